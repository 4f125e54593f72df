"""The training program on real ranks: trains, saves, resumes on other meshes, stops, refuses."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.pretrain.common import BATCH, GPT, LLAMA, QUIET, RATES, command, mesh, stdlib
from tests.ranks import ROOT, RankPool

JOB = "tests.pretrain.jobs:run"
ITERATIONS, SAVED = 8, 4
LINE = re.compile(r"iteration\s+(\d+)/.*?lm loss: ([^ ]+) \|")
WHOLE_LINE = re.compile(
    r" iteration {8}\d/ {7}\d \| consumed samples: {11,12}\d+ \| elapsed time per iteration "
    r"\(ms\): \d+\.\d"
    r" \| learning rate: \d\.\d{6}E-\d\d"
    r" \| global batch size:     8 \| lm loss: \d\.\d{6}E\+00 \| loss scale: 1\.0 \| grad norm: "
    r"\d+\.\d{3}"
    r" \| number of skipped iterations:   0 \| number of nan iterations:   0 \|"
)


@dataclass(frozen=True)
class Source:
    """An uninterrupted run at tp=2, dp=2, ZeRO-1, with a checkpoint in the middle."""

    model: list[str]
    folder: Path
    result: dict[str, Any]

    def argv(self, *more: list[str] | str, iterations: int = ITERATIONS) -> list[str]:
        return command(
            self.model, BATCH, RATES, QUIET, stdlib(), "--train-iters", str(iterations), *more
        )

    def resume(self, *more: list[str] | str, iterations: int = ITERATIONS) -> list[str]:
        return self.argv(
            "--load", str(self.folder), "--ckpt-step", str(SAVED), *more, iterations=iterations
        )


def make_source(ranks: RankPool, model: list[str], folder: Path) -> Source:
    source = Source(model, folder, {})
    results = ranks.run(
        4,
        JOB,
        source.argv(
            mesh(2, 1),
            "--save",
            str(folder),
            "--save-interval",
            str(SAVED),
            "--log-json",
            str(folder / "log.jsonl"),
        ),
    )
    assert all(result["losses"] == results[0]["losses"] for result in results)
    return Source(model, folder, results[3])  # the last rank speaks


@pytest.fixture(scope="module")
def llama(ranks: RankPool, tmp_checkpoints: Path) -> Source:
    return make_source(ranks, LLAMA, tmp_checkpoints / "pretrain_llama")


@pytest.fixture(scope="module")
def gpt(ranks: RankPool, tmp_checkpoints: Path) -> Source:
    return make_source(ranks, GPT, tmp_checkpoints / "pretrain_gpt")


def check_resumed(source: Source, result: dict[str, Any]) -> None:
    assert "error" not in result, result["text"]
    assert (result["first"], result["iteration"], result["consumed"]) == (
        SAVED,
        ITERATIONS,
        ITERATIONS * 8,
    )
    after = source.result["losses"][SAVED:]
    assert len(result["losses"]) == len(after) == ITERATIONS - SAVED
    assert result["losses"] == pytest.approx(after, rel=0, abs=1e-5)


def test_it_learns_and_saves(llama: Source) -> None:
    losses = llama.result["losses"]
    assert len(losses) == ITERATIONS and losses[-1] < losses[0] - 0.5
    assert (llama.folder / "latest").read_text() == f"global_step{ITERATIONS}"
    for tag in (SAVED, ITERATIONS):
        assert (llama.folder / f"global_step{tag}" / "ucp_manifest.json").is_file()


def test_log_lines(llama: Source) -> None:
    lines = [line for line in llama.result["said"].splitlines() if line.startswith(" iteration")]
    assert len(lines) == ITERATIONS and all(WHOLE_LINE.fullmatch(line) for line in lines), lines[0]
    parsed = {int(n): float(loss) for n, loss in (LINE.search(line).groups() for line in lines)}  # type: ignore[union-attr]
    assert list(parsed.values()) == pytest.approx(llama.result["losses"], rel=1e-6)
    logged = [json.loads(line) for line in (llama.folder / "log.jsonl").read_text().splitlines()]
    assert [entry["lm_loss"] for entry in logged] == llama.result["losses"]


@pytest.mark.parametrize(
    ("world", "tp", "zero"), [(4, 1, 3), (4, 4, 1), (1, 1, 0), (4, 2, 1), (2, 1, 2), (2, 2, 3)]
)
def test_llama_resumes_on_another_mesh(
    ranks: RankPool, llama: Source, world: int, tp: int, zero: int
) -> None:
    micro = ["--micro-batch-size", "1"] if world == 2 else []
    check_resumed(
        llama,
        ranks.run(world, JOB, llama.resume(mesh(tp, zero), micro, "--universal-checkpoint"))[-1],
    )


@pytest.mark.parametrize(("world", "tp", "zero"), [(4, 1, 2), (1, 1, 1), (4, 4, 3)])
def test_gpt_resumes_on_another_mesh(
    ranks: RankPool, gpt: Source, world: int, tp: int, zero: int
) -> None:
    check_resumed(
        gpt, ranks.run(world, JOB, gpt.resume(mesh(tp, zero), "--universal-checkpoint"))[-1]
    )


def test_the_comparison_sees_a_wrong_start(ranks: RankPool, llama: Source) -> None:
    """The negative control: without the optimizer's states the losses differ by more than is
    allowed above."""
    result = ranks.run(
        1, JOB, llama.resume(mesh(1, 0), "--universal-checkpoint", "--no-load-optim")
    )[0]
    assert (result["first"], result["iteration"]) == (SAVED, ITERATIONS)
    assert (
        max(
            abs(a - b)
            for a, b in zip(result["losses"], llama.result["losses"][SAVED:], strict=True)
        )
        > 1e-3
    )


def test_another_mesh_needs_the_flag(ranks: RankPool, llama: Source) -> None:
    results = ranks.run(2, JOB, llama.resume(mesh(2, 1)))
    for result in results:
        assert result["error"] == "UsageError" and "--universal-checkpoint" in result["text"]
        assert (
            "tp=2,pp=1,dp=2,zero=1" in result["text"] and "tp=2,pp=1,dp=1,zero=1" in result["text"]
        )


def test_same_mesh_needs_no_flag(ranks: RankPool, llama: Source) -> None:
    result = ranks.run(4, JOB, llama.resume(mesh(2, 1)))[-1]
    assert result["losses"] == llama.result["losses"][SAVED:]  # same mesh: not a bit differs


@pytest.mark.parametrize(
    ("flags", "error", "says"),
    [
        (["--hidden-size", "64"], "UsageError", "hidden_size=32"),
        (["--num-layers", "3"], "UsageError", "--num-layers"),
        (
            ["--untie-embeddings-and-output-weights", "--tie-embeddings-and-output-weights"],
            "UsageError",
            "untie",
        ),
        (["--lr", "1e-3"], "StateMismatchError", "--override-opt_param-scheduler"),
        (["--lr-decay-style", "linear"], "StateMismatchError", "--lr-decay-style"),
        (
            ["--ckpt-step", "77"],
            "NotFoundError",
            "give a --load, --ckpt-step or --load-tag that exists",
        ),
    ],
)
def test_flags_that_contradict_the_checkpoint(
    ranks: RankPool, llama: Source, flags: list[str], error: str, says: str
) -> None:
    result = ranks.run(1, JOB, llama.resume(mesh(1, 0), "--universal-checkpoint", flags))[0]
    assert result.get("error") == error and says in result["text"], result


def test_tp_that_does_not_divide_the_vocabulary(ranks: RankPool, llama: Source) -> None:
    for result in ranks.run(3, JOB, llama.resume(mesh(3, 0), "--universal-checkpoint")):
        assert (
            result["error"] == "UsageError"
            and "512" in result["text"]
            and "use 1, 2, 4;" in result["text"]
        )


@pytest.mark.skipif(os.environ.get("DS_ACCELERATOR") != "cpu", reason="there may be a GPU")
def test_fp16_without_a_gpu_is_refused(ranks: RankPool, llama: Source) -> None:
    result = ranks.run(1, JOB, llama.argv(mesh(1, 1), "--fp16"))[0]
    assert result["error"] == "UsageError" and "--fp16" in result["text"]


def test_bf16_and_sequence_parallelism(ranks: RankPool, llama: Source) -> None:
    """The same model to bf16's rounding, and to fp32's."""
    bf16 = ranks.run(2, JOB, llama.argv(mesh(2, 1), "--bf16"))[-1]
    parallel = ranks.run(2, JOB, llama.argv(mesh(2, 1), "--sequence-parallel"))[-1]
    assert bf16["losses"] != pytest.approx(llama.result["losses"], abs=1e-5)
    assert bf16["losses"] == pytest.approx(llama.result["losses"], abs=5e-2)
    assert parallel["losses"] == pytest.approx(llama.result["losses"], abs=1e-5)


def test_changed_schedule(ranks: RankPool, llama: Source) -> None:
    changed = llama.resume(
        mesh(1, 0), "--universal-checkpoint", "--lr", "1e-3", iterations=SAVED + 1
    )
    mine = ranks.run(1, JOB, [*changed, "--override-opt_param-scheduler"])[0]
    theirs = ranks.run(1, JOB, [*changed, "--use-checkpoint-opt_param-scheduler"])[0]
    rate = re.compile(r"learning rate: (\S+)")
    logged = rate.findall(llama.result["said"])[SAVED]
    assert rate.findall(theirs["said"]) == [logged]
    assert float(rate.findall(mine["said"])[0]) < 1e-3 < float(logged)


def test_finetune_takes_weights_alone(ranks: RankPool, llama: Source) -> None:
    result = ranks.run(
        2,
        JOB,
        llama.resume(
            mesh(2, 2), "--universal-checkpoint", "--finetune", "--lr", "1e-3", iterations=3
        ),
    )[-1]
    assert (result["first"], result["iteration"], result["consumed"]) == (0, 3, 24), result
    assert result["losses"][0] < llama.result["losses"][0] - 0.3  # trained weights, the first batch


def test_a_folder_that_cannot_be_written_is_found_before_training(
    ranks: RankPool, llama: Source
) -> None:
    for result in ranks.run(2, JOB, llama.argv(mesh(2, 1), "--save", "/proc/nothing")):
        assert result["error"] == "DamagedFileError" and "/proc/nothing" in result["text"]


def test_without_the_optimizer_both_are_named(ranks: RankPool, llama: Source) -> None:
    said = ranks.run(
        1,
        JOB,
        llama.resume(mesh(1, 0), "--universal-checkpoint", "--no-load-optim", iterations=SAVED + 1),
    )[0]["said"]
    assert (
        "neither optimizer states nor schedule were loaded, as asked" in said
        and "the checkpoint has none" not in said
    )


def test_sizes_from_the_checkpoint(ranks: RankPool, llama: Source) -> None:
    short = [
        "--seq-length",
        "32",
        "--num-layers",
        "9",
        "--hidden-size",
        "8",
        "--num-attention-heads",
        "1",
    ]
    argv = command(
        short,
        BATCH,
        RATES,
        QUIET,
        stdlib(),
        "--train-iters",
        str(ITERATIONS),
        "--load",
        str(llama.folder),
        "--ckpt-step",
        str(SAVED),
        mesh(1, 0),
        "--universal-checkpoint",
        "--use-checkpoint-args",
    )
    check_resumed(llama, ranks.run(1, JOB, argv)[0])


def test_random_states(ranks: RankPool, llama: Source) -> None:
    """Same mesh: the saved ones, whatever --seed says now; another mesh, or none wanted: others."""
    job = "tests.pretrain.jobs:random_numbers"
    first, again = (
        ranks.run(4, job, llama.resume(mesh(2, 1), seed)) for seed in ([], ["--seed", "5"])
    )
    other = ranks.run(4, job, llama.resume(mesh(1, 1), "--universal-checkpoint"))
    fresh = ranks.run(4, job, llama.resume(mesh(2, 1), "--no-load-rng", "--seed", "5"))
    assert first == again
    assert (
        first[0]["tracker"] != first[1]["tracker"] and first[0]["torch"] == first[1]["torch"]
    )  # tensor-parallel ranks
    assert other[0] not in first and fresh[0] not in first
    assert fresh[0]["torch"] != other[0]["torch"]


def test_evaluation_and_exit_interval(ranks: RankPool, llama: Source) -> None:
    argv = command(
        LLAMA,
        BATCH,
        RATES,
        "--mock-data",
        "--train-iters",
        "9",
        "--eval-iters",
        "2",
        "--eval-interval",
        "2",
        "--exit-interval",
        "5",
        "--log-interval",
        "3",
    )
    results = [ranks.run(world, JOB, argv)[-1] for world in (1, 2)]
    assert [r["stopped_by"] for r in results] == ["--exit-interval"] * 2
    assert all(r["iteration"] == 5 and sorted(r["evaluations"]) == [2, 4] for r in results)
    assert list(results[0]["evaluations"].values()) == pytest.approx(
        list(results[1]["evaluations"].values()), abs=1e-5
    )
    assert re.search(
        r" validation loss at iteration 2 \| lm loss value: \d\.\d{6}E\+00 \| lm loss PPL: "
        r"\d\.\d{6}E\+\d\d \| ",
        results[0]["said"],
    )
    assert re.findall(r"iteration\s+(\d+)/", results[0]["said"]) == ["1", "3"]


def test_tensorboard(ranks: RankPool, tmp_path: Path) -> None:
    """What TensorBoard reads back, at each iteration and at its samples, is what the run logged in
    full."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    argv = command(
        LLAMA,
        BATCH,
        RATES,
        "--mock-data",
        "--train-iters",
        "4",
        "--eval-iters",
        "1",
        "--eval-interval",
        "2",
        "--log-interval",
        "3",
        mesh(2, 1),
        "--tensorboard-dir",
        str(tmp_path / "board"),
        "--log-json",
        str(tmp_path / "log.jsonl"),
    )
    result = ranks.run(2, JOB, argv)[-1]
    entries = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "lm_loss" in entry]
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    for name, key in (
        ("lm loss", "lm_loss"),
        ("learning-rate", "learning_rate"),
        ("grad-norm", "grad_norm"),
    ):
        for curve, x in ((name, "iteration"), (f"{name} vs samples", "consumed_samples")):
            found = board.Scalars(curve)
            assert [point.step for point in found] == [entry[x] for entry in steps]
            assert [point.value for point in found] == pytest.approx(
                [entry[key] for entry in steps], rel=1e-6
            )
    assert [entry["consumed_samples"] for entry in steps] == [8, 16, 24, 32]
    assert (
        len({entry["learning_rate"] for entry in steps}) == 4
        and len({entry["grad_norm"] for entry in steps}) == 4
    )
    validation = {point.step: point.value for point in board.Scalars("lm loss validation")}
    assert validation == pytest.approx(result["evaluations"], rel=1e-6) and list(validation) == [
        2,
        4,
    ]
    assert [point.step for point in board.Scalars("lm loss validation vs samples")] == [16, 32]


