"""Rules on real checkpoints: what stock DeepSpeed wrote at tp = 2 is read by a file of rules alone,
and a wrong one is found."""

import json
import re
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.core.layout import Replicate, Shard, ShardNC
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.errors import ModelMismatchError, RuleError, UnsupportedError, UsageError
from megatron_ucp.formats.patterns import problem_of
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard import rule_draft
from megatron_ucp.reshard.rule_draft import draft_rules, write_draft
from megatron_ucp.reshard.rules import Checked, check_rules
from tests.engines.pipeline_jobs import Staged
from tests.engines.sources import PLAIN, Sources, without_manifest
from tests.engines.tensor_jobs import Mega

pytestmark = pytest.mark.ranks
SAVE, SAVE_STAGES = "tests.engines.tensor_jobs:save", "tests.engines.pipeline_jobs:save"
LLAMA = r"""
format = 1
[[rule]]
pattern = '(?:embedding\.word_embeddings|output_layer)\.weight'
layout = "Shard"
axis = "tp"
dim = 0
[[rule]]
pattern = 'decoder\..*layernorm\.weight'
layout = "Replicate"
[[rule]]
pattern = 'decoder\.layers\.\d+\.self_attention\.linear_qkv\.weight'
layout = "Shard"
axis = "tp"
dim = 0
[[rule]]
pattern = 'decoder\.layers\.\d+\.(?:self_attention\.linear_proj|mlp\.linear_fc2)\.weight'
layout = "ShardHy"
along = [["tp", 1]]
[[rule]]
pattern = 'decoder\.layers\.\d+\.mlp\.linear_fc1\.weight'
layout = "ShardNC"
axis = "tp"
dim = 0
parts = 2
"""
GPT = r"""
format = 1
[[rule]]
pattern = '(?:embedding\.word_embeddings|output_layer)\.weight'
layout = "Shard"
axis = "tp"
dim = 0
[[rule]]
pattern = 'embedding\.position_embeddings\.weight|decoder\..*layernorm\.(?:weight|bias)'
layout = "Replicate"
[[rule]]
pattern = 'decoder\.layers\.\d+\.(?:self_attention\.linear_qkv|mlp\.linear_fc1)\.(?:weight|bias)'
layout = "Shard"
axis = "tp"
dim = 0
[[rule]]
pattern = 'decoder\.layers\.\d+\.(?:self_attention\.linear_proj|mlp\.linear_fc2)\.weight'
layout = "Shard"
axis = "tp"
dim = 1
[[rule]]
pattern = 'decoder\.layers\.\d+\.(?:self_attention\.linear_proj|mlp\.linear_fc2)\.bias'
layout = "Replicate"
"""
RULES = {"llama": LLAMA, "gpt": GPT}
PIPELINE = r"""
[[pipeline]]
pattern = 'EMBEDDING\.(?P<rest>.+)'
name = 'embedding.{rest}'
[[pipeline]]
pattern = '(?P<position>[123])\.(?P<rest>.+)'
name = 'decoder.layers.{position-1}.{rest}'
[[pipeline]]
pattern = '4\.(?P<rest>.+)'
name = 'decoder.final_layernorm.{rest}'
[[pipeline]]
pattern = '5\.weight'
name = 'output_layer.weight'
"""


def stock(sources: Sources, setup: Mega, world: int = 2, save: str = SAVE) -> Path:
    """As stock DeepSpeed writes it: no manifest, no patterns."""
    return Path(sources.get(world, setup, save, attach=False, more=0)) / "filled"


def whole(sources: Sources, family: str) -> Path:
    """The same states, saved with a manifest at tp=1."""
    return Path(sources.get(1, Mega(family, 1, 1), SAVE, more=0)) / "filled"


def bare(folder: Path, tmp_path: Path) -> Path:
    """A copy without its manifest; stock's patterns are still in it."""
    return without_manifest(Path(shutil.copytree(folder, tmp_path / "copy")))


