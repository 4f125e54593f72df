"""One fate for all ranks: a failure on one rank is raised on every rank, and nobody waits for
ever."""

import functools
import hashlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from megatron_ucp.errors import DamagedFileError, RankError, UcpError, UsageError
from megatron_ucp.formats.store import absolute
from megatron_ucp.reshard.messages import (
    BrokenError,
    DefaultRanks,
    GroupRanks,
    OneRank,
    Ranks,
    packed,
    unpacked,
)
from megatron_ucp.reshard.waits import waiting

T = TypeVar("T")
P = ParamSpec("P")


def world() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) without torch.distributed."""
    import torch.distributed as dist

    if (ranks := _AMONG.get()) is not None:
        return ranks.rank, ranks.world
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def default_ranks() -> Ranks:
    """Those of torch's default process group, or those `among` which this is called."""
    if (ranks := _AMONG.get()) is not None:
        return ranks
    return DefaultRanks() if world()[1] > 1 else OneRank()


_AMONG: ContextVar[Ranks | None] = ContextVar("ranks that agree", default=None)


@contextmanager
def among(group: Any) -> Iterator[None]:
    """Inside, all ranks are those of a process group which this one is in (None: of the default
    group)."""
    before = _AMONG.set(None if group is None else GroupRanks(group))
    try:
        yield
    finally:
        _AMONG.reset(before)


def delivered(given: Mapping[int, T], ranks: Ranks | None = None) -> dict[int, T]:
    """As `Ranks.delivered`. Collective."""
    where = ranks or default_ranks()
    with waiting(_caller(), where), _AGREEMENT:
        return where.delivered(given)


_LEFT = "_left_agreement"  # of an error that came between the messages of an agreement


class _Agreement:
    """Inside are the messages of one agreement. An error that comes between them, such as an
    interrupt, leaves this rank at another message than the others: it takes part in no agreement
    around this one, whose messages would be taken for those that are missing."""

    def __enter__(self) -> None:
        """Nothing is to be done before."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            error.__dict__[_LEFT] = True


_AGREEMENT = _Agreement()


def _has_left(error: BaseException | None) -> bool:
    return error is not None and _LEFT in error.__dict__


# ---- one fate


class together:
    """Every rank leaves this block without an error, or every rank raises the error of the lowest
    failing rank. Collective; without a failure all that goes from rank to rank is one number.

    An error that is no UcpError (a defect, an interrupt) goes on unchanged on its own rank; the
    others get a RankError. They agree in the default process group, or as `ranks` can.

    Beside that number each rank may say `numbers`, as many as the others, before the block ends:
    after it `lowest` has the lowest of all ranks.
    """

    def __init__(self, ranks: Ranks | None = None, numbers: Sequence[int] = ()) -> None:
        self._ranks = ranks
        self.numbers = self.lowest = list(numbers)

    def __enter__(self) -> "together":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        ranks = self._ranks or default_ranks()
        told = _as_ucp_error(error)
        if _has_left(error):
            return
        if ranks.world == 1:  # nothing is sent
            self.lowest = self.numbers
            if told is not None:
                _raise(_Failure(0, told), 0, error, told)
            return
        with waiting(_caller(), ranks), _AGREEMENT:
            fate = ranks.world if told is None else ranks.rank
            first, *self.lowest = ranks.lowest(fate, *self.numbers)
            if first == ranks.world:
                return
            data = ranks.broadcast(packed(told) if first == ranks.rank else None, first)
        _raise(_Failure(first, unpacked(data)), ranks.rank, error, told)


_AGREED = "_agreed"  # of an error that every rank raises


@dataclass
class _Failure:
    """The error of a rank, on its way to the others."""

    rank: int
    error: UcpError


def _raise(failure: _Failure, own: int, error: BaseException | None, told: UcpError | None) -> None:
    """Raises what failed on a rank; here that was `error`, if anything did, which others are told
    of as `told`. What all ranks have agreed on goes on as each has it: where one agreement stands
    in another one, nobody is told of it twice."""
    if told is not None and told.__dict__.get(_AGREED):
        raise told
    if error is not None and error is not told and not isinstance(error, OSError):
        return  # goes on as it is
    if failure.rank == own:
        agreed = told or failure.error
    else:
        agreed = failure.error
        agreed.problem += f" (on rank {failure.rank})"
    agreed.__dict__[_AGREED] = True
    raise agreed


class alike(together):
    """As `together`; and the `options`, which each rank sets in the block, are the same on all. Or
    every rank raises UsageError, which names the first one in which a rank differs from rank 0, and
    both values."""

    def __init__(
        self,
        problem: str = "the ranks were given different options",
        numbers: Sequence[int] = (),
    ) -> None:
        super().__init__(numbers=numbers)
        self._problem = problem
        self.options: Mapping[str, Any] = {}

    def __enter__(self) -> "alike":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        text = repr(sorted((name, repr(value)) for name, value in self.options.items()))
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        self.numbers = [*self.numbers, digest, -digest]
        super().__exit__(kind, error, trace)
        *self.lowest, low, high = self.lowest
        if error is None and low != -high:
            _require_same_as_first(gather(self.options), self._problem)


class merging(together):
    """As `together`, for ranks that have a `value` for each other, which is set in the block.
    Values become one on their way along a tree by `merge`, which takes those of ranks that follow
    each other. After the block `result` is the same on all ranks: all of them as one, or what rank
    0 `concludes` from it. `merged` is that one, on rank 0 alone; `to_all=False` leaves it there.
    """

    def __init__(
        self,
        merge: Callable[[Any, Any], Any],
        concludes: Callable[[Any], Any] | None = None,
        ranks: Ranks | None = None,
        to_all: bool = True,
    ) -> None:
        super().__init__(ranks)
        self._merge, self._concludes = merge, concludes
        self._to_all = to_all
        self._defect: Exception | None = None  # of a merge on this rank
        self.value: Any = None
        self.merged: Any = None
        self.result: Any = None

    def __enter__(self) -> "merging":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        ranks = self._ranks or default_ranks()
        told = _as_ucp_error(error)
        if _has_left(error):
            return
        own = self.value if told is None else _Failure(ranks.rank, told)
        with waiting(_caller(), ranks), _AGREEMENT:
            one = functools.partial(self._one, ranks.rank)
            self.merged, result = ranks.agreed(own, one, self._concluded)
        if isinstance(result, _Failure):
            if self._defect is not None:
                raise self._defect
            _raise(result, ranks.rank, error, told)
            return
        self.result = result

    def _one(self, rank: int, own: Any, other: Any) -> Any:
        """Two values as one, or the failure of the lower rank."""
        if isinstance(own, _Failure) or isinstance(other, _Failure):
            failures = [one for one in (own, other) if isinstance(one, _Failure)]
            return min(failures, key=lambda one: one.rank)
        return self._guarded(rank, lambda: self._merge(own, other))

    def _concluded(self, merged: Any) -> Any:
        if isinstance(merged, _Failure):
            return merged
        if self._concludes is not None:
            concludes = self._concludes
            return self._guarded(0, lambda: concludes(merged))
        return merged if self._to_all else None

    def _guarded(self, rank: int, make: Callable[[], Any]) -> Any:
        """What others wait for: an error is told to them, and raised here when all have it."""
        kept = KeptBack()
        with kept:
            return make()
        self._defect = kept.error
        return _Failure(rank, _as_ucp_error(kept.error) or RankError(_DEFECT))


class gathering(merging):
    """As `together`; `value`, set in the block, is in `values` of all ranks after it, by rank.
    Values that are equal go from rank to rank once, and are one object where they arrive."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        super().__init__(_ValuesInOrder.followed_by, ranks=ranks)
        self.values: list[Any] = []

    def __enter__(self) -> "gathering":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and (self._ranks or default_ranks()).world == 1:
            self.values = [self.value]
            return
        if error is None:
            self.value = _ValuesInOrder([pickle.dumps(self.value)], [(0, 1)])
        super().__exit__(kind, error, trace)
        if error is None:
            self.values = self.result.unpacked()


