"""What ranks do for `test_work_sharing`."""

import os
from typing import Any

import megatron_ucp as ucp
from megatron_ucp.errors import UcpError
from megatron_ucp.formats.output_folder import OutFile
from megatron_ucp.reshard import agree, folder

CALLS = {"convert": ucp.convert, "export": ucp.export_hf, "import": ucp.import_hf}


def call(what: str, source: str, output: str, **options: Any) -> dict[str, Any]:
    """One conversion that all ranks share: what it returned or raised, and how many bytes this
    rank wrote."""
    written, write, job_bytes = [0], OutFile.write, folder._JOB_BYTES

    def counted(self: OutFile, data: Any, place: int) -> None:
        written[0] += len(data)
        write(self, data, place)

    OutFile.write, folder._JOB_BYTES = counted, 1024  # so that files this small are shared, too
    try:
        done = CALLS[what](source, output, ranks=True, **options)
    except UcpError as error:
        return {"error": f"{type(error).__name__}: {error}", "written": written[0]}
    finally:
        OutFile.write, folder._JOB_BYTES = write, job_bytes
    facts = {name: getattr(done, name) for name in ("read_bytes", "written_bytes", "files")}
    return {"done": facts, "pointer": getattr(done, "pointer", ""), "written": written[0]}


def by_rank_0(source: str, output: str) -> bool:
    """A conversion of rank 0 alone, while the others do something else."""
    if agree.world()[0] == 0:
        ucp.convert(source, output, to="universal")
    return os.path.exists(output)


def otherwise(source: str, outputs: list[str], options: list[dict[str, Any]]) -> str:
    """Ranks that ask for different things; what was raised."""
    rank = agree.world()[0]
    return call("convert", source, outputs[rank], **options[rank])["error"]


def full(source: str, output: str) -> str:
    """The disk of the last rank is full; what was raised."""
    rank, world = agree.world()
    write = OutFile.write

    def refused(self: OutFile, data: Any, place: int) -> None:
        if rank == world - 1:
            raise OSError(28, "No space left on device", str(self.path))
        write(self, data, place)

    OutFile.write = refused
    try:
        return call("convert", source, output, to="universal")["error"]
    finally:
        OutFile.write = write
