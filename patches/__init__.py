"""Runtime patches for the installed deepspeed and megatron-core: one module per defect, applied by
name, never at import.

    import megatron_ucp_patches
    megatron_ucp_patches.apply("round_robin_links")

A module `patches/NAME.py` holds one `PATCH`. It states the upstream function, the versions that it
is for, why it is needed and when it can go, and has a test that fails without it. `apply` refuses a
version that the patch does not know, and does nothing in a version in which upstream has mended the
defect. A patch for machines without a GPU does nothing where there is one.
"""

import contextlib
import importlib
import logging
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from megatron_ucp.errors import UnsupportedError, UsageError

# Each of these versions has every defect of megatron-core below, unless its patch says otherwise.
# The sources that are tagged core_v0.19.0 call themselves 0.19.1.
MEGATRON_CORE = ("0.16.1", "0.17.1", "0.18.2", "0.19.1", "0.19.2")

# Distribution -> the module that says its version.
MODULES = {"deepspeed": "deepspeed", "megatron-core": "megatron.core"}


@dataclass(frozen=True)
class Patch:
    """One defect of one upstream function, and `change`, which replaces it in this process.
    `versions` have the defect; in `mended` it was looked for and is gone."""

    package: str
    versions: tuple[str, ...]
    upstream: str
    why: str
    until: str
    change: Callable[[], None]
    mended: tuple[str, ...] = ()
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
    line in the log, where a patch for machines without a GPU meets one and where upstream has
    mended the defect.

    Raises UsageError for an unknown name, UnsupportedError for a version of the package that the
    patch does not know.
    """
    patch = find(name)
    if name in _applied:
        return True
    if patch.only_without_gpu and has_gpu():
        logger.info("the patch %s does nothing here: it is for machines without a GPU", name)
        return False
    found = version_of(patch.package)
    if found in patch.mended:
        logger.info(
            "the patch %s does nothing here: %s %s has no such defect", name, patch.package, found
        )
        return False
    if found not in patch.versions:
        raise UnsupportedError(
            f"the patch {name} does not know this version of {patch.package}",
            expected=", ".join(patch.versions + patch.mended),
            found=found,
            fix=f"check whether {patch.upstream} still has the defect: {patch.why}",
        )
    patch.change()
    _applied.add(name)
    return True


def version_of(package: str) -> str:
    """The version of an upstream package, as "0.19.2"; "none" where it is not there.

    The imported module says it: a checkout of Megatron-LM on the path comes before a distribution
    of megatron-core that is installed beside it. megatron-core appends the git hash of the current
    folder ("0.19.2+446de22"), which is cut off. A module that nobody has imported yet is not
    imported for this while a distribution says its version: that takes seconds, and the patch
    `no_torch_compile` has to be the first to do it.
    """
    name = MODULES[package]
    if name not in sys.modules:
        with contextlib.suppress(PackageNotFoundError):
            return version(package).split("+")[0]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        return "none"
    return module.__version__.split("+")[0]


def has_gpu() -> bool:
    """Whether PyTorch sees a GPU."""
    import torch

    return torch.cuda.is_available()
