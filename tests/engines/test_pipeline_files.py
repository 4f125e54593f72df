"""Files of pipelines: which ones are refused, and what a save writes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ucp import describe
from megatron_ucp.reshard.check import diff
from tests.engines import kinds
from tests.engines.sources import Sources, check, without_manifest
from tests.engines.stages import Mesh, ranks_of, resume, setup, source
from tests.engines.test_tensor_parallel import expect

pytestmark = pytest.mark.ranks


STOCK: tuple[Mesh, str] = (2, 2, 1, 1), "gpt"


def attempt(sources: Sources, folder: Path, mesh: Mesh = (2, 1, 1, 1), **kwargs: Any) -> list[dict]:
    family = kwargs.pop("given", "gpt")
    target = setup(mesh, "gpt", **{"tied": True, **kwargs})
    job = kinds.attempt, target, str(folder), "trained"
    return sources.ranks.run(ranks_of(mesh), *job, attach=False, family=family)


@pytest.fixture
def stock(sources: Sources, tmp_path: Path) -> Path:
    """A copy of a stock pipeline checkpoint with tied embeddings, to be damaged."""
    shutil.copytree(source(sources, *STOCK, attach=False, tied=True), tmp_path / "stock")
    return tmp_path / "stock"


def edit(path: Path, change: Any) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layer_02-model_01-model_states.pt", ("layer file", "position 2, tensor-parallel rank 1")),
        ("layer_0*-model_01-model_states.pt", ("layer file", "tensor-parallel rank 1")),
        ("mp_rank_03_model_states.pt", ("model file", "model-parallel ranks 0 to 3")),
        ("zero_pp_rank_0_mp_rank_02_optim_states.pt", ("optimizer file", "model-parallel rank 2")),
    ],
)
def test_a_missing_file(sources: Sources, stock: Path, name: str, words: tuple[str, ...]) -> None:
    for path in (stock / "trained").glob(name):
        path.unlink()
    expect(attempt(sources, stock), "NotFoundError", *words)


def test_a_gap_in_the_layers(sources: Sources, stock: Path) -> None:
    for path in (stock / "trained").glob("layer_01-*"):
        path.unlink()
    expect(attempt(sources, stock), "NotFoundError", "layer file", "position 1")


FC1 = "mlp.linear_fc1.weight"


def test_a_layer_file_of_another_model(sources: Sources, stock: Path) -> None:
    other = Path(source(sources, *STOCK, attach=False, tied=True, ffn=32)) / "trained"
    shutil.copy(other / "layer_01-model_01-model_states.pt", stock / "trained")
    found = attempt(sources, stock)
    expect(found, "ForeignFileError", "layer file differs", "decoder.layers.0.mlp.linear_fc1")


def test_files_of_another_mesh(sources: Sources, stock: Path) -> None:
    other = Path(source(sources, (2, 1, 2, 1), "gpt", attach=False, tied=True)) / "trained"
    shutil.copy(other / "mp_rank_01_model_states.pt", stock / "trained")
    expect(attempt(sources, stock), "ForeignFileError", "model file differs")


def test_a_layer_file_of_another_run(sources: Sources, stock: Path) -> None:
    def other(state: dict) -> None:
        state[FC1] = state[FC1] + 1

    edit(stock / "trained" / "layer_02-model_01-model_states.pt", other)
    found = attempt(sources, stock)
    expect(found, "ForeignFileError", "master weights", f"decoder.layers.1.{FC1}")


def test_a_parameter_that_two_stages_hold_without_a_tie(sources: Sources, stock: Path) -> None:
    def steal(state: dict) -> None:
        shapes = state["param_shapes"][0]
        taken = next(name for name in shapes if name.endswith(FC1))
        renamed = [f"1.{FC1}" if name == taken else name for name in shapes]
        state["param_shapes"][0] = type(shapes)(zip(renamed, shapes.values(), strict=True))

    for rank in ("02", "03"):
        edit(stock / "trained" / f"mp_rank_{rank}_model_states.pt", steal)
    words = "not tied", f"decoder.layers.0.{FC1}", "stages 0, 1"
    expect(attempt(sources, stock), "ModelMismatchError", *words)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("step", ("different steps", "step 3.0", "4.0")),
        ("weight_decay", ("different hyper-parameters", "weight_decay 0.1")),
    ],
)
def test_a_tie_that_went_apart(
    sources: Sources, stock: Path, what: str, words: tuple[str, ...]
) -> None:
    def apart(state: dict) -> None:
        base = state["optimizer_state_dict"]["base_optimizer_state"]
        if what == "step":
            base["state"][0]["step"] += 1
        else:
            base["param_groups"][0]["weight_decay"] = 0.3

    for path in (stock / "trained").glob("*mp_rank_0[23]_optim_states.pt"):
        edit(path, apart)
    found = attempt(sources, stock)
    expect(found, "StateMismatchError", "embedding.word_embeddings.weight", *words)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"layers": 4}, "NotFoundError"),
        ({"layers": 2}, "ModelMismatchError"),
        ({"ffn": 32}, "ModelMismatchError"),
    ],
)
def test_another_model_size(sources: Sources, stock: Path, change: dict, kind: str) -> None:
    expect(attempt(sources, stock, **change), kind)
    ours = Path(source(sources, *STOCK, tied=True))
    expect(attempt(sources, ours, **change), "ModelMismatchError", "parameter:")


def test_no_family(sources: Sources, stock: Path) -> None:
    found = attempt(sources, stock, (2, 1, 1, 1), given=None)
    expect(found, "UnsupportedError", "pipeline", "no family")
    found = attempt(sources, stock, (0, 1, 1, 1), given=None)
    expect(found, "UnsupportedError", "pipeline checkpoint", "needs a family")


def test_the_manifest_of_a_save(sources: Sources) -> None:
    folder = Path(source(sources, *STOCK, tied=True)) / "trained"
    found = describe(folder)
    assert str(found.mesh) == "tp=2,pp=2,dp=1,zero=1" and found.family == "gpt"
    assert {b.at for b in found.buffers} == {(("pp", 0),), (("pp", 1),)}
    holders = [found.buffers[b] for b, _ in found.holders["embedding.word_embeddings.weight"]]
    assert [one.at for one in holders] == [(("pp", 0),), (("pp", 1),)]
    assert found.names[f"2.{FC1}"] == f"decoder.layers.1.{FC1}"
    assert {f.name for f in found.files} >= {p.name for p in folder.glob("*_states.pt")}
    assert len([f for f in found.files if f.name.startswith("layer_")]) == 2 * 5


def test_diff_needs_no_family_for_our_own_saves(sources: Sources, tmp_path: Path) -> None:
    """The same run through another mesh and back is equal; with a byte changed it is not."""
    folder = source(sources, *STOCK, tied=True)
    out = tmp_path / "again"
    target = setup((4, 1, 1, 0), "gpt", tied=True, partition=(1, 2, 2, 1), seed=9)
    sources.ranks.run(4, kinds.reshard, target, folder, str(out))
    assert diff(Path(folder) / "trained", out / "again") == []
    different = diff(Path(folder) / "trained", Path(folder) / "filled")
    names = {d.parameter for d in different}
    assert names >= {f"decoder.layers.1.{FC1}", "decoder.final_layernorm.bias"}


def test_without_its_manifest_our_save_is_read_like_stock(sources: Sources, tmp_path: Path) -> None:
    folder = tmp_path / "save"
    shutil.copytree(source(sources, (2, 1, 2, 1), "gpt", tied=True), folder)
    check(resume(sources, (0, 2, 1, 1), "gpt", str(without_manifest(folder)), tied=True))


def test_older_file_names_and_no_word_about_dimensions(sources: Sources, tmp_path: Path) -> None:
    """Without a topology's "model" axis layer files have no rank in their names, and older versions
    say no dimensions."""
    for number, mesh in enumerate([(2, 1, 2, 1), (2, 2, 1, 1)]):
        folder = tmp_path / str(number)
        shutil.copytree(source(sources, mesh, "gpt", attach=False, tied=True), folder)
        for path in folder.rglob("mp_rank_*_model_states.pt"):
            edit(path, lambda state: state.pop("checkpoint_parallel_dimensions"))
        for path in folder.rglob("layer_*-model_00-*.pt") if mesh[1] == 1 else ():
            path.rename(path.with_name(path.name.replace("-model_00", "")))
        check(resume(sources, (0, 1, 2, 1), "gpt", str(folder), tied=True))


def test_the_same_mesh_gets_its_random_states_back(sources: Sources) -> None:
    found = resume(sources, STOCK[0], "gpt", source(sources, *STOCK, tied=True), tied=True)
    check(found)
    said = [notes for rank in found for notes in rank["notes"].values()]
    assert not [note for notes in said for note in notes if "random" in note]


def test_a_failure_while_bytes_move(sources: Sources) -> None:
    """One rank's disk fails: every rank says so, and no rank's engine trains on or saves."""
    target = setup((2, 2, 1, 1), "gpt", tied=True, seed=9)
    folder = source(sources, *STOCK, tied=True)
    for rank in sources.ranks.run(4, kinds.fails_on_rank, target, folder, 2):
        assert rank["error"] == "DamagedFileError" and rank["refuses"]
