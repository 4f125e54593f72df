"""A folder of a Hugging Face model, opened as a checkpoint that holds weights alone."""

import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layout import Chunks
from megatron_ucp.core.manifest import Manifest, ParamSpec, Tie
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.tensor_parts import Slice, TensorPart, weights_manifest
from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    LayoutError,
    ModelMismatchError,
    NotFoundError,
    UnsupportedError,
    UsageError,
    some_of,
)
from megatron_ucp.formats.byte_files import ByteFile, Record, Where, same_bytes
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.hugging_face.safetensors_file import Entry, SafetensorsFile, header_of
from megatron_ucp.formats.hugging_face.stacked import stacks_of, unstacked
from megatron_ucp.formats.pt.refs import ITEMSIZE, TensorRef
from megatron_ucp.formats.store import Location, folder_at
from megatron_ucp.formats.tags import AS_SAFETENSORS, POINTERS, holds_states, weights_as_pickles

# ---- weights in fp8
#
# Weights that a folder of a Hugging Face model stores in fp8: each block of a matrix has a scale
# beside it, and a weight is the product of the two.
#
# Source: `quantization_config` of DeepSeek-V3's config.json, and the function `weight_dequant` of
# its inference/kernel.py (https://github.com/deepseek-ai/DeepSeek-V3); transformers writes the
# same.


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
            of_block = self.block[0] - row % self.block[0]
            rows = 1 if column else max(1, min((count - at) // self.width, of_block))
            end = min(at + rows * self.width - column, count)
            held = values[at:end].view(rows, -1)
            held *= self._scales_of(row)[column : column + held.shape[1]]
            at = end
        target[:] = memoryview(cast(Any, values.numpy())).cast("B")

    def prefetch(self, source: Record, start_byte: int, size_bytes: int) -> None:
        self.held.file.prefetch(self.held.record, start_byte // _SIZE, size_bytes // _SIZE)

    def _stored(self, first: int, count: int) -> Any:
        """Elements as they are stored, in fp32."""
        import torch  # inspecting a checkpoint must not need it

        stored = bytearray(count)
        self.held.file.read_into(self.held.record, first, memoryview(stored))
        return torch.frombuffer(stored, dtype=torch.float8_e4m3fn).to(torch.float32)

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
    if (
        scales is None
        or not is_matrix
        or (scales.dtype, scales.elems) != (PRODUCT, math.prod(wanted))
    ):
        raise ModelMismatchError(
            "a weight in fp8 does not have its scales",
            file=held.file.path,
            parameter=f"{name}{SCALES}",
            expected=f"{list(wanted)} in {PRODUCT}, for {list(shape)} in blocks of {list(block)}",
            found="nothing" if scales is None else f"{scales.elems} of {scales.dtype}",
            fix="restore the folder, or its config.json",
        )
    return Fp8File(held, scales, shape[1], block).place()


# ---- checkpoint


WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
CONFIG_FILE = "config.json"
ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"  # peft's
_STEM = WEIGHTS_FILE.removesuffix(".safetensors")
_SHARD = re.compile(rf"{_STEM}-\d{{5}}-of-(?P<count>\d{{5}})\.safetensors")
_VARIANT = re.compile(rf"{_STEM}\.[^.]+\.safetensors")
_SHARD_OF_VARIANT = re.compile(rf"{_STEM}\.[^.]+-\d+-of-\d+\.safetensors")
_HEAD = "lm_head.weight"  # of every model of transformers that gives logits
# masks of GPT-2, and frequencies of rotary positions
_CONSTANT = re.compile(r"(.+\.)?attn\.(masked_)?bias|.+\.rotary_emb\.inv_freq")


class HuggingFaceCheckpoint(Checkpoint):
    """One opened folder. The caller says what each tensor holds of which parameter of a family
    (`told.shares` and `told.specs`); else every tensor is a parameter of its own name, or one
    expert's slice of one of the stacks of experts in the model that it is for (`told.like`), in
    which several names may be of one parameter. What is no weight is left out for a family, and for
    a model that has none of that name.

    Raises a UcpError for anything that headers and the index can show: every fault of names and
    shapes in one error. Tensor bytes are not read, but for a head that must be a copy.
    """

    def __init__(self, folder: Folder, told: CallerModel) -> None:
        super().__init__(folder)
        self.main_file = self.full_path(CONFIG_FILE)
        with self.closed_on_failure():
            has_config = self.folder.is_file(CONFIG_FILE)
            self._block = block_of(self.config, self.main_file) if has_config else None
            self._slices: dict[str, Slice] = {}
            self._files = self._tensor_files()
            self._refuse_empty(told.own)
            self._scales = self._without_scales()
            if told.shares is None:
                shares, specs = self._own_names(told)
            else:
                shares, specs = self._of_family(told.shares), told.specs or {}
            self.manifest = self._manifest(shares, specs, named=told.shares is not None)

    # ------------------------------------------------ structure

    def _tensor_files(self) -> dict[str, str]:
        """Tensor -> the file that holds it, in the order of the files' bytes. Raises
        ForeignFileError where the index and the files disagree."""
        for name in (WEIGHTS_FILE, ADAPTER_FILE):
            if self.folder.is_file(name):
                return dict.fromkeys(self.file(name).tensors, name)
        if (shards := all_shards(self.folder)) and INDEX_FILE not in self.folder:
            return self._of_shards(shards)
        if INDEX_FILE not in self.folder:
            refuse_unnamed(self.folder)
            raise NotFoundError(
                "the folder holds no weights as safetensors",
                file=self.folder,
                expected=f"{WEIGHTS_FILE}, or {INDEX_FILE}",
                found=weights_as_pickles(self.folder) or "neither",
                fix=AS_SAFETENSORS,
                id="no-checkpoint",
            )
        listed = self._index()
        out: dict[str, str] = {}
        for name in sorted({*listed.values()}):
            for tensor in self.file(name).tensors:
                out.setdefault(tensor, name)
                if listed.get(tensor) != name:
                    raise ForeignFileError(
                        "the index does not list a tensor where it lies",
                        file=self.folder / INDEX_FILE,
                        parameter=tensor,
                        expected=name,
                        found=listed.get(tensor, "nothing"),
                        fix="restore index and files of one save",
                    )
        if lost := [tensor for tensor in listed if tensor not in out]:
            raise ForeignFileError(
                "the index lists tensors that no file holds",
                file=self.folder / INDEX_FILE,
                parameter=lost[0],
                found=f"{len(lost)} such tensors: {some_of([*lost], between='; ')}",
                fix="restore index and files of one save",
            )
        return out

    def _of_shards(self, shards: Sequence[str]) -> dict[str, str]:
        """Tensor -> the shard that holds it, where no index says it. Raises ForeignFileError."""
        out: dict[str, str] = {}
        for name in shards:
            for tensor in self.file(name).tensors:
                if tensor in out:
                    raise ForeignFileError(
                        "two shards hold a tensor, and no index says which one counts",
                        file=self.folder / name,
                        parameter=tensor,
                        expected=f"{INDEX_FILE}",
                        found=f"the tensor in {out[tensor]} too",
                        fix=f"restore {INDEX_FILE}, or the shards of one save",
                    )
                out[tensor] = name
        return out

    def _refuse_empty(self, known: Mapping[str, ParamSpec]) -> None:
        """Raises ForeignFileError for tensors without elements, of which the model has some."""
        empty = [
            name
            for name, file in self._files.items()
            if not self.file(file).tensors[name].size_bytes
            and (known[name].elems if name in known else name.endswith(("weight", "bias")))
        ]
        if empty:
            raise ForeignFileError(
                "tensors of the folder have size 0: it was saved under ZeRO-3, where each rank has "
                "a part of the weights, without gathering them",
                file=self.folder / self._files[empty[0]],
                parameter=some_of(empty),
                expected="tensors with elements",
                found=f"{len(empty)} of {len(self._files)} tensors without any",
                fix="export the run's own checkpoint (megatron-ucp export-hf), or save again with "
                '"stage3_gather_16bit_weights_on_model_save": true in the ZeRO section',
            )

    def _without_scales(self) -> dict[str, str]:
        """Takes the scales of weights in fp8 from the tensors; returns, for each such weight, the
        file of its scales ("" where there is none)."""
        weights = [name for name in self._files if self._entry(name).dtype == FP8]
        return {name: self._files.pop(f"{name}{SCALES}", "") for name in weights}

    def _without_constants(self, known: Collection[str] = ()) -> dict[str, str]:
        """Without what earlier versions of transformers wrote that is no weight: by its name, and
        by a shape that no weight has."""
        return {
            name: file
            for name, file in self._files.items()
            if name in known
            or not _CONSTANT.fullmatch(name)
            or (name.endswith("bias") and len(self._entry(name).shape) not in (0, 4))
        }

    def _index(self) -> dict[str, str]:
        tree = self.folder.json(INDEX_FILE)
        listed: Any = tree.get("weight_map")
        good = isinstance(listed, dict) and all(
            isinstance(name, str) and name.endswith(".safetensors") and "/" not in name
            for name in listed.values()
        )
        if not good:
            raise DamagedFileError(
                "the index says no files of its folder",
                file=self.folder / INDEX_FILE,
                expected="weight_map: a file for each tensor",
                found=repr(listed)[:80],
            )
        return listed

    def _leave_out_copy(self, alias: str, name: str) -> None:
        """Some programs write a tied parameter under all its names. Raises ModelMismatchError where
        they are several tensors."""
        if not {name, alias} <= {*self._files}:
            return
        if not self._are_same(alias, name):
            raise ModelMismatchError(
                "two parameters are one in the model, and two in the folder",
                file=self.folder,
                parameter=alias,
                expected=f"the bytes of {name}",
                found="others",
                fix="remove it; or, if it was trained apart, build the model untied "
                '("tie_word_embeddings": false in config.json, for a head)',
            )
        del self._files[alias]

    def _are_same(self, one: str, other: str) -> bool:
        """Whether two tensors have one shape and the same values."""
        shapes = {self._entry(name).shape for name in (one, other)}
        return len(shapes) == 1 and same_bytes(self._place(one), self._place(other))

    def _once(self, shares: Mapping[str, TensorPart]) -> Mapping[str, TensorPart]:
        """Without tensors that hold all that an earlier one holds, and may be left out. Raises
        ModelMismatchError where they are not copies."""
        out: dict[str, TensorPart] = {}
        first: dict[str, str] = {}
        for name, share in shares.items():
            held = share.layout.held if isinstance(share.layout, Chunks) else ()
            if len(held) < 2 or any(one != held[0] for one in held):
                out[name] = share
            elif known := first.get(share.param):
                self._leave_out_copy(name, known)
            else:
                first[share.param], out[name] = name, TensorPart(share.param)
        return out

    def _in_slices(self, shares: Mapping[str, TensorPart]) -> dict[str, str]:
        """The files of the tensors, where a tensor of which shares are slices is these. Raises
        UnsupportedError for one in fp8."""
        files = dict(self._files)
        for name, share in shares.items():
            if share.slice_of is not None and share.slice_of.tensor in self._files:
                self._slices[name] = share.slice_of
                files[name] = self._files[share.slice_of.tensor]
        for whole in (one.tensor for one in self._slices.values()):
            files.pop(whole, None)
            if whole in self._scales:
                raise scaled_slices(whole, self.folder / self._files[whole])
        return files

    def _of_family(self, shares: Mapping[str, TensorPart]) -> Mapping[str, TensorPart]:
        """What each tensor holds of a family's parameters, as the folder has them."""
        self._files = self._without_constants()
        shares = self._once(_as_written(shares, self._files))
        self._files = self._in_slices(shares)
        if _HEAD not in shares:
            self._leave_out_copy(_HEAD, next(iter(shares)))
        return shares

    def _own_names(
        self, told: CallerModel
    ) -> tuple[Mapping[str, TensorPart], Mapping[str, ParamSpec]]:
        """Every tensor as what it holds of the model that the folder is for: by what the caller
        says of its names, else as a parameter of its own name, or as one expert's slice of a
        stack."""
        if told.like is not None:
            self._files = self._without_constants(told.own)
        shapes = {name: self._entry(name).shape for name in self._files}
        found = None if told.tensors is None else told.tensors(shapes)
        if found is None:
            found = unstacked(stacks_of(told.own), self._files)
        found = found or {name: TensorPart(name) for name in self._files}
        if told.like is not None:
            found = self._without_copies(found, told.like.ties)
        self._files = self._in_slices(found)
        specs = {
            share.param: replace(self._spec(name), name=share.param)
            if name in self._files and share == TensorPart(share.param)
            else replace(told.own[share.param], extent=None)
            for name, share in found.items()
        }
        return found, specs

    def _without_copies(
        self, shares: Mapping[str, TensorPart], ties: Sequence[Tie]
    ) -> Mapping[str, TensorPart]:
        """The shares without the tensors that are a tied parameter under another of its names.
        Raises ModelMismatchError where they are several tensors."""
        names = {share.param: name for name, share in shares.items() if name in self._files}
        out = dict(shares)
        for tie in ties:
            here = [names[name] for name in (tie.canonical, *tie.aliases) if name in names]
            for alias in here[1:]:
                self._leave_out_copy(alias, here[0])
                del out[alias]
            if here and out[here[0]].param != tie.canonical:  # it lies there under an alias alone
                out[here[0]] = replace(out[here[0]], param=tie.canonical)
        return out

    def _spec(self, name: str) -> ParamSpec:
        return ParamSpec(name, self._entry(name).shape, self._dtype(name), "frozen")

    def _entry(self, name: str) -> Entry:
        """Of a tensor, or of a slice: of one that its tensor can't have, that tensor's."""
        within = self._slices.get(name)
        tensors = self.file(self._files[name]).tensors
        if within is None:
            return tensors[name]
        entry = tensors[within.tensor]
        shape = within.sliced_shape(entry.shape)
        if shape is None:
            return entry
        at = entry.offset_bytes + within.first_elem(shape) * ITEMSIZE[entry.dtype]
        return replace(entry, shape=shape, offset_bytes=at)

    def _dtype(self, name: str) -> str:
        """That of a tensor's values, as they are read."""
        return PRODUCT if name in self._scales else self._entry(name).dtype

    def _manifest(
        self, shares: Mapping[str, TensorPart], specs: Mapping[str, ParamSpec], named: bool
    ) -> Manifest:
        faults = [f"{name}: missing" for name in shares if name not in self._files]
        faults += [f"{name}: not known" for name in self._files if name not in shares]
        params: dict[str, ParamSpec] = {}
        for name, share in shares.items():
            if name in self._files:
                params[share.param], more = self._param(name, share, specs[share.param], named)
                faults += [f"{name}: {fault}" for fault in more]
        if faults:
            raise ModelMismatchError(
                "the folder does not hold the tensors of the model",
                file=self.folder,
                expected=f"{len(shares)} tensors",
                found=f"{len(self._files)} tensors, {len(faults)} faults: "
                + some_of(faults, between="; "),
                fix="mend the folder, or its config.json: that says the family, the sizes and "
                "whether the head is tied",
            )
        self.tensors = tuple(shares)  # by the number of their buffer
        dtypes = [self._dtype(name) for name in shares]
        return weights_manifest(params, zip(shares.values(), dtypes, strict=True))

    def _param(
        self, name: str, share: TensorPart, spec: ParamSpec, named: bool
    ) -> tuple[ParamSpec, list[str]]:
        """The parameter that a tensor is a share of, as long as it is here, and what of it does not
        fit."""
        entry, faults = self._entry(name), list[str]()
        if spec.extent is not None:  # an engine's padding is none of the folder's rows
            rows = self.config.get("vocab_size", spec.extent.true)
            spec = replace(spec, shape=(rows, *spec.shape[1:]), extent=None)
        expected = _stored_shape(share, spec)
        if expected != entry.shape:
            faults.append(f"{list(entry.shape)} instead of {list(expected)}")
        if named and not entry.dtype.startswith(("float", "bfloat")):
            faults.append(f"{entry.dtype}, which are no weights")
        return replace(spec, kind="frozen"), faults

    # ------------------------------------------------ what the operations ask for

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """config.json. Raises NotFoundError, DamagedFileError."""
        return json_in(self.folder, CONFIG_FILE)

    @property
    def notes(self) -> list[str]:
        products = f"{len(self._scales)} weights in fp8 are read as fp32: each times its scale"
        return [
            *self.path_notes,
            "a Hugging Face folder: weights alone, and no checksums to compare them with",
            *([products] if self._scales else []),
            *self._not_read(),
        ]

    def unread(self) -> list[str]:
        """As of any folder; of other weights `notes` say more."""
        return [name for name in super().unread() if not name.endswith(".safetensors")]

    def _not_read(self) -> list[str]:
        """Notes of other weights that lie in the folder, and of an index that does not."""
        read = {*self._files.values()}
        if read <= {WEIGHTS_FILE, ADAPTER_FILE}:
            (first,) = read or {WEIGHTS_FILE}
            others = [INDEX_FILE, *all_shards(self.folder), WEIGHTS_FILE, ADAPTER_FILE]
            there = [name for name in others if name != first and self.folder.is_file(name)]
            return [f"{first} is read, as transformers does; not {some_of(there, 3)} beside it"][
                : len(there)
            ]
        if not self.folder.is_file(INDEX_FILE):
            return [f"there is no {INDEX_FILE}: all of the {len(read)} shards were read"]
        return []

    @property
    def file_names(self) -> list[str]:
        return sorted({*self._files.values(), *filter(None, self._scales.values())})

    def where(self, slot: Slot) -> Where:
        """Place of a tensor."""
        return self._place(self.tensors[slot.buffer])

    def _place(self, name: str) -> Where:
        file = self.file(self._files[name])
        if name in self._slices:
            within, shape = self._slices[name], self._entry(name).shape
            run = within.first_elem(shape), math.prod(shape)
            return file.place(within.tensor).run(*run)
        held = file.place(name)
        if name not in self._scales:
            return held
        scaled, shape = self._scales[name], self._entry(name).shape
        scales = self.file(scaled).place(f"{name}{SCALES}") if scaled else None
        return products_of(name, shape, held, scales, self._block)

    def open_file(self, name: str) -> SafetensorsFile:
        return self._closing.enter_context(SafetensorsFile(self.folder.open(name)))

    def place_of(self, ref: TensorRef) -> Where:
        """There are no tensors but weights."""
        raise UsageError(
            "a Hugging Face folder has no other tensors",
            file=self.folder,
            found=ref,
            fix="report this with the output of `megatron-ucp inspect` for the folder",
        )


def _as_written(
    shares: Mapping[str, TensorPart], files: Collection[str]
) -> Mapping[str, TensorPart]:
    """The shares under the names of a folder: that of a model without its head (GPT-2's own) lacks
    the first word."""
    word = next(iter(shares), "").partition(".")[0] + "."
    if any(name.startswith(word) for name in files):
        return shares
    return {name.removeprefix(word): share for name, share in shares.items()}


def _stored_shape(share: TensorPart, spec: ParamSpec) -> tuple[int, ...] | str:
    try:
        return share.stored_shape(spec)
    except LayoutError as error:
        return error.problem


def _other_kind(folder: Folder) -> str:
    """What else a folder is than one of Hugging Face; empty where nothing shows it."""
    if holds_states(folder):
        return "a tag of DeepSpeed or Megatron"
    if any(folder.is_file(name) for name in POINTERS):
        return "a folder of DeepSpeed or Megatron, with tags"
    return ""


def read_json(path: Location) -> Mapping[str, Any]:
    """An object in a JSON file of a local folder. Raises as `json_in`."""
    return json_in(folder_at(path.parent), path.name)


def json_in(folder: Folder, name: str) -> Mapping[str, Any]:
    """An object in a JSON file. Raises NotFoundError, which says what the folder is instead of one
    of Hugging Face, DamagedFileError."""
    if name not in folder:
        kind = _other_kind(folder)
        raise NotFoundError(
            "the file does not exist",
            file=folder / name,
            expected=f"a folder of Hugging Face, which has {name}",
            found=kind or "a folder without it",
            fix="of such a folder `megatron-ucp export-hf` makes one of Hugging Face, and "
            "`megatron-ucp convert` one for another mesh"
            if kind
            else "restore it",
        )
    return folder.json(name)


def all_shards(folder: Folder) -> list[str]:
    """The shards of a model by their names, which say how many there are; nothing where one of them
    is missing."""
    found: dict[str, list[str]] = {}
    for name in folder.names():
        if shard := _SHARD.fullmatch(name):
            found.setdefault(shard["count"], []).append(name)
    if len(found) != 1:
        return []
    ((count, names),) = found.items()
    return sorted(names) if len(names) == int(count) else []


def refuse_unnamed(folder: Folder) -> None:
    """Raises NotFoundError for a folder that has safetensors, or folders of models below it, and no
    weights under the names that are looked for."""
    files = [name for name in folder.names() if name.endswith(".safetensors")]
    below = [f"snapshots/{name}" for name in folder.names("snapshots")]
    snapshots = [name for name in below if folder.is_file(f"{name}/{CONFIG_FILE}")]
    if not files and not snapshots:
        return
    fix = "give the folder that save_pretrained wrote, or was downloaded, whole"
    if snapshots and not files:
        what, found = "this is the root of a model in the Hub's cache", "folders of its revisions"
        fix = f"give the folder of one: {folder / snapshots[-1]}"
    elif any(_SHARD.fullmatch(name) for name in files):
        what = f"shards of a model lie here, and not all of them, and no {INDEX_FILE}"
        found = some_of(files)
        fix = f"restore the shards that are missing, or {INDEX_FILE}"
    else:
        what, found = "the folder has safetensors under another name", some_of(files)
        variants = [name for name in files if _VARIANT.fullmatch(name)]
        if variants and not any(_SHARD_OF_VARIANT.fullmatch(name) for name in variants):
            what = "the folder holds a variant of a model"
            fix = f"name the file that you mean {WEIGHTS_FILE}, or make a link to it of that name"
    raise NotFoundError(
        what,
        file=folder,
        expected=f"{WEIGHTS_FILE}, or {INDEX_FILE} and its shards",
        found=found,
        fix=fix,
        id="no-checkpoint",
    )


class HuggingFaceFormat:
    """Folders that `save_pretrained` writes, and our own exports."""

    def recognises(self, folder: Folder) -> bool:
        """A trainer's folder of a checkpoint with optimizer may have the weights beside it: it
        is DeepSpeed's."""
        if any(name in folder for name in ("latest", "latest_universal")):
            return False
        names = WEIGHTS_FILE, INDEX_FILE, ADAPTER_FILE
        if any(folder.is_file(name) for name in names):
            return True
        return bool(all_shards(folder)) and not holds_states(folder)

    def open(self, folder: Folder, told: CallerModel) -> Checkpoint:
        return HuggingFaceCheckpoint(folder, told)


# ---- shards
#
# The files of a Hugging Face model: which tensor goes into which, and their index.


_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
Tensor = tuple[str, str, Ints]  # name, dtype, shape


@dataclass(frozen=True)
class WeightFile:
    """A file: its first bytes, the byte at which each tensor begins, and its size."""

    name: str
    header: bytes
    places: dict[str, int]
    size_bytes: int


def parse_size(text: str | int) -> int:
    """Bytes, from a number or a text such as "5GB" (a GB is 10^9 bytes, as transformers counts
    them). Raises UsageError."""
    found = re.fullmatch(
        r"([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([KMGT]?B)?", str(text).strip().upper()
    )
    if found is None or float(found[1]) <= 0:
        raise UsageError(
            "this is no size of a file",
            expected="5GB, 200MB",
            found=text,
            fix="give such a size (--max-shard-size; Python: max_shard_size=)",
        )
    return int(float(found[1]) * _UNITS[(found[2] or "").removeprefix("B")])


def shards_of(
    tensors: Sequence[Tensor], max_bytes: int, stem: str = WEIGHTS_FILE
) -> list[WeightFile]:
    """The files, as `save_pretrained` of transformers 5 divides tensors, in the order of their
    names: one that does not fit into the file begun by those before it begins the next one. One
    that is larger by itself has a file of its own, which ends none."""
    groups: list[list[Tensor]] = []
    current: list[Tensor] = []
    held = 0
    for tensor in sorted(tensors, key=lambda tensor: _natural(tensor[0])):
        size = _size(tensor)
        if size > max_bytes:
            groups.append([tensor])
            continue
        if held + size > max_bytes:
            groups.append(current)
            current, held = [], 0
        current.append(tensor)
        held += size
    if current or not groups:
        groups.append(current)
    base = stem.removesuffix(".safetensors")
    names = [f"{base}-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    return [_shard(stem if len(groups) == 1 else n, g) for n, g in zip(names, groups, strict=True)]


def _natural(name: str) -> list[tuple[object, ...]]:
    """The order of names in which numbers are numbers: between dots, and at the end of a word."""
    out: list[tuple[object, ...]] = []
    for part in name.split("."):
        text = part.rstrip("0123456789")
        number = int(part[len(text) :]) if text != part else None
        out.append((0, number) if not text else (1, text) if number is None else (1, text, number))
    return out


def _size(tensor: Tensor) -> int:
    return Entry(tensor[1], tensor[2], 0).size_bytes


def _shard(name: str, tensors: Sequence[Tensor]) -> WeightFile:
    header, places = header_of(tensors)
    return WeightFile(name, header, places, len(header) + sum(map(_size, tensors)))


def index_of(
    shards: Sequence[WeightFile], tensors: Iterable[Tensor], parameters: int
) -> dict[str, str]:
    """The text of the index by its file's name; none where there is one file. `parameters` are the
    elements of all parameters."""
    if len(shards) == 1:
        return {}
    sizes = [_size(tensor) for tensor in tensors]
    tree = {
        "metadata": {"total_parameters": parameters, "total_size": sum(sizes)},
        "weight_map": {name: shard.name for shard in shards for name in shard.places},
    }
    return {INDEX_FILE: json.dumps(tree, indent=2, sort_keys=True) + "\n"}
