"""Saves of megatron-core's stack as Megatron-LM's older files (`--ckpt-format torch`): they hold
what its own save of the same moment holds, whole or not at all, also beside training."""

import json
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from isal.isal_zlib import crc32

import megatron_ucp as ucp
from megatron_ucp.core.manifest import FILE_NAME, FINGERPRINT
from megatron_ucp.formats.durable import entry_of
from tests.engines.cross_jobs import Zero
from tests.engines.sources import Sources
from tests.engines.stack_jobs import Mcore
from tests.engines.test_stack_loads import check
from tests.engines.test_stack_pairs import BUCKETS, CONSTANT, MOE, show
from tests.engines.test_stack_saves import MIXTURE
from tests.ranks import RankPool, RanksFailed

pytestmark = pytest.mark.ranks
JOBS = "tests.engines.legacy_save_jobs:"
SAVE, RESUME = "tests.engines.stack_jobs:save", "tests.engines.stack_jobs:resume"
LATEST = "latest_checkpointed_iteration.txt"
SMALL = Mcore(layers=2, **CONSTANT)
ENGINES: dict[str, tuple[int, Mcore]] = {
    "dp2": (2, SMALL),
    "dp4": (4, Mcore(**BUCKETS, **CONSTANT)),
    "tp2 bf16": (2, Mcore(tp=2, dtype="bf16", layers=2)),
    "fp16": (2, Mcore(dtype="fp16", layers=2)),
    "dropout": (2, Mcore(tp=2, dropout=0.2, layers=2)),
    "tied stages": (4, Mcore("gpt", tied=True, tp=2, pp=2, vpp=2, dtype="bf16")),
    "layout": (2, Mcore(pp=2, vpp=2, layout="Ett|t|t|L")),
    "moe": (4, Mcore(ep=2, overlap=True, bucket=1000, **MOE)),
    "own buffers": (2, Mcore(**MIXTURE)),
    "moe in stages": (4, Mcore(ep=2, pp=2, **MIXTURE)),
    # optimizers that every data-parallel rank has whole
    "plain": (2, Mcore(distributed=False, layers=2, **CONSTANT)),
    "plain bf16": (4, Mcore("gpt", distributed=False, tied=True, tp=2, pp=2, dtype="bf16")),
    "plain fp16": (2, Mcore(distributed=False, dtype="fp16", layers=2)),
    "plain moe": (4, Mcore(distributed=False, ep=2, pp=2, **MIXTURE)),
}


# ------------------------------------------------ against stock


def differences(one: Any, other: Any, where: str = "") -> list[str]:
    """Where two values of files differ: in types, dtypes, bits. Of flags those of the first one
    count: to a Namespace with more of them nobody objects."""
    if type(one) is not type(other):
        return [f"{where}: {type(one).__name__} and {type(other).__name__}"]
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        return [] if alike else [f"{where}: another tensor"]
    if hasattr(one, "ddp_bucket_size"):
        one, other = vars(one), {name: vars(other).get(name) for name in vars(one)}
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{where}: {one.keys() ^ other.keys()}"]
        return [d for key in one for d in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list | tuple):
        pairs = enumerate(zip(one, other, strict=True))
        return [d for n, pair in pairs for d in differences(*pair, f"{where}.{n}")]
    alike = (one == other).all() if hasattr(one, "all") else one == other
    return [] if alike else [f"{where}: {one!r:.40} and {other!r:.40}"]


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("mp_rank_*/*"))


