"""Hostile pickles, as opcodes: code that would run, bombs, and tensors that can't be."""

import os
import pickle
import struct
from collections.abc import Callable
from typing import Any

from tests.formats.craft import (
    call,
    dict_of,
    named,
    number,
    numbers,
    storage,
    tensor,
    text,
    tuple_of,
)


class System:
    """Pickled as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def doubled(times: int = 60, leaf: bytes = b")") -> bytes:
    """A tuple of two equal tuples, and so on: 60 opcodes, 2**60 values when it is written out."""
    return leaf + b"2\x86" * times


def doubled_lists(times: int = 60) -> bytes:
    """The same of lists: each holds the one before it twice."""
    rows = [
        b"]q" + bytes([0xF0 + (n + 1) % 2]) + b"(" + (b"h" + bytes([0xF0 + n % 2])) * 2 + b"e"
        for n in range(times)
    ]
    return b"(]q\xf0" + b"".join(rows) + b"t"


RUNS: dict[
    str, Callable[[str], bytes]
] = {  # each would run the command in Python's own unpickler, or reach for code
    "os.system by REDUCE": lambda command: call("os.system", tuple_of(text(command))),
    "posix.system by REDUCE": lambda command: call("posix.system", tuple_of(text(command))),
    "eval": lambda command: call(
        "builtins.eval", tuple_of(text(f"__import__('os').system({command!r})"))
    ),
    "exec, by its name of Python 2": lambda command: call(
        "__builtin__.exec", tuple_of(text(f"import os; os.system({command!r})"))
    ),
    "Popen by NEWOBJ": lambda command: (
        named("subprocess.Popen")
        + tuple_of(b"(" + text("sh") + text("-c") + text(command) + b"l")
        + b"\x81"
    ),
    "Popen by NEWOBJ_EX": lambda command: (
        named("subprocess.Popen")
        + tuple_of(text(command))
        + dict_of(text("shell"), b"\x88")
        + b"\x92"
    ),
    "os.system by STACK_GLOBAL": lambda command: (
        text("os") + text("system") + b"\x93" + tuple_of(text(command)) + b"R"
    ),
    "os.system by INST": lambda command: b"(" + text(command) + b"ios\nsystem\n",
    "os.system by OBJ": lambda command: b"(" + named("os.system") + text(command) + b"o",
    "os.system as the class of a storage": lambda command: (
        tuple_of(text("storage"), named("os.system"), text("0"), text(command), number(1)) + b"Q"
    ),
    "persistent id of text": lambda command: b"Pos.system\n",
    "persistent id that is a call": lambda command: (
        call("os.system", tuple_of(text(command))) + b"Q"
    ),
    "a name through a module that torch imports": lambda command: (
        text("torch") + text("serialization.os.system") + b"\x93" + tuple_of(text(command)) + b"R"
    ),
    "getattr on what is no enum": lambda command: call(
        "builtins.getattr", tuple_of(named("builtins.dict"), text("__class__"))
    ),
    "getattr of a getattr": lambda command: call(
        "builtins.getattr",
        tuple_of(
            call("builtins.getattr", tuple_of(named("argparse.Namespace"), text("__init__"))),
            text("__globals__"),
        ),
    ),
    "a member of an enum, called": lambda command: (
        call("builtins.getattr", tuple_of(named("argparse.Namespace"), text("system")))
        + tuple_of(text(command))
        + b"R"
    ),
    "BUILD on a Counter": lambda command: (
        call("collections.Counter") + dict_of(text("__class__"), named("argparse.Namespace")) + b"b"
    ),
    "BUILD on a defaultdict": lambda command: (
        call("collections.defaultdict")
        + dict_of(text("default_factory"), named("builtins.list"))
        + b"b"
    ),
    "BUILD on a function": lambda command: (
        named("torch.Size") + dict_of(text("__call__"), named("builtins.getattr")) + b"b"
    ),
    "__setstate__ by BUILD": lambda command: (
        call("collections.OrderedDict") + dict_of(text("__setstate__"), named("os.system")) + b"b"
    ),
    "a registered extension": lambda command: b"\x82\x01",
    "copyreg": lambda command: call(
        "copyreg._reconstructor",
        tuple_of(named("subprocess.Popen"), named("builtins.object"), b"N"),
    ),
    "a code object": lambda command: call("types.CodeType", numbers(0, 0, 0)),
    "torch.load": lambda command: call("torch.load", tuple_of(text("/dev/zero"))),
    "bytes that torch loads": lambda command: call(
        "torch.storage._load_from_bytes",
        tuple_of(b"B" + struct.pack("<I", len(blob := pickle.dumps(System(command)))) + blob),
    ),
    "numpy.load": lambda command: call("numpy.load", tuple_of(text("/dev/zero"))),
    "a numpy array of objects": lambda command: call(
        "numpy.dtype", tuple_of(text("O8"), b"\x89", b"\x88")
    ),
    "a hub": lambda command: call("torch.hub.load", tuple_of(text("a/b"), text("c"))),
    "a factory that runs code": lambda command: call(
        "collections.defaultdict", tuple_of(named("os.system"))
    ),
}

BOMBS: dict[
    str, Callable[[str], bytes]
] = {  # small, and would take all memory, all time or the C stack
    "doubled tuples": lambda command: doubled(),
    "doubled lists": lambda command: doubled_lists(),
    "doubled dicts": lambda command: (
        b"(}q\xf0"
        + b"".join(
            b"}q"
            + bytes([0xF0 + (n + 1) % 2])
            + b"("
            + text("a")
            + b"h"
            + bytes([0xF0 + n % 2])
            + text("b")
            + b"h"
            + bytes([0xF0 + n % 2])
            + b"u"
            for n in range(60)
        )
        + b"t"
    ),
    "nested 300,000 deep": lambda command: b")" + b"\x85" * 100_000,
    "a deep tuple as key": lambda command: b"}" + b")" + b"\x85" * 100_000 + b"Ns",
    "a doubled tuple as key": lambda command: b"}" + doubled() + b"Ns",
    "encode again and again": lambda command: (
        text("x" * 10**6)
        + b"q\xf00"
        + text("latin1")
        + b"q\xf10"
        + named("_codecs.encode")
        + b"q\xf20]("
        + b"h\xf2h\xf0h\xf1\x86R" * 1000
        + b"e"
    ),
    "an int of 100,000 bytes": lambda command: (
        b"\x8b" + struct.pack("<i", 100_000) + b"\x7f" * 100_000
    ),
    "an int of 2**31 bytes": lambda command: b"\x8b\xff\xff\xff\x7f",
    "a text of 2**63 bytes": lambda command: b"\x8d" + b"\xff" * 7 + b"\x7f",
    "a bytearray of 2**40 bytes": lambda command: b"\x96" + struct.pack("<Q", 2**40),
    "a bytearray by its size": lambda command: call("builtins.bytearray", numbers(2**40)),
    "a range of everything, as a set": lambda command: call(
        "builtins.set", tuple_of(call("builtins.range", numbers(0, 2**62, 1)))
    ),
    "a memo miss": lambda command: b"j\xff\xff\xff\xff",
}

TENSORS: dict[str, Callable[[str], bytes]] = {
    "a shape of 2**62": lambda command: tensor(storage("0", 1), 0, numbers(2**62), numbers(1)),
    "a shape of 2**62 by stride 0": lambda command: tensor(
        storage("0", 1), 0, numbers(2**40, 2**22), numbers(0, 0)
    ),
    "a negative dim": lambda command: tensor(storage("0", 10), 0, numbers(-1, 2), numbers(1, 1)),
    "a negative stride": lambda command: tensor(storage("0", 10), 5, numbers(2), numbers(-1)),
    "a negative offset": lambda command: tensor(storage("0", 10), -5, numbers(2), numbers(1)),
    "an offset past the end": lambda command: tensor(storage("0", 10), 9, numbers(2), numbers(1)),
    "an offset of 2**80": lambda command: tensor(storage("0", 10), 2**80, numbers(2), numbers(1)),
    "100 dims": lambda command: tensor(
        storage("0", 10), 0, numbers(*[1] * 100), numbers(*[1] * 100)
    ),
    "more strides than dims": lambda command: tensor(
        storage("0", 10), 0, numbers(2), numbers(1, 1)
    ),
    "a storage of 2**70": lambda command: tensor(storage("0", 2**70), 0, numbers(2), numbers(1)),
    "a storage of -1": lambda command: tensor(storage("0", -1), 0, numbers(2), numbers(1)),
    "a storage named ../../etc/passwd": lambda command: tensor(
        storage("../../etc/passwd", 10), 0, numbers(2), numbers(1)
    ),
    "a storage named like a device": lambda command: tensor(
        storage("/dev/zero", 10), 0, numbers(2), numbers(1)
    ),
    "one storage in two sizes": lambda command: tuple_of(
        tensor(storage("zz", 10), 0, numbers(2), numbers(1)),
        tensor(storage("zz", 11), 0, numbers(2), numbers(1)),
    ),
}
