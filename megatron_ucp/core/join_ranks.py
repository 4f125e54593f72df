"""The places of a mesh as one: each stage, and on it each expert-parallel rank, numbers its buffers
and parameter groups from 0, the checkpoint all of them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import EXPERTS, Coords, without_cuts, without_experts
from megatron_ucp.errors import ModelMismatchError


@dataclass(frozen=True)
class Stage:
    """What a rank of one stage holds: the optimizer's flat buffers, its parameter groups, and one
    buffer (of `values`) for every frozen parameter and module buffer. `at` is the stage's place,
    with that of the rank's experts (see Mesh.holding); a buffer of experts is one that an expert
    axis cuts."""

    params: tuple[ParamSpec, ...]
    buffers: tuple[FlatBuffer, ...]
    groups: tuple[ParamGroup, ...]
    values: tuple[FlatBuffer, ...] = ()
    at: Coords = ()


@dataclass(frozen=True)
class JoinedStages:
    """The stages as one: their optimizers' buffers in the order of the stages, then their values.
    For each stage `buffer_numbers` has the numbers of its buffers in `buffers`, `value_numbers`
    those of its values, and `first_group` the number of its first group."""

    params: tuple[ParamSpec, ...]
    buffers: tuple[FlatBuffer, ...]
    groups: tuple[ParamGroup, ...]
    buffer_numbers: tuple[tuple[int, ...], ...]
    value_numbers: tuple[tuple[int, ...], ...]
    first_group: tuple[int, ...]


def join(stages: Sequence[Stage]) -> JoinedStages:
    """One list of everything. What is no expert's is held at all expert-parallel ranks of a stage;
    the first one's is taken. Raises ModelMismatchError where two places describe one thing
    differently."""
    params: dict[str, ParamSpec] = {}
    for spec in (spec for stage in stages for spec in stage.params):
        _same(params.setdefault(spec.name, spec), spec, "hold a parameter", spec.name)
    groups: list[ParamGroup] = []
    first_group: list[int] = []
    first: dict[Coords, tuple[int, Stage]] = {}
    for stage in stages:
        number, other = first.setdefault(without_cuts(stage.at), (len(groups), stage))
        if other is stage:
            groups += stage.groups
        _same_number(other.groups, stage.groups)
        _same(other.groups, stage.groups, "have parameter groups")
        first_group.append(number)
    buffers = _Numbered()
    numbers = [
        buffers.of(stage.at, stage.buffers, group)
        for stage, group in zip(stages, first_group, strict=True)
    ]
    _check_shares(buffers.all)
    values = _Numbered(len(buffers.all))
    value_numbers = [values.of(stage.at, stage.values, 0) for stage in stages]
    return JoinedStages(
        tuple(params.values()),
        (*buffers.all, *values.all),
        tuple(groups),
        tuple(numbers),
        tuple(value_numbers),
        tuple(first_group),
    )


def _check_shares(buffers: Sequence[FlatBuffer]) -> None:
    """Raises ModelMismatchError where ranks that cut one parameter keep other states of it, or
    other steps."""
    first: dict[tuple[int, str], Any] = {}
    for buffer in buffers:
        for member in buffer.members if buffer.cut_at else ():
            kept = buffer.states, member.group, dict(member.scalars)
            known = first.setdefault((buffer.stage, member.param), kept)
            _same(known, kept, "keep something of a parameter", member.param)


class _Numbered:
    """Buffers of all places, numbered from `first` on."""

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.all: list[FlatBuffer] = []
        self._dense: dict[Coords, list[int]] = {}

    def of(self, at: Coords, buffers: Sequence[FlatBuffer], group: int) -> tuple[int, ...]:
        """The numbers of a place's own buffers."""
        known = self._dense.get(without_experts(at))
        dense: list[int] = []
        out: list[int] = []
        for buffer in buffers:
            is_expert = not EXPERTS.isdisjoint(buffer.axes)
            placed = _placed(buffer, at if is_expert else without_experts(at), group)
            if is_expert or known is None:
                out.append(self._add(placed))
            elif len(dense) < len(known):
                out.append(known[len(dense)])
                _same(self.all[out[-1] - self.first], placed, "have a buffer", _named(placed))
            else:
                _same(len(known), len(dense) + 1, "have buffers", _named(placed))
            if not is_expert:
                dense.append(out[-1])
        if known is None:
            self._dense[without_experts(at)] = dense
        elif len(known) != len(dense):
            _same(len(known), len(dense), "have buffers")
        return tuple(out)

    def _add(self, buffer: FlatBuffer) -> int:
        self.all.append(buffer)
        return self.first + len(self.all) - 1


def _named(buffer: FlatBuffer) -> str | None:
    return buffer.members[0].param if buffer.members else None


def _same(one: Any, other: Any, what: str, param: str | None = None) -> None:
    if one != other:
        raise ModelMismatchError(
            f"two ranks {what} that must not differ",
            parameter=param,
            expected=str(one)[:_SHOWN],
            found=str(other)[:_SHOWN],
        )


def _same_number(ours: Sequence[ParamGroup], theirs: Sequence[ParamGroup]) -> None:
    if len(ours) != len(theirs):
        raise ModelMismatchError(
            "two ranks have other numbers of parameter groups",
            expected=f"{len(ours)} groups",
            found=f"{len(theirs)} groups",
            fix="give the optimizer the same groups on every rank: a rank that trains none of its "
            "experts has none for them, so freeze those of every rank or leave each one some",
        )


_SHOWN = 200  # characters of a buffer, which may have thousands of members


def _placed(buffer: FlatBuffer, at: Coords, first_group: int) -> FlatBuffer:
    """A place's buffer among those of all places. At the only place it stays as it is."""
    if not at:
        return buffer
    members = tuple(
        member if member.group is None else replace(member, group=member.group + first_group)
        for member in buffer.members
    )
    return replace(buffer, members=members, at=(*at, *buffer.at))


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
