"""Optimizer files told apart by the keys that are present."""

from collections.abc import Callable
from typing import Any

from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.deepspeed.muon import is_offloaded
from megatron_ucp.formats.deepspeed.optimizer_files import OptimizerFile, Zero3File, Zero12File
from megatron_ucp.formats.deepspeed.plain_values import Tree
from megatron_ucp.formats.deepspeed.stage_0_files import FusedFlatFile, PlainFile, UnfusedFile


def reader_for(
    tree: Tree,
    file: str,
    weight_dtype: Callable[[str], str] = lambda _: "float32",
    config: Any = None,
) -> OptimizerFile:
    """The format of an optimizer state dict; `weight_dtype` is that of a weight in the model file,
    `config` the DeepSpeed config of the run. Raises DamagedFileError where no known key is
    present."""
    if "fp32_flat_groups" in tree:
        return Zero3File()
    if "single_partition_of_fp32_groups" in tree:
        return Zero12File(is_offloaded(config))
    if "fp32_groups_flat" in tree:
        return FusedFlatFile()
    if "fp32_groups" in tree:
        return UnfusedFile()
    if "state" in tree and "param_groups" in tree:
        return PlainFile(weight_dtype)
    raise DamagedFileError(
        "this is no optimizer state of DeepSpeed",
        file=file,
        found=", ".join(map(str, tree))[:200],
        expected="single_partition_of_fp32_groups, fp32_flat_groups, fp32_groups or state",
    )
