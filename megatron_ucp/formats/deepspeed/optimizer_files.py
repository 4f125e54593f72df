"""How DeepSpeed's optimizer wrappers lay out their states in files, and those of ZeRO.

A row for each wrapper says under which keys its file keeps masters and states, and how parameters
lie in a buffer (reference: `state_dict` of the wrapper in DeepSpeed 0.19.8). One loop reads the
pickled tree of any of them into flat buffers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ucp.core import flat
from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import Spread, stored_tensors
from megatron_ucp.core.flat import FlatBuffer, Member, States
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import DamagedFileError, ForeignFileError, UnsupportedError
from megatron_ucp.formats.deepspeed import formulas
from megatron_ucp.formats.deepspeed.model_file import Tree
from megatron_ucp.formats.deepspeed.muon import uncut_states
from megatron_ucp.formats.foreign import as_float, at_key, at_key_or, each, of_kind, sizes
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.optimizers import check_known, is_element
from megatron_ucp.formats.plain_values import Tensors, param_groups
from megatron_ucp.formats.pt.unpickler import TensorRef
from megatron_ucp.formats.pt.values import number_in

OFFLOADED = "_offload_buffer"
# bitsandbytes' `state_dict` puts its states one level deeper, whatever their dtype
_WRAPPED = "__bnb_optimizer_quant_state__"
_SHARING = "ds_zero_partition_groups"


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


@dataclass(frozen=True)
class OptimizerTree:
    """The optimizer's state dict of one file; `tensor` reads a small tensor of it."""

    tree: Tree
    file: str
    tensor: Tensors


@dataclass(frozen=True)
class IndexStates:
    """What a file keeps under one index: the states of parameters, masters first where it has any,
    the numbers that it keeps of them, and the group that lists them."""

    named: Mapping[str, Ints]
    index: int
    group: int | None
    refs: Mapping[str, TensorRef]
    scalars: Mapping[str, float]

    @property
    def states(self) -> States:
        return tuple((state, ref.storage.dtype) for state, ref in self.refs.items())

    @property
    def first(self) -> str:
        """Of the parameters the first one, which says for all who shares them."""
        return next(iter(self.named), "")

    def members(self, starts: Sequence[int]) -> tuple[Member, ...]:
        """The parameters, each one from where it begins in the buffer."""
        return tuple(
            Member(name, start, math.prod(shape), self.group, self.scalars)
            for (name, shape), start in zip(self.named.items(), starts, strict=True)
        )


ListedTensor = tuple[Mapping[str, Ints], int, int | None]  # parameters, their index, their group


class OptimizerFile:
    """One wrapper's file format; a subclass is a row."""

    keeper: Keeper
    masters_key = ""  # of the list of masters; "" where the weights are the masters
    base_key = "optimizer_state_dict"  # of the base optimizer's state dict

    def contents(
        self, found: OptimizerTree, shapes: Sequence[Mapping[str, Ints]], spread: Spread
    ) -> Contents:
        """What the file holds; `shapes` are names and rank-local shapes of each group's parameters
        in the optimizer's order. Raises a UcpError."""
        base, masters = self.base(found.tree, found.file), self.masters(found.tree, found.file)
        self.check(found, masters, shapes, spread)
        groups, states = groups_of(base, found.file), at_key_or(base, "state", {}, found.file)
        buffers: list[FlatBuffer] = []
        indices: list[int] = []
        for named, index, group in self.listed(groups, states, shapes, found.file):
            element, kept = _split(entry_of(states, index, found.file), found)
            if self.masters_key:
                element = {MASTER: self._master(masters, index, found.file), **element}
            one = IndexStates(named, index, group, element, kept)
            made = self.buffers(one, found, groups, spread)
            buffers += made
            indices += [index] * len(made)
        scaler = self.scaler(found.tree)
        told = param_groups(groups, found.tensor)
        return Contents(self.keeper_of(found.tree), tuple(buffers), told, scaler, tuple(indices))

    def _master(self, masters: Sequence[TensorRef], index: int, file: str) -> TensorRef:
        return of_kind(
            masters[index] if 0 <= index < len(masters) else None, TensorRef, self.masters_key, file
        )

    def element(self, tree: Tree, index: int, state: str, file: str) -> TensorRef | None:
        """The tensor with a state of the buffer that the file keeps under `index`, None where the
        tree has none. Raises DamagedFileError."""
        if state == MASTER:
            masters = self.masters(tree, file)
            return self._master(masters, index, file) if self.masters_key else None
        states = at_key_or(self.base(tree, file), "state", {}, file)
        found = entry_of(states, index, file).get(state)
        return None if found is None else of_kind(found, TensorRef, state, file)

    def base(self, tree: Tree, file: str) -> Tree:
        """The base optimizer's state dict."""
        return of_kind(required(tree, self.base_key, file), dict, self.base_key, file)

    def masters(self, tree: Tree, file: str) -> Sequence[TensorRef]:
        """The masters in the optimizer's order; none where the training weights are the masters."""
        found = required(tree, self.masters_key, file)
        return each(found, TensorRef, self.masters_key, file)

    def keeper_of(self, tree: Tree) -> Keeper:
        return self.keeper

    def scaler(self, tree: Tree) -> LossScale:
        """The loss scale in its canonical form."""
        return LossScale.pickled(tree.get("loss_scaler"))

    def check(
        self,
        found: OptimizerTree,
        masters: Sequence[TensorRef],
        shapes: Sequence[Mapping[str, Ints]],
        spread: Spread,
    ) -> None:
        """Raises ForeignFileError where model file and optimizer files count differently."""

    def listed(
        self,
        groups: Sequence[Tree],
        states: Tree,
        shapes: Sequence[Mapping[str, Ints]],
        file: str,
    ) -> Iterable[ListedTensor]:
        """What the file keeps states of: a buffer for each entry of `shapes`."""
        return ((named, index, _group_of(index, groups)) for index, named in enumerate(shapes))

    def buffers(
        self, one: IndexStates, found: OptimizerTree, groups: Sequence[Tree], spread: Spread
    ) -> list[FlatBuffer]:
        """The buffers of what the file keeps under one index."""
        raise NotImplementedError


