"""Weights that a folder of a Hugging Face model stores in fp8: each block of a matrix has a scale
beside it, and a weight is the product of the two.

Source: `quantization_config` of DeepSeek-V3's config.json, and the function `weight_dequant` of its
inference/kernel.py (https://github.com/deepseek-ai/DeepSeek-V3); transformers writes the same.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.errors import DamagedFileError, ModelMismatchError, UnsupportedError, UsageError
from megatron_ucp.formats.byte_files import ByteFile, Record, Where

FP8, PRODUCT = "float8_e4m3fn", "float32"
SCALES = "_scale_inv"  # behind the name of a weight
_SIZE = 4  # bytes of a product
_IN_GENERAL = "from_pretrained(folder), dequantize(), save_pretrained(another)"
_DEQUANTISE = {
    "mxfp4": "from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True), "
    'dtype="bfloat16"), save_pretrained(another)'
}


def block_of(config: Mapping[str, Any], file: str) -> Ints | None:
    """Rows and columns of a block, as a config.json says them; None where nothing is quantised.
    Raises UnsupportedError for weights that are quantised otherwise."""
    said = config.get("quantization_config")
    if not said:
        return None
    block = said.get("weight_block_size")
    known = said.get("quant_method") == "fp8" and said.get("fmt", "e4m3") == "e4m3"
    sizes = block if isinstance(block, list) else ()
    if not known or len(sizes) != 2 or not all(type(one) is int and one > 0 for one in sizes):
        raise UnsupportedError(
            "the folder's weights are quantised in a way that is not known",
            file=file,
            parameter="quantization_config",
            expected="fp8 (e4m3) with weight_block_size: two numbers",
            found=said,
            fix="write the folder in bf16 first, with transformers: "
            + _DEQUANTISE.get(str(said.get("quant_method")), _IN_GENERAL),
        )
    return tuple(sizes)


def scaled_slices(name: str, file: str) -> UnsupportedError:
    """The error for a tensor in fp8 that holds the weights of several experts."""
    return UnsupportedError(
        "experts in one tensor are in fp8: which scale is whose is not known",
        file=file,
        parameter=name,
        expected="bf16, fp16 or fp32",
        found=FP8,
        fix=f"write the folder in bf16 first, with transformers: {_IN_GENERAL}",
    )


class Fp8File(ByteFile):
    """A file as if one weight in fp8 were stored as the fp32 products. `held` is where the weight
    lies, of `width` columns, and `scales` where its scales do; `block` is rows and columns."""

    def __init__(self, held: Where, scales: Where, width: int, block: Ints) -> None:
        self.path = held.file.path
        self.held, self.scales, self.width, self.block = held, scales, width, block

    def place(self) -> Where:
        """All products."""
        record, elems = self.held.record, self.held.elems
        product = Record(record.name, record.offset_bytes, elems * _SIZE, 0)
        return Where(self, product, 0, elems, PRODUCT)

    def read_into(self, source: Record, start_byte: int, target: memoryview) -> None:
        """One multiplication for each element, in fp32."""
        if start_byte % _SIZE or len(target) % _SIZE:
            raise UsageError(
                "a part of an element is read",
                file=self.path,
                parameter=source.name,
                found=f"{len(target)} bytes from byte {start_byte}",
                fix="report this with the output of `megatron-ucp inspect` for the checkpoint",
            )
        first, count = start_byte // _SIZE, len(target) // _SIZE
        if not count:
            return
        values, at = self._stored(first, count), 0
        while at < count:
            row, column = divmod(first + at, self.width)
            rows = 1 if column else max(1, min((count - at) // self.width, self._rows_left(row)))
            end = min(at + rows * self.width - column, count)
            held = values[at:end].view(rows, -1)
            held *= self._scales_of(row)[column : column + held.shape[1]]
            at = end
        target[:] = memoryview(cast(Any, values.numpy())).cast("B")

    def _stored(self, first: int, count: int) -> Any:
        """Elements as they are stored, in fp32."""
        import torch  # inspecting a checkpoint must not need it

        stored = bytearray(count)
        self.held.file.read_into(self.held.record, first, memoryview(stored))
        return torch.frombuffer(stored, dtype=torch.float8_e4m3fn).to(torch.float32)

    def _rows_left(self, row: int) -> int:
        """Rows from this one on to the end of its block."""
        return self.block[0] - row % self.block[0]

    def _scales_of(self, row: int) -> Any:
        """The scale of each element of a row. Raises DamagedFileError."""
        import torch

        columns = -(-self.width // self.block[1])
        data = bytearray(columns * _SIZE)
        start = self.scales.offset_bytes + row // self.block[0] * len(data)
        self.scales.file.read_into(self.scales.record, start, memoryview(data))
        scales = torch.frombuffer(data, dtype=torch.float32)
        if not scales.isfinite().all():
            raise DamagedFileError(
                "scales of a weight are no numbers",
                file=self.scales.file.path,
                parameter=self.scales.record.name,
                found=f"row {row // self.block[0]}",
                fix="restore the file",
            )
        return scales.repeat_interleave(self.block[1])[: self.width]


def products_of(
    name: str, shape: Ints, held: Where, scales: Where | None, block: Ints | None
) -> Where:
    """Where the products of a weight and its scales are. Raises UnsupportedError where the config
    says no blocks, ModelMismatchError where the scales are not those of the weight."""
    if block is None:
        raise UnsupportedError(
            "a weight is in fp8, and config.json does not say how it is scaled",
            file=held.file.path,
            parameter=name,
            expected="quantization_config",
            found="nothing",
            fix="restore the config.json that was written with the weights",
        )
    wanted = tuple(-(-n // size) for n, size in zip(shape, block, strict=False))
    is_matrix = len(shape) == len(block)
    if scales is None or not is_matrix or (scales.dtype, scales.elems) != (PRODUCT, prod(wanted)):
        raise ModelMismatchError(
            "a weight in fp8 does not have its scales",
            file=held.file.path,
            parameter=f"{name}{SCALES}",
            expected=f"{list(wanted)} in {PRODUCT}, for {list(shape)} in blocks of {list(block)}",
            found="nothing" if scales is None else f"{scales.elems} of {scales.dtype}",
            fix="restore the folder, or its config.json",
        )
    return Fp8File(held, scales, shape[1], block).place()
