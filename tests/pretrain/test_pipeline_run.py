"""The training program with pipeline stages: the losses of a run without, and resumes from and onto
every other mesh."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.pretrain import jobs
from tests.pretrain.common import BATCH, GPT, LLAMA, RATES, command, mesh, stdlib
from tests.ranks import RankPool

JOB = jobs.run
ITERATIONS, SAVED = 6, 3
MODELS = {"gpt": GPT, "llama": LLAMA}


def argv(family: str, *more: list[str] | str) -> list[str]:
    # one padded vocabulary for all tensor-parallel sizes
    return command(
        MODELS[family],
        BATCH,
        RATES,
        stdlib(),
        "--make-vocab-size-divisible-by 512 --log-interval 1 --eval-iters 2",
        f"--train-iters {ITERATIONS}",
        *more,
    )


def staged(pp: int, tp: int = 1, zero: int = 1) -> list[str]:
    return [*mesh(tp, zero), "--pipeline-model-parallel-size", str(pp)]


@dataclass(frozen=True)
class Source:
    """An uninterrupted run with a checkpoint in the middle."""

    family: str
    folder: Path
    result: dict[str, Any]

    def resume(self, *more: list[str] | str) -> list[str]:
        return argv(self.family, f"--load {self.folder} --ckpt-step {SAVED}", *more)

    def check(self, result: dict[str, Any]) -> None:
        assert "error" not in result, result["text"]
        reached = result["first"], result["iteration"], result["consumed"]
        assert reached == (SAVED, ITERATIONS, ITERATIONS * 8)
        assert result["losses"] == pytest.approx(self.result["losses"][SAVED:], rel=0, abs=1e-5)
        assert result["evaluations"] == pytest.approx(self.result["evaluations"], rel=0, abs=1e-5)


class Sources:
    """Each mesh's run, once."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self.ranks, self.folder = ranks, folder
        self.made: dict[tuple[str, str], Source] = {}

    def get(self, family: str, name: str, flags: list[str]) -> Source:
        if (family, name) not in self.made:
            folder = self.folder / f"staged_{family}_{name}"
            save = argv(family, flags, f"--save {folder} --save-interval {SAVED}")
            first, *_, last = results = self.ranks.run(4, JOB, save)
            assert all(result.get("losses") == first.get("losses") for result in results), first
            assert "error" not in first, first["text"]
            self.made[family, name] = Source(family, folder, last)
        return self.made[family, name]

    def whole(self, family: str) -> Source:
        return self.get(family, "dp4", mesh(1, 1))

    def staged(self, family: str) -> Source:
        return self.get(family, "pp2dp2", staged(2))


@pytest.fixture(scope="module")
def sources(ranks: RankPool, tmp_checkpoints: Path) -> Sources:
    return Sources(ranks, tmp_checkpoints)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_two_stages_train_as_one(sources: Sources, family: str) -> None:
    whole, found = sources.whole(family).result, sources.staged(family).result
    assert whole["losses"][-1] < whole["losses"][0] - 0.4
    assert found["losses"] == pytest.approx(whole["losses"], rel=0, abs=1e-5)
    assert found["evaluations"] == pytest.approx(whole["evaluations"], rel=0, abs=1e-5)

    def lines(result: dict[str, Any]) -> list[list[str]]:
        """Iteration lines without the time; the rate by samples, the norm as printed."""
        said = [line for line in result["said"].splitlines() if line.startswith(" iteration")]
        return [
            [part for part in line.split(" | ") if "elapsed" not in part and "lm loss" not in part]
            for line in said
        ]

    assert lines(found) == lines(whole) and len(lines(found)) == ITERATIONS


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("gpt", [*staged(2, tp=2), "--sequence-parallel", "--make-vocab-size-divisible-by", "256"]),
        ("llama", [*staged(4, zero=0), "--pipeline-partition-method", "1,2,1,1"]),
        (
            "gpt",
            [*staged(2, zero=0), "--pp-partition-method", "uniform", "--micro-batch-size", "1"],
        ),
    ],
)
def test_other_cuts(ranks: RankPool, sources: Sources, family: str, flags: list[str]) -> None:
    whole, found = sources.whole(family).result, ranks.run(4, JOB, argv(family, flags))[-1]
    assert found["losses"] == pytest.approx(whole["losses"], rel=0, abs=1e-5), found
    assert found["evaluations"] == pytest.approx(whole["evaluations"], rel=0, abs=1e-5)


def test_bf16(ranks: RankPool, sources: Sources) -> None:
    found = ranks.run(4, JOB, argv("llama", staged(2), "--bf16"))[-1]
    assert found["losses"] != pytest.approx(sources.whole("llama").result["losses"], abs=1e-5)
    assert found["losses"] == pytest.approx(sources.whole("llama").result["losses"], abs=5e-2)


