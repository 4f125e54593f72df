"""`ucp.save(format=)`: engines save a folder for FSDP2 from memory, which a program without this
package loads under strict keys."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from tests.engines import fsdp2_jobs, titan_jobs
from tests.engines.fsdp2_jobs import Plain
from tests.engines.test_fsdp2_pairs import unlike
from tests.formats import fsdp2_runs
from tests.formats.test_dcp import GOLDEN
from tests.ranks import RankPool
from tests.reshard.test_torchtitan import differ, flat_of

pytest.importorskip("transformers", reason="these programs train a model of transformers")


@pytest.mark.parametrize("setup", [Plain(1), Plain(3)], ids=str)
def test_fsdp2_loads_it_under_strict_keys(ranks: RankPool, setup: Plain, tmp_path: Path) -> None:
    own = {"setup": setup, "folder": str(tmp_path / "run"), "model": None}
    run = ranks.run(2, fsdp2_jobs.trained, timeout_s=200, **own)[0]
    report = run["saved"]["dcp"]
    assert report.global_steps == 3 and Path(report.path).name == "step-3"
    assert len(report.bytes_by_rank) == 2 and min(report.bytes_by_rank) > 0
    found = fsdp2_runs.run(2, "fsdp", "-", "--load", report.path, "--steps", "0")
    assert unlike(found["begun"], run["states"]) == []
    found["begun"]["states"]["model.norm.weight"]["exp_avg"][-1] += 1e-3
    assert unlike(found["begun"], run["states"]) == ["model.norm.weight exp_avg"]
    assert sorted(path.name for path in Path(report.path).parent.iterdir()) == ["step-3"]


@pytest.mark.parametrize(
    ("to", "stack"), [("dcp", False), ("accelerate", False), ("accelerate", True)], ids=str
)
def test_it_is_what_convert_writes(ranks: RankPool, to: str, stack: bool, tmp_path: Path) -> None:
    """Byte by byte, but for the manifest: of AutoTP's engine, and of megatron-core's stack."""
    own: dict[str, Any] = {"folder": str(tmp_path / "run"), "timeout_s": 200}
    if stack:
        start = str(tmp_path / "start")
        ranks.run(1, fsdp2_jobs.start, folder=start, timeout_s=120)
        run = ranks.run(2, fsdp2_jobs.train_stack, tp=2, model=start, **own)[0]
    else:
        run = ranks.run(2, fsdp2_jobs.trained, setup=Plain(2, tp=2), model=None, **own)[0]
    ucp.convert(tmp_path / "run", tmp_path / "out", to=to)
    one, two = Path(run["saved"][to].path), tmp_path / "out"

    def other() -> list[str]:
        names = {path.relative_to(f) for f in (one, two) for path in f.rglob("*") if path.is_file()}
        return sorted(
            str(name) for name in names if (one / name).read_bytes() != (two / name).read_bytes()
        )

    assert other() == ["ucp_manifest.json"]
    assert len(ucp.diff(one, two)) == 0
    if not stack:  # whose own files have other names
        assert str(ucp.fingerprint(one)) == str(ucp.fingerprint(tmp_path / "run"))
    file = next(path for path in sorted(one.rglob("*.distcp")))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert len(other()) == 2


def test_what_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, fsdp2_jobs.refused_saves, folder=str(tmp_path / "run"), timeout_s=200)
    assert found[0] == found[1]
    assert found[0] == {
        "no such format": "UsageError: there is no such format to save an engine in",
        "files alone": "UsageError: there is no such format to save an engine in",
        "older tags": "UsageError: a folder in the format dcp has no place for keep_latest",
        "a tag for itself": "UsageError: a save for the engine's own program has no place for tag",
        "not attached": "UsageError: this is no attached engine",
        "other tags": "UsageError: the ranks were given different options",
        "twice": "UsageError: the output exists",
        "itself": "UsageError: ucp.save is for megatron-core's own stack",
    }
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]


def test_after_a_step_the_next_save_is_another_one(ranks: RankPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    found: Any = ranks.run(2, fsdp2_jobs.saves_and_steps, folder=folder, timeout_s=200)[0]
    first, second = (ucp.fp32_state_dict(path) for path in found["paths"])
    assert first.keys() == second.keys()
    assert not any(torch.equal(first[name], second[name]) for name in first)
    assert found["losses"] == found["alone"], "a save changes nothing in the engine"


@pytest.mark.parametrize("zero", [1, 3])
def test_what_torchtitan_saved_comes_back(ranks: RankPool, zero: int, tmp_path: Path) -> None:
    """Through an engine: every weight, moment, step and setting, and the step of the schedule."""
    held = torch.load(GOLDEN / "torchtitan.pt", weights_only=False)
    own = {"folder": str(GOLDEN / "torchtitan"), "out": str(tmp_path / "out"), "steps": 1}
    found = ranks.run(2, titan_jobs.pass_on, setup=Plain(zero), timeout_s=200, **own)[0]
    assert any("step alone" in note for note in found["notes"]) and found["scheduled"] == 4
    back = flat_of(Path(found["report"].path), tmp_path)

    def unlike_held() -> list[str]:
        # which implementation of torch's steps is each program's own
        return [k for k in differ(held, back) if not k.endswith((".fused", ".foreach"))]

    assert unlike_held() == []
    key = "state.layers.0.attention.qkv_linear.wqkv.weight.exp_avg"
    rows = back["optimizer"][key]
    rows[[0, 1]] = rows[[1, 0]]
    assert unlike_held() == [key]
