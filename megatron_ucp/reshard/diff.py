"""Two checkpoints of any meshes, compared bit by bit in their canonical state."""

import ctypes
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot, make_plan, prove
from megatron_ucp.formats.deepspeed.native import PER_GROUP
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.formats.registry import Checkpoint, open_checkpoint
from megatron_ucp.reshard.execute import DTYPES, check_runs, execute
from megatron_ucp.reshard.windows import WINDOW_BYTES, Memory, WindowReader, pool

_MEMCMP = ctypes.CDLL(None).memcmp  # bits, not numbers: NaN equals itself, and -0.0 is not 0.0


@dataclass(frozen=True)
class Difference:
    """One thing that differs: a parameter (or "" for the run), what of it, and both sides as
    text."""

    parameter: str
    what: str
    a: str
    b: str


def diff(
    a: str | Path,
    b: str | Path,
    progress: Callable[[int, int], None] | None = None,
    rules: str | Path | None = None,
    rules_b: str | Path | None = None,
) -> list[Difference]:
    """Every difference in parameters, shapes, master weights, optimizer states, steps,
    hyper-parameters and counters.

    Empty where the canonical states are equal bit by bit, whatever the meshes. Training copies are
    not compared: they are casts of the masters. `progress(done, total)` counts bytes. `rules` is a
    file of rules (docs/rules.md) for both, `rules_b` another one for b. Raises a UcpError.
    """
    with open_checkpoint(a, rules=rules) as one, open_checkpoint(b, rules=rules_b or rules) as two:
        out: list[Difference | _Values] = [*_run(one, two)]
        with pool() as threads:  # they compare while the next parameter is planned
            job = _Job(WindowReader(one), WindowReader(two), threads)
            try:
                for name in dict.fromkeys([*one.manifest.by_name, *two.manifest.by_name]):
                    out += _parameter(one, two, name, job)
                found = job.collect(progress)
            finally:  # also for Ctrl-C: what has not begun does not begin
                job.cancel()
        return [
            difference
            for one in out
            for difference in (found[one] if isinstance(one, _Values) else [one])
        ]


def _run(one: Checkpoint, two: Checkpoint) -> Iterator[Difference]:
    for key in ("global_steps", "global_samples", "skipped_steps", "lr_scheduler"):
        a, b = one.meta.get(key), two.meta.get(key)
        if key == "lr_scheduler" and (one.pipeline or two.pipeline):
            # each stage's scheduler counts its own groups; their rates are compared with the
            # parameters' hyper-parameters
            a, b = (
                {k: v for k, v in state.items() if k not in PER_GROUP}
                if isinstance(state, dict)
                else state
                for state in (a, b)
            )
        if a != b:
            yield Difference("", key, repr(a), repr(b))


def _parameter(
    one: Checkpoint, two: Checkpoint, name: str, job: "_Job"
) -> "Iterator[Difference | _Values]":
    a, b = one.manifest.by_name.get(name), two.manifest.by_name.get(name)
    if a is None or b is None:
        yield Difference(
            name,
            "parameter",
            "missing" if a is None else "present",
            "missing" if b is None else "present",
        )
        return
    for what in ("shape", "kind"):
        if getattr(a, what) != getattr(b, what):
            yield Difference(name, what, str(getattr(a, what)), str(getattr(b, what)))
    if a.shape != b.shape:
        return
    states = [dict(c.manifest.buffers[c.manifest.holders[name][0][0]].states) for c in (one, two)]
    both = {state: dtype for state, dtype in states[0].items() if states[1].get(state) == dtype}
    if both:
        job.want(a, both)
    for state in dict.fromkeys([*states[0], *states[1]]):
        if state not in states[0] or state not in states[1]:
            yield Difference(name, state, *("present" if state in s else "missing" for s in states))
        elif state not in both:
            yield Difference(name, f"{state} dtype", *(f"torch.{s[state]}" for s in states))
        else:
            yield _Values(name, state)
    for what in ("scalars_of", "group_of"):
        yield from _settings(name, *(getattr(c.manifest, what)(name) for c in (one, two)))


