"""The manifest of a checkpoint that does not exist yet: a source's parameters under a target's mesh
and engine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import Spread, in_order, is_stacked, stored_tensors
from megatron_ucp.core.flat import FlatBuffer, Member, States, alone
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.layout import Chunks, ShardRuns
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import Coords, Mesh, expert_rank_of, stage_of
from megatron_ucp.core.stages import Stage, join
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.errors import (
    RuleError,
    StateMismatchError,
    UsageError,
)
from megatron_ucp.formats.deepspeed.autoep import group_name
from megatron_ucp.formats.deepspeed.formulas import round_robin
from megatron_ucp.formats.deepspeed.muon import in_its_order, steps_matrices
from megatron_ucp.formats.deepspeed.target import GroupOnRank, with_states
from megatron_ucp.formats.optimizers import kept_by, refuse_step_in_group, require_equal
from megatron_ucp.reshard.expert_meshes import (
    check_experts,
    check_stages,
    check_trained,
    held_by,
    marks_on,
)
from megatron_ucp.reshard.match import check_not_lost, match_ties, one_value, source_states
from megatron_ucp.reshard.stage_division import placed
from megatron_ucp.reshard.wanted import NamedGroup, Wanted


def named_groups(wanted: Wanted) -> list[NamedGroup]:
    """The target's groups as an optimizer without pipeline has them. Raises UsageError,
    StateMismatchError."""
    target, source = wanted.target, wanted.source
    found = _listed_groups(wanted) if target.groups is not None else _source_groups(wanted)
    if target.groups is None and target.mesh.ep != source.mesh.ep:
        # the source lists the experts of each of its ranks
        found = [replace(one, names=tuple(in_order(one.names))) for one in found]
    if not target.optimizer:
        return found
    refuse_step_in_group(target.optimizer)
    return [replace(one, group=replace(one.group, optimizer=target.optimizer)) for one in found]


def target_manifest(wanted: Wanted) -> Manifest:
    """What the target holds, buffer by buffer, without files. Raises a UcpError that names what is
    not known."""
    source, mesh, file = wanted.source, wanted.target.mesh, wanted.file
    _check_cuts(wanted)
    match_ties(source, file)
    groups = _with_experts_apart(named_groups(wanted), mesh, source.mesh)
    shapes = _local_shapes(wanted, mesh)
    groups = [_as_stepped(wanted, one, shapes) for one in groups]
    local = {name: math.prod(shape) for name, shape in shapes.items()}
    by_stage = placed(wanted, local)
    check_stages(by_stage, source, mesh, file)
    held = held_by(by_stage, source, mesh, file)
    stages = [
        _stage(wanted, groups, local, held[stage_of(at)][expert_rank_of(at)], at)
        for at in mesh.holding()
    ]
    joined = join(stages)
    layers = wanted.layers if mesh.pp > 1 else None
    return Manifest(
        wanted.target.keeper(wanted.dtype),
        mesh,
        joined.params,
        joined.buffers,
        joined.groups,
        source.ties,
        family=source.family,
        run=source.run,
        names=dict(layers.names) if layers else {},
    )


def _local_shapes(wanted: Wanted, mesh: Mesh) -> dict[str, Ints]:
    """The shape of every parameter on a rank of a mesh."""
    shares = mesh.shares()
    return {
        spec.name: spec.layout.local_shape(spec.name, spec.shape, shares)
        for spec in wanted.params.values()
    }


def _as_stepped(wanted: Wanted, one: NamedGroup, shapes: Mapping[str, Ints]) -> NamedGroup:
    """A group in the order of the optimizer that steps it, which Muon sorts by rank-local
    `shapes`. Raises UsageError."""
    if not steps_matrices(one.group.settings):
        return one
    listed = wanted.target.groups is not None
    source = shapes if listed else _local_shapes(wanted, wanted.source.mesh)
    at_init = wanted.target.mesh.zero == 3
    names = in_its_order(one.names, shapes, source, wanted.file, at_init)
    return replace(one, names=names)


def _check_cuts(wanted: Wanted) -> None:
    """Raises RuleError where the target's mesh cuts what nobody declared how to cut, and as
    `check_experts`."""
    source, mesh, file = wanted.source, wanted.target.mesh, wanted.file
    cuts = _cuts_parameters(mesh)
    if cuts and not _cuts_parameters(source.mesh) and not wanted.declared:
        raise RuleError(
            "nobody declared how the parameters are cut",
            file=file,
            expected=f"layouts for {mesh}",
            found="a checkpoint without tensor parallelism and without a family",
            fix="give --rules FILE (Python: rules=); `megatron-ucp rules` writes a draft",
            id="layout-unknown",
        )
    unknown = [spec for spec in source.params if _is_unknown(spec)] if cuts else []
    if unknown:
        raise RuleError(
            "nobody declared how a parameter is cut",
            file=file,
            parameter=unknown[0].name,
            expected=f"a layout for {mesh}",
            found=f"{len(unknown)} such parameters",
            fix="give --rules FILE (Python: rules=), convert to tp=1, or load into a live engine",
            id="layout-unknown",
        )
    check_experts(source, mesh, file)
    check_trained(source, mesh, file)


def _cuts_parameters(mesh: Mesh) -> bool:
    return max(mesh.cut_of_dense, mesh.cut_of_experts) > 1


def _is_unknown(spec: ParamSpec) -> bool:
    """Whether files hold a parameter in chunks, or ranks in shares of different sizes, that say
    nothing of how another mesh cuts it."""
    if isinstance(spec.layout, ShardRuns):
        return True
    chunked = isinstance(spec.layout, Chunks) and spec.kind != "buffer"
    return chunked and spec.on_mesh is None and len(spec.shape) > 0


def _with_experts_apart(groups: list[NamedGroup], mesh: Mesh, source: Mesh) -> list[NamedGroup]:
    """Groups in which no expert is among parameters that other ranks share; those of experts come
    last, as DeepSpeed's own function splits them."""
    spread = Spread.on(mesh)
    apart: list[NamedGroup] = []
    others: list[NamedGroup] = []
    for one in groups:
        experts = tuple(name for name in one.names if spread.is_apart(name))
        rest = tuple(name for name in one.names if not spread.is_apart(name))
        if experts and rest:
            marks = {**one.group.marks, "name": group_name(mesh.ep), "moe": True}
            apart.append(NamedGroup(replace(one.group, marks=marks), experts))
            others.append(replace(one, names=rest))
        else:
            marks = marks_on(one.group.marks, mesh, source)
            others.append(replace(one, group=replace(one.group, marks=marks)))
    return [*others, *apart]


