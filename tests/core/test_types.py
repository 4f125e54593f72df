"""The core types one by one: what they refuse when they are built, and oracles that are not
ours."""

import json
import os
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ucp import errors
from megatron_ucp.core import flat
from megatron_ucp.core.box import Box, flat_boxes, flat_index, whole
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.layout import (
    Extent,
    Partial,
    Piece,
    Replicate,
    Shard,
    ShardHy,
    ShardNC,
    layout_from_json,
    layout_to_json,
)
from megatron_ucp.core.manifest import FileEntry, Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.manifest_json import from_json, plain_name, to_json
from megatron_ucp.core.mesh import Coord, Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.core.rules import Rule, RuleSet
from megatron_ucp.formats.deepspeed import buffers
from megatron_ucp.formats.optimizers import check_known, kept_by, require_equal
from tests.core.strategies import meshes

shapes = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def points(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(a, b) for a, b in zip(box.start, box.stop, strict=True))))


@given(shapes, st.data())
def test_a_flat_range_is_few_boxes_with_the_same_points(shape, data):
    total = len(points(whole(shape)))
    low = data.draw(st.integers(0, total))
    high = data.draw(st.integers(low, total))
    boxes = flat_boxes(shape, low, high)
    flat = [flat_index(p, shape) for box in boxes for p in sorted(points(box))]
    assert flat == list(range(low, high))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.data())
def test_subtraction_leaves_disjoint_boxes(shape, data):
    def box() -> Box:
        start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        return Box(
            start,
            tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, shape, strict=True)),
        )

    a, b = box(), box()
    left = a.minus(b)
    assert sum(x.numel for x in left) == len(points(a) - points(b))
    assert {p for x in left for p in points(x)} == points(a) - points(b)


def stacked(*within: tuple[int, int] | None, rule: str = "each", starts=(0, 0, 0)) -> FlatBuffer:
    """Members of 3 elements each, as slices of a stored tensor."""
    members = [
        Member(f"e{i}", start, 3, slice_of=one)
        for i, (one, start) in enumerate(zip(within, starts, strict=False))
    ]
    return FlatBuffer(tuple(members), 9, 2, rule, ())


def test_slices_of_a_stored_tensor():
    """Two experts of 3 elements in one tensor, of which each of two partitions has 3; alone each
    expert would be cut in 2 and 1."""
    buffer = stacked((0, 6), (3, 6))
    owned = [[(f.member, f.low, f.high, f.offset) for f in buffer.fragments(p)] for p in (0, 1)]
    assert owned == [[(0, 0, 3, 0)], [(1, 0, 3, 0)]] and buffer.used() == 3


def test_what_is_no_box_piece_extent_or_buffer():
    for wrong in (
        lambda: Box((1,), (0,)),
        lambda: Box((-1,), (0,)),
        lambda: Box((0,), (1, 2)),
        lambda: Piece(Box((0,), (2,)), Box((0,), (3,)), (2,), (0,)),
        lambda: Piece(Box((0, 0), (2, 2)), Box((0,), (2,)), (2, 2), (0,)),
        lambda: Extent(5, 4),
        lambda: Extent(0, 4),
        lambda: flat_boxes((2, 2), 0, 5),
        lambda: FlatBuffer((Member("a", 0, 3), Member("b", 2, 3)), 6, 1, "whole", ()),
        lambda: FlatBuffer((Member("a", 0, 3),), 2, 1, "whole", ()),
        lambda: FlatBuffer((Member("a", 0, 3),), 3, 2, "whole", ()),
        lambda: FlatBuffer((Member("a", 0, 3),), 4, 2, "third", ()),
        lambda: FlatBuffer((Member("a", 0, 3),), 4, 0, "each", ()),
    ):
        with pytest.raises(ValueError):
            wrong()


def test_what_are_no_slices():
    for wrong in (
        lambda: stacked((0, 6), rule="whole"),
        lambda: stacked((0, 5)),
        lambda: stacked((1, 6)),
        lambda: stacked((0, 9)),
        lambda: stacked((3, 6), (0, 6)),
        lambda: stacked((0, 6), (2, 6)),
        lambda: stacked((0, 6), (3, 7)),
        lambda: stacked((0, 6), (3, 6), (0, 3)),
        lambda: stacked((0, 6), (3, 6), starts=(0, 3)),
        lambda: stacked((0, 6), None),
    ):
        with pytest.raises(ValueError, match=r"slice|overlap"):
            wrong()


