"""What the package says while it works: one line at the end of each operation, its notes, progress.

All of it goes through Python's logger `megatron_ucp`, which has a handler of its own on stderr:
DeepSpeed, Trainer and Lightning set other loggers to WARNING, and the line must be seen there too.
Only rank 0 speaks. `MEGATRON_UCP_LOG=quiet` switches everything off; another value is the name of a
level: `error`, `warning` (notes alone) or `info` (the default). A program that gives the logger a
handler or a level of its own keeps them.

    say.ended("loaded step 80 (runs/ck/global_step80): ...", notes)    # the line, then the notes
    with say.progress("convert") as progress:                          # bytes
        for done in work:
            progress(done, total)
    with say.by_command_line(quiet=False):     # no lines: the command prints its own; progress
        ...
"""

import functools
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import ParamSpec, TypeVar

LOGGER = logging.getLogger("megatron_ucp")
# A logger of its own, so that a command that prints its own last line still shows progress.
PROGRESS = LOGGER.getChild("progress")
VARIABLE = "MEGATRON_UCP_LOG"
_P = ParamSpec("_P")
_R = TypeVar("_R")
_OFF = logging.CRITICAL + 1
_LEVELS = {
    "quiet": _OFF,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
}
_EACH_S = 30.0  # a line of progress in a job's log
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "B"))


class _Stderr(logging.StreamHandler):
    """Writes to what stderr is at the time: tests and notebooks replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def line(text: str) -> None:
    """A line that says what was done. Shown on rank 0, unless it is switched off."""
    _log(logging.INFO, text)


def note(text: str) -> None:
    """Something that was not carried over exactly, or that the user should know: a warning."""
    _log(logging.WARNING, f"note: {text}")


def note_of_rank(text: str) -> None:
    """As `note`, of whichever rank knows it: rank 0 may be the one that it is about."""
    _set_up()
    LOGGER.log(logging.WARNING, f"note: {text}")


def ended(text: str, notes: Sequence[str] = ()) -> None:
    """The line of an operation, which ends with the number of its notes, and then the notes."""
    line(with_count(text, notes))
    for one in notes:
        note(one)


def with_count(text: str, notes: Sequence[str]) -> str:
    """The line that `ended` shows."""
    count = f"{len(notes) or 'no'} note{'' if len(notes) == 1 else 's'}"
    return f"{text}; {count}"


def _called(name: str, signature: inspect.Signature) -> str:
    """How a function is called, without types: `convert(src, dst, *, mesh=, ...)`."""
    words: list[str] = []
    for param in signature.parameters.values():
        if param.kind == param.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        words.append(f"{param.name}=" if param.kind == param.KEYWORD_ONLY else param.name)
    return f"{name}({', '.join(words)})"


def shown(
    what: str, unit: str = "B", ends: bool = False
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """A decorator of an operation with an argument `progress`: where nobody gives one, it is
    `progress` of here. With `ends` its result, which has `notes`, is shown as the last line."""

    def decorate(operation: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(operation)

        @functools.wraps(operation)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:  # told in the caller's own words
                told = f"{_called(operation.__name__, signature)}: {error}"
                for name in kwargs.keys() - signature.parameters.keys():
                    near = get_close_matches(name, signature.parameters, n=1)
                    told += f"; did you mean {near[0]}?" if near else ""
                raise TypeError(told) from None
            if kwargs.get("progress") is not None:
                done = operation(*args, **kwargs)
            else:
                with progress(what, unit) as kwargs["progress"]:
                    done = operation(*args, **kwargs)
            if ends:
                ended(str(done), getattr(done, "notes", ()))
            return done

        return run

    return decorate


@contextmanager
def progress(what: str, unit: str = "B") -> Iterator[Callable[[int, int], None]]:
    """What long work calls with (done, total): a bar on a terminal, else a line each 30 s with how
    much is done and how long the rest takes. `unit` is "B" for bytes, or a noun in the plural."""
    _set_up()
    if not is_rank_0() or not PROGRESS.isEnabledFor(logging.INFO):
        yield lambda done, total: None
    elif sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(desc=what, unit=unit, unit_scale=unit == "B", leave=False) as bar:

            def advance(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            yield advance
    else:
        yield _Lines(what, unit)


class _Lines:
    """Progress where nobody watches."""

    def __init__(self, what: str, unit: str) -> None:
        self.what, self.unit = what, unit
        self.started = self.said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.said < _EACH_S or not 0 < done < total:
            return
        self.said = now
        left = (now - self.started) * (total - done) / done
        much = f"{of(done, total, self.unit)} ({done / total:.0%})".replace("%", " %")
        PROGRESS.info(f"{self.what}: {much}, {duration(left)} left")


@contextmanager
def by_command_line(quiet: bool = False) -> Iterator[None]:
    """Inside, no operation shows its line or notes, as the command prints its own; progress is
    shown unless `quiet`."""
    _set_up()
    before = LOGGER.level, PROGRESS.level
    PROGRESS.setLevel(_OFF if quiet else LOGGER.level)
    LOGGER.setLevel(_OFF)
    try:
        yield
    finally:
        LOGGER.setLevel(before[0])
        PROGRESS.setLevel(before[1])


def amount(size_bytes: int) -> str:
    """Bytes for people: "10.6 MB"."""
    scale, unit = _unit_of(size_bytes)
    return f"{_short(size_bytes / scale)} {unit}"


def of(done: int, total: int, unit: str = "B") -> str:
    """How much of how much: "1.2 of 15.5 GB"."""
    if unit != "B":
        return f"{done:,} of {total:,} {unit}"
    scale, name = _unit_of(total)
    return f"{_short(done / scale)} of {_short(total / scale)} {name}"


def part(done: int, total: int) -> str:
    """How many bytes of how many: "15.5 GB" where it is all of them."""
    return amount(done) if done == total else of(done, total)


def duration(seconds: float) -> str:
    """Seconds for people: "0.16 s", "41 s", "3 min 20 s", "1 h 05 min"."""
    if seconds < 9.95:
        return f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return (
        f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"
    )


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (zip(row, widths, strict=True) for row in rows)
    return ["  ".join(f"{text:{width}}" for text, width in line).rstrip() for line in lines]


def is_rank_0() -> bool:
    """Whether this process is the one that speaks: rank 0 of torch.distributed, or of the launcher
    before that is there."""
    dist = sys.modules.get("torch.distributed")  # torch is not imported for this
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def _unit_of(size_bytes: int) -> tuple[int, str]:
    return next((row for row in _UNITS if size_bytes >= row[0]), _UNITS[-1])


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 and value != int(value) else f"{value:.0f}"


def _log(level: int, text: str) -> None:
    _set_up()
    if is_rank_0():
        LOGGER.log(level, text)


def _set_up() -> None:
    """The handler and the level, where the program gave the logger none. At the first line and not
    on import: the program sets up its logging in between."""
    if LOGGER.level == logging.NOTSET:
        word = os.environ.get(VARIABLE, "").strip().lower()
        LOGGER.setLevel(_LEVELS.get(word, logging.INFO))
        if word and word not in _LEVELS:
            note(f"{VARIABLE}={word} is not known: it takes {', '.join(_LEVELS)}")
    if not LOGGER.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("megatron_ucp: %(message)s"))
        LOGGER.addHandler(handler)
        LOGGER.propagate = False  # the root logger's handlers would show each line again
