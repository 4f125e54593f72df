"""Which model megatron-core's stack trains: canonical names, cuts as `sharded_state_dict()` says
them, the family."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ucp import say
from megatron_ucp.core.box import Ints, strides
from megatron_ucp.core.experts import is_expert
from megatron_ucp.core.layout import Extent, Layout, Replicate, Shard, ShardNC, layout_to_json
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.mesh import DENSE_CUT, EXPERT_CUT, Coords, Mesh, Place
from megatron_ucp.errors import LayoutError, UnsupportedError
from megatron_ucp.families import model_as_built, model_of_module
from megatron_ucp.families.family import TRUE_VOCAB, Declared, Family, Model
from megatron_ucp.formats.megatron.names import (
    Stacking,
    extra_state_name,
    in_its_layer,
    keys_of,
    read_key,
    stacked_extra_states,
    with_unfused_norms,
)
from megatron_ucp.formats.megatron.writer import CONTENT, ModelKeys
from megatron_ucp.reshard import agree

# ---- names
#
# Canonical names of what a chunk of megatron-core's own pipeline holds: layers and experts by
# their numbers in the whole model, in the words of megatron-core's own modules.


EMBEDDING = "embedding.word_embeddings.weight"
POSITIONS = "embedding.position_embeddings.weight"
HEAD = "output_layer.weight"
_LAYER = re.compile(r"((?:\w+\.)*layers)\.\d+")  # the name of a module in a list of layers
_INNER_LAYER = re.compile(r"(mtp\.layers\.\d+\.)mtp_model_layer\.(?!layers\.)")
_CONVOLUTION = re.compile(r"(.+\.mixer\.conv1d)_(weight|bias)")
# of TEGroupedMLP: a parameter for each expert of the rank
_GROUPED = re.compile(r"(.+\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)")


def bare_model(chunk: Any) -> Any:
    """The GPTModel in megatron-core's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def canonical_names(model: Any) -> dict[str, str]:
    """For every parameter and persistent buffer of a bare chunk: its name there -> its name in the
    whole model.

    A chunk counts its layers from 0, and a rank its experts: their numbers are asked of the
    modules. The last stage's copy of a tied embedding has the embedding's name. In layers of
    Transformer Engine a norm is a part of the matrix behind it, and all experts of a rank are one
    module. Of a parameter under several names the first one counts, as in `named_parameters`.
    """
    layers, own_experts = _layers(model), expert_prefixes(model)
    out, seen = dict[str, str](), set[int]()
    for name, value in model.state_dict(keep_vars=True).items():
        if value is None or name.endswith("._extra_state") or id(value) in seen:
            continue  # states of Transformer Engine, empty without it
        seen.add(id(value))
        whole = _expert_by_expert(name)
        for local, prefix in own_experts.items():
            if whole.startswith(local):
                whole = prefix + whole.removeprefix(local)
        for local, prefix in layers.items():
            if whole.startswith(local):
                whole = with_unfused_norms(prefix + whole.removeprefix(local))
                break
        if name == HEAD and getattr(value, "shared_embedding", False):
            whole = EMBEDDING
        out[name] = _as_in_files(whole)
    return out


def _as_in_files(name: str) -> str:
    """A name as it was before an attribute of megatron-core's was renamed: its key in files stays.
    Since 0.17 that is the inner layer of multi-token prediction, since 0.19 Mamba's convolution."""
    name = _INNER_LAYER.sub(r"\1transformer_layer.", name)
    return _CONVOLUTION.sub(r"\1.\2", name)


def _layers(model: Any) -> dict[str, str]:
    """What names in each layer begin with -> what they do in the whole model: megatron-core's
    layers know their numbers."""
    out: dict[str, str] = {}
    for name, module in model.named_modules():
        found = _LAYER.fullmatch(name)
        if found is not None and hasattr(module, "layer_number"):
            out[f"{name}."] = f"{found[1]}.{module.layer_number - 1}."
    return out


def _expert_by_expert(name: str) -> str:
    """The name that a parameter of TEGroupedMLP has in a SequentialMLP; any other name as it is."""
    found = _GROUPED.fullmatch(name)
    if found is None:
        return name
    experts, matrix, kind, local = found.groups()
    return f"{experts}.local_experts.{local}.{matrix}.{kind}"


