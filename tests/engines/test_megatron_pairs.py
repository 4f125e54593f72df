"""megatron-core's own files on one mesh into its stack on another, and into DeepSpeed: every
master, moment, step and hyper-parameter, bit by bit. Stock's own writer saves."""

from typing import Any

import pytest

from megatron_ucp.core.mesh import Mesh
from tests.engines.cross_jobs import Zero
from tests.engines.megatron_jobs import Mcore
from tests.engines.sources import Sources, check
from tests.share import LOSS_STEPS

BUCKETS: dict[str, Any] = {"overlap": True, "gather": True, "bucket": 2000}
MOE: dict[str, Any] = {"family": "mixtral", "layers": 2}
CONSTANT: dict[str, Any] = {"style": "constant"}

# name -> (ranks, setup); with one bucket, as stock's usual kind loses elements of several
SOURCES = {
    "dp2": (2, Mcore()),
    "tp2dp2": (4, Mcore(tp=2)),
    "pp2vpp2dp2": (4, Mcore(pp=2, vpp=2)),
    "plain": (2, Mcore(distributed=False)),
    "bf16": (4, Mcore(tp=2, dtype="bf16")),
    "tied": (4, Mcore("gpt", tied=True, pp=2, vpp=2, tp=2)),
    "ep2": (4, Mcore(ep=2, **MOE)),
    "buckets": (4, Mcore(**BUCKETS)),
    "etp1-buckets": (4, Mcore(ep=2, tp=2, etp=1, overlap=True, bucket=1000, **MOE)),
    "constant": (2, Mcore(**CONSTANT)),
    "ep2-constant": (4, Mcore(ep=2, tp=2, **MOE, **CONSTANT)),
}
TARGETS = [
    ("dp2", 4, Mcore(pp=2, vpp=2)),
    ("dp2", 4, Mcore(**BUCKETS)),
    ("dp2", 1, Mcore(distributed=False)),
    ("dp2", 1, Mcore(overlap=True, bucket=1)),  # a padded bucket for each parameter
    ("dp2", 2, Mcore(pp=2, first=3)),
    ("tp2dp2", 2, Mcore()),
    ("tp2dp2", 4, Mcore(pp=2, layout="Et|tttL", overlap=True, bucket=3000)),
    ("pp2vpp2dp2", 4, Mcore(tp=2, pad=True)),
    ("plain", 4, Mcore(**BUCKETS)),
    ("bf16", 2, Mcore(dtype="bf16")),
    ("bf16", 4, Mcore(dtype="bf16", pp=2, vpp=2, **BUCKETS)),
    ("tied", 2, Mcore("gpt", tied=True)),
    ("tied", 4, Mcore("gpt", tied=True, pp=2, **BUCKETS)),
    ("ep2", 4, Mcore(ep=4, **MOE)),
    ("ep2", 4, Mcore(ep=2, tp=2, etp=1, overlap=True, bucket=1000, **MOE)),
    ("ep2", 4, Mcore(ep=2, pp=2, **MOE)),
    ("etp1-buckets", 2, Mcore(**MOE)),
    ("buckets", 4, Mcore(pp=2, vpp=2, **BUCKETS)),
]
# others of the same kinds
LATER = [
    ("dp2", 2, Mcore(tp=2)),
    ("tp2dp2", 4, Mcore(tp=2, pp=2)),
    ("pp2vpp2dp2", 1, Mcore()),
    ("plain", 2, Mcore(tp=2, distributed=False)),
    ("ep2", 2, Mcore(**MOE)),
    ("buckets", 4, Mcore(tp=2, pp=2)),
]


def show(value: object) -> str | None:
    if not isinstance(value, Mcore):
        return None
    usual = type(value)()
    names = [name for name in vars(value) if getattr(value, name) != getattr(usual, name)]
    return "-".join(f"{name}{getattr(value, name)}" for name in names) or "dp"


def saved(sources: Sources, source: str) -> str:
    """Each source once; several buckets in Megatron's default kind, which is the live buffers."""
    ranks, setup = SOURCES[source]
    kind = {"kind": "dp_reshardable"} if setup.bucket else {}
    return sources.get(ranks, setup, more=3, **kind)


CASES = [*TARGETS, *(pytest.param(*one, marks=pytest.mark.slow) for one in LATER)]


