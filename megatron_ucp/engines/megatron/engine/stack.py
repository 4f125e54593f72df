"""A live stack of megatron-core's, as its user handed it over."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines.handle import Handle
from megatron_ucp.families.base import Model
from megatron_ucp.reshard.hugging_face.exported import Exported


@dataclass
class MegatronStack:
    """Chunks of a model in megatron-core's DistributedDataParallel, their optimizer and scheduler.

    `iteration`, `consumed_samples`, `skipped_iterations` and `floating_point_operations` are the
    run's position: a load sets them, a save writes them; in between they are the training loop's.
    `ucp` has what this package does with it; `ucp_export_hf(dst, ...)` is `ucp.export_hf`.
    """

    chunks: list[Any] = field(repr=False)
    optimizer: Any = field(repr=False)
    scheduler: Any = field(repr=False)
    mesh: Mesh
    model: Model = field(repr=False)
    ucp: Handle = field(init=False, repr=False)
    iteration: int = 0
    consumed_samples: int = 0
    skipped_iterations: int = 0
    floating_point_operations: float = 0

    @property
    def ucp_export_hf(self) -> Callable[..., Exported]:
        return self.ucp.export_hf
