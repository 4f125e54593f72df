"""Conversions that several ranks share: one fate, and one comparison of what all of them read.

Four processes write the files of a conversion, each about a quarter of the bytes:

    torchrun --nproc_per_node 4 -m megatron_ucp convert runs/llama universal/step80 --to universal

Which rank writes what, `folder.share_of` says. A rank reads what it writes, so that two ranks may
each read a part of one record of the source; its CRC-32 is put together from both.
"""

import hashlib
import os
import zlib
from contextlib import AbstractContextManager
from typing import Any

from megatron_ucp.formats.byte_files import Record
from megatron_ucp.formats.checkpoint import Readable
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.checksums import SummedRun, check_runs
from megatron_ucp.reshard.files import FileSource
from megatron_ucp.reshard.folder import FolderOutput
from megatron_ucp.reshard.messages import Ranks
from megatron_ucp.reshard.options import check_switch


class SharedFileSource(FileSource):
    """A checkpoint of which each rank reads what it writes."""

    def check(self, thorough: bool) -> None:
        """Compares every record that a rank read from with its CRC-32: the records of a file on one
        rank, to which the others send what they have of them. Collective. Raises
        DamagedFileError."""
        given: dict[int, tuple[list[SummedRun], dict[tuple[str, str], Record]]] = {}
        for run in self._runs:
            given.setdefault(_checker_of(run.file), ([], {}))[0].append(run)
        for key, record in self._records.items():
            given.setdefault(_checker_of(key[0]), ([], {}))[1][key] = record
        came = agree.delivered(given)
        with agree.together():
            runs = [run for own, _ in came.values() for run in own]
            records = {key: record for _, own in came.values() for key, record in own.items()}
            opened = self.checkpoint.opened
            summed = {k: record for k, record in records.items() if opened(k[0]).has_checksums}
            self.checkpoint.check_read()
            self.read_bytes += check_runs(runs, summed, opened, thorough=thorough)[2]


def _checker_of(path: str) -> int:
    """The rank that compares the records of a file, which follows from its name."""
    return zlib.crc32(os.path.basename(path).encode()) % agree.world()[1]


def source_of(
    checkpoint: Readable, file: str, masters: Readable | None = None, ranks: bool = False
) -> FileSource:
    """The files of a checkpoint as a source: of this process, or of all ranks."""
    return (SharedFileSource if ranks else FileSource)(checkpoint, file, masters)


def ranks_of(ranks: bool) -> Ranks:
    """All ranks, or this process by itself. Raises UsageError for what is no switch."""
    check_switch("ranks", ranks)
    return agree.default_ranks() if ranks else agree.OneRank()


def require_same(output: FolderOutput, ranks: Ranks, **options: Any) -> None:
    """Raises UsageError where the ranks of one conversion were given different `options`, or would
    write different files."""
    files = repr([(file.name, file.size_bytes) for file in output.files])
    told = {name: agree.plain_option(value) for name, value in options.items()}
    if ranks.world > 1:
        agree.require_same({**told, "files": hashlib.sha256(files.encode()).hexdigest()})


def as_rank_error(what: str) -> AbstractContextManager[None]:
    """Inside, messages between ranks that break are a RankError."""
    return agree.as_rank_error(what, fix=_FIX)


_FIX = (
    "nothing has the name of the output; look at what the other ranks say, then start all of them "
    "again"
)
