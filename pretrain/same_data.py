"""Which data a run reads: what its checkpoints keep, so that a position is never one in other data.

Files are known by what is in them: those that moved are the same data. Of a large one some windows
are read, and its size.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrain.data import is_indexed, parse_blend, parse_split, text_files

NAME = "data_identity"  # of an argument of a run: JSON
FLAG = "--allow-other-data"
WINDOWS, WINDOW_BYTES = 64, 1 << 16


def identity(args: argparse.Namespace) -> str:
    """What the order of the samples of a run follows from, but for `--seed`. Raises NotFoundError
    where --data-path names no data."""
    return json.dumps({key: value for key, value in _parts(args).items() if value is not None})


def differences(before: Any, here: str) -> list[str]:
    """What another run's identity has otherwise, a line for each flag; none where nobody knows."""
    try:
        was: Any = json.loads(before)
    except (TypeError, ValueError):
        return []
    if not isinstance(was, dict):
        return []
    now = json.loads(here)
    return [
        f"{flag} was {_shown(was.get(flag))}, is {_shown(now.get(flag))}"
        for flag in {**was, **now}
        if _compared(was.get(flag)) != _compared(now.get(flag))
    ]


def _parts(args: argparse.Namespace) -> dict[str, Any]:
    """By the flags that say them."""
    if args.mock_data:
        return {"--mock-data": True, "--seq-length": args.seq_length}
    blend = parse_blend(args.data_path)
    total = sum(weight or 0 for weight, _ in blend)
    sources = [
        {
            "path": path,
            "files": _fingerprint(path),
            "weight": weight / total if weight is not None and len(blend) > 1 else None,
        }
        for weight, path in blend
    ]
    text = not all(is_indexed(path) for _, path in blend)
    return {
        "--data-path": sources,
        "--split": parse_split(args.split),
        "--seq-length": args.seq_length,
        "--tokenizer-model": _tokenizer(args) if text else None,
    }


def _tokenizer(args: argparse.Namespace) -> str | None:
    """What makes ids of a text, beside the type, which belongs to the model."""
    folder = Path(args.tokenizer_model or "")
    if args.tokenizer_type != "HuggingFaceTokenizer" or not folder.is_dir():
        return None
    files = [*folder.glob("tokenizer*.json"), *folder.glob("*.model"), *folder.glob("*.txt")]
    return _digest(sorted(files))


def _fingerprint(path: str) -> str:
    indexed = [Path(path + ".idx"), Path(path + ".bin")]
    return _digest(indexed if is_indexed(path) else text_files(path))


def _digest(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        for part in _sampled(file):
            digest.update(part)
    return digest.hexdigest()[:32]


def _sampled(path: Path) -> Iterator[bytes]:
    """The size of a file, and its bytes: of a large one those of windows from end to end."""
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    with open(path, "rb") as file:
        if size <= WINDOWS * WINDOW_BYTES:
            yield file.read()
            return
        for window in range(WINDOWS):
            file.seek((size - WINDOW_BYTES) * window // (WINDOWS - 1))
            yield file.read(WINDOW_BYTES)


def _compared(value: Any) -> Any:
    """Without the paths: they may be others."""
    if not isinstance(value, list):
        return value
    return [
        {k: v for k, v in one.items() if k != "path"} if isinstance(one, dict) else one
        for one in value
    ]


def _shown(value: Any) -> str:
    if not isinstance(value, list):
        return "not given" if value is None else str(value)
    return " ".join(_shown_source(one) if isinstance(one, dict) else f"{one:g}" for one in value)


def _shown_source(source: dict[str, Any]) -> str:
    weight = "" if source.get("weight") is None else f"{source['weight']:g} "
    return f"{weight}{source.get('path')} ({str(source.get('files'))[:8]})"
