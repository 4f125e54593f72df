"""Exports a model to a Hugging Face folder, from files or from a live engine."""

import json
import math
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.box import Ints
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.names import MASTER, VALUE, dtype_name
from megatron_ucp.core.plan import LOSSLESS, Slot, Want
from megatron_ucp.core.tensor_parts import TensorPart, state_in, weights_manifest
from megatron_ucp.errors import NotFoundError, SaveError, UnsupportedError, UsageError, some_of
from megatron_ucp.families.arguments import unknown_padding
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint, Readable
from megatron_ucp.formats.file_layout import FileLayout, FilePiece
from megatron_ucp.formats.hugging_face.checkpoint import (
    CONFIG_FILE,
    Tensor,
    WeightFile,
    index_of,
    parse_size,
    read_json,
    shards_of,
)
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.formats.store import CLAIM, Location, StorePath, location, unfinished_shown
from megatron_ucp.formats.store_saves import attempt_at
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.check import Difference, weight_differences, weight_of
from megatron_ucp.reshard.engine import Engine
from megatron_ucp.reshard.files import FileSource
from megatron_ucp.reshard.findings import Progress, checked
from megatron_ucp.reshard.folder import (
    FolderOutput,
    FolderSink,
    GatheredFolder,
    check_source,
    require_free,
    require_plain,
)
from megatron_ucp.reshard.hugging_face.names import (
    Twin,
    config_for,
    family_of,
    needs_family,
    pipe_names,
    twin_of,
)
from megatron_ucp.reshard.kept_moves import SharedMemories
from megatron_ucp.reshard.match import replica_notes, require_one_copy
from megatron_ucp.reshard.options import EXPORT, check_words, plain_path
from megatron_ucp.reshard.transfer import NARROW, SinkPart, Source, TransferRun, transfer
from megatron_ucp.reshard.work_sharing import as_rank_error, ranks_of, require_same, source_of

# ---- exported
#
# What an export did.


@dataclass(frozen=True)
class Exported:
    """What an export did. `read_bytes` and `written_bytes` are of tensors; `notes` say what is not
    as in the source; `verified` whether the files were read back and compared; `loadable` whether
    there is a config, without which no library loads the folder; `complete` whether the folder has
    all that its class asks for, and all that an adapter's run trained; `proved` what was compared.
    """

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
    loadable: bool = True
    proved: str = ""
    complete: bool = True

    def __str__(self) -> str:
        lacks = "" if self.complete else "; NOT COMPLETE: see the notes"
        lacks = lacks if self.loadable else "; NO LIBRARY LOADS IT YET: it has no config"
        return (
            f"wrote {self.path}: {self.source_mesh} -> Hugging Face; {self.tensors} tensors in "
            f"{self.dtype}, {say.amount(self.written_bytes)} in {self.files} "
            f"file{'s' if self.files != 1 else ''}, {say.duration(self.seconds)}, "
            f"{self.proved}{lacks}"
        )


# ---- beside
#
# What lies beside the weights of an exported model: config.json, and the files that the model's
# own folder has for its tokenizer, its processor, generating, and code of its own.
#
# Files whose names are known are copied. Every other one is named in a note, so that nothing is
# left out in silence, but for what holds weights or is of a training.


LIST_FILE = "ucp_export.json"  # what an export wrote: name of the file -> bytes
MOST_BYTES = 2**28  # of a file that is copied; the largest tokenizers have 40 MB
_MOST_NAMED = 40
_TEMPLATES = "additional_chat_templates"  # the folder that transformers itself makes in a folder

_TOKENIZER = re.compile(
    r"tokenizer.*|.*vocab.*|merges\.txt|special_tokens_map\.json|added_tokens\.json|tekken\.json|"
    r"chat_template\..+|(?:.+/)?.+\.(?:jinja|model|tiktoken|bpe|spm)|normalizer\.json"
)
_OTHERS = re.compile(r"generation_config\.json|.*processor.*\.json|LICEN[CS]E.*|NOTICE.*|README.*")
# Written anew by the export, weights in any program's form, a trainer's or DeepSpeed's.
_NOT_OF_A_MODEL = re.compile(
    r"\..+|__pycache__/|(?:adapter_)?config\.json|adapter_model\..+|.+\.index\.json|latest.*|"
    r".+\.(?:safetensors|bin|pt|pth|ckpt|distcp|gguf|ggml|h5|msgpack|onnx|onnx_data|npz|npy|tflite)|"
    r"(?:global_step|checkpoint-|iter_|epoch|step)\w*/|zero_to_\w+\.py|trainer_state\.json|"
    r"(?:\w+_)?(?:results|metrics)\.json|ds_config.*\.json|ucp_.+\.json|.+\.(?:pkl|pickle|log|nemo)"
)


