"""What the ranks do in the tests of DeepSpeed's AutoEP: it takes the mixtures of a model apart and
gives each rank some of the experts, in stacked tensors."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

import megatron_ucp as ucp
from pretrain.mcore.experts import apply_patches
from tests.engines import kinds
from tests.engines.kinds import KINDS, Kind
from tests.engines.model import config_of, engine_around
from tests.engines.moe_jobs import hash_of, train
from tests.engines.tensor_jobs import swap

WIDTH, FFN, VOCAB, SEQUENCE, BATCH = 6, 5, 24, 6, 4


@dataclass(frozen=True)
class Auto:
    """A model of two layers with experts, each rank of `ep` with as many of them. `sub_group` is
    ZeRO-3's sub-group size in elements."""

    ep: int
    zero: int
    dtype: str = "fp32"
    experts: int = 4
    frozen: bool = False
    sub_group: int = 10**9
    seed: int = 1


class Stacked(torch.nn.Module):
    """Experts as transformers keeps them: gate and up in one tensor, down in another."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.empty(count, 2 * FFN, WIDTH))
        self.down_proj = torch.nn.Parameter(torch.empty(count, WIDTH, FFN))


class Mixture(torch.nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, count, bias=False)
        self.experts = Stacked(count)


class Net(torch.nn.Module):
    def __init__(self, setup: Auto) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_experts=setup.experts, top_k=2)
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.mixtures = torch.nn.ModuleList(Mixture(setup.experts) for _ in range(2))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens[:, :-1])
        for mixture in self.mixtures:
            x = x + mixture(x)
        logits = self.head(self.norm(x) * self.scale.to(x.dtype)).float()
        return functional.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, 1:].reshape(-1))


def draw(net: torch.nn.Module, seed: int) -> None:
    """Whole tensors, before AutoEP takes the rank's own experts."""
    for name, param in net.named_parameters():
        own = torch.Generator().manual_seed(hash_of(name) + seed)
        param.data.copy_(torch.randn(param.shape, generator=own) * 0.5)


def make(setup: Auto, attach: bool = True) -> Any:
    """An engine with two groups, which DeepSpeed's function splits, and LambdaLR."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    # a job before may have patched the norms of experts in some processes of the pool: all or none
    apply_patches()
    torch.manual_seed(setup.seed)
    dist.barrier()
    net = Net(setup)
    draw(net, setup.seed)
    if setup.frozen:
        net.mixtures[1].experts.requires_grad_(False)

    def optimizer(_: Any) -> torch.optim.Optimizer:
        named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
        wide = {n for n, p in named if len(getattr(p, "ds_shape", p.shape)) > 1}
        groups = [
            {"name": "wide", "params": [p for n, p in named if n in wide], "weight_decay": 0.1},
            {"name": "thin", "params": [p for n, p in named if n not in wide], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(split(groups), lr=3e-3)

    experts = {
        "enabled": True,
        "autoep_size": setup.ep,
        "use_grouped_mm": False,
        # what it looks for in the model here
        "moe_layer_pattern": r"mixtures\.\d+",
        "router_pattern": "gate",
        "expert_pattern": "experts",
        "expert_w1": "gate_up_proj",
        "expert_w2": "down_proj",
        "expert_w3": None,
        "num_experts_attr": "num_experts",
        "top_k_attr": "top_k",
    }
    zero = {"reduce_scatter": True, "sub_group_size": setup.sub_group}
    config = config_of(
        setup.zero,
        BATCH // dist.get_world_size(),
        setup.dtype,
        zero,
        gradient_clipping=0.0,  # at stage 0 a rank clips by the norm of its own experts
        expert_parallel=experts,
    )
    made = engine_around(
        net,
        optimizer,
        config,
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, _slower),
    )
    return ucp.attach(made) if attach else made


def _slower(step: int) -> float:
    return 1.0 / (1 + step)


def plant_fault(engine: Any, fault: str) -> None:
    """One small wrong thing that a comparison has to see, at ZeRO-0."""
    experts, base = engine.module.mixtures[1].experts, engine.optimizer
    gate, up = experts.w1.data, experts.w3.data
    if fault == "two experts swapped":
        gate.copy_(gate[[1, 0, *range(2, len(gate))]])
    elif fault == "gate and up of one expert":
        swap(gate[2], up[2])
    elif fault == "a row of the router":
        router = engine.module.mixtures[0].router.gate.weight.data
        router.copy_(router.roll(1, 0))
    elif fault == "an expert's moment":
        base.state[experts.w2]["exp_avg"][3, 0, 0] = 0.5
    else:
        kinds.plant_fault(engine, fault)


KINDS[Auto] = Kind(make, train, plant_fault)
