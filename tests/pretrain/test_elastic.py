"""Elastic runs: which mesh and which batch some ranks get, and what is refused."""

from typing import Any

import pytest

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UsageError
from pretrain import elastic
from pretrain.arguments import complete, complete_each, parse
from pretrain.checkpoint import Saved, _where, padded_vocab
from tests.pretrain.common import GPT, LLAMA

ELASTIC = [*LLAMA, "--lr", "1e-3", "--mock-data", "--train-iters", "10", "--elastic"]
ELASTIC += ["--save", "there", "--save-interval", "2"]
BATCH = ["--global-batch-size", "12", "--micro-batch-size", "4"]
MESHES = "tp=2,dp=2,zero=1;tp=1,dp=3,zero=3; tp=2,pp=2,dp=1"


def arguments(ranks: int, *more: str, batch: list[str] = BATCH) -> Any:
    return complete(parse([*ELASTIC, *batch, *more]), ranks)


def refused(ranks: int, *more: str, batch: list[str] = BATCH) -> str:
    with pytest.raises(UsageError) as caught:
        arguments(ranks, *more, batch=batch)
    return str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "flags", "mesh"),
    [
        (4, ["--elastic-meshes", MESHES], "tp=2,pp=1,dp=2,zero=1"),  # the first of two
        (3, ["--elastic-meshes", MESHES], "tp=1,pp=1,dp=3,zero=3"),
        (4, ["--elastic-meshes", "pp=2,tp=2"], "tp=2,pp=2,dp=1,zero=1"),
        (1, ["--elastic-meshes", "dp=1"], "tp=1,pp=1,dp=1,zero=1"),  # the usual stage
        (1, ["--elastic-meshes", "dp=1", "--zero-stage", "2"], "tp=1,pp=1,dp=1,zero=2"),
        (2, ["--elastic-meshes", "sp=2", "--tensor-model-parallel-size", "2"], "sp=2"),
        (4, [], "tp=1,pp=1,dp=4,zero=1"),
        (6, ["--tensor-model-parallel-size", "2", "--zero-stage", "2"], "tp=2,pp=1,dp=3,zero=2"),
        (4, ["--pipeline-model-parallel-size", "2"], "tp=1,pp=2,dp=2,zero=1"),
        (2, ["--ds-sequence-parallel-size", "2"], "sp=2"),
    ],
)
def test_the_mesh_of_some_ranks(ranks: int, flags: list[str], mesh: str) -> None:
    args = arguments(ranks, *flags)
    assert mesh in str(elastic.mesh_of(args)) and elastic.mesh_of(args).world == ranks
    assert args.world_size == ranks


def test_the_mesh_of_megatrons_own_engine() -> None:
    flags = ["--engine", "megatron", "--elastic-meshes", "dp=2,zero=1;dp=3,zero=0;dp=1,zero=2"]
    assert arguments(2, *flags).use_distributed_optimizer is True
    assert arguments(3, *flags).use_distributed_optimizer is False
    assert "zero=0 or zero=1" in refused(1, *flags)


@pytest.mark.parametrize(
    ("ranks", "flags", "says"),
    [
        (2, ["--elastic-meshes", MESHES], ("has 2 ranks", "(3 ranks)", "(4 ranks)", "--nnodes")),
        (3, ["--tensor-model-parallel-size", "2"], ("tp=2, pp=1", "multiple of 2", "dp=3,zero=1")),
        (2, ["--elastic-meshes", "dp=2,vpp=2"], ("can't choose", "tp, pp, ep, etp, sp, dp, zero")),
        (4, ["--elastic-meshes", "cp=2,dp=2"], ("can't choose",)),
        (2, ["--elastic-meshes", "dp=2,tq=1"], ("tq=1",)),
        (4, ["--elastic-meshes", "pp=2,dp=2,zero=3"], ("--zero-stage 3 does not go with",)),
        (2, ["--elastic-batch-tolerance", "1.5"], ("no share",)),
        (5, [], ("can't be shared equally by 5", "common multiple, such as 60", "10 here")),
        (5, ["--elastic-batch-tolerance", "0.1"], ("--elastic-batch-tolerance 0.167",)),
    ],
)
def test_what_can_not_be(ranks: int, flags: list[str], says: tuple[str, ...]) -> None:
    said = refused(ranks, *flags)
    assert all(part in said for part in says), said


