"""Flat buffers as arithmetic: which run of which parameter lies where in which partition."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ucp.core.mesh import DENSE_CUT, Coords, stage_of
from megatron_ucp.core.states import VALUE

Scalars = Mapping[str, float]
States = tuple[tuple[str, str], ...]  # (name, dtype) of element-wise states
NO_SCALARS: Scalars = {}


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter in a flat buffer: its rank-local tensor begins at `start` and has `size`
    elements.

    `group` is its parameter group, None for what no optimizer steps; `scalars` are the scalar
    states that the optimizer keeps for it (`step`). `chunk` is the number of the box that is held
    of a parameter in explicit chunks (see `Chunks`), else None.
    """

    param: str
    start: int
    size: int
    group: int | None = None
    scalars: Scalars = field(default_factory=dict[str, float], hash=False)
    chunk: int | None = None


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

    rule "whole": the buffer of `length` elements is cut into equal chunks (one partition: it is not
    cut). rule "each": every member is cut by ceil and partition r holds the r-th chunk of each
    member one after the other; `start` and `length` then count elements of one partition.
    `states` are (name, dtype) of the element-wise states; `at` is the placement, such as the
    pipeline stage; `axes` are the mesh axes that cut the members.
    """

    members: tuple[Member, ...]
    length: int
    partitions: int
    rule: str
    states: States
    at: Coords = ()
    axes: tuple[str, ...] = DENSE_CUT

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
    def stage(self) -> int:
        """The pipeline stage that holds it."""
        return stage_of(self.at)

    def is_held_at(self, at: Coords) -> bool:
        """Whether the ranks at a place (see Mesh.holding) have a part of it."""
        return {*self.at} <= {*at}

    @property
    def stepped(self) -> bool:
        """Whether an optimizer steps it; else it is a frozen parameter or a module's buffer."""
        return VALUE not in dict(self.states)

    @property
    def group(self) -> int | None:
        """The parameter group of all members; that of the first one where they differ."""
        return self.members[0].group if self.members else None

    @property
    def spread(self) -> tuple[str, ...]:
        """Every axis that decides which ranks have a part of it."""
        return (*self.axes, *(axis for axis, _ in self.at))

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


def alone(
    param: str,
    size: int,
    states: States,
    group: int | None = None,
    scalars: Scalars = NO_SCALARS,
    *,
    at: Coords = (),
    axes: tuple[str, ...] = DENSE_CUT,
    chunk: int | None = None,
) -> FlatBuffer:
    """A buffer of one parameter that no partition cuts. `size` is in elements of one rank."""
    member = Member(param, 0, size, group, scalars, chunk)
    return FlatBuffer((member,), size, 1, "whole", states, at, axes)


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
