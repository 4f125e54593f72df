"""Arguments that several functions take, checked before anything else happens."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_ucp.errors import NotFoundError, UsageError
from megatron_ucp.formats.deepspeed.target import Target


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


def read_ds_config(config: Any) -> Mapping[str, Any] | None:
    """A DeepSpeed config that a caller gave, as a mapping or as the path of its file. Raises
    UsageError for anything else, NotFoundError for a file that can't be read."""
    read: Any = config
    if isinstance(config, str | Path) and str(config):
        try:
            read = json.loads(Path(config).read_text(encoding="utf-8"))
        except OSError as error:
            raise NotFoundError(
                "the DeepSpeed config can't be read",
                file=config,
                found=error.strerror,
                fix="check the path of the file",
                id="",
            ) from None
        except (ValueError, RecursionError) as error:
            raise UsageError(
                "the DeepSpeed config is no JSON",
                file=config,
                found=f"{type(error).__name__}: {error}",
                fix="give a JSON file",
            ) from None
    if read is None or isinstance(read, Mapping):
        return read
    raise UsageError(
        "this is no DeepSpeed config",
        expected="a mapping, or the path of a JSON file with one",
        found=repr(read)[:200],
        fix='give one, such as {"zero_optimization": {"stage": 1}}',
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
