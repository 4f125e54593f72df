"""Runtime patches for the installed deepspeed and megatron-core: one module per defect, applied by
name, never at import.

    import megatron_ucp_patches
    megatron_ucp_patches.apply("round_robin_links")

A module `patches/NAME.py` holds one `PATCH`. It states the upstream function, the versions that it
is for, why it is needed and when it can go, and has a test that fails without it. `apply` refuses a
version that the patch does not know. A patch for machines without a GPU does nothing where there is
one.
"""

import importlib
import logging
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from megatron_ucp.errors import UnsupportedError, UsageError


@dataclass(frozen=True)
class Patch:
    """One defect of one upstream function, and `change`, which replaces it in this process."""

    package: str
    versions: tuple[str, ...]
    upstream: str
    why: str
    until: str
    change: Callable[[], None]
    only_without_gpu: bool = False  # the defect is that there is no GPU


logger = logging.getLogger(__name__)
_applied: set[str] = set()


def names() -> list[str]:
    """Names of all patches."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find(name: str) -> Patch:
    """A patch by name. Raises UsageError."""
    if name not in names():
        raise UsageError("there is no such patch", expected=", ".join(names()), found=name)
    return importlib.import_module(f"{__name__}.{name}").PATCH


def apply(name: str) -> bool:
    """Applies a patch to this process. Twice is once. Returns whether it is in force; False, with a
    line in the log, where a patch for machines without a GPU meets one.

    Raises UsageError for an unknown name, UnsupportedError for a version of the package that the
    patch does not know.
    """
    patch = find(name)
    if name in _applied:
        return True
    if patch.only_without_gpu and has_gpu():
        logger.info("the patch %s does nothing here: it is for machines without a GPU", name)
        return False
    try:
        found = version(patch.package)
    except PackageNotFoundError:
        found = "none"
    if found not in patch.versions:
        raise UnsupportedError(
            f"the patch {name} does not know this version of {patch.package}",
            expected=", ".join(patch.versions),
            found=found,
            fix=f"check whether {patch.upstream} still has the defect: {patch.why}",
        )
    patch.change()
    _applied.add(name)
    return True


def has_gpu() -> bool:
    """Whether PyTorch sees a GPU."""
    import torch

    return torch.cuda.is_available()