def moe_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """megatron-core's MoE layers, by name in the model."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            yield name, module


def expert_prefixes(model: torch.nn.Module) -> dict[str, str]:
    """What names of a rank's experts begin with -> what they do in the whole model."""
    return {
        f"{name}.experts.local_experts.{local}.": f"{name}.experts.local_experts.{number}."
        for name, layer in moe_layers(model)
        for local, number in enumerate(layer.local_expert_indices)
    }


# ---- derived
#
# How the parameters of a live model of megatron-core are cut, as the model itself says it: its
# `sharded_state_dict()` has the box of every parameter, whatever the model is.
#
# A box of this rank alone shows no cut where an axis has one rank. So the offsets are kept from
# which megatron-core makes each box: they name the dim that is cut, into however many parts.
# Where a module saves one parameter as several tensors (gate and up, the parts of a Mamba
# projection), the function that divides it is called on memory without values, and the strides of
# what it gives say which rows are which.


SOURCE = "the model's own sharded_state_dict()"
_DOWN, _DOWN_OF_QUERIES = "linear_kv_down_proj.weight", "linear_q_down_proj.weight"
_OFFSETS = "_ucp_offsets"  # of a ShardedTensor: those that it was made from


@dataclass(frozen=True)
class AxisShare:
    """Into how many parts the ranks cut a parameter, along which axis, and which part this rank
    has."""

    axis: str
    parts: int
    index: int


@dataclass(frozen=True)
class NoSizes:
    """A model that no family describes has none that a family's table could be made from."""


DeclaredTable = dict[str, Declared]
Offsets = tuple[tuple[int, int, int], ...]  # along dims: (dim, which part, of how many)
# by the id of a tensor, which is kept: while it lives no other one has that
_Given = dict[int, tuple[Any, Offsets]]


def derived_table(
    model: Any, names: Mapping[str, str], place: Place, whole: bool = True
) -> DeclaredTable:
    """What this rank's `model` says of its parameters: of each of them, where the table must be the
    `whole` of what is known. `names` are those of its state dict, each with the canonical one.

    Raises UnsupportedError, which names the parameter, for one that the model says nothing of, or
    says to be cut in a way that no layout has; LayoutError where it gives a layer or an expert
    another number.
    """
    out: DeclaredTable = {}
    with _without_values(model) as params:
        for entry, offsets in _entries(model):
            name = _known(params.get(id(entry.data), ()), names)
            if name is not None:
                shape = tuple(entry.data.shape)
                pieces = _pieces(name, entry, offsets, shape)
                _check_numbers(name, pieces)
                (axis,) = EXPERT_CUT if is_expert(name) else DENSE_CUT
                share = AxisShare(axis, *place[axis])
                declared = _declared(name, shape, pieces, share)
                _check_mark(name, entry.data, declared, share)
                out.setdefault(name, _with_extent(declared, entry, model))
        wanted = filter(None, (_known(own, names) for own in params.values()))
        missing = sorted({*wanted} - out.keys())
    _check_latents(model, out)
    if missing and whole:
        raise UnsupportedError(
            "the model does not say how a parameter is cut",
            parameter=missing[0],
            expected=f"an entry of {SOURCE} for it",
            found="none",
            fix="give its module a sharded_state_dict that has it, or name a family: family=",
            id="layout-unknown",
        )
    return out


def _check_mark(name: str, param: Any, declared: Declared, share: AxisShare) -> None:
    """Raises LayoutError for a parameter that megatron-core's layers mark as cut, and of which the
    model says that every rank has all: a save would have one rank's part of it."""
    is_marked = getattr(param, "tensor_model_parallel", False) and share.parts > 1
    if is_marked and declared.layout.is_whole:
        raise LayoutError(
            "a parameter is marked as cut, and the model says that every rank has all of it",
            parameter=name,
            expected=f"a cut along dim {param.partition_dim} in {SOURCE}",
            found=f"{declared.shape} on each of {share.parts} ranks",
            fix="let the sharded_state_dict of its module say how it is cut, or take the mark "
            "tensor_model_parallel away where all ranks do have the same",
        )


def digest_of(table: Mapping[str, Declared]) -> str:
    """Equal for tables that say the same."""
    said = [(name, one.shape, layout_to_json(one.layout)) for name, one in sorted(table.items())]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def said_together(own: Callable[[], DeclaredTable], at: Coords, speaks: bool) -> DeclaredTable:
    """What all ranks say, of which each has its `own`: the ranks at one place of the mesh (`at`)
    must say the same, and the first of them `speaks`. Collective. Raises what `own` raises on every
    rank, and LayoutError."""
    with agree.gathering() as told:
        table = own()
        told.value = at, digest_of(table), table if speaks else None
    said = {(place, digest) for place, digest, _ in told.values}
    if len(said) > len({place for place, _ in said}):
        return joined_tables(agree.gather(table))  # says where they differ
    return joined_tables([one or {} for _, _, one in told.values])


