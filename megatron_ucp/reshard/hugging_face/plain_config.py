"""What a config.json that somebody gives for a model of transformers says of its tensors, as far as
any model's config does: the rows and the width of the table of tokens, and how many layers there
are. transformers leaves out layers that a config does not count, with a warning."""

import re
from collections.abc import Mapping
from typing import Any

from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.errors import ModelMismatchError

_TOKENS = re.compile(r"(.+\.)?(embed_tokens|wte|word_embeddings|embed_in)\.weight")
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
