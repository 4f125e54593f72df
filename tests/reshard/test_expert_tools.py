"""Every verb on checkpoints with experts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.errors import RuleError
from tests.engines import kinds, tensor_jobs
from tests.engines.moe_jobs import Moe
from tests.engines.sources import Sources, check, of_states, without_manifest
from tests.engines.tensor_jobs import Staged
from tests.engines.test_mixtral import mixtral
from tests.ranks import RankPool

pytestmark = pytest.mark.ranks
STOCK = kinds.stock_load


@pytest.fixture
def mixed(sources: Sources) -> Path:
    """A Mixtral on two expert-parallel ranks."""
    return Path(sources.get(4, mixtral(2, zero=1), more=0))


@pytest.fixture
def own(sources: Sources) -> Path:
    """DeepSpeed's own mixtures on two expert-parallel ranks."""
    return Path(sources.get(4, Moe(2, 1), more=3))


def converted(source: Path, out: Path, target: object, tag: str = "trained") -> Path:
    """A copy for another mesh, with the source's oracle beside it."""
    for each in ("trained", "filled"):
        ucp.convert(source / each, out / each, target=target)
    shutil.copy(source / "oracle.pt", out)
    return out


TARGETS = [
    (ucp.Mesh(dp=4, ep=4, zero=2), mixtral(4, zero=2)),
    (ucp.Mesh(tp=2, dp=2, ep=2, zero=0), mixtral(2, tp=2, zero=0)),
    (ucp.Mesh(tp=2, dp=2, ep=2, etp=1, zero=1), mixtral(2, tp=2, etp=1, zero=1)),
    (ucp.Mesh(dp=4, zero=3), mixtral(1, zero=3)),
]


@pytest.mark.parametrize(("mesh", "setup"), TARGETS, ids=[str(mesh) for mesh, _ in TARGETS])
def test_a_conversion_resumes(
    sources: Sources, mixed: Path, tmp_path: Path, mesh: ucp.Mesh, setup: object
) -> None:
    out = converted(mixed, tmp_path / "out", mesh)
    assert main(["verify", "--deep", str(out / "trained")]) == 0
    assert main(["diff", str(mixed / "trained"), str(out / "trained")]) == 0
    check(sources.resume(4, setup, out))


def test_a_pipeline_is_written(sources: Sources, mixed: Path, tmp_path: Path) -> None:
    target = ucp.Target(ucp.Mesh(pp=2, dp=2, ep=2, zero=1), stages="uniform")
    out = converted(mixed, tmp_path / "out", target)
    check(sources.resume(4, mixtral(2, pp=2), out))


def names_of_groups(folder: Path) -> set[str]:
    """Under which DeepSpeed looks for the ranks that share a group."""
    kept = "optimizer_state_dict"
    out: set[str] = set()
    for path in folder.glob("*_optim_states.pt"):
        tree = torch.load(path, weights_only=False)
        base = tree["optimizer"] if "optimizer" in tree else tree[kept]["base_optimizer_state"]
        out |= {group["name"] for group in base["param_groups"]}
    return out


@pytest.mark.parametrize("ep", [4, 1])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_stock_deepspeed_loads_a_conversion(
    ranks: RankPool, own: Path, tmp_path: Path, zero: int, ep: int
) -> None:
    """Stock goes by position: a rank's experts must come in the order of its module."""
    out = converted(own, tmp_path / "out", ucp.Mesh(dp=4, ep=ep, zero=zero))
    assert names_of_groups(out / "trained") == {"matrices", "vectors", f"ep_size_{ep}"}
    found = ranks.run(4, STOCK, Moe(ep, zero), str(out / "trained"), tag="trained")
    assert found[0]["differences"] == []


@pytest.mark.parametrize("mesh", [ucp.Mesh(dp=4, ep=2, zero=2), ucp.Mesh(dp=4, ep=1, zero=2)])
def test_stock_deepspeed_loads_frozen_experts(
    ranks: RankPool, sources: Sources, tmp_path: Path, mesh: ucp.Mesh
) -> None:
    """Of what ZeRO-2's model file says of frozen parameters it would give each rank that of the
    first one; so the file says nothing of them."""
    setup = Moe(2, 1, frozen=(1, 2), scaled=True)
    out = converted(Path(sources.get(4, setup, more=0)), tmp_path / "out", mesh)
    target = replace(setup, ep=mesh.ep, zero=2, seed=5)
    assert ranks.run(4, STOCK, target, str(out / "trained"), tag="trained")[0]["differences"] == []
    kinds = {spec.kind for spec in ucp.describe(out / "trained").params if spec.expert}
    assert kinds == {"trainable", "frozen", "buffer"}
    assert ucp.verify(out / "trained", deep=True).findings == ()


