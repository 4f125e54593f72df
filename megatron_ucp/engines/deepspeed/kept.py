"""Plain values that a save of a DeepSpeed engine keeps, refused before anything is written where no
load could give them back."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ucp.engines.deepspeed.optimizer import wrapper_of
from megatron_ucp.engines.read_back import KeptValue, kept_of
from megatron_ucp.errors import UsageError
from megatron_ucp.formats.deepspeed.files import OWN_KEYS, PATTERNS


def of_engine(engine: Any) -> Iterator[KeptValue]:
    """The state of the scheduler, and the hyper-parameters of every group."""
    groups = getattr(wrapper_of(engine).base, "param_groups", [])
    return kept_of("lr_scheduler", engine.lr_scheduler, groups, in_manifest=True)


def of_caller(client_state: Any, engine: Any, file: object) -> Iterator[KeptValue]:
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
    yield KeptValue("client_state", dict(client_state), live=False)
