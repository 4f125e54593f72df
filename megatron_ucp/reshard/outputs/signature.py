"""What lies beside the files of a conversion, and says which files they are."""

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_ucp.core.manifest import (
    CONVERTED_FROM,
    FINGERPRINT,
    MOVED_LATEST,
    RUN,
    SAVED_ON,
    FileEntry,
    Manifest,
)
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.formats import durable
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.deepspeed.tag_folder import CLASSES, MEMBERS
from megatron_ucp.reshard.fingerprint import recorded_in, true_shape
from megatron_ucp.reshard.folder_sink import require_free


def signed(
    manifest: Manifest, source: Checkpoint, files: tuple[FileEntry, ...], said: dict[str, Any]
) -> Manifest:
    """The manifest with what identifies the files, and what else is `said` of them. All of it comes
    from the source: whoever converts it again gets the same bytes."""
    recorded = source.recorded.run if source.recorded is not None else {}
    newest = max(os.stat(source.folder / name).st_mtime for name in source.file_names)
    content = json.dumps([recorded.get("saved_at"), [asdict(entry) for entry in files]])
    kept = ("seed", "data", RUN, CLASSES, MEMBERS)
    run = {
        **{key: recorded[key] for key in kept if key in recorded},
        **_fingerprint(manifest, source),
        **{key: value for key, value in manifest.run.items() if key not in (SAVED_ON, FINGERPRINT)},
        CONVERTED_FROM: str(source.manifest.written_on),
        "saved_at": recorded.get("saved_at", newest),
        MOVED_LATEST: False,
        **said,
    }
    save_id = hashlib.sha256(content.encode()).hexdigest()[:32]
    return replace(manifest, files=files, save_id=save_id, run=run)


def _fingerprint(manifest: Manifest, source: Checkpoint) -> dict[str, Any]:
    """What the save recorded of each parameter that still has the same elements."""
    table = {} if source.recorded is None else recorded_in(source.recorded.run)
    known, there = source.manifest.by_name, manifest.by_name
    same = {
        name: states
        for name, states in table.items()
        if name in known and name in there and true_shape(known[name]) == true_shape(there[name])
    }
    return {FINGERPRINT: same} if same else {}


def name_folder(folder: Path, manifest: Manifest, aside: Path) -> None:
    """Gives a folder its manifest and its name. Raises UsageError where a save took the name
    meanwhile, OSError."""
    require_free(folder)
    durable.commit(aside, to_json(manifest), durable.Syncs())
