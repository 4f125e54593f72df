"""What the ranks do in the engine tests."""

from typing import Any

import torch

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import oracle_of
from tests.engines.model import Setup, make_engine, train


def masters_are_equal(setup: Setup, folder: str) -> bool:
    """Whether every state, as fp32, is what the checkpoint's was."""
    oracle = oracle_of(folder)["states"]["trained"]["full"]
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
    from deepspeed.runtime.checkpoint_engine import (
        decoupled_checkpoint_engine,
        fast_checkpoint_engine,
    )

    own = {key: value for key, value in checkpoint.items() if key != "writer"}
    engine = make_engine(Setup(1, "bf16", config=(("checkpoint", own),)), attach=False)
    stock = engine.checkpoint_engine
    # these need libaio to be built: their own classes, without their set-up
    kind = {
        "decoupled": decoupled_checkpoint_engine.DecoupledCheckpointEngine,
        "fast": fast_checkpoint_engine.FastCheckpointEngine,
    }.get(checkpoint.get("writer", ""))
    if kind is not None:
        engine.checkpoint_engine = kind.__new__(kind)
    try:
        ucp.attach(engine)
    except ucp.UcpError as error:
        return str(error)
    finally:
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
    oracle = oracle_of(folder)["states"]["trained"]
    engine = make_engine(setup)

    def equal() -> dict[str, bool]:
        have = canonical(engine)
        parts = {"frozen.weight": "weights", "scale": "values", "calls": "values"}
        return {n: torch.equal(have[part][n], oracle[part][n]) for n, part in parts.items()}

    before = equal()
    ucp.load(engine, folder, tag="trained")
    after = equal()
    engine.destroy()
    return {name: (before[name], after[name]) for name in before}


def weights_only(setup: Setup, folder: str) -> dict[str, Any]:
    oracle = oracle_of(folder)["states"]["trained"]["full"]
    masters = {key: value for key, value in oracle.items() if key[1] == "fp32"}

    def settings(engine: Any) -> dict[str, Any]:
        found = canonical(engine)["hyper"].items()
        scheduled = ("lr", "_last_lr")
        return {n: {k: v for k, v in one.items() if k not in scheduled} for n, one in found}

    out = {}
    for option, value in (("load_module_only", True), ("load_optimizer_states", False)):
        engine = make_engine(setup)
        own = settings(engine)
        ucp.load(engine, folder, tag="trained", **{option: value})
        have = canonical(engine)
        out[option] = {
            "masters": all(torch.equal(have["full"][key], one) for key, one in masters.items()),
            "no states": {k for _, k in have["full"]} == {"fp32"} and not have["scalars"],
            "own hyper-parameters": settings(engine) == own,
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
