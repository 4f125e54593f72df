"""A model that is another one in part: resized vocabularies, parts that a checkpoint lacks, and
what each word of `allow` does at each door."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.errors import UcpError, UsageError
from megatron_ucp.reshard.options import TABLE
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import oracle_of
from tests.engines.model import Setup, make_engine, train
from tests.engines.sources import Sources, without_manifest


def resize(setup: Setup, folder: str, step: bool = True) -> dict[str, Any]:
    """A load into a model with other rows: refused without the allowance; with it, what is not as
    it should be: rows that both have from the checkpoint, the others as they were, states zero."""
    oracle = oracle_of(folder)["states"]["filled"]
    engine = make_engine(setup)
    before = canonical(engine)
    out: dict[str, Any] = {"refusal": "", "id": ""}
    try:
        ucp.load(engine, folder, tag="filled")
    except ucp.UcpError as error:
        out |= {"refusal": str(error), "id": error.id}
    out["unchanged"] = differences(before, canonical(engine)) == []
    report = ucp.load(engine, folder, tag="filled", allow={"vocab"})
    have = canonical(engine)
    wrong, compared = [], 0
    for key, want in oracle["full"].items():
        found, rows = have["full"][key], min(len(want), len(have["full"][key]))
        own = before["full"].get(key, torch.zeros_like(found))
        rest = own[rows:] if key[1] == "fp32" else torch.zeros_like(found[rows:])
        same = torch.equal(found[:rows], want[:rows]) and torch.equal(found[rows:], rest)
        compared += len(found) - rows
        wrong += [] if same else [key]
    out |= {"wrong": wrong, "new": compared, "notes": report.notes, "steps": report.global_steps}
    out["scalars"] = [k for k, v in oracle["scalars"].items() if have["scalars"].get(k) != v]
    out["weights"] = [
        name
        for name, weight in have["weights"].items()
        if (name, "fp32") in have["full"]
        and not torch.equal(weight, have["full"][name, "fp32"].to(weight.dtype))
    ]
    if step:
        train(engine, 1)
    engine.destroy()
    return out


def attempts(setup: Setup, folder: str, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loads into one engine with each of the options given: the error, whether the engine is as
    before, the notes."""
    engine = make_engine(setup)
    out: list[dict[str, Any]] = []
    for options in given:
        before = canonical(engine)
        found: dict[str, Any] = {"error": "", "notes": ()}
        try:
            found["notes"] = ucp.load(engine, folder, tag="trained", **options).notes
        except ucp.UcpError as error:
            found["error"] = f"{type(error).__name__}: {error}"
        found["unchanged"] = differences(before, canonical(engine)) == []
        out.append(found)
    engine.destroy()
    return out


ALL_WAYS: dict[str, dict[str, Any]] = {
    "load": {},
    "states out": {"load_optimizer_states": False},
    "module only": {"load_module_only": True},
    "scheduler out": {"load_lr_scheduler_states": False},
}


def each_word(setup: Setup, folder: str, words: list[str]) -> dict[str, dict[str, str]]:
    """For each way to load, and each word that is allowed there, what the load says against it."""
    engine = make_engine(setup)
    out: dict[str, dict[str, str]] = {}
    for way in (*ALL_WAYS, "held", "resize"):
        out[way] = {word: _said(engine, setup, folder, way, word) for word in words}
    engine.destroy()
    return out


def _said(engine: Any, setup: Setup, folder: str, way: str, word: str) -> str:
    try:
        if way == "held":
            ucp.load(engine, ucp.hold(engine), allow={word})
        elif way == "resize":
            other = make_engine(setup)
            try:
                ucp.resize(engine, other, allow={word})
            finally:
                other.destroy()
        else:
            ucp.load(engine, folder, tag="trained", allow={word}, **ALL_WAYS[way])
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks
GOLDEN = Path(__file__).parents[1] / "formats" / "golden"


# ---- rows of a vocabulary


