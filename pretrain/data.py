"""Training samples by number. A sample's tokens depend on data, seed and number alone, never on
ranks or batch sizes; so a run that goes on with another dp neither repeats nor skips one, whatever
--train-iters says.

megatron-core's own GPTDataset shuffles all epochs that a run needs at once, hence another
--train-iters gives another order. Here each epoch is a GPTDataset of its own.
"""

import argparse
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

from megatron_ucp.errors import NotFoundError, UsageError
from pretrain.tokenizer import Tokenizer

SPLITS = ("train", "valid", "test")


class Samples(Protocol):
    """Sample i is `sequence + 1` tokens, (sequence + 1,) int64, for every i >= 0; `epoch` of them
    are all the data once."""

    epoch: int

    def __getitem__(self, number: int) -> np.ndarray: ...


class MockSamples:
    """Arithmetic progressions modulo the vocabulary: data that a model can learn."""

    epoch = 2**31

    def __init__(self, ids: int, sequence: int, seed: int, split: int) -> None:
        self._ids, self._sequence, self._seed = ids, sequence, (seed, split)

    def __getitem__(self, number: int) -> np.ndarray:
        first, step = np.random.default_rng((*self._seed, number)).integers(self._ids, size=2)
        return (first + (step % 7 + 1) * np.arange(self._sequence + 1)) % self._ids


