"""Where the parameters of a model lie in the stored tensors of a `torch_dist` folder: weights,
and the optimizer's states that lie under names (`optimizer.state.STATE.KEY`)."""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.grouping import MadeWhenAsked, grouped
from megatron_ucp.core.names import MASTER
from megatron_ucp.errors import DamagedFileError, UnsupportedError
from megatron_ucp.formats.megatron.distcp import Chunk, StoredTensor
from megatron_ucp.formats.megatron.names import (
    LOCAL_EXPERTS,
    ROUTER,
    Key,
    in_order_of_rows,
    key_before_experts,
    read_key,
)
from megatron_ucp.formats.optimizers import check_known

# ---- stored


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block [start, stop) of a parameter: all elements of a run of a chunk, which begins
    `offset_elems` elements into it."""

    start: Ints
    stop: Ints
    tensor: StoredTensor
    chunk: Chunk
    offset_elems: int


class Blocks(MadeWhenAsked[StoredBlock]):
    """The blocks of a parameter in one tensor, in the order of where they begin. They are rows of
    arrays of all parameters of that tensor, and are made where somebody asks for them."""

    def __init__(self, tensor: StoredTensor, grid: "_Grid", low: int, high: int) -> None:
        self._tensor, self._grid, self._low, self._high = tensor, grid, low, high

    def __len__(self) -> int:
        return self._high - self._low

    def made(self, number: int) -> StoredBlock:
        grid, row = self._grid, self._low + number
        start, stop = (tuple(each[row].tolist()) for each in (grid.starts, grid.stops))
        chunk = self._tensor.chunks[int(grid.chunks[row])]
        return StoredBlock(start, stop, self._tensor, chunk, int(grid.offsets[row]))

    @property
    def boxes(self) -> "Boxes":
        """Where each begins and ends."""
        return Boxes(self._grid, self._low, self._high)


class Boxes(MadeWhenAsked[tuple[Ints, Ints]]):
    """Where each of some blocks begins and ends."""

    def __init__(self, grid: "_Grid", low: int, high: int) -> None:
        self._grid, self._low, self._high = grid, low, high

    def __len__(self) -> int:
        return self._high - self._low

    def made(self, number: int) -> tuple[Ints, Ints]:
        grid, row = self._grid, self._low + number
        return tuple(grid.starts[row].tolist()), tuple(grid.stops[row].tolist())

    def __eq__(self, other: object) -> bool:
        """Of the arrays that all states of a parameter share at once, else one by one."""
        if isinstance(other, Boxes) and self._grid is other._grid:
            return (self._low, self._high) == (other._low, other._high)
        return super().__eq__(other)

    def __hash__(self) -> int:
        return super().__hash__()


class EachAlone(MadeWhenAsked[tuple[tuple[Ints, Ints], ...]]):
    """Boxes as `Chunks` asks for them: each alone in its chunk."""

    def __init__(self, boxes: Sequence[tuple[Ints, Ints]]) -> None:
        self._boxes = boxes

    def __len__(self) -> int:
        return len(self._boxes)

    def made(self, number: int) -> tuple[tuple[Ints, Ints], ...]:
        return (self._boxes[number],)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, EachAlone):
            return self._boxes == other._boxes
        return super().__eq__(other)

    def __hash__(self) -> int:
        return super().__hash__()


@dataclass(frozen=True)
class StoredParam:
    """One state of one parameter: its blocks, sorted by where they begin, are the whole of it.
    `rows` are those of each part, where its rows lie under several keys."""

    name: str
    shape: Ints
    dtype: str
    expert: tuple[int, int] | None
    blocks: Sequence[StoredBlock]
    rows: Ints = ()

    @property
    def boxes(self) -> Sequence[tuple[Ints, Ints]]:
        if isinstance(self.blocks, Blocks):
            return self.blocks.boxes
        return tuple((block.start, block.stop) for block in self.blocks)


def stored_params(
    tensors: Mapping[str, StoredTensor], file: str, grids: "Grids | None" = None
) -> dict[str, StoredParam]:
    """Every parameter that lies in tensors, by canonical name; the tensors are by the keys of the
    model. Raises DamagedFileError where two keys are one parameter's, or a part of one or an expert
    is missing. `grids` are those of other states of the same model."""
    known = Grids() if grids is None else grids
    found = grouped(
        (part.name, part) for key, tensor in tensors.items() for part in known.parts(key, tensor)
    )
    counts = _experts_by_layer(found, file)
    return {name: _joined(name, parts, counts, file) for name, parts in found.items()}


@dataclass(frozen=True, slots=True)
class _Part:
    """What one tensor holds of a parameter: all of it, or a part (see `Key`)."""

    name: str
    expert: int | None
    part: str
    shape: Ints
    dtype: str
    blocks: Blocks


@dataclass(frozen=True, eq=False)
class _Grid:
    """How the chunks of a tensor divide its parameters: the blocks of all of them as rows, those of
    parameter number i from `ends[i]` to `ends[i + 1]`, of which row r begins `offsets[r]` elements
    into chunk `chunks[r]`. `names` are those of the parameters, with the numbers of experts."""

    names: list[tuple[str, int | None]]
    ends: list[int]
    starts: Any
    stops: Any
    chunks: Any
    offsets: Any


class Grids:
    """How the chunks of tensors divide their parameters, made once for the states of a model that
    are cut alike."""

    def __init__(self) -> None:
        self._of_key: dict[str, tuple[Key, Any, Any, _Grid]] = {}

    def parts(self, key: str, tensor: StoredTensor) -> Iterator[_Part]:
        """What a tensor holds of each of its parameters."""
        starts, sizes = arrays_of(tensor)
        known = self._of_key.get(key)
        same = known is not None and all(
            _is_same(*pair) for pair in ((known[1], starts), (known[2], sizes))
        )
        if known is None or not same or _leads(known[0], tensor) != len(known[3].names):
            read = read_key(key)
            grid = _grid(read, tensor.shape, starts, sizes, known and known[3])
            known = self._of_key[key] = read, starts, sizes, grid
        read, _, _, grid = known
        shape, dtype, part = tensor.shape[len(read.stacked) :], tensor.dtype, read.part
        for (name, expert), low, high in zip(grid.names, grid.ends, grid.ends[1:], strict=False):
            yield _Part(name, expert, part, shape, dtype, Blocks(tensor, grid, low, high))


def _leads(key: Key, tensor: StoredTensor) -> int:
    """How many parameters lie in a tensor."""
    return math.prod(tensor.shape[: len(key.stacked)])


def arrays_of(tensor: StoredTensor) -> tuple[Any, Any]:
    """Where the chunks of a tensor begin, and their shapes: a row for each."""
    import numpy as np

    chunks: Any = tensor.chunks
    if hasattr(chunks, "starts"):
        return chunks.starts, chunks.sizes
    rows = ([chunk.start for chunk in chunks], [chunk.shape for chunk in chunks])
    starts, sizes = (np.array(each, np.int64).reshape(len(chunks), -1) for each in rows)
    return starts, sizes


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (one.shape == other.shape and bool((one == other).all()))


def _grid(key: Key, shape: Ints, starts: Any, sizes: Any, other: _Grid | None) -> _Grid:
    """How the chunks of a tensor divide the parameters that lie in it along its leading dims."""
    import numpy as np

    lead = len(key.stacked)
    counts = shape[:lead]
    count = math.prod(counts)
    spans = sizes[:, :lead].prod(1, dtype=np.int64)
    chunks = np.repeat(np.arange(len(starts)), spans)
    # of a chunk that has several parameters, which of them in its own order
    within = np.arange(len(chunks)) - np.repeat(np.cumsum(spans) - spans, spans)
    number, left = np.zeros(len(chunks), np.int64), within
    for dim in range(lead - 1, -1, -1):
        size = sizes[chunks, dim].astype(np.int64)
        number += (starts[chunks, dim] + left % size) * math.prod(counts[dim + 1 :])
        left = left // size
    inner = starts[:, lead:][chunks], sizes[:, lead:][chunks]
    offsets = within * inner[1].prod(1, dtype=np.int64)
    order = np.lexsort((*inner[0].T[::-1], number))
    ends = np.searchsorted(number[order], np.arange(count + 1)).tolist()
    if other is not None and len(other.names) == count:
        names = other.names
    else:
        names = [key.canonical(index) for index in itertools.product(*map(range, counts))]
    first, size = inner[0][order], inner[1][order]
    return _Grid(names, ends, first, first + size, chunks[order], offsets[order])


def _joined(name: str, parts: list[_Part], counts: Mapping[str, int], file: str) -> StoredParam:
    """The parameter of one part, or of several, one below the other."""
    first, expert = parts[0], None
    if first.expert is not None:
        expert = first.expert, counts[_layer_of_expert(name, first.expert)]
    if len(parts) == 1 and not first.part:
        return StoredParam(name, first.shape, first.dtype, expert, first.blocks)
    order = in_order_of_rows(part.part for part in parts)
    kinds = {(part.dtype, part.shape[1:] if part.part else part.shape) for part in parts}
    if order is None or len(order) != len(parts) or len(kinds) > 1:
        raise DamagedFileError(
            "the keys of a parameter do not fit together",
            file=file,
            parameter=name,
            expected="one key, or one for each part of it, such as the gate and the up",
            found=", ".join(part.blocks[0].tensor.key for part in parts if part.blocks),
        )
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


# ---- named states


_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<state>[^.]+)\.(?P<key>.+)")
_FLAT = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.(?P<rest>.+)")
# What the DistributedOptimizer calls the masters, and what a Float16Optimizer does.
_MASTERS = ("param", "fp32_param")
_FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class HeldStates:
    """What is held of one parameter: each state, the masters first, all in the same boxes."""

    by_state: Mapping[str, StoredParam]
    stepped: bool = False

    @property
    def boxes(self) -> Sequence[tuple[Ints, Ints]]:
        return next(iter(self.by_state.values())).boxes


@dataclass(frozen=True)
class NamedStates:
    """`weights` by canonical name, and the optimizer's states by state and name; `flat` are the
    tensors of buckets, by key; `copies` are tensors that lie under two keys, which must be the
    same."""

    weights: Mapping[str, StoredParam]
    states: Mapping[str, Mapping[str, StoredParam]]
    flat: Mapping[str, StoredTensor]
    file: str
    copies: Sequence[tuple[StoredTensor, StoredTensor]] = ()

    def held(self, name: str) -> HeldStates | None:
        """The optimizer's states of a parameter; None for one that no optimizer steps.

        Where no masters are stored the weights are the masters, which is right in fp32 alone.
        Raises DamagedFileError, UnsupportedError.
        """
        found = {state: params[name] for state, params in self.states.items() if name in params}
        if self.states and not found:
            return None
        weight = self.weights[name]
        by_state = {MASTER: found.pop(MASTER, weight), **dict(sorted(found.items()))}
        if by_state[MASTER].dtype != "float32":
            raise DamagedFileError(
                "a parameter has lost its fp32 masters",
                file=self.file,
                parameter=name,
                expected=f"optimizer.state.{_MASTERS[0]} or {_MASTERS[1]}",
                found=f"weights in {weight.dtype}",
            )
        for state, param in by_state.items():
            if param.dtype not in _FLOATS:
                raise UnsupportedError(
                    f"the state {state} is no number for each element: it is scaled by blocks",
                    file=self.file,
                    parameter=name,
                    expected=", ".join(_FLOATS),
                    found=param.dtype,
                    fix="save it again without --exp-avg-dtype and --exp-avg-sq-dtype",
                )
            if param.shape != weight.shape:
                raise DamagedFileError(
                    f"the state {state} has another shape than its parameter",
                    file=self.file,
                    parameter=name,
                    expected=weight.shape,
                    found=param.shape,
                )
            if param.boxes != by_state[MASTER].boxes:
                raise UnsupportedError(
                    "the states of a parameter are cut into other chunks than its masters",
                    file=self.file,
                    parameter=name,
                    expected=f"{len(by_state[MASTER].boxes)} chunks",
                    found=f"{len(param.boxes)} chunks of {state}",
                    fix="load it with Megatron-LM and save it again with --ckpt-format torch_dist",
                )
        return HeldStates(by_state, stepped=True)


def split_keys(tensors: Mapping[str, StoredTensor], file: str) -> NamedStates:
    """The tensors of an index by what they are. Raises DamagedFileError for a state of a parameter
    that is not there, UnsupportedError for states that can't be cut."""
    weights: dict[str, StoredTensor] = {}
    states: dict[str, dict[str, StoredTensor]] = {}
    flat: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        if found := _STATE.fullmatch(key):
            state = MASTER if found["state"] in _MASTERS else found["state"]
            states.setdefault(state, {})[found["key"]] = tensor
        elif _FLAT.fullmatch(key):
            flat[key] = tensor
        else:
            weights[key] = tensor
    every = [weights, *states.values()]
    copies = [pair for held in every for pair in _taken_copies(held)]
    check_known([state for state in states if state != MASTER], file)
    grids = Grids()
    named = stored_params(weights, file, grids)
    by_state = {state: stored_params(held, file, grids) for state, held in states.items()}
    lost = {name for held in by_state.values() for name in held} - named.keys()
    if lost:
        raise DamagedFileError(
            "the optimizer has states of a parameter that is not there",
            file=file,
            parameter=min(lost),
            found=f"{len(lost)} such parameters",
        )
    _check_alike(by_state, file)
    return NamedStates(named, by_state, flat, file, copies)


