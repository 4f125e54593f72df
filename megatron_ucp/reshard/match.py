"""Whether a checkpoint fits a target: parameters, states, groups. What can be said before a byte is
moved."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.core.flat import Member
from megatron_ucp.core.join_ranks import replicas
from megatron_ucp.core.manifest import DIVERGED, Manifest, ParamSpec, differs_in_padding
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.values import alike, shown
from megatron_ucp.errors import ForeignFileError, ModelMismatchError, StateMismatchError, some_of
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.optimizers import keeps_states, rule_of, rule_untold
from megatron_ucp.formats.schedules import regrouped
from megatron_ucp.formats.wrapped_model import likely_renaming, other_prefix
from megatron_ucp.reshard.options import is_allowed, is_named


@dataclass(frozen=True)
class Fit:
    """How a target is filled: source state per target state, and what was let pass by name.

    `skipped` and `new` (trainable ones) keep the target's values. Of `new`, and of `unfrozen`,
    which were frozen in the source, the optimizer's states begin afresh. `frozen` were trained
    there.
    """

    master: str = MASTER
    unfrozen: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()

    @property
    def fresh(self) -> set[str]:
        """Trainable parameters whose states begin afresh."""
        return {*self.unfrozen, *self.new}


# ------------------------------------------------ nothing of the model, or of a part of it


def require_known_parts(
    source: Manifest, target: Manifest, allow: Collection[str], file: str
) -> None:
    """Raises ModelMismatchError where the checkpoint holds no parameter of the model, or none of
    one of its parts: what is loaded then is nothing, whatever is allowed. `allow` may name a part
    ("new:vision_tower"). A part without anything that is trained may be lacking with "missing", as
    in a save without frozen weights, unless the checkpoint has parameters of other names."""
    wanted = [spec.name for spec in target.params]
    held = {*source.by_name, *(alias for tie in source.ties for alias in tie.aliases)}
    lacking = {name for name in wanted if name not in held}
    if not lacking:
        return
    others = [name for name in source.by_name if name not in target.by_name]
    renamed = likely_renaming(others, [*lacking]) if others else ""
    if len(lacking) == len(wanted):
        raise ModelMismatchError(
            "the checkpoint holds no parameter of the model",
            file=file,
            expected=some_of(wanted, 4),
            found=some_of([*source.by_name], 4) or "none",
            fix=_OTHER_NAMES.format(renamed or "no name of one side is one of the other"),
        )
    for part, names in parts_of(wanted).items():
        named = all(is_named("new", n, allow) or is_named("missing", n, allow) for n in names)
        if named or not lacking.issuperset(names):
            continue
        trained = any(target.by_name[name].kind == "trainable" for name in names)
        if trained or others:
            raise ModelMismatchError(
                "the checkpoint holds no parameter of a part of the model",
                file=file,
                parameter=part,
                expected=f"{len(names)} parameters, such as {names[0]}",
                found=f"none; others of the checkpoint: {some_of(others, 4) or 'none'}",
                fix=_OTHER_NAMES.format(renamed or "no name of this part is there")
                + f'; or name the part that begins anew, as with allow={{"new:{part}"}} '
                f'("missing:{part}" of frozen ones)',
            )


_OTHER_NAMES = "build the model as the run did: {}"


def parts_of(names: Collection[str]) -> dict[str, list[str]]:
    """The parts of a model, by what their names begin with: each list of numbered layers
    (`vision_tower.encoder.layers`), and each child of the model with several modules in it."""
    lists: dict[str, dict[str, list[str]]] = {}
    children: dict[str, dict[str, list[str]]] = {}
    for name in names:
        head, _, rest = name.partition(".")
        children.setdefault(head, {}).setdefault(rest.rpartition(".")[0], []).append(name)
        parts = name.split(".")
        number = next((n for n, one in enumerate(parts) if n and one.isdecimal()), 0)
        if number:
            layers = lists.setdefault(".".join(parts[:number]), {})
            layers.setdefault(parts[number], []).append(name)
    several = [*lists.items(), *children.items()]
    return {
        part: [name for found in pieces.values() for name in found]
        for part, pieces in several
        if len(pieces) > 1
    }


_LEAVE_OUT = (
    "build the model with the configuration that the checkpoint was trained with; or leave them "
    'out with allow={"extra"}, as transformers does with layers that predict further tokens (MTP)'
)
_FIRST_NAME = (
    "a save without frozen weights leaves out their first names alone: load it with "
    'allow={"missing", "extra"}, which keeps the model\'s own'
)


def match_params(source: Manifest, target: Manifest, allow: frozenset[str], file: str) -> Fit:
    """Raises ModelMismatchError unless both sides hold the same parameters with the same shapes,
    kinds and ties, but for what is allowed. That the checkpoint holds nothing of the model, or
    nothing of a part that `allow` does not name, is never allowed."""
    if wrapped := other_prefix(source.by_name, target.by_name, file):
        raise wrapped
    require_known_parts(source, target, allow, file)
    passed = defaultdict[str, list[str]](list)  # lines about what is let pass, by the field of Fit
    rows = _one_resize(source, target)
    for spec in target.params:
        have = source.by_name.get(spec.name)
        for fate, line in _fates(have, spec, source, target, allow, rows, file):
            passed[fate].append(line)
    wanted = {spec.name for spec in target.params}
    extra = [spec for spec in source.params if spec.name not in wanted]
    for spec in extra:
        if spec.kind != "trainable" and "extra" in allow:
            passed["dropped"].append(spec.name)
            continue
        tied = next((tie.canonical for tie in target.ties if spec.name in tie.aliases), None)
        raise ModelMismatchError(
            "the checkpoint holds a parameter that the model lacks",
            file=file,
            parameter=spec.name,
            expected=f"{len(wanted)} parameters",
            found=f"{len(extra)} more in the checkpoint"
            + (f"; the model ties it to {tied}" if tied else ""),
            fix=_FIRST_NAME
            if tied in passed["skipped"]
            else None
            if any(spec.kind == "trainable" for spec in extra)
            else _LEAVE_OUT,
        )
    return replace(Fit(), **{fate: tuple(lines) for fate, lines in passed.items()})


def _fates(
    have: ParamSpec | None,
    spec: ParamSpec,
    source: Manifest,
    target: Manifest,
    allow: frozenset[str],
    rows: bool,
    file: str,
) -> Iterator[tuple[str, str]]:
    """What is let pass of a parameter of the target, which is `have` in the source. `rows`: all
    shapes that differ do so as a resized vocabulary's."""
    if have is not None:
        if source.keeper in (Keeper.NOBODY, Keeper.WEIGHTS) and have.kind == "frozen":
            have = replace(have, kind=spec.kind)  # nobody says what was trained
        yield from _match_one(have, spec, allow, target.mesh.tp, rows, file)
    elif spec.kind != "trainable" and is_allowed("missing", spec.name, allow):
        yield "skipped", spec.name
    elif spec.kind == "trainable" and is_allowed("new", spec.name, allow):
        yield "new", spec.name
    else:
        _missing(spec.name, spec.kind, source, target, file)


