"""What a user does wrong, and what a disk does: a named error on every rank, and an engine that is
unchanged or refuses."""

import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines import kinds
from tests.engines.model import Setup
from tests.engines.sources import Sources, without_manifest

pytestmark = pytest.mark.ranks
TARGET = Setup(1, "bf16", seed=9)
MODEL = "mp_rank_00_model_states.pt"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def attempt(
    sources: Sources, folder: Path, dp: int = 2, setup: Setup = TARGET, **kwargs: Any
) -> list[dict]:
    found = sources.ranks.run(dp, kinds.attempt, setup, str(folder), **kwargs)
    assert len({rank["message"].split(" (on rank")[0] for rank in found}) == 1 or all(
        rank["error"] for rank in found
    )
    return found


def expect(found: list[dict], kind: str, *words: str, unchanged: bool = True) -> None:
    """Every rank raised the same kind of error that says these words, and the engine is as it was
    or refuses."""
    for rank in found:
        assert rank["error"] == kind, rank["message"]
        for word in words:
            assert word in rank["message"], rank["message"]
        assert "what to do:" in rank["message"], rank["message"]
        assert rank["unchanged"] == unchanged
        assert rank["refuses"] != unchanged


def test_a_path_that_is_not_there(sources: Sources, tmp_path: Path) -> None:
    expect(attempt(sources, tmp_path / "nowhere"), "NotFoundError", "nowhere")


def test_an_empty_folder(sources: Sources, tmp_path: Path) -> None:
    expect(attempt(sources, tmp_path), "NotFoundError", "no checkpoint")


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("name", [OPTIM.format(1), OPTIM.format(0), MODEL])
def test_a_missing_file(sources: Sources, broken: Any, name: str, with_manifest: bool) -> None:
    folder = broken() if with_manifest else without_manifest(broken())
    (folder / "filled" / name).unlink()
    word = "missing" if "optim" in name or with_manifest else "no model"
    expect(attempt(sources, folder, tag="filled"), "NotFoundError", word)


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("keep", [0.5, 0.999, 0.0])
@pytest.mark.parametrize("name", [OPTIM.format(1), MODEL])
def test_a_truncated_file(
    sources: Sources, broken: Any, name: str, keep: float, with_manifest: bool
) -> None:
    folder = broken() if with_manifest else without_manifest(broken())
    path = folder / "filled" / name
    os.truncate(path, int(path.stat().st_size * keep))
    expect(attempt(sources, folder, tag="filled"), "DamagedFileError", name)


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("other", ["another run", "another step"])
@pytest.mark.parametrize("zero", [1, 3])
def test_a_file_of_another_save(
    sources: Sources, broken: Any, other: str, zero: int, with_manifest: bool
) -> None:
    setup = Setup(zero, "bf16")
    folder = broken(setup=setup) if with_manifest else without_manifest(broken(setup=setup))
    steps = {"steps": 3} if other == "another run" else {"steps": 4}
    origin = Path(sources.get(2, Setup(zero, "bf16", seed=5), more=0, **steps)) / "trained"
    shutil.copy(origin / OPTIM.format(1), folder / "trained")
    if zero == 3 and other == "another run" and not with_manifest:
        # Such a file holds no weights, no names and the same steps: nothing in it shows where it
        # comes from.
        pytest.skip(
            "ZeRO-3 files of stock DeepSpeed carry no evidence of their run beside the step; the "
            "manifest does"
        )
    expect(attempt(sources, folder, tag="trained"), "ForeignFileError", OPTIM.format(1))


def put(at: Path, text: str) -> None:
    (at / "ucp_manifest.json").write_text(text)


def one_more(run: Path) -> None:
    shutil.copy(run / "filled" / OPTIM.format(1), run / "filled" / OPTIM.format(2))


TAGS = "tags: filled, trained"
OF_ANOTHER_VERSION = '{"format": "megatron_ucp", "version": 99}'
OF_NO_FILES = '{"format": "megatron_ucp", "version": 1}'
MANIFEST = "DamagedFileError", "ucp_manifest.json"
# what is done to a run, the tag that is loaded, the error and its words
WRONG: dict[str, tuple[Callable[[Path], Any], str | None, *tuple[str, ...]]] = {
    "no such tag": (lambda run: None, "global_step7", "NotFoundError", "global_step7", TAGS),
    "latest names no tag": (
        *(lambda run: (run / "latest").write_text("gone"), None),
        *("NotFoundError", "gone", TAGS),
    ),
    "one partition more than the run had": (
        *(lambda run: one_more(without_manifest(run)), "filled"),
        *("ForeignFileError", "more optimizer files"),
    ),
    "a file that the manifest does not know": (
        *(one_more, "filled", "ForeignFileError", OPTIM.format(2), "not part of the save"),
    ),
    "half a manifest": (lambda run: put(run / "filled", "{"), "filled", *MANIFEST, "can't be read"),
    "a version of later": (
        *(lambda run: put(run / "filled", OF_ANOTHER_VERSION), "filled", *MANIFEST, "version"),
    ),
    "a list": (lambda run: put(run / "filled", "[1]"), "filled", *MANIFEST, "can't be read"),
    "a manifest of nothing": (
        *(lambda run: put(run / "filled", OF_NO_FILES), "filled", *MANIFEST, "read"),
    ),
    "the manifest of another tag": (
        *(lambda run: shutil.copy(run / "trained" / "ucp_manifest.json", run / "filled"), "filled"),
        "ForeignFileError",
    ),
}


