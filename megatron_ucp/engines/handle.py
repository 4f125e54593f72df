"""What this package does with a live engine, under the same names whatever trains in it."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_ucp.engines.background import wait, wait_together
from megatron_ucp.engines.export import export
from megatron_ucp.engines.load import load
from megatron_ucp.engines.memory_steps import steps_of
from megatron_ucp.engines.reports import Reports, report
from megatron_ucp.engines.saves import SaveReport
from megatron_ucp.engines.taking import LentRun, Taking
from megatron_ucp.families.base import Model
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine, Holder
from megatron_ucp.reshard.fingerprint import Fingerprint, of_memories
from megatron_ucp.reshard.hugging_face.exported import Exported
from megatron_ucp.reshard.report import Report


class Handle:
    """An attached engine, as its attribute `ucp`. `program` is the engine itself, whose bare model
    (of one chunk) is `module`, of the family's `model` if it is of any. `options` are those of
    `load` that `attach` was given: the default of every call that loads, holds or resizes."""

    def __init__(
        self,
        program: Any,
        module: Any,
        model: Model | None,
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.program, self.module, self.model, self.options = program, module, model, options

    def describe(self) -> Engine:
        """The engine as it is. Collective."""
        raise NotImplementedError

    def present(self) -> Holder:
        """The engine as it is, with the states that its optimizer has now. Collective; nothing in
        it is changed."""
        raise NotImplementedError

    def to_fill(self, family: Any) -> Engine:
        """The engine, which a load fills; `family` is the load's. Collective. Raises a UcpError on
        every rank where it can't be filled exactly."""
        raise NotImplementedError

    def lent(self, how: Taking) -> LentRun:
        """The engine as a run that a resize moves from; nothing in it is changed. Collective.
        Raises a UcpError on every rank."""
        raise NotImplementedError

    def require_usable(self) -> None:
        """Raises EngineUnusableError on every rank where a load failed on any, or the engine's
        memory was let go of. Collective."""
        raise NotImplementedError

    @agree.door("the fingerprint")
    def fingerprint(self) -> Fingerprint:
        """As `ucp.fingerprint` of the engine. Collective."""
        self.require_usable()
        return of_memories(self.present())

    def save(self, save_dir: Any, **options: Any) -> SaveReport:
        """As `engine.save_checkpoint`, or `ucp.save`."""
        raise NotImplementedError

    def load(self, path: str | Path, tag: str | None = None, **options: Any) -> Report:
        """As `ucp.load`."""
        return load(self.program, path, tag, **options)

    @agree.door("the export")
    def export_hf(self, dst: str | Path, *args: Any, **options: Any) -> Exported:
        """The weights as `ucp.export_hf` of the engine writes them; see `export`. A save that is
        under way is there before."""
        wait_together(self.program)
        self.require_usable()
        return export(self.describe, self.module, self.model, dst, *args, **options)

    def close(self) -> None:
        """The engine trains no more: what is under way is there before, and the steps that it kept
        in memory are what is left of it. Raises as `ucp.wait`."""
        wait(self.program)
        if (kept := steps_of(self.program)) is not None:
            kept.close()

    def report(self) -> Reports:
        """As `ucp.report`."""
        return report(self.program)