def _match_one(
    have: ParamSpec, spec: ParamSpec, allow: frozenset[str], tp: int, rows: bool, file: str
) -> Iterator[tuple[str, str]]:
    """What is allowed of a shape or a kind that differs. Raises ModelMismatchError for what is
    not."""
    if have.shape != spec.shape:
        if "vocab" not in allow or not (rows or differs_in_padding(have, spec)):
            raise _other_shape(have, spec, allow, tp, rows, file)
        change = spec.shape[0] - have.shape[0]
        what = (
            "dropped"
            if change < 0
            else "added as zeros"
            if differs_in_padding(have, spec)
            else _FRESH
        )
        yield "resized", f"{spec.name}: {abs(change)} rows {what}"
    if have.kind != spec.kind and "trainable" in (spec.kind, have.kind):
        yield _match_kind(have, spec, allow, file), spec.name


def _match_kind(have: ParamSpec, spec: ParamSpec, allow: frozenset[str], file: str) -> str:
    """What becomes of a parameter that is trained on one side alone. Raises ModelMismatchError
    where that is not allowed, or a buffer."""
    is_trained = spec.kind == "trainable"
    word, fate = ("unfreeze", "unfrozen") if is_trained else ("freeze", "frozen")
    if word in allow and "buffer" not in (have.kind, spec.kind):
        return fate
    raise ModelMismatchError(
        f"a parameter is {have.kind} in the checkpoint and {spec.kind} in the engine",
        file=file,
        parameter=spec.name,
        expected=spec.kind,
        found=have.kind,
        fix="set requires_grad as the run that wrote it did when its engine was made (what is "
        "frozen after attaching stays the optimizer's), or go on with other trainable "
        f'parameters with allow={{"{word}"}}',
    )


