"""The one way in which a training state is moved, between files and the memory of ranks.

A `Source` has values: the files of a checkpoint, the memories of a live engine's ranks, a base
model with an adapter. A `Sink` takes them: a folder, a live engine. `transfer` joins the two, and
gives every pair the same guarantees: all of it is planned, proved and looked up before a byte
moves; values that a narrower dtype can't hold are refused; what was read is compared with its
checksums; nothing counts before all ranks are done, and after a failure of any rank nothing does.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import torch

from megatron_ucp.core.box import strides
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.names import MASTER, dtype_name
from megatron_ucp.core.plan import LOSSLESS, Cast, Copy, Op, Plan, Side, Slot, Want, make_plan
from megatron_ucp.core.proof import prove
from megatron_ucp.errors import InexactError, SaveError, some_of
from megatron_ucp.formats.checkpoint import Readable
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine
from megatron_ucp.reshard.execute import TORCH_DTYPES, execute
from megatron_ucp.reshard.findings import Progress

# ---- overflows
#
# Finite values that a dtype can't hold: they would become infinite without a word.


_NARROW = "float16"  # the others that train have the range of float32
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
Lost = Mapping[tuple[str, str], int]  # (name of a tensor, dtype) -> how many values


def lost_values(exact: torch.Tensor, rounded: torch.Tensor) -> int:
    """How many finite values became none."""
    return int((exact.isfinite() & ~rounded.isfinite()).sum())


def too_large(found: Lost, file: str, verb: str) -> InexactError:
    """The error for tensors with values that their dtype can't hold; of several dtypes, the
    first tensor's."""
    parameter, dtype = min(found)
    counts = sorted((name, count) for (name, own), count in found.items() if own == dtype)
    listed = [f"{name}: {count}" for name, count in counts]
    return InexactError(
        f"values are too large for {dtype}",
        file=file,
        parameter=parameter,
        expected=f"at most {torch.finfo(TORCH_DTYPES[dtype]).max:g}",
        found=f"larger values in {some_of(listed, between='; ')}",
        fix=f"{verb} in bfloat16 or float32",
    )


def is_finite(values: torch.Tensor) -> bool:
    return not len(values) or all(math.isfinite(float(one)) for one in torch.aminmax(values))


class Overflows:
    """Counts the finite values of each tensor that its dtype can't hold. Several threads use one;
    a total is `found` once they are done."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def compare(self, name: str, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """Looks at some values of a tensor, before and after they were rounded."""
        if lost := lost_values(exact, rounded):
            key = name, dtype_name(rounded.dtype)
            with self._lock:
                self.found[key] = self.found.get(key, 0) + lost


def refuse_lost(found: Iterable[Lost], file: str, verb: str) -> None:
    """Raises InexactError that lists every tensor with values which its dtype can't hold, of what
    all ranks found. What several ranks have copies of counts once."""
    total = Counter[tuple[str, str]]()
    for one in found:
        total |= Counter(one)
    if total:
        raise too_large(total, file, verb)


def is_looked_at(
    source: Manifest, param: str, state: str, want: str, as_trained: bool = True
) -> bool:
    """Whether values of a source's state may be lost in the dtype `want`. What the run itself
    computed with (`as_trained`), its masters rounded to the dtype of its training, is as it was."""
    have = source.states_of(param)[state]
    if have == want or (have, want) in LOSSLESS or not {have, want} <= _FLOATS:
        return False
    return not as_trained or state != MASTER or source.by_name[param].dtype != want


def param_of(op: Op, target: Manifest) -> str:
    """The parameter of which an operation fills some elements."""
    return target.member(op.target.slot.buffer, op.member).param


def may_overflow(source: Manifest, target: Manifest) -> bool:
    """Whether a load may make infinite weights of a checkpoint's finite ones: it was trained in
    another dtype. The same on every rank."""
    known = source.by_name
    return any(
        spec.dtype == _NARROW and spec.name in known and known[spec.name].dtype != _NARROW
        for spec in target.params
    )


def lost_in_casts(engine: Engine, source: Readable, plan: Plan) -> Lost:
    """What this rank's memory, which was filled, lost of the checkpoint's values as they were
    rounded. Raises DamagedFileError where the source can't be read again."""
    out: dict[tuple[str, str], int] = {}
    for op in plan.ops:
        if not isinstance(op, Cast) or op.lossless:
            continue
        values = _memory_of(engine, op)
        name = param_of(op, engine.manifest)
        key = name, dtype_name(values.dtype)
        if not is_looked_at(source.manifest, name, op.source.slot.state, key[1]):
            continue
        if values.isfinite().all():
            continue
        if lost := lost_values(_read_again(source, op).to(values.device), values):
            out[key] = out.get(key, 0) + lost
    return out


