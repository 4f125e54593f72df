"""A live value as a .pt file: the pickle that `torch.save` makes of it, and the memory that its
records hold. Nothing is copied."""

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.serialization import location_tag

from megatron_ucp.formats.pt.writer import ArchiveLayout, archive_of

_PROTOCOL = 2  # as torch.save


@dataclass(frozen=True)
class LiveArchive:
    """The file `path`, in which the storage of a key lies from byte `layout.places[key]` on.
    `memory` has the bytes of each storage where they are now, flat, on any device."""

    path: Path
    layout: ArchiveLayout
    memory: Mapping[str, torch.Tensor]


def live_archive(value: object, path: Path) -> LiveArchive:
    """What `torch.save(value, path)` would write. Raises what `pickle` raises for a value that it
    can't take, RuntimeError for memory that is saved under two dtypes."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(value)
    sizes = {key: storage.nbytes() for key, storage in pickler.storages.items()}
    layout = archive_of(path.stem, stream.getvalue(), sizes)
    memory = {key: storage_bytes(storage) for key, storage in pickler.storages.items()}
    return LiveArchive(path, layout, memory)


def storage_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """The memory of a storage, as flat bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Pickler(pickle.Pickler):
    """Keeps storages apart, under the ids that `torch.load` knows. Source of the ids: the function
    `_save` of torch/serialization.py."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=_PROTOCOL)
        self.storages: dict[str, torch.UntypedStorage] = {}
        self._keys: dict[int, str] = {}  # by the storage's place in memory of torch
        self._dtypes: dict[int, torch.dtype] = {}  # by the first byte

    def persistent_id(self, obj: Any) -> Any:
        """Of a storage; None for all else, which is pickled."""
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype
            kind, elems = getattr(torch, obj._pickle_storage_type()), obj._size()
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype = obj, torch.uint8
            kind, elems = torch.UntypedStorage, obj.nbytes()
        else:
            return None
        if storage.data_ptr() and self._dtypes.setdefault(storage.data_ptr(), dtype) != dtype:
            raise RuntimeError("two tensors of different dtypes share their memory")
        key = self._keys.setdefault(storage._cdata, str(len(self._keys)))
        self.storages[key] = storage
        return "storage", kind, key, location_tag(storage), elems
