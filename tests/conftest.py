"""Fixtures and rules for all tests."""

import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests import ops, raised
from tests.object_server import MotoServer, ObjectServer
from tests.processor_time import with_descendants
from tests.ranks import ROOT, RankPool
from tests.share import ALL

if TYPE_CHECKING:  # torch: seconds, before the processes that run the tests are started
    from tests.engines.sources import Sources
    from tests.places import Place

SHOWN_JOBS = 10
BUDGET = Path(__file__).with_name("budget.json")
LONG_S = 0.7  # what costs more is left out of `quick`
CASES_S = 0.3  # processor seconds that the cases of a test may take by default, by the budget
pools: list[RankPool] = []
jobs_of_workers: list[tuple[str, int, float]] = []
seconds: dict[str, tuple[float, int]] = {}  # of the processor, and cases, by test function


# A shell starts a job in the background with SIGINT ignored, and what the tests start would inherit
# that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# As tests/run.sh sets them, for who calls pytest alone.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ops.FOLDER))
os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
if (here := str(Path(sys.executable).parent)) not in os.environ["PATH"].split(":"):
    os.environ["PATH"] = f"{here}:{os.environ['PATH']}"  # DeepSpeed looks for ninja there


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Four warm processes for multi-rank jobs. They start with the first job."""
    subprocess.run([sys.executable, ops.__file__], check=True)  # or a job would build them
    pool = RankPool(size=4)
    pools.append(pool)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tmp_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for checkpoints that several tests read. Removed at the end: pytest would keep the
    last three."""
    folder = tmp_path_factory.mktemp("checkpoints")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def sources(ranks: RankPool, tmp_checkpoints: Path) -> "Sources":
    from tests.engines.sources import Sources

    return Sources(ranks, tmp_checkpoints)


@pytest.fixture(scope="session")
def running_object_server() -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        yield server


@pytest.fixture
def object_server(
    running_object_server: ObjectServer, monkeypatch: pytest.MonkeyPatch
) -> ObjectServer:
    """An empty object store without faults, to which s3:// leads in this process and in those that
    it starts."""
    running_object_server.ask("empty")
    _lead_to(running_object_server, monkeypatch)
    return running_object_server


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest) -> "Place":
    """Gives folders to a test that runs with both places where they can lie."""
    from tests.places import Place

    stored = request.param == "store"
    return Place(request.getfixturevalue("object_server") if stored else None)


@pytest.fixture(scope="session")
def running_moto_server() -> Iterator[MotoServer]:
    with MotoServer() as server:
        yield server


