"""Optimizer files told apart by the keys that are present."""

from collections.abc import Callable
from typing import Any

from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.deepspeed.folder import WRONG_STRUCTURE
from megatron_ucp.formats.deepspeed.model_file import Tree
from megatron_ucp.formats.deepspeed.muon import is_offloaded
from megatron_ucp.formats.deepspeed.optimizer_files import OptimizerFile, Zero3File, Zero12File
from megatron_ucp.formats.deepspeed.stage_0_files import FusedFlatFile, PlainFile, UnfusedFile
from megatron_ucp.formats.deepspeed.stage_order import wrong_structure
from megatron_ucp.formats.pt.unpickler import TensorRef


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


def element_of(
    reader: OptimizerFile, tree: Tree, index: int, state: str, file: str
) -> TensorRef | None:
    """`reader.element`. Raises DamagedFileError for a file that lacks what the first one has."""
    try:
        return reader.element(tree, index, state)
    except WRONG_STRUCTURE as error:
        raise wrong_structure(error, file) from error
