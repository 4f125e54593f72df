"""The optimizers of megatron-core's stack, and what each has on this rank: pieces of masters
with their states, as the live objects say."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from megatron_ucp.core.flat import FlatBuffer, Scalars, States
from megatron_ucp.core.names import MASTER, dtype_name
from megatron_ucp.engines.live import flat_view, scalar_state
from megatron_ucp.errors import PlanError, UnsupportedError
from megatron_ucp.formats.megatron.arguments import Kind
from megatron_ucp.formats.megatron.groups import MEGATRON_KEYS
from megatron_ucp.formats.optimizers import full_name, in_table, kept_by, name_in_table
from megatron_ucp.reshard.execute import TORCH_DTYPES, fresh

# ---- known
#
# Which optimizers step the masters of megatron-core's stack: torch's, Transformer Engine's and
# Apex' Adam, known by their names. Neither Transformer Engine nor Apex has to be there.


_MASTERS = "masters lie in the optimizer"
# attributes of the fused ones under which states are other numbers, or lie elsewhere
_VARIANTS = {
    "capturable": "its step and rates are tensors that CUDA graphs hold",
    "master_weights": _MASTERS,
    "use_master": _MASTERS,
    "store_param_remainders": "of masters the trailing bits alone are kept",
    "use_decoupled_grad": "gradients have another dtype than masters",
}
# in names of optimizers whose step takes whole matrices: Megatron-LM gives each rank some of them
_WHOLE_MATRICES = ("muon", "orthogonalized", "shampoo", "soap")
_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype")
_FP32 = "torch.float32"


def refuse_unknown(optimizer: Any) -> None:
    """Raises UnsupportedError for an optimizer whose states are not known, or that keeps them in a
    form that can't be carried bit by bit."""
    name, full = name_in_table(type(optimizer)), full_name(type(optimizer))
    bases = " ".join(base.__name__.lower() for base in type(optimizer).__mro__)
    if not in_table(name) and any(word in bases for word in _WHOLE_MATRICES):
        raise UnsupportedError(
            "optimizers that step whole matrices are not supported in megatron-core's stack",
            expected="Adam of torch, Transformer Engine or Apex",
            found=full,
            fix="train with --optimizer adam, or save and load with Megatron-LM's own functions on "
            "the same mesh",
        )
    if not in_table(name):
        raise UnsupportedError(
            "the states of this optimizer are not known",
            expected="Adam of torch, Transformer Engine or Apex",
            found=full,
            fix="train with --optimizer adam, or say what it keeps with ucp.register_optimizer "
            f'("{name}", ...) before attach_megatron',
        )
    odd = {one: why for one, why in _VARIANTS.items() if getattr(optimizer, one, None)}
    for one in _DTYPES:
        if str(getattr(optimizer, one, _FP32)) != _FP32:
            odd[one] = f"a moment is kept in {getattr(optimizer, one)}, scaled"
    if odd:
        one, why = next(iter(odd.items()))
        raise UnsupportedError(
            f"{one} of the optimizer is not supported: {why}",
            expected=f"masters and moments in float32, {', '.join(odd)} off",
            found=f"{full} with {one}={getattr(optimizer, one)}",
            fix="leave --use-precision-aware-optimizer and its options out",
        )


# ---- inner


# Keys of a parameter group that are none of its optimizer's.
STRUCTURE = frozenset({"params", "step", *MEGATRON_KEYS})


