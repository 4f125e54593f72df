"""Enums of megatron-core in its pickles: inert values whatever they are called. Everything else
that a name below its package could be is refused, and nothing runs."""

import enum
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.core.values import Stand
from megatron_ucp.errors import UcpError, UnsafePickleError
from megatron_ucp.formats.megatron.arguments import OF_METADATA, OF_VALUES, plain_arguments
from megatron_ucp.formats.pt.unpickler import loads

from .craft import call, dict_of, named, number, pickle_of, text, tuple_of, watch
from .megatron_files import copied

BUILD = b"b"
NEW = "megatron.core.transformer.enums.SomethingOfNextYear"
ELSEWHERE = "megatron.core.inference.config.KVCacheManagementMode"


def by_name(kind: str, member: str) -> bytes:
    """`getattr(Class, "member")`, as Python 3.11.0 to 3.11.3 writes it."""
    return call("builtins.getattr", tuple_of(named(kind), text(member)))


MEMBERS = {
    "a number": (call(NEW, tuple_of(number(3))), (3,)),
    "a word": (call(ELSEWHERE, tuple_of(text("persist"))), ("persist",)),
    "no word but a version": (call(NEW, tuple_of(text("te-2.1:fp8"))), ("te-2.1:fp8",)),
    "a pair": (call(NEW, tuple_of(tuple_of(number(1), text("row")))), ((1, "row"),)),
    "by name": (by_name(NEW, "full_iteration"), ("full_iteration",)),
    "a private class": (call("megatron.core.a._Kind", tuple_of(number(1))), (1,)),
    "of the program": (
        call("megatron.training.config.Mode", tuple_of(text("lenient"))),
        ("lenient",),
    ),
}


@pytest.mark.parametrize("case", MEMBERS)
def test_a_member_of_any_enum_is_a_value(case: str) -> None:
    body, args = MEMBERS[case]
    with watch() as seen:
        value: Any = loads(pickle_of(body), file="x", allow=OF_VALUES)
    assert isinstance(value, Stand) and value.args == args and not value.state
    assert seen == []


def test_an_argument_has_the_value_of_its_enum() -> None:
    body = call("argparse.Namespace") + dict_of(text("scope"), MEMBERS["a word"][0]) + BUILD
    assert plain_arguments(loads(pickle_of(body), file="x", allow=OF_VALUES)) == {
        "scope": "persist"
    }


E = "megatron.core.transformer.enums"
HOSTILE = {
    # a name with dots reaches whatever a module has imported
    "a dotted name": f"c{E}\nos.system\n".encode() + tuple_of(text("true")) + b"R",
    "a dotted attribute": f"c{E}\nModelType.__init__\n".encode() + tuple_of(number(1)) + b"R",
    "a function": call(f"{E}.system", tuple_of(text("true"))),
    "a function of a module in it": call(f"{E}.os.system", tuple_of(text("true"))),
    "a dunder": call(f"{E}.__import__", tuple_of(text("os"))),
    "a command for a class": call("megatron.core.a.Run", tuple_of(text("touch /tmp/x; true"))),
    "a class without arguments": call("megatron.core.a.Run"),
    "a class with two": call("megatron.core.a.Run", tuple_of(number(1), text("a"))),
    "a class with a list": call("megatron.core.a.Run", tuple_of(b"]")),
    "a class with an object": call("megatron.core.a.Run", tuple_of(call("argparse.Namespace"))),
    "attributes": call("megatron.core.a.Run", tuple_of(number(1))) + b"}" + BUILD,
    "elements": call("megatron.core.a.Run", tuple_of(number(1))) + b"Na",
    "items": call("megatron.core.a.Run", tuple_of(number(1))) + text("a") + b"Ns",
    "a new object": named("megatron.core.a.Run") + tuple_of(number(1)) + b"\x81",
    "an attribute that is no member": by_name(NEW, "__class__"),
    "a dotted member": by_name(NEW, "a.b"),
    "beside the package": call("megatronic.core.enums.Kind", tuple_of(number(1))),
    "the package itself": call("megatron.Kind", tuple_of(number(1))),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_what_is_no_member_is_refused(case: str) -> None:
    with watch() as seen, pytest.raises(UnsafePickleError):
        loads(pickle_of(HOSTILE[case]), file="x", allow=OF_VALUES)
    assert seen == []


def test_no_other_pickle_holds_them() -> None:
    body = pickle_of(MEMBERS["a number"][0])
    for allow in ({"allow": OF_METADATA}, {}):
        with pytest.raises(UnsafePickleError, match="SomethingOfNextYear"):
            loads(body, file="x", **allow)


# ------------------------------------------------ in a folder


def planted(folder: Path, value: object) -> Path:
    """A golden checkpoint whose arguments hold one more value, as torch.save writes it."""
    import torch

    tag = copied("td_full_tp2dp2", folder / "saved")
    path = tag / "common.pt"
    tree = torch.load(path, weights_only=False)
    tree["args"].of_next_year = value
    torch.save(tree, path)
    return tag


def in_module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    for one in members.values():
        one.__module__ = name
    sys.modules[name] = module
    return module


@pytest.fixture
def module() -> Any:
    name = "megatron.core.of_next_year"
    yield name
    sys.modules.pop(name, None)


def test_a_folder_with_an_enum_of_next_year_is_read(tmp_path: Path, module: str) -> None:
    kind: Any = enum.Enum("Kind", {"full": "full", "part": "part"}, module=module)
    in_module(module, Kind=kind)
    tag = planted(tmp_path, [kind.full, kind.part])
    del sys.modules[module]
    assert ucp.describe(tag).run["global_steps"] == 3 and ucp.verify(tag, deep=True)
    assert module not in sys.modules


class Reduced:
    """What a hostile file could hold: an object of a class that says how it is made."""

    how: tuple[Any, ...] = ()

    def __reduce__(self) -> Any:
        return self.how


@pytest.mark.parametrize(
    "how",
    [
        lambda kind, ran: (os.mkdir, (str(ran),)),
        lambda kind, ran: (kind, (str(ran),)),
        lambda kind, ran: (kind, (), {"a": 1}),
        lambda kind, ran: (exec, (f"open({str(ran)!r}, 'w')",)),
    ],
    ids=["a function", "a path", "a state", "code"],
)
def test_an_object_of_a_class_below_the_package_is_refused(
    how: Any, tmp_path: Path, module: str
) -> None:
    ran = tmp_path / "ran"
    kind: Any = type("Kind", (Reduced,), {"__init__": lambda self, *_: None})
    in_module(module, Kind=kind)
    value = kind()
    kind.how = how(kind, ran)
    tag = planted(tmp_path, value)
    with pytest.raises(UcpError) as caught:
        ucp.inspect(tag)
    assert isinstance(caught.value, UnsafePickleError) and not ran.exists()
