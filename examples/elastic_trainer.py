"""An elastic run of transformers' Trainer with a DeepSpeed config: torchrun starts it again on the
ranks that are left, or that came, and it goes on from its newest whole checkpoint.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes=1:2 --nproc_per_node 2 --max-restarts 3 --rdzv-backend c10d \
        --rdzv-endpoint HOST:29400 examples/elastic_trainer.py

docs/elastic.md says more of that command. The lines that megatron_ucp adds are marked with `# <--`.
"""

import argparse
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from hf_trainer import Samples  # beside this file
from lib.small_llama import make_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import megatron_ucp as ucp  # <-- 1

GLOBAL_BATCH, MICRO_BATCH = 12, 4
WAIT_S = 600  # for other ranks, at most: nothing else ends the wait for a node without power
AGAIN = 75  # exit code of a rank whose agent shall start it again


def shared_batch(ranks: int) -> tuple[int, int]:
    """Micro batch and accumulation, so that any number of ranks takes the same samples in a
    step."""
    if GLOBAL_BATCH % ranks:
        sys.exit(f"{GLOBAL_BATCH} samples can't be shared equally by {ranks} ranks")
    share = GLOBAL_BATCH // ranks
    micro = max(size for size in range(1, MICRO_BATCH + 1) if not share % size)
    return micro, share // micro


def newest_whole(folder: Path) -> str | None:
    """The newest checkpoint of Trainer, which writes trainer_state.json last."""
    whole = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    newest = max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)
    return None if newest is None else str(newest)


class Notice(TrainerCallback):
    """SIGTERM, to any rank: all ranks save after the step, and stop."""

    def __init__(self) -> None:
        self.asked = self.stopped = False
        signal.signal(signal.SIGTERM, self.ask)

    def ask(self, *_: object) -> None:
        self.asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        flag = torch.tensor(float(self.asked), device=args.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag:
            self.stopped = control.should_save = control.should_training_stop = True

    def code(self) -> int:
        """The exit code. A rank that was not told to end wants to be started again: the node of
        another one was given back. Its own agent may still be about to tell it."""
        deadline = time.monotonic() + 2
        while self.stopped and not self.asked and time.monotonic() < deadline:
            time.sleep(0.05)
        return AGAIN if self.stopped and not self.asked else 0


class Log(TrainerCallback):
    """A line of JSON for each step, from the first rank."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            entry = {"step": state.global_step, "loss": logs["loss"], "ranks": args.world_size}
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")


def make_trainer(args: argparse.Namespace, ranks: int) -> Trainer:
    micro, accumulation = shared_batch(ranks)
    arguments = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        learning_rate=1e-3,
        save_steps=args.save_steps,
        save_total_limit=3,
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        ddp_timeout=WAIT_S,
        accelerator_config={"use_configured_state": True},
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": 2 if ranks > 1 else 1},
            "zero_allow_untested_optimizer": True,
            "universal_checkpoint": {"enabled": True},  # <-- 2
        },
    )
    return Trainer(make_model(seed=1), arguments, train_dataset=Samples())


def main() -> int:
    parser = argparse.ArgumentParser(description="An elastic run of Trainer.")
    parser.add_argument("--out", type=Path, default=Path("runs/elastic_trainer"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-steps", type=int, default=10)
    args = parser.parse_args()
    if not torch.cuda.is_available():  # Accelerate finds no backend for DeepSpeed by itself there
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo", timeout=timedelta(seconds=WAIT_S))
    ucp.install()  # <-- 3: before the trainer is built
    args.out.mkdir(parents=True, exist_ok=True)
    notice = Notice()
    trainer = make_trainer(args, int(os.environ.get("WORLD_SIZE", "1")))
    trainer.add_callback(notice)
    trainer.add_callback(Log(args.out / "log.jsonl"))
    trainer.train(resume_from_checkpoint=newest_whole(args.out))
    return notice.code()


if __name__ == "__main__":
    sys.exit(main())