@dataclass(frozen=True)
class Stepped:
    """Elements [first, last) of a parameter on this rank, that `inner` steps in its group number
    `group`; `master` is what torch's optimizer steps for them, one-dimensional where ranks share
    the parameter."""

    inner: Any
    group: int
    param: torch.nn.Parameter
    master: torch.Tensor
    first: int
    last: int

    @property
    def held(self) -> dict[str, Any]:
        """The optimizer's state; empty before the first step."""
        return self.inner.optimizer.state[self.master]

    @property
    def present(self) -> tuple[States, Scalars]:
        """The element-wise states that the optimizer keeps now, and its count of steps, wherever
        it has it; none before the first step."""
        held: Mapping[str, Any] = self.inner.optimizer.state.get(self.master) or {}
        step = held.get("step", self.settings.get("step"))
        states = {k: v for k, v in held.items() if isinstance(v, torch.Tensor) and v.dim()}
        if not states or step is None:
            return (), {}
        named = tuple((k, dtype_name(v.dtype)) for k, v in sorted(states.items()))
        return named, {"step": float(step)}

    @property
    def settings(self) -> dict[str, Any]:
        return self.inner.optimizer.param_groups[self.group]

    def tensor(self, state: str) -> torch.Tensor:
        """The elements of a state that the optimizer has now, or of the masters."""
        return self.master if state == MASTER else self.held[state]

    def set_scalars(self, scalars: Scalars) -> None:
        """Gives the optimizer its count of steps: Transformer Engine's and Apex' have it in their
        groups, as an int. Without any all is as before the first step."""
        stepper = self.inner.optimizer
        keeps = kept_by(name_in_table(type(stepper)), self.settings)
        if keeps.step == "group":
            for group in stepper.param_groups:  # also where this rank has none of its parameters
                group.pop("step", None)
                group.update({key: int(value) for key, value in scalars.items()})
        else:
            for key, value in scalars.items():
                self.held[key] = scalar_state(value, keeps, self.settings, self.master)
        if not self.held:
            stepper.state.pop(self.master, None)


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Those of a chain that step something, in its order: parameters that all data-parallel ranks
    share, then experts. Raises UnsupportedError for a kind whose masters lie elsewhere."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    kinds = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)
    out: list[Any] = []
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if type(one) not in kinds:
            raise UnsupportedError(
                "an optimizer of megatron-core's that is not known",
                expected=", ".join(kind.__name__ for kind in kinds),
                found=type(one).__name__,
                fix="use Adam by get_megatron_optimizer",
            )
        if not one.is_stub_optimizer:
            out.append(one)
    return out


def kind_of(optimizer: Any) -> Kind:
    """Which of megatron-core's optimizers it is, or a chain is made of."""
    from megatron.core.optimizer.optimizer import FP32Optimizer

    one = inner_optimizers(optimizer)[0]
    if is_distributed(one):
        return Kind.DISTRIBUTED
    return Kind.FP32 if isinstance(one, FP32Optimizer) else Kind.FLOAT16


def is_distributed(inner: Any) -> bool:
    """Whether the data-parallel ranks share its masters."""
    return hasattr(inner, "gbuf_ranges")


def pieces_of(inner: Any) -> Iterator[Stepped]:
    """Everything that an optimizer steps on this rank.

    By its lists of parameters and masters side by side: `model_param_group_index_map` is wrong
    where a group mixes dtypes.
    """
    names = next((row for row in _LISTS if hasattr(inner, row[0][0])), None)
    if names is None:
        params = [group["params"] for group in inner.optimizer.param_groups]
        lists = zip(params, params, strict=True)
    else:
        lists = zip(*(_joined(inner, *pair) for pair in names), strict=True)
    for group, (params, masters) in enumerate(lists):
        for param, master in zip(params, masters, strict=True):
            yield Stepped(inner, group, param, master, *_range(inner, param))


# of each group of an optimizer: parameters in half precision and others, and the masters of both
_LISTS = (
    (
        ("model_float16_groups", "model_fp32_groups"),
        ("shard_fp32_from_float16_groups", "shard_fp32_groups"),
    ),
    (
        ("float16_groups", "fp32_from_fp32_groups"),
        ("fp32_from_float16_groups", "fp32_from_fp32_groups"),
    ),
)


def _joined(inner: Any, half: str, other: str) -> list[list[Any]]:
    """Two lists of each group as one."""
    both = zip(getattr(inner, half), getattr(inner, other), strict=True)
    return [[*first, *second] for first, second in both]


def _range(inner: Any, param: torch.nn.Parameter) -> tuple[int, int]:
    if not is_distributed(inner):
        return 0, param.numel()
    found = inner._get_model_param_range_map(param)["param"]
    return found.start, found.end


