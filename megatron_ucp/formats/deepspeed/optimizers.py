"""The optimizer files of DeepSpeed's wrappers: ZeRO's, BF16_Optimizer's, those that nothing
partitions (stage 0), and Muon's. A row for each wrapper says where its file keeps what."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from megatron_ucp.core import flat
from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import PartitionRanks, expert_name, is_stacked, stored_tensors
from megatron_ucp.core.flat import FlatBuffer, States
from megatron_ucp.core.manifest import Manifest, ParamGroup
from megatron_ucp.core.names import MASTER, Keeper
from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    StateMismatchError,
    UnsupportedError,
    UsageError,
)
from megatron_ucp.formats import expect
from megatron_ucp.formats.deepspeed.buffers import GroupOnRank, elems_of
from megatron_ucp.formats.deepspeed.config import DeepSpeedConfig
from megatron_ucp.formats.deepspeed.weights import Tree
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.optimizers import check_known, is_element
from megatron_ucp.formats.param_groups import Tensors, param_groups, step_of
from megatron_ucp.formats.pt.refs import TensorRef, number_in

# ---- muon
#
# DeepSpeed's Muon: which groups it steps as whole matrices, and where their momentum lies.
#
# Source: `runtime/zero/muon/` of DeepSpeed 0.19.8, and `_muon_momentum_buffer` and
# `_apply_muon_updates_cpu_offload` in `runtime/zero/stage_1_and_2.py`.


MUON = "deepspeed.MuonWithAuxAdam"
MOMENTUM = "momentum_buffer"
_CLIPPED_FIRST = (Keeper.ZERO_0, Keeper.BF16)  # engines that clip what Muon gets, not what it gives
_STEPPED_BY = "use_muon"  # the key of a group; the other groups are stepped by Adam


def steps_matrices(group: Mapping[str, Any]) -> bool:
    """Whether Muon steps a group with these hyper-parameters, and not the Adam beside it."""
    return bool(group.get(_STEPPED_BY))


def uncut_states(group: Mapping[str, Any], keeper: Keeper, offloaded: bool) -> tuple[str, ...]:
    """The states of a group of which a partition keeps whole matrices (see `FlatBuffer.uncut`):
    the momentum at ZeRO-1 and 2, unless the optimizer is offloaded to the CPU."""
    kept = keeper == Keeper.ZERO_1_OR_2 and steps_matrices(group) and not offloaded
    return (MOMENTUM,) if kept else ()


def in_its_order(
    names: Sequence[str],
    shapes: Mapping[str, Ints],
    source: Mapping[str, Ints],
    file: str,
    at_init: bool = False,
) -> tuple[str, ...]:
    """The parameters of a group that Muon steps in the order that its class gives them: by their
    rank-local `shapes`, greatest first, compared dim by dim, and those of one shape as the client
    listed them. `names` are in the order of a source with its own shapes, which is the same kind of
    order, or the client's: so it is where ZeRO-3 made the model (`zero.Init`: then no parameter has
    a shape yet), and so a target `at_init` keeps it.

    Raises UsageError where parameters have one shape here and had others in the source: nobody
    knows then which one the client listed first.
    """
    is_sorted = list(names) == _sorted(names, source)
    if not is_sorted:
        return tuple(names) if at_init else tuple(_sorted(names, shapes))
    out = _sorted(names, shapes)
    for one, other in pairwise(out):
        if shapes[one] == shapes[other] and source[one] != source[other]:
            raise UsageError(
                "the order of a group that Muon steps is not known on this mesh",
                file=file,
                parameter=f"{one} and {other}",
                expected="shapes of a rank that differ, or were the same in the source too",
                found=f"{shapes[one]}, from {source[one]} and {source[other]}",
                fix="load it into an engine of the job and save there, or list the groups as its "
                "optimizer has them (--groups; Python: Target(groups=))",
            )
    return tuple(out)


def _sorted(names: Sequence[str], shapes: Mapping[str, Ints]) -> list[str]:
    return sorted(names, key=lambda name: shapes[name], reverse=True)


def check_momentum(groups: Sequence[ParamGroup], buffers: Iterable[FlatBuffer], file: str) -> None:
    """Raises DamagedFileError where a group that Muon steps has other states than a momentum,
    UnsupportedError where it steps stacked experts, whose matrices one tensor holds."""
    for buffer in buffers:
        group = groups[buffer.group] if buffer.group is not None else None
        if group is None or not steps_matrices(group.settings):
            continue
        first = buffer.members[0].param
        found = [state for state, _ in buffer.states if state not in (MASTER, MOMENTUM)]
        if found:
            raise DamagedFileError(
                "a group that Muon steps holds states of another optimizer",
                file=file,
                parameter=first,
                expected=MOMENTUM,
                found=" ".join(found),
                fix="load another tag, or the weights alone (Python: load_optimizer_states=False)",
            )
        if any(is_stacked(member.param) for member in buffer.members):
            raise UnsupportedError(
                "Muon over AutoEP's stacked experts is not supported",
                file=file,
                parameter=first,
                fix="resume on the mesh that wrote it with DeepSpeed's own load",
            )


def other_steps(source: Manifest, target: Manifest) -> list[str]:
    """Notes where Muon goes on otherwise than it would have, from states that are bit-equal."""
    if not (is_used(source) and is_used(target)):
        return []
    out: list[str] = []
    if source.mesh.tp != target.mesh.tp:
        out.append(
            "Muon: its next steps are not those of the checkpoint's mesh, as it orthogonalizes "
            f"what a tensor-parallel rank has of a matrix: {source.mesh.tp} ranks then, "
            f"{target.mesh.tp} now"
        )
    if (source.keeper in _CLIPPED_FIRST) != (target.keeper in _CLIPPED_FIRST):
        out.append(
            "Muon: its next steps are not those of the checkpoint's ZeRO stage where gradients "
            "are clipped: DeepSpeed clips before orthogonalizing without ZeRO and in "
            "BF16_Optimizer, behind it at ZeRO 1 to 3"
        )
    return out


def is_used(manifest: Manifest) -> bool:
    """Whether Muon steps a group of a manifest."""
    return any(steps_matrices(group.settings) for group in manifest.groups)


# ---- optimizer files
#
# How DeepSpeed's optimizer wrappers lay out their states in files, and those of ZeRO.
#
# A row for each wrapper says under which keys its file keeps masters and states, and how
# parameters lie in a buffer (reference: `state_dict` of the wrapper in DeepSpeed 0.19.8). One
# loop reads the pickled tree of any of them into flat buffers.


OFFLOADED = "_offload_buffer"
# bitsandbytes' `state_dict` puts its states one level deeper, whatever their dtype
_WRAPPED = "__bnb_optimizer_quant_state__"
_SHARING = "ds_zero_partition_groups"


@dataclass(frozen=True)
class Contents:
    """The optimizer part of a checkpoint as one file shows it, which is of a `format`; must be
    equal in all files of one save.

    `indices` are the numbers under which the file keeps each buffer's states."""

    format: "OptimizerFile"
    keeper: Keeper
    buffers: tuple[FlatBuffer, ...]
    groups: tuple[ParamGroup, ...]
    scaler: LossScale
    indices: tuple[int, ...]

    @property
    def scalars(self) -> tuple[Mapping[str, float], ...]:
        """The scalar states of each buffer, which are those of its members."""
        return tuple(b.members[0].scalars if b.members else {} for b in self.buffers)


