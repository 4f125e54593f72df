"""Conversions into a dtype of less range: a finite value that it can't hold is refused by name, in
every format and state; nothing is left of the output then."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.errors import InexactError
from megatron_ucp.formats.deepspeed.target import Target
from tests.formats.megatron_files import TAG, by_torch
from tests.reshard import paper, twins
from tests.reshard.plain import PLAIN
from tests.reshard.test_export_edges import with_values

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
