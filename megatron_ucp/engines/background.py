"""Saves that go on while an engine trains: one at a time for each engine, by a thread of the
lowest priority, on connections between ranks that training does not use."""

import atexit
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from megatron_ucp import say
from megatron_ucp.engines.record import record_of
from megatron_ucp.errors import RankError, SaveError, UcpError, UsageError
from megatron_ucp.formats.locks import PublishRight
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.execute import copy_run
from megatron_ucp.reshard.messages import Ranks, of_bytes, to_bytes
from megatron_ucp.reshard.options import BACKGROUND, IN_BACKGROUND, check_fields, options_for
from megatron_ucp.reshard.threads import at_lowest_priority
from megatron_ucp.reshard.waits import MOST_NAMED, StepsOfRanks

_T = TypeVar("_T")

# ---- beside ranks
#
# Ranks that agree beside training: on connections of their own, which no collective of training
# meets, and which outlive the process groups of the program.


_START_S = 120.0  # until all ranks are connected
_DONE = "done"
_LATE = "TORCH_GLOO_LAZY_INIT"  # since torch 2.8; older ones connect all ranks at once
_MESSAGE_BYTES = 64 * 2**20  # that go to another rank at once


def _messages(
    runs: Sequence[tuple[int, torch.Tensor]],
) -> Iterator[tuple[torch.Tensor, int, int]]:
    """Memory of ranks as messages: bytes, the rank, and the number of the message there."""
    counts: dict[int, int] = {}
    for rank, memory in runs:
        for low in range(0, len(memory), _MESSAGE_BYTES):
            number = counts.get(rank, 0)
            counts[rank] = number + 1
            yield memory[low : low + _MESSAGE_BYTES], rank, number


class SideGroup(Ranks):
    """All ranks of the default process group. Making one is collective. It may be used by another
    thread than training's, by one at a time.

    A rank is connected to rank 0's store, and to the few ranks that it ever sends messages to:
    gloo connects two ranks when they first do. `patience_s` bounds each message (None: a day).
    """

    def __init__(self) -> None:
        self.rank, self.world = agree.world()
        self.patience_s: float | None = None
        self._group: Any = None
        self._turn = 0
        self.doing = "has not begun"
        self._steps: StepsOfRanks | None = None
        if self.world > 1:
            self._connect()

    def _connect(self) -> None:
        patience, alone = timedelta(seconds=_START_S), False
        if self.rank == 0:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            store = TCPStore(host, 0, self.world, True, patience, alone)
        host, port = agree.of_first(lambda: (store.host, store.port))
        if self.rank:
            store = TCPStore(host, port, self.world, False, patience, alone)
        self._steps = StepsOfRanks(store, self.rank, self.world)
        self.says(_DONE)
        with _connecting_late():
            mine = PrefixStore("agree", store)
            self._group = dist.ProcessGroupGloo(mine, self.rank, self.world, patience)

    def lowest(self, *numbers: int) -> list[int]:
        """As of all ranks. Raises RankError, which names the ranks that are not there and what they
        do; so do the others."""
        with self._turn_of_all():
            return super().lowest(*numbers)

    def agreed(
        self, value: _T, merge: Callable[[_T, _T], _T], conclude: Callable[[_T], Any]
    ) -> tuple[_T, Any]:
        with self._turn_of_all():
            return super().agreed(value, merge, conclude)

    def delivered(self, given: Mapping[int, _T]) -> dict[int, _T]:
        with self._turn_of_all():
            return super().delivered(given)

    @contextmanager
    def _turn_of_all(self) -> Iterator[None]:
        self._turn += 1
        self.says(_DONE)
        try:
            yield
        except RuntimeError as error:
            late = self._steps.late(self._turn) if self._steps is not None else ()
            doing = [f"rank {rank}: {what}" for rank, what in islice(late, MOST_NAMED)]
            raise RankError(
                "the ranks could not agree beside training: one is gone, or takes too long",
                found="; ".join(doing) or str(error).strip().partition("\n")[0],
                fix="look at the output of that rank",
            ) from error

    def move(self, sent: Mapping[int, bytes], sizes: Mapping[int, int]) -> dict[int, bytes]:
        seconds = 86400.0 if self.patience_s is None else max(self.patience_s, 0.001)
        patience = timedelta(seconds=seconds)
        coming = {rank: of_bytes(bytes(size)) for rank, size in sizes.items()}
        works = [self._group.recv([memory], rank, 0) for rank, memory in coming.items()]
        works += [self._group.send([of_bytes(data)], rank, 0) for rank, data in sent.items()]
        for work in works:
            work.wait(patience)
        return {rank: to_bytes(memory) for rank, memory in coming.items()}

    def exchange(
        self, sent: Sequence[tuple[int, torch.Tensor]], taken: Sequence[tuple[int, torch.Tensor]]
    ) -> None:
        """Sends flat bytes to ranks, and fills others with what ranks send, in the order in which
        these send it. All that send to each other call it at once. Raises RankError."""
        try:
            # all of them wait for what comes before they send: nobody waits for another's turn
            coming = [self._group.recv([memory], *where) for memory, *where in _messages(taken)]
            for memory, *where in _messages(sent):
                self._group.send([memory], *where).wait()
            for work in coming:
                work.wait()
        except RuntimeError as error:
            raise RankError(
                "what ranks keep for each other did not arrive: one is gone",
                found=str(error).strip().partition("\n")[0],
                fix="look at the output of the other ranks",
            ) from error

    def says(self, what: str) -> None:
        """Keeps what this rank does now for those that wait for it."""
        self.doing = what
        if self._steps is not None:
            self._steps.says(self._turn, what)


