"""What the ranks do in the tests of DeepSpeed's own mixtures, `deepspeed.moe.layer.MoE`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines import kinds, tensor_jobs
from tests.engines.kinds import KINDS, Kind, kind_of
from tests.engines.model import config_of, engine_around, step_with, tokens_of
from tests.engines.tensor_jobs import swap

WIDTH, VOCAB, SEQUENCE, BATCH = 6, 24, 6, 4


@dataclass(frozen=True)
class Moe:
    """A model with two mixtures. `experts` are those of each one (PR-MoE has different numbers);
    `residual` adds a dense MLP beside each (residual MoE). `scaled` experts have buffers; those of
    the numbers `frozen` are not trained. `tied`: the head is the embedding."""

    ep: int
    zero: int
    dtype: str = "fp32"
    experts: tuple[int, int] = (4, 4)
    residual: bool = False
    seed: int = 1
    scaled: bool = False
    frozen: tuple[int, ...] = ()
    tied: bool = False


class Expert(torch.nn.Module):
    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 5)
        self.down = torch.nn.Linear(5, WIDTH)
        if scaled:
            self.register_buffer("scale", torch.ones(5))
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.up(x))
        return self.down(y * self.scale.to(y.dtype) if hasattr(self, "scale") else y)


def mixture(setup: Moe, count: int) -> torch.nn.Module:
    """DeepSpeed's layer with so many experts. It drops no token and draws nothing."""
    from deepspeed.moe.layer import MoE

    return MoE(
        WIDTH,
        Expert(setup.scaled),
        num_experts=count,
        ep_size=setup.ep,
        k=2,
        drop_tokens=False,
        use_rts=False,
        use_residual=setup.residual,
        top2_2nd_expert_sampling=False,
    )


class Net(torch.nn.Module):
    def __init__(self, setup: Moe) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.mixtures = torch.nn.ModuleList(mixture(setup, count) for count in setup.experts)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        if setup.tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for mixture in self.mixtures:
            x = x + mixture(x)[0]
        logits = self.head(self.norm(x) * self.scale.to(x.dtype)).float()
        return torch.nn.functional.cross_entropy(
            logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1)
        )


def whole_names(net: torch.nn.Module, ep: int) -> dict[str, str]:
    """Name of a parameter or buffer -> that with the number of an expert in the whole layer."""
    ep_rank = dist.get_rank() % ep
    counts: dict[str, set[str]] = {}
    held = [*dict(net.named_parameters()), *dict(net.named_buffers())]
    for name in held:
        head, found, rest = name.partition("deepspeed_experts.")
        if found:
            counts.setdefault(head, set()).add(rest.partition(".")[0])
    out = dict(zip(held, held, strict=True))
    for name in held:
        head, found, rest = name.partition("deepspeed_experts.")
        if found:
            number, _, inner = rest.partition(".")
            out[name] = f"{head}{found}{int(number) + ep_rank * len(counts[head])}.{inner}"
    return out


def draw(net: torch.nn.Module, seed: int, ep: int, frozen: tuple[int, ...] = ()) -> None:
    """The same first values on every mesh: those of an expert follow from its number."""
    whole = whole_names(net, ep)
    for name, param in net.named_parameters():
        own = torch.Generator().manual_seed(hash_of(whole[name]) + seed)
        param.data.copy_(torch.randn(param.shape, generator=own) * 0.5)
        param.requires_grad = not any(f"_experts.{number}." in whole[name] for number in frozen)
    for name, buffer in net.named_buffers():
        if "_experts." in name:
            buffer.fill_(hash_of(whole[name]) % 97 + seed)


def hash_of(name: str) -> int:
    """Of every name another one, the same in every process."""
    import zlib

    return zlib.crc32(name.encode())


