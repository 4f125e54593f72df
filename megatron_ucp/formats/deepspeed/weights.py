"""The weights and buffers of a DeepSpeed tag: what model files say of them, and where they lie."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import ContradictionError
from megatron_ucp.core.grouping import grouped, kept
from megatron_ucp.core.layers import TIED
from megatron_ucp.core.manifest import Tie
from megatron_ucp.errors import DamagedFileError, ForeignFileError, ModelMismatchError
from megatron_ucp.formats import expect
from megatron_ucp.formats.deepspeed.config import DeepSpeedConfig
from megatron_ucp.formats.deepspeed.files import TagFolder, missing_layers
from megatron_ucp.formats.pt.refs import TensorRef

# ---- model file
#
# What a model file says besides its tensors: how parameters are flattened, in which dtype it
# trains, which names are one.


Tree = Mapping[str, Any]
_FROZEN, _SHARED = "frozen_param_shapes", "shared_params"


def shapes_by_group(meta: Tree, file: str) -> list[dict[str, Ints]] | None:
    """`param_shapes` of a model file, which older versions wrote as one dict for all; None at stage
    0. Raises DamagedFileError."""
    shapes = meta.get("param_shapes")
    shapes = [shapes] if isinstance(shapes, dict) else shapes
    if shapes is None or (
        isinstance(shapes, list)
        and all(
            isinstance(named, dict)
            and all(
                isinstance(name, str)
                and isinstance(shape, tuple)
                and all(type(n) is int and n >= 0 for n in shape)
                for name, shape in named.items()
            )
            for named in shapes
        )
    ):
        return shapes
    raise DamagedFileError(
        "the model file does not say how parameters are flattened",
        file=file,
        expected="param_shapes: names and shapes",
        found=type(shapes).__name__,
    )


def frozen_shapes(meta: Tree, file: str) -> dict[str, Ints]:
    """Names and shapes of frozen parameters, as a model file says them. Raises DamagedFileError."""
    said = expect.key_or(meta, _FROZEN, {}, file)
    return {
        expect.kind(name, str, _FROZEN, file): expect.sizes(one, name, file)
        for name, one in said.items()
    }


def buffer_names(meta: Tree, file: str) -> list[str]:
    """What a model file says of module buffers. Raises DamagedFileError."""
    return expect.texts(meta.get("buffer_names"), "buffer_names", file)


def shared_params(meta: Tree, file: str) -> dict[str, str]:
    """Further names of parameters, with the first ones. Raises DamagedFileError."""
    said = expect.key_or(meta, _SHARED, {}, file)
    expect.texts([*said, *said.values()], _SHARED, file)
    return said


def training_dtype(meta: Tree, module: Tree, names: Iterable[str]) -> str:
    """Of the weights of a model file: as its config says; older files have none, but weights."""
    config = meta.get("ds_config")
    if config is None:
        found = [ref.storage.dtype for ref in map(module.get, names) if isinstance(ref, TensorRef)]
        return found[0] if found else "float32"
    return DeepSpeedConfig(config).dtype


def find_ties(meta: Tree, module: Tree, flat: Iterable[str], file: str) -> tuple[Tie, ...]:
    """Names that share memory in the file, plus what its `shared_params` says; the name that is
    flattened comes first. DeepSpeed takes parameters without elements for one, as their memory
    begins at one place: they are not."""
    flat, shapes = set(flat), frozen_shapes(meta, file)
    by_place = grouped(
        ((ref.storage.key, ref.offset_elems, ref.shape), name)
        for name, ref in module.items()
        if isinstance(ref, TensorRef) and ref.numel
    )
    groups: dict[str, list[str]] = {}
    for names in by_place.values():
        first = next((name for name in names if name in flat), names[0])
        groups.setdefault(first, []).extend(name for name in names if name != first)
    for alias, name in shared_params(meta, file).items():
        shape = shapes.get(name, getattr(module.get(name), "shape", ()))
        is_empty = name not in flat and 0 in shape
        if not is_empty and alias not in groups.setdefault(name, []):
            groups[name].append(alias)
    return tuple(Tie(name, tuple(aliases)) for name, aliases in groups.items() if aliases)


# ---- side data
#
# What layers with quantized weights add to a model's state dict: scales, maps and settings beside
# each weight, which are no parameters and no buffers.
#
# They belong to frozen weights, and follow from the base model: its loader quantizes anew and
# makes the same ones. So no load sets them. They are left out of the weights, and given to
# whoever compares them with a live model's.


# bitsandbytes: of a weight in 4 bits, behind its own name; of one in 8 bits, in the weight's place
_BITSANDBYTES = re.compile(
    r".+\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\.bitsandbytes__\w+)|"
    r"(?:.+\.)?(?:SCB|weight_format)"
)
# HQQ: of a layer, beside W_q. Most of these names say nothing by themselves.
_HQQ = re.compile(
    r"(?P<layer>.+)\.(?:nbits|group_size|shape|scale|zero|axis|packing|unpack_view_dtype|"
    r"view_as_float|quant_scale|quant_zero|compute_dtype|offload_meta|channel_wise|round_zero|"
    r"optimize|stores_quant_config|encoded_state_dict|max_scale|min_scale)"
)
_OF_EVERY_HQQ = ("nbits", "group_size", "axis")


def is_side_data(name: str, entries: Collection[str]) -> bool:
    """Whether an entry of a state dict with these `entries` is what a quantized layer adds."""
    if _BITSANDBYTES.fullmatch(name):
        return True
    found = _HQQ.fullmatch(name)
    return found is not None and all(f"{found['layer']}.{one}" in entries for one in _OF_EVERY_HQQ)


def without_side_data(
    module: Mapping[str, Any], own: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of a state dict without those that quantized layers add, and those; `own` are
    the names of the model's parameters and buffers, as far as the files list them."""
    side = {
        name: value
        for name, value in module.items()
        if name not in own and is_side_data(name, module)
    }
    return {name: value for name, value in module.items() if name not in side}, side