@contextmanager
def _connecting_late() -> Iterator[None]:
    """Inside, a group of gloo's that is made connects two ranks when they first send each other
    something. Otherwise each rank would connect to each other one: 16,383 sockets of a rank among
    16,384."""
    before = os.environ.get(_LATE)
    os.environ[_LATE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LATE]
        else:
            os.environ[_LATE] = before


# ---- snapshot
#
# Host memory that holds what a save writes while training goes on.


class SnapshotMemory:
    """Buffers that are allocated once and used again by the next save, which takes as much in the
    same order; pinned where there is a GPU. `most_bytes` of them at most (None: as many as are
    asked for)."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = most_bytes
        self._buffers: list[torch.Tensor] = []
        self._taken = 0
        self._devices: set[torch.device] = set()  # of which copies may be on their way

    @property
    def size_bytes(self) -> int:
        """What is held now."""
        return sum(len(buffer) for buffer in self._buffers)

    def begin(self) -> None:
        """All of it is free again."""
        self._taken = 0

    def copy(self, memory: torch.Tensor) -> torch.Tensor | None:
        """A copy of flat bytes; None where there is no room for it. What comes from a device is
        there once `wait` returned."""
        buffer = self.room(len(memory))
        if buffer is None:
            return None
        if memory.is_cpu:
            copy_run(buffer, memory)
            return buffer
        self._devices.add(memory.device)
        return buffer.copy_(memory, non_blocking=True)

    def wait(self) -> None:
        """All that was copied is there when it returns. Without it a writer, which is another
        thread, would read host memory that a device has not filled yet."""
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)
        self._devices.clear()

    def room(self, size_bytes: int) -> torch.Tensor | None:
        """So many bytes, of whatever value; None where there is no room for them."""
        nothing = torch.empty(0, dtype=torch.uint8)
        if self._taken == len(self._buffers):
            self._buffers.append(nothing)
        at = self._taken
        if len(self._buffers[at]) < size_bytes:
            rest = self.size_bytes - len(self._buffers[at])
            if self._most_bytes is not None and rest + size_bytes > self._most_bytes:
                return None
            self._buffers[at] = nothing  # the old one goes before its successor comes
            pinned = torch.cuda.is_available()
            self._buffers[at] = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
        self._taken += 1
        return self._buffers[at][:size_bytes]

    def release(self) -> None:
        """Gives all memory back."""
        self._buffers.clear()
        self._taken = 0


class CopiedRuns:
    """Copies of runs of an engine's memory, found by where that lies."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}  # by the first byte of a run
        self._begins: list[int] = []  # of the runs, in order

    def add(self, memory: torch.Tensor, copy: torch.Tensor) -> None:
        """Notes the copy of flat bytes. All runs are noted before the first one is looked for."""
        self._copies[memory.data_ptr()] = copy
        self._begins = []

    def find(self, memory: torch.Tensor) -> torch.Tensor | None:
        """A tensor that lies inside of a run as the copy has it; None where no run has all of
        it."""
        self._begins = self._begins or sorted(self._copies)
        start, size = memory.data_ptr(), memory.numel() * memory.element_size()
        at = bisect_right(self._begins, start)
        if not at or not memory.is_contiguous():
            return None
        first = self._begins[at - 1]
        part = self._copies[first][start - first : start - first + size]
        return part.view(memory.dtype).view(memory.shape) if len(part) == size else None