@pytest.mark.parametrize("missing", ["--global-batch-size", "--save-interval", "--save"])
def test_what_it_needs(missing: str) -> None:
    argv = [*ELASTIC, *BATCH]
    del argv[argv.index(missing) : argv.index(missing) + 2]
    if missing == "--save":
        del argv[argv.index("--save-interval") : argv.index("--save-interval") + 2]
    with pytest.raises(UsageError, match=f"--elastic needs {missing}"):
        complete(parse(argv), 2)
    plain = [word for word in [*ELASTIC, *BATCH] if word != "--elastic"]
    for flag in (["--elastic-meshes", "dp=2"], ["--elastic-batch-tolerance", "0.1"]):
        with pytest.raises(UsageError, match=f"{flag[0]} needs --elastic"):
            complete(parse([*plain, *flag]), 2)


@pytest.mark.parametrize(
    ("ranks", "batch", "micro", "flags", "shared"),
    [  # global batch, micro batch, ranks that share it, accumulation
        (4, 12, 4, [], (12, 3, 4, 1)),
        (3, 12, 4, [], (12, 4, 3, 1)),
        (2, 12, 4, [], (12, 3, 2, 2)),  # 4 does not divide 6
        (1, 12, 4, [], (12, 4, 1, 3)),
        (1, 12, 5, [], (12, 4, 1, 3)),
        (1, 7, 4, [], (7, 1, 1, 7)),
        (4, 12, 4, ["--tensor-model-parallel-size", "4"], (12, 4, 1, 3)),
        (5, 12, 4, ["--elastic-batch-tolerance", "0.2"], (10, 2, 5, 1)),
        (7, 12, 4, ["--elastic-batch-tolerance", "0.2"], (14, 2, 7, 1)),
        (4, 12, 4, ["--elastic-batch-tolerance", "0.2"], (12, 3, 4, 1)),  # exact where it can be
        (2, 1, 1, ["--elastic-batch-tolerance", "0.99"], None),  # no rank without a sample
    ],
)
def test_the_batch_of_some_ranks(
    ranks: int, batch: int, micro: int, flags: list[str], shared: tuple[int, ...] | None
) -> None:
    said = ["--global-batch-size", str(batch), "--micro-batch-size", str(micro)]
    if shared is None:
        assert "can't be shared equally" in refused(ranks, *flags, batch=said)
        return
    args = arguments(ranks, *flags, batch=said)
    found = (args.global_batch_size, args.micro_batch_size)
    assert (*found, args.data_parallel_size, args.gradient_accumulation) == shared
    assert found[1] * shared[2] * shared[3] == found[0]
    assert args.lr_decay_steps == args.train_samples == 10 * batch  # no length moves
    changed = "(--global-batch-size 12: -16.7%)" in elastic.start_line(args)
    assert changed == (shared[0] == 10)


def test_the_batch_of_experts_keeps_its_micro_batches() -> None:
    """What balances them is computed for each micro batch."""
    flags = ["--model-family", "mixtral", "--num-experts", "4"]
    assert arguments(3, *flags).gradient_accumulation == 1
    assert "multiple of --micro-batch-size" in refused(4, *flags)


def test_an_interleaved_pipeline_gets_the_micro_batches_that_it_can_run() -> None:
    flags = ["--engine", "megatron", "--pipeline-model-parallel-size", "2"]
    args = arguments(2, *flags, "--num-layers-per-virtual-pipeline-stage", "1", "--num-layers", "4")
    assert (args.micro_batch_size, args.gradient_accumulation) == (3, 4)


