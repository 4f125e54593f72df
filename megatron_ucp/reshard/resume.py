"""Fills a live engine from a checkpoint of any mesh: what every engine's load does.

Order: everything that metadata can show is found on all ranks first; then the engine is marked
unusable, filled, refreshed and marked usable again. No collective stands inside the arithmetic.
"""

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.flat import FlatBuffer, Scalars
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import RUN, Manifest
from megatron_ucp.core.plan import Cast, Mean, Plan, Slot, Want, make_plan
from megatron_ucp.core.proof import prove
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.errors import (
    StateMismatchError,
    UsageError,
    some_of,
)
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.deepspeed.doctor import refuse_lost_moments
from megatron_ucp.formats.of_ranks import (
    PerRank,
    differing,
)
from megatron_ucp.formats.optimizers import kept_by, require_equal
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.arguments import check_switch
from megatron_ucp.reshard.engine import Engine, How, TakenExtras
from megatron_ucp.reshard.execute import Counts, check_runs, execute
from megatron_ucp.reshard.match import (
    ALLOWANCES,
    Fit,
    check_not_lost,
    group_values,
    has_masters,
    match_optimizers,
    match_params,
    match_ties,
    one_value,
    replica_notes,
    require_alone,
    source_states,
)
from megatron_ucp.reshard.overflows import lost_in, may_overflow, too_large
from megatron_ucp.reshard.own_values import set_buffers, values_for
from megatron_ucp.reshard.report import Report

_NAMED = 5  # parameters that a note lists by name


def check_options(
    hyper: str = "checkpoint",
    checksums: bool = True,
    allow: Collection[str] = (),
    rng: bool = True,
    per_rank: Callable[[str, list[Any]], Any] | None = None,
    **unknown: Any,
) -> None:
    """Raises UsageError for an option of `load` that is not known, before anybody trains for hours
    with it."""
    if unknown:
        raise UsageError(
            "an option is not known",
            expected="hyper, checksums, allow, rng, per_rank",
            found=", ".join(sorted(unknown)),
            fix="give one of these options",
        )
    check_switch("checksums", checksums)
    check_switch("rng", rng)
    if hyper not in ("checkpoint", "config"):
        raise UsageError(
            "hyper says where hyper-parameters come from",
            expected="checkpoint or config",
            found=hyper,
            fix='give hyper="checkpoint" or hyper="config"',
        )
    if per_rank is not None and not callable(per_rank):
        raise UsageError(
            "per_rank is a function of a name and the values of all ranks",
            expected="function(name, values)",
            found=repr(per_rank)[:200],
            fix="give a function, or leave per_rank out",
        )
    words = isinstance(allow, Collection) and not isinstance(allow, str)
    odd = (
        [one for one in allow if not isinstance(one, str) or one not in ALLOWANCES] if words else []
    )
    wrong = sorted(map(str, odd)) if words else [repr(allow)]
    if wrong:
        raise UsageError(
            "allow names what may happen",
            expected=" ".join(ALLOWANCES),
            found=", ".join(wrong),
            fix='give a set of these, such as allow={"missing"}',
        )


def resume(engine: Engine, path: str | Path, tag: str | None, how: How) -> Report:
    """Fills an engine. Collective. Raises a UcpError on every rank; the engine is unchanged where
    metadata could show the reason, and refuses to step and to save where it could not."""
    started = time.perf_counter()
    with ExitStack() as opened:
        with agree.together() as looked:
            told = replace(engine.told(), weights="weights" in how.allow)
            if "values" in how.allow:
                told = replace(told, classes=None)
            source = opened.enter_context(open_checkpoint(path, tag, told=told))
            looked.value = _check_files(source, how, engine)
        how = replace(how, apart=functools.reduce(PerRank.__or__, looked.values))
        with agree.together() as planned:
            job = _Job.prepare(engine, source, how)
            planned.value = _inexact(job.plan, engine.manifest)
        job.notes[:0] = _of_all_ranks(engine.manifest, planned.values)
        filled = agree.collect(job.fill)
        sums, read_bytes = _checksums(filled, source)
        job.check_overflows(planned.values)
        engine.refresh()
        with agree.together():
            notes = job.finish()
        engine.mark_usable()
    steps = source.extras.counters.get("global_steps", 0)
    said = source.recorded.run if source.recorded is not None else {}
    return Report(
        str(source.folder),
        str(source.manifest.written_on),
        str(engine.manifest.mesh),
        *sums,
        time.perf_counter() - started,
        job.extras.client_state,
        tuple(notes),
        steps,
        str(said.get(RUN, "")),
        read_bytes,
        _left_out(how, engine),
    )