def _taken_copies(
    held: dict[str, StoredTensor],
) -> Iterator[tuple[StoredTensor, StoredTensor]]:
    """Takes away what is also there under its other key (see `key_before_experts`), in the same
    chunks; gives both."""
    for key, tensor in [*held.items()]:
        other = key_before_experts(key)
        if other is not None and other in held and _is_alike(tensor, held[other]):
            yield tensor, held.pop(other)


def _is_alike(one: StoredTensor, other: StoredTensor) -> bool:
    boxes = zip(arrays_of(one), arrays_of(other), strict=True)
    return (one.dtype, one.shape) == (other.dtype, other.shape) and all(
        _is_same(*pair) for pair in boxes
    )


def _check_alike(by_state: Mapping[str, Mapping[str, StoredParam]], file: str) -> None:
    """Raises DamagedFileError where one state has another set of parameters than the others. The
    masters of fp32 parameters may be the weights."""
    moments = [state for state in by_state if state != MASTER]
    for state in moments[1:]:
        odd = by_state[state].keys() ^ by_state[moments[0]].keys()
        if odd:
            raise DamagedFileError(
                "a parameter has not all of the optimizer's states",
                file=file,
                parameter=min(odd),
                expected=", ".join(by_state),
                found=f"{len(odd)} such parameters",
            )
