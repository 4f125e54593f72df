"""What the ranks do in the tests of DeepSpeed's AutoTP."""

from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp


def make(vocab: int, zero: int) -> Any:
    """A tiny LLaMA of Hugging Face that AutoTP cuts over two ranks."""
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    net = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **sizes, **heads))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "tensor_parallel": {"autotp_size": 2},
        "steps_per_print": 10**9,
    }
    parameters = list(net.parameters())
    return deepspeed.initialize(
        model=net, model_parameters=parameters, config=config, dist_init_required=False
    )[0]


def save(vocab: int, zero: int, folder: str) -> list[str]:
    """Saves as DeepSpeed does; what `attach` and `load` say, without and with a family."""
    engine = make(vocab, zero)
    tokens = torch.randint(vocab, (2, 8), generator=torch.Generator().manual_seed(3))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(folder, tag="cut")
    dist.barrier()
    said: list[str] = []
    for call in (
        lambda: ucp.attach(engine),
        lambda: ucp.attach(engine, family="gpt"),
        lambda: ucp.load(engine, folder),
    ):
        try:
            call()
            said.append("nothing was refused")
        except ucp.UcpError as error:
            said.append(f"{type(error).__name__}: {error}")
    engine.destroy()
    return said
