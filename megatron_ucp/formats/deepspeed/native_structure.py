"""A manifest as the ranks of a run hold it: what each one writes of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import (
    LocalExperts,
    counts_of,
    expert_name,
    in_own_file,
)
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import Manifest, ParamGroup
from megatron_ucp.core.mesh import Coords
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.base import Extras
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.of_ranks import Apart


@dataclass(frozen=True)
class RunSettings:
    """What written files say besides the manifest. `extras` are the source's; `config`, `version`
    and `dtype` those of the run that the files are for; `scaler` is the loss scale; `int_steps`
    says whether the optimizer keeps `step` as an int; `scheduler` gives the state of a stage's
    scheduler; `apart` are the values that ranks have otherwise than each other."""

    extras: Extras
    config: Mapping[str, Any]
    version: str
    dtype: str
    scaler: LossScale
    clip_grad: float
    int_steps: bool
    scheduler: Callable[[int], Any]
    apart: Apart = field(default_factory=Apart)


@dataclass(frozen=True)
class Own:
    """One rank: its number, its stage, tensor-parallel rank and partition of the dense buffers, its
    expert-tensor-parallel rank and its experts. `parts` has for each buffer that it holds its
    place along the axes that cut the buffer, and its partition."""

    rank: int
    stage: int
    tp: int
    part: int
    etp: int
    experts: LocalExperts
    parts: Mapping[int, tuple[Coords, int]]

    def slot(self, buffer: int, state: str) -> Slot:
        """The slot that the rank has of a state of a buffer."""
        cut, part = self.parts[buffer]
        return Slot(buffer, cut, part, state)


class Structure:
    """A manifest, rank by rank. `layers` are those of its pipeline."""

    def __init__(self, manifest: Manifest, run: RunSettings, layers: Layers | None) -> None:
        self.manifest, self.run, self.mesh = manifest, run, manifest.mesh
        self.layers = layers if manifest.mesh.pp > 1 else None
        self._pipe = {name: pipe for pipe, name in manifest.names.items()}
        self._number = {
            (buffer.stage, buffer.members[0].param): b
            for b, buffer in enumerate(manifest.buffers)
            if not buffer.stepped
        }
        self._counts = counts_of(spec.name for spec in manifest.params)

    def _own(self, rank: int) -> Own:
        """What a rank writes of."""
        at, (ep, etp) = self.mesh.coord(rank), self.mesh.expert_place(rank)
        parts = {number: (cut, part) for number, cut, part in self.manifest.parts_of(rank)}
        experts = LocalExperts.among(self._counts, self.mesh.ep, ep)
        return Own(rank, at.pp, at.tp, self.mesh.partition_of(rank), etp, experts, parts)

    # ---------------------------------------------------------------- the structure of a stage

    def _buffers(self, own: Own) -> list[tuple[int, FlatBuffer]]:
        """The optimizer's buffers that a rank holds, group by group, with their numbers in the
        manifest."""
        held = [(number, self.manifest.buffers[number]) for number in own.parts]
        return sorted(
            ((b, buffer) for b, buffer in held if buffer.stepped),
            key=lambda entry: (entry[1].group or 0, entry[0]),
        )

    def _groups(self, own: Own) -> list[tuple[ParamGroup, list[int]]]:
        """Each parameter group of a rank, and the places of its buffers among the rank's."""
        held = enumerate(self._buffers(own))
        places = grouped((buffer.group or 0, at) for at, (_, buffer) in held)
        return [(self.manifest.groups[number], places[number]) for number in sorted(places)]

    def _values(self, own: Own, kind: str) -> list[tuple[int, str]]:
        """Frozen parameters or module buffers of a rank: number of the buffer, and name."""
        held = [(b, name) for (_, name), b in self._number.items() if b in own.parts]
        return [(b, name) for b, name in held if self.manifest.by_name[name].kind == kind]

    def _apart(self, name: str) -> bool:
        """Whether a parameter lies in an expert file."""
        return in_own_file(name, self.mesh.experts_apart)

    def _local(self, name: str) -> Ints:
        return self.manifest.local_shape(name)

    def _named(self, name: str) -> str:
        """The name that the engine's module gives a parameter."""
        return self._pipe.get(name, name) if self.layers else name

    def _mp(self, stage: int, tp: int) -> int:
        return stage * self.mesh.tp + tp

    def _in_module(self, name: str, own: Own) -> str:
        """The name of the tensor in which a rank's module keeps a parameter."""
        part = expert_name(name)
        stacked = part is not None and part.is_slice
        return part.layer if part is not None and stacked else self._own_name(name, own)

    def _own_name(self, name: str, own: Own) -> str:
        """The name that a rank's module gives one of its parameters."""
        return self._named(own.experts.own_name(name) or name)
