"""Megatron-LM's older files (`--ckpt-format torch`), one folder for each model-parallel rank, into
megatron-core's stack on another mesh, bit by bit. megatron-core's own optimizer writes the buffers;
it can't where a rank has no piece of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from tests.engines.megatron_jobs import Mcore, close, legacy_save, make, train
from tests.engines.sources import Sources, check
from tests.engines.test_megatron_saves import MIXTURE
from tests.ranks import RankPool


def by_stock(setup: Mcore, folder: str) -> None:
    engine = make(setup)
    train(engine, 2)
    legacy_save(engine, Path(folder) / "iter_0000002")
    close(engine)


def load_refused(setup: Mcore, folder: str) -> str:
    engine = make(setup)
    train(engine, 1, first=9)
    try:
        ucp.load(engine.handle, folder)
        return ""
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        close(engine)


TIED: dict[str, Any] = {"family": "gpt", "tied": True}
MOE: dict[str, Any] = {"family": "mixtral"}
SOURCES = {
    "tied stages": Mcore(pp=2, vpp=2, tp=2, **TIED),
    "a mixture in stages": Mcore(ep=2, pp=2, **MIXTURE),
    "buckets of experts": Mcore(ep=2, overlap=True, bucket=1000, **MOE),
    "whole optimizers": Mcore(pp=2, tp=2, dtype="bf16", distributed=False, **TIED),
}
MORE = {
    "buckets": Mcore(overlap=True, bucket=2000),
    "buckets of tied stages": Mcore(pp=2, overlap=True, bucket=1500, **TIED),
    "a layout": Mcore(pp=2, vpp=2, layout="Ett|t|t|L"),
    "uneven stages": Mcore(pp=2, first=3),
    "bf16": Mcore(tp=2, dtype="bf16"),
    "fp16": Mcore(tp=2, dtype="fp16"),
    "experts in virtual stages": Mcore(ep=2, pp=2, vpp=2, **MOE),
    "experts cut as attention is": Mcore(ep=2, tp=2, **MOE),
    "experts without expert parallelism": Mcore(tp=2, **MOE),
    "whole optimizers in fp32": Mcore(distributed=False, pp=2, vpp=2),
    "whole optimizers of a mixture": Mcore(distributed=False, ep=2, pp=2, **MIXTURE),
    "whole optimizers in fp16": Mcore(distributed=False, dtype="fp16", tp=2),
    "whole optimizers of another Adam": Mcore(distributed=False, adam="apex", dtype="bf16"),
}


@pytest.mark.parametrize(
    "source", [*SOURCES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_into_another_mesh(sources: Sources, source: str) -> None:
    setup = {**SOURCES, **MORE}[source]
    folder = sources.get(4, setup, more=3, kind="legacy")
    other: dict[str, Any] = {"pp": 1, "vpp": 1, "layout": None, "first": None, "bucket": None}
    target = replace(setup, tp=1, ep=1, overlap=False, distributed=True, **other)
    check(sources.resume(2, target, folder))


def one_less(tree: dict[str, Any]) -> None:
    tree["optimizer"]["optimizer"]["param_groups"][0]["params"].pop()


def masters_swapped(tree: dict[str, Any]) -> None:
    """Of two layers' matrices of one shape."""
    held = tree["optimizer"]["fp32_from_fp16_params"][0]
    shapes = [one.shape for one in held]
    one, other, *_ = (n for n, shape in enumerate(shapes) if shape == shapes[-1])
    held[one], held[other] = held[other], held[one]


def another_shape(tree: dict[str, Any]) -> None:
    states = tree["optimizer"]["optimizer"]["state"]
    states[0], states[1] = states[1], states[0]


def another_step(tree: dict[str, Any]) -> None:
    tree["optimizer"]["optimizer"]["state"][0]["step"] += 1


FAULTS: dict[str, Any] = {
    "another number of parameters": one_less,
    "masters of parameters are not the weights": masters_swapped,
    "is not its state": another_shape,
    "a different number of times": another_step,
}


@pytest.mark.parametrize("said", FAULTS)
def test_states_at_others_places_are_refused(ranks: RankPool, tmp_path: Path, said: str) -> None:
    """Of optimizers that every data-parallel rank has whole: nothing in the files names them."""
    setup = Mcore(distributed=False, dtype="bf16", layers=2)
    ranks.run(1, by_stock, setup, str(tmp_path))
    folder = tmp_path / "iter_0000002"
    path = folder / "mp_rank_00" / "model_optim_rng.pt"
    assert ranks.run(1, load_refused, setup, str(folder)) == [""]
    tree = torch.load(path, weights_only=False)
    FAULTS[said](tree)
    torch.save(tree, path)
    (found,) = ranks.run(1, load_refused, setup, str(folder))
    assert found.startswith("StateMismatchError") and said in found, found
