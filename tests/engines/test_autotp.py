"""DeepSpeed's AutoTP: models of transformers resume at any tensor-parallel size, bit by bit, and
without a family; their files are read by everything that reads files."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import kinds
from tests.engines.autotp_jobs import CHANGED, OF_MUON, PLANTS, Auto
from tests.engines.kinds import oracle_of
from tests.engines.sources import Sources, check, check_fails, without_manifest
from tests.share import LOSS_STEPS

pytestmark = pytest.mark.ranks
# Ranks of the job, and the mesh: copies are ranks / tp. At tp=4 the last rank of "llama" has no
# attention, which DeepSpeed does not train at ZeRO-3.
Mesh = tuple[int, int, int]
SOURCES: dict[str, list[Mesh]] = {
    "llama": [(2, 2, 1), (1, 1, 3), (4, 4, 0)],
    "gpt2": [(2, 2, 3), (1, 1, 1)],
    "phi3": [(2, 2, 2)],
}
PAIRS: list[tuple[str, Mesh, Mesh]] = [
    ("llama", (2, 2, 1), (1, 1, 0)),
    ("llama", (2, 2, 1), (4, 2, 2)),
    ("llama", (2, 2, 1), (2, 2, 3)),
    ("llama", (2, 2, 1), (4, 4, 1)),
    ("llama", (1, 1, 3), (4, 2, 1)),
    ("llama", (1, 1, 3), (2, 2, 0)),
    ("llama", (4, 4, 0), (2, 1, 3)),
    ("llama", (4, 4, 0), (2, 2, 2)),
    ("gpt2", (2, 2, 3), (4, 4, 0)),
    ("gpt2", (2, 2, 3), (1, 1, 1)),
    ("gpt2", (2, 2, 3), (2, 2, 2)),
    ("gpt2", (1, 1, 1), (2, 2, 3)),
    ("gpt2", (1, 1, 1), (4, 4, 2)),
    ("phi3", (2, 2, 2), (4, 4, 3)),
    ("phi3", (2, 2, 2), (1, 1, 0)),
]


def saved(sources: Sources, kind: str, mesh: Mesh, **options: Any) -> str:
    ranks, tp, zero = mesh
    return sources.get(ranks, Auto(kind, tp, zero), **options)


def show(value: object) -> str:
    return "{}t{}z{}".format(*value) if isinstance(value, tuple) else str(value)


def test_the_pairs_are_what_they_say() -> None:
    assert {mesh[1] for _, *meshes in PAIRS for mesh in meshes} == {1, 2, 4}
    assert {mesh[2] for _, *meshes in PAIRS for mesh in meshes} == {0, 1, 2, 3}
    assert all(source in SOURCES[kind] for kind, source, _ in PAIRS)


@pytest.mark.parametrize(("kind", "source", "target"), PAIRS, ids=show)
@pytest.mark.cases(9)
def test_pair(sources: Sources, kind: str, source: Mesh, target: Mesh) -> None:
    folder, (ranks, tp, zero) = saved(sources, kind, source), target
    setup = Auto(kind, tp, zero, seed=9)
    losses = ranks <= 2
    more = LOSS_STEPS if losses else 0
    check(sources.resume(ranks, setup, folder, more=more), 1e-5 if more else None)


Run = tuple[int, Auto]  # ranks, and what they hold


def resume(sources: Sources, source: Run, target: Run, **options: Any) -> list[dict]:
    (ranks, setup), (target_ranks, other) = source, target
    as_in_pairs = setup.dtype == "fp32" and not setup.muon  # where losses are compared
    folder = sources.get(ranks, setup, **({} if as_in_pairs else {"more": 0}))
    return sources.resume(target_ranks, replace(other, seed=9), folder, **options)


def low(kind: str, tp: int, zero: int, **options: Any) -> Auto:
    return Auto(kind, tp, zero, "bf16", **options)


def of16(kind: str, tp: int, zero: int, **options: Any) -> Auto:
    return Auto(kind, tp, zero, "fp16", **options)


OTHERS: dict[str, tuple[Run, Run]] = {
    "bf16, 2 to 1": ((2, low("llama", 2, 1)), (1, low("llama", 1, 3))),
    "bf16, 2 to 4": ((2, low("llama", 2, 1)), (4, low("llama", 4, 0))),
    "bf16, 2 to 2": ((2, low("llama", 2, 1)), (4, low("llama", 2, 3))),
    "bf16, 1 to 2": ((1, low("gpt2", 1, 3)), (4, low("gpt2", 2, 2))),
    "bf16, to fp32 sums": ((1, low("gpt2", 1, 3)), (2, low("gpt2", 2, 1, fp32_sums=True))),
    "offload, 2 to 1": (
        (2, low("llama", 2, 2, offload=True)),
        (2, low("llama", 1, 3, offload=True)),
    ),
    "offload, 2 to 4": (
        (2, low("llama", 2, 2, offload=True)),
        (4, low("llama", 4, 1, offload=True)),
    ),
    "bf16 onto offload": ((2, low("llama", 2, 1)), (4, low("llama", 2, 3, offload=True))),
    "offload, off": ((2, low("llama", 2, 2, offload=True)), (1, low("llama", 1, 0))),
    "fp16, 2 to 1": ((2, of16("llama", 2, 2)), (1, of16("llama", 1, 3))),
    "fp16, 2 to 4": ((2, of16("llama", 2, 3)), (4, of16("llama", 4, 0))),
    "fp16, 1 to 2": ((1, of16("gpt2", 1, 0)), (4, of16("gpt2", 2, 1))),
    "fp16, offload": ((2, of16("llama", 2, 2)), (4, of16("llama", 2, 3, offload=True))),
    "fp32 onto offload": ((1, Auto("gpt2", 1, 1)), (2, Auto("gpt2", 2, 2, offload=True))),
}


@pytest.mark.parametrize("pair", OTHERS)
def test_half_precision_and_optimizers_in_the_memory_of_the_cpu(
    sources: Sources, pair: str
) -> None:
    check(resume(sources, *OTHERS[pair]))


def muon(tp: int, zero: int, **options: Any) -> Auto:
    return Auto("llama", tp, zero, muon=True, **options)


MUON: dict[str, tuple[Run, Run]] = {
    "2 to 1, ZeRO-1 to ZeRO-2": ((4, muon(2, 1)), (2, muon(1, 2))),
    "2 to 1, ZeRO-1 to ZeRO-0": ((4, muon(2, 1)), (1, muon(1, 0))),
    "1 to 2, ZeRO-3 to ZeRO-1": ((2, muon(1, 3)), (4, muon(2, 1))),
    "1 to 2, ZeRO-3 to ZeRO-3": ((2, muon(1, 3)), (2, muon(2, 3))),
    "2 to 2, ZeRO-1 to ZeRO-2": ((4, muon(2, 1)), (2, muon(2, 2, offload=True))),
    "2 to 4, fp16": ((2, muon(2, 3, dtype="fp16")), (4, muon(4, 1, dtype="fp16"))),
    "4 to 2, fp16": ((4, muon(4, 0, dtype="fp16")), (4, muon(2, 2, dtype="fp16", offload=True))),
    "2 to 1, bf16": ((2, muon(2, 2, dtype="bf16")), (2, muon(1, 1, dtype="bf16"))),
}


@pytest.mark.parametrize("pair", MUON)
def test_muon(sources: Sources, pair: str) -> None:
    """States are bit-equal; where shares are others, so are the next steps, and the report says
    that."""
    source, target = MUON[pair]
    found = resume(sources, source, target)
    check(found)
    for rank in found:
        said = any("orthogonalizes" in note for note in rank["notes"]["filled"])
        assert said == (source[1].tp != target[1].tp)
        assert any("momentum_buffer" in line for line in rank["before"]["filled"])


GROUPS = [
    ((2, Auto("llama", 2, 1)), (2, Auto("llama", 1, 2, groups="halved"))),
    ((2, Auto("llama", 2, 3, groups="alike")), (4, Auto("llama", 4, 1, groups="joined"))),
    ((4, muon(2, 2, groups="halved")), (4, muon(4, 2))),
    ((1, muon(1, 0, groups="alike")), (4, muon(2, 3, groups="joined"))),
]


@pytest.mark.parametrize(("source", "target"), GROUPS)
def test_groups_split_or_joined(sources: Sources, source: Run, target: Run) -> None:
    check(resume(sources, source, target))


STOCK = {"muon": MUON["2 to 1, ZeRO-1 to ZeRO-2"], "offload": OTHERS["offload, 2 to 4"]}


@pytest.mark.parametrize("pair", STOCK)
def test_files_of_stock_deepspeed(sources: Sources, tmp_path: Path, pair: str) -> None:
    """Without a manifest."""
    (ranks, setup), (target_ranks, target) = STOCK[pair]
    folder = sources.get(ranks, setup, more=0)
    stock = without_manifest(Path(shutil.copytree(folder, tmp_path / "stock")))
    check(sources.resume(target_ranks, replace(target, seed=9), stock))


FAULTS = [(fault, fault in OF_MUON) for fault in PLANTS]


@pytest.mark.parametrize(("fault", "of_muon"), FAULTS)
def test_a_planted_fault_is_seen(sources: Sources, fault: str, of_muon: bool) -> None:
    """Negative control of every pair: what the comparison must not let pass."""
    source = MUON["2 to 1, ZeRO-1 to ZeRO-2"][0] if of_muon else (2, Auto("llama", 2, 1))
    target = (2, Auto("llama", 2, 0, muon=of_muon))
    check_fails(resume(sources, source, target, plant=fault, tags=("filled",)))


def same(one: Any, other: Any) -> bool:
    """Of which the second may be missing."""
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return torch.equal(one, other) if tensors else bool(other is not None and one == other)


def others(want: dict[str, Any], have: dict[str, Any], but: str) -> list[Any]:
    """Where two states differ, apart from one parameter."""
    return [
        (part, key)
        for part in ("full", "scalars", "hyper", "weights")
        for key, value in want[part].items()
        if but not in (key, key[0]) and not same(value, have[part].get(key))
    ]


def go_on(sources: Sources, source: Mesh, target: Mesh, change: str, fault: str = "") -> list[Any]:
    """Keys of what the run had, of which an engine that trains other parameters has something
    else after a load; the parameter that changed is looked at by itself."""
    folder, (ranks, tp, zero) = saved(sources, "llama", source), target
    want = oracle_of(folder)["states"]["filled"]
    setup = Auto("llama", tp, zero, seed=5, change=change)
    found = sources.ranks.run(
        ranks, kinds.around_load, setup, folder, fault=fault, allow={setup.change}
    )[0]
    name, before, after = CHANGED[change], found["before"], found["after"]
    assert torch.equal(want["weights"][name], after["weights"][name])
    assert not torch.equal(want["weights"][name], before["weights"][name])
    own = [{key[1] for key in found[w]["full"] if key[0] == name} for w in ("after", "stepped")]
    adam = {"fp32", "exp_avg", "exp_avg_sq"}
    assert own == ([set(), set()] if change == "freeze" else [{"fp32"}, adam])
    assert any(name in note for note in found["notes"])

    assert len(others(want, before, name)) > 100
    return others(want, after, name)


CHANGES: list[tuple[Mesh, Mesh, str]] = [
    ((2, 2, 1), (4, 2, 2), "unfreeze"),
    ((4, 4, 0), (2, 2, 1), "unfreeze"),
    ((2, 2, 1), (2, 2, 3), "freeze"),
    ((1, 1, 3), (4, 4, 1), "freeze"),
]


@pytest.mark.parametrize(("source", "target", "change"), CHANGES, ids=show)
def test_other_trainable_parameters(
    sources: Sources, source: Mesh, target: Mesh, change: str
) -> None:
    """A share of heads of different sizes is frozen no more; one of an MLP is frozen."""
    assert go_on(sources, source, target, change) == []


def test_a_planted_fault_beside_other_trainable_parameters_is_seen(sources: Sources) -> None:
    assert go_on(sources, (2, 2, 1), (2, 2, 0), "freeze", "a moment")
