"""Saves that this package writes, at once and in the background: what stock writes of the same
moment, record by record."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.engines.background import BackgroundOptions, SnapshotMemory, background_options
from megatron_ucp.engines.memory import MemoryOptions
from megatron_ucp.engines.save import SaveOptions
from megatron_ucp.errors import UsageError
from megatron_ucp.reshard.options import WAYS
from tests.engines import background_jobs, background_save_jobs
from tests.engines.autoep_jobs import Auto as AutoEP
from tests.engines.autotp_jobs import Auto as AutoTP
from tests.engines.background_save_jobs import records
from tests.engines.megatron_jobs import Mcore
from tests.engines.model import Setup
from tests.engines.moe_jobs import Moe
from tests.engines.tensor_jobs import Mega, Staged
from tests.engines.test_muon import muon
from tests.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.ranks
OFFLOAD = (("offload_optimizer", {"device": "cpu"}),)
WIDE = (("data_types", {"grad_accum_dtype": "fp32"}),)
# name: ranks, setup
ENGINES: dict[str, tuple[int, Any]] = {
    "fp32 at stage 0": (2, Setup(0, "fp32")),
    "bf16 at stage 0": (2, Setup(0, "bf16")),
    "stage 1": (4, Setup(1, "bf16")),
    "BF16_Optimizer": (2, Setup(1, "bf16", config=WIDE)),
    "stage 2": (2, Setup(2, "fp32")),
    "fp16 at stage 2": (2, Setup(2, "fp16")),
    "stage 3": (2, Setup(3, "bf16")),
    "offloaded": (2, Setup(2, "bf16", "CPUAdam", zero_config=OFFLOAD)),
    "offloaded at stage 3": (2, Setup(3, "bf16", "CPUAdam", zero_config=OFFLOAD)),
    "Muon": (2, muon(1, "bf16")),
    "Muon at stage 3": (2, muon(3)),
    "experts": (2, Moe(2, 1, "bf16")),
    "experts at stage 0": (2, Moe(2, 0)),
    "AutoEP": (2, AutoEP(2, 1)),
    "tensors": (4, Mega("llama", 2, 1, "bf16")),
    "tensors at stage 3": (4, Mega("gpt", 2, 3, "bf16", tied=True)),
    "AutoTP": (2, AutoTP("llama", 2, 1, "bf16")),
    "AutoTP at stage 3": (2, AutoTP("even", 2, 3)),
    "pipeline": (2, Staged("gpt", 1, 1, pp=2)),
    "pipeline with tensors": (4, Staged("llama", 2, 0, pp=2)),
}


def check_alike(folder: Path, ways: tuple[str, ...] = ("direct", "background")) -> int:
    """Every file of stock's save is in ours, with the same records; returns how many bytes."""
    compared = 0
    stock = {path.name for path in (folder / "stock" / "tag").iterdir()}
    for way in ways:
        own = {path.name for path in (folder / way / "tag").iterdir()}
        assert not stock - own and all(name.startswith("ucp_") for name in own - stock)
        assert (folder / way / "latest").read_text() == "tag"
        for name in sorted(one for one in stock if one.endswith(".pt")):
            want = records(folder / "stock" / "tag" / name)
            have = records(folder / way / "tag" / name)
            assert have.keys() == want.keys(), name
            assert [key for key in want if have[key] != want[key]] == [], name
            compared += sum(map(len, want.values()))
    return compared


