"""What the ranks do with checkpoints of older versions of DeepSpeed."""

import json
from pathlib import Path
from typing import Any

import torch

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import plant_fault
from tests.engines.model import Setup, make_engine
from tests.formats.golden.make_older import FOLDER, STEPS, values_of

LOW = {"fp32": torch.float32, "bf16": torch.bfloat16}
OWN_BUFFERS = ("0.19.4",)  # leave buffers in fp32, as 0.19.8 does


def expected(version: str, case: str, dtype: str) -> dict[str, Any]:
    """The canonical state of the run that saved a golden checkpoint: values by the rule that filled
    them, the rest as its engine said."""
    held = json.loads(Path(FOLDER, version, f"{case}.json").read_text())
    values = values_of()
    kept = torch.float32 if version in OWN_BUFFERS else LOW[dtype]
    full = {key: tensor for key, tensor in values.items() if key[1] != "value"}
    weights = {name: tensor for (name, state), tensor in full.items() if state == "fp32"}
    weights["frozen.weight"] = values["frozen.weight", "value"]
    return {
        "full": full,
        "weights": {name: tensor.to(LOW[dtype]) for name, tensor in weights.items()},
        "values": {
            # cast with the weights when it was saved
            "scale": values["scale", "value"].to(kept).float(),
            "calls": torch.tensor(STEPS),
        },
        "scalars": {tuple(key.split("|")): value for key, value in held["scalars"].items()},
        "hyper": {name: _plain(settings) for name, settings in held["hyper"].items()},
        "scheduler": held["scheduler"],
        "counters": tuple(held["counters"]),
        "scale": {},
    }


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}


def resume(
    setup: Setup, version: str, case: str, plant: str | None = None, **options: Any
) -> dict[str, Any]:
    """Loads a golden checkpoint into a fresh engine, and compares."""
    want = expected(version, case, setup.dtype)
    engine = make_engine(setup)
    before = canonical(engine)
    out: dict[str, Any] = {"before": {case: differences(want, before)}, "error": ""}
    try:
        out["notes"] = ucp.load(engine, FOLDER / version / case, **options).notes
    except ucp.UcpError as error:
        out |= {"error": type(error).__name__, "message": str(error)}
    if plant:
        plant_fault(engine, plant)
    have = canonical(engine)
    out["differences"] = {case: differences(want, have)}
    out["unchanged"] = differences(before, have) == []
    engine.destroy()
    return out