def write(folder: Path, text: str, name: str = "rules.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def said(found: Checked) -> list[str]:
    return [f"{one.parameter}: {one.what}: {one.expected}: {one.found}" for one in found.findings]


def specs(path: Path, rules: str | None = None) -> dict[str, ParamSpec]:
    return dict(ucp.describe(path, rules=rules).by_name)


@pytest.mark.parametrize(
    ("family", "zero", "world"), [("llama", 1, 2), ("gpt", 1, 4), ("gpt", 3, 2), ("llama", 3, 4)]
)
def test_stock_at_tp2_is_the_state_at_tp1(
    sources: Sources, tmp_path: Path, family: str, zero: int, world: int
) -> None:
    folder, rules = stock(sources, Mega(family, 2, zero), world), write(tmp_path, RULES[family])
    with pytest.raises(UnsupportedError, match="megatron-ucp rules"):
        ucp.describe(folder)
    assert ucp.diff(folder, whole(sources, family), rules=rules) == []
    found = check_rules(folder, rules)
    assert said(found) == [] and found.parameters == len(specs(folder, rules)) > 10
    assert ucp.verify(folder, deep=True, rules=rules).findings == ()


def test_the_verbs_take_rules(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, rules = str(stock(sources, Mega("llama", 2, 1))), write(tmp_path, LLAMA)
    other = write(tmp_path, LLAMA.replace("parts = 2", "parts = [24, 24]"), "other.toml")
    for args in (
        ["inspect", folder],
        ["verify", folder, "--deep"],
        ["rules", folder],
        ["diff", folder, folder],
        ["diff", folder, folder, "--rules-b", other],
    ):
        assert main([*args, "--rules", rules]) == 0, args
    for args in (["inspect", folder], ["verify", folder], ["diff", folder, folder]):
        assert main(args) == 2, args
    assert "megatron-ucp rules" in capsys.readouterr().err


def test_swapped_gate_and_up_are_a_difference(sources: Sources, tmp_path: Path) -> None:
    """One part: gate and up of the first rank, then those of the second. No value of one checkpoint
    alone can show it."""
    folder, rules = (
        stock(sources, Mega("llama", 2, 1)),
        write(tmp_path, LLAMA.replace("ShardNC", "Shard").replace("parts = 2", "")),
    )
    other = whole(sources, "llama")
    with pytest.raises(
        RuleError, match="contradicts the manifest in the layout"
    ):  # the other one knows better
        ucp.diff(folder, other, rules=rules)
    found = ucp.diff(folder, other, rules=rules, rules_b=write(tmp_path, LLAMA, "good.toml"))
    assert {one.parameter for one in found} == {
        f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in (0, 1)
    }


def test_parts_of_other_sizes_are_a_difference_or_refused(sources: Sources, tmp_path: Path) -> None:
    folder = stock(sources, Mega("llama", 2, 1))
    found = ucp.diff(
        folder,
        whole(sources, "llama"),
        rules=write(tmp_path, LLAMA.replace("parts = 2", "parts = [16, 32]")),
        rules_b=write(tmp_path, LLAMA, "good.toml"),
    )
    assert {one.parameter for one in found} == {
        f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in (0, 1)
    }
    wrong = write(tmp_path, LLAMA.replace("parts = 2", "parts = [16, 16]"))
    found = check_rules(folder, wrong)
    assert ["do not add up" in line for line in said(found)] == [True, True]
    assert all(one.file == wrong for one in found.findings)


def test_a_wrong_dim_is_a_difference_in_shape(sources: Sources, tmp_path: Path) -> None:
    folder, rules = (
        stock(sources, Mega("gpt", 2, 1)),
        write(tmp_path, GPT.replace("dim = 1", "dim = 0")),
    )
    found = ucp.diff(
        folder, whole(sources, "gpt"), rules=rules, rules_b=write(tmp_path, GPT, "good.toml")
    )
    assert {one.what for one in found} == {"shape"} and len(found) == 4
    found = check_rules(folder, write(tmp_path, GPT.replace("dim = 1", "dim = 2")))
    assert len(said(found)) == 4 and all(
        "a dim that the parameter does not have" in line for line in said(found)
    )


def test_what_the_values_contradict(sources: Sources, tmp_path: Path) -> None:
    folder = stock(sources, Mega("gpt", 2, 1))
    replicated = GPT.replace('layout = "Shard"\naxis = "tp"\ndim = 1', 'layout = "Replicate"')
    found = said(check_rules(folder, write(tmp_path, replicated)))
    assert len(found) == 4 and all("but the ranks hold different values" in line for line in found)
    cut = GPT.replace('layout = "Replicate"', 'layout = "Shard"\naxis = "tp"\ndim = 0')
    found = said(check_rules(folder, write(tmp_path, cut)))
    assert all("every rank holds the same values" in line for line in found)
    assert {line.partition(":")[0] for line in found} >= {
        "embedding.position_embeddings.weight",
        "decoder.final_layernorm.bias",
    }


def test_unmatched_doubly_matched_and_unused(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = stock(sources, Mega("gpt", 2, 1))
    text = (
        GPT.replace("|output_layer)", ")").replace("embedding\\.position_embeddings\\.weight|", "")
        + "[[rule]]\npattern = 'decoder\\.layer\\.\\d+\\.mlp\\.linear_fc1\\.weight'\nlayout = "
        "'Replicate'\n"
        + "[[rule]]\npattern = 'decoder\\.layers\\.1\\.mlp\\.linear_fc1\\.bias'\nlayout = "
        "'Replicate'\n"
    )
    rules = write(tmp_path, text)
    found = said(check_rules(folder, rules))
    unmatched = [
        line.partition(":")[0]
        for line in found
        if "no rule matches" in line and "the nearest is" in line
    ]
    assert sorted(unmatched) == ["embedding.position_embeddings.weight", "output_layer.weight"]
    assert [
        line
        for line in found
        if line.startswith("decoder.layers.1.mlp.linear_fc1.bias: two rules match")
    ]
    unused = [line for line in found if "a rule matches no parameter" in line]
    assert len(unused) == 1 and "linear_fc1.weight" in unused[0].partition("nearest")[2]
    assert len(found) == 4
    assert main(["rules", str(folder), "--rules", rules, "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["findings"]) == 4
    assert main(["rules", str(folder), "--rules", rules]) == 1
    assert "4 findings" in capsys.readouterr().out
    with pytest.raises(RuleError, match="rule"):
        ucp.describe(folder, rules=rules)


# ------------------------------------------------ checkpoints that say how they are cut


def test_rules_that_contradict_a_manifest_are_refused(sources: Sources, tmp_path: Path) -> None:
    folder = Path(sources.get(2, Mega("llama", 2, 1), SAVE)) / "filled"
    good = write(tmp_path, LLAMA)
    assert specs(folder, good) == specs(folder) and said(check_rules(folder, good)) == []
    wrong = write(tmp_path, LLAMA.replace("parts = 2", "parts = [16, 32]"), "wrong.toml")
    with pytest.raises(RuleError, match="contradicts the manifest in the layout"):
        ucp.describe(folder, rules=wrong)
    found = said(check_rules(folder, wrong))
    assert len(found) == 2 and all("contradicts the manifest" in line for line in found)


def test_at_tp1_rules_add_layouts(sources: Sources, tmp_path: Path) -> None:
    """A run without a family knows its parameters as whole; the rules say how they may be cut."""
    folder = Path(sources.get(2, PLAIN)) / "trained"
    text = (
        "format = 1\n[[rule]]\npattern = 'up\\.weight'\nlayout = 'Shard'\naxis = 'tp'\ndim = 1\n"
        + "[[rule]]\npattern = 'up\\.bias|[^u].*'\nlayout = 'Replicate'\n"
    )
    rules = write(tmp_path, text)
    found = specs(folder, rules)
    assert found["up.weight"].layout == Shard("tp", 1)
    assert {n: (s.shape, s.dtype, s.kind) for n, s in found.items()} == {
        n: (s.shape, s.dtype, s.kind) for n, s in specs(folder).items()
    }
    copy = bare(folder, tmp_path)
    assert (
        specs(copy, rules)["up.weight"].layout == Shard("tp", 1) != specs(copy)["up.weight"].layout
    )
    assert ucp.diff(folder, copy, rules=rules) == []
    with pytest.raises(RuleError, match="no rule matches"):
        ucp.describe(copy, rules=write(tmp_path, text.replace("[^u]", "[^ue]"), "few.toml"))


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_rules_win_over_stock_patterns_and_notes_say_so(
    sources: Sources, tmp_path: Path, family: str
) -> None:
    folder = bare(Path(sources.get(2, Mega(family, 2, 1), SAVE)) / "filled", tmp_path)
    rules = write(tmp_path, RULES[family])
    with open_checkpoint(folder, rules=rules) as checkpoint:
        assert checkpoint.notes == []
    assert said(check_rules(folder, rules)) == []
    text = (
        RULES[family]
        .replace('along = [["tp", 1]]', 'along = [["tp", 0]]')
        .replace("dim = 1", "dim = 0")
    )
    wrong = write(tmp_path, text, "wrong.toml")
    with open_checkpoint(folder, rules=wrong) as checkpoint:
        name = "decoder.layers.0.mlp.linear_fc2.weight"
        assert checkpoint.manifest.by_name[name].shape == (32, 12)
        (note,) = checkpoint.notes
        assert "another layout than universal_checkpoint_info" in note and name in note
    assert (
        note in ucp.verify(folder, rules=wrong).notes
        and ucp.verify(folder, rules=rules).notes == ()
    )
    found = said(check_rules(folder, wrong))
    assert len(found) == 4 and all(
        "contradicts universal_checkpoint_info" in line for line in found
    )


# ------------------------------------------------ pipelines


@pytest.mark.parametrize(
    ("family", "tp", "tied", "world"),
    [("llama", 1, False, 2), ("gpt", 1, True, 2), ("gpt", 2, True, 4)],
)
def test_a_stock_pipeline(
    sources: Sources, tmp_path: Path, family: str, tp: int, tied: bool, world: int
) -> None:
    folder = stock(sources, Staged(family, tp, 1, pp=2, tied=tied), world, SAVE_STAGES)
    text = RULES[family] + PIPELINE.replace("EMBEDDING", r"tied_modules\.embed" if tied else "0")
    if tied:  # there is no head of its own
        text = text.replace(
            "\n[[pipeline]]\npattern = '5\\.weight'\nname = 'output_layer.weight'", ""
        ).replace("|output_layer", "")
    rules = write(tmp_path, text)
    with pytest.raises(UnsupportedError, match="pipeline"):
        ucp.describe(folder)
    assert said(check_rules(folder, rules)) == []
    other = Path(sources.get(1, Staged(family, 1, 1, tied=tied), SAVE_STAGES)) / "filled"
    assert ucp.diff(folder, other, rules=rules) == []
    check_wrong_pipelines(folder, other, tmp_path, text)


def check_wrong_pipelines(folder: Path, other: Path, tmp_path: Path, text: str) -> None:
    """Names that meet, names that are missing, layers that are one off."""
    few = text.replace("[123])", "[12])")
    doubled = few + "[[pipeline]]\npattern = '3\\.(?P<rest>.+)'\nname = 'decoder.layers.1.{rest}'\n"
    found = said(check_rules(folder, write(tmp_path, doubled)))
    assert len(found) == 1 and "two parameters of the pipeline get one canonical name" in found[0]
    missing = write(tmp_path, few)
    found = said(check_rules(folder, missing))
    assert len(found) > 3 and all(
        line.startswith("3.") and "no [[pipeline]] entry matches" in line for line in found
    )
    with pytest.raises(RuleError, match=r"no .* entry matches"):
        ucp.describe(folder, rules=missing)
    shifted = write(tmp_path, text.replace("position-1", "position-0"))
    found = ucp.diff(folder, other, rules=shifted)
    layers = {one.parameter.split(".")[2] for one in found if one.what == "parameter"}
    assert layers == {"0", "3"}  # one layer is missing, one is too many


@pytest.mark.parametrize(("zero", "dtype", "extras"), [(0, "bf16", False), (1, "fp32", True)])
def test_a_pipeline_that_lists_its_parameters_elsewhere(
    sources: Sources, tmp_path: Path, zero: int, dtype: str, extras: bool
) -> None:
    """BF16_Optimizer without ZeRO names them in the optimizer files; frozen ones and buffers lie in
    the layer files alone."""
    setup = Staged("gpt", 2, zero, dtype=dtype, pp=2, tied=True, extras=extras)
    folder, other = (
        stock(sources, setup, 4, SAVE_STAGES),
        Path(sources.get(4, setup, SAVE_STAGES)) / "filled",
    )
    text = (
        GPT.replace("|output_layer", "")
        + PIPELINE.replace("EMBEDDING", r"tied_modules\.embed").partition(
            "[[pipeline]]\npattern = '5"
        )[0]
    )
    rules = write(tmp_path, text)
    assert said(check_rules(folder, rules)) == [] and ucp.diff(folder, other, rules=rules) == []
    found = specs(folder, rules)
    assert found == {name: replace(spec, extent=None) for name, spec in specs(other).items()}
    assert {spec.kind for spec in found.values()} == (
        {"trainable", "frozen", "buffer"} if extras else {"trainable"}
    )


def test_a_stage_0_pipeline_ties_by_rule(sources: Sources, tmp_path: Path) -> None:
    """Nothing but the layer files lists its parameters; it is read without its optimizer."""
    folder = stock(sources, Staged("llama", 1, 0, pp=2), 2, SAVE_STAGES)
    rules = write(tmp_path, LLAMA + PIPELINE.replace("EMBEDDING", "0"))
    with open_checkpoint(folder, rules=rules) as checkpoint:
        assert checkpoint.manifest.engine == "none" and len(checkpoint.manifest.params) > 10
    doubled = LLAMA + PIPELINE.replace("EMBEDDING", "0").replace(
        "5\\.weight'\nname = 'output_layer.weight'",
        "5\\.weight'\nname = 'embedding.word_embeddings.weight'",
    )
    with pytest.raises(RuleError, match="two parameters of the pipeline get one canonical name"):
        ucp.describe(folder, rules=write(tmp_path, doubled))
    tied = doubled.replace(
        "name = 'embedding.word_embeddings.weight'",
        "name = 'embedding.word_embeddings.weight'\ntied = true",
    )
    tied = tied.replace("name = 'embedding.{rest}'", "name = 'embedding.{rest}'\ntied = true")
    found = ucp.describe(folder, rules=write(tmp_path, tied)).by_name
    assert "embedding.word_embeddings.weight" in found and "output_layer.weight" not in found


# ------------------------------------------------ drafts


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
def test_a_draft_of_stock_patterns_says_the_same(
    sources: Sources, tmp_path: Path, family: str
) -> None:
    folder = bare(Path(sources.get(2, Mega(family, 2, 1), SAVE)) / "filled", tmp_path)
    rules = drafted(folder, tmp_path)
    assert specs(folder, rules) == specs(folder) and said(check_rules(folder, rules)) == []
    text = Path(rules).read_text()
    assert "from universal_checkpoint_info" in text and "from the manifest" not in text
    assert any(isinstance(spec.layout, ShardNC) for spec in specs(folder).values()) == (
        family == "llama"
    )
    assert "stock DeepSpeed's default" in text


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
    assert main(["rules", str(folder), "--rules", rules]) == 2
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
    assert main(["rules", folder, "--out", str(out), "--rules", str(out)]) == 2


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
