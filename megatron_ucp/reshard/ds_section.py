"""The section of a DeepSpeed config that attaches engines."""

from collections.abc import Mapping
from typing import Any

from megatron_ucp.errors import UsageError
from megatron_ucp.reshard.load_options import check_options

SECTION = "universal_checkpoint"
_KEYS = {
    "enabled": bool,
    "hyper": str,
    "checksums": bool,
    "allow": list,
    "family": str,
    "rules": str,
    "rng": bool,
    "durable": bool,
    "keep_latest": int,
    "save": str,
    "busy": str,
    "deadline": (int, float),
    "on_error": str,
    "snapshot_bytes": int,
    "keep_snapshot": bool,
    "keep": str,
    "every": int,
    "copies": int,
    "folder": str,
}
_OF_LOADS = ("hyper", "checksums", "allow", "rng")


def options_of(config: Any, enabled: bool = False) -> dict[str, Any] | None:
    """Options of the section "universal_checkpoint" of a parsed DeepSpeed config; None where it is
    not enabled: neither by the section, nor by the stock key `"checkpoint": {"load_universal":
    true}`, nor by whoever asks (`enabled`), whom the section may contradict.

    Raises UsageError for an unknown key or value.
    """
    section = config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise UsageError(
            f'"{SECTION}" of the DeepSpeed config is a section',
            expected='{"enabled": true}',
            found=repr(section),
            fix='write it as {"enabled": true}, or leave it out',
        )
    unknown = sorted(
        key
        for key, value in section.items()
        if key not in _KEYS or not isinstance(value, _KEYS[key])
    )
    if unknown:
        raise UsageError(
            f'the section "{SECTION}" of the DeepSpeed config has a key or value that is not known',
            expected=", ".join(f"{k}: {_word(t)}" for k, t in _KEYS.items()),
            found=", ".join(f"{k}: {section[k]!r}" for k in unknown),
            fix="correct the key or its value (docs/reference/python.md, Settings)",
        )
    options = {key: value for key, value in section.items() if key != "enabled"}
    check_options(**{key: value for key, value in options.items() if key in _OF_LOADS})
    stock = config.get("checkpoint")
    enabled |= isinstance(stock, Mapping) and bool(stock.get("load_universal"))
    return options if section.get("enabled", enabled) else None


def _word(kind: type | tuple[type, ...]) -> str:
    return "number" if isinstance(kind, tuple) else kind.__name__
