"""A family of one's own costs a file and a line: what knows families takes it, with a kind of
parameter that none of ours has, and no other line changed."""

import json
import math
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.core.layout import Extent, ShardNC
from megatron_ucp.engines.deepspeed.save import info_of
from megatron_ucp.errors import LayoutError, UsageError
from megatron_ucp.families import families
from megatron_ucp.families.family import Declared, Model
from pretrain.arguments import complete, make_parser, parse
from tests.engines.canonical import bits
from tests.engines.sources import Sources, without_manifest
from tests.families import jobs
from tests.families.jobs import PLANTED, SIZES, Own, whole_parts
from tests.families.own import MIXER
from tests.ranks import RankPool
from tests.scripts import run_command

FUSED = "layers.1.in_proj"
ELEMS = sum(math.prod(shape) for _, _, shape in whole_parts().values())


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with jobs.known():
        yield


# ------------------------------------------------ a resume


def source(sources: Sources, world: int, setup: Own) -> str:
    return sources.get(world, setup, more=0)


def resume(sources: Sources, world: int, setup: Own, folder: str, **options: Any) -> list[Any]:
    return sources.resume(world, setup, folder, **options)


def check(found: list[Any]) -> None:
    for rank in found:
        assert rank["differences"] and all(d == [] for d in rank["differences"].values()), rank
        assert all(len(d) > 10 for d in rank["before"].values()), "it was equal before the load"


@pytest.mark.parametrize(
    ("ranks_before", "before", "ranks_after", "after"),
    [
        (4, Own(2, 1), 1, Own(1, 0)),
        (4, Own(2, 1), 2, Own(1, 3)),
        (2, Own(1, 3), 4, Own(4, 1)),
        (2, Own(1, 3), 4, Own(2, 2)),
        (2, Own(2, 0, "bf16"), 2, Own(1, 1, "bf16")),
    ],
    ids=str,
)
def test_resumes_bit_for_bit(
    sources: Sources, ranks_before: int, before: Own, ranks_after: int, after: Own
) -> None:
    folder = source(sources, ranks_before, before)
    setup = Own(after.tp, after.zero, after.dtype, seed=9)
    check(resume(sources, ranks_after, setup, folder))


def test_the_comparison_sees_a_planted_fault(sources: Sources) -> None:
    folder = source(sources, 4, Own(2, 1))
    found = resume(sources, 1, Own(1, 0, seed=9), folder, plant=PLANTED, tags=("filled",))
    assert f"weights {FUSED}" in str(found[0]["differences"]["filled"]), found[0]


# ------------------------------------------------ the verbs


@pytest.fixture
def folder(sources: Sources) -> Path:
    return Path(source(sources, 4, Own(2, 1))) / "trained"


def told(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    assert main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect_and_describe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(capsys, "inspect", folder)["family"] == "mixer"
    manifest = ucp.describe(folder)
    assert manifest.by_name[FUSED].layout == ShardNC("tp", 0, (12, 8, 4))
    assert manifest.by_name["words"].extent == Extent(13, 16)  # whatever the name


def test_verify_and_diff(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), "--deep"]) == 0
    assert main(["diff", str(folder), str(folder)]) == 0
    assert main(["diff", str(folder), str(folder.with_name("filled"))]) == 1
    assert FUSED in capsys.readouterr().out


RULES = r"""
format = 1
[[rule]]
pattern = '.*\.in_proj'
layout = "ShardNC"
axis = "tp"
dim = 0
parts = [PARTS]
[[rule]]
pattern = '.*\.conv'
layout = "ShardNC"
axis = "tp"
dim = 0
parts = [12, 8]
[[rule]]
pattern = '.*\.skip|words'
layout = "Shard"
axis = "tp"
dim = 0
[[rule]]
pattern = '.*\.out_proj'
layout = "Shard"
axis = "tp"
dim = 1
[[rule]]
pattern = '.*norm'
layout = "Replicate"
"""