def _left_out(how: How, engine: Engine) -> str:
    """What of a training state was not asked for, in words."""
    if how.module_only:
        return "optimizer, scheduler and counters"
    return "the optimizer's states" if engine.has_optimizer and not how.optimizer else ""


@dataclass
class _Job:
    """One load on its way: what to read into where, and what to set. `states` and `scalars` are for
    each buffer of the manifest that this rank fills, `groups` for each of its groups."""

    engine: Engine
    source: Checkpoint
    how: How
    plan: Plan
    extras: TakenExtras
    states: dict[int, tuple[str, ...]]
    scalars: dict[int, list[Scalars]]
    groups: list[Mapping[str, Any]]
    notes: list[str] = field(default_factory=list[str])

    @classmethod
    def prepare(cls, engine: Engine, source: Checkpoint, how: How) -> "_Job":
        """Everything that needs no tensor byte; raises before anything is written. Every rank looks
        at the whole engine, and plans for its own part."""
        file, bare = str(source.folder), engine.manifest
        optimizer = how.optimizer and engine.has_optimizer
        engine.check(source, optimizer)
        fit = _fit(source.manifest, bare, how.allow, optimizer, file)
        if optimizer:
            match_ties(source.manifest, file)
        require_alone(bare, fit, optimizer and engine.has_one_step, file)
        states = _states(bare, source.manifest, fit, optimizer, file)
        target = _with_states(engine, states)
        groups, settings = _groups(engine, source, target, fit, how) if optimizer else ([], [])
        plan = _proved(engine, source, target, fit, how.allow)
        how, apart = _with_own(source, bare, replace(how, optimizer=optimizer))
        extras = _extras(engine, source, how)
        own = [number for number, _, _ in engine.parts() if bare.buffers[number].stepped]
        said = _described(fit, source.manifest)
        notes = [*source.notes, *said, *settings, *apart, *extras.notes]
        scalars = {number: _scalars(bare.buffers[number], source.manifest) for number in own}
        held = {number: states[number] for number in own}
        return cls(engine, source, how, plan, extras, held, scalars, groups, notes)

    def fill(self) -> Counts:
        """Moves the bytes. From here on a failure of any rank leaves the engine unusable on all."""
        self.engine.mark_unusable()
        if self.how.optimizer:
            self.engine.allocate(self.states)
        where, checksums = self.source.where, self.how.checksums
        with say.progress("load") as advance:
            return execute(
                self.plan, where, self.engine.tensor, checksums=checksums, progress=advance
            )

    def check_overflows(self, inexact: Sequence[tuple[int, int]]) -> None:
        """Raises InexactError on every rank, before weights become infinite. Collective, where any
        rank rounds (`inexact`, of all of them), or the dtype of the training is another one."""
        rounds = any(rounded for rounded, _ in inexact)
        if rounds or may_overflow(self.source.manifest, self.engine.manifest):
            found: dict[tuple[str, str], int] = {}
            for one in agree.collect(lambda: lost_in(self.engine, self.source, self.plan)):
                found |= one
            if found:
                raise too_large(found, str(self.source.folder), "train")

    def finish(self) -> list[str]:
        """Sets steps, hyper-parameters and extras; returns the notes of the whole load."""
        self.notes += self.engine.drop_gradients()
        if self.how.own is not None:
            set_buffers(self.engine, self.how.own.buffers)
        if self.how.optimizer:
            for number, scalars in self.scalars.items():
                self.engine.set_scalars(number, scalars)
            self.notes += self._set_groups()
        self.notes += self.extras.restore()
        return self.notes

    def _set_groups(self) -> list[str]:
        if self.how.hyper == "config":
            return ["hyper-parameters kept from the engine's configuration, as asked"]
        if not any(self.groups):
            fresh = "the optimizer's states begin afresh, "
            return [
                f"{fresh if not any(self.states.values()) else ''}hyper-parameters kept from the "
                "engine: the checkpoint holds none"
            ]
        own = {group.optimizer for group in self.engine.manifest.groups}
        theirs = {group.optimizer for group in self.source.manifest.groups}
        return self.engine.set_groups(self.groups, carried=theirs <= {*own, ""})


def _scalars(buffer: FlatBuffer, source: Manifest) -> list[Scalars]:
    """The scalar states that each member of a buffer gets: none where they begin afresh."""
    return [
        source.scalars_of(member.param) if member.param in source.holders else {}
        for member in buffer.members
    ]


def _check_files(source: Checkpoint, how: How, engine: Engine) -> PerRank:
    """Compares the files with each other; the ranks share the work. Returns what differs from rank
    to rank in those of this one."""
    rank, world = agree.world()
    optimizer = how.optimizer and engine.has_optimizer
    own = source.file_names[rank::world]
    for name in own:
        source.check(name, how.allow, optimizer)
    if optimizer:
        refuse_lost_moments(source.manifest, str(source.folder))
    return differing(source, own)