def test_each_allowed_mesh_is_looked_at_before_the_first_step() -> None:
    given = parse([*ELASTIC, *BATCH, "--elastic-meshes", f"{MESHES};dp=5"])
    assert complete(given, 4).data_parallel_size == 2
    with pytest.raises(UsageError, match="by 5 data-parallel ranks") as caught:
        list(complete_each(given))
    assert "on dp=5 of --elastic-meshes" in str(caught.value)
    with pytest.raises(UsageError, match="on tp=2,pp=2,dp=1 of --elastic-meshes"):
        list(complete_each(given | {"zero_stage": 3}))  # a stage that no mesh says is the flag's
    good = parse([*ELASTIC, *BATCH, "--elastic-meshes", MESHES])
    assert [args.world_size for args in complete_each(good)] == [4, 3, 4]
    assert not list(complete_each(parse([*ELASTIC, *BATCH])))


def test_the_vocabulary_fits_each_allowed_mesh() -> None:
    flags = ["--elastic-meshes", "dp=4;tp=4", "--make-vocab-size-divisible-by", "50"]
    assert padded_vocab(257, arguments(4, *flags), None) == 400
    assert padded_vocab(257, arguments(4, *flags[2:]), None) == 300


def test_a_run_ends_after_as_many_samples_as_without_an_interruption() -> None:
    args = arguments(5, "--elastic-batch-tolerance", "0.2")  # batches of 10 for 12
    assert args.train_samples == 120
    assert elastic.last_iteration(args, 0, 0) == 12
    assert elastic.last_iteration(args, 5, 60) == 11
    assert elastic.last_iteration(arguments(4), 5, 60) == 10
    assert elastic.last_iteration(arguments(4), 12, 120) == 12


def test_a_restart_goes_on_from_its_own_saves() -> None:
    first = ["--load", "elsewhere", "--ckpt-step", "7", "--finetune", "--no-load-optim"]
    given = elastic.resumed_flags(parse([*ELASTIC, *BATCH, *first]))
    args = complete(given, 4)
    assert (args.load, args.save) == ("there", "there")
    assert args.universal_checkpoint and not args.finetune and not args.no_load_optim
    assert args.ckpt_step is None


def test_the_launcher_and_the_waits() -> None:
    shares = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(UsageError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        elastic.check_launcher({"elastic": True}, shares)
    elastic.check_launcher({}, shares)
    with pytest.raises(UsageError, match="waits for a lost node for ever"):
        elastic.check_launcher({"elastic": True}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    elastic.check_launcher({"elastic": True}, {"TORCHELASTIC_USE_AGENT_STORE": "False"})
    elastic.check_launcher({"elastic": True}, {})
    minutes = [
        elastic.timeout(parse(argv)).total_seconds() / 60
        for argv in ([], ["--elastic"], ["--elastic", "--distributed-timeout-minutes", "0.5"])
    ]
    assert minutes == [30, 10, 0.5]
    assert elastic.save_options(arguments(2, "--async-save")) == {"deadline": 600}
    assert not elastic.save_options(arguments(2))


def test_other_families_too() -> None:
    argv = [*GPT, *ELASTIC[len(LLAMA) :], *BATCH]
    assert complete(parse(argv), 3).data_parallel_size == 3


@pytest.mark.parametrize(
    ("save", "flags", "damaged", "found"),
    [
        ("runs/a", [], (), ("runs/a/", None)),  # the folder, in whose memory a newer step may be
        ("runs/a", [], ("global_step4: damaged",), ("runs/a/", "global_step2")),
        ("runs/b", [], (), ("runs/a/global_step2", None)),
        ("runs/a", ["--finetune"], (), ("runs/a/global_step2", None)),
        ("runs/a", ["--ckpt-step", "2"], (), ("runs/a/global_step2", None)),
    ],
)
def test_memory_of_the_own_folder_however_it_is_written(
    save: str, flags: list[str], damaged: tuple[str, ...], found: tuple[str, str | None]
) -> None:
    argv = [*LLAMA, "--lr", "1e-3", "--mock-data", "--train-iters", "10", *BATCH, *flags]
    argv += ["--keep-memory-every", "2", "--load", "runs/a/", "--save", save]
    saved = Saved("runs/a/global_step2", damaged, Mesh(), 8, {}, 2, 8)
    assert _where(saved, complete(parse(argv), 1)) == found