@pytest.mark.parametrize(
    ("family", "world", "flags"),
    [
        ("gpt", 4, mesh(1, 2)),
        ("gpt", 2, mesh(2, 3)),
        ("llama", 1, mesh(1, 0)),
        ("gpt", 4, staged(4)),
        ("llama", 4, staged(2, tp=2)),
        ("llama", 4, [*staged(2), "--pipeline-partition-method", "1,4"]),
    ],
)
def test_a_pipeline_resumes_on_another_mesh(
    ranks: RankPool, sources: Sources, family: str, world: int, flags: list[str]
) -> None:
    source = sources.staged(family)
    source.check(ranks.run(world, JOB, source.resume(flags, "--universal-checkpoint"))[-1])


@pytest.mark.parametrize(
    ("family", "world", "flags"), [("gpt", 2, staged(2)), ("llama", 4, staged(2, tp=2, zero=0))]
)
def test_a_pipeline_resumes_what_was_whole(
    ranks: RankPool, sources: Sources, family: str, world: int, flags: list[str]
) -> None:
    source = sources.whole(family)
    source.check(ranks.run(world, JOB, source.resume(flags, "--universal-checkpoint"))[-1])


def test_the_same_mesh_needs_no_flag(ranks: RankPool, sources: Sources) -> None:
    source = sources.staged("gpt")
    result = ranks.run(4, JOB, source.resume(staged(2)))[-1]
    assert result["losses"] == source.result["losses"][SAVED:]  # not a bit differs


@pytest.mark.parametrize(
    "flags",
    [staged(2), [*staged(2, tp=2), "--sequence-parallel"], [*staged(2, zero=0), "--bf16"]],
    ids=["dp2", "tp2", "bf16-zero-0"],
)
def test_dropout_goes_on_where_it_was(ranks: RankPool, tmp_path: Path, flags: list[str]) -> None:
    """Every stage has generators of its own; a loss without dropout is another one."""
    dropout = argv("gpt", flags, "--hidden-dropout 0.1 --attention-dropout 0.1")
    whole = ranks.run(4, JOB, [*dropout, "--save", str(tmp_path), "--save-interval", str(SAVED)])[
        -1
    ]
    resumed = ranks.run(4, JOB, [*dropout, "--load", str(tmp_path), "--ckpt-step", str(SAVED)])[-1]
    assert resumed.get("losses") == whole["losses"][SAVED:], resumed
    without = ranks.run(4, JOB, argv("gpt", flags))[-1]
    assert abs(without["losses"][0] - whole["losses"][0]) > 1e-3


def test_another_number_of_stages_needs_it(ranks: RankPool, sources: Sources) -> None:
    for result in ranks.run(4, JOB, sources.staged("gpt").resume(staged(4))):
        assert result["error"] == "UsageError" and "--universal-checkpoint" in result["text"]
        meshes = "tp=1,pp=2,dp=2,zero=1", "tp=1,pp=4,dp=1,zero=1"
        assert all(mesh in result["text"] for mesh in meshes)


@pytest.mark.parametrize(
    "case",
    [
        ("gpt", staged(2, tp=2), 2, mesh(1, 2)),
        ("llama", staged(2, tp=2), 4, staged(4)),
        ("llama", staged(2), 4, mesh(2, 1)),
        ("gpt", staged(2), 1, mesh(1, 0)),
    ],
    ids=["gpt to 2", "llama to 4 stages", "llama to tp 2", "gpt to 1"],
)
def test_a_pipeline_that_stock_deepspeed_saved(
    ranks: RankPool, sources: Sources, tmp_path: Path, case: tuple[Any, ...]
) -> None:
    """Without a manifest: what is at each position, and how it is cut, is the family's, at the
    sizes of the flags."""
    family, saved, world, flags = case
    whole = sources.whole(family)
    vocabulary = "--make-vocab-size-divisible-by 256" if "2" in saved[:2] else ""
    ranks.run(4, jobs.save_with_stock, argv(family, saved, vocabulary), str(tmp_path), SAVED)
    assert not list(tmp_path.glob("*/ucp_*")) and list(tmp_path.glob("*/layer_*"))
    source = Source(family, tmp_path, whole.result)
    source.check(ranks.run(world, JOB, source.resume(flags, "--universal-checkpoint"))[-1])


def test_sigterm_stops_all_stages(ranks: RankPool, sources: Sources, tmp_path: Path) -> None:
    """One rank of the first stage gets it; the checkpoint goes on without stages."""
    flags = argv("llama", staged(2), f"--save {tmp_path}")
    results = ranks.run(4, jobs.run_with_sigterm, flags, rank=1, iteration=2)
    assert all((r["stopped_by"], r["iteration"]) == ("SIGTERM", 2) for r in results), results[0]
    assert (tmp_path / "latest").read_text() == "global_step2"
    resume = argv("llama", mesh(1, 0), f"--load {tmp_path} --universal-checkpoint")
    resumed, want = ranks.run(1, JOB, resume)[0], sources.whole("llama").result["losses"][2:]
    assert resumed["losses"] == pytest.approx(want, rel=0, abs=1e-5)


def test_a_model_that_does_not_fit_the_stages(ranks: RankPool) -> None:
    flags = argv("gpt", staged(2), "--pipeline-partition-method type:attention")
    for result in ranks.run(2, JOB, flags):
        assert result["error"] == "UsageError" and "TransformerLayerPipe" in result["text"]
