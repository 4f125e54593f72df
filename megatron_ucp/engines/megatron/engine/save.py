"""`save` of megatron-core's stack: a distributed checkpoint that stock Megatron-LM and every engine
here load on any mesh.

All ranks make the same plan of the files from the manifest, and each writes the elements that it
has to their places: nothing is gathered. Files are written aside; the folder gets its name when all
of them are on disk.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ucp import say
from megatron_ucp.core.flat import Scalars, States
from megatron_ucp.core.manifest import (
    MOVED_LATEST,
    RECORDED,
    RUN,
    TAG,
    FileEntry,
    Manifest,
)
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.engines import random_states
from megatron_ucp.engines.loader import ResumableLoader
from megatron_ucp.engines.megatron.engine.flags import plain_flags
from megatron_ucp.engines.megatron.engine.inner import inner_optimizers, kind_of
from megatron_ucp.engines.megatron.engine.live import LiveMegatron, describe
from megatron_ucp.engines.megatron.engine.output import SavedStates, SavedWeights, StackOutput
from megatron_ucp.engines.megatron.engine.stack import MegatronStack
from megatron_ucp.engines.megatron.names import bare_model
from megatron_ucp.engines.own_values import LiveValues
from megatron_ucp.engines.read_back import KeptValue, kept_of, refuse_strange
from megatron_ucp.engines.saves import (
    SaveReport,
    SaveSink,
    Saving,
    completed,
    ended,
    position_of,
    prune,
    publish,
    require_one_save,
    run_of,
    where_to,
)
from megatron_ucp.engines.unusable import require_usable
from megatron_ucp.errors import SaveError, UnsupportedError, UsageError
from megatron_ucp.families.architecture import FREQUENCY, recorded
from megatron_ucp.formats.base import Extras
from megatron_ucp.formats.durable import Syncs
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.megatron.common_file import CommonFile
from megatron_ucp.formats.megatron.extras import ARGUMENTS_KEY, OPERATIONS
from megatron_ucp.formats.megatron.writer import (
    entries_of,
    finish_files,
)
from megatron_ucp.formats.of_ranks import PER_RANK, PerRank
from megatron_ucp.formats.pointers import MEGATRON_LATEST, iteration_name
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.arguments import plain_path
from megatron_ucp.reshard.folder_sink import FolderOutput
from megatron_ucp.reshard.memories import Memories
from megatron_ucp.reshard.transfer import TransferRun, transfer

_WINDOW_BYTES = 8 << 20
_BEGIN_SYNC_BYTES = 1 << 20  # of a chunk after which the disk begins, while the next one is summed


def save(
    stack: MegatronStack,
    save_dir: str | Path,
    *,
    arguments: Mapping[str, Any] | Any = None,
    durable: bool = True,
    keep_latest: int | None = None,
    rng: bool = True,
    loader: ResumableLoader | None = None,
) -> SaveReport:
    """Saves megatron-core's own stack, as stock Megatron-LM and every engine here load it. Atomic
    and collective. A DeepSpeed engine saves by its own `save_checkpoint`.

    Args:
        stack: What `attach_megatron` returned. Its `iteration` names the tag (`iter_0000100`).
        save_dir: The folder above the tags; its pointer then names the new one.
        arguments: Megatron-LM's flags (a Namespace or a mapping), which its own load asks for.
            Default: those that the model shows.
        durable: Whether files are on disk before they count.
        keep_latest: How many whole tags of this run are left. Default: all.
        rng: Whether random states are kept.
        loader: A `ResumableLoader`, whose position is kept.

    Returns:
        What was done: path, mesh, step, bytes, seconds, notes.

    Raises:
        SaveError: Where a file can't be written, on every rank; older tags are as they were.
        UsageError: Before the first step, and for another engine.

    Example:
        >>> stack = ucp.attach_megatron(model, optimizer, opt_param_scheduler)
        >>> saved = ucp.save(stack, "megatron")
    """
    with agree.together():
        _refuse_other(stack)
        folder = Path(plain_path(save_dir))
        how = Saving(durable, keep_latest, rng, loader)
    started = time.perf_counter()
    tag = iteration_name(stack.iteration)
    sync = Syncs(how.durable)
    job = _Job(stack, *_described(stack))
    notes, written_bytes = _save(job, folder, tag, arguments, how, sync)
    report = SaveReport(
        str(folder / tag),
        str(stack.mesh),
        stack.iteration,
        written_bytes,
        time.perf_counter() - started,
        sync.seconds,
        durable=how.durable,
        notes=tuple(notes),
    )
    return ended(stack, report)


def _save(
    job: "_Job", folder: Path, tag: str, arguments: Any, how: Saving, sync: Syncs
) -> tuple[list[str], int]:
    """Writes the tag; returns the notes, and the bytes of all files. Collective. Raises as
    `save`."""
    with agree.together() as block:
        block.value = where_to(folder, tag), how.asked()
    require_one_save(block.values)
    apart = job.own.differing(agree.collect(job.own.digest))
    written = _Tag(job, folder, tag, how, sync, apart)
    close = partial(job.close, arguments=arguments)
    files, parts = job.output.files(), job.output.parts
    output = FolderOutput(parts, files, close, written.publish, "save", written.each)
    with agree.together():
        sink = SaveSink(folder, tag, output, sync)
    source = Memories(str(folder / tag), job.states, SavedWeights(job.states))
    with say.progress("save") as advance:
        transfer(source, sink, run=TransferRun(progress=advance))
    return agree.gather((job.notes, written.size_bytes))[0]


@dataclass
class _Tag:
    """What a save adds to its tensors: `apart` is what differs from rank to rank. `size_bytes` are
    those of all files, once they have their names."""

    job: "_Job"
    folder: Path
    tag: str
    how: Saving
    sync: Syncs
    apart: PerRank
    size_bytes: int = 0

    def each(self, aside: Path, rank: int) -> list[Path]:
        """Writes what a rank has for itself."""
        beside = [random_states.write(aside, rank)] if self.how.rng else []
        return beside + ([self.job.own.write(aside, rank, self.apart)] if self.apart else [])

    def publish(self, aside: Path) -> None:
        """The manifest, the name, the pointers; then older tags go."""
        job, folder = self.job, self.folder
        said = {TAG: self.tag, RUN: run_of(job.stack).id}
        said |= {PER_RANK: self.apart.as_value()} if self.apart else {}
        whole = _recorded(job.manifest, entries_of(aside), self.how.loader, said)
        job.notes += publish(aside, folder, to_json(whole), MEGATRON_LATEST, self.sync)
        job.notes += prune(folder, self.how.keep_latest, job.stack)
        self.size_bytes = whole.size_bytes


def _refuse_other(stack: Any) -> None:
    if not isinstance(stack, MegatronStack):
        raise UsageError(
            "ucp.save is for megatron-core's own stack",
            expected="what ucp.attach_megatron returned",
            found=type(stack).__name__,
            fix="an engine of DeepSpeed saves by its own engine.save_checkpoint",
        )


def _described(stack: MegatronStack) -> tuple[LiveMegatron, Manifest]:
    """The engine with the states that its optimizers have now. Collective."""
    with agree.together():
        refuse_strange(_kept(stack), SaveError)
        require_usable(stack.optimizer)
    live = describe(stack)
    live.finish_gathers()
    with agree.together() as told:
        told.value = live.own.present()
    states, scalars = _one_of([one for own in told.values for one in own])
    buffers = tuple(
        replace(
            buffer,
            states=(*buffer.states, *states),
            members=tuple(replace(member, scalars=scalars) for member in buffer.members),
        )
        if buffer.stepped
        else buffer
        for buffer in live.manifest.buffers
    )
    run = {
        random_states.STEPS: stack.iteration,
        random_states.SEED: torch.initial_seed(),
        "skipped_steps": stack.skipped_iterations,
        RECORDED: recorded(stack.model.sizes, bare_model(stack.chunks[0])),
    }
    return live, replace(live.manifest, buffers=buffers, run=run)


def _kept(stack: MegatronStack) -> Iterator[KeptValue]:
    """Plain values that the files hold."""
    for inner in inner_optimizers(stack.optimizer):
        groups = inner.optimizer.param_groups
        yield from kept_of("scheduler", stack.scheduler, groups, live=False)


def _one_of(found: list[tuple[States, Scalars]]) -> tuple[States, Scalars]:
    """What all pieces of all ranks have. Raises UsageError where it is not the same, or none, or
    not in fp32."""
    states, scalars = found[0] if found else ((), {})
    if any(one != found[0] for one in found) or not states:
        raise UsageError(
            "there is nothing that Megatron-LM could load as the state of an optimizer",
            expected="the same states and step on every rank",
            found=f"{found[0]} and others" if states else "none, before the first step",
            fix="save after the first step",
        )
    if odd := [f"{state} in {dtype}" for state, dtype in states if dtype != "float32"]:
        raise UnsupportedError(
            "the optimizer keeps a state in another dtype than megatron-core's files have",
            expected="float32",
            found=", ".join(odd),
            fix="keep the optimizer's states in fp32: leave --exp-avg-dtype and "
            "--exp-avg-sq-dtype out",
        )
    return states, scalars


class _Job:
    """One save on its way: what is written, the same on every rank, and what this rank has."""

    def __init__(self, stack: MegatronStack, live: LiveMegatron, manifest: Manifest) -> None:
        self.stack, self.live, self.manifest = stack, live, manifest
        self.states = SavedStates(manifest, live)
        buffers = {value.name: value.tensor for value in live.own.values if value.kind == "buffer"}
        self.own = LiveValues(buffers, {}, None, False, {})
        self.notes = list(live.own.taken_as)
        self.kind = kind_of(stack.optimizer)
        apart = isinstance(getattr(bare_model(stack.chunks[0]).config, FREQUENCY, 1), list)
        self.output = StackOutput(manifest, self.kind, apart)

    def close(self, aside: Path, arguments: Any) -> None:
        """Writes what is no element. Raises OSError."""
        common = self._common(arguments, str(aside))
        finish_files(aside, self.output.plan, common.output())
        self.notes += common.notes

    def _common(self, arguments: Any, file: str) -> CommonFile:
        """What stands in `common.pt`."""
        stack = self.stack
        said = plain_flags(arguments)
        counters = {
            "global_steps": stack.iteration,
            "global_samples": stack.consumed_samples,
            "skipped_steps": stack.skipped_iterations,
        }
        schedule = None if stack.scheduler is None else stack.scheduler.state_dict()
        client = {ARGUMENTS_KEY: said, OPERATIONS: stack.floating_point_operations}
        extras = Extras(counters, schedule, self._scaler(), None, client)
        mesh, apart = stack.mesh, stack.mesh.experts_apart
        return CommonFile(self.manifest, extras, mesh, file, self.kind, apart)

    def _scaler(self) -> LossScale:
        """The loss scale, where it changes."""
        scaler = next((getattr(one, "grad_scaler", None) for one in self.live.own.inner), None)
        if scaler is None or not hasattr(scaler, "_growth_tracker"):
            return LossScale()
        return LossScale.of_megatron(
            float(scaler.scale),
            scaler._growth_tracker,
            self.stack.iteration,
            scaler.growth_interval,
            (scaler.hysteresis, scaler._hysteresis_tracker),
        )


def _recorded(
    manifest: Manifest,
    entries: list[FileEntry],
    loader: ResumableLoader | None,
    said: Mapping[str, Any],
) -> Manifest:
    """The manifest beside the files: mesh, random states, position of the data, and what is `said`
    of the save. Where an element lies is said by the files' own index."""
    return completed(manifest, entries, {**said, **position_of(loader), MOVED_LATEST: True})
