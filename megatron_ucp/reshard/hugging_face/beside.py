"""What lies beside the weights of an exported model: config.json, and the files that the model's
own folder has for its tokenizer, its processor, generating, and code of its own.

A file is copied where its kind is one that such folders have and that holds no weights and nothing
of a training. Every other file is named in a note, so that nothing is left out in silence.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ucp.errors import NotFoundError, UcpError, some_of
from megatron_ucp.formats.hugging_face.checkpoint import (
    CONFIG_FILE,
    read_json,
)
from megatron_ucp.reshard.arguments import plain_path
from megatron_ucp.reshard.hugging_face.twin import Twin

LIST_FILE = "ucp_export.json"  # what an export wrote: name of the file -> bytes
MOST_BYTES = 2**28  # of a file that is copied; the largest tokenizers have 40 MB
_MOST_NAMED = 40
_FOLDERS = ("additional_chat_templates",)  # what transformers itself puts into a folder of its own

# Written anew by the export, or of weights in this or another program's form.
_WEIGHTS = re.compile(
    r"(?:adapter_)?config\.json|adapter_model\..+|.+\.index\.json|"
    r".+\.(?:safetensors|bin|pt|pth|ckpt|gguf|ggml|h5|msgpack|onnx|onnx_data|npz|npy|tflite|nemo)"
)
# Of a run, a trainer or DeepSpeed.
_TRAINING = re.compile(
    r"latest(?:_universal|_checkpointed_iteration\.txt)?|zero_to_\w+\.py|trainer_state\.json|"
    r"(?:\w+_)?(?:results|metrics)\.json|ds_config.*\.json|ucp_.+\.json|.+\.(?:pkl|pickle|log)|"
    r"events\.out\.tfevents.*"
)
# Kinds of files that tokenizers, processors and model cards have.
_COPIED = re.compile(
    r".+\.(?:json|txt|model|jinja|jinja2|tiktoken|bpe|spm|vocab|merges|codes|tsv|csv|md|proto)|"
    r"LICEN[CS]E.*|NOTICE.*|README.*|USAGE.*"
)
_CODE = re.compile(r".+\.py")
_TOKENIZER = re.compile(
    r"tokenizer.*|.*vocab.*|merges\.txt|special_tokens_map\.json|added_tokens\.json|"
    r"chat_template\..+|.+\.(?:model|tiktoken|bpe|spm|codes)|normalizer\.json"
)


@dataclass(frozen=True)
class Beside:
    """`files` are texts, or files to copy, by their names in the new folder; `notes` say what of
    the model's folder is not among them."""

    files: Mapping[str, str | Path]
    notes: tuple[str, ...] = ()


def beside_weights(twin: Twin, tokenizer: str | Path | None, *models: str | Path | None) -> Beside:
    """config.json, and what is copied of the model's folders: the first one that has a file counts,
    and the first one that has a tokenizer counts for all of it, as files of two tokenizers would be
    a third one. `tokenizer` is a folder that comes before them. Raises NotFoundError where that has
    no tokenizer."""
    files: dict[str, str | Path] = {}
    left: list[str] = []
    for folder in (tokenizer, *models):
        if folder is None:
            continue
        found, more = _copied(Path(plain_path(folder)))
        if folder is tokenizer and not any(map(_TOKENIZER.fullmatch, found)):
            raise NotFoundError(
                "the folder that was given for the tokenizer has no file of one",
                file=tokenizer,
                expected="tokenizer.json, tokenizer_config.json, tokenizer.model, ...",
                found="none" if Path(folder).is_dir() else "no such folder",
                fix="give --tokenizer (Python: tokenizer=) the folder that its save_pretrained "
                "wrote, or leave it out",
                id="",
            )
        if any(map(_TOKENIZER.fullmatch, files)):
            found = {name: path for name, path in found.items() if not _TOKENIZER.fullmatch(name)}
        files = {**found, **files}
        left += more
    if twin.config is not None:
        files[twin.config_file] = _json(twin.config)
    if twin.family:
        tokens = {key: (twin.config or {}).get(key) for key in ("bos_token_id", "eos_token_id")}
        files.setdefault("generation_config.json", _json({"_from_model_config": True, **tokens}))
    left = [*dict.fromkeys(left)]
    notes = [f"not copied: {some_of(left, _MOST_NAMED)}"] if left else []
    return Beside(files, (*notes, *_code_that_lacks(twin, files)))


def _copied(folder: Path) -> tuple[dict[str, str | Path], list[str]]:
    """The files of a folder that are copied, by their names there, and the names of others, with
    the reason where the name does not show it. Weights and training states are in neither."""
    copied: dict[str, str | Path] = {}
    left: list[str] = []
    code: dict[str, str | Path] = {}
    for name, path in _entries(folder):
        if reason := _reason_to_leave(name, path, folder):
            left.append(f"{name}{reason}")
        elif _CODE.fullmatch(name):
            code[name] = path
        elif _COPIED.fullmatch(name):
            copied[name] = path
        else:
            left.append(name)
    # a script of the training, where no config says that the model has code of its own
    if code and _says_code(folder):
        return {**copied, **code}, left
    return copied, sorted([*left, *code])


def _entries(folder: Path) -> Iterator[tuple[str, Path]]:
    """What of a folder is no weight, no training state and not hidden, in the order of names; of
    the folders in it those alone that transformers writes are entered."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") or path.name == "__pycache__":
            continue
        if path.is_dir():
            if path.name in _FOLDERS and not path.is_symlink():
                yield from ((f"{path.name}/{one.name}", one) for one in sorted(path.iterdir()))
            elif not _is_training_folder(path):
                yield f"{path.name}/", path
        elif not (_WEIGHTS.fullmatch(path.name) or _TRAINING.fullmatch(path.name)):
            yield path.name, path


def _is_training_folder(path: Path) -> bool:
    """Whether a folder is a tag, or a trainer's checkpoint, which has no file of the model."""
    return bool(re.fullmatch(r"(global_step|checkpoint-|iter_|epoch|step)\w*", path.name)) or any(
        one.name.endswith("_states.pt") or one.name in ("latest", ".metadata")
        for one in path.iterdir()
    )


def _reason_to_leave(name: str, path: Path, folder: Path) -> str:
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


def _says_code(folder: Path) -> bool:
    """Whether a config of the folder names code beside it."""
    return any(True for path in folder.glob("*config.json") for _ in _code_of(_tree(path)))


def _tree(path: Path) -> Mapping[str, Any]:
    """A config, or nothing of what is none: others say what is wrong with it."""
    try:
        return read_json(path) if path.is_file() else {}
    except UcpError:
        return {}


def _code_of(config: Mapping[str, Any]) -> Iterator[str]:
    """The files of code that `auto_map` of a config names; one of another repository has its name
    before two dashes, and lies there."""
    known: Any = config.get("auto_map")
    for said in known.values() if isinstance(known, dict) else ():
        for one in said if isinstance(said, list | tuple) else [said]:
            if isinstance(one, str) and "--" not in one and "." in one:
                yield f"{one.rpartition('.')[0].replace('.', '/')}.py"


def _code_that_lacks(twin: Twin, files: Mapping[str, object]) -> list[str]:
    """A note of the code that config.json names and the new folder lacks."""
    lost = sorted({*_code_of(twin.config or {})} - {*files})
    if not lost:
        return []
    return [
        f"auto_map of {CONFIG_FILE} names {some_of(lost)}, which the export lacks: export with the "
        "model's folder as --config (Python: config=)"
    ]


def _json(tree: Mapping[str, Any]) -> str:
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"
