"""How DeepSpeed lays parameters out in flat buffers.

Sources, of DeepSpeed 0.19.8: `DeepSpeedZeroOptimizer.__init__` for ZeRO-1 and 2, for ZeRO-3
`partition_parameters.py` and `_create_fp16_sub_groups`.
"""

import math
from collections.abc import Sequence

# `nccl_start_alignment_factor`: a partition starts at a multiple of this many elements
PARTITION_ALIGNMENT = 2


def parameter_alignment(itemsize: int) -> int:
    """Alignment in elements under `zero_optimization.parameter_alignment` (16 bytes)."""
    return 16 // math.gcd(16, itemsize)


def whole_length(used: int, partitions: int) -> int:
    """Length of a ZeRO-1/2 or BF16_Optimizer buffer."""
    unit = PARTITION_ALIGNMENT * partitions
    return -(-used // unit) * unit


def round_robin(count: int, partitions: int) -> list[int]:
    """Order of members under `round_robin_gradients`: parameter i goes to bucket i mod D, buckets
    one after the other."""
    return [i for bucket in range(partitions) for i in range(bucket, count, partitions)]


def sub_groups(sizes: Sequence[int], partitions: int, sub_group_size: int) -> list[list[int]]:
    """Member numbers of each ZeRO-3 sub-group: closed once the rank-local elements reach
    `sub_group_size`."""
    out: list[list[int]] = []
    held = 0
    for index, size in enumerate(sizes):
        if not out or held >= sub_group_size:
            out.append([])
            held = 0
        out[-1].append(index)
        held += -(-size // partitions)
    return out
