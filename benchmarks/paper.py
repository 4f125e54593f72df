"""Checkpoints that this package's writer makes without training, and manifests of runs that exist
on paper only."""

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron_ucp.core.experts import file_rank
from megatron_ucp.core.flat import alone
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import FILE_NAME, FileEntry, Manifest, ParamGroup
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import EXPERT_CUT, Mesh
from megatron_ucp.core.names import MASTER, Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.families import find_family
from megatron_ucp.families.family import Family, Model, Sizes
from megatron_ucp.families.settings import RECORDED, Architecture
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.checkpoint import Extras
from megatron_ucp.formats.deepspeed import files
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.deepspeed.writer import NativeWriter, RunSettings
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.pt.archive import write_pt
from megatron_ucp.reshard.target import Conversion, target_manifest

# models of about 124 million and of about a billion parameters
GPT = {
    "124M": "layers=12,hidden=768,heads=12,vocab=50304,positions=1024",
    "1B": "layers=24,hidden=1792,heads=14,vocab=50304,positions=1024",
    "tiny": "layers=2,hidden=64,heads=4,vocab=512,positions=64",
}
LLAMA = {
    "124M": "layers=12,hidden=768,heads=12,groups=4,ffn=2048,vocab=32000",
    "1B": "layers=22,hidden=2048,heads=32,groups=4,ffn=5632,vocab=32000",
    "tiny": "layers=2,hidden=64,heads=4,groups=2,ffn=176,vocab=512",
}
# 1.04 x 10^12 parameters; 4.2 x 10^11 parameters
MIXTURE = "layers=64,hidden=8192,heads=64,groups=8,ffn=5120,vocab=128000,experts=128"
DENSE = "layers=128,hidden=16384,heads=128,vocab=128000,positions=1024"
MIXTURE_MESH = Mesh(tp=8, pp=16, ep=16, dp=128, zero=1)  # 16,384 ranks
DENSE_MESH = Mesh(tp=8, pp=16, dp=128, zero=1)
TWO_RANKS, BLOCK_BYTES = Mesh(dp=2, zero=1), 2**20
ADAM = ((MASTER, "float32"), ("exp_avg", "float32"), ("exp_avg_sq", "float32"))


def written(folder: Path, sizes: str, family: str = "gpt", mesh: Mesh = TWO_RANKS) -> Path:
    """A checkpoint of such a model at ZeRO-1, in bf16: every number is 1.5."""
    target = Target(mesh, "bfloat16").completed({})
    known = paper_sizes(family, sizes)
    model = paper_manifest(find_family(family), known)
    manifest = target_manifest(Conversion(model, target, "paper"))
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    none = LossScale()
    extras = Extras({"global_steps": 1, "global_samples": 2}, None, none, config, {})
    run = RunSettings(extras, config, "0.19.8", "bfloat16", none, 1.0, False, lambda _: None)
    out = folder / "written"
    out.mkdir()
    outputs = [*NativeWriter(manifest, run, None).outputs()]
    for output in outputs:
        write_pt(out / output.name, output.tree, partial(payload, output.payloads))
    entries = tuple(output_folder.entry_of(out / output.name) for output in outputs)
    manifest = replace(manifest, files=entries, save_id="written", run=run_of(known))
    (out / FILE_NAME).write_text(to_json(manifest))
    return out


