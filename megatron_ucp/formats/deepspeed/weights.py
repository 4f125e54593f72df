"""Where a checkpoint keeps weights and buffers: in the model file of each rank, or in one file per
layer of a pipeline."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.manifest import Tie
from megatron_ucp.errors import DamagedFileError, ForeignFileError
from megatron_ucp.formats.deepspeed.model_file import (
    buffer_names,
    find_ties,
    frozen_shapes,
    shapes_by_group,
)
from megatron_ucp.formats.deepspeed.paths import missing_layers
from megatron_ucp.formats.deepspeed.pipe_names import PipeNames
from megatron_ucp.formats.deepspeed.side_data import without_side_data
from megatron_ucp.formats.deepspeed.tag_folder import TagFolder
from megatron_ucp.formats.foreign import texts
from megatron_ucp.formats.pt.unpickler import TensorRef


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
        self._modules: dict[int, dict[str, Any]] = {}
        self._side: dict[int, dict[str, Any]] = {}

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
        texts(list(module), "module", self._folder.full_path(self._files[tp]))
        return _under_own_names(module, self._renamed) if self._renamed else module

    def module(self, tp: int = 0) -> Mapping[str, Any]:
        if tp not in self._modules:
            found = without_side_data(self._read(tp), self._own_names(tp))
            self._modules[tp], self._side[tp] = found
        return self._modules[tp]

    def _own_names(self, tp: int) -> set[str]:
        """The parameters and buffers that a model file lists."""
        file = self._files[tp]
        meta, path = self._folder.tree(file), self._folder.full_path(file)
        trained = shapes_by_group(meta, path) or []
        listed = [*trained, frozen_shapes(meta, path), dict.fromkeys(buffer_names(meta, path), ())]
        return {name for names in listed for name in names}

    def side_data(self) -> Mapping[str, Any]:
        self.module()
        return self._side[0]

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
        self._held: dict[int, tuple[dict[str, Any], dict[str, str]]] = {}

    def name_of(self, name: str, file: str) -> str:
        return self._names.find(name, file)

    def module(self, tp: int = 0) -> Mapping[str, Any]:
        return self._read(tp)[0]

    def file_of(self, name: str, tp: int = 0) -> str:
        return self._read(tp)[1].get(name, "")

    def _read(self, tp: int) -> tuple[dict[str, Any], dict[str, str]]:
        """Of a tensor-parallel rank by canonical name: tensors, and the names of their files."""
        if tp not in self._held:
            found: dict[str, Any] = {}
            files: dict[str, str] = {}
            for name, value, file in self._entries(tp):
                if name not in files:
                    found[name], files[name] = value, file
            self._held[tp] = found, files
        return self._held[tp]

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
