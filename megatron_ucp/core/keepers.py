"""Who keeps the states that a manifest lists: an optimizer in memory and in its program's files, or
a format that has an order of its own."""

from enum import StrEnum


class Keeper(StrEnum):
    """What `Manifest.keeper` may be; a manifest's file has the value, as its `engine`."""

    ZERO_0 = "zero0"  # DeepSpeed: an optimizer without partitions
    ZERO_1_OR_2 = "zero12"
    ZERO_3 = "zero3"
    BF16 = "bf16"  # DeepSpeed's BF16_Optimizer
    NOBODY = "none"  # weights in files of DeepSpeed's, of no optimizer
    MEGATRON = "megatron"  # megatron-core's own stack, live
    UNIVERSAL = "universal"  # DeepSpeed's universal folder
    TORCH_DIST = "torch_dist"  # a distributed checkpoint of Megatron-LM's
    LEGACY = "torch"  # a checkpoint of Megatron-LM's for each rank
    WEIGHTS = "weights"  # weights alone, each tensor for itself
    PAPER = "paper"  # a target that is read into, and never written
