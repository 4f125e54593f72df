"""Stand-ins on the CPU for the Adam of Transformer Engine and of Apex: their names, states and
groups, and where they count their steps. What their kernels would not take raises here. And for
Transformer Engine's layers: which module has a norm."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

STATES = ("exp_avg", "exp_avg_sq")


class _Fused(torch.optim.Optimizer):
    """Keyword arguments beyond these are kept as attributes, as the variants are."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        **variants: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = int(adam_w_mode)
        self.capturable = False
        vars(self).update(variants)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            if type(group["step"]) is not int:
                raise TypeError("multi_tensor_adam(): incompatible function arguments")
            for param in group["params"]:
                if not self.state[param]:
                    self.state[param].update({key: torch.zeros_like(param) for key in STATES})
                if param.grad is not None:
                    self._step(param, group)

    def _step(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        grad, decay = param.grad, group["weight_decay"]
        first, second = (self.state[param][key] for key in STATES)
        if not self.adam_w_mode:
            grad = grad + decay * param
        for state, value, beta in zip(
            (first, second), (grad, grad * grad), group["betas"], strict=True
        ):
            state.mul_(beta).add_(value * (1 - beta))
        over = [
            1 - beta ** group["step"] if group["bias_correction"] else 1.0
            for beta in group["betas"]
        ]
        moved = (first / over[0]) / ((second / over[1]).sqrt() + group["eps"])
        if self.adam_w_mode:
            moved = moved + decay * param
        param.sub_(group["lr"] * moved)


class FusedAdam(_Fused):
    """Transformer Engine's: a load takes its own states alone."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for held in state_dict["state"].values():
            for name in held:
                if name not in STATES:
                    raise KeyError(name)
        super().load_state_dict(state_dict)


class ApexAdam(_Fused):
    """Apex': it keeps no account of what a load brings."""


class Subclass(FusedAdam):
    """What somebody made of it."""


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"
ApexAdam.__module__ = "apex.optimizers.fused_adam"
ApexAdam.__qualname__ = "FusedAdam"
KINDS: dict[str, Any] = {"te": FusedAdam, "apex": ApexAdam, "subclass": Subclass}


def use(kind: str) -> None:
    """From now on megatron-core makes optimizers of this kind: "torch", or what it would find
    installed."""
    import megatron.core.optimizer as package
    from megatron.core.optimizer import distrib_optimizer

    fused = KINDS.get(kind)
    flags: Any = package
    flags.Adam = fused or torch.optim.AdamW
    flags.USING_PYTORCH_OPTIMIZER = fused is None
    flags = distrib_optimizer
    flags.Adam = fused or torch.optim.Adam
    flags.HAVE_APEX_OR_TE = fused is not None
    flags.USING_TE_OPTIMIZER = kind in ("te", "subclass")
    flags.USING_APEX_OPTIMIZER = kind == "apex"


@contextmanager
def fused_norms(really: bool) -> Iterator[None]:
    """Norms are parameters of the matrix behind them, its first ones, in the models built here."""
    from pretrain.mcore import chunks

    plain: Any = chunks._chunk

    def fused(*said: Any) -> Any:
        model = plain(*said)
        for layer in model.decoder.layers:
            _move(layer.input_layernorm, layer.self_attention.linear_qkv)
            if not hasattr(layer.mlp, "experts"):
                _move(layer.pre_mlp_layernorm, layer.mlp.linear_fc1)
        return model

    chunks._chunk = fused if really else plain
    try:
        yield
    finally:
        chunks._chunk = plain


def _move(norm: Any, matrix: Any) -> None:
    own = dict(matrix._parameters)
    matrix._parameters.clear()
    for kind, param in [*norm._parameters.items()]:
        del norm._parameters[kind]
        norm.__dict__[kind] = param  # which it computes with
        matrix.register_parameter(f"layer_norm_{kind}", param)
    for name, param in own.items():
        matrix.register_parameter(name, param)
