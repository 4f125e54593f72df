"""What the package says about versions of an engine that it was not tested with."""

from megatron_ucp import say
from megatron_ucp.reshard.doctor import CHECKED, imported_version, is_tested

_said: set[str] = set()  # packages, in this process


def check_versions() -> None:
    """Says, once a process, of each engine that is imported in a version outside of `CHECKED`.
    Nothing is refused for it: files are told by their keys, live objects by what they have."""
    for package, checked in CHECKED.items():
        found = imported_version(package)
        if found is None or package in _said or is_tested(package, found):
            continue
        _said.add(package)
        say.note(
            f"{package} {found} is no version that was tested ({', '.join(checked)}): what is not "
            "known of its files and objects is an error"
        )