def compared(folder: Path, way: str) -> list[str]:
    """What the files of a way hold otherwise than stock's."""
    stock, own = (folder / name / "iter_0000002" for name in ("stock", way))
    assert files_of(stock) == files_of(own) != []
    return [
        f"{name}{line}"
        for name in files_of(stock)
        for line in differences(
            *(torch.load(tag / name, weights_only=False) for tag in (stock, own))
        )
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_files_hold_what_stocks_save_holds(ranks: RankPool, tmp_path: Path, engine: str) -> None:
    world, setup = ENGINES[engine]
    found = ranks.run(world, JOBS + "saved_each_way", setup, str(tmp_path))
    for way in ("direct", "background"):
        assert compared(tmp_path, way) == []
        assert (tmp_path / way / LATEST).read_text() == "2"
        assert not ucp.verify(tmp_path / way, deep=True).findings
        table = json.loads((tmp_path / way / "iter_0000002" / FILE_NAME).read_text())
        for one in found:
            assert one["own"].table == table["run"][FINGERPRINT] and len(one["own"].table) > 10
            assert one["own"].digest == ucp.fingerprint(tmp_path / way).digest
            report = one[way]
            assert sum(report.bytes_by_rank) == report.written_bytes
            assert (report.blocked_seconds < report.seconds) == (way == "background")
            assert not report.notes


def test_the_comparison_sees_one_element(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, JOBS + "saved_each_way", SMALL, str(tmp_path))
    path = tmp_path / "stock" / "iter_0000002" / "mp_rank_00" / "distrib_optim.pt"
    tree = torch.load(path, weights_only=False)
    next(iter(tree[0].values()))["exp_avg"][0] += 1
    torch.save(tree, path)
    (found,) = compared(tmp_path, "direct")
    assert "exp_avg: another tensor" in found


@pytest.mark.parametrize("room", [0, 20_000])
def test_what_finds_no_room_is_written_before_the_call_returns(
    ranks: RankPool, tmp_path: Path, room: int
) -> None:
    ranks.run(2, JOBS + "saved_each_way", SMALL, str(tmp_path), snapshot_bytes=room)
    assert compared(tmp_path, "background") == []


@pytest.mark.parametrize("engine", ["dp4", "tied stages", "moe", "plain", "plain bf16"])
def test_megatron_core_loads_them(sources: Sources, engine: str) -> None:
    """On the same mesh, by its own functions."""
    world, setup = ENGINES[engine]
    folder = sources.get(world, setup, SAVE, more=3, kind="torch")
    check(sources.ranks.run(world, JOBS + "stock_load", setup, folder), None)


# ------------------------------------------------ on another mesh

OTHER: dict[str, Any] = {"pp": 1, "vpp": 1, "layout": None, "bucket": None, "gather": False}


@pytest.mark.parametrize(
    "engine", ["dp4", "tied stages", "moe", "moe in stages", "plain", "plain bf16", "plain moe"]
)
def test_into_another_mesh(sources: Sources, engine: str) -> None:
    world, setup = ENGINES[engine]
    folder = sources.get(world, setup, SAVE, more=3, kind="torch")
    shown = str(ucp.inspect(Path(folder) / "trained"))
    assert ": Megatron-LM's legacy torch format\n" in shown
    target = replace(setup, tp=1, ep=1, overlap=False, **OTHER)
    check(sources.ranks.run(2, RESUME, target, folder), None)


def flip(tag: Path, name: str, is_it: Any) -> None:
    """One bit of the first record of a file that `is_it`, and the checksums of it."""
    path = tag / name
    whole = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if "/data/" in i.filename and is_it(i.file_size))
        data = archive.read(info)
    header = info.header_offset
    lengths = struct.unpack("<HH", whole[header + 26 : header + 30])
    at = header + 30 + sum(lengths)
    assert whole[at : at + len(data)] == data
    whole[at + 8] ^= 1
    old, new = (struct.pack("<I", crc32(one)) for one in (data, whole[at : at + len(data)]))
    assert whole.count(old) >= 1
    path.write_bytes(whole.replace(old, new))
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


def list_anew(tag: Path, name: str) -> None:
    """The manifest's line about a file is that of the file as it is now."""
    manifest = json.loads((tag / FILE_NAME).read_text())
    entry = entry_of(tag / name, name)
    now = [entry.name, entry.size_bytes, entry.sha256]
    manifest["files"] = [now if one[0] == name else one for one in manifest["files"]]
    (tag / FILE_NAME).write_text(json.dumps(manifest))


