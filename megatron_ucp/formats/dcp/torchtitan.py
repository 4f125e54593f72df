"""torchtitan's names: which of its tensors holds what of the model in transformers.

torchtitan trains llama3, qwen3, deepseek_v3 and gpt_oss with modules of its own. What it calls
`layers.0.feed_forward.w1.weight` is `model.layers.0.mlp.gate_proj.weight` in transformers, and the
experts of a layer are one tensor. Two things are more than names:

- Its llama3 rotates neighbouring rows of queries and keys, and transformers rows half a head
  apart. Row 2 i + j of a head here is row i + j * (head size / 2) there.
- Its modules keep queries, keys and values in one parameter, wqkv, of which a save splits the
  weights into wq, wk and wv, and leaves the optimizer's states in one: for each group of
  heads the rows of its queries, then of its key, then of its value.

Source: state_dict_adapter.py of each model, and the class FusedQKVLinear, of torchtitan 0.3.0.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_ucp.core.box import Bounds, Ints
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.layout import Chunks, Layout
from megatron_ucp.core.tensor_parts import Interleaved, Slice, TensorPart

EMBEDDING, HEAD = "tok_embeddings.weight", "lm_head.weight"
_TOP = {
    "model.embed_tokens.weight": EMBEDDING,
    "model.norm.weight": "norm.weight",
    "lm_head.weight": HEAD,
}
_QKV, _EXPERTS = "attention.qkv_linear.", "moe.routed_experts.inner_experts."
# by the end of a name, behind the number of its layer; of transformers -> of torchtitan
_LAYER = {
    "input_layernorm.weight": "attention_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    **{
        f"self_attn.{n}_proj.{end}": f"{_QKV}w{n}.{end}"
        for n in "qkv"
        for end in ("weight", "bias")
    },
    "self_attn.o_proj.weight": "attention.wo.weight",
    "self_attn.o_proj.bias": "attention.wo.bias",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
    "self_attn.sinks": "attention.sinks",
    "mlp.gate_proj.weight": "feed_forward.w1.weight",
    "mlp.up_proj.weight": "feed_forward.w3.weight",
    "mlp.down_proj.weight": "feed_forward.w2.weight",
    "mlp.gate.weight": "moe.router.gate.weight",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
    "mlp.router.weight": "moe.router.gate.weight",
    "mlp.router.bias": "moe.router.gate.bias",
    "mlp.shared_experts.gate_proj.weight": "moe.shared_experts.w1.weight",
    "mlp.shared_experts.up_proj.weight": "moe.shared_experts.w3.weight",
    "mlp.shared_experts.down_proj.weight": "moe.shared_experts.w2.weight",
}
# of DeepSeek-V3's latent attention, whose query has no place in wqkv
_LATENT = {
    "self_attn.q_proj.weight": "attention.wq.weight",
    "self_attn.q_a_proj.weight": "attention.wq_a.weight",
    "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
    "self_attn.q_b_proj.weight": "attention.wq_b.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_a.weight",
    "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
    "self_attn.kv_b_proj.weight": "attention.wkv_b.weight",
}
# each a matrix of a stack
_EXPERT = {
    "gate_proj.weight": f"{_EXPERTS}w1_EFD",
    "up_proj.weight": f"{_EXPERTS}w3_EFD",
    "down_proj.weight": f"{_EXPERTS}w2_EDF",
}
# of gpt-oss: stacks on both sides, whose matrices transformers has transposed
_STACKS = {
    "mlp.experts.gate_up_proj": f"{_EXPERTS}mlp1_weight_EGD",
    "mlp.experts.gate_up_proj_bias": f"{_EXPERTS}mlp1_bias_EG",
    "mlp.experts.down_proj": f"{_EXPERTS}mlp2_weight_EDF",
    "mlp.experts.down_proj_bias": f"{_EXPERTS}mlp2_bias_ED",
}
_MATRICES = ("gate_up_proj", "down_proj")
_JOINED = tuple(f"mlp.experts.{one}" for one in _MATRICES)
GATE = "moe.router.gate.weight"
ROUTER_BIAS = "moe.expert_bias_E"  # every mixture here has it, and few in transformers
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OF_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(.+)")
_FUSED = re.compile(r"(.+\.qkv_linear\.)wqkv\.(weight|bias)")
_OWN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
FURTHER = "mtp_layers."  # layers that predict further tokens


@dataclass(frozen=True)
class Heads:
    """Of attention: how many heads, how many groups of them share a key, the size of each. `turns`:
    rows of queries and keys are in the order of llama3."""

    heads: int
    groups: int
    size: int
    turns: bool = False

    def rows(self, which: str) -> int:
        """How many rows of "q", "k" or "v" a group has."""
        return self.size * (self.heads // self.groups if which == "q" else 1)

    def at(self, which: str, group: int) -> int:
        """The first row of a group in wqkv."""
        before = {"q": 0, "k": self.rows("q"), "v": self.rows("q") + self.size}[which]
        return group * self.all_rows // self.groups + before

    @property
    def all_rows(self) -> int:
        """Of wqkv."""
        return (self.heads + 2 * self.groups) * self.size

    def there(self, which: str, row: int) -> int:
        """The row in transformers' tensor of a row of torchtitan's."""
        if which == "v" or not self.turns:
            return row
        head, at = divmod(row, self.size)
        return head * self.size + at // 2 + at % 2 * (self.size // 2)


@dataclass(frozen=True)
class TitanNames:
    """`shares`: what each tensor of torchtitan's holds of which parameter, or each slice of one;
    `states` where the states of a slice lie, if not under the name of its weight."""

    shares: Mapping[str, TensorPart]
    states: Mapping[str, Slice] = field(default_factory=dict)


# ---- what lies in a folder


def is_torchtitan(names: Collection[str]) -> bool:
    """Whether the names of weights are torchtitan's."""
    return EMBEDDING in names and any(one.endswith(".attention_norm.weight") for one in names)


