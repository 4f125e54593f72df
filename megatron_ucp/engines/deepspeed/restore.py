"""What resumes in a DeepSpeed engine besides tensors: scheduler, counters, loss scale, client
state, random states, data position."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines.built import Values
from megatron_ucp.engines.deepspeed.batch import notes_of_batch
from megatron_ucp.engines.deepspeed.extra_state import states_for
from megatron_ucp.engines.deepspeed.schedulers import check_class
from megatron_ucp.engines.loader import ResumableLoader, restore_position
from megatron_ucp.engines.random_states import Restored
from megatron_ucp.errors import StateMismatchError
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.schedules import counted_groups
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.load_options import How
from megatron_ucp.reshard.match import scheduler_for

# of a loss scale, what some files don't say and a step reads
_MISSED = ("delayed_shift", "cur_hysteresis", "min_scale")
MIDDLE = "mid_accumulation"  # of a manifest: micro-batches since the last step, which are lost


@dataclass(frozen=True)
class DeepSpeedExtras:
    """Values ready to be set, tensors included. `schedules`: whether the scheduler is asked for.
    `others` are states of DeepSpeed's own helpers,
    `modules` what modules keep besides tensors."""

    schedules: bool
    scheduler: Any
    counters: Mapping[str, int]
    others: Mapping[str, Any]
    client_state: Mapping[str, Any]
    scaler: LossScale
    ranks: tuple[int, int]  # data-parallel and model-parallel ones of the checkpoint
    randoms: Restored
    position: Mapping[str, Any] | None
    loader: ResumableLoader | None
    modules: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        source: Checkpoint,
        engine: Any,
        scheduler: bool,
        groups: Sequence[int | None],
        how: How,
        mesh: Mesh,
        place: tuple[int, int],
    ) -> "DeepSpeedExtras":
        """`groups` are the checkpoint's for each group of the engine's stage; `place` is this
        rank's data-parallel rank and pipeline stage. Raises StateMismatchError where the scheduler
        counts other groups than the engine has, or the data position does not fit the loader."""
        saved, values = source.extras, Values(source, "values" in how.allow)
        apart, own = how.apart, how.own
        client = saved.client_state if own is None else own.over(saved.client_state, apart)
        found, notes = _schedule(source, engine, groups, how, values) if scheduler else (None, [])
        notes += _of_the_position(source, engine, how)
        position = None if how.module_only else saved.data_position
        if how.loader is not None and position is not None:
            how.loader.check(position, str(source.folder))
        rank = agree.world()[0]
        randoms = Restored.plan(source, mesh, rank, place) if how.rng else Restored(None)
        ranks = source.manifest.mesh
        return cls(
            scheduler,
            found,
            saved.counters,
            {key: values.built(value, key) for key, value in saved.others.items()},
            values.built(dict(client), "client_state"),
            saved.scaler,
            (ranks.partitions, ranks.tp * ranks.pp),
            randoms,
            position,
            how.loader,
            states_for(engine.module, source, values, how),
            (*notes, *values.notes),
        )

    def restore(self, engine: Any, wrapper: Any) -> list[str]:
        """Sets everything but the modules' states as DeepSpeed's `_load_checkpoint` does; the loss
        scale where the optimizer's `wrapper` is given. Returns notes."""
        notes: list[str] = []
        if wrapper is not None:
            set_scaler(engine, wrapper, self.scaler, notes)
        self._restore_scheduler(engine, notes)
        self._restore_helpers(engine)
        counters = self.counters
        engine.global_steps = counters.get("global_steps", engine.global_steps)
        samples = engine.global_steps * engine.train_batch_size()
        engine.global_samples = counters.get("global_samples", samples)
        engine.skipped_steps = counters.get("skipped_steps", engine.skipped_steps)
        engine.loaded_checkpoint_dp_world_size, engine.loaded_checkpoint_mp_world_size = self.ranks
        self.randoms.apply()
        if self.randoms.note:
            notes.append(self.randoms.note)
        return notes + restore_position(self.loader, self.position)

    def _restore_scheduler(self, engine: Any, notes: list[str]) -> None:
        if not self.schedules:
            return
        if engine.lr_scheduler is not None and self.scheduler is not None:
            engine.lr_scheduler.load_state_dict(self.scheduler)
        elif engine.lr_scheduler is not None or self.scheduler is not None:
            why = "the checkpoint has none" if self.scheduler is None else "the engine has none"
            notes.append(f"the scheduler was not restored: {why}")

    def _restore_helpers(self, engine: Any) -> None:
        """DeepSpeed's layer dropping and curriculum learning."""
        dropping, sampler = (self.others.get(key) for key in ("random_ltd", "data_sampler"))
        if dropping is not None and engine.random_ltd_enabled():
            if engine.random_ltd_scheduler is not None:
                engine.random_ltd_scheduler.load_state_dict(dropping)
        if sampler is not None and engine.training_dataloader is not None:
            if engine.curriculum_learning_enabled():
                engine.training_dataloader.data_sampler.load_state_dict(sampler)