@dataclass(frozen=True)
class OptimizerTree:
    """The optimizer's state dict of one file; `tensor` reads a small tensor of it."""

    tree: Tree
    file: str
    tensor: Tensors


@dataclass(frozen=True)
class IndexStates:
    """What a file keeps under one index: the states of parameters with rank-local shapes, masters
    first where it has any, and the group that lists them."""

    named: Mapping[str, Ints]
    index: int
    group: GroupOnRank
    refs: Mapping[str, TensorRef]


GroupShapes = Sequence[Mapping[str, Ints]]  # names and rank-local shapes of each group's parameters
ListedTensor = tuple[Mapping[str, Ints], int, int | None]  # parameters, their index, their group


class OptimizerFile:
    """One wrapper's file format; a subclass is a row."""

    keeper: Keeper
    masters_key = ""  # of the list of masters; "" where the weights are the masters
    base_key = "optimizer_state_dict"  # of the base optimizer's state dict

    def contents(
        self, found: OptimizerTree, shapes: GroupShapes, spread: PartitionRanks
    ) -> Contents:
        """What the file holds; `shapes` are in the optimizer's order. Raises a UcpError."""
        base, masters = self.base(found.tree, found.file), self.masters(found.tree, found.file)
        self.check(found, shapes, spread)
        groups, states = groups_of(base, found.file), expect.key_or(base, "state", {}, found.file)
        buffers: list[FlatBuffer] = []
        indices: list[int] = []
        for named, index, group in self.listed(groups, states, shapes, found.file):
            element, kept = _split(entry_of(states, index, found.file), found)
            if self.masters_key:
                element = {MASTER: self._master(masters, index, found.file), **element}
            first = next(iter(named), "")  # which says for all who shares them
            sizes = [(name, math.prod(shape)) for name, shape in named.items()]
            on_rank = GroupOnRank(
                group,
                "",
                sizes,
                self.states_of(element, first),
                lambda _, kept=kept: kept,
                spread.partitions(first),
                spread.axes(first),
                {} if group is None else groups[group],
            )
            flat_buffers = self.buffers(IndexStates(named, index, on_rank, element), found)
            buffers += flat_buffers
            indices += [index] * len(flat_buffers)
        return Contents(
            self,
            self.keeper_of(found.tree),
            tuple(buffers),
            param_groups(groups, found.tensor, found.file),
            self.scaler(found.tree),
            tuple(indices),
        )

    def states_of(self, refs: Mapping[str, TensorRef], name: str) -> States:
        """Name and dtype of the states of a parameter, masters first."""
        return tuple((state, ref.storage.dtype) for state, ref in refs.items())

    def _master(self, masters: Sequence[TensorRef], index: int, file: str) -> TensorRef:
        return expect.kind(
            masters[index] if 0 <= index < len(masters) else None, TensorRef, self.masters_key, file
        )

    def element(self, tree: Tree, index: int, state: str, file: str) -> TensorRef | None:
        """The tensor with a state of the buffer that the file keeps under `index`, None where the
        tree has none. Raises DamagedFileError."""
        if state == MASTER:
            masters = self.masters(tree, file)
            return self._master(masters, index, file) if self.masters_key else None
        states = expect.key_or(self.base(tree, file), "state", {}, file)
        found = entry_of(states, index, file).get(state)
        return None if found is None else expect.kind(found, TensorRef, state, file)

    def base(self, tree: Tree, file: str) -> Tree:
        """The base optimizer's state dict."""
        return expect.kind(required(tree, self.base_key, file), dict, self.base_key, file)

    def masters(self, tree: Tree, file: str) -> Sequence[TensorRef]:
        """The masters in the optimizer's order; none where the training weights are the masters."""
        found = required(tree, self.masters_key, file)
        return expect.each(found, TensorRef, self.masters_key, file)

    def keeper_of(self, tree: Tree) -> Keeper:
        return self.keeper

    def scaler(self, tree: Tree) -> LossScale:
        """The loss scale in its canonical form."""
        return LossScale.pickled(tree.get("loss_scaler"))

    def check(self, found: OptimizerTree, shapes: GroupShapes, spread: PartitionRanks) -> None:
        """Raises ForeignFileError where model file and optimizer files count differently."""

    def listed(
        self, groups: Sequence[Tree], states: Tree, shapes: GroupShapes, file: str
    ) -> Iterable[ListedTensor]:
        """What the file keeps states of: a buffer for each entry of `shapes`."""
        return ((named, index, _group_of(index, groups)) for index, named in enumerate(shapes))

    def buffers(self, one: IndexStates, found: OptimizerTree) -> list[FlatBuffer]:
        """The buffers of what the file keeps under one index."""
        raise NotImplementedError


