"""From the command line to one complete, consistent set of arguments; every contradiction is a
UsageError that names flags."""

import argparse
import difflib
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UsageError
from megatron_ucp.families import find_family
from pretrain import elastic, engine, experts
from pretrain.checks import check_divides, check_rows, flag_of
from pretrain.family import USUAL, check_fixed, fixed_by
from pretrain.flags import FLAGS, IGNORED, MODEL, NEUTRAL, Flag

# Arguments that make another model: they come from the checkpoint, or must agree with it.
MODEL_ARGUMENTS = (
    "model_family",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "position_embedding_type",
    "normalization",
    "swiglu",
    "disable_bias_linear",
    "openai_gelu",
    "rotary_base",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor",
    "norm_epsilon",
    "untie_embeddings_and_output_weights",
    "max_position_embeddings",
    "tokenizer_type",
    "vocab_size",
    *experts.MODEL,
)
Given = dict[str, Any]  # attribute -> value, of the flags that were given


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(
            "the command line can't be read",
            found=message,
            fix="pretrain_gpt.py --help lists all flags",
        )


def spellings(*names: str) -> list[str]:
    """Each name, and with dashes for underscores and the other way round: DeepSpeed's tools write
    one, Megatron's the other."""
    both = [
        f"--{name[2:].replace(old, new)}"
        for name in names
        for old, new in (("", ""), ("_", "-"), ("-", "_"))
    ]
    return list(dict.fromkeys([*names, *both]))


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain_gpt.py",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Train megatron-core's GPTModel under DeepSpeed or by megatron-core's own "
        "optimizer; resume on any tensor-parallel size, pipeline, number of ranks and ZeRO stage.",
    )
    for flag in FLAGS:
        _add(parser, flag)
    hidden: dict[str, Any] = {"dest": "_ignored", "help": argparse.SUPPRESS}
    for name, values in IGNORED.items():
        how: Any = {"nargs": values} if values else {"action": "store_true"}
        parser.add_argument(*spellings(name), **hidden, **how)
    for name, allowed in NEUTRAL.items():
        parser.add_argument(*spellings(name), **hidden, choices=allowed)
    return parser


def _add(parser: argparse.ArgumentParser, flag: Flag) -> None:
    names, text = spellings(flag.name, *flag.aliases), flag.text.replace("%", "%%")
    if flag.kind is bool:
        parser.add_argument(
            *names, dest=flag.attribute, action="store_const", const=flag.value, help=text
        )
    else:
        parser.add_argument(
            *names,
            dest=flag.attribute,
            type=flag.kind,
            choices=flag.allowed or None,
            nargs="+" if flag.many else None,
            help=text,
        )


def parse(argv: Sequence[str]) -> Given:
    """The flags that were given. Raises UsageError for one that is not known, with the nearest."""
    parser = make_parser()
    found, unknown = parser.parse_known_args(list(argv))
    if unknown:
        known = [name for flag in FLAGS for name in (flag.name, *flag.aliases)]
        name = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        raise UsageError(
            f"{name} is not a flag of this program",
            found=" ".join(unknown),
            fix=f"the nearest is {near[0]}; --help lists all flags",
        )
    given = vars(found)
    given.pop("_ignored", None)
    return given


def complete(
    given: Given, world: int, saved: Mapping[str, Any] | None = None
) -> argparse.Namespace:
    """All arguments, for a world of that many ranks. `saved` are a checkpoint's, for
    --use-checkpoint-args.

    Raises UsageError. Adds data_parallel_size, gradient_accumulation, ds_config (what
    --deepspeed_config holds) and the lengths of the schedule in samples.
    """
    given = dict(given)
    if saved is not None:
        given |= {name: saved[name] for name in MODEL_ARGUMENTS if saved.get(name) is not None}
    given["ds_config"] = merge_config(given)
    values = {flag.attribute: flag.default for flag in reversed(FLAGS)}
    family = find_family(given.get("model_family", USUAL))
    args = argparse.Namespace(**{**values, **family.defaults, **fixed_by(family), **given})
    _model(args, given)
    experts.check_experts(args, given)
    _choices(args)
    if args.elastic:
        elastic.choose_mesh(args, world)
    _mesh_and_batch(args, world)
    _lengths(args)
    return args


