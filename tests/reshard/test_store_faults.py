"""Every verb on a checkpoint in an object store that fails: right as from the disk, or refused by a
named error in bounded time, and nothing that looks whole is left."""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.core.manifest import FILE_NAME, Manifest
from megatron_ucp.core.manifest import RUN as RUN_ID
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.formats import store
from megatron_ucp.formats.store import StoreOptions, StorePath, configure
from megatron_ucp.formats.tags import names_a_later_save
from tests.object_server import ObjectServer
from tests.reshard import paper, twins

RUN, OUT = "bucket/run", "bucket/out"
# One request may take so long, and is asked for again for so long: where that is to end, and where
# it is to help.
SHORT, LONG = StoreOptions(timeout_s=0.4, give_up_s=0.2), StoreOptions(timeout_s=1, give_up_s=20)
BOUND_S = 30.0  # what waits for an answer that stalls takes a minute
DONE, FOUND, REFUSED = 0, 1, 2
# What a verb reads: {run} is the run, {disk} the same on the disk, {out} what it writes.
READERS = (
    "inspect {run} --all",
    "ls {run}",
    "verify {run}",
    "verify {run} --deep",
    "diff {run} {disk}",
    "plan {run} --mesh dp=2,zero=1",
)
MAKERS = (
    "convert {run} {out}/tag --mesh dp=2,zero=1",
    "convert {run} {out}/tag --to universal",
    "export-hf {run} {out}/tag",
)


@dataclass(frozen=True)
class Plan:
    """A fault, and whether what was asked for comes out right all the same."""

    kind: str
    request: str
    value: float = 0
    times: int = -1
    key: str = "*"
    right: bool = False
    after: int = 0

    def __str__(self) -> str:
        often = {-1: "always", 1: "once"}.get(self.times, f"{self.times} times")
        where = "" if self.key == "*" else f" of {self.key.rpartition('*')[2]}"
        value = f" {self.value:g}" if self.value else ""
        return f"{self.kind}{value} {self.request}{where} {often}"

    def plant(self, server: ObjectServer) -> None:
        configure(LONG if self.right else SHORT)
        server.fault(
            self.kind,
            self.request,
            self.key,
            value=self.value,
            times=self.times,
            after=self.after,
        )


@pytest.fixture(autouse=True)
def short_times() -> Iterator[None]:
    configure(SHORT)
    yield
    configure(StoreOptions())


@dataclass
class OnDisk:
    """A run with one tag of a GPT on the disk, and what verbs make of it there."""

    run: Path
    made: Path
    known: dict[str, tuple[int, str]] = field(default_factory=dict)

    def out(self, verb: str) -> Path:
        return self.made / re.sub(r"\W+", "_", verb)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    run = tmp_path_factory.mktemp("run")
    paper.write(twins.model("gpt"), run / "step7")
    (run / "latest").write_text("step7")
    return OnDisk(run, tmp_path_factory.mktemp("made"))


@dataclass
class Verbs:
    """Runs verbs, on the run in the store or on the disk."""

    server: ObjectServer
    disk: OnDisk
    told: Callable[[], str]

    def __call__(self, verb: str, run: str = f"s3://{RUN}", out: object = "") -> tuple[int, str]:
        """The exit code, and what was printed."""
        words = [word.format(run=run, disk=self.disk.run, out=out) for word in verb.split()]
        self.told()
        code = main(words)
        return code, self.told()

    def on_disk(self, verb: str) -> str:
        """What the verb says of the run on the disk."""
        if verb not in self.disk.known:
            out = self.disk.out(verb)
            self.disk.known[verb] = self(verb, run=str(self.disk.run), out=out)
        code, said = self.disk.known[verb]
        assert code == DONE, said
        return said

    def says_as_on_disk(self, verb: str, said: str) -> bool:
        return plain(said, self.disk.run) == plain(self.on_disk(verb), self.disk.run)

    def made_as_on_disk(self, verb: str, out: Path) -> bool:
        self.on_disk(verb)
        return states(out) == states(self.disk.out(verb))


@pytest.fixture
def verbs(object_server: ObjectServer, disk: OnDisk, capsys: pytest.CaptureFixture[str]) -> Verbs:
    object_server.ask("copy_in", folder=str(disk.run), prefix=RUN)

    def told() -> str:
        said = capsys.readouterr()
        return said.out + said.err

    return Verbs(object_server, disk, told)


