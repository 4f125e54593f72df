"""A program that trains a small model by torchtitan's own modules, optimizers and checkpointer, and
knows nothing of this package.

    python titan_program.py KIND FOLDER RANK WORLD [options]

It goes on from `--load`, takes `--steps`, saves step by step below FOLDER where that is not "-",
and writes what it holds to `--report`: losses, logits, and every weight, moment, step and setting,
each whole.

Two things that torchtitan has kernels of a GPU for are computed by plain torch here: attention, and
the products of experts, in fp32.
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

ROWS, LENGTH, VOCABULARY, TOKENS, WIDTH, HEADS, GROUPS, LAYERS = 4, 8, 48, 40, 16, 4, 2, 2
RATE, OTHER_RATE, EPSILON = 3e-3, 1e-3, 1e-4


# ---- by plain torch


def attention(
    self: Any, q: Any, k: Any, v: Any, *, attention_masks: Any, scale: Any = None, **more: Any
) -> torch.Tensor:
    """Causal, of [batch, length, heads, size]; with what `out_transform` makes of it."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    change = more.get("out_transform")
    return out if change is None else change(out, scores.logsumexp(-1).transpose(1, 2))


def products(self: Any, *, A: Any, B_t: Any, offs: Any) -> torch.Tensor:
    """The rows of each expert times its matrix."""
    bounds = [0, *offs.tolist()]
    parts = [A[a:b] @ B_t[n] for n, (a, b) in enumerate(pairwise(bounds))]
    return torch.cat([*parts, A.new_zeros(len(A) - bounds[-1], B_t.shape[-1])])


def on_a_cpu() -> None:
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.models.common.moe import GroupedExperts

    FlexAttention.forward = attention
    GroupedExperts._grouped_mm = products
    torch.Tensor.bfloat16 = lambda self: self  # type: ignore[method-assign]


# ---- models


def around(kind: Any, layers: Any, tied: bool = False, epsilon: float = 1e-5) -> Any:
    from torchtitan.models import llama3
    from torchtitan.models.common import Embedding, Linear, RMSNorm

    return kind.Config(
        dim=WIDTH,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=WIDTH, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=WIDTH, eps=epsilon, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=WIDTH, out_features=VOCABULARY, param_init=llama3._output_linear_init(WIDTH)
        ),
        layers=layers,
        **({"enable_weight_tying": True} if tied else {}),
    )


def llama3(fused: bool) -> Any:
    from torchtitan.models import llama3 as module
    from torchtitan.models.common import ComplexRoPE

    layers = module._build_llama3_layers(
        n_layers=LAYERS,
        dim=WIDTH,
        n_heads=HEADS,
        n_kv_heads=GROUPS,
        hidden_dim=24,
        fuse_qkv=fused,
        attn_backend="flex",
        rope=ComplexRoPE.Config(dim=WIDTH // HEADS, max_seq_len=64, theta=10000.0),
    )
    return around(module.Llama3Model, layers)


def qwen3(fused: bool) -> Any:
    from torchtitan.models import qwen3 as module
    from torchtitan.models.common import CosSinRoPE

    layers = module._build_qwen3_layers(
        n_layers=LAYERS,
        dim=WIDTH,
        n_heads=HEADS,
        n_kv_heads=GROUPS,
        head_dim=8,
        hidden_dim=24,
        fuse_qkv=fused,
        attn_backend="flex",
        rope=CosSinRoPE.Config(dim=8, max_seq_len=64, theta=10000.0),
    )
    return around(module.Qwen3Model, layers, tied=True, epsilon=1e-6)


def qwen3_moe(fused: bool) -> Any:
    from torchtitan.models import qwen3 as module
    from torchtitan.models.common import CosSinRoPE

    layers = module._build_qwen3_moe_layers(
        n_layers=LAYERS,
        dim=WIDTH,
        n_heads=HEADS,
        n_kv_heads=GROUPS,
        head_dim=8,
        moe_hidden_dim=12,
        num_experts=4,
        top_k=2,
        fuse_qkv=fused,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=8, max_seq_len=64, theta=10000.0),
    )
    return around(module.Qwen3Model, layers, epsilon=1e-6)


def deepseek_v3(fused: bool) -> Any:
    from torchtitan.models import deepseek_v3 as module
    from torchtitan.models.common import ComplexRoPE

    layers = module._build_dsv3_layers(
        n_layers=LAYERS,
        n_dense_layers=1,
        dim=WIDTH,
        n_heads=HEADS,
        q_lora_rank=8,
        kv_lora_rank=12,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        mscale=1.0,
        dense_hidden_dim=24,
        moe_hidden_dim=12,
        num_experts=4,
        num_shared_experts=1,
        router_top_k=2,
        router_score_func="sigmoid",
        router_route_norm=True,
        router_route_scale=2.5,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=ComplexRoPE.Config(dim=4, max_seq_len=64, theta=10000.0),
    )
    return around(module.DeepSeekV3Model, layers)


