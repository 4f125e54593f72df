"""How DeepSpeed lays parameters out in flat buffers, in files that are read and in a target.

Sources, of DeepSpeed 0.19.8: `DeepSpeedZeroOptimizer.__init__` for ZeRO-1 and 2, for ZeRO-3
`partition_parameters.py` and `_create_fp16_sub_groups`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_ucp.core import flat
from megatron_ucp.core.experts import stored_tensors
from megatron_ucp.core.flat import FlatBuffer, Member, Scalars, States
from megatron_ucp.core.mesh import DENSE_CUT

# `nccl_start_alignment_factor`: a partition starts at a multiple of this many elements
PARTITION_ALIGNMENT = 2


def parameter_alignment(itemsize: int) -> int:
    """Alignment in elements under `zero_optimization.parameter_alignment` (16 bytes)."""
    return 16 // math.gcd(16, itemsize)


def whole_length(used: int, partitions: int) -> int:
    """Length of a ZeRO-1/2 or BF16_Optimizer buffer."""
    unit = PARTITION_ALIGNMENT * partitions
    return -(-used // unit) * unit


def round_robin(count: int, partitions: int) -> list[int]:
    """Order of members under `round_robin_gradients`: parameter i goes to bucket i mod D, buckets
    one after the other."""
    return [i for bucket in range(partitions) for i in range(bucket, count, partitions)]


def sub_groups(sizes: Sequence[int], partitions: int, sub_group_size: int) -> list[list[int]]:
    """Member numbers of each ZeRO-3 sub-group: closed once the rank-local elements reach
    `sub_group_size`."""
    out: list[list[int]] = []
    held = 0
    for index, size in enumerate(sizes):
        if not out or held >= sub_group_size:
            out.append([])
            held = 0
        out[-1].append(index)
        held += -(-size // partitions)
    return out


TensorSizes = Sequence[tuple[str, int]]  # names and rank-local elements of what one tensor keeps


@dataclass(frozen=True)
class GroupOnRank:
    """A parameter group as a rank has it: `sizes` are names and rank-local elements in the
    optimizer's order, `states` (name, dtype) with the masters first, `scalars` gives the scalar
    states of a parameter. `partitions` is over how many ranks ZeRO divides a buffer of it, `axes`
    are those that cut it; `settings` are its hyper-parameters.

    Example: sizes (("w", 6), ("b", 3)) over two partitions are one buffer of 12 elements at ZeRO-1
    (two chunks of 6: all of w, and b with three elements of padding), and at ZeRO-3 one of 5 on
    each rank (3 of w, 2 of b).
    """

    number: int | None
    optimizer: str
    sizes: Sequence[tuple[str, int]]
    states: States
    scalars: Callable[[str], Scalars]
    partitions: int
    axes: tuple[str, ...] = DENSE_CUT
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def tensors(self) -> list[TensorSizes]:
        """`sizes` by the tensor of the engine that keeps them."""
        known = dict(self.sizes)
        return [[(name, known[name]) for name in names] for names in stored_tensors(known)]

    def alone(self, name: str, elems: int) -> FlatBuffer:
        """A parameter in a buffer of its own, without ZeRO."""
        scalars = self.scalars(name)
        return flat.alone(name, elems, self.states, self.number, scalars, axes=self.axes)

    def each_cut(self, tensors: Sequence[TensorSizes]) -> FlatBuffer:
        """ZeRO-3: a sub-group of the tensors, of which each one is cut for itself."""
        parts = self.partitions
        starts, used = flat.aligned_starts([-(-elems_of(tensor) // parts) for tensor in tensors])
        members: list[Member] = []
        for tensor, start in zip(tensors, starts, strict=True):
            members += flat.slices(self._members(tensor, start))
        return FlatBuffer(tuple(members), used, parts, "each", self.states, axes=self.axes)

    def cut_as_one(
        self,
        tensors: Sequence[TensorSizes],
        starts: Sequence[int],
        used: int,
        uncut: tuple[str, ...] = (),
    ) -> FlatBuffer:
        """ZeRO-1, ZeRO-2 and BF16_Optimizer: tensors from their `starts` on, filled up behind the
        `used` elements and cut into equal chunks."""
        held = zip(tensors, starts, strict=True)
        members = [m for t, at in held for m in flat.one_after_another(self._members(t, at))]
        length, parts = whole_length(used, self.partitions), self.partitions
        return FlatBuffer(
            tuple(members), length, parts, "whole", self.states, axes=self.axes, uncut=uncut
        )

    def not_cut(self, tensors: Sequence[TensorSizes]) -> FlatBuffer:
        """FP16_Optimizer: one buffer without padding, without ZeRO."""
        starts, used = flat.aligned_starts([elems_of(tensor) for tensor in tensors])
        return replace(self.cut_as_one(tensors, starts, used), length=used, partitions=1)

    def _members(self, tensor: TensorSizes, start: int) -> list[Member]:
        return [Member(n, start, size, self.number, self.scalars(n)) for n, size in tensor]


def elems_of(tensor: TensorSizes) -> int:
    return sum(size for _, size in tensor)
