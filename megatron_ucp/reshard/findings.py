"""What is wrong with a checkpoint, collected instead of raised."""

from collections.abc import Callable
from dataclasses import dataclass

from megatron_ucp.errors import UcpError

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


def finding_of(error: UcpError) -> Finding:
    shown = [
        str(value) if value is not None else ""
        for value in (error.file, error.parameter, error.expected, error.found)
    ]
    return Finding(error.problem, *shown)
