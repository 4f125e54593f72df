"""Opening the index of a checkpoint of Megatron-core with as many chunks as a save of thousands of
ranks has: seconds of processor time, and peak memory, of the rank that reads it and of those to
which it is sent. A tool that compares two commits: no page shows its figures.

    python -m benchmarks.index         # two minutes
    python -m benchmarks.index --tiny  # to see that it runs

The files are those of a mixture of experts of 10^12 parameters (64 layers of 128 experts), saved by
data-parallel ranks that cut each parameter anew; they exist by their names and sizes alone. Each
measurement is a process of its own. Writes benchmarks/results/index.json.
"""

import argparse
import os
import pickle
import random
import resource
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

from benchmarks import frame
from megatron_ucp.core.box import Ints, flat_boxes
from megatron_ucp.core.flat import alone
from megatron_ucp.core.layout import Shard
from megatron_ucp.core.manifest import Manifest, Slot
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.core.plan import make_plan
from megatron_ucp.core.proof import prove
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.folder import LocalFolder
from megatron_ucp.formats.megatron.index import Index, check_files, parsed_index
from megatron_ucp.formats.megatron.params import split_keys
from megatron_ucp.formats.megatron.torch_dist import TorchDistCheckpoint

SMALL_FILES = frame.ROOT / "tests/formats/golden/megatron/td_full_tp2dp2/iter_0000003"
LAYERS, EXPERTS, HIDDEN, EXPERT_HIDDEN, VOCABULARY = 64, 128, 8192, 5120, 128000
FILES, EXPERT = 2048, "decoder.layers.mlp.experts.experts"
PREFIX = "optimizer.state."
STATES = ("", f"{PREFIX}fp32_param.", f"{PREFIX}exp_avg.", f"{PREFIX}exp_avg_sq.")
# chunks of a parameter of a state: 1.2 million chunks, and 5 million
CUTS = {"many": 18, "more": 72}
# seconds and bytes of the rank that reads, and of another one
LIMITS = {"reads": ("read", 10.0, 10**9), "is told": ("told", 1.0, 3 * 10**8)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    layers, experts = (2, 4) if options.tiny else (LAYERS, EXPERTS)
    result: dict[str, Any] = {}
    for what, cuts in CUTS.items():
        folder = options.folder / what
        count = write_folder(folder, layers, experts, 4 if options.tiny else cuts)
        result[what] = {"chunks": count, "bytes": (folder / ".metadata").stat().st_size}
        for job in (read, told):
            result[what][job.__name__] = frame.alone(job, folder).value
    rows: list[dict[str, Any]] = []
    for who, (job, seconds, size_bytes) in LIMITS.items():
        found = result["many"][job]
        rows.append(frame.claim(f"seconds of the rank that {who}", found["seconds"], seconds))
        rows.append(frame.claim(f"memory of the rank that {who}", found["peak_bytes"], size_bytes))
    return {**result, "claims": rows}


# ---- what the measured processes do


def clock() -> float:
    """Processor time of this process and of those that it waited for: other work on the machine is
    not counted."""
    return sum(os.times()[:4])


def read(folder: str) -> Callable[[], dict[str, Any]]:
    return partial(opened_by_reader, Path(folder))


def told(folder: str) -> Callable[[], dict[str, Any]]:
    return partial(opened_by_another, Path(folder))


def opened_by_reader(folder: Path) -> dict[str, Any]:
    """The rank that reads the file opens the folder, and sends the arrays."""
    started = clock()
    opened = LocalFolder(folder)
    index = parsed_index((folder / ".metadata").read_bytes(), str(folder / ".metadata"))
    parsed_s = clock() - started
    check_files(opened, index)
    checked_s = clock() - started
    data = pickle.dumps(index)
    sent_s = clock() - started
    (folder / "told").write_bytes(data)
    found = opened_as(index, opened)
    return {
        "seconds parsed": parsed_s,
        "seconds with the files": checked_s,
        "seconds with what is sent": sent_s,
        "bytes sent": len(data),
        "seconds": sent_s + found["seconds"],
        "opened": found,
        "peak_bytes": frame.memory_bytes("VmHWM"),
        "peak_bytes of its child": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def opened_by_another(folder: Path) -> dict[str, Any]:
    """Another rank gets the arrays."""
    data = (folder / "told").read_bytes()
    started = clock()
    index: Index = pickle.loads(data)  # which this benchmark wrote
    got_s = clock() - started
    found = opened_as(index, LocalFolder(folder))
    return {
        "seconds unpickled": got_s,
        "seconds": got_s + found["seconds"],
        "opened": found,
        "peak_bytes": frame.memory_bytes("VmHWM"),
    }


def opened_as(index: Index, folder: LocalFolder) -> dict[str, Any]:
    """Seconds until the checkpoint's manifest is there, and a plan of one rank's part of it: a half
    of eight experts of a layer."""
    started = clock()
    states = split_keys(index.tensors, folder / ".metadata")
    split_s = clock() - started
    with TorchDistCheckpoint(folder, CallerModel(), index, states) as opened:
        opened_s = clock() - started
        held = opened.manifest
        specs = [
            replace(spec, layout=Shard("tp", 0), on_mesh=None)
            for spec in held.params
            if spec.name.startswith("decoder.layers.1.mlp.experts.")
        ][:16]
        params = {spec.name: spec for spec in specs}
        kinds = ("fp32", "float32"), ("exp_avg", "float32"), ("exp_avg_sq", "float32")
        buffers = [alone(name, spec.elems // 2, kinds, 0) for name, spec in params.items()]
        group = held.groups[:1]
        target = Manifest(Keeper.PAPER, Mesh(tp=2), tuple(specs), tuple(buffers), group)
        wants = [
            (Slot(number, (("tp", 1),), 0, state), state)
            for number in range(len(buffers))
            for state, _ in kinds
        ]
        plan = make_plan(held, target, wants)
        prove(plan, held, target)
        planned_s = clock() - started
        read = {op.sources[0].slot for op in plan.ops}
    return {
        "seconds of keys": split_s,
        "seconds with the manifest": opened_s,
        "seconds": planned_s,
        "parameters": len(held.params),
        "chunks of parameters": len(held.buffers),
        "slots that are read": len(read),
        "copies": len(plan.ops),
    }


# ---- the folder


def write_folder(folder: Path, layers: int, experts: int, cuts: int) -> int:
    """A folder with an index and files of the sizes that it says; returns the chunks."""
    folder.mkdir()
    draw = random.Random(0)
    ends = dict.fromkeys(range(FILES), 0)
    index = IndexWriter()
    for key, shape, boxes in drawn(draw, layers, experts, cuts):
        for state in STATES:
            index.tensor(state + key, "float32" if state else "bfloat16", shape)
            for number, (start, size) in enumerate(boxes):
                file = (number * 7919 + len(index.places)) % FILES
                length = 1600 + 2 * draw.randrange(1, 10**6)
                index.chunk(start, size, f"__{file}_0.distcp", ends[file], length)
                ends[file] += length
    with open(folder / ".metadata", "wb", 2**20) as out:
        out.writelines(index.opcodes())
    for name in ("common.pt", "metadata.json"):  # of another run: the groups and what else is small
        shutil.copy(SMALL_FILES / name, folder)
    for file, size in ends.items():
        with open(folder / f"__{file}_0.distcp", "wb") as out:
            out.truncate(size)
    return len(index.places)


def drawn(
    draw: random.Random, layers: int, experts: int, cuts: int
) -> Iterator[tuple[str, Ints, Sequence[tuple[Ints, Ints]]]]:
    """The key of each weight, its shape, and the first element and shape of each chunk."""
    a_layer, an_expert = (layers,), (layers, experts)
    tensors: dict[str, tuple[Ints, Ints]] = {  # how many are stacked, and the shape of each
        "decoder.layers.self_attention.linear_qkv.weight": (a_layer, (3 * HIDDEN, HIDDEN)),
        "decoder.layers.self_attention.linear_proj.weight": (a_layer, (HIDDEN, HIDDEN)),
        "decoder.layers.input_layernorm.weight": (a_layer, (HIDDEN,)),
        "decoder.layers.pre_mlp_layernorm.weight": (a_layer, (HIDDEN,)),
        "decoder.layers.mlp.router.weight": (a_layer, (experts, HIDDEN)),
        f"{EXPERT}.linear_fc1.weight": (an_expert, (2 * EXPERT_HIDDEN, HIDDEN)),
        f"{EXPERT}.linear_fc2.weight": (an_expert, (HIDDEN, EXPERT_HIDDEN)),
        "embedding.word_embeddings.weight": ((), (VOCABULARY, HIDDEN)),
        "output_layer.weight": ((), (VOCABULARY, HIDDEN)),
        "decoder.final_layernorm.weight": ((), (HIDDEN,)),
    }
    for name, (stack, shape) in tensors.items():
        ones = (1,) * len(stack)
        boxes = [
            ((*place, *start), (*ones, *size))
            for place in product(*map(range, stack))
            for start, size in cut(draw, shape, cuts)
        ]
        yield name, (*stack, *shape), boxes


def cut(draw: random.Random, shape: Ints, cuts: int) -> Iterator[tuple[Ints, Ints]]:
    """A tensor in runs of its elements, as partitions own them, each in blocks."""
    elems = prod(shape)
    runs = max(1, cuts * 2 // 5) if len(shape) > 1 else cuts  # a run is up to three blocks
    borders = [0, *sorted(draw.sample(range(1, elems), runs - 1)), elems]
    for low, high in pairwise(borders):
        for box in flat_boxes(shape, low, high):
            yield box.start, box.shape


class IndexWriter:
    """Writes the pickle that torch would write of `Metadata`, without its objects."""

    def __init__(self) -> None:
        self._memo: dict[Any, int] = {}
        self._count = 0
        self._entries: list[tuple[str, str, Ints, list[tuple[Ints, Ints]]]] = []
        self.places: list[tuple[str, Ints, str, int, int]] = []

    def tensor(self, key: str, dtype: str, shape: Ints) -> None:
        self._entries.append((key, dtype, shape, []))

    def chunk(self, start: Ints, size: Ints, file: str, at: int, length: int) -> None:
        key, _, _, chunks = self._entries[-1]
        chunks.append((start, size))
        self.places.append((key, start, file, at, length))

    def pickled(self) -> bytes:
        return b"".join(self.opcodes())

    def opcodes(self) -> Iterator[bytes]:
        metadata, files = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint"
        yield b"\x80\x04" + self._object(metadata, "Metadata") + self._put() + b"}" + self._put()
        yield b"(" + self._text("state_dict_metadata") + b"}" + self._put() + b"("
        for key, dtype, shape, chunks in self._entries:
            yield self._text(key) + self._object(metadata, "TensorStorageMetadata") + self._put()
            yield b"}" + self._put() + b"(" + self._text("properties")
            yield self._object(metadata, "TensorProperties") + self._put() + b"("
            yield self._class("torch", dtype)
            yield self._class("torch.serialization", "_get_layout") + self._text("torch.strided")
            yield b"\x85" + self._put() + b"R" + self._put() + b"\x89"
            yield self._class(metadata, "_MEM_FORMAT_ENCODING") + b"K\0\x85" + self._put()
            yield b"R" + self._put() + b"\x89t" + self._put() + b"b"
            yield self._text("size") + self._size(shape) + self._text("chunks")
            yield b"]" + self._put()
            for first in range(0, len(chunks), 1000):
                yield b"("
                for start, size in chunks[first : first + 1000]:
                    yield self._object(metadata, "ChunkStorageMetadata") + self._put() + b"}"
                    yield self._put() + b"(" + self._text("offsets") + self._size(start)
                    yield self._text("sizes") + self._size(size) + b"ub"
                yield b"e"
            yield b"ub"
        yield b"u" + self._text("planner_data") + b"N" + self._text("storage_data") + b"}"
        yield self._put()
        for first in range(0, len(self.places), 1000):
            yield b"("
            for key, start, file, at, length in self.places[first : first + 1000]:
                yield self._object(metadata, "MetadataIndex") + self._put() + b"}" + self._put()
                yield b"(" + self._text("fqn") + self._text(key) + self._text("index") + b"N"
                yield self._text("offset") + self._size(start) + b"ub"
                yield self._object(f"{files}.filesystem", "_StorageInfo") + self._put() + b"}"
                yield self._put() + b"(" + self._text("relative_path") + self._text(file)
                yield self._text("offset") + number(at) + self._text("length") + number(length)
                yield b"ub"
            yield b"u"
        yield self._text("version") + self._text("1.0.0") + b"ub."

    def _put(self) -> bytes:
        self._count += 1
        return b"\x94"

    def _get(self, key: Any) -> bytes:
        """A reference to what was made before; nothing for what is made now."""
        known = self._memo.get(key)
        if known is None:
            return b""
        return b"h" + bytes([known]) if known < 256 else b"j" + struct.pack("<I", known)

    def _text(self, text: str) -> bytes:
        if known := self._get(text):
            return known
        self._memo[text] = self._count
        data = text.encode()
        return b"\x8c" + bytes([len(data)]) + data + self._put()

    def _class(self, module: str, name: str) -> bytes:
        if known := self._get((module, name)):
            return known
        code = self._text(module) + self._text(name) + b"\x93"
        self._memo[module, name] = self._count
        return code + self._put()

    def _object(self, module: str, name: str) -> bytes:
        return self._class(module, name) + b")\x81"

    def _size(self, value: Ints) -> bytes:
        if known := self._get(value):
            return known
        code = self._class("torch", "Size") + (b"(" if len(value) > 3 else b"")
        end = (b")", b"\x85", b"\x86", b"\x87", b"t")[min(len(value), 4)]
        code += b"".join(map(number, value)) + end + self._put() + b"\x85" + self._put() + b"R"
        self._memo[value] = self._count
        return code + self._put()


def number(value: int) -> bytes:
    """A whole number from 0 on."""
    if value < 256:
        return b"K" + bytes([value])
    if value < 65536:
        return b"M" + struct.pack("<H", value)
    if value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little")
    return b"\x8a" + bytes([len(data)]) + data


if __name__ == "__main__":
    raise SystemExit(frame.main("index"))
