"""Conversions on real checkpoints: equal to the source bit by bit; stock DeepSpeed loads them."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.errors import (
    InexactError,
    NotFoundError,
)
from tests.engines import kinds
from tests.engines.model import Setup
from tests.engines.sources import Sources
from tests.engines.tensor_jobs import Mega, Staged
from tests.reshard.converted import Mesh, digest, loaded, same
from tests.reshard.plain import stock_converted

pytestmark = pytest.mark.ranks

# (dp, ZeRO) of the source and of the target
PAIRS = [
    ((2, 1), (2, 1)),
    ((2, 1), (4, 3)),
    ((2, 1), (2, 0)),
    ((4, 3), (1, 1)),
    ((4, 3), (2, 2)),
    ((4, 3), (2, 3)),
    ((2, 0), (2, 2)),
    ((2, 0), (4, 3)),
    ((2, 2), (1, 0)),
    ((1, 1), (4, 2)),
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_native(sources: Sources, tmp_path: Path, source: Mesh, target: Mesh, dtype: str) -> None:
    folder = Path(sources.get(source[0], Setup(source[1], dtype)))
    before, tag = digest(folder), "trained" if target == (4, 2) else "filled"
    mesh = ucp.Mesh(dp=target[0], zero=target[1])
    found = ucp.convert(folder, tmp_path / tag, target=mesh, tag=tag, latest=True)
    same(folder / tag, found.path)
    assert digest(folder) == before and (tmp_path / "latest").read_text() == tag
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([tag, "latest"])
    setup = Setup(target[1], dtype, seed=9)
    assert loaded(sources, target[0], setup, found.path, str(folder), tag=tag) == []
    assert loaded(sources, target[0], setup, found.path, str(folder), kinds.our_load, tag=tag) == []


def test_the_client_state_travels(sources: Sources, tmp_path: Path) -> None:
    folder = sources.get(2, Setup(1, "bf16"))
    for to, target in (("native", ucp.Mesh(dp=2, zero=1)), ("universal", None)):
        found = ucp.convert(folder, tmp_path / to, to=to, target=target, tag="trained")
        job = kinds.stock_load, Setup(1, "bf16", seed=9), found.path, folder
        how = {"tag": "trained", "universal": to == "universal"}
        state = sources.ranks.run(2, *job, **how)[0]["client_state"]
        assert state["note"] == "mine" and torch.equal(state["data"], torch.arange(5))


SETTINGS = {
    "sub-groups": Setup(3, "bf16", zero_config=(("sub_group_size", 30),)),
    "aligned parameters": Setup(1, "bf16", zero_config=(("parameter_alignment", True),)),
    "round robin": Setup(2, "bf16", zero_config=(("round_robin_gradients", True),)),
    "BF16_Optimizer": Setup(1, "bf16", config=(("data_types", {"grad_accum_dtype": "fp32"}),)),
    "three groups": Setup(3, "fp32", groups=3),
    "SGD": Setup(1, "fp32", "SGD", (("momentum", 0.9),)),
    "AMSGrad": Setup(2, "bf16", options=(("amsgrad", True),)),
    "elastic": Setup(1, "bf16", zero_config=(("elastic_checkpoint", True),)),
    "fp16": Setup(1, "fp16"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_to_and_from_a_job_with_other_settings(sources: Sources, tmp_path: Path, name: str) -> None:
    """There with the DeepSpeed config of the job, and back to a plain one of the other stage."""
    setup, dtype = SETTINGS[name], SETTINGS[name].dtype
    plain = Setup(
        3 if setup.zero < 3 else 1, dtype, setup.optimizer, setup.options, groups=setup.groups
    )
    config = {"zero_optimization": dict(setup.zero_config), **dict(setup.config)}
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    folder = sources.get(2, plain)
    there, mesh = tmp_path / "there", ucp.Mesh(dp=2, zero=setup.zero)
    found = ucp.convert(folder, there, target=mesh, tag="filled", ds_config=config)
    if name != "elastic":  # its own form is not written: DeepSpeed reads the plain one there, too
        same(Path(folder) / "filled", found.path)
    other = replace(setup, dtype=dtype, seed=9)
    assert loaded(sources, 2, other, found.path, folder) == []
    own = sources.get(2, setup)
    back = ucp.convert(
        own,
        tmp_path / "back",
        target=ucp.Mesh(dp=4, zero=plain.zero),
        tag="filled",
        ds_config={dtype: {"enabled": True}} if dtype != "fp32" else {},
    )
    setup = Setup(plain.zero, dtype, setup.optimizer, setup.options, groups=setup.groups, seed=9)
    assert [
        d
        for d in loaded(sources, 4, setup, back.path, own)
        if not (name == "elastic" and d.startswith("hyper"))
    ] == []


@pytest.mark.parametrize(
    ("before", "after"), [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", "fp16"), ("fp16", "bf16")]
)
def test_another_training_dtype(sources: Sources, tmp_path: Path, before: str, after: str) -> None:
    folder = sources.get(2, Setup(1, before))
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    target = ucp.Target(ucp.Mesh(dp=2, zero=2), dtype=names[after])
    if before == "fp32":  # a frozen parameter has no master
        with pytest.raises(InexactError, match="would be rounded"):
            ucp.convert(folder, tmp_path / "out", target=target, tag="filled")
    allow = frozenset({"narrow"})
    found = ucp.convert(folder, tmp_path / "out", target=target, tag="filled", allow=allow)
    different = loaded(sources, 2, Setup(2, after, seed=9), found.path, folder, same_dtype=False)
    assert [d for d in different if not d.startswith(("scale", "values"))] == []


# ------------------------------------------------ tensor parallelism and pipelines

TENSORS = [
    ("llama", (2, 1, 3), (1, 2, 1)),
    ("gpt", (1, 4, 1), (2, 2, 3)),
    ("llama", (4, 1, 1), (2, 1, 0)),
    ("gpt", (2, 2, 0), (4, 1, 1)),
]


@pytest.mark.parametrize(("family", "source", "target"), TENSORS)
def test_tensor_parallel(
    sources: Sources, tmp_path: Path, family: str, source: Mesh, target: Mesh
) -> None:
    folder = sources.get(source[0] * source[1], Mega(family, source[0], source[2]), more=0)
    tp, dp, zero = target
    found = ucp.convert(
        folder, tmp_path / "native", target=ucp.Mesh(tp=tp, dp=dp, zero=zero), tag="filled"
    )
    universal = ucp.convert(folder, tmp_path / "universal", to="universal", tag="filled")
    same(Path(folder) / "filled", found.path)
    same(found.path, universal.path)
    setup = Mega(family, tp, zero, seed=9)
    assert loaded(sources, tp * dp, setup, found.path, folder) == []
    assert loaded(sources, tp * dp, setup, found.path, folder, kinds.our_load) == []
    assert loaded(sources, tp * dp, setup, universal.path, folder, kinds.our_load) == []
    if zero in (1, 2):
        assert loaded(sources, tp * dp, setup, universal.path, folder, universal=True) == []


# (tp, pp, dp, ZeRO, tied, dtype); pp 0: an engine without a pipeline
STAGES = [
    ((1, 2, 2, 1, False, "fp32"), (2, 0, 2, 3)),
    ((1, 0, 4, 3, True, "bf16"), (1, 4, 1, 1)),
    ((2, 2, 1, 1, True, "bf16"), (1, 2, 2, 1)),
    ((1, 2, 1, 0, False, "bf16"), (1, 0, 2, 2)),
    ((1, 4, 1, 1, True, "fp32"), (2, 2, 1, 0)),
]


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize(("source", "target"), STAGES)
def test_pipelines(
    sources: Sources, tmp_path: Path, family: str, source: Mesh, target: Mesh
) -> None:
    tp, pp, dp, zero, tied, dtype = source
    folder = sources.get(
        tp * dp * (pp or 1),
        Staged(family, tp, zero, pp=pp, tied=bool(tied), dtype=str(dtype)),
    )
    tp, pp, dp, zero = target
    stages = "uniform" if pp else None
    mesh = ucp.Target(ucp.Mesh(tp=tp, pp=pp or 1, dp=dp, zero=zero), stages=stages)
    found = ucp.convert(folder, tmp_path / "native", target=mesh, tag="filled")
    same(Path(folder) / "filled", found.path)
    setup = Staged(family, tp, zero, pp=pp, tied=bool(tied), dtype=str(dtype), seed=9)
    assert loaded(sources, tp * dp * (pp or 1), setup, found.path, folder) == []
    assert loaded(sources, tp * dp * (pp or 1), setup, found.path, folder, kinds.our_load) == []
    universal = ucp.convert(folder, tmp_path / "universal", to="universal", tag="filled")
    same(found.path, universal.path)


EXTRAS = [
    ((1, 2, 2, 1), (2, 0, 2, 3)),
    ((1, 0, 4, 3), (1, 2, 2, 1)),
    ((1, 2, 1, 0), (1, 0, 2, 2)),
    ((2, 2, 1, 1), (1, 4, 1, 0)),
]


@pytest.mark.parametrize(("source", "target"), EXTRAS)
def test_frozen_parameters_and_buffers_of_a_pipeline(
    sources: Sources, tmp_path: Path, source: Mesh, target: Mesh
) -> None:
    """A buffer is in no family's table: its place is beside the layer's parameters."""
    tp, pp, dp, zero = source
    folder = sources.get(tp * dp * (pp or 1), Staged("llama", tp, zero, pp=pp, extras=True), more=0)
    tp, pp, dp, zero = target
    stages = "uniform" if pp else None
    mesh = ucp.Target(ucp.Mesh(tp=tp, pp=pp or 1, dp=dp, zero=zero), stages=stages)
    found = ucp.convert(folder, tmp_path / "native", target=mesh, tag="filled")
    same(Path(folder) / "filled", found.path)
    setup = Staged("llama", tp, zero, pp=pp, extras=True, seed=9)
    assert loaded(sources, tp * dp * (pp or 1), setup, found.path, folder) == []


def test_the_same_stages_need_no_word(sources: Sources, tmp_path: Path) -> None:
    folder = sources.get(2, Staged("gpt", 1, 1, pp=2, tied=True, partition=(1, 5)), more=0)
    found = ucp.convert(folder, tmp_path / "out", target=ucp.Mesh(pp=2, dp=2, zero=1), tag="filled")
    same(Path(folder) / "filled", found.path)
    setup = Staged("gpt", 1, 1, pp=2, tied=True, partition=(1, 5), seed=9)
    assert loaded(sources, 4, setup, found.path, folder) == []
    found = ucp.convert(folder, tmp_path / "other", target=ucp.Mesh(pp=3, dp=1, zero=1))
    assert any("`--stages layers`" in note for note in found.notes)
    said = ucp.convert(
        folder, tmp_path / "named", target=ucp.Target(ucp.Mesh(pp=3, zero=1), stages="layers")
    )
    assert ucp.diff(found.path, said.path) == [] and said.notes == found.notes[:-1]


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


@pytest.mark.parametrize(("dp", "zero"), [(2, 1), (2, 2), (4, 3)])
def test_stocks_own_universal_folders_are_read(
    sources: Sources, tmp_path: Path, dp: int, zero: int
) -> None:
    """In both of its forms. Its converter makes all values float32, and writes neither frozen
    parameters nor buffers at stage 3."""
    folder = Path(sources.get(dp, Setup(zero, "bf16")))
    more = ["--inject_missing_state"] if zero < 3 else []
    stock_converted(folder / "filled", tmp_path / "stock", *more)
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
