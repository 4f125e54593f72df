"""Adapters on a quantized base: they resume bit for bit on any mesh, exports are peft's own files,
and a base that is another one is seen; what can't be attached is left alone by the runner."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import megatron_ucp as ucp
from megatron_ucp.formats.deepspeed.weights import is_side_data, without_side_data
from tests.engines import quantized_jobs
from tests.ranks import RankPool
from tests.reshard import twins

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.ranks
Saved = Callable[..., tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_checkpoints: Path) -> Saved:
    """(kind, ZeRO stage, without frozen weights, how attached) -> the folder of a run on two ranks,
    and what rank 0 saw."""
    kept: dict[Any, tuple[Path, dict[str, Any]]] = {}

    def get(kind: str, zero: int, exclude: bool, attach: str) -> Any:
        key = kind, zero, exclude, attach
        if key not in kept:
            folder = tmp_checkpoints / f"quantized_{len(kept)}"
            found = ranks.run(2, quantized_jobs.save, kind, zero, str(folder), exclude, attach)
            kept[key] = folder, found[0]
        return kept[key]

    return get


CASES = [
    ("nf4", 2, True, "", 1, 1),
    ("nf4", 3, True, "", 2, 3),
    ("nf4", 3, False, "stock", 1, 2),
    ("nf4", 1, False, "direct", 2, 3),
    ("nf4", 0, True, "", 2, 2),
    ("fp4, scales quantized too", 3, False, "", 1, 1),
    ("fp4, scales quantized too", 2, True, "direct", 2, 3),
    ("8 bits", 2, False, "", 1, 1),
    ("8 bits", 3, True, "stock", 2, 2),
]


@pytest.mark.parametrize(("kind", "zero", "exclude", "attach", "world", "target"), CASES)
def test_an_adapter_resumes(
    ranks: RankPool,
    saved: Saved,
    tmp_path: Path,
    kind: str,
    zero: int,
    exclude: bool,
    attach: str,
    world: int,
    target: int,
) -> None:
    """Of a plain save, and of attached ones; the frozen weights in the files or not."""
    folder, run = saved(kind, zero, exclude, attach)
    found = ranks.run(world, quantized_jobs.resume, kind, target, str(folder), run["states"])[0]
    assert found["error"] == "" and found["after"] == []
    assert found["before"] != []
    if world == 2:
        same = 2 if target == zero else 1  # stages sum gradients in other orders
        assert found["losses"][:same] == run["losses"][:same]
    assert ucp.verify(folder, deep=True).findings == ()
    options = {"config": folder / "peft", "dtype": "bfloat16"}
    ucp.export_hf(folder, tmp_path / "out", verify=True, **options)
    want = load_file(folder / "peft" / "adapter_model.safetensors")
    assert twins.same(load_file(tmp_path / "out" / "adapter_model.safetensors"), want) == []


def test_weights_between_other_scales_are_refused(ranks: RankPool, saved: Saved) -> None:
    """Quantized weights in the files go into a base that has the run's scales, and no other."""
    folder, run = saved("nf4", 3, False, "")
    job = quantized_jobs.resume
    found = ranks.run(1, job, "nf4", 2, str(folder), run["states"], base=2)[0]
    assert "the quantized weights of the base are others" in found["error"]
    assert "absmax" in found["error"] and "exclude_frozen_parameters=True" in found["error"]
    alone, run = saved("nf4", 2, True, "")  # the way that the message names
    assert ranks.run(1, job, "nf4", 1, str(alone), run["states"], base=2)[0]["error"] == ""


def test_a_planted_fault_is_seen(ranks: RankPool, saved: Saved) -> None:
    folder, run = saved("nf4", 2, True, "")
    job = quantized_jobs.resume
    found = ranks.run(1, job, "nf4", 1, str(folder), run["states"], fault="one bit")[0]
    assert found["after"] != []


def test_what_can_not_be_attached_is_left_alone(ranks: RankPool, tmp_path: Path) -> None:
    """By the runner: the script goes on as without it, and a line says so. Who asks for it in the
    config gets the error."""
    (found,) = ranks.run(1, quantized_jobs.left_alone, str(tmp_path / "a"), False)
    assert found["error"] == "" and found["losses"][0] == found["losses"][1]
    assert "this engine is left as it is" in found["notes"][0]
    assert "lm_head.own_entry" in found["notes"][0] and not found["manifest"]
    (found,) = ranks.run(1, quantized_jobs.left_alone, str(tmp_path / "b"), True)
    assert "lm_head.own_entry" in found["error"]


def test_names_of_side_data() -> None:
    layer = "model.layers.0.q_proj"
    bits_4 = ["absmax", "quant_map", "nested_absmax", "quant_state.bitsandbytes__nf4"]
    hqq = [f"{layer}.{name}" for name in ("nbits", "group_size", "axis", "scale", "zero", "shape")]
    module = [f"{layer}.weight", *(f"{layer}.weight.{name}" for name in bits_4)]
    assert [name for name in module if not is_side_data(name, module)] == [f"{layer}.weight"]
    assert all(is_side_data(name, hqq) for name in hqq)
    # names that say nothing by themselves
    assert not any(is_side_data(f"{layer}.{name}", module) for name in ("scale", "shape", "zero"))
    own = {f"{layer}.SCB": 1, "SCB": 2, f"{layer}.weight": 3}
    assert without_side_data(own, [f"{layer}.SCB"]) == (
        {f"{layer}.SCB": 1, f"{layer}.weight": 3},
        {"SCB": 2},
    )
