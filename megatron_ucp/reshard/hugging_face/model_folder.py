"""A folder of a Hugging Face model that is to be written: its tensors, its files, and what lies
beside the weights."""

import itertools
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import LOSSLESS, Slot
from megatron_ucp.core.shares import Share
from megatron_ucp.core.states import VALUE
from megatron_ucp.errors import NotFoundError, UsageError, some_of
from megatron_ucp.formats import durable
from megatron_ucp.formats.hugging_face.checkpoint import read_json
from megatron_ucp.formats.hugging_face.shards import index_of, shards_of
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.reshard.arguments import plain_path
from megatron_ucp.reshard.diff import weight_of
from megatron_ucp.reshard.hugging_face.twin import Twin
from megatron_ucp.reshard.output_folder import require_free

WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")
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
LIST_FILE = "ucp_export.json"  # what an export wrote: name of the file -> bytes
Beside = Mapping[str, str | Path]  # what lies beside the weights: a text, or a file to copy


@dataclass(frozen=True)
class OutgoingTensor:
    """A tensor, and where it goes: from byte `place` of `file` on. `state` is the source's that has
    its values, in `saved_dtype`."""

    name: str
    share: Share
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


@dataclass(frozen=True)
class OutgoingPart:
    """What is read of a tensor in a slot of its own: all of it, or a tile."""

    slot: Slot
    share: Share
    elems: int


Tiles = list[OutgoingPart]  # of a run of rows, side by side


