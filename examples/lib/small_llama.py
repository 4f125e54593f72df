"""A small Llama of transformers, and the source of Python's standard library to train it on."""

import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 256  # a byte is a token
SEQUENCE, GLOBAL_BATCH = 128, 8
CORPUS_BYTES = 4_000_000


def make_model(seed: int) -> LlamaForCausalLM:
    """Random weights, 1.05M parameters."""
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
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, use_cache=False))


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
