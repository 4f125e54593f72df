"""What a checkpoint says before the model is built, loading into the engine, saving, and random states."""

import argparse
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines import agree
from megatron_ucp.errors import ModelMismatchError, NotFoundError, UsageError
from megatron_ucp.formats.deepspeed import NativeCheckpoint
from megatron_ucp.formats.deepspeed_paths import nothing_there
from pretrain.arguments import MODEL_ARGUMENTS
from pretrain.log import say

EMBEDDING = "embedding.word_embeddings.weight"
# Arguments that change which samples follow: allowed, but said.
_DATA_ARGUMENTS = ("seed", "seq_length", "data_path", "split", "mock_data", "tokenizer_model")


@dataclass(frozen=True)
class Saved:
    """What the files of a tag say. `args` are empty for a checkpoint that another program wrote."""

    path: str
    tag: str | None
    mesh: Mesh
    padded_vocab: int
    args: Mapping[str, Any]
    iteration: int
    consumed: int


@dataclass
class Position:
    """How far the run is."""

    iteration: int = 0
    consumed: int = 0


def peek(args: argparse.Namespace) -> Saved | None:
    """The checkpoint that --load names; None where there is none yet. Reads no tensor. Collective: every rank gets rank 0's."""
    with agree.together():
        found = _peek(args) if agree.world()[0] == 0 else None
    return agree.gather(found)[0]


def _peek(args: argparse.Namespace) -> Saved | None:
    if args.load is None:
        return None
    tag = args.load_tag if args.ckpt_step is None else f"global_step{args.ckpt_step}"
    if tag is None and nothing_there(args.load):
        if args.exit_on_missing_checkpoint:
            raise NotFoundError("--load names no checkpoint", file=args.load, expected="a file `latest`", found="nothing",
                                fix="check the path, or leave --exit-on-missing-checkpoint out to start afresh")
        return None
    # The manifest knows whole shapes; a checkpoint that stock DeepSpeed wrote at tp > 1 is refused here by name.
    with NativeCheckpoint(args.load, tag, positions_too=True) as checkpoint:
        manifest, meta = checkpoint.manifest, checkpoint.meta
        spec = manifest.by_name.get(EMBEDDING)
        if spec is None:
            raise ModelMismatchError("the checkpoint is not of a model that this program builds", file=checkpoint.folder,
                                     parameter=EMBEDDING,
                                     expected="megatron-core's GPTModel", found="no such parameter")
        return Saved(str(checkpoint.folder), tag, manifest.mesh, spec.extent.stored if spec.extent else spec.shape[0],
                     dict(meta.get("args") or {}), int(meta.get("iteration") or meta.get("global_steps") or 0),
                     int(meta.get("consumed_train_samples") or meta.get("global_samples") or 0))


def check_saved(saved: Saved, args: argparse.Namespace) -> None:
    """Raises UsageError for flags that contradict the checkpoint."""
    here = (args.tensor_model_parallel_size, args.data_parallel_size, args.zero_stage)
    if not args.universal_checkpoint and (saved.mesh.tp, saved.mesh.dp, saved.mesh.zero) != here:
        raise UsageError("the checkpoint was written on another mesh", file=saved.path, expected=str(saved.mesh),
                         found="tp={},dp={},zero={}".format(*here), fix="--universal-checkpoint loads it on this one")
    wrong = {name: (saved.args[name], getattr(args, name)) for name in MODEL_ARGUMENTS
             if saved.args.get(name) is not None and saved.args[name] != getattr(args, name)}
    if wrong:
        raise UsageError("flags contradict the checkpoint: " + ", ".join(f"--{name.replace('_', '-')}" for name in wrong),
                         file=saved.path,
                         expected=", ".join(f"{name}={old}" for name, (old, _) in wrong.items()),
                         found=", ".join(f"{name}={new}" for name, (_, new) in wrong.items()),
                         fix="give the model's flags as they were, or --use-checkpoint-args")


def padded_vocab(vocab: int, args: argparse.Namespace, saved: Saved | None) -> int:
    """Rows of the embedding: the checkpoint's, else rounded up as Megatron does. Padding rows are trained like others, so a
    size that changed at resume would not be exact."""
    tp = args.tensor_model_parallel_size
    if saved is None:
        multiple = args.make_vocab_size_divisible_by * tp
        return math.ceil(vocab / multiple) * multiple
    stored = saved.padded_vocab
    if stored % tp:
        works = [size for size in range(1, min(stored, 64) + 1) if not stored % size]
        raise UsageError("--tensor-model-parallel-size does not divide the checkpoint's padded vocabulary", file=saved.path,
                         expected=f"a divisor of {stored}", found=tp, fix=f"use {', '.join(map(str, works))}")
    if stored < vocab:
        raise UsageError("the tokenizer has more ids than the checkpoint's padded vocabulary", file=saved.path,
                         expected=f"at most {stored}", found=vocab, fix="use the tokenizer of the first run")
    return stored


