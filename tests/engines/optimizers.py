"""Optimizers that are not in the package's table, as a user writes them."""

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """One element-wise state and a count, under names of its own."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            one, two = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                held = self.state[param]
                if not held:
                    held["trend"], held["turns"] = torch.zeros_like(param), 0
                held["turns"] += 1
                param.mul_(1 - group["lr"] * group["weight_decay"])
                moved = held["trend"].mul(one).add(param.grad, alpha=1 - one)
                param.add_(moved.sign(), alpha=-group["lr"])
                held["trend"].mul_(two).add_(param.grad, alpha=1 - two)


class OwnAdamW(torch.optim.AdamW):
    """A subclass that keeps what its base keeps."""


class ChattyAdamW(torch.optim.AdamW):
    """A subclass that keeps more than its base, which shows after the first step."""

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param in self.state:
                    self.state[param]["history"] = [1, 2, 3]
                    self.state[param]["spread"] = torch.ones(3)
        return done


class Adam8bit(torch.optim.Optimizer):
    """Keeps block-wise states under bitsandbytes' names."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update(state1=torch.zeros(8), qmap1=torch.zeros(256))