def groups_of(base: Tree, file: str) -> Sequence[Tree]:
    """The parameter groups, each with a list of indices."""
    groups = each(base.get("param_groups", []), dict, "param_groups", file)
    for group in groups:
        each(group.get("params", []), int, "params", file)
    return groups


def _group_of(index: int, groups: Sequence[Tree]) -> int | None:
    """The number of the group that lists an index."""
    return next((n for n, group in enumerate(groups) if index in group.get("params", ())), None)


def entry_of(states: Tree, index: Any, file: str) -> Tree:
    """What an optimizer's `state` holds under an index, on one level; empty where it holds
    nothing. Raises DamagedFileError."""
    entry = of_kind(states.get(index, {}), dict, f"state of {index}", file)
    inner = entry.get(_WRAPPED)
    if not isinstance(inner, dict):
        return entry
    return {**{key: value for key, value in entry.items() if key != _WRAPPED}, **inner}


def _split(entry: Tree, found: OptimizerTree) -> tuple[dict[str, TensorRef], dict[str, float]]:
    """Element-wise states and scalar ones of one entry of an optimizer's `state`."""
    file = found.file
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
    element: dict[str, TensorRef] = {}
    scalars: dict[str, float] = {}
    for key, value in kept.items():
        if is_element(key):
            element[key] = of_kind(value, TensorRef, key, file)
        elif isinstance(value, TensorRef):
            scalars[key] = number_in(found.tensor(value), file)
        else:
            scalars[key] = as_float(value, key, file)
    return element, scalars


def required(tree: Tree, key: str, file: str) -> Any:
    """A part of the file without which it holds no optimizer. Raises DamagedFileError."""
    if key not in tree:
        raise DamagedFileError(
            "an optimizer file lacks its optimizer's states",
            file=file,
            expected=key,
            found=", ".join(map(str, tree))[:200],
        )
    return tree[key]


def _check_groups(masters: Sequence[Any], shapes: Sequence[Any], what: str, file: str) -> None:
    """Raises ForeignFileError where model file and optimizer file count differently."""
    if len(masters) != len(shapes):
        raise ForeignFileError(
            f"model file and optimizer file hold different numbers of {what}",
            file=file,
            expected=len(shapes),
            found=len(masters),
        )


def _check_count(tree: Tree, partitions: Sequence[int], file: str) -> None:
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


def _first_partitions(shapes: Sequence[Mapping[str, Ints]], spread: Spread) -> list[int]:
    """Over how many ranks each group's buffer is divided."""
    return [spread.partitions(next(iter(named), "")) for named in shapes]


