"""Tensor parallelism of any Hugging Face model: DeepSpeed's AutoTP cuts a small Llama over two
ranks, and its checkpoint resumes on one rank and on four, at other ZeRO stages, without a family
and without a conversion.

    python examples/autotp.py                  # trains, saves, resumes three times, prints a table
    python examples/autotp.py --plant-fault    # flips one bit after each load: exit code 1

The vocabulary has 257 tokens, which no tensor-parallel size divides: two ranks have 129 and 128
rows. The lines that megatron_ucp adds to a DeepSpeed script are marked with `# <--`.
"""

import argparse
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from lib.resumes import Case, add_arguments, compare, write_result  # beside this file
from lib.states import compare_plain, equal, gather_plain, plant_in_moment, save, total
from train import GLOBAL_BATCH, learning_rate, make_optimizer, read_corpus, sample
from train import make_model as plain_model
from transformers import LlamaForCausalLM

import megatron_ucp as ucp  # <-- 1

VOCAB = 257
SOURCE = (2, 2, 1)  # tensor-parallel size, data-parallel ranks, ZeRO stage
TARGETS = [(1, 2, 3), (4, 1, 2), (2, 1, 0)]
Mesh = tuple[int, int, int]


def make_model(seed: int) -> LlamaForCausalLM:
    sizes = {"intermediate_size": 344, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return plain_model(seed, vocab_size=VOCAB, **sizes, **heads)


def make_engine(mesh: Mesh, seed: int) -> Any:
    """A plain DeepSpeed engine, whose model AutoTP cuts where tp is above 1."""
    tp, dp, zero = mesh
    model = make_model(seed)
    optimizer = make_optimizer(model)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    config = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // dp,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **({"tensor_parallel": {"autotp_size": tp}} if tp > 1 else {}),
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config
    )
    return ucp.attach(engine)  # <-- 2: saves carry a manifest, loads take any mesh


def train(engine: Any, mesh: Mesh, corpus: torch.Tensor, steps: int) -> list[float]:
    """The losses of the next steps. Tensor-parallel ranks follow each other and get the same
    samples, which are those of the step whatever the mesh."""
    tp, dp, _ = mesh
    micro, copy = GLOBAL_BATCH // dp, dist.get_rank() // tp
    losses: list[float] = []
    for _ in range(steps):
        first = engine.global_steps * GLOBAL_BATCH + copy * micro
        tokens = torch.stack([sample(corpus, number) for number in range(first, first + micro)])
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    return losses


# ------------------------------------------------ the comparison, without megatron_ucp


def gather(engine: Any, mesh: Mesh) -> dict[str, Any]:
    """Every master, moment and weight in full, hyper-parameters, scheduler and counters.

    DeepSpeed's accessors give a rank's share; shares are joined along the dim in which they are
    smaller than the parameter of a model that nobody cut.
    """
    whole = {name: param.shape for name, param in make_model(0).named_parameters()}
    return gather_plain(
        engine, engine.lr_scheduler, lambda name, share: join(share, whole[name], mesh[0])
    )


def join(share: torch.Tensor, whole: torch.Size, tp: int) -> torch.Tensor:
    """The shares of the tensor-parallel ranks side by side; with one more dim, so that it equals
    nothing, where copies differ."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, share)
    shares = every[:tp]  # those of the first copy
    if share.shape == whole:
        same = all(equal(shares[0], other) for other in every)
        return shares[0] if same else torch.stack(every)
    (dim,) = (d for d, n in enumerate(whole) if share.shape[d] < n)
    return torch.cat(shares, dim)


# ------------------------------------------------ on the ranks


def work(args: argparse.Namespace) -> None:
    """One run on its ranks: the one that saves, or one that resumes."""
    deepspeed.init_distributed("gloo")
    corpus, folder = read_corpus(), args.out / "checkpoint"
    mesh: Mesh = tuple(args.mesh)
    saves = mesh == SOURCE
    engine = make_engine(mesh, seed=1 if saves else 2)
    result: dict[str, Any] = {}
    if saves:
        train(engine, mesh, corpus, args.steps)
        engine.save_checkpoint(str(folder))  # DeepSpeed's own files, plus ucp_manifest.json
        save(args.out / "states.pt", gather(engine, mesh))
    else:
        engine.load_checkpoint(str(folder))  # <-- 3: DeepSpeed's own call, on any mesh
        if args.plant_fault:
            plant_in_moment(engine)
        result = compare_plain(args.out / "states.pt", gather(engine, mesh))
        result["read_bytes"] = total(engine.ucp_report.read_bytes)
    result["losses"] = train(engine, mesh, corpus, args.more)
    if dist.get_rank() == 0:
        write_result(args, result)
    engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


def case(tp: int, dp: int, zero: int) -> Case:
    return Case(f"tp={tp}, dp={dp}, ZeRO-{zero}", tp * dp, (tp, dp, zero))


def main() -> int:
    parser = argparse.ArgumentParser(description="AutoTP at one size, resumed at others.")
    add_arguments(parser, "runs/autotp", 3)
    args = parser.parse_args()
    if args.mesh:
        work(args)
        return 0
    return compare(__file__, args, case(*SOURCE), [case(*mesh) for mesh in TARGETS])


if __name__ == "__main__":
    sys.exit(main())