def complete_each(
    given: Given, saved: Mapping[str, Any] | None = None
) -> Iterator[argparse.Namespace]:
    """All arguments on each of --elastic-meshes. Raises UsageError for the first one that can't be:
    a run that starts on another one shall not come to it in the night."""
    for mesh in elastic.mesh_names(given.get("elastic_meshes")):
        try:
            yield complete(given | {"elastic_meshes": mesh}, Mesh.parse(mesh).world, saved)
        except UsageError as error:
            error.problem += f" (on {mesh} of --elastic-meshes)"
            raise


def _require(args: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(args, name) is None:
            raise UsageError(f"{flag_of(name)} is required", found="nothing")
    for flag in FLAGS:
        value = getattr(args, flag.attribute)
        least = (
            0
            if flag.name in ("--eval-iters", "--lr-warmup-iters", "--lr-warmup-samples", "--seed")
            else 1
        )
        if flag.kind is int and not flag.choices and value is not None and value < least:
            raise UsageError(f"{flag.name} is too small", expected=f"at least {least}", found=value)


def _model(args: argparse.Namespace, given: Given) -> None:
    _require(
        args,
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "seq_length",
        "micro_batch_size",
        "lr",
    )
    args.normalization = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}.get(
        args.normalization, args.normalization
    )
    check_fixed(args, {flag.attribute: flag.name for flag in reversed(MODEL)})
    if args.group_query_attention and args.num_query_groups is None:
        raise UsageError(
            "--group-query-attention does not say how many groups",
            expected="--num-query-groups",
            found="nothing",
        )
    args.num_query_groups = args.num_query_groups or args.num_attention_heads
    heads = args.num_attention_heads
    check_divides(args, "num_query_groups", heads, "--num-attention-heads")
    if args.kv_channels is None:
        fix = "change one of them, or give --kv-channels"
        check_divides(args, "num_attention_heads", args.hidden_size, "--hidden-size", fix)
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.ffn_hidden_size is None:  # Megatron's own defaults
        args.ffn_hidden_size = (
            args.hidden_size * 8 // 3 // 64 * 64 if args.swiglu else 4 * args.hidden_size
        )
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.max_position_embeddings < args.seq_length:
        raise UsageError(
            "--max-position-embeddings is smaller than --seq-length",
            found=args.max_position_embeddings,
            expected=f"at least {args.seq_length}",
        )


def _choices(args: argparse.Namespace) -> None:
    """Flags that exclude or need each other."""
    args.tokenizer_type = (
        "HuggingFaceTokenizer" if args.tokenizer_type == "HFTokenizer" else args.tokenizer_type
    )
    check_rows(args)
    if not args.mock_data and not args.data_path:
        raise UsageError(
            "there is no data to train on", expected="--data-path or --mock-data", found="neither"
        )
    if args.tokenizer_type == "HuggingFaceTokenizer" and not args.tokenizer_model:
        raise UsageError(
            "--tokenizer-type HuggingFaceTokenizer needs a folder",
            expected="--tokenizer-model DIR",
            found="nothing",
        )
    if args.vocab_size is not None and args.tokenizer_type != "NullTokenizer":
        raise UsageError(
            "--vocab-size contradicts the tokenizer, which has its own",
            expected="--tokenizer-type NullTokenizer",
            found=f"--tokenizer-type {args.tokenizer_type}",
            fix="leave --vocab-size out",
        )
    if not 0 <= args.elastic_batch_tolerance < 1:
        raise UsageError(
            "--elastic-batch-tolerance is no share of the global batch",
            expected="at least 0, below 1",
            found=args.elastic_batch_tolerance,
        )
    if args.tensorboard_dir and importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "--tensorboard-dir needs the package tensorboard",
            expected="tensorboard",
            found="not installed",
            fix="pip install tensorboard, or leave --tensorboard-dir out",
        )


