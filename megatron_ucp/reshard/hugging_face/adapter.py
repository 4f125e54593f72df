"""Adapters of Hugging Face's peft in a checkpoint: what peft's own files call them.

A model that peft wrapped names its parameters after the module and the adapter:
`base_model.model.layers.0.q_proj.lora_A.default.weight`. peft's files leave the adapter's name out,
and hold nothing of the base model but what peft itself put there: modules that are trained as a
whole, trained biases, a table of tokens that has an adapter. What else was trained has no place in
them, and is named.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.errors import DamagedFileError, ModelMismatchError, UnsupportedError, some_of

PREFIX = "base_model.model."  # peft's wrappers, before the names of the base model
FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
_MAGNITUDE = "lora_magnitude_vector"  # of DoRA; its file's name has no ".weight"
_TOKENS = "trainable_tokens_delta"
_PART = re.compile(
    rf"(?P<module>.+)\.(?P<part>{'|'.join(FACTORS)}|{_MAGNITUDE}|{_TOKENS})\.(?P<adapter>[^.]+)"
    r"(?P<rest>\.weight|\.bias)?"
)
# Of AdaLoRA, whose factors have the names of LoRA's, and of prompts that are trained.
_OTHER_KINDS = re.compile(r".+\.lora_E\..+|prompt_encoder\..+")
_WHOLE = re.compile(r"(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<rest>.+)")
# What peft put around a base model's own parameters.
_WRAPPED = re.compile(r"(?P<module>.+)\.(base_layer|original_module)\.(?P<rest>[^.]+)")
# Tables of tokens that peft's files hold as they are, frozen, where an adapter is on them.
_TABLES = re.compile(r"(.+\.)?(embed_tokens|lm_head)")


@dataclass
class Adapter:
    """One adapter. All names of parameters are those of the checkpoint.

    `files`: parameter -> its name in peft's file. `factors`: module of the base model -> part, such
    as lora_A -> parameter. `whole`: tensor of the base model -> the trained parameter that takes
    its place. `base`: parameter that was not trained -> tensor of the base model. `biases` are
    trained ones of the base model, which are in peft's file where its config says so; `beside` are
    trained parameters for which peft's files have no place; `tables` are frozen tables of tokens
    that peft adds to its files, and that were not saved.
    """

    name: str = ""
    files: dict[str, str] = field(default_factory=dict[str, str])
    factors: dict[str, dict[str, str]] = field(default_factory=dict[str, dict[str, str]])
    whole: dict[str, str] = field(default_factory=dict[str, str])
    base: dict[str, str] = field(default_factory=dict[str, str])
    biases: list[str] = field(default_factory=list[str])
    beside: list[str] = field(default_factory=list[str])
    tables: list[str] = field(default_factory=list[str])

    def left_out(self, config: Mapping[str, Any] | None) -> list[str]:
        """What was trained and is not in peft's file of this config."""
        said = "none" if config is None else config.get("bias", "none")
        return [*self.beside, *(self.biases if said == "none" and config is not None else [])]


def adapter_of(manifest: Manifest, file: str) -> Adapter | None:
    """The adapter that a checkpoint holds; None where peft did not wrap the model.

    Raises UnsupportedError for several adapters, and for one of another kind than LoRA and DoRA;
    ModelMismatchError for one of which a part was not saved.
    """
    kinds = {spec.name: spec.kind for spec in manifest.params}
    others = [name for name in kinds if _OTHER_KINDS.fullmatch(name)]
    if not others and not any(name.startswith(PREFIX) for name in kinds):
        return None  # other implementations of adapters: names are what they are
    parts = {match["part"] for match in map(_PART.fullmatch, kinds) if match}
    if others or not parts - {_TOKENS}:
        raise _unsupported("the adapter is neither LoRA nor DoRA", others or kinds, file)
    found, names = Adapter(), set[str]()
    for name, kind in kinds.items():
        if match := _PART.fullmatch(name) or _WHOLE.fullmatch(name):
            names.add(match["adapter"])
            _add(found, name, match)
        elif kind == "trainable":
            _add_trained(found, name)
        else:
            found.base[name] = tensor_of(name)
    if len(names) > 1:
        raise _unsupported("the checkpoint holds several adapters", sorted(names), file)
    (found.name,) = names
    _require_all(found, file)
    _add_tables(found, kinds)
    return found


