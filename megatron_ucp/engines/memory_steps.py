"""Steps of an engine that are kept in the memory of machines, where they outlive its processes.

Each `every` steps all elements are copied into a tmpfs while training stands still. Beside training
each rank then sends what other machines shall have, and sums its bytes. Only when all ranks are
done does the step count; the one before it is whole until then.
"""

import hashlib
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from isal.isal_zlib import crc32

from megatron_ucp import say
from megatron_ucp.core.manifest import ORIGIN, RUN, BufferPart
from megatron_ucp.engines.background import (
    Background,
    BesideTraining,
    SaveTurn,
    keep_background,
)
from megatron_ucp.engines.loader import ResumableLoader
from megatron_ucp.engines.saves import as_save_error, run_of, stamp
from megatron_ucp.engines.taking import DataPlace, LentRun, Taking
from megatron_ucp.errors import UsageError
from megatron_ucp.formats import in_memory
from megatron_ucp.formats.memory_folder import (
    TURNS,
    KeptShare,
    KeptSlot,
    LifeLock,
    MemoryFolder,
    name_memory_run,
    node,
    refuse_room,
)
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.arguments import check_saves, plain_path
from megatron_ucp.reshard.fingerprint import Sums, diverged, recorded_as, sums_of_rank, table_of
from megatron_ucp.reshard.held_layout import CopiedLayout, copied
from megatron_ucp.reshard.memory_sink import HeldMemory

KEPT_STEPS = "_ucp_memory_steps"  # of an engine
MEMORY = "memory"
_DEADLINE_S = 600.0  # after which a step is given up: no rank waits longer for one that is gone