class LiveBucket:
    """This rank's part of a flat buffer of the manifest: `pieces` by the number of the member, of
    which partition `part` is made. `weights` is the memory of the partition where the weights are
    the masters.

    megatron-core keeps a tensor for each piece of a state. A load fills partitions as they lie in
    files: what makes room for one (`join`, `allocate`) turns its pieces into views of one tensor,
    in which they stay. To look at them (`tensor`, `read`) moves nothing.
    """

    def __init__(
        self, flat: FlatBuffer, part: int, pieces: dict[int, Stepped], weights: torch.Tensor | None
    ) -> None:
        self.flat, self.part, self.pieces, self.weights = flat, part, pieces, weights
        self._found: dict[str, torch.Tensor] = {}

    @property
    def _is_piece(self) -> bool:
        """Whether the partition is one piece, without padding: its tensors can stay."""
        lengths = [piece.last - piece.first for piece in self.pieces.values()]
        return lengths == [self.flat.partition_elems]

    def tensor(self, state: str) -> torch.Tensor:
        """The memory of a state, flat. Raises PlanError while it lies in pieces."""
        if state not in self._found:
            one = self._one(state)
            if one is None:
                raise PlanError("the pieces of a partition lie apart: join them first", found=state)
            self._found[state] = one
        return self._found[state]

    def read(self, state: str, first: int, last: int) -> torch.Tensor:
        """Elements [first, last) of a state of one member, as they lie."""
        if state == MASTER and self.weights is not None:
            return self.weights[first:last]
        starts, numbers = self._in_order
        found = bisect_right(starts, first) - 1
        if found >= 0:
            piece, at = self.pieces[numbers[found]], starts[found]
            if last <= at + piece.last - piece.first:
                return flat_view(piece.tensor(state).detach())[first - at : last - at]
        raise PlanError("no piece has these elements", found=f"{state} [{first}, {last})")

    def _one(self, state: str) -> torch.Tensor | None:
        """The tensor that is a state's whole partition; None where its pieces lie apart."""
        if state == MASTER and self.weights is not None:
            return self.weights
        if self._is_piece:
            (piece,) = self.pieces.values()
            return flat_view(piece.tensor(state).detach())
        elems = self.flat.partition_elems
        first: torch.Tensor | None = None
        for number, piece in self.pieces.items():
            held = piece.master if state == MASTER else piece.held.get(state)
            if not isinstance(held, torch.Tensor) or held.dtype != torch.float32:
                return None
            first = held if first is None else first
            memory, shared = held.untyped_storage(), first.untyped_storage()
            alone = memory.nbytes() == elems * held.itemsize and held.is_contiguous()
            is_one = alone and memory.data_ptr() == shared.data_ptr()
            if not is_one or held.storage_offset() != self._places[number]:
                return None
        return None if first is None else torch.as_strided(first.detach(), (elems,), (1,), 0)

    def join(self, state: str) -> None:
        """Makes the pieces of a state views of one tensor, with their values."""
        if self._one(state) is not None:
            return
        device = next((p.master.device for p in self.pieces.values()), torch.device("cpu"))
        like = torch.empty(1, device=device).expand(self.flat.partition_elems)
        home = self._found[state] = fresh(like, torch.float32)
        for number, piece in self.pieces.items():
            at = self._places[number]
            view = home[at : at + piece.last - piece.first]
            if state == MASTER or state in piece.held:
                view.copy_(flat_view(piece.tensor(state).detach()))
            if state == MASTER:
                piece.master.data = view
            else:
                piece.held[state] = view

    @cached_property
    def _places(self) -> dict[int, int]:
        """Where each piece begins in the partition."""
        members = self.flat.members
        return {
            number: self.flat.offset(members[number], self.part, piece.first)
            for number, piece in self.pieces.items()
        }

    @cached_property
    def _in_order(self) -> tuple[list[int], list[int]]:
        """Where the pieces begin, in order, and their numbers: each element is looked up, and a
        bucket may have thousands of pieces."""
        order = sorted(self._places, key=self._places.__getitem__)
        return [self._places[number] for number in order], order

    def allocate(self, states: Sequence[str], dtype: str) -> None:
        """Makes room for exactly these states."""
        for piece in self.pieces.values():
            held = piece.held
            for key in [key for key in held if key not in states]:
                del held[key]
            for key in states if self._is_piece else ():
                old = held.get(key)
                if not isinstance(old, torch.Tensor) or old.shape != piece.master.shape:
                    held[key] = fresh(piece.master.detach(), TORCH_DTYPES[dtype])
        for key in states:
            self.join(key)


@dataclass(frozen=True)
class OwnValue:
    """A frozen parameter, or a buffer of a module."""

    name: str
    kind: str
    tensor: torch.Tensor = field(repr=False)
