"""An opened checkpoint, whatever its format: what it is asked for, and the answers that most
formats share."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, Self

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import Manifest, Order, ParamSpec
from megatron_ucp.core.mesh import Coords, Mesh
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.rules import RuleSet
from megatron_ucp.core.tensor_parts import TensorPart
from megatron_ucp.core.values import InertObject
from megatron_ucp.formats import per_rank
from megatron_ucp.formats.byte_files import ByteFile, Record, Where
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.manifest_beside import ManifestBeside
from megatron_ucp.formats.per_rank import OwnValues, PerRank, RankDifferences
from megatron_ucp.formats.pt.refs import ITEMSIZE, MAX_ELEMS, TensorRef, number_in, tensor_value

# A rank's random generators by name (see `Checkpoint.random_states`).
Generators = Mapping[str, bytes | Sequence[int] | Sequence[float]]
TWISTER_WORDS = 624  # of the state of a Mersenne Twister, which torch, numpy and Python have
NO_RANDOM_STATES = "the checkpoint has none"
_OF_STATES = (".pt", ".pth", ".bin", ".pkl", ".ckpt", ".npz", ".safetensors", ".distcp")
_CHECKED_AT_ONCE = 64  # files whose heads and tails an object store is asked for together


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
    files hold none), `helpers` are states of DeepSpeed's own helpers by key. `clip_grad` and
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
    helpers: Mapping[str, Any] = field(default_factory=dict)
    data_position: Mapping[str, Any] | None = None
    version: str = ""
    clip_grad: float | None = None
    int_steps: bool = False
    stateless: Mapping[str, Any] = field(default_factory=dict)
    patterns: Mapping[str, Any] = field(default_factory=dict)
    modules: Mapping[str, Any] = field(default_factory=dict)
    side_data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CallerModel:
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
    `registered`: the templates of the parameters of a model of
    megatron-core's in the order in which it registers them (see `formats/megatron/buffers`)."""

    order: Order | None = None
    specs: Mapping[str, ParamSpec] | None = None
    names: Mapping[str, str] | None = None
    rules: RuleSet | None = None
    shares: Mapping[str, TensorPart] | None = None
    like: Manifest | None = None
    tensors: Callable[[Mapping[str, Ints]], Mapping[str, TensorPart] | None] | None = None
    weights: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    classes: frozenset[str] | None = frozenset()
    registered: Sequence[str] = ()

    @property
    def own(self) -> Mapping[str, ParamSpec]:
        """What the caller's model has, by name; nothing where nobody says it."""
        return {} if self.like is None else self.like.by_name

    def declared(self, spec: ParamSpec) -> ParamSpec | None:
        """A whole parameter with the layout that a mesh gives it, as `specs` or `rules` say it;
        None where neither does. Raises RuleError."""
        if self.specs is not None and spec.name in self.specs:
            return self.specs[spec.name]
        if self.rules is None or not self.rules.rules or spec.kind == "buffer":
            return None
        axes = (*Mesh().cuts(), *Mesh().cuts(expert=True))
        return self.rules.declare(spec.name, spec.shape, dict.fromkeys(axes, 1))


# ---- checkpoint


