"""Whether a checkpoint fits a target: parameters, states, groups. What can be said before a byte is
moved."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ucp.core.flat import Member
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.shares import WEIGHTS
from megatron_ucp.core.stages import replicas
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.errors import ModelMismatchError, StateMismatchError
from megatron_ucp.formats.base import PER_GROUP
from megatron_ucp.formats.optimizers import keeps_states

NO_OPTIMIZER = "none"  # the engine of a manifest without an optimizer
ALLOWANCES = {
    "narrow": "values may be rounded to a narrower dtype",
    "mean": "copies of a Partial parameter may be averaged",
    "vocab": "rows of a padded vocabulary may be dropped, or added as zeros",
    "missing": "frozen parameters and buffers that the checkpoint lacks keep the engine's values",
    "stale": "masters may differ from the weights beside them; the masters are loaded",
    "positions": "states in stage-0 files without a manifest are taken in the order of the groups",
    "scheduler": "the engine's scheduler may get the state of one of another class",
    "weights": "the optimizer's states may be damaged; the weights beside them are loaded",
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
        if have is not None:
            if source.engine in (NO_OPTIMIZER, WEIGHTS) and have.kind == "frozen":
                have = replace(have, kind=spec.kind)  # nobody says what was trained
            _match_one(have, spec, fit, "vocab" in allow, file)
        elif spec.kind != "trainable" and "missing" in allow:
            fit.skipped.append(spec.name)
        else:
            _missing(spec.name, spec.kind, source, target, file)
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


def _match_one(have: ParamSpec, spec: ParamSpec, fit: Fit, resize: bool, file: str) -> None:
    """Raises ModelMismatchError where shape or kind differ; `resize` lets a padded vocabulary have
    another size."""
    if have.shape != spec.shape and _vocabulary(have, spec):
        if not resize:
            raise ModelMismatchError(
                "the padded vocabulary has another size in the checkpoint",
                file=file,
                parameter=spec.name,
                expected=f"{have.shape[0]} rows",
                found=f"{spec.shape[0]} rows in the model",
                fix=_keep_vocabulary(have.shape[0]),
            )
        change = spec.shape[0] - have.shape[0]
        what = "added as zeros" if change > 0 else "dropped"
        fit.resized.append(f"{spec.name}: {abs(change)} rows {what}")
    elif have.shape != spec.shape:
        raise ModelMismatchError(
            "a parameter has another shape in the checkpoint",
            file=file,
            parameter=spec.name,
            expected=f"{spec.shape} as in the model",
            found=have.shape,
        )
    elif have.kind != spec.kind and "trainable" in (spec.kind, have.kind):
        raise ModelMismatchError(
            f"a parameter is {have.kind} in the checkpoint and {spec.kind} in the engine",
            file=file,
            parameter=spec.name,
            expected=spec.kind,
            found=have.kind,
            fix="set requires_grad as the run that wrote it did",
        )


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
        expected=f"{len(source.params)} parameters, as in the checkpoint",
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
    tied = {
        name: [source.member(b, m) for b, m in source.holders[name]] for name in replicas(source)
    }
    for name, (first, *others) in tied.items() if optimizer else ():
        for other in others:
            _match_tie(source, name, first, other, file)
    return list(tied)


def _match_tie(source: Manifest, name: str, first: Member, other: Member, file: str) -> None:
    """Raises StateMismatchError where two copies of a tied parameter have other steps or
    hyper-parameters."""
    groups = [
        source.groups[member.group].settings if member.group is not None else {}
        for member in (first, other)
    ]
    pairs = {"steps": (first.scalars, other.scalars), "hyper-parameters": tuple(groups)}
    for what, (one, two) in pairs.items():
        if one != two:
            key = next(key for key in {**one, **two} if one.get(key) != two.get(key))
            stages = replicas(source)[name]
            raise StateMismatchError(
                f"the stages that hold a tied parameter have different {what}",
                file=file,
                parameter=name,
                expected=f"{key} {one.get(key)} as at stage {stages[0]}",
                found=f"{two.get(key)} at one of stages {', '.join(map(str, stages[1:]))}",
                fix="load another tag; the copies of this parameter went apart during training",
            )


def group_values(
    target: Manifest, of: Callable[[str], Mapping[str, Any]], file: str
) -> list[Mapping[str, Any]]:
    """The hyper-parameters that each target group gets. Raises StateMismatchError where its members
    disagree."""
    members: list[list[Member]] = [[] for _ in target.groups]
    for buffer in target.buffers:
        for member in buffer.members:
            if member.group is not None:
                members[member.group].append(member)
    return [one_value(every, of, "hyper-parameters", file) for every in members]


def source_states(source: Manifest, param: str) -> dict[str, str]:
    """Element-wise states that the checkpoint holds for a parameter, with their dtypes, without
    masters and values."""
    states = source.states_of(param)
    return {name: dtype for name, dtype in states.items() if name not in (MASTER, VALUE)}


def has_masters(source: Manifest, params: Iterable[str]) -> bool:
    """Whether every parameter has a master copy in the checkpoint."""
    return all(MASTER in source.states_of(name) for name in params if name in source.holders)


def check_not_lost(
    source: Manifest, settings: Mapping[str, Any], optimizer: str, file: str
) -> None:
    """Raises StateMismatchError for a checkpoint without optimizer states whose run took steps:
    they were never saved (SuperOffload writes such files), and are lost."""
    counts = [source.run.get(key) for key in ("global_steps", "skipped_steps")]
    steps, skipped = (count if isinstance(count, int) else 0 for count in counts)
    taken = steps - skipped
    if taken > 0 and keeps_states(optimizer, settings):
        raise StateMismatchError(
            "the run took steps, but the checkpoint holds no states of its optimizer",
            file=file,
            expected=f"states after {taken} steps",
            found="none: they were never saved",
            fix="load another tag, or begin with fresh states: load_optimizer_states=False",
        )


def scheduler_for(found: Any, origins: Sequence[int | None], count: int) -> Any:
    """A scheduler's state for other groups: what it keeps per group follows the parameters. `found`
    has it for the `count` groups of the checkpoint; `origins` are those that each target group
    comes from."""
    if not isinstance(found, dict) or None in origins:
        return found
    out = dict(found)
    for key in PER_GROUP & found.keys():
        if isinstance(found[key], list) and len(found[key]) == count:
            out[key] = [found[key][origin] for origin in origins if origin is not None]
    return out