def test_sigterm_on_one_rank_stops_all(ranks: RankPool, llama: Source, tmp_path: Path) -> None:
    argv = llama.argv(mesh(2, 1), "--save", str(tmp_path))
    results = ranks.run(4, "tests.pretrain.jobs:run_with_sigterm", argv, rank=1, iteration=3)
    assert all((r["stopped_by"], r["iteration"]) == ("SIGTERM", 3) for r in results)
    assert (tmp_path / "latest").read_text() == "global_step3"
    resumed = ranks.run(
        1, JOB, llama.argv(mesh(1, 0), "--load", str(tmp_path), "--universal-checkpoint")
    )[0]
    assert resumed["losses"] == pytest.approx(llama.result["losses"][3:], rel=0, abs=1e-5)


@pytest.mark.ranks
def test_program_ends_with_zero_after_sigterm(tmp_path: Path) -> None:
    argv = command(
        LLAMA,
        BATCH,
        RATES,
        QUIET,
        stdlib(),
        "--train-iters",
        "100000",
        "--save",
        str(tmp_path / "out"),
    )
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "pretrain/pretrain_gpt.py"), *argv],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if re.search(r"iteration\s+3/", line):
                process.send_signal(signal.SIGTERM)
                break
        rest, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, (tmp_path / "errors").read_text()
    saved = re.search(r"saved \S+ at iteration (\d+)", rest)
    assert saved and (tmp_path / "out" / "latest").read_text() == f"global_step{saved[1]}"
    shown = subprocess.run(
        [sys.executable, "-m", "megatron_ucp.cli", "inspect", str(tmp_path / "out"), "--no-table"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr


@pytest.mark.ranks
def test_program_names_an_unknown_flag() -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "pretrain/pretrain_gpt.py"),
            "--tensor-model-paralel-size",
            "2",
        ],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.returncode == 2
        and "the nearest is --tensor-model-parallel-size" in done.stderr
        and "Traceback" not in done.stderr
    )


