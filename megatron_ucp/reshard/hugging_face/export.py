"""A checkpoint of any mesh as a folder of a Hugging Face model, straight from its own files.

The folder is a mesh more, of one rank, with other names: what is written is planned and proved as
a whole before the first byte, then moved window by window through a buffer of bounded size,
whatever the model, by as many threads as there are cores. The bytes depend on the model alone, not
on the mesh that saved it. The folder appears whole or not at all.
"""

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from megatron_ucp import say
from megatron_ucp.core.dtypes import dtype_name
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.shares import state_in, weights_manifest
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.errors import SaveError, UsageError
from megatron_ucp.families.arguments import unknown_padding
from megatron_ucp.formats.base import Checkpoint, Source, Told
from megatron_ucp.formats.durable import write_at, write_joined_at
from megatron_ucp.formats.hugging_face.checkpoint import CONFIG_FILE, read_json
from megatron_ucp.formats.hugging_face.shards import parse_size
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.arguments import check_allow, plain_path
from megatron_ucp.reshard.diff import Difference, weight_differences
from megatron_ucp.reshard.execute import TORCH_DTYPES, bytes_of
from megatron_ucp.reshard.findings import Progress, checked
from megatron_ucp.reshard.hugging_face.exported import Exported
from megatron_ucp.reshard.hugging_face.merge import Merge, open_merge
from megatron_ucp.reshard.hugging_face.model_config import config_for, family_of
from megatron_ucp.reshard.hugging_face.model_folder import (
    WEIGHT_DTYPES,
    Beside,
    Outgoing,
    OutgoingPart,
    beside_weights,
    publish,
    refuse_foreign,
    training_dtype,
)
from megatron_ucp.reshard.hugging_face.twin import needs_family, pipe_names, twin_of
from megatron_ucp.reshard.match import replica_notes
from megatron_ucp.reshard.output_folder import (
    FileRun,
    begin_sync,
    in_threads,
    require_outside,
    require_plain,
    sync_all,
    written_aside,
)
from megatron_ucp.reshard.overflows import Overflows
from megatron_ucp.reshard.windows import (
    THREADS,
    WIDE_WINDOW_BYTES,
    WINDOW_BYTES,
    Memory,
    WindowReader,
    pool,
)

ROWS_AT_ONCE = 128  # of tiles that are joined
_ALLOWED = frozenset({"mean", "stale", "weights"})
_OF_FILES = ("tag", "rules", "family", "merge", "verify", "force", "allow")
LIVE_EXPORT = "ucp_export_hf"  # of an attached engine: what writes its weights


