"""The whole checkpoint without its bytes: mesh, parameters, flat buffers, groups, files. Evidence,
no authority."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import (
    ChunkBuffers,
    ChunkHolders,
    ContradictionError,
    FlatBuffer,
    Member,
    Scalars,
)
from megatron_ucp.core.layout import CHUNK, Chunks, Extent, Layout, Piece, Replicate
from megatron_ucp.core.mesh import PLACEMENT, Coords, Mesh, Place
from megatron_ucp.core.names import ITEMSIZE, Keeper
from megatron_ucp.errors import LayoutError, UsageError

FILE_NAME = "ucp_manifest.json"
RECORDED = "model"  # of a manifest's run: sizes and architecture of the model, as its family says
TAG = "tag"  # of a manifest's run: the name of the folder that was saved; a copy has another one
CONVERTED_FROM = "converted_from"  # of a manifest's run: the mesh of what was converted
ORIGIN = "run_origin"  # of a run in memory: the tag without an id that the run went on from
RUN = "run_id"  # of a manifest's run: what all saves of one run say, and no other run's
DIVERGED = "diverged"  # of a manifest's run: parameters of which ranks had different copies
FINGERPRINT = "fingerprint"  # of a manifest's run: dtype and CRC-32 of each parameter's states
MOVED_LATEST = "moved_latest"  # of a manifest's run: whether it became the newest one
RENAMED = "renamed"  # of a manifest's run: names in a state dict -> those of the model
ARGUMENTS = "arguments"  # of a manifest's run: the flags of a program that says no family
OTHER_ANGLES = "other_rotary_angles"  # of those flags: not those of rotary positions
ORDER = "query_key_value_order"  # of those flags: of its rows; empty where nobody says it
SAVED_ON = "saved_on"  # of a manifest's run: its mesh, where the files don't depend on it
KINDS = ("trainable", "frozen", "buffer")
BufferPart = tuple[int, Coords, int]  # buffer, place along the axes that cut it, partition
Order = Sequence[Sequence[str]]  # of each group's trainable parameters, as its optimizer has them


@dataclass(frozen=True, slots=True)
class Slot:
    """One stored run of elements: a state of one partition of a buffer, at a place along the axes
    that cut it."""

    buffer: int
    cut: Coords
    part: int
    state: str

    def __reduce__(self) -> tuple[Any, ...]:
        """Ranks send each other many, which a dataclass pickles in thrice the time."""
        return Slot, (self.buffer, self.cut, self.part, self.state)

    @property
    def place(self) -> BufferPart:
        """The partition that it is a state of."""
        return self.buffer, self.cut, self.part


@dataclass(frozen=True)
class ParamSpec:
    """One logical parameter, free of topology. `shape` is the whole tensor's, with vocabulary
    padding; `dtype` that of the training copy; `order` the dims as the memory stores them (None: as
    they are); `expert` says of which expert it is a part: its number in the whole model's layer,
    and how many the layer has (None: of none). Where `layout` are the explicit chunks of another
    program's files, `on_mesh` is how a mesh cuts it (None: nobody says). `first_counts`: of copies
    on several stages the first stage's is the parameter, and the model uses no other one."""

    name: str
    shape: Ints
    dtype: str
    kind: str = "trainable"
    layout: Layout = field(default_factory=Replicate)
    extent: Extent | None = None
    order: Ints | None = None
    expert: tuple[int, int] | None = None
    on_mesh: Layout | None = None
    first_counts: bool = False

    @property
    def elems(self) -> int:
        """Elements of all of it."""
        return math.prod(self.shape)

    def without_chunks(self) -> "ParamSpec":
        """The parameter as a mesh cuts it, whatever chunks files hold it in."""
        if not isinstance(self.layout, Chunks):
            return self
        return replace(self, layout=self.on_mesh or Replicate(), on_mesh=None)

    def pieces(self, place: Place) -> tuple[Piece, ...]:
        """What the rank at `place` holds; see Layout.pieces."""
        try:
            return _pieces(self.layout, self.shape, tuple(place.items()), self.order)
        except LayoutError:  # which names the parameter
            return self.layout.pieces(self.name, self.shape, place, self.order)


