"""Keys of Megatron-core's checkpoints, and the canonical names of the parameters behind them; how
tensor parallelism cuts each.

Layers are stacked under one key (the layer is the first dim of the tensor) unless they differ;
experts are stacked likewise. Sources: `sharded_state_dict` of megatron-core 0.16.1's transformer
block, layers, MLP and experts.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import expert_name, is_expert
from megatron_ucp.core.layout import Layout, Replicate, Shard, ShardNC
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.mesh import DENSE_CUT, EXPERT_CUT

LAYERS_PREFIX = "decoder.layers."
# Lists of layers. Those for multi-token prediction are never stacked, and have a layer of the
# decoder's kind in each of theirs; of a hybrid model a list of layers of its own.
_LISTS = r"(?P<list>(?P<of>decoder|encoder|mtp)\.layers)"
_INNER = r"(?P<inner>(?:transformer_layer|mtp_model_layer(?:\.layers\.\d+)?)\.)?"
STACKED_EXPERTS = "mlp.experts.experts."
LOCAL_EXPERTS = "mlp.experts.local_experts."
ROUTER = "mlp.router.weight"
_FUSED_WITH_MLP = "mlp.linear_fc1.layer_norm_"
# The norms are named after the layer behind them, with which Transformer Engine fuses them.
_RENAMED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    _FUSED_WITH_MLP: "pre_mlp_layernorm.",
    # read only, of layers that have one matrix in the place of attention or of the MLP
    "self_attention.layer_norm_": "input_layernorm.",
    "mlp.layer_norm_": "pre_mlp_layernorm.",
}
_EXPERT = re.compile(r"mlp\.experts\.experts\.(?:(?P<number>\d+)\.)?(?P<rest>linear_fc[12]\..+)")
_LAYER = re.compile(rf"{_LISTS}\.(?:(?P<number>\d+)\.)?{_INNER}(?P<rest>.+)")
# Parameters whose rows lie under several keys: what these end with, in the order of the rows. Gate
# and up of a gated MLP do so with `singleton_local_shards` alone.
_PARTS = (
    ("_w", "_v"),
    (".z", ".x", ".B", ".C", ".dt"),  # a Mamba mixer's input projection
    (".x", ".B", ".C"),  # its convolution
    (".query", ".key", ".value", ".z", ".beta", ".alpha"),  # a gated delta net's input projection
    (".query", ".key", ".value", ".z", ".f", ".b", ".w"),
    (".query", ".key", ".value"),  # its convolution
)
_IN_PARTS = re.compile(
    r"(?P<matrix>.*linear_fc1\.(?:weight|bias))(?P<gate>_w|_v)"
    r"|(?P<module>.*\.(?:in_proj\.weight|conv1d[._](?:weight|bias)))(?P<part>\.[a-zA-Z]+)"
)
_CUT_IN_PARTS = re.compile(r".*\.(in_proj\.weight|conv1d[._](weight|bias))")

# The dim that tensor parallelism cuts of a parameter, None: it is whole on every rank.
_CUT_DIMS: dict[str, int | None] = {
    "embedding.word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "output_layer.bias": 0,
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
    "self_attention.linear_q_proj.weight": 0,
    "self_attention.linear_q_up_proj.weight": 0,
    "self_attention.linear_kv_up_proj.weight": 0,
    "self_attention.core_attention.softmax_offset": 0,
    "eh_proj.weight": 0,
    "self_attention.linear_q_up_proj.layer_norm_weight": None,
    "self_attention.linear_kv_up_proj.layer_norm_weight": None,
    "enorm.weight": None,
    "hnorm.weight": None,
    "linear_fc1.weight": 0,
    "linear_fc1.bias": 0,
    "linear_fc2.weight": 1,
    "self_attention.linear_proj.bias": None,
    "linear_fc2.bias": None,
    "embedding.position_embeddings.weight": None,
    ROUTER: None,
    "mlp.router.bias": None,
    "mlp.router.expert_bias": None,
    "mlp.shared_experts.gate_weight": None,
}
_NORM = re.compile(r"(.+\.)?(\w*layernorm|\w*_norm)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Key:
    """What a key says. `name` is the canonical name, with `{layer}` and `{expert}` in the places of
    these numbers. `layer` and `expert` are numbers that the key itself says; `stacked` has for each
    leading dim of the tensor what its index is the number of. `part`: what the key of one of
    several parts of the parameter ends with; "" where it has the whole."""

    name: str
    layer: int | None = None
    expert: int | None = None
    stacked: tuple[str, ...] = ()
    part: str = ""

    def canonical(self, index: Ints) -> tuple[str, int | None]:
        """The name of the parameter at an index along the stacked dims, and its expert's number."""
        at = dict(zip(self.stacked, index, strict=True))
        layer, expert = at.get("layer", self.layer), at.get("expert", self.expert)
        return self.name.format(layer=layer, expert=expert), expert