def said_of_side_data(names: Collection[str]) -> list[str]:
    """A note of it; none where there is none."""
    if not names:
        return []
    return [
        f"the weights of the base are quantized: {len(names)} scales and settings beside them "
        f"({min(names)}, ...) are not set by any load, nor converted; the base's own loader makes "
        "them anew"
    ]


# ---- pipe names
#
# Names in a DeepSpeed pipeline and the canonical ones: a PipelineModule names parameters by
# position in its list of layers.
#
# `3.mlp.linear_fc1.weight` is a parameter of the layer at position 3; `tied_modules.embed.weight`
# one of a module that several stages hold. Layer files hold the part after the position, or after
# the key of the tied module.


_PIPE = re.compile(rf"([0-9]{{1,6}}|{TIED}\.[^.]+)\..+")


@dataclass(frozen=True)
class PipeNames:
    """`canonical` maps the name of every parameter in the pipeline to its canonical one."""

    canonical: Mapping[str, str]

    def __post_init__(self) -> None:
        for pipe in self.canonical:
            if not _PIPE.fullmatch(pipe):
                raise ContradictionError(f"{pipe!r} is no name in a pipeline")

    @cached_property
    def tied(self) -> frozenset[str]:
        """Canonical names of what several stages may hold."""
        return frozenset(
            name for pipe, name in self.canonical.items() if pipe.startswith(f"{TIED}.")
        )

    @cached_property
    def _heads(self) -> dict[str, dict[str, str]]:
        """By position or tied module: the rest of the name -> canonical name."""
        out: dict[str, dict[str, str]] = {}
        for pipe, name in self.canonical.items():
            head, rest = _split(pipe)
            out.setdefault(head, {})[rest] = name
        return out

    @property
    def layers(self) -> list[int]:
        """Positions that hold parameters of their own, in order."""
        return sorted(int(head) for head in self._heads if head.isdigit())

    def find(self, pipe: str, file: str | None = None) -> str:
        """The canonical name of a parameter, or of a buffer of a module that has parameters. Raises
        ModelMismatchError."""
        if pipe in self.canonical:
            return self.canonical[pipe]
        return self._renamed(*_split(pipe), file)

    def of_layer(self, layer: int, key: str, keys: frozenset[str], file: str) -> str:
        """The canonical name of `key` in the file of a layer that holds `keys`. Raises
        ModelMismatchError."""
        if str(layer) in self._heads:
            return self._renamed(str(layer), key, file)
        for head, names in self._heads.items():
            if head.startswith(f"{TIED}.") and names.keys() <= keys:
                return self._renamed(head, key, file)
        return self._renamed(str(layer), key, file)

    def _renamed(self, head: str, rest: str, file: str | None) -> str:
        known = self._heads.get(head, {})
        if rest in known:
            return known[rest]
        prefixes = {name.removesuffix(end) for end, name in known.items()}
        # a parameter must be declared; what lies beside parameters at the same place, a buffer,
        # gets the same prefix
        if (
            len(prefixes) == 1
            and not rest.endswith((".weight", ".bias"))
            and rest not in ("weight", "bias")
        ):
            return f"{prefixes.pop()}{rest}"
        raise ModelMismatchError(
            "the pipeline holds a parameter that the model lacks",
            file=file,
            parameter=f"{head}.{rest}",
            expected=f"positions 0 to {max(self.layers, default=0)}",
            found=f"{rest} at {head}",
        )


