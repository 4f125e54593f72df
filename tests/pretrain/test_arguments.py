"""Flags: spellings, aliases, family defaults, contradictions, the DeepSpeed config."""

import argparse
import importlib.util
import json
from pathlib import Path

import pytest

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UsageError
from pretrain.arguments import complete, make_parser, parse
from pretrain.checkpoint import Saved, padded_vocab
from pretrain.flags import FLAGS, GROUPS, IGNORED
from pretrain.setup import deepspeed_config
from tests.pretrain.common import GPT, LLAMA, command
from tests.ranks import ROOT

REST = ["--micro-batch-size", "2", "--lr", "1e-3", "--train-iters", "10", "--mock-data"]


def arguments(*more: str, model: list[str] = LLAMA, world: int = 4) -> argparse.Namespace:
    return complete(parse(command(model, REST, *more)), world)


def test_family_defaults() -> None:
    llama, gpt = arguments(), arguments(model=GPT)
    names = ("normalization", "swiglu", "disable_bias_linear", "position_embedding_type")
    for args, values in (
        (llama, ["RMSNorm", True, True, "rope"]),
        (gpt, ["LayerNorm", False, False, "learned_absolute"]),
    ):
        assert [getattr(args, name) for name in names] == values
    assert llama.untie_embeddings_and_output_weights and not gpt.untie_embeddings_and_output_weights
    assert gpt.ffn_hidden_size == 4 * 32
    assert llama.num_query_groups == 2 and gpt.num_query_groups == 4
    untied = arguments("--untie-embeddings-and-output-weights", model=GPT)
    assert untied.untie_embeddings_and_output_weights
    assert not arguments("--tie-embeddings-and-output-weights").untie_embeddings_and_output_weights