@pytest.mark.parametrize(("source", "world", "target"), CASES, ids=show)
@pytest.mark.cases(12)
def test_pair(sources: Sources, source: str, world: int, target: Mcore) -> None:
    folder = saved(sources, source)
    _, setup = SOURCES[source]
    more = 3 if setup.dtype == "fp32" else 0
    found = sources.resume(world, target, folder, more=more)
    check(found, 1e-5 if more else None)
    for one in found:  # whatever the files depend on
        said = Mesh.parse([*one["reports"].values()][-1].source)
        assert (said.tp, said.pp, said.vpp) == (setup.tp, setup.pp, setup.vpp)


@pytest.mark.parametrize("source", ["dp2", "pp2vpp2dp2", "bf16", "buckets", "ep2", "plain", "tied"])
def test_the_same_mesh_goes_on_with_identical_bits(sources: Sources, source: str) -> None:
    folder = saved(sources, source)
    ranks, setup = SOURCES[source]
    found = sources.resume(ranks, setup, folder, tags=("trained",), three=True)
    check(found)
    assert all(rank["after"] == [] for rank in found)
    notes = [note for rank in found for note in rank["notes"]["trained"]]
    assert not [note for note in notes if " lr " in note], "a schedule moves it at every step"


UNDER = [
    ("constant", 2, Zero(zero=0)),
    ("constant", 4, Zero(zero=1, tp=2)),
    ("constant", 4, Zero(zero=2)),
    ("constant", 2, Zero(zero=3)),
    ("constant", 4, Zero(zero=1, pp=2)),
    ("ep2-constant", 4, Zero(zero=1, ep=4, **MOE)),
    ("ep2-constant", 2, Zero(zero=3, **MOE)),
]


@pytest.mark.parametrize(("source", "world", "target"), UNDER, ids=show)
def test_pair_under_deepspeed(sources: Sources, source: str, world: int, target: Zero) -> None:
    ranks, setup = SOURCES[source]
    folder = sources.get(ranks, setup)
    check(
        sources.resume(world, target, folder, more=LOSS_STEPS, load_lr_scheduler_states=False), 1e-5
    )


# torch's AdamW on one rank without clipping: the same arithmetic in both engines
EXACT: dict[str, Any] = {"clip": 0.0, "style": "constant", "eps": 1e-8}
PLAIN = Mcore(distributed=False, micro=4, **EXACT)


def test_one_rank_goes_on_under_deepspeed_with_identical_bits(sources: Sources) -> None:
    folder = sources.get(1, PLAIN, more=3, kind="ours")
    (found,) = sources.resume(
        1,
        Zero(zero=1, **EXACT),
        folder,
        tags=("trained",),
        three=True,
        load_lr_scheduler_states=False,
    )
    check([found])
    assert found["after"] == []


def test_one_rank_goes_on_from_deepspeed_with_identical_bits(sources: Sources) -> None:
    folder = sources.get(1, Zero(zero=1, **EXACT), more=3)
    (found,) = sources.resume(1, PLAIN, folder, tags=("trained",), three=True)
    check([found])
    assert found["after"] == []


FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"family": "gpt", "tied": True},
    "experts": MOE,
}
DENSE: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (4, BUCKETS),
    (4, {"tp": 2}),
    (4, {"pp": 2, "vpp": 2}),
    (4, {"tp": 2, "pp": 2, "overlap": True, "bucket": 1500}),
]
EXPERTS: list[tuple[int, dict[str, Any]]] = [
    (2, {}),
    (4, {"ep": 2, "overlap": True, "bucket": 1000}),
    (4, {"ep": 4}),
    (4, {"ep": 2, "tp": 2}),
]
EVERY = [
    (name, source, target)
    for name in FAMILIES
    for source in (EXPERTS if name == "experts" else DENSE)
    for target in (EXPERTS if name == "experts" else DENSE)
]


def shown(value: Any) -> str:
    if isinstance(value, str):
        return value
    ranks, sizes = value
    return f"{ranks}-" + "-".join(f"{key}{size}" for key, size in sizes.items())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source", "target"), EVERY, ids=shown)
def test_every_pair(sources: Sources, name: str, source: Any, target: Any) -> None:
    """Through ucp.save, which takes every mesh."""
    (ranks, sizes), (world, others) = source, target
    folder = sources.get(ranks, Mcore(**FAMILIES[name], **sizes), more=3, kind="ours")
    check(sources.resume(world, Mcore(**FAMILIES[name], **others), folder, tags=("filled",)))
