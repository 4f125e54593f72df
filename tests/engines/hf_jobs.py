"""What the ranks do with Hugging Face folders: engines of megatron-core's models load them, and
save what is exported."""

import os
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.core import plan as planning
from megatron_ucp.reshard.kept_moves import Holdings
from pretrain.mcore import models
from tests.engines import tensor_jobs
from tests.engines.canonical import canonical, differences
from tests.engines.hf_twin import wide
from tests.engines.kinds import oracle_of
from tests.engines.masters import runs_of
from tests.engines.model import engine_around
from tests.engines.tensor_jobs import Staged, close


def load(
    setup: Staged, folder: str, oracle: str, tag: str = "filled", trained: int = 0, **options: Any
) -> dict[str, Any]:
    """Loads a folder into an engine that may have `trained` before, and compares the masters with
    those of the run that was exported; then trains a step."""
    want = oracle_of(oracle)["states"][tag]["full"]
    engine = tensor_jobs.make(setup)
    tensor_jobs.train(engine, trained)
    found: dict[str, Any] = {"error": "", "notes": ()}
    before = canonical(engine)
    try:
        report = ucp.load(engine, folder, **options)
    except ucp.UcpError as error:
        unchanged = differences(before, canonical(engine)) == []
        close(engine)
        return {"error": f"{type(error).__name__}: {error}", "unchanged": unchanged}
    have = canonical(engine)["full"]
    masters = {key: value for key, value in want.items() if key[1] == "fp32"}
    found["masters"] = [
        f"{key}" for key, value in masters.items() if not torch.equal(have[key], value)
    ]
    found["compared"] = len(masters)
    found["states"] = sorted({state for _, state in have})
    found["notes"], found["read_bytes"] = report.notes, report.read_bytes
    found["loss"] = tensor_jobs.train(engine, 1)[0]
    close(engine)
    return found


# ------------------------------------------------ logits


@torch.no_grad()
def randomise(model: Any) -> None:
    """Weights that hide nothing: large, norms that are not 1, biases that are not 0."""
    dice = torch.Generator().manual_seed(5)
    for name, param in sorted(model.named_parameters()):
        drawn = torch.randn(param.shape, generator=dice)
        if param.dim() == 1:
            param.copy_(1 + 0.2 * drawn if name.endswith("norm.weight") else 0.2 * drawn)
        else:
            param.copy_(drawn * (1.0 if "router" in name else 0.15))


def engine_of(config: models.ModelConfig) -> Any:
    """An attached engine around a model, in fp32 on one rank."""

    models.start(1, seed=7)
    model = models.build(config)
    randomise(model)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(models.param_groups(model, 1e-3, 0.1))
    made = engine_around(model, optimizer, settings, mpu=models.mpu())
    return ucp.attach(made, family=config.family)


@torch.no_grad()
def logits_of(engine: Any, tokens: torch.Tensor, dtype: str) -> torch.Tensor:
    """Of the engine's model as it is: [batch, sequence, true vocabulary]."""
    model: Any = engine.module.to(getattr(torch, dtype)).eval()
    model.config.moe_router_dtype = "fp64" if dtype == "float64" else "fp32"
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    with mock.patch("torch.softmax", wide(torch.softmax)):
        found = model(tokens, positions, models.not_attended(length, tokens.device))
    return found[..., : model.ucp_true_vocab].clone()


@torch.no_grad()
def greedy(engine: Any, prompt: torch.Tensor, more: int) -> torch.Tensor:
    """The most likely token after each prompt, again and again."""
    tokens = prompt
    for _ in range(more):
        last = logits_of(engine, tokens, "float64")[:, -1]
        tokens = torch.cat([tokens, last.argmax(-1, keepdim=True)], 1)
    return tokens[:, prompt.shape[1] :]


