"""Replacing the tensors of a value that was read."""

import collections

import pytest

from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.pt.refs import StorageRef, TensorRef
from megatron_ucp.formats.pt.unpickle import with_tensors


def ref(key: str) -> TensorRef:
    return TensorRef(StorageRef(key, "float32", 1), 0, (1,), (1,))


def test_resolve_replaces_tensors_and_keeps_types_and_sharing() -> None:
    shared, calls = ref("a"), []
    part = {"w": shared}
    source = [
        part,
        part,
        (shared, 1),
        collections.OrderedDict(b=ref("b")),
        InertObject("a.B", (shared,), {"s": ref("c")}),
        collections.defaultdict(list, {1: shared}),
        collections.deque([shared, 2], 3),
        collections.Counter({5: 2}),
    ]

    def convert(item: TensorRef) -> str:
        calls.append(item)
        return item.storage.key

    result = with_tensors(source, convert)
    assert result == [
        {"w": "a"},
        {"w": "a"},
        ("a", 1),
        {"b": "b"},
        InertObject("a.B", ("a",), {"s": "c"}),
        {1: "a"},
        collections.deque(["a", 2]),
        {5: 2},
    ]
    assert (
        isinstance(result, list)
        and result[0] is result[1]
        and type(result[3]) is collections.OrderedDict
    )
    assert isinstance(result[5], collections.defaultdict) and result[5].default_factory is list
    assert isinstance(result[6], collections.deque) and result[6].maxlen == 3
    assert type(result[7]) is collections.Counter
    assert [item.storage.key for item in calls] == ["a", "b", "c"]
    assert (
        part == {"w": shared} and isinstance(source[4], InertObject) and source[4].args == (shared,)
    )


def test_resolve_of_cycles_and_of_shared_doublings_ends() -> None:
    value: list[object] = [ref("a")]
    value.append((value,))
    result = with_tensors(value, lambda item: 1)
    assert isinstance(result, list) and result[0] == 1 and result[1][0] is result
    doubled: object = [ref("a")]
    for _ in range(60):
        doubled = [doubled, doubled]
    with_tensors(doubled, lambda item: 1)  # without the memo this would never end


def test_resolve_limits_depth() -> None:
    deep: object = ref("a")
    for _ in range(150):
        deep = [deep]
    with pytest.raises(DamagedFileError, match="nested too deeply"):
        with_tensors(deep, lambda item: 1, file="x.pt")
    assert with_tensors(deep, lambda item: 1, max_depth=200)
