"""Folders of transformers' model classes: what `save_pretrained` wrote loads at ZeRO-3 as it is,
and an export has the same names, the same bits and the same logits."""

from pathlib import Path

import pytest

from tests.engines import model_classes
from tests.engines.model_classes import CLASSES
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
JOB = model_classes.there_and_back
# a mixture whose router is renamed too, a hybrid, and two ways in which towers are renamed
QUICK = (
    *("MixtralForCausalLM", "NemotronHForCausalLM"),
    *("Qwen2_5_VLForConditionalGeneration", "LlavaForConditionalGeneration"),
)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CLASSES]
)
def test_there_and_back(ranks: RankPool, tmp_path: Path, name: str) -> None:
    (found,) = ranks.run(1, JOB, name, str(tmp_path))
    assert found["drawn"] == []  # so that a load that does nothing is seen
    for what in ("loaded", "not held", "exported", "live", "again", "diff"):
        assert found[what] == [], what
    assert found["logits"]


def test_so_many_classes() -> None:
    assert len(CLASSES) >= 48


@pytest.mark.parametrize("fault", ["loaded", "exported"])
def test_a_planted_fault_is_seen(ranks: RankPool, tmp_path: Path, fault: str) -> None:
    """One sign, in the folder that is loaded, or in the one that was exported."""
    (found,) = ranks.run(1, JOB, "MixtralForCausalLM", str(tmp_path), fault)
    assert len(found["exported"]) == 1 and not found["logits"]
    assert len(found["loaded"]) == (fault == "loaded")