def read_key(key: str) -> Key:
    """What the key of a model's tensor says. A key of no known form is a name."""
    layer = _LAYER.fullmatch(key)
    if layer is None:
        return Key(_escaped(key))
    number, rest = layer["number"], layer["rest"]
    expert = _EXPERT.fullmatch(rest)
    stacked = () if number else ("layer",)
    before = f"{layer['list']}.{{layer}}.{layer['inner'] or ''}"
    if expert is None:
        rest, part = _without_part(rest)
        return Key(before + _escaped(_unfused(rest)), _number(number), None, stacked, part)
    matrix, part = _without_part(expert["rest"])
    name = f"{before}{LOCAL_EXPERTS}{{expert}}.{_escaped(matrix)}"
    stacked = stacked if expert["number"] else (*stacked, "expert")
    return Key(name, _number(number), _number(expert["number"]), stacked, part)


def _unfused(rest: str) -> str:
    """The rest of a name in a layer, where a norm may be a part of the matrix behind it."""
    for theirs, ours in _RENAMED.items():
        if rest.startswith(theirs):
            return ours + rest.removeprefix(theirs)
    return rest


def with_unfused_norms(name: str) -> str:
    """A name in a model, where a norm in a layer may be a part of the matrix behind it."""
    found = _LAYER.fullmatch(name)
    return name[: found.start("rest")] + _unfused(found["rest"]) if found else name


def _without_part(rest: str) -> tuple[str, str]:
    """The rest of a key in a layer, and which part of the parameter it has ("": the whole)."""
    found = _IN_PARTS.fullmatch(rest)
    if found is None:
        return rest, ""
    return found["matrix"] or found["module"], found["gate"] or found["part"]


def in_order_of_rows(parts: Iterable[str]) -> list[str] | None:
    """The parts of a parameter in the order of its rows; None where they are no whole one."""
    found = {*parts}
    return next(([*known] for known in (("",), *_PARTS) if {*known} == found), None)


def _number(text: str | None) -> int | None:
    return None if text is None else int(text)


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


# ends of the names of modules' buffers; those that a model makes anew are no part of a checkpoint
DERIVED = (".local_tokens_per_expert", ".inv_freq")
BUFFERS = (".expert_bias", *DERIVED)


def global_name(name: str, first_layer: int, first_expert: int) -> str:
    """The canonical name of what a rank's chunk calls `name`: it counts its layers and experts from
    0 on."""
    found = _LAYER.fullmatch(name)
    if found is None or found["number"] is None:
        return name
    rest = _unfused(found["rest"])
    if expert := expert_name(rest):
        rest = expert.at(expert.number + first_expert)
    number = int(found["number"]) + (first_layer if found["of"] != _PREDICTS else 0)
    return f"{found['list']}.{number}.{found['inner'] or ''}{rest}"


def whole_shape(name: str, local: Ints, ranks: int) -> Ints:
    """The shape of a parameter of which `ranks` tensor-parallel ranks have `local` each."""
    dim = _CUT_DIMS.get(_short(name))
    if dim is None or dim >= len(local):
        return local
    return (*local[:dim], local[dim] * ranks, *local[dim + 1 :])


def _short(name: str) -> str:
    """The name of a parameter in its layer, the first and the second matrix of any MLP alike."""
    found = _LAYER.fullmatch(name)
    short = found["rest"] if found else name
    return re.sub(r"^mlp\..*?(linear_fc[12]\.)", r"\1", short)


_EXTRA_STATE = re.compile(r"(?P<key>.+\._extra_state)/shard_(?P<index>[\d.]+)_[\d.]+")


def extra_state_name(key: str) -> str | None:
    """The canonical name of the extra state of a layer (fp8 scales of Transformer Engine, mostly
    nothing), which lies under a key of its own; None for another key."""
    found = _EXTRA_STATE.fullmatch(key)
    if found is None:
        return None
    read, index = read_key(found["key"]), tuple(map(int, found["index"].split(".")))
    return read.canonical(index)[0] if len(index) == len(read.stacked) else read.name


_WITH_EXTRA_STATE = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
CORE_ATTENTION = "self_attention.core_attention"  # of Transformer Engine's layers


def stacked_extra_states(names: Iterable[str], stacked: bool) -> Iterator[str]:
    """The keys of the extra states that some model with these parameters asks for when it loads;
    models that don't have them pass them over."""
    modules: dict[str, None] = {}
    for name in names:
        module, _, kind = name.rpartition(".")
        layer = number_of_layer(name)
        if layer is None or kind != "weight":
            continue
        if module.rpartition(".")[2] in _WITH_EXTRA_STATE:
            modules[module] = None
        modules[f"{LAYERS_PREFIX}{layer}.{CORE_ATTENTION}"] = None
    places = {module: key_of(f"{module}.", stacked) for module in modules}
    counts: dict[str, Ints] = {}
    for at in places.values():
        size = tuple(n + 1 for n in at.index)
        counts[at.key] = tuple(map(max, counts.get(at.key, size), size))
    for at in places.values():
        index, size = at.index or (0,), counts[at.key] or (1,)
        shard = ".".join(map(str, index)), ".".join(map(str, size))
        yield f"{at.key}_extra_state/shard_{shard[0]}_{shard[1]}"


