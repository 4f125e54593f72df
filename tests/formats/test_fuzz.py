"""Random damage to real files: a value or a named error, in little time and memory, and nothing is
run, imported or written.

2,000 inputs by default; `-m slow` runs 100,000. An input has a number, and the same number is the
same input: what a run finds is added to FOUND.
"""

from pathlib import Path

import pytest
import torch

from tests.formats.fuzz import FILE_NAME, Good, damaged, good, kinds_of, run, use, whole
from tests.formats.hostile import bounded

MEMORY_BYTES = 2**30
FOUND = {"keys of buffer_names that can't be hashed": 105}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Good:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("good")
    made = good(folder)
    (folder / FILE_NAME).write_text(made.manifest)
    for name in (*made.files, FILE_NAME):  # it is good, and all is imported that reading imports
        use(folder, name)
    whole(folder)
    return made


def check(source: Good, folder: Path, seeds: range) -> None:
    with bounded(MEMORY_BYTES):
        found = run(source, folder, seeds)
    print(
        f"{len(seeds):,} inputs, the slowest took {found.slowest_s:.2f} s: {dict(found.outcomes)}"
    )
    assert not found.wrong, f"{len(found.wrong)} of {len(seeds)}:\n" + "\n".join(found.wrong[:20])
    for kind in {kinds_of(seed) for seed in seeds} - {
        "splice"
    }:  # it damages some and not all: it is neither harmless nor crude
        of_kind = {outcome for which, outcome in found.outcomes if which == kind}
        assert "DamagedFileError" in of_kind and (len(of_kind) > 1 or len(seeds) < 1000), (
            kind,
            of_kind,
        )


def test_damaged_files(source: Good, tmp_path: Path) -> None:
    check(source, tmp_path, range(2000))


@pytest.mark.slow
def test_many_damaged_files(source: Good, tmp_path: Path) -> None:
    check(source, tmp_path, range(2000, 102_000))


@pytest.mark.parametrize("seed", FOUND.values(), ids=FOUND.keys())
def test_what_was_found_once(source: Good, tmp_path: Path, seed: int) -> None:
    with bounded(MEMORY_BYTES):
        assert not run(source, tmp_path, range(seed, seed + 1), also_whole=1).wrong


def test_a_number_is_an_input(source: Good) -> None:
    assert [damaged(source, seed) for seed in range(50)] == [
        damaged(source, seed) for seed in range(50)
    ]
    assert len({damaged(source, seed)[1] for seed in range(500)}) > 450
    assert damaged(source, 0)[1] not in source.files.values()


def test_what_should_not_happen_is_seen(
    source: Good, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: a reader that raises anything else, runs a command or writes a file."""
    import subprocess

    from tests.formats import fuzz

    for wrong, word in (
        (lambda *_: {}["x"], "KeyError"),
        (lambda *_: subprocess.run(["true"]), "subprocess.Popen"),
        (lambda *_: (tmp_path / "x").write_text("x"), "open"),
        (lambda *_: bytearray(2**40), "MemoryError"),
    ):
        monkeypatch.setattr(fuzz, "use", wrong)
        with bounded(MEMORY_BYTES):
            found = run(source, tmp_path, range(1), also_whole=10**6)
        assert len(found.wrong) == 1 and word in found.wrong[0], (word, found.wrong)
