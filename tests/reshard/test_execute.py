"""Column cuts of a file's tensor, read straight into the target or through staging: the same bytes,
and no others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ucp.core.box import Box
from megatron_ucp.core.plan import Cast, Copy, Plan, Side, Slot
from megatron_ucp.errors import DamagedFileError, UsageError
from megatron_ucp.formats.byte_files import Where
from megatron_ucp.formats.pt import file as pt_file
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.reshard import execute
from megatron_ucp.reshard.execute import bytes_of

ROWS, COLUMNS = 96, 512  # large enough to be read row by row
SOURCE, TARGET = Slot(0, (), 0, "master"), Slot(1, (), 0, "master")


@pytest.fixture
def tensor() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS) + 1


@pytest.fixture
def file(tmp_path: Path, tensor: torch.Tensor) -> Path:
    torch.save(tensor, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def where_of(file: PtFile) -> Where:
    return Where(file, file.record(file.tree.storage), 0, ROWS * COLUMNS, "float32")  # type: ignore[attr-defined]


def plan_of(
    shape: tuple[int, ...],
    source: tuple[int, tuple[int, ...]],
    target: tuple[int, tuple[int, ...]],
    kind: type[Copy] = Copy,
) -> Plan:
    box = Box((0,) * len(shape), shape)
    return Plan(
        ((TARGET, "master"),),
        (kind(Side(SOURCE, *source), Side(TARGET, *target), shape, 0, box),),
        (),
    )


@pytest.mark.parametrize(
    ("over_gaps", "short_bytes", "read_elems"),
    [
        (1, 2**15, ROWS * 256),
        (4, 2**15, (ROWS - 1) * COLUMNS + 256),  # over the gaps, twice of what is wanted
        (4, 512, ROWS * 256),  # the gaps are longer than that
    ],
)
def test_short_gaps_may_be_read(
    file: Path,
    tensor: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    over_gaps: int,
    short_bytes: int,
    read_elems: int,
) -> None:
    monkeypatch.setattr(execute, "SHORT_GAP_BYTES", short_bytes)
    out = torch.zeros(ROWS * 256)
    plan = plan_of((ROWS, 256), (0, (COLUMNS, 1)), (0, (256, 1)))
    with PtFile(file) as opened:
        counts = execute.execute(
            plan, lambda _: where_of(opened), lambda _: out, over_gaps=over_gaps
        )
    assert torch.equal(out.view(ROWS, 256), tensor[:, :256])
    assert counts.read_bytes == 4 * read_elems


@pytest.mark.parametrize(
    ("low", "high", "pitch"), [(0, 256, 256), (128, 512, 384), (5, 6, 1), (100, 300, 512)]
)
def test_columns_straight_into_the_target(
    file: Path,
    tensor: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    low: int,
    high: int,
    pitch: int,
) -> None:
    monkeypatch.setattr(execute._Reading, "_read_blocks", None)  # not this way
    out = torch.zeros(ROWS * pitch + 3)
    with PtFile(file) as opened:
        plan = plan_of((ROWS, high - low), (low, (COLUMNS, 1)), (3, (pitch, 1)))
        counts = execute.execute(plan, lambda _: where_of(opened), lambda _: out)
    filled = out[3:].view(ROWS, pitch)
    assert torch.equal(filled[:, : high - low], tensor[:, low:high])
    assert not out[:3].any() and not filled[:, high - low :].any()
    assert counts.read_bytes == counts.unsummed_bytes == ROWS * (high - low) * 4 and not counts.runs


def test_three_dims(file: Path, tensor: torch.Tensor) -> None:
    """Two of four row blocks, the second half of the columns, to places in another order."""
    out = torch.zeros(2 * 16 * 256)
    with PtFile(file) as opened:
        plan = plan_of((16, 2, 256), (256, (COLUMNS, 48 * COLUMNS, 1)), (0, (256, 16 * 256, 1)))
        counts = execute.execute(plan, lambda _: where_of(opened), lambda _: out)
    assert torch.equal(out.view(2, 16, 256), tensor.view(2, 48, COLUMNS)[:, :16, 256:])
    assert counts.read_bytes == out.nbytes


@pytest.mark.parametrize("staging_bytes", [256, 2**20])
def test_a_cast_goes_through_staging(file: Path, tensor: torch.Tensor, staging_bytes: int) -> None:
    staging = execute.Staging(staging_bytes)
    out = torch.zeros(ROWS * 256, dtype=torch.float64)
    with PtFile(file) as opened:
        plan = plan_of((ROWS, 256), (128, (COLUMNS, 1)), (0, (256, 1)), Cast)
        execute.execute(plan, lambda _: where_of(opened), lambda _: out, staging=staging)
    assert torch.equal(out.view(ROWS, 256), tensor[:, 128:384].double())


def test_rows_outside_of_record_or_target(file: Path) -> None:
    with PtFile(file) as opened:
        record, memory = where_of(opened).record, memoryview(bytearray(64))
        end = record.size_bytes
        for starts, places in (
            (range(end - 24, end, 16), range(0, 32, 16)),
            (range(-4, 28, 16), range(0, 32, 16)),
            (range(0, 32, 16), range(44, 76, 16)),
            (range(0, 32, 16), range(-4, 28, 16)),
        ):
            with pytest.raises(UsageError, match="row lies outside"):
                opened.read_rows_into(record, starts, 16, memory, places)


def test_rows_of_a_file_that_was_cut_short(file: Path) -> None:
    with PtFile(file) as opened:
        record = where_of(opened).record
        with file.open("r+b") as raw:
            raw.truncate(record.offset_bytes + 24)
        with pytest.raises(DamagedFileError, match="truncated"):
            opened.read_rows_into(
                record, range(0, 32, 16), 16, memoryview(bytearray(32)), range(0, 32, 16)
            )


def test_short_counts_are_continued(
    file: Path, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pt_file.os.preadv
    monkeypatch.setattr(pt_file.os, "preadv", lambda fd, into, at: whole(fd, [into[0][:5]], at))
    memory = bytearray(32)
    with PtFile(file) as opened:
        opened.read_rows_into(
            where_of(opened).record, range(0, 80, 40), 16, memoryview(memory), range(16, -16, -16)
        )
    flat = tensor.view(-1)
    assert torch.equal(
        torch.frombuffer(memory, dtype=torch.float32), torch.cat([flat[10:14], flat[:4]])
    )


def interleaved(count: int) -> Plan:
    """A tensor that is stored transposed, in `count` groups of columns that lie in another order in
    the target."""
    width, box = COLUMNS // count, Box((0, 0), (COLUMNS // count, ROWS))
    ops = tuple(
        Copy(
            Side(SOURCE, number * width, (1, COLUMNS)),
            Side(TARGET, (count - 1 - number) * width * ROWS, (ROWS, 1)),
            (width, ROWS),
            0,
            box,
        )
        for number in range(count)
    )
    return Plan(((TARGET, "master"),), ops, ())


@pytest.mark.parametrize("staging_bytes", [64, 4 * COLUMNS * 7, 4 * COLUMNS * 40, 2**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_that_take_turns_in_each_row(
    file: Path,
    tensor: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    staging_bytes: int,
    dtype: torch.dtype,
) -> None:
    """They are read together: each byte once, in memory that is bounded, and its sum compared."""
    staging, plan = execute.Staging(staging_bytes), interleaved(8)
    most: list[int] = []
    take = execute.Staging.take
    monkeypatch.setattr(
        execute.Staging, "take", lambda self, size: most.append(size) or take(self, size)
    )
    out = torch.zeros(ROWS * COLUMNS, dtype=dtype)
    with PtFile(file) as opened:
        counts = execute.execute(plan, lambda _: where_of(opened), lambda _: out, staging=staging)
    assert torch.equal(out.view(8, 64, ROWS).flip(0).view(COLUMNS, ROWS), tensor.t().to(dtype))
    assert max(most) <= max(staging_bytes, 64 * 4)
    if staging_bytes > 64:
        assert counts.read_bytes == tensor.nbytes and not counts.unsummed_bytes
        assert sum(run.size for run in counts.runs) == tensor.nbytes


def test_the_memory_of_a_tensor_with_gaps() -> None:
    """What is read into a copy of it would be lost."""
    whole = torch.zeros(4, 6)
    bytes_of(whole)[:4] = b"\0\0\x80\x3f"
    assert whole[0, 0] == 1 and len(bytes_of(whole[:, :0])) == 0
    for part in (whole[:, :3], whole.t(), whole[::2]):
        with pytest.raises(ValueError, match="with gaps"):
            bytes_of(part)


def test_progress_counts_the_bytes_that_are_wanted(file: Path, tensor: torch.Tensor) -> None:
    out, said = torch.zeros(ROWS * 256), list[tuple[int, int]]()
    plan = plan_of((ROWS, 256), (0, (COLUMNS, 1)), (0, (256, 1)))
    with PtFile(file) as opened:
        execute.execute(
            plan,
            lambda _: where_of(opened),
            lambda _: out,
            progress=lambda done, total: said.append((done, total)),
        )
    assert said == [(ROWS * 256 * 4,) * 2]
    assert torch.equal(out.view(ROWS, 256), tensor[:, :256])


def test_storage_is_told_of_what_is_read_next(
    file: Path, tensor: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte once, before it is read, not more than a bound ahead; nothing of rows with gaps."""
    step, most = 16 * 2**10, 48 * 2**10
    monkeypatch.setattr(execute, "AHEAD_STEP_BYTES", step)
    monkeypatch.setattr(execute, "DISK_AHEAD_BYTES", most)
    monkeypatch.setattr(execute, "CRC_CHUNK_BYTES", step)
    told, read = list[tuple[int, int]](), [0]
    into = PtFile.read_into

    def prefetch(_: PtFile, record: object, start: int, size: int) -> None:
        told.append((start, start + size))
        assert start < read[0] + most

    def read_into(self: PtFile, source: Any, start_byte: int, target: memoryview) -> None:
        assert told and told[-1][1] >= start_byte + len(target)
        into(self, source, start_byte, target)
        read[0] = start_byte + len(target)

    monkeypatch.setattr(PtFile, "prefetch", prefetch)
    monkeypatch.setattr(PtFile, "read_into", read_into)
    out, elems = torch.zeros(ROWS * COLUMNS), ROWS * COLUMNS
    with PtFile(file) as opened:
        where, plan = where_of(opened), plan_of((elems,), (0, (1,)), (0, (1,)))
        execute.execute(plan, lambda _: where, lambda _: out)
        assert torch.equal(out.view(ROWS, COLUMNS), tensor)
        assert told == [(at, at + step) for at in range(0, 4 * elems, step)]
        told.clear()
        parts = ((0, 100), (100, 3900), (4000, 200), (4200, 96), (6000, 10))  # first, elements
        ops = [plan_of((size,), (at, (1,)), (at, (1,))).ops[0] for at, size in parts]
        steps = execute._steps_of(ops, {op.source.slot: where for op in ops})
        assert [(at, at + size) for _, at, size in steps] == [
            (0, step),
            (step, 17184),
            (24000, 24040),
        ]
        columns = plan_of((ROWS, 256), (0, (COLUMNS, 1)), (0, (256, 1)))
        execute.execute(columns, lambda _: where, lambda _: out)
        assert told == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_long_runs_are_copied_as_torch_copies(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies around them stays, and so does what a copy must cast or leave gaps in."""
    monkeypatch.setattr(execute, "LONG_RUN_BYTES", 16)
    source = torch.randint(0, 2**15, (6, 40)).to(dtype)
    views: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "a run": lambda whole: whole[1:4],
        "flat": lambda whole: whole.view(-1)[3:100],
        "a short run": lambda whole: whole[0, :1],
        "rows with gaps": lambda whole: whole[:, 1:30],
        "turned": lambda whole: whole.T,
    }
    for name, view in views.items():
        for into in (dtype, torch.float64):
            found, want = (torch.zeros(source.shape, dtype=into) for _ in range(2))
            execute.copy_run(view(found), view(source))
            view(want).copy_(view(source))
            assert torch.equal(found, want) and want.any(), name