def has_turns(names: Collection[str]) -> bool:
    """Whether a model rotates neighbouring rows of queries and keys: llama3, which has none of what
    tells the others."""
    others = (".q_norm.weight", ".sinks", ".wkv_a.weight")
    return not any(name.endswith(others) for name in names)


def fused_of(name: str) -> tuple[str, ...]:
    """The weights of a parameter that is split where it is saved; itself otherwise."""
    found = _FUSED.fullmatch(name)
    return (name,) if found is None else tuple(f"{found[1]}w{n}.{found[2]}" for n in "qkv")


def twin_shapes(shapes: Mapping[str, Ints]) -> tuple[dict[str, Ints], list[str]]:
    """The names and shapes in transformers of what tensors of torchtitan's hold; and the names of
    tensors that it has nothing for."""
    latent = any(name.endswith(".attention.wkv_a.weight") for name in shapes)
    ends = {theirs: ours for ours, theirs in _ends(latent).items()}
    if any(name.endswith(f"{_EXPERTS}mlp1_weight_EGD") for name in shapes):
        ends["moe.router.gate.weight"] = "mlp.router.weight"
    top = {theirs: ours for ours, theirs in _TOP.items()}
    experts = {theirs: ours for ours, theirs in _EXPERT.items()}
    stacks = {theirs: ours for ours, theirs in _STACKS.items()}
    out: dict[str, Ints] = {}
    lost: list[str] = []
    for name, shape in shapes.items():
        found = _OWN_LAYER.fullmatch(name)
        number, end = ("", "") if found is None else (found[1], found[2])
        first = f"model.layers.{number}."
        is_bias = end == ROUTER_BIAS and not latent
        if name in top:
            out[top[name]] = shape
        elif end in experts:
            for expert in range(shape[0]):
                out[f"{first}mlp.experts.{expert}.{experts[end]}"] = shape[1:]
        elif end in stacks:
            is_turned = stacks[end].endswith(_MATRICES)
            out[first + stacks[end]] = (*shape[:-2], shape[-1], shape[-2]) if is_turned else shape
        elif end in ends and not is_bias:
            out[first + ends[end]] = shape
        else:
            lost.append(name)
    return out, lost


def _ends(latent: bool) -> dict[str, str]:
    """The names of what no layer has for each expert."""
    router = {k: v for k, v in _LAYER.items() if not k.startswith("mlp.router.weight")}
    return {**router, **(_LATENT if latent else {})}


# ---- names of parts


def titan_names(
    shares: Mapping[str, TensorPart],
    shapes: Mapping[str, Ints],
    heads: Heads | None,
    is_fused: bool,
) -> tuple[TitanNames, list[str]]:
    """What torchtitan's tensors hold of parameters, of which `shares` says what transformers'
    tensors hold; and the names of tensors that torchtitan has no place for. `shapes` are those of
    the parameters. `is_fused`: the states of queries, keys and values are one tensor."""
    latent = any(name.endswith(".kv_a_proj_with_mqa.weight") for name in shares)
    is_gpt_oss = any(name.endswith(".sinks") for name in shares)
    ends, counts = {**_LAYER, **_STACKS, **(_LATENT if latent else {})}, _experts(shares)
    out: dict[str, TensorPart] = {}
    states: dict[str, Slice] = {}
    lost: list[str] = []
    for name, part in shares.items():
        tensor = name if part.slice_of is None else part.slice_of.tensor
        found = _OF_LAYER.fullmatch(tensor)
        number, end = ("", "") if found is None else (found[1], found[2])
        expert, first = _OF_EXPERT.fullmatch(end), f"layers.{number}."
        if tensor in _TOP:
            out[_TOP[tensor]] = part
        elif expert is not None and expert[2] in _EXPERT:
            stack = first + _EXPERT[expert[2]]
            within = Slice(stack, int(expert[1]), 0, counts[number])
            out[f"{stack}[{expert[1]}]"] = replace(part, slice_of=within)
        elif end in _JOINED and not is_gpt_oss:
            out |= _split(first, end, part, shapes[part.param])
        elif end not in ends:
            lost.append(name)
        elif ends[end].startswith(_QKV):
            for own, piece, within in _rows(first + ends[end], part, shapes, heads, is_fused):
                out[own] = piece
                if within is not None:
                    states[own] = within
        else:
            out |= _renamed(first + ends[end], name, tensor, part, shapes)
    return TitanNames(_numbered(out), states), lost


