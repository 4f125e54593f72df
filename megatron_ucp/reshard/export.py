"""A checkpoint of any mesh as a folder of a Hugging Face model, straight from its own files.

The folder is a mesh more, of one rank, with other names: what is written is planned and proved as
a whole before the first byte, then moved window by window through a buffer of bounded size,
whatever the model, by as many threads as there are cores. The bytes depend on the model alone, not
on the mesh that saved it. The folder appears whole or not at all.
"""

import json
import math
import os
import shutil
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import LOSSLESS, Slot
from megatron_ucp.core.shares import weights_manifest
from megatron_ucp.core.states import VALUE
from megatron_ucp.errors import InexactError, SaveError, UsageError
from megatron_ucp.formats import durable
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.hugging_face.checkpoint import CONFIG_FILE, read_json
from megatron_ucp.formats.hugging_face.shards import WeightFile, index_of, parse_size, shards_of
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.diff import weight_differences, weight_of
from megatron_ucp.reshard.execute import TORCH_DTYPES, bytes_of
from megatron_ucp.reshard.findings import Progress
from megatron_ucp.reshard.output_folder import (
    begin_sync,
    in_threads,
    require_free,
    require_outside,
    require_plain,
    sync_all,
    written_aside,
)
from megatron_ucp.reshard.twin import Twin, twin_of
from megatron_ucp.reshard.windows import WINDOW_BYTES, Memory, WindowReader

WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")
# What is stored transposed is written in larger windows, so that its columns are read in long runs.
_WIDE_WINDOW_BYTES = 8 * WINDOW_BYTES
_ALLOWED = frozenset({"mean", "stale"})
_LISTED = 8
# What a tokenizer, and generating, need: copied where somebody says which model they are of.
COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Exported:
    """What an export did. `read_bytes` and `written_bytes` are of tensors; `notes` say what is not
    as in the source; `verified` whether the files were read back and compared."""

    path: str
    source_mesh: str
    dtype: str
    files: int
    tensors: int
    read_bytes: int
    written_bytes: int
    seconds: float
    verified: bool
    notes: tuple[str, ...]


def export_hf(
    src: str | Path,
    dst: str | Path,
    dtype: str | None = None,
    max_shard_size: str | int = "5GB",
    *,
    tag: str | None = None,
    rules: str | Path | None = None,
    config: str | Path | None = None,
    family: str = "",
    tokenizer: str | Path | None = None,
    verify: bool = False,
    allow: Collection[str] = (),
    progress: Progress | None = None,
) -> Exported:
    """Writes the weights of the checkpoint `src` as the new folder `dst`, which
    `AutoModelForCausalLM.from_pretrained` takes: the masters, rounded to `dtype` (None: that of
    training).

    `config` is a folder with the config.json of the model, which a checkpoint without a family
    needs (else the weights alone are written); `family` is that of a checkpoint that does not say
    its own; tokenizer files are copied from `tokenizer`, else from `config`. `verify` reads the
    files back and compares them with the source, bit by bit, before they get their name. `allow`
    as in `convert`. Raises a UcpError, SaveError where the output can't be written; nothing is
    left of it then.
    """
    started, folder = time.perf_counter(), Path(dst)
    _check_arguments(folder, dtype, allow)
    max_bytes = parse_size(max_shard_size)
    given = None if config is None else read_json(Path(config) / CONFIG_FILE)
    with open_checkpoint(src, tag, rules) as source:
        require_outside(folder, source.folder)
        for name in source.file_names:
            source.check(name, allow)
        chosen = dtype or _training_dtype(source.manifest)
        twin = twin_of(source.manifest, given, family, chosen, str(source.folder))
        beside = _beside(twin, tokenizer or config)
        job = _Job(source, twin, chosen, max_bytes, frozenset(allow), progress)
        job.prove()
        job.write(folder, beside, verify)
    notes = [*source.notes]
    if twin.config is None:
        notes.append(
            "no config.json was written: give --config DIR for one that transformers needs"
        )
    return Exported(
        str(folder),
        str(source.manifest.mesh),
        chosen,
        len(job.shards),
        len(twin.shares),
        job.reader.read_bytes,
        job.done,
        time.perf_counter() - started,
        verify,
        tuple(notes),
    )


