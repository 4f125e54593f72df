"""Runs of DeepSpeed whose saves lack something, with its own code on a CPU: what asks for a GPU is
told another name of the CPU, or gets torch's arithmetic."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from tests.engines.model import Setup, ds_config, make_engine, make_groups, make_net, train

SMALL = ("sub_group_size", 30)  # several sub-groups, of which partial offload takes some


def offload(**options: Any) -> tuple[str, Any]:
    return "offload_optimizer", {"device": "cpu", **options}


ADAM = ("optimizer", {"type": "AdamW", "params": {"lr": 3e-3}})
ZENFLOW = {
    "topk_ratio": 0.3,
    "select_strategy": "step",
    "select_interval": 2,
    "update_interval": 1,
    "full_warm_up_rounds": 0,
    "overlap_step": False,
}
RUNS: dict[str, Setup] = {
    "partial offload": Setup(3, "bf16", "CPUAdam", zero_config=(offload(ratio=0.5), SMALL)),
    "SuperOffload": Setup(3, "bf16", "CPUAdam", zero_config=(offload(super_offload=True), SMALL)),
    "ZenFlow": Setup(2, "bf16", config=(ADAM,), zero_config=(offload(), ("zenflow", ZENFLOW))),
    "zero_quantized_nontrainable": Setup(
        3, "bf16", zero_config=(("zero_quantized_nontrainable_weights", True),)
    ),
    # healthy: weights are in 8 bits on their way alone
    "zero_quantized_weights": Setup(3, "bf16", zero_config=(("zero_quantized_weights", True),)),
}


class Stream:
    def synchronize(self) -> None:
        """A CPU has done what it was told."""


class Quantizer:
    """What ZeRO++'s kernel does, with one scale for each rank's partition."""

    def quantize(self, param: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = param.float().abs().max().clamp(min=1e-8).reshape(1) / 127
        return (param.float() / scale).round().to(torch.int8), scale

    def dequantize(
        self, quantized_param: torch.Tensor, scale: torch.Tensor, dtype: Any = None
    ) -> torch.Tensor:
        width = -(-quantized_param.numel() // scale.numel())
        scales = scale.view(-1).repeat_interleave(width)[: quantized_param.numel()]
        return (quantized_param * scales.view(quantized_param.shape)).to(dtype or torch.bfloat16)


@contextlib.contextmanager
def without_a_gpu(run: str) -> Iterator[None]:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.superoffload import superoffload_stage3
    from deepspeed.runtime.zero import partition_parameters

    own = get_accelerator()
    with contextlib.ExitStack() as stack:
        if run == "partial offload":  # not "cpu", as a GPU's sub-groups have
            stack.enter_context(mock.patch.object(own, "_name", "cpu:0"))
        elif run == "SuperOffload":
            check = "_validate_superoffload_accelerator"
            stack.enter_context(mock.patch.object(superoffload_stage3, check, lambda: None))
            stack.enter_context(mock.patch.object(type(own), "current_stream", lambda _: Stream()))
        elif run.startswith("zero_quantized"):
            stack.enter_context(mock.patch.object(partition_parameters, "CUDAQuantizer", Quantizer))
        yield


def save(run: str, folder: str) -> str:
    """Trains and saves; the name of what DeepSpeed stepped with."""
    import deepspeed

    setup = RUNS[run]
    with without_a_gpu(run):
        if run == "ZenFlow":  # takes its settings from the config's optimizer
            net = make_net(setup)
            engine = deepspeed.initialize(
                model=net,
                model_parameters=make_groups(net, setup),
                config=ds_config(setup),
                dist_init_required=False,
            )[0]
        else:
            engine = make_engine(setup, attach=False)
        train(engine, 3)
        engine.save_checkpoint(folder, tag="trained")
        stepped = type(engine.optimizer).__name__
        engine.destroy()
    return stepped
