"""The manifest of a checkpoint that does not exist yet: a source's parameters under a target's mesh
and engine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.core.flat import FlatBuffer, Member, round_robin
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.partition import Layers
from megatron_ucp.core.stages import Stage, join
from megatron_ucp.core.states import MASTER, VALUE, kept_by, require_equal
from megatron_ucp.errors import RuleError, StateMismatchError, UnsupportedError, UsageError
from megatron_ucp.formats.deepspeed.target import Target, with_states
from megatron_ucp.reshard.match import match_ties, one_value, source_states


@dataclass(frozen=True)
class Group:
    """A parameter group as an optimizer without pipeline has it: its hyper-parameters, and names in
    its order."""

    settings: Mapping[str, Any]
    names: tuple[str, ...]


def target_manifest(
    source: Manifest,
    target: Target,
    layers: Layers | None,
    file: str,
    declared: bool = True,
    permuted: bool = False,
) -> Manifest:
    """What the target holds, buffer by buffer, without files.

    `layers` are those of the pipeline, needed where the target has one. `declared` says whether
    anybody declared how parameters are cut; `permuted` whether the source's groups are in the order
    of `round_robin_gradients`. Raises a UcpError that names what is not known.
    """
    mesh = target.mesh
    if mesh.tp > 1 and source.mesh.tp == 1 and not declared:
        raise RuleError(
            "nobody declared how the parameters are cut",
            file=file,
            expected=f"layouts for tp={mesh.tp}",
            found="a checkpoint without tensor parallelism and without a family",
            fix="give --rules FILE (megatron-ucp rules writes a draft)",
        )
    match_ties(source, True, file)
    groups = _groups(source, target, file, permuted)
    dtype = target.dtype or _dtype(source)
    engine = target.engine(dtype)
    optimizer = target.optimizer or source.optimizer
    place = {"tp": (mesh.tp, 0)}
    local = {
        spec.name: math.prod(spec.layout.local_shape(spec.name, spec.shape, place))
        for spec in source.params
    }
    specs = {spec.name: _retyped(spec, dtype) for spec in source.params}
    stages: list[Stage] = []
    if target.stages is None and source.mesh.pp == mesh.pp and layers is not None:
        target = replace(target, stages=_stages_of(source, layers))
    for held in _placed(source, target, layers, local, file):
        here = [
            Group(group.settings, names)
            for group in groups
            if (names := tuple(n for n in group.names if n in held))
        ]
        buffers = [
            buffer
            for number, group in enumerate(here)
            for buffer in target.buffers(
                engine,
                dtype,
                optimizer,
                [(name, local[name]) for name in group.names],
                number,
                _states(source, group, target.optimizer, file, engine, dtype),
            )
        ]
        values = [
            _value(
                spec,
                local[name],
                mesh.partitions if engine == "zero3" and spec.kind == "frozen" else None,
            )
            for name, spec in specs.items()
            if spec.kind != "trainable" and name in held
        ]
        scalars = tuple(
            one_value(buffer.members, source.scalars_of, "steps", file) for buffer in buffers
        )
        stages.append(
            Stage(
                tuple(specs[name] for name in specs if name in held),
                tuple(buffers),
                tuple(group.settings for group in here),
                scalars,
                tuple(values),
            )
        )
    joined = join(stages)
    return Manifest(
        engine,
        mesh,
        joined.params,
        joined.buffers,
        joined.groups,
        joined.scalars,
        source.ties,
        optimizer=optimizer,
        family=source.family,
        run=source.run,
        names=dict(layers.names) if layers and mesh.pp > 1 else {},
    )


def universal_manifest(
    source: Manifest, target: Target, file: str, permuted: bool = False
) -> Manifest:
    """The same parameters, each one whole and in a buffer of its own. Raises a UcpError."""
    match_ties(source, True, file)
    groups = _groups(source, target, file, permuted)
    dtype = target.dtype or _dtype(source)
    specs = {spec.name: _retyped(spec, dtype) for spec in source.params}
    buffers: list[FlatBuffer] = []
    scalars: list[Mapping[str, float]] = []
    for number, group in enumerate(groups):
        states = _states(source, group, target.optimizer, file, "universal", dtype)
        for name in group.names:
            size = math.prod(specs[name].shape)
            buffers.append(
                FlatBuffer((Member(name, 0, size),), size, 1, "whole", states, number, axes=())
            )
            scalars.append(source.scalars_of(name))
    for spec in specs.values():
        if spec.kind != "trainable":
            size = math.prod(spec.shape)
            buffers.append(
                FlatBuffer(
                    (Member(spec.name, 0, size),), size, 1, "whole", ((VALUE, spec.dtype),), axes=()
                )
            )
            scalars.append({})
    return Manifest(
        "universal",
        Mesh(),
        tuple(specs.values()),
        tuple(buffers),
        tuple(group.settings for group in groups),
        tuple(scalars),
        source.ties,
        optimizer=target.optimizer or source.optimizer,
        family=source.family,
        run=source.run,
    )


def _stages_of(source: Manifest, layers: Layers) -> tuple[int, ...] | None:
    """How many layers each stage of the source has; of a parameter that several positions hold the
    last is on the last stage."""
    held = {
        name: [dict(source.buffers[b].at).get("pp", 0) for b, _ in holders]
        for name, holders in source.holders.items()
    }
    at, seen = [0], set[str]()
    for names in layers.canonical:
        own = [held[name][-1] if name in seen else held[name][0] for name in names if name in held]
        seen.update(names)
        at.append(max([at[-1], *own]))
    counts = tuple(at[1:].count(stage) for stage in range(source.mesh.pp))
    return counts if all(counts) else None


def _dtype(source: Manifest) -> str:
    return next((spec.dtype for spec in source.params if spec.kind == "trainable"), "float32")


def _retyped(spec: ParamSpec, dtype: str) -> ParamSpec:
    """Parameters train in one dtype; buffers keep theirs."""
    return spec if spec.kind == "buffer" else replace(spec, dtype=dtype)


def _states(
    source: Manifest, group: Group, optimizer: str | None, file: str, engine: str, dtype: str
) -> tuple[tuple[str, str], ...]:
    """Masters and element-wise states of a group, which the target's `optimizer` has to keep if it
    is another one. At stage 0 in float32 the weights are the masters, whatever the source's are."""
    holders = [source.buffers[source.holders[name][0][0]] for name in group.names]
    masters = {dict(buffer.states).get(MASTER) for buffer in holders}
    found = one_value(
        [Member(name, 0, 0) for name in group.names],
        lambda name: source_states(source, name),
        "states",
        file,
    )
    if len(masters) > 1 or None in masters:
        raise StateMismatchError(
            "the checkpoint holds no master weights of one kind",
            file=file,
            parameter=group.names[0],
            found=", ".join(map(str, masters)),
            fix="convert a checkpoint that was saved with its optimizer",
        )
    if optimizer and (
        states := {**found, **source.scalars_of(group.names[0])}
    ):  # none before the first step
        kept = kept_by(optimizer, group.settings)
        require_equal((*kept.element, *kept.scalar), states, group.names[0], file)
    return with_states(
        found, dtype if (engine, dtype) == ("zero0", "float32") else str(masters.pop())
    )


