"""How DeepSpeed's optimizer wrappers lay out their states in files, and those of ZeRO.

Each class reads the pickled tree of one file into flat buffers (reference: `state_dict` of the
wrapper in DeepSpeed 0.19.8) and says which tensor of the tree holds which state of which buffer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_ucp.core import flat
from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import Spread, stored_tensors
from megatron_ucp.core.flat import FlatBuffer, Member, States
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    UnsupportedError,
)
from megatron_ucp.formats.deepspeed import formulas
from megatron_ucp.formats.deepspeed.model_file import Tree
from megatron_ucp.formats.deepspeed.muon import uncut_states
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.optimizers import check_known, is_element
from megatron_ucp.formats.plain_values import Tensors, param_groups
from megatron_ucp.formats.pt.unpickler import TensorRef
from megatron_ucp.formats.pt.values import number_in

OFFLOADED = "_offload_buffer"
# bitsandbytes' `state_dict` puts its states one level deeper, whatever their dtype
_WRAPPED = "__bnb_optimizer_quant_state__"


@dataclass(frozen=True)
class Contents:
    """The optimizer part of a checkpoint as one file shows it; must be equal in all files of one
    save.

    `indices` are the numbers under which the file keeps each buffer's states."""

    keeper: Keeper
    buffers: tuple[FlatBuffer, ...]
    groups: tuple[ParamGroup, ...]
    scaler: LossScale
    indices: tuple[int, ...]

    @property
    def scalars(self) -> tuple[Mapping[str, float], ...]:
        """Tensors states of each buffer, which are those of its members."""
        return tuple(b.members[0].scalars if b.members else {} for b in self.buffers)


class OptimizerFile(Protocol):
    """One wrapper's file format."""

    def contents(
        self,
        tree: Tree,
        shapes: Sequence[Mapping[str, Ints]],
        spread: Spread,
        file: str,
        tensor: Tensors,
    ) -> Contents: ...

    def element(self, tree: Tree, index: int, state: str) -> TensorRef | None:
        """The tensor with a state of the buffer that the file keeps under `index`, None where the
        tree has none."""
        ...


def entry_of(states: Mapping[Any, Any], index: Any) -> Tree:
    """What an optimizer's `state` holds under an index, on one level; empty where it holds
    nothing."""
    entry: Tree = states.get(index, {})
    inner = entry.get(_WRAPPED)
    if not isinstance(inner, dict):
        return entry
    return {**{key: value for key, value in entry.items() if key != _WRAPPED}, **inner}


def split_states(
    entry: Tree, file: str, tensor: Tensors
) -> tuple[tuple[tuple[str, str], ...], Mapping[str, float]]:
    """Element-wise states (name, dtype) and scalar ones of one entry of an optimizer's `state`."""
    kept = {key: value for key, value in entry.items() if value is not None}
    for key in [key for key in kept if str(key).endswith(OFFLOADED)]:
        # what `engine.offload_states` leaves behind; the state itself is here unless it is
        # offloaded
        if str(key).removesuffix(OFFLOADED) not in kept:
            raise UnsupportedError(
                "an optimizer state was offloaded (engine.offload_states) when it was saved",
                file=file,
                expected=str(key).removesuffix(OFFLOADED),
                found=key,
                fix="call engine.reload_states() before saving; or load another tag",
            )
        del kept[key]
    check_known(kept, file)
    element: list[tuple[str, str]] = []
    scalars: dict[str, float] = {}
    for key, value in kept.items():
        if is_element(key):
            if not isinstance(value, TensorRef):
                raise DamagedFileError(
                    f"the optimizer state {key} is no tensor", file=file, found=type(value).__name__
                )
            element.append((key, value.storage.dtype))
        else:
            scalars[key] = (
                number_in(tensor(value), file) if isinstance(value, TensorRef) else float(value)
            )
    return tuple(element), scalars


def members_of(
    named: Mapping[str, Ints],
    starts: Sequence[int],
    group: int | None,
    scalars: Mapping[str, float],
) -> tuple[Member, ...]:
    """The parameters of a group, each one from where it begins in the buffer."""
    return tuple(
        Member(name, start, math.prod(shape), group, scalars)
        for (name, shape), start in zip(named.items(), starts, strict=True)
    )


