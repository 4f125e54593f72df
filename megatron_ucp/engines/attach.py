"""The three ways in: `attach` an engine, `initialize` one, or `install` for trainers that call
deepspeed themselves."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron_ucp.engines.deepspeed import kept
from megatron_ucp.engines.deepspeed.carried import carried_as
from megatron_ucp.engines.deepspeed.family import model_of, require_engine
from megatron_ucp.engines.deepspeed.live import describe
from megatron_ucp.engines.deepspeed.refuse import refuse_engine, refuse_writer
from megatron_ucp.engines.deepspeed.save import Asked, save
from megatron_ucp.engines.deepspeed.stage import is_pipeline, parallel_of
from megatron_ucp.engines.deepspeed.stock_info import empty_extra_state, info_of
from megatron_ucp.engines.deepspeed.wrappers import remember_stepped
from megatron_ucp.engines.export import export
from megatron_ucp.engines.load import asked_of, fill
from megatron_ucp.engines.loader import ResumableLoader
from megatron_ucp.engines.read_back import refuse_strange
from megatron_ucp.engines.saves import Saving
from megatron_ucp.engines.versions import check_versions
from megatron_ucp.errors import UsageError
from megatron_ucp.families.base import Model
from megatron_ucp.formats.tags import nothing_there
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.resume import How, Report, check_options

SECTION = "universal_checkpoint"
_KEYS = {
    "enabled": bool,
    "hyper": str,
    "checksums": bool,
    "allow": list,
    "family": str,
    "rng": bool,
    "durable": bool,
    "keep_latest": int,
}
_OF_SAVES = ("durable", "keep_latest", "rng")
_ATTACHED = "_ucp_attached"
# DeepSpeed writes this attribute of the module into its model files
INFO = "universal_checkpoint_info"


def attach(
    engine: Any, family: Any = None, loader: ResumableLoader | None = None, **options: Any
) -> Any:
    """Makes an engine's `save_checkpoint` whole or nothing and its `load_checkpoint` take any mesh;
    returns the engine.

    `family` (the name of a registered one, or a Family) declares the layouts of the model, which
    tensor parallelism of megatron-core needs; what AutoTP cut says so itself. The position of
    `loader` is kept in saves and restored by loads.
    `options` are `durable` and `keep_latest` of `Saving`, `hyper`, `checksums` and `allow` of
    `load`, and `rng` of both. Raises UnsupportedError for an engine that can't be loaded exactly,
    on every rank. Twice is once.
    """
    if _is_attached(engine):
        return engine
    check_versions()
    given = {**options, "family": family, "loader": loader}
    asked = {key: agree.plain_option(value) for key, value in given.items()}
    agree.require_same(agree.gather(asked))
    how = _saving(options, loader)
    loading = {key: options[key] for key in options if key not in _OF_SAVES or key == "rng"}
    check_options(**loading)
    with agree.together():
        model = model_of(engine, family)
        refuse_engine(engine, model)
        refuse_writer(engine)
        taken_as = carried_as(engine)
        refuse_strange(kept.of_engine(engine), left=how.values_left)
    if taken_as:
        _say(taken_as)
    if model is not None and not hasattr(engine.module, INFO):
        pipe = model.pipe if is_pipeline(engine) else None
        if info := info_of(model, parallel_of(engine)[0][0], pipe):
            setattr(engine.module, INFO, info)
        engine.module.register_state_dict_post_hook(empty_extra_state)
    engine.__dict__[_ATTACHED] = True
    remember_stepped(engine)
    engine.save_checkpoint = _saver(engine, model, how)
    engine.load_checkpoint = _load_method(engine, family, loader, loading)
    described = functools.partial(describe, engine, model)
    engine.ucp_export_hf = functools.partial(export, described, engine.module, model)
    return engine


def _is_attached(engine: Any) -> bool:
    """Raises UsageError for what is no engine."""
    require_engine(engine)
    return _ATTACHED in engine.__dict__


def _saver(engine: Any, model: Model | None, how: Saving) -> Callable[..., bool]:
    """What takes the place of the engine's `save_checkpoint`."""
    stock_save = engine.save_checkpoint

    @functools.wraps(stock_save)
    def save_checkpoint(
        save_dir: Any,
        tag: Any = None,
        client_state: Any = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
        client_state = client_state or {}
        asked = Asked(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        engine.ucp_save_report = save(engine, model, how, stock_save, asked)
        return True

    return save_checkpoint


def _load_method(
    engine: Any, family: Any, loader: ResumableLoader | None, options: Mapping[str, Any]
) -> Callable[..., tuple[str | None, Mapping[str, Any] | None]]:
    """What takes the place of the engine's `load_checkpoint`."""
    stock_load = engine.load_checkpoint

    @functools.wraps(stock_load)
    def load_checkpoint(
        load_dir: Any,
        tag: Any = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
        native: bool = False,
    ) -> tuple[str | None, Mapping[str, Any] | None]:
        allow = {*options.get("allow", ()), *(() if load_module_strict else ("missing", "extra"))}
        how = How(
            load_optimizer_states and not load_module_only,
            load_lr_scheduler_states,
            load_module_only,
            loader=loader,
            **{**options, "allow": frozenset(allow)},
        )
        stock = bool(native) or custom_load_fn is not None
        with agree.together() as block:
            nothing = not stock and tag is None and nothing_there(load_dir)
            asked = asked_of(load_dir, tag, how, family)
            block.value = {
                "load_dir": asked.pop("path"),
                "load_module_strict": load_module_strict,
                "native": stock,
                **asked,
                "a checkpoint in load_dir": not nothing,
            }
        agree.require_same(block.values)
        if stock:
            return stock_load(
                load_dir,
                tag,
                load_module_strict,
                load_optimizer_states,
                load_lr_scheduler_states,
                load_module_only,
                custom_load_fn,
            )
        if nothing:
            _warn(
                f"megatron_ucp: no checkpoint in {load_dir}, starting from the beginning"
            )  # as DeepSpeed does
            return None, None
        report = fill(engine, load_dir, tag, family, how)
        _log(report)
        engine.ucp_report = report
        return report.path, report.client_state

    return load_checkpoint


def _saving(options: Mapping[str, Any], loader: ResumableLoader | None) -> Saving:
    own = {key: options[key] for key in _OF_SAVES if key in options}
    return Saving(**own, loader=loader, values_left=_leaves_values(options.get("allow")))


def _leaves_values(allow: Any) -> bool:
    return isinstance(allow, Collection) and not isinstance(allow, str) and "values" in allow


def _warn(text: str) -> None:
    from deepspeed.utils import logger

    logger.warning(text)


def _log(report: Report) -> None:
    _say(
        f"loaded {report.path} ({report.source}) into {report.target} in {report.seconds:.2f} s",
        *report.notes,
    )


def _say(*notes: str) -> None:
    from deepspeed.utils import log_dist

    for note in notes:
        log_dist(f"megatron_ucp: {note}", ranks=[0])


def options_of(config: Any) -> dict[str, Any] | None:
    """Options of the section "universal_checkpoint" of a parsed DeepSpeed config; None where it is
    not enabled.

    The stock key `"checkpoint": {"load_universal": true}` enables it too. Raises UsageError for an
    unknown key or value.
    """
    section = config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise UsageError(
            f'"{SECTION}" of the DeepSpeed config is a section',
            expected='{"enabled": true}',
            found=repr(section),
            fix='write the section as an object with the key "enabled"',
        )
    unknown = sorted(
        key
        for key, value in section.items()
        if key not in _KEYS or not isinstance(value, _KEYS[key])
    )
    if unknown:
        raise UsageError(
            f'the section "{SECTION}" of the DeepSpeed config has a key or value that is not known',
            expected=", ".join(f"{k}: {t.__name__}" for k, t in _KEYS.items()),
            found=", ".join(f"{k}: {section[k]!r}" for k in unknown),
            fix="correct these keys or values in the DeepSpeed config, or remove them",
        )
    options = {key: value for key, value in section.items() if key != "enabled"}
    _saving(options, None)
    check_options(
        **{key: value for key, value in options.items() if key != "family" and key not in _OF_SAVES}
    )
    stock = bool((config.get("checkpoint") or {}).get("load_universal"))
    return options if section.get("enabled", stock) else None


def initialize(
    *args: Any, family: Any = None, loader: ResumableLoader | None = None, **kwargs: Any
) -> Any:
    """`deepspeed.initialize`, with the engine attached. Takes and returns what that does; `family`
    and `loader` as `attach`."""
    import deepspeed

    stock = getattr(deepspeed.initialize, "__wrapped__", deepspeed.initialize)
    made: Any = stock(*args, **kwargs)
    options = options_of(made[0]._config._param_dict) or {}
    attach(made[0], loader=loader, **{**options, "family": family or options.get("family")})
    return made


def install() -> None:
    """Wraps `deepspeed.initialize` so that the config section alone attaches the engine. Twice is
    once."""
    import deepspeed

    check_versions()
    stock = deepspeed.initialize
    if getattr(stock, _ATTACHED, False):
        return

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made: Any = stock(*args, **kwargs)
        options = options_of(made[0]._config._param_dict)
        if options is not None:
            attach(made[0], **options)
        return made

    setattr(wrapped, _ATTACHED, True)
    deepspeed.initialize = wrapped
