"""JSON of values that `coded` did not write is refused, and never becomes a value of another
kind."""

from collections import Counter, OrderedDict
from typing import Any

import pytest

from megatron_ucp.core.values import (
    NOT_CODED,
    DeviceName,
    DtypeName,
    InertObject,
    alike,
    coded,
    decoded,
    numpy_scalar,
    same,
)


def array(dtype: str, shape: Any, data: Any = b"") -> Any:
    return coded(InertObject("numpy.ndarray", (), {"dtype": dtype, "shape": shape, "data": data}))


def tensor(dtype: str, shape: Any, data: Any = b"") -> Any:
    return coded(InertObject("torch.Tensor", (), {"dtype": dtype, "shape": shape, "data": data}))


@pytest.mark.parametrize(
    "data",
    [
        array("O", (1,), bytes(8)),
        array("|O8", (1,), bytes(8)),
        array("O,i4", (1,), bytes(24)),
        array("<i4", (2,), bytes(4)),
        array("<i4", (-1,), bytes(4)),
        array("<i4", [1], bytes(4)),
        coded(InertObject("numpy.dtype", (), {"dtype": "O"})),
        coded(InertObject("numpy.dtype", ("O",))),
        tensor("float32", (10**12,)),
        tensor("float32", (1,), [0]),
        tensor("load", (1,), bytes(4)),
        {"$": "DtypeName", "text": "torch.load"},
        {"$": "DeviceName", "text": "cpu\n"},
        {"$": "name", "name": "builtins.list\n0cposix"},
        coded(InertObject("posix\nsystem")),
        coded(InertObject("program.Kind", made="otherwise")),
        {"$": "timedelta", "args": [10**20]},
        {"$": "deque", "items": [], "maxlen": 10**30},
        {"$": "float", "data": ""},
        {"$": "numpy.scalar", "dtype": "<f4", "data": ""},
        {"$": "numpy.scalar", "dtype": "<U9999999999", "data": "AAAAAAAAAAA="},
        {"$": "slice", "args": [0, {}, 1]},
        {"$": "unknown"},
    ],
)
def test_what_was_not_coded_is_refused(data: Any) -> None:
    with pytest.raises(NOT_CODED):
        decoded({"a": [data]})


def test_what_was_coded_comes_back() -> None:
    for value in (
        InertObject("numpy.ndarray", (), {"dtype": "<U3", "shape": (2,), "data": bytes(24)}),
        InertObject("torch.Tensor", (), {"dtype": "bfloat16", "shape": (2, 1), "data": bytes(4)}),
        InertObject("torch.Tensor", (), {"dtype": "float8_e4m3fn", "shape": (), "data": b"a"}),
        InertObject("torch.Tensor", (), {"dtype": "bool", "shape": (0, 5), "data": b""}),
        InertObject("program-of-mine.f.<locals>.Kind", ("A",), {"a": 1}, made="new"),
        numpy_scalar("<U0", b""),
        numpy_scalar("|S2", b"a\0"),
    ):
        assert coded(decoded(coded(value))) == coded(value)


def test_a_name_is_another_key_than_its_text() -> None:
    for name in (DtypeName("torch.float32"), DeviceName("cpu")):
        both = {str(name): 1, name: 2}
        assert len(both) == 2 == len({name, str(name)}) and name == type(name)(str(name))
        assert str(name) != name and list(decoded(coded(both)).values()) == [1, 2]
        assert same(decoded(coded(both)), both) and not same(name, str(name))
        assert alike([name], [str(name)]), "as manifests of version 2 have it"


def test_the_order_of_a_mapping_counts_where_it_says_something() -> None:
    pairs: list[tuple[Any, Any]] = [((1, 2), 1), ("a", {"x": 1, 3: 2})]
    other: list[tuple[Any, Any]] = [("a", {3: 2, "x": 1}), ((1, 2), 1)]
    assert same(dict(pairs), dict(other)) and same(
        Counter({(1,): 1, "b": 2}), Counter({"b": 2, (1,): 1})
    )
    assert not same(OrderedDict(pairs), OrderedDict(other))
    assert not same(dict(pairs), dict(pairs[:1])) and not same([1, 2], [2, 1])
