"""Trains a small Llama of transformers on the source of Python's standard library: an ordinary
DeepSpeed script.

    torchrun --nproc_per_node 4 examples/train.py --zero 1 --save-at 80 --steps 100
    torchrun --nproc_per_node 2 examples/train.py --zero 3 --resume --steps 100

The lines that megatron_ucp adds to such a script are marked with `# <--`. For megatron-core's
models there is pretrain/pretrain_gpt.py.
"""

import argparse
import json
import math
import sysconfig
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import megatron_ucp as ucp  # <-- 1

VOCAB = 256  # a byte is a token
SEQUENCE, GLOBAL_BATCH = 128, 8
CORPUS_BYTES = 4_000_000
WARMUP_STEPS, HORIZON_STEPS = 10, 200


def make_model(seed: int, **other: Any) -> LlamaForCausalLM:
    """Random weights, 1.05M parameters; `other` sizes for another example."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": SEQUENCE,
    }
    return LlamaForCausalLM(
        LlamaConfig(**(sizes | other), tie_word_embeddings=False, use_cache=False)
    )


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups: matrices decay, the weights of norms don't."""
    params = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.95),
    )


def learning_rate(step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth; a factor on the optimizer's own."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = min(1.0, (step - WARMUP_STEPS) / (HORIZON_STEPS - WARMUP_STEPS))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def read_corpus() -> torch.Tensor:
    """The bytes of the standard library's modules, (bytes,) uint8."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = bytearray(b"".join(path.read_bytes() for path in files)[:CORPUS_BYTES])
    return torch.frombuffer(text, dtype=torch.uint8)


def sample(corpus: torch.Tensor, number: int) -> torch.Tensor:
    """Training sample `number`, (SEQUENCE,) int64: the same on any number of ranks, as the number
    alone decides."""
    start = torch.randint(
        len(corpus) - SEQUENCE, (), generator=torch.Generator().manual_seed(number)
    )
    return corpus[start : start + SEQUENCE].long()


def make_engine(zero: int, seed: int) -> Any:
    """A plain DeepSpeed engine on all ranks."""
    model = make_model(seed)
    optimizer = make_optimizer(model)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    config = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dist.get_world_size(),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    return engine


def train_step(engine: Any, corpus: torch.Tensor) -> float:
    """One optimizer step on the next samples; the mean loss over all ranks."""
    rank, micro = dist.get_rank(), GLOBAL_BATCH // dist.get_world_size()
    first = engine.global_steps * GLOBAL_BATCH + rank * micro
    tokens = torch.stack(
        [sample(corpus, number) for number in range(first, first + micro)]
    )  # (micro, SEQUENCE)
    loss = engine(input_ids=tokens, labels=tokens).loss
    engine.backward(loss)
    engine.step()
    total = (
        loss.detach().double()
    )  # summed in float64: its rounding must not show as a difference between meshes
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def main() -> None:
    args = parse()
    deepspeed.init_distributed("gloo")
    corpus = read_corpus()
    # Other weights when resuming: what is right after the load comes from the files.
    engine = make_engine(args.zero, seed=2 if args.resume else 1)

    ucp.attach(engine)  # <-- 2: saves carry a manifest, loads take any mesh

    if args.resume:
        engine.load_checkpoint(
            args.checkpoint
        )  # <-- 3: DeepSpeed's own call; now any stage, any number of ranks

    losses: dict[int, float] = {}
    while engine.global_steps < args.steps:
        if engine.global_steps == args.save_at:
            engine.save_checkpoint(args.checkpoint)  # DeepSpeed's own files, plus ucp_manifest.json
        step = engine.global_steps
        losses[step] = train_step(engine, corpus)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {losses[step]:.6f}", flush=True)

    if args.losses and dist.get_rank() == 0:
        args.losses.write_text(json.dumps(losses))
    engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small Llama with DeepSpeed; save, or resume on this mesh."
    )
    parser.add_argument("--zero", type=int, default=1, choices=range(4), help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=100, help="train up to this step")
    parser.add_argument("--save-at", type=int, help="save before this step and go on")
    parser.add_argument("--resume", action="store_true", help="load the newest checkpoint first")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("runs/train"), help="folder for the checkpoint"
    )
    parser.add_argument("--losses", type=Path, help="file for the losses by step, in full (JSON)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
