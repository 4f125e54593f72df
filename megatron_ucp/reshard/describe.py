"""What a checkpoint is, from its directories and pickles alone."""

from pathlib import Path

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.formats.opened import open_checkpoint


def describe(path: str | Path, tag: str | None = None, rules: str | Path | None = None) -> Manifest:
    """The manifest of a checkpoint: recorded beside it, or rebuilt from the files. Reads no tensor. Raises a UcpError.

    A stage-0 checkpoint without a manifest keeps optimizer states by position only: its manifest has weights alone.
    `rules`: a file of rules (docs/rules.md) for a checkpoint that does not say how it is cut.
    """
    with open_checkpoint(path, tag, rules) as checkpoint:
        return checkpoint.manifest
