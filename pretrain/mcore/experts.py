"""megatron-core's MoE layers under DeepSpeed: what they are built from, which experts a rank holds,
and what DeepSpeed has to know of them.

megatron-core marks the parameters of experts with `allreduce = False` where ranks share them, and
so does DeepSpeed, which then asks for a group's name and for a module of its own. Experts whose
copies are where all others' are (see `groups.experts_are_apart`) are parameters like others.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_ucp.core.experts import check_files
from megatron_ucp.engines.mcore_model import expert_prefixes, moe_layers
from megatron_ucp.errors import LayoutError, UnsupportedError, UsageError
from pretrain.mcore.groups import deepspeed_trains, expert_group_name, experts_are_apart

PATCHES = ("moe_router_gemm", "moe_dispatch_on_cpu", "uneven_gather_on_cpu")
UNDER_DEEPSPEED = ("expert_clip", "expert_norm_bf16", "expert_norm_unfused")
# an attribute of an expert's parameters: its number among all experts of the layer
NUMBER = "ucp_expert"


@dataclass(frozen=True)
class Experts:
    """The experts of a model. `number` of them in every layer that has any (layers 0, `every`,
    2 x `every`, ...), each one a gated MLP of the width `ffn`; a token goes to `topk` of them, none
    is dropped. `shared_ffn` is the width of the expert that sees every token (0: there is none).

    `aux_loss` and `z_loss` are coefficients; `bias` is DeepSeek's balancing without a loss: a
    router's buffer `expert_bias`, which `update_expert_bias` moves by `bias_rate` after each global
    batch. Routers compute in fp32. Raises UsageError for what is no model.
    """

    number: int
    ffn: int
    topk: int = 2
    shared_ffn: int = 0
    every: int = 1
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    score: Literal["softmax", "sigmoid"] = "softmax"
    pre_softmax: bool = False
    aux_loss: float = 0.0
    z_loss: float = 0.0
    bias: bool = False
    bias_rate: float = 1e-3

    def __post_init__(self) -> None:
        if min(self.number, self.ffn, self.every) < 1 or self.shared_ffn < 0:
            raise UsageError(
                "these are no experts",
                expected="sizes of at least 1",
                found=self,
                fix="give a number of experts and sizes of at least 1 (--num-experts, "
                "--moe-ffn-hidden-size)",
            )
        if not 1 <= self.topk <= self.number:
            raise UsageError(
                "a token can't go to so many experts",
                expected=f"1 to {self.number}",
                found=self.topk,
                fix="give a smaller --moe-router-topk, or more --num-experts",
            )
        if self.topk == 1 and self.score == "softmax" and not self.pre_softmax:
            raise UsageError(
                "the softmax over one chosen expert is always 1: the router would learn nothing",
                expected="pre_softmax, or sigmoid scores",
                found="topk 1",
                fix="give --moe-router-pre-softmax, or --moe-router-score-function sigmoid",
            )
        if self.bias and self.score != "sigmoid":
            raise UsageError(
                "megatron-core's expert bias needs sigmoid scores",
                expected="score sigmoid",
                found=self.score,
                fix="give --moe-router-score-function sigmoid, or leave "
                "--moe-router-enable-expert-bias out",
            )
        if self.dispatcher not in ("alltoall", "allgather"):
            raise UsageError(
                "there is no such dispatcher of tokens",
                expected="alltoall or allgather",
                found=self.dispatcher,
                fix="give --moe-token-dispatcher-type alltoall or allgather",
            )

    @property
    def sizes(self) -> dict[str, int]:
        """As the family's table takes them."""
        return {
            "experts": self.number,
            "expert_ffn": self.ffn,
            "shared_ffn": self.shared_ffn,
            "every": self.every,
        }

    @property
    def transformer(self) -> dict[str, Any]:
        """As megatron-core's TransformerConfig takes them. Call `start` first."""
        from megatron.core import parallel_state

        return {
            "num_moe_experts": self.number,
            "moe_ffn_hidden_size": self.ffn,
            "moe_shared_expert_intermediate_size": self.shared_ffn or None,
            "moe_layer_freq": self.every,
            "moe_router_topk": self.topk,
            "moe_router_dtype": "fp32",
            "moe_router_score_function": self.score,
            "moe_router_pre_softmax": self.pre_softmax,
            "moe_router_load_balancing_type": "aux_loss" if self.aux_loss else "none",
            "moe_aux_loss_coeff": self.aux_loss,
            "moe_z_loss_coeff": self.z_loss or None,
            "moe_router_enable_expert_bias": self.bias,
            "moe_router_bias_update_rate": self.bias_rate,
            "moe_token_dispatcher_type": self.dispatcher,
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
        }


