"""What the ranks do in the tests of values that differ from rank to rank: statistics of a
BatchNorm, a rank's own place in its data, a scheduler that follows a rank's own loss."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines.model import WIDTH, config_of


class Meter(torch.nn.Module):
    """Keeps a number besides tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": (self.seen,)}

    def set_extra_state(self, state: Any) -> None:
        (self.seen,) = state["seen"]


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.down = torch.nn.Linear(5, 1)
        self.meter = Meter()
        self.register_buffer("shared", torch.arange(3.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(inputs)))


def make(zero: int, attach: bool = True) -> Any:
    import deepspeed

    torch.manual_seed(5)
    net = Normed()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    config = config_of(zero, 4, gradient_clipping=0.0)
    engine = deepspeed.initialize(
        model=net, optimizer=optimizer, lr_scheduler=None, config=config, dist_init_required=False
    )[0]
    engine.lr_scheduler = schedule  # DeepSpeed would step it without a metric
    return ucp.attach(engine) if attach else engine


def train(engine: Any, steps: int = 2) -> None:
    scheduler, engine.lr_scheduler = engine.lr_scheduler, None
    for number in range(steps):
        seed = 100 * dist.get_rank() + number
        inputs = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        scheduler.step(loss.item())
        engine.module.meter.seen += 1 + dist.get_rank()
    engine.lr_scheduler = scheduler


def buffers(engine: Any) -> dict[str, Any]:
    return {name: buffer.tolist() for name, buffer in engine.module.named_buffers()}


def client_state() -> dict[str, Any]:
    return {"place": {"rank": dist.get_rank(), "seen": torch.arange(3) + dist.get_rank()}, "run": 7}


def held(engine: Any, client: Any) -> dict[str, Any]:
    """All that may differ, as values that pickle takes."""
    place = client.get("place", {})
    shown = {**place, "seen": place["seen"].tolist()} if place else {}
    best = engine.lr_scheduler.best if engine.lr_scheduler is not None else None
    own = {"buffers": buffers(engine), "seen": engine.module.meter.seen, "place": shown}
    return {**own, "run": client.get("run"), "best": best}


def save(zero: int, folder: str, attach: bool, tag: str, alike: bool = False) -> dict[str, Any]:
    """What this rank had when it saved."""
    engine = make(zero, attach)
    if not alike:
        train(engine)
    client = {"run": 7} if alike else client_state()
    engine.save_checkpoint(folder, tag=tag, client_state=client)
    out = held(engine, client)
    out["notes"] = list(engine.ucp_save_report.notes) if attach else []
    engine.destroy()
    return out


def load(zero: int, folder: str, tag: str, stock: bool = False, **options: Any) -> dict[str, Any]:
    """What this rank has after a load, or the error."""
    engine = make(zero, attach=False)
    before = buffers(engine)
    try:
        if stock:
            _, client = engine.load_checkpoint(folder, tag=tag)
            notes: tuple[str, ...] = ()
        else:
            report = ucp.load(engine, folder, tag, **options)
            client, notes = report.client_state, report.notes
    except ucp.UcpError as error:
        out = {"error": str(error), "unchanged": before == buffers(engine)}
    else:
        out = {**held(engine, client), "notes": list(notes)}
    engine.destroy()
    return out


def convert(folder: str, tag: str, to: str, zero: int, dp: int = 2, **options: Any) -> str:
    """The error of a conversion, "" without one."""
    target = ucp.Target(mesh=ucp.Mesh(dp=dp, zero=zero))
    try:
        ucp.convert(Path(folder) / tag, Path(folder) / to, target=target, **options)
    except ucp.UcpError as error:
        return str(error)
    return ""


def save_unlike(folder: str) -> str:
    """A group's setting differs from rank to rank: the error of the save."""
    from tests.engines.masters import base_of

    engine = make(1)
    base_of(engine).param_groups[0]["mine"] = dist.get_rank()
    try:
        engine.save_checkpoint(folder, tag="tag")
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.destroy()
    return ""
