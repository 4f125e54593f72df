"""Every verb on checkpoints of DeepSpeed's AutoEP."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.cli import main
from tests.engines import kinds
from tests.engines.autoep_jobs import Auto
from tests.engines.sources import Sources, check, without_manifest
from tests.ranks import RankPool
from tests.reshard.plain import stock_converted
from tests.reshard.test_expert_tools import converted, copy_of

pytestmark = pytest.mark.ranks
STOCK = kinds.stock_load
SIX = {"experts": 6}


@pytest.fixture
def shards(sources: Sources) -> Path:
    """ZeRO-3 on two expert-parallel ranks."""
    return Path(sources.get(4, Auto(2, 3, **SIX), more=0))


@pytest.fixture
def files(sources: Sources) -> Path:
    """ZeRO-1 on two expert-parallel ranks."""
    return Path(sources.get(4, Auto(2, 1), more=3))


@pytest.mark.parametrize(("ep", "zero"), [(1, 1), (2, 2), (1, 3)])
def test_stock_deepspeed_loads_a_conversion(
    ranks: RankPool, shards: Path, tmp_path: Path, ep: int, zero: int
) -> None:
    out = converted(shards, tmp_path / "out", ucp.Mesh(dp=4, ep=ep, zero=zero))
    assert main(["verify", "--deep", str(out / "trained")]) == 0
    assert main(["diff", str(shards / "trained"), str(out / "trained")]) == 0
    found = ranks.run(4, STOCK, Auto(ep, zero, **SIX), str(out / "trained"), tag="trained")
    assert found[0]["differences"] == []


def test_a_conversion_to_zero_3_resumes(
    ranks: RankPool, sources: Sources, files: Path, tmp_path: Path
) -> None:
    out = converted(files, tmp_path / "out", ucp.Mesh(dp=4, ep=2, zero=3))
    assert ucp.diff(files / "filled", out / "filled") == []
    found = ranks.run(4, STOCK, Auto(2, 3), str(out / "trained"), tag="trained")
    assert found[0]["differences"] == []
    without_manifest(out)
    check(sources.resume(4, Auto(4, 1), out))


@pytest.mark.parametrize(
    ("to", "mesh"),
    [("native", ucp.Mesh(dp=4, ep=2, zero=0)), ("universal", None)],
)
def test_what_is_not_written(files: Path, tmp_path: Path, to: str, mesh: ucp.Mesh | None) -> None:
    with pytest.raises(ucp.UcpError, match="stacked experts are not written"):
        ucp.convert(files / "trained", tmp_path / "out", to=to, target=mesh)
    assert not (tmp_path / "out").exists()


def test_groups_that_tear_a_tensor_apart(files: Path, tmp_path: Path) -> None:
    manifest = ucp.describe(files / "trained")
    first = "mixtures.0.experts.w2[1]"
    groups: dict[int | None, list[str]] = {}
    for spec in manifest.params:
        if spec.kind == "trainable":
            at = -1 if spec.name == first else manifest.group_number(spec.name)
            groups.setdefault(at, []).append(spec.name)
    listed = tuple(map(tuple, groups.values()))
    target = ucp.Target(ucp.Mesh(dp=4, ep=1, zero=1), groups=listed)
    with pytest.raises(ucp.UcpError, match="together"):
        ucp.convert(files / "trained", tmp_path / "out", target=target)


@pytest.mark.parametrize("manifest", [True, False])
def test_every_verb_reads_it(
    shards: Path, files: Path, tmp_path: Path, manifest: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, count, said in ((shards, 36, "6, 3 on each"), (files, 24, "4, 2 on each")):
        folder = copy_of(source, tmp_path / f"{count}", manifest)
        assert main(["inspect", str(folder)]) == 0
        assert f"{said} of 2 ranks: 2 layers" in capsys.readouterr().out
        assert main(["verify", "--deep", str(folder)]) == 0
        assert main(["plan", str(folder), "--mesh", "dp=4,ep=1,zero=3"]) == 0
        named = [spec for spec in ucp.describe(folder).params if spec.expert]
        assert len(named) == count
        assert {"mixtures.1.experts.w3[3]"} < {spec.name for spec in named}
        assert main(["diff", str(source / "filled"), str(folder)]) == 1


@pytest.mark.parametrize("zero", [1, 3])
def test_a_universal_folder_of_stock(
    sources: Sources, shards: Path, files: Path, tmp_path: Path, zero: int
) -> None:
    """Its tensors have all experts of a layer; at ZeRO-3 they are flat, and buffers are missing."""
    source = shards if zero == 3 else files
    out = tmp_path / "stock"
    for tag in ("trained", "filled"):
        stock_converted(source / tag, out / tag, "--inject_missing_state")
        differences = ucp.diff(source / tag, out / tag)
        assert {one.parameter for one in differences} == ({"scale"} if zero == 3 else set())
    if zero == 1:
        shutil.copy(source / "oracle.pt", out)
        check(sources.resume(4, Auto(4, 2), out))


def change_partitions(state: Any) -> None:
    state["optimizer_state_dict"]["ds_zero_partition_groups"][-1]["partition_count"] = 4


def change_placement(state: Any) -> None:
    for layer in state["ds_autoep_layers"]:
        ranks = layer["expert_placement"]["ranks"]
        ranks[0]["experts"], ranks[1]["experts"] = ranks[1]["experts"], ranks[0]["experts"]


def change_count(state: Any) -> None:
    state["ds_autoep_layers"][0]["num_experts"] = 4


def change_sizes(state: Any) -> None:
    state["ds_autoep_layers"][0]["ep_size"] = 1


def change_order(state: Any) -> None:
    state["ds_config"]["use_data_before_expert_parallelism"] = True


def fold(state: Any) -> None:
    state["folding"] = {"tp_size": 2}


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("optim", change_partitions, "shared by other ranks"),
        ("model", change_placement, "otherwise than in equal runs"),
        ("model", change_count, "otherwise than in equal runs"),
        ("model", change_sizes, "different numbers of ranks|otherwise than in equal"),
        ("model", change_order, "in another order among the experts"),
        ("model", fold, "folded with AutoTP"),
    ],
)
def test_files_that_say_something_else(
    shards: Path, tmp_path: Path, file: str, change: Callable[[Any], None], words: str
) -> None:
    folder = copy_of(shards, tmp_path / "changed", manifest=False)
    name = next(folder.glob(f"zero_pp_rank_0_*_{file}_states.pt"))
    state = torch.load(name, weights_only=False)
    change(state)
    torch.save(state, name)
    with pytest.raises(ucp.UcpError, match=words):
        ucp.describe(folder)


def test_shards_of_other_ranks(shards: Path, tmp_path: Path) -> None:
    folder = copy_of(shards, tmp_path / "changed", manifest=False)
    name = next(folder.glob("zero_pp_rank_3_*_optim_states.pt"))
    state = torch.load(name, weights_only=False)
    state["optimizer_state_dict"]["ds_zero_partition_groups"][-1]["partition_ranks"] = [2, 3]
    torch.save(state, name)
    (found,) = ucp.verify(folder).findings
    assert "shared by other ranks" in found.what and found.file.endswith(name.name)


def test_a_lost_expert_is_named(files: Path, tmp_path: Path) -> None:
    for manifest in (True, False):
        folder = copy_of(files, tmp_path / f"lost{manifest}", manifest)
        name = "layer_1_expert_2_mp_rank_00_model_states.pt"
        (folder / name).unlink()
        with pytest.raises(ucp.UcpError, match=name):
            ucp.describe(folder)
            ucp.verify(folder)


def test_an_expert_of_another_run(files: Path, tmp_path: Path) -> None:
    """The file of one expert, from another tag: its masters are others."""
    folder = copy_of(files, tmp_path / "mixed", manifest=False)
    for number in range(4):
        name = f"layer_1_expert_{number}_mp_rank_00_model_states.pt"
        shutil.copy(files / "filled" / name, folder / name)
    found = ucp.verify(folder).findings
    assert any("masters" in one.what or "master" in one.what for one in found)
