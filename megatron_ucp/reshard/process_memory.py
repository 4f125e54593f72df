"""Memory of other processes of this machine.

It is read from where it lies: each value is copied once, and nobody packs it. Linux lets a process
read another one of its user (process_vm_readv), unless a rule of the machine or of a container
forbids it. So ranks try it first: each tells where in its memory a random word lies, and who reads
that word there reads that process. Where they may not, two of them share memory that both have
mapped.
"""

import ctypes
import os
import secrets
import socket
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from megatron_ucp.reshard import agree
from megatron_ucp.reshard.messages import BrokenError, Ranks
from megatron_ucp.reshard.threads import in_own_threads

_MOST_RUNS, _MOST_BYTES = 1024, 2**30  # that one call of the system reads; it stops at 2 GiB


@dataclass(frozen=True, slots=True)
class LyingAt:
    """Where some tensors begin in the memory of a process, and where its mark lies."""

    machine: str
    process: int
    mark_at: int
    mark: bytes
    starts: Sequence[int]


def new_mark() -> torch.Tensor:
    """A random word, which this process keeps as long as others read its memory."""
    return torch.frombuffer(bytearray(secrets.token_bytes(32)), dtype=torch.uint8)


def lying_at(mark: torch.Tensor, tensors: Sequence[torch.Tensor]) -> LyingAt:
    """Where tensors of this process begin, which has that mark."""
    starts = [one.data_ptr() for one in tensors]
    word = bytes(mark.tolist())
    return LyingAt(socket.gethostname(), os.getpid(), mark.data_ptr(), word, starts)


def is_readable(there: LyingAt) -> bool:
    """Whether this process may read that one. Another container may have the same name, and another
    process of the same number: then the mark is not there."""
    if there.machine != socket.gethostname() or _reader() is None:
        return False
    found = torch.zeros(len(there.mark), dtype=torch.uint8)
    runs = np.array([[there.mark_at, len(there.mark)]], np.uintp)
    return _is_read(there.process, runs, found) and bytes(found.tolist()) == there.mark


def read_runs(there: LyingAt, runs: Any, into: torch.Tensor) -> None:
    """Fills contiguous memory with runs of another process's memory, one after another: rows of
    address and bytes. Raises BrokenError where that process is gone."""
    if not _is_read(there.process, runs, into):
        why = os.strerror(ctypes.get_errno())
        raise BrokenError(f"the memory of process {there.process} can't be read: {why}")


def exchange_partitions(rows: Sequence[Sequence[torch.Tensor]], ranks: Ranks) -> bool:
    """Gives every rank all partitions of each row, which are listed in the order of the ranks: each
    reads those of the others from their memories. Whether that was done: nothing is where a rank
    can't read another one. Collective among `ranks`; raises BrokenError on all of them. It is part
    of what all ranks agree on afterwards, so it makes no agreement of its own."""
    machine = zlib.crc32(socket.gethostname().encode())
    if sum(ranks.lowest(machine, -machine)):  # they are on several
        return False
    mark, others = new_mark(), [rank for rank in range(ranks.world) if rank != ranks.rank]
    own = lying_at(mark, [row[ranks.rank] for row in rows])
    there = ranks.delivered(dict.fromkeys(others, own))
    if not all(ranks.lowest(int(all(map(is_readable, there.values()))))):
        return False
    every = [
        (there[rank], start, row[rank])
        for rank in others
        for row, start in zip(rows, there[rank].starts, strict=True)
    ]
    kept = agree.KeptBack()
    with kept:
        in_own_threads(_read_one, every, sum(into.nbytes for _, _, into in every))
    is_read = all(ranks.lowest(int(kept.error is None)))
    kept.raise_kept()
    if not is_read:
        raise BrokenError("another rank can't read the memory of a process")
    return True


def _read_one(one: tuple[LyingAt, int, torch.Tensor]) -> None:
    there, start, into = one
    read_runs(there, np.array([[start, into.nbytes]], np.uintp), into)


@cache
def _reader() -> Any:
    """Linux's process_vm_readv; None on another system."""
    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if read is not None:
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        read.restype = ctypes.c_ssize_t
        read.argtypes = [ctypes.c_int, pointer, size, pointer, size, size]
    return read


def _is_read(process: int, runs: Any, into: torch.Tensor) -> bool:
    """Whether all of some runs came."""
    read, address = _reader(), into.data_ptr()
    for some in _at_once(runs):
        size = int(some[:, 1].sum())
        here = np.array([[address, size]], np.uintp)
        if read(process, here.ctypes.data, 1, some.ctypes.data, len(some), 0) != size:
            return False
        address += size
    return True


def _at_once(runs: Any) -> Iterator[Any]:
    """Runs as they are read by one call each; a large one in pieces."""
    longest = int(runs[:, 1].max(initial=0))
    if longest * min(len(runs), _MOST_RUNS) <= _MOST_BYTES:
        yield from np.split(runs, range(_MOST_RUNS, len(runs), _MOST_RUNS))
        return
    for start, size in runs.tolist():
        for low in range(0, size, _MOST_BYTES):
            yield np.array([[start + low, min(_MOST_BYTES, size - low)]], np.uintp)


# ---- memory that two processes share


@dataclass(frozen=True, slots=True)
class Address:
    """Where other processes of a machine find memory: the file is named as it ends, and nobody can
    guess that name."""

    path: str
    name: str
    size_bytes: int


def offered(size_bytes: int, files: ExitStack) -> tuple[Address, torch.Tensor] | None:
    """Memory that other processes of this machine can map until its file is closed with `files`. It
    has no name in a folder, and goes with the last process that has it. All of it is allocated at
    once: a write into a page for which there is no room would end the process. None where there is
    none."""
    name = f"megatron_ucp_{secrets.token_hex(16)}"
    with suppress(OSError, AttributeError):  # the latter: no such files on this system
        file = os.memfd_create(name)
        files.callback(os.close, file)
        os.posix_fallocate(file, 0, size_bytes + len(name))
        os.pwrite(file, name.encode(), size_bytes)
        address = Address(f"/proc/{os.getpid()}/fd/{file}", name, size_bytes)
        memory = mapped(address)
        return None if memory is None else (address, memory)
    return None


def mapped(address: Address) -> torch.Tensor | None:
    """That memory; None where this process doesn't see it: it is on another machine, or apart on
    this one."""
    path, end = address.path, address.size_bytes + len(address.name)
    with suppress(OSError, RuntimeError):  # torch raises the latter
        if os.readlink(path) == f"/memfd:{address.name} (deleted)":
            memory = torch.from_file(path, shared=True, size=end, dtype=torch.uint8)
            if bytes(memory[address.size_bytes :].tolist()) == address.name.encode():
                return memory[: address.size_bytes]
    return None
