"""Saves into an object store without locks and renames: who claims a tag, who counts, what is
removed, and what a lost answer or a race leaves."""

import os
import urllib.request
from collections.abc import Iterator

import pytest

from megatron_ucp.core.manifest import FILE_NAME, FileEntry, Manifest
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.errors import SaveError, StoreError, UsageError
from megatron_ucp.formats import store, store_saves
from megatron_ucp.formats.store import CLAIM, StoreOptions, StorePath, configure, folder_at
from megatron_ucp.formats.tags import has_state_files
from megatron_ucp.reshard.look import ls
from tests.object_server import MotoServer, ObjectServer

RUN = StorePath("s3://bucket/run")
TAG = RUN / "step1"
FILE = "mp_rank_00_model_states.pt"


@pytest.fixture(autouse=True)
def short_times() -> Iterator[None]:
    configure(StoreOptions(timeout_s=20, give_up_s=1))
    yield
    configure(StoreOptions())


@pytest.fixture(params=["object_server", "moto_server"])
def either_server(request: pytest.FixtureRequest) -> ObjectServer | MotoServer:
    return request.getfixturevalue(request.param)


def written(attempt: store_saves.Attempt, data: bytes, name: str = FILE) -> bytes:
    """A save of one file; its manifest."""
    (attempt.aside / name).write_bytes(data)
    run = {"stored_in": f"{attempt.aside.name}/"} if attempt.aside != attempt.tag else {}
    files = (FileEntry(name, len(data), ""),)
    manifest = Manifest(Keeper.ZERO_0, Mesh(), (), (), files=files, run=run)
    return to_json(manifest).encode()


def save(data: bytes) -> None:
    with store_saves.attempt(TAG) as attempt:
        attempt.commit(written(attempt, data), [FILE])


def read(name: str = FILE) -> bytes:
    folder = folder_at(TAG)
    return folder.small(name, 1000)


def test_a_save_is_there_when_its_manifest_is(either_server: object) -> None:
    with store_saves.attempt(TAG) as attempt:
        manifest = written(attempt, b"one")
        assert (TAG / FILE).read_bytes() == b"one"
        assert not has_state_files(TAG) and folder_at(TAG).names() == []
        attempt.commit(manifest, [FILE])
        assert has_state_files(TAG)
    assert folder_at(TAG).names() == [FILE, FILE_NAME]
    assert not (TAG / CLAIM).is_file()


def test_what_was_not_committed_goes(either_server: object) -> None:
    with pytest.raises(StoreError), store_saves.attempt(TAG) as attempt:
        written(attempt, b"one")
        raise StoreError("planted")
    assert not TAG.is_dir()


def test_a_tag_is_replaced_in_one_step(either_server: object) -> None:
    save(b"one")
    with store_saves.attempt(TAG) as attempt:
        manifest = written(attempt, b"two!")
        assert read() == b"one"
        attempt.commit(manifest, [FILE])
        assert read() == b"two!"
    assert read() == b"two!"
    assert [path.name for path in store_saves.objects_that_count(TAG)].count(FILE) == 1
    assert len([*TAG.rglob("*")]) == 2  # the first one's file went


def test_of_two_jobs_the_one_that_ends_first_counts(either_server: object) -> None:
    with store_saves.attempt(TAG) as late:
        text = written(late, b"late")
        save(b"first")
        assert read() == b"first"
        with pytest.raises(SaveError, match="meanwhile"):
            late.commit(text, [FILE])
    assert read() == b"first"
    assert len([*TAG.rglob("*")]) == 2


def test_a_job_that_was_killed_stands_in_nobodys_way(either_server: object) -> None:
    killed = store_saves.attempt(TAG)
    attempt = killed.__enter__()
    written(attempt, b"torn")
    assert [one.tag for one in store_saves.left_overs(RUN)] == [TAG]
    (note, *_) = store_saves.notes_of_left_overs(RUN)
    assert "step1: left over" in note and "2 objects" in note and "process" in note
    save(b"whole")
    assert read() == b"whole"
    lines = store_saves.remove_left_overs(RUN)
    assert lines == [f"removed 2 objects that were left over in {TAG}"]
    assert read() == b"whole" and store_saves.left_overs(RUN) == []


