"""What is missing is missed by every verb: see `absence` for the law and the table.

What lies in the repository, and what is converted from it. Saves of engines are in
`tests/engines/test_absence.py`.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

import megatron_ucp as ucp
from megatron_ucp.formats.base import Told
from tests.reshard.absence import Save, Table, linked, plain_of, told_of

GOLDEN = Path(__file__).parents[1] / "formats" / "golden"
DEEPSPEED = [
    *("zero0_fp32", "zero0_bf16", "zero1", "zero2", "zero3", "bf16_optimizer", "zero1_elastic"),
    *("zero1_old", "zero2_old", "zero3_old", "v1_zero0_fp32", "v1_zero1", "v1_zero3"),
]
OLDER = sorted(
    path.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("older/*/*") if path.is_dir()
)
MEGATRON = sorted(
    path.relative_to(GOLDEN).as_posix() for path in GOLDEN.glob("megatron*/*") if path.is_dir()
)
QUICK = {"megatron/legacy_tp2pp2", "megatron/td_dpr_dp2_bf16", "megatron/rng_tp2dp2"}


def save_of(case: str, scratch: Path) -> Save:
    """A save of the repository. Of stage 0 an engine tells the order of the parameters."""
    source, told = GOLDEN / case, Told()
    if case.startswith("zero0"):
        with numpy.load(GOLDEN / f"{case}.npz") as arrays:
            told = Told(json.loads(str(arrays["json"]))["order"])
    inner = next(source.glob("iter_*"), source)
    copy = scratch / "copied" / inner.name
    shutil.copytree(inner, copy)
    if case.startswith("v1"):
        told = told_of(copy)
    return Save(linked(copy, scratch / "run", inner.name), inner.name, told)


def slow_but(cases: list[str], quick: set[str]) -> list[object]:
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(
    "case",
    [
        *DEEPSPEED,
        *slow_but(
            OLDER, {"older/0.14.5/zero3", "older/0.17.6/zero1", "older/0.19.4/ulysses_zero3"}
        ),
        *slow_but(MEGATRON, QUICK),
    ],
)
def test_what_is_missing_is_missed_by_every_verb(case: str, tmp_path: Path) -> None:
    table = Table(save_of(case, tmp_path), tmp_path)
    assert [*table.wrong()] == []
    assert table.cases >= len({*table.save.folder.rglob("*")}) > 0
    # of DeepSpeed's and Megatron's own files every one is needed
    assert {re.sub(r"\d+", "N", one) for one in table.spare} <= {"file ucp_manifest.json"}


def universal(scratch: Path) -> Path:
    return Path(ucp.convert(GOLDEN / "v1_zero1", scratch / "made" / "s1", to="universal").path)


def to_torch_dist(scratch: Path) -> Path:
    source = GOLDEN / "megatron" / "td_full_tp2dp2"
    return Path(ucp.convert(source, scratch / "made" / "s1", to="torch_dist").path)


def to_native(mesh: str, source: str = "v1_zero1") -> Callable[[Path], Path]:
    def made(scratch: Path) -> Path:
        out = scratch / "made" / "s1"
        return Path(ucp.convert(GOLDEN / source, out, to="native", mesh=mesh).path)

    return made


CONVERTED: dict[str, Callable[[Path], Path]] = {
    "universal": universal,
    "torch_dist": to_torch_dist,
    "ZeRO-3 on three ranks": to_native("dp=3,zero=3"),
    "ZeRO-2 on three ranks": to_native("dp=3,zero=2"),
    "stage 0": to_native("dp=2,zero=0"),
    "a pipeline with tensor parallelism": to_native("tp=2,pp=2,zero=1", "megatron/td_full_tp2dp2"),
    "experts": to_native("dp=2,ep=2,zero=1", "megatron/rng_moe_ep2"),
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", CONVERTED)
def test_a_conversion_of_which_something_is_missing(kind: str, plain: bool, tmp_path: Path) -> None:
    made = CONVERTED[kind](tmp_path)
    told = told_of(made)
    if plain:
        plain_of(made)
    table = Table(Save(linked(made, tmp_path / "run", "s1"), "s1", told), tmp_path)
    assert [*table.wrong()] == []
    assert table.cases > 0