@pytest.mark.cases()
@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_a_run_is_named(sources: Sources, broken: Any, what: str) -> None:
    change, tag, kind, *words = WRONG[what]
    folder = broken()
    change(folder)
    expect(attempt(sources, folder, tag=tag), kind, *words)


@pytest.mark.parametrize(
    ("net", "word"),
    [
        ("Wider", "another shape"),
        ("Longer", "checkpoint lacks"),
        ("Shorter", "model lacks"),
        ("Untied", "checkpoint lacks"),
        ("Thawed", "frozen in the checkpoint"),
        ("MoreBuffers", "buffer"),
    ],
)
@pytest.mark.parametrize("zero", [2, 3])
def test_a_model_that_does_not_fit(
    sources: Sources, broken: Any, net: str, word: str, zero: int
) -> None:
    found = attempt(sources, broken(), setup=Setup(zero, "bf16", seed=9, net=net))
    expect(found, "ModelMismatchError", word, "parameter:")


def test_an_optimizer_that_does_not_fit(sources: Sources, broken: Any) -> None:
    found = attempt(sources, broken(), setup=Setup(1, "bf16", "SGD", (("momentum", 0.9),), seed=9))
    expect(found, "StateMismatchError", "momentum_buffer", "exp_avg exp_avg_sq")


def test_groups_that_do_not_fit(sources: Sources, broken: Any) -> None:
    """One group where the checkpoint has two with other settings: averaging or picking one would be
    silent."""
    found = attempt(sources, broken(), setup=Setup(3, "bf16", groups=1, seed=9))
    expect(found, "StateMismatchError", "different hyper-parameters", "weight_decay: 0.0 and 0.1")


def test_a_buffer_that_would_be_rounded(sources: Sources) -> None:
    found = attempt(sources, Path(sources.get(2, Setup(0, "fp32"))))
    expect(found, "InexactError", "rounded", 'allow={"narrow"}')


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch hostile_was_here",)


@pytest.mark.parametrize("name", [MODEL, OPTIM.format(0), OPTIM.format(1)])
@pytest.mark.parametrize(("dp", "through"), [(2, "load"), (2, "engine"), (1, "load")])
def test_a_pickle_that_wants_to_run_code(
    sources: Sources, broken: Any, tmp_path: Path, name: str, dp: int, through: str
) -> None:
    folder = without_manifest(broken())
    plant_pickle(folder / "filled" / name, Hostile())
    found = attempt(sources, folder, dp, tag="filled", through=through)
    expect(found, "UnsafePickleError", name, "system")
    assert not list(Path.cwd().glob("hostile_was_here")) and not list(
        tmp_path.rglob("hostile_was_here")
    )


def test_the_planted_pickle_does_run_elsewhere(
    broken: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: the file is a working attack."""
    monkeypatch.chdir(tmp_path)
    path = broken() / "filled" / MODEL
    plant_pickle(path, Hostile())
    torch.load(path, weights_only=False)
    assert (tmp_path / "hostile_was_here").exists()


def plant_pickle(path: Path, value: object) -> None:
    """Adds a value to the dictionary of a .pt file and leaves every other record as it is."""
    with zipfile.ZipFile(path) as old:
        records = {info.filename: old.read(info) for info in old.infolist()}
    name = next(n for n in records if n.endswith("/data.pkl"))
    body = pickle.dumps(
        {"planted": value}, protocol=2
    )  # \x80\x02 } q\x00 X...: keep key, value and SETITEM
    inside = body[2 + 3 : -2]
    records[name] = records[name][:-1] + inside + b"s."
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for record, data in records.items():
            new.writestr(record, data)


@pytest.mark.parametrize("zero", [1, 3])
def test_a_flipped_bit_in_a_tensor(sources: Sources, broken: Any, zero: int) -> None:
    """Bytes moved before it showed: the engine refuses to step and to save, until a whole
    checkpoint is loaded."""
    folder = broken()
    path = folder / "filled" / OPTIM.format(1)
    with zipfile.ZipFile(path) as file:
        biggest = max(
            (i for i in file.infolist() if "/data/" in i.filename), key=lambda info: info.file_size
        )
        content = file.read(biggest)
    data = bytearray(path.read_bytes())
    at = data.index(content) + biggest.file_size // 2
    data[at] ^= 4
    path.write_bytes(data)
    found = attempt(
        sources, folder, setup=Setup(zero, "bf16", seed=9), tag="filled", then="trained"
    )
    expect(found, "DamagedFileError", path.name, "CRC-32", unchanged=False)
    assert all(rank["steps_after_a_good_load"] for rank in found)
