"""What a config.json that somebody gives for a model of transformers says of its tensors, as far as
any model's config does: the rows and the width of the table of tokens, how many layers there are,
and whether the head is the table of tokens. transformers leaves out layers that a config does not
count, with a warning, and draws a head that the files lack and the config does not tie."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.errors import ModelMismatchError

_TOKENS = re.compile(r"(.+\.)?(embed_tokens|wte|word_embeddings|embed_in)\.weight")
# as _TOKENS, with the names that other lists of rows have, too: they count where a head is tied
_TABLE = re.compile(
    r"(.+\.)?(embed_tokens|wte|word_embeddings|embed_in|shared|tok_embeddings|embeddings|"
    r"token_embedding|tokens_embed|embedding)\.weight"
)
_HEAD = re.compile(
    r"(.+\.)?(lm_head|embed_out|output_projection|proj_out|output_layer|lm_head\.decoder|"
    r"predictions\.decoder|decoder_head|generator_lm_head|output|head|lm_loss|pred_layer\.proj)"
    r"\.weight"
)
_TIED = "tie_word_embeddings"
_TEXT = re.compile(r".*(text|language|llm|decoder|thinker|talker).*")  # keys of configs of texts
_LAYER = re.compile(r"(.*?\b(?:layers|h))\.(\d+)\..+")
_WIDTH = ("hidden_size", "n_embd")
_LAYERS = ("num_hidden_layers", "n_layer")


def check_given(config: Mapping[str, Any], params: Mapping[str, ParamSpec], file: str) -> None:
    """Raises ModelMismatchError that lists every size which the tensors contradict. A model with
    several tables of tokens or lists of layers (an encoder and a decoder) has more than one answer,
    and is not asked."""
    found: dict[str, tuple[int, object]] = {}
    tables = [spec.shape for name, spec in params.items() if _TOKENS.fullmatch(name)]
    if len(tables) == 1 and len(tables[0]) == 2:
        found |= _said(config, ("vocab_size",), tables[0][0])
        # OPT's table may be narrower than the model
        if config.get("word_embed_proj_dim") is None:
            found |= _said(config, _WIDTH, tables[0][1])
    numbers: dict[str, set[int]] = {}
    for name in params:
        if layer := _LAYER.fullmatch(name):
            numbers.setdefault(layer[1], set()).add(int(layer[2]))
    if len(numbers) == 1:
        (of_layers,) = numbers.values()
        found |= _said(config, _LAYERS, max(of_layers) + 1)
    if wrong := {key: (here, said) for key, (here, said) in found.items() if here != said}:
        raise ModelMismatchError(
            "the config is of another model than the checkpoint",
            file=file,
            expected="; ".join(f"{key} {here}" for key, (here, _) in wrong.items()),
            found="; ".join(f"{key} {said}" for key, (_, said) in wrong.items()),
            fix="give the config.json of the model that was trained",
        )


def _said(
    config: Mapping[str, Any], keys: tuple[str, ...], here: int
) -> dict[str, tuple[int, object]]:
    """What a config says of a size that is `here` in the tensors, where it says anything."""
    return {key: (here, config[key]) for key in keys if type(config.get(key)) is int}


# ------------------------------------------------ the head


def is_tied(manifest: Manifest) -> bool | None:
    """Whether the head of a model is its table of tokens: one tensor under two names, or two
    tensors; None where there is no such head, or several tables."""
    heads, tables = set[str](), set[str]()
    for tie in manifest.ties:
        names = [tie.canonical, *tie.aliases]
        if any(map(_HEAD.fullmatch, names)) and any(map(_TABLE.fullmatch, names)):
            return True
    for spec in manifest.params:
        if len(spec.shape) == 2 and spec.kind != "buffer":
            heads |= {spec.name} if _HEAD.fullmatch(spec.name) else set()
            tables |= {spec.name} if _TABLE.fullmatch(spec.name) else set()
    rows = {manifest.by_name[name].shape for name in heads}
    fitting = [name for name in tables if manifest.by_name[name].shape in rows]
    return False if len(heads) == len(fitting) == 1 else None


def with_tie(config: Mapping[str, Any], manifest: Manifest) -> tuple[Mapping[str, Any], list[str]]:
    """The config with `tie_word_embeddings` as the tensors are, in it and in the configs of texts
    in it; a note where it said something else. Readers draw a head that they don't find where the
    config does not tie it, and drop a trained one where it does."""
    tied = is_tied(manifest)
    if tied is None:
        return config, []
    said = {place: value for place, value in _flags(config) if value is not tied}
    changed = _with_flag(config, tied)
    if not said:
        return changed, []
    what = (
        "the head is the table of tokens, one tensor"
        if tied
        else "the head and the table of tokens are two tensors"
    )
    places = ", ".join(said)
    return changed, [
        f"{places} is {str(tied).lower()} in the exported config.json, and was "
        f"{str(not tied).lower()}: {what}"
    ]


def _flags(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, bool]]:
    """What a config, and the configs of texts in it, say of the tie."""
    if isinstance(config.get(_TIED), bool):
        yield f"{place}{_TIED}", config[_TIED]
    for key in _texts(config):
        yield from _flags(config[key], f"{place}{key}.")


def _texts(config: Mapping[str, Any]) -> Collection[str]:
    return [key for key, value in config.items() if isinstance(value, dict) and _TEXT.match(key)]


def _with_flag(config: Mapping[str, Any], tied: bool, inner: bool = False) -> dict[str, Any]:
    """A config of a text in another one gets the flag only where it has it, or its class's default
    may be another one."""
    own = {} if inner and _TIED not in config and "vocab_size" not in config else {_TIED: tied}
    texts = {key: _with_flag(config[key], tied, inner=True) for key in _texts(config)}
    return {**config, **texts, **own}
