"""`install`: every engine that a trainer makes is attached, as its DeepSpeed config says."""

import functools
from typing import Any

from megatron_ucp import say
from megatron_ucp.engines.deepspeed.engine import attach_with
from megatron_ucp.engines.handle import check_versions
from megatron_ucp.engines.trainers import guard_trainers
from megatron_ucp.errors import UcpError, UsageError
from megatron_ucp.reshard.options import SECTION, options_of

_INSTALLED = "_ucp_installed"  # of `deepspeed.initialize`: what it does with the engines it makes


def install(*, enabled: bool = False) -> None:
    """Wraps `deepspeed.initialize`, so that engines that a trainer makes are attached. For HF
    Trainer, Accelerate and Lightning; before the trainer is built. Twice is once.

    Args:
        enabled: Attach every engine, unless the section "universal_checkpoint" of its DeepSpeed
            config says `"enabled": false`. Without it only engines whose config enables it are
            attached; a note says so once, where the first one does not.

    Returns:
        Nothing.

    Raises:
        UsageError: When an engine is made, for an unknown key of its config's section.
        UnsupportedError: When an engine is made, as `attach`.

    Example:
        >>> import megatron_ucp as ucp
        >>> ucp.install(enabled=True)
    """
    _install(enabled)


def install_for_scripts() -> None:
    """`install` for a script that says nothing of this package: an engine that can't be attached
    is left alone, with a note, unless its config asks for it."""
    _install(True, leaves_alone=True)


def _install(enabled: bool, leaves_alone: bool = False) -> None:
    import deepspeed

    check_versions()
    stock = deepspeed.initialize
    if getattr(stock, _INSTALLED, None) is not None:
        getattr(stock, _INSTALLED).enabled |= enabled
        return
    installed = _Installed(enabled, leaves_alone)
    guard_trainers()

    @functools.wraps(stock)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        made: Any = stock(*args, **kwargs)
        installed.attach(made[0])
        return made

    setattr(wrapped, _INSTALLED, installed)
    deepspeed.initialize = wrapped


class _Installed:
    """What a wrapped `deepspeed.initialize` does with the engines that it makes."""

    def __init__(self, enabled: bool, leaves_alone: bool) -> None:
        self.enabled, self.leaves_alone = enabled, leaves_alone
        self._has_attached, self._has_warned = False, False

    def attach(self, engine: Any) -> None:
        config = engine._config._param_dict
        options = options_of(config, self.enabled)
        if options is not None:
            try:
                attach_with(engine, options, by_install=True)
            except UcpError as error:  # on every rank, before anything has changed
                is_asked = options_of(config) is not None
                if isinstance(error, UsageError) or is_asked or not self.leaves_alone:
                    raise
                say.note(
                    "this engine is left as it is, and saves and loads as DeepSpeed alone does: "
                    f"{error.problem}" + (f" ({error.parameter})" if error.parameter else "")
                )
                return
            self._has_attached = True
        elif not self.enabled and not self._has_attached and not self._has_warned:
            self._has_warned = True
            say.note(
                "ucp.install() was called, and the DeepSpeed config does not enable it, so that "
                f'this engine is not attached: add "{SECTION}": {{"enabled": true}} to the config, '
                "or call megatron_ucp.install(enabled=True), which Lightning needs: its test, "
                "validate and predict leave the section out"
            )
