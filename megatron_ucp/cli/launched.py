"""A command that torchrun starts on several processes, of one machine or of several: they form a
process group, share the work and end together. Rank 0 speaks for all.

    torchrun --nnodes 2 --nproc_per_node 4 ... -m megatron_ucp convert runs/llama out --to universal

Each process beats in torchrun's store once a second, and looks whether the next one does. So a
process that dies, hangs or loses its machine is named within a minute, whatever the others do."""

import _thread
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self, TypeVar

from megatron_ucp.errors import RankError

Answer = TypeVar("Answer")
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_MEET_S = 300.0  # until all have imported what they need
_BEAT_S = 1.0
_SILENT_S = 60.0  # after which a process that does not beat is taken for dead
_LOOK_S = 2.5 * _BEAT_S  # when the connection to some process broke already
_END_S = 10.0  # that a process waits for others in the end, and its threads for their next window
_LONGEST = timedelta(days=7)  # a rank that is done waits for the others: beats say whether they are
_FIX = (
    "nothing has the name of the output; look at the output and the machine of that process, then "
    "start all of them again"
)


def is_launched() -> bool:
    """Whether torchrun started this very process, and others beside it. What such a process starts
    in turn inherits its variables, and works alone: its parent is the rank that they speak of."""
    own = {name: os.environ.get(name, "") for name in _OF_A_RANK}
    if "TORCHELASTIC_RUN_ID" not in os.environ or not all(map(str.isdigit, own.values())):
        return False
    return int(own["WORLD_SIZE"]) > 1 and own != _variables_of(os.getppid())


def _variables_of(process: int) -> dict[str, str]:
    """Which rank a process was started as; nothing where this system does not say so."""
    try:
        data = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in data.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs if name in _OF_A_RANK}


