"""What is wrong with a checkpoint, collected instead of raised. Imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_ucp.errors import UcpError
from megatron_ucp.formats.checkpoint import Checkpoint

Progress = Callable[[int, int], None]  # (done, total)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    what: str
    file: str = ""
    parameter: str = ""
    expected: str = ""
    found: str = ""


def some(count: int, what: str) -> str:
    """A number of things: "no faults", "1 fault", "2 faults"."""
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def checked(source: Checkpoint) -> str:
    """What a line says of checksums: everything that was read was compared, where there are any."""
    has_all = all(source.file(name).has_checksums for name in source.file_names)
    return "every byte read was checked" if has_all else "not all of the source has checksums"


def in_short(error: UcpError) -> str:
    """What an error says, and of which file."""
    return error.problem + (f" ({Path(error.file).name})" if error.file else "")


def finding_of(error: UcpError) -> Finding:
    shown = [
        str(value) if value is not None else ""
        for value in (error.file, error.parameter, error.expected, error.found)
    ]
    return Finding(error.problem, *shown)
