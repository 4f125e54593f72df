"""What the keys of a DCP folder say: which are weights, which states of an optimizer, which the
settings of its parameter groups.

DCP flattens nested dictionaries, and joins their keys with dots. So `dcp.save({"model": ...,
"optim": ...})` has the keys `model.FQN`, `optim.state.FQN.exp_avg` and `optim.param_groups.0.lr`,
and torchtitan's flat state dict the keys `FQN`, `optimizer.state.FQN.exp_avg` and
`optimizer.param_groups.FQN.lr`. FQN is the name of a parameter as the program's model has it.

Source: `get_optimizer_state_dict` and its flattening in torch.distributed.checkpoint.state_dict
(torch 2.13), Accelerate 1.15 and torchtitan 0.3.0.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_ucp.errors import DamagedFileError, StateMismatchError, UnsupportedError, some_of
from megatron_ucp.formats.dcp.torchtitan import fused_of

# What a flat state dict has beside parameters and their optimizer.
SCHEDULER, TRAIN_STATE = "lr_scheduler.", "train_state."
_BESIDE = (SCHEDULER, TRAIN_STATE, "dataloader.", "dataloader", "rng", "epoch", "step")
_GROUPS = re.compile(r"((?:[^.]+\.)*?)param_groups\.")
_MODEL = "model."
_AVERAGES = re.compile(r"(.*\.)?(model_)?(ema|averaged?|swa)(_model|_weights)?\.")


@dataclass(frozen=True)
class GroupKeys:
    """One parameter group: the key of each of its settings. `params` is the key of the list of its
    parameters' names; where settings lie by parameter, `names` are these."""

    settings: Mapping[str, str]
    params: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Keys:
    """`weights`: the key of each parameter or buffer by its name; `states`: of each state by name
    and state; `groups` as the files list them; `beside`: keys of what is neither, such as the
    scheduler; `prefix` of the weights and `optimizer` of the optimizer's keys; `stated` are the
    names of which the optimizer says anything, of which one may stand for several weights."""

    weights: Mapping[str, str]
    states: Mapping[str, Mapping[str, str]]
    groups: tuple[GroupKeys, ...] = ()
    beside: tuple[str, ...] = ()
    prefix: str = ""
    optimizer: str = ""
    left: tuple[str, ...] = ()
    stated: frozenset[str] = frozenset()


def read_keys(
    tensors: Collection[str],
    objects: Collection[str],
    known: Collection[str],
    listed: Mapping[str, tuple[str, ...]],
    file: str,
) -> Keys:
    """What the keys say. `known` are names of the caller's model (none: nobody says them), and
    `listed` what the lists of parameters say, by their keys. Raises UnsupportedError for several
    optimizers and for states by position; DamagedFileError, StateMismatchError."""
    optimizer = optimizer_prefix([*tensors, *objects], file)
    states, groups, rest = dict[str, dict[str, str]](), dict[str, dict[str, str]](), list[str]()
    for key in [*tensors, *objects]:
        if optimizer is None or not key.startswith(optimizer):
            rest.append(key)
            continue
        inner = key.removeprefix(optimizer)
        if inner.startswith("state."):
            name, _, state = inner.removeprefix("state.").rpartition(".")
            states.setdefault(name, {})[state] = key
        elif inner.startswith("param_groups."):
            name, _, setting = inner.removeprefix("param_groups.").rpartition(".")
            groups.setdefault(name, {})[setting] = key
        else:
            rest.append(key)
    if optimizer is not None:
        _refuse_positions(states, file)
    found = _groups(groups, file)
    stated = {
        *states,
        *(name for one in found for name in (*one.names, *listed.get(one.params, ()))),
    }
    names = {weight for name in stated for weight in fused_of(name)}
    states = {weight: own for name, own in states.items() for weight in fused_of(name)}
    found = tuple(
        replace(one, names=tuple(w for name in one.names for w in fused_of(name))) for one in found
    )
    here = {*tensors}
    weights = [key for key in rest if key in here]
    prefix, left = _weights_prefix(weights, sorted(names), known, file)
    held = {
        key.removeprefix(prefix): key
        for key in weights
        if key.startswith(prefix) and (prefix or not key.startswith(_BESIDE))
    }
    taken = {*held.values()}
    beside = tuple(key for key in rest if key not in taken)
    return Keys(held, states, found, beside, prefix, optimizer or "", left, frozenset(stated))