def make(setup: Moe, attach: bool = True) -> Any:
    """An engine with two groups, which DeepSpeed's function splits, and LambdaLR."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    torch.manual_seed(setup.seed)
    dist.barrier()
    net = Net(setup)
    draw(net, setup.seed, setup.ep, setup.frozen)
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    groups = [
        {"name": "matrices", "params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"name": "vectors", "params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(split(groups), lr=3e-3)
    config = config_of(
        setup.zero,
        BATCH // dist.get_world_size(),
        setup.dtype,
        {"reduce_scatter": True},
        # at stage 0 each rank clips by the norm of its own experts, and the copies of all else go
        # apart (deepspeed 0.19.8, clip_grad_norm_ without an mpu)
        gradient_clipping=1.0 if setup.zero else 0.0,
    )
    made = engine_around(net, optimizer, config, rate=lambda step: 1.0 / (1 + step))
    return ucp.attach(made) if attach else made


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Losses of so many steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses: list[float] = []
    for step in range(first, first + steps):
        mine = tokens_of(step, (BATCH, SEQUENCE + 1), VOCAB).chunk(world)[rank]
        losses.append(step_with(engine, engine(mine.contiguous())))
    return losses


def plant_fault(engine: Any, fault: str) -> None:
    """One small wrong thing that a comparison has to see, at ZeRO-0."""
    params, base = dict(engine.module.named_parameters()), engine.optimizer
    head = "mixtures.1.deepspeed_moe.experts.deepspeed_experts"
    first, second = (params.get(f"{head}.{number}.up.weight") for number in (0, 1))
    if fault == "two experts swapped":
        swap(first.data, second.data)
    elif fault == "a row of the router":
        router = params["mixtures.0.deepspeed_moe.gate.wg.weight"].data
        router.copy_(router.roll(1, 0))
    elif fault == "an expert's moment":
        base.state[first]["exp_avg"].view(-1)[3] = 0.5
    elif fault == "an expert's decay":
        group = next(g for g in base.param_groups if any(p is first for p in g["params"]))
        group["weight_decay"] += 0.01
    else:
        kinds.plant_fault(engine, fault)


KINDS[Moe] = Kind(make, train, plant_fault)


# ------------------------------------------------ jobs


def save_without_frozen(setup: Any, folder: str) -> None:
    """A step, saved as the tag `trained` without frozen weights; the oracle beside it."""
    kind = kind_of(setup)
    engine = kind.make(setup)
    kind.train(engine, 1)
    engine.save_checkpoint(folder, tag="trained", exclude_frozen_parameters=True)
    states = {"trained": kind.canonical(engine)}
    kind.close(engine)
    if dist.get_rank() == 0:
        torch.save({"states": states, "losses": [], "steps": 1}, Path(folder) / "oracle.pt")


def save_refused(setup: Moe, folder: str, state: dict[str, Any] | None = None) -> str:
    """What is said against a save with a client state."""
    engine = make(setup)
    saving = partial(engine.save_checkpoint, folder, client_state=state or {})
    return tensor_jobs.refusal(engine, saving)


def load_refused(setup: Moe, folder: str, **options: Any) -> str:
    """What a load says of the tag `trained`."""
    engine = make(setup, attach=False)
    return tensor_jobs.refusal(engine, lambda: ucp.load(engine, folder, tag="trained", **options))


def unnamed(setup: Moe, folder: str) -> str:
    """What a load says of a parameter of experts whose name does not say of which ones."""
    engine = make(setup, attach=False)
    known = next(p for p in engine.module.parameters() if not getattr(p, "allreduce", True))
    odd = torch.nn.Parameter(torch.zeros(2))
    odd.allreduce, odd.group_name = False, known.group_name
    engine.module.register_parameter("stacked", odd)
    engine.param_names[odd] = "stacked"
    return tensor_jobs.refusal(engine, lambda: ucp.load(engine, folder))


def adapted(setup: Moe, folder: str) -> str:
    """What a load says of a parameter that was added to experts later, as adapters are: DeepSpeed
    has marked those that were there."""
    engine = make(setup, attach=False)
    expert = next(m for m in engine.module.modules() if isinstance(m, Expert))
    expert.late = torch.nn.Parameter(torch.zeros(2))
    name = next(n for n, p in engine.module.named_parameters() if p is expert.late)
    engine.param_names[expert.late] = name
    return tensor_jobs.refusal(engine, lambda: ucp.load(engine, folder))