def _split(pipe: str) -> tuple[str, str]:
    parts = pipe.split(".")
    count = 2 if parts[0] == TIED else 1
    return ".".join(parts[:count]), ".".join(parts[count:])


# ---- weights
#
# Where a checkpoint keeps weights and buffers: in the model file of each rank, or in one file per
# layer of a pipeline.


class Weights:
    """Weights and buffers by canonical name."""

    def name_of(self, name: str, file: str) -> str:
        """The canonical name of a parameter that a file calls `name`. Raises ModelMismatchError."""
        raise NotImplementedError

    def module(self, tp: int = 0) -> Mapping[str, Any]:
        """What a tensor-parallel rank has, of all stages: name -> tensor reference."""
        raise NotImplementedError

    def file_of(self, name: str, tp: int = 0) -> str:
        """Name of the file that keeps a weight of `module`."""
        raise NotImplementedError

    def ties(self, flat: Iterable[str]) -> tuple[Tie, ...]:
        """Names of one and the same memory; none where all stages that hold a parameter have one
        canonical name for it."""
        return ()

    def extra_states(self) -> dict[str, Any]:
        """What modules keep besides tensors, by canonical name: for most of them nothing (see
        `no_extra_state`), which a strict load asks for all the same."""
        raise NotImplementedError

    def side_data(self) -> Mapping[str, Any]:
        """What quantized layers keep beside their weights (see `side_data`), of the first rank."""
        return {}

    def check(self, file: str) -> None:
        """Compares a file with the first one of its kind. Raises ForeignFileError."""


