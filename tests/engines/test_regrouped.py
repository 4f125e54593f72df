"""Megatron-core's models, cut by tensor parallelism and in pipeline stages, go on with other
trainable parameters than in the checkpoint, or with its groups split or joined."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from pretrain.mcore import models
from tests.engines import kinds
from tests.engines.canonical import base_of
from tests.engines.masters import without_pipeline
from tests.engines.sources import Sources
from tests.engines.tensor_jobs import Staged

Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Way:
    """How a model is trained: names of what is frozen, and of what has a group of its own; whether
    groups are `halved`, have one set of hyper-parameters (`alike`), or are one group (`joined`)."""

    frozen: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    halved: bool = False
    alike: bool = False
    joined: bool = False


def regrouped(model: Any, groups: Groups, way: Way, staged: bool) -> Groups:
    whole = SimpleNamespace(module=model, **({"num_stages": 1} if staged else {}))
    held = {without_pipeline(whole, name): p for name, p in model.named_parameters()}
    apart = [held[name] for name in way.apart if name in held]
    for group in groups:
        members = [p for p in group["params"] if p.requires_grad]
        group["params"] = [p for p in members if not any(p is one for one in apart)]
    if way.alike or way.joined:
        groups = [{**group, "weight_decay": 0.1} for group in groups]
    if way.joined:
        groups = [{**groups[0], "params": [p for group in groups for p in group["params"]]}]
    if way.halved:
        halves = [(g, (len(g["params"]) + 1) // 2) for g in groups]
        parts = [(g, part) for g, n in halves for part in (g["params"][:n], g["params"][n:])]
        groups = [{**g, "params": part} for g, part in parts]
    if apart:
        groups.append({**groups[0], "params": apart})
    return [group for group in groups if group["params"]]


@contextlib.contextmanager
def trained(setup: Staged, way: Way) -> Iterator[None]:
    """Models are built so in this block."""
    stock, staged = models.param_groups, bool(setup.pp)

    def groups(model: Any, lr: float, decay: float) -> Groups:
        whole = SimpleNamespace(module=model, **({"num_stages": 1} if staged else {}))
        for name, param in model.named_parameters():
            if without_pipeline(whole, name) in way.frozen:
                param.requires_grad_(False)
        return regrouped(model, stock(model, lr, decay), way, staged)

    with mock.patch.object(models, "param_groups", groups):
        yield


def save(job: tuple[Staged, Way], folder: str) -> None:
    with trained(*job):
        kinds.save(job[0], folder, more=0)


def plant(engine: Any, fault: str) -> None:
    """A moment of one rank, or the step of one flat buffer."""
    state = next(iter(base_of(engine).state.values()))
    if fault == "one moment":
        state["exp_avg"].view(-1)[0] += 1
    elif fault == "one step":
        state["step"] += 1


def around_load(
    setup: Staged, way: Way, folder: str, allow: tuple[str, ...] = (), fault: str = ""
) -> dict[str, Any]:
    """As `kinds.around_load`, of an engine that is trained so."""
    with trained(setup, way):
        return kinds.around_load(setup, folder, fault=fault, plant=plant, allow=allow)


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks
FC1, EMBEDDING = "decoder.layers.1.mlp.linear_fc1.weight", "embedding.word_embeddings.weight"
NORMS = ("decoder.layers.2.input_layernorm.weight", "decoder.final_layernorm.weight")
DEEPER = tuple(
    f"decoder.layers.3.{part}.weight"
    for part in (
        "input_layernorm",
        "pre_mlp_layernorm",
        "self_attention.linear_proj",
        "self_attention.linear_qkv",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
    )
)
Run = tuple[int, Staged]  # ranks, and what they hold
PLAIN = Way()


def run(tp: int, pp: int, zero: int, dtype: str = "fp32", **options: Any) -> Run:
    """On two copies, but for four shares of tensors."""
    setup = Staged(options.pop("family", "llama"), tp, zero, dtype=dtype, pp=pp, **options)
    return min(4, 2 * tp * (pp or 1)), setup


def gpt(tp: int, pp: int, zero: int, dtype: str = "fp32") -> Run:
    return run(tp, pp, zero, dtype, family="gpt", tied=True)


def resume(sources: Sources, source: tuple[Run, Way], target: tuple[Run, Way], **how: Any) -> Any:
    ((ranks, setup), way), ((world, other), other_way) = source, target
    folder = sources.get(ranks, (setup, way), save)
    found = sources.ranks.run(world, around_load, replace(other, seed=9), other_way, folder, **how)
    return found[0]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def others(want: dict[str, Any], have: dict[str, Any], but: tuple[str, ...] = ()) -> list[Any]:
    """Where two states differ, apart from some parameters."""
    out: list[Any] = []
    for part in ("full", "scalars", "hyper", "weights"):
        keys = want[part].keys() | have[part].keys()
        kept = [k for k in keys if (k if isinstance(k, str) else k[0]) not in but]
        assert len(kept) > 10
        out += [(part, k) for k in kept if not same(want[part].get(k), have[part].get(k))]
    return out


def check(found: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    """All others have what the run had, and take one step more."""
    assert len(others(found["want"], found["before"], but)) > 10
    assert others(found["want"], found["after"], but) == []
    counted = {k: v for k, v in found["want"]["scalars"].items() if k[0] not in but}
    for key, value in counted.items():
        assert found["stepped"]["scalars"][key] == value + 1, key


def check_fresh(found: dict[str, Any], names: tuple[str, ...]) -> None:
    """Nothing but masters before the first step, and moments of that step alone after it."""
    for name in names:
        assert {k[1] for k in found["after"]["full"] if k[0] == name} == {"fp32"}
        stepped = found["stepped"]
        assert stepped["scalars"][name, "step"] == 1
        gradient = stepped["full"][name, "exp_avg"] / 0.1
        assert gradient.abs().max() > 0
        second = stepped["full"][name, "exp_avg_sq"]
        assert torch.allclose(second, 1e-3 * gradient**2, rtol=1e-4, atol=1e-12)
    assert any(names[0] in note and "begin afresh" in note for note in found["notes"])


MESHES: list[tuple[Run, Run]] = [
    (run(2, 2, 1), run(1, 2, 0)),
    (run(2, 0, 3, "bf16"), run(2, 2, 1, "bf16")),
    (run(1, 2, 0), run(4, 0, 3)),
    (run(2, 2, 1, "bf16"), run(2, 0, 0, "bf16")),
    (run(2, 0, 0), run(2, 2, 0)),
    (run(1, 2, 0, "bf16"), run(2, 2, 0, "bf16")),
]
TIED: list[tuple[Run, Run]] = [
    (gpt(2, 2, 1), gpt(1, 2, 0)),
    (gpt(1, 2, 1, "bf16"), gpt(2, 0, 3, "bf16")),
    (gpt(1, 0, 1), gpt(2, 2, 1)),
]
FREEZING = [(*pair, (FC1,)) for pair in MESHES]
FREEZING += [(run(1, 2, 1), run(1, 2, 1), NORMS), *((*pair, (EMBEDDING,)) for pair in TIED)]


def show(value: object) -> str:
    if isinstance(value, tuple) and value and isinstance(value[-1], Staged):
        held = value[-1]
        return f"t{held.tp}p{held.pp}z{held.zero}-{held.dtype}"
    return str(value[0]) if isinstance(value, tuple) and value else str(value)


@pytest.mark.parametrize(("source", "target", "names"), FREEZING, ids=show)
def test_frozen(sources: Sources, source: Run, target: Run, names: tuple[str, ...]) -> None:
    """As the weights that the run computed with."""
    way = Way(frozen=names)
    found = resume(sources, (source, PLAIN), (target, way), allow=("freeze",))
    check(found, names)
    for name in names:
        assert not [key for key in found["after"]["full"] if key[0] == name]
        trained = found["want"]["weights"][name]
        assert torch.equal(found["stepped"]["weights"][name], trained)
        assert not torch.equal(found["before"]["weights"][name], trained)


@pytest.mark.parametrize(("source", "target", "names"), FREEZING, ids=show)
def test_unfrozen(sources: Sources, source: Run, target: Run, names: tuple[str, ...]) -> None:
    """From the weights that were frozen."""
    ways = Way(frozen=names), Way(apart=names)
    found = resume(sources, (source, ways[0]), (target, ways[1]), allow=("unfreeze",))
    check(found, names)
    check_fresh(found, names)
    for name in names:
        kept = found["want"]["weights"][name]
        assert torch.equal(found["after"]["weights"][name], kept)
        # norms begin as ones in every run
        assert name in NORMS or not torch.equal(found["before"]["weights"][name], kept)


@pytest.mark.parametrize(("source", "target"), MESHES, ids=show)
def test_more_layers(sources: Sources, source: Run, target: Run) -> None:
    deeper = target[0], replace(target[1], layers=4)
    way = Way(apart=DEEPER)
    found = resume(sources, (source, PLAIN), (deeper, way), allow=("new",))
    check(found, DEEPER)
    check_fresh(found, DEEPER)
    for name in DEEPER:
        drawn, kept = (found[when]["full"][name, "fp32"] for when in ("before", "after"))
        assert torch.equal(drawn, kept)


REGROUPED = [
    (Way(), Way(halved=True)),
    (Way(halved=True), Way()),
    (Way(alike=True), Way(joined=True)),
]


@pytest.mark.parametrize("ways", REGROUPED, ids=["split", "joined again", "joined"])
@pytest.mark.parametrize(("source", "target"), MESHES, ids=show)
def test_other_groups(sources: Sources, source: Run, target: Run, ways: tuple[Way, Way]) -> None:
    check(resume(sources, (source, ways[0]), (target, ways[1])))


@pytest.mark.parametrize("fault", ["one moment", "one step"])
def test_a_planted_fault_is_seen(sources: Sources, fault: str) -> None:
    pair = (run(2, 2, 1), PLAIN), (run(2, 2, 1), Way(halved=True))
    with pytest.raises(AssertionError):
        check(resume(sources, *pair, fault=fault))


REFUSED = [
    (Way(frozen=(FC1,)), Way(), 1, ("unfreeze",), "parameter group of their own"),
    (Way(), Way(joined=True), 1, (), "different hyper-parameters"),
    (Way(), Way(frozen=(FC1,)), 0, ("unfreeze", "new"), "freeze"),
]


@pytest.mark.parametrize(("way", "other", "zero", "allow", "words"), REFUSED)
def test_refused_by_name(
    sources: Sources, way: Way, other: Way, zero: int, allow: tuple[str, ...], words: str
) -> None:
    pair = (run(1, 2, 1), way), (run(2, 2, zero), other)
    found = resume(sources, *pair, allow=allow)
    assert words in found["error"] and found["unchanged"]