@dataclass(frozen=True)
class InMemory:
    """What is kept in memory, and how often.

    Args:
        keep: "memory".
        every: Steps from one that is kept to the next one.
        copies: On how many other machines each element is kept too, in the order of ranks.
        folder: The folder of the run's saves, which its memory is known by. Default: that of the
            first `ucp.load`.
        client_state: A function without arguments, which gives what `save_checkpoint` would be
            given as `client_state` now.
    """

    keep: str
    every: int
    copies: int = 1
    folder: str | Path | None = None
    client_state: Callable[[], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        check_saves(self)
        if self.client_state is not None and not callable(self.client_state):
            _refuse("client_state", "a function without arguments", self.client_state)
        if self.folder is not None:
            plain_path(self.folder)


def _refuse(name: str, expected: str, found: object) -> None:
    raise UsageError(
        "an option of steps in memory can't be used",
        parameter=name,
        expected=expected,
        found=repr(found)[:200],
        fix=f"correct {name}, or leave keep and what belongs to it out",
    )


IN_MEMORY = tuple(one.name for one in fields(InMemory))


def in_memory_as(options: Mapping[str, Any]) -> InMemory | None:
    """What is kept in memory, of options of `attach`; None where nothing is. Raises UsageError."""
    if not options:
        return None
    if missing := [name for name in ("keep", "every") if options.get(name) is None]:
        _refuse(missing[0], f'keep="{MEMORY}" and every=', options.get(missing[0]))
    return InMemory(**options)


class Attached(Protocol):
    """The handle of an attached engine."""

    program: Any
    module: Any

    def lent(self, how: Taking) -> LentRun:
        """The engine as a run. Collective."""
        ...


@dataclass(frozen=True)
class KeptReport:
    """The last step that was kept in memory: seconds in which training stood still, seconds until
    it counted, and the bytes that this rank keeps of it."""

    steps: int
    blocked_seconds: float
    seconds: float
    size_bytes: int


class MemorySteps:
    """What is kept of the engine that `attached` is the handle of: with random states or without,
    and with the position of a `loader`. Raises UsageError where another engine of this program
    keeps steps for the same folder."""

    def __init__(
        self,
        attached: Attached,
        how: InMemory,
        rng: bool = True,
        loader: ResumableLoader | None = None,
    ) -> None:
        self._attached, self.how, self._rng, self._loader = attached, how, rng, loader
        self._world = torch.distributed.group.WORLD
        self._is_named = False  # whether the folder of saves names this run
        self._place: DataPlace | None = None
        self.background = Background(
            BesideTraining(busy="skip", on_error="warn", deadline=_DEADLINE_S)
        )
        self.path: Path | None = None
        self.life: Life | None = None
        self.report: KeptReport | None = None
        self._seen, self._said = 0, set[str]()
        if how.folder is not None:
            self.adopt(how.folder)

    def adopt(self, folder: str | Path) -> None:
        """The run is that of a folder of saves, if it is of none yet. What an engine kept for that
        folder which this one stands for (of the same model, or of a world that was taken down) is
        what is left of it from now on. Raises UsageError where another engine keeps steps for
        it."""
        if self.path is not None:
            return
        path = Path(folder).resolve()
        before = _OF_FOLDER.get(path)
        if before is not None and before._lives_beside(self):
            raise UsageError(
                "another engine of this program keeps steps in memory for this folder",
                file=path,
                expected="one engine for each folder of saves",
                found="two engines that live",
                fix="give each engine a folder of its own (folder=); of one that is not needed any "
                "more call engine.ucp.close() before (engine.destroy() does it too)",
            )
        if before is not None:
            before.close()
        self.path = path
        _OF_FOLDER[path] = self

    def _lives_beside(self, other: "MemorySteps") -> bool:
        """Whether its engine trains on beside another one: both are of this world, and have no
        module in common."""
        is_same = self._attached.module is other._attached.module
        return self.path is not None and self._world is other._world and not is_same

    def is_of(self, folder: Any) -> bool:
        """Whether steps in memory are those of the run in a folder."""
        return self.path is not None and self.path == Path(folder).resolve()

    @property
    def folder(self) -> MemoryFolder:
        """The run's folder on this machine."""
        if self.path is None:
            raise UsageError("steps in memory are of no folder", fix="give folder=")
        return MemoryFolder(self.path)

    def close(self) -> None:
        """Keeps no more; what is kept is there."""
        self.background.wait()
        if self.life is not None:
            self.life.release()
        self.path = self.life = None
        self._said.add(_NO_FOLDER)

    def _name_run(self) -> None:
        """The folder of saves names this run as the one whose steps are in memory: what other runs
        of the folder left there is none of its steps. Collective."""
        if self.path is None or self._is_named:
            return
        with _as_save_error(), agree.together():
            if agree.world()[0] == 0:
                name_memory_run(self.path, run_of(self._attached.program).id)
        self._is_named = True

    def goes_on(self, steps: int, loaded: KeptShare | None, is_own: bool) -> None:
        """The engine was filled at a step: from what was in memory, of which `loaded` is a share,
        or from elsewhere. Where that is the run's own folder (`is_own`), what else is left in
        memory goes; else when the next step counts. Collective."""
        self._seen, self._place, self._is_named = steps, None, False
        if loaded is not None:
            stamp(loaded.kept_at)  # what is kept from now on is newer, whatever the clock says
        if self.path is None:
            return
        with _as_save_error(), agree.together():
            if self.life is not None:
                self.life.go_on(loaded)
        nodes = agree.gather(node())
        with _as_save_error(), agree.together():
            if is_own and nodes.index(node()) == agree.world()[0]:
                self.folder.forget_dead(loaded)

    def _note_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say.note(text)

    # ------------------------------------------------ at the end of a step

    def stepped(self, steps: int) -> None:
        """The optimizer was stepped, for this step: the program may draw data of the next one
        before `ended_step`, and what that moves is kept as it is now."""
        if steps != self._seen and steps % self.how.every == 0:
            self._place = DataPlace.now(self._loader, self._rng)

    @agree.door("a step in memory")
    def ended_step(self, steps: int) -> None:
        """The engine came to a step; between two of them. Collective. Raises a UcpError on every
        rank."""
        if steps == self._seen:
            return
        self._seen = steps
        self._name_run()
        if self.life is not None:
            self.life.came_to(steps)
        if steps % self.how.every == 0:
            with torch.inference_mode(False):  # an evaluation may be what comes next
                self.keep(steps)
        self._place = None

    def keep(self, steps: int) -> None:
        """Keeps the state as it is now, which is that of a step. Collective. Raises a UcpError on
        every rank."""
        if self.path is None:
            self._note_once(_NO_FOLDER)
            return
        started = time.perf_counter()
        with agree.together() as block:
            client = self.how.client_state
            state = {} if client is None else dict(client())
            own = run_of(self._attached.program)
            block.value = self.background.is_busy, uuid.uuid4().hex, own.id, own.origin
        if any(is_busy for is_busy, *_ in block.values):
            self._note_once(
                f"step {steps} is not kept in memory: the one before it is still under way; more "
                "steps between them (every=) let it end. Said once"
            )
            return
        self.background.wait()
        how = Taking(state, self._loader, self._rng, checksums=False, place=self._place)
        lent = self._attached.lent(how)
        life = self._arranged(lent)
        with _as_save_error(), agree.together():
            turn, memory = life.begin_turn()
            copy_of(lent, life.own, memory)
        _, *ids = block.values[0]
        step = _Step(life, lent.run, turn, memory, steps, *ids)
        self.background.ready()
        blocked = time.perf_counter() - started
        rest = partial(self._settle, step, started, blocked)
        self.background.start(f"step {steps} in memory", rest)

    def _arranged(self, lent: LentRun) -> "Life":
        """Where it lies; anew where parts or sizes are others than before. Collective."""
        held = HeldMemory(lent.holder.manifest, lent.holder.parts())
        digest = hashlib.sha256(repr(held.places()).encode()).digest()
        is_known = self.life is not None and self.life.digest == digest
        if not all(agree.gather(is_known)) or self.life is None:
            self.life = self._begun(lent, digest)
        return self.life

    def _begun(self, lent: LentRun, digest: bytes) -> "Life":
        """Room for steps of these parts and sizes. Collective."""
        with _as_save_error(), agree.together() as block:
            self.folder.make()
            block.value = node(), lent.holder.parts(), uuid.uuid4().hex[:12]
        nodes, here, names = zip(*block.values, strict=True)
        if self.life is not None:
            self.life.release()
            self.life = None
        with _as_save_error(), agree.together() as block:
            layout = copied(lent.holder.manifest, here, nodes, self.how.copies)
            life = Life(self.folder, names[0], layout, lent, nodes, digest)
            block.value = life.size_bytes
        life.sizes = tuple(block.values)
        with _as_save_error(), agree.together():
            life.refuse_room()
        self._say_taken(life)
        with _as_save_error(), agree.together():
            life.begin()
        return life

    def _say_taken(self, life: "Life") -> None:
        """What is taken, before it is. On rank 0."""
        nodes, copies = len({*life.nodes}), self.how.copies
        most = max(life.on_machine(name) for name in {*life.nodes})
        say.line(
            f"each {self.how.every} steps the state is kept in memory ({life.folder.path}): "
            f"{say.amount(most)} for two of them on a machine"
        )
        if nodes <= copies:
            self._note_once(
                f"{copies} copies on other machines were asked for, and there are {nodes} "
                "machines: a step in memory is lost with any that has a part of it"
                if nodes > 1
                else "there is one machine: steps in memory outlive processes, and not the machine"
            )

    # ------------------------------------------------ beside training

    def _settle(self, step: "_Step", started: float, blocked: float, turn: SaveTurn) -> None:
        """Brings a step to where it counts. Collective, among the ranks of the turn."""
        life = step.life
        with _as_save_error(), agree.together(turn) as block:
            turn.ranks.exchange(*life.messages(step.memory))
            block.value = sums_of_rank(life.view(step.memory))
        share, run = step.share(), step.text(block.values)
        with _as_save_error(), agree.together(turn), turn.right.changing("says what is kept"):
            life.folder.write_aside(share, run)
        with _as_save_error(), agree.together(turn), turn.right.changing("counts in memory"):
            life.folder.count(share, run)
        life.last = step.turn
        seconds = time.perf_counter() - started
        self.report = KeptReport(step.steps, blocked, seconds, life.size_bytes)
        with _as_save_error(), agree.together(turn):
            if life.is_first_here:
                with turn.right.changing("forgets what dead processes kept"):
                    life.folder.forget_dead()


_as_save_error = partial(
    as_save_error,
    "the step was not kept in memory; the one before it, and all tags, are as they were",
)
_NO_FOLDER = (
    "no step is kept in memory yet: it is not known which run this is. Give attach the folder of "
    "its saves (folder=), or load from it"
)
_OF_FOLDER: "weakref.WeakValueDictionary[Path, MemorySteps]" = weakref.WeakValueDictionary()


class Life:
    """Where steps of one engine lie: the parts that this rank keeps, those of its own first, and
    what is sent between ranks. `sizes` are the bytes that each rank keeps of a step."""

    def __init__(
        self,
        folder: MemoryFolder,
        id: str,
        layout: CopiedLayout,
        lent: LentRun,
        nodes: Sequence[str],
        digest: bytes,
    ) -> None:
        self.folder, self.id, self.layout, self.nodes = folder, id, layout, nodes
        self.digest, self.rank = digest, agree.world()[0]
        self.manifest = lent.holder.manifest
        self.own = layout.own[self.rank]
        self.kept = layout.kept_by(self.rank)
        self.places = HeldMemory(self.manifest, self.kept).places()
        self.sizes: tuple[int, ...] = ()
        self.last: int | None = None
        self._lock: LifeLock | None = None
        self._memory: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        """From now on it is known to live. Raises OSError."""
        self._lock = LifeLock(self.folder, self.id, self.rank)

    def came_to(self, steps: int) -> None:
        """Says which step the run came to."""
        if self._lock is not None:
            self._lock.steps(steps)

    def release(self) -> None:
        """What is kept is what is left of it."""
        if self._lock is not None:
            self._lock.release()

    @property
    def size_bytes(self) -> int:
        """What this rank keeps of a step."""
        return max((at + size for _, at, size in self.places), default=0)

    @property
    def is_first_here(self) -> bool:
        """Whether this rank is the first one of its machine."""
        return self.nodes.index(self.nodes[self.rank]) == self.rank

    @property
    def parts_in_all(self) -> int:
        """How many parts all ranks have together."""
        return len({part for own in self.layout.own for part in own})

    def on_machine(self, name: str) -> int:
        """What two steps take on a machine."""
        return 2 * sum(
            size for size, own in zip(self.sizes, self.nodes, strict=True) if own == name
        )

    def refuse_room(self) -> None:
        """Raises SaveError where this machine has no room for two steps, of which the second one
        comes when what dead processes left is gone."""
        two, free = self.on_machine(self.nodes[self.rank]), self.folder.free_bytes()
        left = self.folder.left_bytes()
        needed, room = (two, free + left) if two - left > free else (two // 2, free)
        words = say.amount(two), say.amount(room)
        refuse_room(needed, room, self.folder.path, words)

    def begin_turn(self) -> tuple[int, torch.Tensor]:
        """Number and memory of the next step, in the place of the older one. Raises OSError."""
        turn = 0 if self.last is None else 1 - self.last
        self.folder.forget(self.id, turn, self.rank)
        if turn not in self._memory:
            self._memory[turn] = self.folder.bytes_of(self.id, turn, self.rank, self.size_bytes)
        return turn, self._memory[turn]

    def go_on(self, loaded: KeptShare | None) -> None:
        """Its own step was loaded, and the other one is written next; or another one, and its own
        are none any more. Raises OSError."""
        if loaded is not None and loaded.life == self.id:
            self.last = loaded.turn
            return
        self.last = None
        for turn in TURNS:
            self.folder.forget(self.id, turn, self.rank)

    def view(self, memory: torch.Tensor) -> HeldMemory:
        """What this rank itself had, in flat memory."""
        return lying(self.manifest, self.own, memory)

    def messages(
        self, memory: torch.Tensor
    ) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[int, torch.Tensor]]]:
        """Flat memory to be sent, each with its taker; and to be filled, each with its giver."""
        runs: dict[BufferPart, list[torch.Tensor]] = {}
        for slot, at, size in self.places:
            runs.setdefault(slot.place, []).append(memory[at : at + size])
        sent = [
            (taker, one)
            for part, giver, taker in self.layout.sent
            if giver == self.rank
            for one in runs[part]
        ]
        taken = [
            (giver, one)
            for part, giver, taker in self.layout.sent
            if taker == self.rank
            for one in runs[part]
        ]
        return sent, taken