def groups_of(base: Tree, file: str) -> Sequence[Tree]:
    """The parameter groups, each with a list of indices."""
    groups = expect.each(base.get("param_groups", []), dict, "param_groups", file)
    for group in groups:
        expect.each(group.get("params", []), int, "params", file)
    return groups


def _group_of(index: int, groups: Sequence[Tree]) -> int | None:
    """The number of the group that lists an index."""
    return next((n for n, group in enumerate(groups) if index in group.get("params", ())), None)


def entry_of(states: Tree, index: Any, file: str) -> Tree:
    """What an optimizer's `state` holds under an index, on one level; empty where it holds
    nothing. Raises DamagedFileError."""
    entry = expect.kind(states.get(index, {}), dict, f"state of {index}", file)
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
            element[key] = expect.kind(value, TensorRef, key, file)
        elif isinstance(value, TensorRef):
            scalars[key] = number_in(found.tensor(value), file)
        else:
            scalars[key] = expect.number(value, key, file)
    if "step" in scalars:
        step_of(scalars["step"], file)
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


def _first_partitions(shapes: GroupShapes, spread: PartitionRanks) -> list[int]:
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
        entries, key = expect.each(listed, dict, self.base_key, file), f"{self.base_key}_step"
        step = {"step": tree[key]} if key in tree else {}
        return {
            "state": {index: {**step, **entry} for index, entry in enumerate(entries)},
            "param_groups": [{"params": [index]} for index in range(len(self.masters(tree, file)))],
        }

    def check(self, found: OptimizerTree, shapes: GroupShapes, spread: PartitionRanks) -> None:
        _check_groups(self.masters(found.tree, found.file), shapes, "groups", found.file)
        _check_count(found.tree, _first_partitions(shapes, spread), found.file)

    def buffers(self, one: IndexStates, found: OptimizerTree) -> list[FlatBuffer]:
        """A group's buffer, filled up and cut into equal chunks."""
        starts, used = _starts(one, found)
        uncut = uncut_states(one.group.settings, self.keeper_of(found.tree), self._offloaded)
        return [one.group.cut_as_one(one.group.tensors, starts, used, uncut)]


