"""Folders of Hugging Face models in which something lies otherwise than save_pretrained leaves it:
each cause by its name, and each advice walked to its end."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.errors import ForeignFileError, NotFoundError, UcpError
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.formats.store import Location
from tests.places import Place

TENSORS = {f"layers.{n}.weight": torch.full((2, 3), float(n)) for n in range(3)}
INDEX = "model.safetensors.index.json"


def shards(folder: Path, stem: str = "model", index: str = INDEX) -> Path:
    """A tensor in each shard."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{stem}-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    for name, (tensor, value) in zip(names, TENSORS.items(), strict=True):
        save_file({tensor: value}, folder / name, {"format": "pt"})
    where = dict(zip(TENSORS, names, strict=True))
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def one_file(folder: Path, name: str = "model.safetensors", times: float = 1.0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({n: t * times for n, t in TENSORS.items()}, folder / name, {"format": "pt"})
    return folder


def refusal(folder: Location, error: type[UcpError] = NotFoundError) -> str:
    with pytest.raises(error) as raised:
        open_checkpoint(folder)
    return str(raised.value)


def notes(folder: Location) -> str:
    with open_checkpoint(folder) as found:
        return "\n".join(found.notes)


def test_a_variant_is_named_and_the_advice_leads_on(tmp_path: Path) -> None:
    folder = one_file(tmp_path / "m", "model.fp16.safetensors")
    said = refusal(folder)
    assert "a variant of a model" in said and "found: model.fp16.safetensors" in said
    assert "make a link to it" in said and "latest" not in said
    (folder / "model.safetensors").symlink_to("model.fp16.safetensors")
    with open_checkpoint(folder) as found:
        assert {*found.manifest.by_name} == {*TENSORS}


@pytest.mark.parametrize(
    "name", ["consolidated.safetensors", "model.fp8-00001-of-00001.safetensors"]
)
def test_other_names(tmp_path: Path, name: str, place: Place) -> None:
    said = refusal(place(one_file(tmp_path / "m", name)))
    assert f"found: {name}" in said and "under another name" in said


def test_shards_without_their_index(tmp_path: Path, place: Place) -> None:
    """All of them are read; of which one is missing, none."""
    folder = shards(tmp_path / "m")
    with_index = notes(place(folder))
    (folder / INDEX).unlink()
    assert f"there is no {INDEX}: all of the 3 shards were read" in notes(place(folder))
    assert INDEX not in with_index
    with open_checkpoint(place(folder)) as found:
        assert {*found.manifest.by_name} == {*TENSORS}
    (folder / "model-00002-of-00003.safetensors").unlink()
    said = refusal(place(folder))
    assert "not all of them" in said and "model-00001-of-00003.safetensors" in said


def test_a_tensor_in_two_shards(tmp_path: Path, place: Place) -> None:
    folder = shards(tmp_path / "m")
    (folder / INDEX).unlink()
    save_file(TENSORS, folder / "model-00003-of-00003.safetensors", {"format": "pt"})
    assert "two shards hold a tensor" in refusal(place(folder), ForeignFileError)


@pytest.mark.parametrize("also", [shards, lambda f: one_file(f, "adapter_model.safetensors")])
def test_two_sets_of_weights(tmp_path: Path, also: Callable[[Path], Path], place: Place) -> None:
    """transformers takes model.safetensors: so do we, and say so."""
    folder = also(one_file(tmp_path / "m", times=5))
    assert "model.safetensors is read, as transformers does; not" in notes(place(folder))
    assert "is read" not in notes(place(one_file(tmp_path / "alone")))


def test_tensors_of_size_0(tmp_path: Path, place: Place) -> None:
    """As save_pretrained leaves them under ZeRO-3: none is ever a value. A model may have an empty
    buffer."""
    folder = tmp_path / "m"
    folder.mkdir()
    empty = {**TENSORS, "layers.1.weight": torch.empty(0), "empty": torch.empty(0)}
    save_file(empty, folder / "model.safetensors", {"format": "pt"})
    said = refusal(place(folder), ForeignFileError)
    assert "ZeRO-3" in said and "1 of 4 tensors" in said and "layers.1.weight" in said
    specs = tuple(ParamSpec(name, tuple(t.shape), "float32", "buffer") for name, t in empty.items())
    like = Manifest(Keeper.ZERO_3, Mesh(), specs, ())
    with open_checkpoint(place(folder), told=CallerModel(like=like)) as found:
        assert found.manifest.by_name["empty"].elems == 0


def test_the_root_of_a_cache(tmp_path: Path) -> None:
    root = tmp_path / "models--a--b"
    one_file(root / "snapshots" / "1f")
    (root / "snapshots" / "1f" / "config.json").write_text("{}")
    said = refusal(root)
    assert "the Hub's cache" in said and f"give the folder of one: {root}/snapshots/1f" in said
    with open_checkpoint(root / "snapshots" / "1f") as found:
        assert {*found.manifest.by_name} == {*TENSORS}
