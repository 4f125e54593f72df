"""Hostile files: archives, manifests, things in the place of files, and pointers to tags."""

import os
import pickle
import struct
from dataclasses import replace
from pathlib import Path

from tests.formats.craft import (
    Entry,
)
from tests.formats.hostile_changes import (
    ALL_BUT_INSPECT,
    MANIFEST,
    MODEL,
    OPTIMIZER,
    RANDOM,
    Hostile,
    archive,
    big_endian,
    changed_bytes,
    changed_manifest,
    deflated,
    ends,
    field,
    forged,
    instead,
    legacy,
    pointer,
    renamed,
    safetensors,
    sparse,
    sparse_pickle,
    tar,
    vouched,
)
from tests.formats.hostile_pickles import RUNS, System

ZIPS: dict[str, Hostile] = {
    "a deflated member of 64 MiB": Hostile(deflated),
    "a deflated tensor": Hostile(archive(field("tensor", method=8))),
    "an encrypted tensor": Hostile(archive(field("tensor", flags=1))),
    "a name with ..": Hostile(renamed(b"archive/../../../tmp/x"), says="not plain"),
    "an absolute name": Hostile(renamed(b"/etc/passwd"), says="not plain"),
    "a name with a backslash": Hostile(renamed(b"archive\\..\\x"), says="not plain"),
    "a name with a NUL": Hostile(renamed(b"archive/data/0\0.txt"), says="not plain"),
    "a name that is no text": Hostile(renamed(b"archive/\xff\xfe"), says="not plain"),
    "one name twice": Hostile(
        archive(lambda entries, pickle_at, _: entries.append(entries[pickle_at])), says="twice"
    ),
    "two archives in one": Hostile(
        archive(
            lambda entries, pickle_at, _: entries.append(
                replace(entries[pickle_at], name="other/data.pkl")
            )
        )
    ),
    "a local header of another name": Hostile(
        archive(field("pickle", local_name=b"archive/data.pkX"))
    ),
    "a local header that is longer": Hostile(
        archive(field("tensor", local_extra=b"FB\2\0ZZ", size=2**20))
    ),
    "an offset past the end": Hostile(archive(field("tensor", header=2**31))),
    "an offset of 2**63": Hostile(archive(field("tensor", header=2**63, zip64=True))),
    "records that overlap": Hostile(
        archive(
            lambda entries, pickle_at, tensor_at: entries.append(Entry("archive/data/zz", header=0))
        )
    ),
    "a record that reaches into the next": Hostile(archive(field("pickle", size=2**20))),
    "a record of 2**64 bytes": Hostile(archive(field("tensor", size=2**64 - 1, zip64=True))),
    "a ZIP64 field that is missing": Hostile(archive(field("tensor", zip64=True, extra=b""))),
    "a ZIP64 field that is cut": Hostile(
        archive(field("tensor", zip64=True, extra=b"\1\0\xff\0" + bytes(8)))
    ),
    "more records than there are": Hostile(ends(count=60_000, here=60_000)),
    "a ZIP64 end that lies about the directory": Hostile(ends(end64=True, end64_start=2**62)),
    "a ZIP64 end of 2**60 records": Hostile(ends(end64=True, end64_count=2**60)),
    "a directory past the end": Hostile(ends(start=2**31)),
    "another disk": Hostile(ends(disk=1)),
    "big-endian": Hostile(archive(big_endian), sees=ALL_BUT_INSPECT),
    "half of the file": Hostile(changed_bytes(lambda data: data[: len(data) // 2]), says=MODEL),
    "an empty file": Hostile(changed_bytes(lambda data: b""), says=MODEL),
    "a legacy torch file that runs code": Hostile(legacy, says="legacy"),
    "a tar archive": Hostile(tar, says=MODEL),
    "a bare pickle": Hostile(
        lambda folder, command: (folder / MODEL).write_bytes(pickle.dumps(System(command)))
    ),
    "a sparse file of 1 TiB": Hostile(instead(MODEL, sparse(2**40, b"PK\3\4"))),
    "a sparse pickle of 1 TiB": Hostile(lambda folder, _: sparse_pickle(folder / MODEL)),
}


MANIFESTS: dict[str, Hostile] = {
    name: replace(row, manifest=True)
    for name, row in {
        "a file named ../../etc/passwd": Hostile(
            changed_manifest(lambda data: data["files"][0].__setitem__(0, "../../etc/passwd")),
            says="plain file name",
        ),
        "an absolute file name": Hostile(
            changed_manifest(lambda data: data["files"][0].__setitem__(0, "/etc/passwd")),
            says="plain file name",
        ),
        "a file of -1 bytes": Hostile(
            changed_manifest(lambda data: data["files"][0].__setitem__(1, -1))
        ),
        "a parameter of 2**200 elements": Hostile(
            changed_manifest(lambda data: data["params"][0].__setitem__(1, [2**100, 2**100])),
            sees=ALL_BUT_INSPECT,
        ),
        "a mesh of 10**18 ranks": Hostile(
            changed_manifest(lambda data: data["mesh"].__setitem__("dp", 10**18))
        ),
        "a mesh that is no mesh": Hostile(
            changed_manifest(lambda data: data.__setitem__("mesh", {"__class__": "os.system"}))
        ),
        "10**12 partitions": Hostile(
            changed_manifest(lambda data: data["buffers"][0].__setitem__("partitions", 10**12))
        ),
        "a length of 10**30": Hostile(
            changed_manifest(lambda data: data["buffers"][0].__setitem__("length", 10**30)),
            sees=ALL_BUT_INSPECT,
        ),
        "a field of another version": Hostile(
            changed_manifest(lambda data: data.__setitem__("__reduce__", "os.system"))
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
        "a sparse manifest of 1 TiB": Hostile(instead(MANIFEST, sparse(2**40))),
        "a number of a million digits": Hostile(
            lambda folder, _: (folder / MANIFEST).write_text('{"version": ' + "9" * 10**6 + "}")
        ),
        "no UTF-8": Hostile(
            lambda folder, _: (folder / MANIFEST).write_bytes(b'{"format": "\xff\xfe\xfd"}')
        ),
        "a manifest that is a pipe": Hostile(instead(MANIFEST, os.mkfifo)),
        "a manifest that is a loop": Hostile(
            instead(MANIFEST, lambda path: path.symlink_to(path.name))
        ),
        "a manifest that is a device": Hostile(
            instead(MANIFEST, lambda path: path.symlink_to("/dev/zero"))
        ),
        "a manifest that is a folder": Hostile(instead(MANIFEST, Path.mkdir)),
        "random states with a header of 2**60 bytes": Hostile(
            lambda folder, _: vouched(folder, struct.pack("<Q", 2**60) + b"{}"), sees=("load",)
        ),
        "random states with offsets past the end": Hostile(
            lambda folder, _: vouched(
                folder,
                safetensors(
                    {"torch": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}
                ),
            ),
            sees=("load",),
        ),
        "random states of another shape": Hostile(
            lambda folder, _: vouched(
                folder,
                safetensors(
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
        "random states that are a pipe": Hostile(instead(RANDOM, os.mkfifo)),
        "random states that are a device": Hostile(
            instead(RANDOM, lambda path: path.symlink_to("/dev/zero"))
        ),
        "os.system, and a manifest that vouches for it": Hostile(
            forged(RUNS["os.system by REDUCE"]), says="closed list", sees=ALL_BUT_INSPECT
        ),
    }.items()
}


PLACES: dict[str, Hostile] = {  # what stands in the place of a file or a folder
    **{
        f"a {what} in the place of the model file": Hostile(instead(MODEL, make))
        for what, make in {
            "pipe": os.mkfifo,
            "device": lambda path: path.symlink_to("/dev/zero"),
            "terminal": lambda path: path.symlink_to("/dev/tty"),
            "loop": lambda path: path.symlink_to(path.name),
            "folder": Path.mkdir,
            "dangling link": lambda path: path.symlink_to("nowhere"),
        }.items()
    },
    "a pipe in the place of an optimizer file": Hostile(instead(OPTIMIZER, os.mkfifo)),
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
    f"latest that says {what}": Hostile(pointer(content))
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
        "sparse file of 1 TiB": sparse(2**40, b"x"),
        "device": lambda path: path.symlink_to("/dev/zero"),
    }.items()
}
