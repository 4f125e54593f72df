"""Rules on real checkpoints: what stock DeepSpeed wrote at tp = 2 is read by a file of rules alone,
and a wrong one is found."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.core.layout import Shard
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.errors import ModelMismatchError, RuleError, UcpError, UnsupportedError
from megatron_ucp.formats.registry import open_checkpoint
from tests.engines.sources import PLAIN, Sources, without_manifest
from tests.engines.tensor_jobs import Mega, Staged

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


def stock(sources: Sources, setup: Mega, world: int = 2) -> Path:
    """As stock DeepSpeed writes it: no manifest, no patterns."""
    return Path(sources.get(world, setup, attach=False, more=0)) / "filled"


def whole(sources: Sources, family: str) -> Path:
    """The same states, saved with a manifest at tp=1."""
    return Path(sources.get(1, Mega(family, 1, 1), more=0)) / "filled"


def bare(folder: Path, tmp_path: Path) -> Path:
    """A copy without its manifest; stock's patterns are still in it."""
    return without_manifest(Path(shutil.copytree(folder, tmp_path / "copy")))


def write(folder: Path, text: str, name: str = "rules.toml") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def specs(path: Path, rules: str | None = None) -> dict[str, ParamSpec]:
    return dict(ucp.describe(path, rules=rules).by_name)


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks


def refused(folder: Path, rules: str) -> str:
    """What the dry run of a resume says of rules that are wrong, which names their file."""
    with pytest.raises(UcpError) as told:
        ucp.plan(folder, "dp=2,zero=1", rules=rules)
    assert f"file: {rules}" in str(told.value)
    return str(told.value)


@pytest.mark.parametrize(
    ("family", "zero", "world"), [("llama", 1, 2), ("gpt", 1, 4), ("gpt", 3, 2), ("llama", 3, 4)]
)
def test_stock_at_tp2_is_the_state_at_tp1(
    sources: Sources, tmp_path: Path, family: str, zero: int, world: int
) -> None:
    folder, rules = stock(sources, Mega(family, 2, zero), world), write(tmp_path, RULES[family])
    with pytest.raises(UnsupportedError, match="megatron-ucp inspect"):
        ucp.describe(folder)
    assert ucp.diff(folder, whole(sources, family), rules=rules) == []
    assert len(specs(folder, rules)) > 10
    assert ucp.verify(folder, deep=True, rules=rules).findings == ()


