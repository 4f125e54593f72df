"""How DeepSpeed's optimizer wrappers lay out their states in files, told apart by the keys that are
present.

Each class reads the pickled tree of one file into flat buffers (reference: `state_dict` of the
wrapper in DeepSpeed 0.19.8) and says which tensor of the tree holds which state of which buffer.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_ucp.core import flat
from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import FlatBuffer, Member, States
from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    StateMismatchError,
    UnsupportedError,
)
from megatron_ucp.formats.deepspeed import formulas, plain_values
from megatron_ucp.formats.deepspeed.experts import Spread
from megatron_ucp.formats.deepspeed.plain_values import (
    SCALER,
    Scalar,
    Tree,
    loss_scaler,
    param_groups,
)
from megatron_ucp.formats.optimizers import check_known, is_element
from megatron_ucp.formats.pt.unpickler import TensorRef

OFFLOADED = "_offload_buffer"
# bitsandbytes' `state_dict` puts its states one level deeper, whatever their dtype
_WRAPPED = "__bnb_optimizer_quant_state__"


@dataclass(frozen=True)
class Contents:
    """The optimizer part of a checkpoint as one file shows it; must be equal in all files of one
    save.

    `indices` are the numbers under which the file keeps each buffer's states."""

    engine: str
    buffers: tuple[FlatBuffer, ...]
    groups: tuple[ParamGroup, ...]
    scaler: Mapping[str, Any]
    indices: tuple[int, ...]

    @property
    def scalars(self) -> tuple[Mapping[str, float], ...]:
        """Scalar states of each buffer, which are those of its members."""
        return tuple(b.members[0].scalars if b.members else {} for b in self.buffers)


class OptimizerFile(Protocol):
    """One wrapper's file format."""

    def contents(
        self,
        tree: Tree,
        shapes: Sequence[Mapping[str, Ints]],
        spread: Spread,
        file: str,
        scalar: Scalar,
    ) -> Contents: ...

    def element(self, tree: Tree, index: int, state: str) -> TensorRef | None:
        """The tensor with a state of the buffer that the file keeps under `index`, None where the
        tree has none."""
        ...


def reader_for(
    tree: Tree, file: str, weight_dtype: Callable[[str], str] = lambda _: "float32"
) -> OptimizerFile:
    """The format of an optimizer state dict; `weight_dtype` is that of a weight in the model file.
    Raises DamagedFileError where no known key is present."""
    if "fp32_flat_groups" in tree:
        return Zero3File()
    if "single_partition_of_fp32_groups" in tree:
        return Zero12File()
    if "fp32_groups_flat" in tree:
        return FusedFlatFile()
    if "fp32_groups" in tree:
        return UnfusedFile()
    if "state" in tree and "param_groups" in tree:
        return PlainFile(weight_dtype)
    raise DamagedFileError(
        "this is no optimizer state of DeepSpeed",
        file=file,
        found=", ".join(map(str, tree))[:200],
        expected="single_partition_of_fp32_groups, fp32_flat_groups, fp32_groups or state",
    )


def entry_of(states: Mapping[Any, Any], index: Any) -> Tree:
    """What an optimizer's `state` holds under an index, on one level; empty where it holds
    nothing."""
    entry: Tree = states.get(index, {})
    inner = entry.get(_WRAPPED)
    if not isinstance(inner, dict):
        return entry
    return {**{key: value for key, value in entry.items() if key != _WRAPPED}, **inner}


