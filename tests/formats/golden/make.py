"""Makes the golden checkpoints of this folder again:  python -m tests.formats.golden.make  [case
...]

Each case is one tag folder, and beside it `<case>.npz`: every element of every master and optimizer
state, steps and hyper-parameters, gathered from the live engine without the package
(`tests.engines.canonical`). `made_with.json` says with which versions. The current layouts are
files as DeepSpeed wrote them; the older ones are such files with the keys, types and records taken
out or changed that older versions (DeepSpeed 0.5 to 0.14, torch 1.13) did not write.
"""

import io
import json
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.engines.model import Setup
from tests.formats.craft import Entry, zip_of
from tests.ranks import RankPool

FOLDER = Path(__file__).parent
MAX_FILE_BYTES = 30_000
OLD_VERSION = "0.5.10"
GRADIENTS = (("data_types", {"grad_accum_dtype": "fp32"}),)
LATER_MODEL_KEYS = (
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "buffer_names",
    "global_samples",
    "checkpoint_parallel_dimensions",
    "random_ltd",
    "data_sampler",
    "ds_config",
)
LATER_OPTIMIZER_KEYS = (
    "param_alignment_paddings",
    "param_slice_mappings",
    "group_paddings",
    "ds_zero_partition_groups",
    "clip_grad",
)


@dataclass(frozen=True)
class Case:
    """What is saved, on two ranks, and how its files are made older."""

    setup: Setup
    older: Callable[[dict[str, Any]], None] | None = None


def older(tree: dict[str, Any]) -> None:
    """In place: as before fragments, alignment paddings and the recording of frozen and shared
    parameters."""
    tree["ds_version"] = OLD_VERSION
    for key in LATER_MODEL_KEYS:
        tree.pop(key, None)
    if isinstance(tree.get("param_shapes"), list) and len(tree["param_shapes"]) == 1:
        tree["param_shapes"] = dict(tree["param_shapes"][0])
    optimizer = tree.get("optimizer_state_dict")
    if optimizer is None:
        return
    for key in LATER_OPTIMIZER_KEYS:
        optimizer.pop(key, None)
    count = optimizer["partition_count"]
    optimizer["partition_count"] = count if isinstance(count, int) else count[0]
    optimizer["zero_stage"] = int(optimizer["zero_stage"])
    inner = optimizer.get("base_optimizer_state") or optimizer["optimizer_state_dict"]
    for state in inner["state"].values():
        state["step"] = int(state["step"])
    if "ds_version" in optimizer:
        optimizer["ds_version"] = OLD_VERSION


def zero(stage: int, **more: Any) -> Setup:
    return Setup(stage, "bf16", **more)


# one group, as its shapes were a dict; nothing frozen, as that was not saved
OLD: dict[str, Any] = {"groups": 1, "net": "Thawed"}
CASES = {
    "zero0_fp32": Case(Setup(0)),
    "zero0_bf16": Case(zero(0)),
    "zero1": Case(zero(1)),
    "zero2": Case(zero(2)),
    "zero3": Case(zero(3)),
    "bf16_optimizer": Case(zero(1, config=GRADIENTS)),
    "zero1_elastic": Case(zero(1, zero_config=(("elastic_checkpoint", True),))),
    **{f"zero{stage}_old": Case(zero(stage, **OLD), older) for stage in (1, 2, 3)},
    "zero2_python3.13": Case(zero(2)),  # made by Python 3.13 with torch 2.14.1
}


def save(setup: Setup, folder: str) -> dict[str, Any]:
    """On every rank: trains, fills masters and moments with values that all differ, saves; what the
    engine holds."""
    from tests.engines.canonical import base_of, canonical, fill, names
    from tests.engines.model import make_engine, train

    engine = make_engine(setup, attach=False)
    train(engine, 3)
    fill(engine)
    engine.save_checkpoint(folder, tag="tag", client_state={"note": "golden"})
    held, named = canonical(engine), names(engine)
    groups = getattr(engine.optimizer, "fp16_groups", None) if setup.zero == 0 else []
    if groups is None:
        groups = [
            [p for p in group["params"] if p.requires_grad]
            for group in base_of(engine).param_groups
        ]
    out = {
        "full": {key: tensor.numpy() for key, tensor in held["full"].items()},
        "scalars": held["scalars"],
        "hyper": held["hyper"],
        "order": [[named[p] for p in group] for group in groups],
    }
    engine.destroy()
    return out


def record(held: dict[str, Any], path: Path) -> None:
    """Arrays `<parameter>|<state>`, and as JSON what is no array."""
    arrays = {"|".join(key): array for key, array in held["full"].items()}
    rest = {
        "scalars": {"|".join(key): value for key, value in held["scalars"].items()},
        "order": held["order"],
        "hyper": held["hyper"],
    }
    numpy.savez_compressed(path, json=numpy.array(json.dumps(rest)), **arrays)


def save_old(tree: Any, path: Path) -> None:
    """As torch 1.13: protocol 2, and none of the records that came later, `byteorder` among
    them."""
    buffer = io.BytesIO()
    torch.save(tree, buffer, pickle_protocol=2)
    with zipfile.ZipFile(buffer) as archive:
        kept = [
            name
            for name in archive.namelist()
            if name == "archive/data.pkl" or name.startswith("archive/data/")
        ]
        entries = [Entry(name, archive.read(name)) for name in kept]
    path.write_bytes(zip_of([*entries, Entry("archive/version", b"3\n")]))


def make(pool: RankPool, name: str, case: Case) -> None:
    target = FOLDER / name
    shutil.rmtree(target, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        held = pool.run(2, save, case.setup, folder)[0]
        shutil.copytree(Path(folder, "tag"), target)
    record(held, FOLDER / f"{name}.npz")
    for path in sorted(target.iterdir()):
        if case.older is not None:
            tree = torch.load(path, weights_only=False)
            case.older(tree)
            save_old(tree, path)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RuntimeError(f"{path} is too large for a repository: {path.stat().st_size} bytes")


def main() -> None:
    wanted = sys.argv[1:] or list(CASES)
    pool = RankPool(2)
    try:
        for name in wanted:
            make(pool, name, CASES[name])
    finally:
        pool.close()
    if sys.argv[1:]:
        return
    versions = {name: version(name) for name in ("deepspeed", "torch", "numpy")}
    (FOLDER / "made_with.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