@pytest.mark.parametrize("verb", ["convert", "plan"])
def test_deepspeeds_own_experts_at_zero_3(
    own: Path, tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which DeepSpeed does not train there, whatever the expert-parallel size."""
    out = [str(tmp_path / "out")] if verb == "convert" else []
    assert main([verb, str(own / "trained"), *out, "--mesh", "dp=4,zero=3"]) == 2
    assert "DeepSpeed does not train these experts at ZeRO-3" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_universal_folder_holds_every_expert(
    sources: Sources, own: Path, mixed: Path, tmp_path: Path
) -> None:
    for source, setup in ((own, Moe(4, 1)), (mixed, mixtral(4, zero=2))):
        out = tmp_path / source.name
        for tag in ("trained", "filled"):
            ucp.convert(source / tag, out / tag, to="universal")
        shutil.copy(source / "oracle.pt", out)
        check(sources.resume(4, setup, out))


def test_what_stock_reads_of_a_universal_folder(
    ranks: RankPool, mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it where a rank has all experts; with more ranks it takes those of each one for the
    first ones, which the tool says."""
    assert main(["convert", str(mixed / "trained"), str(tmp_path / "trained")]) == 0
    assert "experts of this folder rightly at ep=1 alone" in capsys.readouterr().out
    shutil.copy(mixed / "oracle.pt", tmp_path)
    job, path = STOCK, str(tmp_path / "trained")
    asked: dict[str, Any] = {"tag": "trained", "universal": True}
    alone = ranks.run(2, job, replace(mixtral(1), seed=5), path, **asked)[0]["differences"]
    assert all(
        one.startswith("values") for one in of_states(alone)
    )  # buffers, which it never restores
    found = ranks.run(4, job, replace(mixtral(2), seed=5), path, **asked)[0]["differences"]
    moments = [one for one in found if one.startswith("full")]
    assert moments and all("local_experts.2" in one or "local_experts.3" in one for one in moments)


MORE_RANKS = [
    (ucp.Mesh(dp=4, ep=2, zero=1), mixtral(2)),
    (ucp.Mesh(tp=2, dp=2, ep=2, etp=1, zero=0), mixtral(2, tp=2, etp=1, zero=0)),
    (ucp.Mesh(pp=2, dp=2, ep=2, zero=1), mixtral(2, pp=2)),
]


@pytest.mark.parametrize(("mesh", "setup"), MORE_RANKS, ids=[str(mesh) for mesh, _ in MORE_RANKS])
def test_stock_loads_experts_that_all_ranks_had(
    ranks: RankPool, sources: Sources, tmp_path: Path, mesh: ucp.Mesh, setup: Staged
) -> None:
    """Among all others in the source, in groups and files of their own in the target."""
    source = Path(sources.get(4, mixtral(1), more=0))
    target = ucp.Target(mesh, stages="uniform" if mesh.pp > 1 else None)
    out = converted(source, tmp_path / "out", target)
    assert ucp.diff(source / "trained", out / "trained") == []
    target = replace(setup, seed=5)
    assert ranks.run(4, STOCK, target, str(out / "trained"), tag="trained")[0]["differences"] == []


def test_a_rate_of_experts_is_a_difference(sources: Sources, tmp_path: Path) -> None:
    """Also where they are among all others on one side: schedulers keep a number for each group."""
    alone = Path(sources.get(4, mixtral(1), more=0)) / "trained"
    ucp.convert(alone, tmp_path / "other", target=ucp.Mesh(dp=4, ep=2, zero=1))
    source = without_manifest(shutil.copytree(alone, tmp_path / "changed"))
    for path in source.glob("*_optim_states.pt"):
        tree = torch.load(path, weights_only=False)
        base = tree["optimizer_state_dict"]["base_optimizer_state"]
        base["param_groups"][0]["initial_lr"] *= 2
        torch.save(tree, path)
    found = ucp.diff(source, tmp_path / "other")
    assert {"initial_lr" in one.what for one in found} == {True}
    assert any("local_experts" in one.parameter for one in found)


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_stock_loads_where_no_rank_has_experts_of_its_own(
    ranks: RankPool, mixed: Path, tmp_path: Path, zero: int
) -> None:
    """megatron-core's experts are then among all others: the job's groups must be listed."""
    target = replace(mixtral(1, zero=zero), seed=5)
    groups = tuple(map(tuple, ranks.run(4, tensor_jobs.groups_of, target)[0]))
    mesh = ucp.Mesh(dp=4, zero=zero)
    told = ucp.convert(mixed / "trained", tmp_path / "told" / "trained", target=mesh)
    assert any("--groups" in note for note in told.notes)
    out = converted(mixed, tmp_path / "out", ucp.Target(mesh, groups=groups))
    found = ranks.run(4, STOCK, target, str(out / "trained"), tag="trained")
    assert found[0]["differences"] == []


def test_inspect_counts_experts(mixed: Path, own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(mixed / "trained")]) == 0
    assert "4, 2 on each of 2 ranks: 3 layers" in capsys.readouterr().out
    assert main(["inspect", "--json", str(own / "trained")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [len(layers) for layers in found["experts"].values()] == [2]
    assert main(["plan", str(own / "trained"), "--mesh", "dp=4,ep=4,zero=1"]) == 0


def copy_of(source: Path, out: Path, manifest: bool = True) -> Path:
    shutil.copytree(source / "trained", out)
    return out if manifest else without_manifest(out)


@pytest.mark.parametrize("manifest", [True, False])
def test_a_lost_expert_is_named(own: Path, tmp_path: Path, manifest: bool) -> None:
    for number in (1, 3):
        folder = copy_of(own, tmp_path / f"lost{number}", manifest)
        name = f"layer_0_expert_{number}_mp_rank_00_model_states.pt"
        (folder / name).unlink()
        with pytest.raises(ucp.UcpError, match=name):
            ucp.describe(folder)
            ucp.verify(folder)


@pytest.mark.parametrize("zero", [0, 1])
def test_the_lost_experts_of_a_whole_layer_are_named(
    sources: Sources, tmp_path: Path, zero: int
) -> None:
    source = sources.get(4, Moe(2, zero), more=3)
    folder = copy_of(Path(source), tmp_path / "lost", manifest=False)
    assert ucp.verify(folder).findings == ()
    for path in folder.glob("layer_1_expert_*"):
        path.unlink()
    with pytest.raises(ucp.UcpError, match=r"4 expert files are missing[^$]*layer_1_expert_0"):
        ucp.describe(folder)
    assert "4 expert files are missing" in str(ucp.verify(folder).findings)


def test_an_expert_that_two_files_hold(own: Path, tmp_path: Path) -> None:
    folder = copy_of(own, tmp_path / "twice", manifest=False)
    held = folder / "layer_0_expert_1_mp_rank_00_model_states.pt"
    again = folder / "layer_1_expert_1_mp_rank_00_model_states.pt"
    shutil.copy(held, again)
    with pytest.raises(ucp.UcpError, match=r"missing[^$]*mixtures\.1\."):  # the same bytes twice
        ucp.describe(folder)
    other = own / "filled" / held.name
    shutil.copy(other, again)
    assert held.read_bytes() != other.read_bytes()
    with pytest.raises(ucp.UcpError, match="two files"):
        ucp.describe(folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layer_0_expert_1_mp_rank_0_model_states.pt", "two files are for one place"),
        ("layer_00_expert_1_mp_rank_00_model_states.pt", "two files are for one place"),
        ("layer_0_expert_1_mp_rank_03_model_states.pt", "more model-parallel ranks"),
        ("layer_0_expert_9_mp_rank_00_model_states.pt", "holds something else"),
        ("layer_7_expert_0_mp_rank_00_model_states.pt", "two files"),
    ],
)
def test_an_expert_file_too_many(own: Path, tmp_path: Path, name: str, words: str) -> None:
    """With another save's bytes."""
    folder = copy_of(own, tmp_path / "more", manifest=False)
    number = 0 if "expert_0" in name else 1
    shutil.copy(own / "filled" / f"layer_0_expert_{number}_mp_rank_00_model_states.pt", folder)
    (folder / f"layer_0_expert_{number}_mp_rank_00_model_states.pt").rename(folder / name)
    shutil.copy(own / "trained" / f"layer_0_expert_{number}_mp_rank_00_model_states.pt", folder)
    with pytest.raises(ucp.UcpError, match=words):
        ucp.describe(folder)


def test_an_expert_of_another_size(own: Path, tmp_path: Path) -> None:
    folder = copy_of(own, tmp_path / "other", manifest=False)
    path = folder / "layer_0_expert_1_mp_rank_00_model_states.pt"
    tree = torch.load(path, weights_only=False)
    name = next(iter(tree))
    torch.save({**tree, name: torch.zeros(3)}, path)
    (found,) = ucp.verify(folder).findings
    assert "a weight has another size" in found.what and found.parameter == name
    assert found.file.endswith(path.name)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("dp=4,ep=2,etp=2,zero=0", "would not save all parts"),  # two ranks would write one file
        ("dp=4,etp=2,zero=1", "would not save all parts"),
        ("tp=4,dp=2,ep=2,etp=1,zero=1", "would not save all parts"),
        ("pp=3,dp=2,ep=2,zero=1", "no layer with experts"),
    ],
)
def test_meshes_whose_experts_deepspeed_has_no_files_for(
    mixed: Path, tmp_path: Path, mesh: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = ["--stages", "4,1,1"] if "pp" in mesh else []
    for verb, out in (("convert", [str(tmp_path / "out")]), ("plan", list[str]())):
        assert main([verb, str(mixed / "trained"), *out, "--mesh", mesh, *stages]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_size_that_does_not_divide_the_experts(mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(ucp.UcpError, match="does not divide the experts"):
        ucp.convert(mixed / "trained", tmp_path / "out", target=ucp.Mesh(dp=3, ep=3, zero=1))
    assert not (tmp_path / "out").exists()


def test_local_numbers_without_files_of_experts(own: Path, tmp_path: Path) -> None:
    """What an old script may leave: optimizer files that count a rank's own experts, and no word
    about which ones these are."""
    folder = copy_of(own, tmp_path / "local", manifest=False)
    for path in folder.glob("layer_*_expert_*"):
        path.unlink()
    with pytest.raises(ucp.UcpError, match="expert files are missing"):
        ucp.describe(folder)


RULES = r"""
format = 1

[[rule]]
pattern = '.*\.local_experts\.\d+\.linear_fc1\.weight'
layout = "{layout}"
axis = "{axis}"
dim = 0
{parts}

[[rule]]
pattern = '.*\.local_experts\.\d+\.linear_fc2\.weight'
layout = "Shard"
axis = "etp"
dim = 1

[[rule]]
pattern = '.*\.shared_experts\.linear_fc1\.weight'
layout = "ShardNC"
axis = "tp"
dim = 0
parts = 2

[[rule]]
pattern = '.*\.(shared_experts\.linear_fc2|linear_proj)\.weight'
layout = "Shard"
axis = "tp"
dim = 1

[[rule]]
pattern = '.*\.(linear_qkv|word_embeddings)\.weight|output_layer\.weight'
layout = "Shard"
axis = "tp"
dim = 0

[[rule]]
pattern = '.*norm\.weight|.*\.router\..*'
layout = "Replicate"
"""


@pytest.fixture
def unexplained(sources: Sources, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint whose experts are cut, and a copy without anything that says how."""
    whole = Path(sources.get(4, mixtral(2, tp=2, zero=1), more=0)) / "trained"
    shutil.copytree(whole, tmp_path / "bare")
    return whole, without_manifest(tmp_path / "bare")


def test_rules_say_how_experts_are_cut(unexplained: tuple[Path, Path], tmp_path: Path) -> None:
    whole, bare = unexplained
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES.format(layout="ShardNC", axis="etp", parts="parts = 2"))
    with_rules = ["--rules", str(rules)]
    assert main(["plan", str(bare), "--mesh", "dp=4,ep=4,zero=2", *with_rules]) == 0
    assert main(["verify", "--deep", str(bare), *with_rules]) == 0
    assert main(["diff", str(whole), str(bare), *with_rules]) == 0
    out = tmp_path / "out"
    assert main(["convert", str(bare), str(out), "--mesh", "dp=4,ep=4,zero=2", *with_rules]) == 0
    assert main(["diff", str(whole), str(out)]) == 0


def test_gate_and_up_of_experts_swapped_by_rules_are_a_difference(
    unexplained: tuple[Path, Path], tmp_path: Path
) -> None:
    whole, bare = unexplained
    wrong, good = tmp_path / "wrong.toml", tmp_path / "good.toml"
    wrong.write_text(RULES.format(layout="Shard", axis="etp", parts=""))
    good.write_text(RULES.format(layout="ShardNC", axis="etp", parts="parts = 2"))
    with pytest.raises(RuleError, match="contradicts the manifest in the layout"):
        ucp.diff(bare, whole, rules=wrong)
    found = ucp.diff(bare, whole, rules=wrong, rules_b=good)
    names = [f"decoder.layers.{n}.mlp.experts.local_experts" for n in range(3)]
    want = {f"{name}.{expert}.linear_fc1.weight" for name in names for expert in range(4)}
    assert {one.parameter for one in found} == want


def test_a_rule_that_cuts_experts_as_the_rest_is_refused(
    unexplained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks that cut an expert can be others: etp=1 at tp=2 holds whole experts."""
    _, bare = unexplained
    rules = tmp_path / "rules.toml"
    rules.write_text(RULES.format(layout="ShardNC", axis="tp", parts="parts = 2"))
    assert main(["verify", str(bare), "--rules", str(rules)]) != 0
    said = capsys.readouterr().err
    assert "expected: etp" in said and "local_experts" in said
