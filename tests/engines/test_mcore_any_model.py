"""Models of megatron-core's that no family describes resume on other meshes bit for bit: how they
are cut is what their own `sharded_state_dict` says."""

from pathlib import Path
from typing import Any

import megatron_ucp_patches as patches
import pytest

import megatron_ucp as ucp
from megatron_ucp.core.layout import Shard
from tests.engines import any_models
from tests.engines.any_models import SETTINGS, AnyModel
from tests.ranks import RankPool

# 0.16.1 writes other slices of a padded bucket: of the embedding's copy on the last stage
STOCK_STATES = ("param", "exp_avg", "exp_avg_sq")
STOCK_LOSES = {
    f"optimizer.state.{state}.embedding.word_embeddings.weight" for state in STOCK_STATES
}
WORLD, STEPS = 4, 3
# tp, pp, ep, etp of the source, then of what is loaded; the ones after the second are slow
DENSE = [(2, 1, 1, None), (1, 2, 1, None), (4, 1, 1, None), (2, 2, 1, None), (1, 1, 1, None)]
MIXTURE = [(2, 1, 2, 1), (2, 2, 1, None), (1, 1, 4, 1), (1, 2, 2, 1), (4, 1, 2, 2)]
ONE_STAGE = [(2, 1, 1, None), (1, 1, 1, None), (4, 1, 1, None)]
MESHES = {kind: MIXTURE if "num_moe_experts" in own else DENSE for kind, own in SETTINGS.items()}
MESHES["own module"] = MESHES["t5"] = ONE_STAGE
MESHES["gpt-oss"] = [(2, 1, 2, 1), (2, 2, 2, 1), (1, 1, 4, 1), (1, 2, 2, 1), (4, 1, 2, 1)]
CASES = [
    pytest.param(kind, mesh, id=f"{kind}: {mesh}", marks=[pytest.mark.slow] if n > 1 else [])
    for kind, meshes in MESHES.items()
    for n, mesh in enumerate(meshes[1:])
]


def on(kind: str, mesh: tuple[int, int, int, int | None], **more: Any) -> AnyModel:
    tp, pp, ep, etp = mesh
    return AnyModel(kind=kind, tp=tp, pp=pp, ep=ep, etp=etp, **more)


def steps_alike(kind: str) -> int:
    """How many losses a run on another mesh has alike: megatron-core's latent attention of local
    modules has other gradients under another tp, also without a resume; the blocks of a gated
    delta net round more, 2e-6 after one step."""
    return {"latent": 1, "gated": 2}.get(kind.partition(" ")[0], STEPS)