def plain(said: str, disk: Path) -> str:
    """What was said, but for where the run lies and how long it took."""
    said = said.replace(f"s3://{RUN}", "RUN").replace(str(disk), "RUN")
    return " ".join(re.sub(r"\d+\.\d+ s|-+", "#", said).split())


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def states(folder: Path) -> dict[str, bytes]:
    """The files of an output, without those that say when and of what they were made."""
    said = "ucp_manifest.json", "ucp_export.json"
    return {n: data for n, data in bytes_below(folder).items() if not n.endswith(said)}


# ---- without a fault


@pytest.mark.parametrize("verb", READERS)
def test_a_verb_says_of_a_store_what_it_says_of_the_disk(verbs: Verbs, verb: str) -> None:
    configure(LONG)
    code, said = verbs(verb)
    assert code == DONE and verbs.says_as_on_disk(verb, said), said
    assert not any(one.name in ("PUT", "DELETE", "DELETE_MANY") for one in verbs.server.requests())


@pytest.mark.parametrize("verb", MAKERS)
def test_what_is_made_from_a_store_and_in_one(verbs: Verbs, tmp_path: Path, verb: str) -> None:
    """The same bytes as from the disk to the disk."""
    configure(LONG)
    assert verbs(verb, out=tmp_path / "read")[0] == DONE
    assert verbs.made_as_on_disk(verb, tmp_path / "read")
    code, said = verbs(verb, out=f"s3://{OUT}")
    assert code == DONE, said
    verbs.server.ask("copy_out", prefix=OUT, folder=str(tmp_path / "made"))
    assert verbs.made_as_on_disk(verb, tmp_path / "made")
    names = {*bytes_below(tmp_path / "made")}
    assert names == {*bytes_below(tmp_path / "read")}, "nothing else is left in the store"


# ---- reading


HOLDS_STATES = "*optim_states.pt"
READING = (
    Plan("status", "*", 503, times=2, right=True),
    Plan("status", "*", 503),
    Plan("status", "GET", 500),
    Plan("status", "LIST", 403),
    Plan("status", "GET", 403),
    Plan("status", "GET", 403, key=HOLDS_STATES),
    Plan("status", "GET", 404, key=HOLDS_STATES),
    Plan("cut", "GET", 100, times=1, right=True),
    Plan("cut", "GET", 0),
    Plan("stall", "GET", 10, times=1, right=True),
    Plan("stall", "GET", 10),
    Plan("short", "GET", 1, times=1, right=True),
    Plan("short", "GET", 1),
    Plan("lost", "*", times=2, right=True),
    Plan("lost", "GET"),
    Plan("delay", "*", 0.01, right=True),
    Plan("delay", "GET", 30),
    Plan("trickle", "GET", 2_000_000, right=True),
)


READ_WITH = (*READERS, MAKERS[0], MAKERS[2])


def some(verbs: Sequence[str], plans: Sequence[Plan]) -> list[Any]:
    """Every verb with every fault; the default run takes a part, with each of both."""
    return [
        pytest.param(
            verb,
            plan,
            id=f"{' '.join(verb.replace('{run}', '').split()[:2])}, {plan}",
            marks=() if (number + 3 * at) % 4 == 0 else pytest.mark.slow,
        )
        for number, verb in enumerate(verbs)
        for at, plan in enumerate(plans)
    ]


@pytest.mark.parametrize(("verb", "plan"), some(READ_WITH, READING))
def test_a_read_that_fails(verbs: Verbs, tmp_path: Path, verb: str, plan: Plan) -> None:
    verbs.on_disk(verb)
    plan.plant(verbs.server)
    with in_time():
        code, said = verbs(verb, out=tmp_path / "out")
    if verb in READERS and code == DONE and verbs.says_as_on_disk(verb, said):
        # `inspect` needs no more than the manifest
        assert plan.right or (verb.startswith("inspect") and plan.key == HOLDS_STATES), said
    elif plan.right:
        assert code == DONE and verbs.made_as_on_disk(verb, tmp_path / "out"), said
    else:
        refused(verb, code, said)
        assert not (tmp_path / "out" / "tag").exists()


@contextmanager
def in_time() -> Iterator[None]:
    started = time.monotonic()
    yield
    took_s = time.monotonic() - started
    assert took_s < BOUND_S, took_s


