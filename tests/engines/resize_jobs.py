"""What the ranks do in the tests of resizes: one engine trains, another one on another mesh goes on
from its memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import megatron_ucp as ucp
from tests.engines import (
    autotp_jobs,
    cross_jobs,
    jobs,
    model,
    moe_jobs,
    pipeline_jobs,
    stack_jobs,
    stack_states,
    tensor_jobs,
)
from tests.engines import canonical as zero_states


@dataclass(frozen=True)
class Kind:
    """How an engine of a setup is made, trained, filled, looked at and closed. `handle` is what
    this package takes."""

    make: Callable[[Any], Any]
    train: Callable[..., list[float]]
    plant: Callable[[Any, str], None]
    close: Callable[[Any], None]
    handle: Callable[[Any], Any] = lambda engine: engine
    fill: Callable[[Any], None] = zero_states.fill
    canonical: Callable[[Any], dict[str, Any]] = zero_states.canonical


def _settled(engine: Any) -> dict[str, Any]:
    stack_jobs.settle(engine)
    return stack_states.canonical(engine)


KINDS: dict[str, Kind] = {
    "Setup": Kind(model.make_engine, model.train, jobs.plant_fault, lambda one: one.destroy()),
    "Mega": Kind(tensor_jobs.make, tensor_jobs.train, tensor_jobs.plant_fault, tensor_jobs.close),
    "Staged": Kind(
        pipeline_jobs.make, pipeline_jobs.train, pipeline_jobs.plant_fault, tensor_jobs.close
    ),
    "Moe": Kind(moe_jobs.make, moe_jobs.train, moe_jobs.plant_fault, lambda one: one.destroy()),
    "Auto": Kind(autotp_jobs.make, autotp_jobs.train, jobs.plant_fault, lambda one: one.destroy()),
    "Zero": Kind(
        cross_jobs.make, pipeline_jobs.train, pipeline_jobs.plant_fault, tensor_jobs.close
    ),
    "Mcore": Kind(
        stack_jobs.make,
        stack_jobs.train,
        stack_states.plant_fault,
        stack_jobs.close,
        lambda engine: engine.handle,
        stack_states.fill,
        _settled,
    ),
}


def kind_of(setup: Any) -> Kind:
    """By the class of a setup."""
    return KINDS[type(setup).__name__]


def compared(one: Any, other: Any) -> Callable[[dict[str, Any], dict[str, Any]], list[str]]:
    """What compares the states of two setups: all of it, where both have the same engine."""
    return (
        zero_states.differences
        if kind_of(one).fill is kind_of(other).fill
        else (stack_states.compare)
    )


def pair(
    source: Any,
    target: Any,
    filled: bool = False,
    more: int = 0,
    plant: str = "",
    hold: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains an engine, holds it, builds another one in its place that has trained something else,
    loads, and compares. `filled`: with provenance values. `more` steps afterwards, beside the same
    ones of the engine that was never resized."""
    one, other = kind_of(source), kind_of(target)
    engine = one.make(source)
    one.train(engine, 3)
    if filled:
        one.fill(engine)
    want = one.canonical(engine)
    held = ucp.hold(one.handle(engine), **(hold or {}))
    found: dict[str, Any] = {"held": held.size_bytes}
    found["after the hold"] = zero_states.differences(want, one.canonical(engine))
    losses = one.train(engine, more, first=3) if more else []
    one.close(engine)
    engine = other.make(target)
    other.train(engine, 1, first=99)
    compare = compared(source, target)
    found["before"] = compare(want, other.canonical(engine))
    report = ucp.load(other.handle(engine), held)
    found |= {"notes": report.notes, "line": str(report), "left": held.size_bytes}
    found["moved"], found["fingerprint"] = report.all_read_bytes, report.fingerprint
    if plant:
        other.plant(engine, plant)
    found["differences"] = compare(want, other.canonical(engine))
    if more:
        again = other.train(engine, more, first=3)
        found["loss"] = max(abs(a - b) for a, b in zip(again, losses, strict=True))
    other.close(engine)
    return found
