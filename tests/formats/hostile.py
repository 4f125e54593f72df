"""Hostile checkpoints, as data: what an attacker does to a good one. All are built here; no file of
theirs is kept.

A row gets the folder of a good tag that two ranks wrote at ZeRO-1, without a manifest unless it
says otherwise, and a shell command that makes a file (the mark). Nothing may ever run the command.
A row must be refused by everything that reads what it spoils: `sees` names the verbs that do, of
which `inspect` reads least.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ucp.formats.pt.reader import PtFile
from tests.formats.craft import (
    Entry,
    call,
    dict_of,
    named,
    number,
    numbers,
    storage,
    tensor,
    text,
    tuple_of,
    zip_of,
)

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
MANIFEST, RANDOM = "ucp_manifest.json", "ucp_rng_00000.safetensors"
VERBS = (
    "inspect",
    "verify",
    "verify --deep",
    "diff",
    "convert --to universal",
    "convert --mesh dp=4,zero=3",
    "plan --mesh dp=4,zero=3",
)
READERS = (*VERBS, "load")
ALL_BUT_INSPECT = READERS[1:]
Make = Callable[[Path, str], object]


@dataclass(frozen=True)
class Hostile:
    """One attack. `manifest`: the save's own manifest stays beside it. `says` is a word of the
    message."""

    make: Make
    sees: tuple[str, ...] = READERS
    manifest: bool = False
    says: str = ""


# ------------------------------------------------ writing


def records_of(path: Path) -> list[Entry]:
    """The records of a .pt file."""
    with zipfile.ZipFile(path) as file:
        return [Entry(info.filename, file.read(info)) for info in file.infolist()]


def pickled(entries: list[Entry]) -> int:
    """Which of the records is the pickle."""
    return next(
        number for number, entry in enumerate(entries) if str(entry.name).endswith("/data.pkl")
    )


def plant(path: Path, value: bytes, key: str = "planted") -> None:
    """Sets a key of the dictionary in a .pt file to what the opcodes make; all else stays."""
    entries = records_of(path)
    which = pickled(entries)
    body = entries[which].data[:-1]
    entries[which] = replace(entries[which], data=body + text(key) + value + b"s.")
    path.write_bytes(zip_of(entries))


def _planted(value: Callable[[str], bytes], name: str = MODEL, key: str = "planted") -> Make:
    return lambda folder, command: plant(folder / name, value(command), key)


def _archive(
    change: Callable[[list[Entry], int, int], object], name: str = MODEL, **end: int
) -> Make:
    """Changes the records of a file, given them, the number of the pickle and that of the first
    tensor."""

    def make(folder: Path, _: str) -> None:
        entries = records_of(folder / name)
        tensors = [
            n
            for n, entry in enumerate(entries)
            if "/data/" in str(entry.name)
            and entry.data
            and not str(entry.name).endswith("serialization_id")
        ]
        change(entries, pickled(entries), tensors[0])
        (folder / name).write_bytes(zip_of(entries, **end))  # type: ignore[arg-type]

    return make


def _ends(**end: Any) -> Make:
    return lambda folder, _: (folder / MODEL).write_bytes(zip_of(records_of(folder / MODEL), **end))


def _field(which: int | str, **fields: Any) -> Callable[[list[Entry], int, int], object]:
    """Other fields for the pickle ("pickle"), the first tensor ("tensor") or the record of a
    number."""

    def change(entries: list[Entry], pickle_at: int, tensor_at: int) -> None:
        at = {"pickle": pickle_at, "tensor": tensor_at}.get(str(which), which)
        entries[int(at)] = replace(entries[int(at)], **fields)

    return change


def _renamed(name: bytes) -> Make:
    return _archive(lambda entries, _, __: entries.append(Entry(name, b"x")))


def _big_endian(entries: list[Entry], pickle_at: int, _: int) -> None:
    name = str(entries[pickle_at].name).replace("data.pkl", "byteorder")
    entries[:] = [*(entry for entry in entries if entry.name != name), Entry(name, b"big")]


def _bytes(change: Callable[[bytes], bytes], name: str = MODEL) -> Make:
    return lambda folder, _: (folder / name).write_bytes(change((folder / name).read_bytes()))


def _json(change: Callable[[dict[str, Any]], object]) -> Make:
    def make(folder: Path, _: str) -> None:
        data = json.loads((folder / MANIFEST).read_text())
        change(data)
        (folder / MANIFEST).write_text(json.dumps(data))

    return make


def _instead(name: str, make: Callable[[Path], object]) -> Make:
    """Something else in the place of a file."""

    def change(folder: Path, _: str) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def _sparse(size_bytes: int, text: bytes = b"") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(text)
        os.truncate(path, size_bytes)

    return make


def _pointer(content: bytes) -> Make:
    return lambda folder, _: (folder.parent / "latest").write_bytes(content)


def forge_manifest(folder: Path, names: tuple[str, ...] = (MODEL, OPTIMIZER)) -> None:
    """Makes the manifest vouch for the files as they are: an attacker can do that, too."""
    data = json.loads((folder / MANIFEST).read_text())
    for row in data["files"]:
        if row[0] in names:
            with PtFile(folder / row[0]) as file:
                row[1:] = [file.size_bytes, file.directory_sha256]
    (folder / MANIFEST).write_text(json.dumps(data))


def _forged(value: Callable[[str], bytes]) -> Make:
    def make(folder: Path, command: str) -> None:
        plant(folder / MODEL, value(command))
        forge_manifest(folder)

    return make


def _legacy(folder: Path, command: str) -> None:
    import torch

    torch.save({"planted": _System(command)}, folder / MODEL, _use_new_zipfile_serialization=False)


def _tar(folder: Path, _: str) -> None:
    with tarfile.open(folder / MODEL, "w") as file:
        for name in ("sys_info", "pickle", "storages"):
            file.addfile(tarfile.TarInfo(f"../{name}"), io.BytesIO())


def _deflated(folder: Path, _: str) -> None:
    with zipfile.ZipFile(folder / MODEL, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(2**26))


class _System:
    """Pickled as a call of os.system."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