class TextSamples:
    """Windows of one row of tokens, in another order in every epoch. A window's last token is the
    next one's first."""

    def __init__(self, tokens: np.ndarray, sequence: int, seed: int) -> None:
        self._tokens, self._sequence, self._seed = tokens, sequence, seed
        self.epoch = max(0, (len(tokens) - 1) // sequence)
        self._order = lru_cache(maxsize=2)(self._shuffle)

    def _shuffle(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(self.epoch)

    def __getitem__(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.epoch)
        start = int(self._order(epoch)[place]) * self._sequence
        return self._tokens[start : start + self._sequence + 1].astype(np.int64)


class IndexedSamples:
    """Part of a .bin/.idx pair, through megatron-core's GPTDataset; epoch e has the seed `seed +
    e`."""

    def __init__(
        self,
        low_level: Any,
        prefix: str,
        documents: np.ndarray,
        sequence: int,
        seed: int,
        tokenizer: Tokenizer,
    ) -> None:
        self._low_level, self._prefix, self._documents = low_level, prefix, documents
        self._sequence, self._seed = sequence, seed
        # what GPTDataset asks of a tokenizer; the last goes into the name of an index that is not
        # written
        self._stand_in = SimpleNamespace(
            vocab_size=tokenizer.vocab_size, eod=tokenizer.eod, unique_identifiers={}
        )
        tokens = int(low_level.sequence_lengths[documents].sum()) if len(documents) else 0
        self.epoch = max(0, (tokens - 1) // sequence)
        self._dataset = lru_cache(maxsize=2)(self._build)

    def _build(self, epoch: int) -> Any:
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.utils import Split

        # Without a blend megatron-core takes the config for mock data, and then keeps the index in
        # memory: otherwise it writes it beside the data, from rank 0, while the other ranks must
        # not read it yet.
        config = GPTDatasetConfig(
            random_seed=self._seed + epoch,
            sequence_length=self._sequence,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            tokenizer=self._stand_in,  # type: ignore[arg-type]
        )
        return GPTDataset(self._low_level, self._prefix, self._documents, None, Split.train, config)

    def __getitem__(self, number: int) -> np.ndarray:
        epoch, place = divmod(number, self.epoch)
        return self._dataset(epoch)._query_document_sample_shuffle_indices(place)[0]


class Blend:
    """Several sources by weight. The choice for a sample depends on the samples before it, not on
    how many follow."""

    def __init__(self, parts: list[tuple[float, Samples]], samples: int) -> None:
        from megatron.core.datasets import helpers

        self._parts = [part for _, part in parts]
        weights = np.array([weight for weight, _ in parts], dtype=np.float64)
        self.epoch = sum(part.epoch for part in self._parts)
        self._which, self._number = (
            np.zeros(samples, dtype=np.int16),
            np.zeros(samples, dtype=np.int64),
        )
        helpers.build_blending_indices(  # type: ignore[attr-defined]
            self._which, self._number, weights / weights.sum(), len(parts), samples, False
        )

    def __getitem__(self, number: int) -> np.ndarray:
        return self._parts[self._which[number]][int(self._number[number])]


class Batches:
    """The micro batches of one data-parallel rank: consecutive samples, `micro` for each rank in
    turn."""

    def __init__(
        self, samples: Samples, tokenizer: Tokenizer, micro: int, dp: int, rank: int
    ) -> None:
        self._samples, self._ids, self._micro, self._dp, self._rank = (
            samples,
            tokenizer.vocab_size,
            micro,
            dp,
            rank,
        )

    def numbers(self, consumed: int, step: int) -> range:
        """The samples of micro step `step` of the iteration that starts after `consumed`
        samples."""
        first = consumed + (step * self._dp + self._rank) * self._micro
        return range(first, first + self._micro)

    def get(self, consumed: int, step: int) -> torch.Tensor:
        """(micro, sequence + 1) int64. Raises UsageError for an id that the vocabulary lacks."""
        rows = np.stack([self._samples[number] for number in self.numbers(consumed, step)])
        if rows.min() < 0 or rows.max() >= self._ids:
            raise UsageError(
                "the data holds an id that the vocabulary lacks",
                expected=f"ids below {self._ids}",
                found=int(rows.max()),
                fix="use the tokenizer that made the data; for NullTokenizer, a larger "
                "--vocab-size",
            )
        return torch.from_numpy(rows.astype(np.int64))


def make_samples(
    args: argparse.Namespace, tokenizer: Tokenizer, split: int, samples: int
) -> Samples:
    """Train (0), validation (1) or test (2) data for at least that many samples. Raises UsageError
    where a split is too small."""
    shares = parse_split(args.split)
    low, high = sum(shares[:split]), sum(shares[: split + 1])
    if args.mock_data:
        return MockSamples(tokenizer.vocab_size - 1, args.seq_length, args.seed, split)
    parts: list[tuple[float, Samples]] = []
    for weight, path in parse_blend(args.data_path):
        open_one = _open_indexed if is_indexed(path) else _open_text
        source = open_one(path, args, tokenizer, low, high)
        if not source.epoch:
            raise UsageError(
                f"the {SPLITS[split]} part of the data holds no whole sequence",
                file=path,
                expected=f"more than {args.seq_length} tokens",
                found=f"--split {args.split}",
                fix="give that part a larger share in --split, or more data"
                + ("" if split == 0 else ", or --eval-iters 0"),
            )
        parts.append((source.epoch if weight is None else weight, source))
    return parts[0][1] if len(parts) == 1 else Blend(parts, samples)


def parse_split(text: str) -> list[float]:
    """ "969,30,1" as three shares that add up to 1."""
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not shares[0]:
        raise UsageError(
            "--split can't be read",
            expected="up to three weights as 969,30,1, the first above 0",
            found=text,
        )
    return [share / sum(shares) for share in [*shares, 0.0, 0.0][:3]]


def parse_blend(words: list[str]) -> list[tuple[float | None, str]]:
    """--data-path: paths alone (blended by size), or a weight before each."""
    if len(words) > 1 and not len(words) % 2:
        try:
            return [
                (float(weight), path) for weight, path in zip(words[::2], words[1::2], strict=True)
            ]
        except ValueError:
            pass
    return [(None, path) for path in words]


def is_indexed(path: str) -> bool:
    return Path(path + ".idx").is_file() and Path(path + ".bin").is_file()


@lru_cache(maxsize=8)  # the splits share it
def _low_level(path: str) -> Any:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return IndexedDataset(path)


def _open_indexed(
    path: str, args: argparse.Namespace, tokenizer: Tokenizer, low: float, high: float
) -> IndexedSamples:
    dataset = _low_level(path)
    count = len(dataset.sequence_lengths)
    documents = np.arange(
        round(low * count), round(high * count), dtype=np.int32
    )  # as megatron-core's builder cuts
    return IndexedSamples(dataset, path, documents, args.seq_length, args.seed, tokenizer)


def _open_text(
    path: str, args: argparse.Namespace, tokenizer: Tokenizer, low: float, high: float
) -> TextSamples:
    tokens = _tokens(path, tokenizer)
    return TextSamples(
        tokens[round(low * len(tokens)) : round(high * len(tokens))], args.seq_length, args.seed
    )


@lru_cache(maxsize=8)
def _tokens(path: str, tokenizer: Tokenizer) -> np.ndarray:
    """All text of a file, or of the files in a folder, each ended by `eod`."""
    return np.concatenate(
        [
            np.append(tokenizer.encode(file.read_bytes()), np.int32(tokenizer.eod))
            for file in text_files(path)
        ]
    )


def text_files(path: str) -> list[Path]:
    """A file, or those in a folder in the order of their names. Raises NotFoundError,
    UsageError."""
    place = Path(path)
    files = (
        sorted(p for p in place.iterdir() if p.is_file() and not p.name.startswith("."))
        if place.is_dir()
        else [place]
    )
    if not place.exists() or not files:
        raise NotFoundError(
            "--data-path names no data",
            file=path,
            expected="PREFIX with PREFIX.bin and PREFIX.idx, a text file, or a folder of them",
            found="an empty folder" if place.exists() else "nothing",
        )
    if place.suffix in (".bin", ".idx"):
        raise UsageError(
            "--data-path takes indexed data without the ending",
            file=path,
            expected=str(place.with_suffix("")),
            found=path,
        )
    return files