@pytest.mark.parametrize(
    ("theirs", "name", "value"),
    [
        ("--num-key-value-heads 4", "num_query_groups", 4),
        ("--layernorm-epsilon 1e-6", "norm_epsilon", 1e-6),
        ("--rotary-position-embeddings-theta 500000", "rotary_base", 500000),
        ("--normalization rmsnorm", "normalization", "RMSNorm"),
        ("--use-rotary-position-embeddings", "position_embedding_type", "rope"),
        ("--tokenizer-type NullTokenizer", "vocab_size", None),
        ("--train-tokens 3200 --train-iters 10", None, None),
        ("--ckpt_step 3 --load x", "ckpt_step", 3),
        ("--zero_stage 3", "zero_stage", 3),
        ("--override-opt-param-scheduler", "override_opt_param_scheduler", True),
        ("--bf16", "bf16", True),
        (
            "--deepspeed --no-pipeline-parallel --local_rank 0 --data-impl mmap "
            "--no-bias-gelu-fusion",
            "bf16",
            None,
        ),
        (
            "--pipeline-model-parallel-size 1 --expert-model-parallel-size 1 --num-experts 1",
            "bf16",
            None,
        ),
    ],
)
def test_aliases(theirs: str, name: str | None, value: object) -> None:
    if name is None:
        with pytest.raises(UsageError, match="the length of the run is given once"):
            arguments(*theirs.split())
    else:
        assert getattr(arguments(*theirs.split()), name) == value


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--tensor-model-parallel-sise 2", "the nearest is --tensor-model-parallel-size"),
        ("--univresal-checkpoint", "--universal-checkpoint"),
        ("--pipeline-model-parallel-size 3", "a divisor of 4: 4 ranks"),
        ("--num-experts 8", "--model-family mixtral"),
        ("--expert-model-parallel-size 2", "experts"),
        ("--context-parallel-size 2", "choose from '1'"),
        ("--rotary-percent 0.5", "choose from '1'"),
        ("--tensor-model-parallel-size 3", "a divisor of 4"),
        ("--global-batch-size 12", "a multiple of 2 x 4"),
        ("--swiglu --model-family gpt --normalization LayerNorm", "--model-family llama"),
        ("--normalization LayerNorm", "--model-family gpt"),
        ("--bf16 --fp16", "--bf16 and --fp16"),
        ("--data-path x", "--mock-data and --data-path"),
        ("--num-query-groups 3", "a divisor of 4"),
        ("--num-attention-heads 5 --num-query-groups 5", "--kv-channels"),
        ("--save-interval 5", "needs --save"),
        ("--finetune", "needs --load"),
        ("--universal-checkpoint", "needs --load"),
        ("--vocab-size 100", "NullTokenizer"),
        ("--train-samples 80", "given once"),
        ("--lr-warmup-iters 2 --lr-warmup-fraction 0.1", "given once"),
        ("--lr-warmup-iters 2 --lr-warmup-samples 9", "given once"),
        ("--lr-warmup-iters 10", "the warm-up is longer"),
        ("--min-lr 2e-3", "--lr is the largest"),
        ("--lr-warmup-init 1.0", "--lr is the largest"),
        ("--lr-decay-style step", "--lr-decay-style"),
        ("--lr-decay-style WSD", "needs the length of its decay"),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 11", "needs the length of its decay"),
        ("--max-position-embeddings 16", "at least 32"),
        ("--tokenizer-type HFTokenizer", "--tokenizer-model"),
        ("--num-layers x", "num-layers"),
        ("--allow-vocab-resize", "needs --load"),
        ("--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler", "one flag"),
        ("--zero-stage 4", "zero-stage"),
        ("--group-query-attention --num-query-groups 0", "at least 1"),
        ("--micro-batch-size 0", "--micro-batch-size is too small"),
        (
            "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2",
            "a divisor of 2: 4 ranks, --tensor-model-parallel-size 2",
        ),
        (
            "--pipeline-model-parallel-size 2 --zero-stage 2",
            "--zero-stage 2 does not go with --pipeline-model-parallel-size 2",
        ),
        ("--pipeline-model-parallel-size 2 --zero-stage 3", "--zero-stage 0 or 1"),
        ("--pipeline-model-parallel-size 0", "at least 1"),
        ("--pipeline-model-parallel-size 2 --no-pipeline-parallel", "one flag"),
        (
            "--pipeline-model-parallel-size 2 --fp16 --zero-stage 0",
            "--fp16 in a pipeline needs --zero-stage 1",
        ),
        (
            "--pipeline-model-parallel-size 2 --pipeline-partition-method best",
            "uniform, parameters, type:REGEX",
        ),
        (
            "--pipeline-model-parallel-size 2 --pp-partition-method 2,2",
            "2 numbers of at least 1 with the sum 5",
        ),
        (
            "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
            "interleaved",
        ),
        ("--num-virtual-stages-per-pipeline-rank 2", "choose from '1'"),
        ("--decoder-first-pipeline-num-layers 1", "is not a flag of this program"),
        ("--tensor-model-parallel-size 4 --sequence-parallel --seq-length 30", "a multiple of 4"),
        ("--no-save-optim", "is not a flag of this program"),
        ("--use-distributed-optimizer", "--zero-stage 1"),
        ("--pipeline-model-parallel-layout Et|tL", "--pipeline-partition-method"),
        ("--overlap-grad-reduce", "does not go with --engine deepspeed"),
        ("--engine megatron --zero-stage 1", "--use-distributed-optimizer"),
        ("--engine megatron --pipeline-partition-method uniform", "of DeepSpeed's pipeline"),
        ("--engine megatron --overlap-param-gather", "--use-distributed-optimizer --overlap-grad"),
        (
            "--engine megatron --pipeline-model-parallel-size 4",
            "the layers do not divide into the stages",
        ),
        (
            "--engine megatron --pipeline-model-parallel-size 2 "
            "--pipeline-model-parallel-layout E|t|tL",
            "a multiple of 2 stages",
        ),
        (
            "--engine megatron --pipeline-model-parallel-size 2 --global-batch-size 4 "
            "--pipeline-model-parallel-layout E|t|t|L",
            "an interleaved pipeline does not run these batches",
        ),
    ],
)
def test_refusals(flags: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        arguments(*flags.split())
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "missing",
    ["--num-layers", "--seq-length", "--lr", "--micro-batch-size", "--train-iters", "--mock-data"],
)
def test_required(missing: str) -> None:
    words = command(LLAMA, REST)
    place = words.index(missing)
    with pytest.raises(UsageError, match=missing):
        complete(parse(words[:place] + words[place + (1 if missing == "--mock-data" else 2) :]), 1)


