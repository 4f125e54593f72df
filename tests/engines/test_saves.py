"""Saves that can be trusted: random states, data position, failures, retention, the newest whole
tag."""

import errno
import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.core.manifest import FILE_NAME, Manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.engines.save import publish
from megatron_ucp.errors import NotFoundError, UsageError
from megatron_ucp.formats import locks
from megatron_ucp.formats.output_folder import Syncs, begin
from tests.engines import killed, save_jobs
from tests.engines.model import Setup
from tests.engines.sources import drop_record
from tests.ranks import ROOT, RankPool, RanksFailed

SETUP = Setup(1, "bf16")
NOISY = Setup(1, "fp32", net="Noisy")


# ------------------------------------------------ random states


@pytest.fixture(scope="module")
def noisy(ranks: RankPool, tmp_checkpoints: Path) -> tuple[str, list[list[float]]]:
    folder = tmp_checkpoints / "noisy"
    return str(folder), ranks.run(2, save_jobs.noisy, NOISY, str(folder))


@pytest.mark.parametrize("zero", [1, 3])
def test_the_same_mesh_repeats_every_random_number(ranks: RankPool, noisy: Any, zero: int) -> None:
    folder, losses = noisy
    target = Setup(zero, "fp32", net="Noisy", seed=9)  # ZeRO does not decide where a rank is
    for found, want in zip(
        ranks.run(2, save_jobs.resume_noisy, target, folder), losses, strict=True
    ):
        assert found["losses"] == want
        assert not [note for note in found["notes"] if "random" in note]


def test_without_them_the_losses_differ(ranks: RankPool, noisy: Any) -> None:
    folder, losses = noisy
    for found in ranks.run(2, save_jobs.resume_noisy, NOISY, folder, rng=False):
        assert all(a != b for a, b in zip(found["losses"], losses[0], strict=True))


def test_another_mesh_derives_them(ranks: RankPool, noisy: Any) -> None:
    folder, _ = noisy
    first, second = (
        ranks.run(4, save_jobs.resume_noisy, Setup(1, "fp32", net="Noisy", seed=s), folder)
        for s in (3, 4)
    )
    draws = [tuple(found["draws"]) for found in first]
    assert draws == [tuple(found["draws"]) for found in second], (
        "nothing of the process decides, the checkpoint does"
    )
    assert all(
        a != b for x, y in itertools.combinations(draws, 2) for a, b in zip(x, y, strict=True)
    ), "each rank has its own"
    assert all(
        any("derived from the seed, the step" in note for note in found["notes"]) for found in first
    )


def test_a_damaged_file_of_random_states_is_found_before_anything_is_loaded(
    ranks: RankPool, noisy: Any, tmp_path: Path
) -> None:
    folder = shutil.copytree(noisy[0], tmp_path / "copy")
    (path,) = folder.glob("*/ucp_rng_00001.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    for said in ranks.run(2, save_jobs.try_load, NOISY, str(folder)):
        assert said.startswith("ForeignFileError") and "ucp_rng_00001" in said
    path.unlink()
    for said in ranks.run(2, save_jobs.try_load, NOISY, str(folder)):
        assert said.startswith("NotFoundError") and "ucp_rng_00001" in said


# ------------------------------------------------ data


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (4, 1)])
def test_the_data_goes_on_on_another_number_of_ranks(
    ranks: RankPool, tmp_path: Path, before: int, after: int
) -> None:
    first = ranks.run(before, save_jobs.read_and_save, SETUP, str(tmp_path), 4)
    then = ranks.run(after, save_jobs.resume_and_read, Setup(2, "bf16"), str(tmp_path))
    assert not [note for _, notes in then for note in notes if "data position" in note]
    got, rest = (
        sorted(sample for rank in part for sample in rank)
        for part in (first, [samples for samples, _ in then])
    )
    assert sorted(got + rest) == list(range(48)) and len(got) == 8 * before
    lost = ranks.run(after, save_jobs.resume_and_read, SETUP, str(tmp_path), given=False)
    assert sum(len(samples) for samples, _ in lost) == 48
    assert all(
        "the data position was not restored: no loader was given" in notes for _, notes in lost
    )


def test_a_loader_of_another_order_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save_jobs.read_and_save, SETUP, str(tmp_path), 4)
    for found in ranks.run(2, save_jobs.another_data_order, SETUP, str(tmp_path)):
        assert "the data position belongs to another order" in found["error"] and found["unchanged"]


# ------------------------------------------------ failures