def load(engine: Any, saved: Saved, args: argparse.Namespace) -> Position:
    """Fills the engine; returns where to go on. Collective. Raises a UcpError on every rank."""
    weights_only = args.finetune
    keep = not (args.finetune or args.no_load_optim)
    report = ucp.load(engine, saved.path, load_module_only=weights_only, load_optimizer_states=keep, load_lr_scheduler_states=keep,
                      family=args.model_family)
    say(f"loaded {saved.path} ({report.source}) into {report.target} in {report.seconds:.2f} s")
    for note in report.notes:
        say(f"  {note}")
    if weights_only:
        return Position()
    for name in _DATA_ARGUMENTS:
        if name in saved.args and saved.args[name] != getattr(args, name):
            say(f"  --{name.replace('_', '-')} was {saved.args[name]}, is {getattr(args, name)}: other samples follow")
    position = Position(saved.iteration, saved.consumed)
    if not args.no_load_rng:
        restore_random(Path(saved.path), saved.mesh, args, position)
    return position


def save(engine: Any, args: argparse.Namespace, position: Position) -> None:
    """One tag, whole when `latest` names it. Collective."""
    tag = f"global_step{position.iteration}"
    if not args.no_save_rng:
        write_random(Path(args.save) / tag)
    plain = {name: value for name, value in vars(args).items() if name != "ds_config"}
    engine.save_checkpoint(args.save, tag=tag, client_state={
        "iteration": position.iteration, "consumed_train_samples": position.consumed, "args": plain, "checkpoint_version": 3.0})
    say(f"saved {Path(args.save) / tag} at iteration {position.iteration}")


# ---------------------------------------------------------------- random states

def write_random(folder: Path) -> None:
    """This rank's generators, as `ucp_rng_RANK.safetensors`; before the save, so that `latest` never names a tag without."""
    from safetensors.torch import save_file
    with agree.together():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / f".ucp_rng_{dist.get_rank():05d}"
        save_file(_random_states(), temporary)
        temporary.replace(_random_file(folder))


def _random_file(folder: Path) -> Path:
    return folder / f"ucp_rng_{dist.get_rank():05d}.safetensors"


def _tracker() -> Any:
    """megatron-core's generators for tensor-parallel regions."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    return get_cuda_rng_tracker()


def _random_states() -> dict[str, torch.Tensor]:
    _, keys, place, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    states = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.array(keys, dtype=np.int64)),
              "numpy_place": torch.tensor([place, has_gauss]), "numpy_gauss": torch.tensor([gauss], dtype=torch.float64),
              "python": torch.tensor([version, *internal]), "python_gauss": torch.tensor([gauss_next or math.nan],
                                                                                         dtype=torch.float64)}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    for name, state in _tracker().get_states().items():
        states[f"tracker.{name}"] = state if isinstance(state, torch.Tensor) else state.get_state()
    return {name: state.cpu().contiguous().clone() for name, state in states.items()}


def restore_random(folder: Path, mesh: Mesh, args: argparse.Namespace, position: Position) -> None:
    """On the same mesh the saved states; else states derived from seed, iteration and tensor-parallel rank. Collective."""
    from safetensors.torch import load_file
    same = (mesh.tp, mesh.dp) == (args.tensor_model_parallel_size, args.data_parallel_size)
    if not (same and all(agree.gather(_random_file(folder).is_file()))):
        seed_random(args.seed + position.iteration)
        if args.hidden_dropout or args.attention_dropout:
            say("  random states were derived from seed, iteration and rank: they were saved on another mesh, or not at all")
        return
    with agree.together():
        states = load_file(_random_file(folder))
        torch.set_rng_state(states["torch"])
        place, has_gauss = states["numpy_place"].tolist()
        np.random.set_state(("MT19937", states["numpy"].numpy().astype(np.uint32), place, has_gauss, states["numpy_gauss"].item()))
        version, *internal = states["python"].tolist()
        gauss_next = states["python_gauss"].item()
        random.setstate((version, tuple(internal), None if math.isnan(gauss_next) else gauss_next))
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])
        tracked = {name.removeprefix("tracker."): state for name, state in states.items() if name.startswith("tracker.")}
        tracker = _tracker()
        if set(tracked) == set(tracker.get_states()):
            tracker.set_states(tracked)


def seed_random(seed: int) -> None:
    """All generators of this rank. Data-parallel ranks share a seed, as in Megatron; tensor-parallel regions differ by rank."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
