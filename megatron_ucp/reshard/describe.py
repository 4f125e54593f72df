"""What a checkpoint is, from its directories and pickles alone."""

import os
from dataclasses import replace
from pathlib import Path

from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import FILE_NAME, FileEntry, Manifest
from megatron_ucp.core.mesh import EXPERT_RANK
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.deepspeed.paths import is_universal
from megatron_ucp.formats.listed_files import Recorded
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.formats.registry import checkpoint_folder, open_checkpoint
from megatron_ucp.reshard.each_file import check_size


def describe(path: str | Path, tag: str | None = None, rules: str | Path | None = None) -> Manifest:
    """The manifest of a checkpoint: recorded beside it, or rebuilt from the files. Reads no tensor.

    Args:
        path: A tag folder, or the folder above it.
        tag: The tag in `path`, where it is not the newest.
        rules: A file of rules (docs/reference/rules.md), where no family knows the layouts.

    Returns:
        Mesh, parameters, flat buffers, groups, files. A stage-0 checkpoint without a manifest
        keeps optimizer states by position only: its manifest has weights alone.

    Raises:
        NotFoundError: Where there is no checkpoint.
        UcpError: For one that can't be read.

    Example:
        >>> import megatron_ucp as ucp
        >>> str(ucp.describe("runs/llama").mesh)
        'tp=2,pp=1,dp=2,zero=1'
    """
    with open_checkpoint(path, tag, rules) as checkpoint:
        return checkpoint.manifest


def look(path: str | Path, tag: str | None = None, rules: str | Path | None = None) -> Manifest:
    """As `describe`, but a manifest is believed once every file that it lists is there with its
    size: none is opened.

    So it takes no longer on thousands of ranks. `verify` compares the manifest with the files.
    Raises a UcpError.
    """
    folder = checkpoint_folder(path, tag)
    if rules is not None or is_universal(folder) or not os.path.lexists(folder / FILE_NAME):
        with open_checkpoint(folder, rules=rules) as checkpoint:
            files = tuple(
                FileEntry(name, os.stat(folder / name).st_size) for name in checkpoint.file_names
            )
            return replace(checkpoint.manifest, files=files)
    recorded = Recorded(
        folder, [name for name in os.listdir(folder) if name.endswith("_states.pt")]
    )
    recorded.close()
    for entry in recorded.files.values():
        check_size(f"{folder}/{entry.name}", entry)
    if recorded.manifest is None:
        raise DamagedFileError("the manifest went away while it was read", file=folder / FILE_NAME)
    return recorded.manifest


def experts(manifest: Manifest) -> dict[str, list[str]]:
    """Experts in words ("8, 4 on each of 2 ranks") -> the layers with so many."""
    counts = {
        spec.name.rpartition(f".{spec.expert[0]}.")[0]: spec.expert[1]
        for spec in manifest.params
        if spec.expert is not None
    }
    ranks = manifest.mesh.size(EXPERT_RANK)
    out: dict[str, list[str]] = {}
    for layer, count in counts.items():
        text = f"{count}, {count // ranks} on each of {ranks} ranks" if ranks > 1 else f"{count}"
        out.setdefault(text, []).append(layer)
    return out


def sizes(manifest: Manifest) -> dict[str, tuple[tuple[str, ...], int]]:
    """Each element-wise state: its dtypes, and its bytes over all parameters, whole and once
    ("weights": the training copy)."""
    dtypes: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    has_one_copy = manifest.keeper in (Keeper.UNIVERSAL, Keeper.WEIGHTS)
    for spec in manifest.params:
        copies = [] if has_one_copy else [("weights", spec.dtype)]
        for state, dtype in (*copies, *manifest.states_of(spec.name).items()):
            dtypes.setdefault(state, set()).add(dtype)
            size = spec.elems * ITEMSIZE.get(dtype, 0)
            sizes[state] = sizes.get(state, 0) + size
    return {state: (tuple(sorted(dtypes[state])), sizes[state]) for state in sizes}
