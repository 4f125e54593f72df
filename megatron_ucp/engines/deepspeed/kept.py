"""Plain values that a save of a DeepSpeed engine keeps, refused before anything is written where no
load could give them back."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from megatron_ucp.engines.deepspeed.wrappers import wrapper_of
from megatron_ucp.engines.values import KeptValue
from megatron_ucp.errors import UsageError
from megatron_ucp.formats.deepspeed.plain_values import GROUP_MARKS


def of_engine(engine: Any) -> Iterator[KeptValue]:
    """The state of the scheduler, and the hyper-parameters of every group."""
    if engine.lr_scheduler is not None:
        yield KeptValue("lr_scheduler", engine.lr_scheduler.state_dict())
    for number, group in enumerate(getattr(wrapper_of(engine).base, "param_groups", [])):
        own = {key: value for key, value in group.items() if key not in GROUP_MARKS}
        yield KeptValue(f"param_groups[{number}]", own)


def of_caller(client_state: Any, reserved: Collection[str], file: object) -> Iterator[KeptValue]:
    """Each entry of the client state. Raises UsageError for what is no dict, or has a key that
    DeepSpeed itself writes."""
    if not isinstance(client_state, Mapping):
        raise UsageError("client_state is a dictionary", found=type(client_state).__qualname__)
    taken = sorted(key for key in client_state if isinstance(key, str) and key in reserved)
    if taken:
        raise UsageError(
            "client_state has keys that DeepSpeed writes itself, and would replace their values",
            file=file,
            found=", ".join(taken),
            fix="give these values other names",
        )
    for key, value in client_state.items():
        yield KeptValue(f"client_state[{key!r}]", value, live=False)
