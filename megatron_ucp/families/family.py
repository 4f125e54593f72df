"""What a family is: a table of every parameter with its whole shape and its cut, and all else
that a model of the family needs to be built, trained and planned."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.layout import Extent, Layout, Replicate, Shard, ShardNC
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.rules import RuleSet
from megatron_ucp.errors import LayoutError, RuleError, UsageError
from megatron_ucp.families.settings import Sizes  # by this name for families of others
from megatron_ucp.families.twin import HuggingFace

# ---- base
#
# What a family is: a table of every parameter of a model with its whole shape and its cut, and
# all else that a model of the family needs to be built, trained and planned.


@dataclass(frozen=True)
class Declared:
    """One parameter as its family declares it.

    `shape` is the whole one, `layout` its cut, `attributes` are those that the live parameter must
    carry, `extent` says how many rows of a padded vocabulary are data, `expert` of which expert
    it is a part (see `ParamSpec`). `init` is how a builder
    draws the first values: N(0, std), for a projection that ends in the residual stream
    N(0, std / sqrt(2 layers)), or a constant. `summed`: every tensor-parallel rank has it whole,
    and computes a part of its gradient. `buffer`: it is none of the module's parameters, but a
    buffer in fp32 that no optimizer steps.
    """

    shape: Ints
    layout: Layout
    attributes: Mapping[str, object] = field(default_factory=dict[str, object])
    extent: Extent | None = None
    expert: tuple[int, int] | None = None
    init: Literal["normal", "residual", "ones", "zeros"] = "normal"
    summed: bool = False
    buffer: bool = False

    def spec(self, name: str, dtype: str, kind: str = "trainable") -> ParamSpec:
        """As a manifest lists it; a buffer's dtype and kind are its own."""
        if self.buffer:
            dtype, kind = "float32", "buffer"
        return ParamSpec(
            name, self.shape, dtype, kind, self.layout, self.extent, expert=self.expert
        )


def column(rows: int, *rest: int) -> Declared:
    """Cut on dim 0, as megatron-core's ColumnParallelLinear is."""
    return Declared(
        (rows, *rest),
        Shard("tp", 0),
        {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1},
    )


def vocabulary(sizes: Sizes, *rest: int) -> Declared:
    """Cut on dim 0, as megatron-core's VocabParallelEmbedding is; of its `vocab` rows the first
    `true_vocab` are data. Raises UsageError where these are more."""
    if not 0 < sizes.true_vocab <= sizes.vocab:
        raise UsageError(
            "the padded vocabulary is smaller than the tokenizer's",
            expected=f"at least {sizes.true_vocab}",
            found=sizes.vocab,
            fix="give at least as many padded rows as the tokenizer has",
        )
    return replace(column(sizes.vocab, *rest), extent=Extent(sizes.true_vocab, sizes.vocab))


def gated(half: int, *rest: int, axis: str = "tp") -> Declared:
    """Gate and up, one above the other, each cut on dim 0."""
    return Declared(
        (2 * half, *rest),
        ShardNC(axis, 0, (half, half)),
        {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2},
    )


def row(rows: int, columns: int, axis: str = "tp") -> Declared:
    """Cut on dim 1, as RowParallelLinear is; both of a layer end in the residual stream."""
    return Declared(
        (rows, columns),
        Shard(axis, 1),
        {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 1},
        init="residual",
    )


def whole(*shape: int) -> Declared:
    """On every rank of the tensor-parallel group with the same bits."""
    return Declared(shape, Replicate(), {"tensor_model_parallel": False})


def norm(width: int) -> Declared:
    """The weight of a LayerNorm or RMSNorm."""
    return replace(whole(width), init="ones")


def bias(of: Declared) -> Declared:
    """A bias is drawn as 0, however it is cut."""
    return replace(of, init="zeros")


@dataclass(frozen=True)
class Builder:
    """How megatron-core's own modules make a model of the family, in megatron-core's words.
    `experts`: layers may have experts instead of an MLP; `qkv_biases`, `qk_norms` as in `Sizes`."""

    normalization: Literal["LayerNorm", "RMSNorm"]
    gated: bool
    biases: bool
    position_embedding_type: Literal["learned_absolute", "rope"]
    experts: bool = False
    qkv_biases: bool = False
    qk_norms: bool = False

    @property
    def learned_positions(self) -> bool:
        return self.position_embedding_type == "learned_absolute"

    @property
    def flags(self) -> dict[str, bool]:
        """The fields of `Sizes` that follow."""
        return {
            "gated": self.gated,
            "biases": self.biases,
            "norm_biases": self.normalization == "LayerNorm",
            "qkv_biases": self.qkv_biases,
            "qk_norms": self.qk_norms,
        }

    def check(self, sizes: Sizes, name: str) -> None:
        """Raises UsageError for sizes of a model that this does not build; `name` is the
        family's."""
        own = {field: getattr(sizes, field) for field in self.flags}
        if own != self.flags or (sizes.positions and not self.learned_positions):
            raise UsageError(
                f"these sizes are no {name}",
                expected=", ".join(f"{field}={value}" for field, value in self.flags.items()),
                found=str(sizes),
                fix="give the family that the model was built with",
            )


