"""A LoRA adapter of peft under transformers' Trainer: two ranks at ZeRO-2 train and save, and the
run goes on where it was on four ranks at ZeRO-3 and on one at ZeRO-1.

    python examples/hf_trainer.py                  # trains, saves, resumes twice, prints a table
    python examples/hf_trainer.py --plant-fault    # flips one bit after each load: exit code 1

The lines that megatron_ucp adds to such a script are marked with `# <--`.
"""

import argparse
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from lib.resumes import Case, add_arguments, compare, write_result  # beside this file
from lib.small_llama import GLOBAL_BATCH, make_model, read_corpus, sample
from lib.states import compare_plain, gather_plain, plant_in_moment, save, total
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments

import megatron_ucp as ucp  # <-- 1

SOURCE = Case("2 ranks, ZeRO-2", 2, (2, 2))
TARGETS = [Case("4 ranks, ZeRO-3", 4, (4, 3)), Case("1 rank, ZeRO-1", 1, (1, 1))]


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows of the source of Python's standard library."""

    def __init__(self) -> None:
        self.corpus = read_corpus()

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = sample(self.corpus, number)
        return {"input_ids": tokens, "labels": tokens}


def make_trainer(args: argparse.Namespace, ranks: int, zero: int, seed: int) -> Trainer:
    """The frozen model is the same in every run, as if it had been downloaded; the adapter's first
    weights depend on the seed."""
    base = make_model(seed=1)
    torch.manual_seed(seed)
    config = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    arguments = TrainingArguments(
        output_dir=str(args.out / "trainer"),
        max_steps=args.steps + args.more,
        per_device_train_batch_size=GLOBAL_BATCH // ranks,
        learning_rate=1e-3,
        save_steps=args.steps,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        accelerator_config={"use_configured_state": True},
        deepspeed={
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": zero},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "universal_checkpoint": {"enabled": True},  # <-- 2
        },
    )
    return Trainer(get_peft_model(base, config), arguments, train_dataset=Samples())


class Check(TrainerCallback):
    """Keeps the states when the run saves; compares with them when another one begins there."""

    def __init__(self, args: argparse.Namespace, trainer: Trainer, saves: bool) -> None:
        self.args, self.trainer, self.saves = args, trainer, saves
        self.found: dict[str, Any] = {}

    def states(self) -> dict[str, Any]:
        trainer: Any = self.trainer
        return gather_plain(trainer.deepspeed, trainer.lr_scheduler, lambda _, whole: whole)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.saves and state.global_step == self.args.steps:
            save(self.args.out / "states.pt", self.states())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.saves:
            return
        engine: Any = self.trainer.deepspeed
        if self.args.plant_fault:
            plant_in_moment(engine)
        self.found = compare_plain(self.args.out / "states.pt", self.states())
        self.found["read_bytes"] = total(engine.ucp_report.read_bytes)


def work(args: argparse.Namespace) -> None:
    """One run on its ranks: the one that saves, or one that resumes."""
    if not torch.cuda.is_available():  # Accelerate finds no backend for DeepSpeed by itself there
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    ucp.install()  # <-- 3: before the trainer is built
    ranks, zero = args.mesh
    saves = (ranks, zero) == SOURCE.mesh
    trainer = make_trainer(args, ranks, zero, seed=2 if saves else 3)
    check = Check(args, trainer, saves)
    trainer.add_callback(check)
    folder = str(args.out / "trainer" / f"checkpoint-{args.steps}")
    trainer.train(resume_from_checkpoint=None if saves else folder)
    losses = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    kept = [loss for step, loss in losses.items() if step > args.steps]
    if dist.get_rank() == 0:
        write_result(args, check.found | {"losses": kept})
    engine: Any = trainer.deepspeed
    engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description="HF Trainer and LoRA on other ranks.")
    add_arguments(parser, "runs/hf_trainer", 2)
    args = parser.parse_args()
    if args.mesh:
        work(args)
        return 0
    return compare(__file__, args, SOURCE, TARGETS)


if __name__ == "__main__":
    sys.exit(main())
