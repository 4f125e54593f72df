"""The command line: verbs that parse, print and map errors to exit codes. No logic. One module per
verb."""

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
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
    with contextlib.ExitStack() as left:
        if sys.stderr is None:  # closed by the shell
            nowhere = left.enter_context(open(os.devnull, "w", encoding="utf-8"))
            left.enter_context(contextlib.redirect_stderr(nowhere))
        try:
            with contextlib.redirect_stdout(_Output(sys.stdout)):
                return _flushed(words)
        except BrokenPipeError:
            _forget_output()
            return NOBODY_READS
        except _OutputError as error:
            _forget_output()
            _say(error.told, words, sys.stderr)
            return UNUSABLE
        except KeyboardInterrupt:
            print("megatron-ucp: interrupted", file=sys.stderr)
            return INTERRUPTED


def _flushed(words: list[str]) -> int:
    """The exit code, when all that was printed is where it belongs; also of `--help`."""
    sys.stdout.flush()  # fails at once where there is none
    try:
        return _run(words)
    finally:
        sys.stdout.flush()


def _forget_output() -> None:
    """Or Python says at its end, too, that it can't be written."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
    _say(told, words, sys.stdout if "--json" in words else sys.stderr)
    return UNUSABLE


def _say(told: UcpError, words: list[str], stream: Any) -> None:
    """An error, with --json as JSON."""
    if "--json" in words:
        facts = {key: value for key, value in told.__dict__.items() if value is not None}
        print(json.dumps({"error": type(told).__name__, **facts}), file=stream)
    else:
        print(f"megatron-ucp: {told}", file=_Plain(stream))


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


class _OutputError(Exception):
    """Standard output can't be written."""

    def __init__(self, found: str) -> None:
        self.told = UsageError(
            "the output can't be written",
            file="standard output",
            found=found,
            fix="give the output a place that is open and has room",
        )
        super().__init__(found)


class _Output(_Plain):
    """Standard output, which may be closed or full: that is no fault of a checkpoint."""

    def write(self, text: str) -> int:
        with self._checked():
            return super().write(text)

    def flush(self) -> None:
        with self._checked():
            super().flush()

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        if self._stream is None:
            raise _OutputError("it is closed")
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _OutputError(f"{type(error).__name__}: {error.strerror}") from None


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
