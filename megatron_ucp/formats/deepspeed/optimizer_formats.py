"""Optimizer files told apart by the keys that are present."""

from collections.abc import Callable
from typing import Any

from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.deepspeed.muon import is_offloaded
from megatron_ucp.formats.deepspeed.optimizer_files import OptimizerFile, Zero3File, Zero12File
from megatron_ucp.formats.deepspeed.stage_0_files import FusedFlatFile, PlainFile, UnfusedFile
from megatron_ucp.formats.foreign import of_kind


def reader_for(
    tree: Any,
    file: str,
    weight_dtype: Callable[[str], str] = lambda _: "float32",
    config: Any = None,
) -> OptimizerFile:
    """The format of an optimizer state dict; `weight_dtype` is that of a weight in the model file,
    `config` the DeepSpeed config of the run. Raises DamagedFileError where no known key is
    present."""
    keys = of_kind(tree, dict, "the optimizer", file).keys()
    rows = (
        Zero3File(),
        Zero12File(is_offloaded(config)),
        FusedFlatFile(),
        UnfusedFile(),
    )
    for row in rows:
        if row.masters_key in keys:
            return row
    if {"state", "param_groups"} <= keys:
        return PlainFile(weight_dtype)
    raise DamagedFileError(
        "this is no optimizer state of DeepSpeed",
        file=file,
        found=", ".join(map(str, keys))[:200],
        expected="single_partition_of_fp32_groups, fp32_flat_groups, fp32_groups or state",
    )
