"""What the ranks do in the tests of plans: a load whose reads are counted below the executor."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_ucp as ucp
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.reshard import files as loading
from tests.engines.kinds import kind_of


def reads(setup: Any, folder: str, checksums: bool = False) -> dict[str, Any]:
    """Bytes by file, number of copies and bytes of filled memory of one load; what its report
    says."""
    engine, files, out = kind_of(setup).make(setup), Counter[str](), {}
    execute, one, many = loading.execute, PtFile.read_into, PtFile.read_rows_into

    def read_into(self: PtFile, record: Any, offset_bytes: int, into: memoryview) -> Any:
        files[Path(self.path).relative_to(folder).as_posix()] += len(into)
        return one(self, record, offset_bytes, into)

    def read_rows_into(
        self: PtFile, record: Any, starts: range, row_bytes: int, into: memoryview, places: range
    ) -> Any:
        files[Path(self.path).relative_to(folder).as_posix()] += len(starts) * row_bytes
        return many(self, record, starts, row_bytes, into, places)

    def counted(plan: Any, locate: Any, target: Any, **options: Any) -> Any:
        out.update(
            copies=len(plan.ops), state_bytes=sum(target(slot).nbytes for slot, _ in plan.wants)
        )
        with mock.patch.multiple(PtFile, read_into=read_into, read_rows_into=read_rows_into):
            return execute(plan, locate, target, **options)

    with mock.patch.object(loading, "execute", counted):
        report = ucp.load(engine, folder, checksums=checksums)
    kind_of(setup).close(engine)
    return {**out, "files": dict(files), "read_bytes": report.read_bytes}