def refused(verb: str, code: int, said: str) -> None:
    """A named error that says which object and what to do; of `ls` a line, of `verify` a fault."""
    assert "Traceback" not in said and len(said) < 3000, said
    if verb.startswith("ls") and code == DONE:
        assert "step7" in said and "whole" not in said, said
        return
    assert f"s3://{RUN}" in said or f"s3://{OUT}" in said, said
    if verb.startswith("verify") and code == FOUND:
        assert "fault found" in said or "faults found" in said, said
        return
    assert code == REFUSED and "what to do:" in said, f"{code}: {said}"


@pytest.mark.parametrize("verb", READ_WITH, ids=lambda verb: verb.split()[0])
def test_a_host_that_is_dead(verbs: Verbs, tmp_path: Path, verb: str) -> None:
    verbs.server.ask("refuse")
    try:
        with in_time():
            refused("", *verbs(verb, out=tmp_path / "out"))
    finally:
        verbs.server.ask("accept")
    configure(LONG)
    assert verbs(verb, out=tmp_path / "out")[0] == DONE


def test_a_host_that_hangs(verbs: Verbs) -> None:
    verbs.server.pause()
    try:
        with in_time():
            refused("", *verbs("inspect {run}"))
    finally:
        verbs.server.resume()


@pytest.mark.parametrize("place", [0, 10, 5000, 64_000], ids=lambda place: f"byte {place}")
@pytest.mark.parametrize("verb", ["verify {run} --deep", *MAKERS], ids=lambda verb: verb.split()[0])
def test_a_flipped_bit(verbs: Verbs, tmp_path: Path, verb: str, place: int) -> None:
    """Of every answer, at that byte or the last one. Byte 10 of a file says when it was made: what
    comes out then is right."""
    configure(LONG)
    verbs.server.fault("flip", "GET", f"{RUN}/step7/*.pt", value=place)
    code, said = verbs(verb, out=tmp_path / "out")
    if code == DONE:
        assert place == 10, said
        assert verb not in MAKERS or verbs.made_as_on_disk(verb, tmp_path / "out")
        return
    refused(verb, code, said)
    assert not (tmp_path / "out" / "tag").exists()


