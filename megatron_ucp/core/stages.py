"""The stages of a pipeline as one: each stage numbers its buffers and parameter groups from 0, the
checkpoint all of them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import on_stage
from megatron_ucp.errors import ModelMismatchError


@dataclass(frozen=True)
class Stage:
    """What one stage holds: the optimizer's flat buffers, its parameter groups, and one buffer (of
    `values`) for every frozen parameter and module buffer."""

    params: tuple[ParamSpec, ...]
    buffers: tuple[FlatBuffer, ...]
    groups: tuple[ParamGroup, ...]
    values: tuple[FlatBuffer, ...] = ()


@dataclass(frozen=True)
class Joined:
    """All stages: their optimizer's buffers in the order of the stages, then their values.
    `first_buffer`, `first_group` and `first_value` are the numbers under which each stage's
    begin."""

    params: tuple[ParamSpec, ...]
    buffers: tuple[FlatBuffer, ...]
    groups: tuple[ParamGroup, ...]
    first_buffer: tuple[int, ...]
    first_group: tuple[int, ...]
    first_value: tuple[int, ...]


def join(stages: Sequence[Stage]) -> Joined:
    """One list of everything. Raises ModelMismatchError where two stages describe a parameter
    differently."""
    params: dict[str, ParamSpec] = {}
    for spec in (spec for stage in stages for spec in stage.params):
        if params.setdefault(spec.name, spec) != spec:
            raise ModelMismatchError(
                "two stages hold a parameter that is not the same",
                parameter=spec.name,
                expected=params[spec.name],
                found=spec,
            )
    first_buffer = starts([len(stage.buffers) for stage in stages])
    first_group = starts([len(stage.groups) for stage in stages])
    first_value = starts([len(stage.values) for stage in stages], first_buffer[-1])
    buffers = [
        placed(buffer, number, len(stages), group)
        for number, (stage, group) in enumerate(zip(stages, first_group, strict=False))
        for buffer in stage.buffers
    ]
    values = [
        placed(buffer, number, len(stages))
        for number, stage in enumerate(stages)
        for buffer in stage.values
    ]
    return Joined(
        tuple(params.values()),
        (*buffers, *values),
        tuple(group for stage in stages for group in stage.groups),
        first_buffer[:-1],
        first_group[:-1],
        first_value[:-1],
    )


def starts(counts: Sequence[int], first: int = 0) -> tuple[int, ...]:
    """The number under which each one's things begin, and the one after the last."""
    out = [first]
    for count in counts:
        out.append(out[-1] + count)
    return tuple(out)


def placed(buffer: FlatBuffer, stage: int, stages: int, first_group: int = 0) -> FlatBuffer:
    """A stage's buffer among those of all stages. Without a pipeline it stays as it is."""
    if stages == 1:
        return buffer
    members = tuple(
        member if member.group is None else replace(member, group=member.group + first_group)
        for member in buffer.members
    )
    return replace(buffer, members=members, at=(*on_stage(stage), *buffer.at))


def replicas(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Parameters that several stages hold, and the stages."""
    out: dict[str, tuple[int, ...]] = {}
    for name, held in manifest.holders.items():
        stages = tuple(dict.fromkeys(manifest.buffers[b].stage for b, _ in held))
        if len(stages) > 1:
            out[name] = stages
    return out


def check_replicas(manifest: Manifest, tied: Collection[str], file: str | None = None) -> None:
    """Raises ModelMismatchError for a parameter that several stages hold though it is none of the
    `tied` ones."""
    for name, stages in replicas(manifest).items():
        if name not in tied:
            raise ModelMismatchError(
                "a parameter that is not tied is held by several stages of the pipeline",
                file=file,
                parameter=name,
                expected="one stage",
                found=f"stages {', '.join(map(str, stages))}",
                fix="restore the files of one save; or build the pipeline so that each layer is on "
                "one stage",
            )
