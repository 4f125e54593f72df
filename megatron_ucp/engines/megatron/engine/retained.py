"""Which older saves go, as Megatron-LM's `--save-retain-interval` asks."""

from contextlib import suppress
from pathlib import Path

from megatron_ucp.errors import UcpError
from megatron_ucp.formats.durable import Syncs, retire
from megatron_ucp.formats.pointers import iteration_name, iteration_of_name, newest_named


def newest(folder: Path) -> int | None:
    """The iteration that a folder names as its newest one."""
    with suppress(UcpError, OSError):  # the save that follows says what is wrong with it
        named = newest_named(folder)
        return iteration_of_name(named.tag) if named is not None else None
    return None


def retired(
    folder: Path, before: int | None, iteration: int, run: str, interval: int | None, sync: Syncs
) -> list[str]:
    """Removes the save of iteration `before`, once that of `iteration`, of which `sync` is, is
    done: those that the interval divides stay. What can't be removed is said, and no error."""
    if not interval or not before or before == iteration or before % interval == 0:
        return []
    try:
        return [retire(folder / iteration_name(before), run, sync.right)]
    except (OSError, UcpError) as error:
        return [f"{iteration_name(before)} could not be removed: {error}"]
