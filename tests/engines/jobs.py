"""What the ranks do in the engine tests."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences, fill
from tests.engines.model import Setup, make_engine, train


def save(setup: Setup, folder: str, steps: int = 3, attach: bool = True, more: int = 20, filled: bool = True) -> None:
    """Trains, saves the tag `trained`, fills with provenance values, saves `filled`; canonical states beside them."""
    engine = make_engine(setup, attach)
    train(engine, steps)
    engine.save_checkpoint(folder, tag="trained", client_state={"note": "mine", "data": torch.arange(5)})
    states = {"trained": canonical(engine)}
    if filled:
        fill(engine)
        engine.save_checkpoint(folder, tag="filled")
        states["filled"] = canonical(engine)
    losses = []
    if more:
        engine.destroy()
        engine = make_engine(setup, attach=False)
        train(engine, steps)  # the same run again, uninterrupted
        losses = train(engine, more, first=steps)
    if dist.get_rank() == 0:
        torch.save({"states": states, "losses": losses, "steps": steps}, Path(folder) / "oracle.pt")
    engine.destroy()


def resume(setup: Setup, folder: str, tags: tuple[str, ...] = ("filled", "trained"), more: int = 0, same_dtype: bool = True,
           plant: str | None = None, **options: Any) -> dict[str, Any]:
    """Loads each tag into a fresh engine and compares; trains on after the last one."""
    oracle = torch.load(Path(folder) / "oracle.pt", weights_only=False)
    engine = make_engine(setup)
    before = canonical(engine)
    found: dict[str, Any] = {"differences": {}, "before": {}, "reports": {}}
    for tag in tags:
        report = ucp.load(engine, folder, tag=tag, **options)
        if plant:
            plant_fault(engine, plant)
        want = oracle["states"][tag]
        found["before"][tag] = differences(want, before, same_dtype)
        found["differences"][tag] = differences(want, canonical(engine), same_dtype)
        found["reports"][tag] = report
    if more:
        losses = train(engine, more, first=oracle["steps"])
        found["loss"] = max(abs(a - b) for a, b in zip(losses, oracle["losses"][:more], strict=True))
    engine.destroy()
    return found


def plant_fault(engine: Any, fault: str) -> None:
    """One small wrong thing that a comparison has to see."""
    from tests.engines.canonical import _runs, base_of
    base = base_of(engine)
    name, _, count, master, offset, g = max(_runs(engine), key=lambda run: run[2])
    held = base.state[master]
    flat = master.data.view(-1)
    if fault == "one bit":
        flat.view(torch.int32)[offset] ^= 1
    elif fault == "two elements swapped":
        flat[offset], flat[offset + 1] = flat[offset + 1].clone(), flat[offset].clone()
    elif fault == "one moment":
        held["exp_avg"].view(-1)[offset + count - 1] = 0.5
    elif fault == "one step":
        held["step"] += 1
    elif fault == "one group's weight decay":
        base.param_groups[g]["weight_decay"] += 0.01
    elif fault == "a buffer":
        engine.module.calls += 1
    else:
        raise ValueError(fault)


def attempt(setup: Setup, folder: str, tag: str | None = None, through: str = "load", then: str | None = None,
            **options: Any) -> dict[str, Any]:
    """A load that should fail: the error, whether the engine is bit for bit as before, and whether it refuses to go on.

    `then` loads another tag afterwards and steps.
    """
    engine = make_engine(setup)
    train(engine, 1)
    before = canonical(engine)
    out: dict[str, Any] = {"error": None, "message": ""}
    try:
        if through == "load":
            ucp.load(engine, folder, tag=tag, **options)
        else:
            engine.load_checkpoint(folder, tag=tag)
    except Exception as error:
        out |= {"error": type(error).__name__, "message": str(error)}
    out["unchanged"] = differences(before, canonical(engine)) == []
    refusals = []
    marked = "_ucp_methods_before_load" in engine.__dict__  # a step without a backward pass is for an engine that refuses
    for method in (engine.step if marked else lambda: train(engine, 1), lambda: engine.save_checkpoint(folder, tag="after")):
        try:
            method()
        except ucp.UcpError as error:
            refusals.append(type(error).__name__)
    out["refuses"] = refusals == ["EngineUnusableError"] * 2
    if not out["refuses"] and refusals:
        raise AssertionError(f"the engine refuses only a part: {refusals}")
    if then:
        ucp.load(engine, folder, tag=then)
        before = canonical(engine)
        train(engine, 1)
        out["steps_after_a_good_load"] = differences(before, canonical(engine)) != []
    engine.destroy()
    return out