def test_an_object_that_is_replaced_while_it_is_read(
    verbs: Verbs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of a file would be of another save."""
    monkeypatch.setattr(store, "ENDS_BYTES", 4096)  # its head and tail are not all of it
    file = next(verbs.disk.run.glob(f"step7/{HOLDS_STATES}"))
    other = tmp_path / "other"
    other.write_bytes(file.read_bytes()[::-1])
    configure(LONG)
    verbs.server.ask("replace_after", key=f"{RUN}/step7/{file.name}", path=str(other), gets=2)
    refused("", *verbs(MAKERS[0], out=tmp_path / "out"))
    assert not (tmp_path / "out" / "tag").exists()


# ---- writing


WRITING = (
    Plan("status", "PUT", 503, times=2, right=True),
    Plan("status", "PUT", 503),
    Plan("status", "PUT", 403),
    Plan("status", "PUT", 403, key=f"{OUT}/tag/ucp_*"),
    Plan("status", "PUT", 503, after=2),
    Plan("cut", "PUT", 10, times=1, right=True),
    Plan("cut", "PUT", 10, key="*[ns]"),
    Plan("lost", "PUT", times=1, right=True),
    Plan("lost", "PUT", times=2, after=1, right=True),
    Plan("delay", "PUT", 30),
    Plan("delay", "PUT", 0.02, right=True),
    Plan("unconditional", "*"),
)


@pytest.mark.parametrize(("verb", "plan"), some((MAKERS[0], MAKERS[2]), WRITING))
def test_a_write_that_fails(verbs: Verbs, tmp_path: Path, verb: str, plan: Plan) -> None:
    plan.plant(verbs.server)
    with in_time():
        code, said = verbs(verb, out=f"s3://{OUT}")
    verbs.server.ask("heal")
    configure(LONG)
    if plan.right or (code == DONE and plan.kind == "unconditional"):
        assert code == DONE, said
        verbs.server.ask("copy_out", prefix=OUT, folder=str(tmp_path / "made"))
        assert verbs.made_as_on_disk(verb, tmp_path / "made")
        return
    refused("", code, said)
    nothing_whole(verbs)
    verbs.server.ask("remove", prefix=OUT)
    assert verbs(verb, out=f"s3://{OUT}")[0] == DONE


IN_PARTS = (
    Plan("status", "CREATE", 503, times=2, right=True),
    Plan("status", "CREATE", 403),
    Plan("status", "PART", 500, times=3, right=True),
    Plan("status", "PART", 503),
    Plan("status", "PART", 503, after=2),
    Plan("cut", "PART", 100, times=2, right=True),
    Plan("lost", "PART", times=2, right=True),
    Plan("delay", "PART", 30),
    Plan("status", "COMPLETE", 503, times=1, right=True),
    Plan("status", "COMPLETE", 403),
    Plan("lost", "COMPLETE", times=1, right=True),
)


@pytest.mark.parametrize("plan", IN_PARTS, ids=str)
def test_a_write_in_parts_that_fails(
    verbs: Verbs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: Plan
) -> None:
    """As large objects are written, with smaller parts than S3 would take."""
    monkeypatch.setattr(store, "PART_BYTES", 4096)
    test_a_write_that_fails(verbs, tmp_path, MAKERS[2], plan)
    assert verbs.server.count("PART") or plan.request == "CREATE"


def nothing_whole(verbs: Verbs) -> None:
    """Neither a verb nor the files say that anything was made."""
    left = [key for key in verbs.server.ask("objects") if key.startswith(f"{OUT}/")]
    assert not [key for key in left if key.endswith(("ucp_manifest.json", "ucp_export.json"))], left
    assert verbs.server.ask("uploads") == {}
    code, said = verbs("inspect {run}", run=f"s3://{OUT}/tag")
    assert code == REFUSED, said


# ---- requests


@pytest.mark.parametrize(
    ("verb", "most"), [("inspect {run}", 40), ("verify {run}", 100), (MAKERS[0], 100)]
)
def test_requests_are_few(verbs: Verbs, tmp_path: Path, verb: str, most: int) -> None:
    """An answer of a store takes longer than a megabyte of it."""
    configure(LONG)
    verbs(verb, out=str(tmp_path / "out"))
    counts: Any = verbs.server.counts()
    assert counts.total() <= most, counts


# ------------------------------------------------ a failing store says nothing of what lies in it


@pytest.fixture
def two_tags(object_server: ObjectServer, tmp_path: Path) -> str:
    """A run with two whole tags, of which the pointer names the newer one."""
    for step in ("step7", "step9"):
        paper.write(twins.model("gpt"), tmp_path / step)
    (tmp_path / "latest").write_text("step9")
    object_server.ask("copy_in", folder=str(tmp_path), prefix=RUN)
    return f"s3://{RUN}"


def test_a_tag_that_can_t_be_asked_for_is_not_passed_over(
    object_server: ObjectServer, two_tags: str
) -> None:
    assert ucp.newest_whole(two_tags).folder.name == "step9"
    object_server.fault("status", "GET", "*step9/*", value=503)
    with pytest.raises(ucp.StoreError):
        ucp.newest_whole(two_tags)


@pytest.mark.parametrize("deep", [False, True])
def test_a_file_that_can_t_be_asked_for_is_no_damage(
    object_server: ObjectServer, two_tags: str, deep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "ENDS_BYTES", 4096)  # what is read later is asked for later
    object_server.fault("status", "GET", "*optim_states.pt", value=503, after=1)
    with pytest.raises(ucp.StoreError):
        ucp.verify(two_tags, deep=deep)


def test_a_manifest_that_can_t_be_asked_for_moves_no_pointer(
    object_server: ObjectServer, two_tags: str
) -> None:
    named = StorePath(two_tags) / "step9" / FILE_NAME
    later = Manifest(Keeper.ZERO_0, Mesh(), (), (), run={RUN_ID: "one", "saved_at": 9.0})
    named.write_bytes(to_json(later).encode())
    earlier = replace(later, run={RUN_ID: "one", "saved_at": 7.0})
    pointer = StorePath(two_tags) / "latest"
    assert names_a_later_save(pointer, earlier)
    object_server.fault("status", "GET", f"*{FILE_NAME}", value=503)
    with pytest.raises(ucp.StoreError):
        names_a_later_save(pointer, earlier)
