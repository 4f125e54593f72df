"""A small torch model with everything that a checkpoint can get wrong, and engines around it."""

import importlib
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.engines import optimizers
from tests.engines.kinds import KINDS, Kind
from tests.ranks import allow_fp16_on_cpu

VOCAB, WIDTH = 11, 7
GLOBAL_BATCH, SEQUENCE = 4, 5


class Net(torch.nn.Module):
    """Tied head, odd sizes, a one-element parameter, a frozen layer, a float and an int buffer, one
    that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 13)
        self.down = torch.nn.Linear(13, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(WIDTH) + 0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("not_saved", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        x = self.embed(tokens[:, :-1])
        x = x + self.down(torch.tanh(self.up(x))) * self.gain + self.frozen(x)
        logits = self.head(self.norm(x) * self.scale.to(x.dtype)).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 14)
        self.down = torch.nn.Linear(14, WIDTH)


class Longer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(WIDTH, WIDTH)


class Shorter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, bias=False)


class Untied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, VOCAB, bias=False)


class Thawed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.frozen.weight.requires_grad_(True)


class Grown(Net):
    """One more layer, which is used."""

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm.register_forward_pre_hook(lambda _, inputs: (inputs[0] + self.more(inputs[0]),))


class MoreBuffers(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("another", torch.zeros(3))


class MoreRows(Net):
    """Three tokens more, as `resize_token_embeddings` adds them."""

    ROWS = VOCAB + 3

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(self.ROWS, WIDTH)
        self.head = torch.nn.Linear(WIDTH, self.ROWS, bias=False)
        self.head.weight = self.embed.weight


class FewerRows(MoreRows):
    ROWS = VOCAB - 2


class MoreRowsUntied(MoreRows):
    """A head of its own, with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, self.ROWS)


class UntiedBias(Net):
    """The same head for the rows that there were."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(WIDTH, VOCAB)


class WithTower(Net):
    """A tower of two layers beside the rest, which the loss needs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)
        )
        self.norm.register_forward_pre_hook(self.through)

    def through(self, _: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = inputs[0]
        for layer in self.tower:
            x = x + layer(x)
        return (x,)


class WithFrozenTower(WithTower):
    def __init__(self) -> None:
        super().__init__()
        self.tower.requires_grad_(False)


class Unlike(torch.nn.Module):
    """No name of another model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(VOCAB, WIDTH)
        self.out = torch.nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.out(self.words(tokens[:, :-1])).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].reshape(-1))


class Twins(Net):
    """Two matrices of one shape, and of no other parameter's."""

    def __init__(self) -> None:
        super().__init__()
        self.left = torch.nn.Linear(WIDTH, 9, bias=False)
        self.right = torch.nn.Linear(WIDTH, 9, bias=False)
        self.back = torch.nn.Linear(9, WIDTH, bias=False)
        self.norm.register_forward_pre_hook(self.around)

    def around(self, _: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = inputs[0]
        return (x + self.back(torch.tanh(self.left(x)) * torch.sigmoid(self.right(x))),)


class Empty(Net):
    """A trainable parameter without elements stands before others."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.zeros(0, WIDTH))
        self.last = torch.nn.Parameter(torch.rand(1, WIDTH))
        self.norm.register_forward_pre_hook(
            lambda _, inputs: (inputs[0] + torch.cat([self.nothing, self.last]).sum(0),)
        )


class Tiny(Net):
    """With three groups the last one has a single element: most ranks hold nothing but padding of
    it."""


class Matrices(Net):
    """Only matrices are trained, as Muon asks for."""

    def __init__(self) -> None:
        super().__init__()
        for param in self.parameters():
            param.requires_grad_(param.dim() == 2 and param.requires_grad)


class Noisy(Net):
    """Its loss needs the generators of torch, numpy and Python."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        noise = (
            torch.rand(()) + np.random.rand() + np.random.randn() + random.random() + random.gauss()
        )
        return super().forward(tokens) * (1 + 0.1 * float(noise))


NETS = {
    kind.__name__: kind
    for kind in (
        Net,
        Wider,
        Longer,
        Grown,
        Shorter,
        Untied,
        Thawed,
        MoreBuffers,
        MoreRows,
        FewerRows,
        MoreRowsUntied,
        UntiedBias,
        WithTower,
        WithFrozenTower,
        Unlike,
        Twins,
        Empty,
        Tiny,
        Matrices,
        Noisy,
    )
}


SCHEDULES: dict[str, Any] = {
    "LambdaLR": lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1.0 / (1 + step)),
    "StepLR": lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2),
    "Renamed": lambda opt: Renamed(opt, lambda step: 1.0 / (1 + step)),
}