def test_the_verbs_take_rules(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, rules = str(stock(sources, Mega("llama", 2, 1))), write(tmp_path, LLAMA)
    other = write(tmp_path, LLAMA.replace("parts = 2", "parts = [24, 24]"), "other.toml")
    for args in (
        ["inspect", folder],
        ["verify", folder, "--deep"],
        ["plan", folder, "--mesh", "dp=2,zero=1"],
        ["diff", folder, folder],
        ["diff", folder, folder, "--rules-b", other],
    ):
        assert main([*args, "--rules", rules]) == 0, args
    for args in (["verify", folder], ["diff", folder, folder]):
        assert main(args) == 2, args
    assert "megatron-ucp inspect --all" in capsys.readouterr().err


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
    assert "do not add up" in refused(folder, wrong)


def test_a_wrong_dim_is_a_difference_in_shape(sources: Sources, tmp_path: Path) -> None:
    folder, rules = (
        stock(sources, Mega("gpt", 2, 1)),
        write(tmp_path, GPT.replace("dim = 1", "dim = 0")),
    )
    found = ucp.diff(
        folder, whole(sources, "gpt"), rules=rules, rules_b=write(tmp_path, GPT, "good.toml")
    )
    assert {one.what for one in found} == {"shape"} and len(found) == 4
    wrong = write(tmp_path, GPT.replace("dim = 1", "dim = 2"))
    assert "a dim that the parameter does not have" in refused(folder, wrong)


def test_what_the_values_contradict(sources: Sources, tmp_path: Path) -> None:
    folder = stock(sources, Mega("gpt", 2, 1))
    replicated = GPT.replace('layout = "Shard"\naxis = "tp"\ndim = 1', 'layout = "Replicate"')
    found = ucp.verify(folder, deep=True, rules=write(tmp_path, replicated)).findings
    names = {one.parameter for one in found if "copies" in one.what}
    assert len(names) == 4 and all(name.endswith(("proj.weight", "fc2.weight")) for name in names)


def test_unmatched_and_doubly_matched(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run names what is wrong, with what to do."""
    folder = stock(sources, Mega("gpt", 2, 1))
    few = write(tmp_path, GPT.replace("|output_layer)", ")"))
    assert main(["plan", str(folder), "--mesh", "dp=2,zero=1", "--rules", few]) == 2
    shown = capsys.readouterr().err
    assert "no rule matches" in shown and "output_layer.weight" in shown
    assert "the nearest is" in shown and few in shown
    text = GPT + "[[rule]]\npattern = 'decoder\\.layers\\.1\\.mlp\\.linear_fc1\\.bias'\n"
    twice = refused(folder, write(tmp_path, text + "layout = 'Replicate'\n"))
    assert "two rules match" in twice and "decoder.layers.1.mlp.linear_fc1.bias" in twice


# ------------------------------------------------ checkpoints that say how they are cut


def test_rules_that_contradict_a_manifest_are_refused(sources: Sources, tmp_path: Path) -> None:
    folder = Path(sources.get(2, Mega("llama", 2, 1))) / "filled"
    good = write(tmp_path, LLAMA)
    assert specs(folder, good) == specs(folder)
    wrong = write(tmp_path, LLAMA.replace("parts = 2", "parts = [16, 32]"), "wrong.toml")
    with pytest.raises(RuleError, match="contradicts the manifest in the layout"):
        ucp.describe(folder, rules=wrong)


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
    folder = bare(Path(sources.get(2, Mega(family, 2, 1))) / "filled", tmp_path)
    rules = write(tmp_path, RULES[family])
    with open_checkpoint(folder, rules=rules) as checkpoint:
        assert checkpoint.notes == []
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


# ------------------------------------------------ pipelines


@pytest.mark.parametrize(
    ("family", "tp", "tied", "world"),
    [("llama", 1, False, 2), ("gpt", 1, True, 2), ("gpt", 2, True, 4)],
)
def test_a_stock_pipeline(
    sources: Sources, tmp_path: Path, family: str, tp: int, tied: bool, world: int
) -> None:
    folder = stock(sources, Staged(family, tp, 1, pp=2, tied=tied), world)
    text = RULES[family] + PIPELINE.replace("EMBEDDING", r"tied_modules\.embed" if tied else "0")
    if tied:  # there is no head of its own
        text = text.replace(
            "\n[[pipeline]]\npattern = '5\\.weight'\nname = 'output_layer.weight'", ""
        ).replace("|output_layer", "")
    rules = write(tmp_path, text)
    with pytest.raises(UnsupportedError, match="pipeline"):
        ucp.describe(folder)
    other = Path(sources.get(1, Staged(family, 1, 1, tied=tied), more=0)) / "filled"
    assert ucp.diff(folder, other, rules=rules) == []
    check_wrong_pipelines(folder, other, tmp_path, text)


def check_wrong_pipelines(folder: Path, other: Path, tmp_path: Path, text: str) -> None:
    """Names that meet, names that are missing, layers that are one off."""
    few = text.replace("[123])", "[12])")
    doubled = few + "[[pipeline]]\npattern = '3\\.(?P<rest>.+)'\nname = 'decoder.layers.1.{rest}'\n"
    said = refused(folder, write(tmp_path, doubled))
    assert "two parameters of the pipeline get one canonical name" in said
    missing = write(tmp_path, few)
    said = refused(folder, missing)
    assert "no [[pipeline]] entry matches" in said and "parameter: 3." in said
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
        stock(sources, setup, 4),
        Path(sources.get(4, setup, more=0)) / "filled",
    )
    text = (
        GPT.replace("|output_layer", "")
        + PIPELINE.replace("EMBEDDING", r"tied_modules\.embed").partition(
            "[[pipeline]]\npattern = '5"
        )[0]
    )
    rules = write(tmp_path, text)
    assert ucp.diff(folder, other, rules=rules) == []
    found = specs(folder, rules)
    assert found == {name: replace(spec, extent=None) for name, spec in specs(other).items()}
    assert {spec.kind for spec in found.values()} == (
        {"trainable", "frozen", "buffer"} if extras else {"trainable"}
    )


def test_a_stage_0_pipeline_ties_by_rule(sources: Sources, tmp_path: Path) -> None:
    """Nothing but the layer files lists its parameters; it is read without its optimizer."""
    folder = stock(sources, Staged("llama", 1, 0, pp=2), 2)
    rules = write(tmp_path, LLAMA + PIPELINE.replace("EMBEDDING", "0"))
    with open_checkpoint(folder, rules=rules) as checkpoint:
        assert checkpoint.manifest.keeper == "none" and len(checkpoint.manifest.params) > 10
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


@pytest.mark.parametrize("to", ["universal", "native"])
def test_a_stock_checkpoint_and_rules_are_enough_to_convert(
    sources: Sources, tmp_path: Path, to: str
) -> None:
    folder, rules = stock(sources, Mega("llama", 2, 1)), write(tmp_path, LLAMA)
    target = ucp.Mesh(tp=4, dp=1, zero=1) if to == "native" else None
    made = ucp.convert(folder, tmp_path / "made", to=to, target=target, rules=rules)
    assert ucp.diff(made.path, whole(sources, "llama")) == []
    assert ucp.describe(made.path).mesh.tp == (4 if target else 1)


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


def test_inspect_lists_what_a_file_of_rules_needs(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Names and shapes of a checkpoint whose cuts nobody says; and that they are one rank's."""
    folder = stock(sources, Mega("llama", 2, 1))
    with pytest.raises(UnsupportedError, match="needs a family or rules"):
        ucp.describe(folder)
    assert main(["inspect", str(folder), "--all"]) == 0
    shown = capsys.readouterr().out
    assert "shapes are those that one rank holds" in shown
    with open_checkpoint(folder, rules=Path(write(tmp_path, LLAMA))) as known:
        for spec in known.manifest.params:
            local = known.manifest.local_shape(spec.name)
            assert spec.name in shown and "x".join(map(str, local)) in shown