def _mesh_and_batch(args: argparse.Namespace, world: int) -> None:
    args.world_size = world
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    check_divides(args, "tensor_model_parallel_size", world, "the number of ranks")
    if world // tp % pp:
        raise UsageError(
            "--pipeline-model-parallel-size does not divide the number of ranks",
            found=pp,
            expected=f"a divisor of {world // tp}: {world} ranks, --tensor-model-parallel-size "
            f"{tp}",
        )
    experts.check_expert_mesh(args)
    if args.sequence_parallel and args.seq_length % tp:
        raise UsageError(
            "--sequence-parallel cuts --seq-length by --tensor-model-parallel-size",
            expected=f"a multiple of {tp}",
            found=args.seq_length,
        )
    sp = args.ds_sequence_parallel_size
    args.data_parallel_size = world // tp // pp // max(sp, 1)
    engine.check_engine(args)
    engine.check_sequences(args)
    experts.check_expert_zero(args)
    if pp > 1 and args.engine == engine.DEEPSPEED:
        _pipeline(args)
    args.clip_grad = 1.0 if args.clip_grad is None else args.clip_grad
    _batch(args)


def _batch(args: argparse.Namespace) -> None:
    """The global batch, and how many micro batches a rank makes of its share."""
    once = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = once
    args.stated_batch_size = args.global_batch_size
    if args.elastic:
        elastic.fit_batch(args)
        once = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size % once:
        raise UsageError(
            "--global-batch-size is not a multiple of --micro-batch-size x data-parallel size",
            expected=f"a multiple of {args.micro_batch_size} x {args.data_parallel_size}",
            found=args.global_batch_size,
        )
    args.gradient_accumulation = args.global_batch_size // once
    engine.check_interleaved(args)
    configured = args.ds_config.pop("gradient_accumulation_steps", args.gradient_accumulation)
    if configured != args.gradient_accumulation:
        raise UsageError(
            "gradient_accumulation_steps of the DeepSpeed config contradicts the batch sizes",
            file=args.deepspeed_config,
            expected=args.gradient_accumulation,
            found=configured,
            fix="leave it out: the batch sizes and dp give it",
        )


def _pipeline(args: argparse.Namespace) -> None:
    """What DeepSpeed's pipeline takes."""
    if args.zero_stage > 1:
        raise UsageError(
            f"--zero-stage {args.zero_stage} does not go with --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}",
            expected="--zero-stage 0 or 1",
            found=args.zero_stage,
            fix="use --zero-stage 1: DeepSpeed's pipeline takes no higher one",
        )
    if args.fp16 and args.zero_stage == 0:
        raise UsageError(
            "--fp16 in a pipeline needs --zero-stage 1: stages with different numbers of parameter "
            "groups would wait "
            "for each other",
            expected="--zero-stage 1",
            found=0,
        )
    if args.no_pipeline_parallel:
        raise UsageError(
            "the number of pipeline stages is given once",
            expected="one flag",
            found="--no-pipeline-parallel and --pipeline-model-parallel-size "
            f"{args.pipeline_model_parallel_size}",
        )
    from pretrain.mcore.pipeline import (
        stage_method,  # here, as it imports torch: --help is quick
    )

    layers = args.num_layers + 3
    if args.pipeline_model_parallel_size > layers:
        raise UsageError(
            "--pipeline-model-parallel-size is more than there are layers",
            found=args.pipeline_model_parallel_size,
            expected=f"at most {layers}: --num-layers {args.num_layers}, embedding, final norm and "
            "head",
        )
    stage_method(args.pipeline_partition_method, layers, args.pipeline_model_parallel_size)


def _lengths(args: argparse.Namespace) -> None:
    """Train, decay and warm-up lengths, in samples."""
    batch = args.stated_batch_size  # a batch that elasticity changed moves no length
    if args.train_tokens is not None:
        args.train_samples = args.train_tokens // args.seq_length
    if args.train_iters is None and args.train_samples is None:
        raise UsageError(
            "the length of the run is not given",
            expected="--train-iters, --train-samples or --train-tokens",
            found="none",
        )
    args.train_iters = args.train_iters or args.train_samples // batch
    if args.elastic:
        args.train_samples = args.train_samples or args.train_iters * batch
    args.lr_decay_steps = (
        _samples(args, "lr_decay", batch) or args.train_samples or args.train_iters * batch
    )
    warmup = _samples(args, "lr_warmup", batch)
    if warmup is None:
        warmup = int((args.lr_warmup_fraction or 0.0) * args.lr_decay_steps)
    args.lr_warmup_steps = warmup
    args.lr_wsd_decay_steps = _samples(args, "lr_wsd_decay", batch)
    _check_schedule(args)