@dataclass(frozen=True)
class Beside:
    """`files` are texts, or files to copy, by their names in the new folder; `notes` say what of
    the model's folder is not among them."""

    files: Mapping[str, str | Location]
    notes: tuple[str, ...] = ()


def beside_weights(
    twin: Twin, tokenizer: str | Path | None, *models: str | Location | None
) -> Beside:
    """config.json, and what is copied of the model's folders: the first one that has a file counts,
    and the first one that has a tokenizer counts for all of it, as files of two tokenizers would be
    a third one. `tokenizer` is a folder that comes before them. Raises NotFoundError where that has
    no tokenizer."""
    files: dict[str, str | Location] = {}
    left: list[str] = []
    code = {*_code_of(twin.config or {})}
    for folder in (tokenizer, *models):
        if folder is None:
            continue
        found, more = _copied(location(plain_path(folder)), bool(code))
        if folder is tokenizer and not any(map(_TOKENIZER.fullmatch, found)):
            raise NotFoundError(
                "the folder that was given for the tokenizer has no file of one",
                file=tokenizer,
                expected="tokenizer.json, tokenizer_config.json, tokenizer.model, ...",
                found="none" if location(folder).is_dir() else "no such folder",
                fix="give --tokenizer (Python: tokenizer=) the folder that its save_pretrained "
                "wrote, or leave it out",
                id="",
            )
        if any(map(_TOKENIZER.fullmatch, files)):
            found = {name: path for name, path in found.items() if not _TOKENIZER.fullmatch(name)}
        files = {**found, **files}
        left += more
    if twin.config is not None:
        files[twin.config_file] = _json_of(twin.config)
    if twin.family:
        tokens = {key: (twin.config or {}).get(key) for key in ("bos_token_id", "eos_token_id")}
        files.setdefault("generation_config.json", _json_of({"_from_model_config": True, **tokens}))
    left = [*dict.fromkeys(left)]
    notes = [f"not copied: {some_of(left, _MOST_NAMED)}"] if left else []
    if lost := sorted(code - {*files}):
        notes.append(
            f"auto_map of {CONFIG_FILE} names {some_of(lost)}, which the export lacks: export with "
            "the model's folder as --config (Python: config=)"
        )
    return Beside(files, tuple(notes))


def _copied(folder: Location, has_code: bool) -> tuple[dict[str, str | Location], list[str]]:
    """The files of a folder that are copied, by their names there, and the names of others, with
    the reason where the name does not show it. Where the model has code, all of it is copied."""
    copied: dict[str, str | Location] = {}
    left: list[str] = []
    for name, path in _entries(folder):
        is_known = _TOKENIZER.fullmatch(name) or _OTHERS.fullmatch(name)
        reason = _reason_to_leave(name, path, folder)
        if reason or not (is_known or (has_code and name.endswith(".py"))):
            left.append(f"{name}{reason}")
        else:
            copied[name] = path
    return copied, left


def _entries(folder: Location) -> Iterator[tuple[str, Location]]:
    """What a folder has of a model beside its weights, in the order of names; a folder's name ends
    with a slash."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = f"{path.name}/" if path.is_dir() else path.name
        if path.name == _TEMPLATES and path.is_dir() and not path.is_symlink():
            yield from ((f"{name}{one.name}", one) for one in sorted(path.iterdir()))
        elif not _NOT_OF_A_MODEL.fullmatch(name):
            yield name, path


def _reason_to_leave(name: str, path: Location, folder: Location) -> str:
    """Why a file can't be copied; "" where it can."""
    if name.endswith("/"):
        return " (a folder)"
    if not path.is_file():
        return " (no regular file)"
    target, inside = path.resolve(), folder.resolve()
    # the Hub's cache has files in `blobs`, and links to them in `snapshots/REVISION`
    homes = [inside]
    if inside.parent.name == "snapshots":
        homes.append(inside.parent.parent / "blobs")
    if not any(target.is_relative_to(home) for home in homes):
        return " (a link that leads out of the folder)"
    if path.stat().st_size > MOST_BYTES:
        return f" (larger than {MOST_BYTES >> 20} MiB)"
    return ""


