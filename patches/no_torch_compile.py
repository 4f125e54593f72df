"""A machine without a GPU: megatron-core's `jit_fuser` leaves functions as they are instead of
compiling them."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from . import MEGATRON_CORE, Patch


def change() -> None:
    # The import runs the decorator in the modules that megatron.core itself imports.
    with without_compiler():
        import megatron.core.jit
    megatron.core.jit.disable_jit_fuser()
    # Where megatron.core was imported before:
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core"):
            unwrap(module)
            for thing in list(vars(module).values()):
                if isinstance(thing, type) and thing.__module__.startswith("megatron.core"):
                    unwrap(thing)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """For an import that decorates functions: torch.compile would import its compiler for them,
    which takes longer than all the rest of Megatron-Core."""
    import torch

    stock, torch.compile = torch.compile, leave
    try:
        yield
    finally:
        torch.compile = stock


def leave(model: Any = None, **_: Any) -> Any:
    """What stands for torch.compile, called with a function or as a decorator with options."""
    return model if model is not None else lambda function: function


def unwrap(holder: Any) -> None:
    """Puts the original functions back into a module or a class."""
    for name, thing in list(vars(holder).items()):
        original = getattr(thing, "_torchdynamo_orig_callable", None)
        if original is not None:
            setattr(holder, name, original)


PATCH = Patch(
    package="megatron-core",
    versions=MEGATRON_CORE,
    only_without_gpu=True,
    upstream="megatron.core.jit.jit_fuser",
    why="the first call of each of some forty small functions starts a C++ compiler, about 20 s "
    "and more than a test takes, "
    "and fails where there is none",
    until="upstream asks before it compiles, as torch.compile's own switches can",
    change=change,
)
