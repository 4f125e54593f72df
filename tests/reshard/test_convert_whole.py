"""Conversions that are refused, damaged or killed: whole or not there. And the verb."""

import json
import resource
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import megatron_ucp as ucp
from megatron_ucp import errors
from megatron_ucp.cli import main
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.reshard.files import FileSource
from tests.engines import kinds
from tests.engines.model import Setup
from tests.engines.sources import Sources, without_manifest
from tests.engines.tensor_jobs import Mega
from tests.reshard.converted import same
from tests.scripts import run_command

pytestmark = pytest.mark.ranks

NAMES = (
    *("embed.weight", "up.weight", "up.bias", "down.weight", "down.bias"),
    *("norm.weight", "norm.bias", "gain"),
)
PP, ONE = ucp.Mesh(pp=2), ucp.Mesh()
Refusal = tuple[type[ucp.UcpError], str, dict[str, Any]]
PLAIN_REFUSALS: list[Refusal] = [
    (errors.UsageError, "for one mesh", {}),
    (errors.UsageError, "no such format", {"to": "hf"}),
    (errors.RuleError, "nobody declared", {"target": ucp.Mesh(tp=2)}),
    (errors.UnsupportedError, "not known", {"target": PP}),
    (errors.UnsupportedError, "not known", {"target": PP, "to": "universal"}),
    (errors.UsageError, "allow names what may happen", {"target": ONE, "allow": {"narow"}}),
    (errors.UsageError, "ZeRO 0 and 1", {"target": ucp.Mesh(pp=2, zero=2)}),
    (errors.UsageError, "every trainable", {"target": ucp.Target(ONE, groups=(("up.weight",),))}),
    (errors.StateMismatchError, "different hyper", {"target": ucp.Target(ONE, groups=(NAMES,))}),
]
LLAMA_REFUSALS: list[Refusal] = [
    (errors.LayoutError, "does not divide attention heads", {"target": ucp.Mesh(tp=5)}),
    (errors.UsageError, "do not add up", {"target": ucp.Target(PP, stages=(1, 1))}),
]


def test_what_a_mesh_does_not_say(sources: Sources, tmp_path: Path) -> None:
    plain = sources.get(2, Setup(1, "bf16"))
    llama = sources.get(4, Mega("llama", 2, 1), more=0)
    out = tmp_path / "out"
    for source, refusals in ((plain, PLAIN_REFUSALS), (llama, LLAMA_REFUSALS)):
        for error, words, arguments in refusals:
            with pytest.raises(error, match=words):
                ucp.convert(source, out, **{"to": "native", **arguments})
            assert not list(tmp_path.iterdir()), "something is left"
    out.mkdir()
    with pytest.raises(errors.UsageError, match="exists"):
        ucp.convert(plain, out, target=ucp.Mesh())


def test_groups_of_ones_own(sources: Sources, tmp_path: Path) -> None:
    """The order of an optimizer that lists its parameters differently; stock's load goes by
    position."""
    folder = sources.get(2, Setup(1, "fp32", groups=1))
    target = ucp.Target(ucp.Mesh(dp=2, zero=1), groups=(NAMES[::-1],))
    found = ucp.convert(folder, tmp_path / "out", target=target, tag="filled")
    same(Path(folder) / "filled", found.path)
    order = [m.param for m in ucp.describe(found.path).buffers[0].members]
    assert order == list(NAMES[::-1])


def test_a_checkpoint_without_an_optimizer(sources: Sources, tmp_path: Path) -> None:
    folder = Path(sources.get(2, Setup(0, "bf16"), attach=False, more=0))
    with pytest.raises(errors.StateMismatchError, match="no optimizer"):
        ucp.convert(folder, tmp_path / "out", target=ucp.Mesh(dp=2, zero=1), tag="trained")


def test_a_damaged_source_leaves_nothing(sources: Sources, broken: Any, tmp_path: Path) -> None:
    folder = without_manifest(broken()) / "filled"
    path = next(folder.glob("*rank_1*optim*"))
    with PtFile(path) as file:
        records = [record for name, record in file.records.items() if "/data/" in name]
        record = max(records, key=lambda record: record.size_bytes)
        at = record.offset_bytes + record.size_bytes // 3
    flip(path, at)
    out = tmp_path / "out"
    for to, target in (("native", ucp.Mesh(dp=4, zero=3)), ("universal", None)):
        with pytest.raises(errors.DamagedFileError, match="damaged"):
            ucp.convert(folder, out / to, to=to, target=target)
        assert list(out.iterdir()) == []


@pytest.mark.parametrize("what", ["a step", "client state"])
def test_a_damaged_number_beside_the_parameters(
    sources: Sources, broken: Any, tmp_path: Path, what: str
) -> None:
    """A step and a tensor of the client state are read outside of the plan; their records count as
    well."""
    folder = without_manifest(broken()) / "trained"
    if what == "a step":
        # the same flip in all files: no two of them disagree
        for path in folder.glob("*optim*"):
            flip_steps(path)
    else:
        path = folder / "mp_rank_00_model_states.pt"
        with PtFile(path) as file:
            tree: Any = file.tree
            at = file.record(tree["data"].storage).offset_bytes
        flip(path, at)
    with pytest.raises(errors.DamagedFileError, match="wrong checksum"):
        ucp.convert(folder, tmp_path / "out" / "x", target=ucp.Mesh(dp=4, zero=3))
    assert list((tmp_path / "out").iterdir()) == []
    for rank in sources.ranks.run(2, kinds.attempt, Setup(3, "bf16", seed=9), str(folder)):
        assert rank["error"] == "DamagedFileError" and "wrong checksum" in rank["message"]
        assert rank["unchanged"]


