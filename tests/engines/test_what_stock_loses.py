"""What stock DeepSpeed does not save of a run: SuperOffload, partial offload, ZenFlow and ZeRO++'s
quantized frozen weights, in files that DeepSpeed itself wrote. The cause is named by every look at
them and by every load."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.cli import main
from tests.engines import kinds
from tests.engines.model import Setup, ds_config, make_engine, make_groups, make_net, train
from tests.ranks import RankPool

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


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks
STEPPED = {"SuperOffload": "SuperOffloadOptimizer_Stage3", "ZenFlow": "ZenFlowZeroOptimizer"}
# how a load gets what is there
GO_ON: dict[str, dict[str, Any]] = {
    "partial offload": {"load_optimizer_states": False},
    "SuperOffload": {"load_optimizer_states": False},
    "ZenFlow": {"allow": ("stale",)},
}


LOAD = kinds.attempt, Setup(1, "bf16", seed=9)
SLOW = pytest.mark.slow  # SuperOffload starts a process, and that imports all anew


@pytest.mark.parametrize(
    "run",
    [
        "partial offload",
        "ZenFlow",
        "zero_quantized_nontrainable",
        pytest.param("SuperOffload", marks=SLOW),
    ],
)
def test_the_cause_is_named(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str
) -> None:
    for stepped in ranks.run(2, save, run, str(tmp_path)):
        assert stepped.startswith(STEPPED.get(run, "DeepSpeedZeroOptimizer_Stage3"))
    assert main(["inspect", str(tmp_path)]) == 0
    (line,) = [row for row in capsys.readouterr().out.splitlines() if "not saved" in row]
    assert run in line
    assert any(run in note for note in ucp.verify(tmp_path).notes)
    for rank in ranks.run(2, *LOAD, str(tmp_path), "trained", attach=False):
        assert run in rank["message"] and "what to do:" in rank["message"], rank["message"]
        assert rank["unchanged"]
    if run in GO_ON:
        for rank in ranks.run(2, *LOAD, str(tmp_path), "trained", attach=False, **GO_ON[run]):
            assert not rank["error"] and not rank["unchanged"], rank["message"]
            assert any(run in note for note in rank["notes"])


def test_a_healthy_run_is_not_accused(
    ranks: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.run(2, save, "zero_quantized_weights", str(tmp_path))
    assert main(["inspect", str(tmp_path)]) == 0
    assert "not saved" not in capsys.readouterr().out
    assert ucp.verify(tmp_path, deep=True).findings == ()
    for rank in ranks.run(2, *LOAD, str(tmp_path), "trained", attach=False):
        assert not rank["error"] and not rank["unchanged"]
