"""Saving: the time in this package's own code, fsync apart, on 124 million parameters and two
ranks; the size of a manifest.

    python -m benchmarks.save                         # about ten minutes
    python -m benchmarks.save --tiny --repetitions 2  # to see that it runs

Then every way to save in turns, against copies of the same bytes on disk (`cp` and `sync`) and in
memory (by torch; a save's own copies take two thirds of that), and how even the ranks write at
ZeRO-1 on four ranks. Beside them torch's own async_save of as many bytes, megatron-core's save of
its stack of as many parameters, steps per second while a save is under way, and the host memory
that one takes and leaves, as another process sees it.

Own time is what a save takes beyond DeepSpeed's own call inside it, measured with `durable=False`;
the slowest rank counts. fsync is measured by saves with `durable=True`, interleaved, which are also
what own time is compared with: it is the default. The manifest is of a run that exists on paper
only: 16,384 ranks, a mixture of experts with 10^12 parameters. Writes benchmarks/results/save.json.
"""

import argparse
import json
import math
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import save_ranks
from benchmarks.cases import Mesh
from benchmarks.machine import description
from benchmarks.model import TINY
from benchmarks.tool import claim
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.layout import Replicate, Shard
from megatron_ucp.core.manifest import FileEntry, Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import Mesh as WholeMesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.formats.deepspeed.buffers import whole_length
from tests.ranks import RankPool

# of the ways to save: what, numerator, denominator, "at most" or "at least", limit
WAYS = [
    ("training waits / stock's whole save", "background blocked", "stock seconds", 0.1),
    ("direct / cp and sync", "direct seconds", "cp and sync seconds", 1.05),
    ("background / cp and sync", "background seconds", "cp and sync seconds", 1.2),
    ("direct / stock, both on disk", "direct seconds", "stock seconds", 1 / 1.8),
]
COPY, FASTEST = "copy in memory blocked", "copy in memory fastest"
BLOCKED_LIMIT, LARGER_BLOCKED_LIMIT, OWN_LIMIT_MS = 1.1, 1.15, 15.0
EVEN_RANKS, EVEN_LIMIT = 4, 1.02
LARGER = {"width": 1024, "layers": 24}
STACK = {"hidden": 768, "layers": 12, "vocab": 50304}
# over the bytes that a rank writes; a process doesn't give the last pages back
MEMORY_LIMIT, LEFT_LIMIT = 1.05, 0.01
RANKS, RESULTS = 2, Path(__file__).parent / "results" / "save.json"
OWN_LIMIT, MANIFEST_LIMIT_BYTES = 0.01, 64 * 10**6
PAPER = WholeMesh(tp=8, pp=16, ep=16, dp=128, zero=1)
LAYERS, WIDTH, EXPERT_WIDTH, EXPERTS, VOCABULARY = 64, 8192, 5120, 128, 128000


def main() -> int:
    args = parse()
    folder = Path(tempfile.mkdtemp(prefix="saves_", dir=args.folder))
    pool = RankPool(RANKS, gloo=True)
    try:
        found: list[list[dict[str, Any]]] = pool.run(
            RANKS,
            save_ranks.measure,
            str(folder),
            TINY if args.tiny else {},
            args.repetitions,
            timeout_s=1000,
        )
        ways = measured_ways(pool, folder, TINY if args.tiny else {}, args.ways_repetitions)
    finally:
        pool.close()
        shutil.rmtree(folder)
    result = evaluated([slowest(found, number) for number in range(args.repetitions)])
    result["ways"] = [*claims_of(ways, BLOCKED_LIMIT), own_constant(ways), even(folder, args)]
    result["seconds of ways"] = ways
    if not args.tiny:
        result["ways of 354M"] = claims_of(measured_larger(folder, args), LARGER_BLOCKED_LIMIT)
    result["memory"], result["steps per second"] = measured_beside(folder, args)
    stack = measured_stack(folder, args)
    result["others"] = {name: statistics.median(each) for name, each in (ways | stack).items()}
    print(told(result))
    if not args.tiny:
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if args.tiny or (result["met"] and result["manifest"]["met"]) else 1


