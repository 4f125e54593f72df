"""Layers of megatron-core's that keep a state over the sequence, on a CPU: Mamba's, and those of
gated delta nets. Their kernels need a GPU; what stands for them here is the recurrence itself, step
by step. How parameters are made, cut and saved is megatron-core's own code."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

_INFERENCE = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"


def scan(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    step_bias: torch.Tensor,
    decay: torch.Tensor,
    D: torch.Tensor,
    headdim: int,
    ngroups: int,
    **_: Any,
) -> torch.Tensor:
    """What `mamba_ssm` computes by blocks, of `projected` (batch, length, z x B C dt)."""
    length, heads, size = projected.shape[1], len(decay), projected.shape[-1]
    inner = heads * headdim
    mixed_size = size - inner - heads
    z, mixed, steps = projected.split([inner, mixed_size, heads], dim=-1)
    mixed = F.silu(_convolved(mixed, weight, bias, length))
    states = (mixed_size - inner) // 2
    x, b, c = mixed.split([inner, states, states], dim=-1)
    each = heads // ngroups
    b, c = (one.unflatten(-1, (ngroups, -1)).repeat_interleave(each, dim=2) for one in (b, c))
    out = _recurrence(x.unflatten(-1, (heads, -1)), b, c, F.softplus(steps + step_bias), decay)
    return (out + D[:, None] * x.unflatten(-1, (heads, -1))).flatten(-2) * F.silu(z)


def _convolved(
    mixed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, length: int
) -> torch.Tensor:
    """Each channel with itself at the places before."""
    padding = weight.shape[-1] - 1
    channels = mixed.transpose(1, 2)
    found = F.conv1d(channels, weight.unsqueeze(1), bias, padding=padding, groups=len(weight))
    return found[..., :length].transpose(1, 2)


def _recurrence(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, steps: torch.Tensor, decay: torch.Tensor
) -> torch.Tensor:
    """Dao and Gu (2024), section 2: what a state of each head and channel keeps, place by place.
    `x` is (batch, length, heads, channels), `b` and `c` have states for channels."""
    state, out = x.new_zeros(*x[:, 0].shape, b.shape[-1]), list[torch.Tensor]()
    for at in range(x.shape[1]):
        gone = torch.exp(steps[:, at] * decay)[..., None, None]
        came = (steps[:, at, :, None] * x[:, at])[..., None] * b[:, at, :, None]
        state = gone * state + came
        out.append((state * c[:, at, :, None]).sum(-1))
    return torch.stack(out, dim=1)


def _norm() -> type:
    from megatron.core import parallel_state
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    class Norm(torch.nn.Module):
        """In the place of `mamba_ssm`'s norm over groups, of which megatron-core's is a subclass;
        saved as that is."""

        def __init__(self, width: int, eps: float, group_size: int, **_: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(width))
            self.eps, self.group_size = eps, group_size

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            groups = x.unflatten(-1, (-1, self.group_size))
            return F.rms_norm(groups, (self.group_size,), eps=self.eps).flatten(-2) * self.weight

        def sharded_state_dict(self, prefix: str, sharded_offsets: Any, metadata: Any) -> Any:
            own = self.state_dict(prefix="", keep_vars=True)
            groups = {
                "tp_group": parallel_state.get_tensor_model_parallel_group(),
                "dp_cp_group": metadata["dp_cp_group"],
            }
            return make_sharded_tensors_for_checkpoint(
                own, prefix, {"weight": 0}, sharded_offsets, **groups
            )

    return Norm


@contextmanager
def kernels_on_cpu() -> Iterator[None]:
    """While such layers are built: as if their packages were here, and memory a GPU's."""
    sys.modules.setdefault(_INFERENCE, mock.MagicMock())  # needs triton, and is not used
    from megatron.core.ssm import gated_delta_net, mamba_mixer

    mixer: dict[str, Any] = {
        "HAVE_MAMBA_SSM": True,
        "ExtendedRMSNorm": _norm(),
        "mamba_split_conv1d_scan_combined": scan,
    }
    for name, value in mixer.items():
        setattr(mamba_mixer, name, value)
    # from 0.19 on a package, whose module `common` asks for these
    delta_nets: Any = getattr(gated_delta_net, "common", gated_delta_net)
    delta_nets.HAVE_FLA = True
    delta_nets.l2norm = lambda values: F.normalize(values, dim=-1, eps=1e-6)
    with mock.patch.object(torch.cuda, "current_device", lambda: "cpu"):
        yield


def mamba_layer(column: Any, row: Any, norm: Any) -> Any:
    """The spec of a Mamba layer of local modules."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    added: Any = get_bias_dropout_add
    mixer = ModuleSpec(MambaMixer, submodules=MambaMixerSubmodules(in_proj=column, out_proj=row))
    return ModuleSpec(
        MambaLayer, submodules=MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=added)
    )


def delta_net(column: Any, row: Any, norm: Any) -> Any:
    """The spec of a gated delta net of local modules, in the place of attention."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts = GatedDeltaNetSubmodules(in_proj=column, out_norm=norm, out_proj=row)
    return ModuleSpec(GatedDeltaNet, submodules=parts)
