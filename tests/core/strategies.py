"""Random models on random meshes, and an oracle that cuts them without the package's boxes and
layouts.

The oracle numbers every element of a logical tensor and cuts the array of numbers with numpy: what
a slot must hold is then a list of numbers, -1 for padding.
"""

import os
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from megatron_ucp.core import flat
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.layout import Layout, Partial, Replicate, Shard, ShardHy, ShardNC
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.deepspeed import buffers as formulas

# Of the random cases that a law gets in `tests/run.sh all`: the share that it gets in this run.
SHARE = float(os.environ.get("LAW_SHARE", "0.15"))
SIZES = (1, 2, 3, 4)
WIDTH = 12  # divides by every size above


def cases(many: int) -> settings:
    """How often a law is tried: `many` times in `tests/run.sh all`, on other cases in each run."""
    return settings(max_examples=max(10, round(many * SHARE)), deadline=None)


@dataclass(frozen=True)
class Model:
    """Logical parameters with the layout that every mesh of one example uses."""

    shapes: tuple[tuple[int, ...], ...]
    layouts: tuple[Layout, ...]
    groups: int
    tied: frozenset[int] = frozenset()  # parameters that several stages may hold
    experts: frozenset[int] = frozenset()  # those that one of the ep ranks has
    layer_of: tuple[
        int, ...
    ] = ()  # of each: the first parameter of its layer of experts, or itself

    def name(self, index: int) -> str:
        return f"block.{index}.weight"

    def group(self, index: int) -> int:
        """The number of a parameter's group: one for all experts of a layer."""
        return self.layer_of[index] % self.groups


@st.composite
def layouts(draw: st.DrawFn, shape: list[int], axis: str) -> Layout:
    kinds = ["replicate", "partial", "shard", "nc", "unit", *(["hy"] if axis == "tp" else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "replicate" or not shape:
        return Replicate()
    if kind == "partial":
        return Partial(axis)
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "shard":
        shape[dim] = WIDTH
        return Shard(axis, dim)
    if kind == "hy":
        other = draw(st.integers(0, len(shape) - 1))
        shape[dim] = WIDTH
        shape[other] = WIDTH * (4 if other == dim else 1)
        return ShardHy((("tp", dim), ("etp", other)))
    unit = draw(st.integers(1, 2)) if kind == "unit" else 1
    parts = tuple(
        WIDTH * unit * n for n in draw(st.lists(st.integers(1, 2), min_size=1, max_size=3))
    )
    shape[dim] = sum(parts)
    return ShardNC(axis, dim, parts, unit)


@st.composite
def models(draw: st.DrawFn) -> Model:
    shapes, chosen, experts, layer_of = [], [], set[int](), list[int]()
    for _ in range(draw(st.integers(1, 4))):
        first = len(shapes)
        shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=3))
        is_expert = draw(st.booleans())
        layout = draw(layouts(shape, "etp" if is_expert else "tp"))
        for number in range(first, first + (draw(st.integers(1, 3)) if is_expert else 1)):
            shapes.append(tuple(shape))
            chosen.append(layout)
            layer_of.append(first)
            experts |= {number} if is_expert else set()
    tied = draw(st.frozensets(st.integers(0, len(shapes) - 1), max_size=2)) - experts
    groups = draw(st.integers(1, 2))
    return Model(tuple(shapes), tuple(chosen), groups, tied, frozenset(experts), tuple(layer_of))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    tp = draw(st.sampled_from(SIZES))
    etp = draw(st.sampled_from([s for s in (1, 2) if s]))
    ep = draw(st.sampled_from([1, 2, 3]))
    dp = draw(st.sampled_from([1, 2, 3, 5, 8])) * etp * ep
    pp = draw(st.sampled_from([1, 1, 2, 3, 4]))
    shared = ep == etp == 1  # sequences; with experts the ranks must divide by ep and etp
    return Mesh(
        tp=tp,
        pp=pp,
        cp=draw(st.sampled_from([1, 1, 2])) if shared else 1,
        sp=draw(st.sampled_from([1, 1, 2])) if shared else 1,
        vpp=draw(st.sampled_from([1, 2, 3])) if pp > 1 else 1,
        ep=ep,
        etp=etp,
        dp=dp,
        zero=draw(st.sampled_from([0, 1, 2, 3])),
        order=draw(st.sampled_from(["dp-pp", "pp-dp"])),
    )


Place = tuple[tuple[str, int], ...]
Stored = list[ParamSpec]  # the parameters of one stored tensor


def places(mesh: Mesh) -> list[Place]:
    """Where buffers may lie: each stage's virtual stages, in the order in which layers run through
    them."""
    if mesh.pp == 1:
        return [()]
    return [
        (("pp", pp), *((("vpp", vpp),) if mesh.vpp > 1 else ()))
        for vpp in range(mesh.vpp)
        for pp in range(mesh.pp)
    ]


