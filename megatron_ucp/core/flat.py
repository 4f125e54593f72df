"""ZeRO's flat buffers as arithmetic: which run of which parameter lies where in which partition.

Formulas: `DeepSpeedZeroOptimizer.__init__` (whole), `partition_parameters.py` and
`_create_fp16_sub_groups` (each) of DeepSpeed 0.19.8.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = (
    2  # `nccl_start_alignment_factor`: a partition starts at a multiple of this many elements
)


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter in a flat buffer: its rank-local tensor begins at `start` and has `size`
    elements."""

    param: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """Elements [low, high) of member number `member`'s rank-local tensor, at `offset` in the
    partition's memory."""

    member: int
    low: int
    high: int
    offset: int


@dataclass(frozen=True)
class FlatBuffer:
    """A run of rank-local tensors, cut into `partitions`.

    rule "whole": the buffer of `length` elements is cut into equal chunks (ZeRO-1/2,
    BF16_Optimizer, unpartitioned states with one partition). rule "each": every member is cut by
    ceil and partition r holds the r-th chunk of each member one after the other (ZeRO-3); `start`
    and `length` then count elements of one partition. `states` are (name, dtype) of the
    element-wise states; `at` is the placement (("pp", stage), ...); `axes` are the mesh axes that
    cut the members; `group` is the parameter group, None for frozen parameters and module buffers.
    """

    members: tuple[Member, ...]
    length: int
    partitions: int
    rule: str
    states: tuple[tuple[str, str], ...]
    group: int | None = None
    at: tuple[tuple[str, int], ...] = ()
    axes: tuple[str, ...] = ("tp",)

    def __post_init__(self) -> None:
        end = 0
        for member in self.members:
            width = member.size if self.rule == "whole" else -(-member.size // self.partitions)
            if member.start < end or member.size < 0:
                raise ValueError(f"members of a buffer overlap at {member.param}")
            end = member.start + width
        if end > self.length or self.partitions < 1 or self.rule not in ("whole", "each"):
            raise ValueError(
                f"a buffer of {self.length} elements can't hold members that end at {end}"
            )
        if self.rule == "whole" and self.length % self.partitions:
            raise ValueError(
                f"a buffer of {self.length} elements can't be cut into {self.partitions} equal "
                "chunks"
            )

    @property
    def partition_elems(self) -> int:
        """Elements that one partition stores, padding included."""
        return self.length // self.partitions if self.rule == "whole" else self.length

    def fragments(self, part: int) -> Iterator[Fragment]:
        """What partition `part` holds, in memory order."""
        for index, member in enumerate(self.members):
            low, high = self.owned(member, part)
            if low < high:
                yield Fragment(index, low, high, self.offset(member, part, low))

    def owned(self, member: Member, part: int) -> tuple[int, int]:
        """The flat range of the member's rank-local tensor that partition `part` owns; empty where
        it owns nothing."""
        if self.rule == "whole":
            size = self.partition_elems
            low, high = part * size - member.start, (part + 1) * size - member.start
        else:
            chunk = -(-member.size // self.partitions)
            low, high = part * chunk, (part + 1) * chunk
        low, high = max(0, min(low, member.size)), max(0, min(high, member.size))
        return (low, high) if low < high else (0, 0)

    def offset(self, member: Member, part: int, element: int) -> int:
        """Position in the partition's memory of an element that it owns."""
        if self.rule == "whole":
            return member.start + element - part * self.partition_elems
        return member.start + element - part * -(-member.size // self.partitions)

    def owners(self, member: Member, low: int, high: int) -> range:
        """The partitions that own a part of the non-empty range [low, high) of the member."""
        if self.rule == "whole":
            size = self.partition_elems
            return range((member.start + low) // size, (member.start + high - 1) // size + 1)
        chunk = -(-member.size // self.partitions)
        return range(low // chunk, (high - 1) // chunk + 1)

    def used(self) -> int:
        """End of the last member; what follows is padding."""
        return max(
            (
                m.start + (m.size if self.rule == "whole" else -(-m.size // self.partitions))
                for m in self.members
            ),
            default=0,
        )


def aligned_starts(sizes: Sequence[int], alignment: int = 1) -> tuple[list[int], int]:
    """Starts of members that each begin at a multiple of `alignment`, and the end of the last
    one."""
    starts: list[int] = []
    at = 0
    for size in sizes:
        at = -(-at // alignment) * alignment
        starts.append(at)
        at += size
    return starts, at


def parameter_alignment(itemsize: int) -> int:
    """Alignment in elements under `zero_optimization.parameter_alignment` (16 bytes)."""
    return 16 // math.gcd(16, itemsize)


def whole_length(used: int, partitions: int) -> int:
    """Length of a ZeRO-1/2 or BF16_Optimizer buffer."""
    unit = ALIGNMENT * partitions
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
