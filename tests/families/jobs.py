"""What the ranks do with families that they register themselves."""

import zlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import megatron_ucp as ucp
from pretrain.mcore import models
from tests.engines.kinds import KINDS, Kind
from tests.engines.model import config_of, engine_around
from tests.engines.tensor_jobs import close
from tests.families.own import MIXER, NEO, MixerSizes
from tests.families.registration import registered
from tests.pretrain import jobs as pretrain_jobs

SIZES = MixerSizes(
    layers=2,
    hidden=6,
    heads=4,
    groups=4,
    head_dim=2,
    ffn=12,
    vocab=16,
    true_vocab=13,
    states=8,
)
PLANTED = "two parts of a fused projection swapped"


known = partial(registered, MIXER, NEO)


@dataclass(frozen=True)
class Own:
    """The mixer on a mesh."""

    tp: int
    zero: int
    dtype: str = "fp32"
    seed: int = 1


def whole_parts() -> dict[str, tuple[tuple[int, ...] | None, int, tuple[int, ...]]]:
    """Every parameter as this model cuts it, without a look at the family: sizes of the parts of
    the dim that is cut (None: not cut), that dim, and the whole shape."""
    out: dict[str, Any] = {"words": ((16,), 0, (16, 6))}
    for layer in range(SIZES.layers):
        out |= {
            f"layers.{layer}.norm": (None, 0, (6,)),
            f"layers.{layer}.in_proj": ((12, 8, 4), 0, (24, 6)),
            f"layers.{layer}.conv": ((12, 8), 0, (20, 1, 3)),
            f"layers.{layer}.skip": ((4,), 0, (4,)),
            f"layers.{layer}.out_proj": ((12,), 1, (6, 12)),
        }
    return out


class Held(torch.nn.Module):
    """Parameters with megatron-core's attributes, and a loss that gives each element a gradient of
    its own: what is trained does not depend on the mesh by a bit."""

    def __init__(self, setup: Own, rank: int, prefix: str) -> None:
        super().__init__()
        for name, (parts, dim, shape) in whole_parts().items():
            if name.rpartition(".")[0] == prefix:
                param = held_by(setup, rank, name, parts, dim, shape)
                self.register_parameter(name.rpartition(".")[2], param)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        own = self.parameters(recurse=False)  # at ZeRO-3 only these are there
        return torch.stack([(param.float().square() * scale).sum() for param in own]).sum()


def held_by(setup: Own, rank: int, name: str, parts: Any, dim: int, shape: Any) -> Any:
    """What a tensor-parallel rank has of a parameter."""
    seed = zlib.crc32(f"{setup.seed} {name}".encode())
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if parts is not None:
        cut = [part.chunk(setup.tp, dim)[rank] for part in drawn.split(parts, dim)]
        drawn = torch.cat(cut, dim).contiguous()
    param: Any = torch.nn.Parameter(drawn)
    param.tensor_model_parallel = parts is not None
    if parts is not None:
        param.partition_dim, param.partition_stride = dim, 1
        # megatron-core's own attribute for the fused projections of its Mamba layers
        param.partition_sizes = [part // setup.tp for part in parts]
    return param


class Mixer(Held):
    def __init__(self, setup: Own, rank: int) -> None:
        super().__init__(setup, rank, "")
        self.sizes = SIZES
        self.layers = torch.nn.ModuleList(
            Held(setup, rank, f"layers.{layer}") for layer in range(SIZES.layers)
        )

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(scale) + sum(layer(scale) for layer in self.layers)


def make(setup: Own, attach: bool = True) -> Any:
    models.start(setup.tp, seed=7)
    model = Mixer(setup, models.mpu().get_tensor_model_parallel_rank())
    optimizer = torch.optim.AdamW(models.param_groups(model, 3e-3, 0.1))
    settings = config_of(setup.zero, 1, setup.dtype, gradient_clipping=0.0)
    engine = engine_around(
        model, optimizer, settings, rate=lambda step: 1.0 / (1 + step), mpu=models.mpu()
    )
    return ucp.attach(engine, family="mixer") if attach else engine


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """The same on every rank of every mesh."""
    for step in range(first, first + steps):
        engine.backward(engine(torch.tensor(1.0 + step)))
        engine.step()
    return []


def swap_parts(engine: Any, _fault: str) -> None:
    """On one rank at ZeRO-0: what a layout with the parts in another order would have made."""
    weight = dict(engine.module.named_parameters())["layers.1.in_proj"].data
    first, second, third = weight.split((12, 8, 4))
    weight.copy_(torch.cat([first, third, second]))


KINDS[Own] = Kind(make, train, swap_parts, close, known=known, compares_all=False)


def pretrained(argv: list[str], train: bool = False) -> dict[str, Any]:
    """As `states` of the training program's tests."""
    with known():
        return pretrain_jobs.states(argv, train)
