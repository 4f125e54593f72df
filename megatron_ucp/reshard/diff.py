"""Two checkpoints of any meshes, compared bit by bit in their canonical state; of one that holds
weights alone the weights."""

import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ucp import say
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.layout import Partial
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.core.values import alike, same, shown
from megatron_ucp.errors import some_of
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.megatron.schedule import one_spelling
from megatron_ucp.formats.of_ranks import Apart
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.formats.rank_differences import apart_in
from megatron_ucp.formats.registry import checkpoint_folder, is_hugging_face, open_checkpoint
from megatron_ucp.formats.schedules import without_groups
from megatron_ucp.reshard.file_source import WINDOW_BYTES, FileSource, Memory, ThreadMemory, pool
from megatron_ucp.reshard.findings import Progress
from megatron_ucp.reshard.fingerprint import is_kept, of_path
from megatron_ucp.reshard.hugging_face.twin import told_by
from megatron_ucp.reshard.one_parameter import one_parameter, slots_of
from megatron_ucp.reshard.transfer import SinkPart, WindowReader, proved

_MEMCMP = ctypes.CDLL(None).memcmp  # bits, not numbers: NaN equals itself, and -0.0 is not 0.0


@dataclass(frozen=True)
class Difference:
    """One thing that differs: a parameter (or "" for the run), what of it, and both sides as
    text."""

    parameter: str
    what: str
    a: str
    b: str


@say.shown("diff")
def diff(
    a: str | Path,
    b: str | Path,
    *,
    progress: Progress | None = None,
    rules: str | Path | None = None,
    rules_b: str | Path | None = None,
    fingerprint: bool = False,
) -> list[Difference]:
    """Compares two checkpoints of any formats and meshes, bit by bit: parameters, shapes, fp32
    master weights, optimizer states, steps, hyper-parameters, counters, schedules.

    Training copies are not compared, as they are casts of the master weights; nor is the client
    state. Of a Hugging Face folder the weights are compared, with the other side's master weights
    rounded to its dtypes.

    Args:
        a: A tag folder, the folder above it, or a Hugging Face folder. Or a file with what
            `megatron-ucp inspect --fingerprint --json` printed of a checkpoint that lies elsewhere:
            then fingerprints are compared.
        b: The other one.
        progress: `progress(done, total)` counts bytes.
        rules: A file of rules (docs/reference/rules.md) for both.
        rules_b: Another one for `b`.
        fingerprint: Compares what the saves recorded of every parameter and state, and reads no
            tensor.

    Returns:
        Every difference; an empty list where there is none.

    Raises:
        UcpError: For a checkpoint that can't be read, or has no such record.

    Example:
        >>> import megatron_ucp as ucp
        >>> assert not ucp.diff("runs/llama", "dp3/global_step80")
    """
    if fingerprint or is_kept(a) or is_kept(b):
        sides = (a, rules), (b, rules_b or rules)
        first, second = (of_path(p, rules=r, recorded=fingerprint) for p, r in sides)
        return [Difference(*one) for one in first.compared(second)]
    with ExitStack() as opened:
        one, two = _opened(a, b, rules, rules_b or rules, opened)
        if Keeper.WEIGHTS in (one.manifest.keeper, two.manifest.keeper):
            return weight_differences(one, two, progress)
        return _differences(one, two, _run(one, two), _parameter, progress)


def weight_differences(
    one: Checkpoint,
    two: Checkpoint,
    progress: Progress | None = None,
    among: Mapping[str, ParamSpec] | None = None,
) -> list[Difference]:
    """Every difference in the weights of two checkpoints, of which at least one holds nothing else:
    the other one's masters are rounded to its dtypes. Rows of a vocabulary that are padding are not
    compared. `among` are the parameters that are looked at (None: all), without the padding that a
    checkpoint alone may not know. Raises a UcpError."""
    return _differences(one, two, (), partial(_weights, among or {}), progress, among)


def _opened(
    a: str | Path, b: str | Path, rules: Any, rules_b: Any, opened: ExitStack
) -> tuple[Checkpoint, Checkpoint]:
    """Both checkpoints. A Hugging Face folder is read under the names of the other one, where that
    is of a family."""
    twins = [is_hugging_face(checkpoint_folder(path)) for path in (a, b)]
    if twins[0] and not twins[1]:
        two = opened.enter_context(open_checkpoint(b, rules=rules_b))
        told = told_by(Path(a), two.manifest)
        return opened.enter_context(open_checkpoint(a, told=told)), two
    one = opened.enter_context(open_checkpoint(a, rules=rules))
    told = told_by(Path(b), one.manifest) if twins[1] else None
    return one, opened.enter_context(open_checkpoint(b, rules=rules_b, told=told))


