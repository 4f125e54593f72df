"""TEGroupedMLP of megatron-core on matrices that plain torch multiplies: the experts of a rank are
one module with a parameter for each.

Names, shapes and attributes are those of `TEColumnParallelGroupedLinear` and
`TERowParallelGroupedLinear` (megatron-core 0.16.1's extensions for Transformer Engine 2).
"""

from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from pretrain.mcore import experts, models


class Grouped(torch.nn.Module):
    """`weight0`, `weight1`, ...: a matrix for each expert of this rank. What etp cuts is exchanged
    by the dispatcher of tokens."""

    dim = 0

    def __init__(
        self, count: int, input_size: int, output_size: int, *, config: Any, **_: Any
    ) -> None:
        super().__init__()
        from megatron.core import parallel_state

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

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """As `_sharded_state_dict_grouped` of the same file."""
        from megatron.core import parallel_state as groups
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        held, apart = dict(self.named_parameters()), metadata.get("singleton_local_shards")
        ranks: Any = groups.get_expert_model_parallel_world_size()
        first: Any = groups.get_expert_model_parallel_rank()
        out: dict[str, Any] = {}
        for local in range(len(held)):
            number = first * len(held) + local
            own = (len(sharded_offsets), number, ranks * len(held))
            made = make_sharded_tensors_for_checkpoint(
                {"weight": held[f"weight{local}"]},
                f"{number}.{prefix}" if apart else prefix,
                {"weight": self.dim},
                sharded_offsets if apart else (*sharded_offsets, own),
                tp_group=groups.get_expert_tensor_parallel_group(),
                dp_cp_group=metadata["dp_cp_group"],
            )
            (out[f"{prefix}weight{local}"],) = made.values()
        return out

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, None]:
        parts = tokens.split(counts)
        return torch.cat(
            [part @ w.t() for part, w in zip(parts, self.parameters(), strict=True)]
        ), None


class GroupedRow(Grouped):
    dim = 1


def layer_specs(transformer: Any) -> Any:
    """As `models.layer_specs`, with such experts."""
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.spec_utils import ModuleSpec

    specs: Any = LOCAL(transformer)
    grouped: Any = MLPSubmodules(linear_fc1=Grouped, linear_fc2=GroupedRow)  # type: ignore[arg-type]
    for layer in specs.layer_specs:
        mlp = layer.submodules.mlp
        # what makes a module: a ModuleSpec, or in newer versions of megatron-core a function
        parts = mlp.keywords["submodules"] if isinstance(mlp, partial) else mlp.submodules
        if isinstance(getattr(parts, "experts", None), partial):
            parts.experts = partial(TEGroupedMLP, submodules=grouped)
        elif hasattr(parts, "experts"):
            parts.experts = ModuleSpec(module=TEGroupedMLP, submodules=grouped)
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
def grouped_experts(really: bool) -> Any:
    """Models that are built within have such experts."""
    with ExitStack() as patched:
        if really:
            patched.enter_context(mock.patch.object(models, "layer_specs", layer_specs))
            patched.enter_context(mock.patch.object(experts, "mark_experts", mark))
        yield


def export(setup: Any, folder: str) -> None:
    """The drawn weights of a model as a Hugging Face folder, from the memory of all ranks."""
    from tests.engines import megatron_jobs

    engine = megatron_jobs.make(setup)
    engine.handle.ucp_export_hf(folder)
    megatron_jobs.close(engine)
