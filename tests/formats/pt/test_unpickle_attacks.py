"""Hostile pickles: each is refused by a named error, runs nothing and leaves no trace."""

import os
import pickle
from collections import OrderedDict

import pytest

from megatron_ucp.core.values import ClassName, InertObject
from megatron_ucp.errors import DamagedFileError, UnsafePickleError
from megatron_ucp.formats.pt import allowed_calls
from megatron_ucp.formats.pt.refs import StorageRef, TensorRef
from megatron_ucp.formats.pt.unpickle import AllowedClasses, loads
from tests.formats.craft import (
    call,
    dict_of,
    named,
    numbers,
    pickle_of,
    storage,
    tensor,
    text,
    tuple_of,
    watch,
)

EMPTY_DICT, NONE, BUILD = b"}", b"N", b"b"


CALLS = [
    "os.system",
    "posix.system",
    "builtins.eval",
    "__builtin__.eval",
    "builtins.exec",
    "builtins.__import__",
    "builtins.open",
    "builtins.type",
    "builtins.object",
    "builtins.setattr",
    "builtins.vars",
    "subprocess.Popen",
    "functools.partial",
    "operator.attrgetter",
    "operator.methodcaller",
    "importlib.import_module",
    "runpy.run_path",
    "torch.load",
    "torch.hub.load",
    "torch.storage._load_from_bytes",
    "torch._utils._rebuild_wrapper_subclass",
    "torch._utils._rebuild_device_tensor_from_numpy",
    "torch.serialization.load",
    "torch._C._jit_init",
    "numpy.load",
    "numpy.f2py.crackfortran.getlincoef",
    "numpy._core.multiarray.fromfile",
    "codecs.decode",
    "_codecs.decode",
    "_codecs.lookup",
    "copyreg._reconstructor",
    "copy_reg._reconstructor",
    "copyreg.__newobj__",
    "types.FunctionType",
    "types.CodeType",
    "collections.namedtuple",
    "collections.OrderedDict.update",
    "datetime.sys",
    "datetime.datetime.now",
    "pathlib.Path.cwd",
    "pathlib.os",
    "argparse.ArgumentParser",
    "argparse._sys.exit",
    "deepspeed.runtime.engine.os",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler.update_scale",
    "torch.FloatStorage.from_file",
    "torch.os.system",
    "megatron_ucp.formats.pt.unpickle.loads",
    "megatron_ucp.formats.pt.unpickle.InertObject",
    "tests.formats.craft.text",
]


@pytest.mark.parametrize("qualname", CALLS)
@pytest.mark.parametrize("form", ["global", "stack_global", "reduce", "new", "value"])
def test_other_globals_are_refused_whatever_asks_for_them(qualname: str, form: str) -> None:
    module, _, name = qualname.rpartition(".")
    ask = text(module) + text(name) + b"\x93" if form == "stack_global" else named(qualname)
    ending = {"new": tuple_of(text("touch /tmp/attacked")) + b"\x81", "value": b""}
    data = pickle_of(ask + ending.get(form, tuple_of(text("touch /tmp/attacked")) + b"R"))
    with watch() as events, pytest.raises(UnsafePickleError) as caught:
        loads(data, file="evil.pt")
    assert not events
    assert "evil.pt" in str(caught.value)
    assert qualname.replace("__builtin__", "builtins") in str(caught.value)


def test_the_same_call_runs_in_pythons_own_unpickler(tmp_path: object) -> None:
    """Negative control: the attack is a real one, and the watch sees it."""
    data = pickle_of(call("os.system", tuple_of(text(f"touch {tmp_path}/attacked"))))
    with watch() as events:
        pickle.loads(data)
    assert os.path.exists(f"{tmp_path}/attacked") and any("os.system" in event for event in events)


MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "only protocol": b"\x80\x02",
    "protocol 0": b"I1\n.",
    "protocol 1": b"K\x01q\x00}.",
    "protocol 9": b"\x80\x09N.",
    "stop on nothing": pickle_of(b""),
    "two values": pickle_of(b"NN"),
    "open mark": pickle_of(b"(N"),
    "after the end": pickle_of(b"N") + b"N",
    "pop of nothing": pickle_of(b"0"),
    "no mark": pickle_of(b"t"),
    "tuple of too few": pickle_of(b"N\x86"),
    "tuple over a mark": pickle_of(b"N(\x85"),
    "dup of nothing": pickle_of(b"2"),
    "unknown opcode": pickle_of(b"\xff"),
    "inst": pickle_of(b"(S'touch x'\nios\nsystem\n"),
    "obj": pickle_of(b"(" + named("collections.OrderedDict") + b"o"),
    "ext1": pickle_of(b"\x82\x01"),
    "ext2": pickle_of(b"\x83\x01\x00"),
    "ext4": pickle_of(b"\x84\x01\x00\x00\x00"),
    "next buffer": pickle_of(b"\x97"),
    "read-only buffer": pickle_of(b"N\x98"),
    "text persid": pickle_of(b"Pstorage\n"),
    "text int": pickle_of(b"I1\n"),
    "memo miss": pickle_of(b"h\x05"),
    "memo of nothing": pickle_of(b"q\x05"),
    "memoize nothing": pickle_of(b"\x94"),
    "text past the end": pickle_of(b"X\xff\xff\xff\x7fabc"),
    "text of 2**63": pickle_of(b"\x8d" + b"\xff" * 8),
    "bytes of 2**40": pickle_of(b"\x8e" + (2**40).to_bytes(8, "little")),
    "long of -1": pickle_of(b"\x8b" + b"\xff" * 4),
    "bytearray of 2**40": pickle_of(b"\x96" + (2**40).to_bytes(8, "little")),
    "cut number": b"\x80\x02J\x01",
    "frame past the end": b"\x80\x04\x95" + b"\x10" + b"\0" * 7,
    "huge int": pickle_of(b"\x8b\x00\x10\x00\x00" + b"\1" * 4096),
    "no utf-8": pickle_of(b"X\x02\x00\x00\x00\xff\xfe"),
    "global without end": pickle_of(b"cos"),
    "global no utf-8": pickle_of(b"c\xff\n\xfe\n"),
    "stack global of numbers": pickle_of(b"K\x01K\x01\x93"),
    "call of text": pickle_of(text("os.system") + b")R"),
    "call of a dtype": pickle_of(named("torch.float16") + b")R"),
    "call of a value": pickle_of(call("argparse.Namespace") + b")R"),
    "call with a list": pickle_of(named("torch.Size") + b"]R"),
    "new of text": pickle_of(text("x") + b")\x81"),
    "new of a value": pickle_of(b"])\x81"),
    "new with keywords": pickle_of(
        named("argparse.Namespace") + b")" + dict_of(text("a"), NONE) + b"\x92"
    ),
    "call of a class": pickle_of(call("torch.Tensor")),
    "call of a storage": pickle_of(call("torch.FloatStorage", numbers(5))),
    "call of list": pickle_of(call("builtins.list", tuple_of(b"]"))),
    "call of str": pickle_of(call("builtins.str")),
    "append to None": pickle_of(b"NNa"),
    "append to tuple": pickle_of(b")Na"),
    "append to bytearray": pickle_of(b"\x96" + b"\0" * 8 + b"K\x01a"),
    "items of a list": pickle_of(b"]NNs"),
    "items of a tensor": pickle_of(tensor(storage(), 0, numbers(1), numbers(1)) + b"NNs"),
    "odd items": pickle_of(b"}(Nu"),
    "odd dict": pickle_of(b"(Nd"),
    "members of a list": pickle_of(b"](N\x90"),
    "list as key": pickle_of(b"}]Ns"),
    "dict as member": pickle_of(b"\x8f(}\x90"),
    "list in a tuple as key": pickle_of(b"}" + tuple_of(b"]") + b"Ns"),
    "list as frozen member": pickle_of(b"(]\x91"),
    "tensor as key": pickle_of(b"}" + tensor(storage(), 0, numbers(1), numbers(1)) + b"Ns"),
    "set of lists": pickle_of(call("builtins.set", tuple_of(b"(]l"))),
    "set of an int": pickle_of(call("builtins.set", numbers(3))),
    "frozenset of dicts": pickle_of(call("builtins.frozenset", tuple_of(b"(}l"))),
    "bytearray of a number": pickle_of(call("builtins.bytearray", numbers(2**40))),
    "bytes of a number": pickle_of(call("builtins.bytes", numbers(2**40))),
    "encode by a code page": pickle_of(call("_codecs.encode", tuple_of(text("x"), text("rot13")))),
    "encode not latin": pickle_of(call("_codecs.encode", tuple_of(text("€"), text("latin1")))),
    "range of text": pickle_of(call("builtins.range", tuple_of(text("a"), text("b"), text("c")))),
    "range of 2**70": pickle_of(call("builtins.range", numbers(0, 2**70, 1))),
    "range by 0": pickle_of(call("builtins.range", numbers(0, 1, 0))),
    "complex of text": pickle_of(call("builtins.complex", tuple_of(text("1")))),
    "date of text": pickle_of(call("datetime.date", tuple_of(text("x")))),
    "date of lists": pickle_of(call("datetime.date", tuple_of(b"]", b"]", b"]"))),
    "date of year 0": pickle_of(call("datetime.date", numbers(0, 1, 1))),
    "timedelta of 10**30 days": pickle_of(call("datetime.timedelta", numbers(10**30))),
    "path of numbers": pickle_of(call("pathlib.PosixPath", numbers(1))),
    "device of nothing": pickle_of(call("torch.device")),
    "stage 7": pickle_of(call("deepspeed.runtime.zero.config.ZeroStageEnum", numbers(7))),
    "stage of text": pickle_of(
        call("deepspeed.runtime.zero.config.ZeroStageEnum", tuple_of(text("1")))
    ),
    "fragment of one": pickle_of(
        call("deepspeed.utils.tensor_fragment.fragment_address", numbers(1))
    ),
    "OrderedDict of pairs": pickle_of(call("collections.OrderedDict", tuple_of(b"(]l"))),
    "state of a list": pickle_of(b"]" + EMPTY_DICT + BUILD),
    "state of a dict": pickle_of(b"}" + EMPTY_DICT + BUILD),
    "state of a set": pickle_of(b"\x8f" + EMPTY_DICT + BUILD),
    "state of text": pickle_of(text("x") + EMPTY_DICT + BUILD),
    "state of a tensor": pickle_of(
        tensor(storage(), 0, numbers(1), numbers(1)) + dict_of(text("shape"), b")") + BUILD
    ),
    "state of a storage": pickle_of(storage() + dict_of(text("elems"), b"K\x01") + BUILD),
    "state of a defaultdict": pickle_of(
        call("collections.defaultdict") + dict_of(text("default_factory"), NONE) + BUILD
    ),
    "slots of an OrderedDict": pickle_of(
        call("collections.OrderedDict") + tuple_of(NONE, dict_of(text("items"), NONE)) + BUILD
    ),
    "attribute named by a number": pickle_of(
        call("argparse.Namespace") + dict_of(b"K\x01", NONE) + BUILD
    ),
    "array of another class": pickle_of(
        call("numpy.core.multiarray._reconstruct", tuple_of(named("argparse.Namespace")))
    ),
    "array with too few bytes": pickle_of(
        call(
            "numpy._core.numeric._frombuffer",
            tuple_of(b"C\x03abc", call("numpy.dtype", tuple_of(text("f4"))), numbers(1), text("C")),
        )
    ),
    "array of 2**62": pickle_of(
        call(
            "numpy._core.numeric._frombuffer",
            tuple_of(
                b"C\x00",
                call("numpy.dtype", tuple_of(text("f4"))),
                numbers(2**62, 2**62),
                text("C"),
            ),
        )
    ),
    "array state of text": pickle_of(
        call("numpy._core.multiarray._reconstruct", tuple_of(named("numpy.ndarray")))
        + text("x")
        + BUILD
    ),
    "dtype state of text": pickle_of(call("numpy.dtype", tuple_of(text("f4"))) + text("x") + BUILD),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_pickles_are_damaged_files(data: bytes) -> None:
    with watch() as events, pytest.raises(DamagedFileError) as caught:
        loads(data, file="bad.pt")
    assert not events and "bad.pt" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    ["text past the end", "text of 2**63", "bytes of 2**40", "bytearray of 2**40", "long of -1"],
)
def test_lengths_are_compared_with_what_is_there(name: str) -> None:
    with pytest.raises(DamagedFileError, match="truncated"):
        loads(MALFORMED[name], file="x")


