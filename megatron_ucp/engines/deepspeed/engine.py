"""A DeepSpeed engine as an engine of this package: `attach` one, or `initialize` one attached."""

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.manifest import RUN
from megatron_ucp.engines.background import (
    Background,
    background_options,
    keep_background,
    wait_together,
)
from megatron_ucp.engines.deepspeed.live import LiveEngine, describe, lies_at
from megatron_ucp.engines.deepspeed.model import described_model
from megatron_ucp.engines.deepspeed.modules import quantized_note
from megatron_ucp.engines.deepspeed.optimizer import remember_stepped
from megatron_ucp.engines.deepspeed.program import say_other_mesh
from megatron_ucp.engines.deepspeed.refuse import carried_as, refuse_writer, require_engine
from megatron_ucp.engines.deepspeed.save import EngineSave, empty_extra_state, info_of
from megatron_ucp.engines.deepspeed.shard import is_pipeline, parallel_of
from megatron_ucp.engines.deepspeed.state import (
    LEFT,
    check_states,
    read_extras,
    read_state,
    saved_by_caller,
    saved_by_engine,
)
from megatron_ucp.engines.handle import Handle, check_versions
from megatron_ucp.engines.hold import HoldOptions, MemoryRun, lent
from megatron_ucp.engines.live import require_usable
from megatron_ucp.engines.load import (
    as_compared,
    fill,
    go_on,
    load_options,
    no_checkpoint,
    options_of_load,
    origin_of,
)
from megatron_ucp.engines.memory import MemorySteps, keep_steps, memory_options, steps_of
from megatron_ucp.engines.record import HANDLE, record_of
from megatron_ucp.engines.run_state import ResumableLoader
from megatron_ucp.engines.save import SaveOptions, SaveReport, save_engine
from megatron_ucp.engines.trainers import guard_removals
from megatron_ucp.engines.values import refuse_strange
from megatron_ucp.errors import NotFoundError, UcpError, UnsupportedError, UsageError
from megatron_ucp.families.family import Family, Model
from megatron_ucp.formats.deepspeed.files import PATTERNS
from megatron_ucp.formats.output_folder import manifest_of
from megatron_ucp.formats.store import Location, absolute, is_url, location
from megatron_ucp.formats.tags import LATEST
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.hugging_face.export import LIVE_EXPORT
from megatron_ucp.reshard.options import (
    LOADS,
    OPTIONS,
    SECTION,
    absolute_path,
    check_given,
    options_for,
    options_of,
    plain_path,
    require_known,
    use_store,
)

_STOCK_LOAD = "_load_checkpoint"  # what DeepSpeed's load_checkpoint reads a tag's model with
_REPLACED = (
    *("save_checkpoint", "load_checkpoint", _STOCK_LOAD, "destroy"),
    *("step", "forward", "train_batch"),
    *(HANDLE, LIVE_EXPORT),
)


@agree.door("attach")
def attach(
    engine: Any,
    family: str | Family | None = None,
    loader: ResumableLoader | None = None,
    *,
    durable: bool | None = None,
    keep_latest: int | None = None,
    rng: bool | None = None,
    hyper: str | None = None,
    checksums: bool | None = None,
    allow: Collection[str] | None = None,
    read: str | None = None,
    save: str | None = None,
    rules: str | Path | None = None,
    **beside: Any,
) -> Any:
    """Makes a DeepSpeed engine's `save_checkpoint` atomic, and lets its `load_checkpoint` take what
    any mesh saved. Collective: on every rank, once, after `deepspeed.initialize`.

    An engine that `install` or the runner attached takes these options too. Attaching twice with
    the same options, or with none, is attaching once.

    Args:
        engine: What `deepspeed.initialize` returned.
        family: The model family (a registered name, or a `Family`), which declares how tensor
            parallelism of megatron-core shards the model. Without one a model of megatron-core's
            says it itself, as does what AutoTP shards; an export to Hugging Face needs the family.
        loader: A data loader whose position is kept in saves and restored by loads.
        durable: Whether a save's files are on disk before they count. Default: true.
        keep_latest: How many whole tags are left after a save. Default: all.
        rng: Whether random states are kept and restored. Default: true.
        hyper: As of `load`, for every `load_checkpoint`.
        checksums: As of `load`.
        allow: As of `load`.
        read: As of `load`.
        save: Who writes the files, and when: DeepSpeed's own code ("stock", the default), this
            package ("direct": the same files, faster), or this package while training goes on
            ("background": the call returns when a snapshot is taken; see `wait`).
        rules: A file of rules (docs/reference/rules.md), or the name of one that comes with the
            package, for a model that neither a family nor its modules describe.
        beside: How a save goes on in the background: `busy`, `deadline`, `on_error`,
            `snapshot_bytes`, `keep_snapshot`; see `BackgroundOptions`. What is kept in memory
            between saves: `keep`, `every`, `copies`, `folder`, `client_state`; see
            `MemoryOptions`. How object stores are asked: `store`, see docs/stores.md. Other options
            are refused.

    Returns:
        The engine.

    Raises:
        UsageError: For options that are not known, or differ between ranks, or contradict those
            that the engine was attached with: an attach may be followed by one with more of them.
        UnsupportedError: For an engine that can't be saved and loaded exactly.

    Example:
        >>> engine, *_ = deepspeed.initialize(model=model, config=ds_config)
        >>> ucp.attach(engine, keep_latest=2)
        >>> engine.load_checkpoint("checkpoints")
    """
    require_engine(engine)
    check_versions()
    given = {
        "durable": durable,
        "keep_latest": keep_latest,
        "rng": rng,
        "hyper": hyper,
        "checksums": checksums,
        "allow": allow,
        "read": read,
        "save": save,
        "family": family,
        "loader": loader,
        "rules": rules,
        **beside,
    }
    attach_with(engine, {key: value for key, value in given.items() if value is not None})
    return engine