@dataclass(frozen=True)
class Divided:
    """A size that tensor parallelism cuts, under the name that an error gives it. Where it is
    `shared`, there may be more ranks than it has: several ranks then use one (key-value groups)."""

    what: str
    size: int
    shared: bool = False

    def check(self, tp: int) -> None:
        """Raises LayoutError, naming the tensor-parallel sizes that work."""
        if not self.size % tp or (self.shared and not tp % self.size):
            return
        if self.shared:
            raise LayoutError(
                f"{self.what} and the tensor-parallel size do not divide each other",
                expected=f"a multiple or a divisor of {self.size}",
                found=tp,
                fix=f"use a tensor-parallel size that is a multiple or a divisor of {self.size}",
                id="does-not-divide",
            )
        works = [n for n in range(1, self.size + 1) if not self.size % n and n <= 64]
        raise LayoutError(
            f"the tensor-parallel size does not divide {self.what}",
            expected=f"a divisor of {self.size}",
            found=tp,
            fix=f"use a tensor-parallel size of {', '.join(map(str, works))}",
            id="does-not-divide",
        )


def dense(sizes: Sizes) -> tuple[Divided, ...]:
    """What tensor parallelism cuts of a transformer without experts."""
    return (
        Divided("attention heads", sizes.heads),
        Divided("the padded vocabulary", sizes.vocab),
        Divided("ffn_hidden_size", sizes.ffn),
        Divided("key-value groups", sizes.groups, shared=True),
    )


# Functions of a family take the sizes of its own class, hence Any.
@dataclass(frozen=True)
class Family:
    """All that a family of models decides; registering it makes it known everywhere.

    - `table(sizes)` lists every parameter by canonical name (global layer numbers); `source` is the
      file to edit.
    - `pipe(sizes)` maps the names in a DeepSpeed pipeline to canonical ones, `layers(names)` gives
      the pipeline's layers for a model with these parameters (None: the family has no pipeline).
    - `divided(sizes)` lists the sizes that a tensor-parallel size must divide.
    - `builder` lets `engines/megatron` build the model, and the pretraining program train it (None:
      somebody else builds it). `defaults` are that program's defaults, by attribute.
    - `paper` are sizes of a model that exists on paper only and is told no others.
    - `sizes` is the class of the sizes; `measure(module)` takes them from a live module (None: from
      the config of a megatron-core GPTModel).
    - `hugging_face` is the family's twin there (None: it has none).
    - `rules` are those of a user's file that the family stands for.
    - `fitted(sizes, names)` are sizes that a config says as a model with parameters of these names
      has them, where its modules may be of several kinds.
    """

    name: str
    table: Callable[[Any], dict[str, Declared]]
    source: str
    pipe: Callable[[Any], dict[str, str]] | None = None
    layers: Callable[[Collection[str]], Layers] | None = None
    divided: Callable[[Any], tuple[Divided, ...]] = dense
    builder: Builder | None = None
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    paper: Mapping[str, int] = field(default_factory=dict[str, int])
    sizes: type[Sizes] = Sizes
    measure: Callable[[Any], Sizes] | None = None
    hugging_face: HuggingFace | None = None
    rules: RuleSet | None = None
    fitted: Callable[[Any, Collection[str]], Any] = lambda sizes, _: sizes


@dataclass(frozen=True)
class Model:
    """A family at certain sizes (of a class of the family's own)."""

    family: Family
    sizes: Any

    @cached_property
    def table(self) -> dict[str, Declared]:
        return self.family.table(self.sizes)

    @cached_property
    def pipe(self) -> dict[str, str]:
        """Name in a DeepSpeed pipeline -> canonical name; empty for a family without one."""
        return self.family.pipe(self.sizes) if self.family.pipe else {}

    def find(self, name: str) -> Declared:
        """The declaration of a parameter. Raises RuleError that names the nearest one and the file
        to edit."""
        if name in self.table:
            return self.table[name]
        import difflib

        shape = re.sub(r"\d+", "{N}", name)
        near = difflib.get_close_matches(
            shape, {re.sub(r"\d+", "{N}", known) for known in self.table}, n=1, cutoff=0.0
        )
        raise RuleError(
            f"the family {self.family.name} has no rule for a parameter",
            file=self.family.source,
            parameter=name,
            expected="one rule",
            found=f"none; the nearest is {near[0] if near else 'none'}",
            fix=f"check that the model is a {self.family.name}, or add a rule to "
            f"{self.family.source}",
        )

    def check_cut(self, tp: int) -> None:
        """Raises LayoutError, naming the sizes that work, where a tensor-parallel size does not
        divide the model."""
        for divided in self.family.divided(self.sizes):
            divided.check(tp)