@pytest.mark.parametrize("target", [Zero(zero=3, layers=2), replace(SMALL, tp=2)], ids=show)
def test_a_changed_file_with_checksums_of_its_own_is_named(
    ranks: RankPool, tmp_path: Path, target: Any
) -> None:
    ranks.run(2, JOBS + "saved_each_way", SMALL, str(tmp_path))
    tag = tmp_path / "direct" / "iter_0000002"
    tree = torch.load(tag / "mp_rank_00" / "distrib_optim.pt", weights_only=False)
    (states,) = tree[0].values()
    assert [*states][:3] == ["param", "exp_avg", "exp_avg_sq"]
    seen: list[int] = []
    name = "mp_rank_00/distrib_optim.pt"
    flip(tag, name, lambda size: seen.append(size) or len([n for n in seen if n > 1000]) == 2)
    for said in ranks.run(2, JOBS + "load_refused", target, str(tmp_path / "direct")):
        assert said.startswith("ForeignFileError") and "is not the one that was saved" in said
    list_anew(tag, name)
    for said in ranks.run(2, JOBS + "load_refused", target, str(tmp_path / "direct")):
        assert said.startswith("ForeignFileError"), said
        assert "(exp_avg)" in said
    manifest = json.loads((tag / FILE_NAME).read_text())
    del manifest["run"][FINGERPRINT]
    (tag / FILE_NAME).write_text(json.dumps(manifest))
    for said in ranks.run(2, JOBS + "load_refused", target, str(tmp_path / "direct")):
        assert said == "", "nothing else sees it"


# ------------------------------------------------ beside training


@pytest.mark.parametrize("engine", ["dp4", "fp16", "own buffers", "moe", "plain", "plain fp16"])
def test_ten_steps_before_the_writer_starts_change_nothing(
    ranks: RankPool, tmp_path: Path, engine: str
) -> None:
    world, setup = ENGINES[engine]
    for one in ranks.run(world, JOBS + "trained_on", setup, str(tmp_path)):
        assert one["found"] == [] and len(one["changed"]) > 5


@pytest.mark.parametrize("engine", ["fp16", "dp2", "own buffers", "plain"])
def test_what_is_left_out_of_the_snapshot_is_found(
    ranks: RankPool, tmp_path: Path, engine: str
) -> None:
    world, setup = ENGINES[engine]
    for one in ranks.run(world, JOBS + "trained_on", setup, str(tmp_path), True):
        assert one["found"]


@pytest.mark.parametrize("way", ["direct", "background"])
def test_a_step_amid_the_taking_is_named(ranks: RankPool, tmp_path: Path, way: str) -> None:
    for found in ranks.run(2, JOBS + "torn", SMALL, str(tmp_path), way, True):
        assert len(found["changed"]) > 5
        assert found["error"].startswith("SaveError: the optimizer stepped while"), found
        assert "'step': 2.0}, as when" in found["error"] and "'step': 3.0}" in found["error"]
        assert found["left"] == [] == found["whole"]


