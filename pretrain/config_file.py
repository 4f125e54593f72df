"""The DeepSpeed config of --deepspeed_config beside the flags: what both say must be the same."""

import json
from pathlib import Path
from typing import Any

from megatron_ucp.errors import UsageError

# keys of the config, and the flags that say the same; `stage` is in the section of ZeRO
SAME = {
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "train_batch_size": "global_batch_size",
    "gradient_clipping": "clip_grad",
    "stage": "zero_stage",
}
OURS = {
    "optimizer": "the optimizer is AdamW, with --lr, --weight-decay and --adam-*",
    "scheduler": "the schedule is made by --lr-*",
}


def merge_config(given: dict[str, Any]) -> dict[str, Any]:
    """The DeepSpeed config without what flags say too: that goes into `given`, the values of flags
    by attribute. Raises UsageError where the two differ."""
    path = given.get("deepspeed_config")
    if path is None:
        return {}
    config = _read(path)
    zero = config.setdefault("zero_optimization", {})
    for key, name in SAME.items():
        value = (zero if key == "stage" else config).pop(key, "auto")
        if value != "auto" and given.setdefault(name, value) != value:
            raise UsageError(
                f"--{name.replace('_', '-')} contradicts the DeepSpeed config",
                file=path,
                expected=f"{key}: {value}",
                found=given[name],
                fix="leave one of them out",
            )
    _merge_dtypes(config, given, path)
    # compared once the number of ranks is known
    if config.get("gradient_accumulation_steps") == "auto":
        del config["gradient_accumulation_steps"]
    return config


def _read(path: str) -> dict[str, Any]:
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            "--deepspeed_config is no JSON file",
            file=path,
            found=f"{type(error).__name__}: {error}",
        ) from None
    if not isinstance(config, dict):
        raise UsageError(
            "--deepspeed_config holds no section",
            file=path,
            expected="{...}",
            found=type(config).__name__,
        )
    for section, why in OURS.items():
        if section in config:
            raise UsageError(
                f'"{section}" of the DeepSpeed config contradicts the flags',
                file=path,
                expected="no such section",
                found=section,
                fix=why,
            )
    return config


def _merge_dtypes(config: dict[str, Any], given: dict[str, Any], path: str) -> None:
    for name in ("bf16", "fp16"):
        enabled = config.get(name, {}).pop("enabled", "auto")
        if enabled is True:
            given[name] = True
        elif enabled is False and given.get(name):
            raise UsageError(
                f"--{name} contradicts the DeepSpeed config",
                file=path,
                expected=f"{name}: enabled",
                found="false",
            )
