"""Arguments that several functions take, checked before anything else happens."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ucp.errors import UsageError, did_you_mean
from megatron_ucp.formats.deepspeed.target import Target

_SECTIONS = ("bf16", "fp16", "bfloat16", "zero_optimization", "optimizer", "checkpoint")


def plain_path(path: Any) -> str:
    """A path as text. Raises UsageError for what is none."""
    if isinstance(path, str | Path) and str(path):
        return os.fspath(path)
    raise UsageError(
        "this is no path",
        expected="the path of a folder",
        found=repr(path)[:200],
        fix="give a path as text, such as runs/llama",
    )


def absolute_path(path: Any) -> Path:
    """The path of a folder as it is meant at the call, wherever the program goes before it is used.
    Raises UsageError for what is no path."""
    return Path(os.path.abspath(plain_path(path)))


def require_known(options: Iterable[str], known: Sequence[str]) -> None:
    """Raises UsageError, with the nearest known one, for options that a function does not take."""
    if unknown := [name for name in options if name not in known]:
        raise UsageError(
            "an option is not known",
            expected=", ".join(known),
            found=", ".join(sorted(unknown)),
            fix=did_you_mean(unknown[0], known, "give one of these options"),
        )


def check_switch(name: str, value: object) -> None:
    """Raises UsageError for a switch that is neither on nor off: "no" is true in Python."""
    if not isinstance(value, bool):
        raise UsageError(
            f"{name} is a switch",
            expected="True or False",
            found=repr(value)[:200],
            fix=f"give {name}=True or {name}=False",
        )


# ------------------------------------------------ options of saves and steps in memory


@dataclass(frozen=True)
class NumberOption:
    """A number of `units`: `least` or more (`is_above`: more than that), `most` at most; None where
    it may be left out."""

    units: str
    least: int
    most: int | None = None
    is_whole: bool = True
    is_above: bool = False
    is_optional: bool = False

    def check(self, name: str, value: object) -> None:
        """Raises UsageError."""
        if (value is None and self.is_optional) or self._fits(value):
            return
        low = f"more than {self.least}" if self.is_above else f"at least {self.least}"
        left_out = f", or leave {name} out" if self.is_optional else ""
        raise UsageError(
            f"{name} is a {'whole ' if self.is_whole else ''}number of {self.units}",
            parameter=name,
            expected=low if self.most is None else f"{low}, at most {self.most:,}",
            found=repr(value)[:200],
            fix=f"give such a number{left_out}",
        )

    def _fits(self, value: object) -> bool:
        kinds = (int,) if self.is_whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            return False
        is_low = value <= self.least if self.is_above else value < self.least
        return not is_low and (self.most is None or value <= self.most)


@dataclass(frozen=True)
class WordOption:
    """One of some words."""

    words: tuple[str, ...]

    def check(self, name: str, value: object) -> None:
        """Raises UsageError."""
        if value not in self.words:
            raise UsageError(
                f"{name} is none of its words",
                parameter=name,
                expected=" or ".join(self.words),
                found=repr(value)[:200],
                fix=f"give {name} as one of these",
            )


class SwitchOption:
    """True or False."""

    def check(self, name: str, value: object) -> None:
        """Raises UsageError."""
        check_switch(name, value)


_YEAR_S = 366 * 24 * 3600  # the operating system waits no longer at once
OPTIONS_OF_SAVES: dict[str, NumberOption | WordOption | SwitchOption] = {
    "durable": SwitchOption(),
    "rng": SwitchOption(),
    "keep_latest": NumberOption("tags", 1, is_optional=True),
    "busy": WordOption(("wait", "skip")),
    "deadline": NumberOption(
        "seconds", 0, _YEAR_S, is_whole=False, is_above=True, is_optional=True
    ),
    "on_error": WordOption(("raise", "warn")),
    "snapshot_bytes": NumberOption("bytes", 0, is_optional=True),
    "keep_snapshot": SwitchOption(),
    "keep": WordOption(("memory",)),
    "every": NumberOption("steps", 1),
    "copies": NumberOption("machines", 0),
}


def check_saves(options: object) -> None:
    """Checks every field of a dataclass that is one of the `OPTIONS_OF_SAVES`. Raises
    UsageError."""
    for name, row in OPTIONS_OF_SAVES.items():
        if hasattr(options, name):
            row.check(name, getattr(options, name))


def one_target(mesh: Any, target: Any, **more: Any) -> Target | None:
    """The target that a caller gave, as a mesh or as a target; None where neither was given. Raises
    UsageError."""
    if mesh is not None and target is not None:
        raise UsageError(
            "a mesh and a target were given",
            expected="one of them: a target has a mesh",
            found=f"{mesh} and {target}"[:200],
            fix="leave the mesh out",
        )
    given = target if mesh is None else mesh
    return None if given is None else Target.of(given, **more)


def needed_target(mesh: Any, target: Any, what: str) -> Target:
    """As `one_target`, of `what` needs one. Raises UsageError where neither was given."""
    given = one_target(mesh, target)
    if given is None:
        raise no_mesh(what)
    return given


def no_mesh(what: str) -> UsageError:
    """The error where nobody said a mesh, which `what` is for."""
    return UsageError(
        f"{what} for one mesh",
        expected="a mesh, such as tp=1,dp=4,zero=1",
        found="none",
        fix="give --mesh (Python: mesh=)",
    )


def parsed_config(ds_config: Any) -> Mapping[str, Any] | None:
    """A DeepSpeed config that a caller gave, as a mapping or by its file; None for None. Raises
    UsageError."""
    if ds_config is None:
        return None
    if isinstance(ds_config, Mapping):
        return _with_sections(ds_config, "")
    found = read_json(plain_path(ds_config))
    if not isinstance(found, dict):
        raise UsageError(
            "this file is no DeepSpeed config",
            file=ds_config,
            expected="a JSON object",
            found=type(found).__name__,
            fix="give the config that the job passes to DeepSpeed",
        )
    return _with_sections(found, str(ds_config))


def _with_sections(config: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """A DeepSpeed config. Raises UsageError where a section that is read is none."""
    wrong = [name for name in _SECTIONS if not isinstance(config.get(name, {}), Mapping)]
    if wrong:
        raise UsageError(
            "a section of the DeepSpeed config is no object",
            file=file or None,
            expected=f'"{wrong[0]}": {{...}}',
            found=repr(config[wrong[0]])[:200],
            fix="correct the config",
        )
    return config


def read_json(path: str) -> Any:
    """The value in a JSON file. Raises UsageError."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        missing = isinstance(error, FileNotFoundError)
        found = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            "there is no such file" if missing else "the file can't be read as JSON",
            file=path,
            expected="a JSON file",
            found="nothing" if missing else found,
            fix="check the path and what is in the file",
        ) from None