@dataclass(frozen=True)
class _Attachment:
    """How an engine was attached: with which options, whether by `install` and not by the program
    itself, and which `attributes` of the engine were replaced (None: it had none of its own)."""

    options: Mapping[str, Any]
    by_install: bool
    attributes: Mapping[str, Any]


def attach_with(engine: Any, options: Mapping[str, Any], by_install: bool = False) -> None:
    """As `attach`, of options by name; `by_install`: they are those of a config. Collective. Raises
    a UcpError on every rank."""
    agree.require_same(_comparable(options))
    require_known(options, [*OPTIONS])
    check_given(options)
    before: _Attachment | None = record_of(engine).attachment
    if before is None:
        _attach_first(engine, dict(options), by_install)
    elif _more_than(before, options):
        require_usable(engine)
        _detach(engine, before)
        _attach_first(engine, {**before.options, **options}, by_install)


def _comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as ranks, and two calls, compare them."""
    return {key: agree.plain_option(value) for key, value in options.items()}


def _more_than(before: _Attachment, options: Mapping[str, Any]) -> bool:
    """Whether the program asks for more than the engine was attached with. Raises UsageError for
    options that contradict those."""
    old, new = _comparable(before.options), _comparable(options)
    contradicts = {key for key in new if key in old and old[key] != new[key]}
    more = {key for key in new if key not in old}
    for key in ("loader", "client_state"):  # objects, whose names say too little
        if key in options and key in before.options and options[key] is not before.options[key]:
            contradicts.add(key)
    if contradicts:
        who = "its DeepSpeed config" if before.by_install else "an earlier attach"
        raise UsageError(
            f"the engine is attached already, by {who}, with other options",
            expected=_in_words(before.options, "no options"),
            found=_in_words({key: options[key] for key in sorted(contradicts)}, ""),
            fix="give all options in one place: the first attach, or the config's section "
            f'"{SECTION}"',
        )
    return bool(more)


def _in_words(options: Mapping[str, Any], nothing: str) -> str:
    return ", ".join(f"{k}={agree.plain_option(v)!r}" for k, v in options.items())[:400] or nothing


def _detach(engine: Any, attachment: _Attachment) -> None:
    """Gives an engine back what was its own, as nothing was asked of the attachment yet. A save
    that is under way is there before. Collective."""
    wait_together(engine)
    if (kept := steps_of(engine)) is not None:
        kept.close()
    record = record_of(engine)
    record.attachment, record.memory, record.backgrounds = None, None, {}
    for name, value in attachment.attributes.items():
        engine.__dict__.pop(name, None)
        if value is not None:
            engine.__dict__[name] = value


def _attach_first(engine: Any, options: dict[str, Any], by_install: bool) -> None:
    attachment = _Attachment(
        dict(options), by_install, {name: engine.__dict__.get(name) for name in _REPLACED}
    )
    use_store(options)
    save_options = SaveOptions.of(options)
    beside, in_memory = background_options(options), memory_options(options)
    model = _model_of(engine, options.get("family"), options.get("rules"), save_options)
    _say_layouts(engine, model)
    handle = _DeepSpeedHandle(engine, model, save_options, options_for(LOADS, options))
    steps = None
    if in_memory is not None:
        with agree.together():
            steps = MemorySteps(handle, in_memory, save_options.rng, save_options.loader)
    if beside is not None:
        keep_background(engine, Background(beside))
        guard_removals()
    record_of(engine).attachment = attachment
    _take_over(engine, handle)
    if steps is not None:
        _keep_steps(engine, steps)


def _model_of(engine: Any, family: Any, rules: Any, options: SaveOptions) -> Model | None:
    """The engine's model, if a family or rules describe it. Collective. Raises a UcpError on every
    rank for an engine that can't be attached."""
    model = described_model(engine, family, rules)
    with agree.together():
        refuse_writer(engine)
        taken_as = carried_as(engine)
        refuse_strange(saved_by_engine(engine), left=options.values_left)
    for note in [*([taken_as] if taken_as else []), *quantized_note(engine.module)]:
        say.note(note)
    return model