def save_and_compute(
    configs: list[models.ModelConfig], folder: str, tokens: torch.Tensor, more: int
) -> list[dict[str, torch.Tensor]]:
    """Saves each model, and what it computes."""
    out: list[dict[str, torch.Tensor]] = []
    for number, config in enumerate(configs):
        engine = engine_of(config)
        engine.save_checkpoint(f"{folder}/{number}", tag="tag")
        found = {dtype: logits_of(engine, tokens, dtype) for dtype in ("float32", "float64")}
        out.append({**found, "greedy": greedy(engine, tokens[:, :4], more)})
        close(engine)
    return out


def load_and_compute(
    configs: list[models.ModelConfig], folders: list[str], tokens: torch.Tensor
) -> list[torch.Tensor]:
    """Loads Hugging Face folders into models of megatron-core."""
    out: list[torch.Tensor] = []
    for config, folder in zip(configs, folders, strict=True):
        engine = engine_of(config)
        ucp.load(engine, folder)
        out.append(logits_of(engine, tokens, "float64"))
        close(engine)
    return out


# ------------------------------------------------ models of transformers


def plain_engine(zero: int, seed: int, dtype: str = "bf16") -> Any:
    """transformers' Llama, with a buffer of its own, under DeepSpeed."""

    from tests.engines.trainer_jobs import ds_config, make_model

    model = make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = ds_config(zero, **({dtype: {"enabled": True}} if dtype != "fp32" else {}))
    config["zero_force_ds_cpu_optimizer"] = False
    made = engine_around(model, optimizer, config, rate=lambda step: 1.0)
    return ucp.attach(made)


def plain_save(zero: int, folder: str, dtype: str = "bf16") -> None:
    """Trains and saves; beside it what stock's script gets out, and what the model computes."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from tests.engines.trainer_jobs import make_data

    engine = plain_engine(zero, 1, dtype)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        rows = torch.stack([row["input_ids"] for row in make_data()[4 * step : 4 * step + 4]])
        mine = rows.chunk(world)[rank]
        engine.backward(engine(input_ids=mine, labels=mine).loss)
        engine.step()
    engine.save_checkpoint(folder, tag="tag")
    if rank == 0:
        engine.module.config.save_pretrained(folder + "/config")
    if rank == 0 and zero:
        stock = get_fp32_state_dict_from_zero_checkpoint(folder, "tag")
        torch.save({name: value.clone() for name, value in stock.items()}, folder + "/stock.pt")
    engine.destroy()


def plain_load(zero: int, folder: str, **settings: Any) -> dict[str, Any]:
    """Loads a folder into an engine of the same model from another seed, whose config says other
    `settings`: masters and the buffer, by the names of the model."""
    engine = plain_engine(zero, 9)
    engine.module.config.update(settings)
    report = ucp.load(engine, folder, allow={"missing"})
    held = canonical(engine)
    engine.destroy()
    return {"full": held["full"], "notes": report.notes}


def live_export(setup: Staged, folder: str, tag: str, out: str) -> dict[str, Any]:
    """Loads a checkpoint, exports from memory, then where one rank's disk is full, then into a
    dtype that can't hold it; what each rank wrote, and what the refusals say."""
    engine = tensor_jobs.make(setup)
    report = engine.ucp.load(folder, tag=tag)
    assert engine.ucp.report() == ucp.report(engine) and engine.ucp.report().load is report
    found: dict[str, Any] = {
        "written": engine.ucp.export_hf(out, max_shard_size=3000).written_bytes
    }
    errors = []
    for options in ({}, {"dtype": "int8"}, {"max_shard_size": "big"}):
        try:
            engine.ucp_export_hf(out, **options)
        except ucp.UcpError as error:
            errors.append(type(error).__name__)
    full = OSError(28, "No space left on device")
    is_last = dist.get_rank() == dist.get_world_size() - 1
    try:
        with mock.patch("os.pwrite", side_effect=full) if is_last else nullcontext():
            engine.ucp_export_hf(out + "_full")
    except ucp.UcpError as error:
        errors.append(f"{type(error).__name__}: {error}")
    for _, _, _, master, offset, _ in runs_of(engine):
        master.data.view(-1)[offset] = 1e6
    try:
        engine.ucp_export_hf(out + "_narrow", dtype="float16")
    except ucp.UcpError as error:
        errors.append(f"{type(error).__name__}: {error.found}")
    found |= {"errors": errors, "left": sorted(p.name for p in Path(out).parent.iterdir())}
    close(engine)
    return found


