"""Values: what a valid pickle means. Python's pickle, torch, numpy and DeepSpeed are the
oracles."""

import argparse
import collections
import copyreg
import datetime
import io
import pathlib
import pickle
import subprocess
import sys
import types
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ucp.core.values import (
    ClassName,
    DeviceName,
    DtypeName,
    InertObject,
    NumpyScalar,
    Size,
    VersionName,
)
from megatron_ucp.errors import DamagedFileError, UnsafePickleError, UnsupportedError
from megatron_ucp.formats.pt.refs import ITEMSIZE, StorageRef, TensorRef
from megatron_ucp.formats.pt.unpickle import AllowedClasses, SafeUnpickler, loads
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

PROTOCOLS = (2, 3, 4, 5)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=300)
    | st.complex_numbers(allow_nan=False)
)
keys = (
    scalars
    | st.tuples(scalars, scalars)
    | st.frozensets(st.integers(), max_size=4)
    | st.dates()
    | st.timedeltas()
)
values = st.recursive(
    scalars
    | st.sets(keys, max_size=4)
    | st.binary().map(bytearray)
    | st.datetimes(timezones=st.just(datetime.UTC))
    | st.builds(range, st.integers(-9, 9), st.integers(-9, 9))
    | st.builds(slice, st.integers(0, 9)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict)
        | st.dictionaries(keys, inner, max_size=3).map(lambda d: collections.defaultdict(list, d))
        | st.dictionaries(keys, st.integers(), max_size=3).map(collections.Counter)
        | st.builds(collections.deque, st.lists(inner, max_size=3), st.none() | st.integers(0, 4))
    ),
    max_leaves=25,
)


def read(value: object, protocol: int = 2) -> object:
    return loads(pickle.dumps(value, protocol), file="x.pt")


def read_torch(value: object) -> object:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return loads(archive.read("archive/data.pkl"), file="x.pt")