class WholeModel(Weights):
    """No pipeline: `module` in the model file of each tensor-parallel rank. A hook of the model's
    state dict may have `renamed` some entries: their names, and those of the model."""

    def __init__(
        self, folder: TagFolder, files: Mapping[int, str], renamed: Mapping[str, str]
    ) -> None:
        self._folder, self._files, self._renamed = folder, files, renamed

    def name_of(self, name: str, file: str) -> str:
        return name

    def _read(self, tp: int) -> dict[str, Any]:
        module = self._folder.tree(self._files[tp]).get("module")
        if not isinstance(module, dict):
            raise DamagedFileError(
                "the model file holds no weights",
                file=self._folder.full_path(self._files[tp]),
                expected="module, or layer files beside it",
                found=type(module).__name__,
            )
        module = by_dotted_name(module)
        expect.texts(list(module), "module", self._folder.full_path(self._files[tp]))
        return _under_own_names(module, self._renamed) if self._renamed else module

    def module(self, tp: int = 0) -> Mapping[str, Any]:
        return self._parts(tp)[0]

    @kept
    def _parts(self, tp: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The weights of a rank, and its side data."""
        return without_side_data(self._read(tp), self._own_names(tp))

    def _own_names(self, tp: int) -> set[str]:
        """The parameters and buffers that a model file lists."""
        file = self._files[tp]
        meta, path = self._folder.tree(file), self._folder.full_path(file)
        trained = shapes_by_group(meta, path) or []
        listed = [*trained, frozen_shapes(meta, path), dict.fromkeys(buffer_names(meta, path), ())]
        return {name for names in listed for name in names}

    def side_data(self) -> Mapping[str, Any]:
        return self._parts(0)[1]

    def file_of(self, name: str, tp: int = 0) -> str:
        return self._files[tp]

    def ties(self, flat: Iterable[str]) -> tuple[Tie, ...]:
        first = self._files[0]
        return find_ties(
            self._folder.tree(first), self.module(), flat, self._folder.full_path(first)
        )

    def extra_states(self) -> dict[str, Any]:
        first = self._files[0]
        named = {*buffer_names(self._folder.tree(first), self._folder.full_path(first))}
        held = self.module().items()
        return {name: value for name, value in held if is_extra_state(name) and name not in named}


class PipelineWeights(Weights):
    """Those of a pipeline, whose names are mapped. Of what several stages hold the first one's is
    read."""

    def __init__(self, names: PipeNames) -> None:
        self._names = names

    def name_of(self, name: str, file: str) -> str:
        return self._names.find(name, file)

    def module(self, tp: int = 0) -> Mapping[str, Any]:
        return self._read(tp)[0]

    def file_of(self, name: str, tp: int = 0) -> str:
        return self._read(tp)[1].get(name, "")

    @kept
    def _read(self, tp: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Of a tensor-parallel rank by canonical name: tensors, and the names of their files."""
        found: dict[str, Any] = {}
        files: dict[str, str] = {}
        for name, value, file in self._entries(tp):
            if name not in files:
                found[name], files[name] = value, file
        return found, files

    def _entries(self, tp: int) -> Iterator[tuple[str, Any, str]]:
        """Canonical name, tensor and name of the file of all that a rank has, stage by stage."""
        raise NotImplementedError


class StageModels(PipelineWeights):
    """A pipeline whose stages have their weights in model files, as DeepSpeed writes one with
    experts: `files` by (stage, tensor-parallel rank)."""

    def __init__(
        self, folder: TagFolder, names: PipeNames, files: Mapping[tuple[int, int], str]
    ) -> None:
        super().__init__(names)
        self._stages = {at: WholeModel(folder, {0: file}, {}) for at, file in files.items()}

    def _entries(self, tp: int) -> Iterator[tuple[str, Any, str]]:
        for (_, rank), stage in sorted(self._stages.items()):
            for name, value in stage.module().items() if rank == tp else ():
                if not no_extra_state(name, value):
                    file = stage.file_of(name)
                    yield self.name_of(name, file), value, file

    def extra_states(self) -> dict[str, Any]:
        return {
            self._names.find(name): value
            for (_, rank), stage in sorted(self._stages.items())
            for name, value in (stage.extra_states().items() if rank == 0 else ())
            if is_nothing(value)
        }


class LayerFiles(PipelineWeights):
    """A pipeline: one file per position and tensor-parallel rank, with names relative to the layer.

    Raises NotFoundError for a file that is missing, ForeignFileError for one too many.
    """

    def __init__(self, folder: TagFolder, names: PipeNames, tp: int) -> None:
        super().__init__(names)
        self._folder, self._files = folder, folder.names.layers
        wanted = {
            (layer, rank)
            for layer in (*names.layers, *(layer for layer, _ in self._files))
            for rank in range(tp)
        }
        missing = sorted(wanted - set(self._files))
        if missing:
            raise missing_layers(folder.folder, len(missing), *missing[0])
        extra = sorted(set(self._files) - wanted)
        if extra:
            raise ForeignFileError(
                "there are layer files of more tensor-parallel ranks than the run had",
                file=folder.full_path(self._files[extra[0]]),
                expected=tp,
                found=extra[0][1] + 1,
            )

    def _entries(self, tp: int) -> Iterator[tuple[str, Any, str]]:
        for (layer, rank), file in sorted(self._files.items()):
            for name, value in self._layer(layer, file).items() if rank == tp else ():
                yield name, value, file

    def _layer(self, layer: int, file: str) -> dict[str, Any]:
        """One file's tensors by canonical name; a megatron-core linear's `_extra_state` is none."""
        tree = {
            key: value
            for key, value in self._folder.tree(file).items()
            if not no_extra_state(key, value)
        }
        path = self._folder.full_path(file)
        if not all(isinstance(key, str) for key in tree):
            raise DamagedFileError(
                "a layer file holds other things than names and tensors", file=path
            )
        return {
            self._names.of_layer(layer, key, frozenset(tree), path): value
            for key, value in tree.items()
        }

    def extra_states(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for (layer, rank), file in sorted(self._files.items()):
            tree = self._folder.tree(file) if rank == 0 else {}
            keys = frozenset(key for key, value in tree.items() if not no_extra_state(key, value))
            out |= {
                self._names.of_layer(layer, key, keys, file): value
                for key, value in tree.items()
                if key not in keys
            }
        return out

    def check(self, file: str) -> None:
        ((layer, rank),) = (place for place, name in self._files.items() if name == file)
        ours, theirs = (_shapes(self._layer(layer, self._files[layer, r])) for r in (0, rank))
        if ours != theirs:
            name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
            raise ForeignFileError(
                "a layer file differs from the one of the first tensor-parallel rank",
                file=self._folder.full_path(file),
                parameter=name,
                expected=ours.get(name),
                found=theirs.get(name),
            )


def by_dotted_name(
    module: Mapping[Any, Any], seen: set[int] | None = None, levels: int = 8
) -> dict[Any, Any]:
    """The entries by dotted name: Megatron-DeepSpeed saves a tree of dictionaries, of four levels.
    What was `seen`, or is deeper than `levels`, is left as it is: a file may have a dictionary in
    itself, or a million times."""
    seen = set() if seen is None else seen
    out: dict[Any, Any] = {}
    for name, value in module.items():
        rest: dict[Any, Any] = {}
        inner = isinstance(value, dict) and id(value) not in seen and levels > 0
        if inner and not is_extra_state(name):
            seen.add(id(value))
            rest = by_dotted_name(value, seen, levels - 1)
        out |= {f"{name}.{one}": held for one, held in rest.items()} or {name: value}
    return out


def _under_own_names(module: Mapping[str, Any], renamed: Mapping[str, str]) -> dict[str, Any]:
    """The entries under the names that the model has, where those are not among them."""
    others = {name: own for name, own in renamed.items() if own not in module}
    out: dict[str, Any] = {}
    for name, value in module.items():
        out.setdefault(others.get(name, name), value)
    return out


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[Ints, str] | None]:
    return {
        name: (ref.shape, ref.storage.dtype) if isinstance(ref, TensorRef) else None
        for name, ref in tensors.items()
    }


def is_extra_state(name: str) -> bool:
    """Whether an entry is what a module's own `get_extra_state` gave."""
    return str(name).rpartition(".")[2] == "_extra_state"


def no_extra_state(name: str, value: Any) -> bool:
    """megatron-core's local layer spec has an `_extra_state` per linear layer that says nothing:
    None, or empty."""
    return is_extra_state(name) and is_nothing(value)


def is_nothing(value: Any) -> bool:
    """Whether an extra state says nothing."""
    return value is None or (isinstance(value, TensorRef) and not value.numel)