def _code_of(config: Mapping[str, Any]) -> Iterator[str]:
    """The files of code that `auto_map` of a config names; one of another repository has its name
    before two dashes, and lies there."""
    known: Any = config.get("auto_map")
    for said in known.values() if isinstance(known, dict) else ():
        for one in said if isinstance(said, list | tuple) else [said]:
            if isinstance(one, str) and "--" not in one and "." in one:
                yield f"{one.rpartition('.')[0].replace('.', '/')}.py"


def _json_of(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"


# ---- model folder
#
# A folder of a Hugging Face model that is to be written: its tensors, its files, and what lies
# beside the weights.


WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class OutgoingTensor:
    """A tensor, and where it goes: from byte `place` of `file` on. `state` is the source's that has
    its values, in `saved_dtype`."""

    name: str
    share: TensorPart
    state: str
    saved_dtype: str
    dtype: str
    shape: Ints
    file: str
    place: int

    @property
    def elems(self) -> int:
        return math.prod(self.shape)

    @property
    def is_rounded(self) -> bool:
        """Whether values may change with the dtype."""
        return self.dtype != self.saved_dtype and (self.saved_dtype, self.dtype) not in LOSSLESS


class Outgoing:
    """What is written of a source in `dtype` (None: each tensor in that of its training), into
    files of at most `max_bytes`. `tensors` are in the order of the twin's."""

    def __init__(self, source: Manifest, twin: Twin, dtype: str | None, max_bytes: int) -> None:
        self.twin, self.dtype = twin, dtype or training_dtype(source)
        held = {share.param: weight_of(source, share.param) for share in twin.shares.values()}
        dtypes = {n: self._dtype_of(twin.specs[n], have, dtype) for n, (_, have) in held.items()}
        rows = [
            (name, dtypes[share.param], share.stored_shape(twin.specs[share.param]))
            for name, share in twin.shares.items()
        ]
        # peft reads an adapter from one file
        most = sys.maxsize if twin.is_adapter else max_bytes
        self.files = shards_of(_whole_tensors(rows, twin.shares), most, twin.weights_file)
        self.tensors = self._placed(rows, held)

    def _dtype_of(self, spec: ParamSpec, saved: str, asked: str | None) -> str:
        """The dtype in which a parameter is written that was `saved` in one, as `save_pretrained`
        of a model that is loaded in the dtype that is asked for has it."""
        if saved not in WEIGHT_DTYPES:
            return saved
        if spec.name in self.twin.float32:
            return "float32"
        if spec.kind == "buffer":  # a family's are in fp32 whatever the weights are
            return "float32" if self.twin.family else saved
        return asked or (spec.dtype if spec.dtype in WEIGHT_DTYPES else self.dtype)

    def _placed(
        self, rows: Sequence[Tensor], held: Mapping[str, tuple[str, str]]
    ) -> list[OutgoingTensor]:
        """The rows with their places in the files; `held` says state and dtype in the source."""
        places = {n: (file.name, at) for file in self.files for n, at in file.places.items()}
        out: list[OutgoingTensor] = []
        for name, dtype, shape in rows:
            share = self.twin.shares[name]
            within = share.slice_of
            file, at = places[name if within is None else within.tensor]
            at += (0 if within is None else within.first_elem(shape)) * ITEMSIZE[dtype]
            out.append(OutgoingTensor(name, share, *held[share.param], dtype, shape, file, at))
        return out

    @property
    def is_loadable(self) -> bool:
        """Whether the folder says what its model is."""
        return self.twin.config is not None

    @property
    def notes(self) -> list[str]:
        """What the class computes a little otherwise, and what the folder lacks."""
        if self.is_loadable:
            return [*self.twin.notes]
        reader = "peft" if self.twin.is_adapter else "transformers"
        file = self.twin.config_file
        return [
            *self.twin.notes,
            f"no {file} was found, which {reader} needs: export again with the folder of the model "
            "as --config (Python: config=)",
        ]

    def output(
        self,
        source: Source,
        beside: Beside,
        publish: Callable[[Location], object],
        replaces: bool = False,
    ) -> FolderOutput:
        writer = _Slots(source.manifest_of(0), self.twin)
        files = tuple(self._layout(file, writer) for file in self.files)
        part = writer.part()
        return FolderOutput(
            (part,), files, partial(self.finish, beside=beside), publish, "export", replaces
        )

    def exported(
        self,
        folder: Location,
        mesh: str,
        sizes: tuple[int, int, float],
        verified: bool,
        notes: Sequence[str],
        seen: str,
    ) -> Exported:
        """What an export did: bytes read and written, and seconds; `notes` are the source's, `seen`
        says what was compared."""
        counts = len(self.files), sum(len(file.places) for file in self.files)
        said = (*notes, *self.notes)
        where, is_all = (str(folder), mesh, self.dtype), self.twin.is_complete
        return Exported(*where, *counts, *sizes, verified, said, self.is_loadable, seen, is_all)

    def _layout(self, file: WeightFile, slots: "_Slots") -> FileLayout:
        """One file: the pieces in the order of their bytes."""
        tensors = sorted(self.tensors, key=lambda tensor: tensor.place)
        pieces = [slots.piece(tensor) for tensor in tensors if tensor.file == file.name]
        blobs = [(0, partial(bytes, file.header))]
        return FileLayout(file.name, file.size_bytes, pieces, blobs)

    def finish(self, folder: Location, beside: Beside) -> None:
        """The index, and what else lies beside the weights. Raises OSError."""
        rows = [(one.name, one.dtype, one.shape) for one in self.tensors]
        params = {one.share.param for one in self.tensors}
        elems = sum(self.twin.specs[name].elems for name in params)
        for name, what in {**index_of(self.files, rows, elems), **beside.files}.items():
            (folder / name).parent.mkdir(exist_ok=True)
            if isinstance(what, str):
                (folder / name).write_text(what, encoding="utf-8")
            else:
                (folder / name).write_bytes(what.read_bytes())
        if not isinstance(folder, StorePath):  # there it makes the folder whole
            (folder / LIST_FILE).write_text(_json(_sizes(folder)), encoding="utf-8")


def _whole_tensors(rows: Sequence[Tensor], shares: Mapping[str, TensorPart]) -> list[Tensor]:
    """The tensors of a folder, of which some rows are slices."""
    out: dict[str, Tensor] = {}
    for name, dtype, shape in rows:
        within = shares[name].slice_of
        whole = name if within is None else within.tensor
        out[whole] = whole, dtype, shape if within is None else within.whole_shape(shape)
    return list(out.values())


class _Slots:
    """The one part of a folder, as its pieces are counted: each has a buffer of its own."""

    def __init__(self, source: Manifest, twin: Twin) -> None:
        self._source, self._twin = source, twin
        self._rows: list[tuple[TensorPart, str]] = []
        self._wants: list[Want] = []
        self._names: list[str] = []

    def piece(self, tensor: OutgoingTensor) -> FilePiece:
        slot = Slot(len(self._rows), (), 0, VALUE)
        self._rows.append((tensor.share, tensor.dtype))
        self._wants.append((slot, state_in(self._source, tensor.state)))
        self._names.append(tensor.name)
        return FilePiece(0, slot, tensor.elems, tensor.dtype, tensor.place)

    def part(self) -> SinkPart:
        target = weights_manifest(self._twin.specs, self._rows)
        return SinkPart(target, tuple(self._wants), NARROW, names=tuple(self._names))


def training_dtype(manifest: Manifest) -> str:
    """That of the trained parameters, else of the first one."""
    trained = [spec.dtype for spec in manifest.params if spec.kind == "trainable"]
    return (trained or [spec.dtype for spec in manifest.params] or ["float32"])[0]


def _json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"


def _sizes(folder: Location) -> dict[str, int]:
    """Bytes of each file of a folder, and of the folders in it."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if not path.is_dir() and path.name != CLAIM
    }


def refuse_foreign(folder: Location) -> bool:
    """Whether there is a folder that may be replaced. Raises UsageError for one that no export
    wrote, or that holds anything else by now."""
    if not (folder.exists() or folder.is_symlink()):
        return False
    listed: Any = None
    if not folder.is_symlink() and (folder / LIST_FILE).is_file():
        listed = read_json(folder / LIST_FILE)
    there = _sizes(folder)
    there.pop(LIST_FILE, None)
    if listed is None or there != listed:
        other = sorted(name for name in there if (listed or {}).get(name) != there[name])
        raise UsageError(
            "the output is no folder that an export wrote as it is",
            file=folder,
            expected=f"the files that its {LIST_FILE} lists" if listed else LIST_FILE,
            found=some_of(other) or "fewer files",
            fix="give another name, or remove it",
        )
    return True


def publish(aside: Location, folder: Location, force: bool = False) -> None:
    """Gives a folder that is on disk its name; with `force` in the place of an earlier export.
    Raises OSError, UsageError, StoreError."""
    if isinstance(aside, StorePath):
        sizes = _sizes(aside)
        attempt_at(aside).commit(_json(sizes).encode(), sizes, LIST_FILE)
        return
    if not (force and refuse_foreign(folder)):
        require_free(folder)
    output_folder.give_name(aside, output_folder.Syncs())


# ---- export
#
# A checkpoint of any mesh as a folder of a Hugging Face model, straight from its own files.
#
# The folder is a mesh more, of one rank, with other names: what is written is planned and proved
# as a whole before the first byte, then moved window by window through a buffer of bounded size,
# whatever the model, by as many threads as there are cores. The bytes depend on the model alone,
# not on the mesh that saved it. The folder appears whole or not at all.


_OF_FILES = ("tag", "rules", "family", "verify", "force", "allow", "ranks")
LIVE_EXPORT = "ucp_export_hf"  # of an attached engine: what writes its weights


def export_hf(
    src: Any,
    dst: str | Path,
    *,
    dtype: Any = None,
    max_shard_size: str | int = "5GB",
    tag: str | None = None,
    rules: str | Path | None = None,
    config: str | Path | None = None,
    family: str = "",
    tokenizer: str | Path | None = None,
    verify: bool = False,
    force: bool = False,
    allow: Collection[str] = (),
    ranks: bool = False,
    progress: Progress | None = None,
) -> Exported:
    """Writes the weights of a checkpoint as a folder that
    `AutoModelForCausalLM.from_pretrained` takes; of a model that peft wrapped, the adapter, in
    peft's format.

    Args:
        src: The checkpoint: a tag folder, or the folder above it. Or an attached engine, whose
            weights in memory are written; collective, and only with `dtype`, `max_shard_size`,
            `config` and `tokenizer`.
        dst: The new folder. It appears whole or not at all.
        dtype: That of the weights, such as "bf16" or `torch.float32`, to which the fp32 master
            weights are rounded. Default: that of each one's training. Buffers keep theirs, and
            what the model's class keeps in float32 is written so.
        max_shard_size: The most bytes of a file, such as "5GB".
        tag: The tag in `src`, where it is not the newest.
        rules: A file of rules (docs/reference/rules.md), where no family knows the layouts.
        config: The model's config.json (an adapter's adapter_config.json), or its folder. Default:
            what the checkpoint says, else the file in the tag folder or in the one above.
        family: The model family, where neither the checkpoint nor its config says one.
        tokenizer: A folder whose tokenizer files are copied. Default: that of the config.
        verify: Whether to read the files back and compare them with the source, bit by bit.
        force: Whether to replace a folder that an earlier export wrote, and nobody changed.
        allow: What may happen besides exact copies and rounding: "mean", "stale", "weights".
        ranks: Whether all ranks write the folder of a checkpoint together, as of `convert`.
        progress: `progress(done, total)` counts bytes; with `ranks` those of this rank.

    Returns:
        What was done. `loadable` is false where no config was found: the weights are there, and
        no library loads them without one. `complete` is false where `from_pretrained` would draw
        tensors at random, or an adapter lacks what was trained beside it.

    Raises:
        UsageError: For arguments that can't be.
        SaveError: Where the output can't be written; nothing is left of it.
        UcpError: Where the weights can't be carried over exactly.

    Example:
        >>> import megatron_ucp as ucp
        >>> assert ucp.export_hf("runs/llama", "hf", dtype="bf16", verify=True).loadable
    """
    asked = _Asked(dtype, max_shard_size, config, tokenizer, tag, rules, family)
    asked = replace(asked, verify=verify, force=force, allow=allow, ranks=ranks)
    if hasattr(src, LIVE_EXPORT):
        return _of_engine(src, dst, asked, progress)
    if hasattr(src, "save_checkpoint"):
        raise UsageError(
            "this engine is not attached",
            expected="an engine that ucp.attach was given, or the path of a checkpoint",
            found=type(src).__qualname__,
            fix="call ucp.attach(engine) first",
        )
    return _of_files(src, dst, asked, progress=progress)


@dataclass(frozen=True)
class _Asked:
    """What an export is asked for; see `export_hf`."""

    dtype: Any
    max_shard_size: str | int
    config: str | Path | None
    tokenizer: str | Path | None
    tag: str | None
    rules: str | Path | None
    family: str
    verify: bool = False
    force: bool = False
    allow: Collection[str] = ()
    ranks: bool = False


@say.shown("export-hf", ends=True)
def _of_files(
    src: str | Path, dst: str | Path, asked: _Asked, *, progress: Progress | None = None
) -> Exported:
    started, ranks = time.perf_counter(), ranks_of(asked.ranks)
    with as_rank_error("the export"), ExitStack() as opened:
        with agree.together(ranks):
            folder = location(plain_path(dst))
            dtype = check_output(folder, asked.dtype, asked.allow, asked.force)
            asked = replace(asked, dtype=dtype, max_shard_size=parse_size(asked.max_shard_size))
            told = CallerModel(names=_pipe_names(asked), weights="weights" in asked.allow)
            source = opened.enter_context(open_checkpoint(src, asked.tag, asked.rules, told))
            check_source(source, folder, asked.allow)
            prepared = _prepared(source, asked)
            values, written = _values(prepared, asked.ranks), _Written(prepared, folder, asked)
            output = prepared.out.output(values, prepared.beside, written.publish, asked.force)
        require_same(output, ranks, dst=folder, dtype=prepared.out.dtype)
        run, sink = TransferRun(progress=progress), FolderSink(folder, output, asked.ranks)
        transfer(values, sink, frozenset(asked.allow), run=run, alone=not asked.ranks)
        read_bytes, written_bytes = agree.total(values.read_bytes, run.done, ranks=ranks)
        seen = "read back and equal" if asked.verify else checked(prepared.source)
        sizes = read_bytes, written_bytes, time.perf_counter() - started
        mesh = str(source.manifest.written_on)
        return prepared.out.exported(folder, mesh, sizes, asked.verify, prepared.notes, seen)


def _pipe_names(asked: _Asked) -> Mapping[str, str] | None:
    """Names in a pipeline of the model that the config says. A family that is not asked for is that
    of any model with such a config: what it does not compute, transformers may."""
    if asked.family:
        return pipe_names(asked.family, asked.config)
    with suppress(UnsupportedError):
        return pipe_names(family_of(asked.config), asked.config)
    return None


@dataclass(frozen=True)
class _Prepared:
    """What is read, and what is written. `readable` are the source's masters, or the weights that
    the model computed with."""

    source: Checkpoint
    readable: Readable
    out: Outgoing
    beside: Beside
    notes: Sequence[str]


def _prepared(source: Checkpoint, asked: _Asked) -> _Prepared:
    """Finds the config, and decides under which names and in which files tensors are written."""
    found = config_for(source.manifest, asked.config, location(str(source.folder)))
    given = None if found is None else found.tree
    notes, family = _notes(source, given is None), asked.family
    if found is not None and asked.config is None:
        notes.append(f"the model's config was found in {found.folder}")
    if found is not None and needs_family(source.manifest):
        family = family or found.family
    chosen = asked.dtype or training_dtype(source.manifest)
    twin = twin_of(source.manifest, given, family, chosen, str(source.folder))
    of_model = None if found is None else found.folder
    beside = beside_weights(twin, asked.tokenizer, of_model)
    notes += beside.notes
    out = Outgoing(source.manifest, twin, asked.dtype, int(asked.max_shard_size))
    return _Prepared(source, _readable(source, out, asked.allow), out, beside, notes)


def _values(prepared: _Prepared, ranks: bool) -> FileSource:
    source, file = prepared.source, str(prepared.source.folder)
    is_copy = prepared.readable is not source
    return source_of(prepared.readable, file, source if is_copy else None, ranks)


def _of_engine(engine: Any, dst: str | Path, asked: _Asked, progress: Progress | None) -> Exported:
    """The export of a live engine. Raises UsageError for what only files have."""
    given = [name for name in _OF_FILES if getattr(asked, name)]
    if given := [*given, *["progress"] * (progress is not None)]:
        raise UsageError(
            "the export of a live engine does not take this",
            expected="dtype, max_shard_size, config, tokenizer",
            found=", ".join(given),
            fix="leave it out, or save and export the checkpoint",
        )
    how = asked.dtype, asked.max_shard_size, asked.config, asked.tokenizer
    return getattr(engine, LIVE_EXPORT)(plain_path(dst), *how)


def check_output(
    folder: Location, dtype: Any, allow: Collection[str], force: bool = False
) -> str | None:
    """The name of the dtype. Raises UsageError for arguments of an export that can't be."""
    require_plain(folder, lambda: force and refuse_foreign(folder))
    name = None if dtype is None else dtype_name(dtype)
    if name not in (None, *WEIGHT_DTYPES):
        raise UsageError(
            "weights have no such dtype",
            expected=", ".join(WEIGHT_DTYPES),
            found=name,
            fix="give one of these",
        )
    check_words(allow, {EXPORT})
    return name