def _add_tables(found: Adapter, kinds: Mapping[str, str]) -> None:
    """peft's files hold a table of tokens, frozen, beside the factors that are on it; not where
    single rows of tokens are trained."""
    if any(_TOKENS in parts for parts in found.factors.values()):
        return
    for module in found.factors:
        table = f"{PREFIX}{module}.base_layer.weight"
        if _TABLES.fullmatch(module) and table in kinds:
            found.files[table] = table
        elif _TABLES.fullmatch(module):
            found.tables.append(table)


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


def _add_trained(found: Adapter, name: str) -> None:
    """A parameter of the base model that was trained beside the adapter: a bias, which peft's files
    have where the config says so, or anything that was set to be trained by hand."""
    found.whole[tensor_of(name)] = name
    if name.endswith(".bias"):
        found.files[name] = name
        found.biases.append(name)
    else:
        found.beside.append(name)


def _require_all(found: Adapter, file: str) -> None:
    """Raises ModelMismatchError where a factor of a pair is missing: a save without frozen
    parameters leaves out one that is not trained."""
    for module, parts in found.factors.items():
        for pair in (FACTORS[:2], FACTORS[2:]):
            if len({*pair} & {*parts}) == 1:
                (lost,) = {*pair} - {*parts}
                raise ModelMismatchError(
                    "a part of the adapter is not in the checkpoint",
                    file=file,
                    parameter=f"{PREFIX}{module}.{lost}",
                    expected=" and ".join(pair),
                    found=", ".join(sorted(parts)),
                    fix="save with exclude_frozen_parameters=False: what is not trained is left "
                    "out otherwise; or write it with peft's own save_pretrained",
                )


def _unsupported(problem: str, names: Iterable[str], file: str) -> UnsupportedError:
    listed = [*names]
    return UnsupportedError(
        problem,
        file=file,
        expected="one adapter, LoRA or DoRA",
        found=some_of(listed),
        fix="write it with peft's own save_pretrained",
    )


def check_adapter_config(
    adapter: Adapter, manifest: Manifest, config: Mapping[str, Any], file: str
) -> None:
    """Raises ModelMismatchError where an adapter_config.json is of another adapter,
    DamagedFileError for one that says no ranks."""
    patterns: Any = config.get("rank_pattern") or {}
    kind = config.get("peft_type")
    said = [config.get("r"), *(patterns.values() if isinstance(patterns, dict) else [patterns])]
    if kind == "LORA" and not all(isinstance(rank, int) for rank in said):
        raise _no_number("rank", file, f"r {config.get('r')!r}, rank_pattern {patterns!r}")
    found = {
        manifest.by_name[param].shape[0]
        for parts in adapter.factors.values()
        for part, param in parts.items()
        if part in ("lora_A", "lora_embedding_A")
    }
    if kind != "LORA" or not _are_ranks(found, {*said}, config):
        raise ModelMismatchError(
            "the config is of another adapter than the checkpoint's",
            file=file,
            expected=f"LORA of rank {', '.join(map(str, sorted(found)))}",
            found=f"{kind} of rank {config.get('r')}",
            fix="give the adapter_config.json of the run",
        )


def _are_ranks(found: set[int], said: set[Any], config: Mapping[str, Any]) -> bool:
    """Whether the ranks of factors are those of a config. A factor of a parameter of experts
    (target_parameters) has as many rows for each expert."""
    if not config.get("target_parameters"):
        return found <= said
    return all(any(rows % rank == 0 for rank in said if rank) for rows in found)


def _no_number(what: str, file: str, found: str) -> DamagedFileError:
    return DamagedFileError(
        f"adapter_config.json does not say the adapter's {what}",
        file=file,
        expected="numbers for r and lora_alpha; rank_pattern and alpha_pattern as tables",
        found=found[:200],
        fix="give the adapter_config.json of the run",
    )
