"""DeepSpeed's DualPipeV: its engines are refused by name, and so are its files of stage 0."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.core.layers import Layers
from megatron_ucp.families.family import Declared, Family, Sizes, whole
from tests.engines.canonical import everywhere
from tests.engines.kinds import refusal_of
from tests.engines.model import config_of, engine_around
from tests.families.registration import registered
from tests.ranks import RankPool

LAYERS, WIDTH, STAGES, MICRO_BATCHES = 4, 5, 2, 4


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def table(sizes: Sizes) -> dict[str, Declared]:
    return {
        f"layers.{number}.inner.{name}": whole(*shape)
        for number in range(LAYERS)
        for name, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))
    }


def staged(name: str) -> str:
    return name.removeprefix("layers.")


def layers(held: Collection[str]) -> Layers:
    names = {staged(name): name for name in held}
    at: list[dict[str, str]] = [{} for _ in range(LAYERS)]
    for pipe in names:
        position, _, rest = pipe.partition(".")
        at[int(position)][rest] = pipe
    return Layers(tuple(at), names, frozenset(range(LAYERS)))


FAMILY = Family(
    "stack",
    table,
    "tests/engines/test_dualpipev.py",
    lambda sizes: {staged(name): name for name in table(sizes)},
    layers,
    measure=lambda module: Sizes(LAYERS, WIDTH, 1, 1, 1, 1, 1, 1),
)


known = partial(registered, FAMILY)


def make(zero: int, seed: int, folded: bool) -> Any:
    from deepspeed.pipe import DualPipeVModule, PipelineModule

    kind = DualPipeVModule if folded else PipelineModule
    net = kind(
        [Layer() for _ in range(LAYERS)],
        num_stages=STAGES,
        loss_fn=torch.nn.functional.mse_loss,
        partition_method="uniform",
    )
    for name, param in net.named_parameters():  # the same values on whatever rank
        dice = torch.Generator().manual_seed(seed + 10 * int(name[0]) + param.dim())
        param.data.copy_(torch.randn(param.shape, generator=dice))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    return engine_around(
        net,
        optimizer,
        config_of(zero, 1, gradient_accumulation_steps=MICRO_BATCHES, gradient_clipping=0.0),
        rate=lambda step: 1.0 / (1 + step),
    )


def moments(engine: Any) -> dict[str, torch.Tensor]:
    """The first moments of all ranks, by name in the pipeline."""
    from deepspeed.utils import safe_get_full_optimizer_state

    def of(param: Any) -> Any:
        if engine.zero_optimization_stage():
            return safe_get_full_optimizer_state(param, "exp_avg")
        return engine.optimizer.state[param]["exp_avg"]

    own = {name: of(param).clone() for name, param in engine.module.named_parameters()}
    return {name: value for held in everywhere(own) for name, value in held.items()}


def save(zero: int, folder: str) -> dict[str, Any]:
    """What `attach` and `load` say to such an engine; and its first moments, as DeepSpeed's own
    save writes them."""
    engine = make(zero, 1, folded=True)
    for step in range(2):
        dice = torch.Generator().manual_seed(step)
        batch = torch.randn(MICRO_BATCHES, 2, 1, WIDTH, generator=dice)
        engine.train_batch(iter([(one[0], one[1]) for one in batch]))
    engine.save_checkpoint(folder, tag="tag")
    said: list[str] = []
    with known():
        for call in (
            lambda: ucp.attach(engine, family="stack"),
            lambda: ucp.load(engine, folder, family="stack"),
        ):
            said.append(refusal_of(call, "nothing was refused"))
    found = {"said": said, "moments": moments(engine)}
    engine.destroy()
    return found


def load(zero: int, folder: str, **options: Any) -> dict[str, Any]:
    """Such files in a plain pipeline: the error, or what it has of them."""
    with known():
        engine = make(zero, 9, folded=False)
        out: dict[str, Any] = {"error": ""}
        try:
            ucp.load(engine, folder, family="stack", **options)
        except ucp.UcpError as error:
            out["error"] = f"{type(error).__name__}: {error}"
        else:
            out["moments"] = moments(engine)
    dist.barrier()
    engine.destroy()
    return out


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks


def wrong(want: dict[str, Any], have: dict[str, Any]) -> list[str]:
    """Names of parameters with another first moment."""
    assert len(want["moments"]) == 8 and {*have["moments"]} == {*want["moments"]}
    return [n for n, value in want["moments"].items() if not torch.equal(value, have["moments"][n])]


def test_it_is_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    """Of stage 0 its files say no more than how many parameters a rank has: refused as those of
    any pipeline are."""
    want, _ = ranks.run(2, save, 0, str(tmp_path))
    for message in want["said"]:
        assert message.startswith("UnsupportedError") and "two separate runs of layers" in message
    for rank in ranks.run(2, load, 0, str(tmp_path)):
        assert rank["error"].startswith("UnsupportedError")
        assert "nothing says whose they are" in rank["error"]


def test_its_files_of_zero_1_name_their_parameters(ranks: RankPool, tmp_path: Path) -> None:
    want, _ = ranks.run(2, save, 1, str(tmp_path))
    for rank in ranks.run(2, load, 1, str(tmp_path)):
        assert not rank["error"] and wrong(want, rank) == []
