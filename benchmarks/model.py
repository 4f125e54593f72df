"""The model of the benchmarks, a GPT-2 small of 124 million parameters in plain torch or
megatron-core, and engines around it."""

import os
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch

import megatron_ucp as ucp
from pretrain.mcore import models, pipeline
from pretrain.mcore.experts import Experts

WIDTH, LAYERS, HEADS, VOCABULARY, POSITIONS = 768, 12, 12, 50304, 1024
MIXTURE = {"width": 512, "layers": 8, "vocabulary": 8192}  # with 8 experts 124 million parameters
TINY = {"width": 96, "layers": 2, "vocabulary": 512}  # to try a benchmark out
SIZES: dict[str, dict[str, int]] = {
    "tiny": TINY,
    "124M": {"width": WIDTH, "layers": LAYERS, "vocabulary": VOCABULARY},
    "354M": {"width": 1056, "layers": 24, "vocabulary": VOCABULARY},
    "1B": {"width": 1824, "layers": 24, "vocabulary": VOCABULARY},
}


@dataclass(frozen=True)
class Mesh:
    """A ZeRO stage on all ranks; with `tp`, the GPT of megatron-core cut `tp` times, else a model
    in plain torch; with `pp`, in as many stages on DeepSpeed's PipelineEngine, which may be one;
    with `ep`, megatron-core's mixture of experts, divided among so many ranks."""

    zero: int
    tp: int = 0
    pp: int = 0
    ep: int = 0

    def __str__(self) -> str:
        cuts = {"ep": self.ep, "pp": self.pp, "tp": self.tp}
        first = next((f"{axis}{size}" for axis, size in cuts.items() if size), "")
        return f"{first}z{self.zero}"


def text_of(size: str) -> str:
    """A size as `benchmarks.paper.written` takes it."""
    found = SIZES[size]
    sizes = f"layers={found['layers']},hidden={found['width']},heads={HEADS}"
    return f"{sizes},vocab={found['vocabulary']},positions={POSITIONS},tied=1"


class Gpt2(torch.nn.Module):
    """Tied embedding and head, learned positions. Returns the loss on `tokens`."""

    def __init__(self, width: int, layers: int, vocabulary: int) -> None:
        super().__init__()
        self.wte = torch.nn.Embedding(vocabulary, width)
        self.wpe = torch.nn.Embedding(POSITIONS, width)
        kind = {"activation": "gelu", "batch_first": True, "norm_first": True}
        layer = torch.nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.0, **kind)
        self.layers = torch.nn.ModuleList([deepcopy(layer) for _ in range(layers)])
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(places)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(len(places)).to(x)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(x)).float()[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_engine(mesh: Mesh, size: dict[str, int], attach: bool = False) -> Any:
    """A stock DeepSpeed engine: bf16 with fp32 masters, AdamW with two parameter groups. `attach`:
    what the family declares is saved too, which stock's converter needs for tensor parallelism."""
    import deepspeed

    torch.manual_seed(0)
    if mesh.ep and size["layers"] == LAYERS:
        size = MIXTURE
    net: Any = megatron(mesh, **size) if mesh.tp else Gpt2(**size)
    optimizer = torch.optim.AdamW(models.param_groups(net, 1e-4, 0.1), lr=1e-4)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": mesh.zero},
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
    }
    engine, *_ = deepspeed.initialize(
        model=net,
        optimizer=optimizer,
        config=config,
        dist_init_required=False,
        mpu=models.mpu() if mesh.tp and not mesh.pp else None,
    )
    return ucp.attach(engine, family=family(mesh)) if attach and mesh.tp else engine


def family(mesh: Mesh) -> str | None:
    return "mixtral" if mesh.ep else "gpt" if mesh.tp else None


def megatron(mesh: Mesh, width: int, layers: int, vocabulary: int) -> Any:
    """The same sizes as `Gpt2` in megatron-core; with `ep` a Mixtral with eight experts in each
    layer."""
    heads = 8 if mesh.ep else HEADS
    config = models.ModelConfig(
        "mixtral" if mesh.ep else "gpt",
        layers=layers,
        hidden=width,
        ffn=width if mesh.ep else 4 * width,
        heads=heads,
        groups=4 if mesh.ep else heads,
        head_dim=width // heads,
        tied=not mesh.ep,
        vocab=vocabulary,
        true_vocab=vocabulary,
        positions=POSITIONS,
        dtype="bf16",
        experts=Experts(8, ffn=width * 17 // 8) if mesh.ep else None,
    )
    models.start(mesh.tp, seed=0, pp=mesh.pp or 1, ep=mesh.ep or 1)
    return pipeline.build_pipeline(config, mesh.pp) if mesh.pp else models.build(config)


def train_step(engine: Any, mesh: Mesh) -> None:
    """One step on a few tokens, the same on all ranks: the optimizer's states exist afterwards."""
    tokens = torch.arange(16).unsqueeze(0)
    if mesh.pp:
        engine.train_batch(iter([(tokens, tokens)]))
        return
    engine.backward(models.loss(engine, tokens, tokens) if mesh.tp else engine(tokens))
    engine.step()


def start() -> None:
    """A rank's communication, by its environment, or that of one rank alone."""
    import deepspeed
    import torch.distributed as dist

    from tests.ranks import free_port

    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MEGATRON_UCP_LOG"] = "quiet"
    if "RANK" not in os.environ:
        os.environ.update({**alone, "MASTER_PORT": str(free_port())})
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", dist_init_required=False)


def close(engine: Any, mesh: Mesh) -> None:
    engine.destroy()
    if mesh.tp:
        models.stop()
