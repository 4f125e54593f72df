"""Saves into an object store, and loads from one: the bytes of the disk, whole or not there."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

import megatron_ucp as ucp
from tests.engines import (
    background_save_jobs,
    killed,
    megatron_background_jobs,
    store_jobs,
    test_background_save,
)
from tests.engines import test_megatron_background as stacks
from tests.engines.canonical import differences
from tests.engines.model import Setup
from tests.engines.store_jobs import in_store
from tests.object_server import MotoServer, ObjectServer, Remote
from tests.ranks import RankPool, free_port

pytestmark = pytest.mark.ranks
RUN = "s3://bucket/run"
WAYS = ("stock", "direct", "background")
STUCK_S = 90.0  # a second on an idle machine; what waits for an answer that never comes takes more


def small_parts(server: ObjectServer) -> dict[str, str]:
    return {**server.environment(), store_jobs.PART: "4096"}


@pytest.mark.parametrize("engine", ["stage 1", "stage 2", "experts", "AutoTP", "pipeline"])
def test_the_objects_are_the_files_of_the_disk(
    ranks: RankPool, object_server: ObjectServer, tmp_path: Path, engine: str
) -> None:
    world, setup = test_background_save.ENGINES[engine]
    job = background_save_jobs.saved_each_way
    ranks.run(world, job, setup, str(tmp_path / "disk"))
    environment = small_parts(object_server)
    ranks.run(world, in_store, environment, job, setup, RUN)
    folder = tmp_path / "store"
    object_server.ask("copy_out", prefix="bucket/run", folder=str(folder))
    (folder / "stock").rename(tmp_path / "of stock")
    (tmp_path / "disk" / "stock").rename(folder / "stock")
    assert test_background_save.check_alike(folder) > 10_000
    (folder / "stock").rename(tmp_path / "disk" / "stock")
    (tmp_path / "of stock").rename(tmp_path / "disk" / "direct of the store")
    for way in WAYS:
        assert not ucp.verify(f"{RUN}/{way}", deep=True).findings
    assert object_server.ask("uploads") == {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("server", ["object_server", "moto_server"])
def test_what_was_saved_loads_on_another_mesh_and_older_tags_go(
    ranks: RankPool, request: pytest.FixtureRequest, server: str, way: str
) -> None:
    served: ObjectServer | MotoServer = request.getfixturevalue(server)
    # moto takes parts of 5 MiB and more, as S3 does
    environment = small_parts(served) if isinstance(served, ObjectServer) else served.environment()
    setups = Setup(1, "bf16"), Setup(3, "bf16")
    job = store_jobs.saved_and_loaded
    for found in ranks.run(2, in_store, environment, job, *setups, RUN, way):
        assert differences(found["saved"], found["loaded"]) == []
        assert found["client_state"]["seen"] == 3
        assert found["listed"] == [("step2", True, ""), ("step3", True, "latest")]
        assert found["notes"] == ()


@pytest.mark.parametrize("engine", ["plain", "moe"])
def test_a_stack_saves_the_files_of_the_disk(
    ranks: RankPool, object_server: ObjectServer, tmp_path: Path, engine: str
) -> None:
    world, setup = stacks.ENGINES[engine]
    job = megatron_background_jobs.saved_both_ways
    ranks.run(world, job, setup, str(tmp_path / "disk"))
    ranks.run(world, in_store, small_parts(object_server), job, setup, RUN)
    object_server.ask("copy_out", prefix="bucket/run", folder=str(tmp_path / "store"))
    assert stacks.check_alike(tmp_path / "store") > 10_000
    for way in ("direct", "background"):
        (own,) = (tmp_path / "store" / way).glob("iter_*")
        (there,) = (tmp_path / "disk" / way).glob("iter_*")
        for path in there.iterdir():
            if path.name not in ("ucp_manifest.json", "common.pt"):
                assert path.read_bytes() == (own / path.name).read_bytes(), path.name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("request_name", "key"),
    [("PUT", "*/ucp_rng*"), ("PART", "*"), ("COMPLETE", "*"), ("PUT", "*/ucp_manifest.json")],
)
def test_a_store_that_fails_is_named_on_every_rank_and_nothing_counts(
    ranks: RankPool, object_server: ObjectServer, way: str, request_name: str, key: str
) -> None:
    setup, job = Setup(1, "bf16"), store_jobs.failing
    object_server.fault("status", request_name, key, value=503)
    for found in ranks.run(2, in_store, small_parts(object_server), job, setup, RUN, way):
        assert "SaveError" in found["said"] and RUN in found["said"], found["said"]
        assert "503" in found["said"]
    assert object_server.count(request_name, key) > 2, "it was not tried again"
    left = object_server.ask("objects")
    assert not any(name.endswith(("manifest.json", "latest")) for name in left), left
    if key.endswith("manifest.json"):  # nobody knows whether it was written: all stays, claimed
        assert "bucket/run/step1/.ucp_saving" in left
        assert "left over" in ucp.ls(RUN).notes[0]
    else:
        assert not left, left
    with pytest.raises(ucp.NotFoundError):
        ucp.describe(RUN)
    assert object_server.ask("uploads") == {}
    object_server.ask("heal")
    job = store_jobs.save_once
    said = ranks.run(2, in_store, small_parts(object_server), job, setup, RUN, "step1")
    assert said == ["", ""]
    assert not ucp.verify(RUN, deep=True).findings


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("request_name", ["PART", "COMPLETE"])
def test_an_upload_that_stalls_is_given_up_on_every_rank_in_time(
    ranks: RankPool, object_server: ObjectServer, way: str, request_name: str
) -> None:
    setup, job = Setup(1, "bf16"), store_jobs.failing
    object_server.fault("delay", request_name, value=300)
    environment = {**small_parts(object_server), store_jobs.TIMEOUT: "1"}
    for found in ranks.run(2, in_store, environment, job, setup, RUN, way):
        assert "SaveError" in found["said"] and RUN in found["said"], found["said"]
        assert found["took_s"] < STUCK_S, found
    left = object_server.ask("objects")
    assert not any(name.endswith(("manifest.json", "latest")) for name in left), left


STATES = "*optim_states.pt"
# a fault, its request, value, how often, key; what every rank is told where it can't be right
LOADING: dict[str, tuple[tuple[str, str, float, int, str], str]] = {
    "503 for a while": (("status", "*", 503, 3, "*"), ""),
    "503 for ever": (("status", "GET", 503, -1, "*"), "StoreError"),
    "503 for ever, of states": (("status", "GET", 503, -1, STATES), "StoreError"),
    "an answer that is cut": (("cut", "GET", 100, 1, STATES), ""),
    "answers that are cut": (("cut", "GET", 100, -1, STATES), "StoreError"),
    "an answer that stalls": (("stall", "GET", 10, 1, STATES), ""),
    "answers that stall": (("stall", "GET", 10, -1, STATES), "StoreError"),
    "a short answer": (("short", "GET", 1, 1, STATES), ""),
    "short answers": (("short", "GET", 1, -1, STATES), "StoreError"),
    "answers that are lost": (("lost", "*", 0, 2, "*"), ""),
    "wrong bytes": (("flip", "GET", 3000, -1, STATES), "DamagedFileError|ForeignFileError"),
    "states that are gone": (("status", "GET", 404, -1, STATES), "NotFoundError|DamagedFileError"),
}


@pytest.mark.parametrize("name", LOADING)
def test_a_load_by_ranks_is_right_or_refused_on_all_of_them(
    ranks: RankPool, object_server: ObjectServer, name: str
) -> None:
    (kind, request_name, value, times, key), told = LOADING[name]
    setups, environment = (Setup(1, "bf16"), Setup(3, "bf16", seed=9)), object_server.environment()
    want = ranks.run(2, in_store, environment, store_jobs.saved_state, setups[0], RUN)[0]
    object_server.fault(kind, request_name, key, value=value, times=times)
    environment |= {store_jobs.TIMEOUT: "1", store_jobs.GIVE_UP: "1" if told else "20"}
    for found in ranks.run(2, in_store, environment, store_jobs.loaded, setups[1], RUN):
        assert re.match(f"({told})" if told else "$", found["said"]), found["said"]
        assert found["took_s"] < STUCK_S, found["took_s"]
        assert told or differences(want, found["state"]) == []
        assert not told or "s3://" in found["said"]
    assert object_server.requests(request_name, key), "the fault was not met"


def test_a_host_that_is_gone_is_named_on_every_rank(ranks: RankPool) -> None:
    closed = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{free_port()}", "AWS_ALLOW_HTTP": "true"}
    environment = {
        **closed,
        **{"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "here"},
        store_jobs.TIMEOUT: "1",
    }
    for job in (store_jobs.loaded, store_jobs.save_once):
        args = (Setup(1, "bf16"), RUN, *(("step1",) if job is store_jobs.save_once else ()))
        for found in ranks.run(2, in_store, environment, job, *args):
            said = found if isinstance(found, str) else found["said"]
            assert re.match("StoreError|SaveError", said) and "s3://" in said, said


# Requests by kind, of both ranks together, and how many at most one after the other. Half of each
# is too little, as the test tries.
LOAD_TAKES = {"LIST": 1, "HEAD": 0, "GET": 16, "PUT": 0}, 9
SAVE_TAKES = {"LIST": 2, "HEAD": 8, "GET": 16, "PUT": 8}, 26


def over(limits: tuple[Mapping[str, int], int], server: ObjectServer) -> dict[str, int]:
    """What there is more of than the limits say."""
    counts, (most, depth) = server.counts(), limits
    found = {kind: counts[kind] for kind in most if counts[kind] > most[kind]}
    return found | ({"depth": server.depth()} if server.depth() > depth else {})


@pytest.mark.parametrize("is_save", [False, True], ids=["load", "save"])
def test_requests_are_few_and_sent_at_once(
    ranks: RankPool, object_server: ObjectServer, is_save: bool
) -> None:
    """At a store each request takes 10 to 100 ms, however small it is: what counts is how many are
    waited for one after the other."""
    setup, job = Setup(1, "bf16"), store_jobs.counted
    environment = object_server.environment()
    ranks.run(2, in_store, environment, job, setup, RUN, Remote(object_server.control), is_save)
    object_server.ask("heal")
    limits = SAVE_TAKES if is_save else LOAD_TAKES
    assert over(limits, object_server) == {}
    halves = {kind: most // 2 for kind, most in limits[0].items()}, limits[1] // 2
    wanted = {"depth", *(kind for kind, most in limits[0].items() if most)}
    assert over(halves, object_server).keys() == wanted, "negative control"


def test_a_store_that_ignores_conditions_is_refused(
    ranks: RankPool, object_server: ObjectServer
) -> None:
    object_server.fault("unconditional", "PUT")
    environment = small_parts(object_server)
    setup = Setup(1, "bf16")
    job = store_jobs.save_once
    for said in ranks.run(2, in_store, environment, job, setup, RUN, "step1"):
        assert "ignores the conditions" in said and "SaveError" in said, said


@pytest.mark.parametrize(
    ("save", "trials"),
    [
        ("direct", 3),
        ("background", 3),
        *(pytest.param(way, 25, marks=pytest.mark.slow) for way in ("direct", "background")),
    ],
)
def test_killed_at_random_moments_what_latest_names_is_whole(
    object_server: ObjectServer, tmp_path: Path, save: str, trials: int
) -> None:
    killed.trials_in_a_process(tmp_path, [f"deepspeed:{save}:{trials}"], "--url", RUN)
