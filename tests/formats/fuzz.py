"""Random damage to real files, by number: the same number is the same damage."""

import copy
import json
import pickletools
import random
import re
import struct
import time
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.manifest import FILE_NAME, FileEntry
from megatron_ucp.core.manifest_json import from_json, to_json
from megatron_ucp.errors import UcpError
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.pt.pickle import dumps
from megatron_ucp.formats.pt.refs import StorageRef, TensorRef
from megatron_ucp.formats.pt.unpickle import loads
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.look import look
from tests.formats.craft import (
    Entry,
    call,
    dict_of,
    mutated,
    named,
    number,
    numbers,
    storage,
    tensor,
    text,
    tuple_of,
    watch,
    zip_of,
)

MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
TIME_S = 5.0
# Opcodes, alone and in groups, that a mutation puts in: among them each way to name, call and
# change something.
SNIPPETS = [
    *(
        bytes([code])
        for code in b"(t)}]\x85\x86\x87Rb\x81\x92ues "
        b"a\x90\x91\x8f201Q\x93dlN\x88\x89\x94.io\x82\x97\x98"
    ),
    b"K\x05",
    b"J\xff\xff\xff\xff",
    b"q\x00",
    b"h\x00",
    b"r\xff\xff\xff\xff",
    text("x"),
    text("0"),
    text("step"),
    numbers(2, 3),
    number(2**70),
    number(-1),
    named("os.system"),
    named("builtins.getattr"),
    named("builtins.set"),
    named("subprocess.Popen"),
    named("torch._utils._rebuild_tensor_v2"),
    named("collections.OrderedDict"),
    named("argparse.Namespace"),
    named("numpy.dtype"),
    named("torch.Size"),
    named("torch.float16"),
    storage(),
    storage("0", 2**59),
    tensor(storage(), 0, numbers(2), numbers(1)),
    call("os.system", tuple_of(text("true"))),
    call("collections.OrderedDict"),
    dict_of(text("a"), b"N"),
    b")" + b"2\x86" * 40,
    call("collections.Counter"),
    call("builtins.bytearray", numbers(2**40)),
    b"\x8d" + b"\xff" * 8,
    b"\x8b\xff\xff\xff\x7f",
]
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**24,
    2**70,
    0.5,
    float("nan"),
    "",
    "x",
    "../x",
    b"x",
    [],
    {},
    (),
    [None],
    ["x"],
    [-1],
    {"x": 1},
    {0: {}},
    [[]],
    [{}],
    ({},),
    (2**40, 2**40),
    [0] * 50,
    {"a": {"b": {"c": []}}},
    TensorRef(StorageRef("0", "float32", 1), 0, (), ()),
    TensorRef(StorageRef("zz", "int64", 4), 0, (4,), (1,)),
]


@dataclass(frozen=True)
class Good:
    """A checkpoint of stock DeepSpeed's layout, ZeRO-1 on two ranks, as bytes by file name; and a
    manifest of it."""

    files: dict[str, bytes]
    manifest: str


def good(folder: Path) -> Good:
    shapes = OrderedDict(
        (name, torch.Size(shape))
        for name, shape in (("a.weight", (4, 3)), ("a.bias", (5,)), ("b", ()))
    )
    module = OrderedDict((name, torch.rand(shape).bfloat16()) for name, shape in shapes.items())
    module["calls"] = torch.tensor(3)
    model = {
        "module": module,
        "buffer_names": ["calls"],
        "optimizer": None,
        "param_shapes": [shapes],
        "frozen_param_shapes": None,
        "shared_params": {"tied": "a.weight"},
        "lr_scheduler": {"last_epoch": 7, "base_lrs": [0.1]},
        "skipped_steps": 0,
        "global_steps": 7,
        "global_samples": 28,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        "ds_config": {"bf16": {"enabled": True}},
        "mine": {"note": "text", "data": torch.arange(4)},
    }
    _save(model, folder / MODEL)
    for part in range(2):
        _save({"optimizer_state_dict": _optimizer_part()}, folder / OPTIMIZER.format(part))
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    with open_checkpoint(folder) as checkpoint:
        entries = []
        for name in files:
            with PtFile(folder / name) as file:
                entries.append(FileEntry(name, file.size_bytes, file.directory_sha256))
        manifest = replace(checkpoint.manifest, files=tuple(entries), save_id="0" * 32)
        return Good(files, to_json(manifest))