@st.composite
def holdings(draw: st.DrawFn, model: Model, mesh: Mesh) -> dict[Place, list[int]]:
    """The parameters of each place: runs of uneven lengths (in the order of the virtual stages, so
    that a stage with several of them holds several runs), and the other holders of what is tied.
    Places may stay empty."""
    every = places(mesh)
    count = len(model.shapes)
    cuts = sorted(
        draw(st.lists(st.integers(0, count), min_size=len(every) - 1, max_size=len(every) - 1))
    )
    out = {
        place: list(range(a, b))
        for place, a, b in zip(every, [0, *cuts], [*cuts, count], strict=True)
    }
    for index in sorted(model.tied):
        for place in draw(st.lists(st.sampled_from(every), max_size=2, unique=True)):
            if index not in out[place]:
                out[place].append(index)
    return out


@st.composite
def parameters(draw: st.DrawFn, model: Model, number: int) -> ParamSpec:
    """A parameter whose memory has its dims in any order."""
    shape, layout = model.shapes[number], model.layouts[number]
    dims = range(len(shape))
    order = draw(st.permutations(dims)) if draw(st.booleans()) else dims
    name = model.name(number)
    return ParamSpec(name, shape, "bfloat16", "trainable", layout, order=tuple(order))


@st.composite
def manifests(draw: st.DrawFn, model: Model, dtype: str = "float32") -> Manifest:
    """The model on a random mesh, in a random order, with or without alignment, round robin and
    sub-groups."""
    mesh = draw(meshes())
    specs = [draw(parameters(model, number)) for number in range(len(model.shapes))]
    # any rank may have any expert; at ep=1 they lie among all else
    apart = {i: draw(st.integers(0, mesh.ep - 1)) for i in model.experts if mesh.ep > 1}
    ordering = draw(st.permutations(range(len(specs))))
    held = draw(holdings(model, mesh))
    buffers: list[FlatBuffer] = []
    for place in draw(
        st.permutations(list(held))
    ):  # the order of buffers says nothing about stages
        for group, at in product(range(model.groups), [None, *range(mesh.ep)]):
            of_group = [i for i in ordering if i in held[place] and model.group(i) == group]
            here = [i for i in of_group if apart.get(i) == at]
            if here:
                stored = [[specs[i] for i in one] for one in draw(stored_tensors(model, here))]
                found = draw(flat_buffers(stored, mesh, group, dtype, at is not None))
                buffers += [replace(buffer, at=on_rank(place, at)) for buffer in found]
    return Manifest(
        Keeper.PAPER,
        mesh,
        tuple(specs),
        tuple(buffers),
        groups=tuple(ParamGroup({"lr": 0.1}) for _ in range(model.groups)),
    )


def on_rank(place: Place, ep: int | None) -> Place:
    return place if ep is None else (*place, ("ep", ep))


@st.composite
def stored_tensors(draw: st.DrawFn, model: Model, here: list[int]) -> list[list[int]]:
    """Parameters by the tensor that memory holds them in: experts of a layer may be stacked, in any
    order, all else has a tensor of its own."""
    stacked = {first for first in model.layer_of if draw(st.booleans())}
    out: dict[tuple[int, ...], list[int]] = {}
    for i in here:
        layer = model.layer_of[i]
        out.setdefault((layer,) if layer in stacked else (layer, i), []).append(i)
    return list(out.values())


@st.composite
def flat_buffers(
    draw: st.DrawFn, stored: list[Stored], mesh: Mesh, group: int, dtype: str, experts: bool
) -> list[FlatBuffer]:
    dp = mesh.dp // mesh.ep if experts else mesh.dp
    place = {"tp": (mesh.tp, 0), "etp": (mesh.etp, 0)}
    tensors = [
        [Member(s.name, 0, int(np.prod(oracle_local(s, place).shape)), group) for s in one]
        for one in stored
    ]
    sizes = [sum(member.size for member in tensor) for tensor in tensors]
    states = (("fp32", dtype), ("exp_avg", "float32"))
    common: dict[str, Any] = {"states": states, "axes": ("etp",) if experts else ("tp", "etp")}
    if mesh.zero == 0:
        lone = [one_after_another([tensor], [0]) for tensor in tensors]
        pairs = zip(lone, sizes, strict=True)
        return [FlatBuffer(one, size, 1, "whole", **common) for one, size in pairs]
    if mesh.zero < 3:
        return [whole_buffer(draw, tensors, sizes, dp, common)]
    subs = formulas.sub_groups(sizes, dp, draw(st.sampled_from([1, 7, 10**9])))
    return [sub_group([tensors[i] for i in chosen], dp, common) for chosen in subs]