class Checkpoint(ABC):
    """An opened checkpoint of any format; a context manager that closes its files. Nothing of it is
    executed: only directories and pickles were read.

    A format gives `manifest`, `where`, `file`, `main_file`, `file_names` and what else it has; for
    what few formats have, this class answers that there is nothing.
    """

    manifest: Manifest
    main_file: str  # that says most of the extras, for messages: a full path
    path_notes: Sequence[str] = ()  # of the notes those about the way from the path that was given

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._closing = ExitStack()
        self._open: dict[str, Any] = {}
        self._read_apart: dict[tuple[str, str], Record] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closing.close()
        self._open.clear()

    @contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Closes the files where what is done inside fails."""
        with ExitStack() as undo:
            undo.callback(self.close)
            yield
            undo.pop_all()

    @property
    @abstractmethod
    def file_names(self) -> list[str]:
        """Every file with state in it, by its name in the folder."""

    @abstractmethod
    def where(self, slot: Slot) -> Where:
        """Place of a slot of the manifest. Raises DamagedFileError or ForeignFileError."""

    def locate(self, slots: Collection[Slot]) -> dict[Slot, Where]:
        """Places of several slots. Raises as `where`."""
        return {slot: self.where(slot) for slot in slots}

    def unread(self) -> list[str]:
        """Files beside those of the checkpoint that may hold states of a run, and that nobody
        reads."""
        own = {*self.file_names}
        return [
            name
            for name in self.folder.names()
            if name.endswith(_OF_STATES) and name not in own and not name.startswith((".", "ucp_"))
        ]

    @property
    def notes(self) -> list[str]:
        """What a reader should know of how the checkpoint was understood."""
        return [*self.path_notes]

    # ------------------------------------------------ files

    def full_path(self, name: str) -> str:
        return self.folder / name

    def file(self, name: str) -> Any:
        """A file of the folder, open: a ByteFile. Raises as `open_file`."""
        if name not in self._open:
            self._open[name] = self.open_file(name)
        return self._open[name]

    def open_file(self, name: str) -> Any:
        """Opens a file, which `close` closes. Raises ForeignFileError where it is not the one that
        the manifest lists, DamagedFileError."""
        raise NotImplementedError

    def opened(self, path: str) -> Any:
        """The open file of a full path."""
        return self.file(self.folder.name_of(path))

    def check(self, name: str, allow: Collection[str] = ()) -> None:
        """Compares one file with the others. `allow` names what may be ("stale" is asked here).
        Raises ForeignFileError for a file of another run, step or mesh, StateMismatchError where
        nothing in it says whose its states are, DamagedFileError.

        Most formats compare files when the folder is opened, so that opening one is all that is
        left.
        """
        self.file(name)

    def check_headers(self, names: Sequence[str]) -> None:
        """As `check`, for several files, without a look at what their tensors hold."""
        for name in names:
            self.file(name)

    def check_all(self, names: Sequence[str], allow: Collection[str] = ()) -> None:
        """As `check`, for several files."""
        for name in self.prefetching(names, allow):
            self.check(name, allow)

    def prefetching(self, names: Sequence[str], allow: Collection[str] = ()) -> Iterator[str]:
        """The names of files, each of which is checked before the next one is asked for: an object
        store sends what the checks of some of them need at once."""
        for at in range(0, len(names), _CHECKED_AT_ONCE):
            some = names[at : at + _CHECKED_AT_ONCE]
            self.folder.prefetch(some)
            self.prefetch_checked(some, allow)
            yield from some

    def prefetch_checked(self, names: Collection[str], allow: Collection[str]) -> None:
        """Lets storage begin with what `check` reads of these files besides their ends. In most
        formats that is nothing. Raises StoreError."""
        return

    def records(self, name: str) -> list[tuple[Record, str]]:
        """Every record of a file, with the dtype of the tensors in it ("" where it holds none)."""
        return self.file(name).all_records()

    # ------------------------------------------------ the manifest, and what it lists

    @cached_property
    def evidence(self) -> ManifestBeside | None:
        """The manifest beside the files, with what it lists; None for a format without one."""
        return None

    @property
    def recorded(self) -> Manifest | None:
        """The manifest that lies beside the files, None where there is none."""
        return self.evidence.manifest if self.evidence is not None else None

    def beside(self, name: str) -> bytes | None:
        """The bytes of a small file that the manifest lists; None where it lists none of that
        name."""
        return self.evidence.read(name) if self.evidence is not None else None

    def check_beside(self) -> None:  # noqa: B027  most formats list nothing else
        """Compares what lies beside the state files with what the manifest says of it. Raises
        ForeignFileError."""

    def differs(self, name: str) -> PerRank:
        """What of a file's plain values and buffers differs from the first one's of its kind, as
        ranks keep them; as the manifest says it, if nothing else does. Raises DamagedFileError."""
        return per_rank.listed(self.recorded)

    def of_rank(self, rank: int) -> OwnValues:
        """What a rank has of all that `differs`. Raises DamagedFileError."""
        if not per_rank.listed(self.recorded):
            return OwnValues()
        name = per_rank.file_name(rank)
        return per_rank.recorded_of(self.beside(name), self.folder / name)

    # ------------------------------------------------ what few formats have

    def random_states(self, here: Mesh, rank: int) -> Generators | str:
        """The generators that the format's own program kept for a rank of the mesh `here`, or why
        there are none for it.

        `torch` and `cuda` are the bytes of these; `numpy` its 624 words, `numpy_place` the position
        in them and whether a normal number is left of a pair, `numpy_gauss` that number; `python`
        version, words and position, `python_gauss` the number that is left (NaN: none);
        `megatron.NAME` the bytes of what megatron-core's tracker calls NAME. Raises
        DamagedFileError."""
        return NO_RANDOM_STATES

    def layers(self) -> Layers | None:
        """The layers of the pipeline that wrote it, as its files show them; None without one."""
        return None

    def copies(self) -> "TrainedWeights | None":
        """The weights that the model computed with, in the dtype of training: the masters, rounded.
        Some elements of each one were compared. None where the files do not have all of them beside
        the masters. Raises ForeignFileError for one that is not its master."""
        return None

    @cached_property
    def extras(self) -> Extras:
        """What was saved besides element-wise states. Raises DamagedFileError."""
        found, kept = self.read_extras(), self.recorded
        position = found.data_position if kept is None else kept.run.get("data")
        return replace(found, data_position=position)

    def read_extras(self) -> Extras:
        """What the files say of `extras`; a manifest beside them says the data position."""
        return Extras({}, None, LossScale(), None, {})

    # ------------------------------------------------ tensors outside of a plan

    def place(self, name: str, ref: TensorRef) -> Where:
        """Place of a tensor of a `.pt` file."""
        file, dtype = self.file(name), ref.storage.dtype
        start = ref.offset_elems * ITEMSIZE[dtype]
        return Where(file, file.record(ref.storage), start, ref.numel, dtype)

    def place_apart(self, path: str, ref: TensorRef) -> Where:
        """Place of a tensor that is read outside of a plan: a scalar state, client state. See
        `check_read`."""
        where = self.place(self.folder.name_of(path), ref)
        self.note_read(where.file, where.record)
        return where

    def note_read(self, file: ByteFile, record: Record) -> None:
        """Remembers a record for `check_read`."""
        self._read_apart[file.path, record.name] = record

    def place_of(self, ref: TensorRef) -> Where:
        """Place of a tensor that the extras refer to: as many elements from there on as its strides
        span. Raises DamagedFileError."""
        return self.place_apart(self.main_file, ref)

    def check_read(self) -> None:
        """Compares these records with their CRC-32, which the executor does for all that a plan
        reads. Raises DamagedFileError."""
        for (path, _), record in self._read_apart.items():
            self.opened(path).check(record)

    def tensor(self, path: str, ref: TensorRef, max_elems: int = MAX_ELEMS) -> InertObject:
        """A small tensor, as a plain value. Raises UnsupportedError for a larger one."""
        return tensor_at(self.place_apart(path, ref), ref, max_elems)

    def scalar(self, path: str, ref: TensorRef) -> float:
        """The value of a one-element tensor. Raises DamagedFileError."""
        return number_in(self.tensor(path, ref), path)


@dataclass(frozen=True)
class TrainedWeights:
    """The parameters of a checkpoint as its model files hold them: `held` are the weights of each
    buffer of the manifest at each place along the axes that cut it, with the names of their
    files."""

    manifest: Manifest
    files: Checkpoint
    held: Mapping[tuple[int, Coords], tuple[TensorRef, str]]

    def where(self, slot: Slot) -> Where:
        """Place of a slot of the manifest."""
        ref, name = self.held[slot.buffer, slot.cut]
        return self.files.place(name, ref)

    def locate(self, slots: Collection[Slot]) -> dict[Slot, Where]:
        """As `Checkpoint.locate`: their headers were read when they were compared."""
        return {slot: self.where(slot) for slot in slots}

    def opened(self, path: str) -> ByteFile:
        return self.files.opened(path)

    def check_read(self) -> None:
        self.files.check_read()


Readable = Checkpoint | TrainedWeights  # what elements can be read from


class Format(Protocol):
    """One row of the table of formats."""

    def recognises(self, folder: Folder) -> bool:
        """Whether a tag folder is of this format."""
        ...

    def open(self, folder: Folder, told: CallerModel) -> Checkpoint:
        """Opens it. Raises a UcpError for anything that directories and pickles can show."""
        ...


def tensor_at(where: Where, ref: TensorRef, max_elems: int = MAX_ELEMS) -> InertObject:
    """A small tensor at a place, as a plain value. Raises UnsupportedError."""
    data = bytearray(ref.span_bytes if ref.numel <= max_elems else 0)
    where.read_into(memoryview(data))
    return tensor_value(ref, data, where.file.path, max_elems)


# ---- rank differences


def ranks_of(checkpoint: Checkpoint) -> Mesh:
    """The mesh whose ranks saved, which files without ranks do not say."""
    return (checkpoint.recorded or checkpoint.manifest).mesh


def apart_in(checkpoint: Checkpoint) -> RankDifferences:
    """All of it, of all ranks of a checkpoint. Raises DamagedFileError."""
    what = differing(checkpoint, checkpoint.file_names)
    count = ranks_of(checkpoint).world if what else 0
    return RankDifferences(what, [checkpoint.of_rank(rank).only(what) for rank in range(count)])


def differing(checkpoint: Checkpoint, names: Iterable[str]) -> PerRank:
    """What differs between some files of a checkpoint and the first ones of their kind."""
    found = PerRank()
    for name in names:
        found |= checkpoint.differs(name)
    return found
