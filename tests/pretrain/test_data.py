"""Samples by number: the same whatever the number of ranks, nothing twice, nothing left out."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ucp.errors import NotFoundError, UsageError
from pretrain import same_data
from pretrain.arguments import complete, parse
from pretrain.data import Batches, Samples, make_samples, parse_blend, parse_split
from pretrain.tokenizer import ByteTokenizer, HuggingFaceTokenizer, make_tokenizer
from tests.pretrain import jobs
from tests.pretrain.common import BATCH, LLAMA, QUIET, RATES, command, stdlib
from tests.ranks import RankPool

SEQUENCE = 32
TEXT = "".join(
    hashlib.sha256(bytes([n % 256, n // 256])).hexdigest() for n in range(320)
).encode()  # never says the same twice


def samples_of(*flags: str, split: int = 0, count: int = 1000) -> Samples:
    args = complete(
        parse(command(LLAMA, "--micro-batch-size 1 --lr 1e-3 --train-iters 10", *flags)),
        1,
    )
    return make_samples(args, make_tokenizer(args), split, count)


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_bytes(TEXT)
    return str(tmp_path / "text.txt")


@pytest.fixture
def indexed(tmp_path: Path) -> str:
    """Documents of numbered ids, written by megatron-core's own builder."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    prefix = tmp_path / "corpus_text_document"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(5000))
    for start in range(0, 4000, 100):
        builder.add_document(torch.arange(start, start + 100), [100])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def hashes(samples: Samples, dp: int, micro: int, iterations: int, batch: int = 16) -> list[str]:
    """Of each iteration's token ids, in the order of the global batch."""
    out = []
    for iteration in range(iterations):
        rows: dict[int, torch.Tensor] = {}
        for rank in range(dp):
            batches = Batches(samples, ByteTokenizer(10**6), micro, dp, rank)
            for step in range(batch // dp // micro):
                numbers = batches.numbers(iteration * batch, step)
                assert not set(numbers) & set(rows)
                rows |= dict(zip(numbers, batches.get(iteration * batch, step), strict=True))
        assert sorted(rows) == list(range(iteration * batch, (iteration + 1) * batch))
        out.append(
            hashlib.sha256(b"".join(rows[n].numpy().tobytes() for n in sorted(rows))).hexdigest()
        )
    return out


@pytest.mark.parametrize("kind", ["mock", "text", "indexed", "blend"])
def test_batches_do_not_depend_on_dp(kind: str, text: str, indexed: str) -> None:
    flags = {
        "mock": ["--mock-data"],
        "text": ["--data-path", text],
        "blend": ["--data-path", "3", text, "1", indexed],
        "indexed": ["--data-path", indexed],
    }[kind]
    if "text" not in kind:
        flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "5000"]
    expected = hashes(samples_of(*flags), 1, 16, 6)
    assert len(set(expected)) == 6
    for dp, micro in ((2, 4), (4, 1), (4, 4), (16, 1)):
        assert hashes(samples_of(*flags), dp, micro, 6) == expected
    assert hashes(samples_of(*flags, "--seed 5"), 1, 16, 6) != expected
    assert (
        hashes(samples_of(*flags, "--train-iters 500"), 1, 16, 6) == expected
    )  # nor on the length of the run
    assert hashes(samples_of(*flags, count=5000), 1, 16, 6) == expected


@pytest.mark.parametrize("kind", ["text", "indexed"])
def test_an_epoch_holds_everything_once(kind: str, text: str, indexed: str) -> None:
    flags = ["--data-path", text if kind == "text" else indexed, "--split", "1"]
    if kind == "indexed":
        flags += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "5000"]
    samples = samples_of(*flags)
    first, second = (
        [tuple(samples[n]) for n in range(e * samples.epoch, (e + 1) * samples.epoch)]
        for e in (0, 1)
    )
    assert all(len(row) == SEQUENCE + 1 for row in first)
    assert len(set(first)) == samples.epoch and first != second
    if kind == "text":
        assert set(first) == set(second) and samples.epoch == len(TEXT) // SEQUENCE
    else:  # documents are shuffled, so windows differ: count the tokens
        tokens = sorted(token for row in first for token in row[:-1])
        assert (
            len(set(tokens)) == len(tokens) == samples.epoch * SEQUENCE
            and samples.epoch == (4000 - 1) // SEQUENCE
        )


