"""Whether a live model computes what the model in a checkpoint did, where no tensor's shape shows
it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import RECORDED
from megatron_ucp.errors import ModelMismatchError
from megatron_ucp.families.architecture import architecture_of
from megatron_ucp.families.arguments import with_model
from megatron_ucp.families.base import Model
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.hugging_face.checkpoint import CONFIG_FILE, read_json
from megatron_ucp.reshard.hugging_face.twin import check_config, other_settings, settings_of

_HEADS = ("heads", "groups", "head_dim")  # of a family's sizes
CONFIG = "config"  # of what a manifest records of a model of transformers
_OF_THE_RUN = ("positions",)  # the longest sequence may change from one run to the next


def check_model(source: Checkpoint, model: Model, module: Any) -> None:
    """Raises ModelMismatchError for a Hugging Face folder of a model that computes something else,
    and for other attention heads than those of the run that saved a checkpoint."""
    if source.manifest.keeper == Keeper.WEIGHTS:
        check_config(source.folder, model, architecture_of(module))
    own = asdict(model.sizes)
    for name, saved in _recorded(source, "sizes").items():
        if name in _HEADS and own.get(name, saved) != saved:
            raise ModelMismatchError(
                "the model has other attention heads than the run that saved the checkpoint",
                file=str(source.folder),
                expected=f"{name}={saved}",
                found=f"{name}={own[name]}",
                fix="build the model as the run did",
            )


def computes_otherwise(source: Checkpoint, model: Model | None, module: Any) -> list[str]:
    """A note where a live model computes something else than the one in the checkpoint. Some of
    that is changed on purpose, such as the rotary base for longer sequences."""
    if model is None:
        return _other_settings(source, module)
    live = architecture_of(module)
    own: dict[str, Any] = {} if live is None else _flat(asdict(live))
    saved = _flat(_recorded(source, "architecture"))
    both = sorted({*own, *saved}) if own and saved else []
    found = [
        f"{name} {saved.get(name)} in the checkpoint, {own.get(name)} in the model"
        for name in both
        if name not in _OF_THE_RUN and own.get(name) != saved.get(name)
    ]
    return [f"the model computes something else: {'; '.join(found)}"] if found else []


def recorded_settings(module: Any) -> dict[str, Any]:
    """What a manifest says of a model of transformers; nothing of another one."""
    found = settings_of(config_of(module))
    return {CONFIG: found} if found else {}


def _other_settings(source: Checkpoint, module: Any) -> list[str]:
    if source.manifest.keeper != Keeper.WEIGHTS:
        return other_settings(_recorded(source, CONFIG), config_of(module), "the checkpoint")
    path = source.folder / CONFIG_FILE
    said = settings_of(read_json(path)) if path.is_file() else {}
    return other_settings(said, config_of(module), CONFIG_FILE)


def config_of(module: Any) -> Mapping[str, Any]:
    """The config of a model of transformers, also of one that peft wrapped."""
    said = getattr(getattr(module, "config", None), "to_dict", None)
    return {} if said is None else said()


def class_name(module: Any) -> str:
    """The name of the class of a model of transformers; of one that a program derives from such a
    class, with the module that has it, so that it is nobody else's."""
    kind = type(module)
    is_theirs = kind.__module__.partition(".")[0] == "transformers"
    return kind.__name__ if is_theirs else f"{kind.__module__}.{kind.__qualname__}"


def _recorded(source: Checkpoint, part: str) -> Mapping[str, Any]:
    """What a checkpoint says of its model; nothing where it does not."""
    said: object = with_model(source.manifest).run.get(RECORDED)
    found = cast("Mapping[str, object]", said).get(part) if isinstance(said, dict) else None
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def _flat(said: Mapping[str, Any]) -> dict[str, Any]:
    """An architecture with its odd settings beside the others."""
    odd: object = said.get("odd")
    more = cast("Mapping[str, Any]", odd) if isinstance(odd, dict) else {}
    return {**{name: value for name, value in said.items() if name != "odd"}, **more}
