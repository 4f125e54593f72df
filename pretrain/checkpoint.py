"""What a checkpoint says before the model is built, loading into the engine, and saving."""

import argparse
import errno
import math
import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megatron_ucp as ucp
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines.memory import steps_of
from megatron_ucp.errors import ModelMismatchError, NotFoundError, UsageError
from megatron_ucp.families.arguments import with_model
from megatron_ucp.families.family import Sizes
from megatron_ucp.families.mixtral import MixtralSizes
from megatron_ucp.families.settings import PRE_SOFTMAX, Architecture
from megatron_ucp.formats.registry import is_hugging_face
from megatron_ucp.formats.store import Location, is_url, location
from megatron_ucp.formats.tags import find_tag, has_state_files, iteration_name, nothing_there
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Report
from megatron_ucp.reshard.folder import require_plain
from megatron_ucp.reshard.hugging_face.names import read_twin
from megatron_ucp.reshard.look import open_anyhow
from pretrain import elastic, same_data
from pretrain.arguments import MODEL_ARGUMENTS
from pretrain.checks import flag_of
from pretrain.engine import DEEPSPEED, MEGATRON
from pretrain.log import say
from pretrain.mcore import models

EMBEDDING = "word_embeddings.weight"
# Arguments that change which samples follow: allowed, but said.
_DATA_ARGUMENTS = ("seed", "seq_length", "data_path", "split", "mock_data", "tokenizer_model")


# ---- the position of a run in its data


@dataclass
class Position:
    """How far the run is."""

    iteration: int = 0
    consumed: int = 0


def program_of(engine: Any) -> Any:
    """What `ucp.load` and `ucp.save` take: of megatron-core's own stack its handle."""
    return getattr(engine, "handle", engine)


def position_state(position: Position) -> dict[str, Any]:
    """As a checkpoint's client state has it."""
    return {"iteration": position.iteration, "consumed_train_samples": position.consumed}


def keep_position(engine: Any, position: Callable[[], Position]) -> None:
    """In-memory checkpoints hold the position too."""
    steps = steps_of(program_of(engine))
    if steps is not None:
        steps.options = replace(steps.options, client_state=lambda: position_state(position()))


def count(engine: Any, position: Position) -> None:
    """After a step: megatron-core's own stack has the position itself."""
    if (handle := getattr(engine, "handle", None)) is not None:
        handle.iteration, handle.consumed_samples = position.iteration, position.consumed


# ---- what a checkpoint says before the model is built


@dataclass(frozen=True)
class Saved:
    """What the files of a tag say, and which tags were passed over for it. `args` are empty for a
    checkpoint that another program wrote."""

    path: str
    passed_over: tuple[str, ...]
    mesh: Mesh
    padded_vocab: int
    args: Mapping[str, Any]
    iteration: int
    consumed: int
    has_schedule: bool = True  # a scheduler that counts samples: this program's, or Megatron's own
    weights_only: bool = False  # a Hugging Face folder: training begins at its weights


def peek(args: argparse.Namespace) -> Saved | None:
    """The checkpoint that --load names; None where there is none yet. Reads no tensor. Collective:
    every rank gets rank 0's."""
    with agree.together():
        found = _peek(args) if agree.world()[0] == 0 else None
    return agree.gather(found)[0]


def _peek(args: argparse.Namespace) -> Saved | None:
    if args.load is None:
        return None
    tag = _tag_of(args)
    if location(args.load).is_dir() and is_hugging_face(location(args.load)):
        return _weights(args, tag)
    if tag is None and nothing_there(args.load):
        if args.exit_on_missing_checkpoint:
            raise NotFoundError(
                "--load names no checkpoint",
                file=args.load,
                expected="a file `latest`",
                found="nothing",
                fix="check the path, or leave --exit-on-missing-checkpoint out to start afresh",
            )
        return None
    folder, passed_over = _folder(args, tag)
    checkpoint, is_whole = open_anyhow(folder)
    with checkpoint:
        manifest, extras = checkpoint.manifest, checkpoint.extras
        client, counters, schedule = extras.client_state, extras.counters, extras.scheduler
        arguments = arguments_of_run(client.get("args") or {}, with_model(manifest).family)
        if args.use_checkpoint_args and not arguments:
            raise UsageError(
                "--use-checkpoint-args: the checkpoint holds no arguments",
                file=folder,
                found="a checkpoint that stock DeepSpeed wrote",
                fix="give the model's flags",
            )
        return Saved(
            str(checkpoint.folder),
            passed_over,
            manifest.mesh,
            _rows(manifest, is_whole, folder),
            arguments,
            int(client.get("iteration") or counters.get("global_steps") or 0),
            int(client.get("consumed_train_samples") or counters.get("global_samples") or 0),
            isinstance(schedule, dict) and "num_steps" in schedule,
        )


