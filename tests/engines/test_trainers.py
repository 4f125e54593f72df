"""Trainers that call `deepspeed.initialize` themselves: HF Trainer, Accelerate, and scripts under
the module runner."""

import base64
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp import run as runner
from megatron_ucp.cli import main
from megatron_ucp.engines import trainers
from megatron_ucp.engines.deepspeed.refuse import _OF_ENGINES
from megatron_ucp.errors import UsageError
from megatron_ucp.reshard.options import options_of
from tests.engines import trainer_jobs
from tests.engines.canonical import differences
from tests.engines.trainer_jobs import ON
from tests.ranks import ROOT, RankPool
from tests.reshard import twins
from tests.scripts import run_command, start

SAVED_AT, STEPS = 4, 8
STOCK_KEY = {"checkpoint": {"load_universal": True}}


def check_equal(want: dict[str, Any], fresh: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Every rank began with the saved states, which a fresh engine did not have."""
    assert len(differences(want, fresh)) > 10
    for rank in found:
        assert differences(want, rank["begin"]) == []


def check_losses(want: dict[int, float], have: dict[int, float]) -> None:
    steps = range(SAVED_AT + 1, STEPS + 1)
    assert max(abs(want[step] - have[step]) for step in steps) <= 1e-5


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_checkpoints: Path) -> tuple[str, dict[str, Any]]:
    """The checkpoint of an HF Trainer run at ZeRO-2 on two ranks that went on to its end, and what
    rank 0 saw."""
    folder = tmp_checkpoints / "trainer"
    found = ranks.run(2, trainer_jobs.trainer, str(folder), zero=2, steps=STEPS, save_at=SAVED_AT)
    return str(folder / f"checkpoint-{SAVED_AT}"), found[0]


@pytest.mark.parametrize(("dp", "zero"), [(1, 3), (4, 1), (2, 0)])
def test_hf_trainer_resumes_on_another_mesh(
    ranks: RankPool, trained: tuple[str, dict[str, Any]], tmp_path: Path, dp: int, zero: int
) -> None:
    checkpoint, reference = trained
    job = trainer_jobs.trainer, str(tmp_path)
    found = ranks.run(dp, *job, zero=zero, steps=STEPS, resume=checkpoint, seed=5)
    check_equal(reference["saved"], reference["begin"], found)
    check_losses(reference["losses"], found[0]["losses"])


def samples(found: list[dict[str, Any]]) -> list[list[int]]:
    """The samples of each step, those of rank 0 first."""
    steps = zip(*(rank["samples"] for rank in found), strict=True)
    return [[number for share in shares for number in share] for shares in steps]


@pytest.mark.parametrize(
    "case", [(1, 4, ""), (4, 4, ""), (2, 2, "repeats 8"), (1, 6, "leaves out 8")], ids=str
)
def test_the_trainers_own_counters(
    ranks: RankPool, trained: tuple[str, dict[str, Any]], tmp_path: Path, case: tuple[int, int, str]
) -> None:
    """It goes on where it was while a step has as many samples, on any number of ranks; else a note
    says what it repeats or leaves out."""
    dp, batch, said = case
    job, arguments = trainer_jobs.trainer, {"zero": 1, "batch": batch}
    whole = ranks.run(1, job, str(tmp_path / "whole"), steps=14, zero=0)
    order = [number for step in samples(whole) for number in step]
    found = ranks.run(dp, job, str(tmp_path), steps=STEPS, resume=trained[0], **arguments)
    first = SAVED_AT * batch
    assert samples(found)[0] == order[first : first + batch]
    for rank in found:
        notes = [note for note in rank["report"].notes if "trainer_state.json" in note]
        known = [f"after sample {first:,}, which {said} samples" in note for note in notes]
        assert known == [True] * bool(said)
        # 4 samples in a step before; 2 and 6 are as many for each of the ranks and steps between
        changed = [note for note in rank["report"].notes if "another batch" in note]
        assert [f"4 samples before, {batch} (" in note for note in changed] == [True] * bool(said)
        assert all("the learning rate and the schedule" in note for note in changed)


def autotp(size: int) -> dict[str, Any]:
    return {**ON, **({"tensor_parallel": {"autotp_size": size}} if size > 1 else {})}


@pytest.fixture(scope="module")
def cut(ranks: RankPool, tmp_checkpoints: Path) -> tuple[str, dict[str, Any]]:
    """As `trained`, of two ranks that share a model of AutoTP and each step's four samples."""
    folder, job = tmp_checkpoints / "trainer_cut", trainer_jobs.trainer
    run = {"zero": 1, "steps": STEPS, "save_at": SAVED_AT, "batch": 8, "config": autotp(2)}
    found = ranks.run(2, job, str(folder), **run)
    assert found[0]["samples"] == found[1]["samples"]
    return str(folder / f"checkpoint-{SAVED_AT}"), found[0]


@pytest.mark.parametrize(
    "case",
    [(1, 1, 4, ""), (4, 2, 8, ""), (2, 2, 4, "repeats 8"), (1, 1, 6, "leaves out 8")],
    ids=str,
)
def test_the_trainer_under_autotp(
    ranks: RankPool, cut: tuple[str, dict[str, Any]], tmp_path: Path, case: tuple[Any, ...]
) -> None:
    """DeepSpeed counts the samples of a step once for each of AutoTP's ranks."""
    world, size, batch, said = case
    checkpoint, reference = cut
    options = {"resume": checkpoint, "seed": 5, "batch": batch, "config": autotp(size)}
    job = trainer_jobs.trainer
    found = ranks.run(world, job, str(tmp_path), zero=2, steps=STEPS, **options)
    check_equal(reference["saved"], reference["begin"], found)
    if not said:
        check_losses(reference["losses"], found[0]["losses"])
    for rank in found:
        notes = [note for note in rank["report"].notes if "trainer_state.json" in note]
        known = ["took 16 samples in 4 steps" in n and said in n for n in notes]
        assert known == [True] * bool(said)


def test_the_trainer_comparison_sees_another_step(trained: tuple[str, dict[str, Any]]) -> None:
    saved = trained[1]["saved"]
    scalars = {key: value + (key[1] == "step") for key, value in saved["scalars"].items()}
    assert len(differences(saved, {**saved, "scalars": scalars})) == 1


def exported(folder: Path, out: Path, saved: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The tensors of an export in fp32, which must be the masters, and the other states' weights by
    the names of the model."""
    ucp.export_hf(folder, out, dtype="float32", verify=True, **options)
    found = twins.read(out)
    masters = {name: full for (name, state), full in saved["full"].items() if state == "fp32"}
    assert len(masters) > 10 and {*masters} <= {*found}
    assert all(torch.equal(found[n].view(-1), full.view(-1)) for n, full in masters.items())
    return found


def test_a_trainer_checkpoint_goes_to_hugging_face(
    trained: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """With the config that the Trainer wrote beside it; transformers loads the folder."""
    from transformers import AutoModelForCausalLM

    folder, out = Path(trained[0]), tmp_path / "out"
    found = exported(folder, out, trained[1]["saved"], config=folder)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    held = model.state_dict()
    assert all(torch.equal(held[name], found[name]) for name in found if name != "mark")


STOCK: dict[str, tuple[bool, dict[str, Any]]] = {
    "not installed": (False, {"universal_checkpoint": {"enabled": True}}),
    "no section": (True, {}),
    "not enabled": (True, {"universal_checkpoint": {"enabled": False}}),
}


@pytest.mark.parametrize("how", STOCK)
def test_stock_deepspeed_refuses_the_same_resume(
    ranks: RankPool, trained: tuple[str, dict[str, Any]], tmp_path: Path, how: str
) -> None:
    run = {"folder": str(tmp_path), "zero": 2, "steps": STEPS, "resume": trained[0]}
    said = ranks.run(1, trainer_jobs.refused, *STOCK[how], **run)
    assert said[0].startswith("ZeRORuntimeException"), said[0]


def test_the_stock_key_needs_no_converted_folder_and_follows_latest(
    ranks: RankPool, trained: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Defect S14: with the key left on, stock DeepSpeed goes on loading an old converted folder."""
    checkpoint, reference = trained
    stale = Path(checkpoint) / "latest_universal"
    stale.write_text("global_step2_universal")
    (Path(checkpoint) / "global_step2_universal" / "zero").mkdir(parents=True)
    run = {"zero": 1, "steps": STEPS, "resume": checkpoint, "seed": 5, "config": STOCK_KEY}
    try:
        found = ranks.run(1, trainer_jobs.trainer, str(tmp_path), **run)
    finally:
        stale.unlink()
    check_equal(reference["saved"], reference["begin"], found)
    assert Path(found[0]["report"].path).name == f"global_step{SAVED_AT}"


@pytest.mark.parametrize(("dp", "zero"), [(4, 3), (1, 1)])
def test_accelerate_resumes_on_another_mesh(
    ranks: RankPool, tmp_checkpoints: Path, tmp_path: Path, dp: int, zero: int
) -> None:
    folder = str(tmp_path / "state")
    job = trainer_jobs.accelerator
    reference = ranks.run(2, job, folder, zero=2, steps=STEPS, save_at=SAVED_AT)[0]
    found = ranks.run(dp, job, folder, zero=zero, steps=STEPS, load=True, seed=5)
    check_equal(reference["saved"], found[0]["fresh"], found)
    check_losses(reference["losses"], found[0]["losses"])
    (state,) = Path(folder).glob("**/latest")
    exported(state.parent, tmp_path / "out", reference["saved"])


@pytest.mark.parametrize(
    ("source", "dp", "zero"), [(1, 4, 3), (0, 1, 1), (3, 1, 0), (2, 4, 1), (3, 2, 2)]
)
def test_an_adapter_under_accelerate(
    ranks: RankPool, tmp_path: Path, source: int, dp: int, zero: int
) -> None:
    """Without the weights of its base, of which the head is tied."""
    folder, job = str(tmp_path / "state"), trainer_jobs.accelerator
    options = {"steps": STEPS, "adapter": True}
    reference = ranks.run(2, job, folder, zero=source, save_at=SAVED_AT, **options)[0]
    found = ranks.run(dp, job, folder, zero=zero, load=True, seed=5, **options)
    check_equal(reference["saved"], found[0]["fresh"], found)
    check_losses(reference["losses"], found[0]["losses"])
    (kept,) = [note for note in found[0]["report"].notes if "not in the checkpoint" in note]
    assert "embed_tokens" in kept


@pytest.mark.parametrize("form", ["dict", "file with comments", "base64"])
def test_the_section_is_found_wherever_deepspeed_finds_its_config(
    ranks: RankPool, tmp_path: Path, form: str
) -> None:
    section = {"enabled": True, "hyper": "config"}
    config: Any = {"train_batch_size": 1, "universal_checkpoint": section}
    if form == "file with comments":
        (tmp_path / "ds.json").write_text("{\n  // mine\n" + json.dumps(config)[1:-1] + ",\n}")
        config = str(tmp_path / "ds.json")
    elif form == "base64":
        config = base64.urlsafe_b64encode(json.dumps(config).encode()).decode()
    assert ranks.run(1, trainer_jobs.installed, config) == [True]


@pytest.mark.parametrize(
    ("section", "found"),
    [
        ({"enable": True}, "enable"),
        ({"enabled": "yes"}, "enabled"),
        ({"enabled": True, "checksum": False}, "checksum"),
        (True, "True"),
        ({"enabled": True, "hyper": "both"}, "both"),
        ({"enabled": True, "allow": ["all"]}, "all"),
    ],
)
def test_an_unknown_key_or_value_in_the_section_is_a_named_error(
    ranks: RankPool, section: Any, found: str
) -> None:
    with pytest.raises(UsageError, match=f"found: .*{found}"):
        options_of({"train_batch_size": 1, "universal_checkpoint": section})
    config = {"train_batch_size": 1, "universal_checkpoint": section}
    assert found in ranks.run(1, trainer_jobs.installed, config)[0]


NAMED = SimpleNamespace(**dict.fromkeys(_OF_ENGINES))  # what has the names of an engine


def test_an_unknown_option_of_attach_is_a_named_error() -> None:
    with pytest.raises(UsageError, match="hypr"):
        ucp.attach(NAMED, hypr="config")
    for allow in ("new", 3):
        with pytest.raises(UsageError, match=f"found: {allow!r}"):
            ucp.attach(NAMED, allow=allow)


def test_a_folder_without_any_checkpoint_is_a_fresh_start(ranks: RankPool, tmp_path: Path) -> None:
    """As in DeepSpeed, through the engine's own method and without a tag; a tag that is not there
    is an error."""
    found = ranks.run(1, trainer_jobs.first_start, str(tmp_path))[0]
    assert found == [(None, None), (None, None), "NotFoundError", "NotFoundError"]


@pytest.mark.ranks
def test_the_module_runner_resumes_a_script_that_knows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = [str(Path(__file__).with_name("plain_script.py")), str(tmp_path)]
    runner, log = ["-m", "megatron_ucp.run", *script], tmp_path / "log"
    assert start(2, [*runner, "save", "1"], log) == 0, log.read_text()
    assert start(1, [*script, "resume", "1"], log) != 0
    assert "ZeRORuntimeException" in log.read_text()
    assert start(1, [*runner, "resume", "3"], log) == 0, log.read_text()
    (line,) = [line for line in log.read_text().splitlines() if "loaded step 3" in line]
    assert "tp=1,pp=1,dp=2,zero=1 -> tp=1,pp=1,dp=1,zero=3" in line and "fingerprint of" in line
    files = [tmp_path / f"{verb}.pt" for verb in ("save", "resume")]
    want, have = (torch.load(file, weights_only=False) for file in files)
    assert differences(want, have) == []


@pytest.mark.ranks
@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_the_module_runner_is_what_python_is_to_a_script(tmp_path: Path, as_module: bool) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7")
    (tmp_path / "job.py").write_text(
        "import sys, beside, deepspeed\n"
        "wrapped = hasattr(deepspeed.initialize, '__wrapped__')\n"
        "print(__name__, sys.argv[1:], beside.VALUE, wrapped)"
    )
    what = ["-m", "job"] if as_module else [str(tmp_path / "job.py")]
    done = run_command([sys.executable, "-m", "megatron_ucp.run", *what, "--lr", "1"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "__main__ ['--lr', '1'] 7 True"


@pytest.mark.parametrize(
    "how",
    [
        ["megatron_ucp.run", "job.py", "--epochs", "3"],
        ["megatron_ucp.run", "--local_rank=0", "job.py", "--epochs", "3"],
        ["megatron_ucp.run", "-m", "job", "--epochs", "3"],
        ["megatron_ucp", "--quiet", "run", "job.py", "--epochs", "3"],
        ["megatron_ucp", "run", "-m", "job", "--epochs", "3"],
    ],
)
def test_what_a_script_prints_and_raises_is_its_own(tmp_path: Path, how: list[str]) -> None:
    """Colours arrive, an error of ours that it raises has its traceback; DeepSpeed's launcher puts
    the rank first."""
    (tmp_path / "job.py").write_text(
        "import sys, megatron_ucp as ucp\n"
        "print('\\033[31mred\\033[0m', sys.argv[1:])\nucp.Mesh(tp=0)"
    )
    done = run_command([sys.executable, "-m", *how], env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    rank = ["--local_rank=0"] if "--local_rank=0" in how else []
    assert done.stdout == f"\033[31mred\033[0m {[*rank, '--epochs', '3']}\n"
    assert done.returncode == 1 and 'job.py", line 3' in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope.py", "--lr", "1"], "there is no such script"),
        (["-m", "no_such_module_at_all"], "there is no such module"),
        (["-m"], "there is no such module"),
        (["--nproc_per_node", "2", "train.py"], "the option --nproc_per_node"),
        ([], "usage: "),
    ],
)
def test_what_can_not_be_run_is_said_in_a_few_lines(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in (runner.main, lambda words: main(["run", *words])):
        assert run(words) == 2
        found = capsys.readouterr().err
        assert said in found and "Traceback" not in found and len(found.splitlines()) < 10
    assert main(["run", "--help"]) == 0 and "usage: " in capsys.readouterr().out


# ------------------------------------------------ trainers that are killed while they save

KILLED = [(name, save, keep) for name in ("trainer", "accelerate", "lightning")
          for save in ("background", "direct") for keep in (1, 2)]  # fmt: skip


def killed(folder: Path, *options: str, lives: int = 4) -> list[dict[str, Any]]:
    """What each life of a run did, which is killed again and again."""
    words = [sys.executable, "-m", "tests.engines.killed_trainers", str(folder), *options]
    words += ["--lives", str(lives)]
    done = run_command(words, timeout=400)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"life"')]
    assert len(found) == lives, done.stdout[-3000:] + done.stderr[-3000:]
    return found


@pytest.mark.parametrize(
    ("name", "save", "keep"),
    [pytest.param(*one, marks=[] if one == KILLED[0] else pytest.mark.slow) for one in KILLED],
)
def test_a_trainer_that_is_killed_goes_on_from_a_whole_checkpoint(
    tmp_path: Path, name: str, save: str, keep: int
) -> None:
    found = killed(tmp_path, "--trainer", name, "--save", save, "--keep", str(keep))
    assert [line["wrong"] for line in found] == [[]] * len(found)
    assert found[-1]["begins"] > 0


@pytest.mark.slow
def test_the_comparison_of_killed_trainers_sees_a_removal_too_early(tmp_path: Path) -> None:
    """As it is where nobody waits: of some lives nothing whole is left."""
    found = killed(tmp_path, "--trainer", "trainer", "--keep", "1", "--plant-fault", lives=12)
    assert any(line["wrong"] for line in found)


# ------------------------------------------------ what waits for a save


@dataclass
class Turn:
    """A save in the background of a tag."""

    what: str
    error: Exception | None = None
    joined: int = 0

    def join(self) -> None:
        self.joined += 1


def _spellings(path: Path, link: Path) -> list[Any]:
    """A path in the ways in which programs give it."""
    link.symlink_to(path.parent)
    with os.scandir(path.parent) as entries:
        entry = next(one for one in entries if one.name == path.name)
    relative = os.path.relpath(path)
    return [
        str(path),
        path,
        os.fsencode(path),
        entry,
        link / path.name,
        relative,
        f"{path}/../{path.name}",
    ]


@pytest.mark.parametrize("failed", [False, True])
def test_a_checkpoint_waits_for_the_save_whatever_its_path_is_spelt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    """An older checkpoint is the last one while a newer is on its way. Unrelated folders beside it
    are nobody's."""
    older, newer = tmp_path / "out" / "checkpoint-5", tmp_path / "out" / "checkpoint-10"
    tag = older / "global_step5"
    for folder in (tag, newer / "global_step10", tmp_path / "out" / "cache", newer / "images"):
        folder.mkdir(parents=True)
    (tag / "mp_rank_00_model_states.pt").write_bytes(b"")
    turn = Turn(str(newer / "global_step10"), OSError() if failed else None)
    monkeypatch.setattr(trainers, "last_saves", lambda: [turn])
    for number, path in enumerate(_spellings(older, tmp_path / "link")):
        assert trainers._may_remove(path) is not failed, path
        assert turn.joined == number + 1, path
    turn.joined = 0
    for path in (tmp_path / "out" / "cache", newer / "images", tmp_path / "nothing", b"\xff"):
        assert trainers._may_remove(path)
    assert turn.joined == 0
    for around in (newer, tmp_path / "out"):
        assert trainers._may_remove(around)
    assert turn.joined == 2
