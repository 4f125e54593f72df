"""The fingerprint of a live engine, or of files."""

import os
from typing import Any

from megatron_ucp.engines.held import HANDLE
from megatron_ucp.errors import UsageError
from megatron_ucp.reshard.fingerprint import Fingerprint, of_path


def fingerprint(engine_or_path: Any, tag: str | None = None) -> Fingerprint:
    """What a training state is, whatever mesh, format or engine holds it. Of an engine collective:
    nothing is moved but sums. Of files all bytes are read, and compared with what the save
    recorded.

    Args:
        engine_or_path: An attached engine (of DeepSpeed, or what `attach_megatron` returned), or a
            checkpoint: the tag's folder or the one above it. Or a file with what `megatron-ucp
            inspect --fingerprint --json` printed.
        tag: Of a checkpoint's folder; default the newest.

    Returns:
        `table`, the CRC-32 of each parameter and state; `settings`, steps and hyper-parameters;
        `digest`, one SHA-256 over both; `differences(other)` names what differs.

    Raises:
        UsageError: For what is neither.
        ForeignFileError: Where files hold another value than was saved, or copies of a parameter
            differ.

    Example:
        >>> print(ucp.fingerprint("checkpoints"))
        >>> ucp.fingerprint(engine).differences(ucp.fingerprint("checkpoints"))
        []
    """
    if isinstance(engine_or_path, str | os.PathLike):
        return of_path(engine_or_path, tag)
    handle: Any = getattr(engine_or_path, HANDLE, None)
    if handle is None:
        raise UsageError(
            "this has no fingerprint",
            expected="an attached engine, or the path of a checkpoint",
            found=type(engine_or_path).__name__,
            fix="attach the engine first: ucp.attach(engine)",
        )
    return handle.fingerprint()
