"""The model of the benchmarks: a GPT-2 small of 124 million parameters in plain torch, and engines around it."""

from typing import Any

import torch

WIDTH, LAYERS, HEADS, VOCABULARY, POSITIONS = 768, 12, 12, 50304, 1024
TINY = {"width": 64, "layers": 2, "vocabulary": 500}  # to try a benchmark out


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # x: batch, positions, width
        batch, length, width = x.shape
        heads = HEADS if width % HEADS == 0 else 1
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


class Gpt2(torch.nn.Module):
    """Tied embedding and head, learned positions. Returns the loss on `tokens`."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(POSITIONS, width)
        self.blocks = torch.nn.ModuleList([Block(width) for _ in range(layers)])
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def make_engine(stage: int, size: dict[str, int]) -> Any:
    """A stock DeepSpeed engine: bf16 with fp32 masters, AdamW with two parameter groups."""
    import deepspeed
    torch.manual_seed(0)
    net = Gpt2(**size)
    params = list(net.parameters())
    optimizer = torch.optim.AdamW([{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
                                   {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0}], lr=1e-4)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": stage}, "steps_per_print": 10**9, "gradient_clipping": 1.0}
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def train_step(engine: Any, vocabulary: int = VOCABULARY) -> None:
    """One step on a few random tokens: the optimizer's states exist afterwards."""
    loss = engine(torch.randint(vocabulary, (1, 16)))
    engine.backward(loss)
    engine.step()
