"""What every format gives to the operations above it, whatever its files are."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import Manifest, Order, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.rules import RuleSet
from megatron_ucp.core.shares import Share
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.of_ranks import OwnValues, PerRank
from megatron_ucp.formats.pt.values import ITEMSIZE, TensorRef

# A rank's random generators by name (see `Checkpoint.random_states`).
Generators = Mapping[str, bytes | Sequence[int] | Sequence[float]]
TWISTER_WORDS = 624  # of the state of a Mersenne Twister, which torch, numpy and Python have
NO_RANDOM_STATES = "the checkpoint has none"


@dataclass(frozen=True, slots=True)
class Record:
    """One stored run of bytes: `size_bytes` from byte `offset_bytes` of the file on, with the
    CRC-32 that the file says (0 where it says none)."""

    name: str
    offset_bytes: int
    size_bytes: int
    crc32: int


class ByteFile(Protocol):
    """An open file, whatever container it is."""

    path: str
    has_checksums: bool

    def read_into(self, source: Record, start_byte: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `start_byte` of the record on. Raises DamagedFileError
        for a short read."""
        ...

    def read_rows_into(
        self, record: Record, starts: range, size_bytes: int, target: memoryview, places: range
    ) -> None:
        """For each of `starts`, bytes of the record, fills `size_bytes` of `target` from the same
        one of `places` on. Raises as `read_into`."""
        ...

    def check(self, record: Record) -> None:
        """Compares the record with its CRC-32. Raises DamagedFileError."""
        ...


@dataclass(frozen=True, slots=True)
class Where:
    """Where a slot lies: `elems` elements of `dtype` from byte `offset_bytes` of a record on."""

    file: ByteFile
    record: Record
    offset_bytes: int
    elems: int
    dtype: str

    def run(self, first: int, elems: int) -> "Where":
        """So many of the elements from `first` on."""
        offset = self.offset_bytes + first * ITEMSIZE[self.dtype]
        return replace(self, offset_bytes=offset, elems=elems)


# What torch's schedulers keep once per parameter group; the stages of a pipeline may have different
# groups.
PER_GROUP = frozenset(
    {
        *("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs"),
        *("base_momentums", "max_momentums"),
    }
)


@dataclass(frozen=True)
class Extras:
    """What a run saved besides element-wise states. Tensors in it are references, which
    `Checkpoint.read` takes.

    `scheduler` is its `state_dict`; what it keeps for each parameter group stands in the order of
    the manifest's groups. `scaler` is the loss scale, `config` the DeepSpeed config (None: the
    files hold none), `others` are states of DeepSpeed's own helpers by key. `clip_grad` and
    `int_steps` (whether the optimizer keeps its step as an int) are as the files show them.
    `stateless` are entries of the weights that hold nothing, by canonical name; `patterns` is stock
    DeepSpeed's `universal_checkpoint_info`; `modules` are what modules keep besides tensors
    (`get_extra_state`), by the names of these entries of the weights; `side_data` is what quantized
    layers keep beside their weights, by such names.
    """

    counters: Mapping[str, int]
    scheduler: Mapping[str, Any] | None
    scaler: LossScale
    config: Mapping[str, Any] | None
    client_state: Mapping[str, Any]
    others: Mapping[str, Any] = field(default_factory=dict[str, Any])
    data_position: Mapping[str, Any] | None = None
    version: str = ""
    clip_grad: float | None = None
    int_steps: bool = False
    stateless: Mapping[str, Any] = field(default_factory=dict[str, Any])
    patterns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    modules: Mapping[str, Any] = field(default_factory=dict[str, Any])
    side_data: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Readable(Protocol):
    """Where tensors can be read from."""

    @property
    def manifest(self) -> Manifest:
        """What there is."""
        ...

    def where(self, slot: Slot) -> Where:
        """Place of a slot of the manifest. Raises DamagedFileError or ForeignFileError."""
        ...

    def opened(self, path: str) -> ByteFile:
        """The open file of a path that `where` gave."""
        ...

    def check_read(self) -> None:
        """Compares the tensors that `place_of` gave, and scalar states, with their CRC-32. Raises
        DamagedFileError."""
        ...