class Renamed(torch.optim.lr_scheduler.LambdaLR):
    """Keeps the same keys under another class."""


@dataclass(frozen=True)
class Setup:
    """How an engine is built. `groups` 2: biases and vectors have their own learning rate and
    weight decay."""

    zero: int
    dtype: str = "fp32"
    optimizer: str = "AdamW"
    options: tuple[tuple[str, Any], ...] = ()
    config: tuple[tuple[str, Any], ...] = ()
    zero_config: tuple[tuple[str, Any], ...] = ()
    groups: int = 2
    seed: int = 1
    net: str = "Net"
    extra: dict[str, Any] = field(default_factory=dict, compare=False)


def param_groups(net: torch.nn.Module, groups: int) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    if groups == 1:
        return [{"params": [p for _, p in named], "lr": 3e-3}]
    matrices = [p for _, p in reversed(named) if p.dim() > 1]  # not the order of the module
    vectors = [p for _, p in named if p.dim() <= 1]
    if groups == 3:
        single = [p for p in vectors if p.numel() == 1]
        rest = [p for p in vectors if p.numel() > 1]
        return [
            {"params": matrices, "lr": 3e-3},
            {"params": rest, "lr": 7e-3},
            {"params": single, "lr": 1e-3},
        ]
    return [
        {"params": matrices, "lr": 3e-3, "weight_decay": 0.1},
        {"params": vectors, "lr": 7e-3, "weight_decay": 0.0},
    ]


def swap(net: torch.nn.Module, params: list[Any], names: tuple[str, ...]) -> None:
    """Two parameters of a group change places."""
    if names:
        wanted = [dict(net.named_parameters())[name] for name in names]
        one, other = (next(i for i, p in enumerate(params) if p is w) for w in wanted)
        params[one], params[other] = params[other], params[one]


def make_optimizer(
    name: str, groups: list[dict[str, Any]], options: dict[str, Any]
) -> torch.optim.Optimizer:
    """By class name: DeepSpeed's own, else torch's; with its package, of any other."""
    import deepspeed.ops as ops

    own = {
        **{name: (optimizers, name) for name in ("Lion", "OwnAdamW", "ChattyAdamW", "Adam8bit")},
        "FusedAdam": (ops.adam, "FusedAdam"),
        "CPUAdam": (ops.adam, "DeepSpeedCPUAdam"),
        "FusedLion": (ops.lion, "FusedLion"),
        "CPULion": (ops.lion, "DeepSpeedCPULion"),
        "CPUAdagrad": (ops.adagrad, "DeepSpeedCPUAdagrad"),
    }
    if "." in name:  # of another package
        package, _, name = name.rpartition(".")
        made = getattr(importlib.import_module(package), name)(groups, **options)
        for group in made.param_groups:
            if "train_mode" in group:  # schedule-free; its `train()` makes entries for parameters
                group["train_mode"] = True  # that DeepSpeed's wrappers replace
        return made
    return getattr(*own.get(name, (torch.optim, name)))(groups, **options)


