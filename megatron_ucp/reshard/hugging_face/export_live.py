"""A live engine as a folder of a Hugging Face model, from the memory of all ranks.

Each tensor has one rank that writes it. All of it is planned and proved before the first byte.
Every rank then makes the same plans, window by window: a rank that has elements of a window packs
them into one message to the writer, so that nobody holds more than a window of what is not its own.
"""

import os
import time
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ucp.core.mesh import Coords
from megatron_ucp.core.plan import Mean, Op, Slot, Windows, make_plan
from megatron_ucp.core.proof import one_state, prove
from megatron_ucp.core.shares import weights_manifest
from megatron_ucp.core.states import VALUE
from megatron_ucp.errors import PlanError, SaveError
from megatron_ucp.formats import durable
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine
from megatron_ucp.reshard.execute import TORCH_DTYPES, bytes_of
from megatron_ucp.reshard.hugging_face.exported import Exported
from megatron_ucp.reshard.hugging_face.model_folder import Beside, Outgoing, publish
from megatron_ucp.reshard.match import replica_notes
from megatron_ucp.reshard.output_folder import sync_all, written_aside
from megatron_ucp.reshard.overflows import lost_values, too_large
from megatron_ucp.reshard.windows import WINDOW_BYTES

_Place = tuple[int, Coords, int]  # buffer, place along the axes that cut it, partition


def export_live(engine: Engine, out: Outgoing, folder: Path, beside: Beside) -> Exported:
    """Writes the folder, whole or not at all. Collective; every rank sees the same disk. Raises a
    UcpError on every rank."""
    started, (rank, world) = time.perf_counter(), agree.world()
    aside = durable.aside_of(folder.absolute().parent, folder.absolute().name)
    holders = _holders(engine)
    with ExitStack() as left:
        with agree.together():
            if rank == 0:
                left.enter_context(written_aside(folder))
                out.begin(aside)
        with agree.together():
            job = _Share(engine, out, holders, _writers(out, world))
            job.prove()
        job.write(aside)
        with agree.together() as block:
            job.check()
            job.sync()
            block.value = job.overflows
        with agree.together():
            found = {name: count for held in block.values for name, count in held.items()}
            if found:
                raise too_large(found, str(folder), "export")
        with agree.together():
            if rank == 0:
                out.finish(aside, beside)
                sync_all(aside)
                publish(aside, folder)
    return job.result(folder, time.perf_counter() - started)


def _holders(engine: Engine) -> dict[_Place, int]:
    """The first rank that has each partition of each buffer. Collective."""
    out: dict[_Place, int] = {}
    for number, parts in enumerate(agree.gather(engine.parts())):
        for part in parts:
            out.setdefault(part, number)
    return out


def _writers(out: Outgoing, world: int) -> list[int]:
    """The rank that writes each tensor: each as many bytes as the others, if it can be."""
    held = [0] * world
    writers = [0] * len(out.tensors)
    for number in out.largest_first:
        writers[number] = min(range(world), key=held.__getitem__)
        held[writers[number]] += out.tensors[number].elems
    return writers