def joined_tables(tables: Sequence[Mapping[str, Declared]]) -> DeclaredTable:
    """What all ranks say together. Raises LayoutError where two say different things of one
    parameter: then the cut is none that a mesh axis makes."""
    out: DeclaredTable = {}
    first: dict[str, int] = {}
    for rank, table in enumerate(tables):
        for name, declared in table.items():
            known = out.setdefault(name, declared)
            if known.shape != declared.shape or known.layout != declared.layout:
                raise LayoutError(
                    "two ranks say different things of how a parameter is cut",
                    parameter=name,
                    expected=f"{known.shape}, {known.layout} as on rank {first[name]}",
                    found=f"{declared.shape}, {declared.layout} on rank {rank}",
                    fix=f"look at {SOURCE} on these ranks",
                )
            first.setdefault(name, rank)
    return out


def model_by_itself(table: DeclaredTable) -> Model:
    """A model that no family describes: all that is known of it is how it is cut."""
    return Model(Family("", lambda _: table, SOURCE, divided=lambda _: ()), NoSizes())


def require_agreement(model: Model, table: Mapping[str, Declared]) -> None:
    """Raises LayoutError where a family declares another shape or cut than the model has."""
    for name, own in table.items():
        declared = model.find(name)
        if declared.shape != own.shape or declared.layout != own.layout:
            raise LayoutError(
                "the family declares a parameter otherwise than the model says itself",
                file=model.family.source,
                parameter=name,
                expected=f"{own.shape}, {own.layout}, by {SOURCE}",
                found=f"{declared.shape}, {declared.layout}, by the family {model.family.name}",
                fix="give the family that the model was built with, or none",
            )


def _known(own: Iterable[str], names: Mapping[str, str]) -> str | None:
    """The canonical name of a parameter, which a module may have under several of its `own`."""
    return next((names[name] for name in own if name in names), None)


@contextmanager
def _without_values(model: Any) -> Iterator[dict[int, list[str]]]:
    """Inside, the model has parameters without memory in the place of its own, of the shapes before
    ZeRO divided them: nothing that the model does then can touch a value. Gives the names of each
    in the model's state dict."""
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    shadows: dict[int, Any] = {}
    made: set[int] = set()
    try:
        for module in model.modules():
            for name, param in list(module._parameters.items()):
                if param is not None:
                    shadow = shadows.setdefault(id(param), _shadow(param))
                    made.add(id(shadow))
                    swapped.append((module._parameters, name, param))
                    module._parameters[name] = shadow
        held = model.state_dict(keep_vars=True)
        found: dict[int, list[str]] = {}
        for name in held:
            if id(held[name]) in made:
                found.setdefault(id(held[name]), []).append(name)
        yield found
    finally:
        for params, name, param in swapped:
            params[name] = param


def _shadow(param: Any) -> torch.nn.Parameter:
    shape = getattr(param, "ds_shape", param.shape)
    empty = torch.empty(tuple(shape), dtype=param.dtype, device="meta")
    shadow = torch.nn.Parameter(empty, requires_grad=param.requires_grad)
    for name, value in vars(param).items():  # what its module marked it with
        if not name.startswith("ds_"):
            setattr(shadow, name, value)
    return shadow


