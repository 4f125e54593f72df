"""What a checkpoint is, from its directories and pickles alone."""

from pathlib import Path

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.formats.opened import open_checkpoint


def describe(path: str | Path, tag: str | None = None) -> Manifest:
    """The manifest of a checkpoint: recorded beside it, or rebuilt from the files. Reads no tensor. Raises a UcpError.

    A stage-0 checkpoint without a manifest keeps optimizer states by position only: its manifest has weights alone.
    """
    with open_checkpoint(path, tag) as checkpoint:
        return checkpoint.manifest