@dataclass
class _ValuesInOrder:
    """The values of ranks that follow each other: those that differ, pickled, and runs of ranks
    that have the same one, as (which of them, how many ranks)."""

    values: list[bytes]
    runs: list[tuple[int, int]]

    def followed_by(self, other: "_ValuesInOrder") -> "_ValuesInOrder":
        """With those of the ranks behind these."""
        numbers = {value: number for number, value in enumerate(self.values)}
        for value in other.values:
            if value not in numbers:
                numbers[value] = len(self.values)
                self.values.append(value)
        for theirs, count in other.runs:
            number = numbers[other.values[theirs]]
            if self.runs[-1][0] == number:
                self.runs[-1] = number, self.runs[-1][1] + count
            else:
                self.runs.append((number, count))
        return self

    def unpacked(self) -> list[Any]:
        values = [pickle.loads(value) for value in self.values]  # of our own ranks
        return [values[number] for number, count in self.runs for _ in range(count)]


def collect(make: Callable[[], T], ranks: Ranks | None = None) -> list[T]:
    """What `make` returns on every rank, by rank; an error is raised as by `together`."""
    with gathering(ranks) as block:
        block.value = make()
    return block.values


def gather(value: T, ranks: Ranks | None = None) -> list[T]:
    """The value of every rank, by rank. Collective."""
    return collect(lambda: value, ranks)


def of_first(make: Callable[[], T], ranks: Ranks | None = None) -> T:
    """What `make` returns on rank 0, which alone calls it; its error is raised as by `together`."""
    block = merging(lambda own, _: own, ranks=ranks)
    with block:
        if (world()[0] if ranks is None else ranks.rank) == 0:
            block.value = make()
    return block.result


def all_of(value: bool, ranks: Ranks | None = None) -> bool:
    """Whether it holds on every rank. Collective: one number."""
    where = ranks or default_ranks()
    with waiting(_caller(), where), _AGREEMENT:
        return bool(where.lowest(int(value))[0])


def any_of(value: bool, ranks: Ranks | None = None) -> bool:
    """Whether it holds on some rank. Collective: one number."""
    return not all_of(not value, ranks)


