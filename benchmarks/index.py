"""Opening the index of a checkpoint of Megatron-core with as many chunks as a save of thousands of
ranks has: seconds of processor time, and peak memory, of the rank that reads it and of those to
which it is sent.

    python -m benchmarks.index         # two minutes, 4 GiB of memory
    python -m benchmarks.index --tiny  # to see that it runs

The files are those of a mixture of experts of 10^12 parameters (64 layers of 128 experts), saved by
data-parallel ranks that cut each parameter anew; they exist by their names and sizes alone. Each
measurement is a process of its own. Results: benchmarks/results/index.json, "Many ranks" in
docs/reference/performance.md.
"""

import argparse
import os
import pickle
import random
import resource
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
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
CUTS = 18  # chunks of a parameter of a state: 1.2 million chunks
# job, and the most seconds and megabytes that it may take
LIMITS = {"reads": ("read", 10.0, 1000), "is told": ("told", 1.0, 300)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    folder, sizes = options.folder / "index", (2, 4, 4) if options.tiny else (LAYERS, EXPERTS, CUTS)
    result: dict[str, Any] = {"chunks": write_folder(folder, *sizes)}
    result["bytes"] = (folder / ".metadata").stat().st_size
    for job in (read, told):
        result[job.__name__] = frame.alone(job, folder).value
    claims: list[dict[str, Any]] = []
    for who, (job, *most) in LIMITS.items():
        found = result[job]["seconds"], result[job]["peak_bytes"] / 1e6
        for what, value, limit in zip(("seconds", "MB"), found, most, strict=True):
            claims.append(frame.claim(f"{what} of the rank that {who}", value, limit))
    return {**result, "claims": claims}


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

# a tensor's key, dtype and shape; of each chunk the first element, shape, file, place and size
Drawn = tuple[str, str, Ints, list[tuple[Ints, Ints, str, int, int]]]


def write_folder(folder: Path, layers: int, experts: int, cuts: int) -> int:
    """A folder with an index and files of the sizes that it says; returns the chunks."""
    folder.mkdir()
    draw, ends, tensors = random.Random(0), dict.fromkeys(range(FILES), 0), list[Drawn]()
    for key, shape, boxes in drawn(draw, layers, experts, cuts):
        for state in STATES:
            chunks = []
            for number, (start, size) in enumerate(boxes):
                file = (number * 7919 + len(tensors)) % FILES
                length = 1600 + 2 * draw.randrange(1, 10**6)
                chunks.append((start, size, f"__{file}_0.distcp", ends[file], length))
                ends[file] += length
            dtype = "float32" if state else "bfloat16"
            tensors.append((state + key, dtype, shape, chunks))
    (folder / ".metadata").write_bytes(pickled(tensors))
    for name in ("common.pt", "metadata.json"):  # of another run: the groups and what else is small
        shutil.copy(SMALL_FILES / name, folder)
    for file, size in ends.items():
        with open(folder / f"__{file}_0.distcp", "wb") as out:
            out.truncate(size)
    return sum(len(chunks) for *_, chunks in tensors)


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


def pickled(tensors: Iterable[Drawn]) -> bytes:
    """The index that torch would write of these tensors."""
    import torch  # here, as the measured processes have none
    from torch.distributed.checkpoint import metadata as its
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    index = its.Metadata({}, storage_data={})
    for key, dtype, shape, chunks in tensors:
        properties, places = its.TensorProperties(getattr(torch, dtype)), list[Any]()
        for start, size, file, at, length in chunks:
            first = torch.Size(start)
            places.append(its.ChunkStorageMetadata(first, torch.Size(size)))
            index.storage_data[its.MetadataIndex(key, first)] = _StorageInfo(file, at, length)
        tensor = its.TensorStorageMetadata(properties, torch.Size(shape), places)
        index.state_dict_metadata[key] = tensor
    return pickle.dumps(index, protocol=4)


if __name__ == "__main__":
    raise SystemExit(frame.main("index"))