def _differences(
    one: Checkpoint,
    two: Checkpoint,
    first: Iterable[Difference],
    compare: "Compare",
    progress: Progress | None,
    among: Collection[str] | None = None,
) -> list[Difference]:
    """What differs of the runs comes `first`, then what `compare` says of each parameter."""
    out: list[Difference | Compared] = [*first]
    with pool() as threads:  # they compare while the next parameter is planned
        job = _Job(FileSource(one), FileSource(two), threads)
        known = [manifest.by_name for manifest in job.manifests]
        if among is None and known[0].keys().isdisjoint(known[1]):
            sides = (some_of([*specs], 2) for specs in known)
            out.insert(0, Difference("", "no parameter is in both", *sides))
        try:
            for name in {**known[0], **known[1]} if among is None else among:
                if all(name in specs for specs in known):
                    out += compare(name, job)
                else:
                    here = ("present" if name in specs else "missing" for specs in known)
                    out.append(Difference(name, "parameter", *here))
            job.finish(progress)
        finally:  # also for Ctrl-C: what has not begun does not begin
            job.cancel()
    return [
        difference
        for one in out
        for difference in ([one] if isinstance(one, Difference) else one.result())
    ]


def _run(one: Checkpoint, two: Checkpoint) -> Iterator[Difference]:
    for key in ("global_steps", "global_samples", "skipped_steps"):
        a, b = one.extras.counters.get(key), two.extras.counters.get(key)
        if a != b:
            yield Difference("", key, repr(a), repr(b))
    apart = [apart_in(checkpoint) for checkpoint in (one, two)]
    if not _same_apart(*apart):
        shown_apart = (str(replace(each.what, client_state=frozenset())) for each in apart)
        yield Difference("", "values that differ from rank to rank", *shown_apart)
    a, b = one.extras.scheduler, two.extras.scheduler
    staged = max(c.manifest.mesh.pp for c in (one, two)) > 1
    if staged or len(one.manifest.groups) != len(two.manifest.groups):
        # the stages of a pipeline, and experts that other ranks share, have groups of their own;
        # their rates are compared with the parameters' hyper-parameters
        a, b = without_groups(a), without_groups(b)
    if not alike(one_spelling(a), one_spelling(b)):
        yield Difference("", "lr_scheduler", shown(a), shown(b))


def _same_apart(a: Apart, b: Apart) -> bool:
    """Of buffers and schedulers: the client state is the caller's, and is not compared."""
    sides = [replace(each.what, client_state=frozenset()) for each in (a, b)]
    if not any(sides):
        return True
    pairs = zip(a.ranks, b.ranks, strict=False)
    return (
        sides[0] == sides[1]
        and len(a.ranks) == len(b.ranks)
        and all(
            same(dict(one.buffers), dict(other.buffers)) and same(one.scheduler, other.scheduler)
            for one, other in pairs
        )
    )


def _parameter(name: str, job: "_Job") -> "Iterator[Difference | Compared]":
    a, b = job.specs(name)
    for what in ("shape", "kind"):
        if getattr(a, what) != getattr(b, what):
            yield Difference(name, what, str(getattr(a, what)), str(getattr(b, what)))
    if a.shape != b.shape:
        return
    yield from _states(name, job)
    for what in ("scalars_of", "group_of"):
        yield from _settings(name, *(getattr(one, what)(name) for one in job.manifests))


def _weights(
    known: Mapping[str, ParamSpec], name: str, job: "_Job"
) -> "Iterator[Difference | Compared]":
    """The weights of a parameter, in the dtype of the side that holds nothing else; `known` are
    parameters without padding."""
    a, b = job.specs(name)
    alike = a.shape == b.shape or _padded(a, b) or _padded(b, a)
    if not alike and not (name in known and known[name].shape == b.shape):
        yield Difference(name, "shape", str(a.shape), str(b.shape))
        return
    one, two = job.manifests
    sides = [weight_of(manifest, name) for manifest in job.manifests]
    if one.keeper == two.keeper and sides[0] != sides[1]:
        yield Difference(name, "dtype", *(f"torch.{dtype}" for _, dtype in sides))
        return
    alone = two if two.keeper == Keeper.WEIGHTS else one
    target = one_parameter(alone, name, {VALUE: alone.states_of(name)[VALUE]})
    first, second = ({VALUE: state} for state, _ in sides)
    yield job.compare(name, target, (first, second), frozenset({"narrow"}))[VALUE]


def _padded(larger: ParamSpec, smaller: ParamSpec) -> bool:
    """Whether one vocabulary has the rows of the other, and padding."""
    extent = larger.extent
    return extent is not None and smaller.shape == (extent.true, *larger.shape[1:])


def weight_of(manifest: Manifest, name: str) -> tuple[str, str]:
    """The state that has a parameter's weights, and its dtype: the masters, where there are any."""
    states = manifest.states_of(name)
    state = MASTER if MASTER in states else VALUE
    return state, states[state]


def _states(name: str, job: "_Job") -> "Iterator[Difference | Compared]":
    """States that one side lacks or has in another dtype; those of both are compared."""
    states = [manifest.states_of(name) for manifest in job.manifests]
    both = {state: dtype for state, dtype in states[0].items() if states[1].get(state) == dtype}
    compared = job.want(name, both) if both else {}
    for state in dict.fromkeys([*states[0], *states[1]]):
        if state not in states[0] or state not in states[1]:
            yield Difference(name, state, *("present" if state in s else "missing" for s in states))
        elif state not in both:
            yield Difference(name, f"{state} dtype", *(f"torch.{s[state]}" for s in states))
        else:
            yield compared[state]


