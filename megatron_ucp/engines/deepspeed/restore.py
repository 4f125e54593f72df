"""What resumes in a DeepSpeed engine besides tensors: scheduler, counters, loss scale, client
state, random states, data position."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines.built import Values
from megatron_ucp.engines.common_extras import CommonExtras
from megatron_ucp.engines.deepspeed.batch import notes_of_batch
from megatron_ucp.engines.deepspeed.extra_state import set_states, states_for
from megatron_ucp.engines.deepspeed.schedulers import check_class
from megatron_ucp.engines.deepspeed.wrappers import Wrapper
from megatron_ucp.errors import StateMismatchError
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.schedules import counted_groups
from megatron_ucp.reshard.engine import How
from megatron_ucp.reshard.match import scheduler_for

# of a loss scale, what some files don't say and a step reads
_MISSED = ("delayed_shift", "cur_hysteresis", "min_scale")
MIDDLE = "mid_accumulation"  # of a manifest: micro-batches since the last step, which are lost


@dataclass(frozen=True)
class DeepSpeedExtras:
    """Values ready to be set in an engine, tensors included; the loss scale where its `wrapper` is
    given. `schedules`: whether the scheduler is asked for. `others` are states of DeepSpeed's own
    helpers, `modules` what modules keep besides tensors; `module_only`: nothing else is set."""

    engine: Any
    wrapper: Wrapper | None
    common: CommonExtras
    schedules: bool
    scheduler: Any
    others: Mapping[str, Any]
    ranks: tuple[int, int]  # data-parallel and model-parallel ones of the checkpoint
    modules: Mapping[str, Any]
    module_only: bool
    notes: tuple[str, ...] = ()

    @property
    def client_state(self) -> Mapping[str, Any]:
        return self.common.client_state

    @classmethod
    def read(
        cls,
        source: Checkpoint,
        wrapper: Wrapper,
        scheduler: bool,
        groups: Sequence[int | None],
        how: How,
        mesh: Mesh,
        place: tuple[int, int],
    ) -> "DeepSpeedExtras":
        """`groups` are the checkpoint's for each group of the engine's stage; `place` is this
        rank's data-parallel rank and pipeline stage. Raises StateMismatchError where the scheduler
        counts other groups than the engine has, or the data position does not fit the loader."""
        values = Values(source, "values" in how.allow)
        engine, ranks = wrapper.engine, source.manifest.mesh
        found, notes = _schedule(source, engine, groups, how, values) if scheduler else (None, [])
        notes += _of_the_position(source, engine, how)
        common = CommonExtras.taken(source, values, how, mesh, place)
        others = source.extras.others.items()
        return cls(
            engine,
            wrapper if how.optimizer else None,
            common,
            scheduler,
            found,
            {key: values.built(value, key) for key, value in others},
            (ranks.partitions, ranks.tp * ranks.pp),
            states_for(engine.module, source, values, how),
            how.module_only,
            (*notes, *values.notes),
        )

    def restore(self) -> list[str]:
        """As DeepSpeed's `_load_checkpoint` does; returns notes."""
        engine, notes = self.engine, list[str]()
        set_states(engine.module, self.modules)
        if self.module_only:
            return notes
        if self.wrapper is not None:
            set_scaler(engine, self.wrapper, self.common.scaler, notes)
        self._restore_scheduler(engine, notes)
        self._restore_helpers(engine)
        counters = self.common.counters
        engine.global_steps = counters.get("global_steps", engine.global_steps)
        samples = engine.global_steps * engine.train_batch_size()
        engine.global_samples = counters.get("global_samples", samples)
        engine.skipped_steps = counters.get("skipped_steps", engine.skipped_steps)
        engine.loaded_checkpoint_dp_world_size, engine.loaded_checkpoint_mp_world_size = self.ranks
        return notes + self.common.go_on()

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
