"""Fills a live engine from a checkpoint of any mesh: what every engine's load does.

Order: everything that metadata can show is found on all ranks first; then the engine is marked
unusable, filled, refreshed and marked usable again. No collective stands inside the arithmetic.
"""

import functools
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.flat import FlatBuffer, Scalars
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import ORIGIN, RUN, BufferPart, Manifest, ParamGroup
from megatron_ucp.core.plan import Slot, Want
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.errors import (
    StateMismatchError,
)
from megatron_ucp.formats.base import Checkpoint, Told
from megatron_ucp.formats.deepspeed.doctor import refuse_lost_moments
from megatron_ucp.formats.of_ranks import PerRank
from megatron_ucp.formats.optimizers import kept_by, require_equal
from megatron_ucp.formats.rank_differences import differing
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine, Holder, How, TakenExtras
from megatron_ucp.reshard.engine_sink import EngineSink, Filled, InPlaceSource, named
from megatron_ucp.reshard.file_source import SharedFiles
from megatron_ucp.reshard.fingerprint import recorded_in
from megatron_ucp.reshard.match import (
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
    require_one_copy,
    source_states,
)
from megatron_ucp.reshard.own_values import values_for
from megatron_ucp.reshard.renumbered import for_model
from megatron_ucp.reshard.report import Report
from megatron_ucp.reshard.shared_memories import SharedMemories
from megatron_ucp.reshard.transfer import SinkPart, TransferRun, transfer


def resume(engine: Engine, path: str | Path, tag: str | None, how: How) -> Report:
    """Fills an engine. Collective. Raises a UcpError on every rank; the engine is unchanged where
    metadata could show the reason, and refuses to step and to save where it could not."""
    started = time.perf_counter()
    with ExitStack() as opened:
        with agree.together() as looked:
            read = opened.enter_context(open_checkpoint(path, tag, told=_told(engine, how)))
            source = for_model(read, engine.manifest, how.allow)
            looked.value = _check_files(source, how, engine)
        how = replace(how, apart=functools.reduce(PerRank.__or__, looked.values))
        values = SharedFiles(source, str(source.folder), how.checksums)
        return _filled_from(engine, source, values, how, started)


def resume_from_memory(engine: Engine, source: Checkpoint, held: Holder, how: How) -> Report:
    """As `resume`, from the memories of all ranks: `source` says all that is no element of a
    tensor, and `held` has this rank's elements."""
    started = time.perf_counter()
    with agree.together() as looked:
        looked.value = _check_files(source, how, engine)
    how = replace(how, apart=functools.reduce(PerRank.__or__, looked.values))
    return _filled_from(engine, source, SharedMemories(str(source.folder), held), how, started)


def _filled_from(
    engine: Engine,
    source: Checkpoint,
    values: InPlaceSource,
    how: How,
    started: float,
) -> Report:
    """Fills an engine with `values`, which are those of `source`. `started` is the clock when the
    load began. Collective."""
    with agree.together():
        sink = _prepared(engine, source, how)
    with say.progress("load") as advance:
        transfer(values, sink, run=TransferRun(progress=advance))
    steps = source.extras.counters.get("global_steps", 0)
    said = source.recorded.run if source.recorded is not None else {}
    return Report(
        str(source.folder),
        str(source.manifest.written_on),
        str(engine.manifest.mesh),
        *values.sums,
        time.perf_counter() - started,
        sink.extras.client_state,
        tuple(sink.notes),
        steps,
        str(said.get(RUN, "")),
        str(said.get(ORIGIN, "")),
        values.read_by_all,
        _left_out(how, engine),
        sink.compared,
    )


def _told(engine: Engine, how: How) -> Told:
    """What the engine knows of the checkpoint, and what the caller allows."""
    told = replace(engine.told(), weights="weights" in how.allow)
    return replace(told, classes=None) if "values" in how.allow else told


def _left_out(how: How, engine: Engine) -> str:
    """What of a training state was not asked for, in words."""
    if how.module_only:
        return "optimizer, scheduler and counters"
    return "the optimizer's states" if engine.has_optimizer and not how.optimizer else ""


def _prepared(engine: Engine, source: Checkpoint, how: How) -> EngineSink:
    """Everything that needs no tensor byte; raises before anything is written. Every rank looks at
    the whole engine, and prepares the parts that it has."""
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
    own, apart = values_for(source, bare, how.apart, how.per_rank, how.allow)
    how = replace(how, optimizer=optimizer, own=own)
    extras = _extras(engine, source, how)
    filled = _filled(engine, source, states, groups)
    parts = _parts(engine, target, fit, how.allow)
    copies = require_one_copy(source, bare.by_name, how.allow)
    described = _described(fit, source.manifest)
    notes = [*source.notes, *copies, *described, *settings, *apart, *extras.notes]
    return EngineSink(engine, source.manifest, how, parts, filled, extras, notes)


def _filled(
    engine: Engine,
    source: Checkpoint,
    states: list[tuple[str, ...]],
    groups: list[Mapping[str, Any]],
) -> Filled:
    """What this rank's buffers get besides elements."""
    buffers = engine.manifest.buffers
    own = [number for number, _, _ in engine.parts() if buffers[number].stepped]
    scalars = {number: _scalars(buffers[number], source.manifest) for number in own}
    recorded = {} if source.recorded is None else recorded_in(source.recorded.run)
    return Filled({number: states[number] for number in own}, scalars, groups, recorded)


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
    return replace(fit, master=VALUE)


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

    params = [member.param for member in buffer.members]
    found = one_value(params, names_of, "states", file)
    scalars = one_value(params, source.scalars_of, "steps", file)
    group = ParamGroup({}) if buffer.group is None else bare.groups[buffer.group]
    keeps = kept_by(group.optimizer, group.settings)
    if found or scalars:
        require_equal(keeps.element, found, params[0], file)
        require_equal(keeps.scalar, scalars, params[0], file)
    elif keeps.element or keeps.scalar:  # from before the first step, or never saved
        check_not_lost(source, source.group_of(params[0]), group.optimizer, file)
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


def _wants(target: Manifest, fit: Fit, taken: Sequence[BufferPart]) -> list[Want]:
    """Every slot that is taken, and the source state that fills it."""
    wants: list[Want] = []
    for number, cut, part in taken:
        buffer = target.buffers[number]
        first = buffer.first_param
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


def _parts(
    engine: Engine, target: Manifest, fit: Fit, allow: frozenset[str]
) -> tuple[SinkPart, ...]:
    """What is filled on this rank. What is frozen from here on is rounded to its
    training copy, as the run did, and so are the weights of an engine without an optimizer; nothing
    else without `allow`."""
    allow = allow if engine.has_optimizer else allow | {"narrow"}
    wants = _wants(target, fit, engine.parts())
    frozen = [want for want in wants if target.buffers[want[0].buffer].first_param in fit.frozen]
    apart = {slot for slot, _ in frozen}
    others = [want for want in wants if want[0] not in apart]
    parts = [SinkPart(target, tuple(others), allow, as_trained=True)]
    if frozen:
        parts.append(SinkPart(target, tuple(frozen), allow | {"narrow"}, as_trained=True))
    return tuple(parts)


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
    for _, member, group in bare.stepped():
        if found.get(group) is None:
            found[group] = source.group_number(member.param)
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
    return replica_notes(source) + named(found)