def _schedule(
    source: Checkpoint, engine: Any, groups: Sequence[int | None], how: How, values: Values
) -> tuple[Any, list[str]]:
    """The scheduler's state as the engine takes it, and notes. Raises StateMismatchError."""
    own = how.own
    apart = own is not None and how.apart.scheduler
    found = own.scheduler if own is not None and apart else source.extras.scheduler
    if found is None:
        return None, []
    here = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    found = scheduler_for(found, groups, len(source.manifest.groups), here)
    notes = check_class(found, engine.lr_scheduler, source, "scheduler" in how.allow)
    _check_scheduler(found, engine, source)
    return values.built(found, "lr_scheduler", here), notes


def _of_the_position(source: Checkpoint, engine: Any, how: How) -> list[str]:
    """Notes where the run does not go on with the next sample."""
    notes: list[str] = []
    if taken := source.manifest.run.get(MIDDLE):
        notes.append(
            f"the save came after {taken} micro-batches of a step: they are not in it, and "
            "their step begins again"
        )
    if how.module_only:
        return notes
    manifest, counters = source.manifest, source.extras.counters
    counts_samples = how.loader is not None and source.extras.data_position is not None
    return notes + notes_of_batch(
        Path(source.folder), manifest.run, counters, engine, manifest.mesh.tp, counts_samples
    )


def _check_scheduler(found: Any, engine: Any, source: Checkpoint) -> None:
    """Raises StateMismatchError where a scheduler, or one in it, counts other groups than the
    engine has."""
    count = len(getattr(engine.optimizer, "param_groups", None) or [])
    counts = (len(rates) for rates in counted_groups(found))
    other = next((number for number in counts if number != count), None)
    if engine.lr_scheduler is not None and other is not None:
        raise StateMismatchError(
            "the scheduler of the checkpoint counts another number of groups",
            file=source.main_file,
            expected=count,
            found=other,
            fix="build the optimizer's groups as the run did, or load with "
            "load_lr_scheduler_states=False",
        )


def set_scaler(engine: Any, wrapper: Any, saved: LossScale, notes: list[str]) -> None:
    """Carries the loss scale from fp16 to fp16; every other target ignores it."""
    if not engine.fp16_enabled() or not saved.said:
        return
    scaler, names = wrapper.scaler()
    if not saved.is_kind(bool(getattr(scaler, names.get("dynamic", "dynamic"), False)), notes):
        return
    for key, value in vars(saved).items():
        name = names.get(key, key)
        has = hasattr(scaler, name)
        if key == "dynamic":
            continue
        if value is None and has and key in _MISSED:
            notes.append(f"loss scaler: {key} is not in the checkpoint, the engine's value stays")
        elif value is not None and has:
            setattr(scaler, name, value)
        elif value is not None:
            notes.append(f"loss scaler: {key}={value} has no counterpart in this engine")
