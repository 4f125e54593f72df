"""Whether a folder that was converted gets a pointer such as `latest`, and what is said of it.

A pointer decides what every later command and job loads. So none is moved that was not asked for.
"""

import re
from pathlib import Path

from megatron_ucp.core.manifest import CONVERTED_FROM, FILE_NAME, TAG
from megatron_ucp.core.manifest_json import from_json
from megatron_ucp.errors import UcpError, UsageError
from megatron_ucp.formats import durable
from megatron_ucp.formats.deepspeed.paths import is_universal
from megatron_ucp.formats.pointers import (
    iteration_name,
    iteration_of_name,
    pointers_to,
)
from megatron_ucp.formats.registry import is_megatron
from megatron_ucp.formats.tags import has_state_files
from megatron_ucp.reshard.outputs.table import Writable

_OWN_NAME = re.compile(r"global_step\d+|iter_\d{7,}")


def check_name(folder: Path, to: Writable, latest: bool) -> None:
    """Raises UsageError where a pointer is asked for that can't name the folder."""
    if latest and not _can_name(to, folder.absolute().name):
        raise UsageError(
            f"`{to.pointer}` can't name this folder",
            file=folder,
            expected=f"a name such as {iteration_name(100)}",
            found=folder.name,
            fix="name the output so, or leave --latest out (Python: latest=)",
        )


def _can_name(to: Writable, name: str) -> bool:
    return not to.numbered or iteration_of_name(name) is not None


def point_at(folder: Path, to: Writable, latest: bool, iteration: int) -> str:
    """Writes the pointer that belongs to a new folder, where that is asked for (`latest`), or where
    the folder above is a run of that format that has none; says what was done, or how to load the
    folder. `iteration` is that of the run."""
    folder = folder.absolute()
    parent, name, own = folder.parent, folder.name, to.pointer
    by_path = f"load it by its path, or with the tag {name}"
    if to.numbered:
        by_path = "Megatron-LM goes by that pointer: give --latest (Python: latest=True) for it"
    if not _can_name(to, name):
        return (
            f"no pointer was written: Megatron-LM looks for folders such as "
            f"{iteration_name(iteration)}; rename {name} for it"
        )
    if not latest and (kept := _left_alone(parent, name, to)):
        return f"{kept}: {by_path}"
    is_alone = to.pointers == (own,)
    moving, notes = ({own: name}, []) if is_alone else pointers_to(parent, name, own)
    try:
        for pointer, text in moving.items():
            durable.replace_text(parent / pointer, text, durable.Syncs())
    except OSError as error:  # the output is whole all the same
        return f"`{own}` could not be written ({type(error).__name__}): {by_path}"
    named = " and ".join(f"`{pointer}`" for pointer in moving)
    return "; ".join([f"{named} in {parent} now names {name}", *notes])


def _left_alone(parent: Path, name: str, to: Writable) -> str:
    """Why no pointer of a folder is written that nobody asked for; "" where it is a run of that
    format without one."""
    there = [one for one in to.pointers if (parent / one).is_file()]
    if there:
        names = (parent / there[0]).read_text(errors="replace").strip()[:80]
        return f"`{there[0]}` still names {names}"
    return "" if _is_run(parent, name, to) else f"no `{to.pointer}` was written"


def _is_run(parent: Path, name: str, to: Writable) -> bool:
    """Whether a program saved tags of the same kind into a folder: not merely that copies of tags,
    or what was converted, lie there. DeepSpeed keeps universal folders beside its own tags."""
    others = [path for path in parent.iterdir() if path.is_dir() and path.name != name]
    tags = [path for path in others if has_state_files(path) and not is_universal(path)]
    return any(is_megatron(path) == to.numbered and _was_saved(path) for path in tags)


def _was_saved(tag: Path) -> bool:
    """Whether a program saved this tag here, under this name: as its manifest says, else as
    DeepSpeed, transformers and Megatron-LM name their own."""
    if not (tag / FILE_NAME).is_file():
        return _OWN_NAME.fullmatch(tag.name) is not None
    try:
        run = from_json((tag / FILE_NAME).read_bytes(), str(tag / FILE_NAME)).run
    except (OSError, UcpError):
        return False
    return run.get(TAG) == tag.name and CONVERTED_FROM not in run
