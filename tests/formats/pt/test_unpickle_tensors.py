"""Hostile storages and tensors in pickles: whatever does not lie inside of its storage is refused.
And the tensors of a value that was read are replaced."""

import collections

import pytest

from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.pt.refs import StorageRef, TensorRef
from megatron_ucp.formats.pt.unpickle import loads, with_tensors
from tests.formats.craft import (
    call,
    named,
    number,
    numbers,
    pickle_of,
    storage,
    tensor,
    text,
    tuple_of,
)

NONE = b"N"


def pid(*items: bytes) -> bytes:
    return tuple_of(*items) + b"Q"


FLOAT = named("torch.FloatStorage")
STORAGES = {
    "no tuple": text("storage") + b"Q",
    "four fields": pid(text("storage"), FLOAT, text("0"), text("cpu")),
    "another word": pid(text("module"), FLOAT, text("0"), text("cpu"), number(1)),
    "class as text": pid(text("storage"), text("FloatStorage"), text("0"), text("cpu"), number(1)),
    "class that is none": pid(
        text("storage"), named("torch.Tensor"), text("0"), text("cpu"), number(1)
    ),
    "number as key": pid(text("storage"), FLOAT, number(0), text("cpu"), number(1)),
    "negative": storage(elems=-1),
    "2**64 elements": storage(elems=2**64),
    "elements as text": pid(text("storage"), FLOAT, text("0"), text("cpu"), text("1")),
    "elements as bool": pid(text("storage"), FLOAT, text("0"), text("cpu"), b"\x88"),
    "elements as float": pid(text("storage"), FLOAT, text("0"), text("cpu"), b"G" + b"\0" * 8),
    "no location": pid(text("storage"), FLOAT, text("0"), NONE, number(1)),
    "two sizes": tuple_of(storage(elems=1), storage(elems=2)),
    "two kinds": tuple_of(storage(), storage(kind="torch.IntStorage")),
    **{
        f"key {key!r}": storage(key=key)
        for key in ("", "..", "../1", "a/b", "/etc/passwd", "a\0", "a\n", "é", "x" * 101)
    },
}


@pytest.mark.parametrize("body", STORAGES.values(), ids=STORAGES.keys())
def test_malformed_storages(body: bytes) -> None:
    with pytest.raises(DamagedFileError, match="storage"):
        loads(pickle_of(body), file="x")


ROWS: dict[str, tuple[int, bytes, bytes]] = {
    "offset past the end": (10, numbers(1), numbers(1)),
    "negative offset": (-1, numbers(1), numbers(1)),
    "too long": (0, numbers(11), numbers(1)),
    "too wide a stride": (0, numbers(2), numbers(10)),
    "negative size": (0, numbers(-1), numbers(1)),
    "negative stride": (5, numbers(2), numbers(-1)),
    "2**64 sizes": (0, numbers(2**32, 2**32), numbers(2**32, 1)),
    "size 2**63": (0, numbers(2**63), numbers(0)),
    "fewer strides": (0, numbers(1, 1), numbers(1)),
    "more strides": (0, numbers(1), numbers(1, 1)),
    "65 dims": (0, numbers(*[1] * 65), numbers(*[1] * 65)),
    "shape as number": (0, number(3), numbers(1)),
    "shape of texts": (0, tuple_of(text("3")), numbers(1)),
    "shape of bools": (0, tuple_of(b"\x88"), numbers(1)),
    "scalar past the end": (10, b")", b")"),
    "shape of None": (0, NONE, NONE),
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_impossible_tensors(row: tuple[int, bytes, bytes]) -> None:
    with pytest.raises(DamagedFileError):
        loads(pickle_of(tensor(storage(), *row)), file="x")


def test_empty_tensors_need_no_room() -> None:
    value = loads(pickle_of(tensor(storage(elems=0), 0, numbers(0, 5), numbers(5, 1))), file="x")
    assert isinstance(value, TensorRef) and value.numel == 0 and value.is_contiguous


CALLED_WRONGLY = {
    "tensor of no storage": tensor(NONE, 0, numbers(1), numbers(1)),
    "tensor of a tensor": tensor(
        tensor(storage(), 0, numbers(1), numbers(1)), 0, numbers(1), numbers(1)
    ),
    "too few arguments": call("torch._utils._rebuild_tensor_v2", tuple_of(storage(), number(0))),
    "too many arguments": call("torch._utils._rebuild_tensor", tuple_of(*[storage()] * 9)),
    "v3 of odd bytes": call(
        "torch._utils._rebuild_tensor_v3",
        tuple_of(
            storage(elems=3, kind="torch.storage.UntypedStorage"),
            number(0),
            numbers(1),
            numbers(1),
            NONE,
            NONE,
            named("torch.uint16"),
        ),
    ),
    "v3 of an unknown dtype": call(
        "torch._utils._rebuild_tensor_v3",
        tuple_of(storage(), number(0), numbers(1), numbers(1), NONE, NONE, text("torch.void")),
    ),
    "parameter of a number": call(
        "torch._utils._rebuild_parameter", tuple_of(number(1), NONE, NONE)
    ),
    "subclass": call(
        "torch._tensor._rebuild_from_type_v2",
        tuple_of(
            named("torch._utils._rebuild_tensor"),
            named("torch.Size"),
            tuple_of(storage(), number(0), numbers(1), numbers(1)),
            b"}",
        ),
    ),
    "made by no tensor function": call(
        "torch._tensor._rebuild_from_type_v2",
        tuple_of(named("argparse.Namespace"), named("torch.Tensor"), b")", b"}"),
    ),
    "attributes as text": call(
        "torch._tensor._rebuild_from_type_v2",
        tuple_of(
            named("torch._utils._rebuild_tensor"),
            named("torch.Tensor"),
            tuple_of(storage(), number(0), numbers(1), numbers(1)),
            text("x"),
        ),
    ),
}


@pytest.mark.parametrize("body", CALLED_WRONGLY.values(), ids=CALLED_WRONGLY.keys())
def test_tensor_functions_called_wrongly(body: bytes) -> None:
    with pytest.raises(DamagedFileError):
        loads(pickle_of(body), file="x")


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
    assert isinstance(result, list) and result[0] is result[1]
    assert type(result[3]) is collections.OrderedDict
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
        with_tensors(deep, lambda item: 1)
