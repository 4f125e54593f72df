"""The fingerprint as a second oracle of the loads that other tests make."""

from pathlib import Path
from typing import Any

import megatron_ucp as ucp

MARK = "fingerprint: "


def unlike(engine: Any, folder: str | Path, tag: str, exact: bool = True) -> list[str]:
    """What the fingerprints of a live engine and of the files that it loaded say differs, whatever
    the two meshes are. Not `exact`: nothing is said. Collective."""
    if not exact:
        return []
    have, want = ucp.fingerprint(engine), ucp.fingerprint(folder, tag)
    assert len(have.table) > 5
    return [MARK + one for one in have.differences(want)]


def unchecked(report: Any) -> list[str]:
    """Whether a load compared less than all that it moved, where a save recorded a fingerprint."""
    found = report.fingerprint
    if found is None or found.done_bytes == found.loaded_bytes > 0:
        return []
    return [f"{MARK}{found.done_bytes} of {found.loaded_bytes} bytes compared"]
