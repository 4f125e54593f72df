"""Where a test reads a folder: on the disk, where it lies, or in an object store."""

from pathlib import Path

from megatron_ucp.formats.store import Location, StorePath
from tests.object_server import Remote


class Place:
    """Gives a folder as it is, or where its files are in a store, as they are at that moment. The
    fixture `place` runs a test with both."""

    def __init__(self, server: Remote | None) -> None:
        self._server, self._count = server, 0

    @property
    def is_store(self) -> bool:
        return self._server is not None

    def __call__(self, folder: Path) -> Location:
        if self._server is None:
            return folder
        self._count += 1
        prefix = f"bucket/{self._count}/{folder.name}"
        self._server.ask("copy_in", folder=str(folder), prefix=prefix)
        return StorePath(f"s3://{prefix}")
