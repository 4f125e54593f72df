"""Layers with the parameters of Transformer Engine's, computed in plain torch: a norm within the
linear layer behind it, and the experts of a rank in one module with a parameter for each.

Names, shapes and their order are those of `TELayerNormColumnParallelLinear` and `TEGroupedLinear`
(megatron-core 0.16.1's extensions, Transformer Engine 2).
"""

from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_ucp.engines.megatron import experts, models


class NormAndLinear(ColumnParallelLinear):
    """The norm's weight is the first parameter."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **more: Any) -> None:
        super().__init__(input_size, output_size, config=config, **more)
        own = dict(self._parameters)
        self._parameters.clear()
        self.layer_norm_weight = torch.nn.Parameter(
            torch.ones(input_size, dtype=config.params_dtype)
        )
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._parameters.update(own)
        self._epsilon = config.layernorm_epsilon

    def forward(self, hidden: torch.Tensor, *rest: Any, **more: Any) -> Any:
        shape = self.layer_norm_weight.shape
        normed = torch.nn.functional.rms_norm(hidden, shape, self.layer_norm_weight, self._epsilon)
        return super().forward(normed, *rest, **more)


class Grouped(torch.nn.Module):
    """`weight0`, `weight1`, ...: a matrix for each expert of this rank. What etp cuts is exchanged
    by the dispatcher of tokens."""

    dim = 0

    def __init__(
        self, count: int, input_size: int, output_size: int, *, config: Any, **_: Any
    ) -> None:
        super().__init__()
        ranks: Any = parallel_state.get_expert_tensor_parallel_world_size()
        shape = [output_size, input_size]
        shape[self.dim] //= ranks
        for number in range(count):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype))
            weight.tensor_model_parallel = True  # type: ignore[attr-defined]
            weight.partition_dim = self.dim  # type: ignore[attr-defined]
            weight.partition_stride = 2 if self.dim == 0 else 1  # type: ignore[attr-defined]
            apart = parallel_state.get_expert_model_parallel_world_size() > 1
            weight.allreduce = not apart  # type: ignore[attr-defined]
            setattr(self, f"weight{number}", weight)

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, None]:
        parts = tokens.split(counts)
        return torch.cat(
            [part @ w.t() for part, w in zip(parts, self.parameters(), strict=True)]
        ), None


class GroupedRow(Grouped):
    dim = 1


def layer_specs(transformer: Any) -> Any:
    """As `models.layer_specs`, of such layers."""
    specs: Any = LOCAL(transformer)
    for layer in specs.layer_specs:
        inner = layer.submodules
        inner.input_layernorm = IdentityOp
        inner.self_attention.submodules.linear_qkv = NormAndLinear
        mlp = inner.mlp.submodules
        if hasattr(mlp, "experts"):
            grouped = MLPSubmodules(linear_fc1=Grouped, linear_fc2=GroupedRow)
            mlp.experts = ModuleSpec(module=TEGroupedMLP, submodules=grouped)
        else:
            inner.pre_mlp_layernorm = IdentityOp
            mlp.linear_fc1 = NormAndLinear
    return specs


LOCAL = models.layer_specs


def mark(model: torch.nn.Module) -> None:
    """As `experts.mark_experts`: the numbers decide how weights are drawn."""
    for _, layer in experts.moe_layers(model):
        for name, param in layer.experts.named_parameters():
            number = layer.local_expert_indices[int(name.rpartition("weight")[2])]
            setattr(param, experts.NUMBER, number)
            param.allreduce = not experts.experts_are_apart()


@contextmanager
def built_so(wanted: bool) -> Any:
    """Models that are built within have such layers."""
    with ExitStack() as patched:
        if wanted:
            patched.enter_context(mock.patch.object(models, "layer_specs", layer_specs))
            patched.enter_context(mock.patch.object(experts, "mark_experts", mark))
        yield


def export(setup: Any, folder: str) -> None:
    """The drawn weights of a model as a Hugging Face folder, from the memory of all ranks."""
    from tests.engines import stack_jobs

    engine = stack_jobs.make(setup)
    engine.handle.ucp_export_hf(folder)
    stack_jobs.close(engine)
