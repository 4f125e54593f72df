"""torch's AdamW in megatron-core's DistributedOptimizer: a load gives each parameter its own step,
and the checkpoint's."""

from typing import Any

import torch

from . import MEGATRON_CORE, Patch


def change() -> None:
    from megatron.core.optimizer import distrib_optimizer

    kind: Any = distrib_optimizer.DistributedOptimizer
    sharded_state_dict, load_state_dict = kind.sharded_state_dict, kind.load_state_dict
    set_states = kind._set_main_param_and_optimizer_states

    def with_states(
        self: Any,
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if is_loading and not self.optimizer.state:
            _with_fresh_states(self)
        return sharded_state_dict(self, model_sharded_state_dict, is_loading, *args, **kwargs)

    def load(self: Any, state_dict: Any) -> None:
        with torch.no_grad():  # masters in fp32 are views of leaves
            load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:  # not where another Adam counts in its groups
                state["step"] = state["step"].clone()  # was one tensor for all

    def keeping_step(self: Any, model_param: Any, tensors: Any) -> None:
        group, order = self.model_param_group_index_map[model_param]
        held = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        # what comes with `tensors` is that of the fresh optimizer, or none at all
        kept = {"step": held["step"].clone()} if "step" in held else {}
        set_states(self, model_param, {**tensors, **kept})

    kind.sharded_state_dict, kind.load_state_dict = with_states, load
    kind._set_main_param_and_optimizer_states = keeping_step


@torch.no_grad()
def _with_fresh_states(optimizer: Any) -> None:
    """Makes the states that a load fills. Upstream's way is a step of the optimizer, which moves
    fp32 parameters by their weight decay: it is undone."""
    params = [param for group in optimizer.optimizer.param_groups for param in group["params"]]
    before = [param.detach().clone() for param in params]
    optimizer._init_optimizer_states_with_dummy_values()
    for param, old in zip(params, before, strict=True):
        param.copy_(old)


PATCH = Patch(
    package="megatron-core",
    versions=MEGATRON_CORE,
    upstream="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer: sharded_state_dict, "
    "load_state_dict, _set_main_param_and_optimizer_states",
    why="without Transformer Engine and Apex it asserts that there are states before the first "
    "step, gives all parameters one step tensor, which AdamW then advances once for each of them, "
    "and overwrites the loaded step with that of the fresh optimizer",
    until="upstream clones the step for each parameter and keeps the loaded one",
    change=change,
)