def _rows(manifest: Manifest, is_whole: bool, folder: Location) -> int:
    """Rows of the embedding, of which each tensor-parallel rank has a share where parameters are
    not whole; its name is then one in the file of a stage."""
    specs = [spec for spec in manifest.params if spec.name.endswith(EMBEDDING)]
    if not specs or (is_whole and specs[0].name != f"embedding.{EMBEDDING}"):
        raise ModelMismatchError(
            "the checkpoint is not of a model that this program builds",
            file=folder,
            parameter=f"embedding.{EMBEDDING}",
            expected="megatron-core's GPTModel",
            found="no such parameter",
        )
    if not is_whole:
        return specs[0].shape[0] * manifest.mesh.tp
    return specs[0].extent.stored if specs[0].extent else specs[0].shape[0]


def arguments_of_run(saved: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The arguments of a run; those that Megatron-LM says otherwise as this program does."""
    arguments = dict(saved)
    if "layernorm_epsilon" not in arguments:
        return arguments
    arguments["model_family"] = family or None
    arguments["norm_epsilon"] = arguments["layernorm_epsilon"]
    if not arguments.get("group_query_attention"):
        arguments["num_query_groups"] = arguments.get("num_attention_heads")
    if (
        arguments.get("bias_gelu_fusion")
        and arguments.get("add_bias_linear")
        and not arguments.get("swiglu")
    ):
        arguments["openai_gelu"] = True  # its kernel computes the tanh form, too
    return arguments


def _tag_of(args: argparse.Namespace) -> str | None:
    """The tag that is asked for; that of an iteration is named as Megatron does, where there is
    such a folder."""
    if args.ckpt_step is None:
        return args.load_tag
    megatron = iteration_name(args.ckpt_step)
    return megatron if (location(args.load) / megatron).is_dir() else f"global_step{args.ckpt_step}"


def _weights(args: argparse.Namespace, tag: str | None) -> Saved:
    """A Hugging Face folder, at whose weights training begins. Raises UsageError where a tag of it
    is asked for."""
    folder: str = args.load
    if tag is not None:
        raise UsageError(
            "a Hugging Face folder has no tags",
            file=folder,
            expected="--load alone",
            found=tag,
            fix="leave --ckpt-step or --load-tag out",
        )
    twin, sizes, architecture = read_twin(location(folder))
    arguments = _arguments(twin.family, sizes, architecture)
    if (
        "rotary_base" in arguments
    ):  # no tensor has the longest sequence: a run may have a longer one
        longest = max(arguments.pop("max_position_embeddings"), args.seq_length or 0)
        arguments |= {"max_position_embeddings": longest} if args.use_checkpoint_args else {}
    return Saved(
        folder, (), Mesh(), sizes.vocab, arguments, 0, 0, has_schedule=False, weights_only=True
    )


def _arguments(family: str, sizes: Sizes, architecture: Architecture) -> dict[str, Any]:
    """The flags that make the model of a Hugging Face folder."""
    out: dict[str, Any] = {
        "model_family": family,
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "ffn_hidden_size": sizes.ffn,
        "num_attention_heads": sizes.heads,
        "num_query_groups": sizes.groups,
        "kv_channels": sizes.head_dim,
        "norm_epsilon": architecture.norm_epsilon,
        "untie_embeddings_and_output_weights": not sizes.tied,
        "max_position_embeddings": sizes.positions or architecture.positions,
        "openai_gelu": architecture.activation == "gelu_tanh",
    }
    if sizes.positions:
        return out
    base = architecture.rotary_base
    out |= {
        "rotary_base": int(base) if base == int(base) else base,
        "use_rope_scaling": architecture.rope_factor > 0,
        "rotary_seq_len_interpolation_factor": architecture.interpolation or None,
    }
    if architecture.rope_factor:
        out["rope_scaling_factor"] = architecture.rope_factor
    if isinstance(sizes, MixtralSizes):
        out |= {
            "num_experts": sizes.experts,
            "moe_ffn_hidden_size": sizes.width,
            "moe_router_topk": architecture.topk,
            "moe_layer_freq": sizes.every,
            "moe_router_pre_softmax": architecture.odd.get(PRE_SOFTMAX, False),
        }
    return out


def _folder(args: argparse.Namespace, tag: str | None) -> tuple[Location, tuple[str, ...]]:
    """The tag folder to load, and what was passed over for it: the tag that was asked for, else the
    newest that is whole."""
    load = location(args.load)
    try:
        if tag is None and load.is_dir() and not has_state_files(load):
            found = ucp.newest_whole(args.load)
            return found.folder, found.passed_over
        return find_tag(args.load, tag).folder, ()
    except NotFoundError as error:
        error.what_to_do = "give a --load, --ckpt-step or --load-tag that exists and is whole"
        raise


def check_saved(saved: Saved, args: argparse.Namespace) -> None:
    """Raises UsageError for flags that contradict the checkpoint."""
    _check_data(saved, args)
    # BF16_Optimizer, which a pipeline has at stage 0 too, cuts its states as stage 1 does: the mesh
    # says 1
    before = replace(saved.mesh, zero=saved.args.get("zero_stage", saved.mesh.zero))
    here = elastic.mesh_of(args)
    if not args.universal_checkpoint and (before != here or saved.weights_only):
        raise UsageError(
            "the checkpoint is a Hugging Face folder"
            if saved.weights_only
            else "the checkpoint was written on another mesh",
            file=saved.path,
            expected=str(saved.mesh),
            found=str(here),
            fix="--universal-checkpoint loads it on this one",
        )
    wrong = {
        name: (saved.args[name], getattr(args, name))
        for name in MODEL_ARGUMENTS
        if saved.args.get(name) is not None and saved.args[name] != getattr(args, name)
    }
    if wrong:
        raise UsageError(
            "flags contradict the checkpoint: " + ", ".join(map(flag_of, wrong)),
            file=saved.path,
            expected=", ".join(f"{name}={old}" for name, (old, _) in wrong.items()),
            found=", ".join(f"{name}={new}" for name, (_, new) in wrong.items()),
            fix="give the model's flags as they were, or --use-checkpoint-args",
        )


def _check_data(saved: Saved, args: argparse.Namespace) -> None:
    """Raises UsageError where the position in the checkpoint is one in other data."""
    other = _other_data(saved, args)
    if other and not (args.allow_other_data or args.finetune or saved.weights_only):
        raise UsageError(
            "the checkpoint's position is one in other data: the run would repeat samples, or skip "
            "some",
            file=saved.path,
            expected="the data of the run that saved it",
            found="; ".join(other),
            fix=f"give the data's flags as they were; or {same_data.FLAG}, which goes on at sample "
            f"{saved.consumed} of these data; or --finetune, which begins at the first one",
        )


def _other_data(saved: Saved, args: argparse.Namespace) -> list[str]:
    """What is not the data of the run that saved, where its checkpoint says which they were."""
    return same_data.differences(saved.args.get(same_data.NAME), getattr(args, same_data.NAME))


def padded_vocab(vocab: int, args: argparse.Namespace, saved: Saved | None) -> int:
    """Rows of the embedding: the checkpoint's, else rounded up as Megatron does. Padding rows are
    trained like others, so a size that changed at resume would not be exact: it changes only where
    it must, and with --allow-vocab-resize."""
    tp = args.tensor_model_parallel_size
    if saved is None:
        multiple = args.make_vocab_size_divisible_by * elastic.vocabulary_multiple(args)
        return math.ceil(vocab / multiple) * multiple
    stored = saved.padded_vocab
    if stored < vocab:
        raise UsageError(
            "the tokenizer has more ids than the checkpoint's padded vocabulary",
            file=saved.path,
            expected=f"at most {stored}",
            found=vocab,
            fix="use the tokenizer of the first run",
        )
    if stored % tp and args.allow_vocab_resize:
        return padded_vocab(vocab, args, None)
    if stored % tp:
        works = [
            size for size in range(1, 65) if not (stored % size or args.num_attention_heads % size)
        ]
        raise UsageError(
            "--tensor-model-parallel-size does not divide the checkpoint's padded vocabulary",
            file=saved.path,
            expected=f"a divisor of {stored}",
            found=tp,
            fix=f"use {', '.join(map(str, works))}; or drop rows or add zero rows with "
            "--allow-vocab-resize, which "
            "shifts the loss",
        )
    return stored


def _allowed(args: argparse.Namespace, saved: Saved, tag: str | None) -> set[str]:
    """What a load may do: Megatron's own scheduler fits this program's; what is newer in memory may
    stand for a tag that was not named by the user."""
    takes_schedule = saved.has_schedule and not (args.finetune or args.no_load_optim)
    keeps_steps = args.keep_memory_every is not None
    words = {
        "vocab": args.allow_vocab_resize,
        "scheduler": takes_schedule,
        "memory": tag and keeps_steps,
    }
    return {word for word, is_meant in words.items() if is_meant}


def load(engine: Any, saved: Saved, args: argparse.Namespace) -> tuple[Position, Report]:
    """Fills the engine; returns where to go on, and what was read. Collective. Raises a UcpError on
    every rank."""
    weights_only = args.finetune
    path, tag = _where(saved, args)
    keep = not (args.finetune or args.no_load_optim)
    report = ucp.load(
        program_of(engine),
        path,
        tag,
        load_module_only=weights_only,
        load_optimizer_states=keep,
        load_lr_scheduler_states=keep and (saved.has_schedule or args.engine == MEGATRON),
        family=args.model_family,
        rng=not args.no_load_rng,
        allow=_allowed(args, saved, tag),
    )
    for line in saved.passed_over:
        say(f"  passed over {line}")
    if saved.weights_only:
        return Position(), report
    if not keep:
        say("  neither optimizer states nor schedule were loaded, as asked")
    if weights_only:
        return Position(), report
    _say_other_data(saved, args)
    position = _position(report, saved)
    if not saved.args:
        say(
            f"  the checkpoint is of another program: iteration {position.iteration} and "
            f"{position.consumed} consumed samples are "
            "its own counts"
        )
    if keep and not saved.has_schedule and args.engine == DEEPSPEED:
        engine.lr_scheduler.step(position.consumed)
        say(
            "  the checkpoint holds no schedule that counts samples: the flags' schedule goes on "
            "from the consumed samples"
        )
    return position, report


def _where(saved: Saved, args: argparse.Namespace) -> tuple[str, str | None]:
    """The path of the tag; or the folder of it, in whose memory a newer step may be, and the name
    of the tag where it is not the newest."""
    is_named = args.keep_memory_every is None or args.finetune or _tag_of(args) is not None
    if is_named or os.path.realpath(args.load) != os.path.realpath(args.save):
        return saved.path, None
    return args.load, Path(saved.path).name if saved.passed_over else None


def _position(report: Report, saved: Saved) -> Position:
    """Where what was loaded was: it says that itself, where this program saved it."""
    state = report.client_state
    if {"iteration", "consumed_train_samples"} <= state.keys():
        return Position(int(state["iteration"]), int(state["consumed_train_samples"]))
    return Position(saved.iteration, saved.consumed)


def _say_other_data(saved: Saved, args: argparse.Namespace) -> None:
    for line in _other_data(saved, args):
        say(f"  {line}: the run goes on at sample {saved.consumed} of other data, as allowed")
    known = same_data.NAME in saved.args
    for name in ("seed",) if known else _DATA_ARGUMENTS:
        if name in saved.args and saved.args[name] != getattr(args, name):
            say(
                f"  {flag_of(name)} was {saved.args[name]}, is {getattr(args, name)}: "
                "other samples follow"
            )


def prepare_folder(args: argparse.Namespace) -> None:
    """Makes --save, and looks at --export-hf, so that a folder that can't be written is found
    before the training and not after it. Raises OSError, UsageError."""
    if args.export_hf:
        require_plain(location(args.export_hf))
    if args.save:
        location(args.save).mkdir(parents=True, exist_ok=True)
        if not is_url(args.save) and not os.access(args.save, os.W_OK):
            raise PermissionError(errno.EACCES, "no write permission", args.save)


def save(engine: Any, args: argparse.Namespace, position: Position) -> None:
    """One tag, whole when it is named as the newest. Collective."""
    if args.engine == MEGATRON:
        count(engine, position)
        _save_stack(engine.handle, args, position)
        return
    tag = f"global_step{position.iteration}"
    plain = {name: value for name, value in vars(args).items() if name != "ds_config"}
    engine.save_checkpoint(
        args.save,
        tag=tag,
        client_state={**position_state(position), "args": plain, "checkpoint_version": 3.0},
    )
    _say_saved(args, location(args.save) / tag, position)


def _say_saved(args: argparse.Namespace, path: Any, position: Position) -> None:
    done = "saving" if args.async_save else "saved"
    say(f"{done} {path} at iteration {position.iteration}")


def _save_stack(handle: Any, args: argparse.Namespace, position: Position) -> None:
    flags = {name: value for name, value in vars(args).items() if name != "ds_config"}
    report = ucp.save(
        handle,
        args.save,
        arguments=flags,
        durable=not args.no_durable,
        keep_latest=args.keep_latest,
        rng=not args.no_save_rng,
    )
    _say_saved(args, report.path, position)


def export(engine: Any, args: argparse.Namespace) -> None:
    """The weights as a folder of a Hugging Face model, from the memory of all ranks. Collective."""
    model = args.tokenizer_model
    tokenizer = model if model and Path(model).is_dir() else None
    exporting = engine.handle if args.engine == MEGATRON else engine
    found = exporting.ucp_export_hf(args.export_hf, tokenizer=tokenizer)
    say(f"exported {found.path}: {found.tensors} tensors of {found.dtype}")


def seed_random(seed: int) -> None:
    """All generators of this rank. Data-parallel ranks share a seed, as in Megatron; stages and
    tensor-parallel regions differ."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    seed = models.stage_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