@pytest.mark.parametrize(
    ("layout", "shape", "size", "word"),
    [
        (Shard("tp", 0), (6, 2), 4, "can't be cut"),
        (Shard("tp", 2), (4, 4), 2, "does not have"),
        (ShardNC("tp", 0, (4, 4)), (9, 2), 2, "add up"),
        (ShardNC("tp", 0, (4, 6), 2), (10, 2), 2, "can't be cut"),
    ],
)
def test_a_layout_that_does_not_fit(layout, shape, size, word):
    with pytest.raises(errors.LayoutError, match=word) as error:
        layout.pieces("some.weight", shape, {"tp": (size, 0)})
    assert error.value.parameter == "some.weight"


def test_gate_and_up_lie_apart_in_the_logical_tensor():
    pieces = ShardNC("tp", 0, (4, 4)).pieces("fc1", (8, 3), {"tp": (2, 1)})
    assert [(p.local.start, p.full.start, p.full.shape) for p in pieces] == [
        ((0, 0), (2, 0), (2, 3)),
        ((2, 0), (6, 0), (2, 3)),
    ]


@pytest.mark.parametrize(
    "layout",
    [
        Replicate(),
        Partial("tp"),
        Shard("tp", 1),
        ShardHy((("tp", 0), ("etp", 1))),
        ShardNC("tp", 0, (4, 8), 2),
    ],
)
def test_layouts_as_json(layout):
    assert layout_from_json(json.loads(json.dumps(layout_to_json(layout)))) == layout


@pytest.mark.parametrize(
    "data", [[], ["Sharded", "tp", 0], ["Shard"], "Shard", None, ["Shard", "tp", 0, 1, 2]]
)
def test_what_is_no_layout(data):
    with pytest.raises(errors.LayoutError, match="no layout"):
        layout_from_json(data)


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(tp=2, pp=2, dp=2),
        Mesh(tp=2, pp=2, dp=2, order="pp-dp"),
        Mesh(tp=2, dp=4, ep=2),
        Mesh(tp=2, pp=2, dp=4, ep=4, etp=1),
        Mesh(tp=2, pp=2, dp=4, ep=2, etp=2, order="pp-dp"),
        Mesh(tp=2, cp=2, dp=2, pp=2),
    ],
)
def test_groups_equal_those_of_megatron(mesh):
    """Oracle: megatron-core's RankGenerator, which makes its process groups."""
    from megatron.core.parallel_state import RankGenerator

    order = "tp-cp-ep-dp-pp" if mesh.order == "dp-pp" else "tp-cp-ep-pp-dp"
    dense = RankGenerator(tp=mesh.tp, ep=1, dp=mesh.dp, pp=mesh.pp, cp=mesh.cp, order=order)
    expert = RankGenerator(
        tp=mesh.etp, ep=mesh.ep, dp=mesh.expert_partitions, pp=mesh.pp, cp=1, order=order
    )
    ranks = range(mesh.world)
    assert sorted({mesh.partition_group(r) for r in ranks}) == sorted(
        tuple(sorted(g)) for g in dense.get_ranks("dp-cp")
    )
    assert sorted({mesh.expert_data_group(r) for r in ranks}) == sorted(
        tuple(sorted(g)) for g in expert.get_ranks("dp")
    )
    for axis in ("tp", "pp"):
        found = {
            tuple(
                r
                for r in ranks
                if replace(mesh.coord(r), **{axis: 0}) == replace(mesh.coord(s), **{axis: 0})
            )
            for s in ranks
        }
        assert found == {tuple(sorted(g)) for g in dense.get_ranks(axis)}


@given(st.sampled_from(["dp-pp", "pp-dp"]), *[st.integers(1, 3)] * 4)
def test_ranks_and_coordinates_are_one_to_one(order, tp, pp, cp, dp):
    mesh = Mesh(tp=tp, pp=pp, cp=cp, dp=dp, order=order)
    assert [mesh.rank(mesh.coord(r)) for r in range(mesh.world)] == list(range(mesh.world))
    assert len({mesh.coord(r) for r in range(mesh.world)}) == mesh.world
    assert mesh.coord(0) == Coord()