@pytest.fixture(scope="module")
def deepspeed_sources(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """As `sources`, of runs under DeepSpeed at tp=2, ZeRO-2."""

    class Sources(dict[str, Any]):
        def __missing__(self, kind: str) -> Any:
            folder, setup = str(tmp_path_factory.mktemp("any")), AnyModel(kind=kind, tp=2)
            found = ranks.run(WORLD, any_models.saved_under_deepspeed, setup, 2, folder)
            return self.setdefault(kind, (folder, found[0]))

    return Sources()


@pytest.fixture(scope="module")
def sources(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of each kind the folder and the losses of the run that goes on; made when it is asked for."""

    class Sources(dict[str, Any]):
        def __missing__(self, kind: str) -> Any:
            folder = str(tmp_path_factory.mktemp("any"))
            found = ranks.run(WORLD, any_models.saved, on(kind, MESHES[kind][0]), folder)
            return self.setdefault(kind, (folder, found[0]))

    return Sources()


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_another_mesh_has_the_same_bits_and_losses(
    ranks: RankPool, sources: dict[str, Any], tmp_path: Path, kind: str, mesh: Any
) -> None:
    folder, losses = sources[kind]
    found = ranks.run(
        WORLD, any_models.resumed, on(kind, mesh, seed=3), folder, str(tmp_path / "b")
    )
    count, unequal = ranks.run(1, any_models.compared, f"{folder}/stock", str(tmp_path / "b"))[0]
    assert found[0]["others"] == [] and count > 20
    assert set(unequal) <= (STOCK_LOSES if kind == "predicting mixture" and mesh[1] > 1 else set())
    same = steps_alike(kind)
    assert found[0]["losses"][:same] == pytest.approx(losses[:same], abs=1e-5)


@pytest.mark.parametrize("kind", SETTINGS)
def test_stock_finds_every_key_that_it_asks_for_in_our_files(
    ranks: RankPool, sources: dict[str, Any], kind: str
) -> None:
    folder, _ = sources[kind]
    tensors, objects, missing, unequal = ranks.run(1, any_models.asked_for, folder)[0]
    # what a program keeps of itself, which no model asks for
    missing = [key for key in missing if not key.startswith(("common_state/", "rng_state/"))]
    assert tensors > 20 and objects and (missing, unequal) == ([], [])
    assert tensors > 20 and objects and unequal == []


@pytest.mark.parametrize("kind", [kind for kind in SETTINGS if kind != "t5"])
def test_stocks_own_files_go_on_on_another_mesh(
    ranks: RankPool, sources: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    """Without a manifest; projections in parts lie under stock's keys for them. T5's two names for
    a parameter are two parameters there."""
    folder, losses = sources[kind]
    stock, again = f"{folder}/stock", str(tmp_path / "b")
    mesh = MESHES[kind][1]
    found = ranks.run(WORLD, any_models.resumed, on(kind, mesh, seed=3), stock, again)
    count, unequal = ranks.run(1, any_models.compared, stock, again)[0]
    assert found[0]["others"] == [] and count > 20
    assert set(unequal) <= (STOCK_LOSES if kind == "predicting mixture" and mesh[1] > 1 else set())
    same = steps_alike(kind)
    assert found[0]["losses"][:same] == pytest.approx(losses[:same], abs=1e-5)


@pytest.mark.parametrize("kind", ["mamba", "gated delta net"])
def test_a_projection_that_was_cut_as_one_would_be_seen(
    ranks: RankPool, sources: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    """Its parts (z, x, B, C, dt) are cut each by itself. Were they not, rows would go elsewhere."""
    folder, _ = sources[kind]
    setup, again = on(kind, (4, 1, 1, None), seed=3), str(tmp_path / "b")
    found = ranks.run(WORLD, any_models.resumed_as_one, setup, folder, again)[0]
    _, unequal = ranks.run(1, any_models.compared, f"{folder}/stock", again)[0]
    assert any("in_proj" in key for key in unequal) and any("conv1d" in key for key in unequal)
    assert found["losses"][0] != pytest.approx(sources[kind][1][0], abs=1e-3)


@pytest.mark.parametrize("kind", ["dense", "t5", "gpt-oss"])
def test_two_states_of_stock_that_differ_are_seen(
    ranks: RankPool, sources: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    """The comparison's control: the state of a run that took another number of steps."""
    folder, _ = sources[kind]
    other = on(kind, MESHES[kind][0])
    ranks.run(WORLD, any_models.saved, other, str(tmp_path), steps=1, more=0)
    count, unequal = ranks.run(1, any_models.compared, f"{folder}/stock", f"{tmp_path}/stock")[0]
    assert len(unequal) > count // 2


def test_the_manifest_has_the_layouts(sources: dict[str, Any]) -> None:
    """So that tools need neither megatron-core nor a family."""
    folder, _ = sources["latent attention"]
    manifest = ucp.inspect(folder).manifest
    layer = "decoder.layers.1.self_attention."
    spec = manifest.by_name[f"{layer}linear_q_up_proj.weight"]
    assert spec.layout == Shard("tp", 0)
    assert not ucp.verify(folder, deep=True).findings


def test_the_tools_know_the_model_from_its_manifest(
    sources: dict[str, Any], tmp_path: Path
) -> None:
    """A conversion to a mesh of DeepSpeed's, without a family; then back, and nothing differs."""
    folder, _ = sources["leading dense layers"]
    ucp.convert(folder, tmp_path / "native", target=ucp.Mesh(tp=2, dp=2, zero=1))
    assert ucp.diff(folder, tmp_path / "native") == []
    ucp.convert(tmp_path / "native", tmp_path / "again", to="torch_dist")
    assert ucp.diff(folder, tmp_path / "again") == []


@pytest.mark.parametrize(
    ("kind", "plant", "parameter"),
    [
        ("shared experts and router bias", "swapped experts", "local_experts.1.linear_fc1.weight"),
        ("predicting mixture", "later prediction", "mtp.layers.1"),
        ("latent attention", "cut by columns", "linear_q_up_proj.weight"),
        ("latent attention", "whole latents", "layers.0.self_attention.linear_kv_down_proj.weight"),
        ("t5", "cross attention by columns", "layers.1.cross_attention.linear_kv."),
        ("gpt-oss", "whole sinks", "layers.1.self_attention.core_attention.softmax_offset"),
        ("t5", "a forgotten cut", "layers.0.mlp.linear_fc2.weight"),
        ("latent attention", "a method that fails", 'KeyError: "of somebody\'s module"'),
    ],
)
def test_a_planted_fault_is_named_on_every_rank(
    ranks: RankPool, kind: str, plant: str, parameter: str
) -> None:
    mesh = (2, 1, 2, 1) if kind == "gpt-oss" else (2, 1, 1, None)
    for found in ranks.run(2, any_models.refused, on(kind, mesh), plant):
        assert found.partition("\n")[0].partition(" (on rank")[0] in (
            "a module and its files number a layer or an expert differently",
            "two ranks say different things of how a parameter is cut",
            "a down projection has other rows than the model's config says",
            "a parameter is marked as cut, and the model says that every rank has all of it",
            "the model can't say how its parameters are cut",
        )
        assert parameter in found


def test_attributes_of_experts_decide_nothing(ranks: RankPool, sources: dict[str, Any]) -> None:
    """What the model says of its layouts does. Where megatron-core itself goes by an attribute that
    lies, and puts experts among what all ranks share, that is refused. Up to 0.18 it does so where
    ranks cut attention and no expert."""
    kind = "leading dense layers"
    folder, _ = sources[kind]
    for found in ranks.run(WORLD, any_models.unmarked, on(kind, (4, 1, 2, 2), seed=3), folder):
        assert found == {"error": "", "marked": True, "others": []}
    lies = patches.version_of("megatron-core").startswith(("0.16.", "0.17.", "0.18."))
    for found in ranks.run(WORLD, any_models.unmarked, on(kind, (2, 1, 1, 1), seed=3), folder):
        if not lies:
            assert found == {"error": "", "marked": True, "others": []}
            continue
        assert not found["marked"]
        assert found["error"].startswith("a buffer mixes experts with parameters that other ranks")
        assert "param.allreduce" in found["error"]


# ------------------------------------------------ a GPTModel and a hybrid model

PAIRS = [
    ("dense", "hybrid"),
    ("hybrid", "dense"),
    ("q/k norms and experts", "hybrid mixture"),
    ("hybrid mixture", "q/k norms and experts"),
]


def in_pairs(table: Any, to_hybrid: bool) -> dict[str, Any]:
    """The states of a model, in the names of the one that has two layers for each, or one for
    two."""

    def renamed(name: str) -> str:
        old, new = "final_layernorm", "final_norm"
        name = name.replace(old, new) if to_hybrid else name.replace(new, old)
        parts = name.split(".")
        if parts[1] == "layers":
            is_mlp = parts[3] in ("mlp", "pre_mlp_layernorm")
            number = int(parts[2])
            parts[2] = str(2 * number + is_mlp if to_hybrid else number // 2)
        return ".".join(parts)

    return {renamed(name): states for name, states in table.items()}


@pytest.mark.parametrize(("kind", "other"), PAIRS)
def test_a_gpt_model_becomes_a_hybrid_model_and_back(
    ranks: RankPool, sources: dict[str, Any], kind: str, other: str
) -> None:
    """All states bit for bit under the other names, on another mesh, and the same losses."""
    folder, losses = sources[kind]
    wanted = in_pairs(ucp.fingerprint(folder).table, "hybrid" in other)
    for mesh in MESHES[other][1:3]:
        job = any_models.carried
        found = ranks.run(WORLD, job, on(other, mesh, seed=3), folder, {"hybrid"})[0]
        assert found["error"] == "" and found["changed"]
        assert found["table"] == wanted and len(wanted) > 20
        assert found["losses"] == pytest.approx(losses, abs=1e-5)
        (note,) = [one for one in found["notes"] if "renumbered" in one]
        assert note.startswith("layers renumbered, as allowed: ")


@pytest.mark.parametrize("files", ["stock's torch_dist", "universal", "native of DeepSpeed"])
def test_files_of_every_kind_become_a_hybrid_model(
    ranks: RankPool,
    sources: dict[str, Any],
    deepspeed_sources: dict[str, Any],
    tmp_path: Path,
    files: str,
) -> None:
    folder, losses = (deepspeed_sources if files.startswith("native") else sources)["dense"]
    if files == "universal":
        ucp.convert(folder, tmp_path / "universal", to="universal")
    path = {"universal": tmp_path / "universal", "stock's torch_dist": f"{folder}/stock"}
    setup, place = on("hybrid", (2, 2, 1, None), seed=3), str(path.get(files, folder))
    found = ranks.run(WORLD, any_models.carried, setup, place, {"hybrid"})[0]
    assert found["error"] == ""
    assert found["table"] == in_pairs(ucp.fingerprint(place).table, to_hybrid=True)
    if not files.startswith("native"):  # that run had other batches
        assert found["losses"] == pytest.approx(losses, abs=1e-5)


def test_layers_in_another_order_are_seen(ranks: RankPool, sources: dict[str, Any]) -> None:
    """The comparison's control."""
    folder, losses = sources["dense"]
    wanted = in_pairs(ucp.fingerprint(folder).table, to_hybrid=True)
    setup = on("hybrid", DENSE[1], seed=3)
    found = ranks.run(WORLD, any_models.carried, setup, folder, {"hybrid"}, True)[0]
    assert found["error"] == "" and found["table"] != wanted
    assert found["losses"] != pytest.approx(losses, abs=1e-5)


@pytest.mark.parametrize(
    ("kind", "layers", "allow", "said"),
    [
        ("dense", 4, set(), 'allow={"hybrid"}, which changes names and no value'),
        ("hybrid", 4, set(), 'allow={"hybrid"}, which changes names and no value'),
        ("hybrid", 3, {"hybrid"}, "3 layers of attention, as many of MLP or experts"),
    ],
)
def test_what_does_not_become_the_other_is_refused(
    ranks: RankPool, sources: dict[str, Any], kind: str, layers: int, allow: Any, said: str
) -> None:
    folder, _ = sources[kind]
    setup = on("dense" if kind == "hybrid" else "hybrid", (1, 1, 1, None), layers=layers)
    for found in ranks.run(WORLD, any_models.carried, setup, folder, allow):
        assert said in found["error"] and not found["changed"]


@pytest.mark.parametrize("kind", ["dense", "latent attention alone", "own module", "t5"])
@pytest.mark.parametrize(("tp", "zero"), [(1, 3), (2, 1), (4, 2)])
def test_under_deepspeed(
    ranks: RankPool, deepspeed_sources: dict[str, Any], kind: str, tp: int, zero: int
) -> None:
    """Across stages of ZeRO too; a run of the stack's own loads the same files."""
    folder, losses = deepspeed_sources[kind]
    setup = AnyModel(kind=kind, tp=tp, seed=3)
    for found in ranks.run(WORLD, any_models.resumed_under_deepspeed, setup, zero, folder):
        assert found["others"] == [] and len(found["before"]) > 10
        same = steps_alike(kind)
        assert found["losses"][:same] == pytest.approx(losses[:same], abs=1e-5)


@pytest.mark.parametrize("kind", ["dense", "latent attention alone", "t5"])
def test_the_stack_resumes_a_run_of_deepspeed(
    ranks: RankPool, deepspeed_sources: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    folder, _ = deepspeed_sources[kind]
    setup = on(kind, (4, 1, 1, None) if kind == "t5" else (2, 2, 1, None), seed=3)
    for found in ranks.run(WORLD, any_models.resumed, setup, folder, str(tmp_path / "b")):
        assert found["others"] == []
