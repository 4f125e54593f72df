"""Tensor parallelism of any Hugging Face model: DeepSpeed's AutoTP cuts a small Llama over two
ranks, and its checkpoint resumes on one rank and on four, at other ZeRO stages, without a family
and without a conversion.

    python examples/autotp.py                  # trains, saves, resumes three times, prints a table
    python examples/autotp.py --plant-fault    # flips one bit after each load: exit code 1

The vocabulary has 257 tokens, which no tensor-parallel size divides: two ranks have 129 and 128
rows. The lines that megatron_ucp adds to a DeepSpeed script are marked with `# <--`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import launcher  # beside this file, as the next ones
import torch
import torch.distributed as dist
from states import LABELS, base_optimizer, equal, groups_of, held_for
from train import GLOBAL_BATCH, SEQUENCE, learning_rate, make_optimizer, read_corpus, sample
from transformers import LlamaConfig, LlamaForCausalLM

import megatron_ucp as ucp  # <-- 1

VOCAB = 257
TOLERANCE = 1e-5  # in the loss: other ranks add in another order
SOURCE = (2, 2, 1)  # tensor-parallel size, data-parallel ranks, ZeRO stage
TARGETS = [(1, 2, 3), (4, 1, 2), (2, 1, 0)]
Mesh = tuple[int, int, int]


def make_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=SEQUENCE,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


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
    stage, base = mesh[2], base_optimizer(engine)
    if stage in (1, 2) and base.state:
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    whole = {name: param.shape for name, param in make_model(0).named_parameters()}
    found: dict[str, Any] = {}
    groups = groups_of(engine)
    for name, param in engine.module.named_parameters():
        for key, share in held_for(engine, param).items():
            found[f"{key} of {name}"] = join(share.detach().clone(), whole[name], mesh[0])
        settings = base.param_groups[groups[param]]
        found[f"hyper-parameters of {name}"] = {
            k: v for k, v in settings.items() if k not in LABELS
        }
    found["steps"] = sorted({float(held["step"]) for held in base.state.values()})
    found["scheduler"] = engine.lr_scheduler.state_dict()
    found["counters"] = [engine.global_steps, engine.global_samples, engine.skipped_steps]
    return found


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


def differing(want: dict[str, Any], have: dict[str, Any]) -> list[str]:
    return [name for name in want | have if not equal(want.get(name), have.get(name))]


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
        states = gather(engine, mesh)
        if dist.get_rank() == 0:
            torch.save(states, args.out / "states.pt")
    else:
        engine.load_checkpoint(str(folder))  # <-- 3: DeepSpeed's own call, on any mesh
        if args.plant_fault:
            plant(engine)
        want = torch.load(args.out / "states.pt", weights_only=False)
        result["different"] = differing(want, gather(engine, mesh))
        result["compared"] = sum(v.numel() for v in want.values() if isinstance(v, torch.Tensor))
        read = torch.tensor(engine.ucp_report.read_bytes)
        dist.all_reduce(read)
        result["read_bytes"] = int(read)
    result["losses"] = train(engine, mesh, corpus, args.more)
    if dist.get_rank() == 0:
        (args.out / f"{named(mesh)}.json").write_text(json.dumps(result))
    engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


def plant(engine: Any) -> None:
    """Flips the lowest bit of one element of the first rank's first moment."""
    if dist.get_rank() == 0:
        held = next(iter(base_optimizer(engine).state.values()))["exp_avg"]
        held.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


# ------------------------------------------------ the table


def named(mesh: Mesh) -> str:
    return "tp{}_dp{}_zero{}".format(*mesh)


def launch(mesh: Mesh, args: argparse.Namespace) -> dict[str, Any]:
    """Runs this file on the ranks of a mesh; what came of it."""
    print("running at tp={}, dp={}, ZeRO-{} ...".format(*mesh), flush=True)
    own = ["--mesh", *map(str, mesh), "--out", str(args.out)]
    counts = ["--steps", str(args.steps), "--more", str(args.more)]
    fault = ["--plant-fault"] if args.plant_fault else []
    log = args.out / f"{named(mesh)}.log"
    if launcher.run(mesh[0] * mesh[1], [__file__, *own, *counts, *fault], log):
        raise SystemExit(f"{log.read_text()[-3000:]}\nfailed: the whole output is in {log}")
    return json.loads((args.out / f"{named(mesh)}.json").read_text())


def main() -> int:
    args = parse()
    if args.mesh:
        work(args)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    reference = launch(SOURCE, args)["losses"]
    good, rows = True, []
    for mesh in TARGETS:
        found = launch(mesh, args)
        distance = max(abs(a - b) for a, b in zip(found["losses"], reference, strict=True))
        count = len(found["different"])
        equal_bits = f"NO ({count} differ)" if count else f"yes ({found['compared']:,} values)"
        good = good and not count and distance <= TOLERANCE
        rows.append(
            (
                "tp={}, dp={}, ZeRO-{}".format(*mesh),
                f"{found['read_bytes']:,}",
                equal_bits,
                f"{distance:.1e}",
            )
        )
    heads = (
        "resumed at",
        "bytes read",
        "states bit-equal",
        f"largest loss difference, next {args.more} steps",
    )
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    print("\nSaved at tp={}, dp={}, ZeRO-{}. Resumed straight from these files:\n".format(*SOURCE))
    for row in [heads, tuple("-" * width for width in widths), *rows]:
        print("| " + " | ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) + " |")
    return 0 if good else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="AutoTP at one size, resumed at others.")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/autotp"), help="folder for all of it"
    )
    parser.add_argument("--steps", type=int, default=20, help="steps before the save")
    parser.add_argument("--more", type=int, default=20, help="steps after it, which are compared")
    parser.add_argument("--plant-fault", action="store_true", help="flip a bit after each load")
    parser.add_argument("--mesh", type=int, nargs=3, help=argparse.SUPPRESS)  # this is a rank
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
