"""Whether a checkpoint fits a target: parameters, states, groups. What can be said before a byte is
moved."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.errors import ModelMismatchError, StateMismatchError

ALLOWANCES = {
    "narrow": "values may be rounded to a narrower dtype",
    "mean": "copies of a Partial parameter may be averaged",
    "vocab": "rows of a padded vocabulary may be dropped, or added as zeros",
    "missing": "frozen parameters and buffers that the checkpoint lacks keep the engine's values",
    "stale": "masters may differ from the weights beside them; the masters are loaded",
    "extra": "frozen parameters and buffers that the model lacks are dropped",
}


@dataclass
class Fit:
    """How a target is filled: source state per target state, and what was let pass by name."""

    master: str = MASTER
    skipped: list[str] = field(default_factory=list[str])
    dropped: list[str] = field(default_factory=list[str])
    resized: list[str] = field(default_factory=list[str])


def match_params(source: Manifest, target: Manifest, allow: frozenset[str], file: str) -> Fit:
    """Raises ModelMismatchError unless both sides hold the same parameters with the same shapes,
    kinds and ties."""
    fit = Fit()
    for spec in target.params:
        have = source.by_name.get(spec.name)
        if have is None and spec.kind != "trainable" and "missing" in allow:
            fit.skipped.append(spec.name)
            continue
        if have is None:
            _missing(spec.name, spec.kind, source, target, file)
        elif have.shape != spec.shape and _vocabulary(have, spec):
            if "vocab" not in allow:
                raise ModelMismatchError(
                    "the padded vocabulary has another size in the checkpoint",
                    file=file,
                    parameter=spec.name,
                    expected=f"{have.shape[0]} rows",
                    found=f"{spec.shape[0]} rows in the model",
                    fix=_keep_vocabulary(have.shape[0]),
                )
            change = spec.shape[0] - have.shape[0]
            fit.resized.append(
                f"{spec.name}: {abs(change)} rows {'added as zeros' if change > 0 else 'dropped'}"
            )
        elif have.shape != spec.shape:
            raise ModelMismatchError(
                "a parameter has another shape in the checkpoint",
                file=file,
                parameter=spec.name,
                expected=f"{spec.shape} as in the model",
                found=have.shape,
            )
        elif have.kind != spec.kind and (spec.kind == "trainable" or have.kind == "trainable"):
            raise ModelMismatchError(
                f"a parameter is {have.kind} in the checkpoint and {spec.kind} in the engine",
                file=file,
                parameter=spec.name,
                expected=spec.kind,
                found=have.kind,
                fix="set requires_grad as the run that wrote it did",
            )
    wanted = {spec.name for spec in target.params}
    extra = [spec for spec in source.params if spec.name not in wanted]
    for spec in extra:
        if spec.kind != "trainable" and "extra" in allow:
            fit.dropped.append(spec.name)
            continue
        tied = next((tie.canonical for tie in target.ties if spec.name in tie.aliases), None)
        raise ModelMismatchError(
            "the checkpoint holds a parameter that the model lacks",
            file=file,
            parameter=spec.name,
            expected=f"{len(wanted)} parameters",
            found=f"{len(extra)} more in the checkpoint"
            + (f"; the model ties it to {tied}" if tied else ""),
        )
    return fit


def _vocabulary(have: ParamSpec, spec: ParamSpec) -> bool:
    """Whether two shapes of a vocabulary parameter differ in padding alone: both hold the
    tokenizer's rows."""
    return (
        spec.extent is not None
        and have.shape[1:] == spec.shape[1:]
        and have.shape[0] >= spec.extent.true
        and (have.extent is None or have.extent.true == spec.extent.true)
    )


def _keep_vocabulary(rows: int) -> str:
    works = [n for n in range(1, 129) if rows % n == 0]
    return (
        f"build the model with {rows} rows, at a tensor-parallel size of "
        f"{', '.join(map(str, works))}; or drop rows or add "
        'zero rows with allow={"vocab"} (--allow-vocab-resize), which shifts the loss'
    )