# ---- background


_SAVES = "saves"
_LONGER_S = 1.0  # than its deadline a save is waited for: the ranks name the one that is late


@dataclass(frozen=True)
class BackgroundOptions:
    """How saves go on beside training.

    Args:
        busy: What a save does that is asked for while one is under way: "wait", or "skip" (with a
            note).
        deadline: Seconds after which a save is given up (None: never).
        on_error: What a save that failed does: "raise" at the next call, on every rank, or "warn",
            and training goes on.
        snapshot_bytes: Host memory for the snapshot on this rank, at most; what finds no room is
            written before the call returns (None: as much as there is to write).
        keep_snapshot: Whether that memory is kept for the next save.
    """

    busy: str = "wait"
    deadline: float | None = None
    on_error: str = "raise"
    snapshot_bytes: int | None = None
    keep_snapshot: bool = True

    def __post_init__(self) -> None:
        check_fields(self)


def background_options(options: Mapping[str, Any]) -> BackgroundOptions | None:
    """How saves go on beside training, of options of `attach`; None where they don't. Raises
    UsageError."""
    given, is_asked = options_for(IN_BACKGROUND, options), options.get("save") == BACKGROUND
    how = BackgroundOptions(**given)
    if given and not is_asked:
        raise UsageError(
            "options of saves in the background were given, and saves are not made there",
            parameter=", ".join(sorted(given)),
            expected='save="background" beside them',
            found="another way to save, or none",
            fix='give save="background", or leave them out',
        )
    return how if is_asked else None


