"""The training program on real ranks: trains, saves, resumes on other meshes, refuses."""

import json
import re

import pytest

from tests.pretrain import jobs
from tests.pretrain.common import BATCH, QUIET, RATES, command, mesh, stdlib
from tests.pretrain.source import ITERATIONS, JOB, SAVED, Source, check_resumed
from tests.ranks import RankPool

LINE = re.compile(r"iteration\s+(\d+)/.*?lm loss: ([^ ]+) \|")
WHOLE_LINE = re.compile(
    r" iteration {8}\d/ {7}\d \| consumed samples: {11,12}\d+ \| elapsed time per iteration "
    r"\(ms\): \d+\.\d"
    r" \| learning rate: \d\.\d{6}E-\d\d"
    r" \| global batch size:     8 \| lm loss: \d\.\d{6}E\+00 \| loss scale: 1\.0 \| grad norm: "
    r"\d+\.\d{3}"
    r" \| number of skipped iterations:   0 \| number of nan iterations:   0 \|"
)


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
    argv = llama.resume(mesh(tp, zero), micro, "--universal-checkpoint")
    check_resumed(llama, ranks.run(world, JOB, argv)[-1])


@pytest.mark.parametrize(("world", "tp", "zero"), [(4, 1, 2), (1, 1, 1), (4, 4, 3)])
def test_gpt_resumes_on_another_mesh(
    ranks: RankPool, gpt: Source, world: int, tp: int, zero: int
) -> None:
    argv = gpt.resume(mesh(tp, zero), "--universal-checkpoint")
    check_resumed(gpt, ranks.run(world, JOB, argv)[-1])


def test_the_comparison_sees_a_wrong_start(ranks: RankPool, llama: Source) -> None:
    """The negative control: without the optimizer's states the losses differ by more than is
    allowed above."""
    result = ranks.run(1, JOB, llama.resume(mesh(1, 0), "--universal-checkpoint --no-load-optim"))[
        0
    ]
    assert (result["first"], result["iteration"]) == (SAVED, ITERATIONS)
    pairs = zip(result["losses"], llama.result["losses"][SAVED:], strict=True)
    assert max(abs(a - b) for a, b in pairs) > 1e-3


def test_another_mesh_needs_the_flag(ranks: RankPool, llama: Source) -> None:
    results = ranks.run(2, JOB, llama.resume(mesh(2, 1)))
    for result in results:
        assert result["error"] == "UsageError" and "--universal-checkpoint" in result["text"]
        assert all(f"tp=2,pp=1,dp={dp},zero=1" in result["text"] for dp in (1, 2))


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
        (["--lr-decay-style", "linear"], "StateMismatchError", "lr_decay_style"),
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
        assert result["error"] == "UsageError"
        assert "512" in result["text"] and "use 1, 2, 4;" in result["text"]


def test_fp16_is_refused_on_a_device_without_it(ranks: RankPool, llama: Source) -> None:
    job = jobs.run_without_fp16
    result = ranks.run(1, job, llama.argv(mesh(1, 1), "--fp16"))[0]
    assert result["error"] == "UsageError" and "--fp16" in result["text"]


def test_bf16_and_sequence_parallelism(ranks: RankPool, llama: Source) -> None:
    """The same model to bf16's rounding, and to fp32's."""
    bf16 = ranks.run(2, JOB, llama.argv(mesh(2, 1), "--bf16"))[-1]
    parallel = ranks.run(2, JOB, llama.argv(mesh(2, 1), "--sequence-parallel"))[-1]
    assert bf16["losses"] != pytest.approx(llama.result["losses"], abs=1e-5)
    assert bf16["losses"] == pytest.approx(llama.result["losses"], abs=5e-2)
    assert parallel["losses"] == pytest.approx(llama.result["losses"], abs=1e-5)


def test_changed_schedule(ranks: RankPool, llama: Source) -> None:
    changed = llama.resume(mesh(1, 0), "--universal-checkpoint --lr 1e-3", iterations=SAVED + 1)
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
        llama.resume(mesh(2, 2), "--universal-checkpoint --finetune --lr 1e-3", iterations=3),
    )[-1]
    assert (result["first"], result["iteration"], result["consumed"]) == (0, 3, 24), result
    assert result["losses"][0] < llama.result["losses"][0] - 0.3  # trained weights, the first batch


def test_a_folder_that_cannot_be_written_is_found_before_training(
    ranks: RankPool, llama: Source
) -> None:
    for result in ranks.run(2, JOB, llama.argv(mesh(2, 1), "--save /proc/nothing")):
        assert result["error"] == "DamagedFileError" and "/proc/nothing" in result["text"]


def test_without_the_optimizer_both_are_named(ranks: RankPool, llama: Source) -> None:
    said = ranks.run(
        1,
        JOB,
        llama.resume(mesh(1, 0), "--universal-checkpoint --no-load-optim", iterations=SAVED + 1),
    )[0]["said"]
    assert "neither optimizer states nor schedule were loaded, as asked" in said
    assert "the checkpoint has none" not in said


def test_sizes_from_the_checkpoint(ranks: RankPool, llama: Source) -> None:
    short = command("--seq-length 32 --num-layers 9 --hidden-size 8 --num-attention-heads 1")
    argv = command(
        short,
        BATCH,
        RATES,
        QUIET,
        stdlib(),
        f"--train-iters {ITERATIONS} --load {llama.folder} --ckpt-step {SAVED}",
        mesh(1, 0),
        "--universal-checkpoint --use-checkpoint-args",
    )
    check_resumed(llama, ranks.run(1, JOB, argv)[0])