@pytest.mark.parametrize(
    ("zero", "dtype", "net", "wanted"),
    [
        (1, "bf16", "Net", "MoreRows"),
        (3, "bf16", "Net", "MoreRows"),
        (0, "fp32", "Net", "MoreRows"),
        (2, "fp32", "UntiedBias", "MoreRowsUntied"),
        (3, "fp32", "Net", "FewerRows"),
        (1, "bf16", "Net", "FewerRows"),
    ],
)
def test_a_resized_vocabulary_goes_on(
    sources: Sources, zero: int, dtype: str, net: str, wanted: str
) -> None:
    """11 rows become 14 or 9. Rows that both have are the checkpoint's, bit for bit, masters and
    moments; new ones are as the engine drew them."""
    folder = sources.get(2, Setup(zero, dtype, net=net), more=0)
    target = Setup(zero, dtype, net=wanted, seed=9)
    # fewer rows than the data have tokens: no step
    found = sources.ranks.run(2, resize, target, folder, wanted != "FewerRows")
    rows = 14 if wanted.startswith("More") else 9
    for rank in found:
        assert rank["id"] == "vocabulary" and 'allow={"vocab"}' in rank["refusal"]
        assert rank["unchanged"] and f"({rows}, 7) as in the model" in rank["refusal"]
        assert rank["wrong"] == [] and rank["scalars"] == [] and rank["weights"] == []
        assert (rank["new"] > 0) == (rows == 14) and rank["steps"] == 3
        said = "3 rows begin with the engine's values" if rows == 14 else "2 rows dropped"
        assert any("vocabulary resized" in note and said in note for note in rank["notes"])


def test_rows_are_no_way_round_another_width(sources: Sources) -> None:
    """Two biases and rows of one matrix grow, and columns of another: no vocabulary."""
    folder = sources.get(2, Setup(1, "fp32"), more=0)
    given = [{}, {"allow": {"vocab"}}]
    for rank in sources.ranks.run(2, attempts, Setup(1, "fp32", net="Wider"), folder, given):
        plain, allowed = rank
        assert "another shape" in plain["error"] and '"vocab"' not in plain["error"]
        assert '"vocab" is for parameters that all have the same number of rows' in allowed["error"]
        assert plain["unchanged"] and allowed["unchanged"]


# ---- nothing of the model, or of a part


ALL: dict[str, Any] = {"allow": {"new", "extra", "missing", "freeze", "unfreeze", "vocab"}}


def test_a_load_that_finds_nothing_fails_whatever_is_allowed(sources: Sources) -> None:
    folder = sources.get(2, Setup(1, "bf16"), more=0)
    weights = {**ALL, "load_module_only": True}
    for rank in sources.ranks.run(
        2, attempts, Setup(1, "bf16", net="Unlike"), folder, [{}, ALL, weights]
    ):
        for found in rank:
            assert "holds no parameter of the model" in found["error"] and found["unchanged"]
            assert "words.weight" in found["error"] and "embed.weight" in found["error"]


def test_a_part_that_nobody_named_is_not_begun_anew(sources: Sources) -> None:
    """A tower that the checkpoint lacks: "new" is not enough, its name is. A single new layer is
    no part."""
    folder = sources.get(2, Setup(0, "fp32"), more=0)
    states = {"load_optimizer_states": False}
    named = [{"allow": {"new:tower"}, **states}, {"allow": {"new", "new:tower"}, **states}]
    given = [{}, ALL, {"allow": {"new"}, **states}, *named, {"allow": {"new:towe"}, **states}]
    setup = Setup(0, "fp32", net="WithTower", seed=9)
    for rank in sources.ranks.run(2, attempts, setup, folder, given):
        plain, everything, new, alone, both, other = rank
        for found in (plain, everything, new, other):
            assert "holds no parameter of a part of the model" in found["error"]
            assert "tower" in found["error"] and 'allow={"new:tower"}' in found["error"]
            assert found["unchanged"]
        for found in (alone, both):
            assert found["error"] == ""
            assert any(
                note.startswith("new,") and "tower.1.weight" in note for note in found["notes"]
            )
    setup = Setup(0, "fp32", net="Grown", seed=9)
    (found,) = sources.ranks.run(2, attempts, setup, folder, [{"allow": {"new"}, **states}])[0]
    assert found["error"] == ""


def test_a_frozen_part_may_be_missing_where_nothing_else_is_there(
    sources: Sources, tmp_path: Path
) -> None:
    """As in a save without frozen weights; with weights of other names it is a part that is lost
    under them."""
    setup = Setup(1, "bf16", net="WithFrozenTower", seed=9)
    given = [{}, {"allow": {"missing"}}, {"allow": {"missing:tower"}}]
    folder = sources.get(2, Setup(1, "bf16"), more=0)
    for rank in sources.ranks.run(2, attempts, setup, folder, given):
        assert "a frozen parameter that the checkpoint lacks" in rank[0]["error"]
        assert [found["error"] for found in rank[1:]] == ["", ""]
    more = sources.get(2, Setup(1, "bf16", net="MoreBuffers"), more=0)
    allowed = [{"allow": {"missing", "extra"}}, {"allow": {"missing:tower", "extra"}}]
    for rank in sources.ranks.run(2, attempts, setup, more, allowed):
        assert "holds no parameter of a part" in rank[0]["error"]
        assert '"missing:tower"' in rank[0]["error"] and rank[1]["error"] == ""


