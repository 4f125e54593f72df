"""A loop of your own: save on some ranks, go on with any other number of them.

torchrun --nproc_per_node 2 examples/minimal.py     # trains ten steps, saves
torchrun --nproc_per_node 1 examples/minimal.py     # goes on where that was
"""

import sys

import deepspeed
import torch

import megatron_ucp as ucp

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "runs/minimal"
deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
config = {"train_batch_size": 4, "zero_optimization": {"stage": 2}, "steps_per_print": 10**9}
config["zero_allow_untested_optimizer"] = True
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
ucp.attach(engine)
engine.load_checkpoint(FOLDER)  # DeepSpeed's own call; a first start where there is nothing
for step in range(engine.global_steps, engine.global_steps + 10):
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    data = data.chunk(engine.world_size)[engine.global_rank]
    loss = (engine(data.to(engine.device)) - 1).square().mean()
    engine.backward(loss)
    engine.step()
engine.save_checkpoint(FOLDER)
print(f"rank {engine.global_rank}: step {engine.global_steps}, loss {loss.item():.6f}")
