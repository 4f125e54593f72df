"""Ranges of files that several threads write: what is left when one of them fails."""

import threading
import time
from itertools import islice
from pathlib import Path

import pytest
import torch

from megatron_ucp.formats.file_layout import FileLayout
from megatron_ucp.formats.output_folder import Syncs
from megatron_ucp.reshard.folder import FileRange, RangeWriter, in_file_order, record_crcs


class OneFails(RangeWriter):
    """The first thread's range is refused, while the others are in the middle of theirs."""

    ended = 0

    def write(self, one: FileRange) -> None:
        if one.at == 0:
            raise OSError(28, "No space left on device", str(one.path))
        time.sleep(0.3)
        super().write(one)
        self.ended += 1


def ranges(path: Path, count: int) -> list[FileRange]:
    return [FileRange(path, 0, n, torch.full((1,), n, dtype=torch.uint8)) for n in range(count)]


def test_no_thread_writes_any_more_when_a_failure_is_raised(tmp_path: Path) -> None:
    """Files are closed then: a write would go into whatever file has the descriptor next."""
    writer = OneFails(Syncs())
    with pytest.raises(OSError, match="No space left"):
        writer.now(ranges(tmp_path / "a", 8), threads=4)
    ended, alive = writer.ended, [t for t in threading.enumerate() if t.name == "ucp-alongside"]
    writer.close()
    time.sleep(0.5)
    assert not alive and writer.ended == ended


def test_threads_write_what_one_writes(tmp_path: Path) -> None:
    sums: list[dict[int, int]] = []
    for name, threads in (("one", 1), ("four", 4)):
        writer = RangeWriter(Syncs())
        writer.now(ranges(tmp_path / name, 50), threads)
        writer.close()
        assert (tmp_path / name).read_bytes() == bytes(range(50))
        sums.append(record_crcs(writer.written))
    assert sums[0] == sums[1] and len(sums[0]) == 1


@pytest.mark.parametrize("empty", [0, 4, 7])
def test_a_record_of_no_bytes_is_sent_to_a_store_and_not_waited_for(empty: int) -> None:
    """In a file's middle, before what follows it at the same byte, and at both ends."""
    blobs = [(0, lambda: b"abcd"), (empty, lambda: b"")] if empty else [(0, lambda: b"")]
    begin = [] if empty else [(0, b"abcd")]
    layout = FileLayout("a", 7, (), blobs, lambda _: [*begin, (4, b"efg")])
    chunks = in_file_order(layout, {}, {})
    assert b"".join(islice(chunks, 20)) == b"abcdefg"
