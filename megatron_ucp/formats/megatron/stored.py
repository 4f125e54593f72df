"""Where the parameters of a model lie in the stored tensors of a checkpoint."""

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron_ucp.core.box import Ints, flat_index
from megatron_ucp.core.grouping import grouped
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.megatron.index import Chunk, StoredTensor
from megatron_ucp.formats.megatron.names import (
    LOCAL_EXPERTS,
    ROUTER,
    Key,
    in_order_of_rows,
    read_key,
)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block [start, stop) of a parameter: all elements of a run of a chunk, which begins
    `offset_elems` elements into it."""

    start: Ints
    stop: Ints
    tensor: StoredTensor
    chunk: Chunk
    offset_elems: int


@dataclass(frozen=True)
class StoredParam:
    """One state of one parameter: its blocks, sorted by where they begin, are the whole of it.
    `rows` are those of each part, where its rows lie under several keys."""

    name: str
    shape: Ints
    dtype: str
    expert: tuple[int, int] | None
    blocks: tuple[StoredBlock, ...]
    rows: Ints = ()

    @property
    def boxes(self) -> tuple[tuple[Ints, Ints], ...]:
        return tuple((block.start, block.stop) for block in self.blocks)


def stored_params(tensors: Mapping[str, StoredTensor], file: str) -> dict[str, StoredParam]:
    """Every parameter that lies in tensors, by canonical name; the tensors are by the keys of the
    model. Raises DamagedFileError where two keys are one parameter's, or a part of one or an expert
    is missing."""
    found = grouped(
        (part.name, part)
        for key, tensor in tensors.items()
        for part in _parts(read_key(key), tensor)
    )
    counts = _experts_by_layer(found, file)
    return {name: _joined(name, parts, counts, file) for name, parts in found.items()}


@dataclass(frozen=True)
class _Part:
    """What one tensor holds of a parameter: all of it, or a part (see `Key`)."""

    name: str
    expert: int | None
    part: str
    shape: Ints
    dtype: str
    blocks: list[StoredBlock]


def _parts(key: Key, tensor: StoredTensor) -> Iterable[_Part]:
    lead = len(key.stacked)
    shape = tensor.shape[lead:]
    parts: dict[Ints, _Part] = {}
    for index in itertools.product(*map(range, tensor.shape[:lead])):
        name, expert = key.canonical(index)
        parts[index] = _Part(name, expert, key.part, shape, tensor.dtype, [])
    for chunk in tensor.chunks:
        inner = math.prod(chunk.shape[lead:])
        spans = [range(a, b) for a, b in zip(chunk.start[:lead], chunk.stop[:lead], strict=True)]
        for index in itertools.product(*spans):
            at = tuple(i - a for i, a in zip(index, chunk.start[:lead], strict=True))
            offset = flat_index(at, chunk.shape[:lead]) * inner
            block = StoredBlock(chunk.start[lead:], chunk.stop[lead:], tensor, chunk, offset)
            parts[index].blocks.append(block)
    return parts.values()


def _joined(name: str, parts: list[_Part], counts: Mapping[str, int], file: str) -> StoredParam:
    """The parameter of one part, or of several, one below the other."""
    order = in_order_of_rows(part.part for part in parts)
    first = parts[0]
    kinds = {(part.dtype, part.shape[1:] if part.part else part.shape) for part in parts}
    if order is None or len(order) != len(parts) or len(kinds) > 1:
        raise DamagedFileError(
            "the keys of a parameter do not fit together",
            file=file,
            parameter=name,
            expected="one key, or one for each part of it, such as the gate and the up",
            found=", ".join(part.blocks[0].tensor.key for part in parts if part.blocks),
        )
    expert = None
    if first.expert is not None:
        expert = first.expert, counts[_layer_of_expert(name, first.expert)]
    if len(parts) == 1:
        blocks = sorted(first.blocks, key=lambda block: block.start)
        return StoredParam(name, first.shape, first.dtype, expert, tuple(blocks))
    blocks, rows = list[StoredBlock](), list[int]()
    for part in sorted(parts, key=lambda part: order.index(part.part)):
        blocks += [_below(block, sum(rows)) for block in part.blocks]
        rows.append(part.shape[0])
    blocks.sort(key=lambda block: block.start)
    shape = (sum(rows), *first.shape[1:])
    return StoredParam(name, shape, first.dtype, expert, tuple(blocks), tuple(rows))


def _below(block: StoredBlock, rows: int) -> StoredBlock:
    """A block of a part that has so many rows of others above it."""
    start, stop = ((at[0] + rows, *at[1:]) for at in (block.start, block.stop))
    return StoredBlock(start, stop, block.tensor, block.chunk, block.offset_elems)


def _layer_of_expert(name: str, expert: int) -> str:
    return name.partition(f".{expert}.linear_")[0]


def _experts_by_layer(found: Mapping[str, list[_Part]], file: str) -> dict[str, int]:
    """How many experts each layer with experts has: as many as its router sends tokens to. Raises
    DamagedFileError where one is missing."""
    numbers: dict[str, set[int]] = {}
    for name, (first, *_) in found.items():
        if first.expert is not None:
            numbers.setdefault(_layer_of_expert(name, first.expert), set()).add(first.expert)
    counts: dict[str, int] = {}
    for layer, have in numbers.items():
        router = found.get(layer.replace(LOCAL_EXPERTS.rstrip("."), ROUTER))
        counts[layer] = router[0].shape[0] if router else max(have) + 1
        if odd := sorted(have ^ {*range(counts[layer])}):
            raise DamagedFileError(
                "the experts of a layer are not those that its router knows",
                file=file,
                parameter=f"{layer}.{odd[0]}",
                expected=f"experts 0 to {counts[layer] - 1}",
                found=f"{len(have)} of them",
            )
    return counts
