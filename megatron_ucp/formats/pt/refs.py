"""What a pickle of torch can hold besides plain values (`core/values`): tensors and storages, by
place."""

import itertools
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

from megatron_ucp.core.box import dims_in_memory
from megatron_ucp.core.names import ITEMSIZE
from megatron_ucp.core.values import TENSOR, InertObject
from megatron_ucp.errors import DamagedFileError, UnsupportedError


@dataclass(frozen=True, slots=True)
class StorageRef:
    """One storage record, `<archive>/data/<key>`, of `elems` elements of `dtype`."""

    IS_SHORT: ClassVar = True  # of its text

    key: str
    dtype: str
    elems: int

    @property
    def size_bytes(self) -> int:
        return self.elems * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A tensor as a view of a storage; offset and strides in elements. Its last element lies inside
    the storage."""

    IS_SHORT: ClassVar = True

    storage: StorageRef
    offset_elems: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last one."""
        if not self.numel:
            return 0
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return (last + 1) * ITEMSIZE[self.storage.dtype]

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps, as torch defines it (dims of size 1 do
        not count)."""
        return self.order == tuple(range(len(self.shape)))

    @property
    def order(self) -> tuple[int, ...] | None:
        """See `dims_in_memory`."""
        return dims_in_memory(self.shape, self.stride)

    def lies_in(self, order: tuple[int, ...] | None) -> bool:
        """Whether the elements lie without gaps, the dims in an order (None: their own)."""
        return self.is_contiguous if order is None else self.order == order


MAX_ELEMS = 2**20  # of a tensor that is a plain value
_CODES = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i", "bool": "<?"}


def tensor_value(
    ref: TensorRef, data: bytes | bytearray, file: str, max_elems: int = MAX_ELEMS
) -> InertObject:
    """A small tensor as a plain value; `data` are the `span_bytes` from its first element on.
    Raises UnsupportedError for a large one."""
    if ref.numel > max_elems:
        raise UnsupportedError(
            "a tensor among plain values is too large",
            file=file,
            expected=f"at most {max_elems} elements",
            found=str(ref.shape),
            fix="keep large tensors as parameters or buffers of the model, or in a file "
            "of your own",
        )
    size = ITEMSIZE[ref.storage.dtype]
    if not ref.is_contiguous:
        places = (
            sum(at * step for at, step in zip(index, ref.stride, strict=True)) * size
            for index in itertools.product(*map(range, ref.shape))
        )
        data = b"".join(data[place : place + size] for place in places)
    return tensor_object(ref.storage.dtype, ref.shape, bytes(data))


def tensor_object(dtype: str, shape: tuple[int, ...], data: bytes) -> InertObject:
    """A tensor as a plain value: its elements in C order."""
    return InertObject(TENSOR, (), {"dtype": dtype, "shape": tuple(shape), "data": data})


def number_in(tensor: InertObject, file: str) -> float:
    """The number that a tensor of one element is. Raises DamagedFileError for any other."""
    dtype, data = str(tensor.get("dtype")), tensor.get("data")
    code = _CODES.get(dtype)
    if code is None or not isinstance(data, bytes) or len(data) != struct.calcsize(code):
        raise DamagedFileError(
            "a scalar state is no number", file=file, found=f"{dtype} {tensor.get('shape')}"
        )
    return float(struct.unpack(code, data)[0])


def storages_of(tree: object) -> list[StorageRef]:
    """Every storage of a tree, once, in the order of first use: also those of tensors that objects
    hold, as Megatron-DeepSpeed's arguments hold a mask."""
    found: dict[str, StorageRef] = {}
    seen = set[int]()  # an object may hold itself

    def walk(value: object) -> None:
        if isinstance(value, TensorRef):
            found.setdefault(value.storage.key, value.storage)
        elif isinstance(value, _HOLDING) and id(value) not in seen:
            seen.add(id(value))
            for item in _held_by(value):
                walk(item)

    walk(tree)
    return list(found.values())


_HOLDING = (dict, list, tuple, deque, InertObject)


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, InertObject):
        return (*value.args, *value.state.values())
    return value.values() if isinstance(value, dict) else value
