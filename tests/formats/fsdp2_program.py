"""A program that trains a small Llama of transformers under FSDP2, and knows nothing of this
package: torch's `fully_shard` with AdamW in two groups, or Trainer with Accelerate's FSDP2 plugin.

    python fsdp2_program.py KIND FOLDER RANK WORLD [options]

It begins with the weights of `--model` (a folder of transformers), or goes on from `--load`; takes
`--steps`, saves into FOLDER where that is not "-", and writes what it holds to `--report`: losses,
and every weight, moment, step and setting, each whole.
"""

import argparse
import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ROWS, LENGTH, VOCABULARY, TOKENS = 4, 8, 48, 40
RATE, OTHER_RATE, EPSILON = 3e-3, 1e-3, 1e-4
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=os.environ.get("TIED") == "1",
        attn_implementation="eager",
    )


def model(folder: str | None, dtype: torch.dtype) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    if folder:
        return LlamaForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return LlamaForCausalLM(config()).to(dtype)


def batch(step: int) -> torch.Tensor:
    """The rows of a step, the same on all ranks: one token more than the model sees."""
    dice = torch.Generator().manual_seed(1000 + step)
    return torch.randint(TOKENS, (ROWS, LENGTH + 1), generator=dice)


def groups(module: Any, rate: float) -> list[dict[str, Any]]:
    named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    return [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0, "lr": rate},
    ]


def sharded(module: Any, kind: str, world: int) -> Any:
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("copies", "shards"))
    elif kind == "tp":
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("shards", "tp"))
        cut(module, both["tp"])
        mesh = both["shards"]
    else:
        mesh = init_device_mesh("cpu", (world,))
    for layer in module.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def cut(module: Any, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    for layer in module.model.layers:
        plan = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"}
        plan |= {f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)


def loss_of(module: Any, rows: torch.Tensor) -> torch.Tensor:
    logits = module(input_ids=rows[:, :-1]).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def own_rows(step: int, kind: str, rank: int, world: int) -> torch.Tensor:
    if kind == "tp":  # two ranks compute one part of the batch
        rank, world = rank // 2, world // 2
    return batch(step).chunk(world)[rank]


def trained(args: argparse.Namespace) -> dict[str, Any]:
    """By torch alone."""
    module = sharded(model(args.model, getattr(torch, args.dtype)), args.kind, args.world)
    optimizer = torch.optim.AdamW(groups(module, args.rate), lr=RATE, eps=EPSILON)
    decay = 0.1 if args.decay else 0.0
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + decay * step))
    first = 0
    if args.load:
        first = loaded(args, module, optimizer)
        schedule.last_epoch = first
        schedule._last_lr = [group["lr"] for group in optimizer.param_groups]
    losses: list[float] = []
    begun = copy.deepcopy(held(module, optimizer)) if args.load else {}
    for step in range(first, first + args.steps):
        optimizer.zero_grad()
        loss = loss_of(module, own_rows(step, args.kind, args.rank, args.world))
        loss.backward()
        optimizer.step()
        schedule.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / args.world)
    if args.folder != "-":
        saved(args, module, optimizer, schedule, first + args.steps)
    return {"losses": losses, "begun": begun, **held(module, optimizer)}


def parts(args: argparse.Namespace, module: Any, optimizer: Any) -> dict[str, Any]:
    """The state dict that DCP is given."""
    if args.layout == "flat":
        flat = get_optimizer_state_dict(module, optimizer, options=FLAT)
        return {**get_model_state_dict(module), **{f"optimizer.{k}": v for k, v in flat.items()}}
    optim = get_optimizer_state_dict(module, optimizer)
    return {"model": get_model_state_dict(module), "optim": optim}


def saved(args: argparse.Namespace, module: Any, optimizer: Any, schedule: Any, step: int) -> None:
    if args.layout == "accelerate":
        optim = {"optimizer": get_optimizer_state_dict(module, optimizer)}
        dcp.save({"model": get_model_state_dict(module)}, checkpoint_id=f"{args.folder}/{MODEL}")
        dcp.save(optim, checkpoint_id=f"{args.folder}/{OPTIMIZER}")
        return
    tree = parts(args, module, optimizer)
    if args.layout == "flat":
        tree |= {"lr_scheduler": schedule.state_dict(), "train_state": {"step": torch.tensor(step)}}
    dcp.save(tree, checkpoint_id=args.folder)


MODEL, OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"