def test_rules(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fused parameter with parts of three sizes; and with parts of other sizes."""
    rules = tmp_path / "rules.toml"
    for parts, code in (("12, 8, 4", 0), ("8, 12, 4", 2)):
        rules.write_text(RULES.replace("PARTS", parts))
        words = ["plan", str(folder), "--mesh", "tp=1,dp=4,zero=3", "--rules", str(rules)]
        assert main(words) == code, capsys.readouterr()


TARGETS = {
    "universal": ["--to", "universal"],
    "tp=1, ZeRO-3": ["--mesh", "tp=1,dp=2,zero=3"],
    "tp=4": ["--mesh", "tp=4,dp=1,zero=1"],
    "two stages": ["--mesh", "tp=2,pp=2,dp=1,zero=1", "--stages", "1,2"],
}


@pytest.mark.parametrize("name", TARGETS)
def test_convert(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    made = tmp_path / "made"
    assert main(["convert", str(folder), str(made), *TARGETS[name]]) == 0
    assert main(["verify", str(made), "--deep"]) == 0
    assert main(["diff", str(folder), str(made)]) == 0


def test_what_was_converted_resumes(sources: Sources, folder: Path, tmp_path: Path) -> None:
    for name in ("universal", "two stages"):
        home = tmp_path / name
        home.mkdir()
        (home / "oracle.pt").write_bytes((folder.parent / "oracle.pt").read_bytes())
        assert main(["convert", str(folder), str(home / "trained"), *TARGETS[name]]) == 0
        check(resume(sources, 2, Own(2, 2, seed=9), str(home), tags=("trained",)))


def test_a_process_that_does_not_know_the_family(folder: Path, tmp_path: Path) -> None:
    """The manifest says how parameters are cut: the tool needs the family for a pipeline alone."""
    for target, code in (("tp=1,dp=2,zero=3", 0), ("pp=2,dp=2,zero=1", 2)):
        words = ["convert", str(folder), str(tmp_path / target), "--mesh", target]
        done = run_command([sys.executable, "-m", "megatron_ucp.cli", *words])
        assert done.returncode == code, done.stderr
    assert "the names of the parameters in a pipeline are not known" in done.stderr
    assert main(["diff", str(folder), str(tmp_path / "tp=1,dp=2,zero=3")]) == 0


def test_stock_patterns_say_three_parts(folder: Path, tmp_path: Path) -> None:
    """Without the manifest: what the save tells stock's tools is true of this parameter too."""
    bare = without_manifest(Path(shutil.copytree(folder, tmp_path / "bare")))
    assert ucp.describe(bare).by_name[FUSED].layout == ShardNC("tp", 0, (12, 8, 4))
    assert main(["diff", str(folder), str(bare)]) == 0


def test_no_patterns_where_stock_has_none_for_a_parameter() -> None:
    """Stock's converter stops without them; with them it would cut that parameter on dim 0."""
    assert info_of(Model(MIXER, SIZES), 2)
    odd = Declared((8, 4), ShardNC("tp", 0, (4, 4), unit=2))
    uneven = replace(MIXER, table=lambda sizes: {**MIXER.table(sizes), "odd": odd})
    assert info_of(Model(uneven, SIZES), 2) == {}


# ------------------------------------------------ plans


def test_a_plan_of_a_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "plan", folder, "--mesh", "tp=1,dp=4,zero=3")
    assert found["stored_bytes"] == sum(rank["read_bytes"] for rank in found["ranks"]) == 12 * ELEMS


def test_a_mesh_that_does_not_divide() -> None:
    with pytest.raises(LayoutError, match="does not divide heads"):
        Model(MIXER, SIZES).check_cut(8)
    with pytest.raises(LayoutError, match="does not divide states"):
        Model(MIXER, replace(SIZES, states=6)).check_cut(4)


OURS = dict(families())  # before the two of this file are registered
BUILT = {name: family.builder for name, family in OURS.items() if family.builder}
LIKE_LLAMA = tuple(name for name, builder in BUILT.items() if builder.gated)


def test_help_names_it() -> None:
    text = " ".join(make_parser().format_help().split())
    # no builder, no training: DeepSeek-V3 and the mixer are not among them
    assert f"{{{','.join(BUILT)},neo}}" in text and "deepseek_v3" not in BUILT
    assert len(LIKE_LLAMA) > 5
    assert f"default for {', '.join(LIKE_LLAMA)}, neo" in text
    assert f"default 0.1, {' 0, '.join(LIKE_LLAMA)} 0, neo 0" in text


# ------------------------------------------------ training with megatron-core's modules

FLAGS = [
    *["--model-family", "neo", "--num-layers", "2", "--hidden-size", "16", "--seq-length", "8"],
    *["--num-attention-heads", "4", "--micro-batch-size", "2", "--global-batch-size", "4"],
    *["--lr", "1e-2", "--train-iters", "2", "--attention-dropout", "0", "--eval-iters", "0"],
    *["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "31"],
    *["--make-vocab-size-divisible-by", "8", "--init-method-std", "0.1"],
]


def test_flags() -> None:
    args = complete(parse(FLAGS), 1)
    assert (args.normalization, args.swiglu, args.disable_bias_linear) == ("RMSNorm", False, False)
    assert args.position_embedding_type == "rope" and args.untie_embeddings_and_output_weights
    assert args.hidden_dropout == 0.0
    gated = " or ".join(LIKE_LLAMA)
    for flag, others in (("--swiglu", gated), ("--normalization LayerNorm", "gpt")):
        with pytest.raises(UsageError, match=f"leave it out, or use --model-family {others}$"):
            complete(parse([*FLAGS, *flag.split()]), 1)
    with pytest.raises(UsageError, match=f"--model-family {gated} or neo"):
        complete(parse([*FLAGS, "--model-family", "gpt", "--normalization", "RMSNorm"]), 1)
    with pytest.raises(UsageError, match="invalid choice: 'mixer'"):
        parse([*FLAGS, "--model-family", "mixer"])


def test_a_trained_family_resumes_in_a_pipeline(ranks: RankPool, tmp_path: Path) -> None:
    cut = ["--tensor-model-parallel-size", "2", "--zero-stage", "2", "--save", str(tmp_path)]
    want = ranks.run(4, jobs.pretrained, [*FLAGS, *cut], train=True)[0]["full"]
    staged = ["--pipeline-model-parallel-size", "2", "--load", str(tmp_path)]
    argv = [*FLAGS, *staged, "--universal-checkpoint"]
    have = ranks.run(2, jobs.pretrained, argv)[0]["full"]
    assert want.keys() == have.keys() and len(want) > 60
    assert all(torch.equal(bits(want[key]), bits(have[key])) for key in want)
    fresh = ranks.run(2, jobs.pretrained, [*argv, "--load", str(tmp_path / "none")])[0]["full"]
    assert not torch.equal(
        fresh["output_layer.weight", "fp32"], want["output_layer.weight", "fp32"]
    )