def _keep_steps(engine: Any, kept: MemorySteps) -> None:
    """Lets each step begin with a look whether the one before it is to be kept: the program may
    count, step its own schedule and change buffers after `engine.step`."""
    keep_steps(engine, kept)
    pair = ("train_batch", "train_batch") if is_pipeline(engine) else ("step", "forward")
    for name, method in zip(pair, (_noting, _looking), strict=True):
        setattr(engine, name, _instead_of(getattr(engine, name), method(engine, kept, name)))


def _noting(engine: Any, kept: MemorySteps, name: str) -> Callable[..., Any]:
    stock = getattr(engine, name)

    def ended(*args: Any, **kwargs: Any) -> Any:
        done = stock(*args, **kwargs)
        kept.stepped(engine.global_steps)
        return done

    return ended


def _looking(engine: Any, kept: MemorySteps, name: str) -> Callable[..., Any]:
    stock = getattr(engine, name)

    def begun(*args: Any, **kwargs: Any) -> Any:
        # a rank may evaluate alone; `train_batch` itself ends an evaluation
        if name != "forward" or engine.module.training:
            kept.ended_step(engine.global_steps)
        return stock(*args, **kwargs)

    return begun


def _take_over(engine: Any, handle: "_DeepSpeedHandle") -> None:
    """Puts methods of ours in the place of the engine's own."""
    remember_stepped(engine)
    setattr(engine, HANDLE, handle)
    setattr(engine, LIVE_EXPORT, handle.export_hf)
    engine.save_checkpoint = _instead_of(handle.stock_save, handle.save_checkpoint)
    engine.load_checkpoint = _instead_of(handle.stock_load, handle.load_checkpoint)
    setattr(engine, _STOCK_LOAD, _instead_of(getattr(engine, _STOCK_LOAD), handle.load_stock))
    engine.destroy = _instead_of(engine.destroy, partial(handle.destroy, engine.destroy))


def _say_layouts(engine: Any, model: Model | None) -> None:
    """Lets stock DeepSpeed's own tools know how a model of a family is cut."""
    if model is None or not model.family.name or hasattr(engine.module, PATTERNS):
        return
    pipe = model.pipe if is_pipeline(engine) else None
    if info := info_of(model, parallel_of(engine)[0][0], pipe):
        setattr(engine.module, PATTERNS, info)
    engine.module.register_state_dict_post_hook(empty_extra_state)


