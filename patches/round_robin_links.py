"""ZeRO-1/2 with `round_robin_gradients`: link parameters to where they really lie in the permuted
flat buffer."""

from typing import Any

from . import Patch


def change() -> None:
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, link_hp_params

    def link_all(self: Any) -> None:
        import torch.distributed as dist

        if self.cpu_offload:
            self._get_offload_gradient_dict()
        for i, _ in enumerate(self.optimizer.param_groups):
            group = self.real_dp_process_group[i]
            size = self.bit16_groups_flat[i].numel() // dist.get_world_size(group=group)
            starts = {
                id(p): start
                for p, start in zip(
                    self.round_robin_bit16_groups[i], self.round_robin_bit16_offsets[i], strict=True
                )
            }
            link_hp_params(
                lp_param_list=self.bit16_groups[i],
                flat_hp_partition=self.single_partition_of_fp32_groups[i],
                gradient_dict=self.averaged_gradients,
                offload_gradient_dict=self.offload_gradient_dict,
                use_offload=self.cpu_offload,
                param_group_index=i,
                partition_start=dist.get_rank(group=group) * size,
                partition_size=size,
                dp_group=group,
                param_offsets=[starts[id(p)] for p in self.bit16_groups[i]],
            )

    DeepSpeedZeroOptimizer._link_all_hp_params = link_all


PATCH = Patch(
    package="deepspeed",
    versions=("0.19.8",),
    upstream="deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer._link_all_hp_params",
    why="without alignment gaps it links parameters in declaration order over a buffer that "
    "round_robin_gradients has "
    "permuted: safe_get_full_fp32_param returns, and safe_set_full_fp32_param writes, other "
    "parameters' elements",
    until="upstream passes the real offsets for every permuted buffer, not only where there are "
    "alignment gaps",
    change=change,
)