def _experts(shares: Mapping[str, TensorPart]) -> dict[str, int]:
    """How many experts each layer has, by its number."""
    out: dict[str, int] = {}
    for name in shares:
        layer = _OF_LAYER.fullmatch(name)
        expert = None if layer is None else _OF_EXPERT.fullmatch(layer[2])
        if layer is not None and expert is not None:
            out[layer[1]] = max(out.get(layer[1], 0), int(expert[1]) + 1)
    return out


def _split(first: str, end: str, part: TensorPart, shape: Ints) -> dict[str, TensorPart]:
    """A stack of experts as transformers 5 has it in memory: gate and up are one matrix there."""
    if end == "mlp.experts.down_proj":
        return {f"{first}{_EXPERTS}w2_EDF": part}
    experts, rows, columns = shape
    half = rows // 2
    layout = Chunks(
        tuple((((0, at, 0), (experts, at + half, columns)),) for at in (0, half)), dim=1
    )
    return {
        f"{first}{_EXPERTS}{name}": TensorPart(part.param, layout, number)
        for number, name in enumerate(("w1_EFD", "w3_EFD"))
    }


def _renamed(
    own: str, name: str, tensor: str, part: TensorPart, shapes: Mapping[str, Ints]
) -> dict[str, TensorPart]:
    """A tensor under another name; a matrix of a stack of gpt-oss is transposed."""
    if tensor.endswith(tuple(f"experts.{one}" for one in _MATRICES)):
        dims = len(shapes[part.param])
        order = tuple(range(dims)) if part.order is None else part.order
        order = (*order[:-2], order[-1], order[-2])
        part = replace(part, order=None if order == tuple(range(dims)) else order)
    if part.slice_of is None:
        return {own: part}
    return {
        own + name.removeprefix(tensor): replace(part, slice_of=replace(part.slice_of, tensor=own))
    }


def _rows(
    own: str, part: TensorPart, shapes: Mapping[str, Ints], heads: Heads | None, is_fused: bool
) -> Iterator[tuple[str, TensorPart, Slice | None]]:
    """Queries, keys or values: as they are, or a slice for each group of heads."""
    which = own.rpartition(".")[0][-1]
    if heads is None or not (is_fused or (heads.turns and which != "v")):
        yield own, part, None
        return
    rows, rest = heads.rows(which), shapes[part.param][1:]
    fused = f"{own.rpartition('.')[0][:-1]}qkv.{own.rpartition('.')[2]}"
    for group in range(heads.groups):
        first = group * rows
        boxes: list[Bounds] = []
        for low, high in _runs([heads.there(which, row) for row in range(first, first + rows)]):
            boxes += part.boxes(shapes[part.param], (low, *(0,) * len(rest)), (high, *rest))
        here = Slice(own, first, rows, rows * heads.groups)
        there = Slice(fused, heads.at(which, group), rows, heads.all_rows) if is_fused else None
        piece = TensorPart(part.param, Chunks((tuple(boxes),)), slice_of=here)
        yield f"{own}[{group}]", piece, there


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rows that follow each other, as [low, high)."""
    low = high = rows[0]
    for row in rows:
        if row != high:
            yield low, high
            low = row
        high = row + 1
    yield low, high


def _numbered(parts: Mapping[str, TensorPart]) -> dict[str, TensorPart]:
    """The parts, of which those of one parameter that are chunks share one layout."""
    out = dict(parts)
    for names in grouped((part.param, name) for name, part in parts.items()).values():
        own = [parts[name] for name in names]
        if len({id(one.layout) for one in own}) == 1 or any(
            isinstance(one.layout, Interleaved) for one in own
        ):
            continue
        held: list[tuple[Bounds, ...]] = []
        for one in own:
            layout: Layout = one.layout
            held.append(layout.held[one.number] if isinstance(layout, Chunks) else ())
        common = Chunks(tuple(held))
        for number, name in enumerate(names):
            out[name] = replace(out[name], layout=common, number=number)
    return out
