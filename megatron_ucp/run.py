"""`python -m megatron_ucp.run script.py ...`: the script as it is, with every engine of DeepSpeed's
that it makes attached, and Megatron-LM's load and save replaced. `megatron-ucp run` is the same."""

import os
import re
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.cli.output import UNUSABLE
from megatron_ucp.engines.trainers import AfterImport
from megatron_ucp.errors import UnsupportedError, UsageError

USAGE = """usage: python -m megatron_ucp.run script.py [its arguments]
       python -m megatron_ucp.run -m module [its arguments]
       torchrun --nproc_per_node 6 -m megatron_ucp.run train.py ...

Runs a training script unchanged: its saves are atomic, and it loads what any mesh saved.
Every engine that deepspeed.initialize makes is attached; one that can't be is left as it is, with a
note. The section "universal_checkpoint" of its config may add options, {"enabled": false} there
leaves an engine alone. Megatron-LM's pretrain_gpt.py, and any program that calls `pretrain`, gets
this load_checkpoint and save_checkpoint, which follow its flags."""
_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
_TRAINING = "megatron.training.training"  # where Megatron-LM's `pretrain` lies, in every version
_REPLACED = ("load_checkpoint", "save_checkpoint")  # names of that module, which it calls


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script that the words name, as `__main__`; 2 where there is none."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in ([], ["-h"], ["--help"]):
        (sys.stdout if words else sys.stderr).write(f"{USAGE}\n")
        return 0 if words else UNUSABLE
    words = _behind_the_script(words)
    is_module = words[0] == "-m"
    program = words[1:] if is_module else words
    # as python does with a module, and with a script
    sys.path.insert(0, os.getcwd() if is_module else str(Path(program[0]).resolve().parent))
    try:
        _require(program, is_module)
    except UsageError as error:
        sys.stderr.write(f"megatron_ucp.run: {error}\n")
        return UNUSABLE
    run(program, is_module)
    return 0


def run(program: list[str], is_module: bool) -> None:
    """Runs the script or module, with what it imports of DeepSpeed and Megatron-LM taken over.
    Neither has to be installed. What the script raises is its own."""
    hooks = AfterImport({"deepspeed": _attach_engines, _TRAINING: _replace_checkpointing})
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")
    if not hooks.called:
        say.note(
            f"{program[0]} imported neither DeepSpeed nor Megatron-LM's training program: nothing "
            "was attached"
        )


def _attach_engines(_deepspeed: Any) -> None:
    """Every engine that `deepspeed.initialize` makes from now on is attached."""
    from megatron_ucp.engines.deepspeed.install import install_for_scripts

    install_for_scripts()


def _replace_checkpointing(training: Any) -> None:
    """Puts this package's load and save under the names by which Megatron-LM's program calls its
    own. Raises UnsupportedError where it has no such names: its own save must not run unnoticed."""
    from megatron_ucp import megatron_lm

    if missing := [name for name in _REPLACED if not hasattr(training, name)]:
        raise UnsupportedError(
            f"{_TRAINING} has no {', '.join(missing)}",
            file=getattr(training, "__file__", None),
            expected=f"a version of Megatron-LM whose program calls {' and '.join(_REPLACED)}",
            found="none of these names" if len(missing) == 2 else "one of these names",
            fix="start the program without the runner, and call megatron_ucp.megatron_lm's "
            "functions where it loads and saves",
        )
    for name in _REPLACED:
        setattr(training, name, getattr(megatron_lm, name))
    say.line(f"Megatron-LM's {' and '.join(_REPLACED)} are this package's")


def _behind_the_script(words: list[str]) -> list[str]:
    """DeepSpeed's launcher puts the rank (`--local_rank=0`) before all else: it is the script's."""
    ranks = [word for word in words if _LOCAL_RANK.fullmatch(word)]
    rest = [word for word in words if word not in ranks]
    at = 2 if rest[:1] == ["-m"] else 1
    return [*rest[:at], *ranks, *rest[at:]] if words[:1] == ranks[:1] else words


def _require(program: Sequence[str], is_module: bool) -> None:
    """Raises UsageError where there is no such script or module."""
    if is_module:
        if not program or not _is_there(program[0]):
            raise UsageError(
                "there is no such module",
                expected="-m and the name of a module",
                found=program[0] if program else "none",
                fix="check the name, or give the path of the script without -m",
            )
    elif not Path(program[0]).is_file():
        flag = program[0].startswith("-")
        raise UsageError(
            "there is no such script",
            file=None if flag else program[0],
            expected="the path of the training script, then its own arguments",
            found=f"the option {program[0]}" if flag else "no such file",
            fix="give the script first; options of torchrun stand before -m megatron_ucp.run",
        )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(main())
