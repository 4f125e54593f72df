"""The command line: verbs that parse, print and map errors to exit codes. No logic. One module per
verb."""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from megatron_ucp.cli.output import UNUSABLE
from megatron_ucp.errors import DamagedFileError, UcpError, UsageError

VERBS = ("inspect", "plan", "convert", "export-hf", "import-hf", "verify", "diff", "rules")
INTERRUPTED, NOBODY_READS = (
    130,
    141,
)  # what a shell says of a program that ended by SIGINT, by SIGPIPE
# Names come from foreign files: nothing that a terminal obeys, nothing that turns text around, no
# half of a surrogate pair.
_UNPLAIN = re.compile(r"[^\n\t\x20-\x7e\xa0-\u2029\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `megatron-ucp`. Exit 0: done; 1: a difference or damage was found; 2: wrong
    usage or unusable input."""
    words = _dashed(sys.argv[1:] if argv is None else argv)
    try:
        with contextlib.redirect_stdout(_Plain(sys.stdout)):
            code = _run(words)
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # or Python says so again when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NOBODY_READS
    except KeyboardInterrupt:
        print("megatron-ucp: interrupted", file=sys.stderr)
        return INTERRUPTED


def _run(words: list[str]) -> int:
    try:
        args = _parser().parse_args(words)
        return int(args.run(args))
    except UcpError as error:
        told = error
    except BrokenPipeError:
        raise
    except OSError as error:
        told = DamagedFileError(
            "the operating system refused to read or write",
            file=str(error.filename)[:200],
            found=error.strerror,
            fix="check the path, the disk and its permissions",
        )
    except MemoryError:
        told = DamagedFileError(
            "there is not enough memory for what the checkpoint asks for",
            fix="use a larger machine; if the checkpoint is small, distrust it",
        )
    if "--json" in words:
        print(
            json.dumps(
                {
                    "error": type(told).__name__,
                    **{k: v for k, v in told.__dict__.items() if v is not None},
                }
            )
        )
    else:
        print(f"megatron-ucp: {told}", file=_Plain(sys.stderr))
    return UNUSABLE


def _dashed(words: Sequence[str]) -> list[str]:
    """`--foo_bar=a_b` as `--foo-bar=a_b`: underscores are dashes in the names of options."""
    out: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        out.append(
            name.replace("_", "-") + equals + value
            if word.startswith("--") and "--" not in out
            else word
        )
    return out


class _Plain:
    """A stream for text from anywhere."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(_UNPLAIN.sub(lambda found: ascii(found[0])[1:-1], text))

    def flush(self) -> None:
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, fix=f"see `{self.prog} --help`")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="megatron-ucp",
        allow_abbrev=False,
        description="Look into DeepSpeed checkpoints, check and compare them.",
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name in VERBS:
        module = import_module(f"megatron_ucp.cli.{name.replace('-', '_')}")
        verb = verbs.add_parser(
            name, help=module.HELP, description=module.__doc__, allow_abbrev=False
        )
        module.add_arguments(verb)
        verb.add_argument("--json", action="store_true", help="print JSON")
        verb.set_defaults(run=module.run)
    return parser