def _value(spec: ParamSpec, elems: int, parts: int | None) -> FlatBuffer:
    """A frozen parameter or buffer; `parts` are ZeRO-3's partitions of it, None where it is
    whole."""
    return FlatBuffer(
        (Member(spec.name, 0, elems),),
        -(-elems // (parts or 1)),
        parts or 1,
        "each" if parts else "whole",
        ((VALUE, spec.dtype),),
    )


def _groups(source: Manifest, target: Target, file: str, permuted: bool) -> list[Group]:
    """The groups of an optimizer without pipeline. The stages of a pipeline number their own: those
    are one that have the same number where all stages have as many, else those with the same
    settings (but for the rate)."""
    trainable = [spec.name for spec in source.params if spec.kind == "trainable"]
    if target.groups is not None:
        listed = [name for names in target.groups for name in names]
        if sorted(listed) != sorted(trainable):
            odd = sorted(set(listed) ^ set(trainable)) or [
                name for name in listed if listed.count(name) > 1
            ]
            raise UsageError(
                "the groups do not list every trainable parameter once",
                file=file,
                parameter=odd[0],
                expected=f"{len(trainable)} names",
                found=f"{len(listed)}",
            )
        return [
            Group(
                one_value(
                    [Member(n, 0, 0) for n in names], source.group_of, "hyper-parameters", file
                ),
                tuple(names),
            )
            for names in target.groups
        ]
    by_stage: dict[int, dict[int, dict[str, None]]] = {}
    for buffer in source.buffers:
        if buffer.group is not None:
            stage = by_stage.setdefault(dict(buffer.at).get("pp", 0), {})
            stage.setdefault(buffer.group, {}).update(
                dict.fromkeys(member.param for member in buffer.members)
            )
    if not by_stage:
        raise StateMismatchError(
            "the checkpoint holds no optimizer",
            file=file,
            expected="parameter groups",
            found="none",
            fix="convert a checkpoint that was saved with its optimizer",
        )
    alike = len({len(groups) for groups in by_stage.values()}) == 1
    out: dict[Any, tuple[Mapping[str, Any], dict[str, None]]] = {}
    for _, groups in sorted(by_stage.items()):
        for at, (number, names) in enumerate(sorted(groups.items())):
            settings = source.groups[number]
            key = (
                at
                if alike
                else repr(
                    sorted((k, v) for k, v in settings.items() if k not in ("lr", "initial_lr"))
                )
            )
            ordered = _unpermuted(list(names), source.mesh.partitions) if permuted else names
            out.setdefault(key, (settings, {}))[1].update(dict.fromkeys(ordered))
    groups = [Group(settings, tuple(names)) for settings, names in out.values()]
    for group in groups:
        one_value(
            [Member(name, 0, 0) for name in group.names], source.group_of, "hyper-parameters", file
        )
    return groups


def no_layers(file: str) -> UnsupportedError:
    """The error for a pipeline that a model without a family would have."""
    return UnsupportedError(
        "the names of the parameters in a pipeline are not known",
        file=file,
        found="no family",
        expected="a pipeline checkpoint, or one of a family that has a pipeline",
        fix="train with a family, or convert without pp",
    )


def _unpermuted(names: Sequence[str], parts: int) -> list[str]:
    """The client's order of what `round_robin_gradients` permuted."""
    out = [""] * len(names)
    for name, index in zip(names, round_robin(len(names), parts), strict=True):
        out[index] = name
    return out


def _placed(
    source: Manifest, target: Target, layers: Layers | None, local: Mapping[str, int], file: str
) -> list[frozenset[str]]:
    """The names that each stage holds."""
    if target.mesh.pp == 1:
        return [frozenset(spec.name for spec in source.params)]
    if layers is None:
        raise no_layers(file)
    if target.stages is None:
        raise UsageError(
            "how the layers are divided among the stages is not known",
            file=file,
            expected=f"uniform, parameters, layers, or {target.mesh.pp} numbers with the sum "
            f"{len(layers.held)}",
            fix="give --stages (Target(stages=...)) as the job's partition method",
        )
    known = {name for names in layers.canonical for name in names}
    trained = {
        spec.name: local[spec.name] for spec in source.params if spec.kind == "trainable"
    }  # what DeepSpeed balances
    lost = [spec.name for spec in source.params if spec.name not in known]
    if lost:
        raise UnsupportedError(
            "a parameter or buffer has no place in the pipeline",
            file=file,
            parameter=lost[0],
            found=f"{len(lost)} of {len(source.params)}",
        )
    return [
        frozenset(name for at in stage for name in layers.canonical[at])
        for stage in layers.stages(target.stages, target.mesh.pp, trained)
    ]
