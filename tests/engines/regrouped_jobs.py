"""What the ranks do where megatron-core models, in pipeline stages or not, train other parameters
than in the checkpoint, or train them in other groups."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pretrain.mcore import models
from tests.engines import kinds
from tests.engines.canonical import base_of
from tests.engines.masters import without_pipeline
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
