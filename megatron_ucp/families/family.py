"""What a family is: a table of every parameter with its whole shape and its cut, the switches in
which transformers differ, and the Hugging Face twin."""

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
from megatron_ucp.core.tensor_parts import TensorPart
from megatron_ucp.errors import LayoutError, RuleError, UnsupportedError, UsageError
from megatron_ucp.families.settings import Architecture

# ---- sizes and switches
#
# A switch (say, biases) is a field of `Sizes` and of `Builder`, a row of `SWITCHES`, and what
# `attention_and_mlp` lists because of it. Parameters of its own have names in `twin.NORM_ROWS` and
# in `formats/megatron/buffers`, too.


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model. `vocab` is the padded vocabulary, `true_vocab` the tokenizer's; `ffn`
    the width of one half of a gated MLP; `groups` the key-value groups; `positions` is 0 where none
    are learned. `qkv_biases`: only queries, keys and values have biases; `qk_norms`: queries and
    keys are normalised, head by head. A family with sizes of its own gives a subclass."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    vocab: int
    true_vocab: int
    positions: int = 0
    tied: bool = False
    gated: bool = False
    biases: bool = True
    norm_biases: bool = True
    qkv_biases: bool = False
    qk_norms: bool = False

    @property
    def qkv(self) -> int:
        """Rows of linear_qkv: megatron-core interleaves (heads/groups queries, one key, one value)
        per group."""
        return (self.heads + 2 * self.groups) * self.head_dim

    def qkv_rows(self) -> tuple[list[range], list[range], list[range]]:
        """The rows of linear_qkv that are queries, keys and values.

        megatron-core stores one key-value group after the other. Four heads of size 16 in two
        groups: rows 0 to 31 are the queries of group 0, 32 to 47 its key, 48 to 63 its value, 64 to
        95 the queries of group 1.
        """
        queries = self.heads // self.groups * self.head_dim
        out: tuple[list[range], list[range], list[range]] = ([], [], [])
        at = 0
        for _ in range(self.groups):
            for found, rows in zip(out, (queries, self.head_dim, self.head_dim), strict=True):
                found.append(range(at, at + rows))
                at += rows
        return out


# The switches of `Sizes` and `Builder`, with megatron-core's names for them.
SWITCHES = {
    "gated": "gated_linear_unit",
    "biases": "add_bias_linear",
    "qkv_biases": "add_qkv_bias",
    "qk_norms": "qk_layernorm",
}


@dataclass(frozen=True)
class Builder:
    """How megatron-core's own modules make a model of the family, in megatron-core's words: a LLaMA
    is `Builder("RMSNorm", gated=True, biases=False, position_embedding_type="rope")`. `experts`:
    layers may have experts instead of an MLP. `qkv_biases` and `qk_norms` are as in `Sizes`."""

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
        flags: dict[str, bool] = {name: getattr(self, name) for name in SWITCHES}
        return {**flags, "norm_biases": self.normalization == "LayerNorm"}

    @property
    def settings(self) -> dict[str, Any]:
        """The fields of megatron-core's TransformerConfig that follow."""
        settings = {theirs: getattr(self, ours) for ours, theirs in SWITCHES.items()}
        return {**settings, "normalization": self.normalization}

    def makes(self, sizes: Sizes) -> bool:
        """Whether it makes models of these sizes, but for experts."""
        own = {field: getattr(sizes, field) for field in self.flags}
        return own == self.flags and (self.learned_positions or not sizes.positions)

    def check(self, sizes: Sizes, name: str) -> None:
        """Raises UsageError for sizes of a model that this does not build; `name` is the
        family's."""
        if not self.makes(sizes):
            flags = ", ".join(f"{field}={value}" for field, value in self.flags.items())
            raise no_such_sizes(name, flags, sizes)


def no_such_sizes(name: str, expected: str, found: object) -> UsageError:
    """The error for sizes that no model of the family `name` has."""
    return UsageError(
        f"these sizes are no {name}",
        expected=expected,
        found=str(found),
        fix="give the family that the model was built with",
    )


TRUE_VOCAB = "ucp_true_vocab"  # of a model: the rows of its vocabulary that are data


