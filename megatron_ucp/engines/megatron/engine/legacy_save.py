"""`save` of megatron-core's stack as Megatron-LM's older files (`--ckpt-format torch`): a folder
for each model-parallel rank. They hold what its own program gives to `torch.save`, and are written,
brought to disk and named as those of every save are.
"""

import copy
import time
from argparse import Namespace
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from megatron_ucp.core.manifest import MOVED_LATEST, RUN, TAG, Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.megatron.engine.asked import AskedOfStack, described_to_save
from megatron_ucp.engines.megatron.engine.besides import values_of
from megatron_ucp.engines.megatron.engine.flags import flags_of_program
from megatron_ucp.engines.megatron.engine.legacy_tree import (
    buffers_held,
    buffers_value,
    folder_of,
    generators_of,
    model_value,
    refuse,
    require_described,
)
from megatron_ucp.engines.megatron.engine.live import LiveMegatron
from megatron_ucp.engines.megatron.engine.present import PresentStates
from megatron_ucp.engines.megatron.engine.retained import newest, retired
from megatron_ucp.engines.rank_files import RankFiles, Replicas
from megatron_ucp.engines.saves import (
    SaveReport,
    as_save_error,
    position_of,
    require_left,
    require_one_save,
    where_to,
)
from megatron_ucp.engines.taken_files import (
    TakenFiles,
    files_of_rank,
    saved_as_taken,
    write_beside,
)
from megatron_ucp.formats import durable
from megatron_ucp.formats.megatron.rank_folder import MODEL_FILE, OPTIMIZER_FILE
from megatron_ucp.formats.of_ranks import PER_RANK
from megatron_ucp.formats.pointers import MEGATRON_LATEST
from megatron_ucp.reshard import agree


def save_legacy(asked: AskedOfStack) -> SaveReport:
    """As `save`."""
    return saved_as_taken(asked.folder / asked.tag, asked.background, partial(_taken, asked))


def _taken(asked: AskedOfStack, left: ExitStack) -> TakenFiles:
    """Takes everything, and writes what can't wait. Collective."""
    stack, tag = asked.stack, asked.tag
    started, sync = time.perf_counter(), asked.how.syncs(asked.folder, tag)
    present = described_to_save(stack)
    manifest = present.manifest
    flags, before = _begin(asked, present, sync, left)
    own = values_of(present.live)
    apart = own.differing(agree.collect(own.digest))
    files = files_of_rank(Replicas(), sync, asked.background)
    held = _files(asked, present, flags, files)
    with as_save_error(), agree.together():
        beside = write_beside(durable.aside_of(asked.folder, tag), own, apart, asked.how)
    said = {**manifest.run, TAG: tag, MOVED_LATEST: True} | position_of(asked.how.loader)
    said |= {PER_RANK: apart.as_value()} if apart else {}
    interval = asked.retain_interval
    return TakenFiles(
        stack,
        asked.folder,
        tag,
        MEGATRON_LATEST,
        asked.how,
        manifest,
        copy.deepcopy(said),
        files,
        beside,
        [*present.live.own.taken_as],
        started,
        0.0,
        sync,
        held,
        _in_files(manifest),
        partial(retired, asked.folder, before, stack.iteration, manifest.run[RUN], interval, sync),
    )


def _files(
    asked: AskedOfStack, present: PresentStates, flags: Namespace, files: RankFiles
) -> dict[Slot, torch.Tensor]:
    """Gives this rank's values to its files; returns the memory of what they hold. Collective.
    Raises a UcpError on every rank, where an optimizer stepped meanwhile too."""
    generators = generators_of(flags) if asked.how.rng else []
    buffers = buffers_value(asked.stack)
    aside = durable.aside_of(asked.folder, asked.tag)
    with as_save_error(), agree.together():
        _write(present.live, aside, files, (flags, generators, buffers))
    with as_save_error(), agree.together():
        files.share()
    with as_save_error(), agree.together():
        held = _held(present, files, buffers)
        present.require_unstepped()
    return held


def _begin(
    asked: AskedOfStack, present: PresentStates, sync: durable.Syncs, left: ExitStack
) -> tuple[Namespace, int | None]:
    """Everything that can refuse a save before a file is written; then the folder aside, which is
    this job's until `left` removes it. Returns the flags that the files hold, and the iteration of
    the newest save. Collective."""
    before = None
    with as_save_error(), agree.together() as block:
        options = asked.how.asked(ckpt_format=asked.ckpt_format)
        block.value = where_to(asked.folder, asked.tag), options
        require_left(sync)
        refuse(present, asked.stack)
        given = (present.manifest, asked.arguments, asked.how.rng)
        flags = flags_of_program(asked.stack, *given)
        require_described(present.live, flags, str(asked.folder / asked.tag))
        if agree.world()[0] == 0:
            before = newest(asked.folder) if asked.retain_interval else None
            left.enter_context(durable.begin(asked.folder, asked.tag, sync.right))
    require_one_save(block.values)
    return flags, before


def _write(
    live: LiveMegatron, aside: Path, files: RankFiles, values: tuple[Namespace, list, object]
) -> None:
    """Gives this rank's values to its files: the first rank of those that share a folder has one,
    and the first one of those that share buffers. Raises OSError."""
    flags, generators, buffers = values
    mesh, rank = live.manifest.mesh, live.own.rank
    own = folder_of(mesh, rank)
    folder = aside / own.name(mesh)
    is_first = all(folder_of(mesh, other) != own for other in range(rank))
    if is_first:
        folder.mkdir()
        files.save(model_value(live.stack, flags, generators), folder / MODEL_FILE)
    if buffers is not None:
        files.save(buffers, folder / OPTIMIZER_FILE, is_lasting=True)


def _in_files(manifest: Manifest) -> Manifest:
    """The buffers as one rank writes them, for all that share them."""
    buffers = tuple(replace(buffer, partitions=1) for buffer in manifest.buffers)
    return replace(manifest, buffers=buffers)


def _held(present: PresentStates, files: RankFiles, buffers: object) -> dict[Slot, torch.Tensor]:
    """The memory of everything that this rank writes; of buffers of modules, which may differ from
    rank to rank, of all."""
    out = {} if buffers is None else buffers_held(present.live, buffers)
    for number, cut, part in present.parts():
        buffer = present.manifest.buffers[number]
        shared = buffer.stepped and present.manifest.mesh.zero
        for state, _ in buffer.states if not shared else ():
            slot = Slot(number, cut, part, state)
            memory = present.read(slot, 0, buffer.elems(part))
            kept = files.kept(memory)
            if kept is None and present.manifest.by_name[buffer.first_param].kind == "buffer":
                kept = memory.clone()
            if kept is not None:
                out[slot] = kept
    return out
