"""`ucp_export_hf` of every engine: its live weights as a folder of a Hugging Face model."""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.dtypes import dtype_name
from megatron_ucp.core.manifest import RECORDED
from megatron_ucp.engines.same_model import config_of
from megatron_ucp.families.architecture import recorded
from megatron_ucp.families.base import Model
from megatron_ucp.formats.hugging_face.shards import parse_size
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine
from megatron_ucp.reshard.hugging_face.beside import beside_weights
from megatron_ucp.reshard.hugging_face.export import check_output
from megatron_ucp.reshard.hugging_face.export_live import export_live
from megatron_ucp.reshard.hugging_face.exported import Exported
from megatron_ucp.reshard.hugging_face.model_config import config_for
from megatron_ucp.reshard.hugging_face.model_folder import Outgoing, training_dtype
from megatron_ucp.reshard.hugging_face.twin import needs_family, twin_of
from megatron_ucp.reshard.transfer import TransferRun


def export(
    describe: Callable[[], Engine],
    module: Any,
    model: Model | None,
    dst: str | Path,
    dtype: str | None = None,
    max_shard_size: str | int = "5GB",
    config: str | Path | None = None,
    tokenizer: str | Path | None = None,
) -> Exported:
    """Writes the masters of an engine, rounded to `dtype` (None: that of training), as the new
    folder `dst`: the same bytes as `export_hf` of a save. Each rank writes its share.

    `describe` gives the engine, whose bare model (of one chunk) is `module`, of the family's
    `model` if it is of any. `config` is a folder with the config.json of the model; without it a
    model of transformers says its own, and a family what it computes. Collective. Raises a UcpError
    on every rank; nothing is left of the folder then.
    """
    folder = Path(dst)
    live = describe()
    with agree.together():
        if agree.world()[0] == 0:
            check_output(folder, dtype, ())
        dtype = None if dtype is None else dtype_name(dtype)
        manifest = live.manifest
        if model is not None:
            manifest = replace(manifest, run={RECORDED: recorded(model.sizes, module)})
        chosen = dtype or training_dtype(manifest)
        found = None if config is None else config_for(manifest, config, None)
        given = _config(module, model) if found is None else found.tree
        family = found.family if found is not None and needs_family(manifest) else ""
        twin = twin_of(manifest, given, family, chosen, str(folder))
        out = Outgoing(manifest, twin, chosen, parse_size(max_shard_size))
        beside = beside_weights(twin, tokenizer, found and found.folder)
    with say.progress("export-hf") as advance:
        done = export_live(live, out, folder, beside, TransferRun(progress=advance))
    say.ended(str(done), done.notes)
    return done


def _config(module: Any, model: Model | None) -> dict[str, Any] | None:
    """The config of a model of transformers, or of the adapter that peft put around one."""
    adapters = getattr(module, "peft_config", None)
    if isinstance(adapters, dict) and len(adapters) == 1:  # several are refused
        (adapter,) = adapters.values()
        return {name: _plain(value) for name, value in adapter.to_dict().items()}
    config = {} if model is not None else dict(config_of(module))
    if config and not config.get("architectures"):  # which `save_pretrained` says
        config["architectures"] = [type(module).__name__]
    return config or None


def _plain(value: Any) -> Any:
    """As JSON has it: peft keeps module names in sets, and enums for words."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value.value if isinstance(value, Enum) else value
