"""Every hostile checkpoint through every verb of the command line: exit code 2 (verify may say 1),
a message that names what is wrong, nothing run, little time, little memory."""

import contextlib
import json
import pickle
import time
from pathlib import Path

import pytest
import torch

from megatron_ucp.cli import main
from tests.engines.sources import PLAIN, Sources
from tests.formats.craft import watch
from tests.formats.hostile import ROWS, bounded, make
from tests.formats.hostile_changes import MODEL, VERBS, pickled, plant, records_of
from tests.formats.hostile_pickles import RUNS

pytestmark = pytest.mark.ranks
MEMORY_BYTES, TIME_S = 2**30, 10.0
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
    "passwd",
    "/dev/",
)


@pytest.fixture(scope="module")
def good(sources: Sources, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, out = Path(sources.get(2, PLAIN)), tmp_path_factory.mktemp("out")
    for number, verb in enumerate(
        VERBS
    ):  # imports everything, so that what opens files below is what reads checkpoints
        assert main(_words(verb, folder, folder, out / str(number))) == 0
    return folder


def _words(verb: str, good: Path, bad: Path, out: Path) -> list[str]:
    name, *options = verb.split()
    return [
        name,
        *([str(good)] if name == "diff" else []),
        str(bad),
        *([str(out)] if name == "convert" else []),
        *options,
    ]


@pytest.mark.parametrize("name", ROWS)
def test_a_hostile_checkpoint_is_refused(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    mark, row = tmp_path / "mark", ROWS[name]
    bad = make(name, good, tmp_path / "bad", f"touch {mark}")
    capsys.readouterr()
    for verb in row.sees:
        if verb == "load":
            continue
        started = time.process_time()
        with watch() as events, bounded(MEMORY_BYTES):
            code = main(_words(verb, good, bad, tmp_path / "out" / "converted"))
        told = capsys.readouterr()
        message = told.err + told.out
        assert code == 2 or (code == 1 and verb.startswith("verify")), f"{verb}: {message}"
        assert (
            row.says in message
            and "not enough memory" not in message
            and "MemoryError" not in message
        ), f"{verb}: {message}"
        assert len(message) < 3000 and (code == 1 or "what to do:" in message), f"{verb}: {message}"
        assert time.process_time() - started < TIME_S, verb
        assert not [event for event in events if any(word in event for word in FORBIDDEN)], verb
        assert not mark.exists() and not (tmp_path / "out" / "converted").exists()
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir()), (
            "a refused conversion left something"
        )


def test_errors_are_json_where_that_was_asked_for(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = make("pickle: os.system by REDUCE", good, tmp_path / "bad", "true")
    for verb in ("inspect", "diff"):
        assert main([*_words(verb, good, bad, tmp_path / "out"), "--json"]) == 2
        told = json.loads(capsys.readouterr().out)
        assert (
            told["error"] == "UnsafePickleError"
            and told["file"].endswith(MODEL)
            and "closed list" in told["problem"]
        )


@pytest.mark.parametrize(
    "name",
    [
        "os.system by REDUCE",
        "posix.system by REDUCE",
        "eval",
        "os.system by INST",
        "os.system by OBJ",
        "os.system by STACK_GLOBAL",
        "bytes that torch loads",
    ],
)
def test_the_attacks_are_real(tmp_path: Path, name: str) -> None:
    """Negative control: Python's own unpickler runs what the table plants."""
    mark = tmp_path / "mark"
    torch.save({"a": 1}, tmp_path / MODEL)
    plant(tmp_path / MODEL, RUNS[name](f"touch {mark}"))
    entries = records_of(tmp_path / MODEL)
    with contextlib.suppress(RuntimeError):  # torch wants a tensor from what has already run
        pickle.loads(entries[pickled(entries)].data)
    assert mark.exists()


def test_the_bound_on_memory_bounds() -> None:
    with bounded(2**28), pytest.raises(MemoryError):
        bytearray(2**30)
    assert len(bytearray(2**29)) == 2**29
