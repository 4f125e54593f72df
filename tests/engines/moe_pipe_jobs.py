"""What the ranks do in the tests of DeepSpeed's own mixtures in DeepSpeed's own pipeline, which
needs a family that says how its layers are called: here is one, as a user would write it."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.core.layers import Layers
from megatron_ucp.families.family import Declared, Family, Sizes, whole
from tests.engines.canonical import named
from tests.engines.kinds import KINDS, Kind
from tests.engines.model import config_of, engine_around, step_with, tokens_of
from tests.engines.moe_jobs import BATCH, SEQUENCE, VOCAB, WIDTH, Moe, draw, mixture
from tests.engines.tensor_jobs import swap
from tests.families.registration import registered

LAYERS = 2


@dataclass(frozen=True)
class Piped(Moe):
    """A mixture in each of two layers, in `pp` stages; 0 for an engine without a pipeline."""

    pp: int = 0


class Layer(torch.nn.Module):
    def __init__(self, setup: Piped, number: int) -> None:
        super().__init__()
        self.moe = mixture(setup, setup.experts[number])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)[0]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float().reshape(-1, VOCAB), labels.reshape(-1))


def layers_of(setup: Piped) -> list[torch.nn.Module]:
    """Embedding, two layers, norm, head."""
    return [
        torch.nn.Embedding(VOCAB, WIDTH),
        *(Layer(setup, number) for number in range(LAYERS)),
        torch.nn.LayerNorm(WIDTH),
        torch.nn.Linear(WIDTH, VOCAB, bias=False),
    ]


class Net(torch.nn.Module):
    """The same layers without a pipeline."""

    def __init__(self, setup: Piped) -> None:
        super().__init__()
        self.embedding, *layers, norm, self.output_layer = layers_of(setup)
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(layers)
        self.decoder.final_layernorm = norm

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.decoder.layers:
            x = layer(x)
        return loss_of(self.output_layer(self.decoder.final_layernorm(x)), labels)


@dataclass(frozen=True, kw_only=True)
class MoeSizes(Sizes):
    """`experts` of each layer."""

    experts: tuple[int, ...]


def table(sizes: MoeSizes) -> dict[str, Declared]:
    out = {
        "embedding.weight": whole(VOCAB, WIDTH),
        "decoder.final_layernorm.weight": whole(WIDTH),
        "decoder.final_layernorm.bias": whole(WIDTH),
        "output_layer.weight": whole(VOCAB, WIDTH),
    }
    for layer, count in enumerate(sizes.experts):
        prefix = f"decoder.layers.{layer}.moe.deepspeed_moe."
        out[f"{prefix}gate.wg.weight"] = whole(count, WIDTH)
        for expert in range(count):
            for name, shape in {
                "up.weight": (5, WIDTH),
                "up.bias": (5,),
                "down.weight": (WIDTH, 5),
                "down.bias": (WIDTH,),
            }.items():
                declared = replace(whole(*shape), expert=(expert, count))
                out[f"{prefix}experts.deepspeed_experts.{expert}.{name}"] = declared
    return out


def staged(name: str) -> str:
    """The name in the pipeline."""
    head, _, rest = name.partition(".")
    if head == "embedding":
        return f"0.{rest}"
    if head == "output_layer":
        return f"{LAYERS + 2}.{rest}"
    part, _, rest = rest.partition(".")
    if part == "final_layernorm":
        return f"{LAYERS + 1}.{rest}"
    number, _, rest = rest.partition(".")
    return f"{int(number) + 1}.{rest}"


def layers(held: Collection[str]) -> Layers:
    names = {staged(name): name for name in held}
    at: list[dict[str, str]] = [{} for _ in range(LAYERS + 3)]
    for pipe in names:
        position, _, rest = pipe.partition(".")
        at[int(position)][rest] = pipe
    return Layers(tuple(at), names, frozenset(range(len(at))))


def measure(module: Any) -> MoeSizes:
    return MoeSizes(LAYERS, WIDTH, 1, 1, 1, 5, VOCAB, VOCAB, experts=module.config.experts)


FAMILY = Family(
    "piped",
    table,
    "tests/engines/moe_pipe_jobs.py",
    lambda sizes: {staged(name): name for name in table(sizes)},
    layers,
    sizes=MoeSizes,
    measure=measure,
)


known = partial(registered, FAMILY)


def make(setup: Piped, attach: bool = True) -> Any:
    """As moe_jobs.make, with a pipeline or without."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(setup.seed)
    dist.barrier()
    net: Any = (
        PipelineModule(  # a mixture on each stage: with none on one, stock waits for ever
            layers_of(setup), num_stages=setup.pp, loss_fn=loss_of, partition_method="type:^Layer$"
        )
        if setup.pp
        else Net(setup)
    )
    net.config = SimpleNamespace(num_layers=LAYERS, experts=setup.experts)
    draw(net, setup.seed, setup.ep)
    params = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(split([{"name": "all", "params": params}]), lr=3e-3)
    dp = dist.get_world_size() // (setup.pp or 1)
    made = engine_around(
        net,
        optimizer,
        config_of(
            setup.zero, BATCH // dp, zero_config={"reduce_scatter": True}, gradient_clipping=0.0
        ),
        rate=lambda step: 1.0 / (1 + step),
    )
    return ucp.attach(made, family="piped") if attach else made


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """As moe_jobs.train."""
    piped = hasattr(engine, "num_stages")
    dp = engine.grid.get_data_parallel_world_size() if piped else dist.get_world_size()
    rank = engine.grid.get_data_parallel_rank() if piped else dist.get_rank()
    losses = []
    for step in range(first, first + steps):
        mine = tokens_of(step, (BATCH, SEQUENCE + 1), VOCAB).chunk(dp)[rank]
        batch = mine[:, :-1].contiguous(), mine[:, 1:].contiguous()
        if piped:
            losses.append(float(engine.train_batch(iter([batch]))))
        else:
            losses.append(step_with(engine, engine(*batch)))
    return losses


def swap_experts(engine: Any, _fault: str) -> None:
    """Two experts of a rank that has the first layer."""
    head = "decoder.layers.0.moe.deepspeed_moe.experts.deepspeed_experts."
    held = [param for name, param in named(engine).items() if name.startswith(head)]
    ups = [param.data for param in held if tuple(param.shape) == (5, WIDTH)]
    if len(ups) > 1:
        swap(ups[0], ups[1])


KINDS[Piped] = Kind(make, train, swap_experts, known=known)