def _attempt(engine: Any, out: str) -> str:
    """What an export that fails says on this rank."""
    try:
        engine.ucp_export_hf(out)
    except (ucp.UcpError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Disk:
    """What this process writes, and brings to disk, and when it renames."""

    def __init__(self) -> None:
        self.written, self.synced, self.named = set[str](), dict[str, float](), list[float]()
        self._pwrite, self._fsync, self._rename = os.pwrite, os.fsync, os.rename

    def watched(self) -> ExitStack:
        out = ExitStack()
        for name, own in (("pwrite", self.write), ("fsync", self.sync), ("rename", self.rename)):
            out.enter_context(mock.patch(f"os.{name}", own))
        return out

    def write(self, handle: int, data: Any, place: int) -> int:
        self.written.add(_name_of(handle))
        return self._pwrite(handle, data, place)

    def sync(self, handle: int) -> None:
        self._fsync(handle)
        self.synced[_name_of(handle)] = time.monotonic()

    def rename(self, old: Any, new: Any) -> None:
        self.named.append(time.monotonic())
        self._rename(old, new)


def _name_of(handle: int) -> str:
    return Path(os.readlink(f"/proc/self/fd/{handle}")).name


def live_failures(setup: Staged, out: str) -> dict[str, Any]:
    """Exports where one rank can't read its memory, and where the plan has a hole; what is said,
    and what each rank had written by then. Then a good one: for each rank the files that it wrote,
    those that it brought to disk, and when; and when rank 0 gave the folder its name."""
    engine, disk, found = tensor_jobs.make(setup), Disk(), dict[str, Any]()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    unread = mock.patch.object(Holdings, "values", side_effect=RuntimeError("unreadable"))
    with unread if is_last else nullcontext():
        found["unread"] = _attempt(engine, out)
    hole = mock.patch.object(planning._Planner, "_supply", _without("final_layernorm"))
    with disk.watched(), hole:
        found["hole"] = _attempt(engine, out), sorted(disk.written)
    found["left"] = sorted(p.name for p in Path(out).parent.iterdir())
    disk = Disk()
    with disk.watched():
        found["good"] = _attempt(engine, out)
    close(engine)
    written = sorted(disk.written)
    return {**found, "written": written, "synced": disk.synced, "named": disk.named}


def _without(part: str) -> Any:
    """A planner with a defect: it forgets parameters."""
    supply = planning._Planner._supply

    def lacking(own: Any, slot: Any, state: str, index: int, member: Any, want: Any) -> Any:
        if part not in member.param:
            yield from supply(own, slot, state, index, member, want)

    return lacking


def stock_load(setup: Staged, folder: str, oracle: str) -> dict[str, Any]:
    """Stock DeepSpeed's own load of what was imported, into an engine that knows nothing of the
    package; then a step. Masters are compared with those of the run that was exported in bf16."""
    want = oracle_of(oracle)["states"]["filled"]["full"]
    wanted = {key: value.bfloat16().float() for key, value in want.items() if key[1] == "fp32"}
    engine = tensor_jobs.make(setup, attach=False)

    def others() -> int:
        have = canonical(engine)["full"]
        return sum(not torch.equal(have[key], value) for key, value in wanted.items())

    def groups() -> list[dict[str, Any]]:
        return [{**group, "params": None} for group in engine.optimizer.param_groups]

    found: dict[str, Any] = {"compared": len(wanted), "before": others()}
    own, path = groups(), Path(folder)
    engine.load_checkpoint(
        str(path.parent),
        tag=path.name,
        load_optimizer_states=False,
        load_lr_scheduler_states=False,
    )
    found |= {"after": others(), "same_groups": groups() == own, "steps": engine.global_steps}
    found["loss"] = tensor_jobs.train(engine, 1)[0]
    found["stepped"] = others()
    close(engine)
    return found