def _stage(
    wanted: Wanted,
    groups: list[NamedGroup],
    local: Mapping[str, int],
    held: frozenset[str],
    at: Coords,
) -> Stage:
    """What one place of the target holds. `local` are the elements of each parameter that a rank
    has."""
    keeper, params = wanted.target.keeper(wanted.dtype), wanted.params
    here = [one for one in (group.of(held) for group in groups) if one.names]
    buffers: list[FlatBuffer] = []
    for number, one in enumerate(here):
        _check_stacks(one.names, params, wanted.target.mesh, wanted.file)
        on_rank = _on_rank(wanted, number, one, local, keeper)
        buffers += wanted.target.buffers(on_rank, keeper, wanted.dtype)
    for buffer in buffers:  # files keep one set of them for each buffer
        stepped = [member.param for member in buffer.members]
        one_value(stepped, wanted.source.scalars_of, "steps", wanted.file)
    specs = tuple(params[name] for name in sorted(held, key=wanted.places.__getitem__))
    values = tuple(
        _value(wanted.target.mesh, keeper, spec, local[spec.name])
        for spec in specs
        if spec.kind != "trainable"
    )
    return Stage(specs, tuple(buffers), tuple(one.group for one in here), values, at)


def _check_stacks(
    names: Sequence[str], params: Mapping[str, ParamSpec], mesh: Mesh, file: str
) -> None:
    """Raises UsageError where a group does not list all experts of a stacked parameter, in their
    order: one tensor is in one group."""
    for tensor in stored_tensors(names):
        spec = params[tensor[0]]
        if not is_stacked(spec.name) or spec.expert is None:
            continue
        number, count = spec.expert
        numbers = [expert[0] for name in tensor if (expert := params[name].expert)]
        if numbers != list(range(number, number + count // mesh.ep)):
            raise UsageError(
                "a group does not list the experts of a stacked parameter together",
                file=file,
                parameter=spec.name,
                expected=f"{count // mesh.ep} of them, by their numbers",
                found=f"{numbers}",
                fix="list all experts of this parameter in one group, by their numbers "
                "(--groups; Python: Target(groups=))",
            )


def universal_manifest(wanted: Wanted) -> Manifest:
    """The same parameters, each one whole and in a buffer of its own. Raises a UcpError."""
    source = wanted.source
    match_ties(source, wanted.file)
    groups, specs = named_groups(wanted), wanted.params
    buffers: list[FlatBuffer] = []
    for number, one in enumerate(groups):
        states = _states(wanted, one, Keeper.UNIVERSAL)
        for name in one.names:
            scalars = source.scalars_of(name)
            buffers.append(alone(name, specs[name].elems, states, number, scalars, axes=()))
    for spec in specs.values():
        if spec.kind != "trainable":
            buffers.append(alone(spec.name, spec.elems, ((VALUE, spec.dtype),), axes=()))
    return Manifest(
        Keeper.UNIVERSAL,
        Mesh(),
        tuple(specs.values()),
        tuple(buffers),
        tuple(one.group for one in groups),
        source.ties,
        family=source.family,
        run=source.run,
    )


def _states(wanted: Wanted, group: NamedGroup, keeper: Keeper) -> States:
    """Masters and element-wise states of a group, which the target's `optimizer` has to keep if it
    is another one. At stage 0 in float32 the weights are the masters, whatever the source's are."""
    source, file, first = wanted.source, wanted.file, group.names[0]
    masters = {source.states_of(name).get(MASTER) for name in group.names}
    found = one_value(group.names, lambda name: source_states(source, name), "states", file)
    if len(masters) > 1 or None in masters:
        raise StateMismatchError(
            "the checkpoint holds no master weights of one kind",
            file=file,
            parameter=first,
            found=", ".join(map(str, masters)),
            fix="convert a checkpoint that was saved with its optimizer",
            id="no-optimizer",
        )
    states = {**found, **source.scalars_of(first)}
    if not states:
        check_not_lost(source, source.group_of(first), group.group.optimizer, file)
    elif wanted.target.optimizer:
        kept = kept_by(wanted.target.optimizer, group.group.settings)
        require_equal((*kept.element, *kept.scalar), states, first, file)
    plain = (keeper, wanted.dtype) == (Keeper.ZERO_0, "float32")
    return with_states(found, wanted.dtype if plain else str(masters.pop()))


def _on_rank(
    wanted: Wanted, number: int, one: NamedGroup, local: Mapping[str, int], keeper: Keeper
) -> GroupOnRank:
    """A group of a place, as its ranks have it."""
    spread, first = Spread.on(wanted.target.mesh), one.names[0]
    return GroupOnRank(
        number,
        one.group.optimizer,
        [(name, local[name]) for name in one.names],
        _states(wanted, one, keeper),
        wanted.source.scalars_of,
        spread.partitions(first),
        spread.axes(first),
        one.group.settings,
    )


def _value(mesh: Mesh, keeper: Keeper, spec: ParamSpec, elems: int) -> FlatBuffer:
    """A buffer, or a frozen parameter, which ZeRO-3 partitions."""
    states = ((VALUE, spec.dtype),)
    if keeper != Keeper.ZERO_3 or spec.kind != "frozen":
        return alone(spec.name, elems, states, axes=Spread.on(mesh).axes(spec.name))
    parts = mesh.partitions
    return FlatBuffer((Member(spec.name, 0, elems),), -(-elems // parts), parts, "each", states)


# ------------------------------------------------ groups


def _listed_groups(wanted: Wanted) -> list[NamedGroup]:
    """The groups that the target lists. Raises UsageError where they don't list every trainable
    parameter once, StateMismatchError where members of one disagree."""
    source, file = wanted.source, wanted.file
    wished = wanted.target.groups or ()
    trainable = [spec.name for spec in source.params if spec.kind == "trainable"]
    listed = [name for names in wished for name in names]
    if sorted(listed) != sorted(trainable):
        twice = [name for name in listed if listed.count(name) > 1]
        odd = sorted(set(listed) ^ set(trainable)) or twice
        raise UsageError(
            "the groups do not list every trainable parameter once",
            file=file,
            parameter=odd[0],
            expected=f"{len(trainable)} names",
            found=f"{len(listed)}",
            fix="list each of them in one group (--groups; Python: Target(groups=))",
            id="groups-differ",
        )
    out: list[NamedGroup] = []
    for names in wished:
        one_value(names, source.group_of, "hyper-parameters", file)
        number = source.group_number(names[0]) if names else None
        group = source.groups[number] if number is not None else ParamGroup({})
        out.append(NamedGroup(group, tuple(names)))
    return out


def _source_groups(wanted: Wanted) -> list[NamedGroup]:
    """The source's groups. The stages of a pipeline number their own: those are one that have the
    same number where all stages have as many, else those with the same settings (but for the
    rate)."""
    source, file = wanted.source, wanted.file
    by_stage = _groups_by_stage(source)
    if not by_stage:
        raise _no_optimizer(source, file)
    alike = len({len(groups) for groups in by_stage.values()}) == 1
    out: dict[Any, tuple[ParamGroup, dict[str, None]]] = {}
    for _, groups in sorted(by_stage.items()):
        for at, (number, names) in enumerate(sorted(groups.items())):
            group = source.groups[number]
            settings = {k: v for k, v in group.settings.items() if k not in ("lr", "initial_lr")}
            key = at if alike else repr(sorted(settings.items()))
            if wanted.permuted:
                names = _unpermuted(names, source.mesh.partitions)
            out.setdefault(key, (group, {}))[1].update(dict.fromkeys(names))
    for _, names in out.values():
        one_value(names, source.group_of, "hyper-parameters", file)
    return [NamedGroup(group, tuple(names)) for group, names in out.values()]


def _no_optimizer(source: Manifest, file: str) -> StateMismatchError:
    found = "none; or states by position, as stage 0 keeps them"
    fix = (
        "convert a checkpoint that was saved with its optimizer; files of stage 0 without "
        "a manifest: load them into an engine, which knows the order of its groups, and save"
    )
    if source.keeper == Keeper.WEIGHTS:
        found = "weights alone"
        fix = "an engine loads this folder as it is; import-hf writes native files of it"
    return StateMismatchError(
        "the checkpoint holds no optimizer",
        file=file,
        expected="parameter groups",
        found=found,
        fix=fix,
        id="no-optimizer",
    )


def _groups_by_stage(source: Manifest) -> dict[int, dict[int, list[str]]]:
    """Names by stage and by number of the group, in the order of the buffers."""
    out: dict[int, dict[int, dict[str, None]]] = {}
    for buffer, member, group in source.stepped():
        groups = out.setdefault(buffer.stage, {})
        groups.setdefault(group, {})[member.param] = None
    return {
        stage: {number: list(names) for number, names in groups.items()}
        for stage, groups in out.items()
    }


def _unpermuted(names: Sequence[str], parts: int) -> list[str]:
    """The client's order of what `round_robin_gradients` permuted."""
    out = [""] * len(names)
    for name, index in zip(names, round_robin(len(names), parts), strict=True):
        out[index] = name
    return out
