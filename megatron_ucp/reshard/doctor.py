"""What this machine has of all that is needed, beside what was tested."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.reshard.arguments import parsed_config
from megatron_ucp.reshard.ds_section import SECTION, options_of

# What the tests run against; an engine of another version than one of the first two is said once.
# The sources that are tagged core_v0.19.0 call themselves 0.19.1.
CHECKED = {
    "deepspeed": ("0.19.8",),
    "megatron-core": ("0.16.1", "0.17.1", "0.18.2", "0.19.1", "0.19.2"),
}
TESTED = {**CHECKED, "torch": ("2.13.0", "2.14.1"), "transformers": ("5",)}
_MODULES = {"megatron-core": "megatron.core"}  # named otherwise than the distribution
_NEEDED = ("torch", "numpy", "safetensors", "isal")
_FOR = {
    "deepspeed": "to train with DeepSpeed",
    "megatron-core": "to train with Megatron-core",
    "transformers": "to load what export-hf writes",
    "accelerate": "for its trainer",
    "lightning": "for its trainer",
    "peft": "for LoRA",
}


@dataclass(frozen=True)
class MachinePart:
    """One thing: what was found of it, what was tested, and whether that is all right."""

    name: str
    found: str
    says: str
    ok: bool = True


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was looked at. True where nothing that is needed is missing."""

    rows: tuple[MachinePart, ...]

    def __bool__(self) -> bool:
        return all(row.ok for row in self.rows)

    def __str__(self) -> str:
        lines = say.table([(row.name, row.found, row.says) for row in self.rows])
        return "\n".join([*lines, "all right" if self else "something that is needed is missing"])


def doctor(ds_config: Mapping[str, Any] | str | Path | None = None) -> Diagnosis:
    """Versions of the libraries beside those that were tested, compiler, GPU, and whether a
    DeepSpeed config, or its file, attaches engines. Raises UsageError for a config that is none."""
    config = parsed_config(ds_config)
    rows = [*_libraries(), _compiler(), _gpu()]
    return Diagnosis((*rows, *([] if config is None else [_config(config)])))


def imported_version(package: str) -> str | None:
    """The version that the imported module of a package says, None where it is not imported. A
    checkout that stands before an installed package is another version than the installed one."""
    said = getattr(sys.modules.get(_MODULES.get(package, package)), "__version__", None)
    return said if isinstance(said, str) else None


def is_tested(package: str, found: str) -> bool:
    """Whether a version is one of the `TESTED`; any is, where none is named. What stands behind a
    plus does not count: megatron-core puts the git hash of the current folder there
    (`0.19.2+446de22`), torch its build (`2.13.0+cpu`)."""
    plain, tested = found.split("+")[0], TESTED.get(package, ())
    return not tested or any(plain == one or plain.startswith(f"{one}.") for one in tested)


def _libraries() -> Iterator[MachinePart]:
    yield MachinePart(
        "python", platform.python_version(), "3.11 and 3.12 are tested, 3.13 is accepted"
    )
    for name in (*_NEEDED, *_FOR):
        try:
            found = imported_version(name) or version(name)
        except PackageNotFoundError:
            needed = name in _NEEDED
            yield MachinePart(
                name, "none", "needed" if needed else f"only {_FOR[name]}", not needed
            )
            continue
        says = f"tested with {', '.join(TESTED[name])}" if name in TESTED else ""
        other = "" if is_tested(name, found) else "; another version may differ"
        yield MachinePart(name, found, f"{says}{other}")


def _compiler() -> MachinePart:
    found = next((name for name in (os.environ.get("CXX"), "g++", "c++") if _is_there(name)), None)
    return MachinePart(
        "compiler", found or "none", "DeepSpeed compiles an operator at its first start"
    )


def _is_there(name: str | None) -> bool:
    return bool(name) and shutil.which(str(name)) is not None


def _gpu() -> MachinePart:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return MachinePart(
        "GPU", f"{count}" if count else "none", "tested on CPU ranks over gloo, and on one GPU"
    )


def _config(config: Mapping[str, Any]) -> MachinePart:
    by_runner, by_install = options_of(config, True), options_of(config)
    if by_runner is None:
        return MachinePart("attached", "no", f'"{SECTION}" of the config says "enabled": false')
    if by_install is not None:
        return MachinePart(
            "attached", "yes", "by ucp.install() and by the runner, as the config says"
        )
    how = "by the runner (megatron-ucp run) or ucp.attach; ucp.install() alone does not"
    return MachinePart("attached", "by the runner", how)
