"""The published evaluation of Universal Checkpointing, bit for bit: the meshes of
`examples/evaluation.py`, in four ranks.

`bash examples/evaluation.sh` runs the same tables as training runs of up to eight ranks, with
losses; the marked test here starts it.
"""

import sys
from pathlib import Path

import pytest

from pretrain.mcore.experts import Experts
from tests.engines.sources import Sources, check
from tests.engines.tensor_jobs import Staged
from tests.ranks import ROOT

sys.path.append(str(ROOT / "examples"))
import evaluation  # type: ignore[import-not-found]
from quickstart import Mesh  # type: ignore[import-not-found]

from tests.scripts import run_command

pytestmark = pytest.mark.ranks
FOUR = [source for source in evaluation.SOURCES if source.ranks <= 4]
SCENARIOS = {
    "fewer data-parallel ranks": (Mesh(1, 1, 4, 1), Mesh(1, 1, 2, 1)),
    "plain data parallelism to ZeRO": (Mesh(1, 1, 4, 0), Mesh(1, 1, 4, 3)),
    "other tensor-parallel and pipeline sizes": (Mesh(2, 1, 2, 1), Mesh(1, 4, 1, 1)),
    "a mixture of experts": (Mesh(1, 2, 2, 1, ep=2), Mesh(2, 2, 1, 1, ep=1)),
}
FOUR_WITH_EXPERTS = [target for target in evaluation.EXPERTS_TARGETS if target.ranks <= 4]


def setup(mesh: Mesh, seed: int = 1) -> Staged:
    return Staged(
        "mixtral" if mesh.ep else "gpt",
        mesh.tp,
        mesh.zero,
        pp=mesh.pp if mesh.pp > 1 else 0,
        seed=seed,
        sequence_parallel=mesh.sp or (mesh.ep > 0 and mesh.tp > 1),
        ep=max(mesh.ep, 1),
        experts=Experts(4, ffn=12) if mesh.ep else None,
    )


def reshard(sources: Sources, origin: Mesh, target: Mesh) -> None:
    folder = sources.get(origin.ranks, setup(origin), more=0)
    check(sources.resume(target.ranks, setup(target, 9), folder))


def test_the_tables_are_the_published_ones() -> None:
    assert (len(evaluation.TARGETS), len(evaluation.SOURCES), len(FOUR)) == (10, 7, 6)
    assert all(mesh.ranks <= 4 for mesh in evaluation.TARGETS) and evaluation.SOURCE.ranks == 8


@pytest.mark.parametrize("target", evaluation.TARGETS, ids=str)
def test_one_source_to_ten_targets(sources: Sources, target: Mesh) -> None:
    reshard(sources, evaluation.SMALL_SOURCE, target)


@pytest.mark.parametrize("origin", FOUR, ids=str)
def test_the_sources_of_four_ranks_to_one_target(sources: Sources, origin: Mesh) -> None:
    reshard(sources, origin, evaluation.TARGET)


@pytest.mark.parametrize("target", FOUR_WITH_EXPERTS, ids=str)
def test_a_mixture_of_experts_to_other_meshes(sources: Sources, target: Mesh) -> None:
    reshard(sources, evaluation.SMALL_EXPERTS_SOURCE, target)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_scenarios_of_flexibility(sources: Sources, scenario: str) -> None:
    reshard(sources, *SCENARIOS[scenario])


@pytest.mark.slow
def test_the_whole_evaluation_as_training_runs(tmp_path: Path) -> None:
    done = run_command(
        ["bash", str(ROOT / "examples" / "evaluation.sh"), "--out", str(tmp_path)], timeout=2400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| yes (") == 17 + len(evaluation.EXPERTS_TARGETS)
    assert (tmp_path / "one_to_ten.png").stat().st_size > 50_000
