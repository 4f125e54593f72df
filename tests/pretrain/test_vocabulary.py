"""--allow-vocab-resize: refused without it; with it, what remains is equal to the bit, what is
added is zero, and both are said."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pretrain import jobs
from tests.pretrain.common import QUIET, RATES, command, mesh, stdlib
from tests.ranks import RankPool

STATES = jobs.states
MODEL = command(
    "--model-family llama --num-layers 2 --hidden-size 48 --ffn-hidden-size 96 "
    "--num-attention-heads 6 --num-query-groups 6 --seq-length 32"
)
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")


def argv(*more: list[str] | str) -> list[str]:
    batch = "--global-batch-size 6 --micro-batch-size 1"
    return command(MODEL, batch, RATES, QUIET, stdlib(), "--train-iters 3", *more)


@pytest.mark.parametrize(
    "case",
    [
        (2, "--make-vocab-size-divisible-by 128", 3, 512, 384, "128 rows dropped"),
        (1, "--make-vocab-size-divisible-by 1", 2, 257, 512, "255 rows added as zeros"),
    ],
    ids=["dropped", "added"],
)
def test_resize(ranks: RankPool, tmp_path: Path, case: tuple[Any, ...]) -> None:
    world, first, tp, stored, rows, note = case
    save = argv(mesh(world, 1), first, f"--save {tmp_path}")
    source = ranks.run(world, STATES, save, train=True)[0]["full"]
    resume = argv(mesh(tp, 1), f"--load {tmp_path} --universal-checkpoint")
    refused = ranks.run(tp, jobs.run, resume)
    for rank in refused:
        assert rank["error"] == "UsageError" and f"a divisor of {stored}" in rank["text"]
        assert "--allow-vocab-resize" in rank["text"]
    found = ranks.run(tp, STATES, [*resume, "--allow-vocab-resize"])
    check(source, found[0]["full"], stored, rows)
    said = found[0]["said"]
    assert all(f"{name}: {note}" in said for name in VOCABULARY), said


def check(
    source: dict[Any, torch.Tensor], found: dict[Any, torch.Tensor], stored: int, rows: int
) -> None:
    """Masters and both moments: equal in all rows that both sides have, zero in the rest."""
    assert source.keys() == found.keys() and len(found) == 3 * (2 * 6 + 3)
    common = min(stored, rows)
    for (name, key), want in source.items():
        have = found[name, key]
        if name not in VOCABULARY:
            assert torch.equal(want, have), (name, key)
            continue
        assert (len(want), len(have)) == (stored, rows)
        assert torch.equal(want[:common], have[:common]), (name, key)
        assert want[:common].count_nonzero(), (name, key)
        assert not have[common:].count_nonzero(), (name, key)


def test_a_size_that_divides_is_kept(ranks: RankPool, tmp_path: Path) -> None:
    """With the flag too: nothing is resized that need not be, and nothing is said."""
    source = ranks.run(1, STATES, argv(mesh(1, 1), f"--save {tmp_path}"), train=True)[0]["full"]
    load = f"--load {tmp_path} --universal-checkpoint --allow-vocab-resize"
    found = ranks.run(2, STATES, argv(mesh(2, 1), load))
    assert len(source[VOCABULARY[0], "fp32"]) == 384
    check(source, found[0]["full"], 384, 384)
    assert "resized" not in found[-1]["said"]
