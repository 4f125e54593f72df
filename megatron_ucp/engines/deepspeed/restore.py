"""What resumes besides tensors: scheduler, counters, loss scale, client state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ucp.engines.deepspeed.live import is_pipeline
from megatron_ucp.errors import DamagedFileError, StateMismatchError
from megatron_ucp.formats.deepspeed.native import OWN_KEYS, PER_GROUP
from megatron_ucp.formats.pt.unpickler import ITEMSIZE, TensorRef, with_tensors
from megatron_ucp.formats.registry import Checkpoint
from megatron_ucp.reshard.execute import TORCH_DTYPES, bytes_of


@dataclass(frozen=True)
class Extras:
    """Values of the model file, tensors included, ready to be set."""

    scheduler: Any
    counters: Mapping[str, Any]
    random_ltd: Any
    data_sampler: Any
    client_state: Mapping[str, Any]

    @classmethod
    def read(
        cls, source: Checkpoint, engine: Any, scheduler: bool, groups: Sequence[int | None]
    ) -> "Extras":
        """`groups` are the checkpoint's for each group of the engine. Raises StateMismatchError
        where the scheduler counts other groups than the engine has."""
        meta = source.meta
        _check(meta, str(source.folder / source.model_name))
        found = _tensors(source, meta.get("lr_scheduler")) if scheduler else None
        if source.pipeline or is_pipeline(engine):
            found = _of_groups(source, found, groups)
        count = len(getattr(engine.optimizer, "param_groups", None) or [])
        rates = (found or {}).get("base_lrs")
        if engine.lr_scheduler is not None and isinstance(rates, list) and len(rates) != count:
            raise StateMismatchError(
                "the scheduler of the checkpoint counts another number of groups",
                file=source.folder / source.model_name,
                expected=count,
                found=len(rates),
                fix="build the optimizer's groups as the run did, or load with "
                "load_lr_scheduler_states=False",
            )
        return cls(
            found,
            {
                key: meta[key]
                for key in (
                    "global_steps",
                    "global_samples",
                    "skipped_steps",
                    "dp_world_size",
                    "mp_world_size",
                )
                if meta.get(key) is not None
            },
            _tensors(source, meta.get("random_ltd")),
            _tensors(source, meta.get("data_sampler")),
            {key: _tensors(source, value) for key, value in meta.items() if key not in OWN_KEYS},
        )


def _check(meta: Mapping[str, Any], file: str) -> None:
    """Raises DamagedFileError for counters that are no numbers and a scheduler that is no dict,
    before anything is set."""
    for key in ("global_steps", "global_samples", "skipped_steps"):
        value = meta.get(key)
        if value is not None and (type(value) is not int or not 0 <= value < 2**63):
            raise DamagedFileError(
                f"the model file says no number in {key}",
                file=file,
                expected="a whole number from 0",
                found=type(value).__name__,
            )
    if not isinstance(meta.get("lr_scheduler"), dict | None):
        raise DamagedFileError(
            "the scheduler's state is no dictionary",
            file=file,
            expected="what its state_dict() gave",
            found=type(meta["lr_scheduler"]).__name__,
        )


def _of_groups(source: Checkpoint, found: Any, origins: Sequence[int | None]) -> Any:
    """A scheduler's state for the groups of one stage. Each stage of the checkpoint wrote its own,
    and has its own groups."""
    if not isinstance(found, dict) or None in origins:
        return found
    saved = [
        source.tree(source.model_of(stage * source.tensor_parallel)).get("lr_scheduler") or {}
        for stage in range(source.pipeline_stages)
    ]
    out = dict(found)
    for key in PER_GROUP & found.keys():
        lists: list[list[Any]] = [
            values for state in saved if isinstance(values := state.get(key), list)
        ]
        if [len(values) for values in lists] == [
            len(contents.groups) for contents in source.stages
        ]:
            every = [value for values in lists for value in values]
            out[key] = [every[n] for n in origins if n is not None]
    return out


def _tensors(source: Checkpoint, value: Any) -> Any:
    """The value with every tensor reference read into a tensor of its own."""

    def read(ref: TensorRef) -> torch.Tensor:
        file = source.file(source.model_name)
        size = ITEMSIZE[ref.storage.dtype]
        last = (
            sum((n - 1) * s for n, s in zip(ref.shape, ref.stride, strict=True)) + 1
            if ref.numel
            else 0
        )
        memory = torch.empty(last * size, dtype=torch.uint8)
        if last:
            file.read_into(
                source.use(source.full_path(source.model_name), ref),
                ref.offset_elems * size,
                bytes_of(memory),
            )
        return torch.as_strided(
            memory.view(TORCH_DTYPES[ref.storage.dtype]), ref.shape, ref.stride
        ).clone()

    return with_tensors(value, read, file=str(source.folder / source.model_name))


def restore_extras(engine: Any, extras: Extras, notes: list[str]) -> None:
    """Sets scheduler and counters as DeepSpeed's `_load_checkpoint` does."""
    if engine.lr_scheduler is not None and extras.scheduler is not None:
        engine.lr_scheduler.load_state_dict(extras.scheduler)
    elif engine.lr_scheduler is not None or extras.scheduler is not None:
        notes.append(
            "the scheduler was not restored: "
            + ("the checkpoint has none" if extras.scheduler is None else "the engine has none")
        )
    if (
        extras.random_ltd is not None
        and engine.random_ltd_enabled()
        and engine.random_ltd_scheduler is not None
    ):
        engine.random_ltd_scheduler.load_state_dict(extras.random_ltd)
    if (
        extras.data_sampler is not None
        and engine.training_dataloader is not None
        and engine.curriculum_learning_enabled()
    ):
        engine.training_dataloader.data_sampler.load_state_dict(extras.data_sampler)
    counters = extras.counters
    engine.global_steps = counters.get("global_steps", engine.global_steps)
    engine.global_samples = counters.get(
        "global_samples", engine.global_steps * engine.train_batch_size()
    )
    engine.skipped_steps = counters.get("skipped_steps", engine.skipped_steps)
    engine.loaded_checkpoint_dp_world_size = counters.get("dp_world_size")
    engine.loaded_checkpoint_mp_world_size = counters.get("mp_world_size")


def set_scaler(engine: Any, wrapper: Any, saved: Mapping[str, Any], notes: list[str]) -> None:
    """Carries the loss scale from fp16 to fp16; every other target ignores it."""
    if not engine.fp16_enabled() or not saved:
        return
    scaler, names = wrapper.scaler()
    if bool(saved.get("dynamic")) != bool(getattr(scaler, names.get("dynamic", "dynamic"), False)):
        notes.append(
            "the loss scale was kept from the engine's configuration: one side is dynamic, the "
            "other static"
        )
        return
    for key, value in saved.items():
        name = names.get(key, key)
        if key != "dynamic" and hasattr(scaler, name):
            setattr(scaler, name, value)
        elif key != "dynamic":
            notes.append(f"loss scaler: {key}={value} has no counterpart in this engine")
    for key in ("delayed_shift", "cur_hysteresis", "min_scale"):
        if key not in saved and hasattr(scaler, names.get(key, key)):
            notes.append(f"loss scaler: {key} is not in the checkpoint, the engine's value stays")
