"""What transformers computes for folders, in a process of its own: patches that let megatron-core
run on a CPU would change what transformers loads."""

import functools
import io
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


def wide(function: Any) -> Any:
    """A softmax that stays in fp64 where it is given that."""

    def softmax(tensor: torch.Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> torch.Tensor:
        return function(
            tensor, *args, dtype=None if tensor.dtype == torch.float64 else dtype, **kwargs
        )

    return softmax


def stay_in_fp64() -> None:
    """transformers computes norms, softmax and routing in fp32; here in fp64 what is fp64."""
    torch.nn.functional.softmax = wide(torch.nn.functional.softmax)  # type: ignore[assignment]
    to, narrow = torch.Tensor.to, torch.Tensor.float

    def kept(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return (
            self
            if self.dtype == torch.float64 and args == (torch.float32,)
            else to(self, *args, **kwargs)
        )

    torch.Tensor.to = kept  # type: ignore[method-assign,assignment]
    torch.Tensor.float = lambda self: self if self.dtype == torch.float64 else narrow(self)  # type: ignore[method-assign,assignment]


@torch.no_grad()
def logits(request: dict[str, Any]) -> dict[str, Any]:
    """Of the model in `folder`, with the settings `config` changed, for `tokens`; greedy tokens
    after `prompt`. `save`: also what `save_pretrained` writes, into that folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(request["folder"])
    for key, value in request.get("config", {}).items():
        setattr(config, key, value)
    dtype = getattr(torch, request.get("dtype", "float64"))
    model = AutoModelForCausalLM.from_pretrained(
        request["folder"],
        config=config,
        dtype=dtype,
        attn_implementation="eager",
        **({"experts_implementation": "eager"} if config.model_type in MIXTURES else {}),
    ).eval()
    found: dict[str, Any] = {"logits": model(request["tokens"]).logits}
    if "prompt" in request:
        prompt = request["prompt"]
        made = model.generate(prompt, max_new_tokens=request["more"], do_sample=False)
        found["generated"] = made[:, prompt.shape[1] :]
    if "save" in request:
        model.save_pretrained(request["save"], max_shard_size=request.get("max_shard_size", "5GB"))
    return found


@torch.no_grad()
def create(request: dict[str, Any]) -> None:
    """A new model of `config` with random weights, saved into `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = dict(request["config"])
    config = AutoConfig.for_model(kind.pop("model_type"), **kind)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    dice = torch.Generator().manual_seed(1)
    for name, param in sorted(model.named_parameters()):
        drawn = torch.randn(param.shape, generator=dice)
        is_norm = param.dim() == 1 and name.endswith("weight")
        param.copy_(1 + 0.2 * drawn if is_norm else 0.2 * drawn)
    model.save_pretrained(request["folder"])


def answer(requests: bytes) -> bytes:
    out = []
    for request in torch.load(io.BytesIO(requests), weights_only=False):
        if "create" in request:
            create(request)
        out.append(logits(request))
    return packed(out)


def packed(value: Any) -> bytes:
    """Not as processes send tensors: those would go through shared memory."""
    held = io.BytesIO()
    torch.save(value, held)
    return held.getvalue()


@functools.cache
def process() -> ProcessPoolExecutor:
    """One for all tests of this process, as its imports take seconds. It imports nothing of
    megatron-core."""
    return ProcessPoolExecutor(1, get_context("spawn"), stay_in_fp64)


def transformers(requests: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """What it answers to each request, in their order."""
    said = process().submit(answer, packed(requests)).result(timeout=300)
    return torch.load(io.BytesIO(said), weights_only=False)
