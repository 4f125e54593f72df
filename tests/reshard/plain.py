"""A plain model's checkpoint on paper, for conversions that are odd in one thing."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

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


def written(model: paper.Model, folder: Path, **how: Any) -> Path:
    """The model's checkpoint, in the place of the one that is converted where nothing is said."""
    return paper.write(model, folder / "source" / "step7", **how)


def converted(model: paper.Model, source: Path, out: Path, to: Target, **how: Any) -> None:
    """A conversion that is whole, and holds what the model has."""
    ucp.convert(source, out, target=to, **how)
    whole(model, source, out, to)


def stock_converted(source: Path, output: Path, *more: str) -> None:
    """A universal folder by DeepSpeed's own converter."""
    from deepspeed.checkpoint import ds_to_universal

    args = ["--input_folder", str(source), "--output_folder", str(output)]
    args += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    with mock.patch.object(sys, "argv", ["ds_to_universal", *args, *more]):
        ds_to_universal.main(ds_to_universal.parse_arguments())
