"""What differs: files from the truth, and one folder from another."""

from pathlib import Path
from typing import Any

import torch

from megatron_ucp.formats.deepspeed.target import Target
from tests.reshard.paper.model import Model
from tests.reshard.paper.reader import Held, held_by, read, same


def problems(trees: dict[str, Any], model: Model, target: Target) -> list[str]:
    """What differs from the truth, bitwise."""
    found = held_by(trees, model, target)
    out, seen = list(found.problems), 0
    for name, kind in model.kinds.items():
        states = _states(model, target, kind)
        seen += len(states)
        out += [wrong for state in states if (wrong := _wrong(found, model, target, name, state))]
        if kind == "trainable" and target.mesh.zero < 3:
            if not same(found.full[name, "value"], _low(model.truth(name), target)):
                out.append(f"weight of {name}")
    return [*out, *_wrong_numbers(found, model)] if seen else ["nothing was compared"]


def _states(model: Model, target: Target, kind: str) -> tuple[str, ...]:
    if kind == "trainable":
        return ("fp32", *model.states)
    twice = kind == "frozen" and target.mesh.zero == 2
    return ("value", "second") if twice else ("value",)


def _wrong(found: Held, model: Model, target: Target, name: str, state: str) -> str:
    truth, have = model.truth(name, state), found.full.get((name, state))
    if model.kinds[name] == "frozen":
        truth = _low(truth, target)
    if have is None:
        return f"{state} of {name}: missing"
    return "" if same(have, truth) else f"{state} of {name}: another"


def _low(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    """In the dtype of the training copies."""
    return tensor.to(getattr(torch, str(target.dtype)))


def _wrong_numbers(found: Held, model: Model) -> list[str]:
    out = []
    for settings, step, names in model.groups:
        for what, known, want in (
            ("step", found.steps, step.get("step")),
            ("settings", found.settings, settings),
        ):
            out += [f"{what} of {n}: {known.get(n)}" for n in names if known.get(n) != want]
    return out


def differences(one: Path, other: Path) -> list[str]:
    """Between two folders, file by file and value by value. A config says how its own run got
    there: it is left out."""
    trees = [read(folder) for folder in (one, other)]
    return _compared(*trees, "")


def _compared(one: Any, other: Any, path: str) -> list[str]:
    if type(one) is not type(other):
        return [f"{path}: {type(one)} and {type(other)}"]
    differ = [f"{path}: {one} and {other}"]
    if isinstance(one, torch.Tensor):
        return [] if same(one, other) else differ
    if isinstance(one, dict):
        return _compared_dicts(one, other, path)
    if path.endswith("buffer_names"):
        one, other = sorted(one), sorted(other)
    if isinstance(one, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [d for n, (a, b) in pairs for d in _compared(a, b, f"{path}.{n}")]
    if hasattr(one, "__dict__") and not isinstance(one, type):
        return _compared(vars(one), vars(other), path)
    return [] if one == other else differ


def _compared_dicts(one: dict[Any, Any], other: dict[Any, Any], path: str) -> list[str]:
    ordered = path.rpartition("param_shapes")[2].strip(".").isdigit()
    if set(one) != set(other) or (ordered and list(one) != list(other)):
        return [f"{path}: {list(one)} and {list(other)}"]
    keys = [key for key in one if key != "ds_config"]
    return [d for key in keys for d in _compared(one[key], other[key], f"{path}.{key}")]