def _settings(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key in sorted({*a, *b}):
        if a.get(key) != b.get(key):
            yield Difference(name, key, repr(a.get(key)), repr(b.get(key)))


@dataclass(frozen=True)
class _Values:
    """One state of one parameter, which both sides have in one dtype."""

    name: str
    state: str


class _Job:
    """What is read and compared, window by window."""

    def __init__(self, one: WindowReader, two: WindowReader, threads: ThreadPoolExecutor) -> None:
        self.readers, self.threads, self.memory = (one, two), threads, Memory()
        self.targets: dict[_Values, Manifest] = {}
        self.waiting: dict[_Values, Future[list[Difference]]] = {}

    def want(self, spec: ParamSpec, states: Mapping[str, str]) -> None:
        """Plans the comparison of some states (name -> dtype) of a parameter, and starts it. Raises
        a UcpError."""
        target = one_parameter(spec, states)
        self.targets.update((_Values(spec.name, state), target) for state in states)
        for reader in self.readers:
            reader.prove(target, [(_whole(state), state) for state in states])
        for key in [_Values(spec.name, state) for state in states]:
            self.waiting[key] = self.threads.submit(self._compare, key)

    def collect(
        self, progress: Callable[[int, int], None] | None
    ) -> dict[_Values, list[Difference]]:
        """What differs. Raises DamagedFileError."""
        found: dict[_Values, list[Difference]] = {}
        total, done = sum(map(self._bytes, self.targets)), 0
        for key, one in self.waiting.items():
            found[key] = one.result()
            done += self._bytes(key)
            if progress is not None:
                progress(done, total)
        for reader in self.readers:
            reader.check(thorough=False)
        return found

    def cancel(self) -> None:
        for one in self.waiting.values():
            one.cancel()

    def _bytes(self, key: _Values) -> int:
        buffer = self.targets[key].buffers[0]
        return buffer.length * ITEMSIZE[dict(buffer.states)[key.state]]

    def _compare(self, key: _Values) -> list[Difference]:
        target = self.targets[key]
        dtype, elems = dict(target.buffers[0].states)[key.state], target.buffers[0].length
        step, wrong, first = WINDOW_BYTES // ITEMSIZE[dtype], 0, None
        for low in range(0, elems, step):
            held = [self.memory.take(min(step, elems - low), dtype, which) for which in range(2)]
            for reader, memory in zip(self.readers, held, strict=True):
                reader.fill(target, _whole(key.state), key.state, low, memory)
            if _MEMCMP(
                *(ctypes.c_void_p(memory.data_ptr()) for memory in held),
                ctypes.c_size_t(held[0].nbytes),
            ):
                a, b = (memory.view(torch.uint8).view(-1, ITEMSIZE[dtype]) for memory in held)
                unequal = (a != b).any(1).nonzero().reshape(-1)
                at = int(unequal[0])
                first = first or (low + at, repr(held[0][at].item()), repr(held[1][at].item()))
                wrong += len(unequal)
        if first is None:
            return []
        return [
            Difference(
                key.name,
                f"{key.state}, {wrong} of {elems} elements, the first is {first[0]}",
                *first[1:],
            )
        ]


def _whole(state: str) -> Slot:
    return Slot(0, (("tp", 0),), 0, state)


def read_state(checkpoint: Checkpoint, name: str, state: str) -> torch.Tensor:
    """One state of one logical parameter, flat, checked against the CRC-32 of the records that it
    fills."""
    source = checkpoint.manifest
    spec = source.by_name[name]
    dtype = dict(source.buffers[source.holders[name][0][0]].states)[state]
    target = one_parameter(spec, {state: dtype})
    plan = make_plan(source, target, [(_whole(state), state)])
    prove(plan, source, target)
    out = torch.empty(target.buffers[0].length, dtype=DTYPES[dtype])
    counts = execute(plan, checkpoint.where, lambda _: out)
    check_runs(counts.runs, counts.records, checkpoint.opened)
    return out


def one_parameter(spec: ParamSpec, states: Mapping[str, str]) -> Manifest:
    """A target that holds some states (name -> dtype) of one whole parameter."""
    size = math.prod(spec.shape)
    return Manifest(
        "canonical",
        Mesh(),
        (ParamSpec(spec.name, spec.shape, spec.dtype, spec.kind),),
        (FlatBuffer((Member(spec.name, 0, size),), size, 1, "whole", tuple(states.items())),),
    )
