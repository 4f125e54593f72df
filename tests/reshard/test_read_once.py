"""Which ranks hold the same, and how many bytes 64 of them read of files, on paper: each byte once,
whatever all of them hold."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.paper import paper_manifest
from megatron_ucp.core.flat import FlatBuffer, Member, alone
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import ITEMSIZE, VALUE, Keeper
from megatron_ucp.core.plan import Plan, Slot, Windows, make_plan
from megatron_ucp.families import families
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.reshard import read_once
from megatron_ucp.reshard.read_once import holders, is_read_once, shared_parts
from megatron_ucp.reshard.target import Conversion, target_manifest
from megatron_ucp.reshard.transfer import Proved, SinkPart
from tests.reshard import twins

RANKS = 64
ADAM = (("fp32", "float32"), ("exp_avg", "float32"), ("exp_avg_sq", "float32"))
SHAPES = {"embed": (5000, 64), **{f"layer.{n}.weight": (640, 200 + n) for n in range(6)}}
SHAPES |= {f"layer.{n}.norm": (200,) for n in range(6)}


def specs(frozen: bool) -> tuple[ParamSpec, ...]:
    kind = "frozen" if frozen else "trainable"
    out = [ParamSpec(name, shape, "bfloat16", kind) for name, shape in SHAPES.items()]
    return (*out, ParamSpec("lora", (4096, 16), "bfloat16")) if frozen else (*out,)


def zero_0(mesh: Mesh) -> Manifest:
    buffers = [alone(name, math.prod(shape), ADAM, 0, axes=()) for name, shape in SHAPES.items()]
    group = (ParamGroup({}),)
    return Manifest(Keeper.ZERO_0, mesh, specs(frozen=False), tuple(buffers), group)


def lora(mesh: Mesh) -> Manifest:
    """Frozen weights, and a few that ZeRO-1 divides."""
    base = [
        alone(name, math.prod(shape), ((VALUE, "bfloat16"),), axes=())
        for name, shape in SHAPES.items()
    ]
    trained = FlatBuffer((Member("lora", 0, 65536, 0),), 65536, mesh.dp, "whole", ADAM, axes=())
    groups = (ParamGroup({}),)
    return Manifest(Keeper.ZERO_1_OR_2, mesh, specs(frozen=True), (trained, *base), groups)


def released(mesh: Mesh) -> Manifest:
    """Weights alone, as a Hugging Face folder has them."""
    buffers = [
        alone(name, math.prod(shape), ((VALUE, "bfloat16"),), axes=())
        for name, shape in SHAPES.items()
    ]
    params = tuple(replace(spec, kind="frozen") for spec in specs(frozen=False))
    return Manifest(Keeper.WEIGHTS, mesh, params, tuple(buffers))


ZERO_0, ZERO_1 = Mesh(dp=RANKS, zero=0), Mesh(dp=RANKS, zero=1)
CASES: dict[str, tuple[Manifest, Manifest]] = {
    "ZeRO-0": (zero_0(Mesh()), zero_0(ZERO_0)),
    "ZeRO-1 with a frozen base": (lora(Mesh(zero=1)), lora(ZERO_1)),
    "import": (released(Mesh()), zero_0(ZERO_0)),
}


def wants_of(source: Manifest, target: Manifest, rank: int) -> list[Any]:
    slots = target.slots(target.parts_of(rank))
    if source.keeper == Keeper.WEIGHTS:
        return [(slot, VALUE) for slot in slots if slot.state == "fp32"]
    return [(slot, slot.state) for slot in slots]


def reads(source: Manifest, target: Manifest, rank: int, read: str | None) -> list[Plan]:
    """The plans that a rank executes."""
    part = SinkPart(target, tuple(wants_of(source, target, rank)))
    one = Proved(0, part, make_plan(source, target, part.wants), frozenset())
    shared = shared_parts([one], read, rank)
    once = {slot for each in shared for slot, _ in each.wants}
    plans = [one.only({slot for slot, _ in part.wants} - once).plan]
    planner = Windows(source, target)
    for each in shared:
        for number, ((slot, state), low, high) in enumerate(each.windows(target)):
            if each.reader(number) == rank:
                plans.append(planner.plan(slot, state, low, high))
    return plans


def ratio(source: Manifest, target: Manifest, read: str | None) -> float:
    """Bytes that all ranks read, over those that are different; all that is wanted is read."""
    seen: dict[Slot, Any] = {}
    all_bytes = 0
    for rank in range(target.mesh.world):
        for op in (op for plan in reads(source, target, rank, read) for op in plan.ops):
            slot, size = (
                op.source.slot,
                ITEMSIZE[source.buffers[op.source.slot.buffer].states[0][1]],
            )
            if slot not in seen:
                seen[slot] = np.zeros(source.buffers[slot.buffer].length, bool), size
            index = np.zeros(op.shape, np.int64)
            for dim, (n, stride) in enumerate(zip(op.shape, op.source.strides, strict=True)):
                index += stride * np.arange(n).reshape((-1,) + (1,) * (len(op.shape) - dim - 1))
            seen[slot][0][op.source.offset + index] = True
            all_bytes += op.box.numel * size
    assert all(marks.all() for marks, _ in seen.values())
    return all_bytes / sum(int(marks.sum()) * size for marks, size in seen.values())


@pytest.mark.parametrize("case", CASES)
def test_64_ranks_read_each_byte_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = CASES[case]
    monkeypatch.setattr(read_once, "WINDOW_BYTES", 50_000)
    assert ratio(source, target, None) <= 1.02  # 64 copies: the default
    assert ratio(source, target, "each") > 10


@pytest.mark.parametrize("case", CASES)
def test_readers_read_as_much(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = CASES[case]
    monkeypatch.setattr(read_once, "WINDOW_BYTES", 5_000)
    counts = [
        sum(op.box.numel for plan in reads(source, target, rank, "once") for op in plan.ops)
        for rank in range(RANKS)
    ]
    assert max(counts) < 1.5 * sum(counts) / RANKS


def test_who_reads_where_nobody_says() -> None:
    assert [is_read_once(None, n) for n in (1, 2, 8, 9, 64)] == [False, False, False, True, True]
    assert is_read_once("once", 2) and not is_read_once("once", 1)
    assert not is_read_once("each", 64)


MESHES = [
    ("llama", Mesh(tp=2, dp=4, zero=0)),
    ("llama", Mesh(tp=2, sp=2, dp=2, zero=0)),
    ("mixtral", Mesh(tp=2, ep=2, etp=1, dp=4, zero=0)),
    ("mixtral", Mesh(ep=2, etp=1, dp=4, zero=1)),
    ("llama", Mesh(tp=2, dp=4, zero=3)),
]


@pytest.mark.parametrize(("family", "mesh"), MESHES, ids=str)
def test_holders_hold_the_same_part(family: str, mesh: Mesh) -> None:
    """What ranks are said to share, each of them has: the same partition of the same buffer; and
    all say the same ranks."""
    sizes = twins.LLAMA if family == "llama" else twins.MIXTRAL
    paper = paper_manifest(families()[family], sizes)
    wanted = Target(mesh, dtype="bfloat16").completed({})
    target = target_manifest(Conversion(paper, wanted, "paper"))
    parts = [{*target.parts_of(rank)} for rank in range(mesh.world)]
    shared = 0
    for rank, own in enumerate(parts):
        for part in own:
            ranks = holders(mesh, target, part[0], rank)
            assert rank in ranks
            assert all(part in parts[other] for other in ranks)
            assert all(holders(mesh, target, part[0], other) == ranks for other in ranks)
            shared += len(ranks) > 1
            if mesh.zero == 0:
                assert len(ranks) > 1
    assert bool(shared) == (mesh.zero == 0)