# ---- measure
#
# Sizes of a live model, from its own config.


TRUE_VOCAB = "ucp_true_vocab"  # of a model: the rows of its vocabulary that are data


def measured(module: Any) -> Sizes:
    """Sizes of a megatron-core GPTModel, or of a PipelineModule with the same attributes, from its
    own config. Raises UsageError for another module."""
    config: Any = getattr(module, "config", None)
    missing = [
        name
        for name in ("num_layers", "num_query_groups", "kv_channels", "gated_linear_unit")
        if not hasattr(config, name)
    ]
    of_module = ("share_embeddings_and_output_weights", "position_embedding_type")
    if missing or not all(hasattr(module, name) for name in of_module):
        raise UsageError(
            "a family describes a megatron-core GPTModel",
            expected="GPTModel as the engine's module",
            found=type(module).__qualname__,
            fix="leave family out for other models (at tp=1), or give the family a `measure`",
        )
    learned = module.position_embedding_type == "learned_absolute"
    return Sizes(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.num_query_groups or config.num_attention_heads,
        head_dim=config.kv_channels,
        ffn=config.ffn_hidden_size,
        vocab=module.vocab_size,
        true_vocab=getattr(module, TRUE_VOCAB, module.vocab_size),
        positions=module.max_sequence_length if learned else 0,
        tied=module.share_embeddings_and_output_weights,
        gated=config.gated_linear_unit,
        biases=config.add_bias_linear,
        norm_biases=config.normalization == "LayerNorm",
        qkv_biases=bool(getattr(config, "add_qkv_bias", False)) and not config.add_bias_linear,
        qk_norms=bool(getattr(config, "qk_layernorm", False)),
    )


# ---- layer
#
# The parameters of a transformer on megatron-core's local layer spec.


def transformer(sizes: Sizes, layer: Callable[[int], dict[str, Declared]]) -> dict[str, Declared]:
    """Every parameter of a model; `layer(number)` gives those of a layer."""
    out = {
        "embedding.word_embeddings.weight": vocabulary(sizes, sizes.hidden),
        "decoder.final_layernorm.weight": norm(sizes.hidden),
    }
    if sizes.positions:
        out["embedding.position_embeddings.weight"] = whole(sizes.positions, sizes.hidden)
    if sizes.norm_biases:
        out["decoder.final_layernorm.bias"] = bias(whole(sizes.hidden))
    if not sizes.tied:
        out["output_layer.weight"] = vocabulary(sizes, sizes.hidden)
    for number in range(sizes.layers):
        rows = layer(number)
        out |= {f"decoder.layers.{number}.{name}": declared for name, declared in rows.items()}
    return out


def attention_and_mlp(sizes: Sizes) -> dict[str, Declared]:
    """One transformer layer; biases, gate and norm biases as the sizes say."""
    out = {
        "input_layernorm.weight": norm(sizes.hidden),
        "self_attention.linear_qkv.weight": column(sizes.qkv, sizes.hidden),
        "self_attention.linear_proj.weight": row(sizes.hidden, sizes.heads * sizes.head_dim),
        "pre_mlp_layernorm.weight": norm(sizes.hidden),
        "mlp.linear_fc1.weight": (gated if sizes.gated else column)(sizes.ffn, sizes.hidden),
        "mlp.linear_fc2.weight": row(sizes.hidden, sizes.ffn),
    }
    if sizes.norm_biases:
        out |= {
            "input_layernorm.bias": bias(whole(sizes.hidden)),
            "pre_mlp_layernorm.bias": bias(whole(sizes.hidden)),
        }
    if sizes.biases or sizes.qkv_biases:
        out["self_attention.linear_qkv.bias"] = bias(column(sizes.qkv))
    if sizes.qk_norms:  # of its own heads alone a rank computes the gradient
        one = replace(norm(sizes.head_dim), summed=True)
        out |= {f"self_attention.{name}_layernorm.weight": one for name in ("q", "k")}
    if sizes.biases:
        out |= {
            "self_attention.linear_proj.bias": bias(whole(sizes.hidden)),
            "mlp.linear_fc1.bias": bias((gated if sizes.gated else column)(sizes.ffn)),
            "mlp.linear_fc2.bias": bias(whole(sizes.hidden)),
        }
    return out
