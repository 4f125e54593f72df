"""Files that `pt_writer` wrote, read by torch, by Python's zipfile and by our own reader."""

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ucp.errors import PlanError, UnsupportedError
from megatron_ucp.formats.pt import archive as pt_writer
from megatron_ucp.formats.pt.archive import contiguous, write_pt
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.pt.pickle import dumps
from megatron_ucp.formats.pt.refs import ITEMSIZE, InertObject, StorageRef, TensorRef
from megatron_ucp.formats.pt.unpickle import loads

SCALER = "deepspeed.runtime.fp16.loss_scaler.LossScaler"


def data_of(storage: StorageRef) -> bytes:
    """Bytes that depend on the key, ordinary numbers in every dtype."""
    return bytes((7 * i + sum(storage.key.encode())) % 60 for i in range(storage.size_bytes))


def write(path: Path, tree: object) -> Path:
    write_pt(path, tree, lambda storage: [data_of(storage)[:5], memoryview(data_of(storage))[5:]])
    return path


def tree_of_everything() -> dict[str, Any]:
    shared = StorageRef("both", "float32", 24)
    return {
        "none": None,
        "yes": True,
        "no": False,
        "numbers": [0, -1, 2**31 - 1, -(2**31), 2**31, -(2**63), 2**70, 0.5, -1e300],
        "text": "é\n\0 'x'",
        "bytes": b"\0\xff\n",
        "empty": [[], (), {}, ""],
        "nested": ({"a": [(1, 2), {"b": (3,)}]},),
        7: "a number as key",
        ("a", 1): "a tuple as key",
        "ordered": OrderedDict([("z", 1), ("a", OrderedDict())]),
        "set": {1, 2},
        "tensors": {
            dtype: contiguous(f"of_{dtype}", dtype, (2, 3))
            for dtype in (
                "float32",
                "bfloat16",
                "float16",
                "int64",
                "bool",
                "uint8",
                "float64",
                "int32",
            )
        },
        "views": [
            TensorRef(shared, 0, (4, 6), (6, 1)),
            TensorRef(shared, 3, (2, 2), (1, 6)),
            TensorRef(shared, 0, (), ()),
        ],
        "no elements": contiguous("nothing", "float32", (0, 3)),
    }


def test_torch_reads_it_with_its_safe_unpickler(tmp_path: Path) -> None:
    tree = tree_of_everything()
    found = torch.load(write(tmp_path / "file.pt", tree), weights_only=True)
    plain = [key for key in tree if key not in ("tensors", "views", "no elements")]
    assert [found[key] for key in plain] == [tree[key] for key in plain] and list(found) == list(
        tree
    )
    assert list(found["ordered"]) == ["z", "a"] and type(found["ordered"]) is OrderedDict
    for dtype, ref in tree["tensors"].items():
        tensor = found["tensors"][dtype]
        assert tensor.dtype == getattr(torch, dtype) and tuple(tensor.shape) == ref.shape
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == data_of(ref.storage)
    first, second, third = found["views"]
    assert (
        first.untyped_storage().data_ptr()
        == second.untyped_storage().data_ptr()
        == third.untyped_storage().data_ptr()
    )
    assert (
        torch.equal(second, torch.stack([first.flatten()[3::6][:2], first.flatten()[4::6][:2]]))
        and third == first[0, 0]
    )
    assert found["no elements"].shape == (0, 3)


def test_our_reader_gives_the_same_tree_back_and_every_crc_holds(tmp_path: Path) -> None:
    tree = tree_of_everything()
    with PtFile(write(tmp_path / "file.pt", tree)) as file:
        assert file.tree == tree and file.has_checksums
        for name in file.records:
            file.check(file.records[name])
        for ref in tree["tensors"].values():
            assert file.record(ref.storage).offset_bytes % pt_writer.RECORD_ALIGNMENT == 0


@pytest.mark.slow
def test_a_file_of_more_than_four_gigabytes(tmp_path: Path) -> None:
    block = bytes(2**26)
    large, last = contiguous("large", "uint8", (2**32 + 2**26,)), contiguous("last", "uint8", (3,))
    write_pt(
        tmp_path / "large.pt",
        {"large": large, "last": last},
        lambda storage: [b"abc"] if storage.key == "last" else (block for _ in range(65)),
    )
    with zipfile.ZipFile(tmp_path / "large.pt") as archive:
        assert archive.testzip() is None
    with PtFile(tmp_path / "large.pt") as file:
        file.check(file.record(large.storage))
    found = torch.load(tmp_path / "large.pt", weights_only=True, mmap=True)
    assert found["last"].tolist() == list(b"abc") and found["large"].numel() == 2**32 + 2**26


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(VALUES)
@settings(max_examples=300, deadline=None)
def test_any_plain_value_comes_back(value: object) -> None:
    assert loads(dumps(value), file="") == value


def test_objects_of_known_classes_come_back_with_their_attributes(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import LossScaler

    found = torch.load(
        write(
            tmp_path / "file.pt",
            {"scaler": InertObject(SCALER, (), {"cur_scale": 8.0, "dynamic": False})},
        ),
        weights_only=False,
    )
    assert type(found["scaler"]) is LossScaler and found["scaler"].__dict__ == {
        "cur_scale": 8.0,
        "dynamic": False,
    }


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {"a": memoryview(b"")},
        [type],
        TensorRef(StorageRef("a", "uint64", 1), 0, (1,), (1,)),
    ],
)
def test_what_can_not_be_written_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(UnsupportedError, match="can't be written"):
        write(tmp_path / "file.pt", value)


def test_a_payload_of_another_size_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="another number of bytes"):
        write_pt(tmp_path / "file.pt", contiguous("a", "float32", (4,)), lambda _: [bytes(15)])


def test_dtypes_that_can_be_written() -> None:
    written = []
    for dtype in ITEMSIZE:
        try:
            dumps(contiguous("a", dtype, (1,)))
            written.append(dtype)
        except UnsupportedError:
            continue
    assert {"float32", "bfloat16", "float16", "float64", "int64", "int32", "bool", "uint8"} <= set(
        written
    )
