"""Which of megatron-core's optimizers a folder is for: none of them loads the files of another."""

from enum import Enum


class Kind(Enum):
    """By what the files call the fp32 masters. `FLOAT16` and `FP32` keep all states on every
    data-parallel rank; there an fp32 parameter is its own master, and is stored once."""

    DISTRIBUTED = "param"
    FLOAT16 = "fp32_param"
    FP32 = ""