_FRESH = "begin with the engine's values, their states with zeros"


def _other_shape(
    have: ParamSpec, spec: ParamSpec, allow: frozenset[str], tp: int, rows: bool, file: str
) -> ModelMismatchError:
    """What to raise for a parameter of another shape; `rows` as in `_fates`."""
    if _is_vocabulary(have, spec) and spec.extent is not None:
        way_on = _RESIZE if differs_in_padding(have, spec) else _OTHER_TOKENIZER if rows else ""
        return ModelMismatchError(
            "the padded vocabulary has another size in the checkpoint",
            file=file,
            parameter=spec.name,
            expected=f"{have.shape[0]} rows",
            found=f"{spec.shape[0]} rows in the model",
            fix=_keep_vocabulary(have, tp) + way_on,
            id="vocabulary",
        )
    usual = "build the model with the configuration that the checkpoint was trained with"
    fix = None
    if rows:
        fix = usual + _OTHER_TOKENIZER
    elif "vocab" in allow:
        fix = (
            f'{usual}; "vocab" is for parameters that all have the same number of rows there, and '
            "another one here, and differ in nothing else"
        )
    return ModelMismatchError(
        "a parameter has another shape in the checkpoint",
        file=file,
        parameter=spec.name,
        expected=f"{spec.shape} as in the model",
        found=have.shape,
        fix=fix,
        id="vocabulary" if rows else None,
    )


def _one_resize(source: Manifest, target: Manifest) -> bool:
    """Whether all parameters of another shape differ in their first dim alone, and go from one
    number of rows to one other, as those of a vocabulary that was resized: 96 to 104."""
    pairs = ((source.by_name.get(spec.name), spec) for spec in target.params)
    other = [(one, two) for one, two in pairs if one is not None and one.shape != two.shape]
    counts = {(one.shape[:1], two.shape[:1]) for one, two in other if _is_vocabulary(one, two)}
    return len(counts) == 1 and all(_is_vocabulary(one, two) for one, two in other)


def _is_vocabulary(have: ParamSpec, spec: ParamSpec) -> bool:
    """Whether two shapes differ in their rows alone, and both have some."""
    return 0 not in (*have.shape, *spec.shape) and have.shape[1:] == spec.shape[1:] != have.shape


_RESIZE = (
    "; or drop rows, or add rows of zeros, with --allow-vocab-resize (Python: "
    'allow={"vocab"}), which shifts the loss: padding is part of the softmax'
)
_OTHER_TOKENIZER = (
    "; or go on with the rows that both have: --allow-vocab-resize (Python: "
    'allow={"vocab"}), which drops rows, or leaves new ones as the engine has them'
)
_USUAL_DIVISOR = 128  # of Megatron-LM's --make-vocab-size-divisible-by


def _keep_vocabulary(have: ParamSpec, tp: int) -> str:
    """How Megatron-LM, which pads the vocabulary to a multiple of a divisor x tp, builds the size
    of the checkpoint."""
    rows = have.shape[0]
    works = [n for n in range(1, 129) if rows % n == 0]
    if rows % tp:
        return (
            f"{rows} rows don't divide by tp={tp}: build the model with {rows} rows at a "
            f"tensor-parallel size of {', '.join(map(str, works))}"
        )
    known = have.extent is not None and have.extent.true < rows
    usual = [n for n in works if known and _padded(have, _USUAL_DIVISOR * n) == rows]
    return (
        f"build the model with {rows} rows: --make-vocab-size-divisible-by {rows // tp} at "
        f"tp={tp}; tp sizes that can keep it: {', '.join(map(str, works))}"
        + (f", of which {', '.join(map(str, usual))} need no flag" if usual else "")
    )


