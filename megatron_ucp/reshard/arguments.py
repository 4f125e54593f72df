"""Arguments that several functions take, checked before anything else happens."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_ucp.errors import UsageError
from megatron_ucp.formats.deepspeed.target import Target


def plain_path(path: Any) -> str:
    """A path as text. Raises UsageError for what is none."""
    if isinstance(path, str | Path) and str(path):
        return os.fspath(path)
    raise UsageError(
        "this is no path", expected="the path of a folder", found=repr(path)[:200], fix="give one"
    )


def check_allow(allow: Any, known: Collection[str]) -> None:
    """Raises UsageError for allowances that an operation does not know."""
    listed = ", ".join(sorted(known))
    if isinstance(allow, str) or not isinstance(allow, Collection):
        raise UsageError(
            "allow is a set of words that say what may happen",
            expected=f"some of {listed}",
            found=repr(allow)[:200],
            fix='give a set, such as {"narrow"}',
        )
    if unknown := set(allow) - set(known):
        raise UsageError(
            "this is nothing that can be allowed here",
            expected=f"some of {listed}",
            found=", ".join(sorted(map(str, unknown)))[:200],
            fix="leave it out",
        )


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


def parsed_config(ds_config: Any) -> Mapping[str, Any] | None:
    """A DeepSpeed config that a caller gave, as a mapping or by its file; None for None. Raises
    UsageError."""
    if ds_config is None or isinstance(ds_config, Mapping):
        return ds_config
    found = read_json(plain_path(ds_config))
    if not isinstance(found, dict):
        raise UsageError(
            "this file is no DeepSpeed config",
            file=ds_config,
            expected="a JSON object",
            found=type(found).__name__,
            fix="give the config that the job passes to DeepSpeed",
        )
    return found


def read_json(path: str) -> Any:
    """The value in a JSON file. Raises UsageError."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        missing = isinstance(error, FileNotFoundError)
        raise UsageError(
            "there is no such file" if missing else "the file can't be read as JSON",
            file=path,
            expected="a JSON file",
            found="nothing" if missing else f"{type(error).__name__}: {error}",
            fix="check the path and what is in the file",
        ) from None