def stored_keys(model: Any, names: Mapping[str, str]) -> ModelKeys:
    """The keys under which this rank's `model` asks for its parameters and for the extra states of
    its modules, when it loads what a save of this package wrote. `names` are as for
    `derived_table`. Raises UnsupportedError for a parameter of which it asks for parts that are no
    rows."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    params: dict[str, tuple[Stacking, ...]] = {}
    copies: dict[str, tuple[str, ...]] = {}
    with _without_values(model) as own:
        said, _ = _said_by(model, CONTENT)
        for name, value in model.state_dict(keep_vars=True).items():
            own.setdefault(id(value), [name])  # buffers, which have their own memory here too
        for entry in _tensors_of(said):
            name = _known(own.get(id(entry.data), ()), names)
            if name is None:
                continue
            found = tuple(_stackings(name, entry))
            first = params.setdefault(name, found)
            if found[0].key != first[0].key and not found[0].index:
                copies[name] = (*copies.get(name, ()), found[0].key)
    objects = [one.unique_key for one in _of_kind(said, (ShardedObject,))]
    asked = [key for key in objects if extra_state_name(key) is not None]
    return ModelKeys(params, asked, copies)


def joined_keys(found: Sequence[ModelKeys], params: Mapping[str, ParamSpec]) -> ModelKeys:
    """What all ranks ask for together. What no model says keys of has those of megatron-core's
    modules. So have the extra states of modules that this model has not: another implementation of
    the same layers asks for them, and who does not passes them over."""
    keys = {name: at for one in found for name, at in one.params.items()}
    layers = (at.key for name, (at, *_) in keys.items() if in_its_layer(name) is not None)
    stacked = any("layer" in read_key(key).stacked for key in layers)
    every = {name: keys.get(name) or keys_of(spec, stacked) for name, spec in params.items()}
    asked = [key for one in found for key in one.extra_states]
    copies = {name: other for one in found for name, other in one.copies.items()}
    extra = dict.fromkeys([*asked, *stacked_extra_states(params, stacked)])
    return ModelKeys(every, [*extra], copies)


def _stackings(name: str, entry: Any) -> Iterator[Stacking]:
    """The keys of one parameter, in the order of its rows."""
    pieces = _stored_pieces(name, entry, tuple(entry.data.shape))
    first = 0
    by_key: dict[str, Any] = {}
    for piece in sorted(pieces, key=lambda piece: piece.data.storage_offset()):
        by_key.setdefault(piece.key, piece)
    for key, piece in by_key.items():
        lead = piece.prepend_axis_num
        index = tuple(piece.global_offset[:lead])
        if len(by_key) == 1:
            yield Stacking(key, index)
            return
        rows, *others = piece.global_shape[lead:]
        if tuple(others) != tuple(piece.local_shape[1:]):
            raise _not_a_layout(name, f"{key} holds no rows")
        yield Stacking(key, index, first, first + rows)
        first += rows


def _entries(model: Any) -> Iterator[tuple[Any, Offsets | None]]:
    """What the model says of every tensor, with the offsets that it gave for all of it. Layers and
    experts have keys of their own."""
    said, given = _said_by(model, {"singleton_local_shards": True})
    for entry in _tensors_of(said):
        _, offsets = given.get(id(entry.data), (None, None))
        yield entry, offsets


def _tensors_of(said: Any) -> Iterator[Any]:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    return _of_kind(said, (ShardedTensor, ShardedTensorFactory))


def _said_by(model: Any, content: Mapping[str, Any]) -> tuple[Any, "_Given"]:
    """The model's `sharded_state_dict()` for files with such content, and the offsets that it gave.
    Raises UnsupportedError where it can't say it: its modules are anybody's code."""
    from megatron.core import parallel_state

    copies: Any = parallel_state.get_data_parallel_group(with_context_parallel=True)
    kept, said, given = agree.KeptBack(), None, _Given()
    with kept, _offsets_kept(given):
        said = model.sharded_state_dict(metadata={**content, "dp_cp_group": copies})
    if kept.error is not None:
        raise UnsupportedError(
            "the model can't say how its parameters are cut",
            expected=SOURCE,
            found=f"{type(kept.error).__name__}: {kept.error}",
            fix="mend that method of its modules: megatron-core's own saves call it too",
            id="layout-unknown",
        ) from kept.error
    return said, given


@contextmanager
def _offsets_kept(given: _Given) -> Iterator[None]:
    """Inside, a ShardedTensor keeps the offsets that it is made from; `given` has them by the
    tensor."""
    from megatron.core.dist_checkpointing import mapping

    tensor: Any = mapping.ShardedTensor
    stock = vars(tensor)["from_rank_offsets"]

    def made(kind: Any, key: str, data: Any, *offsets: Any, **more: Any) -> Any:
        out = stock.__func__(kind, key, data, *offsets, **more)
        setattr(out, _OFFSETS, offsets)
        given[id(data)] = data, offsets
        return out

    tensor.from_rank_offsets = classmethod(made)
    try:
        yield
    finally:
        tensor.from_rank_offsets = stock


def _of_kind(value: Any, kinds: tuple[type, ...]) -> Iterator[Any]:
    if isinstance(value, kinds):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        inner: Iterable[Any] = value.values() if isinstance(value, Mapping) else value
        for one in inner:
            yield from _of_kind(one, kinds)


@dataclass(frozen=True)
class _Piece:
    """Elements of a parameter that one ShardedTensor has: the view of them, and the offsets of it
    along dims of the parameter: (dim, which part, of how many). `key` is its name in files."""

    key: str
    view: torch.Tensor
    offsets: Offsets


def _pieces(name: str, entry: Any, offsets: Offsets | None, shape: Ints) -> list[_Piece]:
    """One for each ShardedTensor that an entry stands for; `offsets` are those of all of it."""
    return [_piece(name, one, offsets) for one in _stored_pieces(name, entry, shape)]


def _stored_pieces(name: str, entry: Any, shape: Ints) -> list[Any]:
    """The ShardedTensors that an entry stands for: itself, or those that a factory divides a
    parameter of this shape into, as views of one memory without values."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    if isinstance(entry, ShardedTensor):
        return [entry]
    whole = torch.empty(shape, device="meta")
    with _offsets_kept(_Given()):
        built = entry.build_fn(entry.key, whole, entry.replica_id, None)
    found = [*_of_kind(built, (ShardedTensor,))]
    memory = whole.untyped_storage()._cdata
    if any(one.data.untyped_storage()._cdata != memory for one in found):
        raise _not_a_layout(name, "a copy of its elements in another order")
    return found