# ------------------------------------------------ saves that can be trusted


def test_with_dropout_the_same_mesh_goes_on_with_the_same_losses(
    ranks: RankPool, tmp_path: Path
) -> None:
    model = [*GPT[:-4], "--hidden-dropout", "0.2", "--attention-dropout", "0.2"]
    argv = command(model, BATCH, RATES, QUIET, stdlib(), mesh(2, 1), "--train-iters", "6")
    whole = ranks.run(4, JOB, [*argv, "--save", str(tmp_path), "--save-interval", "3"])[-1]
    again = [*argv, "--load", str(tmp_path), "--ckpt-step", "3"]
    assert ranks.run(4, JOB, again)[-1]["losses"] == whole["losses"][3:]
    without = ranks.run(4, JOB, [*again, "--no-load-rng"])[-1]["losses"]
    assert all(a != b for a, b in zip(without, whole["losses"][3:], strict=True)), (
        "dropout draws random numbers"
    )
    other = ranks.run(
        2,
        JOB,
        command(
            model,
            BATCH,
            RATES,
            QUIET,
            stdlib(),
            mesh(1, 3),
            "--train-iters",
            "6",
            "--load",
            str(tmp_path),
            "--universal-checkpoint",
            "--ckpt-step",
            "3",
        ),
    )[-1]
    assert "derived from the seed, the step" in other["said"]
    assert other["losses"] == pytest.approx(whole["losses"][3:], rel=0.1)
    assert other["losses"] != whole["losses"][3:]