class Zero12File(OptimizerFile):
    """ZeRO-1, ZeRO-2 and BF16_Optimizer: one flat buffer per group, cut into equal chunks.
    `offloaded`: the run had its optimizer in the CPU's memory."""

    masters_key = "single_partition_of_fp32_groups"
    base_key = "base_optimizer_state"

    def __init__(self, offloaded: bool = False) -> None:
        self._offloaded = offloaded

    def keeper_of(self, tree: Tree) -> Keeper:
        return Keeper.ZERO_1_OR_2 if "zero_stage" in tree else Keeper.BF16

    def base(self, tree: Tree, file: str) -> Tree:
        """An elastic file lists the states of its buffers, with one step for all, and no
        hyper-parameters."""
        listed = required(tree, self.base_key, file)
        if not isinstance(listed, list):
            return super().base(tree, file)
        entries, key = each(listed, dict, self.base_key, file), f"{self.base_key}_step"
        step = {"step": tree[key]} if key in tree else {}
        return {
            "state": {index: {**step, **entry} for index, entry in enumerate(entries)},
            "param_groups": [{"params": [index]} for index in range(len(self.masters(tree, file)))],
        }

    def check(
        self,
        found: OptimizerTree,
        masters: Sequence[TensorRef],
        shapes: Sequence[Mapping[str, Ints]],
        spread: Spread,
    ) -> None:
        _check_groups(masters, shapes, "groups", found.file)
        _check_count(found.tree, _first_partitions(shapes, spread), found.file)

    def buffers(
        self, one: IndexStates, found: OptimizerTree, groups: Sequence[Tree], spread: Spread
    ) -> list[FlatBuffer]:
        """A group's buffer, filled up and cut into equal chunks."""
        starts, used = _starts(one, found)
        partitions, axes = spread.partitions(one.first), spread.axes(one.first)
        length = formulas.whole_length(used, partitions)
        group = {} if one.group is None else groups[one.group]
        uncut = uncut_states(group, self.keeper_of(found.tree), self._offloaded)
        members = one.members(starts)
        return [
            FlatBuffer(members, length, partitions, "whole", one.states, axes=axes, uncut=uncut)
        ]


def _starts(one: IndexStates, found: OptimizerTree) -> tuple[list[int], int]:
    """Where members begin, with gaps behind the tensors that keep them, and the end of the last
    one."""
    tensors = stored_tensors(one.named)
    said = at_key_or(found.tree, "param_alignment_paddings", [], found.file)
    gaps = (0,) * len(tensors)
    if said:
        gaps = sizes(said[one.index] if one.index < len(said) else None, "gaps", found.file)
    _check_groups(gaps, tensors, "tensors", found.file)
    starts, at = list[int](), 0
    for tensor, gap in zip(tensors, gaps, strict=True):
        for name in tensor:
            starts.append(at)
            at += math.prod(one.named[name])
        at += gap
    return starts, at


class Zero3File(OptimizerFile):
    """ZeRO-3: one flat buffer per sub-group, every member cut for itself."""

    keeper = Keeper.ZERO_3
    masters_key = "fp32_flat_groups"

    def check(
        self,
        found: OptimizerTree,
        masters: Sequence[TensorRef],
        shapes: Sequence[Mapping[str, Ints]],
        spread: Spread,
    ) -> None:
        _check_count(found.tree, [spread.dense], found.file)
        _check_groups(masters, shapes, "sub-groups", found.file)
        said, partitions = sharing(found.tree, found.file), _first_partitions(shapes, spread)
        counts = [at_key(one, "partition_count", int, found.file) for one in said or ()]
        if said is not None and counts != partitions:
            raise ForeignFileError(
                "a sub-group was shared by other ranks than the mesh says",
                file=found.file,
                expected=partitions,
                found=str(counts)[:120],
                fix="put the files of one save, and no others, into the folder",
            )

    def buffers(
        self, one: IndexStates, found: OptimizerTree, groups: Sequence[Tree], spread: Spread
    ) -> list[FlatBuffer]:
        """A sub-group's buffer, in which every stored tensor is cut for itself."""
        partitions, axes = spread.partitions(one.first), spread.axes(one.first)
        tensors = stored_tensors(one.named)
        elems = [sum(math.prod(one.named[name]) for name in tensor) for tensor in tensors]
        starts, used = flat.aligned_starts([-(-size // partitions) for size in elems])
        places = {name: at for names, at in zip(tensors, starts, strict=True) for name in names}
        held = {member.param: member for member in one.members([places[n] for n in one.named])}
        members = [m for names in tensors for m in flat.slices([held[name] for name in names])]
        return [FlatBuffer(tuple(members), used, partitions, "each", one.states, axes=axes)]


def sharing(tree: Tree, file: str) -> Sequence[Tree] | None:
    """Which ranks share each sub-group, where a file of ZeRO-3 says it."""
    said = tree.get(_SHARING)
    return None if said is None else each(said, dict, _SHARING, file)