def export_hf(
    src: Any,
    dst: str | Path,
    *,
    dtype: Any = None,
    max_shard_size: str | int = "5GB",
    tag: str | None = None,
    rules: str | Path | None = None,
    config: str | Path | None = None,
    family: str = "",
    tokenizer: str | Path | None = None,
    merge: str | Path | None = None,
    verify: bool = False,
    force: bool = False,
    allow: Collection[str] = (),
    progress: Progress | None = None,
) -> Exported:
    """Writes the weights of a checkpoint as a folder that
    `AutoModelForCausalLM.from_pretrained` takes; of a model that peft wrapped, the adapter, in
    peft's format.

    Args:
        src: The checkpoint: a tag folder, or the folder above it. Or an attached engine, whose
            weights in memory are written; collective, and only with `dtype`, `max_shard_size`,
            `config` and `tokenizer`.
        dst: The new folder. It appears whole or not at all.
        dtype: That of the weights, such as "bf16" or `torch.float32`, to which the fp32 master
            weights are rounded. Default: the training dtype.
        max_shard_size: The most bytes of a file, such as "5GB".
        tag: The tag in `src`, where it is not the newest.
        rules: A file of rules (docs/reference/rules.md), where no family knows the layouts.
        config: The model's config.json (an adapter's adapter_config.json), or its folder. Default:
            what the checkpoint says, else the file in the tag folder or in the one above.
        family: The model family, where neither the checkpoint nor its config says one.
        tokenizer: A folder whose tokenizer files are copied. Default: that of the config.
        merge: The folder of the base model of a LoRA run: that model is written, with the adapter
            added.
        verify: Whether to read the files back and compare them with the source, bit by bit.
        force: Whether to replace a folder that an earlier export wrote, and nobody changed.
        allow: What may happen besides exact copies and rounding: "mean", "stale", "weights".
        progress: `progress(done, total)` counts bytes.

    Returns:
        What was done. `loadable` is false where no config was found: the weights are there, and
        no library loads them without one.

    Raises:
        UsageError: For arguments that can't be.
        SaveError: Where the output can't be written; nothing is left of it.
        UcpError: Where the weights can't be carried over exactly.

    Example:
        >>> import megatron_ucp as ucp
        >>> assert ucp.export_hf("runs/llama", "hf", dtype="bf16", verify=True).loadable
    """
    asked = _Asked(dtype, max_shard_size, config, tokenizer, tag, rules, family, merge)
    asked = replace(asked, verify=verify, force=force, allow=allow)
    if hasattr(src, LIVE_EXPORT):
        return _of_engine(src, dst, asked)
    if hasattr(src, "save_checkpoint"):
        raise UsageError(
            "this engine is not attached",
            expected="an engine that ucp.attach was given, or the path of a checkpoint",
            found=type(src).__qualname__,
            fix="call ucp.attach(engine) first",
        )
    return _of_files(src, dst, asked, progress=progress)


@dataclass(frozen=True)
class _Asked:
    """What an export is asked for; see `export_hf`."""

    dtype: Any
    max_shard_size: str | int
    config: str | Path | None
    tokenizer: str | Path | None
    tag: str | None
    rules: str | Path | None
    family: str
    merge: str | Path | None
    verify: bool = False
    force: bool = False
    allow: Collection[str] = ()


@say.shown("export-hf", ends=True)
def _of_files(
    src: str | Path, dst: str | Path, asked: _Asked, *, progress: Progress | None = None
) -> Exported:
    """The export of a checkpoint on disk."""
    started, folder = time.perf_counter(), Path(plain_path(dst))
    dtype = check_output(folder, asked.dtype, asked.allow, asked.force)
    asked = replace(asked, dtype=dtype, max_shard_size=parse_size(asked.max_shard_size))
    names = pipe_names(asked.family or family_of(asked.config), asked.config)
    told = Told(names=names, weights="weights" in asked.allow)
    with ExitStack() as opened:
        source = opened.enter_context(open_checkpoint(src, asked.tag, asked.rules, told))
        _check_source(source, folder, asked.allow)
        mesh = str(source.manifest.written_on)
        prepared = _prepared(source, asked, opened)
        job = _Job(prepared, frozenset(asked.allow), progress)
        job.prove()
        job.write(folder, prepared.beside, asked.verify, asked.force)
        seconds = time.perf_counter() - started
        return job.result(folder, mesh, seconds, asked.verify, prepared.notes)


@dataclass(frozen=True)
class _Prepared:
    """What is read, and what is written: `merged` where an adapter is added to its base."""

    source: Checkpoint
    out: Outgoing
    beside: Beside
    notes: Sequence[str]
    merged: Merge | None


def _prepared(source: Checkpoint, asked: _Asked, opened: ExitStack) -> _Prepared:
    """Finds the config, and decides under which names and in which files tensors are written."""
    found = config_for(source.manifest, asked.config, source.folder)
    given = None if found is None else found.tree
    notes, merged, family = _notes(source, given is None), None, asked.family
    if found is not None and asked.config is None:
        notes.append(f"the model's config was found in {found.folder}")
    if asked.merge is not None:
        source, merged = open_merge(opened, asked.merge, source, given)
        given, family = read_json(source.folder / CONFIG_FILE), ""
    elif found is not None and needs_family(source.manifest):
        family = family or found.family
    chosen = asked.dtype or training_dtype(source.manifest)
    twin = twin_of(source.manifest, given, family, chosen, str(source.folder))
    of_model = asked.merge if found is None or asked.merge is not None else found.folder
    beside = beside_weights(twin, asked.tokenizer, of_model)
    out = Outgoing(source.manifest, twin, chosen, int(asked.max_shard_size))
    return _Prepared(source, out, beside, notes, merged)