def _notes(source: Checkpoint, alone: bool) -> list[str]:
    """What the source has to say of an export; `alone`: no config says what its model is."""
    padding = unknown_padding(source.manifest) if alone else []
    copies = require_one_copy(source, source.manifest.by_name, None)
    return [*source.notes, *copies, *replica_notes(source.manifest), *padding]


def _readable(source: Checkpoint, out: Outgoing, allow: Collection[str]) -> Readable:
    """What an export reads: the masters, or where these would be rounded to the dtype of training
    the weights that the model computed with, which were rounded so already."""
    masters, specs = [one for one in out.tensors if one.state == MASTER], source.manifest.by_name
    # of what the class keeps in float32 in a narrower run the masters are written
    are_copies = all(specs[one.share.param].dtype == one.dtype for one in masters)
    if not any(one.is_rounded for one in masters) or not are_copies or "stale" in allow:
        return source
    return source.copies() or source


class _Written:
    """The folder of an export, once its tensors are there: read back where that is asked for, then
    named."""

    def __init__(self, prepared: _Prepared, folder: Location, asked: _Asked) -> None:
        self.prepared, self.folder, self.asked = prepared, folder, asked

    def publish(self, aside: Location) -> None:
        """Raises SaveError where what was read back is something else, UsageError for a name that
        was taken meanwhile."""
        if self.asked.verify:
            self._verify(aside)
        publish(aside, self.folder, self.asked.force)

    def _verify(self, written: Location) -> None:
        """Reads the files back under the names of the source, and compares every parameter with the
        source's masters, rounded as the files are."""
        twin = self.prepared.out.twin
        told = twin.told if twin.family or twin.is_adapter else None
        if told is None:
            like = self.prepared.source.manifest
            told = CallerModel(like=like, tensors=lambda _: twin.shares)
        with unfinished_shown(written), open_checkpoint(written, told=told) as found:
            differences = weight_differences(self.prepared.source, found, among=twin.specs)
        if differences:
            copies = self.prepared.readable is not self.prepared.source
            raise _not_as_written(written, differences, copies)


