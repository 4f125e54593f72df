"""Models with something that few models have, and that a checkpoint can get wrong."""

from typing import Any

import numpy as np
import torch

from tests.engines.model import WIDTH, Net


class Meter(torch.nn.Module):
    """Keeps what is no tensor: a count, a mean, a list, a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {"count": 0, "mean": np.float64(0), "last": torch.zeros(2)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = self.kept["count"] + 1
        last = torch.tensor([float(count), 0.5])
        self.kept = {"count": count, "mean": np.float64(count / 3), "last": last, "all": [count]}
        return x * (1 + 0.01 * count)

    def get_extra_state(self) -> dict[str, Any]:
        return dict(self.kept)

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.kept = dict(state)


class ExtraState(Net):
    """Its loss depends on what a module keeps as `_extra_state`."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()
        self.norm.register_forward_pre_hook(lambda _, inputs: (self.meter(inputs[0]),))


class Strange(Net):
    """Its extra state is of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Stranger()


class Stranger(torch.nn.Module):
    kept = 0

    def get_extra_state(self) -> Any:
        return Strange

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Turned(Net):
    """A buffer that is saved lies transposed in memory."""

    turned: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turned", torch.rand(3, WIDTH, dtype=torch.float64).t())
        self.norm.register_forward_pre_hook(self.add)

    def add(self, _: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        if self.training:
            self.turned.mul_(1.25)
        return (inputs[0] * self.turned.sum(1).to(inputs[0].dtype),)


class Expanded(Net):
    """A buffer of several elements in the memory of one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("wide", torch.rand(1).expand(4))


class Gapped(Net):
    """A buffer is a part of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("part", torch.rand(4, 4)[:, :2])


class Alias(Net):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.alias = self.up


class Hooked(Net):
    """Its state dict has other names for some parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(lambda _, state, *__: renamed(state, "up.", "old_up."))
        self._register_load_state_dict_pre_hook(lambda state, *_: renamed(state, "old_up.", "up."))


def renamed(state: dict[str, Any], before: str, after: str) -> dict[str, Any]:
    """In place: names that begin with `before` begin with `after`."""
    for name in [name for name in state if name.startswith(before)]:
        state[after + name.removeprefix(before)] = state.pop(name)
    return state


class HookedBuffer(Net):
    """Its state dict has another name for a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(lambda _, state, *__: renamed(state, "scale", "factor"))
        self._register_load_state_dict_pre_hook(lambda state, *_: renamed(state, "factor", "scale"))


class Changed(Net):
    """Its state dict has another value of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(lambda _, state, *__: state.update(scale=state["scale"] * 2))


class Added(Net):
    """Its state dict has an entry more."""

    def __init__(self) -> None:
        super().__init__()
        self._register_state_dict_hook(lambda _, state, *__: state.update(version=torch.ones(1)))


class Nothings(Net):
    """Two parameters without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.zeros(0))
        self.naught = torch.nn.Parameter(torch.zeros(0))


class Brackets(Net):
    """Names that look like slices of stacked experts, and are none."""

    def __init__(self) -> None:
        super().__init__()
        named = {"w1[3]": torch.rand(WIDTH), "w1[0]": torch.rand(WIDTH)}
        self.more = torch.nn.ParameterDict(named)
        self.norm.register_forward_pre_hook(
            lambda _, inputs: (inputs[0] * self.more["w1[3]"] + self.more["w1[0]"],)
        )


class Wrapped(torch.nn.Module):
    """A model inside of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.module = Net()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module(tokens)


class Compiled(torch.nn.Module):
    """A model with the names that torch.compile gives it."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = Net()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._orig_mod(tokens)


class LikeSlices(Net):
    """The very name of a slice of a stacked expert."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ParameterDict({"w1[3]": torch.rand(WIDTH)})


ODD = (
    LikeSlices,
    Wrapped,
    Compiled,
    ExtraState,
    Strange,
    Turned,
    Expanded,
    Gapped,
    Changed,
    Added,
    Alias,
    Hooked,
    HookedBuffer,
    Nothings,
    Brackets,
)
NAMED: dict[str, Any] = {kind.__name__: kind for kind in ODD}
