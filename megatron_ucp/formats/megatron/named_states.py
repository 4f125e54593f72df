"""The tensors of a `torch_dist` folder that lie under names: weights, and the optimizer's states of
each (`optimizer.state.STATE.KEY`)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_ucp.core.box import Ints
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import DamagedFileError, UnsupportedError
from megatron_ucp.formats.megatron.index import StoredTensor
from megatron_ucp.formats.megatron.names import key_before_experts
from megatron_ucp.formats.megatron.stored import StoredParam, stored_params
from megatron_ucp.formats.optimizers import check_known

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
    def boxes(self) -> tuple[tuple[Ints, Ints], ...]:
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
    named = stored_params(weights, file)
    by_state = {state: stored_params(held, file) for state, held in states.items()}
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
    boxes = [[(chunk.start, chunk.shape) for chunk in each.chunks] for each in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and boxes[0] == boxes[1]


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
