"""The command line: it parses, prints and maps errors to exit codes. No logic; the commands are in
`verbs`."""

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from megatron_ucp import __version__, say
from megatron_ucp.cli.launched import form, is_launched, launched
from megatron_ucp.cli.output import EXIT_CODES, UNUSABLE, Parser, add_options, nearest, print_json
from megatron_ucp.cli.verbs import VERBS
from megatron_ucp.errors import DamagedFileError, RankError, UcpError, UsageError

COMMANDS = tuple(verb.name for verb in VERBS)
_SHARED = tuple(verb.name for verb in VERBS if verb.is_shared)
INTERRUPTED, NOBODY_READS = 130, 141  # what a shell says of a program that SIGINT, SIGPIPE ended
COMPLETION = "--print-completion"
# Names come from foreign files: nothing that a terminal obeys, nothing that turns text around, no
# half of a surrogate pair.
_UNPLAIN = re.compile(r"[^\n\t\x20-\x7e\xa0-\u2029\u202f-\u2065\u206a-\ud7ff\ue000-\U0010ffff]")
_DESCRIPTION = """\
Looks into checkpoints of DeepSpeed, Megatron-LM and Hugging Face, checks and compares them, and
writes them for another mesh or another program, bit for bit. Not needed to resume: a job that is
started by `megatron-ucp run` loads any checkpoint as it is. Neither DeepSpeed nor a GPU is needed,
but for `run`."""
_EXAMPLES = f"""\
examples:
  megatron-ucp inspect runs/llama                       what is it, and is it whole?
  megatron-ucp plan runs/llama --mesh dp=3,zero=1       the dry run of a resume on 3 ranks
  megatron-ucp export-hf runs/llama hf                  weights for transformers
  torchrun --nproc_per_node 6 -m megatron_ucp.run train.py   resume on 6 ranks, unedited

{EXIT_CODES}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `megatron-ucp`; returns the exit code (see EXIT_CODES)."""
    words = _dashed(sys.argv[1:] if argv is None else argv)
    rest = [word for word in words if word not in ("--json", "--quiet")]
    if rest[:1] == ["run"]:  # all that follows is the script's, and so is its output
        from megatron_ucp.run import main as run

        return run(words[words.index("run") + 1 :])
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
            told = UsageError(
                "the output can't be written",
                file="standard output",
                found=str(error),
                fix="give the output a place that is open and has room",
            )
            with contextlib.redirect_stdout(sys.stderr):
                _tell(told, words)
            return UNUSABLE
        except KeyboardInterrupt:
            print("megatron-ucp: interrupted", file=sys.stderr)
            return INTERRUPTED


def _flushed(words: list[str]) -> int:
    """The exit code, when all that was printed is where it belongs; also of `--help`."""
    sys.stdout.flush()  # fails at once where there is none
    command = next((word for word in words if not word.startswith("-")), "")
    if command not in _SHARED or not is_launched():
        return _run_and_flush(words)
    with launched() as rank:
        return _run_and_flush(words, rank)


def _run_and_flush(words: list[str], rank: int | None = None) -> int:
    try:
        return _run(words, rank)
    finally:
        sys.stdout.flush()


def _forget_output() -> None:
    """Or Python says at its end, too, that it can't be written."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str], rank: int | None = None) -> int:
    """The exit code of the command, of which this process may be one `rank` of several. Everything
    that can go wrong is told as an error of ours; what is the same on all ranks, by rank 0."""
    try:
        if rank is not None:
            form()
        if words and not words[0].startswith("-"):
            _require_command(words[0])
        args = _parser(COMPLETION in words).parse_args(words)
        if args.run is None:
            _parser().print_help()
            return 0
        args.ranks = rank is not None
        with say.by_command_line(args.quiet):
            return int(args.run(args))
    except UcpError as error:
        if rank and not isinstance(error, RankError):
            return UNUSABLE
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
    _tell(told, words, not rank)
    return UNUSABLE


def _tell(told: UcpError, words: list[str], is_rank_0: bool = True) -> None:
    """An error, with --json as JSON on standard output, which is rank 0's alone."""
    if "--json" in words and is_rank_0:
        said = {**vars(told), "id": told.id, "help": told.help}
        facts = {key: value for key, value in said.items() if value not in (None, "")}
        print_json({"error": type(told).__name__, **facts}, UNUSABLE)
    else:
        print(f"megatron-ucp: {told}", file=_Output(sys.stderr))


def _dashed(words: Sequence[str]) -> list[str]:
    """`--foo_bar=a_b` as `--foo-bar=a_b`: underscores are dashes in the names of options. What
    `run` starts has options of its own."""
    out: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        is_ours = word.startswith("--") and "--" not in out and "run" not in out[:2]
        out.append(name.replace("_", "-") + equals + value if is_ours else word)
    return out


def _require_command(word: str) -> None:
    """Raises UsageError for what is no command, with the nearest one."""
    if word in COMMANDS:
        return
    raise UsageError(
        f"there is no command {word[:80]!r}",
        expected=", ".join(COMMANDS),
        found=word[:200],
        fix=nearest(word.replace("_", "-"), COMMANDS, "megatron-ucp"),
    )


class _OutputError(Exception):
    """A stream can't be written, and why."""


class _Output:
    """A stream for text from anywhere. Standard output may be closed or full: that is no fault of a
    checkpoint."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        plain = _UNPLAIN.sub(lambda found: ascii(found[0])[1:-1], text)
        encoding = getattr(self._stream, "encoding", None) or "utf-8"  # of the terminal
        return self._do("write", plain.encode(encoding, "backslashreplace").decode(encoding))

    def flush(self) -> None:
        self._do("flush")

    def _do(self, name: str, *args: str) -> Any:
        if self._stream is None:
            raise _OutputError("it is closed")
        try:
            return getattr(self._stream, name)(*args)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _OutputError(f"{type(error).__name__}: {error.strerror}") from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _parser(completion: bool = False) -> Parser:
    """The parser of all commands; with `completion` also of the option that prints a script for a
    shell."""
    parser = Parser(prog="megatron-ucp", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("--version", "-V", action="version", version=f"megatron-ucp {__version__}")
    _add_common(parser, json=False, quiet=False)
    parser.set_defaults(run=None)
    if completion:
        import shtab

        shtab.add_argument_to(parser, [COMPLETION])
    else:
        parser.add_argument(
            COMPLETION, metavar="SHELL", help="print the completions for bash, zsh or tcsh"
        )
    commands = parser.add_subparsers(metavar="COMMAND", parser_class=Parser)
    for verb in VERBS:
        command = commands.add_parser(
            verb.name,
            help=verb.help,
            description=verb.description,
            epilog=f"example:\n  megatron-ucp {verb.example}\n\n{EXIT_CODES}",
        )
        verb.add(command)
        add_options(command, verb.options)
        _add_common(command)
        command.set_defaults(run=verb.run)
    return parser


def _add_common(parser: Parser, **defaults: bool) -> None:
    """Options that stand before or after the command: the one after it has no default, which would
    undo the one before."""
    shown = {"json": "print one JSON object", "quiet": "show no progress"}
    for name, text in shown.items():
        default: Any = defaults.get(name, argparse.SUPPRESS)
        parser.add_argument(f"--{name}", action="store_true", default=default, help=text)