class SaveTurn(Ranks):
    """One save that goes on: its ranks, its deadline, its right to publish, and what became of it.
    A save that was given up keeps its own, so that nothing of it meets the next one, whenever its
    thread comes back.

    Two threads: the writer, which may hang in the operating system for ever, and the keeper, which
    waits for it until the deadline and takes its right away then. The interpreter joins the keeper,
    as it does all threads that are no daemons, before anything of it is taken down: so the end of
    the program waits for the save, and no longer than its deadline.
    """

    def __init__(
        self, what: str, ranks: SideGroup, deadline: float | None, right: PublishRight
    ) -> None:
        self.what, self.ranks, self.deadline, self.right = what, ranks, deadline, right
        self.rank, self.world = ranks.rank, ranks.world
        self.began, self.pid = time.monotonic(), os.getpid()
        self.error: Exception | None = None
        self.is_given_up = False
        self._found = agree.KeptBack()
        self._keeper: threading.Thread | None = None
        right.says = ranks.says
        if deadline is not None:
            right.until = self.began + deadline

    @property
    def is_under_way(self) -> bool:
        """Whether it goes on, on this rank."""
        return self._keeper is not None and self._keeper.is_alive()

    def left_s(self) -> float | None:
        """Seconds until the deadline. Raises SaveError where it was given up."""
        if self.right.is_lost:
            raise SaveError("the save was given up", found=self.what)
        if self.deadline is None:
            return None
        return max(0.0, self.deadline - (time.monotonic() - self.began))

    def move(self, sent: Mapping[int, bytes], sizes: Mapping[int, int]) -> dict[int, bytes]:
        return self.ranks.move(sent, sizes)

    def lowest(self, *numbers: int) -> list[int]:
        """As of its ranks, until the deadline. Raises RankError, SaveError."""
        return self._in_time.lowest(*numbers)

    def agreed(
        self, value: _T, merge: Callable[[_T, _T], _T], conclude: Callable[[_T], Any]
    ) -> tuple[_T, Any]:
        """As of its ranks, until the deadline. Raises RankError, SaveError."""
        return self._in_time.agreed(value, merge, conclude)

    def delivered(self, given: Mapping[int, _T]) -> dict[int, _T]:
        """As of its ranks, until the deadline. Raises RankError, SaveError."""
        return self._in_time.delivered(given)

    @property
    def _in_time(self) -> SideGroup:
        """Its ranks, which wait for each other until the deadline."""
        self.ranks.patience_s = self.left_s()
        return self.ranks

    def begin(self, work: Callable[[], object], ended: Callable[[], object]) -> None:
        """Does the work in a thread of its own; `ended` is called when nothing more comes of it."""

        # a thread that works takes the interpreter from the one that starts it, for milliseconds
        goes = threading.Event()

        def write() -> None:
            goes.wait()
            at_lowest_priority()
            with self._found:
                work()

        def keep() -> None:
            self._wait_for(writer)
            ended()

        writer = threading.Thread(target=write, name="ucp-save", daemon=True)
        self._keeper = threading.Thread(target=keep, name="ucp-save-keeper", daemon=False)
        writer.start()  # before the keeper: a program that ends starts no threads any more
        try:
            self._keeper.start()
        finally:
            goes.set()

    def _wait_for(self, writer: threading.Thread) -> None:
        """Until it is done, or a little longer than the ranks wait for each other, so that the
        error names one."""
        left = self.left_s()
        writer.join(None if left is None else left + _LONGER_S)
        if writer.is_alive():
            self.give_up("did not finish before its deadline", f"done within {self.deadline:g} s")
            return
        self.error = self._found.error
        if isinstance(self.error, RankError) and self.right.done:
            self.error.problem += f"; here {self.right.outcome}"

    def give_up(self, why: str, expected: str | None = None) -> None:
        """Takes the right to publish from the thread, which may never come back; what else it holds
        is left to it."""
        self.right.take()
        self.is_given_up = True
        self.error = SaveError(
            f"a save in the background {why}, and was given up: {self.right.outcome}",
            file=self.what,
            expected=expected,
            found=f"this rank: {self.ranks.doing}",
            fix="look at the disk; what the pointers of the folder name is whole",
            id="",
        )

    def join(self) -> None:
        """Waits until it is done, or given up."""
        if self._keeper is not None and self.pid == os.getpid():  # no thread outlives a fork
            self._keeper.join()


class Background:
    """The saves of one engine that go on beside its training. `last` is the one that was begun
    last, whatever became of it."""

    last: SaveTurn | None = None

    def __init__(self, options: BackgroundOptions) -> None:
        self.options = options
        self.snapshot = SnapshotMemory(options.snapshot_bytes)
        self._ranks: SideGroup | None = None
        self._turn: SaveTurn | None = None
        _wait_at_end()

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank."""
        return self._turn is not None and self._turn.is_under_way

    @property
    def what(self) -> str:
        return "" if self._turn is None else self._turn.what

    @property
    def is_connected(self) -> bool:
        """Whether this rank has connections: one that failed has let them go."""
        return self._ranks is not None

    def ready(self, are_connected: bool) -> None:
        """Connections, which are made anew unless all ranks have theirs (`are_connected`), and
        memory for the next save. Collective; nothing is under way."""
        if not are_connected:
            self._ranks = SideGroup()
        self.snapshot.begin()

    @property
    def _connected(self) -> SideGroup:
        if self._ranks is None:
            raise SaveError("the ranks are not connected", id="")
        return self._ranks

    def start(
        self, what: str, work: Callable[[SaveTurn], object], right: PublishRight | None = None
    ) -> None:
        """Does the work of a save in a thread of its own, which has the save's `right`."""
        self.snapshot.wait()
        turn = SaveTurn(what, self._connected, self.options.deadline, right or PublishRight())
        self._turn = self.last = turn
        _UNASKED.add(turn)
        turn.begin(partial(work, turn), partial(self._ended, turn))

    def _ended(self, turn: SaveTurn) -> None:
        """Nothing more comes of a save, whose error is raised where the program next asks."""
        if turn.error is None or not self._raises(turn.error):
            _UNASKED.discard(turn)
        if turn.error is not None and self.options.on_error == "warn":
            say.note(f"a save in the background failed, and training goes on: {turn.error}")
        if not self.options.keep_snapshot and not turn.is_given_up:
            self.snapshot.release()

    def _raises(self, error: Exception) -> bool:
        return self.options.on_error == "raise" or not isinstance(error, UcpError)

    def wait(self) -> None:
        """Returns when nothing is under way. Raises the error of the save that failed, once, unless
        it was to warn."""
        turn = self._turn
        if turn is None:
            return
        turn.join()
        self._turn = None  # only now: an interrupt leaves it to the next call
        _UNASKED.discard(turn)
        if turn.error is None:
            return
        # those who failed may not be at the same message any more
        self._ranks = None
        if turn.is_given_up:  # its thread may still read that memory
            self.snapshot = SnapshotMemory(self.options.snapshot_bytes)
        if self._raises(turn.error):
            raise turn.error