# ------------------------------------------------ the rows


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
        tuple_of(b"B" + struct.pack("<I", len(blob := pickle.dumps(_System(command)))) + blob),
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
    "nested 300,000 deep": lambda command: b")" + b"\x85" * 300_000,
    "a deep tuple as key": lambda command: b"}" + b")" + b"\x85" * 300_000 + b"Ns",
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

SHAPELESS = {"a list of lists": b"](]]e", "a number": number(7), "a text": text("x")}
KEYS = (
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "ds_config",
    "lr_scheduler",
    "global_steps",
    "skipped_steps",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "universal_checkpoint_info",
    "ds_version",
)

ZIPS: dict[str, Hostile] = {
    "a deflated member of 64 MiB": Hostile(_deflated),
    "a deflated tensor": Hostile(_archive(_field("tensor", method=8))),
    "an encrypted tensor": Hostile(_archive(_field("tensor", flags=1))),
    "a name with ..": Hostile(_renamed(b"archive/../../../tmp/x"), says="not plain"),
    "an absolute name": Hostile(_renamed(b"/etc/passwd"), says="not plain"),
    "a name with a backslash": Hostile(_renamed(b"archive\\..\\x"), says="not plain"),
    "a name with a NUL": Hostile(_renamed(b"archive/data/0\0.txt"), says="not plain"),
    "a name that is no text": Hostile(_renamed(b"archive/\xff\xfe"), says="not plain"),
    "one name twice": Hostile(
        _archive(lambda entries, pickle_at, _: entries.append(entries[pickle_at])), says="twice"
    ),
    "two archives in one": Hostile(
        _archive(
            lambda entries, pickle_at, _: entries.append(
                replace(entries[pickle_at], name="other/data.pkl")
            )
        )
    ),
    "a local header of another name": Hostile(
        _archive(_field("pickle", local_name=b"archive/data.pkX"))
    ),
    "a local header that is longer": Hostile(
        _archive(_field("tensor", local_extra=b"FB\2\0ZZ", size=2**20))
    ),
    "an offset past the end": Hostile(_archive(_field("tensor", header=2**31))),
    "an offset of 2**63": Hostile(_archive(_field("tensor", header=2**63, zip64=True))),
    "records that overlap": Hostile(
        _archive(
            lambda entries, pickle_at, tensor_at: entries.append(Entry("archive/data/zz", header=0))
        )
    ),
    "a record that reaches into the next": Hostile(_archive(_field("pickle", size=2**20))),
    "a record of 2**64 bytes": Hostile(_archive(_field("tensor", size=2**64 - 1, zip64=True))),
    "a ZIP64 field that is missing": Hostile(_archive(_field("tensor", zip64=True, extra=b""))),
    "a ZIP64 field that is cut": Hostile(
        _archive(_field("tensor", zip64=True, extra=b"\1\0\xff\0" + bytes(8)))
    ),
    "more records than there are": Hostile(_ends(count=60_000, here=60_000)),
    "a ZIP64 end that lies about the directory": Hostile(_ends(end64=True, end64_start=2**62)),
    "a ZIP64 end of 2**60 records": Hostile(_ends(end64=True, end64_count=2**60)),
    "a directory past the end": Hostile(_ends(start=2**31)),
    "another disk": Hostile(_ends(disk=1)),
    "big-endian": Hostile(_archive(_big_endian), sees=ALL_BUT_INSPECT),
    "half of the file": Hostile(_bytes(lambda data: data[: len(data) // 2]), says=MODEL),
    "an empty file": Hostile(_bytes(lambda data: b""), says=MODEL),
    "a legacy torch file that runs code": Hostile(_legacy, says="legacy"),
    "a tar archive": Hostile(_tar, says=MODEL),
    "a bare pickle": Hostile(
        lambda folder, command: (folder / MODEL).write_bytes(pickle.dumps(_System(command)))
    ),
    "a sparse file of 1 TiB": Hostile(_instead(MODEL, _sparse(2**40, b"PK\3\4"))),
    "a sparse pickle of 1 TiB": Hostile(lambda folder, _: _sparse_pickle(folder / MODEL)),
}


def _sparse_pickle(path: Path) -> None:
    """A whole archive whose pickle is a hole of 1 TiB."""
    name, size = b"archive/data.pkl", 2**40
    local = (
        struct.pack("<4s5H3L2H", b"PK\3\4", 0, 0, 0, 0, 0, 0, 0xFFFFFFFF, 0xFFFFFFFF, len(name), 0)
        + name
    )
    extra = struct.pack("<2H3Q", 1, 24, size, size, 0)
    directory = (
        struct.pack(
            "<4s6H3L5H2L",
            b"PK\1\2",
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            0xFFFFFFFF,
            0xFFFFFFFF,
            len(name),
            len(extra),
            0,
            0,
            0,
            0,
            0xFFFFFFFF,
        )
        + name
        + extra
    )
    start = len(local) + size
    end = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 0, 0, 0, 0, 1, 1, len(directory), start)
    end += struct.pack("<4sLQL", b"PK\6\7", 0, start + len(directory), 1)
    end += struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(directory), 0xFFFFFFFF, 0)
    with path.open("wb") as file:
        file.write(local)
        file.seek(start)
        file.write(directory + end)


MANIFESTS: dict[str, Hostile] = {
    name: replace(row, manifest=True)
    for name, row in {
        "a file named ../../etc/passwd": Hostile(
            _json(lambda data: data["files"][0].__setitem__(0, "../../etc/passwd")),
            says="plain file name",
        ),
        "an absolute file name": Hostile(
            _json(lambda data: data["files"][0].__setitem__(0, "/etc/passwd")),
            says="plain file name",
        ),
        "a file of -1 bytes": Hostile(_json(lambda data: data["files"][0].__setitem__(1, -1))),
        "a parameter of 2**200 elements": Hostile(
            _json(lambda data: data["params"][0].__setitem__(1, [2**100, 2**100])),
            sees=ALL_BUT_INSPECT,
        ),
        "a mesh of 10**18 ranks": Hostile(
            _json(lambda data: data["mesh"].__setitem__("dp", 10**18))
        ),
        "a mesh that is no mesh": Hostile(
            _json(lambda data: data.__setitem__("mesh", {"__class__": "os.system"}))
        ),
        "10**12 partitions": Hostile(
            _json(lambda data: data["buffers"][0].__setitem__("partitions", 10**12))
        ),
        "a length of 10**30": Hostile(
            _json(lambda data: data["buffers"][0].__setitem__("length", 10**30)),
            sees=ALL_BUT_INSPECT,
        ),
        "a field of another version": Hostile(
            _json(lambda data: data.__setitem__("__reduce__", "os.system"))
        ),
        "nested a million deep": Hostile(
            lambda folder, _: (folder / MANIFEST).write_text("[" * 10**6)
        ),
        "closed a million deep": Hostile(
            lambda folder, _: (folder / MANIFEST).write_text("[" * 10**6 + "]" * 10**6)
        ),
        "100 MB of lists": Hostile(
            lambda folder, _: (folder / MANIFEST).write_text(
                '{"format": [' + "[]," * (33 * 10**6) + "0]}"
            )
        ),
        "a sparse manifest of 1 TiB": Hostile(_instead(MANIFEST, _sparse(2**40))),
        "a number of a million digits": Hostile(
            lambda folder, _: (folder / MANIFEST).write_text('{"version": ' + "9" * 10**6 + "}")
        ),
        "no UTF-8": Hostile(
            lambda folder, _: (folder / MANIFEST).write_bytes(b'{"format": "\xff\xfe\xfd"}')
        ),
        "a manifest that is a pipe": Hostile(_instead(MANIFEST, os.mkfifo)),
        "a manifest that is a loop": Hostile(
            _instead(MANIFEST, lambda path: path.symlink_to(path.name))
        ),
        "a manifest that is a device": Hostile(
            _instead(MANIFEST, lambda path: path.symlink_to("/dev/zero"))
        ),
        "a manifest that is a folder": Hostile(_instead(MANIFEST, Path.mkdir)),
        "random states with a header of 2**60 bytes": Hostile(
            lambda folder, _: _vouched(folder, struct.pack("<Q", 2**60) + b"{}"), sees=("load",)
        ),
        "random states with offsets past the end": Hostile(
            lambda folder, _: _vouched(
                folder,
                _safetensors(
                    {"torch": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}
                ),
            ),
            sees=("load",),
        ),
        "random states of another shape": Hostile(
            lambda folder, _: _vouched(
                folder,
                _safetensors(
                    {
                        name: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
                        for name in (
                            "torch",
                            "numpy",
                            "numpy_place",
                            "numpy_gauss",
                            "python",
                            "python_gauss",
                        )
                    }
                ),
            ),
            sees=("load",),
        ),
        "random states that are a pipe": Hostile(_instead(RANDOM, os.mkfifo)),
        "random states that are a device": Hostile(
            _instead(RANDOM, lambda path: path.symlink_to("/dev/zero"))
        ),
        "os.system, and a manifest that vouches for it": Hostile(
            _forged(RUNS["os.system by REDUCE"]), says="closed list", sees=ALL_BUT_INSPECT
        ),
    }.items()
}


def _safetensors(header: dict[str, Any]) -> bytes:
    data = json.dumps(header).encode()
    return struct.pack("<Q", len(data)) + data


def _vouched(folder: Path, data: bytes) -> None:
    """Random states of every rank, and a manifest that vouches for them."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for row in manifest["files"]:
        if row[0].endswith(".safetensors"):
            (folder / row[0]).write_bytes(data)
            row[1:] = [len(data), hashlib.sha256(data).hexdigest()]
    (folder / MANIFEST).write_text(json.dumps(manifest))


PLACES: dict[str, Hostile] = {  # what stands in the place of a file or a folder
    **{
        f"a {what} in the place of the model file": Hostile(_instead(MODEL, make))
        for what, make in {
            "pipe": os.mkfifo,
            "device": lambda path: path.symlink_to("/dev/zero"),
            "terminal": lambda path: path.symlink_to("/dev/tty"),
            "loop": lambda path: path.symlink_to(path.name),
            "folder": Path.mkdir,
            "dangling link": lambda path: path.symlink_to("nowhere"),
        }.items()
    },
    "a pipe in the place of an optimizer file": Hostile(_instead(OPTIMIZER, os.mkfifo)),
    "10**9 partitions by a file name": Hostile(
        lambda folder, _: (
            folder / f"bf16_zero_pp_rank_{10**9}_mp_rank_00_optim_states.pt"
        ).write_bytes(b"")
    ),
    "a rank of 5000 digits, as far as a name goes": Hostile(
        lambda folder, _: (folder / f"mp_rank_{'9' * 200}_model_states.pt").write_bytes(b"")
    ),
}

POINTERS: dict[str, Hostile] = {
    f"latest that says {what}": Hostile(_pointer(content))
    for what, content in {
        "../..": b"../../..",
        "an absolute path": b"/etc",
        "..": b"..",
        "nothing": b"",
        "a NUL": b"filled\0x",
        "5 MB": b"x" * 5_000_000,
        "300 letters": b"x" * 300,
        "no text": b"\xff\xfe\xfd",
        "an option": b"--help",
        "a line too many": b"filled\nrm -rf /",
    }.items()
}
POINTERS |= {
    f"latest that is a {what}": Hostile(
        lambda folder, _, make=make: (
            (folder.parent / "latest").unlink(),
            make(folder.parent / "latest"),
        )
    )
    for what, make in {
        "loop": lambda path: path.symlink_to("latest"),
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
        "sparse file of 1 TiB": _sparse(2**40, b"x"),
        "device": lambda path: path.symlink_to("/dev/zero"),
    }.items()
}

ROWS: dict[str, Hostile] = {
    **{
        f"pickle: {name}": Hostile(_planted(value), says=MODEL)
        for name, value in (RUNS | BOMBS | TENSORS).items()
    },
    **{
        f"optimizer's pickle: {name}": Hostile(_planted(RUNS[name], OPTIMIZER), says=OPTIMIZER)
        for name in ("os.system by REDUCE", "Popen by NEWOBJ", "os.system by INST")
    },
    **{
        f"{key}: {what}": Hostile(_planted(value, key=key))
        for key in KEYS
        for what, value in {"doubled tuples in a list": lambda _: b"]" + doubled() + b"a"}.items()
    },
    **{
        f"{key}: 2**24": Hostile(_planted(lambda _: number(2**24), key=key))
        for key in ("dp_world_size", "mp_world_size")
    },
    "dp_world_size and mp_world_size: 2**24": Hostile(
        lambda folder, _: [
            plant(folder / MODEL, number(2**24), key) for key in ("dp_world_size", "mp_world_size")
        ]
    ),
    **{
        f"{key}: {what}": Hostile(_planted(lambda _, value=value: value, key=key))
        for key in ("module", "param_shapes", "frozen_param_shapes")
        for what, value in SHAPELESS.items()
    },
    **{f"zip: {name}": row for name, row in ZIPS.items()},
    **{f"manifest: {name}": row for name, row in MANIFESTS.items()},
    **{f"place: {name}": row for name, row in PLACES.items()},
    **{f"pointer: {name}": row for name, row in POINTERS.items()},
}


def make(name: str, good: Path, folder: Path, command: str) -> Path:
    """A copy of the good checkpoint, with the attack of that row; returns its folder. `good` has
    the tag `filled`."""
    row = ROWS[name]
    shutil.copytree(good, folder, ignore=shutil.ignore_patterns("trained", "oracle.pt", "*.py"))
    (folder / "latest").write_text("filled")
    if not row.manifest:
        (folder / "filled" / MANIFEST).unlink()
    row.make(folder / "filled", command)
    return folder


@contextlib.contextmanager
def bounded(more_bytes: int) -> Iterator[None]:
    """Lets this process take at most so much more memory: what asks for more gets a MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
