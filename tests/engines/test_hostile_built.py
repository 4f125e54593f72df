"""Malformed values of files become no live values: an error with a name, and no other function,
address or size."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.core.values import DeviceName, DtypeName, InertObject, coded, numpy_scalar
from megatron_ucp.engines.values import Values
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats import per_rank
from megatron_ucp.formats.folder import LocalFolder
from megatron_ucp.formats.manifest_beside import ManifestBeside
from megatron_ucp.formats.per_rank import OwnValues, listed, recorded_of, text_of


def array(dtype: str, shape: Any, data: Any) -> InertObject:
    return InertObject("numpy.ndarray", (), {"dtype": dtype, "shape": shape, "data": data})


@pytest.mark.parametrize(
    "value",
    [
        array("O", (1,), bytes(8)),
        array("O,i4", (1,), bytes(24)),
        array("<i4", (2,), bytes(4)),
        array("<f3", (1,), bytes(3)),
        InertObject("numpy.dtype", (), {"dtype": "O"}),
        InertObject("torch.Tensor", (), {"dtype": "float32", "shape": (10**12,), "data": b""}),
        DtypeName("torch.load"),
        DtypeName("torch.int3"),
        DeviceName("zzz"),
        DeviceName("cpu:0:0"),
    ],
)
def test_a_malformed_value_is_refused_by_name(value: object) -> None:
    with pytest.raises(DamagedFileError, match="malformed") as caught:
        Values("main.pt").built({"a": [value]}, "client_state")
    assert caught.value.file == "main.pt" and "client_state" in str(caught.value)


def test_good_ones_are_built() -> None:
    def of(value: object) -> Any:
        return Values("").built(value, "")

    assert of(DtypeName("torch.float16")) is torch.float16
    assert of(DeviceName("cpu")) == torch.device("cpu")
    assert of(array("<U2", (1,), "ab".encode("utf-32-le"))).tolist() == ["ab"]
    assert of(array("<f4", (0, 3), b"")).shape == (0, 3)
    empty = of(numpy_scalar("<U0", b""))
    assert type(empty) is np.str_ and empty == ""


def test_what_differs_from_rank_to_rank_is_lists_of_keys() -> None:
    for said in (
        {"buffers": range(10**12), "client_state": [], "lr_scheduler": False},
        {"buffers": [], "client_state": range(10**12), "lr_scheduler": False},
        {"buffers": [1], "client_state": [], "lr_scheduler": False},
        {"buffers": [], "client_state": [[]], "lr_scheduler": False},
        range(3),
    ):
        manifest: Any = SimpleNamespace(run={"per_rank": said})
        with pytest.raises(DamagedFileError, match="rank to rank"):
            listed(manifest)


def test_values_of_a_rank_that_can_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    good = json.loads(text_of(OwnValues({}, {"a": 1})))
    for wrong in (
        {"$": "timedelta", "args": [10**20]},
        {"$": "float", "data": ""},
        {"$": "InertObject"},
        coded(array("O", (1,), bytes(8))),
    ):
        text = json.dumps({**good, "lr_scheduler": wrong}).encode()
        with pytest.raises(DamagedFileError, match="of a rank can't be read"):
            recorded_of(text, "x")
    monkeypatch.setattr(per_rank, "MAX_VALUES", 3)
    with pytest.raises(DamagedFileError, match="are read"):
        recorded_of(json.dumps(good).encode(), "x")


def test_a_ranks_file_may_be_larger_than_a_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = ManifestBeside(LocalFolder(tmp_path), ())
    assert not (tmp_path / FILE_NAME).exists()
    name = per_rank.file_name(0)
    entry: Any = SimpleNamespace(size_bytes=0, sha256="")
    beside.files = {name: entry, "other.json": entry}
    monkeypatch.setattr(beside, "compare", lambda *_: None)
    monkeypatch.setattr("megatron_ucp.formats.manifest_beside.MAX_BYTES", 10)
    for one in (name, "other.json"):
        (tmp_path / one).write_bytes(bytes(1000))
    assert beside.read(name) == bytes(1000)
    with pytest.raises(DamagedFileError, match="larger"):
        beside.read("other.json")
