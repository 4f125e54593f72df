"""The versions that this package was checked with, and what it says about others."""

import warnings
from importlib.metadata import PackageNotFoundError, version

CHECKED = {"deepspeed": ("0.19.8",), "megatron-core": ("0.16.1",)}


def check_versions() -> None:
    """Warns once per version that was not checked; formats are told by their keys, live attributes
    are read as checked."""
    for package, checked in CHECKED.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        if found not in checked:
            warnings.warn(
                f"megatron_ucp was checked with {package} {', '.join(checked)}, found {found}",
                stacklevel=3,
            )