class Outgoing:
    """What is written of a source in `dtype`, into files of at most `max_bytes`. `tensors` are in
    the order of the twin's."""

    def __init__(self, source: Manifest, twin: Twin, dtype: str, max_bytes: int) -> None:
        self.twin, self.dtype = twin, dtype
        held = {share.param: weight_of(source, share.param) for share in twin.shares.values()}
        dtypes = {n: dtype if have in WEIGHT_DTYPES else have for n, (_, have) in held.items()}
        rows = [
            (name, dtypes[share.param], share.stored_shape(twin.specs[share.param]))
            for name, share in twin.shares.items()
        ]
        # peft reads an adapter from one file
        most = sys.maxsize if twin.is_adapter else max_bytes
        self.files = shards_of(rows, most, twin.weights_file)
        places = {n: (file.name, at) for file in self.files for n, at in file.places.items()}
        self.tensors = [
            OutgoingTensor(
                name, twin.shares[name], *held[twin.shares[name].param], own, shape, *places[name]
            )
            for name, own, shape in rows
        ]
        self.total_bytes = sum(one.elems * ITEMSIZE[one.dtype] for one in self.tensors)

    @cached_property
    def in_order(self) -> list[int]:
        """The numbers of the tensors in the order of the files' bytes."""
        at = {file.name: number for number, file in enumerate(self.files)}
        numbers = range(len(self.tensors))
        return sorted(numbers, key=lambda n: (at[self.tensors[n].file], self.tensors[n].place))

    @property
    def largest_first(self) -> list[int]:
        """The order in which threads, or ranks, share them: the last ones hardly wait for each
        other."""
        return sorted(self.in_order, key=lambda number: -self.tensors[number].elems)

    @property
    def is_loadable(self) -> bool:
        """Whether the folder says what its model is."""
        return self.twin.config is not None

    @property
    def notes(self) -> list[str]:
        """What the folder lacks."""
        if self.is_loadable:
            return []
        reader = "peft" if self.twin.is_adapter else "transformers"
        file = self.twin.config_file
        return [
            f"no {file} was found, which {reader} needs: export again with the folder of the model "
            "as --config (Python: config=)"
        ]

    def parts(self, most_bytes: int, count: int) -> list[list[Tiles]]:
        """What each tensor is read as, in slots that follow each other: all of it, but for one that
        the source stores transposed and that has more than `most_bytes`. Of that, runs of rows in
        `count` tiles of about as many bytes. (Each run reads what lies between its columns, too.)
        """
        slots = (Slot(buffer, (), 0, VALUE) for buffer in itertools.count())
        out: list[list[Tiles]] = []
        for one in self.tensors:
            size_bytes = one.elems * ITEMSIZE[one.dtype]
            runs = [[(one.share, one.elems)]]
            if one.share.order is not None and size_bytes > most_bytes and not one.share.stacked:
                spec = self.twin.specs[one.share.param]
                rows = min(-(-size_bytes // (most_bytes * count)), one.shape[0])
                tiles = one.share.tiles(spec, rows, min(count, one.shape[-1]))
                runs = [[(s, math.prod(s.stored_shape(spec))) for s in run] for run in tiles]
            out.append([[OutgoingPart(next(slots), *part) for part in run] for run in runs])
        return out

    def begin(self, folder: Path) -> None:
        """Every file with its header, as long as it will be. Raises OSError."""
        for one in self.files:
            with open(folder / one.name, "xb") as file:
                file.write(one.header)
                file.truncate(one.size_bytes)

    def finish(self, folder: Path, beside: Beside) -> None:
        """The index, and what else lies beside the weights. Raises OSError."""
        rows = [(one.name, one.dtype, one.shape) for one in self.tensors]
        params = {one.share.param for one in self.tensors}
        elems = sum(math.prod(self.twin.specs[name].shape) for name in params)
        for name, what in {**index_of(self.files, rows, elems), **beside}.items():
            if isinstance(what, Path):
                shutil.copyfile(what, folder / name)
            else:
                (folder / name).write_text(what, encoding="utf-8")
        written = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
        (folder / LIST_FILE).write_text(_json(written), encoding="utf-8")


def training_dtype(manifest: Manifest) -> str:
    """That of the trained parameters, else of the first one."""
    trained = [spec.dtype for spec in manifest.params if spec.kind == "trainable"]
    return (trained or [spec.dtype for spec in manifest.params] or ["float32"])[0]


def beside_weights(
    twin: Twin, tokenizer: str | Path | None, model: str | Path | None = None
) -> Beside:
    """config.json, and the tokenizer's files of its folder, else of the `model`'s where it has
    some. Raises NotFoundError where the tokenizer's has none."""
    out: dict[str, str | Path] = {}
    folder = model if tokenizer is None else plain_path(tokenizer)
    for name in COPIED_FILES if folder is not None else ():
        if (path := Path(folder or "") / name).is_file():
            out[name] = path
    if tokenizer is not None and not out:
        raise NotFoundError(
            "the folder that was given for the tokenizer has no file of one",
            file=tokenizer,
            expected=", ".join(COPIED_FILES[1:4]) + ", ...",
            found="none" if Path(tokenizer).is_dir() else "no such folder",
            fix="give --tokenizer (Python: tokenizer=) the folder that its save_pretrained wrote, "
            "or leave it out",
            id="",
        )
    if twin.config is not None:
        out[twin.config_file] = _json(twin.config)
    if twin.family:
        tokens = {key: (twin.config or {}).get(key) for key in ("bos_token_id", "eos_token_id")}
        out.setdefault("generation_config.json", _json({"_from_model_config": True, **tokens}))
    return out


def _json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"


def refuse_foreign(folder: Path) -> bool:
    """Whether there is a folder that may be replaced. Raises UsageError for one that no export
    wrote, or that holds anything else by now."""
    if not os.path.lexists(folder):
        return False
    listed: Any = None
    if not folder.is_symlink() and (folder / LIST_FILE).is_file():
        listed = read_json(folder / LIST_FILE)
    there = {p.name: p.stat().st_size for p in folder.iterdir()} if folder.is_dir() else {}
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


def publish(aside: Path, folder: Path, force: bool = False) -> None:
    """Gives a folder that is on disk its name; with `force` in the place of an earlier export.
    Raises OSError, UsageError."""
    before = folder.with_name(f".{folder.name}.replaced")
    if force and refuse_foreign(folder):
        shutil.rmtree(before, ignore_errors=True)
        os.rename(folder, before)
    require_free(folder)
    os.rename(aside, folder)
    durable.Syncs()(folder.absolute().parent)
    if force:
        shutil.rmtree(before, ignore_errors=True)