def _piece(name: str, tensor: Any, of_whole: Offsets | None) -> _Piece:
    """A ShardedTensor; one that was narrowed from that of a whole parameter (the parts of a Mamba
    projection) has its offsets, if they say where it is."""
    offsets = getattr(tensor, _OFFSETS, of_whole)
    if offsets is None:
        raise _not_a_layout(name, "a tensor without offsets of ranks")
    for dim, index, of in offsets:
        if dim >= tensor.prepend_axis_num:
            size = tensor.local_shape[dim - tensor.prepend_axis_num]
            if (tensor.global_offset[dim], tensor.global_shape[dim]) != (index * size, of * size):
                raise _not_a_layout(name, f"{tensor.key} from {tensor.global_offset[dim]} on")
    before = tensor.prepend_axis_num
    own = tuple((dim - before, index, of) for dim, index, of in offsets if dim >= before)
    return _Piece(tensor.key, tensor.data, own)


def _check_numbers(name: str, pieces: Sequence[_Piece]) -> None:
    """Raises LayoutError where a key has other numbers of layers or experts than the name."""
    for piece in pieces:
        if _numbers(piece.key) != _numbers(name):
            raise LayoutError(
                "a module and its files number a layer or an expert differently",
                parameter=name,
                expected=f"the numbers of {name}",
                found=piece.key,
                fix=f"look at the layer_number of the modules, and at {SOURCE}",
            )


def _check_latents(model: Any, table: Mapping[str, Declared]) -> None:
    """Raises LayoutError for a down projection of latent attention that every rank has whole, and
    that its module says to be cut: megatron-core does so of a fused one, whatever it is made of."""
    config: Any = getattr(model, "config", None)
    rank, queries = (getattr(config, name, None) for name in ("kv_lora_rank", "q_lora_rank"))
    for name, declared in table.items():
        rows = queries if name.endswith(_DOWN_OF_QUERIES) else None
        if rank and name.endswith(_DOWN):
            rows = rank + config.qk_pos_emb_head_dim
        if rows and declared.shape[0] != rows:
            raise LayoutError(
                "a down projection has other rows than the model's config says",
                parameter=name,
                expected=f"{rows} rows in the whole model",
                found=f"{declared.shape[0]} rows, {declared.layout}, by {SOURCE}",
                fix="build the layer so that it is cut, or give its module a sharded_state_dict "
                "that says it is whole: such a file would hold each rank's copy as another part",
            )


def _numbers(name: str) -> list[str]:
    return re.findall(r"(?<=\.)\d+(?=\.)", name)


def _declared(name: str, shape: Ints, pieces: Sequence[_Piece], share: AxisShare) -> Declared:
    """The whole shape and the layout. Raises UnsupportedError."""
    dims = {dim for piece in pieces for dim, _, _ in piece.offsets}
    if not dims and len(pieces) == 1:
        return Declared(shape, Replicate())
    if len(dims) != 1:
        raise _not_a_layout(name, f"cut along the dims {sorted(dims)}")
    (dim,) = dims
    for piece in pieces:
        if any((index, of) != (share.index, share.parts) for _, index, of in piece.offsets):
            raise _not_a_layout(name, f"{piece.key} cut as {piece.offsets}")
    sizes = _rows(name, shape, dim, pieces)
    whole = (*shape[:dim], shape[dim] * share.parts, *shape[dim + 1 :])
    return Declared(whole, _cut_along(share, dim, sizes))