def test_meshes_as_text():
    assert Mesh.parse("tp=2,pp=1,ep=1,dp=4,zero=1") == Mesh(tp=2, dp=4, zero=1)
    assert Mesh.parse(str(Mesh(tp=2, cp=2, dp=3, zero=3, order="pp-dp"))) == Mesh(
        tp=2, cp=2, dp=3, zero=3, order="pp-dp"
    )
    for wrong in (
        "tp",
        "tp=x",
        "tp=0",
        "tq=2",
        "tp=2,tp=2",
        "zero=4",
        "tp=-1",
        "order=xy",
        "ep=3,dp=2",
    ):
        with pytest.raises(errors.UsageError):
            Mesh.parse(wrong)
    with pytest.raises(errors.UsageError, match="no such rank"):
        Mesh(dp=2).coord(2)


def test_rules_match_in_full_and_exactly_once():
    rules = RuleSet(
        "model.toml",
        (Rule(r"layers\.\d+\.fc1\.weight", Shard("tp", 0)), Rule(r".*\.bias", Replicate())),
    )
    assert rules.find("layers.10.fc1.weight").layout == Shard("tp", 0)
    with pytest.raises(errors.RuleError, match="no rule") as error:
        rules.find("layers.10.fc1.weights")
    assert error.value.file == "model.toml" and r"layers\.\d+\.fc1\.weight" in str(
        error.value.found
    )
    doubled = RuleSet("model.toml", (*rules.rules, Rule(r"layers\.1\..*", Replicate())))
    with pytest.raises(errors.RuleError, match="two rules"):
        doubled.find("layers.1.fc1.weight")


def test_states_are_known_by_optimizer_and_key():
    assert kept_by("torch.AdamW", {"amsgrad": True}).element == (
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
    )
    assert (
        kept_by("torch.SGD", {"momentum": 0}).element == ()
        and kept_by("torch.SGD", {"momentum": 0}).scalar == ()
    )
    with pytest.raises(errors.UnsupportedError, match="not known"):
        kept_by("apex.FusedNovoGrad", {})
    for key, why in (
        ("state1", "8-bit"),
        ("worker_error", "error feedback"),
        ("exp_avg_sq_row", "factored"),
        ("x", "not known"),
    ):
        with pytest.raises(errors.UnsupportedError, match="can't be cut") as error:
            check_known(["exp_avg", key], "f.pt")
        assert why in str(error.value.found)
    with pytest.raises(errors.StateMismatchError, match="other states"):
        require_equal(("exp_avg",), ("exp_avg", "sum"), "w", "f")


def test_zero_formulas_give_the_sizes_seen_on_real_files():
    """Figures measured on DeepSpeed 0.19.8 with two ranks."""
    assert [buffers.whole_length(u, 2) for u in (161, 13, 1, 171, 23)] == [164, 16, 4, 172, 24]
    assert flat.aligned_starts((91, 35, 35), buffers.parameter_alignment(2)) == ([0, 96, 136], 171)
    assert flat.aligned_starts((1, 5, 7), buffers.parameter_alignment(2)) == ([0, 8, 16], 23)
    assert buffers.sub_groups((91, 35, 35), 2, 30) == [[0], [1, 2]] and buffers.sub_groups(
        (1, 5, 7), 2, 30
    ) == [[0, 1, 2]]
    assert buffers.round_robin(5, 2) == [0, 2, 4, 1, 3]


def manifest() -> Manifest:
    spec = ParamSpec("w", (4, 2), "bfloat16", "trainable", Shard("tp", 0))
    return Manifest(
        Keeper.ZERO_1_OR_2,
        Mesh(tp=2, dp=2, zero=1),
        (spec,),
        (
            FlatBuffer(
                (Member("w", 0, 4, 0, {"step": 3.0}),), 4, 2, "whole", (("fp32", "float32"),)
            ),
        ),
        (ParamGroup({"lr": 1.0}),),
        files=(FileEntry("a.pt", 3, "00"),),
    )


def test_the_slots_of_a_rank_and_their_bytes():
    one = manifest()
    slots = list(one.slots(one.parts_of(0)))
    assert [(slot.buffer, slot.state) for slot in slots] == [
        (number, state)
        for number, _, _ in one.parts_of(0)
        for state, _ in one.buffers[number].states
    ]
    for slot in slots:
        buffer = one.buffers[slot.buffer]
        size = {"float32": 4, "bfloat16": 2}[buffer.dtype_of(slot.state)]
        assert one.bytes_of(slot) == buffer.partition_elems * size > 0