def measured(module: Any) -> Sizes:
    """Sizes of a megatron-core GPTModel, or of a PipelineModule with the same attributes, from its
    own config. Raises UsageError for another module."""
    config: Any = getattr(module, "config", None)
    of_config = ("num_layers", "num_query_groups", "kv_channels", "gated_linear_unit")
    of_module = ("share_embeddings_and_output_weights", "position_embedding_type")
    if not all(hasattr(config, name) for name in of_config) or not all(
        hasattr(module, name) for name in of_module
    ):
        raise UsageError(
            "a family describes a megatron-core GPTModel",
            expected="GPTModel as the engine's module",
            found=type(module).__qualname__,
            fix="leave family out for other models (at tp=1), or give the family a `measure`",
        )
    learned = module.position_embedding_type == "learned_absolute"
    switches = {ours: bool(getattr(config, name, False)) for ours, name in SWITCHES.items()}
    switches["qkv_biases"] &= not switches["biases"]  # which are among all biases
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
        norm_biases=config.normalization == "LayerNorm",
        **switches,
    )


# ---- parameters


@dataclass(frozen=True)
class Declared:
    """One parameter as its family declares it.

    - `shape` is the whole shape, and `layout` says how tensor parallelism cuts it. A LLaMA of
      hidden size 64 has `linear_fc2.weight` as (64, 160), cut on dim 1: (64, 80) at tp=2.
    - The live parameter must carry `attributes`.
    - `extent` says how many rows of a padded vocabulary are data.
    - `expert`: the parameter belongs to this expert of so many (see `ParamSpec`).
    - `init` is the distribution of the first values: N(0, std), for a projection that ends in the
      residual stream N(0, std / sqrt(2 layers)), or a constant.
    - `summed`: every tensor-parallel rank has the whole parameter, and a part of its gradient.
    - `buffer`: it is a buffer in fp32 that no optimizer steps.
    - `first_counts`: of copies on several stages the first one counts (see `ParamSpec`).
    """

    shape: Ints
    layout: Layout
    attributes: Mapping[str, object] = field(default_factory=dict[str, object])
    extent: Extent | None = None
    expert: tuple[int, int] | None = None
    init: Literal["normal", "residual", "ones", "zeros"] = "normal"
    summed: bool = False
    buffer: bool = False
    first_counts: bool = False

    def spec(self, name: str, dtype: str, kind: str = "trainable") -> ParamSpec:
        """The parameter as a manifest lists it; a buffer's dtype and kind are its own."""
        if self.buffer:
            dtype, kind = "float32", "buffer"
        return ParamSpec(
            name,
            self.shape,
            dtype,
            kind,
            self.layout,
            self.extent,
            expert=self.expert,
            first_counts=self.first_counts,
        )


def column(rows: int, *rest: int) -> Declared:
    """A matrix that is cut on dim 0, as megatron-core's ColumnParallelLinear is."""
    return Declared(
        (rows, *rest),
        Shard("tp", 0),
        {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1},
    )


def vocabulary(sizes: Sizes, *rest: int) -> Declared:
    """A table of tokens, cut on dim 0 as megatron-core's VocabParallelEmbedding is. Of its `vocab`
    rows the first `true_vocab` are data. Raises UsageError where there are fewer rows."""
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
    """A matrix that is cut on dim 1, as RowParallelLinear is. Both of a layer end in the residual
    stream."""
    return Declared(
        (rows, columns),
        Shard(axis, 1),
        {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 1},
        init="residual",
    )


def whole(*shape: int) -> Declared:
    """A parameter that every rank of the tensor-parallel group has with the same bits."""
    return Declared(shape, Replicate(), {"tensor_model_parallel": False})


def norm(width: int) -> Declared:
    """The weight of a LayerNorm or RMSNorm."""
    return replace(whole(width), init="ones")


def bias(of: Declared) -> Declared:
    """The bias of a layer: it is drawn as 0, and cut as `of` is."""
    return replace(of, init="zeros")


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


# ---- the family