def _starts(named: Mapping[str, Ints], gaps: Sequence[int]) -> tuple[list[int], int]:
    """Where members begin, with gaps behind the tensors that keep them, and the end of the last
    one."""
    starts, at = list[int](), 0
    for tensor, gap in zip(stored_tensors(named), gaps, strict=True):
        for name in tensor:
            starts.append(at)
            at += math.prod(named[name])
        at += gap
    return starts, at


def _check_groups(masters: Sequence[Any], shapes: Sequence[Any], what: str, file: str) -> None:
    """Raises ForeignFileError where model file and optimizer file count differently."""
    if len(masters) != len(shapes):
        raise ForeignFileError(
            f"model file and optimizer file hold different numbers of {what}",
            file=file,
            expected=len(shapes),
            found=len(masters),
        )


def _required(tree: Tree, key: str, file: str) -> Any:
    """A part of the file without which it holds no optimizer. Raises DamagedFileError."""
    if key not in tree:
        raise DamagedFileError(
            "an optimizer file lacks its optimizer's states",
            file=file,
            expected=key,
            found=", ".join(map(str, tree))[:200],
        )
    return tree[key]


def group_of(index: int, groups: Sequence[Tree]) -> int | None:
    """The number of the group that lists an index."""
    for number, group in enumerate(groups):
        if index in group.get("params", ()):
            return number
    return None


def listed(tree: Tree, key: str, file: str) -> list[Any]:
    """A list of the file. Raises DamagedFileError where it has none."""
    value = tree.get(key)
    if not isinstance(value, list):
        raise DamagedFileError(
            "an optimizer file lacks a list", file=file, expected=key, found=type(value).__name__
        )
    return value


def _count(tree: Tree, partitions: Sequence[int], file: str) -> None:
    """Raises ForeignFileError unless each group was written by as many partitions as there are
    files."""
    value = tree.get("partition_count", list(partitions))
    counts = value if isinstance(value, list) else [value] * len(partitions)
    if counts != list(partitions):
        raise ForeignFileError(
            "the partition count differs from the number of optimizer files",
            file=file,
            expected=f"{counts} files",
            found=f"{list(partitions)} files",
            fix="put all optimizer files of one save, and no others, into the folder",
        )


def _elastic_step(tree: Tree) -> Mapping[str, float]:
    """The one step of an elastic file."""
    key = "base_optimizer_state_step"
    return {"step": float(tree[key])} if key in tree else {}


def _equally_cut(
    members: tuple[Member, ...], used: int, spread: Spread, states: States, uncut: tuple[str, ...]
) -> FlatBuffer:
    """A group's buffer of `used` elements, filled up and cut into equal chunks."""
    first = members[0].param if members else ""
    partitions = spread.partitions(first)
    length = formulas.whole_length(used, partitions)
    axes = spread.axes(first)
    return FlatBuffer(members, length, partitions, "whole", states, axes=axes, uncut=uncut)


def _lists(index: int, groups: Sequence[Tree]) -> Tree:
    """The group that lists an index; none in an elastic file."""
    number = group_of(index, groups)
    return {} if number is None else groups[number]


def _entries(base: Any) -> Mapping[Any, Any]:
    """The states of each buffer by its number; an elastic file lists them."""
    return dict(enumerate(base)) if isinstance(base, list) else base.get("state", {})


def _gaps(tree: Tree, shapes: Sequence[Mapping[str, Ints]]) -> Any:
    """Elements behind each tensor of each group that nothing owns."""
    found = tree.get("param_alignment_paddings")
    return found or [[0] * len(stored_tensors(named)) for named in shapes]


