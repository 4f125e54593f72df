"""The training program with experts: the losses of one rank on every mesh, and what flags may
say."""

import json
from pathlib import Path

import pytest

from megatron_ucp.errors import UsageError
from pretrain.arguments import complete, parse
from tests.pretrain import jobs
from tests.pretrain.common import RATES, command, stdlib
from tests.ranks import RankPool

JOB = jobs.run
MIXTRAL = command(
    "--model-family mixtral --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 "
    "--num-attention-heads 4 --num-query-groups 2 --seq-length 32 --num-experts 4 "
    "--moe-aux-loss-coeff 0.02 --moe-shared-expert-intermediate-size 16"
)
# the auxiliary loss is of a micro batch: one size on all meshes
BATCH = ["--global-batch-size", "4", "--micro-batch-size", "1"]
ITERATIONS = 8


def argv(*more: list[str] | str) -> list[str]:
    return command(
        MIXTRAL,
        BATCH,
        RATES,
        stdlib(),
        ["--make-vocab-size-divisible-by", "512", "--log-interval", "1", "--eval-iters", "1"],
        ["--train-iters", str(ITERATIONS)],
        *more,
    )


# one padded vocabulary on all of them
TWO = "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 256"
MESHES = {
    "shared": "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall",
    "cut": f"--expert-model-parallel-size 2 --zero-stage 2 {TWO}",
    "not cut": "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --zero-stage 0 "
    + TWO,
    "stages": "--expert-model-parallel-size 2 --pipeline-model-parallel-size 2",
}
BALANCED = ["--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"]


def test_losses_of_one_rank_on_every_mesh(ranks: RankPool, tmp_path: Path) -> None:
    for more in ([], BALANCED):
        want = ranks.run(1, JOB, argv(*more))[0]
        assert "error" not in want, want["text"]
        assert want["losses"][0] - want["losses"][-1] > 0.1
        assert " load_balancing_loss: " in want["said"]
        for name in MESHES if not more else ("shared",):
            log = tmp_path / f"{name}.json"
            for rank in ranks.run(4, JOB, argv(*more, MESHES[name], ["--log-json", str(log)])):
                assert "error" not in rank, rank["text"]
                assert rank["losses"] == pytest.approx(want["losses"], rel=0, abs=1e-5), name
                assert rank["evaluations"] == pytest.approx(want["evaluations"], rel=0, abs=1e-5)
            first = json.loads(log.read_text().splitlines()[0])
            # megatron-core's own scale: 1 where all experts get as many tokens
            assert 0.5 < first["load_balancing_loss"] < 2
            log.unlink()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--model-family llama", "have no experts"),
        ("--expert-model-parallel-size 3", "a divisor of 4"),
        ("--num-experts 3 --expert-model-parallel-size 2", "does not divide --num-experts"),
        (
            "--moe-ffn-hidden-size 5 --tensor-model-parallel-size 2 --sequence-parallel "
            "--expert-model-parallel-size 2",
            "does not divide --moe-ffn-hidden-size",
        ),
        ("--tensor-model-parallel-size 2", "--sequence-parallel"),
        ("--expert-model-parallel-size 2 --zero-stage 3", "does not go with experts"),
        ("--moe-router-topk 5", "so many experts"),
        ("--moe-router-topk 1", "always 1"),
        ("--moe-router-enable-expert-bias", "sigmoid"),
        ("--num-experts 0", "too small"),
        ("--moe-router-load-balancing-type sinkhorn", "aux_loss"),
        ("--expert-tensor-parallel-size 2", "would not save"),
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1",
            "would not save",
        ),
    ],
)
def test_refusals(flags: str, says: str) -> None:
    rest = ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "10", "--mock-data"]
    with pytest.raises(UsageError) as caught:
        complete(parse(command(MIXTRAL, rest, flags.split())), 4)
    assert says in str(caught.value)


def test_defaults_and_aliases() -> None:
    rest = ["--micro-batch-size", "1", "--lr", "1e-3", "--train-iters", "10", "--mock-data"]
    args = complete(parse(command(MIXTRAL, rest, ["--zero-stage", "3", "--topk", "3"])), 4)
    assert (args.moe_router_topk, args.moe_ffn_hidden_size) == (3, 48)
    assert (args.expert_model_parallel_size, args.expert_tensor_parallel_size) == (1, 1)
    dense = [word for word in MIXTRAL[:14] if word != "mixtral"]
    dense.insert(1, "llama")
    assert complete(parse(command(dense, rest, ["--num-experts", "1"])), 4).num_experts is None


def test_a_run_goes_on_on_other_meshes(ranks: RankPool, tmp_path: Path) -> None:
    """Ten iterations on one mesh, then ten more, straight from its files, on each of the others."""
    whole = ranks.run(1, JOB, argv())[0]["losses"]
    save = ["--save", str(tmp_path), "--save-interval", "10", "--exit-interval", "10"]
    first = ranks.run(4, JOB, argv(*MESHES["shared"].split(), *save))[0]
    assert first["losses"] == pytest.approx(whole[:10], rel=0, abs=1e-5), first.get("text")
    load = ["--load", str(tmp_path), "--universal-checkpoint"]
    for name in ("cut", "stages"):
        found = ranks.run(4, JOB, argv(*MESHES[name].split(), *load))[0]
        assert "error" not in found, found["text"]
        assert found["losses"] == pytest.approx(whole[10:], rel=0, abs=1e-5), name