def test_files_without_a_manifest_count_while_a_save_into_their_tag_is_torn(
    either_server: object,
) -> None:
    (TAG / FILE).write_bytes(b"DeepSpeed's own")
    killed = store_saves.attempt(TAG)
    attempt = killed.__enter__()
    assert attempt.aside != TAG
    written(attempt, b"torn")
    assert folder_at(TAG).names() == [FILE] and read() == b"DeepSpeed's own"
    assert not store.is_left_over(TAG)
    assert [path.name for path in store_saves.objects_that_count(TAG)] == [FILE]
    store_saves.remove_left_overs(RUN)
    assert [path.name for path in TAG.rglob("*")] == [FILE] and read() == b"DeepSpeed's own"
    (TAG / "mine.txt").write_bytes(b"kept")
    save(b"whole")
    assert read() == b"whole" and store_saves.left_overs(RUN) == []
    assert (TAG / "mine.txt").read_bytes() == b"kept" and not (TAG / FILE).is_file()
    assert store_saves.remove_left_overs(RUN) == []
    assert (TAG / "mine.txt").read_bytes() == b"kept"
    (TAG / "mine.txt").unlink()
    # where nothing lies there any more, what a torn save leaves is no tag
    assert store_saves.remove_tag(TAG, str) == "removed step1"
    (TAG / store.BESIDE).write_bytes(b"")
    killed = store_saves.attempt(TAG)
    written(killed.__enter__(), b"torn")
    assert folder_at(TAG).names() == [] and store.is_left_over(TAG)


def test_a_probe_whose_answer_is_lost_leaves_nothing(object_server: ObjectServer) -> None:
    for fault in ("lost", "delay"):
        configure(StoreOptions(timeout_s=0.5, give_up_s=20))  # and forgets what was tried
        object_server.fault(fault, "PUT", "*probe*", times=1, value=2)
        assert store.keeps_conditions(TAG), fault
        assert [*RUN.rglob("*")] == []


def test_what_was_left_and_nothing_else_is_removed(either_server: object) -> None:
    killed = store_saves.attempt(TAG)
    written(killed.__enter__(), b"torn")
    (RUN / "notes.txt").write_text("mine")
    assert store_saves.remove_left_overs(RUN)
    assert [path.name for path in RUN.rglob("*")] == ["notes.txt"]
    save(b"again")
    assert (TAG / FILE).read_bytes() == b"again"


def test_an_output_finds_its_name_taken(either_server: object) -> None:
    with store_saves.output(TAG, replaces=False) as first:
        with pytest.raises(SaveError, match="writes this folder"):
            store_saves.output(TAG, replaces=True).__enter__()
        first.commit(written(first, b"one"), [FILE])
    with pytest.raises(SaveError, match="exists"):
        store_saves.output(TAG, replaces=False).__enter__()
    assert not (TAG / CLAIM).is_file() and read() == b"one"
    with store_saves.output(TAG, replaces=True) as second:
        assert not has_state_files(TAG)  # neither the old one nor the new one is there
        second.commit(written(second, b"two", "other_states.pt"), ["other_states.pt"])
    assert folder_at(TAG).names() == ["other_states.pt", FILE_NAME]


def test_a_tag_is_removed_from_its_manifest_on(object_server: ObjectServer) -> None:
    save(b"one")
    assert store_saves.remove_tag(TAG, lambda: "it is not whole").startswith("kept")
    assert read() == b"one" and not (TAG / CLAIM).is_file()
    with pytest.raises(StoreError), store_saves.attempt(TAG):
        assert store_saves.remove_tag(TAG, str).startswith(f"kept step1: process {os.getpid()} on ")
        raise StoreError("given up")
    object_server.ask("forget_requests")
    assert store_saves.remove_tag(TAG, str) == "removed step1"
    assert not TAG.is_dir()
    removed = [one.key for one in object_server.requests() if one.name.startswith("DELETE")]
    assert removed[0].endswith(FILE_NAME) or len(removed) == 3


def test_a_pointer_moves_unless_it_names_a_later_save(either_server: object) -> None:
    pointer = RUN / "latest"
    assert store_saves.move_pointer(pointer, "step1", lambda: False)
    assert not store_saves.move_pointer(pointer, "step2", lambda: True)
    assert pointer.read_text() == "step1"


def test_who_moves_a_pointer_meanwhile_is_asked_again(object_server: ObjectServer) -> None:
    pointer, asked = RUN / "latest", list[str]()
    pointer.write_text("step1")

    def other() -> bool:
        asked.append(pointer.read_text())
        if len(asked) == 1:
            pointer.write_text("step9")  # another job, between the look and the write
        return asked[-1] == "step9"

    assert not store_saves.move_pointer(pointer, "step2", other)
    assert asked == ["step1", "step9"] and pointer.read_text() == "step9"


def test_a_manifest_of_which_nobody_knows_keeps_its_objects(object_server: ObjectServer) -> None:
    object_server.fault("lost", "PUT", f"*{FILE_NAME}")  # it is written, and no answer comes
    object_server.fault("status", "GET", f"*{FILE_NAME}", value=503, after=1)  # nor later on
    with pytest.raises(StoreError), store_saves.attempt(TAG) as attempt:
        attempt.commit(written(attempt, b"one"), [FILE])
    object_server.ask("heal")
    assert read() == b"one"
    assert [one.objects for one in store_saves.left_overs(RUN)] == [(TAG / CLAIM,)]


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("fault", ["lost", "delay"])
def test_a_lost_answer_is_no_lost_race(
    object_server: ObjectServer, is_new: bool, fault: str
) -> None:
    configure(StoreOptions(timeout_s=0.5, give_up_s=20))
    path = RUN / "latest"
    e_tag = None
    if not is_new:
        path.write_text("before")
        e_tag = store.read_object(path)[1]
    object_server.fault(fault, "PUT", "*latest", times=1, value=2)
    assert store.put_if(path, b"mine", e_tag)
    assert path.read_text() == "mine"
    assert not store.put_if(path, b"other", e_tag)