def last_saves() -> list[SaveTurn]:
    """The last save of each engine of this process, as far as it was one in the background."""
    last = [background.last for background in _SAVING]
    return [turn for turn in last if turn is not None and turn.pid == os.getpid()]


def background_of(engine: Any) -> Background | None:
    """What saves an engine beside its training, if anything does."""
    return record_of(engine).backgrounds.get(_SAVES)


def keep_background(engine: Any, background: Background, does: str = _SAVES) -> None:
    """From now on the engine is saved so, or what else it `does`."""
    record_of(engine).backgrounds[does] = background
    if does == _SAVES:
        _SAVING.add(background)


def wait_together(engine: Any) -> None:
    """As `wait`, on all ranks: what failed on one is raised on each. Collective."""
    for background in record_of(engine).backgrounds.values():
        with agree.together():
            background.wait()


def wait(engine: Any) -> None:
    """Waits for a save that goes on in the background, and for a step that is kept in memory. Of no
    other engine there is any.

    Args:
        engine: A DeepSpeed engine, or what `attach_megatron` returned.

    Returns:
        Nothing: what was saved is in `report`.

    Raises:
        SaveError: Where the save failed; the message says what counts.
        RankError: Where a rank is gone.
        UsageError: For what is no engine.

    Example:
        >>> engine.save_checkpoint("checkpoints")
        >>> ucp.wait(engine)
    """
    if not hasattr(engine, "ucp") and not hasattr(engine, "global_steps"):
        raise UsageError(
            "this is no engine",
            expected="an engine of DeepSpeed, or what ucp.attach_megatron returned",
            found=repr(engine)[:200],
            fix="give the engine whose save is waited for",
        )
    for background in record_of(engine).backgrounds.values():
        background.wait()


# ------------------------------------------------ the end of the program

_SAVING: "weakref.WeakSet[Background]" = weakref.WeakSet()
_UNASKED: set[SaveTurn] = set()  # saves that go on, or whose error nobody has heard of
_waits = False


def _wait_at_end() -> None:
    """The end of the program waits, and so does SIGTERM where it would end it at once."""
    global _waits
    if _waits:
        return
    _waits = True
    atexit.register(_at_end)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def _at_end() -> None:
    if _lost_at_end():
        _end_with(1)


def _terminated(number: int, _frame: object) -> None:
    _lost_at_end()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _lost_at_end() -> bool:
    """Waits for all saves; whether one is lost that nobody has heard of. Its error is shown as one
    that nobody caught: there is no next call that could raise it."""
    is_lost = False
    for turn in [one for one in _UNASKED if one.pid == os.getpid()]:
        try:
            turn.join()
        except KeyboardInterrupt:  # the user's, who does not want to wait
            turn.give_up("was interrupted at the end of the program")
        if turn in _UNASKED and turn.error is not None:
            _UNASKED.discard(turn)
            is_lost = True
            sys.excepthook(type(turn.error), turn.error, turn.error.__traceback__)
    return is_lost


def _end_with(code: int) -> None:
    """This process ends with an exit code, whichever the interpreter has chosen by now. Nothing of
    Python's changes that at its end; so the C library does, behind all that Python still does."""
    library = ctypes.CDLL(None)
    pointer = partial(ctypes.cast, typ=ctypes.c_void_p)
    # the last one comes first: what C has buffered is written, and then it ends
    library.__cxa_atexit(pointer(library._exit), ctypes.c_void_p(code), None)
    library.__cxa_atexit(pointer(library.fflush), None, None)