@dataclass(frozen=True)
class Divided:
    """A size that tensor parallelism cuts, under the name that an error gives it: 8 attention heads
    allow tp=1, 2, 4, 8. `shared`: there may be more ranks than the size, as several ranks can share
    one key-value group; 2 groups allow tp=1, 2, 4, 6, 8."""

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


Config = Mapping[str, Any]  # config.json


# Functions of a family take the sizes of its own class, hence Any.
@dataclass(frozen=True)
class HuggingFace:
    """The twin of a family: `model_type` and `architecture` of config.json.

    - `tensors(sizes)` says what each tensor holds, by its name, in the order of the model.
    - `config(sizes, architecture)` is config.json without what every model has; `read` is its
      inverse, and raises UnsupportedError for what the family does not compute.
    - `refuses(sizes, architecture)` lists what the twin can't represent.
    - `kin` are other model types whose configs and files say the same.
    - `notes(sizes, architecture)` lists what the twin computes a little otherwise.
    """

    model_type: str
    architecture: str
    tensors: Callable[[Any], dict[str, TensorPart]]
    config: Callable[[Any, Architecture], dict[str, Any]]
    read: Callable[[Config], tuple[Sizes, Architecture]]
    refuses: Callable[[Any, Architecture], list[str]]
    kin: tuple[str, ...] = ()
    notes: Callable[[Any, Architecture], list[str]] = lambda _, __: list[str]()

    def has(self, model_type: object) -> bool:
        """Whether a config with this model type is the twin's."""
        return model_type in (self.model_type, *self.kin)

    def whole_config(self, sizes: Sizes, architecture: Architecture, dtype: str) -> dict[str, Any]:
        """config.json of a model. Tokens that begin and end a text are the tokenizer's, and
        `None` here: the classes' own defaults are those of one certain model. Raises
        UnsupportedError that lists what the twin can't represent."""
        if refused := self.refuses(sizes, architecture):
            raise UnsupportedError(
                f"{self.architecture} of Hugging Face does not compute what this model does",
                expected="a model without these settings",
                found="; ".join(refused),
                fix="there is no Hugging Face twin of this model: keep it in its native format",
            )
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "dtype": dtype,
            "tie_word_embeddings": sizes.tied,
            "vocab_size": sizes.true_vocab,
            **self.config(sizes, architecture),
        }


@dataclass(frozen=True)
class Family:
    """All that a family of models decides; registering it makes it known everywhere.

    - `table(sizes)` lists every parameter by canonical name (global layer numbers); `source` is the
      file to edit.
    - `sizes` is the class of the sizes; `measure(module)` takes them from a live module (None: from
      the config of a megatron-core GPTModel).
    - `divided(sizes)` lists the sizes that a tensor-parallel size must divide.
    - `pipe(sizes)` maps the names in a DeepSpeed pipeline to canonical ones, `layers(names)` gives
      the pipeline's layers for a model with these parameters (None: the family has no pipeline).
    - `hugging_face` is the twin there (None: the family has none).
    - `fitted(sizes, names)` adapts the sizes of a config to a model whose parameters have these
      names, where its modules may be of several kinds.
    - `rules` are those of a user's file that the family stands for.
    - `client_state` is what the program that trains it looks for in a checkpoint before the first
      step.
    - `builder` says which of megatron-core's modules make the model (None: somebody else builds
      it). A live model without a family is recognised by it, and `pretrain_gpt.py` trains it.

    One field is for one program: `defaults` of the flags of `pretrain_gpt.py`, by attribute.
    """

    name: str
    table: Callable[[Any], dict[str, Declared]]
    source: str
    pipe: Callable[[Any], dict[str, str]] | None = None
    layers: Callable[[Collection[str]], Layers] | None = None
    divided: Callable[[Any], tuple[Divided, ...]] = dense
    builder: Builder | None = None
    defaults: Mapping[str, object] = field(default_factory=dict[str, object])
    sizes: type[Sizes] = Sizes
    measure: Callable[[Any], Sizes] | None = None
    hugging_face: HuggingFace | None = None
    rules: RuleSet | None = None
    client_state: Mapping[str, object] = field(default_factory=dict[str, object])
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
