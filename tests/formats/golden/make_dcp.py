"""Makes the folders in `golden/dcp`: a small model under FSDP2 on two CPU ranks, by torch alone.

    python tests/formats/golden/make_dcp.py                     # Python 3.11, torch 2.13
    python3.13 tests/formats/golden/make_dcp.py flat_torch2.15  # another Python, another torch

Each has what torch's own gather says in NAME.pt. Cases: "plain" (`model` and `optim`), "flat" (one
object for each parameter and setting, scheduler and counters beside), "accelerate" (two folders),
"tied" (one matrix under two names), "bf16" (weights in bfloat16, and so its moments).
What follows a "_" says who wrote it: "flat_torch2.15" is "flat" by Python 3.13 and torch 2.15.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

HERE = Path(__file__).parent / "dcp"
CASES = ("plain", "flat", "accelerate", "tied", "bf16")


class Net(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.inner = nn.Linear(4, 5)
        self.outer = nn.Linear(5, 4, bias=False)
        self.head = nn.Linear(4, 7, bias=False)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 4.0]))
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.outer(torch.tanh(self.inner(self.table(tokens))))) * self.scale[0]


def main(name: str, rank: int, store: str) -> None:
    case = name.partition("_")[0]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    net = Net(case == "tied").to(torch.bfloat16 if case == "bf16" else torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for part in (net.inner, net.outer):
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in net.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 5e-4},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(3):
        rows = torch.randint(7, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(net(rows).flatten(0, 1).float(), rows.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    weights, states = get_model_state_dict(net), get_optimizer_state_dict(net, optimizer)
    folder = HERE / name
    if case == "accelerate":
        dcp.save({"model": weights}, checkpoint_id=folder / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": states}, checkpoint_id=folder / "optimizer_0")
        if not rank:
            torch.save(schedule.state_dict(), folder / "scheduler.bin")
    elif case == "flat":
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        flat = get_optimizer_state_dict(net, optimizer, options=options)
        counted = {"step": torch.tensor(3, dtype=torch.int32)}
        more = {"lr_scheduler": schedule.state_dict(), "train_state": counted}
        named = {f"optimizer.{key}": value for key, value in flat.items()}
        dcp.save({**weights, **named, **more}, checkpoint_id=folder)
    else:
        dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(net, options=full)
    states = get_optimizer_state_dict(net, optimizer, options=full)
    if not rank:
        torch.save({"weights": weights, **states}, HERE / f"{name}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(sys.argv[1], int(os.environ["RANK"]), sys.argv[2])
    else:
        for one in sys.argv[1:] or CASES:
            shutil.rmtree(HERE / one, ignore_errors=True)
            (HERE / one).mkdir(parents=True)
            place = HERE / "store"
            start = [sys.executable, __file__, one, str(place)]
            ranks = [
                subprocess.Popen(start, env={**os.environ, "PYTHONPATH": "", "RANK": str(n)})
                for n in range(2)
            ]
            assert [each.wait(120) for each in ranks] == [0, 0]
            place.unlink(missing_ok=True)