def _padded(spec: ParamSpec, multiple: int) -> int:
    """The rows of the tokenizer, up to a multiple."""
    true = spec.extent.true if spec.extent is not None else spec.shape[0]
    return -(-true // multiple) * multiple


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
        fix="build the model as the run did, or begin with fresh states for what is new, with "
        'allow={"new"}'
        if kind == "trainable"
        else 'build the model as the run did, or keep the engine\'s values with allow={"missing"}',
    )


def require_alone(target: Manifest, fit: Fit, one_step: bool, file: str) -> None:
    """Raises StateMismatchError where parameters whose states begin afresh share a flat buffer with
    others, as an optimizer counts one step for all of a buffer; or at all, where it counts
    `one_step` for all parameters."""
    if fit.fresh and one_step:
        raise StateMismatchError(
            "parameters can't begin afresh: the engine's optimizer counts one step for all",
            file=file,
            parameter=min(fit.fresh),
            expected="the parameters that the run trained",
            found=f"{len(fit.fresh)} others",
            fix="load with load_optimizer_states=False, or go on under DeepSpeed",
        )
    kinds = {name: "new" for name in fit.new} | {name: "unfrozen" for name in fit.unfrozen}
    for buffer in target.buffers if kinds else ():
        found = {kinds.get(m.param, "going on"): m.param for m in buffer.members}
        if len(found) > 1:
            raise StateMismatchError(
                "parameters that begin afresh are in one flat buffer with others",
                file=file,
                parameter=" and ".join(found.values()),
                expected="one kind in a parameter group",
                found=", ".join(found),
                fix="give the optimizer a parameter group of their own for them",
                id="groups-differ",
            )


def one_value(
    params: Iterable[str], of: Callable[[str], Mapping[str, Any]], what: str, file: str
) -> Mapping[str, Any]:
    """What all parameters of a group agree on. Raises StateMismatchError that names two that do
    not."""
    first: tuple[str, Mapping[str, Any]] | None = None
    for param in params:
        value = of(param)
        if first is None:
            first = (param, value)
        elif not alike(value, first[1]):
            both = {*value, *first[1]}
            keys = sorted(k for k in both if not alike(value.get(k), first[1].get(k)))
            raise StateMismatchError(
                f"parameters of one group of the engine have different {what} in the checkpoint",
                file=file,
                parameter=f"{first[0]} and {param}",
                expected=f"equal {', '.join(keys)}",
                found="; ".join(
                    f"{k}: {shown(first[1].get(k))} and {shown(value.get(k))}" for k in keys
                ),
                fix="build the optimizer's groups as the run that wrote the checkpoint did; or "
                'take the hyper-parameters of this job: hyper="config" (in a DeepSpeed config '
                '"universal_checkpoint": {"hyper": "config"})',
                id="groups-differ",
            )
    return first[1] if first else {}


def match_ties(source: Manifest, file: str) -> None:
    """Raises StateMismatchError where copies of a parameter that several stages hold have other
    steps or hyper-parameters: no target could have both."""
    for name in replicas(source):
        first, *others = [source.member(b, m) for b, m in source.holders[name]]
        for other in others:
            _match_tie(source, name, first, other, file)


def require_one_copy(
    source: Checkpoint, names: Collection[str], allow: Collection[str] | None
) -> list[str]:
    """Notes for those of some parameters of which ranks had different copies when they were saved:
    no mesh shows that any more but the one that saved them. Raises ForeignFileError where the files
    hold several of them, unless that is allowed, or nothing can be (None)."""
    said = {} if source.recorded is None else source.recorded.run
    found = [name for name in said.get(DIVERGED, ()) if name in names]
    if not found:
        return []
    has_copies = any(  # more than one cut of the mesh holds some of them
        len(source.manifest.cuts_of(buffer)) > 1
        for buffer in source.manifest.buffers
        if any(member.param in found for member in buffer.members)
    )
    if allow is not None and "replicas" not in allow and has_copies:
        raise ForeignFileError(
            "copies of a parameter hold different values",
            file=source.folder,
            parameter=some_of(found),
            expected="one value on all ranks that have the parameter",
            found="they differed when they were saved, as the save's notes say",
            fix="the replicas of the run have diverged: load an older tag; or take what was saved, "
            'with allow={"replicas"}',
        )
    return [f"copies differed between ranks when they were saved, one is taken: {some_of(found)}"]


