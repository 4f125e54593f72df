"""Which config.json, or adapter_config.json, says what the model of a checkpoint is."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ucp.core.manifest import RECORDED, Manifest
from megatron_ucp.errors import NotFoundError, UcpError, UsageError
from megatron_ucp.families import families
from megatron_ucp.families.arguments import with_model
from megatron_ucp.families.hugging_face import HuggingFace
from megatron_ucp.formats.hugging_face.checkpoint import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    read_json,
)
from megatron_ucp.reshard.hugging_face.adapter import adapter_of

# A key that the file has where it is of transformers, or of peft: other programs write a
# config.json, too.
_KEYS = {CONFIG_FILE: "model_type", ADAPTER_CONFIG_FILE: "peft_type"}


def twins() -> dict[str, HuggingFace]:
    """The twins in transformers by the names of their families."""
    found = families().values()
    return {one.name: one.hugging_face for one in found if one.hugging_face is not None}


@dataclass(frozen=True)
class FoundConfig:
    """A config, and the folder that it lies in, where the tokenizer's files may lie too."""

    tree: Mapping[str, Any]
    folder: Path

    @property
    def family(self) -> str:
        """The first family of megatron-core's models whose twin in transformers has this config;
        empty where there is none."""
        kind = self.tree.get("model_type")
        return next((name for name, twin in twins().items() if twin.has(kind)), "")


def config_at(given: str | Path, name: str = CONFIG_FILE) -> FoundConfig:
    """The config that a user named, by the file or by its folder. Raises UsageError for a path that
    is none, NotFoundError, DamagedFileError."""
    _check_path(given, name)
    path = Path(given)
    file = path / name if path.is_dir() else path
    if not file.is_file():
        raise NotFoundError(
            f"there is no {name} here",
            file=path,
            expected=f"a folder with {name}, or that file",
            found="a folder without it" if path.is_dir() else "no such file or folder",
            fix="give the folder of the model, as save_pretrained wrote it (--config; Python: "
            "config=)",
            id="no-config",
        )
    return FoundConfig(read_json(file), file.parent)


def _check_path(given: Any, name: str) -> None:
    if not isinstance(given, str | Path):
        raise UsageError(
            "this is no path of a config",
            expected=f"a folder with {name}, or that file",
            found=repr(given)[:200],
            fix="give the path of the folder (--config; Python: config=)",
        )


def config_for(
    manifest: Manifest, given: str | Path | None, folder: Path | None
) -> FoundConfig | None:
    """The config of a checkpoint's model: the one that was given; else, where the checkpoint does
    not say its model, what lies in its `folder` or in the one above, where trainers write it; None
    where there is none. Raises as `config_at`."""
    manifest = with_model(manifest)
    is_adapter = not manifest.family and adapter_of(manifest, str(folder)) is not None
    name = ADAPTER_CONFIG_FILE if is_adapter else CONFIG_FILE
    if given is not None:
        return config_at(given, name)
    if folder is None or (manifest.family and manifest.run.get(RECORDED)):
        return None
    for place in (folder, folder.absolute().parent):
        if (place / name).is_file():
            found = config_at(place, name)
            if _KEYS[name] in found.tree:
                return found
    return None


def family_of(given: str | Path | None) -> str:
    """The family of a config that was given; empty where it says none. Raises UsageError for what
    is no path."""
    if given is not None:
        _check_path(given, CONFIG_FILE)
    try:
        return "" if given is None else config_at(given).family
    except UcpError:  # whoever needs it reads it again
        return ""