def _starts(one: IndexStates, found: OptimizerTree) -> tuple[list[int], int]:
    """Where tensors begin, with the gaps behind them, and the end of the last one."""
    tensors = one.group.tensors
    said = expect.key_or(found.tree, "param_alignment_paddings", [], found.file)
    gaps = (0,) * len(tensors)
    if said:
        gaps = expect.sizes(said[one.index] if one.index < len(said) else None, "gaps", found.file)
    _check_groups(gaps, tensors, "tensors", found.file)
    starts, at = list[int](), 0
    for tensor, gap in zip(tensors, gaps, strict=True):
        starts.append(at)
        at += elems_of(tensor) + gap
    return starts, at


class Zero3File(OptimizerFile):
    """ZeRO-3: one flat buffer per sub-group, every member cut for itself."""

    keeper = Keeper.ZERO_3
    masters_key = "fp32_flat_groups"

    def check(self, found: OptimizerTree, shapes: GroupShapes, spread: PartitionRanks) -> None:
        _check_count(found.tree, [spread.dense], found.file)
        _check_groups(self.masters(found.tree, found.file), shapes, "sub-groups", found.file)
        said, partitions = sharing(found.tree, found.file), _first_partitions(shapes, spread)
        counts = [expect.key(one, "partition_count", int, found.file) for one in said or ()]
        if said is not None and counts != partitions:
            raise ForeignFileError(
                "a sub-group was shared by other ranks than the mesh says",
                file=found.file,
                expected=partitions,
                found=str(counts)[:120],
                fix="put the files of one save, and no others, into the folder",
            )

    def buffers(self, one: IndexStates, found: OptimizerTree) -> list[FlatBuffer]:
        """A sub-group's buffer, in which every stored tensor is cut for itself."""
        return [one.group.each_cut(one.group.tensors)]


