"""What a conversion is asked for."""

from dataclasses import dataclass, replace

from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.formats.deepspeed.target import Target


@dataclass(frozen=True)
class NamedGroup:
    """A parameter group as an optimizer without pipeline has it, and the names in its order."""

    group: ParamGroup
    names: tuple[str, ...]


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

    @property
    def dtype(self) -> str:
        """That of the training copies."""
        trained = (spec.dtype for spec in self.source.params if spec.kind == "trainable")
        return self.target.dtype or next(trained, "float32")

    @property
    def params(self) -> dict[str, ParamSpec]:
        """Parameters as the target trains them: in one dtype; module buffers keep theirs. Files are
        written with the dims in their own order."""
        on_mesh = [replace(spec.without_chunks(), order=None) for spec in self.source.params]
        return {
            spec.name: spec if spec.kind == "buffer" else replace(spec, dtype=self.dtype)
            for spec in on_mesh
        }
