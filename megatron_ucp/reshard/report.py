"""What a load did."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ucp import say


@dataclass(frozen=True)
class FingerprintCheck:
    """How many bytes of the ranks' memory were compared with the fingerprint that the save
    recorded, of all that were loaded into it. Not compared is what a load rounds, averages or
    resizes, what each rank has of its own, and padding of a vocabulary."""

    done_bytes: int
    loaded_bytes: int

    def __str__(self) -> str:
        return f"fingerprint of {say.part(self.done_bytes, self.loaded_bytes)} compared"


@dataclass(frozen=True)
class Report:
    """What a load did, on this rank. `notes` name everything that was not carried over bit for bit,
    or not at all. `run_id` is that of the run which saved it, where the manifest says one, and
    `run_origin`, of a run in memory, the tag without an id that it went on from.
    `all_read_bytes` is `read_bytes` of all ranks; `left_out` what of the state was not asked for.
    `fingerprint` is None where the save recorded none, or checksums were not asked for.
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
    run_origin: str = ""
    all_read_bytes: int = 0
    left_out: str = ""
    fingerprint: FingerprintCheck | None = None

    @property
    def _compared(self) -> str:
        """A fingerprint says more than the checksums of what was read whole."""
        if self.fingerprint is not None:
            return str(self.fingerprint)
        if not self.checked_bytes:
            return "checksums not compared"
        both = self.checked_bytes, self.checked_bytes + self.unchecked_bytes
        part = say.part(*both)
        return f"checksums of {part} compared (of whole records: no fingerprint was saved)"

    def __str__(self) -> str:
        left_out = f", without {self.left_out}" if self.left_out else ""
        return (
            f"loaded step {self.global_steps:,} ({self.path}){left_out}: {self.source} -> "
            f"{self.target}; {say.amount(self.all_read_bytes)} in {say.duration(self.seconds)}, "
            f"{self._compared}"
        )
