"""Makes the checkpoints of an older DeepSpeed in this folder again, with that DeepSpeed:

    python tests/formats/golden/make_older.py VERSION

The version gets an environment of its own (`tests/older_env.sh`). Each case is a tag folder
`older/VERSION/CASE`, as DeepSpeed wrote it. Masters, moments, frozen weights and buffers hold
values that say where they come from (`values_of`); `CASE.json` has what else the engine said:
steps, hyper-parameters, the scheduler, counters.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from tests.engines.canonical import provenance  # noqa: E402
from tests.engines.model import WIDTH, Net, Setup  # noqa: E402

FOLDER = Path(__file__).parent / "older"
MAX_FILE_BYTES = 20_000
STEPS = 3
SECOND_MOMENT = "exp_avg_sq"
STATES = ("fp32", "exp_avg", SECOND_MOMENT)
GRADIENTS = (("data_types", {"grad_accum_dtype": "fp32"}),)
SEQUENCES = {"sp": 2}
VERSIONS = ("0.14.5", "0.15.4", "0.16.9", "0.17.6", "0.18.2", "0.18.9", "0.19.4")
NAMED_BY_SEQUENCE_RANK = ("0.18.2", "0.19.4")  # the first and the last that did


@dataclass(frozen=True)
class Case:
    """What is saved, and on how many ranks."""

    setup: Setup
    world: int = 2


CASES = {
    "zero0": Case(Setup(0)),
    "zero0_bf16": Case(Setup(0, "bf16")),
    "zero1": Case(Setup(1, "bf16")),
    "zero2": Case(Setup(2, "bf16")),
    "zero3": Case(Setup(3, "bf16")),
    "bf16_optimizer": Case(Setup(1, "bf16", config=GRADIENTS)),
}
ULYSSES = {
    f"ulysses_zero{stage}": Case(Setup(stage, "bf16", extra=SEQUENCES), 4) for stage in (1, 3)
}


def cases_of(version: str) -> dict[str, Case]:
    return CASES | (ULYSSES if version in NAMED_BY_SEQUENCE_RANK else {})


def values_of() -> dict[tuple[str, str], torch.Tensor]:
    """What every (parameter, state) holds, and every (frozen parameter or buffer, "value"), in
    fp32."""
    net = Net()
    named = sorted(net.named_parameters())
    out = {
        (name, state): provenance(number, state, param.shape)
        for number, (name, param) in enumerate(named)
        for state in (STATES if param.requires_grad else ("fp32",))
    }
    return {
        (name, state if name != "frozen.weight" else "value"): values
        for (name, state), values in out.items()
    } | {("scale", "value"): provenance(len(named), SECOND_MOMENT, torch.Size([WIDTH]))}


def fill_untrained(net: torch.nn.Module) -> None:
    """Frozen weights and the buffer of a model that no engine has yet."""
    held = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for (name, state), values in values_of().items():
        if state == "value":
            held[name].data.copy_(values)


def save(setup: Setup, folder: str) -> dict[str, Any]:
    """On every rank: trains, fills, saves; what of the engine is no tensor."""
    from deepspeed.accelerator import get_accelerator
    from torch import distributed

    from tests.engines.canonical import canonical, fill
    from tests.engines.model import make_engine, train

    # else 0.14 and 0.15 ask `numactl`, which a machine may not have
    os.environ["LOCAL_SIZE"] = str(distributed.get_world_size())
    # 0.18.9 flattens weights where there is memory and does not detach them: torch 2.13 refuses to
    # gather into that. Without memory it does as its predecessors.
    type(get_accelerator()).available_memory = lambda *_: 0  # type: ignore[method-assign]
    engine = make_engine(replace(setup, extra={**setup.extra, "prepare": fill_untrained}), False)
    train(engine, STEPS)
    fill(engine)
    engine.save_checkpoint(folder, tag="tag", client_state={"note": "golden"})
    held = canonical(engine)
    want = {key: values for key, values in values_of().items() if key[1] != "value"}
    if held["full"].keys() != want.keys() or not all(
        torch.equal(held["full"][key], values) for key, values in want.items()
    ):
        raise AssertionError("the engine does not hold what it was filled with")
    engine.destroy()
    return {key: held[key] for key in ("scalars", "hyper", "scheduler", "counters")}


def record(held: Mapping[str, Any], path: Path) -> None:
    scalars = {"|".join(key): value for key, value in held["scalars"].items()}
    path.write_text(json.dumps({**held, "scalars": scalars}, indent=1, sort_keys=True) + "\n")


def make(version: str) -> None:
    """All cases, by the DeepSpeed of this interpreter."""
    import deepspeed

    from tests.ranks import RankPool

    if deepspeed.__version__ != version:
        raise RuntimeError(f"this is DeepSpeed {deepspeed.__version__}, not {version}")
    shutil.rmtree(FOLDER / version, ignore_errors=True)
    pool = RankPool(4)
    try:
        for name, case in cases_of(version).items():
            with tempfile.TemporaryDirectory() as folder:
                job = save
                held = pool.run(case.world, job, case.setup, folder)[0]
                shutil.copytree(Path(folder, "tag"), FOLDER / version / name)
            record(held, FOLDER / version / f"{name}.json")
    finally:
        pool.close()
    for path in (FOLDER / version).glob("*/*"):
        if path.stat().st_size > MAX_FILE_BYTES:
            raise RuntimeError(f"{path} is too large for a repository: {path.stat().st_size} bytes")


def main() -> None:
    version, inside = sys.argv[1], "--inside" in sys.argv
    if inside:
        make(version)
        return
    subprocess.run(["bash", str(ROOT / "tests/older_env.sh"), version], check=True)
    python = ROOT / ".cache/older" / version / "bin/python"
    extensions = {"TORCH_EXTENSIONS_DIR": str(ROOT / ".cache/older" / version / "ops")}
    subprocess.run(
        [python, "-m", "tests.formats.golden.make_older", version, "--inside"],
        cwd=ROOT,
        env={**os.environ, **extensions},
        check=True,
    )


if __name__ == "__main__":
    main()
