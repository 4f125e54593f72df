"""The pickle of a file that this package writes in the place of `torch.save`: torch's own is the
oracle, byte for byte."""

import gc
import io
import warnings
import weakref
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ucp.engines import pt_files
from megatron_ucp.engines.pt_files import live_archive


def _torchs_own(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    with zipfile.ZipFile(out) as archive:
        return archive.read("archive/data.pkl")


def _ours(value: object) -> bytes:
    return live_archive(value, Path("archive.pt")).layout.known[0]


def _with_attribute() -> torch.Tensor:
    tensor = torch.zeros(3)
    tensor.label = "of somebody's own"  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def _with_hook() -> torch.Tensor:
    tensor = torch.zeros(3, requires_grad=True)
    tensor.register_hook(lambda grad: grad)
    return tensor


class _OwnTensor(torch.Tensor):
    """A subclass, as libraries have for quantized weights."""


_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16),
    *(torch.complex64, torch.complex128),
]
_FLAT = torch.arange(24.0)
_VALUES: dict[str, Any] = {
    **{str(dtype): torch.zeros(2, 3, dtype=dtype) for dtype in _DTYPES},
    "views of one storage": OrderedDict(a=_FLAT[:6].view(2, 3), b=_FLAT[6:], c=_FLAT[::2]),
    "one tensor twice": [_FLAT, _FLAT, {"again": _FLAT}],
    "transposed": torch.zeros(2, 3).t(),
    "empty, twice": [torch.empty(0), torch.empty(0, 4), torch.tensor(3)],
    "with gradient": torch.zeros(2, requires_grad=True),
    "parameters": torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2))] * 2).state_dict(),
    "a parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "an attribute": _with_attribute(),
    "a subclass": torch.zeros(2).as_subclass(_OwnTensor),
    "conjugate": torch.zeros(2, dtype=torch.complex64).conj(),
    "negative": torch.zeros(2, dtype=torch.complex64).conj().imag,
    "sparse": torch.eye(3).to_sparse(),
    "meta": torch.empty(3, device="meta"),
    "a storage": [_FLAT.untyped_storage(), _FLAT[:2].view(torch.uint8).untyped_storage()],
    "a typed storage": [_FLAT._typed_storage(), _FLAT[3:]],
    "no tensor": {"step": 3, "lr": [0.5, None], "shape": torch.Size([2, 3]), "dtype": torch.int8},
}


@pytest.mark.parametrize("name", _VALUES)
def test_a_pickle_is_that_of_torch(name: str) -> None:
    assert _ours(_VALUES[name]) == _torchs_own(_VALUES[name])


def test_a_tensor_with_a_hook_is_warned_of_as_torch_does() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = _ours(_with_hook())
    assert any("hooks" in str(one.message) for one in caught)
    with pytest.warns(UserWarning, match="hooks"):
        assert ours == _torchs_own(_with_hook())


def test_memory_under_two_dtypes_is_refused_as_torch_does() -> None:
    value = [_FLAT, _FLAT.view(torch.int32)]
    with pytest.raises(RuntimeError, match="view the same data as different types"):
        _torchs_own(value)
    with pytest.raises(RuntimeError, match="two tensors of different dtypes share their memory"):
        _ours(value)


def test_plain_tensors_are_not_reduced_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"a": torch.zeros(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    want = _torchs_own(value)

    def refuse(self: torch.Tensor, protocol: int) -> Any:
        raise AssertionError("torch was asked")

    monkeypatch.setattr(torch.Tensor, "__reduce_ex__", refuse)
    assert _ours(value) == want
    with pytest.raises(AssertionError, match="torch was asked"):
        _ours(torch.zeros(2, dtype=torch.complex64).conj())


def test_the_comparison_finds_another_class_of_storages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pt_files._KINDS, torch.float32, torch.DoubleStorage)
    assert _ours(torch.zeros(3)) != _torchs_own(torch.zeros(3))
    assert _ours(torch.zeros(3, dtype=torch.int8)) == _torchs_own(torch.zeros(3, dtype=torch.int8))


def test_nothing_of_a_value_is_kept_once_it_is_pickled() -> None:
    tensor, kept = torch.zeros(3), torch.zeros(3)
    alive, known = weakref.ref(tensor), weakref.ref(kept)
    gc.disable()  # a circle of references would keep the tensor until it runs
    try:
        live_archive([tensor, kept], Path("archive.pt"))
        del tensor
        assert alive() is None and known() is kept
    finally:
        gc.enable()
