"""A torch DataLoader over a DistributedSampler that goes on where a save was, also on another
number of ranks."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron_ucp.errors import StateMismatchError, UnsupportedError
from megatron_ucp.reshard.engine import KeepsPosition

_NEEDED = ("num_replicas", "rank", "dataset", "epoch", "drop_last", "set_epoch")


class ResumableLoader:
    """Wraps a `DataLoader` whose sampler is a `DistributedSampler`, or one of its kind; iterates as
    it does, and goes on where a save was, on any number of ranks.

    Such a sampler deals the epoch's order out like cards, so that the ranks together have always
    had a prefix of it: how many samples that is says all, on any number of ranks. Counted is what
    the loop got, not what workers fetched ahead.

    Args:
        loader: The `DataLoader`.

    Raises:
        UnsupportedError: For another sampler.

    Example:
        >>> sampler = DistributedSampler(data, seed=1)
        >>> loader = ucp.ResumableLoader(DataLoader(data, batch_size=4, sampler=sampler))
        >>> ucp.attach(engine, loader=loader)  # saves keep its position, loads restore it
        >>> for epoch in range(loader.epoch, epochs):
        ...     loader.set_epoch(epoch)
        ...     for batch in loader:
        ...         train(batch)
    """

    def __init__(self, loader: Any) -> None:
        batches: Any = getattr(loader, "batch_sampler", None)
        sampler = getattr(batches, "sampler", None)
        missing = [name for name in _NEEDED if not hasattr(sampler, name)]
        if missing:
            raise UnsupportedError(
                "the loader's sampler is none of DistributedSampler's kind",
                found=type(sampler).__qualname__,
                expected=f"a batch sampler over one with {', '.join(_NEEDED)}",
                fix="use DataLoader(..., batch_size=, sampler=DistributedSampler(...)), also on "
                "one rank",
            )
        self.loader: Any = loader
        self.sampler: Any = sampler
        self.samples = 0  # of the epoch, handed out by all ranks together
        self._start = 0  # where the next iteration begins
        self._is_restored = False  # and has not been iterated since
        batches.sampler = _Rest(self)

    @property
    def epoch(self) -> int:
        return int(self.sampler.epoch)

    def set_epoch(self, epoch: int) -> None:
        """As the sampler's. Another epoch than the present one begins at its first sample."""
        if epoch != self.epoch:
            self._start = self.samples = 0
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        start, replicas = self._start, int(self.sampler.num_replicas)
        rest = len(self.sampler.dataset) - start
        share = rest // replicas if self.sampler.drop_last else -(-rest // replicas)  # of this rank
        self.samples, handed = start, 0
        for batch in self._begun():
            handed = min(handed + int(self.loader.batch_sampler.batch_size), share)
            self.samples = start + handed * replicas
            yield batch

    def _begun(self) -> Iterator[Any]:
        """The iteration of the loader that begins now. Torch draws a seed of its workers as one
        begins; the first one after a load draws it of a copy: what was restored is what the
        program draws next, as in the run that saved, whose iteration had begun before."""
        if not self._is_restored:
            return iter(self.loader)
        self._is_restored = False
        with torch.random.fork_rng(devices=[]):
            return iter(self.loader)

    def take_start(self) -> int:
        """Where the iteration that begins now starts; the one after it starts at the beginning."""
        start, self._start = self._start, 0
        return start

    def order_from(self, start: int) -> list[int]:
        """This rank's share of the epoch's order after its first `start` samples, as
        DistributedSampler deals it."""
        replicas, rank = int(self.sampler.num_replicas), int(self.sampler.rank)
        whole = self._whole()
        rest = whole[start:]
        if self.sampler.drop_last:
            rest = rest[: len(rest) // replicas * replicas]
        elif short := -len(rest) % replicas:
            rest += (whole * (short // len(whole) + 1))[
                :short
            ]  # the epoch's first ones again, as there
        return rest[rank::replicas]

    def _whole(self) -> list[int]:
        """The epoch's order: what the sampler gives to one replica of one."""
        alone, count = copy.copy(self.sampler), len(self.sampler.dataset)
        alone.num_replicas, alone.rank, alone.num_samples, alone.total_size = 1, 0, count, count
        return list(alone)

    # ---------------------------------------------------------------- position

    def state_dict(self) -> dict[str, Any]:
        """Position in samples; the same on every rank and on every number of ranks."""
        return {"epoch": self.epoch, "samples": self.samples, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {
            "dataset": len(self.sampler.dataset),
            "seed": getattr(self.sampler, "seed", None),
            "shuffle": getattr(self.sampler, "shuffle", None),
        }

    def check(self, state: Mapping[str, Any], file: str | None = None) -> None:
        """Raises StateMismatchError where the position counts in another order than this
        loader's."""
        saved = {key: state.get(key) for key in self._identity()}
        if saved != self._identity():
            raise StateMismatchError(
                "the data position belongs to another order of samples",
                file=file,
                expected=saved,
                found=self._identity(),
                fix="build dataset and sampler as the run did, or load without loader=",
            )
        if (ours := self.order_from(0)) != (theirs := list(self.sampler)):
            raise UnsupportedError(
                "the sampler deals its samples out in another way than DistributedSampler",
                expected=f"{ours[:4]}...",
                found=f"{theirs[:4]}...",
                fix="keep the data position yourself, in client_state",
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after the position. Raises as `check`."""
        self.check(state)
        self.sampler.set_epoch(int(state["epoch"]))
        self._start = self.samples = min(int(state["samples"]), len(self.sampler.dataset))
        self._is_restored = True


def restore_position(loader: KeepsPosition | None, position: Mapping[str, Any] | None) -> list[str]:
    """Gives a loader the position of a checkpoint; notes where there is only one of them."""
    if loader is not None and position is not None:
        loader.load_state_dict(position)
    elif loader is not None or position is not None:
        why = "no loader was given" if loader is None else "the checkpoint has none"
        return [f"the data position was not restored: {why}"]
    return []


class _Rest:
    """What the batch sampler draws from: the sampler, less what was handed out before."""

    def __init__(self, owner: ResumableLoader) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[int]:
        return iter(self._owner.order_from(self._owner.take_start()))

    def __len__(self) -> int:
        return len(self._owner.sampler)