def _check_arguments(folder: Path, dtype: str | None, allow: Collection[str]) -> None:
    require_plain(folder)
    if dtype not in (None, *WEIGHT_DTYPES):
        raise UsageError(
            "weights have no such dtype", expected=" ".join(WEIGHT_DTYPES), found=dtype
        )
    if isinstance(allow, str) or set(allow) - _ALLOWED:
        raise UsageError(
            "allow names what may happen",
            expected=" ".join(sorted(_ALLOWED)),
            found=" ".join(sorted(allow)),
        )


def _training_dtype(manifest: Manifest) -> str:
    trained = [spec.dtype for spec in manifest.params if spec.kind == "trainable"]
    return (trained or [spec.dtype for spec in manifest.params] or ["float32"])[0]


def _is_float(dtype: str) -> bool:
    return dtype in WEIGHT_DTYPES


def _beside(twin: Twin, folder: str | Path | None) -> dict[str, str | Path]:
    """What lies beside the weights: texts, or files that are copied."""
    out: dict[str, str | Path] = {}
    if twin.config is not None:
        out[CONFIG_FILE] = _json(twin.config)
    for name in COPIED_FILES if folder is not None else ():
        if (path := Path(folder or "") / name).is_file():
            out[name] = path
    if twin.family:
        tokens = {key: (twin.config or {}).get(key) for key in ("bos_token_id", "eos_token_id")}
        out.setdefault("generation_config.json", _json({"_from_model_config": True, **tokens}))
    return out


def _json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"