@lru_cache(maxsize=1024)
def _pieces(
    layout: Layout, shape: Ints, place: tuple[tuple[str, tuple[int, int]], ...], order: Ints | None
) -> tuple[Piece, ...]:
    """A model's layers are alike, and a fused parameter has a piece for each head."""
    return layout.pieces("", shape, dict(place), order)


@dataclass(frozen=True)
class Tie:
    """One parameter under several names: `canonical` is read, every alias is written."""

    canonical: str
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class FileEntry:
    """A file of the tag folder: a plain name, its size, and a SHA-256: of the zip directory (names,
    sizes, CRC-32s) of a .pt file, of all bytes of another one."""

    name: str
    size_bytes: int
    sha256: str = ""


def differs_in_padding(have: ParamSpec, spec: ParamSpec) -> bool:
    """Whether a parameter has other rows in a model (`spec`) than in a checkpoint (`have`) in the
    padding of the vocabulary alone: both hold the rows of one tokenizer."""
    return (
        spec.extent is not None
        and have.shape[1:] == spec.shape[1:]
        and have.shape[0] >= spec.extent.true
        and (have.extent is None or have.extent.true == spec.extent.true)
    )


@dataclass(frozen=True)
class ParamGroup:
    """What the parameters of a group are stepped with: hyper-parameters as plain values, and the
    optimizer that does it ("torch.AdamW"; "" where nobody says). `steps_as` is the rule by which it
    does, whoever implements it ("AdamW" also of DeepSpeed's fused Adam; "" where nobody says).

    `marks` are other keys that files have for the group (its name, its parameters' names): no load
    sets them, a conversion hands them on.
    """

    settings: Mapping[str, Any]
    optimizer: str = ""
    marks: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)
    steps_as: str = ""

    def __getitem__(self, key: str) -> Any:
        """A hyper-parameter."""
        return self.settings[key]