def engine_around(
    model: Any, optimizer: Any, config: dict[str, Any], rate: Any = None, **more: Any
) -> Any:
    """An engine of stock DeepSpeed on the ranks that are there. `rate`: of LambdaLR, by step."""
    import deepspeed

    if rate:
        more["lr_scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    more |= {"optimizer": optimizer, "config": config}
    return deepspeed.initialize(model=model, dist_init_required=False, **more)[0]


def config_of(
    zero: int,
    rows: int,
    dtype: str = "fp32",
    zero_config: dict[str, Any] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """A config for DeepSpeed, with so many rows for each rank: every parameter is partitioned at
    stage 3, and the loss scale of fp16 is low enough to go on at once."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": zero,
            "stage3_param_persistence_threshold": 0,
            **(zero_config or {}),
        },
        **more,
    }
    if dtype != "fp32":
        scale = {"initial_scale_power": 8} if dtype == "fp16" else {}
        config[dtype] = {"enabled": True, **scale, **config.get(dtype, {})}
    if dtype == "fp16":
        allow_fp16_on_cpu()
    return config


def ds_config(setup: Setup) -> dict[str, Any]:
    """The DeepSpeed config of a setup."""
    rows = GLOBAL_BATCH // dist.get_world_size()
    config = config_of(setup.zero, rows, setup.dtype, dict(setup.zero_config), **dict(setup.config))
    if setup.dtype == "fp16":
        config["fp16"].setdefault("loss_scale_window", 3)
    return config


def make_net(setup: Setup) -> torch.nn.Module:
    """The model of a setup, with the parameters that it trains."""
    torch.manual_seed(setup.seed)
    net: torch.nn.Module = NETS[setup.net]()
    if setup.extra.get("prepare"):
        setup.extra["prepare"](net)
    net.to(setup.extra.get("model_dtype"))
    for what, trained in (("frozen", False), ("thawed", True)):
        if name := setup.extra.get(what):
            dict(net.named_parameters())[name].requires_grad_(trained)
    return net


def make_groups(net: torch.nn.Module, setup: Setup) -> list[dict[str, Any]]:
    """The groups of its optimizer; some parameters may be `apart`, in a group of their own."""
    groups = param_groups(net, setup.groups)
    named = dict(net.named_parameters())
    apart = [named[name] for name in setup.extra.get("apart", ())]
    swap(net, groups[0]["params"], setup.extra.get("swapped", ()))
    without = [*apart, named.get(setup.extra.get("left_out", ""))]
    for group in groups:
        group["params"] = [p for p in group["params"] if not any(p is one for one in without)]
    if setup.extra.get("alike"):  # several groups with one set of hyper-parameters
        groups = [{**group, "lr": 3e-3, "weight_decay": 0.1} for group in groups]
    return [*groups, {"params": apart, "lr": 5e-3}] if apart else groups


def make_engine(setup: Setup, attach: bool = True) -> Any:
    """A DeepSpeed engine on the current world, attached, with LambdaLR."""
    import deepspeed

    import megatron_ucp as ucp

    net = make_net(setup)
    groups, config = make_groups(net, setup), ds_config(setup)
    if setup.optimizer != MUON:
        optimizer = make_optimizer(setup.optimizer, groups, dict(setup.options))
        schedule = SCHEDULES[setup.extra.get("schedule", "LambdaLR")](optimizer)
    make = ucp.initialize if attach else deepspeed.initialize
    if setup.extra.get("evaluate"):
        config.pop("gradient_clipping")
        return make(model=net, config=config, dist_init_required=False)[0]
    if setup.optimizer == MUON:
        return muon_engine(setup, make, net, groups, config)
    if setup.extra.get("sp"):
        from deepspeed.runtime.sequence_parallel import parallel_state_sp

        parallel_state_sp.initialize_sequence_parallel(setup.extra["sp"])
    return make(
        model=net,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=config,
        dist_init_required=False,
        mpu=parallel_state_sp if setup.extra.get("sp") else None,
    )[0]


MUON = "muon"  # of DeepSpeed, by its config


def uncompiled() -> None:
    """Newton-Schulz is not compiled from here on: a compiler's start takes longer than a test."""
    from deepspeed.runtime.zero.muon import original_muon
    from megatron_ucp_patches.no_torch_compile import (  # pyright: ignore[reportMissingImports]
        unwrap,
    )

    unwrap(original_muon)


def muon_section(**options: Any) -> dict[str, Any]:
    """The section of a config that asks for Muon, which is not compiled from here on."""
    uncompiled()
    return {"type": MUON, "params": {"lr": 3e-3, "torch_adam": True, **options}}


def muon_engine(
    setup: Setup, make: Any, net: torch.nn.Module, groups: list[dict[str, Any]], config: Any
) -> Any:
    """An engine whose optimizer the config names."""
    config["optimizer"] = muon_section(**dict(setup.options))
    if setup.zero == 3:
        config["zero_optimization"]["reduce_scatter"] = False
    return make(
        model=net,
        model_parameters=groups,
        lr_scheduler=SCHEDULES[setup.extra.get("schedule", "LambdaLR")],
        config=config,
        dist_init_required=False,
    )[0]


def tokens_of(step: int, shape: tuple[int, int], below: int) -> torch.Tensor:
    """The batch of a step, which depends on the step number alone."""
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1000 + step))


def step_with(engine: Any, loss: torch.Tensor, group: Any = None) -> float:
    """Takes a step; the mean loss over all ranks of a group, exact in float64."""
    engine.backward(loss)
    engine.step()
    total = loss.detach().double().reshape(1)
    dist.all_reduce(total, group=group)
    return float(total) / dist.get_world_size(group)


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Losses of so many steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses: list[float] = []
    for step in range(first, first + steps):
        tokens = tokens_of(step, (GLOBAL_BATCH, SEQUENCE), VOCAB).chunk(world)[rank]
        losses.append(step_with(engine, engine(tokens.contiguous())))
    return losses


KINDS[Setup] = Kind(make_engine, train)