class Zero12File:
    """ZeRO-1, ZeRO-2 and BF16_Optimizer: one flat buffer per group, cut into equal chunks.
    `offloaded`: the run had its optimizer in the CPU's memory."""

    def __init__(self, offloaded: bool = False) -> None:
        self._offloaded = offloaded

    def contents(
        self,
        tree: Tree,
        shapes: Sequence[Mapping[str, Ints]],
        spread: Spread,
        file: str,
        tensor: Tensors,
    ) -> Contents:
        masters = listed(tree, "single_partition_of_fp32_groups", file)
        first = [next(iter(named), "") for named in shapes]
        _check_groups(masters, shapes, "groups", file)
        _count(tree, [spread.partitions(name) for name in first], file)
        base = _required(tree, "base_optimizer_state", file)
        elastic = isinstance(base, list)
        groups = [] if elastic else base.get("param_groups", [])
        keeper = Keeper.ZERO_1_OR_2 if "zero_stage" in tree else Keeper.BF16
        entries, gaps = _entries(base), _gaps(tree, shapes)
        buffers: list[FlatBuffer] = []
        for index, named in enumerate(shapes):
            starts, at = _starts(named, gaps[index])
            element, kept = split_states(entry_of(entries, index), file, tensor)
            group = index if elastic else group_of(index, groups)
            members = members_of(named, starts, group, {**_elastic_step(tree), **kept})
            states = ((MASTER, masters[index].storage.dtype), *element)
            uncut = uncut_states(_lists(index, groups), keeper, self._offloaded)
            buffers.append(_equally_cut(members, at, spread, states, uncut))
        return Contents(
            keeper,
            tuple(buffers),
            param_groups([{}] * len(shapes) if elastic else groups, tensor),
            LossScale.pickled(tree.get("loss_scaler")),
            tuple(range(len(buffers))),
        )

    def element(self, tree: Tree, index: int, state: str) -> TensorRef | None:
        if state == MASTER:
            return tree["single_partition_of_fp32_groups"][index]
        return entry_of(_entries(tree["base_optimizer_state"]), index).get(state)


def _cut_each(
    named: Mapping[str, Ints],
    partitions: int,
    spread: Spread,
    states: States,
    group: int | None,
    scalars: Mapping[str, float],
) -> FlatBuffer:
    """A sub-group's buffer, in which every stored tensor is cut for itself."""
    tensors = stored_tensors(named)
    sizes = [sum(math.prod(named[name]) for name in tensor) for tensor in tensors]
    starts, used = flat.aligned_starts([-(-size // partitions) for size in sizes])
    members: list[Member] = []
    for tensor, start in zip(tensors, starts, strict=True):
        shapes = {name: named[name] for name in tensor}
        members += flat.slices(members_of(shapes, [start] * len(tensor), group, scalars))
    axes = spread.axes(members[0].param if members else "")
    return FlatBuffer(tuple(members), used, partitions, "each", states, axes=axes)


def _count_of_sub_groups(tree: Tree, partitions: Sequence[int], file: str) -> None:
    """Raises ForeignFileError unless the file says of every sub-group, if it says anything, that
    as many ranks share it."""
    said: Any = tree.get("ds_zero_partition_groups")
    if said is not None and [one["partition_count"] for one in said] != list(partitions):
        raise ForeignFileError(
            "a sub-group was shared by other ranks than the mesh says",
            file=file,
            expected=list(partitions),
            found=str([one["partition_count"] for one in said])[:120],
            fix="put the files of one save, and no others, into the folder",
        )


class Zero3File:
    """ZeRO-3: one flat buffer per sub-group, every member cut for itself."""

    def contents(
        self,
        tree: Tree,
        shapes: Sequence[Mapping[str, Ints]],
        spread: Spread,
        file: str,
        tensor: Tensors,
    ) -> Contents:
        masters = listed(tree, "fp32_flat_groups", file)
        _count(tree, [spread.dense], file)
        _check_groups(masters, shapes, "sub-groups", file)
        partitions = [spread.partitions(next(iter(named), "")) for named in shapes]
        _count_of_sub_groups(tree, partitions, file)
        base = _required(tree, "optimizer_state_dict", file)
        groups = base.get("param_groups", [])
        buffers: list[FlatBuffer] = []
        for index, named in enumerate(shapes):
            element, kept = split_states(entry_of(base.get("state", {}), index), file, tensor)
            states = ((MASTER, masters[index].storage.dtype), *element)
            group = group_of(index, groups)
            buffers.append(_cut_each(named, partitions[index], spread, states, group, kept))
        return Contents(
            Keeper.ZERO_3,
            tuple(buffers),
            param_groups(groups, tensor),
            LossScale.pickled(tree.get("loss_scaler")),
            tuple(range(len(buffers))),
        )

    def element(self, tree: Tree, index: int, state: str) -> TensorRef | None:
        if state == MASTER:
            return tree["fp32_flat_groups"][index]
        return entry_of(tree["optimizer_state_dict"]["state"], index).get(state)