def sharing(tree: Tree, file: str) -> Sequence[Tree] | None:
    """Which ranks share each sub-group, where a file of ZeRO-3 says it."""
    said = tree.get(_SHARING)
    return None if said is None else expect.each(said, dict, _SHARING, file)


# ---- stage 0 files


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
        self, groups: Sequence[Tree], states: Tree, shapes: GroupShapes, file: str
    ) -> Iterable[ListedTensor]:
        """Every tensor of the optimizer: a parameter, or a stack of them."""
        tensors = [stored_tensors(named) for named in shapes]
        indices = _stepped(groups, states, [*map(len, tensors)], bool(self.masters_key), file)
        for number, named in enumerate(shapes):
            for names, index in zip(tensors[number], indices[number], strict=True):
                yield {name: named[name] for name in names}, index, number

    def buffers(self, one: IndexStates, found: OptimizerTree) -> list[FlatBuffer]:
        _check_shapes(one, found.file)
        return [one.group.alone(name, elems) for name, elems in one.group.sizes]


class UnfusedFile(Unpartitioned):
    """FP16_UnfusedOptimizer (bf16 and fp16 at stage 0): shaped masters and moments."""

    masters_key = "fp32_groups"

    def masters(self, tree: Tree, file: str) -> Sequence[TensorRef]:
        groups = expect.each(required(tree, self.masters_key, file), list, self.masters_key, file)
        return [ref for group in groups for ref in expect.each(group, TensorRef, "a master", file)]


class PlainFile(Unpartitioned):
    """The user's own optimizer (an fp32 config at stage 0): the model's weights are the masters, in
    the dtype that the model has."""

    def __init__(self, weight_dtype: Callable[[str], str]) -> None:
        self._weight_dtype = weight_dtype

    def base(self, tree: Tree, file: str) -> Tree:
        return tree

    def masters(self, tree: Tree, file: str) -> Sequence[TensorRef]:
        return ()

    def states_of(self, refs: Mapping[str, TensorRef], name: str) -> States:
        return ((MASTER, self._weight_dtype(name)), *super().states_of(refs, name))


class FusedFlatFile(_Stage0File):
    """FP16_Optimizer (FusedAdam at stage 0): one flat, unpadded buffer per group, one partition."""

    masters_key = "fp32_groups_flat"

    def check(self, found: OptimizerTree, shapes: GroupShapes, spread: PartitionRanks) -> None:
        masters = self.masters(found.tree, found.file)
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

    def buffers(self, one: IndexStates, found: OptimizerTree) -> list[FlatBuffer]:
        return [one.group.not_cut(one.group.tensors)]


def _check_shapes(one: IndexStates, file: str) -> None:
    """Raises ForeignFileError where states at the position of a parameter, or of a stack of them,
    are not of its shape."""
    first = next(iter(one.named))
    shape = tuple(one.named[first])
    if is_stacked(first):
        shape = (len(one.named), *shape)
    for ref in one.refs.values():
        if tuple(ref.shape) != shape:
            raise ForeignFileError(
                "the optimizer's parameters come in another order than the model's groups",
                file=file,
                parameter=first,
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


# ---- optimizer formats


def reader_for(
    tree: Any,
    file: str,
    weight_dtype: Callable[[str], str] = lambda _: "float32",
    config: Any = None,
) -> OptimizerFile:
    """The format of an optimizer state dict; `weight_dtype` is that of a weight in the model file,
    `config` the DeepSpeed config of the run. Raises DamagedFileError where no known key is
    present."""
    keys = expect.kind(tree, dict, "the optimizer", file).keys()
    rows = (
        Zero3File(),
        Zero12File(DeepSpeedConfig(config).is_offloaded),
        FusedFlatFile(),
        UnfusedFile(),
    )
    for row in rows:
        if row.masters_key in keys:
            return row
    if {"state", "param_groups"} <= keys:
        return PlainFile(weight_dtype)
    raise DamagedFileError(
        "this is no optimizer state of DeepSpeed",
        file=file,
        found=", ".join(map(str, keys))[:200],
        expected="single_partition_of_fp32_groups, fp32_flat_groups, fp32_groups or state",
    )