@pytest.fixture
def moto_server(running_moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> MotoServer:
    """moto's S3 with an empty bucket, `bucket`."""
    running_moto_server.empty()
    _lead_to(running_moto_server, monkeypatch)
    return running_moto_server


def _lead_to(server: ObjectServer | MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def broken(sources: "Sources", tmp_path: Path) -> Callable[..., Path]:
    """A copy of a good checkpoint, to be damaged."""

    def copy(dp: int = 2, setup: Any = None, **kwargs: Any) -> Path:
        from tests.engines.sources import PLAIN

        setup = PLAIN if setup is None else setup
        folder = tmp_path / "checkpoint"
        shutil.copytree(sources.get(dp, setup, **kwargs), folder)
        (folder / "oracle.pt").unlink()
        return folder

    return copy


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """What `quick` would collect only to leave all of it out."""
    if "not ranks" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    return True if "\npytestmark = pytest.mark.ranks\n" in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks that are asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker("ranks")
        if item.get_closest_marker("gpu") and not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    spent = json.loads(BUDGET.read_text())["functions"]
    for item in items:
        if spent.get(_function(item), (0.0, 0))[0] >= LONG_S:
            item.add_marker("long")
    _leave_cases_out(items, spent)
    with_ranks = {item.path for item in items if item.get_closest_marker("ranks")}
    of_file = _seconds_of_files(spent)  # longest first: begun last, it would run alone in the end
    items.sort(
        key=lambda item: (
            -of_file.get(item.nodeid.partition("::")[0], 0.0),
            item.path not in with_ranks,
        )
    )


def _seconds_of_files(spent: dict[str, tuple[float, int]]) -> dict[str, float]:
    of_file: dict[str, float] = {}
    for name, (of_function, _) in spent.items():
        file = name.partition("::")[0]
        of_file[file] = of_file.get(file, 0.0) + of_function
    return of_file


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _leave_cases_out(items: list[pytest.Item], spent: dict[str, tuple[float, int]]) -> None:
    """Of a test on ranks with many cases the default run takes as many as `CASES_S` allows, one at
    least, and each commit other ones; `tests/run.sh all` takes all of them. A test says with
    `@pytest.mark.cases(2)` that it needs two of them, and with `@pytest.mark.cases()` that it needs
    all: pairs that cover what they are to cover, or answers that one job gives at once."""
    if ALL:
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("ranks") and not item.get_closest_marker("slow"):
            cases.setdefault(_function(item), []).append(item)
    for test, every in cases.items():
        wanted = every[0].get_closest_marker("cases")
        if wanted:
            many = (wanted.args or (len(every),))[0]
        else:
            of_all, taken_then = spent.get(test, (0.0, 1))
            many = min(len(every), max(1, int(CASES_S * taken_then / max(of_all, 0.001))))
        first = (turn() + zlib.crc32(test.encode())) % len(every)
        taken = {(first + number * len(every) // many) % len(every) for number in range(many)}
        for number, item in enumerate(every):
            if number not in taken:
                item.add_marker("slow")


def turn() -> int:
    """Which case of a test has its turn: the same one for the same files. TESTS_TURN says it, where
    a run is to be repeated."""
    if "TESTS_TURN" not in os.environ:  # which the processes that share the tests inherit
        tree = ["git", "-C", str(ROOT), "rev-parse", "HEAD^{tree}"]
        said = subprocess.run(tree, capture_output=True, text=True, check=False).stdout.strip()
        os.environ["TESTS_TURN"] = str(int(said[:6] or "0", 16))
    return int(os.environ["TESTS_TURN"])


def pytest_configure() -> None:
    raised.record(lambda: os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0])


def pytest_report_header() -> str:
    return f"cases by turn: TESTS_TURN={turn()} takes the same ones again"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Adds up what each test function costs, in all processes that work for it."""
    before = with_descendants(os.getpid())
    try:
        return (yield)
    finally:
        _add(_function(item), with_descendants(os.getpid()) - before, 1)


def _add(test: str, spent: float, cases: int) -> None:
    before = seconds.get(test, (0.0, 0))
    seconds[test] = before[0] + spent, before[1] + cases


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def pytest_sessionfinish(session: pytest.Session) -> None:
    told: Any = getattr(session.config, "workeroutput", None)
    if told is not None:
        told["jobs"] = [job for pool in pools for job in pool.jobs]
        told["seconds"] = seconds


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """One of several processes that share the tests is done."""
    told = getattr(node, "workeroutput", {})
    jobs_of_workers.extend(map(tuple, told.get("jobs", ())))
    for name, spent in told.get("seconds", {}).items():
        _add(name, *spent)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    jobs = jobs_of_workers + [job for pool in pools for job in pool.jobs]
    if jobs:
        terminalreporter.section(f"{len(jobs)} jobs on ranks, {sum(job[2] for job in jobs):.1f} s")
        for function, world, spent in sorted(jobs, key=lambda job: -job[2])[:SHOWN_JOBS]:
            terminalreporter.line(f"{spent:7.2f} s  {world} rank(s)  {function}")
    if told := os.environ.get("TESTS_SECONDS"):
        Path(told).write_text(json.dumps(seconds, indent=0, sort_keys=True))