def _check_schedule(args: argparse.Namespace) -> None:
    """Raises UsageError for rates and lengths that are no schedule."""
    if not 0.0 <= args.min_lr <= args.lr or args.lr_warmup_init > args.lr:
        raise UsageError(
            "--lr is the largest of the three rates",
            expected="0 <= --min-lr, --lr-warmup-init <= --lr",
            found=f"--lr {args.lr}, --min-lr {args.min_lr}, --lr-warmup-init {args.lr_warmup_init}",
        )
    if not 0 <= args.lr_warmup_steps < args.lr_decay_steps:
        raise UsageError(
            "the warm-up is longer than the schedule",
            expected=f"fewer than {args.lr_decay_steps} samples",
            found=args.lr_warmup_steps,
            fix="shorten --lr-warmup-*, or lengthen --lr-decay-* or --train-*",
        )
    is_wsd = args.lr_decay_style == "WSD"
    if is_wsd and not 0 < (args.lr_wsd_decay_steps or 0) <= args.lr_decay_steps:
        raise UsageError(
            "--lr-decay-style WSD needs the length of its decay",
            found=args.lr_wsd_decay_steps,
            expected=f"1 to {args.lr_decay_steps} samples",
            fix="give --lr-wsd-decay-iters or --lr-wsd-decay-samples",
        )


def _samples(args: argparse.Namespace, name: str, batch: int) -> int | None:
    iterations, samples = getattr(args, f"{name}_iters"), getattr(args, f"{name}_samples")
    return samples if iterations is None else iterations * batch


# ---- the DeepSpeed config of --deepspeed_config: what it and flags both say must be the same

# keys of the config, and the flags that say the same; `stage` is in the section of ZeRO
SAME = {
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "train_batch_size": "global_batch_size",
    "gradient_clipping": "clip_grad",
    "stage": "zero_stage",
}
OURS = {
    "optimizer": "the optimizer is AdamW, with --lr, --weight-decay and --adam-*",
    "scheduler": "the schedule is made by --lr-*",
}


def merge_config(given: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed config without what flags say too: that goes into `given`, the values of flags
    by attribute. Raises UsageError where the two differ."""
    path = given.get("deepspeed_config")
    if path is None:
        return {}
    config = _read_config(path)
    zero = config.setdefault("zero_optimization", {})
    for key, name in SAME.items():
        value = (zero if key == "stage" else config).pop(key, "auto")
        if value != "auto" and given.setdefault(name, value) != value:
            raise UsageError(
                f"{flag_of(name)} contradicts the DeepSpeed config",
                file=path,
                expected=f"{key}: {value}",
                found=given[name],
                fix="leave one of them out",
            )
    _merge_dtypes(config, given, path)
    # compared once the number of ranks is known
    if config.get("gradient_accumulation_steps") == "auto":
        del config["gradient_accumulation_steps"]
    return config


def _read_config(path: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            "--deepspeed_config is no JSON file",
            file=path,
            found=f"{type(error).__name__}: {error}",
        ) from None
    if not isinstance(config, dict):
        raise UsageError(
            "--deepspeed_config holds no section",
            file=path,
            expected="{...}",
            found=type(config).__name__,
        )
    for section, why in OURS.items():
        if section in config:
            raise UsageError(
                f'"{section}" of the DeepSpeed config contradicts the flags',
                file=path,
                expected="no such section",
                found=section,
                fix=why,
            )
    return config


def _merge_dtypes(config: dict[str, Any], given: dict[str, Any], path: str) -> None:
    for name in ("bf16", "fp16"):
        enabled = config.get(name, {}).pop("enabled", "auto")
        if enabled is True:
            given[name] = True
        elif enabled is False and given.get(name):
            raise UsageError(
                f"--{name} contradicts the DeepSpeed config",
                file=path,
                expected=f"{name}: enabled",
                found="false",
            )