# ---- every word at every door

# Where a word acts: L a load from files, S one without the optimizer's states, M of the module
# alone, D without the scheduler, H from held memory (and resize), C convert, E export, I import.
ACTS = {
    "narrow": "LSMDH C I",
    "mean": "LSMDH CE",
    "vocab": "LSMDH",
    "missing": "LSMDH",
    "stale": "LSMD CE",
    "scheduler": "LS H",
    "optimizer": "L DH",
    "values": "LSMDH",
    "per_rank": "LSMDH C",
    "replicas": "LSMDH C",
    "weights": "SM E",
    "hybrid": "LSMD",
    "memory": "",  # but for an engine that keeps steps in memory
    "extra": "LSMDH",
    "unfreeze": "LSMDH",
    "freeze": "LSMDH",
    "new": "LSMDH",
}
WAYS = {"load": "L", "states out": "S", "module only": "M", "scheduler out": "D"}
WAYS |= {"held": "H", "resize": "H"}


def test_the_words_are_those_of_the_table() -> None:
    assert {*ACTS} == {*TABLE}


def test_each_word_acts_in_a_load_or_is_refused(sources: Sources) -> None:
    folder = sources.get(2, Setup(1, "bf16"), more=0)
    for rank in sources.ranks.run(2, each_word, Setup(1, "bf16", seed=9), folder, [*ACTS]):
        for way, letter in WAYS.items():
            refused = {word for word, said in rank[way].items() if said}
            assert refused == {word for word, acts in ACTS.items() if letter not in acts}, way
            for word in refused:
                said = rank[way][word]
                assert (
                    said.startswith("UsageError")
                    and word in said
                    and "leave it out" in said
                    or (word == "weights" and "load_optimizer_states=False" in said)
                ), said


DOORS: dict[str, Any] = {
    "C": lambda out, word: ucp.convert(GOLDEN / "zero1", out, to="universal", allow={word}),
    "E": lambda out, word: ucp.export_hf(GOLDEN / "zero1", out, allow={word}),
    "I": lambda out, word: ucp.import_hf(GOLDEN / "zero1", out, mesh="dp=2,zero=1", allow={word}),
}


@pytest.mark.parametrize("door", DOORS)
def test_each_word_acts_in_a_tool_or_is_refused(door: str, tmp_path: Path) -> None:
    for word, acts in ACTS.items():
        said = ""
        try:
            DOORS[door](tmp_path / word, word)
        except UsageError as error:
            said = str(error)
        except UcpError:  # what the tool says of the checkpoint, after it took the word
            pass
        refused = "nothing that can be allowed here" in said
        assert refused == (door not in acts), (word, said)
        if refused:
            assert f'"{word}" acts at' in said and not (tmp_path / word).exists()


@pytest.mark.parametrize("word", ["nonsense", "new:", "vocab:embed", "narrow:a.b", 7])
def test_what_is_no_word_is_refused_at_every_door(word: Any, tmp_path: Path) -> None:
    for door in DOORS.values():
        with pytest.raises(UsageError, match="allow names what may happen"):
            door(tmp_path / "out", word)


@pytest.mark.parametrize("attached", [True, False])
def test_weights_alone_are_loaded_without_the_optimizers_files(
    sources: Sources, tmp_path: Path, attached: bool
) -> None:
    source = sources.get(2, Setup(1, "bf16"), more=0)
    shutil.copytree(source, tmp_path / "run")
    if not attached:
        without_manifest(tmp_path / "run")
    for path in (tmp_path / "run" / "trained").glob("*optim_states.pt"):
        path.unlink()
    states = {"load_optimizer_states": False}
    given = [{}, states, {"allow": {"weights"}}, {**states, "allow": {"weights"}}]
    setup = Setup(2, "bf16", seed=9)
    for rank in sources.ranks.run(2, attempts, setup, str(tmp_path / "run"), given):
        for found in rank[:2]:
            assert "missing" in found["error"] and found["unchanged"]
        assert "can do nothing in this load" in rank[2]["error"]
        assert rank[3]["error"] == "" and not rank[3]["unchanged"]
        assert any("weights alone" in note for note in rank[3]["notes"])