def _not_as_written(
    written: Location, differences: Sequence[Difference], copies: bool
) -> SaveError:
    """`copies`: not the masters were written, with which the comparison is."""
    first, fix = differences[0], "check the disk and the memory of this machine, then try again"
    if copies:
        fix += '; were the masters changed on purpose: --allow stale (Python: allow={"stale"})'
    return SaveError(
        "what was read back is not what the checkpoint holds; nothing is left of it",
        file=written,
        parameter=first.parameter,
        expected=first.a,
        found=f"{first.what}: {first.b}; {len(differences)} differences",
        fix=fix,
        id="",
    )


# ---- export live
#
# A live engine as a folder of a Hugging Face model, from the memory of all ranks.


def export_live(
    engine: Engine, out: Outgoing, folder: Location, beside: Beside, run: TransferRun
) -> Exported:
    """Writes the folder, whole or not at all. Collective; every rank sees the same disk. Raises a
    UcpError on every rank."""
    started, manifest = time.perf_counter(), engine.manifest
    source = SharedMemories(str(folder), engine)
    output = out.output(source, beside, partial(publish, folder=folder))
    transfer(source, GatheredFolder(folder, output), run=run)
    sizes = 0, run.done, time.perf_counter() - started
    notes = [*replica_notes(manifest), *beside.notes]
    return out.exported(folder, str(manifest.mesh), sizes, False, notes, "from memory")