def optimizer_prefix(keys: Iterable[str], file: str) -> str | None:
    """What the keys of the optimizer begin with; None where there is none. Raises UnsupportedError
    for several optimizers."""
    found = {match[1] for key in keys if (match := _GROUPS.match(key)) is not None}
    if len(found) > 1:
        raise UnsupportedError(
            "the folder holds the states of several optimizers",
            file=file,
            expected="one, such as optim.state and optim.param_groups",
            found=some_of(sorted(found)),
            fix="save each model with its optimizer into a folder of its own",
        )
    return next(iter(found), None)


def params_keys(keys: Iterable[str], file: str) -> list[str]:
    """The keys of the lists of parameters of groups that are numbered."""
    known = [*keys]
    prefix = optimizer_prefix(known, file)
    if prefix is None:
        return []
    pattern = re.compile(rf"{re.escape(prefix)}param_groups\.\d+\.params")
    return [key for key in known if pattern.fullmatch(key)]


def _refuse_positions(states: Collection[str], file: str) -> None:
    if states and all(name.isdecimal() for name in states):
        raise UnsupportedError(
            "the optimizer's states lie by position, and nothing says of which parameters they are",
            file=file,
            expected="state.FQN.exp_avg, as get_optimizer_state_dict names them",
            found=some_of([f"state.{name}" for name in sorted(states)]),
            fix="save with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict in "
            "the place of optimizer.state_dict()",
        )


def _groups(groups: Mapping[str, Mapping[str, str]], file: str) -> tuple[GroupKeys, ...]:
    """Groups by number, each with its list of parameters; or the settings of each parameter."""
    numbered = {
        name: keys for name, keys in groups.items() if name.isdecimal() and "params" in keys
    }
    if not numbered:
        return tuple(GroupKeys(keys, names=(name,)) for name, keys in groups.items())
    if odd := sorted({*groups} - {*numbered}):
        raise DamagedFileError(
            "parameter groups are listed in two ways",
            file=file,
            expected="numbers, each with its list of parameters",
            found=some_of(odd),
        )
    numbers = sorted(map(int, numbered))
    if numbers != [*range(len(numbers))] or len({*numbers}) != len(numbered):
        raise DamagedFileError(
            "a parameter group is missing",
            file=file,
            expected=f"groups 0 to {len(numbered) - 1}",
            found=", ".join(map(str, numbers)),
        )
    return tuple(
        GroupKeys({k: v for k, v in keys.items() if k != "params"}, keys["params"])
        for keys in (numbered[str(number)] for number in numbers)
    )


def _weights_prefix(
    weights: list[str], names: list[str], known: Collection[str], file: str
) -> tuple[str, tuple[str, ...]]:
    """What the keys of weights begin with, and other sets of weights that are left out: averages
    beside the model. Raises StateMismatchError where the weights of `names`, which an optimizer
    steps, are not there."""
    keys = {*weights}
    if names:
        first = names[0]
        ends = [key.removesuffix(first) for key in weights if key.endswith(first)]
        fitting = [p for p in ends if (not p or p[-1] == ".") and all(p + n in keys for n in names)]
        if not fitting:
            lost = [name for name in names if not any(key.endswith(name) for key in weights)]
            raise StateMismatchError(
                "the optimizer has states of parameters whose weights are not in the folder",
                file=file,
                parameter=some_of(lost or names),
                expected="the weights beside the states: Accelerate's pytorch_model_fsdp_0 beside "
                "optimizer_0, or one folder with both",
                found=some_of(weights) if weights else "no weights",
                fix="give the folder that holds both",
            )
    else:
        fitting = ["", *sorted({key[: at + 1] for key in weights for at in _dots(key)[:2]})]
        if known:
            counts = {p: sum(p + name in keys for name in known) for p in fitting}
            most = max(counts.values())
            fitting = [p for p, count in counts.items() if count == most > 0] or fitting
        own = [key for key in weights if not key.startswith(_BESIDE)]
        inside = [key.startswith((_MODEL, *(_averages(own)))) for key in own]
        if not known:
            fitting = [_MODEL] if own and all(inside) else [""]
    kept = [p for p in fitting if not _AVERAGES.fullmatch(p)] or fitting
    prefix = _MODEL if _MODEL in kept else min(kept, key=len)
    if len(kept) > 1 and prefix != _MODEL:
        raise UnsupportedError(
            "the folder holds several sets of weights with these names",
            file=file,
            expected="one, such as those below `model`",
            found=some_of(sorted(kept)),
            fix="save the model below `model`, and others elsewhere",
        )
    return prefix, tuple(sorted({*fitting} - {prefix}))


def _averages(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple({found[0] for key in keys if (found := _AVERAGES.match(key))})


def _dots(key: str) -> list[int]:
    return [at for at, char in enumerate(key) if char == "."]
