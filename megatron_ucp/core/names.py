"""The words of a manifest: names of states and dtypes, and who keeps a parameter's states."""

from enum import StrEnum

# ---- states
#
# The two states that every engine has a name for. Those of optimizers are in
# `formats/optimizers`.


MASTER = "fp32"  # the name of the master weights among the states of a buffer
VALUE = "value"  # the one state of frozen parameters and module buffers


# ---- keepers
#
# Who keeps the states that a manifest lists: an optimizer in memory and in its program's files,
# or a format that has an order of its own.


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
    DCP = "dcp"  # a distributed checkpoint of an FSDP2 program
    WEIGHTS = "weights"  # weights alone, each tensor for itself
    PAPER = "paper"  # a target that is read into, and never written


# ---- dtypes


_SHORT = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}


def dtype_name(dtype: object) -> str:
    """`bfloat16` for `torch.bfloat16`, "torch.bfloat16", "bf16" and "bfloat16"; what is no dtype is
    given back as text, for whoever lists the dtypes that are possible."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}  # bytes of one element
