"""A training script that knows nothing of megatron_ucp: transformers' LLaMA on plain DeepSpeed.

    torchrun --nproc_per_node 2 examples/stock_train.py --steps 5            # saves checkpoint-5
    torchrun --nproc_per_node 3 -m megatron_ucp.run examples/stock_train.py --steps 8 --resume

The second line resumes on another number of ranks, with the script as it is.
"""

import argparse
from typing import Any

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, TOKENS = 6, 32


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads: Any = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes, **heads))


def train(engine: Any, steps: int) -> None:
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    while engine.global_steps < steps:
        data = torch.Generator().manual_seed(engine.global_steps)  # each step has its own batch
        tokens = torch.randint(128, (BATCH, TOKENS), generator=data)[rank::ranks]
        loss = engine(input_ids=tokens.to(engine.device), labels=tokens.to(engine.device)).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        if rank == 0:
            print(f"step {engine.global_steps}: loss {total.item() / ranks:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="runs/stock")
    parser.add_argument("--zero", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    config = {
        "train_micro_batch_size_per_gpu": BATCH // torch.distributed.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": args.zero},
    }
    built: Any = model()
    engine, *_ = deepspeed.initialize(
        model=built, model_parameters=built.parameters(), config=config
    )
    if args.resume:
        engine.load_checkpoint(args.out)
    train(engine, args.steps)
    engine.save_checkpoint(args.out, tag=f"checkpoint-{engine.global_steps}")
    if torch.distributed.get_rank() == 0:
        built.config.save_pretrained(args.out)  # as transformers' Trainer does
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
