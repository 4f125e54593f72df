"""A fault of this package shows as what it is: no reader calls it damage of a file, and no search
passes over a healthy tag for it. What a foreign tree holds otherwise is refused by name all the
same, place by place."""

import copy
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import UcpError
from megatron_ucp.formats.deepspeed import manifest, run
from megatron_ucp.formats.deepspeed import universal as universal_reader
from megatron_ucp.formats.megatron import checkpoint as megatron_folder
from megatron_ucp.formats.megatron import index, legacy
from megatron_ucp.formats.registry import open_checkpoint
from tests.formats import megatron_files
from tests.formats.megatron_files import copied, rewritten

GOLDEN = Path(__file__).parent / "golden"
ERRORS = (KeyError("planted"), ValueError("planted"), AttributeError("planted"))
HELPERS = {
    "zero1": [
        (run, "reader_for"),
        (run, "check_momentum"),
        (manifest, "number_and_count"),
        (manifest, "buffer_names"),
        (run, "etp_of"),
    ],
    "universal": [(universal_reader, "alone"), (universal_reader, "param_groups")],
    megatron_files.LEGACY: [(legacy, "global_name"), (megatron_folder, "layout_of")],
    "td_full_tp2dp2": [(index, "tiling_fault"), (megatron_folder, "layout_of")],
}
PLANTED = [(case, *helper) for case, helpers in HELPERS.items() for helper in helpers]
ODD: list[Any] = [None, 5, -1, "x", 2.5, True, [], {}, [[]], {"x": []}, ("x",), 10**400]


def source(case: str, folder: Path) -> Path:
    """A folder with one tag; returns the tag."""
    if case == "universal":
        ucp.convert(GOLDEN / "zero1", folder / "tag", to="universal")
        return folder / "tag"
    if case.startswith("zero"):
        shutil.copytree(GOLDEN / case, folder / "tag")
        return folder / "tag"
    return copied(case, folder)


def use(tag: Path) -> None:
    with open_checkpoint(tag) as checkpoint:
        assert checkpoint.extras
        for name in checkpoint.file_names:
            checkpoint.check(name, {"stale"})
        checkpoint.random_states(Mesh(), 0)
        checkpoint.copies()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("case", "module", "helper"), PLANTED)
def test_a_fault_of_ours_shows_as_itself(
    case: str,
    module: Any,
    helper: str,
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tag = source(case, tmp_path / "run")
    use(tag)
    assert ucp.newest_whole(tag.parent).folder == tag

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(module, helper, fail)
    with pytest.raises(type(error), match="planted"):
        use(tag)
    with pytest.raises(type(error), match="planted"):
        ucp.newest_whole(tag.parent)


def places(tree: Any, seen: set[int]) -> list[tuple[Any, Any]]:
    """Every (container, key) of a tree of dicts, lists and attributes, once."""
    tree = tree.state if isinstance(tree, InertObject) else tree
    if id(tree) in seen or not isinstance(tree, dict | list):
        return []
    seen.add(id(tree))
    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    return [place for key, one in items for place in [(tree, key), *places(one, seen)]]


def changed(rng: random.Random) -> Callable[[Any], None]:
    def change(tree: Any) -> None:
        holder, key = rng.choice(places(tree, set()))
        if rng.random() < 0.2 and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = copy.deepcopy(rng.choice(ODD))

    return change


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("td_full_tp2dp2", "common.pt"),
        ("td_full_moe_ep2", "common.pt"),
        ("plain_bf16_tp2", "common.pt"),
        (megatron_files.LEGACY, "mp_rank_00_000/model_optim_rng.pt"),
        (megatron_files.LEGACY, "mp_rank_00_000/distrib_optim.pt"),
        ("rng_legacy_tp2dp2", "mp_rank_00/model_optim_rng.pt"),
    ],
)
def test_megatrons_trees_with_odd_values(case: str, name: str, tmp_path: Path) -> None:
    good = copied(case, tmp_path / "good")
    refused = 0
    for seed in range(SEEDS):
        tag = tmp_path / f"{seed}"
        shutil.copytree(good, tag, copy_function=_linked(name))
        rewritten(tag / name, changed(random.Random(seed)))
        try:
            use(tag)
        except UcpError:
            refused += 1
        shutil.rmtree(tag)
    assert 0 < refused < SEEDS


SEEDS = 40


def _linked(name: str) -> Callable[[str, str], Any]:
    """Copies the file that is changed, links the others."""
    import os

    return lambda a, b: shutil.copy2(a, b) if a.endswith(name) else os.link(a, b)
