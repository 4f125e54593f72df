"""What the ranks do in the engine tests."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.engines.record import record_of
from tests.engines.canonical import canonical, differences, everywhere, fill
from tests.engines.fingerprints import unchecked, unlike
from tests.engines.masters import base_of, runs_of
from tests.engines.model import Setup, make_engine, train
from tests.share import LOSS_STEPS, tags_of


def save(
    setup: Setup,
    folder: str,
    steps: int = 3,
    attach: bool = True,
    more: int = LOSS_STEPS,
    filled: bool = True,
) -> None:
    """Trains, saves the tag `trained`, fills with provenance values, saves `filled`; canonical
    states beside them."""
    engine = make_engine(setup, attach)
    train(engine, steps)
    engine.save_checkpoint(
        folder, tag="trained", client_state={"note": "mine", "data": torch.arange(5)}
    )
    states = {"trained": canonical(engine)}
    groups = {"trained": group_settings(engine)}
    if filled:
        fill(engine)
        engine.save_checkpoint(folder, tag="filled")
        states["filled"] = canonical(engine)
        groups["filled"] = group_settings(engine)
    losses = []
    if more:
        engine.destroy()
        engine = make_engine(setup, attach=False)
        train(engine, steps)  # the same run again, uninterrupted
        losses = train(engine, more, first=steps)
    if dist.get_rank() == 0:
        kept = {"states": states, "losses": losses, "steps": steps, "groups": groups}
        torch.save(kept, Path(folder) / "oracle.pt")
    engine.destroy()


def group_settings(engine: Any) -> list[dict[str, Any]]:
    """Every key of every parameter group of the optimizer, but for the parameters."""
    return [
        {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in group.items()}
        for group in ({**group, "params": None} for group in base_of(engine).param_groups)
    ]


def resume(
    setup: Setup,
    folder: str,
    tags: tuple[str, ...] = (),
    more: int = 0,
    same_dtype: bool = True,
    plant: str | None = None,
    known_keys: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Loads each tag into a fresh engine and compares; trains on after the last one."""
    oracle = torch.load(Path(folder) / "oracle.pt", weights_only=False)
    engine = make_engine(setup)
    before = canonical(engine)
    found: dict[str, Any] = {"differences": {}, "before": {}, "reports": {}}
    for tag in tags or tags_of(more):
        report = ucp.load(engine, folder, tag=tag, **options)
        if plant:
            plant_fault(engine, plant)
        want = oracle["states"][tag]
        found["before"][tag] = differences(want, before, same_dtype, known_keys)
        found["differences"][tag] = differences(want, canonical(engine), same_dtype, known_keys)
        # stock's files at stage 0 have no names for their states
        exact = same_dtype and not known_keys and not options and report.fingerprint is not None
        found["differences"][tag] += unlike(engine, folder, tag, exact)
        found["differences"][tag] += unchecked(report) if exact else []
        found["reports"][tag] = report
    if more:
        losses = train(engine, more, first=oracle["steps"])
        found["loss"] = max(
            abs(a - b) for a, b in zip(losses, oracle["losses"][:more], strict=True)
        )
    engine.destroy()
    return found


def plant_fault(engine: Any, fault: str) -> None:
    """One small wrong thing that a comparison has to see."""
    base = base_of(engine)
    _, _, count, master, offset, g = max(runs_of(engine), key=lambda run: run[2])
    held = base.state[master]
    flat = master.data.view(-1)
    if fault == "one bit":
        flat.view(torch.int32)[offset] ^= 1
    elif fault == "two elements swapped":
        flat[offset], flat[offset + 1] = flat[offset + 1].clone(), flat[offset].clone()
    elif fault == "one moment":
        held["exp_avg"].view(-1)[offset + count - 1] = 0.5
    elif fault == "one trend":
        held["trend"].view(-1)[offset + count - 1] = 0.5
    elif fault == "one step":
        held["step"] += 1
    elif fault == "the partition of another rank":
        rank, world = dist.get_rank(), dist.get_world_size()
        master.data.copy_(everywhere(master.data)[(rank + 1) % world])
    elif fault == "one group's weight decay":
        base.param_groups[g]["weight_decay"] += 0.01
    elif fault == "a buffer":
        engine.module.calls += 1
    else:
        raise ValueError(fault)


