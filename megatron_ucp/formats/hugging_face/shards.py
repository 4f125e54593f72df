"""The files of a Hugging Face model: which tensor goes into which, and their index."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_ucp.core.box import Ints
from megatron_ucp.errors import UsageError
from megatron_ucp.formats.hugging_face.checkpoint import INDEX_FILE, WEIGHTS_FILE
from megatron_ucp.formats.hugging_face.safetensors_file import Entry, header_of

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
Tensor = tuple[str, str, Ints]  # name, dtype, shape


@dataclass(frozen=True)
class WeightFile:
    """A file: its first bytes, the byte at which each tensor begins, and its size."""

    name: str
    header: bytes
    places: dict[str, int]
    size_bytes: int


def parse_size(text: str | int) -> int:
    """Bytes, from a number or a text such as "5GB" (a GB is 10^9 bytes, as transformers counts
    them). Raises UsageError."""
    found = re.fullmatch(
        r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([KMGT]?B)?", str(text).strip().upper()
    )
    if found is None or float(found[1]) <= 0:
        raise UsageError(
            "this is no size of a file",
            expected="5GB, 200MB",
            found=text,
            fix="give such a size (--max-shard-size; Python: max_shard_size=)",
        )
    return int(float(found[1]) * _UNITS[(found[2] or "").removeprefix("B")])


def shards_of(
    tensors: Sequence[Tensor], max_bytes: int, stem: str = WEIGHTS_FILE
) -> list[WeightFile]:
    """The files, as `save_pretrained` of transformers 5 divides tensors, in the order of their
    names: one that does not fit into the file begun by those before it begins the next one. One
    that is larger by itself has a file of its own, which ends none."""
    groups: list[list[Tensor]] = []
    current: list[Tensor] = []
    held = 0
    for tensor in sorted(tensors, key=lambda tensor: _natural(tensor[0])):
        size = _size(tensor)
        if size > max_bytes:
            groups.append([tensor])
            continue
        if held + size > max_bytes:
            groups.append(current)
            current, held = [], 0
        current.append(tensor)
        held += size
    if current or not groups:
        groups.append(current)
    base = stem.removesuffix(".safetensors")
    names = [f"{base}-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    return [_shard(stem if len(groups) == 1 else n, g) for n, g in zip(names, groups, strict=True)]


def _natural(name: str) -> list[tuple[object, ...]]:
    """The order of names in which numbers are numbers: between dots, and at the end of a word."""
    out: list[tuple[object, ...]] = []
    for part in name.split("."):
        text = part.rstrip("0123456789")
        number = int(part[len(text) :]) if text != part else None
        out.append((0, number) if not text else (1, text) if number is None else (1, text, number))
    return out


def _size(tensor: Tensor) -> int:
    return Entry(tensor[1], tensor[2], 0).size_bytes


def _shard(name: str, tensors: Sequence[Tensor]) -> WeightFile:
    header, places = header_of(tensors)
    return WeightFile(name, header, places, len(header) + sum(map(_size, tensors)))


def index_of(
    shards: Sequence[WeightFile], tensors: Iterable[Tensor], parameters: int
) -> dict[str, str]:
    """The text of the index by its file's name; none where there is one file. `parameters` are the
    elements of all parameters."""
    if len(shards) == 1:
        return {}
    sizes = [_size(tensor) for tensor in tensors]
    tree = {
        "metadata": {"total_parameters": parameters, "total_size": sum(sizes)},
        "weight_map": {name: shard.name for shard in shards for name in shard.places},
    }
    return {INDEX_FILE: json.dumps(tree, indent=2, sort_keys=True) + "\n"}
