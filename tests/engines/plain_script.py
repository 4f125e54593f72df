"""A DeepSpeed script that knows nothing of megatron_ucp; its config has the section. Run by
tests/engines/test_trainers.py.

plain_script.py FOLDER save|resume ZERO
"""

import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch

from tests.engines.canonical import canonical
from tests.engines.model import GLOBAL_BATCH, Net, param_groups, train


def main() -> None:
    folder, verb, zero = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    deepspeed.init_distributed("gloo")
    torch.manual_seed(1 if verb == "save" else 2)
    net = Net()
    optimizer = torch.optim.AdamW(param_groups(net, 2))
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config={
            "train_micro_batch_size_per_gpu": GLOBAL_BATCH // torch.distributed.get_world_size(),
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": zero},
        },
    )
    if verb == "save":
        train(engine, 3)
        engine.save_checkpoint(str(folder))
    else:
        engine.load_checkpoint(str(folder))
    state = canonical(engine)
    if torch.distributed.get_rank() == 0:
        torch.save(state, folder / f"{verb}.pt")
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
