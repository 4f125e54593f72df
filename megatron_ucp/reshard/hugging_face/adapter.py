"""Low-rank adapters of Hugging Face's peft in a checkpoint: what peft's own files call them.

A model that peft wrapped names its parameters after the module and the adapter:
`base_model.model.layers.0.q_proj.lora_A.default.weight`. peft's files leave the adapter's name out,
and hold nothing of the base model but the modules that are trained as a whole.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.rules import LONGEST_NAME
from megatron_ucp.errors import (
    DamagedFileError,
    ModelMismatchError,
    UnsupportedError,
    some_of,
)
from megatron_ucp.formats.patterns import problem_of

PREFIX = "base_model.model."  # peft's wrappers, before the names of the base model
FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_MAGNITUDE = "lora_magnitude_vector"  # of DoRA; its file's name has no ".weight"
_PART = re.compile(
    rf"(?P<module>.+)\.(?P<part>{'|'.join(FACTORS)}|{_MAGNITUDE})\.(?P<adapter>[^.]+)"
    r"(?P<rest>\.weight|\.bias)?"
)
_WHOLE = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
# What peft put around a base model's own parameters.
_WRAPPED = re.compile(r"(?P<module>.+)\.(base_layer|original_module)\.(?P<rest>[^.]+)")


@dataclass
class Adapter:
    """One adapter. All names of parameters are those of the checkpoint.

    `files`: parameter -> its name in peft's file. `factors`: module of the base model -> part, such
    as lora_A -> parameter. `whole`: tensor of the base model -> the trained parameter that takes
    its place. `base`: parameter that was not trained -> tensor of the base model.
    """

    name: str = ""
    files: dict[str, str] = field(default_factory=dict[str, str])
    factors: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    whole: dict[str, str] = field(default_factory=dict[str, str])
    base: dict[str, str] = field(default_factory=dict[str, str])


def adapter_of(manifest: Manifest, file: str) -> Adapter | None:
    """The adapter that a checkpoint holds; None where peft did not wrap the model.

    Raises UnsupportedError for several adapters, and for one that is not of low rank.
    """
    kinds = {spec.name: spec.kind for spec in manifest.params}
    if not any(name.startswith(PREFIX) for name in kinds):
        return None  # other implementations of adapters: names are what they are
    if not any(map(_PART.fullmatch, kinds)):
        raise _unsupported("the model has an adapter that is not of low rank", kinds, file)
    found, names, unknown = Adapter(), set[str](), list[str]()
    for name, kind in kinds.items():
        if match := _PART.fullmatch(name) or _WHOLE.fullmatch(name):
            names.add(match["adapter"])
            _add(found, name, match)
        elif kind == "trainable" and not name.endswith(".bias"):
            unknown.append(name)
        else:
            _add_base(found, name, kind)
    if unknown:
        raise _unsupported("peft's files have no place for what was trained", unknown, file)
    if len(names) > 1:
        raise _unsupported("the checkpoint holds several adapters", sorted(names), file)
    (found.name,) = names
    return found


def _add(found: Adapter, name: str, match: re.Match[str]) -> None:
    """A parameter of the adapter's own."""
    module, rest = match["module"], match["rest"] or ""
    inside = module.removeprefix(PREFIX)
    if "part" not in match.re.groupindex:
        found.files[name] = f"{module}.{rest}"
        found.whole[f"{inside}.{rest}"] = name
        return
    part = match["part"]
    found.files[name] = f"{module}.{part}{'' if part == _MAGNITUDE else rest}"
    found.factors.setdefault(inside, {})[part + (".bias" if rest == ".bias" else "")] = name


def tensor_of(name: str) -> str:
    """The tensor of the base model that a parameter is, or takes the place of."""
    match = _WRAPPED.fullmatch(name) or _WHOLE.fullmatch(name)
    return (f"{match['module']}.{match['rest']}" if match else name).removeprefix(PREFIX)


def _add_base(found: Adapter, name: str, kind: str) -> None:
    """A parameter or buffer of the base model: frozen, or a bias that is trained too."""
    own = tensor_of(name)
    if kind == "trainable":
        found.files[name], found.whole[own] = name, name
    else:
        found.base[name] = own


def _unsupported(problem: str, names: Iterable[str], file: str) -> UnsupportedError:
    listed = [*names]
    return UnsupportedError(
        problem,
        file=file,
        expected="one adapter of low rank (lora_A, lora_B), and modules_to_save",
        found=some_of(listed),
        fix="write it with peft's own save_pretrained",
    )


def check_adapter_config(
    adapter: Adapter, manifest: Manifest, config: Mapping[str, Any], file: str
) -> None:
    """Raises ModelMismatchError where an adapter_config.json is of another adapter,
    DamagedFileError for one that says no ranks."""
    patterns: Any = config.get("rank_pattern") or {}
    said = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else [patterns])]
    if not all(isinstance(rank, int) for rank in said):
        raise _no_number("rank", file, f"r {config.get('r')!r}, rank_pattern {patterns!r}")
    found = {
        manifest.by_name[param].shape[0]
        for parts in adapter.factors.values()
        for part, param in parts.items()
        if part in ("lora_A", "lora_embedding_A")
    }
    if config.get("peft_type") != "LORA" or not found <= {*said}:
        raise ModelMismatchError(
            "the config is of another adapter than the checkpoint's",
            file=file,
            expected=f"LORA of rank {', '.join(map(str, sorted(found)))}",
            found=f"{config.get('peft_type')} of rank {config.get('r')}",
            fix="give the adapter_config.json of the run",
        )


def scale_of(config: Mapping[str, Any], module: str, rank: int, file: str) -> float:
    """What the product of the factors is multiplied with: alpha / rank, or alpha / sqrt(rank) for
    rank-stabilised adapters (arXiv:2312.03732). `alpha_pattern` has regular expressions for the
    ends of modules' names. Raises DamagedFileError for what is no such config."""
    alpha: Any = config.get("lora_alpha")
    patterns: Any = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise _no_number("scale", file, f"alpha_pattern {patterns!r}")
    for pattern, value in patterns.items():
        if _is_end_of(module, pattern, file):
            alpha = value
            break
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise _no_number("scale", file, f"lora_alpha {alpha!r}")
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _is_end_of(module: str, pattern: Any, file: str) -> bool:
    """Whether a pattern matches a module's name, or what follows one of its dots. Raises
    DamagedFileError for a pattern that is none, or that might be matched for ever."""
    problem = problem_of(pattern) if isinstance(pattern, str) else "no text"
    if problem or len(module) > LONGEST_NAME:
        problem = problem or f"{module[:80]}... is too long to match"
        raise _no_number("scale", file, f"alpha_pattern {pattern!r}: {problem}")
    starts = (0, *(dot.end() for dot in re.finditer(r"\.", module)))
    return any(re.compile(pattern).fullmatch(module, start) for start in starts)


def _no_number(what: str, file: str, found: str) -> DamagedFileError:
    return DamagedFileError(
        f"adapter_config.json does not say the adapter's {what}",
        file=file,
        expected="numbers for r and lora_alpha; rank_pattern and alpha_pattern as tables",
        found=found[:200],
        fix="give the adapter_config.json of the run",
    )
