"""What stands behind `engine.ucp`: every operation on one live engine, and its reports."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.manifest import RECORDED
from megatron_ucp.core.names import dtype_name
from megatron_ucp.engines.background import wait, wait_together
from megatron_ucp.engines.hold import HoldOptions, MemoryRun
from megatron_ucp.engines.live import config_of
from megatron_ucp.engines.load import load
from megatron_ucp.engines.memory import KeptReport, steps_of
from megatron_ucp.engines.record import HANDLE, LOADED, SAVED
from megatron_ucp.engines.save import SaveReport
from megatron_ucp.errors import UsageError
from megatron_ucp.families.family import Model
from megatron_ucp.families.settings import recorded
from megatron_ucp.formats.hugging_face.checkpoint import parse_size
from megatron_ucp.formats.store import location
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine, Holder, Report
from megatron_ucp.reshard.fingerprint import Fingerprint, of_memories, of_path
from megatron_ucp.reshard.hugging_face.export import (
    Exported,
    Outgoing,
    beside_weights,
    check_output,
    export_live,
    training_dtype,
)
from megatron_ucp.reshard.hugging_face.names import config_for, needs_family, twin_of
from megatron_ucp.reshard.look import CHECKED, imported_version, is_tested
from megatron_ucp.reshard.transfer import TransferRun

# ---- versions
#
# What the package says about versions of an engine that it was not tested with.


_said: set[str] = set()  # packages, in this process


def check_versions() -> None:
    """Says, once a process, of each engine that is imported in a version outside of `CHECKED`.
    Nothing is refused for it: files are told by their keys, live objects by what they have."""
    for package, checked in CHECKED.items():
        found = imported_version(package)
        if found is None or package in _said or is_tested(package, found):
            continue
        _said.add(package)
        say.note(
            f"{package} {found} is no version that was tested ({', '.join(checked)}): what is not "
            "known of its files and objects is an error"
        )


# ---- reports
#
# What was last done with a live engine.


@dataclass(frozen=True)
class Reports:
    """The last load and the last save of an engine, and the last step that was kept in memory; None
    for what it has not done."""

    load: Report | None
    save: SaveReport | None
    memory: KeptReport | None = None

    def __str__(self) -> str:
        done = [one for one in (self.load, self.save) if one is not None]
        lines = [line for one in done for line in (str(one), *(f"note: {n}" for n in one.notes))]
        return "\n".join(lines) or "neither loaded nor saved"


def report(engine: Any) -> Reports:
    """What the last load and the last save of an engine did, and the last step that it kept in
    memory, on this rank.

    Args:
        engine: A DeepSpeed engine, or what `attach_megatron` returned.

    Returns:
        `load` and `save`: meshes, bytes, seconds, notes. `memory`: step, bytes, seconds. None for
        what has not been done.

    Raises:
        UsageError: For what is no engine.

    Example:
        >>> engine.load_checkpoint("checkpoints")
        >>> ucp.report(engine).load.notes
        ()
    """
    kept = getattr(engine, "__dict__", None)
    if kept is None or not (hasattr(engine, "module") or hasattr(engine, "chunks")):
        raise UsageError(
            "this is no engine",
            expected="a DeepSpeed engine, or what ucp.attach_megatron returned",
            found=type(engine).__name__,
            fix="give the engine that was loaded or saved",
        )
    steps = steps_of(engine)
    memory = None if steps is None else steps.report
    return Reports(kept.get(LOADED), kept.get(SAVED), memory)


# ---- fingerprint
#
# The fingerprint of a live engine, or of files.


def fingerprint(engine_or_path: Any, tag: str | None = None) -> Fingerprint:
    """What a training state is, whatever mesh, format or engine holds it. Of an engine collective:
    nothing is moved but sums. Of files all bytes are read, and compared with what the save
    recorded.

    Args:
        engine_or_path: An attached engine (of DeepSpeed, or what `attach_megatron` returned), or a
            checkpoint: the tag's folder or the one above it. Or a file with what `megatron-ucp
            inspect --fingerprint --json` printed.
        tag: Of a checkpoint's folder; default the newest.

    Returns:
        `table`, the CRC-32 of each parameter and state; `settings`, steps and hyper-parameters;
        `digest`, one SHA-256 over both; `differences(other)` names what differs.

    Raises:
        UsageError: For what is neither.
        ForeignFileError: Where files hold another value than was saved, or copies of a parameter
            differ.

    Example:
        >>> print(ucp.fingerprint("checkpoints"))
        >>> ucp.fingerprint(engine).differences(ucp.fingerprint("checkpoints"))
        []
    """
    if isinstance(engine_or_path, str | os.PathLike):
        return of_path(engine_or_path, tag)
    handle: Any = getattr(engine_or_path, HANDLE, None)
    if handle is None:
        raise UsageError(
            "this has no fingerprint",
            expected="an attached engine, or the path of a checkpoint",
            found=type(engine_or_path).__name__,
            fix="attach the engine first: ucp.attach(engine)",
        )
    return handle.fingerprint()


# ---- export
#
# `ucp_export_hf` of every engine: its live weights as a folder of a Hugging Face model.


def export(
    describe: Callable[[], Engine],
    module: Any,
    model: Model | None,
    dst: str | Path,
    dtype: str | None = None,
    max_shard_size: str | int = "5GB",
    config: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> Exported:
    """Writes the masters of an engine, rounded to `dtype` (None: that of training), as the new
    folder `dst`: the same bytes as `export_hf` of a save. Each rank writes its share.

    `describe` gives the engine, whose bare model (of one chunk) is `module`, of the family's
    `model` if it is of any. `config` is a folder with the config.json of the model; without it a
    model of transformers says its own, and a family what it computes. Collective. Raises a UcpError
    on every rank; nothing is left of the folder then.
    """
    folder = location(dst)
    live = describe()
    with agree.together():
        if agree.world()[0] == 0:
            check_output(folder, dtype, ())
        dtype = None if dtype is None else dtype_name(dtype)
        manifest = live.manifest
        if model is not None:
            manifest = replace(manifest, run={RECORDED: recorded(model.sizes, module)})
        chosen = dtype or training_dtype(manifest)
        found = None if config is None else config_for(manifest, config, None)
        given = said_config(module, model) if found is None else found.tree
        family = found.family if found is not None and needs_family(manifest) else ""
        twin = twin_of(manifest, given, family, chosen, str(folder))
        out = Outgoing(manifest, twin, dtype, parse_size(max_shard_size))
        beside = beside_weights(twin, tokenizer, found and found.folder)
    with say.progress("export-hf") as advance:
        done = export_live(live, out, folder, beside, TransferRun(progress=advance))
    say.ended(str(done), done.notes)
    return done


def said_config(module: Any, model: Model | None) -> dict[str, Any] | None:
    """The config of a model of transformers, or of the adapter that peft put around one."""
    adapters = getattr(module, "peft_config", None)
    if isinstance(adapters, dict) and len(adapters) == 1:  # several are refused
        (adapter,) = adapters.values()
        return {name: _plain(value) for name, value in adapter.to_dict().items()}
    config = {} if model is not None else dict(config_of(module))
    if config and not config.get("architectures"):  # which `save_pretrained` says
        config["architectures"] = [type(module).__name__]
    return config or None


def _plain(value: Any) -> Any:
    """As JSON has it: peft keeps module names in sets, and enums for words."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value.value if isinstance(value, Enum) else value


# ---- handle
#
# What this package does with a live engine, under the same names whatever trains in it.


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

    def weights(self) -> Engine:
        """The weights that the engine computes with, as if it had no optimizer. Collective; no
        value is changed."""
        raise NotImplementedError

    def lies_at(self, masters: bool) -> list[object]:
        """As `tensors_lie_at`, of the weights, and of the `masters` with their states."""
        raise NotImplementedError

    def to_fill(self, family: Any) -> Engine:
        """The engine, which a load fills; `family` is the load's. Collective. Raises a UcpError on
        every rank where it can't be filled exactly."""
        raise NotImplementedError

    def lent(self, options: HoldOptions) -> MemoryRun:
        """The engine as a run that a resize moves from; nothing in it is changed. Collective.
        Raises a UcpError on every rank."""
        raise NotImplementedError

    def check_usable(self) -> None:
        """Raises EngineUnusableError where a load failed here."""
        raise NotImplementedError

    def require_usable(self) -> None:
        """As `check_usable`, on every rank where it holds on any. Collective."""
        with agree.together():
            self.check_usable()

    @agree.door("the fingerprint")
    def fingerprint(self) -> Fingerprint:
        """As `ucp.fingerprint` of the engine. Collective."""
        self.require_usable()
        return of_memories(self.present())

    def save(self, save_dir: Any, **options: Any) -> SaveReport:
        raise NotImplementedError

    def load(self, path: str | Path, tag: str | None = None, **options: Any) -> Report:
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
        return report(self.program)