def test_indexed_data_is_as_megatron_core_reads_it(indexed: str) -> None:
    """The first epoch is GPTDataset's own."""
    from types import SimpleNamespace

    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQUENCE,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        tokenizer=SimpleNamespace(vocab_size=5001, eod=5000, unique_identifiers={}),
    )  # type: ignore[arg-type]
    theirs = GPTDataset(
        IndexedDataset(indexed), indexed, np.arange(40, dtype=np.int32), None, Split.train, config
    )
    mine = samples_of(
        "--data-path", indexed, "--tokenizer-type NullTokenizer --vocab-size 5000 --split 1"
    )
    assert len(theirs) == mine.epoch
    for number in (0, 7, mine.epoch - 1):
        assert mine[number][:-1].tolist() == theirs[number]["tokens"].tolist()
        assert mine[number][1:].tolist() == theirs[number]["labels"].tolist()
    assert not list(
        Path(indexed).parent.glob("*cache*")
    )  # nothing is written beside the user's data


def test_splits_share_nothing(text: str, indexed: str) -> None:
    for flags in (
        ["--data-path", text],
        ["--data-path", indexed, "--tokenizer-type", "NullTokenizer", "--vocab-size", "5000"],
    ):
        parts = [samples_of(*flags, "--split 8,1,1", split=split) for split in (0, 1, 2)]
        rows = [{tuple(part[n]) for n in range(part.epoch)} for part in parts]
        assert (
            all(rows)
            and not rows[0] & rows[1]
            and not rows[1] & rows[2]
            and len(rows[0]) > 5 * len(rows[1])
        )


def test_blend_weights(text: str, indexed: str) -> None:
    samples = samples_of(
        "--data-path 3", text, "1", indexed, "--tokenizer-type NullTokenizer --vocab-size 5000"
    )
    from_text = sum(int(samples[n].max()) < 256 or samples[n].max() == 5000 for n in range(400))
    assert from_text == pytest.approx(
        300, abs=25
    )  # a few windows of the indexed data are below 256 too
    assert parse_blend(["a", "b"]) == [(None, "a"), (None, "b")] and parse_blend(["2", "a"]) == [
        (2.0, "a")
    ]


def test_split_text() -> None:
    assert parse_split("969,30,1") == [0.969, 0.03, 0.001] and parse_split("1") == [1.0, 0.0, 0.0]
    for wrong in ("", "a,b", "0,1", "1,2,3,4", "-1,2"):
        with pytest.raises(UsageError, match="--split"):
            parse_split(wrong)


def test_byte_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(256)))
    (tmp_path / "b.txt").write_bytes(b"\xff" * 200)
    samples = samples_of(f"--data-path {tmp_path} --split 1")
    seen = {token for n in range(samples.epoch) for token in samples[n]}
    assert 256 in seen and max(seen) == 256 and ByteTokenizer().vocab_size == 257


def test_hugging_face_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "</s>": 1, "a": 2, "line": 3}, unk_token="[UNK]")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="</s>", unk_token="[UNK]"
    ).save_pretrained(tmp_path / "tokenizer")
    found = HuggingFaceTokenizer(str(tmp_path / "tokenizer"))
    assert (found.vocab_size, found.eod, found.encode(b"a line b").tolist()) == (4, 1, [2, 3, 0])
    (tmp_path / "text.txt").write_text("a line " * 100)
    for spelling in ("HuggingFaceTokenizer", "HFTokenizer"):
        samples = samples_of(
            f"--data-path {tmp_path / 'text.txt'} --tokenizer-type",
            spelling,
            f"--tokenizer-model {tmp_path / 'tokenizer'} --split 1",
        )
        assert set(samples[0]) == {2, 3}


def test_data_that_can_not_be_used(tmp_path: Path, text: str, indexed: str) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "nothing", tmp_path / "empty"):
        with pytest.raises(NotFoundError, match="--data-path"):
            samples_of(f"--data-path {path}")
    with pytest.raises(UsageError, match="without the ending"):
        samples_of("--data-path", indexed + ".bin")
    with pytest.raises(UsageError, match="the valid part of the data holds no whole sequence"):
        samples_of("--data-path", text, "--split 9999,1", split=1)
    with pytest.raises(NotFoundError, match="--tokenizer-model"):
        HuggingFaceTokenizer(str(tmp_path / "nothing"))
    samples = samples_of("--data-path", indexed)  # ids up to 3999, a tokenizer of bytes
    with pytest.raises(UsageError, match="an id that the vocabulary lacks"):
        Batches(samples, ByteTokenizer(), 8, 1, 0).get(0, 0)


JOB = jobs.run


def told(*flags: str) -> str:
    rest = "--micro-batch-size 2 --lr 1e-3 --train-iters 10"
    return same_data.identity(complete(parse(command(LLAMA, rest, *flags)), 1))


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / name) for name in ("one.txt", "two.txt")]
    for number, path in enumerate(paths):
        Path(path).write_text(f"{number} and more\n" * 400)
    return paths


