"""What a user of DeepSpeed may do to a conversion: odd targets, odd values in the files. A finite
value that a dtype can't hold is refused by name in every format; nothing is left of the output."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock
from zipfile import ZipFile

import numpy as np
import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.core.manifest_json import from_json, to_json
from megatron_ucp.errors import InexactError, StateMismatchError, UsageError
from megatron_ucp.families.family import Sizes
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.deepspeed.partition import divide
from megatron_ucp.formats.deepspeed.target import Target, config_for
from megatron_ucp.reshard import target as placed
from tests.formats.craft import names_of_python_3_13
from tests.formats.megatron_files import TAG, by_torch
from tests.reshard import paper, twins
from tests.reshard.plain import (
    PLAIN,
    SHAPES,
    converted,
    edited,
    family_model,
    target,
    whole,
    written,
)
from tests.reshard.test_export_edges import with_values

MODEL = "mp_rank_00_model_states.pt"
OPTIMIZER = "zero_pp_rank_0_mp_rank_00_optim_states.pt"

# ------------------------------------------------ targets


def test_the_files_say_how_they_are_laid_out(
    model: paper.Model, source: Path, tmp_path: Path
) -> None:
    """Else the next conversion puts back an order that nobody permuted, or does not put it back."""
    for name, value in (
        *(("round_robin", True), ("sub_group_size", 7), ("alignment", True), ("offloaded", True)),
    ):
        run = tmp_path / name
        to = target(zero=3 if name == "sub_group_size" else 2, dp=3, **{name: value})
        converted(model, source, run / "there", to)
        files = paper.read(run / "there")
        config = next(tree["ds_config"] for file, tree in files.items() if "model" in file)
        assert Target(to.mesh).completed(config) == to
        ucp.convert(run / "there", run / "back", target=target())
        whole(model, source, run / "back", target())
        ucp.convert(run / "there", run / "same", target=to.mesh)
        assert paper.differences(run / "there", run / "same") == []


def test_the_config_of_the_job_is_in_the_files(
    model: paper.Model, source: Path, tmp_path: Path
) -> None:
    config: dict[str, Any] = {"zero_optimization": {"round_robin_gradients": True}}
    config |= {"gradient_clipping": 0.25, "mine": 1}
    ucp.convert(source, tmp_path / "out", target=ucp.Mesh(dp=3, zero=2), ds_config=config)
    files = paper.read(tmp_path / "out")
    zero = {"round_robin_gradients": True, "stage": 2}
    assert files[MODEL]["ds_config"] == {**config, "zero_optimization": zero}
    assert files[OPTIMIZER]["optimizer_state_dict"]["clip_grad"] == 0.25
    ucp.convert(tmp_path / "out", tmp_path / "back", target=target())
    whole(model, source, tmp_path / "back", target())


def test_what_else_a_config_says_stays() -> None:
    zero = {"sub_group_size": 7, "overlap_comm": True}
    config = {"zero_optimization": zero, "bf16": {"enabled": True}, "steps": 3}
    wanted = {**config, "zero_optimization": {**zero, "stage": 3}}
    assert config_for(Target(ucp.Mesh(zero=3)), config, "bfloat16") == wanted
    found = config_for(Target(ucp.Mesh(zero=1), grad_accum_fp32=True), config, "bfloat16")
    assert found["data_types"] == {"grad_accum_dtype": "fp32"} and "data_types" not in config


def test_a_dtype_that_a_config_leaves_open(source: Path, tmp_path: Path) -> None:
    """A file for the Trainer of Hugging Face, which fills it in later: both sections say "auto"."""
    config = {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    with pytest.raises(UsageError, match="leaves the training dtype open"):
        ucp.convert(source, tmp_path / "out", target=ucp.Mesh(zero=1), ds_config=config)
    to = Target(ucp.Mesh(zero=1), "bfloat16")
    ucp.convert(source, tmp_path / "out", target=to, ds_config=config)
    assert list((tmp_path / "out").glob("bf16_*"))


def test_offloading_to_the_cpu_is_no_bf16_optimizer() -> None:
    config = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    mesh = ucp.Mesh(zero=1)
    assert Target(mesh).completed(config).keeper("bfloat16") == "bf16"
    config["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}}
    assert Target(mesh).completed(config).keeper("bfloat16") == "zero12"


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_a_dtype_for_a_source_without_a_config(
    source: Path, tmp_path: Path, dtype: str | None
) -> None:
    edited(source, lambda _, tree: tree.pop("ds_config", None))
    ucp.convert(source, tmp_path / "out", target=Target(ucp.Mesh(zero=1), dtype))
    weight = paper.read(tmp_path / "out")[MODEL]["module"]["up.weight"]
    assert weight.dtype == (torch.bfloat16 if dtype else torch.float32)


def test_another_optimizer(model: paper.Model, source: Path, tmp_path: Path) -> None:
    for name in ("torch.SGD", "torch.NAdam", "torch.Adagrad"):
        with pytest.raises(StateMismatchError, match="keeps other states"):
            ucp.convert(source, tmp_path / "out", target=target(optimizer=name))
    to = target(optimizer="deepspeed.FusedAdam")  # the same states, and a step that is an int
    converted(model, source, tmp_path / "out", to)
    entry = paper.read(tmp_path / "out")[OPTIMIZER]["optimizer_state_dict"]
    assert type(entry["base_optimizer_state"]["state"][0]["step"]) is int


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_of_a_sequence_are_partitions_too(source: Path, tmp_path: Path, zero: int) -> None:
    to = replace(target(), mesh=ucp.Mesh(dp=2, sp=2, zero=zero))
    ucp.convert(source, tmp_path / "sequence", target=to)
    ucp.convert(source, tmp_path / "data", target=target(dp=4, zero=zero))
    assert paper.differences(tmp_path / "sequence", tmp_path / "data") == []
    assert ucp.verify(tmp_path / "sequence", deep=True).findings == ()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_low_precision_masters(tmp_path: Path, zero: int) -> None:
    """At stage 0 in float32 the weights are the masters, and have their dtype."""
    model = paper.plain_model({name: shape for name, shape in SHAPES.items() if shape})

    def narrow(name: str, tree: dict[str, Any]) -> None:
        if "optim" in name:
            state, name = tree["optimizer_state_dict"], "single_partition_of_fp32_groups"
            state[name] = [flat.bfloat16() for flat in state[name]]
        else:
            tree["module"] = {k: value.bfloat16().float() for k, value in tree["module"].items()}

    source = edited(written(model, tmp_path), narrow)
    ucp.convert(source, tmp_path / "out", target=target(zero=zero))
    assert ucp.verify(tmp_path / "out", deep=True).findings == ()
    assert [
        d for d in ucp.diff(source, tmp_path / "out") if not (zero == 0 and d.what == "fp32 dtype")
    ] == []


def test_parameters_of_a_pipeline_are_balanced_without_frozen_ones(tmp_path: Path) -> None:
    """DeepSpeed counts what is trained."""
    with mock.patch.object(placed, "divide", autospec=True, side_effect=divide) as called:
        model = family_model("gpt", Sizes(2, 4, 2, 2, 2, 4, 8, 8))
        kinds = {name: "frozen" if "layers.0" in name else "trainable" for name in model.shapes}
        names = [name for name, kind in kinds.items() if kind == "trainable"]
        model = replace(model, kinds=kinds, groups=[(*model.groups[0][:2], names)])
        source = written(model, tmp_path)
        to = Target(ucp.Mesh(pp=2, dp=1, zero=1), **PLAIN, stages="parameters")
        ucp.convert(source, tmp_path / "out", target=to)
    assert set(called.call_args.args[3]) == set(names)


# ------------------------------------------------ values

CLIENT = {
    "a view": torch.arange(12.0).reshape(3, 4)[1:],
    "a transposed view": torch.arange(12.0).reshape(3, 4).t(),
    "expanded": torch.ones(1).expand(4),
    "bool": torch.tensor([[True, False], [False, False]]).t(),
    "complex": torch.arange(4).to(torch.complex64)[::2],
    "empty": torch.zeros(0, 3),
    "0-d": torch.tensor(3),
    "numpy": np.arange(6).reshape(2, 3),
    "of Fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "big-endian": np.arange(3, dtype=">i4"),
    "text": np.array(["ab", "c"]),
    "scalar": np.float64(0.1),
    "flag": np.bool_(True),
    "random state": np.random.RandomState(0).get_state(),
}


@pytest.mark.parametrize("to", ["native", "universal"])
def test_client_state(source: Path, tmp_path: Path, to: str) -> None:
    edited(source, lambda name, tree: tree.update(mine=CLIENT) if "model" in name else None)
    before = torch.load(source / MODEL, weights_only=False)["mine"]
    ucp.convert(source, tmp_path / "out", to=to, target=target())
    ucp.convert(tmp_path / "out", tmp_path / "again", target=target(zero=3))  # what we write
    for path in (tmp_path / "out", tmp_path / "again"):
        found = torch.load(next(path.glob(f"*{MODEL}")), weights_only=False)["mine"]
        assert list(found) == list(before)
        for name, value in before.items():
            equal = (
                paper.same(found[name], value)
                if isinstance(value, torch.Tensor)
                else repr(found[name]) == repr(value)
                and getattr(found[name], "dtype", None) == getattr(value, "dtype", None)
            )
            assert type(found[name]) is type(value) and equal, name


def test_a_path_in_the_client_state_that_python_3_13_wrote(source: Path, tmp_path: Path) -> None:
    with names_of_python_3_13():
        edited(source, lambda name, tree: "model" in name and tree.update(data=Path("sets/a")))
    with ZipFile(source / MODEL) as file:
        (written,) = (file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
    assert b"pathlib._local" in written
    assert ucp.verify(source).findings == ()
    ucp.convert(source, tmp_path / "out", target=target())
    (path,) = (tmp_path / "out").glob(f"*{MODEL}")
    assert torch.load(path, weights_only=False)["data"] == Path("sets/a")


def test_a_groups_values_are_written_as_they_are(source: Path, tmp_path: Path) -> None:
    """A rate as a schedule with np.cos leaves it, and a program's own keys."""

    def change(name: str, tree: dict[str, Any]) -> None:
        if "optim" in name:
            groups = tree["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
            groups[0] |= {"lr": np.float64(0.1), "odd": [{}], "x": {}}

    found = ucp.convert(edited(source, change), tmp_path / "out", target=target())
    assert ucp.describe(source).groups[0]["lr"] == 0.1
    entry = paper.read(tmp_path / "out")[OPTIMIZER]["optimizer_state_dict"]
    (group,) = entry["base_optimizer_state"]["param_groups"]
    own = {"odd": [{}], "x": {}}
    assert group == {"lr": 0.1, "weight_decay": 0.5, **own, "params": [0]}
    assert type(group["lr"]) is np.float64 and found.notes == ()


def resealed(folder: Path) -> Path:
    """With a manifest that lists the files as they are now."""
    path = folder / "ucp_manifest.json"
    manifest = from_json(path.read_bytes(), str(path))
    files = tuple(output_folder.entry_of(folder / entry.name) for entry in manifest.files)
    path.write_text(to_json(replace(manifest, files=files)))
    return folder


def test_rates_of_several_stages_that_are_tensors(tmp_path: Path) -> None:
    """Each lies in the file of its own stage."""
    model = family_model("gpt", Sizes(2, 4, 2, 2, 2, 4, 8, 8))
    ends = [
        [n for n in model.shapes if (paper.position(n, 2) < 2) == first] for first in (True, False)
    ]
    groups = [
        ({"lr": rate, "weight_decay": rate}, {"step": 3.0}, names)
        for rate, names in zip((0.5, 0.25), ends, strict=True)
    ]
    model = replace(model, groups=groups)
    source = written(model, tmp_path)
    there, to = tmp_path / "there", Target(ucp.Mesh(pp=2, dp=1, zero=1), **PLAIN, stages=(2, 3))
    ucp.convert(source, there, target=to)
    rates = {"mp_rank_00_model_states.pt": 0.5, "mp_rank_01_model_states.pt": 0.25}
    for name, rate in rates.items():
        tree = torch.load(there / name, weights_only=False)
        torch.save({**tree, "lr_scheduler": {"_last_lr": [torch.tensor(rate)]}}, there / name)
    ucp.convert(resealed(there), tmp_path / "back", target=target(groups=tuple(map(tuple, ends))))
    assert paper.read(tmp_path / "back")[MODEL]["lr_scheduler"] == {"_last_lr": [0.5, 0.25]}


def test_a_step_that_float32_would_round(tmp_path: Path) -> None:
    model = paper.plain_model(SHAPES, optimizer="deepspeed.FusedAdam")
    model.groups[0][1]["step"] = 2.0**24 + 1
    source = written(model, tmp_path)
    converted(model, source, tmp_path / "out", target(optimizer="torch.AdamW"))
    to = Target(ucp.Mesh(), optimizer="torch.AdamW")
    ucp.convert(source, tmp_path / "universal", to="universal", target=to)
    assert ucp.diff(source, tmp_path / "universal") == []


def test_names_of_a_sequential(tmp_path: Path) -> None:
    """They look like those of a pipeline."""
    model = paper.plain_model({"0.weight": (3, 4), "2.weight": (3,)})
    source = written(model, tmp_path)
    ucp.convert(source, tmp_path / "universal", to="universal")
    ucp.convert(tmp_path / "universal", tmp_path / "out", target=target(zero=3))
    whole(model, source, tmp_path / "out", target(zero=3))


def test_odd_names(tmp_path: Path) -> None:
    names = {"a b.weight": (3,), "ü/ñ": (2,), "x" * 3000: (2,), "..": (1,), "": (1,)}
    model = paper.plain_model(names)
    source = written(model, tmp_path)
    converted(model, source, tmp_path / "out", target(zero=3))
    with pytest.raises(ucp.UcpError, match="can't be the name of a folder"):
        ucp.convert(source, tmp_path / "universal", to="universal")


def test_a_buffer_is_listed_first(tmp_path: Path) -> None:
    kinds, dtypes = {"calls": "buffer"}, {"calls": "int64"}
    model = paper.plain_model({"calls": (2,), **SHAPES}, kinds=kinds, dtypes=dtypes)
    source = written(model, tmp_path)
    ucp.convert(source, tmp_path / "universal", to="universal")
    found = {spec.name: spec.dtype for spec in ucp.describe(tmp_path / "universal").params}
    assert found == {"calls": "int64", **dict.fromkeys(SHAPES, "float32")}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_parameters_of_no_and_of_one_element(tmp_path: Path, zero: int) -> None:
    """And parameters without dims, which ZeRO-3 files show as empty in the module: `param_shapes`
    knows better."""
    odd: dict[str, tuple[int, ...]] = {"none": (0, 3), "point": (), "one": (1,)}
    model = paper.plain_model({**SHAPES, **odd}, kinds=dict.fromkeys(odd, "frozen"))
    source = written(model, tmp_path)
    converted(model, source, tmp_path / "out", target(dp=3, zero=zero))
    if zero:
        edited(tmp_path / "out", lambda *_: None)
        assert ucp.diff(source, tmp_path / "out") == []


LARGE = {
    "decoder.layers.0.mlp.linear_fc1.weight": 7e4,
    "decoder.layers.1.mlp.linear_fc2.weight": -1e6,
}
KEPT = {
    "decoder.final_layernorm.weight": float("inf"),
    "decoder.layers.1.input_layernorm.weight": 65504.0,
}


def refused(source: Path, out: Path, **options: Any) -> str:
    before = sorted(out.parent.iterdir())
    with pytest.raises(InexactError, match="too large for float16") as raised:
        ucp.convert(source, out, **options)
    assert sorted(out.parent.iterdir()) == before
    return str(raised.value.found)


@pytest.mark.parametrize("to", ["torch_dist", "native"])
def test_masters_that_weights_can_not_hold(tmp_path: Path, to: str) -> None:
    """What is infinite in the source is kept, as is the largest value that fits."""
    target = Target(ucp.Mesh(zero=1), dtype="float16")
    source = paper.write(with_values(twins.model("llama"), LARGE | KEPT), tmp_path / "a" / "step7")
    found = refused(source, tmp_path / TAG, to=to, target=target)
    assert found == "larger values in " + "; ".join(f"{name}: 1" for name in LARGE)
    good = paper.write(with_values(twins.model("llama"), KEPT), tmp_path / "b" / "step7")
    ucp.convert(good, tmp_path / TAG, to=to, target=target)
    if to == "torch_dist":
        weights = [w for w in by_torch(tmp_path / TAG).values() if w.dtype == torch.float16]
        held = torch.cat([weight.reshape(-1) for weight in weights])
        assert int(held.isinf().sum()) == 1 and int((held == 65504).sum()) == 1


@pytest.mark.parametrize("to", ["universal", "native"])
def test_frozen_parameters(tmp_path: Path, to: str) -> None:
    """They have no masters."""
    kinds = {"b": "frozen", "c": "frozen"}
    model = paper.plain_model({"a": (4, 3), "b": (5,), "c": (2, 2)}, "bfloat16", kinds)
    options: dict[str, Any] = {"to": to, "target": Target(ucp.Mesh(), **PLAIN | HALF)}
    for number, (values, said) in enumerate(
        [({"b": 1e5, "c": float("inf")}, "larger values in b: 1"), ({"c": float("inf")}, "")]
    ):
        source = paper.write(with_values(model, values), tmp_path / str(number) / "step7")
        with pytest.raises(InexactError, match="would be rounded"):
            ucp.convert(source, tmp_path / "out", **options)
        if said:
            assert refused(source, tmp_path / "out", allow={"narrow"}, **options) == said
        else:
            ucp.convert(source, tmp_path / "out", allow={"narrow"}, **options)


HALF = {"dtype": "float16"}
