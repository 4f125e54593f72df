"""States of which a partition keeps whole members: plans from and to them, against an arrangement
that is written down element by element."""

import random
from dataclasses import replace

import pytest

from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.manifest_json import from_json, to_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import MASTER, Keeper
from megatron_ucp.core.plan import Fill, Slot, Windows, make_plan
from megatron_ucp.core.proof import prove
from megatron_ucp.errors import PlanError

STATE = "momentum"
Element = tuple[str, int] | None  # a parameter and the number of an element; None: padding


def random_manifest(dice: random.Random, sizes: dict[str, int]) -> Manifest:
    """One buffer, with gaps behind some members, whose momentum is cut or not."""
    members, at = list[Member](), 0
    for name, size in sizes.items():
        members.append(Member(name, at, size))
        at += size + dice.choice([0, 0, 1, 3])
    parts = dice.randint(1, 5)
    length = -(-at // (2 * parts)) * 2 * parts
    states = ((MASTER, "float32"), (STATE, "float32"))
    uncut = (STATE,) if dice.random() < 0.7 else ()
    buffer = FlatBuffer(tuple(members), length, parts, "whole", states, uncut=uncut)
    specs = tuple(ParamSpec(name, (size,), "float32") for name, size in sizes.items())
    return Manifest(Keeper.ZERO_1_OR_2, Mesh(dp=parts, zero=1), specs, (replace(buffer),))


def arranged(manifest: Manifest, part: int, state: str) -> list[Element]:
    """What a partition stores, element by element, from the words of the definition."""
    (buffer,) = manifest.buffers
    whole: list[Element] = [None] * buffer.length
    for member in buffer.members:
        for index in range(member.size):
            whole[member.start + index] = member.param, index
    size = buffer.length // buffer.partitions
    mine = whole[part * size : (part + 1) * size]
    if state not in buffer.uncut:
        return mine
    touched = dict.fromkeys(element[0] for element in mine if element is not None)
    sizes = {member.param: member.size for member in buffer.members}
    return [(name, index) for name in touched for index in range(sizes[name])]


def filled(source: Manifest, target: Manifest, slot: Slot) -> list[Element]:
    """What a plan puts into a slot."""
    plan = make_plan(source, target, [(slot, slot.state)])
    prove(plan, source, target)
    return carried(source, plan, target.buffers[0].of(slot.state).elems(slot.part))


def carried(source: Manifest, plan: object, elems: int) -> list[Element]:
    out: list[Element] = [("nothing", -1)] * elems
    for op in plan.ops:  # type: ignore[attr-defined]
        have = arranged(source, op.source.slot.part, op.source.slot.state)
        ((count,), (ours,), (theirs,)) = op.shape, op.source.strides, op.target.strides
        for index in range(count):
            out[op.target.offset + index * theirs] = have[op.source.offset + index * ours]
    for fill in plan.fills:  # type: ignore[attr-defined]
        out[fill.start : fill.stop] = [None] * (fill.stop - fill.start)
    return out


@pytest.mark.parametrize("seed", range(40))
def test_every_element_comes_from_its_own_place(seed: int) -> None:
    dice = random.Random(seed)
    sizes = {f"p{number}": dice.randint(1, 9) for number in range(dice.randint(1, 6))}
    source, target = random_manifest(dice, sizes), random_manifest(dice, sizes)
    for part in range(target.buffers[0].partitions):
        for state in (MASTER, STATE):
            slot = Slot(0, target.cuts_of(target.buffers[0])[0], part, state)
            want = arranged(target, part, state)
            assert filled(source, target, slot) == want
            assert target.buffers[0].of(state).elems(part) == len(want)
            low, high = sorted(dice.randint(0, len(want)) for _ in range(2))
            window = Windows(source, target).plan(slot, state, low, high)
            assert carried(source, window, high - low) == want[low:high]


def split() -> tuple[Manifest, Manifest]:
    """Two partitions that share the second of three members, and one partition."""
    sizes = {"a": 3, "b": 4, "c": 3}
    states = ((MASTER, "float32"), (STATE, "float32"))
    members = (Member("a", 0, 3), Member("b", 3, 4), Member("c", 7, 3))
    specs = tuple(ParamSpec(name, (size,), "float32") for name, size in sizes.items())
    two = FlatBuffer(members, 12, 2, "whole", states, uncut=(STATE,))
    one = FlatBuffer(members, 10, 1, "whole", states)
    return (
        Manifest(Keeper.ZERO_1_OR_2, Mesh(dp=2, zero=1), specs, (two,)),
        Manifest(Keeper.ZERO_1_OR_2, Mesh(zero=1), specs, (one,)),
    )


def test_a_split_member_is_in_both_partitions_and_read_from_one() -> None:
    source, target = split()
    lies = source.buffers[0].of(STATE)
    assert [lies.elems(part) for part in (0, 1)] == [7, 7]
    assert list(lies.copies(source.buffers[0].members[1])) == [0, 1]
    cut = target.cuts_of(target.buffers[0])[0]
    plan = make_plan(source, target, [(Slot(0, cut, 0, STATE), STATE)])
    assert sorted((op.source.slot.part, op.box.numel) for op in plan.ops) == [
        (0, 3),
        (0, 4),
        (1, 3),
    ]


def test_a_plan_of_one_state_says_nothing_of_an_uncut_one() -> None:
    """The momentum read from where the masters lie is no plan: the proof, which looks at every
    state, sees it."""
    source, target = split()
    cut = source.cuts_of(source.buffers[0])[0]
    wants = [(Slot(0, cut, 0, state), state) for state in (MASTER, STATE)]
    plan = make_plan(target, source, wants)
    prove(plan, target, source)
    masters = [op for op in plan.ops if op.target.slot.state == MASTER]
    moved = [replace(op, target=replace(op.target, slot=wants[1][0])) for op in masters]
    wrong = replace(plan, ops=(*masters, *moved), fills=tuple[Fill, ...]())
    with pytest.raises(PlanError):
        prove(wrong, target, source)


def test_a_manifest_keeps_it() -> None:
    source, _ = split()
    assert from_json(to_json(source), "file") == source
    assert '"uncut"' in to_json(source) and '"uncut"' not in to_json(split()[1])


def test_what_is_no_buffer() -> None:
    with pytest.raises(ValueError, match="uncut states"):
        FlatBuffer((), 2, 1, "each", (), uncut=(STATE,))