def attempt(
    setup: Setup,
    folder: str,
    tag: str | None = None,
    through: str = "load",
    then: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A load that should fail: the error, whether the engine is bit for bit as before, and whether
    it refuses to go on.

    `then` loads another tag afterwards and steps.
    """
    engine = make_engine(setup)
    train(engine, 1)
    before = canonical(engine)
    out: dict[str, Any] = {"error": None, "message": ""}
    try:
        if through == "load":
            out["notes"] = ucp.load(engine, folder, tag=tag, **options).notes
        else:
            engine.load_checkpoint(folder, tag=tag)
    except Exception as error:
        out |= {"error": type(error).__name__, "message": str(error)}
    out["unchanged"] = differences(before, canonical(engine)) == []
    refusals = []
    marked = (
        record_of(engine).closed_doors is not None
    )  # a step without a backward pass is for an engine that refuses
    for method in (
        engine.step if marked else lambda: train(engine, 1),
        lambda: engine.save_checkpoint(folder, tag="after", save_latest=False),
    ):  # others may read the folder too
        try:
            method()
        except ucp.UcpError as error:
            refusals.append(type(error).__name__)
    if marked:  # what is half of another model is none to give away
        try:
            ucp.export_hf(engine, f"{folder}_half_loaded")
        except ucp.UcpError as error:
            refusals.append(type(error).__name__)
    out["refuses"] = refusals == ["EngineUnusableError"] * 3
    if not out["refuses"] and refusals:
        raise AssertionError(f"the engine refuses only a part: {refusals}")
    if then:
        ucp.load(engine, folder, tag=then)
        before = canonical(engine)
        train(engine, 1)
        out["steps_after_a_good_load"] = differences(before, canonical(engine)) != []
    engine.destroy()
    return out


def masters_are_equal(setup: Setup, folder: str) -> bool:
    """Whether every state, as fp32, is what the checkpoint's was."""
    oracle = torch.load(Path(folder) / "oracle.pt", weights_only=False)["states"]["trained"]["full"]
    engine = make_engine(setup)
    ucp.load(engine, folder, tag="trained")
    have = canonical(engine)["full"]
    engine.destroy()
    return (
        bool(oracle)
        and have.keys() == oracle.keys()
        and all(torch.equal(have[k], oracle[k].float()) for k in oracle)
    )


OFFLOADED: dict[str, dict[str, Any]] = {
    "NVMe": {"device": "nvme", "nvme_path": "/nvme"},
    "partial offload": {"device": "cpu", "ratio": 0.5},
    "SuperOffload": {"device": "cpu", "super_offload": True},
}
ZERO_SETTINGS = {
    "Muon in memory": ("save_muon_momentum_buffer_in_memory", True),
    "hpZ": ("zero_hpz_partition_size", 2),
    "ZeRO++ weights": ("zero_quantized_weights", True),
    "ZeRO++ frozen weights": ("zero_quantized_nontrainable_weights", True),
}


def refusal(feature: str, folder: str) -> list[tuple[str, bool]]:
    """What `load` and `attach` say to an engine with a feature, and whether the engine is unchanged
    after."""
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig as Optimizer,
    )
    from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig as Param

    engine = make_engine(
        Setup(3 if feature in ("partial offload", "SuperOffload") else 1, "bf16"), attach=False
    )
    zero = engine._config.zero_config
    if feature in OFFLOADED:
        zero.offload_optimizer = Optimizer(**OFFLOADED[feature])
    elif feature == "NVMe parameters":
        zero.offload_param = Param(device="nvme", nvme_path="/nvme")
    elif feature == "ZenFlow":
        zero.zenflow = ZenFlowConfig()
    elif feature in ZERO_SETTINGS:
        name, value = ZERO_SETTINGS[feature]
        setattr(zero, name, value)
    elif feature == "DualPipeV":
        from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine

        engine.__class__ = type(DualPipeVEngine.__name__, (type(engine),), {})
    elif feature == "node-local storage":
        engine._config.use_node_local_storage = True
    elif feature == "offloaded states":
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

        engine.optimizer.offloaded_states = {OffloadStateTypeEnum.optim_states}
    elif feature == "AutoEP folded with AutoTP":
        layer = type("AutoEPMoELayer", (torch.nn.Module,), {"folding_group_handles": object()})
        engine.module.add_module("of_experts", layer())
    elif feature == "tensor parallelism":
        engine.mp_world_size = 2
    out = []
    for call in (lambda: ucp.load(engine, folder), lambda: ucp.attach(engine)):
        before = canonical(engine)
        try:
            call()
        except ucp.UcpError as error:
            out.append((str(error), differences(before, canonical(engine)) == []))
        else:
            out.append(("nothing was refused", False))
    engine.destroy()
    return out


def writer_refusal(checkpoint: dict[str, Any]) -> str:
    """What `attach` says to an engine with another checkpoint writer."""
    engine = make_engine(
        Setup(
            1,
            "bf16",
            config=(("checkpoint", {k: v for k, v in checkpoint.items() if k != "writer"}),),
        ),
        attach=False,
    )
    if (
        "writer" in checkpoint
    ):  # these need libaio to be built: their own classes, without their set-up
        from deepspeed.runtime.checkpoint_engine.decoupled_checkpoint_engine import (
            DecoupledCheckpointEngine,
        )
        from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine

        kind = (
            DecoupledCheckpointEngine
            if checkpoint["writer"] == "decoupled"
            else FastCheckpointEngine
        )
        stock, engine.checkpoint_engine = engine.checkpoint_engine, kind.__new__(kind)
    try:
        ucp.attach(engine)
    except ucp.UcpError as error:
        return str(error)
    finally:
        if "writer" in checkpoint:
            engine.checkpoint_engine = stock
        engine.destroy()
    return "nothing was refused"