def _of_engine(engine: Any, dst: str | Path, asked: _Asked) -> Exported:
    """The export of a live engine. Raises UsageError for what only files have."""
    if given := [name for name in _OF_FILES if getattr(asked, name)]:
        raise UsageError(
            "the export of a live engine does not take this",
            expected="dtype, max_shard_size, config, tokenizer",
            found=", ".join(given),
            fix="leave it out, or save and export the checkpoint",
        )
    how = asked.dtype, asked.max_shard_size, asked.config, asked.tokenizer
    return getattr(engine, LIVE_EXPORT)(plain_path(dst), *how)


def check_output(
    folder: Path, dtype: Any, allow: Collection[str], force: bool = False
) -> str | None:
    """The name of the dtype. Raises UsageError for arguments of an export that can't be."""
    require_plain(folder, lambda: force and refuse_foreign(folder))
    name = None if dtype is None else dtype_name(dtype)
    if name not in (None, *WEIGHT_DTYPES):
        raise UsageError(
            "weights have no such dtype",
            expected=", ".join(WEIGHT_DTYPES),
            found=name,
            fix="give one of these",
        )
    check_allow(allow, _ALLOWED)
    return name


def _check_source(source: Checkpoint, folder: Path, allow: Collection[str]) -> None:
    """Compares the files with each other; the output lies elsewhere."""
    require_outside(folder, source.folder)
    for name in source.file_names:
        source.check(name, allow)


def _notes(source: Checkpoint, alone: bool) -> list[str]:
    """What the source has to say of an export; `alone`: no config says what its model is."""
    padding = unknown_padding(source.manifest) if alone else []
    return [*source.notes, *replica_notes(source.manifest), *padding]


def _readable(source: Checkpoint, out: Outgoing, allow: Collection[str]) -> Source:
    """What an export reads: the masters, or where these would be rounded to the dtype of training
    the weights that the model computed with, which were rounded so already."""
    trained = [one for one in out.tensors if one.state == MASTER and one.is_rounded]
    dtypes = {source.manifest.by_name[one.share.param].dtype for one in trained}
    if dtypes != {out.dtype} or "stale" in allow:
        return source
    return source.copies() or source


