"""Loads from steps that machines keep in memory: the newest one that is there as a whole, where no
tag on disk is as new."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_ucp.core.manifest import RUN, BufferPart
from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.held import HeldRun, held_as
from megatron_ucp.engines.memory_steps import MemorySteps
from megatron_ucp.engines.random_states import STEPS
from megatron_ucp.errors import UcpError, some_of
from megatron_ucp.formats import in_memory
from megatron_ucp.formats.durable import manifest_of
from megatron_ucp.formats.memory_folder import (
    KeptShare,
    MemoryFolder,
    damaged,
    memory_run,
    node,
)
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.formats.tags import content_id, find_tag, has_state_files
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine, How
from megatron_ucp.reshard.memory_sink import HeldMemory


@dataclass(frozen=True)
class KeptStep:
    """A step as machines keep it: `shares` are those of each machine."""

    id: str
    shares: Mapping[str, Sequence[KeptShare]]

    @property
    def first(self) -> KeptShare:
        """A share, which says what all of them say."""
        return next(iter(self.shares.values()))[0]

    @property
    def held_by(self) -> dict[BufferPart, int]:
        """The parts that are kept, each with a rank that kept it."""
        every = (share for own in self.shares.values() for share in own)
        return {one.slot.place: share.rank for share in every for one in share.slots}


@dataclass
class Looked:
    """What was found in memory: the `step` to go on from and what this rank holds of it (None: the
    disk has a newer one, or nothing is whole); `came_to` is the last step that the run is known to
    have come to. `notes` say what was chosen, and why."""

    step: KeptStep | None = None
    held: HeldRun | None = None
    came_to: int = 0
    notes: list[str] = field(default_factory=list[str])


def look(kept: MemorySteps, engine: Engine, path: Path, tag: str | None, how: How) -> Looked:
    """Looks for a step in memory that is newer than the tag on disk; where a tag is named, only if
    that is allowed. Collective. Raises a UcpError on every rank."""
    found = Looked()
    if not kept.is_of(path) or (tag is not None and "memory" not in how.allow):
        return found
    nodes = agree.gather(node())
    steps = _listed(kept, nodes, found)
    disk = agree.collect(lambda: _on_disk(engine, path, tag) if not agree.world()[0] else _Disk())[
        0
    ]
    for step in steps:
        if disk.steps is not None and disk.steps >= step.first.steps:
            break
        if other := disk.names_another_run(step.first):
            what = f"step {step.first.steps:,} in memory is of another run than {other}"
            found.notes.append(f"{what}, and is not taken")
            continue
        found.held = _held(kept.folder, step, nodes, how.checksums, found)
        if found.held is not None:
            found.step = step
            break
    if steps or found.came_to:
        _say_chosen(found, disk.steps, "the newest tag" if tag is None else tag)
    return found


def adopt(kept: MemorySteps, path: Path) -> None:
    """What is kept is of the run in a folder, or of that around a tag, if of none yet. Collective.
    Raises UsageError on every rank where another engine keeps steps for it."""
    is_tag = agree.collect(lambda: path.is_dir() and has_state_files(path))[0]
    with agree.together():
        kept.adopt(path.absolute().parent if is_tag else path)


@dataclass(frozen=True)
class _Disk:
    """What a folder of saves says: the step of a tag (None: there is none that can be read) and the
    `run` that saved it; of a tag without an id what else it is known by (`tags.content_id`); and
    the run that it names as the one whose steps are in memory."""

    steps: int | None = None
    run: str = ""
    content: str = ""
    in_memory: str = ""

    def names_another_run(self, share: KeptShare) -> str:
        """What says another run than a step in memory, or none at all; empty where all agree."""
        if self.in_memory != share.run:
            return "its folder names"
        if self.steps is None:
            return ""
        own = share.run if self.run else share.origin
        return "" if own == (self.run or self.content) else "the tag on disk"


def _listed(kept: MemorySteps, nodes: Sequence[str], found: Looked) -> list[KeptStep]:
    """All steps in memory, the newest one first. Collective."""
    with agree.together() as block:
        if nodes.index(node()) == agree.world()[0]:
            block.value = node(), *_on_machine(kept)
    steps: dict[str, dict[str, list[KeptShare]]] = {}
    for name, shares, came_to, others in filter(None, block.values):
        found.came_to = max(found.came_to, came_to)
        if others:
            found.notes.append(
                f"{name}: a process that lives keeps steps in memory for this folder, which are "
                "left alone"
            )
        for share in shares:
            steps.setdefault(share.id, {}).setdefault(name, []).append(share)
    return _newest_first([KeptStep(name, shares) for name, shares in steps.items()])


def _newest_first(steps: Sequence[KeptStep]) -> list[KeptStep]:
    """Steps in the order in which they were kept. Those of one life by their numbers, which only
    grow in it: a load of an older one forgets the others. Lives by the newest stamp of each."""
    newest: dict[str, float] = {}
    for one in steps:
        newest[one.first.life] = max(newest.get(one.first.life, 0.0), one.first.kept_at)

    def order(one: KeptStep) -> tuple[float, str, int, float, str]:
        first = one.first
        return newest[first.life], first.life, first.steps, first.kept_at, one.id

    return sorted(steps, key=order, reverse=True)


def _on_machine(kept: MemorySteps) -> tuple[list[KeptShare], int, bool]:
    """What is left on this machine; the last step that a run came to here; and whether others that
    live keep something here."""
    folder, own = kept.folder, set() if kept.life is None else {kept.life.id}
    dead, alive = folder.lives()
    lives = [*dead, *own]
    came_to = max((folder.steps_seen(life) for life in lives), default=0)
    return folder.shares(lives), came_to, bool({*alive} - own)


def _on_disk(engine: Engine, path: Path, tag: str | None) -> _Disk:
    """What a folder says of a tag, or of the newest one. Raises NotFoundError, UsageError where one
    is asked for that is none: what would stand for it may be of another run."""
    named = None if tag is None else find_tag(path, tag)
    in_memory = memory_run(path)
    with suppress(UcpError, OSError):
        folder = (named or find_tag(path)).folder
        with suppress(UcpError, OSError, KeyError):
            said = manifest_of(folder).run
            if run := str(said.get(RUN, "")):
                return _Disk(int(said[STEPS]), run, "", in_memory)
        with open_checkpoint(folder, told=engine.told()) as checkpoint:
            steps = checkpoint.extras.counters.get(STEPS, 0)
            return _Disk(steps, "", content_id(folder), in_memory)
    return _Disk(in_memory=in_memory)


def _say_chosen(found: Looked, disk: int | None, tag: str) -> None:
    on_disk = "no tag on disk" if disk is None else f"{tag} on disk is of step {disk:,}"
    steps = disk or 0
    if found.step is not None:
        steps = found.step.first.steps
        later = "" if disk is None else f", {steps - disk:,} before it"
        found.notes.append(f"from memory: step {steps:,}; {on_disk}{later}")
    else:
        found.notes.append(f"from disk: no whole step in memory is newer; {on_disk}")
    if found.came_to > steps:
        lost = found.came_to - steps
        found.notes.append(f"the run had come to step {found.came_to:,}: {lost:,} are done again")


# ------------------------------------------------ one step


def _held(
    folder: MemoryFolder, step: KeptStep, nodes: Sequence[str], checksums: bool, found: Looked
) -> HeldRun | None:
    """A step as this rank holds it; None where it is not whole. Collective."""
    what, parts = f"step {step.first.steps:,} in memory", step.first.parts
    if len(step.held_by) < parts:
        found.notes.append(_not_whole(what, len(step.held_by), parts, step.shares))
        return None
    own = _Own(folder, checksums)
    with agree.together() as block:
        rank = agree.world()[0]
        here = [number for number, name in enumerate(nodes) if name == nodes[rank]]
        for share in step.shares.get(nodes[rank], ())[here.index(rank) :: len(here)]:
            own.take(share)
        block.value = [*own.parts], own.faults
    whole = {part for kept, _ in block.values for part in kept}
    found.notes += [fault for _, faults in block.values for fault in faults]
    if len(whole) < parts:
        found.notes.append(_not_whole(what, len(whole), parts, step.shares))
        return None
    return own.held(step)


def _not_whole(what: str, there: int, parts: int, machines: Mapping[str, object]) -> str:
    where = some_of(sorted(machines))
    return f"{what} is not whole: {there} of its {parts} parts are left, on {where}"


class _Own:
    """What this rank reads of a step, as far as it is as it was."""

    def __init__(self, folder: MemoryFolder, checksums: bool) -> None:
        self._folder, self._checksums = folder, checksums
        self._slots: dict[BufferPart, list[tuple[Slot, torch.Tensor]]] = {}
        self.run: in_memory.TakenRun | None = None
        self.faults: list[str] = []

    @property
    def parts(self) -> list[BufferPart]:
        """Those that are whole."""
        return [*self._slots]

    def take(self, share: KeptShare) -> None:
        """Takes the parts of a share; what is wrong with it is in `faults`."""
        what = f"step {share.steps:,} in memory, of rank {share.rank}"
        try:
            self.run = self.run or self._run(share)
            memory = self._folder.bytes_of(share.life, share.turn, share.rank)
            wrong = damaged(share, memory, self._checksums)
        except (UcpError, OSError, ValueError) as error:
            said = error.strerror if isinstance(error, OSError) else error.args[0]
            self.faults.append(f"{what}: {said or error}")
            return
        if wrong:
            self.faults.append(f"{what}: {self._names(wrong[0].slot)} is not as it was written")
        bad = {one.slot.place for one in wrong}
        for one in share.slots:
            if one.slot.place not in bad:
                own = memory[one.offset_bytes : one.offset_bytes + one.size_bytes]
                self._slots.setdefault(one.slot.place, []).append((one.slot, own))

    def _run(self, share: KeptShare) -> in_memory.TakenRun:
        text = self._folder.run_of(share)
        if text is None:
            raise ValueError("what is said of the run can't be read")
        return in_memory.of_json(text, str(self._folder.path))

    def _names(self, slot: Slot) -> str:
        """A slot as users know it."""
        if self.run is None:
            return str(slot)
        params = [member.param for member in self.run.manifest.buffers[slot.buffer].members]
        return f"{slot.state} of {some_of(params, 2)}"

    def held(self, step: KeptStep) -> HeldRun:
        """All of it, without a copy; of a rank that reads nothing, nothing."""
        if self.run is None:
            return HeldRun()
        memory = HeldMemory(self.run.manifest, self.parts)
        for slots in self._slots.values():
            for slot, own in slots:
                memory.lie_in(own, [(slot, 0, len(own))])
        return held_as(step.id, self.run, step.held_by, memory)
