"""A run in memory, as every operation sees a checkpoint: what it is besides elements of tensors."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.manifest_json import from_json as manifest_of_json
from megatron_ucp.core.manifest_json import to_json as manifest_to_json
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.values import NOT_CODED, coded, decoded
from megatron_ucp.errors import DamagedFileError, NotFoundError
from megatron_ucp.formats.byte_files import Where
from megatron_ucp.formats.checkpoint import Checkpoint, Extras
from megatron_ucp.formats.folder import LocalFolder
from megatron_ucp.formats.loss_scale import LossScale

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


def to_json(run: TakenRun) -> str:
    """Text of all of it. Raises TypeError for a value that has no such form."""
    extras = {one.name: coded(_plain(getattr(run.extras, one.name))) for one in fields(run.extras)}
    beside = {name: coded(data) for name, data in run.beside.items()}
    said = {"name": run.name, "extras": extras, "beside": beside, "notes": run.notes}
    return json.dumps({"manifest": manifest_to_json(run.manifest), **said})


def of_json(text: str, file: str) -> TakenRun:
    """What `to_json` wrote. Raises DamagedFileError."""
    try:
        said = json.loads(text)
        found = {name: decoded(value) for name, value in said["extras"].items()}
        extras = Extras(**{**found, "scaler": LossScale(**found["scaler"])})
        beside = {str(name): bytes(decoded(data)) for name, data in said["beside"].items()}
        manifest = manifest_of_json(said["manifest"], file)
        return TakenRun(said["name"], manifest, extras, beside, tuple(said["notes"]))
    except NOT_CODED as error:
        found = f"{type(error).__name__}: {error}"
        raise DamagedFileError("this is no run in memory", file=file, found=found) from error


def _plain(value: Any) -> Any:
    return value.said if isinstance(value, LossScale) else value


class RunInMemory(Checkpoint):
    """A run that was taken, where `held` says how its elements lie now."""

    def __init__(self, taken: TakenRun, held: Manifest) -> None:
        super().__init__(LocalFolder(taken.name))
        self.manifest, self._taken, self.main_file = held, taken, taken.name

    @property
    def file_names(self) -> list[str]:
        return [_NAME]

    @property
    def notes(self) -> list[str]:
        return [*self._taken.notes]

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