def _fit(
    source: Manifest, bare: Manifest, allow: frozenset[str], optimizer: bool, file: str
) -> Fit:
    """How the engine is filled: weights come from the masters, where the checkpoint has them.

    Raises ModelMismatchError; StateMismatchError for a checkpoint without an optimizer whose states
    are asked for.
    """
    fit = match_params(source, bare, allow, file)
    trainable = {spec.name for spec in bare.params if spec.kind == "trainable"} - fit.fresh
    if has_masters(source, trainable):
        return fit
    if optimizer and source.keeper != Keeper.WEIGHTS:
        raise StateMismatchError(
            "the checkpoint holds no optimizer",
            file=file,
            fix="load with load_optimizer_states=False",
            id="no-optimizer",
        )
    fit.master = VALUE
    return fit


def _states(
    bare: Manifest, source: Manifest, fit: Fit, optimizer: bool, file: str
) -> list[tuple[str, ...]]:
    """For each buffer of the engine the element-wise states that it gets besides the masters.
    Raises StateMismatchError where members disagree, or the engine's optimizer keeps others."""
    out: list[tuple[str, ...]] = []
    for buffer in bare.buffers:
        begins_afresh = any(member.param in fit.fresh for member in buffer.members)
        if not optimizer or not buffer.stepped or not buffer.members or begins_afresh:
            out.append(())
            continue
        out.append(_states_of(buffer, bare, source, file))
    return out


def _states_of(buffer: FlatBuffer, bare: Manifest, source: Manifest, file: str) -> tuple[str, ...]:
    def names_of(param: str) -> Mapping[str, bool]:
        return dict.fromkeys(source_states(source, param), True)

    found = one_value(buffer.members, names_of, "states", file)
    scalars = one_value(buffer.members, source.scalars_of, "steps", file)
    first = buffer.members[0]
    group = bare.groups[first.group] if first.group is not None else None
    keeps = kept_by(group.optimizer if group else "", group.settings if group else {})
    if found or scalars:
        require_equal(keeps.element, found, first.param, file)
        require_equal(keeps.scalar, scalars, first.param, file)
    elif keeps.element or keeps.scalar:  # from before the first step, or never saved
        settings = source.group_of(first.param)
        check_not_lost(source, settings, group.optimizer if group else "", file)
    return tuple(found)


def _with_states(engine: Engine, states: list[tuple[str, ...]]) -> Manifest:
    """The engine with the states that it will have."""
    buffers: list[FlatBuffer] = []
    for number, (buffer, found) in enumerate(zip(engine.manifest.buffers, states, strict=True)):
        if found:
            added = tuple((state, engine.state_dtype(number, state)) for state in found)
            buffer = replace(buffer, states=(*buffer.states, *added))
        buffers.append(buffer)
    return replace(engine.manifest, buffers=tuple(buffers))


def _wants(engine: Engine, target: Manifest, fit: Fit) -> list[Want]:
    """Every slot of this rank, and the source state that fills it."""
    wants: list[Want] = []
    for number, cut, part in engine.parts():
        buffer, first = target.buffers[number], _first_of(target, number)
        if first in fit.new or (not buffer.stepped and first in fit.skipped):
            continue
        trained = first in target.by_name and target.by_name[first].kind == "trainable"
        origin = VALUE if first in fit.unfrozen else fit.master
        for state, _ in buffer.states:
            weights = state == MASTER or (state == VALUE and (trained or first in fit.frozen))
            wants.append((Slot(number, cut, part, state), origin if weights else state))
    return wants


