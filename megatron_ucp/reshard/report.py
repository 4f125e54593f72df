"""What a load did."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ucp import say


@dataclass(frozen=True)
class Report:
    """What a load did, on this rank. `notes` name everything that was not carried over bit for bit,
    or not at all. `run_id` is that of the run which saved it, where the manifest says one.
    `all_read_bytes` is `read_bytes` of all ranks; `left_out` what of the state was not asked for.
    """

    path: str
    source: str
    target: str
    read_bytes: int
    checked_bytes: int
    unchecked_bytes: int
    seconds: float
    client_state: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    global_steps: int = 0
    run_id: str = ""
    all_read_bytes: int = 0
    left_out: str = ""

    def __str__(self) -> str:
        summed = "checksums not compared"
        if self.checked_bytes:
            both = self.checked_bytes, self.checked_bytes + self.unchecked_bytes
            whole = say.amount(both[0]) if not self.unchecked_bytes else say.of(*both)
            summed = f"checksums of {whole} compared"
        left_out = f", without {self.left_out}" if self.left_out else ""
        return (
            f"loaded step {self.global_steps:,} ({self.path}){left_out}: {self.source} -> "
            f"{self.target}; {say.amount(self.all_read_bytes)} in {say.duration(self.seconds)}, "
            f"{summed}"
        )
