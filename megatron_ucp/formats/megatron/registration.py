"""The order in which a model of megatron-core registers its parameters: it decides where each of
them lies in the optimizer's buffers.

An order is a list of templates: names with "#" in the place of the numbers of layers and experts.

    embedding.word_embeddings.weight
    decoder.layers.#.input_layernorm.weight
    decoder.layers.#.mlp.experts.local_experts.#.linear_fc1.weight
    output_layer.weight

A live model says its own order (`order_of`). Where there is none, the orders of megatron-core's
modules are tried, which stand here: attributes in the order of `__init__` (0.16.1 to 0.19.2).
"""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_EXPERTS = "local_experts.#"
_HEAD = "output_layer.weight"


@dataclass(frozen=True)
class RegistrationOrder:
    """`by_expert`: whether one expert follows the other (SequentialMLP), or one matrix of all
    experts the other (TEGroupedMLP)."""

    templates: tuple[str, ...]
    by_expert: bool = True

    @cached_property
    def _first(self) -> dict[str, int]:
        """The place of each template, and of the first one behind each beginning up to a "#"."""
        out: dict[str, int] = {}
        for place, template in enumerate(self.templates):
            out[template] = place
            for found in re.finditer("#", template):
                out.setdefault(template[: found.end()], place)
        return out

    def key(self, name: str) -> tuple[int, ...] | None:
        """What to sort names by; None for a name that the order does not have.

        A list of layers counts as one place, in which its layers follow each other by number.
        """
        template, numbers = _template(name), [int(one) for one in _NUMBER.findall(name)]
        if template not in self._first:
            return None
        out: list[int] = []
        behind: list[int] = []
        for found, number in zip(re.finditer("#", template), numbers, strict=True):
            before = template[: found.end()]
            out.append(self._first[before])
            (behind if before.endswith(_EXPERTS) and not self.by_expert else out).append(number)
        return (*out, self._first[template], *behind)


def order_of(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """The templates of a model of which each rank has some names, in the order in which it
    registered them; ranks of earlier pipeline stages come first."""
    merged: list[str] = []
    for own in names:
        at = 0  # behind the template before
        for template in map(_template, own):
            if template in merged:
                at = merged.index(template) + 1
            else:
                merged.insert(at, template)
                at += 1
    return tuple(merged)


@functools.lru_cache(100_000)
def _template(name: str) -> str:
    return _NUMBER.sub("#", name)


# ------------------------------------------------ of megatron-core's modules


def _with_biases(*modules: str) -> Iterator[str]:
    for module in modules:
        yield from (f"{module}.weight", f"{module}.bias")


_NORM = tuple(_with_biases("input_layernorm"))
_IN_FRONT = ("self_attention.core_attention.softmax_offset",)
_PROJ = tuple(_with_biases("self_attention.linear_proj"))
_QKV = (
    *_with_biases("self_attention.linear_qkv"),
    *_with_biases("self_attention.q_layernorm", "self_attention.k_layernorm"),
)
# Multi-head latent attention. Transformer Engine's up projections have the norm in front of them.
_LATENT = (
    *_with_biases("self_attention.linear_q_proj", "self_attention.linear_qkv_down_proj"),
    *_with_biases("self_attention.linear_q_down_proj"),
    "self_attention.linear_q_up_proj.layer_norm_weight",
    *_with_biases("self_attention.linear_q_up_proj", "self_attention.linear_kv_down_proj"),
    "self_attention.linear_kv_up_proj.layer_norm_weight",
    *_with_biases("self_attention.linear_kv_up_proj"),
    *_with_biases("self_attention.q_layernorm", "self_attention.kv_layernorm"),
)
_MLP = (
    *_with_biases("pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2", "mlp.router"),
    *_with_biases("mlp.fc1_latent_proj", "mlp.fc2_latent_proj"),
    *_with_biases(f"mlp.experts.{_EXPERTS}.linear_fc1", f"mlp.experts.{_EXPERTS}.linear_fc2"),
    "mlp.shared_experts.gate_weight",
    *_with_biases("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"),
)
# A Mamba layer of a hybrid model: the mixer's own parameters, then those of its modules. Its
# convolution was a module until 0.18.
_OWN = ("mixer.dt_bias", "mixer.A_log", "mixer.D")
_CONVOLUTION = tuple(_with_biases("mixer.conv1d"))
_PROJECTION = (
    *("mixer.in_proj.layer_norm_weight", "mixer.in_proj.layer_norm_bias"),
    *_with_biases("mixer.in_proj"),
)
_BEHIND = tuple(_with_biases("mixer.norm", "mixer.out_proj", "norm"))
_MAMBAS = (
    (*_OWN, *_PROJECTION, *_CONVOLUTION, *_BEHIND),
    (*_CONVOLUTION, *_OWN, *_PROJECTION, *_BEHIND),
)
# Transformer Engine's layers have the norm in front of a matrix as the matrix's own parameter.
_ATTENTIONS = (
    (*_NORM, *_IN_FRONT, *_PROJ, *_QKV),
    (*_IN_FRONT, *_PROJ, *_NORM, *_QKV),
    (*_NORM, *_IN_FRONT, *_PROJ, *_LATENT),
)


def _model(attention: Sequence[str], mamba: Sequence[str]) -> tuple[str, ...]:
    layer = (*attention, *_MLP, *mamba)
    predicts = "mtp.layers.#"
    return (
        *("embedding.word_embeddings.weight", "embedding.position_embeddings.weight"),
        *(f"decoder.layers.#.{one}" for one in layer),
        *_with_biases("decoder.final_layernorm", "decoder.final_norm"),
        *(f"{predicts}.{one}" for one in _with_biases("enorm", "hnorm", "eh_proj")),
        *(f"{predicts}.transformer_layer.{one}" for one in layer),
        *(f"{predicts}.mtp_model_layer.layers.#.{one}" for one in layer),
        *(f"{predicts}.{one}" for one in _with_biases("final_layernorm")),
        *_with_biases("output_layer"),
    )


_MODELS = tuple(_model(attention, mamba) for mamba in _MAMBAS for attention in _ATTENTIONS)


def orders_to_try(live: Sequence[str], names: Iterable[str]) -> Iterator[RegistrationOrder]:
    """Each order that a model with these parameters could have, once: that of the caller's `live`
    model, where there is one, then those of megatron-core's modules. Experts may follow each other
    one by one, or matrix by matrix. A live model whose head is tied to its embedding has no name
    for it; the head is the last that is registered."""
    present = {*map(_template, names)}
    own = [(*(one for one in live if one != _HEAD), _HEAD)] if live else []
    seen: set[tuple[str, ...]] = set()
    for templates in (*own, *_MODELS):
        found = tuple(one for one in templates if one in present or one == _HEAD)
        if found in seen or not present <= {*found}:
            continue
        seen.add(found)
        yield RegistrationOrder(found)
        if any(_EXPERTS in one for one in found):
            yield RegistrationOrder(found, by_expert=False)
