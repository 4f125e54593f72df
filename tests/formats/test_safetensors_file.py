"""safetensors files: read as the library reads them, and every lie of a header is a named error."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    ModelMismatchError,
    NotFoundError,
    UsageError,
)
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.folder import LocalFolder
from megatron_ucp.formats.hugging_face.checkpoint import (
    HuggingFaceCheckpoint,
    HuggingFaceFormat,
    parse_size,
    shards_of,
)
from megatron_ucp.formats.hugging_face.safetensors_file import DTYPES, SafetensorsFile, header_of
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import read_state

TENSORS = {
    "a.weight": torch.arange(6.0).view(2, 3),
    "b.weight": torch.arange(4, dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 3),
}


def write(path: Path, tree: Any, data: bytes, size: int | None = None) -> Path:
    text = tree if isinstance(tree, bytes) else json.dumps(tree).encode()
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
    return path


def entry(first: int, last: int, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def test_headers_are_the_librarys_own() -> None:
    every = {
        f"{name}{number}": torch.zeros(3, 2, dtype=getattr(torch, dtype))
        for number, dtype in enumerate(DTYPES.values())
        for name in ("b", "a.x", "ü")
    }
    for tensors in (every, TENSORS, {"one": torch.zeros(())}):
        rows = [(n, str(t.dtype)[6:], tuple(t.shape)) for n, t in tensors.items()]
        header, places = header_of(rows)
        data = save(tensors, metadata={"format": "pt"})
        assert data[: len(header)] == header
        assert len(data) == len(header) + sum(t.nbytes for t in tensors.values())
        for name, tensor in tensors.items():
            raw = bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
            assert data[places[name] :].startswith(raw)


def test_what_the_library_wrote_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as found:
        assert {n: s.shape for n, s in found.manifest.by_name.items()} == {
            name: tuple(tensor.shape) for name, tensor in TENSORS.items()
        }
        for name, tensor in TENSORS.items():
            have = read_state(found, name, "value")
            assert have.dtype == tensor.dtype and torch.equal(have, tensor.reshape(-1))


LIES: dict[str, tuple[Any, bytes, str]] = {
    "a gap": ({"a": entry(0, 8), "b": entry(12, 20)}, bytes(20), "leave a gap"),
    "an overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12), "overlap"),
    "the same bytes": ({"a": entry(0, 8), "b": entry(0, 8)}, bytes(8), "overlap"),
    "more than there is": ({"a": entry(0, 8)}, bytes(4), "do not fill"),
    "less than there is": ({"a": entry(0, 8)}, bytes(9), "do not fill"),
    "another shape": ({"a": entry(0, 8, (3,))}, bytes(8), "another number of bytes"),
    "a huge shape": ({"a": entry(0, 8, (2**62, 2**62))}, bytes(8), "another number"),
    "a negative size": ({"a": entry(0, 8, (-2,))}, bytes(8), "no sizes"),
    "a size that is true": ({"a": entry(0, 8, (True, 2))}, bytes(8), "no sizes"),
    "a fraction": ({"a": entry(0, 8, (2.0,))}, bytes(8), "no sizes"),
    "backwards": ({"a": entry(8, 0)}, bytes(8), "another number of bytes"),
    "another dtype": ({"a": entry(0, 8, dtype="F4")}, bytes(8), "dtype of a is not known"),
    "a dtype that is a list": ({"a": entry(0, 8, dtype=["F32"])}, bytes(8), "is not known"),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8), "does not say"),
    "a list": ([1, 2], b"", "no JSON object"),
    "no JSON": (b"{" * 2000, b"", "no JSON"),
    "twice": (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":'
        b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"0",
        "no JSON",
    ),
    "metadata": ({"__metadata__": {"format": 1}}, b"", "metadata"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies(tmp_path: Path, lie: str) -> None:
    tree, data, problem = LIES[lie]
    path = write(tmp_path / "model.safetensors", tree, data)
    with pytest.raises(DamagedFileError, match=problem) as raised:
        SafetensorsFile(path)
    assert raised.value.file == str(path) and len(str(raised.value)) < 1000


@pytest.mark.parametrize("size", [2**63, 2**64 - 1, 1000, 100_000_001])
def test_a_header_that_is_larger_than_the_file(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "x.safetensors", {}, b"", size)
    with pytest.raises(DamagedFileError, match="does not lie in it"):
        SafetensorsFile(path)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"123")
    with pytest.raises(DamagedFileError, match="truncated"):
        SafetensorsFile(tmp_path / "x")
    with pytest.raises(NotFoundError):
        SafetensorsFile(tmp_path / "y")
    with pytest.raises(DamagedFileError, match="no regular file"):
        SafetensorsFile(tmp_path)


def indexed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Two files and their index, which `change` edits."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file({"a": torch.zeros(2)}, folder / names[0])
    save_file({"b": torch.ones(3)}, folder / names[1])
    tree: dict[str, Any] = {"metadata": {}, "weight_map": dict(zip("ab", names, strict=True))}
    change(tree)
    (folder / "model.safetensors.index.json").write_text(json.dumps(tree))
    return folder


def test_an_index(tmp_path: Path) -> None:
    with open_checkpoint(indexed(tmp_path, lambda tree: None)) as found:
        assert [*found.manifest.by_name] == ["a", "b"] and len(found.file_names) == 2


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        (lambda t: t["weight_map"].pop("b"), None, ""),
        (lambda t: t["weight_map"].update(c=t["weight_map"]["a"]), ForeignFileError, "no file"),
        (lambda t: t["weight_map"].update(b=t["weight_map"]["a"]), ForeignFileError, "no file"),
        (lambda t: t.update(weight_map={"c": t["weight_map"]["b"]}), ForeignFileError, "where it"),
        (lambda t: t["weight_map"].update(a="x.safetensors"), NotFoundError, "does not exist"),
        (lambda t: t["weight_map"].update(a="../x.safetensors"), DamagedFileError, "no files"),
        (lambda t: t.pop("weight_map"), DamagedFileError, "no files"),
        (lambda t: t.update(weight_map={"a": 1}), DamagedFileError, "no files"),
    ],
)
def test_an_index_that_lies(
    tmp_path: Path, change: Any, error: type[Exception] | None, problem: str
) -> None:
    folder = indexed(tmp_path, change)
    if error is None:  # a file that the index does not name is none of the model's
        with open_checkpoint(folder) as found:
            assert [*found.manifest.by_name] == ["a"]
        return
    with pytest.raises(error, match=problem):
        open_checkpoint(folder)


def test_all_faults_of_a_family_in_one_error(tmp_path: Path) -> None:
    from megatron_ucp.families import find_family
    from tests.reshard import twins

    model = twins.model("llama")
    held = {name: value.contiguous() for name, value in twins.expected(model).items()}
    held["surprise"] = torch.zeros(2)
    del held["model.norm.weight"]
    name = "model.layers.1.mlp.up_proj.weight"
    held[name] = held[name][:-1].contiguous()
    other = "model.layers.0.mlp.down_proj.weight"
    held[other] = held[other].to(torch.int8)
    held["lm_head.weight"] = held["lm_head.weight"][:-1].contiguous()
    save_file(held, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"vocab_size": 45}')
    family = find_family("llama")
    assert family.hugging_face is not None
    shares = family.hugging_face.tensors(twins.LLAMA)
    specs = {n: d.spec(n, "float32") for n, d in family.table(twins.LLAMA).items()}
    with pytest.raises(ModelMismatchError) as raised:
        HuggingFaceFormat().open(LocalFolder(tmp_path), CallerModel(specs=specs, shares=shares))
    said = str(raised.value.found)
    for fault in (
        "model.norm.weight: missing",
        "surprise: not known",
        f"{name}: [23, 16] instead of [24, 16]",
        f"{other}: int8",
        "lm_head.weight: [44, 16] instead of [45, 16]",
    ):
        assert fault in said
    assert "5 faults" in said


def test_a_trainers_folder_is_deepspeeds(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert HuggingFaceFormat().recognises(LocalFolder(tmp_path))
    (tmp_path / "latest").write_text("global_step3")
    assert not HuggingFaceFormat().recognises(LocalFolder(tmp_path))


def test_files_are_divided_as_by_the_library() -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    for limit in (1, 7, 16, 40, 64, 1000):
        held = {f"l.{n}.w": torch.zeros(n % 5 + 1, 2) for n in range(12)}
        theirs = split_torch_state_dict_into_shards(held, max_shard_size=limit)
        rows = [(n, "float32", tuple(t.shape)) for n, t in reversed(held.items())]
        ours = shards_of(rows, limit)
        assert {f.name: sorted(f.places) for f in ours} == {
            name: sorted(names) for name, names in theirs.filename_to_tensors.items()
        }


def test_sizes_of_files() -> None:
    assert [parse_size(one) for one in ("5GB", "1.5 mb", 7, "12")] == [5 * 10**9, 1500000, 7, 12]
    for wrong in ("", "GB", "-1GB", "0", "5XB", "1e9"):
        with pytest.raises(UsageError):
            parse_size(wrong)


def test_a_closed_checkpoint_closes_its_files(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with HuggingFaceCheckpoint(LocalFolder(tmp_path), CallerModel()) as found:
        file = found.file("model.safetensors")
        assert file.stored.fd >= 0
    with pytest.raises(UsageError):
        file.stored.fd  # noqa: B018