class _Job:
    """One export: plans, windows and counts. Tensors are written by several threads."""

    def __init__(
        self,
        source: Checkpoint,
        twin: Twin,
        dtype: str,
        max_bytes: int,
        allow: frozenset[str],
        progress: Progress | None,
    ) -> None:
        self.source, self.twin, self.progress = source, twin, progress
        held = {
            share.param: weight_of(source.manifest, share.param) for share in twin.shares.values()
        }
        self.states = {name: state for name, (state, _) in held.items()}
        self.wide = {name: have for name, (_, have) in held.items()}
        dtypes = {name: dtype if _is_float(have) else have for name, have in self.wide.items()}
        self.target = weights_manifest(
            twin.specs, [(share, dtypes[share.param]) for share in twin.shares.values()]
        )
        self.tensors = [
            (name, dtypes[share.param], share.stored_shape(twin.specs[share.param]))
            for name, share in twin.shares.items()
        ]
        self.shards = shards_of(self.tensors, max_bytes)
        self.reader = WindowReader(source, allow | {"narrow"})
        self.memory, self.stopped = Memory(), threading.Event()
        self.done, self.total = 0, sum(math.prod(s) * ITEMSIZE[d] for _, d, s in self.tensors)
        self.overflows: dict[str, int] = {}
        self._lock = threading.Lock()

    def prove(self) -> None:
        """Plans everything that will be written, proves it and looks every source up."""
        wants = [
            (Slot(number, (), 0, VALUE), self.states[share.param])
            for number, share in enumerate(self.twin.shares.values())
        ]
        self.reader.prove(self.target, wants)

    def write(self, folder: Path, beside: Mapping[str, str | Path], verify: bool) -> None:
        """The folder, whole or not at all."""
        numbers = {name: number for number, (name, _, _) in enumerate(self.tensors)}
        with written_aside(folder) as aside:
            for shard in self.shards:
                _begin(aside / shard.name, shard)
            jobs = [
                partial(self._tensor, aside / shard.name, numbers[name], place)
                for shard in self.shards
                for name, place in sorted(shard.places.items(), key=lambda item: item[1])
            ]
            in_threads(jobs, self.stopped)
            self.reader.check(thorough=True)
            self._check_overflows()
            elems = sum(math.prod(spec.shape) for spec in self.target.params)
            for name, what in {**index_of(self.shards, self.tensors, elems), **beside}.items():
                if isinstance(what, Path):
                    shutil.copyfile(what, aside / name)
                else:
                    (aside / name).write_text(what, encoding="utf-8")
            if verify:
                _verify(self.source, aside, self.twin)
            sync_all(aside)
            require_free(folder)
            os.rename(aside, folder)
            durable.Syncs()(folder.absolute().parent)

    # ---------------------------------------------------------------- bytes

    def _tensor(self, path: Path, number: int, place: int) -> None:
        """One tensor, from byte `place` of its file on. Runs in a thread of its own."""
        name, dtype, _ = self.tensors[number]
        share = self.twin.shares[name]
        slot, elems = Slot(number, (), 0, VALUE), self.target.buffers[number].length
        size, state = ITEMSIZE[dtype], self.states[share.param]
        step = (WINDOW_BYTES if share.order is None else _WIDE_WINDOW_BYTES) // size
        with open(path, "r+b", buffering=0) as file:
            for low in range(0, elems, step):
                memory = self.memory.take(min(step, elems - low), dtype)
                self.reader.fill(self.target, slot, state, low, memory)
                self._look_for_overflows(number, low, memory)
                _write_at(file.fileno(), bytes_of(memory), place + low * size)
                self._count(memory.nbytes)
        if elems * size > WINDOW_BYTES:
            begin_sync(path)

    def _look_for_overflows(self, number: int, low: int, memory: torch.Tensor) -> None:
        """Counts finite values that the dtype can't hold."""
        name, dtype, _ = self.tensors[number]
        param = self.twin.shares[name].param
        have = self.wide[param]
        if dtype == have or (have, dtype) in LOSSLESS or not len(memory):
            return
        lowest, highest = torch.aminmax(memory)
        if bool(torch.isfinite(highest)) and bool(torch.isfinite(lowest)):
            return
        exact = self._as_saved(number, low, len(memory))
        lost = int((exact.isfinite() & ~memory.isfinite()).sum())
        if lost:
            with self._lock:
                self.overflows[name] = self.overflows.get(name, 0) + lost

    def _as_saved(self, number: int, low: int, elems: int) -> torch.Tensor:
        """Elements of a tensor in the dtype of the source."""
        name, _, _ = self.tensors[number]
        share = self.twin.shares[name]
        have = self.wide[share.param]
        target = weights_manifest(self.twin.specs, [(share, have)])
        reader = WindowReader(self.source, self.reader.allow)
        slot, state = Slot(0, (), 0, VALUE), self.states[share.param]
        reader.prove(target, [(slot, state)])
        out = torch.empty(elems, dtype=TORCH_DTYPES[have])
        reader.fill(target, slot, state, low, out)
        return out

    def _check_overflows(self) -> None:
        if not self.overflows:
            return
        name = min(self.overflows)
        dtype = next(dtype for tensor, dtype, _ in self.tensors if tensor == name)
        listed = [f"{name}: {count}" for name, count in sorted(self.overflows.items())]
        more = f" and {len(listed) - _LISTED} more tensors" if len(listed) > _LISTED else ""
        raise InexactError(
            f"values are too large for {dtype}",
            file=self.source.folder,
            parameter=name,
            expected=f"at most {torch.finfo(TORCH_DTYPES[dtype]).max:g}",
            found=f"larger values in {'; '.join(listed[:_LISTED])}{more}",
            fix="export in bfloat16 or float32",
        )

    def _count(self, written: int) -> None:
        if self.stopped.is_set():
            raise SaveError("the export was stopped")
        with self._lock:
            self.done += written
            if self.progress is not None:
                self.progress(self.done, self.total)


def _begin(path: Path, shard: WeightFile) -> None:
    """A file with its header, as long as it will be."""
    with open(path, "xb") as file:
        file.write(shard.header)
        file.truncate(shard.size_bytes)


def _write_at(handle: int, data: memoryview, place: int) -> None:
    done = 0
    while done < len(data):  # one call moves at most 2 GiB
        done += os.pwrite(handle, data[done:], place + done)


def _verify(source: Checkpoint, written: Path, twin: Twin) -> None:
    """Reads the files back under the names of the source, and compares every parameter with the
    source's masters, rounded as the files are. Raises SaveError."""
    with open_checkpoint(written, told=twin.told if twin.family else None) as found:
        differences = weight_differences(source, found)
    if differences:
        first = differences[0]
        raise SaveError(
            "what was read back is not what the checkpoint holds; nothing is left of it",
            file=written,
            parameter=first.parameter,
            expected=first.a,
            found=f"{first.what}: {first.b}; {len(differences)} differences",
            fix="check the disk and the memory of this machine, then try again",
        )
