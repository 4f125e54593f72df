"""Files of DeepSpeed's AutoTP whose shares are of different sizes, under everything that reads
files; and what is refused by name."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.errors import ModelMismatchError, RuleError, UnsupportedError
from tests.engines import autotp_jobs
from tests.engines.autotp_jobs import Auto
from tests.engines.sources import Sources, without_manifest
from tests.engines.test_autotp import Mesh, saved
from tests.reshard import twins

pytestmark = pytest.mark.ranks
HEAD = "lm_head.weight"
MESHES: list[Mesh] = [(2, 2, 1), (4, 4, 0)]


@pytest.fixture
def stock(sources: Sources, tmp_path: Path) -> Any:
    """A tag as stock DeepSpeed would have written it, and the states that were in the engine."""

    def get(kind: str, mesh: Mesh, tag: str = "trained") -> tuple[Path, dict[str, Any]]:
        folder = Path(saved(sources, kind, mesh))
        oracle = torch.load(folder / "oracle.pt", weights_only=False)["states"][tag]
        copy = tmp_path / "stock" / tag
        shutil.copytree(folder / tag, copy)
        return without_manifest(copy), oracle

    return get


def change(folder: Path, what: Any) -> Path:
    """Changes what the model files say of the parameters."""
    for path in folder.glob("*model_states.pt"):
        tree = torch.load(path, weights_only=False)
        what(tree["universal_checkpoint_info"])
        torch.save(tree, path)
    return folder


@pytest.mark.parametrize("mesh", MESHES)
def test_shares_of_different_sizes_are_no_damage(sources: Sources, stock: Any, mesh: Mesh) -> None:
    for folder in (Path(saved(sources, "llama", mesh)) / "trained", stock("llama", mesh)[0]):
        found = ucp.verify(folder, deep=True)
        assert found.findings == () and found.read_bytes
        (head,) = (spec for spec in ucp.describe(folder).params if spec.name == HEAD)
        assert head.shape == (61, 24) and head.layout.only_cut.runs


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_export_to_hugging_face(sources: Sources, stock: Any, tmp_path: Path, kind: str) -> None:
    folder, oracle = stock(kind, (2, 2, 1 if kind == "llama" else 2))
    ucp.export_hf(folder, tmp_path / "out", dtype="float32", verify=True)
    found = twins.read(tmp_path / "out")
    assert {*found} == {*oracle["weights"]}
    for name, tensor in found.items():
        assert torch.equal(tensor, oracle["weights"][name]), name
    odd = found[HEAD] if kind == "llama" else found["model.layers.0.mlp.gate_up_proj.weight"]
    assert not torch.equal(odd, odd.roll(1, 0)), "a shift by a row would not be seen"


@pytest.mark.parametrize("to", ["native", "universal"])
@pytest.mark.parametrize("mesh", MESHES)
def test_convert(sources: Sources, tmp_path: Path, mesh: Mesh, to: Any) -> None:
    """To one tensor-parallel rank: what comes out is what went in, state by state."""
    folder = Path(saved(sources, "llama", mesh)) / "filled"
    target = ucp.Target(mesh=ucp.Mesh(dp=2, zero=1)) if to == "native" else None
    out = tmp_path / "out" / "tag"
    ucp.convert(folder, out, to=to, target=target)
    assert ucp.verify(out, deep=True).findings == ()
    assert ucp.diff(folder, out) == []
    other = Path(saved(sources, "llama", mesh)) / "trained"
    assert ucp.diff(other, out)


def test_convert_to_other_tensor_parallel_ranks_is_refused(
    sources: Sources, tmp_path: Path
) -> None:
    folder = Path(saved(sources, "llama", (2, 2, 1))) / "trained"
    target = ucp.Target(mesh=ucp.Mesh(tp=2, zero=1))
    with pytest.raises(RuleError) as caught:
        ucp.convert(folder, tmp_path / "out", to="native", target=target)
    assert "convert to tp=1" in caught.value.what_to_do
    assert not (tmp_path / "out").exists()


def test_shares_that_the_map_does_not_describe_are_damage(stock: Any) -> None:
    """Negative control: the map says 30 and 31 rows, the files have 31 and 30."""

    def move(info: Any) -> None:
        entry = next(v for key, v in info["affine_map"]["params"].items() if "lm_head" in key)
        for rank, (start, rows) in enumerate([(0, 30), (30, 31)]):
            held = entry["ranks"][rank]
            held["shard_shape"] = [rows, 24]
            held["pieces"][0] |= {"shape": [rows, 24], "source": [start * 24, [24, 1]]}

    with pytest.raises(ModelMismatchError, match="is not what its layout says") as caught:
        ucp.verify(change(stock("llama", (2, 2, 1))[0], move))
    assert caught.value.parameter == HEAD


def _unsupported(info: Any) -> None:
    info["autotp_unsupported_parameter_patterns"] = {r"^lm_head\.weight$": "heads are paired"}


def _scaled(info: Any) -> None:
    entry = next(v for key, v in info["affine_map"]["params"].items() if "lm_head" in key)
    entry["ranks"][1]["pieces"][0]["scale"] = 0.5


@pytest.mark.parametrize(
    ("what", "words"), [(_unsupported, "heads are paired"), (_scaled, "scaled values")]
)
def test_what_nothing_can_put_together_is_refused(stock: Any, what: Any, words: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        ucp.describe(change(stock("llama", (2, 2, 1))[0], what))
    assert caught.value.parameter == HEAD and words in str(caught.value)


@pytest.mark.parametrize(
    "fault", ["unsupported", "scaled", "another shape", "held twice", "a family"]
)
def test_a_live_engine_is_refused(sources: Sources, fault: str) -> None:
    """On every rank, by `attach` and by `load`, and the engine trains on as before."""
    said = sources.ranks.run(2, autotp_jobs.refused, Auto("llama", 2, 1), fault)
    for rank in said:
        assert rank["same losses"], rank
        for message in rank["messages"]:
            assert rank["words"] in message and "what to do:" in message, message


def test_adapters_that_autotp_drops(sources: Sources) -> None:
    """It puts its layers in the place of peft's; with ZeRO DeepSpeed itself fails then."""
    for messages in sources.ranks.run(2, autotp_jobs.without_adapters):
        for message in messages:
            assert message.startswith("UnsupportedError: the optimizer steps parameters")
            assert "drops their adapters" in message


def test_from_and_to_a_hugging_face_folder(sources: Sources, tmp_path: Path) -> None:
    """A folder fills a live engine, each rank its own rows; the live engine writes the same."""
    folder = Path(saved(sources, "llama", (1, 1, 3))) / "filled"
    ucp.export_hf(folder, tmp_path / "in", dtype="float32")
    setup = Auto("llama", 2, 1, seed=9)
    wrong = sources.ranks.run(4, autotp_jobs.from_hugging_face, setup, str(tmp_path))
    assert wrong == [[]] * 4
    ours, theirs = twins.read(tmp_path / "in"), twins.read(tmp_path / "out")
    assert {*ours} == {*theirs} and len(ours) > 10
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_files_without_a_manifest_resume(sources: Sources, stock: Any, tmp_path: Path) -> None:
    """As stock DeepSpeed writes them, at ZeRO 1."""
    folder, _ = stock("llama", (2, 2, 1))
    origin = Path(saved(sources, "llama", (2, 2, 1)))
    shutil.copy(origin / "oracle.pt", folder.parent)
    setup = Auto("llama", 4, 2, seed=9)
    found = sources.resume(4, setup, str(folder.parent), tags=("trained",))
    assert all(rank["differences"]["trained"] == [] for rank in found)
