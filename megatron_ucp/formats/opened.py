"""Opens a checkpoint, whatever its format."""

from pathlib import Path

from megatron_ucp.formats.deepspeed import NativeCheckpoint


def open_checkpoint(path: str | Path, tag: str | None = None) -> NativeCheckpoint:
    """A checkpoint of any format, to look into and to read; a context manager.

    A stage-0 checkpoint without a manifest keeps optimizer states by position only: it is read without its optimizer.
    Raises a UcpError.
    """
    return NativeCheckpoint(path, tag, positions_too=True)