def replica_notes(source: Manifest) -> list[str]:
    """Notes for parameters that several stages hold: the first stage's copy is the one that is
    read, and nobody reads the others, but for `verify --deep`."""
    return [f"replicas not compared: {name}" for name in replicas(source)]


def _match_tie(source: Manifest, name: str, first: Member, other: Member, file: str) -> None:
    """Raises StateMismatchError where two copies of a tied parameter have other steps or
    hyper-parameters."""
    groups = [
        source.groups[member.group].settings if member.group is not None else {}
        for member in (first, other)
    ]
    pairs = {"steps": (first.scalars, other.scalars), "hyper-parameters": tuple(groups)}
    for what, (one, two) in pairs.items():
        if not alike(one, two):
            key = next(key for key in {**one, **two} if not alike(one.get(key), two.get(key)))
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
    target: Manifest,
    of: Callable[[str], Mapping[str, Any]],
    file: str,
    without: Collection[str],
) -> list[Mapping[str, Any]]:
    """The hyper-parameters that each target group gets, from its members but those `without`.
    Raises StateMismatchError where they disagree."""
    params: list[list[str]] = [[] for _ in target.groups]
    for _, member, group in target.stepped():
        if member.param not in without:
            params[group].append(member.param)
    return [one_value(every, of, "hyper-parameters", file) for every in params]


UNTOLD = "the files don't say by which rule of Adam the run stepped; the engine steps by {}"
ADAMS = frozenset({"Adam", "AdamW"})


def match_optimizers(
    source: Manifest, target: Manifest, fresh: Collection[str], allow: frozenset[str], file: str
) -> list[str]:
    """Notes about groups that the engine steps by another rule than the run did, or whose rule
    nothing says. Raises StateMismatchError unless another one is allowed."""
    other: dict[tuple[str, str], str] = {}
    untold: dict[str, None] = {}
    for _, member, group in target.stepped():
        number = source.group_number(member.param)
        if number is None or member.param in fresh:
            continue
        groups = source.groups[number], target.groups[group]
        rules = rule_of(groups[0]), rule_of(groups[1])
        if rules[1] in ADAMS and rule_untold(groups[0]):
            untold[UNTOLD.format(rules[1])] = None
        elif all(rules) and rules[0] != rules[1]:
            other.setdefault(rules, member.param)
    for (theirs, ours), param in other.items():
        if "optimizer" not in allow:
            raise StateMismatchError(
                "the engine's optimizer steps by another rule than the run's",
                file=file,
                parameter=param,
                expected=f"{theirs}, as the run",
                found=ours,
                fix="build the optimizer of the run, or go on with the engine's own rule with "
                'allow={"optimizer"}',
            )
    return [
        *untold,
        *(
            f"the engine steps by {ours}, the run did by {theirs}: allowed"
            for theirs, ours in other
        ),
    ]


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
    taken = source.taken_steps
    if taken > 0 and keeps_states(optimizer, settings):
        raise StateMismatchError(
            "the run took steps, but the checkpoint holds no states of its optimizer",
            file=file,
            expected=f"states after {taken} steps",
            found="none: they were never saved",
            fix="load another tag, or begin with fresh states: load_optimizer_states=False",
            id="no-optimizer",
        )


def scheduler_for(
    found: Any, origins: Sequence[int | None], count: int, own: Mapping[str, Any] | None = None
) -> Any:
    """A scheduler's state for other groups: what it keeps per group, and what schedulers that it
    holds keep, follows the parameters. `found` has it for the `count` groups of the checkpoint;
    `origins` are those that each target group comes from. A group that comes from none has what the
    target's `own` scheduler says."""
    if not isinstance(found, dict) or (None in origins and own is None):
        return found
    strange: list[Any] = []

    def of(lists: list[Any]) -> Any:
        saved, here = lists
        if len(saved) != count:
            return saved
        if None in origins and (not isinstance(here, list) or len(here) != len(origins)):
            strange.append(saved)
            return saved
        return [
            here[number] if origin is None else saved[origin]
            for number, origin in enumerate(origins)
        ]

    out = regrouped([found, own], of)
    return found if strange else out  # counts other groups: the caller refuses it
