"""Files that are written: their pickled trees, and where the bytes of each storage come from."""

from dataclasses import dataclass, field
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.mesh import Coords
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.values import Stand
from megatron_ucp.formats.pt.unpickler import with_tensors
from megatron_ucp.formats.pt.values import TensorRef
from megatron_ucp.formats.pt.writer import contiguous


@dataclass(frozen=True, slots=True)
class Weight:
    """The training copy of a parameter that a tensor-parallel rank has: its master in the training
    dtype."""

    param: str
    cut: Coords


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the source's model file that belongs to no parameter (client state, scheduler):
    copied as it is."""

    ref: TensorRef


Payload = Slot | Weight | Stored | bytes


@dataclass
class Output:
    """One .pt file: its name in the tag folder, its tree, and what fills each storage, by key."""

    name: str
    tree: Any = None
    payloads: dict[str, Payload] = field(default_factory=dict[str, Payload])

    def tensor(
        self, payload: Payload, dtype: str, shape: Ints, used: Ints | None = None
    ) -> TensorRef:
        """A tensor that fills a storage of its own, or of which only the first `used` elements are
        one."""
        key = str(len(self.payloads))
        self.payloads[key] = payload
        ref = contiguous(key, dtype, shape)
        return ref if used is None else TensorRef(ref.storage, 0, used, (1,) * len(used))

    def adopt(self, value: Any) -> Any:
        """A value of the source's model file, with the tensors in it, for this file."""
        return with_tensors(value, self._adopted)

    def _adopted(self, found: TensorRef | Stand) -> TensorRef:
        if isinstance(found, TensorRef):
            return self.tensor(Stored(found), found.storage.dtype, found.shape)
        data: Any = found.get("data")
        shape: Any = found.get("shape")
        return self.tensor(data, str(found.get("dtype")), shape)