def gpt_oss(fused: bool) -> Any:
    from torchtitan.models import gpt_oss as module
    from torchtitan.models.common import CosSinRoPE

    module_of = module._make_gptoss_attn_config
    module._make_gptoss_attn_config = lambda **own: module_of(
        **{**own, "n_heads": HEADS, "n_kv_heads": GROUPS, "head_dim": 4}
    )
    layers = module._build_gptoss_layers(
        n_layers=LAYERS,
        dim=WIDTH,
        hidden_dim=12,
        num_experts=4,
        top_k=2,
        load_balance_coeff=1e-3,
        fuse_qkv=fused,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=CosSinRoPE.Config(dim=4, max_seq_len=64, theta=10000.0),
    )
    return around(module.GptOssModel, layers)


KINDS = {one.__name__: one for one in (llama3, qwen3, qwen3_moe, deepseek_v3, gpt_oss)}


def model(kind: str, fused: bool, seed: int) -> Any:
    net = KINDS[kind](fused).build()
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=dice) * 0.15 + (param.ndim < 2))
        for name, buffer in net.named_buffers():
            if name.endswith("expert_bias_E"):
                buffer.zero_()
                if kind == "deepseek_v3":
                    buffer.copy_(torch.randn(buffer.shape, generator=dice) * 0.1)
    for module in net.modules():
        if type(module).__name__.endswith("RoPE"):
            module.cache = module._precompute_cache()
    return net


def batch(step: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1000 + step)
    return torch.randint(TOKENS, (ROWS, LENGTH + 1), generator=dice)


# ---- training


def containers(net: Any, rate: float) -> tuple[Any, Any]:
    """Optimizers, of which one group has a `rate` of its own, and schedulers."""
    from torchtitan.components.optimizer import (
        LRSchedulersContainer,
        OptimizersContainer,
        ParamGroupConfig,
    )

    own = {"betas": (0.9, 0.95), "eps": EPSILON}
    groups = [
        ParamGroupConfig(
            pattern=r"norm|bias|sinks",
            optimizer_name="AdamW",
            optimizer_kwargs={"lr": rate, "weight_decay": 0.0, **own},
        ),
        ParamGroupConfig(
            pattern=r".*",
            optimizer_name="AdamW",
            optimizer_kwargs={"lr": RATE, "weight_decay": 0.1, **own},
        ),
    ]
    config = OptimizersContainer.Config(param_groups=groups, implementation="for-loop")
    optimizers = OptimizersContainer(config, model_parts=[net])
    return optimizers, LRSchedulersContainer(optimizers, lambda step: 1.0)


class TrainState:
    """As torchtitan's Trainer."""

    step, ntokens_seen = 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]


def checkpointer(folder: str, net: Any, optimizers: Any, schedulers: Any, state: Any) -> Any:
    from torchtitan.components.checkpointer import CheckpointManager

    config = CheckpointManager.Config(
        enable=True, folder=folder, interval=1, exclude_from_loading=["dataloader"]
    )
    return CheckpointManager(
        config,
        dataloader=None,
        model_parts=[net],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": state},
        sd_adapter=None,
    )


def logits(net: Any, rows: torch.Tensor) -> torch.Tensor:
    out = net(rows, None)
    return (out[0] if isinstance(out, tuple) else out).float()


def trained(args: argparse.Namespace) -> dict[str, Any]:
    on_a_cpu()
    globals()["LAYERS"] = args.layers
    net = model(args.kind, not args.unfused, args.seed)
    mesh = dist.device_mesh.init_device_mesh("cpu", (args.world,), mesh_dim_names=("fsdp",))
    for layer in net.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizers, schedulers = containers(net, args.rate)
    state = TrainState()
    if args.load:
        path = Path(args.load)
        step = int(path.name.rpartition("-")[2])
        manager = checkpointer(str(path.parent), net, optimizers, schedulers, state)
        assert manager.load(step), "torchtitan loaded nothing"
    begun = held(net, optimizers, schedulers) if args.load else {}
    losses: list[float] = []
    for step in range(state.step, state.step + args.steps):
        optimizers.zero_grad()
        rows = batch(step).chunk(args.world)[args.rank]
        out = logits(net, rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        optimizers.step()
        schedulers.step()
        state.step, state.ntokens_seen = step + 1, (step + 1) * ROWS * LENGTH
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / args.world)
    if args.folder != "-":
        checkpointer(args.folder, net, optimizers, schedulers, state).save(state.step)
    found = held(net, optimizers, schedulers)
    with torch.no_grad():
        net.eval()
        found["logits"] = logits(net, batch(99)[:, :-1])
    return {"losses": losses, "begun": begun, **found}


def whole(value: Any) -> Any:
    """A value as it is now."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.clone() if isinstance(value, torch.Tensor) else value


def held(net: Any, optimizers: Any, schedulers: Any) -> dict[str, Any]:
    """All that the run is, by torchtitan's own names."""
    return {
        "weights": {name: whole(value) for name, value in net.state_dict().items()},
        "optimizer": {name: whole(value) for name, value in optimizers.state_dict().items()},
        "scheduler": schedulers.state_dict(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=[*KINDS])
    parser.add_argument("folder")
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("--store", required=True)
    parser.add_argument("--load")
    parser.add_argument("--unfused", action="store_true")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=OTHER_RATE)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--report")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.world
    )
    found = trained(args)
    if args.report and args.rank == 0:
        torch.save(found, args.report)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