class _Share:
    """What this rank does for an export: sends what it has, and writes its tensors."""

    def __init__(
        self, engine: Engine, out: Outgoing, holders: dict[_Place, int], writers: list[int]
    ) -> None:
        self.engine, self.out, self.holders, self.writers = engine, out, holders, writers
        self.rank, self.device = agree.world()[0], _device()
        rows = [(one.share, one.saved_dtype) for one in out.tensors]
        self.exact = weights_manifest(out.twin.specs, rows)  # in the dtypes of the engine
        self.windows = Windows(engine.manifest, self.exact)
        self.overflows: dict[tuple[str, str], int] = {}
        self.written_bytes = 0
        self.written: set[Path] = set()
        self.kept = agree.KeptBack()

    def prove(self) -> None:
        """Plans everything that will be written, as every rank does, proves it, and looks every
        holder up. Raises a UcpError before a byte moves."""
        source = self.engine.manifest
        slots = [Slot(number, (), 0, VALUE) for number in range(len(self.out.tensors))]
        wants = [(slot, self.out.tensors[slot.buffer].state) for slot in slots]
        plan = make_plan(source, self.exact, wants)
        prove(one_state(plan, source.uncut | self.exact.uncut), source, self.exact)
        for slot in plan.sources:
            if (slot.buffer, slot.cut, slot.part) not in self.holders:
                raise PlanError("no rank holds what the plan reads", found=slot)

    def write(self, aside: Path) -> None:
        """Every tensor in one order on all ranks. A rank that can't go on still sends and takes
        what the others wait for: whatever it is, as nothing of it is kept."""
        for number in self.out.in_order:
            one = self.out.tensors[number]
            step = WINDOW_BYTES // ITEMSIZE[one.saved_dtype]
            for low in range(0, one.elems, step):
                memory = self._gathered(number, low, min(low + step, one.elems))
                with self.kept:
                    if memory is not None and self.kept.error is None:
                        self._write(aside, number, low, memory)

    def check(self) -> None:
        """Raises what went wrong on this rank: SaveError where it could not write."""
        try:
            self.kept.raise_kept()
        except OSError as error:
            raise SaveError(
                "the output could not be written; nothing is left of it",
                file=error.filename,
                found=f"{type(error).__name__}: {error}",
                fix="free space or mend permissions on every rank, then try again",
            ) from error

    def sync(self) -> None:
        """Brings what this rank wrote to disk: other machines can't do it for it. Raises
        OSError."""
        sync = durable.Syncs()
        for path in sorted(self.written):
            sync(path)

    def result(self, folder: Path, seconds: float) -> Exported:
        """What was done."""
        out, source = self.out, self.engine.manifest
        dtype = out.tensors[0].dtype if out.tensors else ""
        sizes = (len(out.files), len(out.tensors), 0, self.written_bytes)
        done = (
            seconds,
            False,
            (*replica_notes(source), *out.notes),
            out.is_loadable,
            "from memory",
        )
        return Exported(str(folder), str(source.mesh), dtype, *sizes, *done)

    def _write(self, aside: Path, number: int, low: int, exact: torch.Tensor) -> None:
        one = self.out.tensors[number]
        memory = exact.to(TORCH_DTYPES[one.dtype])
        if one.is_rounded and (lost := lost_values(exact, memory)):
            key = one.name, one.dtype
            self.overflows[key] = self.overflows.get(key, 0) + lost
        path = aside / one.file
        try:
            handle = os.open(path, os.O_WRONLY)
            try:
                durable.write_at(handle, bytes_of(memory), one.place + low * memory.element_size())
            finally:
                os.close(handle)
        except OSError as error:
            error.filename = error.filename or str(path)
            raise
        self.written.add(path)
        self.written_bytes += memory.nbytes

    def _gathered(self, number: int, low: int, high: int) -> torch.Tensor | None:
        """Elements [low, high) of a tensor, on the rank that writes it; None on the others, which
        send what they have of it."""
        one, writer = self.out.tensors[number], self.writers[number]
        plan = self.windows.plan(Slot(number, (), 0, VALUE), one.state, low, high)
        dtype = TORCH_DTYPES[one.saved_dtype]
        mine = torch.zeros(high - low, dtype=dtype) if writer == self.rank else None
        ordered = sorted(plan.ops, key=lambda op: (self._holder(op), op.target.offset))
        for holder, found in groupby(ordered, key=self._holder):
            ops = list(found)
            packed = self._moved(ops, holder, writer, dtype)
            with self.kept:
                if mine is not None and packed is not None:
                    _put(ops, packed.cpu(), mine)
        return mine

    def _moved(
        self, ops: list[Op], holder: int, writer: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """The elements that one rank has of a window, on the rank that writes it; None on the
        others, and where this rank could not read them."""
        count, packed = sum(op.box.numel for op in ops), None
        if self.rank == holder:
            with self.kept:
                packed = torch.cat([self._values(op) for op in ops])
                packed = packed if writer == holder else packed.to(self.device)
            if writer != holder:
                if packed is None:
                    packed = torch.zeros(count, dtype=dtype, device=self.device)
                dist.send(packed, writer)
        elif self.rank == writer:
            packed = torch.empty(count, dtype=dtype, device=self.device)
            dist.recv(packed, holder)
        return packed

    def _values(self, op: Op) -> torch.Tensor:
        """The elements of an operation, from this rank's memory, in the order of its dims."""
        side = _source(op)
        spanned = 1 + sum(
            (size - 1) * step for size, step in zip(op.shape, side.strides, strict=True)
        )
        flat = self.engine.read(side.slot, side.offset, side.offset + spanned)
        return torch.as_strided(flat, op.shape, side.strides, flat.storage_offset()).reshape(-1)

    def _holder(self, op: Op) -> int:
        slot = _source(op).slot
        return self.holders[slot.buffer, slot.cut, slot.part]


def _put(ops: list[Op], packed: torch.Tensor, window: torch.Tensor) -> None:
    """The packed elements of operations to their places in a window."""
    at = 0
    for op in ops:
        values = packed[at : at + op.box.numel].view(op.shape)
        torch.as_strided(window, op.shape, op.target.strides, op.target.offset).copy_(values)
        at += op.box.numel


def _source(op: Op) -> Any:
    if isinstance(op, Mean):
        raise PlanError("a mean of copies is not exported from memory: save, and export the files")
    return op.source


def _device() -> torch.device:
    """Where messages of the default group lie."""
    if not dist.is_initialized():
        return torch.device("cpu")
    from torch.distributed.distributed_c10d import _get_object_coll_device

    return torch.device(_get_object_coll_device(dist.group.WORLD))
