"""What resumes in every engine besides tensors, in the same way."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines.built import Values
from megatron_ucp.engines.loader import restore_position
from megatron_ucp.engines.random_states import Restored
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import How, KeepsPosition


@dataclass(frozen=True)
class CommonExtras:
    """Values of a checkpoint, ready to be set."""

    counters: Mapping[str, int]
    scaler: LossScale
    client_state: Mapping[str, Any]
    randoms: Restored
    position: Mapping[str, Any] | None
    loader: KeepsPosition | None

    @classmethod
    def taken(
        cls, source: Checkpoint, values: Values, how: How, mesh: Mesh, place: tuple[int, int]
    ) -> "CommonExtras":
        """`place` is this rank's data-parallel rank and pipeline stage. Raises StateMismatchError
        where the data position does not fit the loader."""
        saved = source.extras
        client = saved.client_state
        if how.own is not None:
            client = how.own.over(client, how.apart)
        position = None if how.module_only else saved.data_position
        if how.loader is not None and position is not None:
            how.loader.check(position, str(source.folder))
        rank = agree.world()[0]
        randoms = Restored.plan(source, mesh, rank, place) if how.rng else Restored(None)
        built = values.built(dict(client), "client_state")
        return cls(saved.counters, saved.scaler, built, randoms, position, how.loader)

    def go_on(self) -> list[str]:
        """Sets random states and the data position; returns notes."""
        self.randoms.apply()
        notes = [self.randoms.note] if self.randoms.note else []
        return notes + restore_position(self.loader, self.position)
