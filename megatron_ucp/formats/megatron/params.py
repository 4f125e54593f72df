"""Where the parameters of a model lie in the stored tensors of a `torch_dist` folder: weights,
and the optimizer's states that lie under names (`optimizer.state.STATE.KEY`)."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_ucp.core.box import Ints
from megatron_ucp.core.grouping import grouped, kept
from megatron_ucp.core.names import MASTER
from megatron_ucp.errors import DamagedFileError, UnsupportedError
from megatron_ucp.formats.byte_files import Where
from megatron_ucp.formats.megatron.distcp import Blocks, DistcpFile, StoredTensor, joined
from megatron_ucp.formats.megatron.names import (
    LOCAL_EXPERTS,
    ROUTER,
    in_order_of_rows,
    key_before_experts,
    read_key,
)
from megatron_ucp.formats.optimizers import check_known

# ---- stored


@dataclass(frozen=True)
class StoredParam:
    """One state of one parameter: its blocks, sorted by where they begin, are the whole of it, and
    lie in chunks of its `tensors`. `rows` are those of each part, where its rows lie under several
    keys."""

    name: str
    shape: Ints
    dtype: str
    expert: tuple[int, int] | None
    tensors: tuple[StoredTensor, ...]
    blocks: Blocks
    rows: Ints = ()

    def where(self, number: int, file: Callable[[str], DistcpFile]) -> Where:
        """As `Blocks.where`."""
        return self.blocks.where(number, self.tensors, file)


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
    tensor: StoredTensor
    blocks: Blocks


class Grids:
    """How the chunks of tensors divide the parameters in them, made once for the states of a model
    that are cut alike."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[Ints, Blocks, list[Blocks]]] = {}

    def parts(self, key: str, tensor: StoredTensor) -> Iterator[_Part]:
        """What a tensor holds of each of its parameters."""
        read, whole = read_key(key), Blocks.of(tensor)
        dims = len(read.stacked)
        counts, shape = tensor.shape[:dims], tensor.shape[dims:]
        last = self._last.get(key)
        if last is None or last[0] != counts or last[1] != whole:
            last = self._last[key] = counts, whole, whole.stacked(counts)
        for (name, expert), blocks in zip(self._names(key, counts), last[2], strict=True):
            yield _Part(name, expert, read.part, shape, tensor, blocks)

    @kept
    def _names(self, key: str, counts: Ints) -> list[tuple[str, int | None]]:
        """The parameters that are stacked in a tensor, with the numbers of experts."""
        read = read_key(key)
        return [read.canonical(index) for index in itertools.product(*map(range, counts))]


def _joined(name: str, parts: list[_Part], counts: Mapping[str, int], file: str) -> StoredParam:
    """The parameter of one part, or of several, one below the other."""
    first, dtype, expert = parts[0], parts[0].tensor.dtype, None
    if first.expert is not None:
        expert = first.expert, counts[_layer_of_expert(name, first.expert)]
    if len(parts) == 1 and not first.part:
        return StoredParam(name, first.shape, dtype, expert, (first.tensor,), first.blocks)
    order = in_order_of_rows(part.part for part in parts)
    kinds = {(part.tensor.dtype, part.shape[1:] if part.part else part.shape) for part in parts}
    if order is None or len(order) != len(parts) or len(kinds) > 1:
        raise DamagedFileError(
            "the keys of a parameter do not fit together",
            file=file,
            parameter=name,
            expected="one key, or one for each part of it, such as the gate and the up",
            found=", ".join(part.tensor.key for part in parts),
        )
    held, rows = list[tuple[StoredTensor, Blocks]](), list[int]()
    for part in sorted(parts, key=lambda part: order.index(part.part)):
        held.append((part.tensor, part.blocks.moved(sum(rows))))
        rows.append(part.shape[0])
    shape, tensors = (sum(rows), *first.shape[1:]), tuple(tensor for tensor, _ in held)
    return StoredParam(name, shape, dtype, expert, tensors, joined(held), tuple(rows))


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


def blocks_of(states: Mapping[str, StoredParam]) -> Blocks:
    """The blocks of a parameter, in which all of its states lie."""
    return next(iter(states.values())).blocks


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

    def check(self) -> None:
        """Raises UnsupportedError for states that can't be cut, DamagedFileError where a parameter
        has some states of its optimizer and lacks others. The masters of fp32 parameters may be the
        weights."""
        moments = [state for state in self.states if state != MASTER]
        check_known(moments, self.file)
        for state in moments[1:]:
            odd = self.states[state].keys() ^ self.states[moments[0]].keys()
            if odd:
                raise DamagedFileError(
                    "a parameter has not all of the optimizer's states",
                    file=self.file,
                    parameter=min(odd),
                    expected=", ".join(self.states),
                    found=f"{len(odd)} such parameters",
                )

    def held(self, name: str) -> Mapping[str, StoredParam] | None:
        """The optimizer's states of a parameter, the masters first, all in the same blocks; None
        for one that no optimizer steps.

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
            if param.blocks != by_state[MASTER].blocks:
                raise UnsupportedError(
                    "the states of a parameter are cut into other chunks than its masters",
                    file=self.file,
                    parameter=name,
                    expected=f"{len(by_state[MASTER].blocks)} chunks",
                    found=f"{len(param.blocks)} chunks of {state}",
                    fix="load it with Megatron-LM and save it again with --ckpt-format torch_dist",
                )
        return by_state


def split_keys(tensors: Mapping[str, StoredTensor], file: str) -> NamedStates:
    """The tensors of an index by what they are. Raises DamagedFileError for a state of a parameter
    that is not there."""
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
    return NamedStates(named, by_state, flat, file, copies)


def _taken_copies(
    held: dict[str, StoredTensor],
) -> Iterator[tuple[StoredTensor, StoredTensor]]:
    """Takes away what is also there under its other key (see `key_before_experts`), in the same
    chunks; gives both."""
    for key, tensor in [*held.items()]:
        other = key_before_experts(key)
        if other is None or other not in held:
            continue
        kinds = [(one.dtype, one.shape) for one in (tensor, held[other])]
        if kinds[0] == kinds[1] and Blocks.of(tensor) == Blocks.of(held[other]):
            yield tensor, held.pop(other)