@dataclass(frozen=True, repr=False)
class Manifest:
    """Everything that a checkpoint holds, without its bytes.

    `keeper` says how its states lie in files or in memory; `names` are those of a pipeline's
    parameters, with their canonical ones; `run` is what identifies the save (steps, versions)."""

    keeper: Keeper
    mesh: Mesh
    params: tuple[ParamSpec, ...]
    buffers: Sequence[FlatBuffer]
    groups: tuple[ParamGroup, ...] = ()
    ties: tuple[Tie, ...] = ()
    files: tuple[FileEntry, ...] = ()
    family: str = ""
    save_id: str = ""
    run: Mapping[str, Any] = field(default_factory=dict[str, Any])
    names: Mapping[str, str] = field(default_factory=dict[str, str])

    def __repr__(self) -> str:
        return (
            f"Manifest({self.keeper}, {self.mesh}, {self.family or 'no family'}, "
            f"{len(self.params)} parameters and buffers, {len(self.groups)} groups, "
            f"{len(self.files)} files)"
        )

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.size_bytes for entry in self.files)

    @property
    def taken_steps(self) -> int:
        """Steps that the optimizer took: those that the run counts, but for the skipped ones."""
        counts = [self.run.get(key) for key in ("global_steps", "skipped_steps")]
        steps, skipped = (count if isinstance(count, int) else 0 for count in counts)
        return steps - skipped

    def __post_init__(self) -> None:
        if len(self.by_name) != len(self.params):
            raise ContradictionError("a parameter is listed twice")
        if isinstance(self.buffers, ChunkBuffers):
            return  # each is made of its parameter
        for buffer in self.buffers:
            for axis, index in buffer.at:
                cut = axis in buffer.axes and self.mesh.size(axis) > 1
                if not (cut or axis in PLACEMENT) or index >= self.mesh.size(axis):
                    raise ContradictionError(f"{buffer.at} is no place of the mesh {self.mesh}")
            for member in buffer.members:
                self._check_member(member)
        for name, held in self.holders.items():
            places = {(self.buffers[b].at, self.member(b, m).chunk) for b, m in held}
            if len(places) < len(held):
                raise ContradictionError(f"{name} is held twice at one place")

    def _check_member(self, member: Member) -> None:
        spec = self.by_name.get(member.param)
        if spec is None:
            raise ContradictionError(f"a buffer holds {member.param}, which is no parameter")
        if member.group is not None and not 0 <= member.group < len(self.groups):
            raise ContradictionError(f"{member.param} is of a group that does not exist")
        chunks = len(spec.layout.held) if isinstance(spec.layout, Chunks) else 0
        if (member.chunk is None) == bool(chunks) or (member.chunk or 0) > max(chunks - 1, 0):
            raise ContradictionError(
                f"a buffer does not say which chunk of {member.param} it holds"
            )

    # ------------------------------------------------ parameters

    @property
    def written_on(self) -> Mesh:
        """The mesh of the run that wrote the files, as they say it: `mesh` is that of one rank
        where they don't depend on it."""
        said = self.run.get(SAVED_ON)
        if self.mesh.world > 1 or not isinstance(said, str):
            return self.mesh
        with suppress(UsageError):  # whoever wrote it may be anybody
            return Mesh.parse(said)
        return self.mesh

    @property
    def saved_at(self) -> float | None:
        """When it was saved, in seconds since the epoch; None where nothing says it."""
        said = self.run.get("saved_at")
        return float(said) if isinstance(said, int | float) and abs(said) < 1e15 else None

    @cached_property
    def by_name(self) -> dict[str, ParamSpec]:
        return {spec.name: spec for spec in self.params}

    @cached_property
    def holders(self) -> Mapping[str, tuple[tuple[int, int], ...]]:
        """Parameter -> (buffer number, member number) of every buffer that holds it or a chunk of
        it, first stage first."""
        if isinstance(self.buffers, ChunkBuffers):
            return ChunkHolders(self.buffers)
        found: dict[str, list[tuple[int, int]]] = {}
        for b, buffer in enumerate(self.buffers):
            for m, member in enumerate(buffer.members):
                found.setdefault(member.param, []).append((b, m))
        out: dict[str, tuple[tuple[int, int], ...]] = {}
        for name, held in found.items():
            if len(held) > 1:
                held.sort(key=lambda bm: (self.buffers[bm[0]].at, bm))
            out[name] = tuple(held)
        return out

    def member(self, buffer: int, number: int) -> Member:
        return self.buffers[buffer].members[number]

    def stepped(self) -> Iterator[tuple[FlatBuffer, Member, int]]:
        """Every member that an optimizer steps, with its buffer and the number of its group."""
        for buffer in self.buffers:
            for member in buffer.members:
                if member.group is not None:
                    yield buffer, member, member.group

    def first_holder(self, param: str) -> tuple[FlatBuffer, Member]:
        """The buffer that is read for a parameter, and its member there. Raises KeyError."""
        b, m = self.holders[param][0]
        return self.buffers[b], self.buffers[b].members[m]

    def read_from(self, param: str) -> list[tuple[int, int]]:
        """(buffer, member) of what is read for a parameter: its first holder, or the first holder
        of each of its chunks, or of each rank that has a buffer of its own for its share. Empty
        where nothing holds it."""
        first: dict[tuple[int | None, Coords], tuple[int, int]] = {}
        for b, m in self.holders.get(param, ()):
            first.setdefault((self.member(b, m).chunk, self.buffers[b].cut_at), (b, m))
        return list(first.values())

    def is_read(self, param: str, buffer: int) -> bool:
        """Whether a buffer is one of those that are read for a parameter that it holds."""
        return any(b == buffer for b, _ in self.read_from(param))

    def is_copy(self, param: str, buffer: int) -> bool:
        """Whether what a buffer holds of a parameter must be what every other holder has. The last
        stage of Megatron-DeepSpeed has position embeddings beside the tied words, and never uses
        them."""
        return not self.by_name[param].first_counts or self.is_read(param, buffer)

    def states_of(self, param: str) -> dict[str, str]:
        """Name and dtype of every element-wise state that is held for a parameter."""
        return dict(self.first_holder(param)[0].states) if param in self.holders else {}

    def group_number(self, param: str) -> int | None:
        """The number of the group that steps a parameter."""
        return self.first_holder(param)[1].group if param in self.holders else None

    def group_of(self, param: str) -> Mapping[str, Any]:
        """Hyper-parameters of the group of a trainable parameter."""
        group = self.group_number(param)
        return self.groups[group].settings if group is not None else {}

    def scalars_of(self, param: str) -> Scalars:
        """Scalar optimizer states of a trainable parameter."""
        return self.first_holder(param)[1].scalars

    @property
    def optimizer(self) -> str:
        """The optimizer of all groups; several are joined with " and "."""
        return " and ".join(dict.fromkeys(filter(None, (g.optimizer for g in self.groups))))

    # ------------------------------------------------ places

    @cached_property
    def uncut(self) -> frozenset[str]:
        """States that lie in some buffer otherwise than its masters (see `FlatBuffer.uncut`)."""
        if isinstance(self.buffers, ChunkBuffers):
            return frozenset()
        return frozenset(state for buffer in self.buffers for state in buffer.uncut)

    def cuts_of(self, buffer: FlatBuffer) -> list[Coords]:
        """Every place along the axes that cut a buffer; of one rank's own buffer that rank's."""
        share = {*buffer.cut_at}
        return [cut for cut in self.mesh.everywhere(buffer.axes) if share <= {*cut}]

    def place(self, member: Member, cut: Coords) -> Place:
        """Where a member of a buffer lies at a place along the axes that cut it, as its layout asks
        for it."""
        place = self.mesh.place(cut)
        if member.chunk is not None:
            layout = self.by_name[member.param].layout
            place[CHUNK] = len(layout.held) if isinstance(layout, Chunks) else 1, member.chunk
        return place

    def pieces(self, member: Member, cut: Coords) -> tuple[Piece, ...]:
        """What a place holds of a member's parameter."""
        return self.by_name[member.param].pieces(self.place(member, cut))

    def local_shape(self, param: str) -> Ints:
        """The shape of a rank's share of a parameter that is cut evenly."""
        spec = self.by_name[param]
        return spec.layout.local_shape(param, spec.shape, self.mesh.first_shares())

    def slots(self, parts: Iterable[BufferPart]) -> Iterator[Slot]:
        """Every state of some partitions: of partition 0 of buffer 3 at ("tp", 1) those called
        "fp32", "exp_avg" and "exp_avg_sq", of a frozen parameter "value" alone."""
        for part in parts:
            yield from (Slot(*part, state) for state, _ in self.buffers[part[0]].states)

    def bytes_of(self, slot: Slot) -> int:
        """Bytes of a slot, padding included."""
        buffer = self.buffers[slot.buffer]
        return buffer.of(slot.state).elems(slot.part) * ITEMSIZE[buffer.dtype_of(slot.state)]

    def parts_of(self, rank: int) -> list[BufferPart]:
        """What a rank holds: number of the buffer, the rank's place along the axes that cut it, the
        partition that the rank has of it."""
        mesh, out = self.mesh, list[BufferPart]()
        here: dict[str, int] = {}
        part: dict[tuple[str, ...], int] = {}
        for number in self._held_at(rank):
            buffer = self.buffers[number]
            for axis in buffer.axes:
                here.setdefault(axis, mesh.index(rank, axis))
            if buffer.held_along not in part:
                part[buffer.held_along] = mesh.partition_index(rank, buffer.held_along)
            cut = tuple((axis, here[axis]) for axis in buffer.axes)
            out.append((number, cut, part[buffer.held_along] if buffer.partitions > 1 else 0))
        return out

    def _held_at(self, rank: int) -> list[int]:
        """The numbers of the buffers of which a rank has a part, in their order."""
        found: list[int] = []
        for axes, places in self._numbers_at.items():
            found += places.get(self.mesh.at(rank, axes), ())
        return sorted(found)

    @cached_property
    def _numbers_at(self) -> dict[tuple[str, ...], dict[Coords, list[int]]]:
        """The numbers of the buffers at each place, by the axes that the place is on."""
        out: dict[tuple[str, ...], dict[Coords, list[int]]] = {}
        for number, buffer in enumerate(self.buffers):
            axes = tuple(axis for axis, _ in buffer.at)
            out.setdefault(axes, {}).setdefault(buffer.at, []).append(number)
        return out
