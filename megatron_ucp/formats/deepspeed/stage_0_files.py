"""The files of optimizers that ZeRO does not partition: stage 0."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from megatron_ucp.core import flat
from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import Spread, expert_name, is_stacked, stored_tensors
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import ForeignFileError, StateMismatchError
from megatron_ucp.formats.deepspeed.model_file import Tree
from megatron_ucp.formats.deepspeed.optimizer_files import (
    IndexStates,
    ListedTensor,
    OptimizerFile,
    OptimizerTree,
    entry_of,
    required,
)
from megatron_ucp.formats.foreign import each
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.pt.unpickler import TensorRef


class _Stage0File(OptimizerFile):
    keeper = Keeper.ZERO_0

    def scaler(self, tree: Tree) -> LossScale:
        """Its fields stand in the state dict itself."""
        if "cur_scale" not in tree:
            return LossScale()
        return LossScale.of_deepspeed({**tree, "dynamic": tree.get("dynamic_loss_scale")})


class Unpartitioned(_Stage0File):
    """One buffer per parameter. Files name no parameters: `shapes` must list them in the
    optimizer's order."""

    def listed(
        self,
        groups: Sequence[Tree],
        states: Tree,
        shapes: Sequence[Mapping[str, Ints]],
        file: str,
    ) -> Iterable[ListedTensor]:
        """Every tensor of the optimizer: a parameter, or a stack of them."""
        tensors = [stored_tensors(named) for named in shapes]
        indices = _stepped(groups, states, [*map(len, tensors)], bool(self.masters_key), file)
        for number, named in enumerate(shapes):
            for names, index in zip(tensors[number], indices[number], strict=True):
                yield {name: named[name] for name in names}, index, number

    def buffers(
        self, one: IndexStates, found: OptimizerTree, groups: Sequence[Tree], spread: Spread
    ) -> list[FlatBuffer]:
        _check_shapes(one, found.file)
        return [
            flat.alone(
                member.param,
                member.size,
                self.states_of(one, member.param),
                one.group,
                one.scalars,
                axes=spread.axes(member.param),
            )
            for member in one.members([0] * len(one.named))
        ]

    def states_of(self, one: IndexStates, name: str) -> flat.States:
        """The states of one parameter, masters first."""
        return one.states


class UnfusedFile(Unpartitioned):
    """FP16_UnfusedOptimizer (bf16 and fp16 at stage 0): shaped masters and moments."""

    masters_key = "fp32_groups"

    def masters(self, tree: Tree, file: str) -> Sequence[TensorRef]:
        groups = each(required(tree, self.masters_key, file), list, self.masters_key, file)
        return [ref for group in groups for ref in each(group, TensorRef, "a master", file)]


class PlainFile(Unpartitioned):
    """The user's own optimizer (an fp32 config at stage 0): the model's weights are the masters, in
    the dtype that the model has."""

    def __init__(self, weight_dtype: Callable[[str], str]) -> None:
        self._weight_dtype = weight_dtype

    def base(self, tree: Tree, file: str) -> Tree:
        return tree

    def masters(self, tree: Tree, file: str) -> Sequence[TensorRef]:
        return ()

    def states_of(self, one: IndexStates, name: str) -> flat.States:
        return ((MASTER, self._weight_dtype(name)), *one.states)


class FusedFlatFile(_Stage0File):
    """FP16_Optimizer (FusedAdam at stage 0): one flat, unpadded buffer per group, one partition."""

    masters_key = "fp32_groups_flat"

    def check(
        self,
        found: OptimizerTree,
        masters: Sequence[TensorRef],
        shapes: Sequence[Mapping[str, Ints]],
        spread: Spread,
    ) -> None:
        for index, named in enumerate(shapes):
            _, used = flat.aligned_starts([math.prod(shape) for shape in named.values()])
            if index >= len(masters) or masters[index].numel != used:
                raise ForeignFileError(
                    "the optimizer's groups differ from the model's",
                    file=found.file,
                    expected=used,
                    found=[ref.numel for ref in masters],
                    id="groups-differ",
                )

    def buffers(
        self, one: IndexStates, found: OptimizerTree, groups: Sequence[Tree], spread: Spread
    ) -> list[FlatBuffer]:
        starts, used = flat.aligned_starts([math.prod(shape) for shape in one.named.values()])
        axes = spread.axes(one.first)
        return [FlatBuffer(one.members(starts), used, 1, "whole", one.states, axes=axes)]


def _check_shapes(one: IndexStates, file: str) -> None:
    """Raises ForeignFileError where states at the position of a parameter, or of a stack of them,
    are not of its shape."""
    shape = tuple(one.named[one.first])
    if is_stacked(one.first):
        shape = (len(one.named), *shape)
    for ref in one.refs.values():
        if tuple(ref.shape) != shape:
            raise ForeignFileError(
                "the optimizer's parameters come in another order than the model's groups",
                file=file,
                parameter=one.first,
                expected=shape,
                found=ref.shape,
                fix="build the optimizer's groups as the run that saved it did, or save with a "
                "manifest (megatron_ucp.attach)",
                id="groups-differ",
            )


def own_slice(ref: TensorRef | None, shape: Ints, name: str) -> TensorRef | None:
    """Of a state of a stacked parameter, which the file keeps whole, the slice of one of its
    experts; any other tensor as it is. `shape` is the expert's."""
    part = expert_name(name)
    whole = ref is not None and ref.is_contiguous and ref.shape[1:] == shape
    if ref is None or part is None or not part.is_slice or not whole:
        return ref
    first = part.number % ref.shape[0] * math.prod(shape)  # a rank has a run of the experts
    return replace(ref, offset_elems=ref.offset_elems + first, shape=shape, stride=ref.stride[1:])


def is_empty(entry: Tree) -> bool:
    """Whether states are those of a parameter without elements, which nothing else counts."""
    return any(isinstance(value, TensorRef) and not value.numel for value in entry.values())


def _stepped(
    groups: Sequence[Tree], state: Tree, wanted: Sequence[int], masters: bool, file: str
) -> list[list[int]]:
    """Optimizer indices of each group's parameters.

    A plain optimizer also lists frozen parameters, which have no state, and those without elements:
    where the number of names says so, only indices with state count. Before the first step, and
    where it keeps no `masters`, any index will do: there is nothing under it. Raises
    StateMismatchError where names and indices can't be matched one to one.
    """
    out: list[list[int]] = []
    for number, group in enumerate(groups):
        listed = group.get("params", [])
        every = [index for index in listed if not is_empty(entry_of(state, index, file))]
        stepped = [index for index in every if index in state]
        want = wanted[number] if number < len(wanted) else -1
        if not masters and not state and 0 <= want < len(every):
            every = every[:want]
        if want not in (len(every), len(stepped)) or len(groups) != len(wanted):
            raise StateMismatchError(
                "the optimizer's groups differ from the model's",
                file=file,
                expected=f"{list(wanted)} parameters in the groups of the engine",
                found=f"{[len(g.get('params', [])) for g in groups]} in the checkpoint",
                fix="build the optimizer's groups as the run that saved it did, or save with a "
                "manifest (megatron_ucp.attach)",
                id="groups-differ",
            )
        out.append(every if want == len(every) else stepped)
    return out