def payload(given: Any, storage: Any) -> Iterator[bytes]:
    """The bytes of a storage, in blocks."""
    number = b"\0\0\xc0\x3f" if storage.dtype == "float32" else b"\xc0\x3f"
    block = number * (BLOCK_BYTES // len(number))
    known = given[storage.key]
    for low in range(0, storage.size_bytes, BLOCK_BYTES):
        size = min(BLOCK_BYTES, storage.size_bytes - low)
        yield known if isinstance(known, bytes) else block[:size]


def run_of(sizes: Any) -> dict[str, Any]:
    """What a manifest says of a run, and of its model: an export asks for it."""
    architecture = Architecture(1024, 1e-5, "silu" if sizes.gated else "gelu")
    says = {"sizes": asdict(sizes), "architecture": asdict(architecture)}
    steps = {"global_steps": 1, "skipped_steps": 0}
    return {**steps, "ds_version": "0.19.8", "seed": 1, RECORDED: says}


# ---- runs on paper


def paper_sizes(family: str, text: str) -> Sizes:
    """From `layers=32,hidden=4096,heads=32,vocab=32000`; the rest is the family's, or follows."""
    found = find_family(family)
    given = {name: int(value) for name, value in (one.split("=") for one in text.split(","))}
    usual = {
        "groups": given["heads"],
        "head_dim": given["hidden"] // given["heads"],
        "ffn": 4 * given["hidden"],
        "true_vocab": given["vocab"],
        **(found.builder.flags if found.builder else {}),
    }
    return found.sizes(**{**usual, **given})  # type: ignore[arg-type]


def paper_manifest(family: Family, sizes: Sizes) -> Manifest:
    """A model on one rank, with fp32 masters and Adam's two moments: two groups, matrices with
    weight decay and all else without."""
    model = Model(family, sizes)
    specs = [declared.spec(name, "bfloat16") for name, declared in model.table.items()]
    params = tuple(spec for spec in specs if spec.kind != "buffer")
    buffers = [
        alone(spec.name, spec.elems, ADAM, int(len(spec.shape) <= 1), {"step": 1.0})
        for spec in sorted(params, key=lambda spec: len(spec.shape) <= 1)
    ]
    groups = (ParamGroup({"weight_decay": 0.1}), ParamGroup({"weight_decay": 0.0}))
    return Manifest(Keeper.ZERO_0, Mesh(), params, tuple(buffers), groups, family=model.family.name)


def mixture() -> Manifest:
    """A mixture of experts of 10^12 parameters on 16,384 ranks, with DeepSpeed's files of it."""
    model = paper_manifest(find_family("mixtral"), paper_sizes("mixtral", MIXTURE))
    names = [*file_names(MIXTURE_MESH, layers=64, experts=128)]
    return replace(on_mesh(model, MIXTURE_MESH), files=entries_of(names, 10**9), save_id="0" * 32)


def dense() -> Manifest:
    """A dense GPT on 16,384 ranks, with DeepSpeed's files of it."""
    model = paper_manifest(find_family("gpt"), paper_sizes("gpt", DENSE))
    names = [*file_names(DENSE_MESH, layers=128)]
    run = {"global_steps": 1000}
    parts = {"files": entries_of(names, 1000), "save_id": "0" * 32, "run": run}
    return replace(on_mesh(model, DENSE_MESH), **parts)


def entries_of(names: list[str], size_bytes: int) -> tuple[FileEntry, ...]:
    """Files of these sizes: the first one has `size_bytes`, each other one a byte more."""
    numbers = enumerate(names)
    return tuple(FileEntry(name, size_bytes + at, f"{at:064x}") for at, name in numbers)


def file_names(mesh: Mesh, layers: int, experts: int = 0) -> Iterator[str]:
    """As DeepSpeed names them, and our random states."""
    tensors = range(mesh.tp)
    for mp in range(mesh.tp * mesh.pp):
        yield files.model_name(mp)
        yield from (files.optimizer_name(dp, mp) for dp in range(mesh.dp))
        yield from (files.expert_optimizer_name(ep, mp) for ep in range(mesh.ep if experts else 0))
    for layer in range(layers + 2):
        yield from (files.layer_name(layer, tp) for tp in tensors)
    for layer in range(layers):
        for expert in range(experts):
            yield from (files.expert_file_name(layer, expert, tp) for tp in tensors)
    yield from (f"ucp_rng_{rank:05d}.safetensors" for rank in range(mesh.world))


def state_file(manifest: Manifest, slot: Slot) -> str:
    """The file in which DeepSpeed would keep a slot of a manifest that trains in bf16."""
    buffer, mesh = manifest.buffers[slot.buffer], manifest.mesh
    rank = mesh.rank_of((*buffer.at, *slot.cut), slot.part)
    mp = buffer.stage * mesh.tp + mesh.coord(rank).tp
    if buffer.stepped and manifest.keeper != Keeper.ZERO_0:
        return files.optimizer_name(mesh.partition_of(rank), mp, "bf16_")
    ep, etp = mesh.expert_place(rank)
    if buffer.stepped and buffer.axes == EXPERT_CUT:
        return files.expert_optimizer_name(ep, file_rank(mesh, buffer.stage, ep, etp))
    return files.model_name(mp, slot.part if mesh.zero == 3 else None)


def on_mesh(model: Manifest, mesh: Mesh) -> Manifest:
    """A model on a mesh whose stages have as many layers each, the first ones rounded up."""
    layers = in_a_row(spec.name for spec in model.params)
    count = len(layers.held) - 2
    most = -(-count // mesh.pp)
    sizes = [min(most, count - most * stage) for stage in range(mesh.pp)]
    sizes[0] += 1
    sizes[-1] += 1
    target = Target(mesh, dtype="bfloat16", stages=tuple(sizes)).completed({})
    return target_manifest(Conversion(model, target, "", layers))


def in_a_row(names: Iterable[str]) -> Layers:
    """The embedding, each layer, and what comes after the last one, as a pipeline has them."""
    of: dict[int, list[str]] = {}
    for name in names:
        found = re.match(r"decoder\.layers\.(\d+)\.", name)
        first = 0 if name.startswith("embedding.") else sys.maxsize
        of.setdefault(int(found[1]) + 1 if found else first, []).append(name)
    held = [{name: f"{at}.{name}" for name in of[place]} for at, place in enumerate(sorted(of))]
    known = {pipe: name for one in held for name, pipe in one.items()}
    return Layers(tuple(held), known, frozenset())