def _instead_of(stock: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """A method of ours under the name and the documentation of DeepSpeed's."""

    @functools.wraps(stock)
    def method(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    return method


def unattached(engine: Any, family: Any) -> Handle:
    """What stands for an engine that was not attached, of the model that a load would take it for.
    Collective. Raises a UcpError on every rank."""
    return _DeepSpeedHandle(engine, described_model(engine, family), SaveOptions(), {})


class _DeepSpeedHandle(Handle):
    """An engine of DeepSpeed, which is saved as `save_options` say; `stock_save` and `stock_load`
    are its own methods."""

    def __init__(
        self,
        engine: Any,
        model: Model | None,
        save_options: SaveOptions,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__(engine, engine.module, model, options)
        self.save_options = save_options
        self.stock_save, self.stock_load = engine.save_checkpoint, engine.load_checkpoint
        self._load_files = getattr(engine, _STOCK_LOAD)

    def describe(self) -> LiveEngine:
        return describe(self.program, self.model)

    def present(self) -> LiveEngine:
        return describe(self.program, self.model, present=True)

    def weights(self) -> LiveEngine:
        return describe(self.program, self.model, weights=True)

    def lies_at(self, masters: bool) -> list[object]:
        return lies_at(self.program, masters)

    def check_usable(self) -> None:
        require_usable(self.program)

    def to_fill(self, family: Any) -> LiveEngine:
        is_attached = record_of(self.program).attachment is not None
        model = described_model(self.program, family) if is_attached else self.model
        return describe(self.program, model)

    def lent(self, options: HoldOptions) -> MemoryRun:
        options, engine = (
            replace(options, loader=options.loader or self.save_options.loader),
            self.program,
        )
        with agree.together():
            require_usable(engine)
            check_states(engine)
            refuse_strange(saved_by_caller(options.client_state, engine, None))
            refuse_strange(saved_by_engine(engine), left=self.save_options.values_left)
        live = self.present()
        state = read_state(live.shard, options.client_state, options.drawn_now)
        extras = read_extras(live.shard, options.client_state)
        unknown = sorted(
            {name for names in agree.collect(live.shard.not_carried) for name in names}
        )
        if unknown:
            note = f"{LEFT}: {', '.join(unknown)}"
            state = replace(state, notes=(*state.notes, note))
        return lent(live, state, extras, options)

    @agree.door("the save")
    def save(
        self,
        save_dir: Any,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> SaveReport:
        engine = self.program
        steps = engine.global_steps
        request = EngineSave(
            engine,
            absolute_path(save_dir),
            f"global_step{steps}" if tag is None else str(tag),
            steps,
            self.save_options,
            LATEST if save_latest else None,
            self.model,
            self.stock_save,
            client_state or {},
            exclude_frozen_parameters,
        )
        return save_engine(request)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> bool:
        """In the place of the engine's own: whether there is a save, or will be."""
        return not self.save(*args, **kwargs).error

    @agree.door("the load")
    def load_checkpoint(
        self,
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        native: bool = False,
    ) -> tuple[str | None, Mapping[str, Any] | None]:
        allow = {*self.options.get("allow", ())}
        allow |= set[str]() if load_module_strict else {"missing", "extra"}
        given = options_of_load(
            self.program,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            allow=allow,
        )
        stock = bool(native) or custom_load_fn is not None
        wait_together(self.program)
        with agree.together():
            plain_path(load_dir)
            asked = {
                "load_dir": agree.plain_option(location(load_dir)),
                "tag": agree.plain_option(tag),
                "load_module_strict": load_module_strict,
                "native": stock,
                **as_compared(given),
            }
        agree.require_same(asked)
        nothing = not stock and tag is None and no_checkpoint(load_dir)
        if stock:
            if is_url(load_dir):
                raise UnsupportedError(
                    "DeepSpeed's own load reads folders of a disk alone",
                    file=load_dir,
                    expected="a load of this package",
                    found="native=True, or custom_load_fn",
                    fix="leave these out, or copy the checkpoint to a disk",
                )
            own = (load_optimizer_states, load_lr_scheduler_states, load_module_only)
            return self.stock_load(load_dir, tag, load_module_strict, *own, custom_load_fn)
        if not nothing or steps_of(self.program) is not None:
            with suppress(NotFoundError) if nothing else nullcontext():
                done = fill(self, load_dir, tag, load_options(given))
                say_other_mesh(self.program.module, done.client_state)
                return done.path, done.client_state
        say.note(f"no checkpoint in {load_dir}: the run starts from the beginning")
        return None, None

    def destroy(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of the engine's own: its end waits for its last save."""
        try:
            self.close()
        finally:
            stock(*args, **kwargs)

    def load_stock(self, load_dir: Any, tag: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """In the place of what DeepSpeed's own load reads a tag with, whoever calls it: the engine
        goes on with the run of that tag, as after a load of ours."""
        path, client_state = self._load_files(load_dir, tag, *args, **kwargs)
        if path is not None and not kwargs.get("load_module_only"):
            folder = absolute(load_dir) / str(tag)
            run, origin = agree.of_first(lambda: _run_in(folder))
            steps = self.program.global_steps
            go_on(self.program, run, origin, steps, (folder, folder.parent))
        return path, client_state


def _run_in(folder: Location) -> tuple[str, str]:
    """The id of the run that saved a tag, and what the tag is known by where it has none."""
    with suppress(UcpError, OSError):
        if run := str(manifest_of(folder).run.get(RUN, "")):
            return run, ""
    return "", origin_of(folder)


def initialize(
    *args: Any, family: Any = None, loader: ResumableLoader | None = None, **kwargs: Any
) -> Any:
    """`deepspeed.initialize`, with the engine attached.

    Args:
        args: Those of `deepspeed.initialize`.
        family: As of `attach`.
        loader: As of `attach`.
        kwargs: Those of `deepspeed.initialize`. Options of `attach` come from the section
            "universal_checkpoint" of its config.

    Returns:
        What `deepspeed.initialize` does: engine, optimizer, data loader, scheduler.

    Raises:
        UsageError: For an unknown key of the config's section.
        UnsupportedError: As `attach`.

    Example:
        >>> engine, optimizer, _, scheduler = ucp.initialize(model=model, config=ds_config)
    """
    import deepspeed

    stock = getattr(deepspeed.initialize, "__wrapped__", deepspeed.initialize)
    made: Any = stock(*args, **kwargs)
    options = options_of(made[0]._config._param_dict) or {}
    attach(made[0], loader=loader, **{**options, "family": family or options.get("family")})
    return made
