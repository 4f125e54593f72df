"""A run goes from one mesh to another in memory: every master, state, step and hyper-parameter, bit
by bit, against a gather that knows nothing of the package's layouts."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.engines import resize_jobs
from tests.engines.autotp_jobs import Auto
from tests.engines.cross_jobs import Zero
from tests.engines.megatron_jobs import Mcore
from tests.engines.model import Setup
from tests.engines.moe_jobs import Moe
from tests.engines.tensor_jobs import Mega, Staged
from tests.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.ranks
BOUND_S = 60.0  # within which a rank knows that another one died: the group waits for 45 s
BUCKETS: dict[str, Any] = {"overlap": True, "gather": True, "bucket": 2000}
MOE: dict[str, Any] = {"family": "mixtral", "layers": 2}
CONSTANT: dict[str, Any] = {"style": "constant"}
SMALL: dict[str, Any] = {"window": 96}  # bytes at once: many windows, which end anywhere
STEPS = 20
GOES_ON: dict[str, Any] = {"more": STEPS}  # with the losses of the run that was not resized
FILLED: dict[str, Any] = {"filled": True}
OWN_SCHEDULE: dict[str, Any] = {"load": {"load_lr_scheduler_states": False}}


def held(mesh: str | None = None, ranks: int | None = None) -> dict[str, Any]:
    """Options of the hold."""
    return {"hold": {"mesh": mesh, "ranks": ranks}}


# name -> ranks, the engine that is held, the one that is filled, and how
PAIRS: dict[str, tuple[int, Any, Any, dict[str, Any]]] = {
    "z1 to z3": (4, Setup(1), Setup(3, seed=9), GOES_ON),
    "z3 to z1 in bf16": (2, Setup(3, "bf16"), Setup(1, "bf16", seed=9), FILLED),
    "z2 to z0 in fp16": (2, Setup(2, "fp16"), Setup(0, "fp16", seed=9), {}),
    "z0 to z2 by way of two ranks": (4, Setup(0), Setup(2, seed=9), GOES_ON | held(ranks=2)),
    "z3 to z0 by way of one rank": (4, Setup(3), Setup(0, seed=9), GOES_ON | held(ranks=1)),
    "z1 to z3, all ranks stay": (4, Setup(1), Setup(3, seed=9), held("dp=4,zero=3") | SMALL),
    "z3 to z1 by way of three": (4, Setup(3), Setup(1, seed=9), held("dp=3,zero=3", 3)),
    "Muon": (2, Setup(1, optimizer="muon"), Setup(2, optimizer="muon", seed=9), {}),
    "tp1 to tp2": (4, Mega("llama", 1, 1), Mega("llama", 2, 3, seed=9), GOES_ON),
    "tp2 to tp1": (
        4,
        Mega("llama", 2, 0),
        Mega("llama", 1, 2, seed=9),
        held("dp=4,zero=2") | SMALL,
    ),
    "tied tp2 to tp1 in bf16": (
        4,
        Mega("gpt", 2, 3, "bf16", tied=True),
        Mega("gpt", 1, 1, "bf16", tied=True, seed=9),
        FILLED,
    ),
    "a pipeline to none": (4, Staged("gpt", 1, 1, pp=2), Staged("gpt", 1, 3, seed=9), GOES_ON),
    "no pipeline to one": (
        4,
        Staged("llama", 2, 1),
        Staged("llama", 2, 1, pp=2, seed=9),
        held("tp=2,pp=2,zero=1") | SMALL,
    ),
    "a tied pipeline, tp1 to tp2": (
        4,
        Staged("gpt", 1, 0, tied=True, pp=2),
        Staged("gpt", 2, 1, tied=True, pp=2, seed=9),
        FILLED,
    ),
    "experts, ep2 to ep4": (4, Moe(2, 1), Moe(4, 2, seed=9), GOES_ON | SMALL),
    "experts, ep4 to ep1": (4, Moe(4, 0), Moe(1, 1, seed=9), held(ranks=3)),
    "AutoTP, tp4 to tp2": (4, Auto("gpt2", 4, 1), Auto("gpt2", 2, 3, seed=9), SMALL),
    "AutoTP, tp2 to tp4": (4, Auto("gpt2", 2, 3), Auto("gpt2", 4, 2, seed=9), {}),
    "Megatron, dp to vpp": (4, Mcore(), Mcore(pp=2, vpp=2, seed=9), GOES_ON),
    "Megatron, tp2 to buckets": (4, Mcore(tp=2), Mcore(**BUCKETS, seed=9), GOES_ON | SMALL),
    "Megatron, vpp in bf16": (
        4,
        Mcore(tp=2, dtype="bf16"),
        Mcore(dtype="bf16", pp=2, vpp=2, **BUCKETS, seed=9),
        FILLED,
    ),
    "Megatron, ep2 to ep4": (4, Mcore(ep=2, **MOE), Mcore(ep=4, **MOE, seed=9), held(ranks=3)),
    "Megatron, tied stages to none": (
        4,
        Mcore("gpt", tied=True, pp=2),
        Mcore("gpt", tied=True, seed=9),
        held(ranks=2),
    ),
    "Megatron, plain to distributed": (
        2,
        Mcore(distributed=False),
        Mcore(tp=2, seed=9),
        GOES_ON,
    ),
    "Megatron to DeepSpeed": (4, Mcore(**CONSTANT), Zero(zero=1, tp=2, seed=9), OWN_SCHEDULE),
    "Megatron's experts to DeepSpeed": (
        4,
        Mcore(ep=2, tp=2, **MOE, **CONSTANT),
        Zero(zero=1, ep=4, **MOE, seed=9),
        OWN_SCHEDULE,
    ),
    "DeepSpeed to Megatron": (
        4,
        Zero(zero=3),
        Mcore(pp=2, vpp=2, **CONSTANT, seed=9),
        OWN_SCHEDULE | FILLED,
    ),
    "DeepSpeed's pipeline to Megatron": (
        4,
        Zero(zero=1, pp=2),
        Mcore(tp=2, **CONSTANT, seed=9),
        OWN_SCHEDULE | SMALL,
    ),
}


def check(found: list[dict[str, Any]], loss: float | None = None) -> None:
    """As `check_moved`; and the old engine is as it was."""
    check_moved(found)
    for rank in found:
        assert rank["after the hold"] == [], "the old engine is as it was"
        assert loss is None or rank["loss"] <= loss


def check_moved(found: list[dict[str, Any]]) -> None:
    """Every rank saw equal bits, saw that they were different before, and sees a planted one."""
    for rank in found:
        assert rank["differences"] == [], rank["differences"]
        assert len(rank["before"]) > 10, "the engine was equal before"
        assert rank["planted"], "a planted bit was not seen"


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.cases(14)
def test_pair(ranks: RankPool, name: str) -> None:
    world, source, target, options = PAIRS[name]
    found = ranks.run(world, resize_jobs.pair, source, target, **options, timeout_s=200)
    check(found, 1e-5 if "more" in options else None)
    for rank in found:
        assert rank["fingerprint"] == [] and "fingerprint of" in rank["line"]
        assert rank["left"] == 0, "the load let go of the memory"
    if stay := options.get("hold", {}).get("ranks"):
        kept = [rank["held"] > 0 for rank in found]
        assert kept == [number < stay for number in range(world)]


SENDS = ["paired sends", "one exchange"]


@pytest.mark.parametrize("window", [96, 2**20])
@pytest.mark.parametrize("way", SENDS)
def test_how_messages_go(ranks: RankPool, way: str, window: int) -> None:
    check_ways(ranks, way, window)


@pytest.mark.parametrize("way", ["paired sends", "no broadcast"])
def test_weights_that_other_ranks_made(ranks: RankPool, way: str) -> None:
    """Of ZeRO-1 each rank makes its partition of the weights, and broadcasts it. Where nothing is
    done this test sees it."""
    setups = Setup(3, "bf16"), Setup(1, "bf16", seed=9)
    found = ranks.run(4, resize_jobs.by_way, *setups, way, 2**10)
    if way == "no broadcast":
        assert all(rank["differences"] for rank in found)
    else:
        check(found)


def test_how_messages_go_with_gloo_itself() -> None:
    pool = RankPool(4, gloo=True)
    try:
        for way in SENDS:
            check_ways(pool, way, 2**10)
    finally:
        pool.close()


def check_ways(pool: RankPool, way: str, window: int) -> None:
    setups = Setup(1, "bf16"), Setup(3, "bf16", seed=9)
    found = pool.run(4, resize_jobs.by_way, *setups, way, window)
    check(found)
    went = [is_one for rank in found for is_one in rank["went"].values()]
    assert len(went) > 2 and all(is_one == {way == "one exchange"} for is_one in went)


# a world is its ranks, the engine there, and what the hold that ends it is asked for
WORLDS: dict[str, tuple[int, list[tuple[int, Any, dict[str, Any]]]]] = {
    "4 to 3 to 4": (
        4,
        [
            (4, Setup(1), {"mesh": "dp=3,zero=3", "ranks": 3}),
            (3, Setup(3, seed=9), {}),
            (4, Setup(2, seed=9), {}),
        ],
    ),
    "2 to 4": (4, [(2, Setup(3), {}), (4, Setup(1, seed=9), {})]),
    "4 to 3 to 1 to 4, whatever comes": (
        4,
        [
            (4, Setup(3), {"ranks": 3}),
            (3, Setup(0, seed=9), {"ranks": 1}),
            (1, Setup(1, seed=8), {}),
            (4, Setup(3, seed=9), {}),
        ],
    ),
    "AutoTP, 2 to 1": (
        2,
        [(2, Auto("even", 2, 1), {"ranks": 1}), (1, Auto("even", 1, 3, seed=9), {})],
    ),
    "Megatron, 4 to 2 to 4": (
        4,
        [
            (4, Mcore(tp=2), {"ranks": 2}),
            (2, Mcore(pp=2, vpp=2, seed=9), {}),
            (4, Mcore(**BUCKETS, seed=9), {}),
        ],
    ),
    "Megatron to DeepSpeed, 4 to 2": (
        4,
        [(4, Mcore(pp=2, **CONSTANT), {"mesh": "tp=2,dp=1,zero=1"}), (2, Zero(tp=2, seed=9), {})],
    ),
}


@pytest.mark.parametrize("gloo", [False, True])
@pytest.mark.parametrize("name", WORLDS)
def test_other_worlds(ranks: RankPool, tmp_path: Path, name: str, gloo: bool) -> None:
    """Ranks leave and join; nothing lies on a disk."""
    world, steps = WORLDS[name]
    more = STEPS if steps[0][0] == steps[-1][0] else 0
    store = str(tmp_path / "store")
    found = ranks.run(world, resize_jobs.worlds, steps, store, gloo=gloo, more=more, timeout_s=200)
    for rank, held in enumerate(found):
        assert held["differences"] == [[] for _ in held["differences"]]
        assert len(held["differences"]) == sum(rank < count for count, *_ in steps[1:])
    assert max(rank.get("loss", 0.0) for rank in found) <= 1e-5


SAME_WORLD: dict[str, tuple[int, Any, Any, dict[str, Any]]] = {
    "z1 to z3": (4, Setup(1), Setup(3, seed=9), {"more": 4}),
    "z3 to z0 in bf16": (2, Setup(3, "bf16"), Setup(0, "bf16", seed=9), {}),
    "experts": (4, Moe(2, 1), Moe(4, 2, seed=9), {}),
}


@pytest.mark.parametrize("name", SAME_WORLD)
def test_a_live_engine_into_another_one(ranks: RankPool, name: str) -> None:
    world, source, target, options = SAME_WORLD[name]
    client = {"note": "mine"}
    found = ranks.run(world, resize_jobs.both, source, target, client_state=client, **options)
    check(found, 1e-5 if "more" in options else None)
    assert all(rank["client"] == client for rank in found)


@pytest.mark.parametrize(("source", "target"), [(1, 3), (2, 0), (0, 3), (1, 2)])
def test_what_moves_is_what_has_to(ranks: RankPool, source: int, target: int) -> None:
    """A rank that keeps its elements sends and takes nothing."""
    found = ranks.run(4, resize_jobs.both, Setup(source), Setup(target, seed=9))
    check(found)
    assert [rank["moved"] for rank in found] == [rank["needed"] for rank in found]
    assert (sum(rank["needed"] for rank in found) > 0) == ((source, target) in ((1, 3), (2, 0)))


REFUSED = {
    "too many ranks": "UsageError: ranks says how many ranks of this world stay",
    "two numbers": "UsageError: the mesh has another number of ranks than stay",
    "no mesh": "UsageError: ",
    "ranks differ": "UsageError: the ranks were given different options",
    "not attached": "UsageError: this is no attached engine",
    "into itself": "UsageError: the two engines have parameters in common",
    "nothing held": "UsageError: the ranks don't hold one run",
    "let go of": "UsageError: what was held was let go of",
    "a tag": "UsageError: what is held has no tags",
    "a path here, memory there": "UsageError: the ranks were given different options",
}


def test_what_is_refused_leaves_the_engine_as_it_was(ranks: RankPool) -> None:
    for found in ranks.run(2, resize_jobs.refusals, Setup(1)):
        assert found.keys() == REFUSED.keys()
        for name, (said, *changed) in found.items():
            assert said.startswith(REFUSED[name]), said
            assert changed == []


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_while_elements_move(ranks: RankPool, failing: int) -> None:
    job = resize_jobs.fails_while_moving
    for found in ranks.run(4, job, Setup(1), Setup(3, seed=9), failing):
        assert found["fails"].startswith("DamagedFileError: only here")
        assert found["changes"].startswith("ForeignFileError: the ")
        assert "parameter: " in found["changes"], "what differs is named"
        assert found["fails, then"] == found["changes, then"] == "it refuses"
        assert found["differences"] == [], "what was held stayed, and is loaded"


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_weights_into_an_engine_without_an_optimizer(
    ranks: RankPool, zero: int, dtype: str
) -> None:
    target = Setup(zero, dtype, seed=9, extra={"evaluate": True})
    for found in ranks.run(2, resize_jobs.weights_alone, Setup(1), target):
        assert found["wrong"] == [] and found["compared"] > 5
        assert len(found["as before"]) < 3


@pytest.mark.parametrize("moment", ["hold", "load"])
def test_a_rank_that_dies_while_elements_move(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The others know it in bounded time, and what they had is as it was."""
    monkeypatch.setattr("tests.ranks.PEERS_REPORT_S", BOUND_S)  # they write files before they end
    job, dead = resize_jobs.dies, 2
    pool, setups = RankPool(4, gloo=True), (Setup(1), Setup(3, seed=9))
    try:
        with pytest.raises(RanksFailed):
            pool.run(4, job, *setups, dead, str(tmp_path), moment, timeout_s=60)
    finally:
        pool.close()
    for rank in {0, 1, 2, 3} - {dead}:
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        what = "hold" if moment == "hold" else "load"
        assert told["said"].startswith(f"RankError: the {what} did not finish"), told["said"]
        assert "is whole on this rank" in told["said"]
        assert told["seconds"] < BOUND_S and told["same"]
    assert [one for one in os.listdir("/dev/shm") if "megatron_ucp_" in one] == []