@pytest.mark.parametrize("engine", ENGINES)
def test_files_hold_what_stock_writes_of_the_same_moment(
    ranks: RankPool, tmp_path: Path, engine: str
) -> None:
    world, setup = ENGINES[engine]
    found = ranks.run(world, background_save_jobs.saved_each_way, setup, str(tmp_path))
    assert check_alike(tmp_path) > 10_000
    assert ucp.verify(tmp_path / "direct" / "tag").findings == ()
    tables = [ucp.describe(tmp_path / way).run["fingerprint"] for way in WAYS]
    assert tables[0] == tables[1] == tables[2]
    assert {*tables[0]} == {spec.name for spec in ucp.describe(tmp_path / "stock").params}
    for _, direct, background in found:
        assert direct.blocked_seconds == direct.seconds
        assert 0 < background.blocked_seconds < background.seconds
        assert sum(direct.bytes_by_rank) == sum(background.bytes_by_rank) > 10_000


def test_the_comparison_finds_a_bit(ranks: RankPool, tmp_path: Path) -> None:
    _, setup = ENGINES["stage 2"]
    ranks.run(2, background_save_jobs.saved_each_way, setup, str(tmp_path))
    path = tmp_path / "direct" / "tag" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(AssertionError):
        check_alike(tmp_path)


def test_frozen_parameters_are_left_out_as_stock_does(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, background_save_jobs.saved_each_way, Setup(2, "bf16"), str(tmp_path), True)
    check_alike(tmp_path)
    held = ucp.describe(tmp_path / "direct")
    assert not any(spec.kind == "frozen" for spec in held.params)


def test_ranks_that_hold_the_same_weights_write_equal_shares(
    ranks: RankPool, tmp_path: Path
) -> None:
    setup = Setup(1, "bf16", net="Wider")
    reports = ranks.run(4, background_save_jobs.saved_each_way, setup, str(tmp_path))
    for stock, *ours in reports:
        for report in ours:
            assert report.bytes_by_rank == reports[0][1].bytes_by_rank
            assert spread(report.bytes_by_rank) < spread(stock.bytes_by_rank)
            assert sum(report.bytes_by_rank) <= sum(stock.bytes_by_rank)


def spread(sizes: Sequence[int]) -> int:
    return max(sizes) - min(sizes)


# ------------------------------------------------ in the background


@pytest.mark.parametrize(
    "setup", [Setup(0), Setup(1, "bf16"), Setup(2, "fp16"), Setup(3, "bf16")], ids=str
)
def test_ten_steps_before_the_writer_starts_change_nothing(
    ranks: RankPool, tmp_path: Path, setup: Setup
) -> None:
    assert ranks.run(2, background_save_jobs.trained_on, setup, str(tmp_path)) == [[], []]


@pytest.mark.parametrize(("zero", "way"), [(1, "direct"), (3, "background"), (0, "stock")])
def test_a_step_amid_the_taking_is_named(
    ranks: RankPool, tmp_path: Path, zero: int, way: str
) -> None:
    """What was taken is of two steps: nothing of it stays."""
    for found in ranks.run(2, background_save_jobs.torn, Setup(zero), str(tmp_path), way):
        first, second = found["said"]
        assert first.startswith("SaveError: the optimizer stepped while its state was taken")
        assert "'global_steps': 2.0" in first and "'global_steps': 3.0" in first
        assert found["left"] == [] and second == "" and found["differences"] == []


def test_a_scalar_that_is_left_out_of_the_snapshot_is_found(
    ranks: RankPool, tmp_path: Path
) -> None:
    ((said,), _) = ranks.run(
        2, background_save_jobs.trained_on, Setup(1), str(tmp_path), plant=True
    )
    assert "no load would take" in said and not (tmp_path / "latest").exists()
    assert "disagree in the scalars" in said and "step: 2.0" in said and "step: 12.0" in said


@dataclass(frozen=True)
class Saves:
    """How the saves of an engine are named."""

    setup: Any
    pointer: str
    tag: str
    named: str  # by the pointer
    file: str  # of the second rank

    def tags(self, *steps: int) -> list[str]:
        return [self.tag.format(step) for step in steps]


