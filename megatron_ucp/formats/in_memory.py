"""A run in memory, as every operation sees a checkpoint: what it is besides elements of tensors."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import NotFoundError
from megatron_ucp.formats.base import Extras, Where
from megatron_ucp.formats.opened_folder import OpenedFolder

_NAME = "what was taken"  # of the one thing in it that is compared and asked, in place of files


@dataclass(frozen=True)
class TakenRun:
    """All that a live run is besides elements of tensors, in inert form. `manifest` says what the
    ranks of the run held, `beside` has the bytes of the small files that a save would write for
    each rank: random states, and what ranks have otherwise than each other. `name` is what messages
    and reports call it; `notes` say what was left behind."""

    name: str
    manifest: Manifest
    extras: Extras
    beside: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    notes: tuple[str, ...] = ()


class RunInMemory(OpenedFolder):
    """A run that was taken, where `held` says how its elements lie now."""

    def __init__(self, taken: TakenRun, held: Manifest) -> None:
        super().__init__(Path(taken.name))
        self.manifest, self._taken = held, taken
        self.main_file, self.file_names, self.notes = taken.name, [_NAME], [*taken.notes]

    @property
    def recorded(self) -> Manifest:
        """What the run itself said."""
        return self._taken.manifest

    def read_extras(self) -> Extras:
        return self._taken.extras

    def beside(self, name: str) -> bytes | None:
        return self._taken.beside.get(name)

    def check(self, name: str, allow: Collection[str] = (), optimizer: bool = True) -> None:
        """Nothing could be another run's."""

    def file(self, name: str) -> Any:
        """Raises NotFoundError: there is none."""
        raise NotFoundError("a run in memory has no files", file=self.folder, found=name)

    def where(self, slot: Slot) -> Where:
        """Raises NotFoundError: elements lie in the memories of the ranks."""
        raise NotFoundError("a run in memory has no files", file=self.folder, found=slot)