def same(a: object, b: object) -> bool:
    """Equal with equal types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)  # type: ignore[arg-type, index]
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))  # type: ignore[arg-type]
    return a == b


@settings(max_examples=300, deadline=None)
@given(values, st.sampled_from(PROTOCOLS))
def test_plain_values_are_what_pickle_reads(value: object, protocol: int) -> None:
    assert same(read(value, protocol), value)


def test_text_with_lone_surrogates_and_long_texts() -> None:
    for value in ("\ud800x", "é" * 300, "a" * 70_000):
        assert [read(value, protocol) for protocol in PROTOCOLS] == [value] * 4


def test_many_memo_entries_and_shared_objects() -> None:
    shared = [1]
    value = [[text, shared] for text in map(str, range(70_000))]
    for protocol in PROTOCOLS:
        result = read(value, protocol)
        assert result == value and isinstance(result, list) and result[0][1] is result[-1][1]


def test_cycles() -> None:
    value: list[object] = []
    value.append((value, {"me": value}))
    result = read(value)
    assert isinstance(result, list) and result[0][0] is result and result[0][1]["me"] is result


def test_defaultdict_keeps_its_factory_and_refuses_others() -> None:
    result = read(collections.defaultdict(list, {1: [2]}))
    assert isinstance(result, collections.defaultdict) and result.default_factory is list
    with pytest.raises(UnsafePickleError):
        read(collections.defaultdict(pathlib.Path))
    with pytest.raises(DamagedFileError):
        read(collections.defaultdict(str))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_stand_ins_of_the_standard_library(protocol: int) -> None:
    for path in (pathlib.PurePosixPath("/a/b"), pathlib.Path("a"), pathlib.PureWindowsPath("c:/a")):
        found = read(path, protocol)
        assert type(found) is type(path) and found == path
    for kind in (argparse.Namespace, types.SimpleNamespace):
        name = f"{kind.__module__}.{kind.__name__}"
        assert read(kind(lr=1.5), protocol) == InertObject(name, (), {"lr": 1.5})
    kind = read(int, protocol)
    assert isinstance(kind, ClassName) and kind.qualname == "builtins.int"


# what `pickle.dumps` of Python 3.13 writes of {"where": Path("runs/a"), "win":
# PureWindowsPath("c:/x")}, by protocol
OF_PYTHON_3_13 = {
    2: b"\x80\x02}q\x00(X\x05\x00\x00\x00whereq\x01cpathlib._local\nPosixPath\nq\x02X\x06"
    b"\x00\x00\x00runs/aq\x03\x85q\x04Rq\x05X\x03\x00\x00\x00winq\x06cpathlib._local\n"
    b"PureWindowsPath\nq\x07X\x04\x00\x00\x00c:/xq\x08\x85q\tRq\nu.",
    4: b"\x80\x04\x95`\x00\x00\x00\x00\x00\x00\x00}\x94(\x8c\x05where\x94\x8c\x0epathlib._local\x94"
    b"\x8c\tPosixPath\x94\x93\x94\x8c\x06runs/a\x94\x85\x94R\x94\x8c\x03win\x94h\x02\x8c\x0f"
    b"PureWindowsPath\x94\x93\x94\x8c\x04c:/x\x94\x85\x94R\x94u.",
}


@pytest.mark.parametrize("protocol", OF_PYTHON_3_13)
def test_paths_that_python_3_13_pickled(protocol: int) -> None:
    assert loads(OF_PYTHON_3_13[protocol], file="x.pt") == {
        "where": pathlib.PosixPath("runs/a"),
        "win": pathlib.PureWindowsPath("c:/x"),
    }


def test_stand() -> None:
    one = InertObject("a.B", (1,), {"x": 2, "y": [one for one in range(1000)]})
    assert one.get("x") == 2 and one.get("z") is None and one.get("z", 5) == 5
    same = InertObject("a.B", (1,), dict(one.state))
    assert one == same and one != InertObject("a.C", (1,), dict(one.state)) and one != 1
    assert hash(one) == hash(InertObject("a.B", (1,))) and len({one, same}) == 1
    assert "a.B" in repr(one) and "x=2" in repr(one) and len(repr(one)) < 200


def test_repr_of_shared_stands_ends() -> None:
    stand = InertObject("a.B")
    for _ in range(80):
        stand = InertObject("a.B", (stand, stand, stand), {"x": stand})
    assert len(repr(stand)) < 200


# ---- torch ----


def test_storage_classes_and_dtypes() -> None:
    for name, itemsize in ITEMSIZE.items():
        dtype = getattr(torch, name)
        ref = read_torch(torch.zeros(3).to(dtype))
        assert isinstance(ref, TensorRef) and ref.storage == StorageRef("0", name, 3), name
        assert itemsize == dtype.itemsize and ref.storage.size_bytes == 3 * itemsize
        assert read_torch(dtype) == DtypeName(f"torch.{name}")


def test_tensor_geometry() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    cases = {
        "whole": base,
        "row": base[2],
        "column": base[:, 1],
        "transposed": base.T,
        "scalar": base[3, 5],
        "empty": base[:0],
        "expanded": base[:1].expand(3, 6),
        "one": base[1:2, ::6],
        "none": torch.empty(0, 5),
    }
    result = read_torch(cases)
    assert isinstance(result, dict)
    for name, live in cases.items():
        ref = result[name]
        assert ref.shape == tuple(live.shape) and ref.stride == live.stride(), name
        assert ref.offset_elems == live.storage_offset() and ref.numel == live.numel(), name
        assert ref.is_contiguous == live.is_contiguous(), name
    assert len({result[name].storage for name in cases if name != "none"}) == 1


def test_parameters_attributes_and_small_classes() -> None:
    flat = torch.ones(4)
    flat.ds_id = 7  # type: ignore[attr-defined]  # as ZeRO-3's flats, goes through _rebuild_from_type_v2
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    attributed = torch.nn.Parameter(torch.ones(3))
    attributed.sequence_parallel = True  # type: ignore[attr-defined]
    small = [torch.Size([2, 3]), torch.Size([]), torch.device("cuda", 1), torch.device("cpu")]
    result = read_torch([flat, parameter, attributed, *small, torch.__version__])
    assert isinstance(result, list)
    assert [ref.shape for ref in result[:3]] == [(4,), (2, 2), (3,)]
    named = [DeviceName("cuda:1"), DeviceName("cpu"), str(torch.__version__)]
    assert result[3:] == [(2, 3), (), *named]
    kinds = [Size, Size, DeviceName, DeviceName, VersionName]
    assert [type(item) for item in result[3:]] == kinds


def test_old_tensor_form_and_shared_storage() -> None:
    arguments = tuple_of(storage(), number(2), numbers(4), numbers(1))
    old = loads(pickle_of(call("torch._utils._rebuild_tensor", arguments)), file="x")
    assert old == TensorRef(StorageRef("0", "float32", 10), 2, (4,), (1,))


def test_state_dict_metadata_is_left_out() -> None:
    state = torch.nn.Linear(2, 3).state_dict()
    assert hasattr(state, "_metadata")
    result = read_torch(state)
    assert type(result) is collections.OrderedDict and not result.__dict__
    assert list(result) == ["weight", "bias"]


def test_lazy_conjugates_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="conjugate"):
        read_torch(torch.ones(2, dtype=torch.complex64).conj())
    assert isinstance(read_torch(torch.ones(2, dtype=torch.complex64)), TensorRef)


def test_a_tensor_may_end_where_its_storage_ends() -> None:
    assert loads(pickle_of(tensor(storage(), 6, numbers(2, 2), numbers(2, 1))), file="x")
    with pytest.raises(DamagedFileError, match="past its storage"):
        loads(pickle_of(tensor(storage(), 7, numbers(2, 2), numbers(2, 1))), file="x")


# ---- DeepSpeed ----


def test_deepspeed_objects() -> None:
    scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    from deepspeed.checkpoint.universal_checkpoint import SubparamShape
    from deepspeed.runtime.config import DtypeEnum
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    live = scaler.DynamicLossScaler(2**12, 2.0, 1000, 1.0, 2, False, dtype=torch.float16)
    result = read_torch(
        [
            live,
            scaler.LossScaler(2.0),
            ZeroStageEnum.gradients,
            fragment_address(numel=7, start=3),
            SubparamShape(["a"], (2,), 1),
            OffloadDeviceEnum.cpu,
            DtypeEnum.bf16,
        ]
    )
    assert isinstance(result, list)
    dynamic, static, stage, fragment, subparam, device, dtype = result
    assert dynamic.qualname.endswith(".DynamicLossScaler")
    assert dynamic.state == {**live.__dict__, "dtype": DtypeName("torch.float16")}
    assert static.get("cur_scale") == 2.0
    assert (stage, type(stage)) == (2, int)
    assert fragment.state == {"numel": 7, "start": 3}
    assert subparam.state == {"patterns": ["a"], "shape": (2,), "partition_dim": 1}
    assert device.args == ("cpu",) and dtype.qualname == "deepspeed.runtime.config.DtypeEnum"


def test_enum_members_by_name_are_looked_up_nowhere() -> None:
    enum = named("deepspeed.runtime.zero.config.ZeroStageEnum")
    by_name = call("__builtin__.getattr", tuple_of(enum, text("optimizer_states")))
    assert loads(pickle_of(by_name), file="x") == 1
    with pytest.raises(DamagedFileError):
        loads(pickle_of(call("__builtin__.getattr", tuple_of(enum, text("__init__")))), file="x")
    of_another = call("__builtin__.getattr", tuple_of(named("torch.Size"), text("__init__")))
    with pytest.raises(UnsafePickleError):
        loads(pickle_of(of_another), file="x")


def test_fragments_as_named_tuples() -> None:
    kind = "deepspeed.utils.tensor_fragment.fragment_address"
    found = loads(pickle_of(named(kind) + numbers(7, 3) + b"\x81"), file="x")
    assert found == InertObject(kind, (), {"numel": 7, "start": 3})


# ---- numpy ----


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.arange(6, dtype=">i2"),
        np.array([True, False]),
        np.zeros((0, 3)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["ab", "c"]),
        np.array([b"ab", b"c"]),
        np.array(3.5),
    ],
    ids=lambda array: array.dtype.str,
)
def test_numpy_arrays_and_scalars(array: np.ndarray, protocol: int) -> None:
    stand = read(array, protocol)
    assert isinstance(stand, InertObject) and stand.qualname == "numpy.ndarray"
    assert isinstance(stand.get("data"), bytes)
    assert stand.get("dtype") == array.dtype.str and stand.get("shape") == array.shape
    order = "F" if stand.get("fortran_order") else "C"
    again = np.frombuffer(stand.state["data"], array.dtype).reshape(array.shape, order=order)  # type: ignore[call-overload]
    assert np.array_equal(again, array)
    if array.size and array.dtype.byteorder != ">":
        item = array.ravel()[0]
        scalar = read(item, protocol)
        assert isinstance(scalar, NumpyScalar) and scalar == item.item()
        assert (scalar.dtype, scalar.data) == (item.dtype.str, item.tobytes())


def test_numpy_objects_and_structures_are_refused() -> None:
    for protocol in PROTOCOLS:
        with pytest.raises(UnsafePickleError, match="pickled objects"):
            read(np.array([{}], dtype=object), protocol)
        for array in (np.zeros(2, dtype="f4,i4"), np.zeros(2, dtype="M8[s]")):
            with pytest.raises(UnsupportedError):
                read(array, protocol)


def test_numpy_scalars_as_keys() -> None:
    result = read({np.int64(3): "a", np.int64(4): "b", np.float32(5): "c"})
    assert isinstance(result, dict) and list(result.values()) == ["a", "b", "c"]
    four = read(np.int64(4))
    assert isinstance(four, NumpyScalar) and result[four] == "b" and result[4] == "b"
    assert (four.dtype, four.data) == ("<i8", b"\4" + b"\0" * 7)


def test_numpy_random_state_of_a_client() -> None:
    state = np.random.RandomState(3).get_state()
    result = read(state)
    assert isinstance(result, tuple) and result[0] == "MT19937"
    assert result[1].get("data") == state[1].tobytes()  # type: ignore[union-attr, index]


# ---- what is not known ----


class Surprise:
    """Would run code in each way that a class can."""

    def __setstate__(self, state: object) -> None:
        raise RuntimeError("code ran")

    def __new__(cls, *args: object) -> "Surprise":
        if args:
            raise RuntimeError("code ran")
        return super().__new__(cls)


class Words(list):
    pass


class Counts(dict):
    pass


def test_unknown_classes_are_refused_by_name_with_the_file() -> None:
    with pytest.raises(UnsafePickleError) as caught:
        read(Surprise())
    message = str(caught.value)
    assert f"{__name__}.Surprise" in message and "x.pt" in message and "what to do" in message


def test_allowed_classes_become_inert() -> None:
    names = {f"{__name__}.{kind.__name__}" for kind in (Surprise, Words, Counts)}
    allow = AllowedClasses(frozenset(names))
    surprise = Surprise()
    surprise.__dict__["x"] = 1
    words, counts = Words(["a", "b"]), Counts(a=1)
    for protocol in PROTOCOLS:
        result = loads(pickle.dumps([surprise, words, counts], protocol), file="x", allow=allow)
        assert isinstance(result, list)
        assert result[0] == InertObject(f"{__name__}.Surprise", (), {"x": 1})
        assert result[1].get("__elements__") == ["a", "b"]
        assert result[2].get("__items__") == {"a": 1}


def test_state_that_is_no_dict_is_kept() -> None:
    body = named("a.B") + b")\x81" + numbers(1, 2, 3) + b"b"
    found = loads(pickle_of(body), file="x", allow=AllowedClasses(frozenset({"a.B"})))
    assert found == InertObject("a.B", (), {"__state__": (1, 2, 3)})


def test_registered_extensions_are_refused() -> None:
    copyreg.add_extension(__name__, "Surprise", 0x7ABCDE)
    try:
        data = pickle.dumps(Surprise, 2)
        assert pickle.loads(data) is Surprise  # negative control: Python's own follows the registry
        with pytest.raises(DamagedFileError, match="opcode 0x84"):
            loads(data, file="x", allow=AllowedClasses(frozenset({f"{__name__}.Surprise"})))
    finally:
        copyreg.remove_extension(__name__, "Surprise", 0x7ABCDE)


def test_python_reads_the_opcodes_that_only_push_plain_data() -> None:
    """Python's unpickler in Python is private: a later one may look elsewhere, or do more."""
    private, opcodes = pickle._Unpickler, SafeUnpickler.OPCODES
    by_python = {code for code, read in opcodes.items() if read is private.dispatch[code[0]]}
    assert b"".join(sorted(by_python)) == (
        b"()012BCGJKMNQX]hjlqrt}\x85\x86\x87\x88\x89\x8a\x8c\x8f\x93\x94"
    )
    uses = {name for code in by_python for name in opcodes[code].__code__.co_names}
    assert uses <= {
        *("append", "stack", "metastack", "pop_mark", "memo", "read"),  # its own state
        *("find_class", "persistent_load"),  # which are ours
        *("unpack", "decode_long", "set", "tuple", "str", "type", "len", "pop", "maxsize"),
        *("KeyError", "ValueError", "UnpicklingError"),
    }


def test_each_opcode_that_makes_or_fills_something_is_ours() -> None:
    own, opcodes = vars(SafeUnpickler), SafeUnpickler.OPCODES
    codes = {name: code for name, code in vars(pickle).items() if isinstance(code, bytes)}
    read = {name: opcodes[code] for name, code in codes.items() if opcodes.get(code)}
    ours = {name for name, method in read.items() if own.get(method.__name__) is method}
    assert ours == {
        *("PROTO", "FRAME", "LONG4", "BINUNICODE8", "BINBYTES8", "BYTEARRAY8"),
        *("GLOBAL", "FROZENSET", "DICT"),
        *("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"),
        *("REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD"),
    }


def test_no_torch_is_imported() -> None:
    code = (
        "import sys, megatron_ucp.formats.pt.file; "
        "sys.exit(sum(name in sys.modules for name in ('torch', 'numpy', 'deepspeed')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_scheduler_of_torch() -> None:
    """MultiStepLR keeps its milestones in a Counter."""
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    state = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]).state_dict()
    found = read_torch(state)
    assert found == state and isinstance(found, dict)
    assert type(found["milestones"]) is collections.Counter and found["milestones"] == {2: 2, 5: 1}