def test_an_upload_whose_last_answer_is_lost_is_there(object_server: ObjectServer) -> None:
    data = bytes(range(256)) * 40_000
    object_server.fault("lost", "COMPLETE", "*", times=1)
    store.upload(TAG / "large", [data], len(data))
    assert (TAG / "large").read_bytes() == data


def test_a_source_that_fails_leaves_no_upload(object_server: ObjectServer) -> None:
    def chunks() -> Iterator[bytes]:
        yield bytes(store.PART_BYTES)
        raise ValueError("the source")

    with pytest.raises(ValueError, match="the source"):
        store.upload(TAG / "large", chunks(), 3 * store.PART_BYTES)
    assert object_server.count("ABORT") == 1
    assert object_server.ask("uploads") == {} and not (TAG / "large").is_file()


def test_a_source_in_a_store_is_read_while_it_is_written(object_server: ObjectServer) -> None:
    data = bytes(range(256)) * 80_000
    store.upload(TAG / "one", [data], len(data))

    def chunks() -> Iterator[bytes]:
        with store.open_file(TAG / "one") as file:
            for start in range(0, len(data), 2**20):
                yield file.bytes_at(start, min(2**20, len(data) - start))

    store.upload(TAG / "two", chunks(), len(data))
    assert (TAG / "two").read_bytes() == data


def test_an_output_is_refused_where_conditions_are_ignored(object_server: ObjectServer) -> None:
    object_server.fault("unconditional", "PUT")
    configure(StoreOptions(timeout_s=20, give_up_s=1))  # what was tried before counts no more
    with pytest.raises(SaveError, match="ignores the conditions"):
        store_saves.output(TAG, replaces=False).__enter__()
    assert not TAG.is_dir()


def test_a_fork_is_refused_and_does_not_hang(object_server: ObjectServer) -> None:
    (RUN / "latest").write_text("step1")
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            (RUN / "latest").read_text()
            os.write(writing, b"answered")
        except UsageError as error:
            os.write(writing, error.problem.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        assert "is a fork of one that has asked an object store" in said.read()
    os.waitpid(pid, 0)


def test_the_empty_object_of_a_folder_is_no_file(object_server: ObjectServer) -> None:
    """As a store's console makes it, where somebody makes a folder."""
    save(b"one")
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    for key in ("run/", "run/step1/"):
        request = urllib.request.Request(f"{endpoint}/bucket/{key}", data=b"", method="PUT")
        urllib.request.urlopen(request, timeout=20).close()
    assert [path.name for path in RUN.iterdir()] == ["step1"]
    seen = store.look_once(RUN, lambda: (TAG.is_dir(), TAG.is_file(), read()))
    assert seen == (True, False, b"one")
    assert [one.tag for one in ls(RUN).tags] == ["step1"]


@pytest.mark.parametrize("text", ["nan", "inf", "-3", "0", "soon", "1e300"])
def test_a_time_that_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCP_STORE_TIMEOUT_S", text)
    configure(StoreOptions())
    with pytest.raises(UsageError, match="UCP_STORE_TIMEOUT_S is a number of seconds"):
        store.options()
    if text != "soon":
        with pytest.raises(UsageError, match="store: give_up_s is a number of seconds"):
            StoreOptions.of({"give_up_s": float(text)})


@pytest.mark.parametrize(
    "text", ["minio:9000", "http://", "http://a b", "http://a:99999", "ftp://a"]
)
def test_an_endpoint_that_is_no_address(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for config, variable in ((None, text), ({"endpoint": text}, "http://127.0.0.1:1")):
        monkeypatch.setenv("AWS_ENDPOINT_URL", variable)
        configure(StoreOptions(config=config))
        with pytest.raises(UsageError, match="endpoint is no address") as raised:
            RUN.is_dir()
        assert raised.value.parameter == ("AWS_ENDPOINT_URL" if config is None else "endpoint")


def test_a_bucket_that_is_not_there_is_said(moto_server: MotoServer) -> None:
    nowhere = StorePath("s3://nowhere/run/step1")
    for ask in (lambda: (nowhere / FILE).write_bytes(b"one"), lambda: [*nowhere.iterdir()]):
        with pytest.raises(StoreError, match="there is no such bucket"):
            ask()