# ---- attributes of classes and functions ----

STATES: dict[str, bytes] = {
    "attribute": dict_of(text("qualname"), text("os.system")),
    "class": dict_of(text("__class__"), named("torch.Tensor")),
    "setstate": dict_of(text("__setstate__"), named("torch.Tensor")),
    "dict": dict_of(text("__dict__"), b"}"),
    "slots": tuple_of(NONE, dict_of(text("qualname"), text("os.system"))),
    "eq": dict_of(text("__eq__"), NONE),
    "reduce": dict_of(text("__reduce__"), named("torch.Size")),
    "empty": b"}",
    "number": b"K\x01",
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
@pytest.mark.parametrize(
    "qualname",
    [
        "collections.OrderedDict",
        "torch.Size",
        "torch.Tensor",
        "torch.FloatStorage",
        "argparse.Namespace",
        "numpy.dtype",
        "a.Allowed",
        "builtins.dict",
        "torch.float16",
    ],
)
def test_no_class_or_function_can_be_changed(qualname: str, state: bytes) -> None:
    before = [dict(vars(kind)) for kind in (ClassName, InertObject, TensorRef, StorageRef)]
    known = dict(allowed_calls.ALLOWED_CALLS)
    with pytest.raises(DamagedFileError, match="sets attributes"):
        loads(
            pickle_of(named(qualname) + state + BUILD),
            file="x",
            allow=AllowedClasses(frozenset({"a.Allowed"})),
        )
    assert (
        before == [dict(vars(kind)) for kind in (ClassName, InertObject, TensorRef, StorageRef)]
        and known == allowed_calls.ALLOWED_CALLS
    )
    assert loads(pickle_of(call("argparse.Namespace")), file="x") == InertObject(
        "argparse.Namespace"
    )


@pytest.mark.parametrize("state", list(STATES.values())[:-1], ids=list(STATES)[:-1])
def test_attributes_of_stands_are_data_only(state: bytes) -> None:
    one, two = "argparse.Namespace", "types.SimpleNamespace"
    value = loads(pickle_of(tuple_of(call(one) + state + BUILD, call(two))), file="x")
    assert isinstance(value, tuple)
    assert type(value[0]) is InertObject and value[0].qualname == one and value[0].args == ()
    assert value[1] == InertObject(two), "the state of one stand-in is not the state of another"
    assert not hasattr(value[0], "__dict__")


def test_state_of_an_ordered_dict_does_not_shadow_its_methods() -> None:
    value = loads(
        pickle_of(
            call("collections.OrderedDict") + dict_of(text("items"), named("torch.Size")) + BUILD
        ),
        file="x",
    )
    assert isinstance(value, OrderedDict) and not vars(value) and list(value.items()) == []


def test_an_allowed_name_does_not_replace_a_known_one() -> None:
    allow = AllowedClasses(frozenset({"torch._utils._rebuild_tensor_v2", "builtins.getattr"}))
    with pytest.raises(DamagedFileError):
        loads(pickle_of(tensor(storage(), 99, numbers(1), numbers(1))), file="x", allow=allow)
    assert loads(
        pickle_of(call("os.system", tuple_of(text("x")))),
        file="x",
        allow=AllowedClasses(frozenset({"os.system"})),
    ) == InertObject("os.system", ("x",))


@pytest.mark.parametrize(
    "body",
    [
        call("collections.Counter", tuple_of(text("abc"))),
        call("collections.Counter", tuple_of(b"}", b"}")),
        call("collections.Counter", tuple_of(call("collections.OrderedDict"))),
        call("collections.deque", tuple_of(text("abc"))),
        call("collections.deque", tuple_of(b")", b"\x89")),
        call("collections.deque", tuple_of(b")", b"J\xff\xff\xff\xff")),
        call("collections.deque", tuple_of(b")", NONE, NONE)),
        b"}" + call("collections.deque") + b"Ns",
        call("collections.Counter") + b"NNs",
        b"}" + call("collections.Counter") + b"Ns",
        call("collections.Counter") + dict_of(text("a"), NONE) + BUILD,
        call("collections.deque") + dict_of(text("a"), NONE) + BUILD,
    ],
)
def test_malformed_counters_and_deques(body: bytes) -> None:
    with pytest.raises(DamagedFileError):
        loads(pickle_of(body), file="x")
