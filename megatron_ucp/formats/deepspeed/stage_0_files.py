"""The files of optimizers that ZeRO does not partition: stage 0."""

import math
from collections.abc import Callable, Mapping, Sequence
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
    Contents,
    entry_of,
    group_of,
    listed,
    members_of,
    split_states,
)
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.plain_values import Tensors, param_groups
from megatron_ucp.formats.pt.unpickler import TensorRef


class Unpartitioned:
    """Stage 0: one buffer per parameter. Files name no parameters: `shapes` must list them in the
    optimizer's order."""

    keeper = Keeper.ZERO_0

    def base(self, tree: Tree) -> Tree:
        return tree["optimizer_state_dict"]

    def masters(self, tree: Tree) -> list[TensorRef] | None:
        """Masters in the optimizer's order; None where the training weights are the masters."""
        return None

    def master_dtype(self, tree: Tree, name: str, index: int) -> str:
        raise NotImplementedError

    def contents(
        self,
        tree: Tree,
        shapes: Sequence[Mapping[str, Ints]],
        spread: Spread,
        file: str,
        tensor: Tensors,
    ) -> Contents:
        base, masters = self.base(tree), self.masters(tree)
        groups = base["param_groups"]
        tensors = [stored_tensors(named) for named in shapes]
        counts = [len(listed) for listed in tensors]
        indices = _stepped(groups, base["state"], counts, masters is not None, file)
        buffers: list[FlatBuffer] = []
        kept_under: list[int] = []
        for number, named in enumerate(shapes):
            for names, index in zip(tensors[number], indices[number], strict=True):
                entry = entry_of(base["state"], index)
                element, kept = split_states(entry, file, tensor)
                refs = [entry[key] for key, _ in element] + ([masters[index]] if masters else [])
                _check_shapes(refs, names, named[names[0]], file)
                for name in names:
                    states = ((MASTER, self.master_dtype(tree, name, index)), *element)
                    size, axes = math.prod(named[name]), spread.axes(name)
                    buffers.append(flat.alone(name, size, states, number, kept, axes=axes))
                    kept_under.append(index)
        return Contents(
            self.keeper,
            tuple(buffers),
            param_groups(groups, tensor),
            _flat_scaler(tree),
            tuple(kept_under),
        )

    def element(self, tree: Tree, index: int, state: str) -> TensorRef | None:
        if state == MASTER:
            masters = self.masters(tree)
            return masters[index] if masters else None
        return entry_of(self.base(tree)["state"], index).get(state)


def _check_shapes(refs: Sequence[TensorRef], names: Sequence[str], one: Ints, file: str) -> None:
    """Raises ForeignFileError where states at the position of a parameter, or of a stack of them,
    are not of its shape. `one` is the shape of each."""
    shape = (len(names), *one) if is_stacked(names[0]) else tuple(one)
    for ref in refs:
        if tuple(ref.shape) != shape:
            raise ForeignFileError(
                "the optimizer's parameters come in another order than the model's groups",
                file=file,
                parameter=names[0],
                expected=shape,
                found=ref.shape,
                fix="build the optimizer's groups as the run that saved it did, or save with a "
                "manifest (megatron_ucp.attach)",
                id="groups-differ",
            )


class UnfusedFile(Unpartitioned):
    """FP16_UnfusedOptimizer (bf16 and fp16 at stage 0): shaped masters and moments."""

    def masters(self, tree: Tree) -> list[TensorRef]:
        return [ref for group in tree["fp32_groups"] for ref in group]

    def master_dtype(self, tree: Tree, name: str, index: int) -> str:
        return self.masters(tree)[index].storage.dtype


class PlainFile(Unpartitioned):
    """The user's own optimizer (an fp32 config at stage 0): the model's weights are the masters, in
    the dtype that the model has."""

    def __init__(self, weight_dtype: Callable[[str], str]) -> None:
        self._weight_dtype = weight_dtype

    def base(self, tree: Tree) -> Tree:
        return tree

    def master_dtype(self, tree: Tree, name: str, index: int) -> str:
        return self._weight_dtype(name)


class FusedFlatFile:
    """FP16_Optimizer (FusedAdam at stage 0): one flat, unpadded buffer per group, one partition."""

    def contents(
        self,
        tree: Tree,
        shapes: Sequence[Mapping[str, Ints]],
        spread: Spread,
        file: str,
        tensor: Tensors,
    ) -> Contents:
        masters = listed(tree, "fp32_groups_flat", file)
        base = tree["optimizer_state_dict"]
        buffers: list[FlatBuffer] = []
        for index, named in enumerate(shapes):
            starts, used = flat.aligned_starts([math.prod(shape) for shape in named.values()])
            if index >= len(masters) or masters[index].numel != used:
                raise ForeignFileError(
                    "the optimizer's groups differ from the model's",
                    file=file,
                    expected=used,
                    found=[ref.numel for ref in masters],
                    id="groups-differ",
                )
            element, kept = split_states(entry_of(base["state"], index), file, tensor)
            group = group_of(index, base["param_groups"])
            states = ((MASTER, masters[index].storage.dtype), *element)
            members = members_of(named, starts, group, kept)
            axes = spread.axes(next(iter(named), ""))
            buffers.append(FlatBuffer(members, used, 1, "whole", states, axes=axes))
        return Contents(
            Keeper.ZERO_0,
            tuple(buffers),
            param_groups(base["param_groups"], tensor),
            _flat_scaler(tree),
            tuple(range(len(buffers))),
        )

    def element(self, tree: Tree, index: int, state: str) -> TensorRef | None:
        if state == MASTER:
            return tree["fp32_groups_flat"][index]
        return entry_of(tree["optimizer_state_dict"]["state"], index).get(state)


def own_slice(ref: TensorRef | None, shape: Ints, name: str) -> TensorRef | None:
    """Of a state of a stacked parameter, which the file keeps whole, the slice of one of its
    experts; any other tensor as it is. `shape` is the expert's."""
    part = expert_name(name)
    whole = ref is not None and ref.is_contiguous and ref.shape[1:] == shape
    if ref is None or part is None or not part.is_slice or not whole:
        return ref
    first = part.number % ref.shape[0] * math.prod(shape)  # a rank has a run of the experts
    return replace(ref, offset_elems=ref.offset_elems + first, shape=shape, stride=ref.stride[1:])


def _flat_scaler(tree: Tree) -> LossScale:
    """The loss scaler whose fields stand in the state dict itself (stage 0)."""
    if "cur_scale" not in tree:
        return LossScale()
    return LossScale.of_deepspeed({**tree, "dynamic": tree.get("dynamic_loss_scale")})


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
        every = [index for index in group["params"] if not is_empty(entry_of(state, index))]
        stepped = [index for index in every if index in state]
        want = wanted[number] if number < len(wanted) else -1
        if not masters and not state and 0 <= want < len(every):
            every = every[:want]
        if want not in (len(every), len(stepped)) or len(groups) != len(wanted):
            raise StateMismatchError(
                "the optimizer's groups differ from the model's",
                file=file,
                expected=f"{list(wanted)} parameters in the groups of the engine",
                found=f"{[len(g['params']) for g in groups]} in the checkpoint",
                fix="build the optimizer's groups as the run that saved it did, or save with a "
                "manifest (megatron_ucp.attach)",
                id="groups-differ",
            )
        out.append(every if want == len(every) else stepped)
    return out