def split_states(
    entry: Tree, file: str, scalar: Scalar
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
            scalars[key] = scalar(value) if isinstance(value, TensorRef) else float(value)
    return tuple(element), scalars


def _members(
    named: Mapping[str, Ints],
    starts: Sequence[int],
    group: int | None,
    scalars: Mapping[str, float],
) -> tuple[Member, ...]:
    return tuple(
        Member(name, start, math.prod(shape), group, scalars)
        for (name, shape), start in zip(named.items(), starts, strict=True)
    )


def _starts(shapes: Iterable[Ints], gaps: Sequence[int]) -> tuple[list[int], int]:
    """Where members begin that have gaps behind them, and the end of the last one."""
    starts, at = list[int](), 0
    for shape, gap in zip(shapes, gaps, strict=True):
        starts.append(at)
        at += math.prod(shape) + gap
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


def _group_of(index: int, groups: Sequence[Tree]) -> int | None:
    for number, group in enumerate(groups):
        if index in group.get("params", ()):
            return number
    return None


def _listed(tree: Tree, key: str, file: str) -> list[Any]:
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
    members: tuple[Member, ...], used: int, spread: Spread, states: States
) -> FlatBuffer:
    """A group's buffer of `used` elements, filled up and cut into equal chunks."""
    first = members[0].param if members else ""
    partitions = spread.partitions(first)
    length = formulas.whole_length(used, partitions)
    return FlatBuffer(members, length, partitions, "whole", states, axes=spread.axes(first))


class Zero12File:
    """ZeRO-1, ZeRO-2 and BF16_Optimizer: one flat buffer per group, cut into equal chunks."""

    def contents(
        self,
        tree: Tree,
        shapes: Sequence[Mapping[str, Ints]],
        spread: Spread,
        file: str,
        scalar: Scalar,
    ) -> Contents:
        masters = _listed(tree, "single_partition_of_fp32_groups", file)
        first = [next(iter(named), "") for named in shapes]
        _check_groups(masters, shapes, "groups", file)
        _count(tree, [spread.partitions(name) for name in first], file)
        base = _required(tree, "base_optimizer_state", file)
        elastic = isinstance(base, list)
        groups = [] if elastic else base.get("param_groups", [])
        entries = dict(enumerate(base)) if elastic else base.get("state", {})
        gaps = tree.get("param_alignment_paddings") or [[0] * len(s) for s in shapes]
        buffers: list[FlatBuffer] = []
        for index, named in enumerate(shapes):
            starts, at = _starts(named.values(), gaps[index])
            element, kept = split_states(entry_of(entries, index), file, scalar)
            group = index if elastic else _group_of(index, groups)
            members = _members(named, starts, group, {**_elastic_step(tree), **kept})
            states = ((MASTER, masters[index].storage.dtype), *element)
            buffers.append(_equally_cut(members, at, spread, states))
        return Contents(
            "zero12" if "zero_stage" in tree else "bf16",
            tuple(buffers),
            (ParamGroup({}),) * len(shapes) if elastic else param_groups(groups, scalar, file),
            loss_scaler(tree.get("loss_scaler")),
            tuple(range(len(buffers))),
        )

    def element(self, tree: Tree, index: int, state: str) -> TensorRef | None:
        if state == MASTER:
            return tree["single_partition_of_fp32_groups"][index]
        base = tree["base_optimizer_state"]
        states = dict(enumerate(base)) if isinstance(base, list) else base["state"]
        return entry_of(states, index).get(state)