def measured_larger(folder: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """The same of a larger model, without torch's own: what costs the same for any model weighs
    less."""
    pool = RankPool(RANKS, gloo=True)
    try:
        return measured_ways(pool, folder, LARGER, args.others_repetitions, others=False)
    finally:
        pool.close()
        shutil.rmtree(folder, ignore_errors=True)


def measured_ways(
    pool: RankPool, folder: Path, size: dict[str, int], repetitions: int, others: bool = True
) -> dict[str, list[float]]:
    """Seconds of every way to save, of the rank that took longest."""
    call = (save_ranks.measure_ways, str(folder / "ways"), Mesh(1))
    found = pool.run(RANKS, *call, size, repetitions, others, timeout_s=1000)
    out: dict[str, list[float]] = {}
    for each in zip(*found, strict=True):
        for way in each[0]:
            for key in each[0][way].keys() - {"bytes"}:
                out.setdefault(f"{way} {key}", []).append(max(rank[way][key] for rank in each))
    return out


def measured_beside(
    folder: Path, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """What was claimed of host memory, of the rank that takes most; steps per second."""
    size = TINY if args.tiny else {}
    found = anew(RANKS, folder, "beside_training", Mesh(1), size, args.others_repetitions)
    most, left = (max(max(rank[key]) for rank in found) for key in ("most", "left"))
    rows = [
        claim("host memory of a background save / this rank's bytes", most, MEMORY_LIMIT),
        claim("host memory that a wait leaves / this rank's bytes", left, LEFT_LIMIT),
    ]
    steps = {key: statistics.median(found[0][key]) for key in ("beside", "without")}
    return rows, {**steps, "ratio": steps["beside"] / steps["without"]}


def measured_stack(folder: Path, args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of megatron-core's stack, of the rank that took longest."""
    size = {"layers": 2} if args.tiny else STACK
    found = anew(RANKS, folder, "measure_stack", size, args.others_repetitions)
    return {
        way: [max(each) for each in zip(*(rank[way] for rank in found), strict=True)]
        for way in found[0]
    }


def anew(ranks: int, folder: Path, job: str, *args: Any) -> list[Any]:
    """What new processes give, which hold no memory of what ran before."""
    pool = RankPool(ranks, gloo=True)
    try:
        return pool.run(ranks, getattr(save_ranks, job), str(folder), *args, timeout_s=1000)
    finally:
        pool.close()
        shutil.rmtree(folder, ignore_errors=True)


def claims_of(ways: dict[str, list[float]], blocked: float) -> list[dict[str, Any]]:
    """Of medians; `blocked` is the limit of the seconds in which training waits for a background
    save, by those of a copy."""
    medians = {name: statistics.median(each) for name, each in ways.items()}
    waits = ("training waits / copy in memory", "background blocked", COPY, blocked)
    return [
        claim(what, medians[top] / medians[bottom], limit)
        for what, top, bottom, limit in (waits, *WAYS)
    ]


def own_constant(ways: dict[str, list[float]]) -> dict[str, Any]:
    """What training waits for beyond a copy as a save makes it and DeepSpeed's own code, in
    milliseconds."""
    own = statistics.median(ways["background own"]) - statistics.median(ways[FASTEST])
    return claim("milliseconds of its own code that training waits for", 1000 * own, OWN_LIMIT_MS)


def even(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """How much more than the mean one rank writes, at ZeRO-1 on four ranks."""
    sizes = anew(EVEN_RANKS, folder, "bytes_by_rank", Mesh(1), TINY if args.tiny else {})[0]
    return claim("most bytes by one rank / mean", max(sizes) / statistics.mean(sizes), EVEN_LIMIT)


def slowest(found: list[list[dict[str, Any]]], number: int) -> dict[str, dict[str, float]]:
    """Of a repetition: the seconds of the rank that took longest."""
    keys = ("own", "stock", "sync", "seconds")
    return {
        kind: {key: max(rank[number][kind][key] for rank in found) for key in keys}
        for kind in ("durable", "not durable")
    }


def evaluated(each: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over the repetitions, and what was claimed."""

    def median(kind: str, key: str) -> float:
        return statistics.median(one[kind][key] for one in each)

    own, plain, synced = (
        median("not durable", "own"),
        median("not durable", "seconds"),
        median("durable", "seconds"),
    )
    return {
        "own_over_save": own / synced,
        "own_over_save_without_fsync": own / plain,
        "limit": OWN_LIMIT,
        "met": own / synced <= OWN_LIMIT,
        "repetitions": each,
        "own_seconds": own,
        "save_seconds": plain,
        "fsync_seconds": median("durable", "sync"),
        "durable_save_seconds": synced,
        "manifest": measured_manifest(),
        "machine": description(),
    }


def measured_manifest() -> dict[str, Any]:
    paper = manifest()
    size_bytes = len(to_json(paper).encode())
    return {
        "mesh": str(PAPER),
        "ranks": PAPER.world,
        "parameters": sum(math.prod(spec.shape) for spec in paper.params),
        "bytes": size_bytes,
        "limit": MANIFEST_LIMIT_BYTES,
        "met": size_bytes <= MANIFEST_LIMIT_BYTES,
    }


def told(result: dict[str, Any]) -> str:
    paper = result["manifest"]
    return (
        f"own code / save: {result['own_over_save']:.4f} (at most {OWN_LIMIT}); "
        f"{1000 * result['own_seconds']:.1f} ms; {result['own_over_save_without_fsync']:.4f} of "
        f"a save without fsync, {result['save_seconds']:.2f} s\n"
        f"fsync: {result['fsync_seconds']:.2f} s of a durable save's "
        f"{result['durable_save_seconds']:.2f} s\n"
        f"manifest of {PAPER.world:,} ranks and {paper['parameters']:.2e} parameters: "
        f"{paper['bytes'] / 1e6:.1f} MB (at most 64)\n"
        + "\n".join(
            f"{row['what']}: {row['ratio']:.3f} (at most {row['limit']:.3g})"
            for row in result["ways"] + result["memory"] + result.get("ways of 354M", [])
        )
        + f"\nsteps beside a save / without: {result['steps per second']['ratio']:.2f}\n"
        + "\n".join(f"{name}: {seconds:.2f} s" for name, seconds in result["others"].items())
    )


def manifest() -> Manifest:
    """A mixture of experts on PAPER: DeepSpeed's files of such a run, its layouts, every expert a
    parameter of its own."""
    specs: list[ParamSpec] = []
    buffers: list[FlatBuffer] = []
    for stage in range(PAPER.pp):
        layers = range(stage * LAYERS // PAPER.pp, (stage + 1) * LAYERS // PAPER.pp)
        dense = _dense_of(stage, layers)
        specs += dense
        for group in (True, False):
            chosen = [spec for spec in dense if (len(spec.shape) > 1) is group]
            buffers.append(_buffer(chosen, PAPER.dp, (("pp", stage),)))
        for place in range(PAPER.ep):
            experts = _experts_of(place, layers)
            specs += experts
            buffers.append(_buffer(experts, PAPER.dp // PAPER.ep, (("pp", stage), ("ep", place))))
    return Manifest(
        Keeper.ZERO_1_OR_2,
        PAPER,
        tuple(specs),
        tuple(buffers),
        groups=(ParamGroup({"lr": 1e-4, "weight_decay": 0.1}, "torch.AdamW"),) * 2,
        files=tuple(_files()),
        save_id="0" * 32,
    )


def _dense_of(stage: int, layers: range) -> list[ParamSpec]:
    """Of a stage: its layers, and the embedding or the head."""
    dense = [spec for layer in layers for spec in _dense(f"decoder.layers.{layer}.")]
    if stage in (0, PAPER.pp - 1):
        name = "embedding.word_embeddings.weight" if stage == 0 else "output_layer.weight"
        dense.append(ParamSpec(name, (VOCABULARY, WIDTH), "bfloat16", layout=Shard("tp", 0)))
    return dense


def _experts_of(place: int, layers: range) -> list[ParamSpec]:
    """Of a stage's layers: the experts of an expert-parallel rank."""
    numbers = range(place * EXPERTS // PAPER.ep, (place + 1) * EXPERTS // PAPER.ep)
    return [
        spec
        for layer in layers
        for number in numbers
        for spec in _expert(f"decoder.layers.{layer}.mlp.experts.local_experts.{number}.")
    ]


def _dense(prefix: str) -> list[ParamSpec]:
    shapes = {
        "self_attention.linear_qkv.weight": ((10240, WIDTH), Shard("tp", 0)),
        "self_attention.linear_proj.weight": ((WIDTH, WIDTH), Shard("tp", 1)),
        "mlp.router.weight": ((EXPERTS, WIDTH), Replicate()),
        "input_layernorm.weight": ((WIDTH,), Replicate()),
        "pre_mlp_layernorm.weight": ((WIDTH,), Replicate()),
    }
    return [
        ParamSpec(prefix + name, shape, "bfloat16", layout=layout)
        for name, (shape, layout) in shapes.items()
    ]


def _expert(prefix: str) -> list[ParamSpec]:
    return [
        ParamSpec(f"{prefix}linear_{name}.weight", shape, "bfloat16", layout=Shard("tp", dim))
        for name, shape, dim in (
            ("gate", (EXPERT_WIDTH, WIDTH), 0),
            ("up", (EXPERT_WIDTH, WIDTH), 0),
            ("fc2", (WIDTH, EXPERT_WIDTH), 1),
        )
    ]


def _buffer(specs: list[ParamSpec], partitions: int, at: tuple[tuple[str, int], ...]) -> FlatBuffer:
    members, end = [], 0
    for spec in specs:
        size = math.prod(spec.shape) // (1 if spec.layout == Replicate() else PAPER.tp)
        members.append(Member(spec.name, end, size, 0, {"step": 1000.0}))
        end += size
    states = (("fp32", "float32"), ("exp_avg", "float32"), ("exp_avg_sq", "float32"))
    axes = tuple(axis for axis, _ in at)
    return FlatBuffer(
        tuple(members), whole_length(end, partitions), partitions, "whole", states, at, axes
    )


def _files() -> list[FileEntry]:
    """As DeepSpeed names them: optimizer and expert optimizer, model and layer and expert files;
    and our random states."""
    models = PAPER.tp * PAPER.pp
    names = [
        f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
        for mp in range(models)
        for dp in range(PAPER.dp)
    ]
    names += [
        f"expp_rank_{ep}_mp_rank_{mp:02d}_optim_states.pt"
        for mp in range(models)
        for ep in range(PAPER.ep)
    ]
    names += [f"mp_rank_{mp:02d}_model_states.pt" for mp in range(models)]
    names += [
        f"layer_{layer:02d}-model_{tp:02d}-model_states.pt"
        for layer in range(LAYERS + 2)
        for tp in range(PAPER.tp)
    ]
    names += [
        f"layer_{layer}_expert_{expert}_mp_rank_{tp:02d}_model_states.pt"
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for tp in range(PAPER.tp)
    ]
    names += [f"ucp_rng_{rank:05d}.safetensors" for rank in range(PAPER.world)]
    return [FileEntry(name, 10**9 + number, f"{number:064x}") for number, name in enumerate(names)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--ways-repetitions", type=int, default=5)
    parser.add_argument("--others-repetitions", type=int, default=3)
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a small model; nothing is written to benchmarks/results",
    )
    parser.add_argument("--folder", help="where the checkpoints go for a while; needs 4 GB")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