def test_tensorboard_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs the package tensorboard"):
        arguments("--tensorboard-dir", "x")


def test_stages_divide_the_ranks() -> None:
    args = arguments("--pipeline-model-parallel-size", "2", "--global-batch-size", "16")
    assert (args.data_parallel_size, args.gradient_accumulation, args.zero_stage) == (2, 4, 1)
    assert args.pipeline_partition_method == "type:transformer"
    with pytest.raises(UsageError, match="at most 5: --num-layers 2"):
        arguments("--pipeline-model-parallel-size", "6", world=6)


def test_lengths_in_samples() -> None:
    args = arguments("--global-batch-size 16 --lr-warmup-fraction 0.25 --lr-wsd-decay-iters 3")
    assert (args.lr_decay_steps, args.lr_warmup_steps) == (160, 40)
    assert (args.lr_wsd_decay_steps, args.gradient_accumulation) == (48, 2)
    words = [word for word in REST if word not in ("--train-iters", "10")]
    tokens = complete(parse(command(LLAMA, words, "--train-tokens 6400 --global-batch-size 8")), 4)
    assert (tokens.train_samples, tokens.train_iters, tokens.lr_decay_steps) == (200, 25, 200)


def test_deepspeed_config_is_merged(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"

    def merged(config: dict[str, object], *flags: str) -> dict[str, object]:
        path.write_text(json.dumps(config))
        return deepspeed_config(arguments("--deepspeed", "--deepspeed_config", str(path), *flags))

    theirs = {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "wall_clock_breakdown": False,
    }
    config = merged({**theirs, "train_batch_size": "auto"}, "--zero-stage 3")
    assert {name: config[name] for name in theirs} == theirs
    assert config["train_batch_size"] == 8
    for wrong, flags, says in [
        ({"zero_optimization": {"stage": 2}}, ("--zero-stage", "1"), "--zero-stage"),
        ({"train_micro_batch_size_per_gpu": 4}, (), "--micro-batch-size"),
        ({"optimizer": {}}, (), "AdamW"),
        ({"bf16": {"enabled": False}}, ("--bf16",), "--bf16"),
        ({"scheduler": {}}, (), "--lr-"),
        ({"gradient_accumulation_steps": 7}, (), "gradient_accumulation_steps"),
    ]:
        with pytest.raises(UsageError) as caught:
            merged(wrong, *flags)  # type: ignore[arg-type]
        assert says in str(caught.value)
    path.write_text("{")
    with pytest.raises(UsageError, match="no JSON"):
        arguments("--deepspeed_config", str(path))


def test_padded_vocabulary() -> None:
    def saved(rows: int) -> Saved:
        return Saved("there", None, Mesh(), rows, {}, 0, 0)

    two = arguments("--tensor-model-parallel-size", "2")
    assert padded_vocab(257, arguments(), None) == 384 and padded_vocab(257, two, None) == 512
    assert padded_vocab(257, two, saved(384)) == 384  # as it was, not as a new run would have it
    advice = "use 1; or drop rows or add zero rows with --allow-vocab-resize"
    with pytest.raises(UsageError, match=advice) as caught:
        padded_vocab(257, two, saved(387))
    assert "a divisor of 387" in str(caught.value)
    resize = arguments("--tensor-model-parallel-size", "2", "--load", "x", "--allow-vocab-resize")
    assert padded_vocab(257, resize, saved(387)) == 512  # as a new run would have it
    # where it divides nothing changes, flag or not
    assert padded_vocab(257, resize, saved(384)) == 384
    with pytest.raises(UsageError, match="more ids"):
        padded_vocab(257, resize, saved(255))
    with pytest.raises(UsageError, match="more ids"):
        padded_vocab(257, two, saved(256))


def test_every_flag_is_documented_and_parses() -> None:
    page = (ROOT / "docs" / "reference" / "pretrain.md").read_text()
    names = [spelling for flag in FLAGS for spelling in (flag.name, *flag.aliases)]
    for name in [*names, *IGNORED]:
        assert f"`{name}`" in page, name
    assert len({flag.name for flag in FLAGS}) == len(FLAGS) == sum(map(len, GROUPS.values()))
    assert "--universal-checkpoint" in make_parser().format_help()
