"""Drafts of rules: what a checkpoint says of itself, and what only its user can know."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.core.layout import Replicate, ShardNC
from megatron_ucp.errors import ModelMismatchError, RuleError, UsageError
from megatron_ucp.formats.rule_file import problem_of
from megatron_ucp.reshard.rules import draft as rule_draft
from megatron_ucp.reshard.rules.comparison import check_rules
from megatron_ucp.reshard.rules.draft import draft_rules, write_draft
from tests.engines.pipeline_jobs import Staged
from tests.engines.sources import PLAIN, Sources, patterns_alone
from tests.engines.tensor_jobs import VOCAB, Mega
from tests.reshard.rule_texts import (
    GPT,
    LLAMA,
    SAVE,
    SAVE_STAGES,
    bare,
    said,
    specs,
    stock,
    whole,
    write,
)

pytestmark = pytest.mark.ranks


def drafted(folder: Path, tmp_path: Path) -> str:
    assert main(["rules", str(folder), "--out", str(tmp_path / "draft.toml"), "--force"]) == 0
    return str(tmp_path / "draft.toml")


@pytest.mark.parametrize(
    ("setup", "world", "save"),
    [
        (Mega("llama", 2, 1), 2, SAVE),
        (Mega("gpt", 2, 3), 2, SAVE),
        (Mega("llama", 1, 1), 1, SAVE),
        (Mega("gpt", 2, 1, true_vocab=45), 2, SAVE),
        (Staged("gpt", 2, 1, pp=2, tied=True), 4, SAVE_STAGES),
    ],
    ids=str,
)
def test_a_draft_of_a_manifest_says_the_same(
    sources: Sources, tmp_path: Path, setup: Mega, world: int, save: str
) -> None:
    folder = Path(sources.get(world, setup, save, more=0)) / "filled"
    rules = drafted(folder, tmp_path)
    wanted = specs(folder)
    assert specs(folder, rules) == wanted and any(
        not isinstance(spec.layout, Replicate) for spec in wanted.values()
    )
    assert said(check_rules(folder, rules)) == []
    copy = bare(folder, tmp_path)
    assert specs(copy, rules) == wanted
    assert ucp.diff(folder, copy, rules=rules) == []
    text = Path(rules).read_text()
    assert "from the manifest" in text
    for doubt in ("CHECK", 'layout = "?"', "universal_checkpoint_info"):
        assert doubt not in text.partition("format")[2]
    assert len(re.findall(r"\[\[rule]]", text)) < len(wanted)


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("keep", ["patterns", "affine map"])
def test_a_draft_of_stock_patterns_says_the_same(
    sources: Sources, tmp_path: Path, family: str, keep: str
) -> None:
    folder = bare(Path(sources.get(2, Mega(family, 2, 1), SAVE)) / "filled", tmp_path)
    if keep == "patterns":
        patterns_alone(folder)
    rules = drafted(folder, tmp_path)
    assert specs(folder, rules) == specs(folder) and said(check_rules(folder, rules)) == []
    text = Path(rules).read_text()
    assert "from universal_checkpoint_info" in text and "from the manifest" not in text
    assert any(isinstance(spec.layout, ShardNC) for spec in specs(folder).values()) == (
        family == "llama"
    )
    assert ("stock DeepSpeed's default" in text) == (keep == "patterns")
    extent = specs(folder)["embedding.word_embeddings.weight"].extent
    assert extent is not None and extent.true == VOCAB


@pytest.mark.parametrize(("zero", "world"), [(0, 2), (1, 4), (3, 2)])
def test_a_draft_of_values_marks_what_it_can_not_know(
    sources: Sources, tmp_path: Path, zero: int, world: int
) -> None:
    folder = stock(sources, Mega("gpt", 2, zero), world)
    text = draft_rules(folder)
    blocks = {re.search("pattern = '(.*)'", block)[1]: block for block in text.split("\n\n")[1:]}  # type: ignore[index]
    layers = r"decoder\.layers\.\d+"
    assert 'layout = "Replicate"' in blocks[rf"{layers}\.input_layernorm\.weight"]
    assert "seen: every rank holds the same values" in blocks[rf"{layers}\.mlp\.linear_fc2\.bias"]
    assert (
        'layout = "?"' in blocks[rf"{layers}\.mlp\.linear_fc2\.weight"]
        and "a rank holds 16x12" in blocks[rf"{layers}\.mlp\.linear_fc2\.weight"]
    )
    bias = blocks[rf"{layers}\.mlp\.linear_fc1\.bias"]
    assert 'layout = "Shard"' in bias and "dim = 0" in bias and "CHECK" in bias
    rules = write(tmp_path, text)
    with pytest.raises(RuleError, match=r"left open \(rule .*weight"):
        ucp.describe(folder, rules=rules)
    assert main(["rules", str(folder), "--check", rules]) == 2
    row = re.compile(r"(pattern = '[^']*(?:linear_proj|fc2)\S*weight'\n)layout = \"\?\"")
    shard = 'layout = "Shard"\naxis = "tp"\ndim = '
    done = row.sub(rf"\1{shard}1", text).replace('layout = "?"', f"{shard}0")
    rules = write(tmp_path, done)
    if zero:
        assert ucp.diff(folder, whole(sources, "gpt"), rules=rules) == []
    assert said(check_rules(folder, rules)) == []


def constant(path: Path) -> None:
    """A LayerNorm as it is before training: all ones."""
    tree = torch.load(path, weights_only=False)
    tree["optimizer_state_dict"]["single_partition_of_fp32_groups"][1].data.fill_(1.0)
    torch.save(tree, path)


def test_constants_leave_the_layout_open(sources: Sources, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(stock(sources, Mega("gpt", 2, 1)), tmp_path / "copy"))
    before = draft_rules(folder)
    for path in folder.glob("*optim_states.pt"):
        constant(path)
    after = draft_rules(folder)
    assert "one and the same constant" in after and "one and the same constant" not in before
    assert before.count('layout = "Replicate"') > after.count('layout = "Replicate"')
    # a constant contradicts neither
    found = said(check_rules(folder, write(tmp_path, GPT)))
    assert found == []


def test_tp1_leaves_the_layout_open(sources: Sources, tmp_path: Path) -> None:
    """One rank has nothing to compare with."""
    folder = bare(whole(sources, "gpt"), tmp_path)
    text = draft_rules(Path(sources.get(2, PLAIN)) / "trained")
    assert "can't be known from one tensor-parallel rank" in text and "axis" not in text
    assert text.count("[[rule]]") == text.count('layout = "?"') > 5
    assert "from universal_checkpoint_info" in draft_rules(folder)


def test_a_draft_of_a_stock_pipeline_is_usable_in_its_own_names(
    sources: Sources, tmp_path: Path
) -> None:
    folder = stock(sources, Staged("llama", 1, 1, pp=2), 2, SAVE_STAGES)
    text = draft_rules(folder)
    assert "[[pipeline]]" in text and 'layout = "?"' in text
    rules = write(tmp_path, text.replace('layout = "?"', 'layout = "Replicate"'))
    found = specs(folder, rules)
    assert "1.mlp.linear_fc1.weight" in found and "0.word_embeddings.weight" in found
    assert ucp.verify(folder, deep=True, rules=rules).findings == ()


def test_a_universal_folder(sources: Sources, tmp_path: Path) -> None:
    """Whole parameters, and nothing that says how they may be cut."""
    folder = whole(sources, "llama")
    made = Path(ucp.convert(folder, tmp_path / "universal", to="universal").path)
    for path in made.rglob("ucp_manifest.json"):
        path.unlink()
    rules = write(tmp_path, LLAMA)
    assert said(check_rules(made, rules)) == [] and ucp.diff(folder, made, rules=rules) == []
    assert {n: s.layout for n, s in specs(made, rules).items()} == {
        n: s.layout for n, s in specs(folder, rules).items()
    }
    wrong = write(tmp_path, LLAMA.replace("parts = 2", "parts = [24, 25]"), "wrong.toml")
    assert len(said(check_rules(made, wrong))) == 2
    drafted(made, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "it's",
        "a\nb = 1",
        "tab\there",
        'double"quote',
        "back\\slash",
        "\x7f",
        "\u00e9'\U0001f600",
        "h.0.[1]",
        "",
    ],
)
def test_a_draft_survives_odd_names(name: str) -> None:
    text = "\n".join(
        rule_draft._rule(rule_draft._pattern(name), [], rule_draft._Known("seen", Replicate()))
    )
    text += "\n" + "\n".join(rule_draft._entry("x", name))
    found = tomllib.loads(text)
    assert list(found) == ["rule", "pipeline"] and found["pipeline"][0]["name"] == name
    pattern = found["rule"][0]["pattern"]
    assert (
        problem_of(pattern) == ""
        and re.fullmatch(pattern, name)
        and not re.fullmatch(pattern, name + "x")
    )
    assert "\n" not in rule_draft._plain(name)


@pytest.mark.parametrize("to", ["universal", "native"])
def test_a_stock_checkpoint_and_rules_are_enough_to_convert(
    sources: Sources, tmp_path: Path, to: str
) -> None:
    folder, rules = stock(sources, Mega("llama", 2, 1)), write(tmp_path, LLAMA)
    target = ucp.Mesh(tp=4, dp=1, zero=1) if to == "native" else None
    made = ucp.convert(folder, tmp_path / "made", to=to, target=target, rules=rules)
    assert ucp.diff(made.path, whole(sources, "llama")) == []
    assert ucp.describe(made.path).mesh.tp == (4 if target else 1)


def test_out_is_never_overwritten_unasked(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(Path(sources.get(2, PLAIN)) / "trained")
    out = Path(write(tmp_path, "mine"))
    assert main(["rules", folder, "--out", str(out)]) == 2 and out.read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert main(
        ["rules", folder, "--out", str(out), "--force"]
    ) == 0 and out.read_text().startswith("# Drafted from")
    assert [path.name for path in tmp_path.iterdir()] == ["rules.toml"]
    assert main(["rules", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["draft"] == out.read_text()
    with pytest.raises(UsageError, match="can't be written"):
        write_draft("text", tmp_path / "nowhere" / "rules.toml")
    assert main(["rules", folder, "--out", str(out), "--check", str(out)]) == 2


def test_rules_for_another_model(sources: Sources, tmp_path: Path) -> None:
    """Whole shapes follow from the shares that the files hold: one that has none is named."""
    folder = stock(sources, Mega("llama", 2, 1))
    with pytest.raises((RuleError, ModelMismatchError), match="no rule matches"):
        ucp.describe(
            folder,
            rules=write(
                tmp_path, "format = 1\n[[rule]]\npattern = 'bert\\..*'\nlayout = 'Replicate'\n"
            ),
        )
