"""Saves that go on while an engine trains: one at a time for each engine, by a thread of the lowest
priority, on connections between ranks that training does not use."""

import atexit
import ctypes
import os
import platform
import signal
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.engines.beside_ranks import BesideRanks
from megatron_ucp.engines.saves import SaveReport, under_way
from megatron_ucp.engines.snapshot import SnapshotMemory
from megatron_ucp.errors import SaveError, UcpError, UsageError
from megatron_ucp.reshard import agree

_KEPT = "_ucp_background"  # of an engine: what works beside its training, by what it does
_SAVES = "saves"
_ALL: "weakref.WeakSet[Background]" = weakref.WeakSet()


@dataclass(frozen=True)
class BesideTraining:
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
        _require_one_of("busy", self.busy, ("wait", "skip"))
        _require_one_of("on_error", self.on_error, ("raise", "warn"))
        for name in ("deadline", "snapshot_bytes"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise UsageError(
                    f"{name} is a number",
                    expected="at least 0",
                    found=repr(value),
                    fix=f"give a number, or leave {name} out",
                )


def _require_one_of(name: str, value: object, words: tuple[str, ...]) -> None:
    if value not in words:
        raise UsageError(
            f"{name} is none of its words",
            parameter=name,
            expected=" or ".join(words),
            found=repr(value),
            fix=f"give {name} as one of these",
        )


BESIDE = tuple(one.name for one in fields(BesideTraining))


def beside_training(is_asked: bool, options: Mapping[str, Any]) -> BesideTraining | None:
    """How saves go on beside training; None where they don't. Raises UsageError."""
    how = BesideTraining(**options)
    if options and not is_asked:
        raise UsageError(
            "options of saves in the background were given, and saves are not made there",
            parameter=", ".join(sorted(options)),
            expected='save="background" beside them',
            found="another way to save, or none",
            fix='give save="background", or leave them out',
        )
    return how if is_asked else None


class SaveTurn:
    """One save that goes on: its ranks, its deadline, and what became of it. A save that was given
    up keeps its own, so that nothing of it meets the next one, whenever its thread comes back."""

    def __init__(self, what: str, ranks: BesideRanks, deadline: float | None) -> None:
        self.what, self.ranks, self.deadline = what, ranks, deadline
        self.began = time.monotonic()
        self.given_up = threading.Event()
        self.error: Exception | None = None
        self.thread: threading.Thread | None = None

    @property
    def rank(self) -> int:
        """This one."""
        return self.ranks.rank

    def left_s(self) -> float | None:
        """Seconds until the deadline. Raises SaveError where it was given up."""
        if self.given_up.is_set():
            raise SaveError("the save was given up", found=self.what)
        if self.deadline is None:
            return None
        return max(0.0, self.deadline - (time.monotonic() - self.began))

    def gather(self, value: Any) -> list[Any]:
        """As `BesideRanks.gather`, until the deadline. Raises RankError, SaveError."""
        return self.ranks.gather(value, self.left_s())

    def join(self) -> None:
        """Waits until it is done, or given up: a little longer than the ranks wait for each other,
        so that the error names one."""
        if self.thread is None:
            return
        left = None
        if self.deadline is not None:
            left = self.deadline + 1.0 - (time.monotonic() - self.began)
        self.thread.join(None if left is None else max(0.0, left))
        if self.thread.is_alive():
            self._give_up()

    def _give_up(self) -> None:
        """The thread hangs in the operating system: it may never come back, and what it holds is
        left to it."""
        self.given_up.set()
        self.error = SaveError(
            "a save in the background did not finish before its deadline, and was given up",
            file=self.what,
            expected=f"done within {self.deadline:g} s",
            found=f"this rank {self.ranks.doing}",
            fix="look at the disk; older tags are as they were",
            id="",
        )


class Background:
    """The saves of one engine that go on beside its training."""

    def __init__(self, how: BesideTraining) -> None:
        self.how = how
        self.snapshot = SnapshotMemory(how.snapshot_bytes)
        self._ranks: BesideRanks | None = None
        self._turn: SaveTurn | None = None
        _ALL.add(self)
        _wait_at_end()

    @property
    def is_busy(self) -> bool:
        """Whether a save is under way on this rank."""
        thread = None if self._turn is None else self._turn.thread
        return thread is not None and thread.is_alive()

    @property
    def what(self) -> str:
        """What is saved now."""
        return "" if self._turn is None else self._turn.what

    def ready(self) -> Callable[[str], None]:
        """Connections and memory for the next save; returns what is told of the file at work.
        Collective; nothing is under way."""
        # a rank that failed has let its connections go, and then all of them are made anew
        if not all(agree.gather(self._ranks is not None)):
            self._ranks = BesideRanks()
        self.snapshot.begin()
        return self._connected.says

    @property
    def _connected(self) -> BesideRanks:
        if self._ranks is None:
            raise SaveError("the ranks are not connected", id="")
        return self._ranks

    def start(self, what: str, work: Callable[[SaveTurn], object]) -> None:
        """Does the work of a save in a thread of its own."""
        turn = SaveTurn(what, self._connected, self.how.deadline)
        turn.thread = threading.Thread(target=self._run, args=(turn, work), daemon=True)
        self._turn = turn
        turn.thread.start()

    def _run(self, turn: SaveTurn, work: Callable[[SaveTurn], object]) -> None:
        at_lowest_priority()
        kept = agree.KeptBack()
        with kept:
            work(turn)
        if turn.given_up.is_set():
            return  # the program has gone on without it
        turn.error = kept.error  # raised where the program next asks
        if kept.error is not None and self.how.on_error == "warn":
            say.note(f"a save in the background failed, and training goes on: {kept.error}")
        if not self.how.keep_snapshot:
            self.snapshot.release()

    def wait(self) -> None:
        """Returns when nothing is under way. Raises the error of the save that failed, once, unless
        it was to warn."""
        turn = self._turn
        if turn is None:
            return
        turn.join()
        self._turn = None  # only now: an interrupt leaves it to the next call
        if turn.error is None:
            return
        # those who failed may not be at the same message any more
        self._ranks = None
        if turn.given_up.is_set():
            self.snapshot = SnapshotMemory(self.how.snapshot_bytes)
            if self.how.on_error == "warn":
                say.note(str(turn.error))
        if self.how.on_error == "raise" or not isinstance(turn.error, UcpError):
            raise turn.error


def background_of(engine: Any) -> Background | None:
    """What saves an engine beside its training, if anything does."""
    return _all_of(engine).get(_SAVES)


def _all_of(engine: Any) -> dict[str, Background]:
    return getattr(engine, "__dict__", {}).get(_KEPT, {})


def keep_background(engine: Any, background: Background, does: str = _SAVES) -> None:
    """From now on the engine is saved so, or what else it `does`."""
    engine.__dict__.setdefault(_KEPT, {})[does] = background


def skipped(engine: Any, steps: int) -> SaveReport | None:
    """Waits for the save of an engine that is under way on any rank; or says that the one of
    `steps`, which is asked for now, is skipped, and returns the other's report. Collective."""
    background = background_of(engine)
    if background is None:
        return None
    if background.how.busy == "skip" and any(agree.gather(background.is_busy)):
        say.note(f"a save was skipped: that of {background.what} is still under way")
        return under_way(Path(background.what), "", steps, 0.0)
    with agree.together():
        background.wait()
    return None


def wait_together(engine: Any) -> None:
    """As `wait`, on all ranks: what failed on one is raised on each. Collective."""
    for background in _all_of(engine).values():
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
        SaveError: Where the save failed; older tags are as they were.
        RankError: Where a rank is gone.

    Example:
        >>> engine.save_checkpoint("checkpoints")
        >>> ucp.wait(engine)
    """
    for background in _all_of(engine).values():
        background.wait()


def _wait_for_all() -> None:
    for one in list(_ALL):
        kept = agree.KeptBack()
        with kept:
            one.wait()
        if kept.error is not None:  # the program ends: nobody else will hear of it
            say.note(f"the last save failed: {kept.error}")


_waits = False


def _wait_at_end() -> None:
    """The end of the program waits, and so does SIGTERM where it would end it at once."""
    global _waits
    if _waits:
        return
    _waits = True
    atexit.register(_wait_for_all)
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, _frame: object) -> None:
    _wait_for_all()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def at_lowest_priority() -> None:
    """This thread works when nobody else does: of processors, and of disks."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    _idle_disk()


def _idle_disk() -> None:
    number = {"x86_64": 251, "aarch64": 30}.get(platform.machine())  # ioprio_set(2)
    if number is not None:
        lowest = 2 << 13 | 7  # best effort, level 7: an idle class may never be served
        ctypes.CDLL(None).syscall(number, 1, threading.get_native_id(), lowest)