def test_without_a_tag_the_newest_whole_one_is_taken_and_others_are_named(
    ranks: RankPool, llama: Source, tmp_path: Path
) -> None:
    folder = shutil.copytree(llama.folder, tmp_path / "copy")
    next((folder / f"global_step{ITERATIONS}").glob("*zero_pp_rank_1*")).unlink()
    result = ranks.run(
        2, JOB, llama.argv(mesh(2, 2), "--load", str(folder), "--universal-checkpoint")
    )[-1]
    check_resumed(llama, result)
    assert (
        f"passed over global_step{ITERATIONS}: a file that the manifest lists is missing"
        in result["said"]
    )
    asked = ranks.run(
        2,
        JOB,
        llama.argv(
            mesh(2, 2),
            "--load",
            str(folder),
            "--universal-checkpoint",
            "--ckpt-step",
            str(ITERATIONS),
        ),
    )
    assert all(result["error"] == "NotFoundError" for result in asked), (
        "a tag that was asked for is not replaced by another"
    )
    next((folder / f"global_step{SAVED}").glob("mp_rank_01*")).unlink()
    for result in ranks.run(
        2, JOB, llama.argv(mesh(2, 2), "--load", str(folder), "--universal-checkpoint")
    ):
        assert (
            result["error"] == "NotFoundError"
            and "no tag in this folder is whole" in result["text"]
        )
        assert (
            f"global_step{ITERATIONS}: " in result["text"]
            and f"global_step{SAVED}: " in result["text"]
        )


def test_keep_latest(ranks: RankPool, llama: Source, tmp_path: Path) -> None:
    said = ranks.run(
        2,
        JOB,
        llama.argv(
            mesh(2, 1),
            "--save",
            str(tmp_path),
            "--save-interval",
            "1",
            "--keep-latest",
            "2",
            "--no-durable",
            iterations=4,
        ),
    )[-1]["said"]
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == [
        "global_step3",
        "global_step4",
    ]
    assert "removed global_step2" in said