def steps_after(setup: Setup, folder: str, steps: int) -> dict[str, Any]:
    """Steps on after a load: what each flat's counter says, and how many counters there are."""
    engine = make_engine(setup)
    ucp.load(engine, folder, tag="trained")
    train(engine, steps, first=3)
    counters = [s["step"] for s in engine.optimizer.optimizer.state.values()]
    out = {
        "flats": len(counters),
        "objects": len({id(c) for c in counters}),
        "steps": [float(c) for c in counters],
    }
    engine.destroy()
    return out


def groups_after(setup: Setup, folder: str) -> dict[str, Any]:
    engine = make_engine(setup)
    ucp.load(engine, folder, tag="trained")
    out = {
        "groups": [
            {k: g[k] for k in ("lr", "weight_decay", "initial_lr")}
            for g in engine.optimizer.param_groups
        ]
    }
    engine.destroy()
    return out


def unstepped_after(setup: Setup, folder: str) -> dict[str, tuple[bool, bool]]:
    """For a frozen parameter and two buffers: equal to the checkpoint's (before, after) the
    load."""
    oracle = torch.load(Path(folder) / "oracle.pt", weights_only=False)["states"]["trained"]
    engine = make_engine(setup)
    out = []
    for load in (False, True):
        if load:
            ucp.load(engine, folder, tag="trained")
        have = canonical(engine)
        out.append(
            {
                "frozen.weight": torch.equal(
                    have["weights"]["frozen.weight"], oracle["weights"]["frozen.weight"]
                ),
                **{
                    n: torch.equal(have["values"][n], oracle["values"][n])
                    for n in ("scale", "calls")
                },
            }
        )
    engine.destroy()
    return {name: (out[0][name], out[1][name]) for name in out[0]}


def weights_only(setup: Setup, folder: str) -> dict[str, Any]:
    oracle = torch.load(Path(folder) / "oracle.pt", weights_only=False)["states"]["trained"]
    out = {}
    for option, options in (
        ("load_module_only", {"load_module_only": True}),
        ("load_optimizer_states", {"load_optimizer_states": False}),
    ):
        engine = make_engine(setup)
        scheduled = ("lr", "_last_lr")
        settings = {
            n: {k: v for k, v in h.items() if k not in scheduled}
            for n, h in canonical(engine)["hyper"].items()
        }
        ucp.load(engine, folder, tag="trained", **options)
        have = canonical(engine)
        out[option] = {
            "masters": all(
                torch.equal(have["full"][n, "fp32"], v)
                for (n, k), v in oracle["full"].items()
                if k == "fp32"
            ),
            "no states": {k for _, k in have["full"]} == {"fp32"} and not have["scalars"],
            "own hyper-parameters": settings
            == {
                n: {k: v for k, v in h.items() if k not in scheduled}
                for n, h in have["hyper"].items()
            },
            "steps": engine.global_steps,
        }
        engine.destroy()
    return out


def changed_settings(setup: Setup, folder: str, hyper: str) -> dict[str, Any]:
    engine = make_engine(setup)
    for group in engine.optimizer.param_groups:
        group["initial_lr"] = 5e-4
    report = ucp.load(engine, folder, tag="trained", hyper=hyper)
    out = {"initial_lr": engine.optimizer.param_groups[0]["initial_lr"], "notes": report.notes}
    engine.destroy()
    return out


def fails_on_rank(setup: Setup, folder: str, rank: int) -> dict[str, Any]:
    """A load in which one rank's disk fails while bytes move."""
    from megatron_ucp.errors import DamagedFileError
    from megatron_ucp.reshard import files as loading

    engine = make_engine(setup)
    stock = loading.execute

    def execute(plan: Any, *args: Any, **kwargs: Any) -> Any:
        stock(plan.__class__(plan.wants, plan.ops[:3], ()), *args, **kwargs)
        raise DamagedFileError("only here")

    if dist.get_rank() == rank:
        loading.execute = execute
    out = {"error": None, "message": "", "refuses": False}
    try:
        ucp.load(engine, folder, tag="trained")
    except ucp.UcpError as error:
        out |= {"error": type(error).__name__, "message": str(error)}
    finally:
        loading.execute = stock
    try:
        engine.step()
    except ucp.UcpError as error:
        out["refuses"] = type(error).__name__ == "EngineUnusableError"
    engine.destroy()
    return out


def stock_load(setup: Setup, folder: str) -> str:
    engine = make_engine(setup, attach=False)
    try:
        engine.load_checkpoint(folder, tag="trained")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.destroy()
    return "loaded"


def engine_load(setup: Setup, folder: str) -> dict[str, Any]:
    engine = make_engine(setup)
    path, state = engine.load_checkpoint(folder, tag="trained")
    out = {
        "path": path,
        "client_state": {**state, "data": state["data"].tolist()},
        "steps": engine.global_steps,
    }
    engine.destroy()
    return out


def reshard(setup: Setup, folder: str, out: str) -> None:
    """Loads the tag `trained` and saves it again on this mesh as the tag `again`."""
    engine = make_engine(setup)
    ucp.load(engine, folder, tag="trained")
    engine.save_checkpoint(out, tag="again")
    engine.destroy()