def _read_again(source: Readable, op: Copy) -> torch.Tensor:
    """The values of a copy as they are saved, in its shape."""
    dtype = TORCH_DTYPES[source.where(op.source.slot).dtype]
    flat = torch.empty(math.prod(op.shape), dtype=dtype)
    exact = Copy(op.source, Side(op.target.slot, 0, strides(op.shape)), op.shape, op.member, op.box)
    execute(Plan((), (exact,), ()), source.where, lambda _: flat)
    return flat.view(op.shape)


def _memory_of(engine: Engine, op: Op) -> torch.Tensor:
    """What an operation filled."""
    flat = engine.tensor(op.target.slot)
    first = flat.storage_offset() + op.target.offset
    return torch.as_strided(flat, op.shape, op.target.strides, first)


def lost_in_weights(engine: Engine, plan: Plan) -> Lost:
    """What weights will lose of the masters, where they are narrower."""
    out: dict[tuple[str, str], int] = {}
    specs = engine.manifest.by_name
    for op in plan.ops:
        name = param_of(op, engine.manifest)
        if op.target.slot.state != MASTER or specs[name].dtype != _NARROW:
            continue
        values = _memory_of(engine, op)
        if lost := lost_values(values, values.to(TORCH_DTYPES[_NARROW])):
            out[name, _NARROW] = out.get((name, _NARROW), 0) + lost
    return out


# ---- transfer


Together = Callable[[], agree.together]  # what makes one fate of all ranks, or of some
NARROW = frozenset({"narrow"})  # of a part: its values are rounded, and looked at


@dataclass(frozen=True)
class SinkPart:
    """A manifest that is filled, and the slots of it that are wanted, each with the state of the
    source that it gets. `allow` is what may happen to these beside what is allowed for all.
    `as_trained`: weights that are the masters in the dtype of the training, as the run itself
    rounded them: those are as they were, whatever they are. `names` are what messages call each
    buffer's values (none: their parameters)."""

    target: Manifest
    wants: tuple[Want, ...]
    allow: frozenset[str] = frozenset()
    as_trained: bool = False
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proved:
    """Part number `number` of a sink with its plan, which was proved; `allow` is all that may
    happen to it."""

    number: int
    part: SinkPart
    plan: Plan
    allow: frozenset[str]

    def only(self, slots: Container[Slot]) -> "Proved":
        """The same part, of which some slots alone are filled."""
        plan = replace(
            self.plan,
            wants=tuple(want for want in self.plan.wants if want[0] in slots),
            ops=tuple(op for op in self.plan.ops if op.target.slot in slots),
            fills=tuple(fill for fill in self.plan.fills if fill.slot in slots),
        )
        return replace(self, plan=plan)


class WindowReader(Protocol):
    """Reads what one proved part wants, window by window."""

    def fill(self, slot: Slot, low: int, memory: torch.Tensor) -> None:
        """Elements from `low` of a slot into memory of its dtype, which is filled."""
        ...

    def exact(self, slot: Slot, low: int, elems: int) -> torch.Tensor:
        """The same elements in a dtype that keeps every value of the source."""
        ...

    def window_bytes(self, slot: Slot) -> int:
        """How large the windows of a slot are best."""
        ...


class Source(Protocol):
    """Values, wherever they lie. `file` names it in messages; `read_bytes` counts what was read of
    it. `all_looked_at`: what it gives was rounded, whatever the dtypes of the manifest are: sums,
    or copies of the masters."""

    file: str

    @property
    def read_bytes(self) -> int: ...

    @property
    def all_looked_at(self) -> bool: ...

    def manifest_of(self, part: int) -> Manifest:
        """What there is for a part of a sink: most sources have the same for all."""
        ...

    def locate(self, one: Proved) -> None:
        """Looks every slot up that a plan reads. Raises a UcpError before a byte moves."""
        ...

    def check(self, thorough: bool) -> None:
        """Compares what was read with its checksums; `thorough`: what nobody needed of a record is
        read for that. Collective where ranks read together. Raises DamagedFileError on all of
        them."""
        ...


class WindowSource(Source, Protocol):
    """A source of which every window can be read at any time, and from several threads."""

    def windows(self, one: Proved) -> WindowReader:
        """What reads a part."""
        ...


Given = TypeVar("Given", bound=Source, contravariant=True)