def _cut_along(share: AxisShare, dim: int, sizes: Sequence[int]) -> Layout:
    """`sizes` are those that this rank has of each part along the dim."""
    if len(sizes) == 1:
        return Shard(share.axis, dim)
    return ShardNC(share.axis, dim, tuple(size * share.parts for size in sizes))


def _rows(name: str, shape: Ints, dim: int, pieces: Sequence[_Piece]) -> list[int]:
    """The sizes of the pieces along a dim, in the order of the memory. Raises UnsupportedError
    where they are not all of the parameter, one after the other."""
    steps, at, out = strides(shape), 0, []
    for view in sorted((piece.view for piece in pieces), key=lambda view: view.storage_offset()):
        fits = [size == whole for size, whole in zip(view.shape, shape, strict=True)]
        others = [fit for number, fit in enumerate(fits) if number != dim]
        if view.storage_offset() != at * steps[dim] or tuple(view.stride()) != steps:
            raise _not_a_layout(name, "its elements in another order")
        if not all(others):
            raise _not_a_layout(name, f"a part of the shape {tuple(view.shape)}")
        out.append(view.shape[dim])
        at += view.shape[dim]
    if at != shape[dim]:
        raise _not_a_layout(name, f"{at} of {shape[dim]} rows")
    return out


def _with_extent(declared: Declared, entry: Any, model: Any) -> Declared:
    """With what is data of a padded vocabulary, where the model knows it."""
    true, padded = getattr(model, TRUE_VOCAB, None), getattr(entry, "allow_shape_mismatch", False)
    if true is None or not padded:
        return declared
    return Declared(declared.shape, declared.layout, extent=Extent(true, declared.shape[0]))


def _not_a_layout(name: str, found: str) -> UnsupportedError:
    return UnsupportedError(
        "the model cuts a parameter in a way that no layout has",
        parameter=name,
        expected="one dim, cut evenly along an axis of the mesh",
        found=found,
        fix="register a family that declares it (megatron_ucp.register_family), or save and load "
        "with Megatron-LM's own functions on the same mesh",
        id="layout-unknown",
    )


# ---- family
#
# The family of a live stack, at the sizes of its own config, compared with what the model says
# itself; or that alone.


def table_of(chunks: Sequence[Any], mesh: Mesh) -> DeclaredTable:
    """What the chunks of all ranks say of how their parameters are cut. Collective. Raises
    UnsupportedError, LayoutError on every rank."""
    rank = torch.distributed.get_rank()
    at = mesh.at(rank, dict(mesh.holding()[0]))
    place = mesh.place(mesh.at(rank, (*DENSE_CUT, *EXPERT_CUT)))

    def own() -> DeclaredTable:
        models = [bare_model(chunk) for chunk in chunks]
        tables = [derived_table(one, canonical_names(one), place) for one in models]
        return {name: declared for table in tables for name, declared in table.items()}

    return said_together(own, at, rank == mesh.rank_of(at, 0))


def keys_of_chunks(chunks: Sequence[Any], params: Mapping[str, ParamSpec]) -> ModelKeys:
    """The keys under which the chunks of all ranks ask for what a save holds. Collective. Raises
    UnsupportedError on every rank."""
    with agree.gathering() as told:
        models = [bare_model(chunk) for chunk in chunks]
        told.value = [stored_keys(one, canonical_names(one)) for one in models]
    return joined_keys([keys for own in told.values for keys in own], params)


def model_of(
    module: Any, table: Mapping[str, Declared], tp: int, family: str | Family | None
) -> Model:
    """The family at the sizes of the bare model `module`, which says of itself what `table` has.
    Without one, the first registered family that is built as the model is (norms, biases, gates,
    positions, experts) and whose table has all of its parameters; where none is, the table alone.

    Raises UsageError for a family that does not fit, LayoutError where the tensor-parallel size
    does not divide the model, or where family and model say different things.
    """
    shapes = {name: declared.shape for name, declared in table.items()}
    built = model_as_built(module, shapes) if family is None else None
    found = built.family if built else family
    if found is None:
        say.note(
            "no family describes this model: how it is cut is what the model says itself; an "
            "export to Hugging Face needs a family"
        )
        return model_by_itself(dict(table))
    model = model_of_module(found, module, tp)
    require_agreement(model, table)
    return model