def _missing(name: str, kind: str, source: Manifest, target: Manifest, file: str) -> None:
    tied = next((tie.canonical for tie in source.ties if name in tie.aliases), None)
    lacking = [spec.name for spec in target.params if spec.name not in source.by_name]
    raise ModelMismatchError(
        f"the model has a {kind} parameter that the checkpoint lacks"
        if kind != "buffer"
        else "the model has a buffer that the checkpoint lacks",
        file=file,
        parameter=name,
        expected=f"{len(source.params)} parameters in the model",
        found=f"{len(lacking)} more" + (f"; the checkpoint ties it to {tied}" if tied else ""),
        fix=None
        if kind == "trainable"
        else 'build the model as the run did, or keep the engine\'s values with allow={"missing"}',
    )


def one_value(
    members: Iterable[Member], of: Callable[[str], Mapping[str, Any]], what: str, file: str
) -> Mapping[str, Any]:
    """What all members agree on. Raises StateMismatchError that names two members that do not."""
    first: tuple[str, Mapping[str, Any]] | None = None
    for member in members:
        value = of(member.param)
        if first is None:
            first = (member.param, value)
        elif value != first[1]:
            keys = sorted(k for k in {*value, *first[1]} if value.get(k) != first[1].get(k))
            raise StateMismatchError(
                f"parameters of one group of the engine have different {what} in the checkpoint",
                file=file,
                parameter=f"{first[0]} and {member.param}",
                expected=f"equal {', '.join(keys)}",
                found="; ".join(f"{k}: {first[1].get(k)} and {value.get(k)}" for k in keys),
                fix="build the optimizer's groups as the run that wrote the checkpoint did",
            )
    return first[1] if first else {}


def match_ties(source: Manifest, optimizer: bool, file: str) -> list[str]:
    """Parameters that several stages of the checkpoint hold; the first stage's copy is the one that
    is read.

    Raises StateMismatchError where the copies have other steps or hyper-parameters: no target could
    have both.
    """
    tied = {name: [b for b, _ in held] for name, held in source.holders.items() if len(held) > 1}
    for name, (first, *others) in tied.items() if optimizer else ():
        for other in others:
            for what, of in (("steps", source.scalars), ("hyper-parameters", source.groups)):
                numbers = (
                    [first, other]
                    if what == "steps"
                    else [source.buffers[b].group for b in (first, other)]
                )
                one, two = (of[n] if of and n is not None else {} for n in numbers)
                if one != two:
                    key = next(key for key in {**one, **two} if one.get(key) != two.get(key))
                    raise StateMismatchError(
                        f"the stages that hold a tied parameter have different {what}",
                        file=file,
                        parameter=name,
                        expected=f"{key} {one.get(key)} as at {source.buffers[first].at}",
                        found=f"{two.get(key)} at {source.buffers[other].at}",
                        fix="load another tag; the copies of this parameter went apart during "
                        "training",
                    )
    return list(tied)


def group_values(
    target: Manifest, of: Callable[[str], Mapping[str, Any]], file: str
) -> list[Mapping[str, Any]]:
    """The hyper-parameters that each target group gets. Raises StateMismatchError where its members
    disagree."""
    members: dict[int, list[FlatBuffer]] = {}
    for buffer in target.buffers:
        if buffer.group is not None:
            members.setdefault(buffer.group, []).append(buffer)
    out: list[Mapping[str, Any]] = []
    for number in range(len(target.groups)):
        every = [m for buffer in members.get(number, []) for m in buffer.members]
        out.append(one_value(every, of, "hyper-parameters", file))
    return out


def source_states(source: Manifest, param: str) -> dict[str, str]:
    """Element-wise states that the checkpoint holds for a parameter, with their dtypes, without
    masters and values."""
    found = source.holders.get(param)
    states = source.buffers[found[0][0]].states if found else ()
    return {name: dtype for name, dtype in states if name not in (MASTER, VALUE)}


def has_masters(source: Manifest, params: Iterable[str]) -> bool:
    """Whether every parameter has a master copy in the checkpoint."""
    return all(
        MASTER in dict(source.buffers[source.holders[name][0][0]].states)
        for name in params
        if name in source.holders
    )