def _optimizer_part() -> dict[str, Any]:
    entry = {"step": torch.tensor(7.0), "exp_avg": torch.rand(10), "exp_avg_sq": torch.rand(10)}
    return {
        "zero_stage": 1,
        "partition_count": [2],
        "single_partition_of_fp32_groups": [torch.rand(10)],
        "loss_scaler": None,
        "base_optimizer_state": {
            "state": {0: entry},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
        },
    }


def _save(value: object, path: Path) -> None:
    out = BytesIO()
    torch.save(value, out)
    path.write_bytes(out.getvalue())


# ------------------------------------------------ damage


def _entries(data: bytes) -> tuple[list[Entry], int]:
    with zipfile.ZipFile(BytesIO(data)) as file:
        entries = [Entry(info.filename, file.read(info)) for info in file.infolist()]
    return entries, next(
        n for n, entry in enumerate(entries) if str(entry.name).endswith("/data.pkl")
    )


def _with_pickle(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    entries, at = _entries(data)
    entries[at] = replace(entries[at], data=change(entries[at].data))
    return zip_of(entries)


def opcodes(data: bytes, rng: random.Random) -> bytes:
    """Puts opcodes between others, takes some out, copies some elsewhere."""
    starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, other = rng.choice(starts), rng.choice(starts)
        if (what := rng.randrange(4)) == 0:
            del out[
                min(at, other) : max(at, other)
                if rng.random() < 0.1
                else min(at, other) + rng.randint(1, 9)
            ]
        elif what == 1:
            out[at:at] = data[other : other + rng.randint(1, 60)]
        else:
            out[at:at] = rng.choice(SNIPPETS)
    return bytes(out)


def lengths(data: bytes, rng: random.Random) -> bytes:
    """Sets numbers of 2, 4 or 8 bytes to extremes, mostly in the directory at the end."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        size = rng.choice((2, 4, 8))
        at = rng.randrange(max(0, len(out) - 900) if rng.random() < 0.7 else 0, len(out) - size)
        old = int.from_bytes(out[at : at + size], "little")
        most = 2 ** (8 * size)
        value = rng.choice(
            (0, 1, old + 1, old - 1, old * 2, most - 1, most // 2, len(out), rng.randrange(2**16))
        )
        out[at : at + size] = struct.pack({2: "<H", 4: "<I", 8: "<Q"}[size], value % most)
    return bytes(out)


def splice(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """The beginning of one file and the end of another."""
    return data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a tree of dicts and lists."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


def values(tree: Any, rng: random.Random) -> None:
    """Puts other values in the places of some, and takes some out."""
    for _ in range(rng.randint(1, 3)):
        holder, key = rng.choice(list(places(tree)) or [({}, 0)])
        if rng.random() < 0.15 and isinstance(holder, dict):
            holder.pop(key, None)
        elif rng.random() < 0.1 and isinstance(holder, dict):
            holder[rng.choice((0, "x", "step", None))] = copy.deepcopy(rng.choice(VALUES))
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))


def _json_values(text: str, rng: random.Random) -> bytes:
    tree = json.loads(text)
    values(tree, rng)
    return json.dumps(tree, default=lambda _: "x").encode()


# ------------------------------------------------ one input


def kinds_of(seed: int) -> str:
    return (
        "pickle",
        "opcodes",
        "file",
        "directory",
        "lengths",
        "splice",
        "values",
        "manifest",
        "manifest values",
    )[seed % 9]


def damaged(source: Good, seed: int) -> tuple[str, bytes]:
    """File name and damaged bytes of the input of that number."""
    rng, kind = random.Random(seed), kinds_of(seed)
    if kind.startswith("manifest"):
        return FILE_NAME, _json_values(source.manifest, rng) if kind.endswith(
            "values"
        ) else mutated(source.manifest.encode(), seed)
    name = rng.choice(sorted(source.files))
    data = source.files[name]
    if kind == "pickle":
        return name, _with_pickle(data, lambda pickled: mutated(pickled, seed))
    if kind == "opcodes":
        return name, _with_pickle(data, lambda pickled: opcodes(pickled, rng))
    if kind == "values":

        def change(pickled: bytes) -> bytes:
            tree = loads(pickled, file=name)
            values(tree, rng)
            return dumps(tree)

        return name, _with_pickle(data, change)
    if kind == "directory":
        return name, data[:-900] + mutated(data[-900:], seed)
    return name, {
        "file": lambda: mutated(data, seed),
        "lengths": lambda: lengths(data, rng),
        "splice": lambda: splice(data, rng.choice(sorted(source.files.values())), rng),
    }[kind]()


def use(folder: Path, name: str) -> None:
    """All that reads a file, and for one in nine the whole checkpoint too."""
    if name == FILE_NAME:
        from_json((folder / name).read_bytes(), name)
        look(folder)
        return
    with PtFile(folder / name) as file:
        tree = file.tree
        for record in file.records.values():
            file.check(record)
        for value in tree.values() if isinstance(tree, dict) else ():
            if isinstance(value, TensorRef):
                file.record(value.storage)


def whole(folder: Path) -> None:
    """The checkpoint: its structure, and where every slot lies."""
    with open_checkpoint(folder) as checkpoint:
        str(checkpoint.manifest)


@dataclass
class Found:
    """What a run over many inputs found: `outcomes` by kind of input and error, `wrong` inputs with
    what they did."""

    outcomes: Counter[tuple[str, str]]
    wrong: list[str]
    slowest_s: float = 0.0


def run(source: Good, folder: Path, seeds: range, also_whole: int = 4) -> Found:
    """Gives every input to the readers; every `also_whole`-th and all of changed values to the
    whole checkpoint too."""
    found = Found(Counter(), [])
    for name, data in source.files.items():
        (folder / name).write_bytes(data)
    for seed in seeds:
        name, data = damaged(source, seed)
        (folder / name).write_bytes(data)
        readers: list[Callable[[], None]] = [lambda name=name: use(folder, name)]
        if kinds_of(seed) in ("values", "manifest values") or seed // 9 % also_whole == 0:
            readers.append(lambda: whole(folder))
        started = time.process_time()
        for read in readers:
            outcome = _outcome(read, folder)
            found.outcomes[kinds_of(seed), outcome] += 1
            if outcome.startswith("!"):
                found.wrong.append(f"{seed} ({kinds_of(seed)}, {name}): {outcome}")
        seconds = time.process_time() - started
        found.slowest_s = max(found.slowest_s, seconds)
        if seconds > TIME_S:
            found.wrong.append(f"{seed} ({kinds_of(seed)}, {name}): {seconds:.1f} s")
        if name == FILE_NAME:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(source.files[name])
    return found


def _outcome(read: Callable[[], None], folder: Path) -> str:
    """The error's class, "value", or what must not be with a "!" before it."""
    with watch() as events:
        try:
            read()
            outcome = "value"
        except UcpError as error:
            outcome = type(error).__name__ if str(error) else "! an error without a word"
            if isinstance(error.__cause__, MemoryError):
                outcome = "! MemoryError"
        except Exception as error:
            trace, where = error.__traceback__, ""
            while trace is not None:
                where, trace = (
                    f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}",
                    trace.tb_next,
                )
            outcome = f"! {type(error).__name__}: {str(error)[:100]} at {where}"
    odd = [
        event
        for event in events
        if not re.match(rf"open \(('{folder}.*|[0-9]+), ('r'|None), ", event)
    ]
    return f"! {odd[0]}" if odd else outcome
