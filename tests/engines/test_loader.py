"""The data position: what `ResumableLoader` deals out after a resume on any number of ranks. Notes
of a step that takes another number of samples than it did."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

import megatron_ucp as ucp
from megatron_ucp.engines.deepspeed.state import BATCH, notes_of_batch
from megatron_ucp.errors import StateMismatchError, UnsupportedError

EPOCHS = 3


def loaders(
    ranks: int, size: int, batch: int = 1, drop_last: bool = False, workers: int = 0, **sampler: Any
) -> list[Any]:
    """One loader per rank over the numbers below `size`."""
    return [
        ucp.ResumableLoader(
            DataLoader(
                range(size),
                batch_size=batch,
                num_workers=workers,
                drop_last=drop_last,  # type: ignore[arg-type]
                sampler=DistributedSampler(range(size), ranks, rank, **{"seed": 7, **sampler}),
            )
        )
        for rank in range(ranks)
    ]  # type: ignore[arg-type]


def run(ranks: list[Any], epochs: int = EPOCHS) -> Iterator[tuple[int, list[int], dict[str, Any]]]:
    """(epoch, samples of all ranks, state) after each step."""
    for epoch in range(ranks[0].epoch, epochs):
        for loader in ranks:
            loader.set_epoch(epoch)
        for batches in zip(*ranks, strict=True):
            states = [loader.state_dict() for loader in ranks]
            assert all(state == states[0] for state in states)
            yield epoch, [int(sample) for batch in batches for sample in batch], states[0]


def by_epoch(steps: Any) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {epoch: [] for epoch in range(EPOCHS)}
    for epoch, samples, _ in steps:
        found[epoch] += samples
    return found


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations((1, 2, 3, 4, 8), 2)))
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_nothing_is_repeated_and_nothing_skipped(before: int, after: int, stop: int) -> None:
    size = (
        48 if 3 not in (before, after) else 72
    )  # divides by all: DistributedSampler pads an epoch that does not
    first = list(itertools.islice(run(loaders(before, size)), stop * after))
    resumed = loaders(after, size)
    for loader in resumed:
        loader.load_state_dict(first[-1][2])
    found = by_epoch([*first, *run(resumed)])
    assert {epoch: sorted(samples) for epoch, samples in found.items()} == {
        epoch: list(range(size)) for epoch in range(EPOCHS)
    }
    assert found[0] != found[1], "the epochs should be shuffled in another order"


def test_without_the_position_samples_are_repeated() -> None:
    """What the test above sees is there to be seen."""
    first = list(itertools.islice(run(loaders(4, 48)), 5))
    found = by_epoch([*first, *run(loaders(2, 48))])
    assert sorted(found[0]) != list(range(48))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_same_mesh_goes_on_with_the_same_batches(workers: int) -> None:
    whole = [step[:2] for step in run(loaders(2, 50, batch=3))]
    first = list(
        itertools.islice(run(loaders(2, 50, batch=3, workers=workers)), 6)
    )  # workers fetch ahead
    resumed = loaders(2, 50, batch=3)
    for loader in resumed:
        loader.load_state_dict(first[-1][2])
    assert [step[:2] for step in [*first, *run(resumed)]] == whole


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_from_the_beginning_it_is_distributed_samplers_own_order(
    ranks: int, shuffle: bool, drop_last: bool
) -> None:
    for rank, loader in enumerate(
        loaders(ranks, 10, batch=2, drop_last=drop_last, shuffle=shuffle)
    ):
        plain = DataLoader(
            range(10),
            2,
            drop_last=drop_last,  # type: ignore[arg-type]
            sampler=DistributedSampler(range(10), ranks, rank, shuffle, 7),
        )  # type: ignore[arg-type]
        assert len(loader) == len(plain)
        assert [b.tolist() for b in loader] == [b.tolist() for b in plain]
        assert [b.tolist() for b in loader] == [b.tolist() for b in plain], (
            "and so it is the second time"
        )


def test_an_epoch_that_does_not_divide_skips_nothing() -> None:
    first = list(itertools.islice(run(loaders(4, 50)), 5))
    resumed = loaders(3, 50)
    for loader in resumed:
        loader.load_state_dict(first[-1][2])
    samples = by_epoch([*first, *run(resumed)])[0]
    assert set(samples) == set(range(50))
    assert len(samples) == 50, "20 were dealt to four ranks, 30 to three"


def test_where_the_rest_does_not_divide_it_is_padded_as_distributed_sampler_does() -> None:
    first = list(itertools.islice(run(loaders(4, 50)), 6))
    resumed = loaders(4, 50)
    for loader in resumed:
        loader.load_state_dict(first[-1][2])
    assert list(by_epoch([*first, *run(resumed)]).values()) == list(
        by_epoch(run(loaders(4, 50))).values()
    )


def test_the_end_of_an_epoch_is_not_the_epoch_again() -> None:
    first = [step for step in run(loaders(4, 20), epochs=1)]
    resumed = loaders(2, 20)
    for loader in resumed:
        loader.load_state_dict(first[-1][2])
    rest = list(run(resumed))
    assert [epoch for epoch, *_ in rest] == [1] * 10 + [2] * 10


def test_a_loop_that_breaks_starts_again_at_the_beginning() -> None:
    (loader,) = loaders(1, 6, shuffle=False)
    loader.load_state_dict({**loader.state_dict(), "samples": 2})
    assert [int(b) for b in itertools.islice(loader, 2)] == [2, 3]
    assert [int(b) for b in loader] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("change", [{"seed": 8}, {"shuffle": False}])
def test_another_order_is_refused(change: dict[str, Any]) -> None:
    state = loaders(2, 20)[0].state_dict()
    with pytest.raises(StateMismatchError, match="another order of samples"):
        loaders(2, 20, **change)[0].load_state_dict(state)
    with pytest.raises(StateMismatchError, match="another order of samples"):
        loaders(2, 21)[0].load_state_dict(state)


def test_a_sampler_that_deals_in_blocks_is_refused() -> None:
    class Blocks(DistributedSampler):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[int]:
            return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))

    loader = ucp.ResumableLoader(DataLoader(range(8), 2, sampler=Blocks(range(8), 2, 1)))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="in another way"):
        loader.load_state_dict({**loader.state_dict(), "samples": 4})


def test_other_samplers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="SequentialSampler"):
        ucp.ResumableLoader(DataLoader(range(4), 2, sampler=SequentialSampler(range(4))))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="none of DistributedSampler's kind"):
        ucp.ResumableLoader(DataLoader(range(4), batch_size=None))  # type: ignore[arg-type]


class Engine:
    """What DeepSpeed says of a batch."""

    def __init__(self, micro: int, accumulated: int, ranks: int, autotp: int = 1) -> None:
        self.sizes = micro, accumulated, ranks, autotp

    def train_batch_size(self) -> int:
        micro, accumulated, ranks, autotp = self.sizes
        return micro * accumulated * ranks * autotp

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.sizes[0]

    def gradient_accumulation_steps(self) -> int:
        return self.sizes[1]

    def autotp_size(self) -> int:
        return self.sizes[3]


def notes(folder: Path, engine: Engine, run: dict[str, Any], tp: int = 1, **kept: Any) -> list[str]:
    counters = {"global_steps": 10, "global_samples": 320, **kept}
    return notes_of_batch(folder / "tag", run, counters, engine, tp, counts_samples=False)


@pytest.mark.parametrize("run", [{BATCH: 32}, {}])
def test_eight_ranks_become_six(tmp_path: Path, run: dict[str, Any]) -> None:
    """32 samples can't be kept on 6 ranks: the note says what they are now, and what is nearest."""
    changed, skipped = notes(tmp_path, Engine(4, 1, 6), run)
    assert "32 samples before, 24 (4 x 1 accumulated x 6 data-parallel ranks) now" in changed
    assert "32 does not divide by 6 ranks: per-rank batch x accumulation of 5 or 6" in changed
    assert "goes on after sample 240, which repeats 80 samples" in skipped


def test_a_batch_that_can_be_kept(tmp_path: Path) -> None:
    (changed, _) = notes(tmp_path, Engine(4, 1, 4), {})
    assert "per-rank batch x accumulation of 8 keeps it" in changed
    assert notes(tmp_path, Engine(4, 2, 4), {}) == []


def test_nobody_is_told_of_a_batch_that_nobody_knows(tmp_path: Path) -> None:
    """Files of tensor parallelism without a manifest count samples once, or once for each rank."""
    assert notes(tmp_path, Engine(4, 1, 6), {}, tp=2) == []
    (changed,) = notes(tmp_path, Engine(4, 1, 6), {BATCH: 32}, tp=2)
    assert "32 samples before" in changed
    assert notes(tmp_path, Engine(4, 1, 8), {BATCH: 32}, tp=2) == []
    assert notes(tmp_path, Engine(4, 1, 6), {}, global_steps=0) == []


def test_the_trainer_counts_by_its_steps(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}")
    changed, trainer = notes(tmp_path, Engine(4, 2, 6), {})
    assert "48 (4 x 2 accumulated x 6" in changed
    assert "goes on after sample 480, which leaves out 160 samples" in trainer