def test_what_is_the_same_data(texts: list[str], tmp_path: Path) -> None:
    one, two = texts
    moved = str(tmp_path / "elsewhere.text")
    shutil.copy(one, moved)
    first = told("--data-path", one)
    assert same_data.differences(first, told("--data-path", moved)) == []
    assert same_data.differences(first, told("--data-path 3", one)) == []  # one source
    split = told("--data-path", one, "--split 8,2")
    assert same_data.differences(split, told("--data-path", one, "--split 80,20,0")) == []
    blend = told("--data-path 1", one, "3", two)
    assert same_data.differences(blend, told("--data-path 2", moved, "6", two)) == []
    for unknown in (None, "", "[]", "nothing", 3):  # of an older checkpoint
        assert same_data.differences(unknown, first) == []


def test_what_is_other_data(texts: list[str], tmp_path: Path) -> None:
    one, two = texts
    base = ("--data-path", "1", one, "3", two)
    longer = str(tmp_path / "longer.txt")
    Path(longer).write_text(Path(one).read_text() + "x")
    for flags, flag in {
        ("--data-path", one): "--data-path",
        ("--data-path", "1", two, "3", one): "--data-path",
        ("--data-path", "1", one, "2", two): "--data-path",
        ("--data-path", "1", longer, "3", two): "--data-path",
        (*base, "--split", "8,2"): "--split",
        (*base, "--seq-length", "16"): "--seq-length",
    }.items():
        (line,) = same_data.differences(told(*base), told(*flags))
        assert line.startswith(f"{flag} was "), line
    assert len(same_data.differences(told(*base), told("--mock-data"))) == 3


def test_changes_in_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of a large file are looked at, and its size."""
    monkeypatch.setattr(same_data, "WINDOWS", 4)
    monkeypatch.setattr(same_data, "WINDOW_BYTES", 16)
    data = bytes(range(256)) * 3
    path = tmp_path / "data.txt"
    path.write_bytes(data)
    first = told(f"--data-path {path}")
    for other in (b"x" + data[1:], data[:-1] + b"x", data + b"x"):
        path.write_bytes(other)
        assert same_data.differences(first, told(f"--data-path {path}"))
    path.write_bytes(data)
    assert same_data.differences(first, told(f"--data-path {path}")) == []


def test_the_flag_needs_a_checkpoint() -> None:
    with pytest.raises(UsageError, match="needs --load"):
        told("--mock-data --allow-other-data")


class Runs:
    """A run that was saved after two iterations, and what follows."""

    def __init__(self, ranks: RankPool, folder: str, engine: str, data: str) -> None:
        whole = command(LLAMA, BATCH, RATES, QUIET, "--engine", engine)
        self._whole = [*whole, "--train-iters", "4", "--lr-decay-iters", "4"]
        self._ranks, self._folder = ranks, folder
        first = self.of("--data-path", data, "--save", folder, "--exit-interval 2")
        assert first["iteration"] == 2
        self.losses = self.of("--data-path", data)["losses"][2:]

    def of(self, *flags: str) -> dict[str, Any]:
        return self._ranks.run(1, JOB, command(self._whole, *flags))[0]

    def resumed(self, *flags: str) -> dict[str, Any]:
        return self.of("--load", self._folder, *flags)


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_a_run_goes_on_in_its_own_data_alone(ranks: RankPool, tmp_path: Path, engine: str) -> None:
    """The losses are those of the run that was not interrupted where only the path is another one,
    and others where other data were allowed."""
    own, moved, other = stdlib()[2], str(tmp_path / "moved.py"), stdlib()[4]
    shutil.copy(own, moved)
    runs = Runs(ranks, str(tmp_path / "saved"), engine, own)
    assert runs.resumed("--data-path", moved)["losses"] == runs.losses
    for flags, words in {
        ("--data-path", other): ("--data-path was", own, other),
        ("--data-path", own, "--split", "1,1"): ("--split was 0.969 0.03 0.001, is 0.5 0.5 0",),
        ("--mock-data",): ("--mock-data was not given, is True",),
    }.items():
        refused = runs.resumed(*flags)
        assert refused["error"] == "UsageError", refused
        assert all(word in refused["text"] for word in (*words, "--allow-other-data")), refused
        found = runs.resumed(*flags, "--allow-other-data")
        assert words[0] in found["said"] and "as allowed" in found["said"]
        assert (found["first"], found["iteration"]) == (2, 4) and found["losses"] != runs.losses
    begun = runs.resumed("--data-path", other, "--finetune")
    assert begun["first"] == 0 and "as allowed" not in begun["said"]
