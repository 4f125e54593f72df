"""Flat buffers as arithmetic: which run of which parameter lies where in which partition."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from megatron_ucp.core.grouping import MadeWhenAsked, kept
from megatron_ucp.core.mesh import DENSE_CUT, Coords, stage_of
from megatron_ucp.core.names import VALUE
from megatron_ucp.errors import PlanError

Scalars = Mapping[str, float]
States = tuple[tuple[str, str], ...]  # (name, dtype) of element-wise states
NO_SCALARS: Scalars = {}


class ContradictionError(PlanError, ValueError):
    """What describes tensors contradicts itself: a defect of this package, or what files say that
    no reader's check found."""


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter in a flat buffer: its rank-local tensor begins at `start` and has `size`
    elements.

    `group` is its parameter group, None for what no optimizer steps; `scalars` are the scalar
    states that the optimizer keeps for it (`step`). `chunk` is the number of the box that is held
    of a parameter in explicit chunks (see `Chunks`), else None.

    `slice_of` is for parameters that one stored tensor holds one after the other, such as the
    experts of a rank in one stacked tensor, where partitions cut that tensor as one (rule "each"):
    (offset of the first element in it, elements of all of it). All its members have its `start`.
    """

    param: str
    start: int
    size: int
    group: int | None = None
    scalars: Scalars = field(default_factory=dict[str, float], hash=False)
    chunk: int | None = None
    slice_of: tuple[int, int] | None = None

    @property
    def within(self) -> tuple[int, int]:
        """Where it begins in the stored tensor that it lies in, and the elements of that tensor."""
        return self.slice_of or (0, self.size)


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
    pipeline stage; `axes` are the mesh axes that cut the members. Where the ranks of such an axis
    have shares of different sizes, each has a buffer of its own: `at` names its place there too.

    States named in `uncut` lie otherwise than the masters, whether they are there yet or not: a
    partition keeps every member that it owns an element of, all of it, one after the other without
    gaps. `of` gives the buffer as such a state lies in it, which is the rule "uncut".
    """

    members: tuple[Member, ...]
    length: int
    partitions: int
    rule: str
    states: States
    at: Coords = ()
    axes: tuple[str, ...] = DENSE_CUT
    uncut: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.partitions < 1 or self.rule not in ("whole", "each", "uncut"):
            raise ContradictionError(f"no buffer: rule {self.rule!r}, {self.partitions} partitions")
        if self.uncut and self.rule != "whole":
            raise ContradictionError(f"uncut states in a buffer of the rule {self.rule!r}")
        end = 0
        for member in self.members:
            if member.slice_of is not None and member.slice_of[0]:
                continue  # behind another slice of its stored tensor
            if member.start < end or member.size < 0:
                raise ContradictionError(f"members of a buffer overlap at {member.param}")
            end = member.start + self._width(member)
        if any(member.slice_of for member in self.members):
            self._check_slices()
        if end > self.length:
            raise ContradictionError(
                f"a buffer of {self.length} elements can't hold members that end at {end}"
            )
        if self.rule != "each" and self.length % self.partitions:
            raise ContradictionError(
                f"a buffer of {self.length} elements can't be cut into {self.partitions} equal "
                "chunks"
            )

    def _check_slices(self) -> None:
        """Raises ContradictionError unless the slices of each stored tensor follow each other and
        are all of it. Under the rule "whole" slices are members like others: nothing cuts their
        tensor."""
        if self.rule != "each":
            raise ContradictionError(f"slices in a buffer of the rule {self.rule!r}")
        end, start, total = 0, 0, 0  # of the stored tensor of the member before
        for member in self.members:
            if end == total:
                end, start, total = 0, member.start, member.within[1]
            if member.within != (end, total) or member.start != start or member.size < 0:
                raise ContradictionError(
                    f"{member.param} is no slice of the stored tensor that it is in"
                )
            end += member.size
        if end != total:
            last = self.members[-1].param
            raise ContradictionError(f"slices of a stored tensor are missing behind {last}")

    def _width(self, member: Member) -> int:
        """Elements that the stored tensor of a member takes of the buffer."""
        if self.rule == "each":
            return -(-member.within[1] // self.partitions)
        return member.size

    @property
    def stage(self) -> int:
        """The pipeline stage that holds it."""
        return stage_of(self.at)

    def is_held_at(self, at: Coords) -> bool:
        """Whether the ranks at a place (see Mesh.holding) have a part of it."""
        return {*self.at} <= {*at}

    @property
    def cut_at(self) -> Coords:
        """Its coordinates on the axes that cut it, where it describes a single rank there; () where
        all ranks there have alike ones."""
        return tuple((axis, index) for axis, index in self.at if axis in self.axes)

    @property
    def stepped(self) -> bool:
        """Whether an optimizer steps it; else it is a frozen parameter or a module's buffer."""
        return VALUE not in dict(self.states)

    def dtype_of(self, state: str) -> str:
        """That of a state which it holds."""
        return dict(self.states)[state]

    @property
    def first_param(self) -> str:
        """The parameter of the first member; "" where there is none."""
        return self.members[0].param if self.members else ""

    @property
    def group(self) -> int | None:
        """The parameter group of all members; that of the first one where they differ."""
        return self.members[0].group if self.members else None

    @cached_property
    def held_along(self) -> tuple[str, ...]:
        """Every axis that decides which ranks have a part of it."""
        return tuple(dict.fromkeys((*self.axes, *(axis for axis, _ in self.at))))

    @property
    def partition_elems(self) -> int:
        """Elements that each partition stores of what is cut, padding included."""
        return self.length if self.rule == "each" else self.length // self.partitions

    def elems(self, part: int) -> int:
        """Elements that partition `part` stores, padding included."""
        if self.rule != "uncut":
            return self.partition_elems
        return sum(self.members[index].size for index in self._reached(part))

    def of(self, state: str) -> "FlatBuffer":
        """The buffer as one of its states lies in it."""
        return self._as_uncut if state in self.uncut else self

    @cached_property
    def _as_uncut(self) -> "FlatBuffer":
        return replace(self, rule="uncut", uncut=())

    def _reached(self, part: int) -> range:
        """The numbers of the members of which partition `part` has some elements: of a buffer that
        is cut as one, whose members follow each other."""
        first_elem, last_elem = part * self.partition_elems, (part + 1) * self.partition_elems
        first = bisect_right(self.members, first_elem, key=lambda one: one.start + one.size)
        last = bisect_left(self.members, last_elem, first, key=lambda one: one.start)
        return range(first, last)

    @cached_property
    def _gapless(self) -> dict[tuple[str, int | None], int]:
        """Under the rule "uncut": where each member would begin if there were no gaps."""
        sizes, at = dict[tuple[str, int | None], int](), 0
        for member in self.members:
            sizes[member.param, member.chunk] = at
            at += member.size
        return sizes

    def fragments(self, part: int) -> Iterator[Fragment]:
        """What partition `part` holds, in memory order."""
        everywhere = range(len(self.members))
        for index in everywhere if self.rule == "each" else self._reached(part):
            member = self.members[index]
            low, high = self.owned(member, part)
            if low < high:
                yield Fragment(index, low, high, self.offset(member, part, low))

    def owned(self, member: Member, part: int) -> tuple[int, int]:
        """The flat range of the member's rank-local tensor that partition `part` owns; empty where
        it owns nothing."""
        first, chunk = self._chunked(member)
        ends = part * chunk - first, (part + 1) * chunk - first
        low, high = (max(0, min(end, member.size)) for end in ends)
        if low >= high:
            return 0, 0
        return (0, member.size) if self.rule == "uncut" else (low, high)

    def offset(self, member: Member, part: int, element: int) -> int:
        """Position in the partition's memory of an element that it owns."""
        if self.rule == "uncut":
            first = self.members[self._reached(part)[0]]
            key = first.param, first.chunk
            return self._gapless[member.param, member.chunk] - self._gapless[key] + element
        start, chunk = self._chunked(member)
        before = member.start if self.rule == "each" else 0
        return before + start + element - part * chunk

    def owners(self, member: Member, low: int, high: int) -> range:
        """The partitions to read the non-empty range [low, high) of the member from: each element
        is in one of them."""
        if self.rule == "uncut":  # the first one that keeps it: others may have copies
            low, high = 0, 1
        first, chunk = self._chunked(member)
        return range((first + low) // chunk, (first + high - 1) // chunk + 1)

    def copies(self, member: Member) -> range:
        """Under the rule "uncut": every partition that keeps a member."""
        size = self.partition_elems
        last = member.start + member.size - 1
        return range(member.start // size, last // size + 1) if member.size else range(0)

    def _chunked(self, member: Member) -> tuple[int, int]:
        """Where a member begins in the run of elements that is cut, and how many of these each
        partition has: the run is the whole buffer, or under the rule "each" its stored tensor."""
        if self.rule != "each":
            return member.start, self.partition_elems
        first, total = member.within
        return first, -(-total // self.partitions)

    def used(self) -> int:
        """End of the last member; what follows is padding."""
        return max((member.start + self._width(member) for member in self.members), default=0)


class ChunkBuffers(MadeWhenAsked[FlatBuffer]):
    """A buffer for each chunk of each parameter, made where somebody asks for it: the files of
    thousands of ranks have hundreds of thousands of chunks, of which a rank reads some.

    `counts` are the chunks of each parameter; `make("a", 3)` gives the buffer of chunk 3 of the
    parameter "a", which is its only member. With counts of 2 and 3 buffer number 4 is that of chunk
    2 of the second parameter.
    """

    def __init__(self, counts: Mapping[str, int], make: Callable[[str, int], FlatBuffer]) -> None:
        self._names, self._make = [*counts], make
        self._ends = [*accumulate(counts.values(), initial=0)]
        self._numbers = {name: number for number, name in enumerate(self._names)}

    def place(self, number: int) -> tuple[str, int]:
        """The parameter and the chunk of a buffer."""
        at = bisect_right(self._ends, number) - 1
        return self._names[at], number - self._ends[at]

    def of(self, param: str) -> range:
        """The numbers of the buffers of a parameter."""
        number = self._numbers.get(param)
        return range(0) if number is None else range(*self._ends[number : number + 2])

    @property
    def params(self) -> Sequence[str]:
        """All parameters."""
        return self._names

    def __len__(self) -> int:
        return self._ends[-1]

    @kept
    def made(self, number: int) -> FlatBuffer:
        return self._make(*self.place(number))


class ChunkHolders(Mapping[str, tuple[tuple[int, int], ...]]):
    """As `Manifest.holders`, of the buffers of chunks."""

    def __init__(self, buffers: ChunkBuffers) -> None:
        self._buffers = buffers

    def __getitem__(self, param: str) -> tuple[tuple[int, int], ...]:
        numbers = self._buffers.of(param)
        if not numbers:
            raise KeyError(param)
        return tuple((number, 0) for number in numbers)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._buffers.params if self._buffers.of(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


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


def slices(members: Sequence[Member]) -> tuple[Member, ...]:
    """Members of which one stored tensor holds one after the other, as partitions cut it that cut
    every tensor for itself (rule "each"); its place is that of the first one."""
    if len(members) < 2:
        return tuple(members)
    total = sum(member.size for member in members)
    out: list[Member] = []
    at = 0
    for member in members:
        out.append(replace(member, start=members[0].start, slice_of=(at, total)))
        at += member.size
    return tuple(out)


def one_after_another(members: Sequence[Member]) -> tuple[Member, ...]:
    """Members of which one stored tensor holds one after the other, where nothing cuts that tensor
    for itself (rule "whole"); its place is that of the first one."""
    out: list[Member] = []
    at = members[0].start if members else 0
    for member in members:
        out.append(replace(member, start=at))
        at += member.size
    return tuple(out)


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
