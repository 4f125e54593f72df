"""What stock DeepSpeed does not save of a run: SuperOffload, partial offload, ZenFlow and ZeRO++'s
quantized frozen weights, in files that DeepSpeed itself wrote. The cause is named by every look at
them and by every load."""

from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.cli import main
from tests.engines import kinds, unsaved_jobs
from tests.engines.model import Setup
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
STEPPED = {"SuperOffload": "SuperOffloadOptimizer_Stage3", "ZenFlow": "ZenFlowZeroOptimizer"}
# how a load gets what is there
GO_ON: dict[str, dict[str, Any]] = {
    "partial offload": {"load_optimizer_states": False},
    "SuperOffload": {"load_optimizer_states": False},
    "ZenFlow": {"allow": ("stale",)},
}


LOAD = kinds.attempt, Setup(1, "bf16", seed=9)
SLOW = pytest.mark.slow  # SuperOffload starts a process, and that imports all anew


@pytest.mark.parametrize(
    "run",
    [
        "partial offload",
        "ZenFlow",
        "zero_quantized_nontrainable",
        pytest.param("SuperOffload", marks=SLOW),
    ],
)
def test_the_cause_is_named(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str
) -> None:
    for stepped in ranks.run(2, unsaved_jobs.save, run, str(tmp_path)):
        assert stepped.startswith(STEPPED.get(run, "DeepSpeedZeroOptimizer_Stage3"))
    assert main(["inspect", str(tmp_path)]) == 0
    (line,) = [row for row in capsys.readouterr().out.splitlines() if "not saved" in row]
    assert run in line
    assert any(run in note for note in ucp.verify(tmp_path).notes)
    for rank in ranks.run(2, *LOAD, str(tmp_path), "trained", attach=False):
        assert run in rank["message"] and "what to do:" in rank["message"], rank["message"]
        assert rank["unchanged"]
    if run in GO_ON:
        for rank in ranks.run(2, *LOAD, str(tmp_path), "trained", attach=False, **GO_ON[run]):
            assert not rank["error"] and not rank["unchanged"], rank["message"]
            assert any(run in note for note in rank["notes"])


def test_a_healthy_run_is_not_accused(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run(2, unsaved_jobs.save, "zero_quantized_weights", str(tmp_path))
    assert main(["inspect", str(tmp_path)]) == 0
    assert "not saved" not in capsys.readouterr().out
    assert ucp.verify(tmp_path, deep=True).findings == ()
    for rank in ranks.run(2, *LOAD, str(tmp_path), "trained", attach=False):
        assert not rank["error"] and not rank["unchanged"]