def flip_steps(path: Path) -> None:
    with PtFile(path) as file:
        held: Any = file.tree
        state = held["optimizer_state_dict"]["base_optimizer_state"]["state"]
        places = [file.record(entry["step"].storage).offset_bytes for entry in state.values()]
    for place in places:
        flip(path, place + 3)  # of the exponent: 256 times as many steps


def flip(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        old = file.read(1)
        file.seek(at)
        file.write(bytes([old[0] ^ 4]))


# ------------------------------------------------ the disk, and interruptions


def test_a_full_disk(sources: Sources, tmp_path: Path) -> None:
    folder, out = sources.get(2, Setup(1, "bf16")), tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        with pytest.raises(errors.SaveError, match="nothing is left"):
            ucp.convert(folder, out / "x", target=ucp.Mesh(dp=2, zero=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, old)
    assert list(out.iterdir()) == []
    ucp.convert(folder, out / "x", target=ucp.Mesh(dp=2, zero=1))


def test_a_target_that_can_not_be_written(sources: Sources, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file" / "out", Path("/proc/out")):
        with pytest.raises(errors.SaveError, match="could not be written"):
            ucp.convert(sources.get(2, Setup(1, "bf16")), place, target=ucp.Mesh(dp=2, zero=1))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_ctrl_c_leaves_nothing(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = sources.get(2, Setup(1, "bf16")), str(tmp_path / "out" / "x")
    with mock.patch.object(FileSource, "check", side_effect=KeyboardInterrupt):
        assert main(["convert", folder, out, "--mesh", "dp=2,zero=1"]) == 130
    assert capsys.readouterr().err == "megatron-ucp: interrupted\n"
    assert list((tmp_path / "out").iterdir()) == []


# ------------------------------------------------ the command line


def test_the_verb(sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sources.get(2, Setup(1, "bf16"))
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["convert", folder, a, "--tag", "filled", "--mesh", "dp=4,zero=3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert ucp.Mesh(**found["mesh"]) == ucp.Mesh(dp=4, zero=3)
    assert found["files"] == 8 and found["notes"] == []
    # stock's spelling: without a mesh it is a universal folder
    assert main(["convert", "--input_folder", f"{folder}/filled", "--output_folder", b]) == 0
    assert "-> universal; " in capsys.readouterr().out
    assert main(["diff", a, b]) == 0
    config = tmp_path / "config.json"
    wanted = {"bf16": {"enabled": True}, "zero_optimization": {"sub_group_size": 50}}
    config.write_text(json.dumps(wanted))
    job = ["--mesh", "dp=2,zero=3", "--ds-config", str(config), "--tag", "filled"]
    assert main(["convert", folder, c, *job]) == 0
    assert len(ucp.describe(c).buffers) > len(ucp.describe(a).buffers)
    assert "no `latest` was written: load it by its path" in capsys.readouterr().out


def test_the_verb_refuses(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sources.get(2, Setup(1, "bf16"))
    there, out, nothing = (str(tmp_path / name) for name in ("there", "out", "nothing"))
    Path(there).mkdir()
    for arguments in (
        [folder],
        [folder, there, "--mesh", "dp=2"],
        [folder, out, "--mesh", "dp=x"],
        [folder, out, "--to", "native"],
        [nothing, out, "--mesh", "dp=2"],
        [folder, out, "--mesh", "dp=2", "--ds-config", f"{nothing}.json"],
    ):
        assert main(["convert", *arguments]) == 2
        assert "megatron-ucp: " in capsys.readouterr().err
        assert not Path(out).exists()


@pytest.mark.parametrize("trials", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments(sources: Sources, tmp_path: Path, trials: int) -> None:
    folder = sources.get(2, Setup(1, "bf16"))
    program = [sys.executable, "-m", "tests.reshard.killed"]
    arguments = [f"{folder}/filled", str(tmp_path), "--trials", str(trials), "--seed", "5"]
    done = run_command([*program, *arguments], timeout=300 + 10 * trials)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == trials and all(trial["equal"] and trial["again"] for trial in found), found
    hit = [trial for trial in found if trial["killed"] and trial["left"]]
    assert hit, "no kill fell into a conversion"
    ucp.convert(f"{folder}/filled", tmp_path / "next", target=ucp.Mesh(dp=1, zero=1))
    assert not list(tmp_path.glob(".*")), "the next one removes what a killed one left"


def test_what_was_made_without_a_manifest_is_loaded(sources: Sources, tmp_path: Path) -> None:
    """No seed is known there that random states could be derived from."""
    folder = sources.get(2, Setup(1, "bf16"), attach=False, more=0)
    made = ucp.convert(folder, tmp_path / "out", target=ucp.Mesh(dp=2, zero=3), tag="filled")
    target = Setup(3, "bf16", seed=9)
    for rank in sources.ranks.run(2, kinds.our_load, target, made.path, folder):
        assert rank["differences"] == [] and len(rank["before"]) > 10
        assert any("random states: the checkpoint has none" in note for note in rank["notes"])
    named = sources.get(2, Setup(1, "bf16"), more=0)
    made = ucp.convert(named, tmp_path / "named", target=ucp.Mesh(dp=2, zero=3), tag="filled")
    for rank in sources.ranks.run(2, kinds.our_load, target, made.path, named):
        assert any("random states: derived" in note for note in rank["notes"])
