"""What every format gives to the operations above it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.pt.reader import PtFile, Record


@dataclass(frozen=True, slots=True)
class Where:
    """Where a slot lies: `elems` elements of `dtype` from byte `offset_bytes` of a record."""

    file: PtFile
    record: Record
    offset_bytes: int
    elems: int
    dtype: str


class Checkpoint(Protocol):
    """An opened checkpoint. Nothing of it is executed; only directories and pickles were read."""

    manifest: Manifest

    def where(self, slot: Slot) -> Where:
        """Place of a slot of the manifest. Raises DamagedFileError or ForeignFileError."""
        ...

    @property
    def meta(self) -> Mapping[str, Any]:
        """What the run saved besides element-wise state (scheduler, counters, client state),
        tensors as references."""
        ...
