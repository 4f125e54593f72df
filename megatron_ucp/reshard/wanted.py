"""What a conversion is asked for."""

from dataclasses import dataclass, replace
from functools import cached_property

from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.formats.deepspeed.target import Target


@dataclass(frozen=True)
class NamedGroup:
    """A parameter group as an optimizer without pipeline has it, and the names in its order."""

    group: ParamGroup
    names: tuple[str, ...]

    def of(self, held: frozenset[str]) -> "NamedGroup":
        """The same group of a rank that holds some parameters."""
        own = [name for name in held if name in self._places]
        return replace(self, names=tuple(sorted(own, key=self._places.__getitem__)))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}


@dataclass(frozen=True)
class Wanted:
    """What is converted, and what for. `file` is the source's, for messages; `declared` says
    whether anybody declared how parameters are cut; `permuted` whether the source's groups are in
    the order of `round_robin_gradients`; `layers` are those of the pipeline, where somebody knows
    them."""

    source: Manifest
    target: Target
    file: str
    layers: Layers | None = None
    declared: bool = True
    permuted: bool = False

    @cached_property
    def dtype(self) -> str:
        """That of the training copies."""
        trained = (spec.dtype for spec in self.source.params if spec.kind == "trainable")
        return self.target.dtype or next(trained, "float32")

    @cached_property
    def places(self) -> dict[str, int]:
        """Where each parameter stands among all."""
        return {name: place for place, name in enumerate(self.params)}

    @cached_property
    def params(self) -> dict[str, ParamSpec]:
        """Parameters as the target trains them: in one dtype; module buffers keep theirs. Files are
        written with the dims in their own order."""
        on_mesh = [replace(spec.without_chunks(), order=None) for spec in self.source.params]
        return {
            spec.name: spec if spec.kind == "buffer" else replace(spec, dtype=self.dtype)
            for spec in on_mesh
        }