STACK = Mcore(layers=2, style="constant")
BOTH = {
    "DeepSpeed": Saves(
        Setup(1, "bf16"),
        "latest",
        "global_step{}",
        "global_step{}",
        "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ),
    "megatron-core": Saves(
        STACK, "latest_checkpointed_iteration.txt", "iter_{:07}", "{}", "__1_0.distcp"
    ),
}


@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.parametrize("how", ["refused", "warn", "hangs"])
@pytest.mark.cases(2)
def test_what_fails_in_the_background_is_named_on_every_rank(
    ranks: RankPool, tmp_path: Path, how: str, engine: str
) -> None:
    saves = BOTH[engine]
    job = background_jobs.failing, saves.setup, str(tmp_path), saves.pointer, how
    for found in ranks.run(2, *job):
        assert found["latest"] == saves.named.format(1) and found["tags"] == saves.tags(1)
        assert found["then"] == []
        if how == "warn":
            assert found["error"] == ""
            continue
        assert found["error"] in ("SaveError", "RankError")
        assert saves.file in found["message"]
        assert how == "refused" or "rank 1" in found["message"] or "this rank" in found["message"]


@pytest.mark.parametrize("engine", BOTH)
def test_a_rank_that_dies_while_it_writes_leaves_no_pointer(
    ranks: RankPool, tmp_path: Path, engine: str
) -> None:
    saves = BOTH[engine]
    with pytest.raises(RanksFailed) as failed:
        ranks.run(2, background_jobs.die, saves.setup, str(tmp_path))
    assert "RankError" in failed.value.by_rank[0]
    assert (tmp_path / saves.pointer).read_text() == saves.named.format(1)
    assert not (tmp_path / saves.tag.format(2)).exists()


def test_a_writer_that_was_given_up_disturbs_no_later_save(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(
        2, background_save_jobs.back_in_the_next_save, Setup(1, "bf16"), str(tmp_path)
    )
    assert found == [["next"], ["next"]]


@pytest.mark.parametrize("engine", BOTH)
@pytest.mark.cases()
def test_a_save_that_is_asked_for_meanwhile_waits_or_is_skipped(
    ranks: RankPool, tmp_path: Path, engine: str
) -> None:
    """And an export waits, of the engine whose model has a family."""
    saves = BOTH[engine]
    job = background_jobs.busy, saves.setup, str(tmp_path), saves.setup is STACK
    for found in ranks.run(2, *job):
        assert found == {"wait": saves.tags(1, 2), "skip": saves.tags(1)}


@pytest.mark.parametrize("setup", [Setup(3), STACK], ids=BOTH)
@pytest.mark.parametrize("options", [{}, {"keep_snapshot": False}, {"snapshot_bytes": 600}])
@pytest.mark.cases(3)
def test_memory_is_kept_and_used_again_or_given_back(
    ranks: RankPool, tmp_path: Path, options: dict[str, Any], setup: Any
) -> None:
    for first, second, written in ranks.run(
        2, background_jobs.memory_of, setup, str(tmp_path), **options
    ):
        most = options.get("snapshot_bytes", written if options.get("keep_snapshot", True) else 0)
        assert first == second <= most and bool(first) == bool(most)
    assert ucp.verify(tmp_path).findings == ()


def test_a_snapshot_says_where_there_is_no_room() -> None:
    import torch

    memory, value = SnapshotMemory(100), torch.arange(60, dtype=torch.uint8)
    copy = memory.copy(value)
    assert copy is not None and copy.equal(value) and copy.data_ptr() != value.data_ptr()
    assert memory.copy(value) is None
    memory.begin()
    again = memory.copy(value[:50])
    assert again is not None and again.data_ptr() == copy.data_ptr()


def test_copies_from_a_device_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are on their way when `copy` returns."""
    import torch

    snapshot, device, waited = SnapshotMemory(), torch.device("cuda:1"), list[Any]()
    buffer = SimpleNamespace(copy_=lambda memory, non_blocking: "on its way")
    monkeypatch.setattr(snapshot, "room", lambda size: buffer)
    module = SimpleNamespace(synchronize=waited.append)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    memory: Any = type(
        "Memory", (), {"is_cpu": False, "device": device, "__len__": lambda self: 4}
    )()
    assert snapshot.copy(memory) == "on its way" and waited == []
    snapshot.wait()
    assert waited == [device]
    snapshot.wait()
    assert waited == [device]


@pytest.mark.parametrize(
    "options",
    [
        *({"busy": word} for word in ("later", None, 1)),
        {"on_error": "ignore"},
        *({"deadline": n} for n in (-1, 0, 0.0, True, float("nan"), float("inf"), "60", 1e12)),
        *({"snapshot_bytes": n} for n in (True, -1, 3.7, "1G", float("nan"))),
        *({"keep_snapshot": word} for word in ("yes", "no", 1, None)),
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UsageError) as refused:
        BackgroundOptions(**options)
    assert name in str(refused.value) and "expected" in str(refused.value)


def test_options_that_are_right_are_taken() -> None:
    BackgroundOptions("skip", 0.5, "warn", 0, False)
    BackgroundOptions(deadline=None, snapshot_bytes=None)


@pytest.mark.parametrize(
    "options",
    [
        *({"every": n} for n in (0, -1, 1.5, True, None, "2")),
        *({"copies": n} for n in (-1, 0.5, True, None)),
        {"keep": "disk"},
    ],
    ids=str,
)
def test_options_of_steps_in_memory_are_checked(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UsageError, match=name):
        MemoryOptions(**{"keep": "memory", "every": 1, **options})


@pytest.mark.parametrize(
    "options",
    [
        *({"keep_latest": n} for n in (0, -1, 1.5, True, "2")),
        *({name: word} for name in ("durable", "rng") for word in ("yes", 1, None)),
    ],
    ids=str,
)
def test_options_of_all_saves_are_checked(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UsageError, match=name):
        SaveOptions(**options)


@pytest.mark.parametrize("what", [None, "x", 3, {}, Path("a")])
def test_only_an_engine_can_be_waited_for(what: object) -> None:
    with pytest.raises(UsageError, match="no engine"):
        ucp.wait(what)


@pytest.mark.parametrize("way", ["stock", "direct", "background"])
def test_a_tag_with_the_name_of_a_pointer_is_refused_at_once(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    for said, left in ranks.run(
        2, background_save_jobs.named_as_pointers, Setup(1), str(tmp_path), way
    ):
        assert len(said) == 3
        assert all("UsageError" in one and "the name of a pointer" in one for one in said), said
        assert left == ["global_step1", "latest"]


@pytest.mark.parametrize("way", ["direct", "background"])
def test_a_relative_path_means_what_it_meant_at_the_call(
    ranks: RankPool, tmp_path: Path, way: str
) -> None:
    for here, away in ranks.run(2, background_save_jobs.moved_away, Setup(1), str(tmp_path), way):
        assert here == ["global_step1", "latest"] and away == ["here"]
    assert not ucp.verify(tmp_path / "here").findings


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_what_fails_inside_the_call_warns_too(
    ranks: RankPool, tmp_path: Path, on_error: str
) -> None:
    for found in ranks.run(
        2, background_save_jobs.refused_in_the_call, Setup(1), str(tmp_path), on_error
    ):
        assert found["left"] == ["global_step1", "global_step3"], found
        if on_error == "raise":
            assert "SaveError" in found["said"] and found["returned"] is None
        else:
            assert found["returned"] is False and "No space left" in found["report"]


def test_options_of_the_background_are_refused_for_other_saves() -> None:
    asked = {"save": "background", "deadline": 3.0}
    assert background_options(asked) == BackgroundOptions(deadline=3.0)
    assert background_options({"save": "direct"}) is None
    with pytest.raises(UsageError, match=r'deadline(.|\n)*save="background" beside them'):
        background_options({"deadline": 3.0})