@dataclass(frozen=True, slots=True)
class Stacking:
    """The key that a parameter is written under, and its index along the stacked dims. Of a
    parameter that lies under several keys, this one has the rows [first, last); all where `last`
    is None."""

    key: str
    index: Ints
    first: int = 0
    last: int | None = None


_CANONICAL = re.compile(
    rf"{_LISTS}\.(?P<layer>\d+)\.{_INNER}"
    r"(?:mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<matrix>.+)|(?P<rest>.+))"
)
_PREDICTS = "mtp"  # of what the layers for multi-token prediction are


def key_of(name: str, stacked: bool) -> Stacking:
    """The inverse of `read_key`: `stacked` says whether the layers are alike, so that they are
    stacked under one key."""
    found = _CANONICAL.fullmatch(name)
    if found is None:
        return Stacking(name, ())
    layer, stacked = int(found["layer"]), stacked and found["of"] != _PREDICTS
    before = f"{found['list']}." if stacked else f"{found['list']}.{layer}."
    before, index = before + (found["inner"] or ""), (layer,) if stacked else ()
    if found["expert"] is not None:
        return Stacking(
            f"{before}{STACKED_EXPERTS}{found['matrix']}", (*index, int(found["expert"]))
        )
    rest = found["rest"]
    for theirs, ours in _RENAMED.items():
        if rest.startswith(ours):
            rest = theirs + rest.removeprefix(ours)
    return Stacking(before + rest, index)


def keys_of(spec: ParamSpec, stacked: bool) -> tuple[Stacking, ...]:
    """As `key_of`, of a parameter whose rows may lie under several keys: the layout has the rows of
    each part then."""
    at = key_of(spec.name, stacked)
    cut = (spec.on_mesh or spec.layout).fused
    if cut is None or _CUT_IN_PARTS.fullmatch(spec.name) is None:
        return (at,)
    kind = ".query" if ".self_attention." in spec.name else ".x"  # a delta net, or Mamba
    endings = [known for known in _PARTS if len(known) == len(cut.parts) and kind in known]
    if len(endings) != 1:
        return (at,)
    ends = [*itertools.accumulate(cut.parts)]
    return tuple(
        Stacking(f"{at.key}{ending}", at.index, end - rows, end)
        for ending, rows, end in zip(endings[0], cut.parts, ends, strict=True)
    )


def is_cut_in_parts(name: str) -> bool:
    """Whether tensor parallelism cuts each part of a parameter for itself, by its canonical
    name."""
    return _CUT_IN_PARTS.fullmatch(name) is not None


def key_before_experts(key: str) -> str | None:
    """The key of the norm of a layer with experts in models of Transformer Engine, which fuses none
    with experts, by the key that models of megatron-core's own layers give it; None for any other
    key."""
    before, found, kind = key.rpartition(_FUSED_WITH_MLP)
    return f"{before}{_RENAMED[_FUSED_WITH_MLP]}{kind}" if found else None


def key_behind_experts(key: str) -> str | None:
    """The inverse of `key_before_experts`."""
    before, found, kind = key.rpartition(f".{_RENAMED[_FUSED_WITH_MLP]}")
    return f"{before}.{_FUSED_WITH_MLP}{kind}" if found else None


def number_of_layer(name: str) -> int | None:
    """The layer of the decoder that a parameter is part of, by its canonical name."""
    found = _CANONICAL.fullmatch(name)
    return int(found["layer"]) if found and found["list"] + "." == LAYERS_PREFIX else None


def is_prediction(name: str) -> bool:
    """Whether a parameter is part of the layers for multi-token prediction."""
    return name.startswith(f"{_PREDICTS}.")


def in_its_layer(name: str) -> tuple[str, int, str] | None:
    """A canonical name in parts: the list of layers that may be stacked, the number, the rest; None
    for what is in none."""
    found = _CANONICAL.fullmatch(name)
    if found is None or found["of"] == _PREDICTS:
        return None
    return found["list"], int(found["layer"]), name[found.end("layer") + 1 :]


def second_matrix(name: str) -> str:
    """The name of the second matrix of an MLP, by that of a parameter of the first one; "" for any
    other name."""
    before, first, _ = name.rpartition("linear_fc1.")
    return f"{before}linear_fc2.weight" if first else ""


def layout_of(name: str, shape: Ints, width: int | None) -> Layout | None:
    """How tensor parallelism cuts a parameter, None where nobody knows. `width` are the columns of
    the second matrix of its MLP (None: it is none's).

    The first one has as many rows, or twice as many: then it is a gate above the up, each cut for
    itself. No argument of a run says so: folders may have none, and gates have several names there.
    """
    short = _short(name)
    if short not in _CUT_DIMS:
        return Replicate() if _NORM.fullmatch(short) else None
    dim = _CUT_DIMS[short]
    if dim is None or dim >= len(shape):
        return Replicate()
    (axis,) = EXPERT_CUT if is_expert(name) else DENSE_CUT
    if short.startswith("linear_fc1.") and shape[dim] != width:
        return ShardNC(axis, dim, (width, width)) if width and shape[dim] == 2 * width else None
    return Shard(axis, dim)
