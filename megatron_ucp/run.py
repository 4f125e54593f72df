"""`python -m megatron_ucp.run script.py ...`: the script as it is, with every engine that it makes
attached. `megatron-ucp run` is the same."""

import os
import re
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron_ucp.cli.output import UNUSABLE
from megatron_ucp.errors import UsageError

USAGE = """usage: python -m megatron_ucp.run script.py [its arguments]
       python -m megatron_ucp.run -m module [its arguments]
       torchrun --nproc_per_node 6 -m megatron_ucp.run train.py ...

Runs a training script unchanged. Every engine that deepspeed.initialize makes is attached: its
saves are atomic, and it loads what any mesh saved. The section "universal_checkpoint" of the
DeepSpeed config may add options; {"enabled": false} there leaves an engine alone."""
_LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")


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
    """Installs, and runs the script or module. What it raises is its own."""
    from megatron_ucp.engines.attach import install

    install(enabled=True)
    sys.argv = program
    if is_module:
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")


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