class Launched:
    """The processes of one command. A context manager, behind which rank 0 has spoken. `tell` shows
    an error where this process can't go on by itself, and `code` is its exit code then."""

    def __init__(self, tell: Callable[[RankError], None], code: int) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.lost: RankError | None = None
        self._tell, self._code = tell, code
        self._store: Any = None
        self._beats: threading.Thread | None = None
        self._gone, self._answered = 0, 0.0  # the first one that is gone, counted from 1
        self._all_gone = set[int]()
        self._knows, self._ending = threading.Event(), threading.Event()
        self._silenced = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self.rank > 0:
            nowhere = self._silenced.enter_context(open(os.devnull, "w", encoding="utf-8"))
            self._silenced.enter_context(contextlib.redirect_stdout(nowhere))
        return self

    def form(self) -> None:
        """Meets the others: from here on they are ranks of torch.distributed. Raises RankError that
        names those who did not come."""
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost process is told by ours
        import torch.distributed

        dist: Any = torch.distributed  # whose stores are public, and not among its names
        keeps = self._keeps_store
        turn = f"megatron_ucp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        try:
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            limit: dict[str, Any] = {"timeout": timedelta(seconds=_MEET_S)}
            first = dist.TCPStore(*place, is_master=keeps, wait_for_workers=False, **limit)
            # one of its own, in which nobody waits for anything
            own = dist.TCPStore(*place, is_master=False, wait_for_workers=False, **limit)
        except (RuntimeError, ValueError, KeyError) as error:
            raise self._not_met("the first node", str(error)) from error
        self._store = dist.PrefixStore(turn, own)
        try:
            missing = self._meet()
        except RuntimeError:  # who keeps the store is gone
            missing = [0]
        if missing:
            self._say_gone(missing)
            raise self._not_met(_named(missing), f"{self.world - len(missing)} processes came")
        self._answered = time.monotonic()
        self._beats = threading.Thread(target=self._beat, name="ucp-beat", daemon=True)
        self._beats.start()
        threading.Thread(target=self._watch, name="ucp-watch", daemon=True).start()
        group = dist.PrefixStore(f"{turn}/group", first)
        ranks: dict[str, Any] = {"rank": self.rank, "world_size": self.world}
        try:
            dist.init_process_group("gloo", store=group, timeout=_LONGEST, **ranks)
        except (RuntimeError, ValueError) as error:
            raise self._not_met("the connection to one", str(error)) from error

    @property
    def _keeps_store(self) -> bool:
        """Whether this process keeps the store, and not torchrun."""
        return self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def _not_met(self, who: str, found: str) -> RankError:
        return RankError(
            f"the {self.world} processes that torchrun started did not meet: {who} did not come",
            found=found.strip().partition("\n")[0][:200],
            fix="start the command on every node, with the same --nnodes and rendezvous",
        )

    def _meet(self) -> list[int]:
        """The ranks that have not come within the time."""
        self._store.set(f"came/{self.rank}", "")
        ends = time.monotonic() + _MEET_S
        missing = [*range(self.world)]
        while missing and time.monotonic() < ends:
            missing = [rank for rank in missing if not self._store.check([f"came/{rank}"])]
            time.sleep(0.05 if missing else 0)
        return missing

    def _count(self, key: str) -> int:
        return int(self._store.add(key, 0))

    def _beat(self) -> None:
        """Says that this process lives, and notes who does not."""
        beside = (self.rank + 1) % self.world
        seen, since = -1, time.monotonic()
        while not self._ending.wait(_BEAT_S):
            try:
                self._store.add(f"beat/{self.rank}", 1)
                gone, beats = self._count("gone"), self._count(f"beat/{beside}")
                if beats != seen or self._count(f"ended/{beside}"):
                    seen, since = beats, time.monotonic()
            except RuntimeError:  # its keeper is gone
                gone = 1
            self._answered = time.monotonic()
            if not gone and self._answered - since > _SILENT_S:
                gone = beside + 1
            self._gone = self._gone or gone

    def _watch(self) -> None:
        """Gives up where a process is gone, or the store does not answer. Unlike `_beat` it waits
        for nobody."""
        while not self._ending.wait(_BEAT_S):
            if time.monotonic() - self._answered > _SILENT_S + _BEAT_S:
                self._gone = self._gone or 1
            if self._gone:
                return self._give_up([self._gone - 1])

    def _give_up(self, gone: Sequence[int]) -> None:
        """Interrupts this process, whose threads stop at their next window; ends it where it waits
        for messages that will not come."""
        if not self._knows.is_set():
            self.lost = RankError(f"{_named(gone)} died, hangs, or can't be reached", fix=_FIX)
            _thread.interrupt_main()
        self._say_gone(gone)
        if not self._ending.wait(_END_S) and self.lost is not None:
            self._tell(self.lost)
            os._exit(self._code)

    def _say_gone(self, gone: Sequence[int]) -> None:
        self._all_gone.update(gone)

        def say() -> None:
            if not self._count("gone"):
                self._store.add("gone", gone[0] + 1)

        _within(_LOOK_S, say)

    def name_gone(self, error: RankError) -> RankError:
        """The error, with the processes that are gone where its reason is that they are."""
        if self._store is None or error.__cause__ is None:
            return error
        self._knows.set()

        def look() -> list[int]:
            before = [self._count(f"beat/{rank}") for rank in range(self.world)]
            time.sleep(_LOOK_S)
            return [
                rank
                for rank in range(self.world)
                if self._count(f"beat/{rank}") == before[rank] and not self._count(f"ended/{rank}")
            ]

        gone = _within(2 * _LOOK_S, look)
        gone = [0] if gone is None else gone or [self._gone - 1] * (self._gone > 0)
        if not gone:
            return error
        self._say_gone(gone)
        return RankError(f"{_named(gone)} died", found=error.found, fix=_FIX)

    def __exit__(self, *_: object) -> None:
        """Rank 0 ends first where it has to speak: torchrun ends all others when one ends with an
        error. Who keeps the store ends last."""
        self._silenced.close()
        self._ending.set()
        if self._beats is not None:
            self._beats.join(_LOOK_S)
        if self._store is not None:
            _within(_END_S, self._end)

    def _end(self) -> None:
        others = [rank for rank in range(self.world) if rank != self.rank]
        awaited = [0] if self.rank else others if self._keeps_store else []
        keys = [f"ended/{rank}" for rank in awaited if rank not in self._all_gone]
        self._store.add(f"ended/{self.rank}", 1)
        if keys:
            self._store.wait(keys, timedelta(seconds=_END_S))


def _within(seconds: float, ask: Callable[[], Answer]) -> Answer | None:
    """What the store says; None where it is gone, or does not answer in time."""
    answers: list[Answer] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _named(ranks: Sequence[int]) -> str:
    """ "rank 2", "ranks 2, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
