"""The sizes of a model."""

from dataclasses import dataclass


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
