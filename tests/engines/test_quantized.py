"""Adapters on a quantized base: they resume bit for bit on any mesh, exports are peft's own files,
and a base that is another one is seen; what can't be attached is left alone by the runner."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import megatron_ucp as ucp
from megatron_ucp.formats.deepspeed.weights import is_side_data, without_side_data
from tests.engines import kinds, quantized_jobs
from tests.engines.quantized_jobs import Quantized
from tests.engines.sources import Sources, check
from tests.ranks import RankPool
from tests.reshard import twins

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.ranks


def saved(sources: Sources, kind: str, zero: int, exclude: bool, way: str) -> Path:
    """The folder of a run on two ranks, perhaps without its frozen weights."""
    setup = Quantized(kind, zero, way)
    return Path(sources.get(2, setup, more=2, filled=False, exclude=exclude))


MISSING = {"missing"}
CASES = [
    ("nf4", 2, True, "", 1, 1),
    ("nf4", 3, True, "", 2, 3),
    ("nf4", 3, False, "stock", 1, 2),
    ("nf4", 1, False, "direct", 2, 3),
    ("nf4", 0, True, "direct", 2, 2),
    ("fp4, scales quantized too", 3, False, "", 1, 1),
    ("fp4, scales quantized too", 2, True, "direct", 2, 3),
    ("8 bits", 2, False, "", 1, 1),
    ("8 bits", 3, True, "stock", 2, 2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_an_adapter_resumes(sources: Sources, tmp_path: Path, case: tuple[Any, ...]) -> None:
    """Of a plain save, and of attached ones; the frozen weights in the files or not."""
    *run, world, target = case
    folder, (kind, zero, *_) = saved(sources, *run), run
    steps = 2 if target == zero else 1  # stages sum gradients in other orders
    more: dict[str, Any] = {"more": steps if world == 2 else 0, "tags": ("trained",)}
    found = sources.resume(world, Quantized(kind, target, seed=8), folder, allow=MISSING, **more)
    check(found, different=0)
    assert world == 1 or found[0]["loss"] == 0.0  # each rank has losses of its own
    assert ucp.verify(folder, deep=True).findings == ()
    options = {"config": folder / "peft", "dtype": "bfloat16"}
    ucp.export_hf(folder, tmp_path / "out", verify=True, **options)
    want = load_file(folder / "peft" / "adapter_model.safetensors")
    assert twins.same(load_file(tmp_path / "out" / "adapter_model.safetensors"), want) == []


def test_weights_between_other_scales_are_refused(sources: Sources) -> None:
    """Quantized weights in the files go into a base that has the run's scales, and no other."""
    run, job = sources.ranks.run, kinds.attempt
    folder = saved(sources, "nf4", 3, False, "")
    other = Quantized("nf4", 2, base=2, seed=8)
    (found,) = run(1, job, other, str(folder), "trained", allow=MISSING)
    assert "the quantized weights of the base are others" in found["message"]
    assert "absmax" in found["message"] and "exclude_frozen_parameters=True" in found["message"]
    alone = saved(sources, "nf4", 2, True, "")  # the way that the message names
    other = Quantized("nf4", 1, base=2, seed=8)
    (found,) = run(1, job, other, str(alone), "trained", allow=MISSING)
    assert found["error"] is None


def test_a_planted_fault_is_seen(sources: Sources) -> None:
    folder, target = saved(sources, "nf4", 2, True, ""), Quantized("nf4", 1, seed=8)
    how: dict[str, Any] = {"tags": ("trained",), "allow": MISSING, "plant": "one bit"}
    (found,) = sources.resume(1, target, folder, **how)
    assert found["differences"]["trained"] != []


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
