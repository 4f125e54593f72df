"""Two checkpoints of any meshes, compared bit by bit in their canonical state."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot, make_plan, prove
from megatron_ucp.core.zero import FlatBuffer, Member
from megatron_ucp.formats.deepspeed import PER_GROUP
from megatron_ucp.formats.opened import Checkpoint, open_checkpoint
from megatron_ucp.reshard.execute import DTYPES, check_runs, execute


@dataclass(frozen=True)
class Difference:
    """One thing that differs: a parameter (or "" for the run), what of it, and both sides as text."""

    parameter: str
    what: str
    a: str
    b: str


def diff(a: str | Path, b: str | Path, progress: Callable[[int, int], None] | None = None, rules: str | Path | None = None,
         rules_b: str | Path | None = None) -> list[Difference]:
    """Every difference in parameters, shapes, master weights, optimizer states, steps, hyper-parameters and counters.

    Empty where the canonical states are equal bit by bit, whatever the meshes. Training copies are not compared: they are
    casts of the masters. `progress(done, total)` counts parameters. `rules` is a file of rules (docs/rules.md)
    for both, `rules_b` another one for b. Raises a UcpError.
    """
    with open_checkpoint(a, rules=rules) as one, open_checkpoint(b, rules=rules_b or rules) as two:
        out = list(_run(one, two))
        names = list(dict.fromkeys([*one.manifest.by_name, *two.manifest.by_name]))
        for done, name in enumerate(names):
            out += _parameter(one, two, name)
            if progress is not None:
                progress(done + 1, len(names))
        return out


def _run(one: Checkpoint, two: Checkpoint) -> Iterator[Difference]:
    for key in ("global_steps", "global_samples", "skipped_steps", "lr_scheduler"):
        a, b = one.meta.get(key), two.meta.get(key)
        if key == "lr_scheduler" and (one.pipeline or two.pipeline):
            # each stage's scheduler counts its own groups; their rates are compared with the parameters' hyper-parameters
            a, b = ({k: v for k, v in state.items() if k not in PER_GROUP} if isinstance(state, dict) else state
                    for state in (a, b))
        if a != b:
            yield Difference("", key, repr(a), repr(b))


def _parameter(one: Checkpoint, two: Checkpoint, name: str) -> Iterator[Difference]:
    a, b = one.manifest.by_name.get(name), two.manifest.by_name.get(name)
    if a is None or b is None:
        yield Difference(name, "parameter", "missing" if a is None else "present", "missing" if b is None else "present")
        return
    for what in ("shape", "kind"):
        if getattr(a, what) != getattr(b, what):
            yield Difference(name, what, str(getattr(a, what)), str(getattr(b, what)))
    if a.shape != b.shape:
        return
    states = [dict(c.manifest.buffers[c.manifest.holders[name][0][0]].states) for c in (one, two)]
    for state in dict.fromkeys([*states[0], *states[1]]):
        if state not in states[0] or state not in states[1]:
            yield Difference(name, state, *("present" if state in s else "missing" for s in states))
        else:
            yield from _values(name, state, read_state(one, name, state), read_state(two, name, state))
    for what in ("scalars_of", "group_of"):
        yield from _settings(name, *(getattr(c.manifest, what)(name) for c in (one, two)))


def _settings(name: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for key in sorted({*a, *b}):
        if a.get(key) != b.get(key):
            yield Difference(name, key, repr(a.get(key)), repr(b.get(key)))


def _values(name: str, state: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[Difference]:
    if a.dtype != b.dtype:
        yield Difference(name, f"{state} dtype", str(a.dtype), str(b.dtype))
        return
    same = (a.view(torch.uint8) == b.view(torch.uint8)).view(a.numel(), a.element_size()).all(1)
    if not bool(same.all()):
        wrong = (~same).nonzero().reshape(-1)
        at = int(wrong[0])
        yield Difference(name, f"{state}, {len(wrong)} of {a.numel()} elements, the first is {at}",
                         repr(a[at].item()), repr(b[at].item()))


def read_state(checkpoint: Checkpoint, name: str, state: str) -> torch.Tensor:
    """One state of one logical parameter, flat, checked against the CRC-32 of the records that it fills."""
    source = checkpoint.manifest
    spec = source.by_name[name]
    dtype = dict(source.buffers[source.holders[name][0][0]].states)[state]
    target = one_parameter(spec, state, dtype)
    plan = make_plan(source, target, [(Slot(0, (("tp", 0),), 0, state), state)])
    prove(plan, source, target)
    out = torch.empty(target.buffers[0].length, dtype=DTYPES[dtype])
    counts = execute(plan, checkpoint.where, lambda _: out)
    check_runs(counts.runs, counts.records, checkpoint.opened)
    return out


def one_parameter(spec: ParamSpec, state: str, dtype: str) -> Manifest:
    """A target that holds one state of one whole parameter."""
    size = 1
    for n in spec.shape:
        size *= n
    return Manifest("canonical", Mesh(), (ParamSpec(spec.name, spec.shape, spec.dtype, spec.kind),),
                    (FlatBuffer((Member(spec.name, 0, size),), size, 1, "whole", ((state, dtype),)),))
