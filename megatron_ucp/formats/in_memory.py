"""A run in memory, as every operation sees a checkpoint."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.manifest_json import from_json as manifest_of_json
from megatron_ucp.core.manifest_json import to_json as manifest_to_json
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.values import NOT_CODED, coded, decoded
from megatron_ucp.errors import DamagedFileError, NotFoundError
from megatron_ucp.formats.checkpoint import Checkpoint, Extras, Where
from megatron_ucp.formats.folder import LocalFolder
from megatron_ucp.formats.loss_scale import LossScale

_STATE = "state"  # the one name that is compared and asked for, in place of files


@dataclass(eq=False)
class RunInMemory(Checkpoint):
    """A run whose elements lie in the memory of ranks: all that it is besides them, in inert form.

    `original` says what the ranks of the run held, and `manifest` how its elements lie now; `state`
    is what a save writes beside them, and `files` the small files that it would write for each rank
    (random states, and what ranks have otherwise than each other). `name` is what messages and
    reports call it; `left_behind` are notes about what no load gets.
    """

    name: str
    original: Manifest
    manifest: Manifest
    state: Extras
    files: Mapping[str, bytes]
    left_behind: list[str]

    def __post_init__(self) -> None:
        super().__init__(LocalFolder(self.name))
        self.main_file = self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(getattr(self, one.name) for one in fields(self))

    @property
    def notes(self) -> list[str]:
        return [*self.left_behind]

    @property
    def file_names(self) -> list[str]:
        return [_STATE]

    @property
    def recorded(self) -> Manifest:
        """What the run itself said."""
        return self.original

    def read_extras(self) -> Extras:
        return self.state

    def beside(self, name: str) -> bytes | None:
        return self.files.get(name)

    def check(self, name: str, allow: Collection[str] = ()) -> None:
        """Nothing could be another run's."""

    def file(self, name: str) -> Any:
        """Raises NotFoundError: there is none."""
        raise NotFoundError("a run in memory has no files", file=self.folder, found=name)

    def where(self, slot: Slot) -> Where:
        """Raises NotFoundError: elements lie in the memories of the ranks."""
        raise NotFoundError("a run in memory has no files", file=self.folder, found=slot)


def to_json(run: RunInMemory) -> str:
    """Text of all of it, whose elements lie as the ranks held them. Raises TypeError for a value
    that has no such form."""
    extras = {one.name: coded(_plain(getattr(run.state, one.name))) for one in fields(run.state)}
    beside = {name: coded(data) for name, data in run.files.items()}
    said = {"name": run.name, "extras": extras, "beside": beside, "notes": run.notes}
    return json.dumps({"manifest": manifest_to_json(run.original), **said})


def of_json(text: str, file: str) -> RunInMemory:
    """What `to_json` wrote. Raises DamagedFileError."""
    try:
        said = json.loads(text)
        found = {name: decoded(value) for name, value in said["extras"].items()}
        extras = Extras(**{**found, "scaler": LossScale(**found["scaler"])})
        beside = {str(name): bytes(decoded(data)) for name, data in said["beside"].items()}
        manifest = manifest_of_json(said["manifest"], file)
        return RunInMemory(said["name"], manifest, manifest, extras, beside, [*said["notes"]])
    except NOT_CODED as error:
        found = f"{type(error).__name__}: {error}"
        raise DamagedFileError("this is no run in memory", file=file, found=found) from error


def _plain(value: Any) -> Any:
    return value.said if isinstance(value, LossScale) else value
