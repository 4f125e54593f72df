"""megatron-core's BERT and T5 of its own layers, and how a batch goes through a model on a CPU."""

from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from pretrain.mcore import chunks, models


def bert(
    config: Any, words: int, positions: int, ends: Mapping[str, bool], number: int | None
) -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        config,
        0,
        bert_layer_local_spec,
        words,
        positions,
        add_binary_head=False,
        vp_stage=number,
        **ends,
    )


def t5(config: Any, words: int, positions: int, ends: Mapping[str, bool]) -> Any:
    """As many layers encode as decode."""
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    with mock.patch.object(t5_spec, "LNImpl", WrappedTorchNorm):
        specs = t5_spec.encoder_model_with_local_spec(), t5_spec.decoder_model_with_local_spec()
    halves = [
        TransformerBlockSubmodules([spec] * config.num_layers, layer_norm=WrappedTorchNorm)
        for spec in specs
    ]
    return T5Model(config, config, *halves, words, positions, **ends)


def losses_of(kind: str, model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
    """The loss of each token."""
    length = tokens.shape[1]
    if kind == "bert":
        out = model(tokens, torch.ones(tokens.shape, dtype=torch.long), lm_labels=labels)
        return out[0] if isinstance(out, tuple) else out
    if kind == "t5":
        later = models.not_attended(length, tokens.device)
        nothing = torch.zeros_like(later)
        return model(tokens.flip(1), tokens, nothing, later, nothing, lm_labels=labels)
    places = torch.arange(length).expand_as(tokens)
    return model(tokens, places, models.not_attended(length, tokens.device), labels=labels)


@contextmanager
def forward_of(kind: str) -> Any:
    """Inside, a batch goes through the model of megatron-core's own stack as it asks for."""

    def step(data: Any, model: Any) -> Any:
        tokens, labels = next(data)

        def mean(each: Any) -> Any:
            loss = each.float().mean()
            return loss, {"loss": loss.detach().clone()}

        return losses_of(kind, model, tokens, labels), mean

    stock = chunks._forward_step
    with (
        mock.patch.object(chunks, "_forward_step", step if kind in ("bert", "t5") else stock),
        windows_on_cpu(),
    ):
        yield


@contextmanager
def windows_on_cpu() -> Any:
    """megatron-core makes the mask of a sliding window on a GPU, whatever it is for."""
    from megatron.core.fusions import fused_softmax

    def mask(rows: int, columns: int, window: tuple[int, int]) -> torch.Tensor:
        seen = torch.ones(rows, columns, dtype=torch.bool)
        before, after = columns - rows - window[0], columns - rows + window[1]
        return ~seen.triu(before).tril(after)

    with mock.patch.object(fused_softmax, "get_sliding_window_causal_mask", mask):
        yield