@dataclass(frozen=True)
class _Step:
    """A step on its way. `run_id` and `origin` are those of the first rank's run."""

    life: Life
    run: in_memory.TakenRun
    turn: int
    memory: torch.Tensor
    steps: int
    id: str
    run_id: str
    origin: str

    def share(self) -> KeptShare:
        """What this rank keeps of it, with the sums of its bytes."""
        life = self.life
        slots = tuple(
            KeptSlot(slot, at, size, crc32(self.memory[at : at + size].numpy().data))
            for slot, at, size in life.places
        )
        where = life.id, self.turn, life.rank, self.id, self.steps
        return KeptShare(*where, stamp(), life.parts_in_all, self.run_id, slots, self.origin)

    def text(self, sums: Sequence[Sums]) -> str | None:
        """What is said of the run, where this rank says it for its machine."""
        if not self.life.is_first_here:
            return None
        manifest = self.run.manifest
        table, apart = table_of(manifest, sums)
        ids = {RUN: self.run_id, ORIGIN: self.origin}
        said = replace(manifest, run={**manifest.run, **recorded_as(table, apart), **ids})
        notes = (*self.run.notes, *diverged(apart))
        return in_memory.to_json(replace(self.run, manifest=said, notes=notes))


def lying(manifest: Any, parts: Sequence[BufferPart], memory: torch.Tensor) -> HeldMemory:
    """Parts that lie in flat memory, one after the other."""
    held = HeldMemory(manifest, parts)
    held.lie_in(memory, held.places())
    return held


def copy_of(lent: LentRun, parts: Sequence[BufferPart], memory: torch.Tensor) -> None:
    """Copies what a run's holder has of some parts into flat memory."""
    manifest = lent.holder.manifest
    held = lying(manifest, parts, memory)
    for slot, _, _ in held.places():
        into, buffer = held.tensor(slot), manifest.buffers[slot.buffer].of(slot.state)
        for one in buffer.fragments(slot.part):  # megatron-core has a tensor for each of them
            last = one.offset + one.high - one.low
            into[one.offset : last].copy_(lent.holder.read(slot, one.offset, last))


def steps_of(engine: Any) -> MemorySteps | None:
    """What keeps steps of an engine in memory, if anything does."""
    return getattr(engine, "__dict__", {}).get(KEPT_STEPS)


def keep_steps(engine: Any, kept: MemorySteps) -> None:
    """From now on the engine's steps are kept."""
    engine.__dict__[KEPT_STEPS] = kept
    keep_background(engine, kept.background, MEMORY)