def test_a_manifest_that_contradicts_itself():
    good = manifest()
    assert from_json(to_json(good), "f") == good
    for wrong in ({"params": good.params * 2}, {"params": ()}):
        with pytest.raises(ValueError):
            replace(good, **wrong)


HOSTILE = {
    "path": lambda d: d["files"].append(["../../etc/passwd", 1, ""]),
    "absolute": lambda d: d["files"].append(["/x.pt", 1, ""]),
    "hidden": lambda d: d["files"].append([".x", 1, ""]),
    "negative size": lambda d: d["files"].append(["x.pt", -1, ""]),
    "float size": lambda d: d["files"].append(["x.pt", 1.5, ""]),
    "bool size": lambda d: d["files"].append(["x.pt", True, ""]),
    "unknown layout": lambda d: d["params"][0].__setitem__(4, ["Evil"]),
    "kind": lambda d: d["params"][0].__setitem__(3, "x"),
    "shape": lambda d: d["params"][0].__setitem__(1, [-4, 2]),
    "group": lambda d: d["buffers"][0].update(group=7),
    "partitions": lambda d: d["buffers"][0].update(partitions=0),
    "rule": lambda d: d["buffers"][0].update(rule="other"),
    "slice": lambda d: d["buffers"][0].update(slice_of=[[0, 9]], rule="each"),
    "negative slice": lambda d: d["buffers"][0].update(slice_of=[[-4, 4]], rule="each"),
    "no slice": lambda d: d["buffers"][0].update(slice_of=["ab"], rule="each"),
    "slice and whole": lambda d: d["buffers"][0].update(slice_of=[[0, 4]]),
    "unknown key": lambda d: d.update(surprise=1),
    "missing key": lambda d: d.pop("mesh"),
    "mesh": lambda d: d["mesh"].update(tp=0),
    "overlap": lambda d: d["buffers"][0]["members"].append(["w", 0, 4]),
    "scalars": lambda d: d["buffers"][0].update(scalars=[{}, {}]),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_manifest_is_a_named_error(case):
    data = json.loads(to_json(manifest()))
    HOSTILE[case](data)
    with pytest.raises((errors.DamagedFileError, errors.LayoutError, errors.UsageError)):
        from_json(json.dumps(data), "ucp_manifest.json")


@pytest.mark.parametrize(
    "text",
    ["", "null", "[" * 100_000, "{}", '{"format": "megatron_ucp"}', "\x00", '{"version": 1}'],
)
def test_what_is_no_manifest(text):
    with pytest.raises(errors.DamagedFileError):
        from_json(text, "ucp_manifest.json")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "a\\b", "-a\n", "a\x00b", os.sep, "ä.pt", 7, None]
)
def test_names_that_are_not_plain(name):
    with pytest.raises(ValueError):
        plain_name(name)


@settings(deadline=None)
@given(st.sampled_from(["dp-pp", "pp-dp"]), *[st.integers(1, 3)] * 5)
def test_the_rank_of_a_partition_is_the_one_in_its_group(order, tp, pp, cp, sp, dp):
    mesh = Mesh(tp=tp, pp=pp, cp=cp, sp=sp, dp=dp, order=order)
    for rank in range(mesh.world):
        group, at = mesh.partition_group(rank), mesh.coord(rank)
        place = (("tp", at.tp), ("pp", at.pp))
        assert [mesh.rank_of(place, part) for part in range(mesh.partitions)] == list(group)
        assert mesh.partition_of(rank) == group.index(rank)
        if order == "pp-dp" and cp * sp > 1:
            continue  # there experts and all else would have other stages: no such mesh is built
        copies = mesh.expert_data_group(rank)
        ep, etp = mesh.expert_place(rank)
        place = (("pp", at.pp), ("ep", ep), ("etp", etp))
        assert [mesh.rank_of(place, part) for part in range(len(copies))] == list(copies)


@settings(deadline=None)
@given(meshes())
def test_a_ranks_index_is_its_place_among_the_partition_ranks(mesh: Mesh) -> None:
    for rank, axes in product(range(mesh.world), (("tp",), ("pp", "tp"), ("ep", "etp"))):
        assert mesh.partition_index(rank, axes) == mesh.partition_ranks(rank, axes).index(rank)
