"""Which ranks keep what of a step, so that machines may be lost."""

import random

import pytest

from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.layout import Replicate
from megatron_ucp.core.manifest import BufferPart, Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.reshard.memory_layout import CopiedLayout, copied

PARTS, ELEMS = 12, 96


def manifest() -> Manifest:
    """A buffer that is cut into parts."""
    member = Member("w", 0, PARTS * ELEMS, group=0)
    states = (("fp32", "float32"), ("exp_avg", "float32"))
    buffer = FlatBuffer((member,), PARTS * ELEMS, PARTS, "whole", states)
    spec = ParamSpec("w", (PARTS * ELEMS,), "float32", "trainable", Replicate())
    mesh = Mesh(dp=PARTS, zero=1)
    return Manifest(Keeper.ZERO_1_OR_2, mesh, (spec,), (buffer,), (ParamGroup({}),))


def parts() -> list[BufferPart]:
    return [(0, (), number) for number in range(PARTS)]


def machines_of(layout: CopiedLayout, nodes: list[str]) -> dict[BufferPart, set[str]]:
    """The machines that keep each part."""
    found: dict[BufferPart, set[str]] = {}
    for rank, node in enumerate(nodes):
        for part in layout.kept_by(rank):
            found.setdefault(part, set()).add(node)
    return found


def drawn(seed: int) -> tuple[list[str], list[list[BufferPart]], int]:
    """Machines of ranks, what each has, and how many copies are wanted."""
    dice = random.Random(seed)
    nodes = sorted(dice.choice("abcd") for _ in range(dice.randint(1, 8)))
    here: list[list[BufferPart]] = [[] for _ in nodes]
    for part in parts():
        for rank in dice.sample(range(len(nodes)), dice.randint(1, len(nodes))):
            here[rank].append(part)
    return nodes, here, dice.randint(0, 3)


@pytest.mark.parametrize("seed", range(40))
def test_each_part_is_on_so_many_machines(seed: int) -> None:
    nodes, here, copies = drawn(seed)
    layout = copied(manifest(), here, nodes, copies)
    found = machines_of(layout, nodes)
    assert found.keys() == {*parts()}
    assert {len(where) for where in found.values()} == {min(copies + 1, len({*nodes}))}
    kept = [(part, nodes[rank]) for rank in range(len(nodes)) for part in layout.kept_by(rank)]
    assert len(kept) == len({*kept}), "once on a machine"


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_sent_to_a_machine_that_has_it(seed: int) -> None:
    nodes, here, copies = drawn(seed)
    layout = copied(manifest(), here, nodes, copies)
    for rank, own in enumerate(layout.own):
        assert {*own} <= {*here[rank]}, "a rank's own parts are those that it has"
    for part, giver, taker in layout.sent:
        assert part in layout.own[giver] and nodes[giver] != nodes[taker]
        having = {nodes[rank] for rank, own in enumerate(here) if part in own}
        assert nodes[taker] not in having


def test_the_next_machine_in_order_keeps_the_copy() -> None:
    nodes = [*"aabbcc"]
    here = [[part for part in parts() if part[2] % 6 == rank] for rank in range(6)]
    layout = copied(manifest(), here, nodes, 1)
    following = {"a": "b", "b": "c", "c": "a"}
    assert {(nodes[giver], nodes[taker]) for _, giver, taker in layout.sent} == {*following.items()}
    assert [len(layout.kept_by(rank)) for rank in range(6)] == [4] * 6, "evenly"
