"""The opcodes that torch writes, each a function of the machine; every other one is refused.

Pickle's own registry of numbered classes (EXT1 to EXT4) and its opcodes that run code before
protocol 2 (INST, OBJ) are left out on purpose. Source of the codes: `pickletools` of Python 3.11.
"""

import struct
from collections.abc import Callable

from megatron_ucp.formats.pt.machine import Machine

MAX_INT_BYTES = 1024  # an int of more than 4300 digits can't even be shown in an error message
_Handler = Callable[[Machine], None]


def _number(layout: str) -> _Handler:
    unpack_from, size_bytes = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def handler(machine: Machine) -> None:
        machine.stack.append(unpack_from(machine.data, machine.pos)[0])
        machine.pos += size_bytes

    return handler


def _sized(layout: str, convert: Callable[[bytes], object]) -> _Handler:
    unpack_from, prefix_bytes = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def handler(machine: Machine) -> None:
        size_bytes = unpack_from(machine.data, machine.pos)[0]
        machine.pos += prefix_bytes
        machine.stack.append(convert(machine.take(size_bytes)))

    return handler


def _put(layout: str) -> _Handler:
    unpack_from, size_bytes = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def handler(machine: Machine) -> None:
        machine.memo[unpack_from(machine.data, machine.pos)[0]] = machine.stack[-1]
        machine.pos += size_bytes

    return handler


def _get(layout: str) -> _Handler:
    unpack_from, size_bytes = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    def handler(machine: Machine) -> None:
        machine.stack.append(machine.memo[unpack_from(machine.data, machine.pos)[0]])
        machine.pos += size_bytes

    return handler


def _push(make: Callable[[], object]) -> _Handler:
    return lambda machine: machine.stack.append(make())


def _integer(raw: bytes) -> int:
    if len(raw) > MAX_INT_BYTES:
        raise ValueError(f"an integer of {len(raw)} bytes")
    return int.from_bytes(raw, "little", signed=True)


def _utf8(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _skip(size_bytes: int) -> _Handler:
    return lambda machine: (machine.take(size_bytes), None)[1]


def _protocol(machine: Machine) -> None:
    if not 2 <= machine.take(1)[0] <= 5:
        machine.fail("the pickle has an unknown protocol", expected="2 to 5")


def _mark(machine: Machine) -> None:
    machine.below.append(machine.stack)
    machine.stack = []


def _tuple(machine: Machine, size: int) -> None:
    if len(machine.stack) < size:
        machine.fail("the pickle takes more values than there are")
    machine.stack[-size:] = [tuple(machine.stack[-size:])]


def _marked_frozenset(machine: Machine) -> None:
    items = machine.unmark()
    machine.check_keys(items)
    machine.stack.append(frozenset(items))


def _marked_dict(machine: Machine) -> None:
    flat = machine.unmark()
    machine.stack.append({})
    machine.set_items(flat)


def _reduce(machine: Machine) -> None:
    args = machine.stack.pop()
    machine.stack[-1] = machine.call(machine.stack[-1], args)


def _new_object(machine: Machine) -> None:
    args = machine.stack.pop()
    machine.stack[-1] = machine.new(machine.stack[-1], args)


def _new_object_ex(machine: Machine) -> None:
    keywords = machine.stack.pop()
    if type(keywords) is not dict or keywords:
        machine.fail("the pickle makes an object with keyword arguments")
    _new_object(machine)


def _stack_global(machine: Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        machine.fail("the name of a global is no text", found=(module, name))
    machine.find(module, name)


def _marked(machine: Machine, kind: type[tuple[object, ...]] | type[list[object]]) -> None:
    items = machine.unmark()
    machine.stack.append(kind(items))


def _set_item(machine: Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.set_items([key, value])


def _memoize(machine: Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _pop(machine: Machine) -> None:
    if machine.stack:
        machine.stack.pop()
    else:
        machine.unmark()


HANDLERS: dict[int, _Handler] = {
    0x80: _protocol,
    0x95: _skip(8),
    0x28: _mark,
    0x30: _pop,  # PROTO, FRAME, MARK, POP
    0x31: lambda m: (m.unmark(), None)[1],
    0x32: lambda m: m.stack.append(m.stack[-1]),  # POP_MARK, DUP
    0x4E: _push(lambda: None),
    0x88: _push(lambda: True),
    0x89: _push(lambda: False),
    0x4A: _number("<i"),
    0x4B: _number("<B"),
    0x4D: _number("<H"),
    0x47: _number(">d"),  # BININT, 1, 2, BINFLOAT
    0x8A: _sized("<B", _integer),
    0x8B: _sized("<i", _integer),  # LONG1, LONG4
    # texts, bytes, and empty containers
    0x8C: _sized("<B", _utf8),
    0x58: _sized("<I", _utf8),
    0x8D: _sized("<Q", _utf8),
    0x43: _sized("<B", bytes),
    0x42: _sized("<I", bytes),
    0x8E: _sized("<Q", bytes),
    0x96: _sized("<Q", bytearray),
    0x29: _push(tuple),
    0x5D: _push(list),
    0x7D: _push(dict),
    0x8F: _push(set),
    0x85: lambda m: _tuple(m, 1),
    0x86: lambda m: _tuple(m, 2),
    0x87: lambda m: _tuple(m, 3),
    0x74: lambda m: _marked(m, tuple),
    0x6C: lambda m: _marked(m, list),
    0x91: _marked_frozenset,
    0x64: _marked_dict,
    0x61: lambda m: m.append([m.stack.pop()]),
    0x65: lambda m: m.append(m.unmark()),  # APPEND, APPENDS
    0x73: _set_item,
    0x75: lambda m: m.set_items(m.unmark()),
    0x90: lambda m: m.add_items(),  # SETITEM(S), ADDITEMS
    0x71: _put("<B"),
    0x72: _put("<I"),
    0x94: _memoize,  # BINPUT, LONG_BINPUT, MEMOIZE
    0x68: _get("<B"),
    0x6A: _get("<I"),  # BINGET, LONG_BINGET
    # GLOBAL, STACK_GLOBAL, BINPERSID
    0x63: lambda m: m.find(m.line(), m.line()),
    0x93: _stack_global,
    0x51: lambda m: m.persistent_load(),
    0x52: _reduce,
    0x81: _new_object,
    0x92: _new_object_ex,
    0x62: lambda m: m.build(),  # REDUCE, NEWOBJ, NEWOBJ_EX, BUILD
}