class Sink(AbstractContextManager[Any], Protocol[Given]):
    """Where values go. Entering it is the first write; leaving it before `publish` leaves nothing
    behind that counts. `verb` says what for, in messages: to train, to export. `thorough`: every
    record that was read is compared with its checksum, whatever has to be read for that."""

    parts: tuple[SinkPart, ...]
    verb: str
    thorough: bool

    def move(self, source: Given, parts: Sequence[Proved], run: "TransferRun") -> None:
        """Moves everything: each kind of sink has the inner loop that fits it, and takes the
        sources that it fits. `parts` are its own, proved."""
        ...

    def compare(self) -> None:
        """Compares what all ranks have now with what was recorded of it. Collective, as `move` may
        be as a whole, and nothing after it is. Raises a UcpError on every rank."""
        ...

    def lost(self) -> Lost:
        """How many finite values of which tensors became none on this rank."""
        ...

    def finish(self) -> None:
        """Writes all that is no piece; on disk, or in place, when it returns."""
        ...

    def publish(self) -> None:
        """From here on it counts: a folder gets its name, an engine may step."""
        ...


@dataclass
class TransferRun:
    """How far a transfer is. Several threads use one. After a failure of one of them, and after
    Ctrl-C, it is `stopped`, and the others raise at their next window."""

    total: int = 0
    progress: Progress | None = None
    done: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    _lock: Any = field(default_factory=threading.Lock)

    def count(self, moved_bytes: int) -> None:
        """Says that so many bytes more were moved. Raises SaveError where it was stopped."""
        if self.stopped.is_set():
            raise SaveError("the work was stopped", fix="start it again", id="")
        with self._lock:
            self.done += moved_bytes
            if self.progress is not None:
                self.progress(self.done, self.total)


class Readers:
    """What reads each part of a sink, window by window, and looks at every value that it rounds."""

    def __init__(self, source: WindowSource, proved: Sequence[Proved]) -> None:
        self.overflows = Overflows()
        self._parts = [one.part for one in proved]
        self._looked_at = [_looked_at(source, one) for one in proved]
        self._of = [source.windows(one) for one in proved]

    def fill(self, part: int, slot: Slot, low: int, memory: torch.Tensor) -> None:
        """Elements from `low` of a slot of a part into memory of its dtype."""
        self._of[part].fill(slot, low, memory)
        if slot not in self._looked_at[part] or is_finite(memory):
            return
        exact = self._of[part].exact(slot, low, len(memory))
        target, names = self._parts[part].target, self._parts[part].names
        buffer, high = target.buffers[slot.buffer].of(slot.state), low + len(memory)
        for one in buffer.fragments(slot.part):
            first, last = max(one.offset, low), min(one.offset + one.high - one.low, high)
            if first < last:
                name = names[slot.buffer] if names else buffer.members[one.member].param
                own = slice(first - low, last - low)
                self.overflows.compare(name, exact[own], memory[own])

    def window_bytes(self, part: int, slot: Slot) -> int:
        """How large the windows of a slot are best."""
        return self._of[part].window_bytes(slot)


def _looked_at(source: Source, one: Proved) -> frozenset[Slot]:
    """The slots whose values may be lost in a narrower dtype."""
    part, held = one.part, source.manifest_of(one.number)
    if source.all_looked_at:
        return frozenset(slot for slot, _ in part.wants)
    out: set[Slot] = set()
    for slot, state in part.wants:
        buffer = part.target.buffers[slot.buffer]
        dtype = buffer.dtype_of(slot.state)
        params = {member.param for member in buffer.members}
        if any(is_looked_at(held, name, state, dtype, part.as_trained) for name in params):
            out.add(slot)
    return frozenset(out)


def proved(
    source: Source, part: SinkPart, allow: frozenset[str] = frozenset(), number: int = 0
) -> Proved:
    """Plans all of a part, proves the plan and looks every source up. Raises a UcpError."""
    held, allow = source.manifest_of(number), allow | part.allow
    plan = make_plan(held, part.target, part.wants, allow)
    prove(plan, held, part.target)
    one = Proved(number, part, plan, allow)
    source.locate(one)
    return one


def transfer(
    source: Given,
    sink: Sink[Given],
    allow: frozenset[str] = frozenset(),
    *,
    run: TransferRun | None = None,
    alone: bool = False,
) -> TransferRun:
    """Moves all that a sink wants from a source. Collective, unless this process is `alone`.

    Raises a UcpError on every rank. What lay there before is then as it was; of a live engine that
    was written into nothing may be used.
    """
    ranks = agree.OneRank() if alone else None
    run = run or TransferRun()
    with ExitStack() as held:
        with agree.together(ranks):
            parts = [proved(source, part, allow, n) for n, part in enumerate(sink.parts)]
        with agree.together(ranks):
            held.enter_context(sink)
        with agree.together(ranks):
            sink.move(source, parts, run)
        source.check(sink.thorough)
        sink.compare()
        with agree.gathering(ranks) as block:
            block.value = sink.lost()
        with agree.together(ranks):
            refuse_lost(block.values, source.file, sink.verb)
            sink.finish()
        with agree.together(ranks):
            sink.publish()
    return run
