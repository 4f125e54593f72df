"""A plain model's checkpoint on paper, for conversions that are odd in one thing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import megatron_ucp as ucp
from megatron_ucp.families.family import Sizes
from megatron_ucp.formats.deepspeed.target import Target
from tests.reshard import paper

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (5, 4),
    "up.weight": (3, 4),
    "gain": (1,),
    "warmth": (),
}
PLAIN = {
    "dtype": "float32",
    "sub_group_size": 10**9,
    "alignment": False,
    "round_robin": False,
    "grad_accum_fp32": False,
    "offloaded": False,
}


def target(dp: int = 2, zero: int = 1, **more: Any) -> Target:
    return Target(ucp.Mesh(dp=dp, zero=zero), **{**PLAIN, **more})


def edited(folder: Path, change: Callable[[str, dict[str, Any]], None]) -> Path:
    """As stock DeepSpeed might have written it: without a manifest."""
    for path in folder.glob("*.pt"):
        tree = torch.load(path, weights_only=False)
        change(path.name, tree)
        torch.save(tree, path)
    (folder / "ucp_manifest.json").unlink(missing_ok=True)
    return folder


def whole(model: paper.Model, source: Path, found: Path, to: Target) -> None:
    assert paper.problems(paper.read(found), model, to) == []
    assert ucp.verify(found, deep=True).findings == () and ucp.diff(source, found) == []


def family_model(family: str, sizes: Sizes) -> paper.Model:
    """All of a family's parameters, in the order of the layers, in one group."""
    table = paper.find_family(family).table(sizes)
    ordered = sorted(table, key=lambda name: paper.position(name, sizes.layers))
    shapes = {name: table[name].shape for name in ordered}
    return replace(paper.plain_model(shapes), family=family, sizes=sizes)
