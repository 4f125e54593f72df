"""What resumes in a DeepSpeed engine besides tensors: scheduler, counters, loss scale, client
state, extra states of modules, random states, data position."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.manifest import RECORDED, RENAMED, RUN
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines.deepspeed.optimizer import (
    Wrapper,
    in_the_middle,
    micro_batches,
    wrapper_of,
)
from megatron_ucp.engines.deepspeed.shard import LocalShard, parallel_of
from megatron_ucp.engines.live import parts_of, recorded_settings
from megatron_ucp.engines.record import run_of
from megatron_ucp.engines.run_state import (
    SEED,
    STEPS,
    CommonState,
    DrawnState,
    RunState,
    changed_settings,
    counts_samples,
)
from megatron_ucp.engines.values import (
    WHAT_TRAVELS,
    LiveValues,
    SavedValue,
    Values,
    inert,
    is_plain,
    members_by_value,
    named_in,
    names_of,
    saved_values,
    strange,
)
from megatron_ucp.errors import (
    ModelMismatchError,
    StateMismatchError,
    UnsupportedError,
    UsageError,
    some_of,
)
from megatron_ucp.families.settings import recorded
from megatron_ucp.formats.checkpoint import Checkpoint, Extras
from megatron_ucp.formats.deepspeed.files import CLASSES, COUNTERS, MEMBERS, OWN_KEYS, PATTERNS
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.param_groups import GROUP_MARKS
from megatron_ucp.formats.schedules import counted_groups, of_all_stages
from megatron_ucp.formats.store import Location, location
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import LoadOptions, Wants
from megatron_ucp.reshard.match import scheduler_for

# ---- extra state
#
# What modules keep besides tensors: torch's `get_extra_state` and `set_extra_state`, entries
# `_extra_state` of a state dict.


_KEY = "_extra_state"
_NATIVE = "keep it in buffers instead, or leave `attach` out: DeepSpeed's own load on the same mesh"


def states_of(module: torch.nn.Module) -> dict[str, Any]:
    """What the modules in a module keep now, by the names of these entries of its state dict; not
    of those that keep nothing, as megatron-core's linear layers."""
    found = {name: held.get_extra_state() for name, held in _keepers(module).items()}
    return {
        name: value
        for name, value in found.items()
        if value is not None and not (isinstance(value, torch.Tensor) and not value.numel())
    }


def check_states(engine: Any) -> None:
    """Raises UnsupportedError where no load could give a module what it keeps back as it is."""
    kept = states_of(engine.module)
    (tp, _), (stages, _) = parallel_of(engine) if kept else ((1, 0), (1, 0))
    if tp * stages > 1:
        raise UnsupportedError(
            "modules keep an extra state (get_extra_state), of which each model-parallel rank has "
            "its own, and nothing says how it is cut",
            parameter=next(iter(kept)),
            expected="one model-parallel rank",
            found=f"{tp} tensor-parallel ranks, {stages} pipeline stages",
            fix=_NATIVE,
        )
    for name, value in kept.items():
        for place, wrong in strange(value, name, live=False):
            raise UnsupportedError(
                "no load could give a module's extra state (get_extra_state) back as it is",
                parameter=name,
                expected=WHAT_TRAVELS,
                found=f"{place}: {wrong}",
                fix=_NATIVE,
            )


def states_for(
    module: torch.nn.Module,
    source: Checkpoint,
    values: Values,
    options: LoadOptions,
) -> dict[str, Any]:
    """What a load gives to the modules in a module. `values` builds them.

    Raises ModelMismatchError where one side has other states, but for what is allowed;
    UnsafePickleError for a value of a class that is not known."""
    held = _keepers(module)
    own = {} if options.own is None else options.own.buffers
    saved = {**source.extras.modules, **{n: v for n, v in own.items() if n in held}}
    if saved and source.manifest.mesh.tp > 1:
        raise UnsupportedError(
            "modules kept an extra state on each tensor-parallel rank, and nothing says how it is "
            "put together",
            file=source.main_file,
            parameter=next(iter(saved)),
            fix=_NATIVE,
        )
    _require_alike(module, source, saved, options)
    found = {name: values.built(value, name) for name, value in saved.items() if name in held}
    nothing = {name: None for name, value in source.extras.stateless.items() if value is None}
    return {**{name: None for name in nothing if name in held}, **found}


