"""How a good checkpoint becomes a hostile one: its files, archives, pickles and manifest."""

import hashlib
import io
import json
import os
import struct
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ucp.formats.pt.file import PtFile
from tests.formats.craft import (
    Entry,
    text,
    zip_of,
)
from tests.formats.hostile_pickles import System

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


def planted(value: Callable[[str], bytes], name: str = MODEL, key: str = "planted") -> Make:
    return lambda folder, command: plant(folder / name, value(command), key)


def archive(
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


def ends(**end: Any) -> Make:
    return lambda folder, _: (folder / MODEL).write_bytes(zip_of(records_of(folder / MODEL), **end))


def field(which: int | str, **fields: Any) -> Callable[[list[Entry], int, int], object]:
    """Other fields for the pickle ("pickle"), the first tensor ("tensor") or the record of a
    number."""

    def change(entries: list[Entry], pickle_at: int, tensor_at: int) -> None:
        at = {"pickle": pickle_at, "tensor": tensor_at}.get(str(which), which)
        entries[int(at)] = replace(entries[int(at)], **fields)

    return change


def renamed(name: bytes) -> Make:
    return archive(lambda entries, _, __: entries.append(Entry(name, b"x")))


def big_endian(entries: list[Entry], pickle_at: int, _: int) -> None:
    name = str(entries[pickle_at].name).replace("data.pkl", "byteorder")
    entries[:] = [*(entry for entry in entries if entry.name != name), Entry(name, b"big")]


def changed_bytes(change: Callable[[bytes], bytes], name: str = MODEL) -> Make:
    return lambda folder, _: (folder / name).write_bytes(change((folder / name).read_bytes()))


def changed_manifest(change: Callable[[dict[str, Any]], object]) -> Make:
    def make(folder: Path, _: str) -> None:
        data = json.loads((folder / MANIFEST).read_text())
        change(data)
        (folder / MANIFEST).write_text(json.dumps(data))

    return make


def instead(name: str, make: Callable[[Path], object]) -> Make:
    """Something else in the place of a file."""

    def change(folder: Path, _: str) -> None:
        (folder / name).unlink()
        make(folder / name)

    return change


def sparse(size_bytes: int, text: bytes = b"") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(text)
        os.truncate(path, size_bytes)

    return make


def pointer(content: bytes) -> Make:
    return lambda folder, _: (folder.parent / "latest").write_bytes(content)


def forge_manifest(folder: Path, names: tuple[str, ...] = (MODEL, OPTIMIZER)) -> None:
    """Makes the manifest vouch for the files as they are: an attacker can do that, too."""
    data = json.loads((folder / MANIFEST).read_text())
    for row in data["files"]:
        if row[0] in names:
            with PtFile(folder / row[0]) as file:
                row[1:] = [file.size_bytes, file.directory_sha256]
    (folder / MANIFEST).write_text(json.dumps(data))


def forged(value: Callable[[str], bytes]) -> Make:
    def make(folder: Path, command: str) -> None:
        plant(folder / MODEL, value(command))
        forge_manifest(folder)

    return make


def legacy(folder: Path, command: str) -> None:
    import torch

    torch.save({"planted": System(command)}, folder / MODEL, _use_new_zipfile_serialization=False)


def tar(folder: Path, _: str) -> None:
    with tarfile.open(folder / MODEL, "w") as file:
        for name in ("sys_info", "pickle", "storages"):
            file.addfile(tarfile.TarInfo(f"../{name}"), io.BytesIO())


def deflated(folder: Path, _: str) -> None:
    with zipfile.ZipFile(folder / MODEL, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(2**26))


def sparse_pickle(path: Path) -> None:
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


def safetensors(header: dict[str, Any]) -> bytes:
    data = json.dumps(header).encode()
    return struct.pack("<Q", len(data)) + data


def vouched(folder: Path, data: bytes) -> None:
    """Random states of every rank, and a manifest that vouches for them."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for row in manifest["files"]:
        if row[0].endswith(".safetensors"):
            (folder / row[0]).write_bytes(data)
            row[1:] = [len(data), hashlib.sha256(data).hexdigest()]
    (folder / MANIFEST).write_text(json.dumps(manifest))