def _settings(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key in sorted({*a, *b}):
        if not alike(a.get(key), b.get(key)):
            yield Difference(name, key, shown(a.get(key)), shown(b.get(key)))


Compared = Future[list[Difference]]  # of one state of one parameter
Compare = Callable[[str, "_Job"], "Iterator[Difference | Compared]"]


class _Job:
    """What is read and compared, window by window."""

    def __init__(self, one: FileSource, two: FileSource, threads: ThreadPoolExecutor) -> None:
        self.sources, self.threads, self.memory = (one, two), threads, ThreadMemory()
        self.manifests = one.manifest, two.manifest
        self._waiting: list[tuple[int, Compared]] = []  # bytes, and what differs in them

    def specs(self, name: str) -> list[ParamSpec]:
        """A parameter as each side has it."""
        return [manifest.by_name[name] for manifest in self.manifests]

    def want(self, name: str, states: Mapping[str, str]) -> dict[str, Compared]:
        """Plans the comparison of some states (name -> dtype) of a parameter, and starts it. Copies
        of which every rank has its own are compared one by one, or as their mean where the sides
        have other numbers of them. Raises a UcpError."""
        layouts = [spec.layout for spec in self.specs(name)]
        copies = {
            manifest.mesh.size(layout.axis) if isinstance(layout, Partial) else 1
            for manifest, layout in zip(self.manifests, layouts, strict=True)
        }
        averaged = len(copies) > 1
        target = one_parameter(self.manifests[0], name, states, averaged)
        allow = frozenset({"mean"}) if averaged else frozenset[str]()
        same = {state: state for state in states}
        return self.compare(name, target, (same, same), allow)

    def compare(
        self,
        name: str,
        target: Manifest,
        states: tuple[Mapping[str, str], Mapping[str, str]],
        allow: frozenset[str],
    ) -> dict[str, Compared]:
        """Starts the comparison of a parameter in the states of a target, one by one; `states` say
        which state each side has for them. Raises a UcpError."""
        sides: list[WindowReader] = []
        for source, named in zip(self.sources, states, strict=True):
            wants = tuple((s, own) for state, own in named.items() for s in slots_of(target, state))
            sides.append(source.windows(proved(source, SinkPart(target, wants), allow)))
        compared = {
            state: self.threads.submit(self._compare, name, target, state, sides)
            for state in states[0]
        }
        self._waiting += [(_bytes_of(target, state), one) for state, one in compared.items()]
        return compared

    def finish(self, progress: Progress | None) -> None:
        """Waits until all is compared, and was read as it is saved. Raises DamagedFileError."""
        total, done = sum(size for size, _ in self._waiting), 0
        for size, one in self._waiting:
            one.result()
            done += size
            if progress is not None:
                progress(done, total)
        for source in self.sources:
            source.check(thorough=False)

    def cancel(self) -> None:
        for _, one in self._waiting:
            one.cancel()

    def _compare(
        self, name: str, target: Manifest, state: str, sides: Sequence[WindowReader]
    ) -> list[Difference]:
        elems, wrong, first = target.buffers[0].length, 0, None
        for slot in slots_of(target, state):
            count, found = unequal(target, slot, sides, self.memory)
            wrong, first = wrong + count, first or found
        if first is None:
            return []
        what = f"{state}, {wrong} of {elems} elements, the first is {first[0]}"
        return [Difference(name, what, *first[1:])]


def _bytes_of(target: Manifest, state: str) -> int:
    buffer = target.buffers[0]
    return buffer.length * ITEMSIZE[buffer.dtype_of(state)]


def unequal(
    target: Manifest, slot: Slot, sides: Sequence[WindowReader], memory: Memory
) -> tuple[int, tuple[int, str, str] | None]:
    """How many elements of a slot differ between two sides, and the first one: its position, and
    both values."""
    buffer = target.buffers[slot.buffer]
    dtype = buffer.dtype_of(slot.state)
    size, wrong, first = ITEMSIZE[dtype], 0, None
    step = WINDOW_BYTES // size
    for low in range(0, buffer.length, step):
        count = min(step, buffer.length - low)
        held = [memory.take(count, dtype, which) for which in range(2)]
        for side, window in zip(sides, held, strict=True):
            side.fill(slot, low, window)
        if _same_bits(*held):
            continue
        a, b = (window.view(torch.uint8).view(-1, size) for window in held)
        places = (a != b).any(1).nonzero().reshape(-1)
        at = int(places[0])
        first = first or (low + at, repr(held[0][at].item()), repr(held[1][at].item()))
        wrong += len(places)
    return wrong, first


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    pointers = (ctypes.c_void_p(memory.data_ptr()) for memory in (a, b))
    return not _MEMCMP(*pointers, ctypes.c_size_t(a.nbytes))
