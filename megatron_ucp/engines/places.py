"""A live engine as all of its places together, of which this rank holds one: what is the same
whatever trains in it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Coords
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.stages import Joined, Stage, join
from megatron_ucp.engines.optimizer_groups import built_groups, set_group
from megatron_ucp.engines.unusable import mark_unusable, mark_usable
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.families.base import Model
from megatron_ucp.formats.base import Told


class OwnPart(Protocol):
    """What a rank holds of its place."""

    @property
    def at(self) -> Coords: ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class LivePlaces:
    """The engine as `stages` of all its `places`, of which this rank is `own`; `program` is what
    steps, and is marked while a load is on its way. Raises ModelMismatchError where they don't fit,
    UnsupportedError where they are not whole."""

    manifest: Manifest

    def __init__(
        self,
        own: OwnPart,
        program: Any,
        stages: Sequence[Stage],
        places: Sequence[Coords],
        fix: str,
    ) -> None:
        found = [stage.at for stage in stages]
        if found != places:
            raise UnsupportedError(
                "the ranks of the engine don't make up whole stages",
                expected=str(places),
                found=str(found),
                fix=fix,
            )
        self.joined: Joined = join(stages)
        self._here, self._groups, self._program = found.index(own.at), own.param_groups, program
        self.first_group = self.joined.first_group[self._here]

    def numbered(self, buffers: Sequence[Any], values: Sequence[Any]) -> list[dict[int, Any]]:
        """This rank's buffers of the optimizer, and its values, by their numbers in the
        manifest."""
        numbers = self.joined.numbers[self._here], self.joined.values[self._here]
        both = zip(numbers, (buffers, values), strict=True)
        return [dict(zip(*pair, strict=True)) for pair in both]

    @property
    def own_groups(self) -> slice:
        """Which of the manifest's groups are this place's."""
        return slice(self.first_group, self.first_group + len(self._groups))

    def tensor(self, slot: Slot) -> torch.Tensor:
        raise NotImplementedError

    def read(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        return self.tensor(slot)[first:last]

    def modules(self) -> Sequence[torch.nn.Module]:
        """What the program has of the model on this rank."""
        raise NotImplementedError

    def mark_unusable(self) -> None:
        mark_unusable(self._program, self.modules())

    def give_up(self) -> None:
        gone = "the memory of this engine went as it was held, as was asked"
        mark_unusable(self._program, self.modules(), gone)

    def mark_usable(self) -> None:
        mark_usable(self._program)

    def built_groups(
        self, groups: Sequence[Mapping[str, Any]], file: str, allow: bool
    ) -> tuple[list[Mapping[str, Any]], list[str]]:
        out, own = list(groups), self.own_groups
        out[own], notes = built_groups(self._groups, groups[own], file, allow)
        return out, notes

    def set_groups(self, groups: Sequence[Mapping[str, Any]], carried: bool) -> list[str]:
        notes: list[str] = []
        own = groups[self.own_groups]
        for number, (group, saved) in enumerate(zip(self._groups, own, strict=True)):
            set_group(number, group, saved, carried, notes)
        return notes


def told_by(model: Model, manifest: Manifest) -> Told:
    """What a family says of checkpoints of its model."""
    twin, rules = model.family.hugging_face, model.family.rules
    shares = None if twin is None else twin.tensors(model.sizes)
    return Told(None, manifest.by_name, model.pipe, rules, shares, like=manifest)