def lowest(*numbers: int) -> list[int]:
    """For each number the lowest one of all ranks. Collective: these numbers."""
    ranks = default_ranks()
    with waiting(_caller(), ranks), _AGREEMENT:
        return ranks.lowest(*numbers)


def most(number: int) -> int:
    """The highest number of all ranks. Collective: one number."""
    return -lowest(-number)[0]


def total(*numbers: int, ranks: Ranks | None = None) -> list[int]:
    """For each number the sum over all ranks. Collective."""
    block = merging(lambda own, other: [*map(int.__add__, own, other)], ranks=ranks)
    with block:
        block.value = [*numbers]
    return block.result


# ---- errors


class KeptBack:
    """Blocks of a rank on whose messages others wait: its first error is kept, and it goes on, so
    that nobody waits for ever. `raise_kept`, in a `together` block, tells all of them.

    An interrupt is no error of the work, and goes on as it is.
    """

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> "KeptBack":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = self.error or error
        return True

    def raise_kept(self) -> None:
        if self.error is not None:
            raise self.error


def _as_ucp_error(error: BaseException | None) -> UcpError | None:
    if error is None or isinstance(error, UcpError):
        return error
    if isinstance(error, OSError):
        told = DamagedFileError(
            "the operating system refused to read or write",
            file=error.filename,
            found=f"{type(error).__name__}: {os.strerror(error.errno) if error.errno else error}",
            fix="check the disk, its permissions and the path on every rank",
            id="",
        )
        told.__cause__ = error
        return told
    return RankError(_DEFECT)


def is_of_ranks(error: BaseException) -> bool:
    """Whether a collective raised this, and no other code: its connections broke, as they do when a
    rank dies, or its process group is gone. torch has no class for it: gloo's errors are plain
    ones, which name it or come out of torch.distributed."""
    import torch.distributed as dist

    text = str(error)
    if isinstance(error, dist.DistError | BrokenError) or "gloo" in text or "NCCL" in text:
        return True
    trace, home = error.__traceback__, dist.distributed_c10d.__name__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == home:
            return True
        trace = trace.tb_next
    return False


@contextmanager
def as_rank_error(what: str, left: str = "", fix: str = "") -> Iterator[None]:
    """Inside, collectives that break are a RankError: `what` did not finish, and `left` says what
    is left of the run; `fix` says what to do, where that is something else than for an engine."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # the latter for a group that is gone
        if not is_of_ranks(error):
            raise
        raise RankError(
            f"{what} did not finish: a rank died, or messages between ranks failed",
            found=str(error).strip().partition("\n")[0][:200],
            fix=fix
            or f"{left or _LEFT}. Look at the other ranks' output; build the world again (process "
            "groups, model, engine) of the ranks that are there, and load the newest save",
        ) from error


_DEFECT = "another rank failed with an error that is no checkpoint error; its own output shows it"
_LEFT = "an engine that was to be filled is not usable; saves are as they were"


def door(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """For a function that users call on all ranks: what of its collectives breaks is a RankError,
    as of `as_rank_error`."""

    def named(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> T:
            with as_rank_error(what):
                return function(*args, **kwargs)

        return called

    return named


# ---- options


def require_same(
    options: Mapping[str, Any], problem: str = "the ranks were given different options"
) -> None:
    """Raises UsageError, on every rank, that names the first option in which a rank's `options` are
    not those of rank 0, and both values. Collective: three numbers, as long as they are the
    same."""
    with alike(problem) as block:
        block.options = options


def _require_same_as_first(options: Sequence[Mapping[str, Any]], problem: str) -> None:
    first = options[0]
    for rank, held in enumerate(options):
        for name in {**first, **held}:
            if held.get(name) != first.get(name):
                raise UsageError(
                    problem,
                    parameter=name,
                    expected=f"{first.get(name)!r}, as on rank 0",
                    found=f"{held.get(name)!r} on rank {rank}",
                    fix=f"give every rank the same {name}",
                )


def _caller() -> str:
    """The function outside of this module and of `contextlib` that agrees, as messages name it."""
    frame: Any = sys._getframe(1)
    own = {__name__, "contextlib"}
    while frame is not None and frame.f_globals.get("__name__") in own:
        frame = frame.f_back
    if frame is None:
        return ""
    module = str(frame.f_globals.get("__name__", "")).removeprefix("megatron_ucp.")
    return f"{frame.f_code.co_qualname} of {module}, line {frame.f_lineno}"


def plain_option(value: Any) -> Any:
    """An option as ranks compare it: paths in full, sets in order, objects by their names."""
    if isinstance(value, os.PathLike):
        return str(absolute(value))
    if isinstance(value, Mapping):  # its values may be secrets, and options are shown
        data = repr(sorted(value.items(), key=repr)).encode()
        return f"{', '.join(sorted(map(str, value)))} ({hashlib.sha256(data).hexdigest()[:8]})"
    if isinstance(value, set | frozenset | list | tuple):
        return sorted(map(str, value))
    if value is None or isinstance(value, str | int | float):
        return value
    return str(getattr(value, "name", type(value).__qualname__))
