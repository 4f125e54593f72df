"""A format as somebody would add one: all slots of a training state in one safetensors file, beside
the package's own manifest. What it takes to be read, and the writer that saves of an engine need.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megatron_ucp.core.manifest import FILE_NAME, FileEntry
from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.save import Written
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.byte_files import Record, Where
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint, Extras
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.hugging_face.safetensors_file import SafetensorsFile
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.manifest_beside import ManifestBeside
from megatron_ucp.formats.output_folder import Syncs, entry_of
from megatron_ucp.reshard.fingerprint import Sums

STATES, EXTRAS = "toy_states.safetensors", "toy_extras.json"
_MAX_BYTES = 2**20  # of the extras


def key_of(slot: Slot) -> str:
    """The name of a slot in the file: the number of its buffer, and the state."""
    return f"{slot.buffer}.{slot.state}"


class ToyCheckpoint(Checkpoint):
    """A tag folder of this format. Raises NotFoundError, ForeignFileError, DamagedFileError."""

    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self.main_file = folder / STATES
        with self.closed_on_failure():
            self._closing.callback(self.evidence.close)
            self._states = SafetensorsFile(folder.open(STATES))
            self._closing.callback(self._states.close)
            if self.evidence.manifest is None:
                raise DamagedFileError("no manifest lies beside the states", file=self.main_file)
            self.manifest = self.evidence.manifest
            for place in self.manifest.parts_of(0):
                for state, _ in self.manifest.buffers[place[0]].states:
                    self.where(Slot(*place, state))

    @cached_property
    def evidence(self) -> ManifestBeside:
        return ManifestBeside(self.folder, [STATES])

    @property
    def file_names(self) -> list[str]:
        return [STATES]

    def file(self, name: str) -> SafetensorsFile:
        return self._states

    def where(self, slot: Slot) -> Where:
        name, buffer = key_of(slot), self.manifest.buffers[slot.buffer]
        wanted = (buffer.dtype_of(slot.state), (buffer.of(slot.state).elems(slot.part),))
        entry = self._states.tensors.get(name)
        if entry is None or (entry.dtype, entry.shape) != wanted:
            raise DamagedFileError(
                "a slot is not in the file as the manifest says it",
                file=self.main_file,
                parameter=buffer.first_param,
                expected=f"{name}: {wanted}",
                found=entry,
            )
        return self._states.place(name)

    def records(self, name: str) -> list[tuple[Record, str]]:
        return [(self._states.record(one), self._states.tensors[one].dtype) for one in self._names]

    @property
    def _names(self) -> list[str]:
        return [*self._states.tensors]

    def read_extras(self) -> Extras:
        said = json.loads(self.folder.small(EXTRAS, _MAX_BYTES))
        return Extras(said["counters"], None, LossScale(), None, said["client_state"])


class ToyFormat:
    """The row of the table of formats."""

    def recognises(self, folder: Folder) -> bool:
        return folder.is_file(STATES) and folder.is_file(FILE_NAME)

    def open(self, folder: Folder, told: CallerModel) -> Checkpoint:
        return ToyCheckpoint(folder)


class ToyFiles:
    """What a save writes into the folder `aside`: copies of the `slots`, and the `extras`."""

    def __init__(
        self, aside: Path, slots: Mapping[Slot, torch.Tensor], extras: Any, sums: Sums, sync: Syncs
    ) -> None:
        self._aside, self._sums, self._sync = aside, sums, sync
        self._slots = {key_of(slot): memory.clone() for slot, memory in slots.items()}
        self._extras = json.dumps(extras)

    def write(self) -> Written:
        """Raises OSError."""
        save_file(self._slots, self._aside / STATES)
        (self._aside / EXTRAS).write_text(self._extras)
        paths = [self._aside / name for name in (STATES, EXTRAS)]
        for path in paths:
            self._sync(path)
        return Written(sum(path.stat().st_size for path in paths), self._sums)

    def close(self, ranks: Sequence[Written]) -> list[FileEntry]:
        """Both are whole. Raises OSError."""
        return [entry_of(self._aside / name) for name in (STATES, EXTRAS)]