def check_mesh(experts: Experts | None, sequence_parallel: bool) -> None:
    """Raises UsageError or LayoutError where the groups of `start` do not fit the experts."""
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_world_size()
    ep = parallel_state.get_expert_model_parallel_world_size()
    etp: Any = parallel_state.get_expert_tensor_parallel_world_size()
    if experts is None:
        if experts_are_apart():
            raise UsageError(
                "models.start was called for a model with experts",
                expected=f"expert-parallel size 1, expert-tensor-parallel size {tp}",
                found=f"{ep} and {etp}",
                fix="give models.start the expert-parallel sizes that the model has, or "
                "leave them out for a model without experts",
            )
        return
    for divided, size, what, flag in (
        (experts.number, ep, "expert-parallel size does not divide the experts", "model"),
        (
            experts.ffn,
            etp,
            "expert-tensor-parallel size does not divide the width of the experts",
            "tensor",
        ),
    ):
        if divided % size:
            raise LayoutError(
                f"the {what}",
                expected=f"a divisor of {divided}",
                found=size,
                fix=f"give a divisor (--expert-{flag}-parallel-size)",
                id="does-not-divide",
            )
    if deepspeed_trains():
        check_files(tp, ep, etp)
    if tp > 1 and not sequence_parallel:
        raise UnsupportedError(
            "megatron-core trains experts under tensor parallelism with sequence parallelism only",
            expected="sequence_parallel",
            found=f"tensor-parallel size {tp} without it",
            fix="switch sequence parallelism on",
        )


def apply_patches() -> None:
    """What megatron-core, and DeepSpeed where it trains, need to train experts."""
    import megatron_ucp_patches as patches  # pyright: ignore[reportMissingImports]  (package_dir in setup.py)

    for name in (*PATCHES, *(UNDER_DEEPSPEED if deepspeed_trains() else ())):
        patches.apply(name)


def mark_experts(model: torch.nn.Module) -> None:
    """Gives the experts of a model their numbers, and what DeepSpeed asks for where it trains."""
    for _, layer in list(moe_layers(model)):
        for number, expert in zip(
            layer.local_expert_indices, layer.experts.local_experts, strict=True
        ):
            for param in expert.parameters():
                setattr(param, NUMBER, number)
                # megatron-core leaves this to True where ranks cut an expert otherwise than
                # attention, and would then sum gradients of different things
                param.allreduce = not experts_are_apart()
                if experts_are_apart() and deepspeed_trains():
                    param.group_name = expert_group_name()
        if experts_are_apart() and deepspeed_trains():
            _show_to_deepspeed(layer)


def global_expert_names(model: torch.nn.Module) -> dict[str, str]:
    """For every parameter of the model: its name there -> the name with the expert's number among
    all experts of the layer, where megatron-core counts those of each rank from 0. In a pipeline
    both are names in the pipeline. A parameter of an expert has that number as its attribute
    `ucp_expert`."""
    prefixes = expert_prefixes(model)
    out: dict[str, str] = {}
    for name, param in model.named_parameters():
        out[name] = name
        if hasattr(param, NUMBER):
            local = next(prefix for prefix in prefixes if name.startswith(prefix))
            out[name] = prefixes[local] + name.removeprefix(local)
    return out


def is_apart(param: torch.Tensor) -> bool:
    """Whether a parameter is of an expert that DeepSpeed has groups of its own for."""
    return not getattr(param, "allreduce", True)


def cut_of(param: torch.Tensor) -> tuple[int, int]:
    """Into how many parts the ranks cut a parameter that is cut, and which one this rank has."""
    from megatron.core import parallel_state

    group: Any = (
        parallel_state.get_expert_tensor_parallel_group()
        if hasattr(param, NUMBER)
        else parallel_state.get_tensor_model_parallel_group()
    )
    return group.size(), group.rank()