def _groups(
    engine: Engine, source: Checkpoint, target: Manifest, fit: Fit, how: How
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The hyper-parameters of each group as live values, and notes; none for a group whose
    parameters all begin afresh. Raises StateMismatchError, UnsafePickleError."""
    file = str(source.folder)
    notes = match_optimizers(source.manifest, target, fit.fresh, how.allow, file)
    groups = group_values(target, source.manifest.group_of, file, fit.fresh)
    if how.hyper == "config":
        return groups, notes
    groups, left = engine.built_groups(groups, file, "values" in how.allow)
    return groups, notes + left


def _first_of(target: Manifest, buffer: int) -> str:
    members = target.buffers[buffer].members
    return members[0].param if members else ""


def _with_own(source: Checkpoint, bare: Manifest, how: How) -> tuple[How, list[str]]:
    """What is asked for, with what this rank gets of values that differ; and notes."""
    own, notes = values_for(source, bare, how.apart, how.per_rank, how.allow)
    return replace(how, own=own), notes


def _proved(
    engine: Engine, source: Checkpoint, target: Manifest, fit: Fit, allow: frozenset[str]
) -> Plan:
    """A plan that is proved, and whose every source is there. What is frozen from here on is
    rounded to its training copy, as the run did, and so are the weights of an engine without an
    optimizer; nothing else without `allow`."""
    allow = allow if engine.has_optimizer else allow | {"narrow"}
    wants = _wants(engine, target, fit)
    frozen = [want for want in wants if _first_of(target, want[0].buffer) in fit.frozen]
    others = [want for want in wants if want not in frozen]
    plan = make_plan(source.manifest, target, others, allow)
    if frozen:
        more = make_plan(source.manifest, target, frozen, allow | {"narrow"})
        plan = Plan(plan.wants + more.wants, plan.ops + more.ops, plan.fills + more.fills)
    prove(plan, source.manifest, target)
    for slot in plan.sources:
        source.where(slot)
    return plan


def _extras(engine: Engine, source: Checkpoint, how: How) -> TakenExtras:
    """What the engine takes besides element-wise states, and the sums of what was read for it."""
    scheduler = how.scheduler and not how.module_only
    origins = _origins(engine.manifest, source.manifest)
    extras = engine.take_extras(source, scheduler, origins, how)
    if how.checksums:
        source.check_read()
    return extras


def _origins(bare: Manifest, source: Manifest) -> list[int | None]:
    """For each group of the engine the group of the checkpoint that its parameters come from, the
    first one that comes from any."""
    found: dict[int, int | None] = {}
    for buffer in bare.buffers:
        for member in buffer.members:
            if member.group is not None and found.get(member.group) is None:
                found[member.group] = source.group_number(member.param)
    return [found.get(number) for number in range(len(bare.groups))]


def _described(fit: Fit, source: Manifest) -> list[str]:
    """Notes for what metadata already shows to be not carried over."""
    found: dict[str, Sequence[str]] = {
        "kept from the engine: not in the checkpoint": fit.skipped,
        "dropped: not in the model": fit.dropped,
        "vocabulary resized": fit.resized,
        "trained from here on, their states begin afresh: they were frozen": fit.unfrozen,
        "new, with the engine's values, their states begin afresh": fit.new,
        "frozen from here on, their states dropped": fit.frozen,
    }
    return replica_notes(source) + _named(found)


def _inexact(plan: Plan, target: Manifest) -> tuple[int, int]:
    """Parameters of which a plan rounds some elements, and of which it averages some: a bit for
    each parameter of the manifest, as every rank sends it to every other one."""
    number = {spec.name: 1 << n for n, spec in enumerate(target.params)}
    rounded = averaged = 0
    for op in plan.ops:
        if isinstance(op, Mean):
            averaged |= number[target.member(op.target.slot.buffer, op.member).param]
        elif isinstance(op, Cast) and not op.lossless:
            rounded |= number[target.member(op.target.slot.buffer, op.member).param]
    return rounded, averaged


def _of_all_ranks(target: Manifest, found: Sequence[tuple[int, int]]) -> list[str]:
    """Notes for what the plans of all ranks do: one rank's report speaks for the load."""
    names: list[list[str]] = [[], []]
    for listed, masks in zip(names, zip(*found, strict=True), strict=True):
        every = functools.reduce(int.__or__, masks)
        listed += sorted(spec.name for n, spec in enumerate(target.params) if every >> n & 1)
    return _named({"rounded to a narrower dtype": names[0], "averaged over its copies": names[1]})


def _named(found: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{what}: {some_of(names, _NAMED)}" for what, names in found.items() if names]


def _checksums(filled: list[Counts], source: Checkpoint) -> tuple[tuple[int, int, int], int]:
    """Compares the sums of all ranks' runs, each rank a share of the records. Collective.

    Returns bytes: read by this rank, checked and not checked by all ranks; and read by all ranks.
    """
    rank, world = agree.world()
    runs = [run for counts in filled for run in counts.runs]
    records = {key: record for counts in filled for key, record in counts.records.items()}
    unsummed = sum(counts.unsummed_bytes for counts in filled)
    read_bytes = sum(counts.read_bytes for counts in filled)
    if not runs:
        return (filled[rank].read_bytes, 0, unsummed), read_bytes
    sums = agree.collect(lambda: check_runs(runs, records, source.opened, rank=rank, world=world))
    own = (
        filled[rank].read_bytes + sums[rank][2],
        sum(checked for checked, _, _ in sums),
        unsummed + sum(unchecked for _, unchecked, _ in sums),
    )
    return own, read_bytes + sum(more for _, _, more in sums)