class Checkpoint(Readable, Protocol):
    """An opened checkpoint; a context manager. Nothing of it is executed: only directories and
    pickles were read."""

    folder: Path
    led_here: Sequence[str]  # of `notes` those about the way from the path that was given

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    @property
    def recorded(self) -> Manifest | None:
        """The manifest that lies beside the files, None where there is none."""
        ...

    @property
    def extras(self) -> Extras:
        """What was saved besides element-wise states. Raises DamagedFileError."""
        ...

    @property
    def notes(self) -> list[str]:
        """What a reader should know of how the checkpoint was understood."""
        ...

    @property
    def main_file(self) -> str:
        """The file that says most of the extras, for messages."""
        ...

    @property
    def file_names(self) -> list[str]:
        """Every file with state in it, relative to the folder."""
        ...

    def check(self, name: str, allow: Collection[str] = (), optimizer: bool = True) -> None:
        """Compares one file with the others. `allow` names what may be ("stale" and "positions" are
        asked here); `optimizer` says whether its states are wanted. Raises
        ForeignFileError for a file of another run, step or mesh, StateMismatchError where nothing
        in it says whose its states are, DamagedFileError."""
        ...

    def differs(self, name: str) -> PerRank:
        """What of a file's plain values and buffers differs from the first one's of its kind, as
        ranks keep them. Raises DamagedFileError."""
        ...

    def of_rank(self, rank: int) -> OwnValues:
        """What a rank has of all that `differs`. Raises DamagedFileError."""
        ...

    def check_beside(self) -> None:
        """Compares what lies beside the state files with what the manifest says of it. Raises
        ForeignFileError."""
        ...

    def file(self, name: str) -> ByteFile:
        """A file of the folder, open. Raises ForeignFileError where it is not the one that the
        manifest lists, DamagedFileError."""
        ...

    def records(self, name: str) -> list[tuple[Record, str]]:
        """Every record of a file, with the dtype of the tensors in it ("" where it holds none)."""
        ...

    def place_of(self, ref: TensorRef) -> Where:
        """Place of a tensor that `extras` refer to: as many elements from there on as its strides
        span. Raises DamagedFileError."""
        ...

    def beside(self, name: str) -> bytes | None:
        """The bytes of a small file that the manifest lists; None where it lists none of that
        name."""
        ...

    def random_states(self, here: Mesh, rank: int) -> Generators | str:
        """The generators that the format's own program kept for a rank of the mesh `here`, or why
        there are none for it.

        `torch` and `cuda` are the bytes of these; `numpy` its 624 words, `numpy_place` the position
        in them and whether a normal number is left of a pair, `numpy_gauss` that number; `python`
        version, words and position, `python_gauss` the number that is left (NaN: none);
        `megatron.NAME` the bytes of what megatron-core's tracker calls NAME. Raises
        DamagedFileError."""
        ...

    def layers(self) -> Layers | None:
        """The layers of the pipeline that wrote it, as its files show them; None without one."""
        ...

    def copies(self) -> Readable | None:
        """The weights that the model computed with, in the dtype of training: the masters, rounded.
        Some elements of each one were compared. None where the files do not have all of them beside
        the masters. Raises ForeignFileError for one that is not its master."""
        ...


@dataclass(frozen=True)
class Told:
    """What a caller knows of a checkpoint, which may not say it by itself: how parameters are cut
    (`specs`, or `rules` from a file), canonical names of a pipeline's parameters (`names`), and the
    `order` of the parameters in each group of its optimizer; `shares` what each tensor of a
    Hugging Face folder holds of the parameters in `specs`; `like` the caller's model, which says
    what it ties, and without a family what such a folder holds; `tensors` says the same of the
    names and shapes of a folder's tensors, where their names are others than the model's (None:
    nobody can); `weights`: the optimizer's states
    are not wanted, and may be damaged;
    `renamed` the names in the state dict of the caller's model that are others than its
    parameters and buffers have, with those; `classes` are those that the caller's own plain values
    have, by module and name (None: all that a file names may stand as names);
    `shapes`: of what the caller's first tensor-parallel rank has of each parameter, where its
    optimizer sorted by them; `registered`: the templates of the parameters of a model of
    megatron-core's in the order in which it registers them (see `megatron.registration`)."""

    order: Order | None = None
    specs: Mapping[str, ParamSpec] | None = None
    names: Mapping[str, str] | None = None
    rules: RuleSet | None = None
    shares: Mapping[str, Share] | None = None
    like: Manifest | None = None
    tensors: Callable[[Mapping[str, Ints]], Mapping[str, Share] | None] | None = None
    weights: bool = False
    shapes: Mapping[str, Ints] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    classes: frozenset[str] | None = frozenset()
    registered: Sequence[str] = ()


class Format(Protocol):
    """One row of the table of formats."""

    def recognises(self, folder: Path) -> bool:
        """Whether a tag folder is of this format."""
        ...

    def open(self, folder: Path, told: Told) -> Checkpoint:
        """Opens it. Raises a UcpError for anything that directories and pickles can show."""
        ...