def _show_to_deepspeed(layer: Any) -> None:
    """Makes the module that holds a layer's experts one by which DeepSpeed sees that there are
    experts, and which ones lie here. Its saves then have a file for each expert, with DeepSpeed's
    names, and its loads read them."""
    from deepspeed.moe.layer import MoE
    from megatron.core.transformer.moe.experts import SequentialMLP

    ours = "local_experts."
    theirs = f"{ours}deepspeed_moe.experts.deepspeed_experts."  # only that much do they look for

    class DeepSpeedExperts(SequentialMLP, MoE):
        """megatron-core's experts, under a class that DeepSpeed looks for."""

        def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
            if use_data_before_expert_parallel_:
                raise UnsupportedError(
                    "use_data_before_expert_parallelism is not supported",
                    fix="leave it out of the DeepSpeed config: megatron-core orders the ranks",
                )

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            found = super().state_dict(*args, **kwargs)
            if args or kwargs:  # of the whole model
                return found
            return {
                name.replace(ours, theirs, 1): value
                for name, value in found.items()
                if value is not None  # megatron-core's extra states
            }

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            for name in [name for name in state_dict if name.startswith(prefix + theirs)]:
                state_dict[name.replace(theirs, ours, 1)] = state_dict.pop(name)
            super()._load_from_state_dict(state_dict, prefix, *args)

    module = layer.experts
    module.__class__ = DeepSpeedExperts  # not by MoE's constructor, which makes experts of its own
    module.num_experts = layer.config.num_moe_experts
    module.ep_size = module.num_experts // module.num_local_experts
    module.expert_group_name = expert_group_name()


class _CarriesScale(torch.autograd.Function):
    """The loss as it is. On the way back its gradient, whatever DeepSpeed multiplied the loss by,
    becomes that of the auxiliary losses: these start in the middle of the graph."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        MoEAuxLossAutoScaler.main_loss_backward_scale = grad.detach().clone()
        return grad


def with_auxiliary_losses(loss: torch.Tensor, transformer: Any) -> torch.Tensor:
    """The loss of a model; its backward pass sets the scale of the auxiliary losses, if it has
    any."""
    if not transformer.num_moe_experts:
        return loss
    scaled: torch.Tensor = _CarriesScale.apply(loss)  # type: ignore[assignment]
    return scaled


def auxiliary_losses(transformer: Any, micro_batches: int) -> dict[str, float]:
    """Mean over layers with experts, micro batches and data-parallel ranks of the auxiliary losses
    since the last call, without their coefficients. Collective: every rank of the world calls it.
    """
    from megatron.core import parallel_state

    counted = _counted_losses()
    wanted = {
        "load_balancing_loss": bool(transformer.moe_aux_loss_coeff),
        "z_loss": bool(transformer.moe_z_loss_coeff),
    }
    tp = parallel_state.get_tensor_model_parallel_world_size()
    layers = -(-transformer.num_layers // transformer.moe_layer_freq)
    out: dict[str, float] = {}
    for name in (name for name, has in wanted.items() if has):
        total = torch.zeros((), dtype=torch.float64, device=torch.cuda.current_device())
        if name in counted:  # not on a stage without experts
            total += counted[name].double().sum()
        dist.all_reduce(total)
        # of the balancing loss a tensor-parallel rank has the part of its tokens, of the other one
        # the mean over them
        means = parallel_state.get_data_parallel_world_size() * (tp if name == "z_loss" else 1)
        out[name] = float(total) / (layers * micro_batches * means)
    for losses in counted.values():
        losses.zero_()
    return out


def _counted_losses() -> dict[str, torch.Tensor]:
    """The auxiliary losses that this rank's layers counted, [layers] each, by name: the tensors
    that the layers add to."""
    from megatron.core.transformer.moe import moe_utils

    module: Any = moe_utils
    if hasattr(module, "get_moe_metrics_tracker"):  # megatron-core from 0.18 on
        tracker = module.get_moe_metrics_tracker()
        return {name: entry.values for name, entry in tracker.metrics.items()}
    entries = module.get_moe_layer_wise_logging_tracker().items()
    return {name: entry["values"] for name, entry in entries}


@torch.no_grad()
def update_expert_bias(model: torch.nn.Module, transformer: Any) -> None:
    """Moves the routers' biases towards balance, by the tokens that each expert got since the last
    call; nothing for a model without. To be called after each global batch. Collective on each
    stage."""
    from megatron.core.transformer.moe.moe_utils import get_updated_expert_bias

    if not transformer.moe_router_enable_expert_bias:
        return
    for _, layer in moe_layers(model):
        router = layer.router
        router.expert_bias.copy_(
            get_updated_expert_bias(
                router.local_tokens_per_expert,
                router.expert_bias,
                transformer.moe_router_bias_update_rate,
            )
        )
        router.local_tokens_per_expert.zero_()
