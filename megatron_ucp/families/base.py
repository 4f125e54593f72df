"""What a family is: a table of every parameter of a model with its whole shape and its cut."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.layout import Layout, Replicate, Shard, ShardNC
from megatron_ucp.errors import LayoutError, RuleError


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model. `vocab` is the padded vocabulary, `true_vocab` the tokenizer's; `ffn`
    the width of one half of a gated MLP; `groups` the key-value groups."""

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

    @property
    def qkv(self) -> int:
        """Rows of linear_qkv: megatron-core interleaves (heads/groups queries, one key, one value)
        per group."""
        return (self.heads + 2 * self.groups) * self.head_dim


@dataclass(frozen=True)
class Declared:
    """One parameter as its family declares it: whole shape, cut, and the attributes that the live
    parameter must carry."""

    shape: Ints
    layout: Layout
    attributes: Mapping[str, object] = field(default_factory=dict[str, object])


def column(rows: int, *rest: int) -> Declared:
    """Cut on dim 0, as megatron-core's ColumnParallelLinear and VocabParallelEmbedding are."""
    return Declared(
        (rows, *rest),
        Shard("tp", 0),
        {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1},
    )


def gated(half: int, *rest: int) -> Declared:
    """Gate and up, one above the other, each cut on dim 0."""
    return Declared(
        (2 * half, *rest),
        ShardNC("tp", 0, (half, half)),
        {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2},
    )


def row(rows: int, columns: int) -> Declared:
    """Cut on dim 1, as RowParallelLinear is."""
    return Declared(
        (rows, columns),
        Shard("tp", 1),
        {"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 1},
    )


def whole(*shape: int) -> Declared:
    """On every rank of the tensor-parallel group with the same bits."""
    return Declared(shape, Replicate(), {"tensor_model_parallel": False})


@dataclass(frozen=True)
class Family:
    """`table(sizes)` lists every parameter by canonical name (global layer numbers); `source` is
    the file to edit; `pipe(sizes)` maps the names in a DeepSpeed pipeline to canonical ones,
    `layers(names)` gives the pipeline's layers for a model with these parameters (None: the family
    has no pipeline)."""

    name: str
    table: Callable[[Sizes], dict[str, Declared]]
    source: str
    pipe: Callable[[Sizes], dict[str, str]] | None = None
    layers: Callable[[Collection[str]], Layers] | None = None


@dataclass(frozen=True)
class Model:
    """A family at certain sizes."""

    family: Family
    sizes: Sizes

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
        sizes = self.sizes
        divided = {
            "attention heads": sizes.heads,
            "the padded vocabulary": sizes.vocab,
            "ffn_hidden_size": sizes.ffn,
        }
        for what, size in divided.items():
            if size % tp:
                works = [n for n in range(1, size + 1) if not size % n and n <= 64]
                raise LayoutError(
                    f"the tensor-parallel size does not divide {what}",
                    expected=f"a divisor of {size}",
                    found=tp,
                    fix=f"use a tensor-parallel size of {', '.join(map(str, works))}",
                )
        if sizes.groups % tp and tp % sizes.groups:
            raise LayoutError(
                "key-value groups and the tensor-parallel size do not divide each other",
                expected=f"a multiple or a divisor of {sizes.groups}",
                found=tp,
                fix=f"use a tensor-parallel size that is a multiple or a divisor of {sizes.groups}",
            )