class _Job:
    """One export: plans, windows and counts. Tensors are written by several threads."""

    def __init__(
        self, prepared: _Prepared, allow: frozenset[str], progress: Progress | None
    ) -> None:
        source, out, merged = prepared.source, prepared.out, prepared.merged
        self.source, self.out, self.progress, self.merged = source, out, progress, merged
        self.reader = WindowReader(_readable(source, out, allow), allow | {"narrow"})
        self.memories = [Memory() for _ in range(THREADS)]  # a job takes one, and gives it back
        self.stopped = threading.Event()
        # a merge computes whatever run of a tensor is asked for
        self.parts = out.parts(WIDE_WINDOW_BYTES if merged is None else sys.maxsize, THREADS)
        rows = [(part.share, out.tensors[n].dtype) for n, part in self._all_parts]
        self.target = weights_manifest(out.twin.specs, rows)
        self.done = 0
        self.overflows = Overflows()
        self._lock = threading.Lock()

    def prove(self) -> None:
        """Plans everything that will be written, proves it and looks every source up."""
        wants = [(part.slot, self._state(n)) for n, part in self._all_parts]
        self.reader.prove(self.target, wants)

    def write(self, folder: Path, beside: Beside, verify: bool, force: bool) -> None:
        """The folder, whole or not at all."""
        with written_aside(folder) as aside:
            self.out.begin(aside)
            with pool() as threads:
                self._write_tensors(threads, aside)
            self._check_read()
            self.overflows.check(str(self.source.folder), "export")
            self.out.finish(aside, beside)
            if verify:
                self._verify(aside)
            sync_all(aside)
            publish(aside, folder, force)

    def result(
        self, folder: Path, mesh: str, seconds: float, verified: bool, notes: Sequence[str]
    ) -> Exported:
        """What was done; `notes` are the source's."""
        return Exported(
            str(folder),
            mesh,
            self.out.dtype,
            len(self.out.files),
            len(self.out.tensors),
            self.read_bytes,
            self.done,
            seconds,
            verified,
            (*notes, *self.out.notes),
            self.out.is_loadable,
            "read back and equal" if verified else checked(self.source),
        )

    # ---------------------------------------------------------------- bytes

    def _write_tensors(self, threads: ThreadPoolExecutor, aside: Path) -> None:
        """The largest first: the threads hardly wait for each other in the end."""
        single: list[Callable[[], FileRun | None]] = []
        for number in self.out.largest_first:
            if len(self.parts[number]) == len(self.parts[number][0]) == 1:
                single.append(partial(self._tensor, aside, number))
            else:
                self._by_all(threads, aside, number)
        in_threads(threads, single, self.stopped)

    def _tensor(self, aside: Path, number: int) -> FileRun | None:
        """One tensor. Runs in a thread of its own."""
        one, size = self.out.tensors[number], ITEMSIZE[self.out.tensors[number].dtype]
        step = (WINDOW_BYTES if one.share.order is None else WIDE_WINDOW_BYTES) // size
        part, memory = self.parts[number][0][0], self.memories.pop()
        try:
            with open(aside / one.file, "r+b", buffering=0) as file:
                for low in range(0, one.elems, step):
                    window = memory.take(min(step, one.elems - low), one.dtype)
                    self._fill(number, part, low, window)
                    write_at(file.fileno(), bytes_of(window), one.place + low * size)
                    self._count(window.nbytes)
        finally:
            self.memories.append(memory)
        size_bytes = one.elems * size
        return (aside / one.file, one.place, size_bytes) if size_bytes > WINDOW_BYTES else None

    def _by_all(self, threads: ThreadPoolExecutor, aside: Path, number: int) -> None:
        """A tensor in tiles. All threads together read a run of its rows, each a tile, which is
        whole rows of the source where there is one run."""
        one = self.out.tensors[number]
        place = one.place
        for parts in self.parts[number]:
            held = zip(parts, self.memories, strict=False)
            tiles = [memory.take(part.elems, one.dtype) for part, memory in held]
            pairs = zip(parts, tiles, strict=True)
            fill = [partial(self._fill, number, part, 0, tile) for part, tile in pairs]
            in_threads(threads, fill, self.stopped)
            self._write_rows(threads, aside / one.file, place, tiles, one.shape[-1])
            place += sum(tile.nbytes for tile in tiles)

    def _write_rows(
        self,
        threads: ThreadPoolExecutor,
        path: Path,
        place: int,
        tiles: list[torch.Tensor],
        columns: int,
    ) -> None:
        """Rows of which each tile has some columns, from byte `place` of a file on. One thread
        writes, as a file system lets only one write a file; the disk begins meanwhile."""
        rows = sum(len(tile) for tile in tiles) // columns
        held = [(bytes_of(tile), tile.nbytes // rows) for tile in tiles]
        row_bytes = sum(width for _, width in held)
        with open(path, "r+b", buffering=0) as file:
            for first in range(0, rows, ROWS_AT_ONCE):
                numbers = range(first, min(first + ROWS_AT_ONCE, rows))
                pieces = [data[at * n : at * n + n] for at in numbers for data, n in held]
                start, size = place + first * row_bytes, len(numbers) * row_bytes
                write_joined_at(file.fileno(), pieces, start)
                threads.submit(begin_sync, path, start, size)
                self._count(size)

    def _fill(self, number: int, part: OutgoingPart, low: int, memory: torch.Tensor) -> None:
        """Elements from `low` of a part of a tensor, rounded to the dtype of the output."""
        one = self.out.tensors[number]
        if self.merged is None:
            self.reader.fill(self.target, part.slot, self._state(number), low, memory)
        else:
            memory.copy_(self.merged.elements(one.name, low, len(memory)))
        if one.is_rounded:
            exact = partial(self._as_saved, number, part, low, len(memory))
            self.overflows.look(one.name, memory, exact)

    def _state(self, number: int) -> str:
        """The state of what is read that has a tensor's values."""
        return state_in(self.reader.source.manifest, self.out.tensors[number].state)

    @property
    def _all_parts(self) -> Iterator[tuple[int, OutgoingPart]]:
        """(number of the tensor, part), slot by slot."""
        for number, runs in enumerate(self.parts):
            for part in chain.from_iterable(runs):
                yield number, part

    def _check_read(self) -> None:
        """Raises DamagedFileError where what was read is not what was saved."""
        if self.merged is None:
            self.reader.check(thorough=True)
        else:
            self.merged.check()

    @property
    def read_bytes(self) -> int:
        return (self.merged or self.reader).read_bytes

    def _verify(self, written: Path) -> None:
        """Reads the files back under the names of the source, and compares every parameter with the
        source's masters, rounded as the files are; what was merged with a second merge. Raises
        SaveError."""
        twin = self.out.twin
        told = twin.told if twin.family or twin.is_adapter else None
        with open_checkpoint(written, told=told) as found:
            if self.merged is None:
                differences = weight_differences(self.source, found, among=twin.specs)
            else:
                differences = self._merged_differences(found)
        if differences:
            raise _not_as_written(written, differences, self.reader.source is not self.source)

    def _merged_differences(self, found: Checkpoint) -> list[Difference]:
        """Where a folder does not hold what was merged."""
        reader, out = WindowReader(found), list[Difference]()
        reader.prove(self.target, [(part.slot, VALUE) for _, part in self._all_parts])
        for number, part in self._all_parts:
            one = self.out.tensors[number]
            step = WINDOW_BYTES // ITEMSIZE[one.dtype]
            for low in range(0, part.elems, step):
                want = self.memories[0].take(min(step, part.elems - low), one.dtype)
                have = self.memories[0].take(len(want), one.dtype, 1)
                self._fill(number, part, low, want)
                reader.fill(self.target, part.slot, VALUE, low, have)
                if not torch.equal(want.view(torch.uint8), have.view(torch.uint8)):
                    what = f"from element {low} on"
                    out.append(Difference(one.name, what, "the merged values", "others"))
        return out

    def _as_saved(self, number: int, part: OutgoingPart, low: int, elems: int) -> torch.Tensor:
        """Elements of a part of a tensor before they were rounded."""
        one = self.out.tensors[number]
        if self.merged is not None:
            return self.merged.elements(one.name, low, elems)
        rows = [(part.share, one.saved_dtype)]
        target = weights_manifest(self.out.twin.specs, rows)
        reader, slot = WindowReader(self.source, self.reader.allow), Slot(0, (), 0, VALUE)
        reader.prove(target, [(slot, one.state)])
        out = torch.empty(elems, dtype=TORCH_DTYPES[one.saved_dtype])
        reader.fill(target, slot, one.state, low, out)
        return out

    def _count(self, written: int) -> None:
        if self.stopped.is_set():
            raise SaveError("the export was stopped", fix="start it again", id="")
        with self._lock:
            self.done += written
            if self.progress is not None:
                self.progress(self.done, self.out.total_bytes)


def _not_as_written(written: Path, differences: Sequence[Difference], copies: bool) -> SaveError:
    """`copies`: not the masters were written, with which the comparison is."""
    first, fix = differences[0], "check the disk and the memory of this machine, then try again"
    if copies:
        fix += '; were the masters changed on purpose: --allow stale (Python: allow={"stale"})'
    return SaveError(
        "what was read back is not what the checkpoint holds; nothing is left of it",
        file=written,
        parameter=first.parameter,
        expected=first.a,
        found=f"{first.what}: {first.b}; {len(differences)} differences",
        fix=fix,
        id="",
    )