def loaded(args: argparse.Namespace, module: Any, optimizer: Any) -> int:
    """Loads strictly, and returns the steps that the optimizer took."""
    if args.layout == "flat":
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad = torch.zeros_like(one)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad()
        tree = parts(args, module, optimizer)
        dcp.load(tree, checkpoint_id=args.load)
        optim = {
            k.removeprefix("optimizer."): v
            for k, v in tree.items()
            if k in tree and k.startswith("optimizer.")
        }
        weights = {k: v for k, v in tree.items() if not k.startswith("optimizer.")}
        set_model_state_dict(module, weights)
        set_optimizer_state_dict(module, optimizer, optim, options=FLAT)
    elif args.recipe:
        names = {"module": module, "optimizer": optimizer, "folder": args.load}
        exec(Path(args.recipe).read_text(), names)
    else:
        weights, optim = get_model_state_dict(module), get_optimizer_state_dict(module, optimizer)
        if args.layout == "accelerate":
            trees = {MODEL: {"model": weights}, OPTIMIZER: {"optimizer": optim}}
            for name, tree in trees.items():
                dcp.load(tree, checkpoint_id=f"{args.load}/{name}")
        else:
            tree = {"model": weights, "optim": optim}
            dcp.load(tree, checkpoint_id=args.load)
            weights, optim = tree["model"], tree["optim"]
        set_model_state_dict(module, weights)
        set_optimizer_state_dict(module, optimizer, optim)
    return int(next(iter(optimizer.state.values()))["step"])


def held(module: Any, optimizer: Any) -> dict[str, Any]:
    """All that the optimizer steps with, each tensor whole; on rank 0 alone."""
    weights = get_model_state_dict(module, options=FULL)
    optim = get_optimizer_state_dict(module, optimizer, options=FULL)
    return {"weights": weights, "states": optim.get("state"), "groups": optim.get("param_groups")}


# ---- Accelerate, and Trainer


def as_on_accelerators() -> None:
    """Accelerate takes its plugin on accelerators alone; all else is as it would be there."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def by_accelerate(args: argparse.Namespace) -> dict[str, Any]:
    """By an Accelerator's `save_state` and `load_state`."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    as_on_accelerators()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    module = model(args.model, torch.float32)
    optimizer = torch.optim.AdamW(groups(module, args.rate), lr=RATE, eps=EPSILON)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    module, optimizer = accelerator.prepare(module, optimizer)
    if not args.no_schedule:
        schedule = accelerator.prepare(schedule)
    first, begun = 0, {}
    if args.load:
        accelerator.load_state(args.load)
        begun = copy.deepcopy(held(module, optimizer.optimizer))
        first = int(next(iter(optimizer.optimizer.state.values()))["step"])
    losses: list[float] = []
    for step in range(first, first + args.steps):
        optimizer.zero_grad()
        loss = loss_of(module, own_rows(step, "fsdp", args.rank, args.world))
        accelerator.backward(loss)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / args.world)
    if args.folder != "-":
        accelerator.save_state(args.folder)
    return {"losses": losses, "begun": begun, **held(module, optimizer.optimizer)}


def by_trainer(args: argparse.Namespace) -> dict[str, Any]:
    """By Trainer and Accelerate's FSDP2 plugin."""
    from transformers import Trainer, TrainingArguments

    settings = TrainingArguments(
        output_dir=args.folder,
        use_cpu=True,
        max_steps=args.total,
        save_steps=args.steps,
        per_device_train_batch_size=ROWS // args.world,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_epsilon=EPSILON,
        weight_decay=0.1,
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        fsdp="full_shard auto_wrap",
        fsdp_config={
            "version": 2,
            "fsdp_version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": "SHARDED_STATE_DICT",
        },
    )
    as_on_accelerators()
    rows = torch.cat([batch(step) for step in range(args.total)])

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = InOrder(model(args.model, torch.float32), settings, train_dataset=data)
    trainer.train(resume_from_checkpoint=args.load)
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    optimizer = trainer.optimizer
    optimizer = getattr(optimizer, "optimizer", optimizer)
    return {"losses": losses, **held(trainer.model_wrapped, optimizer)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("fsdp", "hsdp", "tp", "trainer", "accelerate"))
    parser.add_argument("folder")
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("--store", required=True)
    parser.add_argument("--model")
    parser.add_argument("--load")
    parser.add_argument("--layout", default="plain", choices=("plain", "flat", "accelerate"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rate", type=float, default=RATE)
    parser.add_argument("--decay", action="store_true")
    parser.add_argument("--no-schedule", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--total", type=int, default=3)
    parser.add_argument("--recipe")
    parser.add_argument("--report")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.world
    )
    ways = {"trainer": by_trainer, "accelerate": by_accelerate}
    found = ways.get(args.kind, trained)(args)
    if args.report and args.rank == 0:
        torch.save(found, args.report)
        Path(f"{args.report}.json").write_text(json.dumps(found["losses"]))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