class Zero3File:
    """ZeRO-3: one flat buffer per sub-group, every member cut for itself."""

    def contents(
        self,
        tree: Tree,
        shapes: Sequence[Mapping[str, Ints]],
        spread: Spread,
        file: str,
        scalar: Scalar,
    ) -> Contents:
        masters = _listed(tree, "fp32_flat_groups", file)
        partitions = spread.dense
        _count(tree, [partitions], file)
        _check_groups(masters, shapes, "sub-groups", file)
        base = _required(tree, "optimizer_state_dict", file)
        groups = base.get("param_groups", [])
        buffers: list[FlatBuffer] = []
        for index, named in enumerate(shapes):
            sizes = [math.prod(shape) for shape in named.values()]
            starts, used = flat.aligned_starts([-(-size // partitions) for size in sizes])
            element, kept = split_states(entry_of(base.get("state", {}), index), file, scalar)
            buffers.append(
                FlatBuffer(
                    _members(named, starts, _group_of(index, groups), kept),
                    used,
                    partitions,
                    "each",
                    ((MASTER, masters[index].storage.dtype), *element),
                )
            )
        return Contents(
            "zero3",
            tuple(buffers),
            param_groups(groups, scalar, file),
            loss_scaler(tree.get("loss_scaler")),
            tuple(range(len(buffers))),
        )

    def element(self, tree: Tree, index: int, state: str) -> TensorRef | None:
        if state == MASTER:
            return tree["fp32_flat_groups"][index]
        return entry_of(tree["optimizer_state_dict"]["state"], index).get(state)


class _Unpartitioned:
    """Stage 0: one buffer per parameter. Files name no parameters: `shapes` must list them in the
    optimizer's order."""

    engine = "zero0"

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
        scalar: Scalar,
    ) -> Contents:
        base, masters = self.base(tree), self.masters(tree)
        groups = base["param_groups"]
        counts = [len(named) for named in shapes]
        indices = _stepped(groups, base["state"], counts, masters is not None, file)
        buffers: list[FlatBuffer] = []
        for number, named in enumerate(shapes):
            for (name, shape), index in zip(named.items(), indices[number], strict=True):
                entry = entry_of(base["state"], index)
                element, kept = split_states(entry, file, scalar)
                refs = [entry[key] for key, _ in element] + ([masters[index]] if masters else [])
                _check_shapes(refs, name, shape, file)
                states = ((MASTER, self.master_dtype(tree, name, index)), *element)
                size, axes = math.prod(shape), spread.axes(name)
                buffers.append(flat.alone(name, size, states, number, kept, axes=axes))
        return Contents(
            self.engine,
            tuple(buffers),
            param_groups(groups, scalar, file),
            _flat_scaler(tree),
            tuple(index for chosen in indices for index in chosen),
        )

    def element(self, tree: Tree, index: int, state: str) -> TensorRef | None:
        if state == MASTER:
            masters = self.masters(tree)
            return masters[index] if masters else None
        return entry_of(self.base(tree)["state"], index).get(state)


def _check_shapes(refs: Sequence[TensorRef], name: str, shape: Ints, file: str) -> None:
    """Raises ForeignFileError where states at a parameter's position are not of its shape."""
    for ref in refs:
        if tuple(ref.shape) != tuple(shape):
            raise ForeignFileError(
                "the optimizer's parameters come in another order than the model's groups",
                file=file,
                parameter=name,
                expected=shape,
                found=ref.shape,
                fix="build the optimizer's groups as the run that saved it did, or save with a "
                "manifest (megatron_ucp.attach)",
            )


class UnfusedFile(_Unpartitioned):
    """FP16_UnfusedOptimizer (bf16 and fp16 at stage 0): shaped masters and moments."""

    def masters(self, tree: Tree) -> list[TensorRef]:
        return [ref for group in tree["fp32_groups"] for ref in group]

    def master_dtype(self, tree: Tree, name: str, index: int) -> str:
        return self.masters(tree)[index].storage.dtype


class PlainFile(_Unpartitioned):
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
        scalar: Scalar,
    ) -> Contents:
        masters = _listed(tree, "fp32_groups_flat", file)
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
                )
            element, kept = split_states(entry_of(base["state"], index), file, scalar)
            group = _group_of(index, base["param_groups"])
            states = ((MASTER, masters[index].storage.dtype), *element)
            members = _members(named, starts, group, kept)
            axes = spread.axes(next(iter(named), ""))
            buffers.append(FlatBuffer(members, used, 1, "whole", states, axes=axes))
        return Contents(
            "zero0",
            tuple(buffers),
            param_groups(base["param_groups"], scalar, file),
            _flat_scaler(tree),
            tuple(range(len(buffers))),
        )

    def element(self, tree: Tree, index: int, state: str) -> TensorRef | None:
        if state == MASTER:
            return tree["fp32_groups_flat"][index]
        return entry_of(tree["optimizer_state_dict"]["state"], index).get(state)


def _flat_scaler(tree: Tree) -> Mapping[str, Any]:
    """The loss scaler whose fields stand in the state dict itself (stage 0)."""
    if "cur_scale" not in tree:
        return {}
    return {
        "dynamic": plain_values.number(tree.get("dynamic_loss_scale")),
        **{name: plain_values.number(tree[name]) for name in SCALER[1:] if name in tree},
    }


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
            )
        out.append(every if want == len(every) else stepped)
    return out