def _require_alike(
    module: torch.nn.Module, source: Checkpoint, saved: Mapping[str, Any], options: LoadOptions
) -> None:
    """Raises ModelMismatchError where one side has other states, but for what is allowed."""
    lacking = set(states_of(module)) - {*source.extras.modules, *source.extras.stateless}
    extra = saved.keys() - _keepers(module).keys()
    for names, what, word in (
        (lacking, "the model has an extra state that the checkpoint lacks", "missing"),
        (extra, "the checkpoint holds an extra state that the model lacks", "extra"),
    ):
        if names and word not in options.allow:
            raise ModelMismatchError(
                what,
                file=source.main_file,
                parameter=min(names),
                found=some_of(sorted(names)),
                fix="build the model with the configuration that the checkpoint was trained with, "
                f'or go on without with allow={{"{word}"}}',
            )


def set_states(module: torch.nn.Module, found: Mapping[str, Any]) -> None:
    """Gives them to the modules."""
    held = _keepers(module)
    for name, value in found.items():
        held[name].set_extra_state(value)


def _keepers(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules with methods of their own for it, by the names of their entries."""
    none = torch.nn.Module
    kinds = {
        kind
        for kind in {type(part) for part in parts_of([module])}
        if kind.get_extra_state is not none.get_extra_state
        and kind.set_extra_state is not none.set_extra_state
    }
    if not kinds:  # names are made of none
        return {}
    return {
        f"{name}.{_KEY}" if name else _KEY: held
        for name, held in module.named_modules()
        if type(held) in kinds
    }


# ---- schedulers
#
# Whose state a scheduler's is: DeepSpeed's files don't say it, so a save's manifest does.


CLASS = "scheduler"  # of a manifest's run
_OF_VERSIONS = frozenset({"verbose"})  # some versions of torch keep it, and none needs it


def class_of(scheduler: Any) -> str | None:
    """How a manifest names a scheduler's class; None without one."""
    kind = type(scheduler)
    return None if scheduler is None else f"{kind.__module__}.{kind.__qualname__}"


def check_class(saved: Any, scheduler: Any, source: Checkpoint, allow: bool) -> list[str]:
    """Notes about a state that goes into a scheduler of another class. Raises StateMismatchError
    unless that is allowed.

    Where the manifest names the class, its name decides, as a module may have moved; else, and
    where two modules have a class of that name, what both keep.
    """
    if scheduler is None:
        return []
    said, have = source.manifest.run.get(CLASS), class_of(scheduler)
    named = isinstance(said, str) and bool(said)
    if named and said == have:
        return []
    keys, own = _kept(saved), _kept(scheduler.state_dict())
    same_name = named and str(said).rpartition(".")[2] == str(have).rpartition(".")[2]
    if keys == own and (same_name or not named):
        return []
    wrote = str(said) if named else f"one that keeps {', '.join(sorted(keys)) or 'nothing'}"
    if not allow:
        raise StateMismatchError(
            "the scheduler of the checkpoint is of another class than the engine's",
            file=source.main_file,
            expected=f"{have}, which keeps {', '.join(sorted(own)) or 'nothing'}",
            found=wrote,
            fix="build the scheduler of the run, keep the engine's with "
            'load_lr_scheduler_states=False, or give it this state with allow={"scheduler"}',
        )
    return [f"the state of another scheduler ({wrote}) was given to {have}, as allowed"]


def with_step_alone(
    saved: Any, here: Any, groups: Sequence[int | None], source: Checkpoint
) -> dict[str, Any] | None:
    """The state of an engine's scheduler of torch's (`here`) at the step of a checkpoint, of which
    that is all that was saved, as torchtitan does; None of any other checkpoint."""
    if not isinstance(here, dict) or not isinstance(saved, dict) or {*saved} != {"last_epoch"}:
        return None
    step: object = saved["last_epoch"]
    if type(step) is not int or not {"last_epoch", "base_lrs", "_last_lr"} <= here.keys():
        return None
    known = source.manifest.groups
    rates = [None if n is None else known[n].settings.get("lr") for n in groups]
    kept = here["_last_lr"]
    own: dict[str, Any] = {"last_epoch": step, "_step_count": step + 1}
    if len(rates) == len(kept):
        own["_last_lr"] = [
            old if new is None else new for new, old in zip(rates, kept, strict=True)
        ]
    return {**here, **own}


def _kept(state: Any) -> frozenset[str]:
    """Names of a state without those that torch's base class keeps for itself."""
    names = state if isinstance(state, dict) else ()
    return frozenset(str(name) for name in names if not str(name).startswith("_")) - _OF_VERSIONS


# ---- batch
#
# What a step takes of the data, where that is not what it was: on another number of ranks the
# same settings are another batch.


FILE = "trainer_state.json"  # the Trainer writes it into the folder that holds the tag
BATCH = "train_batch_size"  # of a manifest's run: samples of a step


def batch_of(engine: Any) -> int:
    """Samples of a step. Under AutoTP DeepSpeed counts those that tensor-parallel ranks share once
    for each of them."""
    return int(engine.train_batch_size()) // max(1, int(engine.autotp_size()))


def notes_of_batch(
    folder: Location,
    run: Mapping[str, Any],
    counters: Mapping[str, int],
    engine: Any,
    tp: int,
    counts_samples: bool,
) -> list[str]:
    """Notes where a step has another number of samples than it had, and where a loop that keeps
    its step alone goes on at another sample than the run had come to.

    `folder` is the tag's, `run` and `counters` the checkpoint's, whose files of a run under AutoTP
    count samples `tp` times. `counts_samples`: the data loader's position is kept in samples.
    """
    steps, taken = counters.get("global_steps", 0), counters.get("global_samples")
    if not steps or taken is None:
        return []
    batch = batch_of(engine)
    # nothing below differs by it otherwise, and a store takes a request to say it
    of_trainer = (tp > 1 or steps * batch != int(taken)) and (folder.parent / FILE).is_file()
    taken = int(taken) // (tp if of_trainer else 1)  # the Trainer's tensor parallelism is AutoTP
    is_known = of_trainer or tp == 1  # whether `taken` counts each sample once
    was = run.get(BATCH) or (taken / steps if is_known else batch)
    notes = [] if was == batch else [_changed(was, batch, engine)]
    if steps * batch != taken and of_trainer:
        notes.append(_of_the_trainer(steps, taken, batch))
    elif notes and is_known and steps * batch != taken and not counts_samples:
        notes.append(
            f"the run took {taken:,} samples: a loop that skips as many batches as there were "
            f"steps {_goes_on(steps * batch, taken)}"
        )
    return notes


def _changed(was: float, batch: int, engine: Any) -> str:
    micro = int(engine.train_micro_batch_size_per_gpu())
    accumulated = int(engine.gradient_accumulation_steps())
    ranks = max(1, batch // (micro * accumulated))
    now = f"{batch:,} ({micro} x {accumulated} accumulated x {ranks} data-parallel ranks)"
    product = "per-rank batch x accumulation"
    if was % ranks:
        low = int(was // ranks)
        sizes = f"{low} or {low + 1}" if low else "1"
        keep = f"{was:,g} does not divide by {ranks} ranks: {product} of {sizes} is nearest"
    else:
        keep = f"{product} of {int(was // ranks)} keeps it"
    return (
        f"a step has another batch: {was:,g} samples before, {now} now; the learning rate and the "
        f"schedule, which counts steps, stay the run's. {keep}"
    )


def _of_the_trainer(steps: int, taken: int, batch: int) -> str:
    """The Trainer keeps its step alone, and finds its epoch and the batches to skip by the number
    of steps that an epoch has now (transformers 5, `_init_training_state`)."""
    return (
        f"{FILE}: the run took {taken:,} samples in {steps:,} steps, and a step has {batch:,} now: "
        f"transformers' Trainer counts epochs anew and {_goes_on(steps * batch, taken)} (with "
        "ignore_data_skip it begins the epoch again). Keep per_device_train_batch_size x "
        "gradient_accumulation_steps x ranks"
    )


def _goes_on(found: int, taken: int) -> str:
    does = "repeats" if found < taken else "leaves out"
    return f"goes on after sample {found:,}, which {does} {abs(found - taken):,} samples"


# ---- restore


# of a loss scale, what some files don't say and a step reads
_MISSED = ("delayed_shift", "cur_hysteresis", "min_scale")
MIDDLE = "mid_accumulation"  # of a manifest: micro-batches since the last step, which are lost


@dataclass(frozen=True)
class EngineState:
    """Values ready to be set in an engine, tensors included; the loss scale where its `wrapper` is
    given. `schedules`: whether the scheduler is asked for. `helpers` are states of DeepSpeed's own
    helpers, `modules` what modules keep besides tensors; `module_only`: nothing else is set.
    `groups` are the hyper-parameters of this rank's groups; `carried` as of `Wants`."""

    engine: Any
    wrapper: Wrapper | None
    common: CommonState
    schedules: bool
    scheduler: Any
    helpers: Mapping[str, Any]
    ranks: tuple[int, int]  # data-parallel and model-parallel ones of the checkpoint
    modules: Mapping[str, Any]
    module_only: bool
    carried: bool
    notes: tuple[str, ...] = ()
    groups: Sequence[Mapping[str, Any]] = ()

    @property
    def client_state(self) -> Mapping[str, Any]:
        return self.common.client_state

    @classmethod
    def prepare(
        cls,
        wants: Wants,
        wrapper: Wrapper,
        own: slice,
        mesh: Mesh,
        place: tuple[int, int],
    ) -> "EngineState":
        """`own` are the manifest's groups at the engine's stage; `place` is this rank's
        data-parallel rank and pipeline stage. Raises StateMismatchError where the scheduler counts
        other groups than the engine has, or the data position does not fit the loader."""
        source, options, notes = wants.source, wants.options, list[str]()
        values = Values.of(source, "values" in options.allow)
        engine, ranks, found = wrapper.engine, source.manifest.mesh, None
        if options.scheduler:
            found, notes = _schedule(source, engine, wants.origins[own], options, values)
        notes += _of_the_position(source, engine, options)
        common = CommonState.prepare(source, values, options, mesh, place)
        helpers = source.extras.helpers.items()
        return cls(
            engine,
            wrapper if options.optimizer else None,
            common,
            options.scheduler,
            found,
            {key: values.built(value, key) for key, value in helpers},
            (ranks.partitions, ranks.tp * ranks.pp),
            states_for(engine.module, source, values, options),
            options.module_only,
            wants.carried,
            (*notes, *values.notes),
        )

    def apply(self) -> list[str]:
        """As DeepSpeed's `_load_checkpoint` does; returns notes."""
        engine, notes = self.engine, list[str]()
        set_states(engine.module, self.modules)
        if self.module_only:
            return notes
        if self.wrapper is not None:
            set_scaler(engine, self.wrapper, self.common.scaler, notes)
        self._restore_scheduler(engine, notes)
        self._restore_helpers(engine, notes)
        counters = self.common.counters
        engine.global_steps = counters.get("global_steps", engine.global_steps)
        samples = engine.global_steps * engine.train_batch_size()
        engine.global_samples = counters.get("global_samples", samples)
        engine.skipped_steps = counters.get("skipped_steps", engine.skipped_steps)
        engine.loaded_checkpoint_dp_world_size, engine.loaded_checkpoint_mp_world_size = self.ranks
        return notes + self.common.apply()

    def _restore_scheduler(self, engine: Any, notes: list[str]) -> None:
        if not self.schedules:
            return
        if engine.lr_scheduler is not None and self.scheduler is not None:
            if counts_samples(engine.lr_scheduler):
                engine.lr_scheduler.num_steps = 0  # it adds what was saved
            engine.lr_scheduler.load_state_dict(self.scheduler)
        elif engine.lr_scheduler is not None or self.scheduler is not None:
            why = "the checkpoint has none" if self.scheduler is None else "the engine has none"
            notes.append(f"the scheduler was not restored: {why}")

    def _restore_helpers(self, engine: Any, notes: list[str]) -> None:
        """DeepSpeed's layer dropping and curriculum learning."""
        live = _live_helpers(engine)
        for key, state in self.helpers.items():
            if key in live:
                live[key].load_state_dict(state)
            else:
                notes.append(f"the state of {key} was not restored: the engine has none")


def _schedule(
    source: Checkpoint,
    engine: Any,
    groups: Sequence[int | None],
    options: LoadOptions,
    values: Values,
) -> tuple[Any, list[str]]:
    """The scheduler's state as the engine takes it, and notes. Raises StateMismatchError."""
    own = options.own
    apart = own is not None and options.apart.scheduler
    found = own.scheduler if own is not None and apart else source.extras.scheduler
    if found is None:
        return None, []
    here = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    if (whole := with_step_alone(found, here, groups, source)) is not None:
        return whole, ["the checkpoint has the scheduler's step alone: the rest is the engine's"]
    found = scheduler_for(found, groups, len(source.manifest.groups), here)
    notes = check_class(found, engine.lr_scheduler, source, "scheduler" in options.allow)
    _check_scheduler(found, engine, source)
    if here is not None:
        changed_settings(engine.lr_scheduler, found, source.main_file)
    return values.built(found, "lr_scheduler", here), notes


def _of_the_position(source: Checkpoint, engine: Any, options: LoadOptions) -> list[str]:
    """Notes where the run does not go on with the next sample."""
    notes: list[str] = []
    if taken := source.manifest.run.get(MIDDLE):
        notes.append(
            f"the save came after {taken} micro-batches of a step: they are not in it, and "
            "their step begins again"
        )
    if options.module_only:
        return notes
    manifest, counters = source.manifest, source.extras.counters
    counts_samples = options.loader is not None and source.extras.data_position is not None
    return notes + notes_of_batch(
        location(str(source.folder)),
        manifest.run,
        counters,
        engine,
        manifest.mesh.tp,
        counts_samples,
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


# ---- what a save writes, and a hold keeps


def read_state(
    shard: LocalShard,
    client_state: Any,
    drawn_now: Callable[[], DrawnState],
    folder: Location = Path(),
) -> RunState:
    """The state of the run that is no element of a tensor. Errors name files in `folder`.
    Collective. Raises SaveError."""
    notes, middle = list[str](), dict[str, Any]()
    if in_the_middle(shard.engine, shard.wrapper):
        middle = {MIDDLE: micro_batches(shard.engine)}
    if middle:
        notes.append(
            "the save came in the middle of an accumulation: the gradients of "
            f"{middle[MIDDLE] or 'some'} micro-batches since the last step are not in it"
        )

    def read() -> tuple[dict[str, Any], LiveValues]:
        return {**_facts(shard), **middle}, _own_values(shard, client_state)

    return RunState.of_ranks(read, drawn_now, folder, notes)


LEFT = "states of the optimizer that are not known stay behind"


def _facts(shard: LocalShard) -> dict[str, Any]:
    """What a manifest says of the engine, the same on all ranks; what says nothing is left out."""
    import deepspeed

    engine, model, module = shard.engine, shard.model, shard.engine.module
    # a plain value names no class
    kept = [one.value for one in saved_by_engine(engine) if not is_plain(one.value)]
    optional = {
        RECORDED: recorded_settings(module) if model is None else recorded(model.sizes, module),
        RENAMED: shard.renamed,
        CLASSES: sorted({*named_in(kept), *names_of(kept)}),
        MEMBERS: list(dict.fromkeys(members_by_value(kept))),
        CLASS: class_of(engine.lr_scheduler),
    }
    return {
        STEPS: engine.global_steps,
        "skipped_steps": engine.skipped_steps,
        BATCH: batch_of(engine),
        SEED: torch.initial_seed(),
        "ds_version": deepspeed.__version__,
        RUN: run_of(engine).id,
        **{key: value for key, value in optional.items() if value},
    }


def _own_values(shard: LocalShard, client_state: Any) -> LiveValues:
    engine = shard.engine
    buffers = {n: v.tensor for n, v in shard.values.items() if v.kind == "buffer"}
    scheduler = None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict()
    compared = bool(client_state) or shard.wrapper.zero == 3
    groups = [
        (f"param_groups[{number}][{key!r}] of stage {shard.number}", value)
        for number, group in enumerate(shard.param_groups)
        for key, value in group.items()
        if key not in GROUP_MARKS
    ]
    held = {**buffers, **states_of(engine.module)}
    return LiveValues(held, client_state, scheduler, compared, dict(groups), shard.number)


def read_extras(shard: LocalShard, client_state: Mapping[Any, Any]) -> Extras:
    """Counters, schedule, loss scale, client state and more, as the files of a save have them.
    Collective. Raises a UcpError on every rank."""
    engine = shard.engine
    with agree.gathering() as block:
        scheduler = engine.lr_scheduler
        state = None if scheduler is None else inert(scheduler.state_dict())
        extras = Extras(
            {key: int(getattr(engine, key)) for key in COUNTERS},
            None,
            _scaler(shard.wrapper),
            inert(dict(engine.config)),
            {inert(key): inert(value) for key, value in client_state.items()},
            _helpers(engine),
            modules={name: inert(value) for name, value in states_of(engine.module).items()},
        )
        block.value = shard.number, state, len(shard.param_groups)
    # the first rank's scheduler, with the rates of all stages, in their order
    first: dict[int, tuple[Any, int]] = {}
    for stage, state, groups in block.values:
        first.setdefault(stage, (state, groups))
    stages = [first[stage] for stage in sorted(first)]
    return replace(extras, scheduler=of_all_stages(block.values[0][1], stages))


def _helpers(engine: Any) -> dict[str, Any]:
    """Their states, as a save has them."""
    return {key: inert(one.state_dict()) for key, one in _live_helpers(engine).items()}


def _live_helpers(engine: Any) -> dict[str, Any]:
    """DeepSpeed's layer dropping and curriculum learning, where they are used, by the keys of its
    model files."""
    found: dict[str, Any] = {}
    if engine.random_ltd_enabled() and engine.random_ltd_scheduler is not None:
        found["random_ltd"] = engine.random_ltd_scheduler
    if engine.training_dataloader is not None and engine.curriculum_learning_enabled():
        found["data_sampler"] = engine.training_dataloader.data_sampler
    return found


def _scaler(wrapper: Wrapper) -> LossScale:
    """The loss scale; of an engine that has none, none."""
    if not wrapper.engine.fp16_enabled():
        return LossScale()
    scaler, names = wrapper.scaler()
    fields = {name: getattr(scaler, names.get(name, name), None) for name in vars(LossScale())}
    return LossScale.of_deepspeed({name: one for name, one in fields.items() if one is not None})


# ---- plain values that a save keeps


def saved_by_engine(engine: Any) -> Iterator[SavedValue]:
    """The state of the scheduler, and the hyper-parameters of every group."""
    groups = getattr(wrapper_of(engine).base, "param_groups", [])
    return saved_values("lr_scheduler", engine.lr_scheduler, groups, in_manifest=True)


def saved_by_caller(client_state: Any, engine: Any, file: object) -> Iterator[SavedValue]:
    """The client state. Raises UsageError for what is no dict, or has a key that
    DeepSpeed itself writes."""
    reserved = OWN_KEYS
    # a method of Megatron-DeepSpeed's models, whose result it puts into the client state
    if callable(getattr(engine.module, PATTERNS, None)):
        reserved = OWN_KEYS - {PATTERNS}
    if not isinstance(client_state, Mapping):
        raise UsageError(
            "client_state is a dictionary",
            found=type(client_state).__qualname__,
            fix='give client_state as a dictionary, such as {"epoch": 3}',
        )
    taken = sorted(key for key in client_state if isinstance(key, str) and key in reserved)
    if taken:
        raise UsageError(
            "client_state has keys that DeepSpeed writes itself, and would replace their values",
            file=file,
            found=", ".join(taken),
            fix="give these values other names",
        )
    yield SavedValue("client_state", dict(client_state), live=False)
