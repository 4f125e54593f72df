"""What trainers do around a save: they remove older checkpoints as soon as the call that saves
returns, and choose what they resume from by its name.

A save in the background is not whole by then. So a removal beside it waits until it is, and is
left out where the save failed."""

import functools
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.engines.background import background_of, last_saves
from megatron_ucp.errors import UcpError
from megatron_ucp.formats.tags import LATEST, has_state_files, is_unfinished, newest_named
from megatron_ucp.reshard.findings import in_short
from megatron_ucp.reshard.look import newest_whole

# ---- after import
#
# Changes a module of another library as soon as it is imported, whoever imports it first.


class AfterImport:
    """Calls a function with a module as soon as the module's own code has run, so that whoever
    imports names from it gets those that the function left there. At once for a module that is
    imported already. A finder of `sys.meta_path`."""

    def __init__(self, functions: Mapping[str, Callable[[Any], None]]) -> None:
        self._functions, self.called = functions, False
        sys.meta_path.insert(0, self)
        for name in functions:
            if (module := sys.modules.get(name)) is not None:
                self._call(module)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As the other finders say, with a loader that calls the function."""
        if name not in self._functions:
            return None
        others: list[Any] = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec: ModuleSpec | None = next((one for one in specs if one is not None), None)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._call(module)

            loader.exec_module = exec_module  # a loader is made for each spec
        return spec

    def _call(self, module: Any) -> None:
        self.called = True
        self._functions[module.__name__](module)


# ---- trainers
#
# What trainers do around a save: they remove older checkpoints as soon as the call that saves
# returns, and choose what they resume from by its name.
#
# A save in the background is not whole by then. So a removal beside it waits until it is, and is
# left out where it failed. And of checkpoints that a trainer would choose, those are passed over
# that a killed process left half-written.


_GUARDED = "_ucp_waits_for_saves"  # of a function that has been replaced
_STATE = "trainer_state.json"  # what Trainer writes last
_NUMBER = re.compile(r"(\d+)$")


@functools.cache
def guard_trainers() -> None:
    """Trainer and Accelerate, imported already or later, resume from whole checkpoints alone."""
    AfterImport(
        {
            "transformers.trainer_utils": _guard_choice,
            "transformers.trainer": _guard_choice,
            "accelerate.accelerator": _guard_accelerator,
        }
    )


# ------------------------------------------------ removals


def guard_removals() -> None:
    """From now on `shutil.rmtree`, by which trainers remove checkpoints, waits for a save in the
    background of the same run. Twice is once."""
    if hasattr(shutil.rmtree, _GUARDED):
        return
    stock = shutil.rmtree

    @functools.wraps(stock)
    def rmtree(path: Any, *args: Any, **kwargs: Any) -> Any:
        if _may_remove(path):
            stock(path, *args, **kwargs)

    # `avoids_symlink_attacks` and what else others look for in it
    vars(rmtree).update(vars(stock))
    setattr(rmtree, _GUARDED, True)
    shutil.rmtree = rmtree  # type: ignore[assignment]


def _may_remove(path: Any) -> bool:
    """Whether a folder may be removed, once saves beside it are whole; not where one failed. What
    is no checkpoint of a run that saves is nobody's to keep."""
    try:
        removed = Path(os.path.realpath(os.fsdecode(path)))
    except (TypeError, ValueError):  # no path: what removes it says so
        return True
    who = _identity(removed)
    for turn in last_saves() if who is not None else ():
        folder = Path(os.path.realpath(turn.what)).parent  # of the tag: what the program gave
        is_around = who in map(_identity, (folder, *folder.parents))
        is_beside = not is_around and _is_beside(removed, folder)
        if not (is_around or is_beside):
            continue
        turn.join()
        if turn.error is not None and is_beside:
            say.note(f"{removed} stays: the save that was to stand for it failed ({turn.what})")
            return False
    return True


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode, which a folder has under any name."""
    with suppress(OSError, ValueError):
        status = path.stat()
        return status.st_dev, status.st_ino
    return None


def _is_beside(removed: Path, folder: Path) -> bool:
    """Whether a folder is a tag in that of a save, or another checkpoint beside it."""
    own = _identity(folder)
    if own in map(_identity, removed.parents):
        return is_unfinished(removed.name) or has_state_files(removed) or _has_states(removed)
    if _identity(removed.parent) != _identity(folder.parent):
        return False
    is_named_alike = _NUMBER.sub("", removed.name) == _NUMBER.sub("", folder.name)
    return is_named_alike or (removed / _STATE).is_file() or _has_states(removed)


# ------------------------------------------------ Trainer


def _guard_choice(module: Any) -> None:
    """`get_last_checkpoint`, by which `resume_from_checkpoint=True` chooses."""
    stock = getattr(module, "get_last_checkpoint", None)
    if stock is None or hasattr(stock, _GUARDED):
        return

    @functools.wraps(stock)
    def get_last_checkpoint(folder: Any) -> str | None:
        return _last_whole(stock(folder), _not_of_trainer)

    setattr(get_last_checkpoint, _GUARDED, True)
    module.get_last_checkpoint = get_last_checkpoint


def _last_whole(last: str | None, why_not: Callable[[Path, bool], str]) -> str | None:
    """The checkpoint that a trainer would choose, or the one before it that is whole; None where
    none is. `why_not` says what a checkpoint lacks, of a run whose checkpoints have states of
    DeepSpeed, or not."""
    if last is None:
        return None
    named, kind = Path(last), _NUMBER.sub("", Path(last).name)
    found = [
        (int(match[1]), path)
        for path in named.parent.iterdir()
        if path.is_dir() and (match := _NUMBER.search(path.name)) and path.name.startswith(kind)
    ]
    has_states = any(_has_states(path) for _, path in found)
    for _, path in sorted(found, reverse=True):
        why = why_not(path, has_states)
        if not why:
            return str(named.parent / path.name)
        say.note(f"{path} is not whole, and is passed over: {why}")
    return None


def _has_states(folder: Path) -> bool:
    """Whether there are states of DeepSpeed in a trainer's checkpoint, or what is left of a save
    of them."""
    return any(
        path.is_dir() and (is_unfinished(path.name) or has_state_files(path))
        for path in folder.iterdir()
    )


def _not_of_trainer(folder: Path, has_states: bool) -> str:
    if not (folder / _STATE).is_file():
        return f"{_STATE} is missing, which is written last"
    return _no_whole_tag(folder, is_named=True) if has_states else ""


def _no_whole_tag(folder: Path, is_named: bool = False) -> str:
    """What a checkpoint lacks of a whole tag, which a pointer has to name where the trainer does
    not; empty where there is one."""
    try:
        newest, named = newest_whole(folder), newest_named(folder)
    except UcpError as error:
        return in_short(error)
    if is_named and named is None:
        return f"`{LATEST}` is missing, which names the tag"
    if is_named and named is not None and named.tag != newest.folder.name:
        return "; ".join(newest.passed_over)
    return ""


# ------------------------------------------------ Accelerate


def _guard_accelerator(module: Any) -> None:
    """`save_state` and `load_state` with names that Accelerate makes: what is removed before a save
    leaves a whole checkpoint until that save is whole; and what is not whole is not loaded."""
    kind = module.Accelerator
    save_state, load_state = kind.save_state, kind.load_state
    if hasattr(save_state, _GUARDED):
        return

    @functools.wraps(save_state)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        how = self.project_configuration
        limit = how.total_limit
        if not (how.automatic_checkpoint_naming and limit and _has_engine(self)):
            return save_state(self, *args, **kwargs)
        _wait_for_saves(self)
        left = _removed(self, max(1, limit - 1))
        how.total_limit = None
        try:
            saved = save_state(self, *args, **kwargs)
        finally:
            how.total_limit = limit
        if limit == 1:
            _wait_for_saves(self)
            self.wait_for_everyone()  # until every rank's files are there
            for other in left:
                shutil.rmtree(other)
        return saved

    @functools.wraps(load_state)
    def load(self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        how = self.project_configuration
        if input_dir is None and how.automatic_checkpoint_naming and _has_engine(self):
            numbered = _numbered(Path(self.project_dir, "checkpoints"))
            last = str(numbered[-1]) if numbered else None
            input_dir = _last_whole(last, functools.partial(_not_of_accelerate, self))
        return load_state(self, input_dir, *args, **kwargs)

    setattr(save, _GUARDED, True)
    kind.save_state, kind.load_state = save, load


def _wait_for_saves(accelerator: Any) -> None:
    for model in accelerator._models:
        if (background := background_of(model)) is not None:
            background.wait()


def _removed(accelerator: Any, most: int) -> list[Path]:
    """Removes all but so many of the last whole checkpoints, and what is half-written: that counts
    for Accelerate as if it was whole. Returns those that are left, on the rank that removes."""
    folder = Path(accelerator.project_dir, "checkpoints")
    if not (accelerator.is_main_process and folder.is_dir()):
        return []
    there = _numbered(folder)
    whole = [one for one in there if not _not_of_accelerate(accelerator, one, True)]
    left = whole[-most:]
    for one in there:
        if one not in left:
            shutil.rmtree(one)
    return left


def _has_engine(accelerator: Any) -> bool:
    return any(hasattr(model, "ucp") for model in accelerator._models)


def _numbered(folder: Path) -> list[Path]:
    """Accelerate's checkpoints, in their order."""
    found = [path for path in folder.glob("checkpoint_*") if path.name.rpartition("_")[2].isdigit()]
    return sorted(found, key=lambda path: int(path.name.rpartition("_")[2]))


def _not_of_accelerate(accelerator: Any, folder: Path, has_states: bool) -> str:
    for name in _written_last(accelerator):
        if not (folder / name).is_file():
            return f"{name} is missing, which is written after the model"
    return _no_whole_tag(folder) if has_states else ""


def _written_last(accelerator: Any) -> Iterator[str]:
    """Files that Accelerate writes for this run, whatever the number of ranks that saved it."""
    yield "random_states_0.pkl"
    for number, _ in enumerate(accelerator._custom_objects):
        yield f"custom_checkpoint_{number}.pkl"
