"""What the package says about versions that it was not checked with."""

import warnings
from importlib.metadata import PackageNotFoundError, version

from megatron_ucp.reshard.doctor import CHECKED


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
