"""One fate for all ranks: a failure on one rank is raised on every rank, and nobody waits for
ever."""

import functools
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar

from megatron_ucp.errors import DamagedFileError, RankError, UcpError, UsageError

T = TypeVar("T")
P = ParamSpec("P")
_AT_ONCE_BYTES = 4096


def world() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) without torch.distributed."""
    import torch.distributed as dist

    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(value: T) -> list[T]:
    """The value of every rank, by rank. Collective: one, where the values are small, and a second
    one for what does not fit."""
    return gathered(value, _all_gather) if world()[1] > 1 else [value]


def gathered(value: T, exchange: Callable[[bytes, int], list[bytes]]) -> list[T]:
    """As `gather`, among ranks that get the bytes of all of them by `exchange`, each filled up to
    one size."""
    data = pickle.dumps(value)
    first = exchange(len(data).to_bytes(8, "little") + data[: _AT_ONCE_BYTES - 8], _AT_ONCE_BYTES)
    sizes = [int.from_bytes(part[:8], "little") for part in first]
    if (longest := max(sizes)) > _AT_ONCE_BYTES - 8:
        first = [bytes(8) + part for part in exchange(data, longest)]
    return [
        pickle.loads(part[8 : 8 + size]) for part, size in zip(first, sizes, strict=True)
    ]  # our own ranks' bytes


def _all_gather(data: bytes, size_bytes: int) -> list[bytes]:
    """The bytes of every rank, each filled up to one size. (torch's all_gather_object takes two
    collectives for any value.)"""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_object_coll_device

    device = _get_object_coll_device(dist.group.WORLD)
    mine = filled(data, size_bytes).to(device)
    out = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(out, mine)
    return [part.cpu().numpy().tobytes() for part in out]


def exchange(given: Mapping[int, T]) -> dict[int, T]:
    """Gives each rank its own value, by its number, where there is one; returns what came to this
    one, by the rank that gave it. Collective."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_object_coll_device

    if world()[1] == 1:
        return {**given}
    data = {rank: pickle.dumps(value) for rank, value in given.items()}
    sizes = gather({rank: len(one) for rank, one in data.items()})
    device, own = _get_object_coll_device(dist.group.WORLD), world()[0]
    going = {rank: filled(one, len(one)).to(device) for rank, one in data.items()}
    coming = {
        rank: filled(b"", told[own]).to(device) for rank, told in enumerate(sizes) if own in told
    }
    messages = [dist.P2POp(dist.irecv, one, rank) for rank, one in coming.items()]
    messages += [dist.P2POp(dist.isend, one, rank) for rank, one in going.items()]
    for one in dist.batch_isend_irecv(messages) if messages else ():
        one.wait()
    return {rank: pickle.loads(one.cpu().numpy().tobytes()) for rank, one in coming.items()}


def filled(data: bytes, size_bytes: int) -> Any:
    """A message of so many bytes, as a tensor."""
    import torch

    return torch.frombuffer(bytearray(data.ljust(size_bytes, b"\0")), dtype=torch.uint8)


class Ranks(Protocol):
    """Ranks that agree elsewhere than in the default process group."""

    @property
    def rank(self) -> int:
        """This one."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """As the function."""
        ...


class together:
    """Every rank leaves this block without an error, or every rank raises the error of the lowest
    failing rank. Collective.

    An error that is no UcpError (a defect, an interrupt) goes on unchanged on its own rank; the
    others get a RankError. `value`, set in the block, is in `values` of all ranks after it, by
    rank. They do so in the default process group, or as `ranks` say.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.value: Any = None
        self.values: list[Any] = []
        self._ranks = ranks

    def __enter__(self) -> "together":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        told = _as_ucp_error(error)
        own, everywhere = (
            (world()[0], gather) if self._ranks is None else (self._ranks.rank, self._ranks.gather)
        )
        found = everywhere((told, self.value if told is None else None))
        if error is not None and error is not told and not isinstance(error, OSError):
            return  # goes on as it is
        for rank, (first, _) in enumerate(found):
            if first is not None and rank == own:
                raise (told or first)
            if first is not None:
                first.problem += f" (on rank {rank})"
                raise first
        self.values = [value for _, value in found]


class alone(together):
    """As `together`, of one process by itself: no other rank knows of its work."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.values = [self.value]


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
        """Raises the error, if there was one."""
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
    return RankError(
        "another rank failed with an error that is no checkpoint error; its own output shows it"
    )


def is_of_ranks(error: BaseException) -> bool:
    """Whether a collective raised this, and no other code: its connections broke, as they do when a
    rank dies, or its process group is gone. torch has no class for it: gloo's errors are plain
    ones, which name it or come out of torch.distributed."""
    import torch.distributed as dist

    text = str(error)
    if isinstance(error, dist.DistError) or "gloo" in text or "NCCL" in text:
        return True
    trace, home = error.__traceback__, dist.distributed_c10d.__name__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == home:
            return True
        trace = trace.tb_next
    return False


@contextmanager
def as_rank_error(what: str, left: str = "") -> Iterator[None]:
    """Inside, collectives that break are a RankError: `what` did not finish, and `left` says what
    is left of the run."""
    try:
        yield
    except (RuntimeError, ValueError) as error:  # the latter for a group that is gone
        if not is_of_ranks(error):
            raise
        raise RankError(
            f"{what} did not finish: a rank died, or messages between ranks failed",
            found=str(error).strip().partition("\n")[0][:200],
            fix=f"{left or _LEFT}. Look at the other ranks' output; build the world again (process "
            "groups, model, engine) of the ranks that are there, and load the newest save",
        ) from error


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


def collect(make: Callable[[], T]) -> list[T]:
    """What `make` returns on every rank, by rank; an error is raised as by `together`. One
    collective."""
    with together() as block:
        block.value = make()
    return block.values


def require_same(
    options: Sequence[Mapping[str, Any]],
    problem: str = "the ranks were given different options",
) -> None:
    """Raises UsageError that names the first option in which a rank's `options` are not those of
    rank 0, and both values. They are what a `together` block gave: every rank raises the same."""
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


def plain_option(value: Any) -> Any:
    """An option as ranks compare it: paths in full, sets in order, objects by their names."""
    if isinstance(value, os.PathLike):
        return os.path.abspath(value)
    if isinstance(value, set | frozenset | list | tuple):
        return sorted(map(str, value))
    if value is None or isinstance(value, str | int | float):
        return value
    return str(getattr(value, "name", type(value).__qualname__))
