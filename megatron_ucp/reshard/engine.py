"""What a live engine tells the operations of this package, and the report of a load."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megatron_ucp import say
from megatron_ucp.core.flat import Scalars
from megatron_ucp.core.manifest import BufferPart, Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint
from megatron_ucp.formats.per_rank import OwnValues, PerRank

if TYPE_CHECKING:
    import torch


# ---- report
#
# What a load did.


@dataclass(frozen=True)
class FingerprintCheck:
    """How many bytes of the ranks' memory were compared with the fingerprint that the save
    recorded, of all that were loaded into it. Not compared is what a load rounds, averages or
    resizes, what each rank has of its own, and padding of a vocabulary."""

    done_bytes: int
    loaded_bytes: int

    def __str__(self) -> str:
        return f"fingerprint of {say.part(self.done_bytes, self.loaded_bytes)} compared"


@dataclass(frozen=True)
class Report:
    """What a load did, on this rank. `notes` name everything that was not carried over bit for bit,
    or not at all. `run_id` is that of the run which saved it, where the manifest says one, and
    `run_origin`, of a run in memory, the tag without an id that it went on from.
    `all_read_bytes` is `read_bytes` of all ranks; `left_out` what of the state was not asked for.
    `fingerprint` is None where the save recorded none, or checksums were not asked for.
    """

    path: str
    source: str
    target: str
    read_bytes: int
    checked_bytes: int
    unchecked_bytes: int
    seconds: float
    client_state: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    global_steps: int = 0
    run_id: str = ""
    run_origin: str = ""
    all_read_bytes: int = 0
    left_out: str = ""
    fingerprint: FingerprintCheck | None = None

    @property
    def _compared(self) -> str:
        """A fingerprint says more than the checksums of what was read whole."""
        if self.fingerprint is not None:
            return str(self.fingerprint)
        if not self.checked_bytes:
            return "checksums not compared"
        both = self.checked_bytes, self.checked_bytes + self.unchecked_bytes
        part = say.part(*both)
        return f"checksums of {part} compared (of whole records: no fingerprint was saved)"

    def __str__(self) -> str:
        left_out = f", without {self.left_out}" if self.left_out else ""
        return (
            f"loaded step {self.global_steps:,} ({self.path}){left_out}: {self.source} -> "
            f"{self.target}; {say.amount(self.all_read_bytes)} in {say.duration(self.seconds)}, "
            f"{self._compared}"
        )


# ---- engine
#
# What a live engine gives to a load, whatever trains in it. `reshard/load` fills any of these.


class KeepsPosition(Protocol):
    """A data loader whose position a checkpoint keeps."""

    def check(self, state: Mapping[str, Any], file: str | None = None) -> None:
        """Raises StateMismatchError where a position is none of this loader's."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after the position. Raises as `check`."""
        ...


@dataclass(frozen=True)
class LoadOptions:
    """What a load is asked for; see `load`. `loader` is the data loader whose position is
    restored. `read` says who reads what several ranks hold alike. `apart` is what differs from rank
    to rank in the checkpoint, and `own` what this rank gets of it (None: what all share), both
    known once its files were looked at."""

    optimizer: bool = True
    scheduler: bool = True
    module_only: bool = False
    hyper: str = "checkpoint"
    checksums: bool = True
    allow: frozenset[str] = frozenset()
    rng: bool = True
    loader: KeepsPosition | None = None
    family: Any = None
    read: str | None = None
    apart: PerRank = field(default_factory=PerRank)
    own: OwnValues | None = None


@dataclass(frozen=True)
class Wants:
    """What a load asks of an engine besides elements. `options.optimizer` says whether the
    optimizer's states are loaded, and `options.scheduler` whether its schedule is. `origins` are
    the groups of the checkpoint `source` that each group of the engine's manifest comes from, and
    `groups` the hyper-parameters that each gets (none at all: the engine keeps its own). `carried`:
    the checkpoint is of the same optimizer, so that keys which a group lacks are the program's
    own."""

    source: Checkpoint
    options: LoadOptions
    origins: Sequence[int | None]
    groups: Sequence[Mapping[str, Any]]
    carried: bool


class ReadyState(Protocol):
    """What was read for an engine besides element-wise states, and fits it."""

    @property
    def client_state(self) -> Mapping[str, Any]: ...

    @property
    def notes(self) -> Sequence[str]:
        """What of it is not carried over as it was."""
        ...


class Holder(Protocol):
    """What holds values on this rank: a live engine, or states that lie beside it."""

    @property
    def manifest(self) -> Manifest: ...

    def parts(self) -> list[BufferPart]:
        """What this rank holds."""
        ...

    def read(self, slot: Slot, first: int, last: int) -> "torch.Tensor":
        """Elements [first, last) of what this rank has of one parameter in a slot, as they lie:
        flat, detached, a view of the engine's own memory. At any time; nothing is moved."""
        ...


class Engine(Holder, Protocol):
    """A live engine on this rank, and what the ranks together hold.

    Its `manifest` describes the whole engine: of its optimizer's states the masters alone, as the
    others come with a checkpoint. Describing it changed nothing in the engine. `has_one_step` says
    that its optimizer counts one step for all parameters.

    A load makes three calls: `ready`, while nothing is changed; `broken`, before the first byte;
    and `filled`, after the last one.
    """

    has_optimizer: bool
    has_one_step: bool

    def told(self) -> CallerModel:
        """What the engine knows of checkpoints of its own model."""
        ...

    def state_dtype(self, buffer: int, state: str) -> str:
        """The dtype that the optimizer gives an element-wise state of a buffer."""
        ...

    def tensor(self, slot: Slot) -> "torch.Tensor":
        """The memory of one of this rank's slots, flat, detached: what a load writes, once the
        engine is broken, and has room for it."""
        ...

    def ready(self, wants: Wants) -> Any:
        """Reads for the engine all that is no element: hyper-parameters, scheduler, counters,
        client state, random states and data position. Returns a `ReadyState`, which `filled` sets.
        Raises a UcpError where the engine can't take the states of the checkpoint."""
        ...

    def broken(self, states: Mapping[int, Sequence[str]] | None) -> Callable[[], None]:
        """The first write. From now on the engine refuses to compute, to step and to be saved. It
        has room for exactly these `states` of each buffer of this rank, and keeps what it has with
        the right size; None: the states of the optimizer stay as they are. Returns what makes it
        whole again; what else is broken stays so."""
        ...

    def filled(self, ready: Any, scalars: Mapping[int, Sequence[Scalars]]) -> list[str]:
        """All elements are there. Makes the training copies of all ranks equal to the masters,
        forgets gradients that wait for a step, and sets the `scalars` of each buffer's members and
        what is `ready` (None: weights alone were filled, and nothing else is touched). Returns
        notes. Collective."""
        ...