def sub_group(tensors: list[list[Member]], dp: int, common: dict[str, Any]) -> FlatBuffer:
    """Of ZeRO-3: every tensor is cut for itself."""
    sizes = [sum(member.size for member in tensor) for tensor in tensors]
    starts, used = flat.aligned_starts([-(-size // dp) for size in sizes])
    members = [
        member
        for tensor, start in zip(tensors, starts, strict=True)
        for member in flat.slices([replace(m, start=start) for m in tensor])
    ]
    return FlatBuffer(tuple(members), used, dp, "each", **common)


def whole_buffer(
    draw: st.DrawFn, tensors: list[list[Member]], sizes: list[int], dp: int, common: dict[str, Any]
) -> FlatBuffer:
    """Of ZeRO-1 or 2, with or without round robin and alignment."""
    plain = list(range(len(tensors)))
    order = formulas.round_robin(len(tensors), dp) if draw(st.booleans()) else plain
    alignment = draw(st.sampled_from([1, 4, 8]))
    starts, used = flat.aligned_starts([sizes[i] for i in order], alignment)
    members = one_after_another([tensors[i] for i in order], starts)
    return FlatBuffer(members, formulas.whole_length(used, dp), dp, "whole", **common)


def one_after_another(tensors: list[list[Member]], starts: list[int]) -> tuple[Member, ...]:
    """The parameters of each tensor, from where it begins."""
    out: list[Member] = []
    for tensor, at in zip(tensors, starts, strict=True):
        for member in tensor:
            out.append(replace(member, start=at))
            at += member.size
    return tuple(out)


def oracle_local(spec: ParamSpec, place: dict[str, tuple[int, int]]) -> np.ndarray:
    """Numbers of the elements that one rank holds, as its memory stores them."""
    full = np.arange(int(np.prod(spec.shape))).reshape(spec.shape)
    for cut in spec.layout.cuts():
        size, index = place[cut.axis]
        if cut.runs:
            ranges = [np.arange(*run) for run in cut.runs[index]]
            full = full.take(np.concatenate(ranges), cut.dim)
        elif cut.parts:
            edges = np.cumsum(cut.parts)[:-1]
            parts = np.split(full, edges, cut.dim)
            full = np.concatenate([np.split(p, size, cut.dim)[index] for p in parts], cut.dim)
        else:
            full = np.split(full, size, cut.dim)[index]
    return full.transpose(spec.order) if spec.order else full


def oracle_slots(manifest: Manifest, state: str) -> dict[Slot, np.ndarray]:
    """What every slot must hold: param number * 2**32 + element number, -1 in padding."""
    out = {}
    numbers = {spec.name: i for i, spec in enumerate(sorted(manifest.params, key=lambda s: s.name))}
    for b, buffer in enumerate(manifest.buffers):
        for cut in manifest.cuts_of(buffer):
            place = {axis: (manifest.mesh.size(axis), index) for axis, index in cut}
            flats = [
                oracle_local(manifest.by_name[m.param], place).reshape(-1)
                + (numbers[m.param] << 32)
                for m in buffer.members
            ]
            parts = whole_parts(buffer, flats) if buffer.rule == "whole" else each(buffer, flats)
            for part, held in enumerate(parts):
                out[Slot(b, cut, part, state)] = held
    return out


def whole_parts(buffer: FlatBuffer, flats: list[np.ndarray]) -> list[np.ndarray]:
    """The buffer is filled, then cut."""
    whole = np.full(buffer.length, -1)
    for member, numbers in zip(buffer.members, flats, strict=True):
        whole[member.start : member.start + len(numbers)] = numbers
    return list(whole.reshape(buffer.partitions, -1))


def each(buffer: FlatBuffer, flats: list[np.ndarray]) -> list[np.ndarray]:
    """Every stored tensor is cut, then each part is filled with a piece of each."""
    tensors: list[list[np.ndarray]] = []
    for member, numbers in zip(buffer.members, flats, strict=True):
        if member.slice_of is None or member.slice_of[0] == 0:
            tensors.append([])
        tensors[-1].append(numbers)
    rows = [np.zeros((buffer.partitions, 0), dtype=np.int64)]
    for numbers in map(np.concatenate, tensors):
        width = -(-len(numbers) // buffer.partitions)
        padding = np.full(width * buffer.partitions - len(numbers), -1)
        rows.append(np.concatenate([numbers, padding]).reshape(buffer.partitions, width))
    return list(np.concatenate(rows, axis=1))


def all_wants(manifest: Manifest, state: str) -> list[tuple[Slot, str]]:
    return [
        (Slot(b, cut, part, state), state)
        for b, buffer in enumerate(manifest.buffers)
        for cut, part in product(manifest.cuts_of(buffer), range(buffer.partitions))
    ]
