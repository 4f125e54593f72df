"""FSDP2, DeepSpeed and megatron-core's own stack take each other's checkpoints: every weight,
moment, step and rate, bit by bit, and the losses that follow. Programs without this package save
and load the folders of FSDP2."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from tests.engines import fsdp2_jobs
from tests.engines.fsdp2_jobs import Plain
from tests.formats import fsdp2_runs
from tests.ranks import RankPool

pytestmark = [pytest.mark.long, pytest.mark.slow]
pytest.importorskip("transformers", reason="these programs train a model of transformers")

STEPS, MORE = 3, 10
SETTINGS = ("lr", "weight_decay", "betas", "eps")


class Runs:
    """Runs of programs, each made once."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self._ranks, self.folder, self._made = ranks, folder, dict[str, Any]()

    @property
    def model(self) -> str:
        """The folder of transformers that all begin with."""
        folder = str(self.folder / "start")
        if "start" not in self._made:
            self._ranks.run(1, fsdp2_jobs.start, folder=folder, timeout_s=120)
            self._made["start"] = True
        return folder

    def fsdp2(self, world: int, kind: str = "fsdp", layout: str = "plain") -> tuple[str, Any]:
        """A folder that a program saved, and what it held; its losses after that."""
        key = f"{kind}-{layout}-{world}"
        folder = str(self.folder / key)
        if key not in self._made:
            how = (kind, folder, "--model", self.model, "--layout", layout)
            found = fsdp2_runs.run(world, *how, "--steps", str(STEPS))
            more = fsdp2_runs.run(
                world, kind, "-", "--model", self.model, "--steps", str(STEPS + MORE)
            )
            self._made[key] = {**found, "more": more["losses"][STEPS:]}
        return folder, self._made[key]

    def deepspeed(self, world: int, setup: Plain) -> tuple[str, Any]:
        key = f"zero{setup.zero}tp{setup.tp}-{world}"
        folder = str(self.folder / key)
        if key not in self._made:
            options = {"setup": setup, "folder": folder, "model": self.model, "more": MORE}
            self._made[key] = self._ranks.run(world, fsdp2_jobs.trained, timeout_s=200, **options)[0]
        return folder, self._made[key]

    def megatron(self, world: int, tp: int) -> tuple[str, Any]:
        key = f"megatron-tp{tp}-{world}"
        folder = str(self.folder / key)
        if key not in self._made:
            options = {"tp": tp, "folder": folder, "model": self.model, "more": MORE}
            run = self._ranks.run(world, fsdp2_jobs.train_stack, timeout_s=200, **options)
            self._made[key] = run[0]
        return folder, self._made[key]


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("fsdp2"))


def unlike(held: Any, states: Any) -> list[str]:
    """What an FSDP2 program held otherwise than an engine under DeepSpeed, whose states have the
    same names."""
    out: list[str] = []
    group_of = {name: group for group in held["groups"] for name in group["params"]}
    names = {name for name, _ in states["full"]}
    assert names == {*held["states"]} == {*group_of}
    for name in sorted(names):
        want = {"fp32": held["weights"][name], **held["states"][name]}
        step = want.pop("step")
        have = {state: value for (n, state), value in states["full"].items() if n == name}
        assert want.keys() == have.keys()
        out += [f"{name} {s}" for s in want if not same_bits(want[s], have[s])]
        out += [f"{name} step"] * (float(step) != states["scalars"][name, "step"])
        for key in SETTINGS:
            if tuple_of(group_of[name][key]) != tuple_of(states["hyper"][name][key]):
                out.append(f"{name} {key}")
    return out


def tuple_of(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.contiguous().reshape(-1), other.contiguous().reshape(-1)
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def near(one: list[float], other: list[float]) -> bool:
    assert len(one) == len(other) == MORE
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-5


# ---- FSDP2 to DeepSpeed

INTO_DEEPSPEED = [
    ((2, "fsdp", "plain"), 2, Plain(1)),
    ((2, "fsdp", "accelerate"), 2, Plain(3)),
    ((4, "fsdp", "plain"), 2, Plain(2, tp=2)),
    ((4, "fsdp", "flat"), 1, Plain(0)),
    ((4, "hsdp", "plain"), 2, Plain(1)),
    ((4, "tp", "plain"), 2, Plain(3)),
]


@pytest.mark.parametrize(("source", "world", "setup"), INTO_DEEPSPEED, ids=str)
def test_fsdp2_into_deepspeed(
    runs: Runs, ranks: RankPool, source: Any, world: int, setup: Plain
) -> None:
    folder, held = runs.fsdp2(*source)
    found = ranks.run(
        world,
        fsdp2_jobs.resume,
        setup=setup,
        folder=folder,
        model=runs.model,
        steps=MORE,
        timeout_s=200,
    )[0]
    assert found["error"] == ""
    assert unlike(held, found["states"]) == []
    assert near(found["losses"], held["more"])


@pytest.mark.parametrize("state", ["fp32", "exp_avg", "exp_avg_sq", "step", "lr"])
def test_the_comparison_sees_a_fault(runs: Runs, ranks: RankPool, state: str) -> None:
    folder, held = runs.fsdp2(2)
    found = ranks.run(
        1, fsdp2_jobs.resume, setup=Plain(0), folder=folder, model=runs.model, timeout_s=200
    )[0]
    name = "model.layers.1.mlp.up_proj.weight"
    if state == "step":
        found["states"]["scalars"][name, "step"] += 1
    elif state == "lr":
        found["states"]["hyper"][name]["lr"] *= 2
    else:
        found["states"]["full"][name, state].view(-1)[-1] += 1e-3
    assert unlike(held, found["states"]) == [f"{name} {'fp32' if state == 'fp32' else state}"]


# ---- DeepSpeed to FSDP2

FROM_DEEPSPEED = [
    (2, Plain(1), "dcp", (2, "fsdp", "plain")),
    (2, Plain(3), "accelerate", (2, "fsdp", "accelerate")),
    (2, Plain(2, tp=2), "dcp", (4, "fsdp", "plain")),
    (1, Plain(0), "dcp", (4, "hsdp", "plain")),
    (2, Plain(1), "dcp", (4, "tp", "plain")),
]


@pytest.mark.parametrize(("world", "setup", "to", "target"), FROM_DEEPSPEED, ids=str)
def test_deepspeed_into_fsdp2(
    runs: Runs, tmp_path: Path, world: int, setup: Plain, to: str, target: Any
) -> None:
    folder, source = runs.deepspeed(world, setup)
    done = ucp.convert(folder, tmp_path / "out", to=to)
    assert done.notes == ()
    ranks_there, kind, layout = target
    found = fsdp2_runs.run(
        ranks_there,
        *(kind, "-", "--model", runs.model, "--layout", layout),
        *("--load", str(tmp_path / "out"), "--steps", str(MORE)),
    )
    assert unlike(found["begun"], source["states"]) == []
    assert near(found["losses"], source["losses"])
    with_a_fault = found["begun"]["states"]["model.norm.weight"]["exp_avg"]
    with_a_fault[-1] += 1e-3
    assert unlike(found["begun"], source["states"]) == ["model.norm.weight exp_avg"]