def test_what_else_sees_a_step_amid_the_taking(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(2, JOBS + "torn", SMALL, str(tmp_path), "background", False):
        assert found["error"] == "" and found["found"]


@pytest.mark.parametrize(
    ("way", "how"), [("direct", "refused"), ("background", "refused"), ("background", "hangs")]
)
def test_what_fails_is_named_on_every_rank(
    ranks: RankPool, tmp_path: Path, way: str, how: str
) -> None:
    for found in ranks.run(2, JOBS + "failing", SMALL, str(tmp_path), way, how):
        assert found["error"] in ("SaveError", "RankError")
        assert "mp_rank_00" in found["message"] or how == "hangs"
        assert found["latest"] == "1" and found["then"] == []
        assert [one for one in found["left"] if one.startswith("iter")] == ["iter_0000001"]


def test_a_rank_that_dies_while_it_writes_leaves_no_pointer(
    ranks: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed):
        ranks.run(2, JOBS + "failing", SMALL, str(tmp_path), "background", "dies")
    assert (tmp_path / LATEST).read_text() == "1"
    assert not (tmp_path / "iter_0000002").exists()


# ------------------------------------------------ what is asked for


def test_the_stack_says_what_no_flag_says(ranks: RankPool, tmp_path: Path) -> None:
    for world, setup in (ENGINES["dp4"], ENGINES["layout"], ENGINES["moe"]):
        folder = tmp_path / str(setup.family) / str(setup.pp)
        found = ranks.run(world, JOBS + "without_flags", setup, str(folder))
        assert found == [[]] * world


def test_a_tag_that_is_there_is_replaced_and_older_ones_go(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(2, JOBS + "twice", SMALL, str(tmp_path)):
        assert found == ["iter_0000003", "iter_0000004", LATEST]


REFUSED: dict[str, tuple[Mcore, dict[str, Any], dict[str, Any], str]] = {
    "cut experts": (Mcore(tp=2, etp=1, **MOE), {}, {}, "experts that are cut as the rest"),
    "other buckets": (
        Mcore(overlap=True, bucket=2000, layers=2),
        {"ddp_bucket_size": 3000},
        {},
        "other buffers",
    ),
    "other stages": (Mcore(pp=2, layers=4), {"decoder_first_pipeline_num_layers": 1}, {}, "layers"),
    "another optimizer": (SMALL, {"optimizer_cpu_offload": True}, {}, "offloaded to the CPU"),
    "more optimizers": (SMALL, {"num_distributed_optimizer_instances": 3}, {}, "more optimizers"),
    "other format": (SMALL, {}, {"ckpt_format": "zarr"}, "torch_dist or torch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_files_can_not_say_is_refused(ranks: RankPool, tmp_path: Path, case: str) -> None:
    setup, given, options, said = REFUSED[case]
    for found in ranks.run(2, JOBS + "refused", setup, str(tmp_path), given, **options):
        assert found.startswith("UnsupportedError") and said in found, found
    assert not [*tmp_path.rglob("*")]


PLAIN = Mcore(distributed=False, layers=2)


@pytest.mark.parametrize("setup", [PLAIN, SMALL], ids=show)
def test_frozen_parameters_are_refused(ranks: RankPool, tmp_path: Path, setup: Mcore) -> None:
    """Nothing in the files says it: the load would look for states that nobody has."""
    for found in ranks.run(2, JOBS + "frozen", setup, str(tmp_path)):
        assert "frozen: decoder.final_layernorm.weight" in found, found
    assert not [*tmp_path.rglob("*")]


@pytest.mark.parametrize(
    ("setup", "how", "said"),
    [
        (SMALL, "others", "by Megatron-LM's own rules"),
        (SMALL, "alike", ""),
        (PLAIN, "others", "by Megatron-LM's own rules"),
        (PLAIN, "alike", "by Megatron-LM's own rules"),
        (PLAIN, "another order", "in the order of the model"),
    ],
)
def test_groups_that_no_load_finds_are_refused(
    ranks: RankPool, tmp_path: Path, setup: Mcore, how: str, said: str
) -> None:
    """The files list no group's parameters: a load finds them by Megatron-LM's rules."""
    for found in ranks.run(2, JOBS + "regrouped", setup, str(tmp_path), how):
        assert found.startswith("UnsupportedError" if said else "") and said in found, found
        assert bool(said) == bool(found)


def test_torch_dist_keeps_groups_of_other_rules(ranks: RankPool, tmp_path: Path) -> None:
    """Its files list no group's parameters either, but the manifest beside them says them."""
    job = JOBS + "regrouped_as_torch_dist"
    assert ranks.run(2, job, SMALL, str(tmp_path)) == [([], []), ([], [])]


def test_a_group_of_two_dtypes(ranks: RankPool, tmp_path: Path) -> None:
    setup = Mcore(distributed=False, dtype="bf16", layers=2)
    assert ranks.run(2, JOBS + "mixed", setup, str(tmp_path)) == [[], []]
