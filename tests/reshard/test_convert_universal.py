"""Universal folders from real checkpoints: loaded by stock DeepSpeed, and stock's own are read."""

import shutil
import sys
from pathlib import Path

import pytest

import megatron_ucp as ucp
from megatron_ucp.errors import (
    NotFoundError,
)
from tests.engines import kinds
from tests.engines.model import Setup
from tests.engines.sources import Sources
from tests.engines.tensor_jobs import Mega, Staged
from tests.reshard.converted import Mesh, loaded, same

pytestmark = pytest.mark.ranks

# What stock's own loads do not restore (S2, S4 and S5 of DeepSpeed 0.19.8): stated in
# docs/convert.md, not promised.
STOCK_FORGETS = {1: {"values calls", "values scale", "weights frozen.weight"}, 3: {"hyper"}}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("source", [(2, 1), (4, 3), (2, 0)])
def test_one_universal_folder_for_all_stages(
    sources: Sources, tmp_path: Path, source: Mesh, dtype: str
) -> None:
    """Stock DeepSpeed loads it at stages 1, 2 and 3: masters, moments, steps, counters
    bit-equal."""
    folder = Path(sources.get(source[0], Setup(source[1], dtype)))
    found = ucp.convert(
        folder, tmp_path / "filled_universal", to="universal", tag="filled", latest=True
    )
    same(folder / "filled", found.path)
    assert (tmp_path / "latest_universal").read_text() == "filled_universal"
    for dp, zero in ((2, 1), (4, 1), (2, 2), (1, 2), (4, 3), (2, 3)):
        setup = Setup(zero, dtype, seed=9)
        different = loaded(sources, dp, setup, found.path, str(folder), universal=True)
        forgets = STOCK_FORGETS[1] | (STOCK_FORGETS[3] if zero == 3 else set())
        assert {d.partition(":")[0] for d in different} <= forgets, (dp, zero)
    for dp, zero in ((2, 1), (4, 3), (1, 0)):
        setup = Setup(zero, dtype, seed=9)
        assert loaded(sources, dp, setup, str(tmp_path), str(folder), kinds.our_load) == []
    back = ucp.convert(found.path, tmp_path / "back", target=ucp.Mesh(dp=source[0], zero=source[1]))
    same(folder / "filled", back.path)


def test_a_universal_folder_with_the_names_of_a_pipeline(sources: Sources, tmp_path: Path) -> None:
    """Stock's pipeline engine looks for its own names."""
    folder = sources.get(4, Mega("llama", 2, 1), more=0)
    found = ucp.convert(
        folder, tmp_path / "out", to="universal", target=ucp.Target(ucp.Mesh(pp=2)), tag="filled"
    )
    assert (tmp_path / "out" / "zero" / "1.mlp.linear_fc1.weight" / "fp32.pt").is_file()
    same(Path(folder) / "filled", found.path)
    setup = Staged("llama", 1, 1, layers=2, pp=2, seed=9)
    assert loaded(sources, 2, setup, found.path, folder, universal=True) == []


def stock_converted(source: Path, output: Path, *more: str) -> None:
    from unittest import mock

    from deepspeed.checkpoint import ds_to_universal

    args = ["--input_folder", str(source), "--output_folder", str(output)]
    args += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    with mock.patch.object(sys, "argv", ["ds_to_universal", *args, *more]):
        ds_to_universal.main(ds_to_universal.parse_arguments())


@pytest.mark.parametrize(("dp", "zero"), [(2, 1), (2, 2), (4, 3)])
def test_stocks_own_universal_folders_are_read(
    sources: Sources, tmp_path: Path, dp: int, zero: int
) -> None:
    """In both of its forms. Its converter makes all values float32, and writes neither frozen
    parameters nor buffers at stage 3."""
    folder = Path(sources.get(dp, Setup(zero, "bf16")))
    stock_converted(
        folder / "filled", tmp_path / "stock", *(["--inject_missing_state"] if zero < 3 else [])
    )
    different = ucp.diff(folder / "filled", tmp_path / "stock")
    assert {(d.parameter, d.what) for d in different} == (
        {("frozen.weight", "parameter"), ("calls", "parameter"), ("scale", "parameter")}
        if zero == 3
        else {("frozen.weight", "value dtype"), ("calls", "value dtype")}
    )
    if zero < 3:
        setup, stock = Setup(3, "bf16", seed=9), str(tmp_path / "stock")
        allow = {"narrow"}
        assert loaded(sources, 4, setup, stock, str(folder), kinds.our_load, allow=allow) == []


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_stocks_universal_folder_of_a_tensor_parallel_run(
    sources: Sources, tmp_path: Path, family: str
) -> None:
    folder = Path(sources.get(2, Mega(family, 2, 1), more=0))
    stock_converted(folder / "filled", tmp_path / "stock")
    assert ucp.diff(folder / "filled", tmp_path / "stock") == []
    setup = Mega(family, 4, 3, seed=9)
    assert loaded(sources, 4, setup, str(tmp_path / "stock"), str(folder), kinds.our_load) == []


def test_a_lost_file_of_a_universal_folder(sources: Sources, tmp_path: Path) -> None:
    """S9: stock loads on and leaves the parameter as it was."""
    folder = sources.get(2, Setup(1, "bf16"))
    for name, error in (
        ("fp32.pt", NotFoundError),
        ("exp_avg.pt", ucp.UcpError),
        ("step.pt", ucp.UcpError),
    ):
        found = ucp.convert(folder, tmp_path / name, to="universal", tag="filled")
        (Path(found.path) / "zero" / "up.weight" / name).unlink()
        with pytest.raises(error) as caught:
            ucp.describe(found.path)
        assert "up.weight" in str(caught.value)
    shutil.rmtree(tmp_path / "fp32.pt" / "zero" / "down.weight")
    with pytest.raises(NotFoundError, match=r"state files are missing[^$]*down\.weight"):
        ucp.describe(tmp_path / "fp32.pt")