FAILURES = {
    "a file that can't grow": (
        "SaveError",
        "a file could not be written",
        "zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ),
    "no memory on one rank": ("SaveError", "a file could not be written", "MemoryError"),
    "a read-only folder": ("SaveError", "the checkpoint was not saved", "Permission denied"),
    "a client state that can't be pickled": (
        "SaveError",
        "no load could give back a value as it is",
        "client_state['function']",
    ),
    "another tag on one rank": ("UsageError", "the ranks don't save into one tag", "tag1"),
    "a path below a file": ("SaveError", "the checkpoint was not saved", "Not a directory"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(
    ranks: RankPool, tmp_path: Path, how: str
) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)  # for the rank that is not root any more
    kind, *words = FAILURES[how]
    for found in ranks.run(2, save_jobs.failing_save, SETUP, str(tmp_path), how):
        assert found["error"] == kind, found["message"]
        assert all(word in found["message"] for word in words), found["message"]
        assert (found["left"], found["latest"]) == (["global_step1"], "global_step1")
        assert (found["then"], found["then_left"]) == ([], ["global_step1", "global_step2"]), (
            "the engine can save again"
        )


@pytest.mark.parametrize("how", ["another name", "another size", "another dtype", "nothing"])
@pytest.mark.parametrize("way", ["stock", "direct", "background"])
def test_files_that_no_load_would_take_get_no_name(
    ranks: RankPool, tmp_path: Path, way: str, how: str
) -> None:
    """And where nothing is changed they get it."""
    job = save_jobs.stock_writes_other_weights
    for found in ranks.run(2, job, SETUP, str(tmp_path), way, how):
        if how == "nothing":
            assert not found["said"] and found["latest"] == "global_step2"
            continue
        assert found["said"].startswith("SaveError: no load would take what was written")
        assert (found["left"], found["latest"]) == (["global_step1"], "global_step1")


def test_a_rank_that_dies_during_the_save(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks.run(2, save_jobs.die_in_save, SETUP, str(tmp_path), timeout_s=60)
    assert "status 7" in failed.value.by_rank[1]
    assert "RankError: the save did not finish" in failed.value.by_rank[0]
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert [p.name for p in tmp_path.iterdir() if p.is_dir() and not p.name.startswith(".")] == [
        "global_step1"
    ]
    found = ucp.newest_whole(tmp_path)
    assert found.folder.name == "global_step1"
    assert [ranks.run(4, save_jobs.try_load, SETUP, str(tmp_path))] == [[""] * 4]


# ------------------------------------------------ several saves


def test_a_second_save_replaces_the_tag_and_keeps_what_is_not_ours(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert ranks.run(2, save_jobs.save_twice_into, SETUP, str(tmp_path), "here") == [[], []]
    assert (tmp_path / "here" / "mine.txt").read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == ["here"]


def test_keep_latest(ranks: RankPool, tmp_path: Path) -> None:
    notes = ranks.run(2, save_jobs.save_many, SETUP, str(tmp_path), 5, milestone=2, keep_latest=2)[
        0
    ]
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == [
        "global_step2",
        "global_step4",
        "global_step5",
    ]
    assert notes == ("removed global_step3",)


def test_a_tag_that_another_process_saves_is_refused_and_a_copy_stays(
    ranks: RankPool, tmp_path: Path
) -> None:
    first, second = ranks.run(2, save_jobs.crowded, SETUP, str(tmp_path))
    for found in (first, second):
        assert "another save is writing this folder" in found["error"]
        assert "a save of this very process" in found["error"]
        assert found["beside"] == [".taken.saving", "global_step2", "mine"]
        assert found["left"] == ["mine", "taken"]
    copy = "kept mine: it is a copy of global_step1"
    assert first["notes"] == ("removed global_step1", copy)
    assert first["then"] == ("removed global_step2",), "what stays is said once"


def test_a_run_is_one_through_loads(ranks: RankPool, tmp_path: Path) -> None:
    found, other = ranks.run(2, save_jobs.runs_of_saves, SETUP, str(tmp_path))
    one, two, three, four, five, note = found
    assert one == two == three and found[:5] == other[:5]
    assert len({one, four, five}) == 3
    assert note == "replaced two, which another run had saved at step 2"


@pytest.mark.parametrize("value", [0, -1, True])
def test_keep_latest_is_a_number_of_tags(value: int) -> None:
    from megatron_ucp.engines.save import SaveOptions

    with pytest.raises(UsageError, match="at least 1"):
        SaveOptions(keep_latest=value)


def test_a_later_stock_save_into_the_tag_is_noticed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save_jobs.save_many, SETUP, str(tmp_path), 2)
    ranks.run(2, save_jobs.stock_save_into, SETUP, str(tmp_path), "global_step2")
    for said in ranks.run(2, save_jobs.try_load, SETUP, str(tmp_path)):
        assert said.startswith(
            "ForeignFileError: a file is not the one that was saved with the manifest"
        )
    (tmp_path / "global_step2" / FILE_NAME).unlink()  # it is a good stock checkpoint
    assert ranks.run(2, save_jobs.try_load, SETUP, str(tmp_path)) == ["", ""]


# ------------------------------------------------ the newest whole tag

DAMAGES: dict[str, Any] = {
    "a missing file": lambda tag: (tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(),
    "a truncated file": lambda tag: (tag / "mp_rank_00_model_states.pt").write_bytes(
        (tag / "mp_rank_00_model_states.pt").read_bytes()[:-100]
    ),
    "a lost record": lambda tag: drop_record(
        tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", 0
    ),
    "another save's file": lambda tag: shutil.copy(
        tag.parent / "global_step1" / "mp_rank_00_model_states.pt", tag
    ),
    "no manifest and no model": lambda tag: [
        (tag / FILE_NAME).unlink(),
        (tag / "mp_rank_00_model_states.pt").unlink(),
    ],
    "a manifest that is cut": lambda tag: (tag / FILE_NAME).write_text(
        (tag / FILE_NAME).read_text()[:-5]
    ),
    "random states": lambda tag: (tag / "ucp_rng_00000.safetensors").write_bytes(b""),
}


@pytest.fixture(scope="module")
def three(ranks: RankPool, tmp_checkpoints: Path) -> Path:
    folder = tmp_checkpoints / "three"
    ranks.run(2, save_jobs.save_many, Setup(1, "bf16"), str(folder), 3)
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_tag_that_is_not_whole_is_passed_over_and_named(
    three: Path, tmp_path: Path, damage: str
) -> None:
    folder = shutil.copytree(three, tmp_path / "copy")
    assert ucp.newest_whole(folder) == type(ucp.newest_whole(folder))(folder / "global_step3", ())
    DAMAGES[damage](folder / "global_step3")
    found = ucp.newest_whole(folder)
    assert found.folder.name == "global_step2"
    assert len(found.passed_over) == 1 and re.fullmatch(
        r"global_step3: .+ \(.+\)", found.passed_over[0]
    )


def test_latest_is_followed_where_its_tag_is_whole(three: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(three, tmp_path / "copy")
    (folder / "latest").write_text("global_step1")  # somebody went back
    (folder / ".global_step4.saving").mkdir()
    found = ucp.newest_whole(folder)
    assert found.folder.name == "global_step1"
    assert found.passed_over == (
        "global_step2: newer, but `latest` names global_step1",
        "global_step3: newer, but `latest` names global_step1",
        ".global_step4.saving: a save that was not finished",
    )
    (folder / "latest").write_text("gone")
    assert ucp.newest_whole(folder).passed_over[0] == "gone: `latest` names it, and it is not there"
    assert ucp.newest_whole(folder).folder.name == "global_step3"
    (folder / "latest").unlink()
    assert ucp.newest_whole(folder).folder.name == "global_step3"


def test_no_tag_is_whole(three: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(three, tmp_path / "copy")
    for tag in ("global_step1", "global_step2", "global_step3"):
        DAMAGES["a missing file"](folder / tag)
    with pytest.raises(NotFoundError, match=r"global_step3: .*global_step2: .*global_step1: "):
        ucp.newest_whole(folder)


def test_what_the_manifest_says_about_the_save(three: Path) -> None:
    said = json.loads((three / "global_step3" / FILE_NAME).read_text())
    files = {name: size for name, size, _ in said["files"]}
    assert files == {
        p.name: p.stat().st_size for p in (three / "global_step3").iterdir() if p.name != FILE_NAME
    }
    assert (
        said["run"]["global_steps"] == 3
        and said["run"]["moved_latest"] is True
        and len(said["save_id"]) == 32
    )


# ------------------------------------------------ kill -9


KILLED = ("deepspeed:stock", "deepspeed:background", "stack:background", "older:background")
MORE_KILLED = (*KILLED, "deepspeed:direct", "older:direct")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("kinds", "trials"),
    [(KILLED, 4), *(pytest.param([one], 20, marks=pytest.mark.slow) for one in MORE_KILLED)],
)
def test_killed_at_random_moments_the_newest_whole_tag_loads_bit_for_bit(
    tmp_path: Path, kinds: Sequence[str], trials: int
) -> None:
    killed.trials_in_a_process(tmp_path, [f"{kind}:{trials}" for kind in kinds])


# ------------------------------------------------ on disk before it counts

SAVE_ONCE = """
from pathlib import Path
from tests.engines import killed
from tests.engines.model import Setup
killed.prepare()
print("ready", flush=True)
input()
run = Setup(1), Path("{0}"), 1, "stock", "deepspeed"
killed.together(2, Path("{0}.store"), killed.save_on_and_on, *run)
"""


def whole_lines(trace: str) -> Iterator[str]:
    """Each call on one line, where it returned: strace splits those during which another process
    makes one."""
    begun: dict[str, str] = {}
    for line in trace.splitlines():
        pid = line.split()[0]
        if line.endswith("<unfinished ...>"):
            begun[pid] = line.removesuffix("<unfinished ...>").rstrip()
        elif pid in begun and (rest := re.match(r"\d+ +<\.\.\. \w+ resumed>(.*)", line)):
            yield begun.pop(pid) + rest[1]
        else:
            yield line


CALL = re.compile(r"(?P<pid>\d+) +(?P<what>fsync|rename\w*)\((?P<arguments>.*)\) += 0")


def save_under_strace(folder: Path, trace: Path) -> None:
    """One save on two ranks, whose calls go to `trace`. It is attached behind the imports, which
    would take it half a minute."""
    watched = ["-e", "trace=fsync,rename,renameat,renameat2", "-o", str(trace)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", SAVE_ONCE.format(folder)]
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as saves:
        assert saves.stdout and saves.stdout.readline() == "ready\n", saves.communicate()
        strace = ["strace", "-f", "-y", *watched, "-p", str(saves.pid)]
        with subprocess.Popen(strace, stderr=subprocess.PIPE, text=True) as watcher:
            assert watcher.stderr and "attached" in watcher.stderr.readline()
            said = saves.communicate("go\n", timeout=200)
    assert saves.returncode == 0, said


@pytest.mark.ranks
def test_strace_sees_every_file_synced_before_the_names_move(tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: nobody looks from outside")
    folder, trace = tmp_path / "checkpoint", tmp_path / "trace"
    save_under_strace(folder, trace)
    lines = [line for line in whole_lines(trace.read_text()) if str(folder) in line]
    calls = [call for line in lines if (call := CALL.match(line))]
    check_order(calls, folder)
    (of_rank_1,) = {call["pid"] for call in calls if "ucp_rng_00001" in call["arguments"]}
    own = [call["arguments"] for call in calls if call["pid"] == of_rank_1]
    names = ("bf16", "zero_pp_rank_1", "rng_00001")
    assert {
        any(name in arguments for name in names) or arguments.endswith(".saving>")
        for arguments in own
    } == {True}, "each rank syncs its own files, and the folder"


def check_order(calls: list["re.Match[str]"], folder: Path) -> None:
    """Every file is synced before the manifest has its name, that before the tag, the tag before
    `latest`."""
    numbered = list(enumerate(calls))
    synced = {
        re.sub(r".*<(.*)>", r"\1", call["arguments"]): number
        for number, call in numbered
        if call["what"] == "fsync"
    }
    renamed = {
        re.findall(r'"([^"]*)"', call["arguments"])[1]: number
        for number, call in numbered
        if call["what"] != "fsync"
    }
    aside, tag = folder / ".step1.saving", folder / "step1"
    files = [p.name for p in tag.iterdir() if p.name != FILE_NAME]
    assert len(files) == 5  # of the model, two of the optimizer, two of random states
    for name in files:
        assert synced[str(aside / name)] < renamed[str(aside / FILE_NAME)] < renamed[str(tag)]
    # of small files by a name without what makes it one save's alone
    synced |= {re.sub(r"(\.saving)\.[0-9a-f]{8}$", r"\1", path): n for path, n in synced.items()}
    assert synced[str(aside / f".{FILE_NAME}.saving")] < renamed[str(aside / FILE_NAME)]
    latest = renamed[str(folder / "latest")]
    assert (
        synced[str(aside)] < renamed[str(tag)] < latest
        and synced[str(folder / ".latest.saving")] < latest < synced[str(folder)]
    )


def test_without_durable_nothing_is_synced(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, save_jobs.count_syncs, SETUP, str(tmp_path / "a"), durable=True) == [9, 3]
    assert ranks.run(2, save_jobs.count_syncs, SETUP, str(tmp_path / "b"), durable=False) == [0, 0]


@pytest.mark.parametrize("has_locks", [True, False])
def test_a_file_system_without_locks_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if not has_locks:
        monkeypatch.setattr(locks.fcntl, "flock", flock)
    manifest = Manifest(Keeper.ZERO_1_OR_2, Mesh(), (), ())
    sync = Syncs()
    with begin(tmp_path, "step1", sync.right) as aside:
        notes = publish(aside, tmp_path, manifest, "latest", sync)
    assert (tmp_path / "latest").read_text() == "step1"
    assert any("no locks (flock)" in note for note in notes) is not has_locks
