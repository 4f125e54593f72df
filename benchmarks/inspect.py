"""`megatron-ucp inspect`: seconds on the manifest of 16,384 ranks, on 64 files without a manifest,
and what Python takes alone.

    python -m benchmarks.inspect

Wall time of a whole process each, the best of several, and as a ratio to `python -c pass`. The
files of the 16,384 ranks are empty but for their sizes: with a manifest inspect opens none of them.
Writes benchmarks/results/inspect.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.machine import description
from megatron_ucp.core.flat import FlatBuffer, Member, aligned_starts
from megatron_ucp.core.layout import Layout, Replicate, Shard
from megatron_ucp.core.manifest import FILE_NAME, FileEntry, Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import Mesh, on_stage
from megatron_ucp.core.names import Keeper
from megatron_ucp.formats.deepspeed.buffers import whole_length

RESULTS, LIMIT_S = Path(__file__).parent / "results" / "inspect.json", 1.0
PAPER = Mesh(tp=8, pp=16, dp=128, zero=1)
LAYERS, WIDTH, VOCABULARY = 128, 16384, 128000
STATES = (("fp32", "float32"), ("exp_avg", "float32"), ("exp_avg_sq", "float32"))


def main() -> int:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="inspect_") as name:
        folder = Path(name)
        write_manifest(folder / "manifest")
        write_files(folder / "files")
        alone = best(args.repetitions, ["-c", "pass"])
        found = {
            what: best(args.repetitions, ["-m", "megatron_ucp.cli", "inspect", str(folder / what)])
            for what in ("manifest", "files")
        }
        count = {what: len(os.listdir(folder / what)) for what in found}
        size = (folder / "manifest" / FILE_NAME).stat().st_size
    each = {
        what: {"seconds": seconds, "over_python": seconds / alone, "files": count[what]}
        for what, seconds in found.items()
    }
    result = {
        "limit_seconds": LIMIT_S,
        "met": max(found.values()) <= LIMIT_S,
        "python_seconds": alone,
        "manifest_bytes": size,
        **each,
        "machine": description(),
    }
    print(f"python alone {alone:.3f} s")
    for what, seconds in found.items():
        print(
            f"inspect, {what}: {seconds:.3f} s, {seconds / alone:.0f} times that, {count[what]:,} "
            f"files (at most {LIMIT_S} s)"
        )
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if result["met"] else 1


def best(repetitions: int, words: Sequence[str]) -> float:
    """Seconds of the fastest of several runs."""
    seconds: list[float] = []
    for _ in range(repetitions):
        started = time.perf_counter()
        subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def write_manifest(folder: Path) -> None:
    """A dense GPT on PAPER: every file that DeepSpeed would write, as a hole of its size, and the
    manifest."""
    folder.mkdir()
    names = file_names()
    for number, name in enumerate(names):
        (folder / name).touch()
        os.truncate(folder / name, 1000 + number)
    specs, buffers = list[ParamSpec](), list[FlatBuffer]()
    for stage in range(PAPER.pp):
        own = stage_params(stage)
        specs += own
        for group in (0, 1):
            chosen = [spec for spec in own if (len(spec.shape) == 1) == bool(group)]
            buffers.append(buffer(chosen, stage, group))
    sizes = enumerate(names)
    manifest = Manifest(
        Keeper.ZERO_1_OR_2,
        PAPER,
        tuple(specs),
        tuple(buffers),
        tuple(
            ParamGroup(settings, "torch.AdamW")
            for settings in ({"lr": 1e-4, "weight_decay": 0.1}, {"lr": 1e-4})
        ),
        (),
        tuple(FileEntry(name, 1000 + number, f"{number:064x}") for number, name in sizes),
        "gpt",
        "0" * 32,
        {"global_steps": 1000},
    )
    (folder / FILE_NAME).write_text(to_json(manifest))


def file_names() -> list[str]:
    """As DeepSpeed names them, and our random states."""
    ranks = PAPER.tp * PAPER.pp
    names = [
        f"zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt"
        for mp in range(ranks)
        for dp in range(PAPER.dp)
    ]
    names += [f"mp_rank_{mp:02d}_model_states.pt" for mp in range(ranks)]
    names += [
        f"layer_{layer:02d}-model_{tp:02d}-model_states.pt"
        for layer in range(LAYERS + 2)
        for tp in range(PAPER.tp)
    ]
    names += [f"ucp_rng_{rank:05d}.safetensors" for rank in range(PAPER.world)]
    return names


def stage_params(stage: int) -> list[ParamSpec]:
    """The parameters of one stage."""
    kinds: dict[str, tuple[tuple[int, ...], Layout]] = {
        "self_attention.linear_qkv.weight": ((3 * WIDTH, WIDTH), Shard("tp", 0)),
        "self_attention.linear_qkv.bias": ((3 * WIDTH,), Shard("tp", 0)),
        "self_attention.linear_proj.weight": ((WIDTH, WIDTH), Shard("tp", 1)),
        "self_attention.linear_proj.bias": ((WIDTH,), Replicate()),
        "mlp.linear_fc1.weight": ((4 * WIDTH, WIDTH), Shard("tp", 0)),
        "mlp.linear_fc1.bias": ((4 * WIDTH,), Shard("tp", 0)),
        "mlp.linear_fc2.weight": ((WIDTH, 4 * WIDTH), Shard("tp", 1)),
        "mlp.linear_fc2.bias": ((WIDTH,), Replicate()),
        **{
            f"{norm}_layernorm.{part}": ((WIDTH,), Replicate())
            for norm in ("input", "pre_mlp")
            for part in ("weight", "bias")
        },
    }
    each = LAYERS // PAPER.pp
    out = [
        ParamSpec(f"decoder.layers.{layer}.{name}", shape, "bfloat16", layout=layout)
        for layer in range(stage * each, (stage + 1) * each)
        for name, (shape, layout) in kinds.items()
    ]
    ends = {0: "embedding.word_embeddings.weight", PAPER.pp - 1: "output_layer.weight"}
    if stage in ends:
        out.append(ParamSpec(ends[stage], (VOCABULARY, WIDTH), "bfloat16", layout=Shard("tp", 0)))
    return out


def buffer(specs: Sequence[ParamSpec], stage: int, group: int) -> FlatBuffer:
    count = [
        spec.shape[0]
        * (spec.shape[1] if len(spec.shape) > 1 else 1)
        // (1 if spec.layout == Replicate() else PAPER.tp)
        for spec in specs
    ]
    starts, end = aligned_starts(count)
    members = tuple(
        Member(spec.name, start, size, group, {"step": 1000.0})
        for spec, start, size in zip(specs, starts, count, strict=True)
    )
    return FlatBuffer(
        members, whole_length(end, PAPER.dp), PAPER.dp, "whole", STATES, on_stage(stage)
    )


def write_files(folder: Path) -> None:
    """64 files of stock DeepSpeed, without a manifest: 63 partitions at ZeRO-1 of 1,000
    parameters."""
    from collections import OrderedDict

    import torch

    folder.mkdir()
    parts, shapes = (
        63,
        OrderedDict((f"layers.{n}.weight", torch.Size((63, 2))) for n in range(1000)),
    )
    torch.save(
        {
            "module": OrderedDict(
                (name, torch.zeros(63, 2, dtype=torch.bfloat16)) for name in shapes
            ),
            "buffer_names": [],
            "param_shapes": [shapes],
            "dp_world_size": parts,
            "mp_world_size": 1,
            "global_steps": 7,
            "skipped_steps": 0,
            "ds_config": {"bf16": {"enabled": True}},
            "ds_version": "0.19.8",
        },
        folder / "mp_rank_00_model_states.pt",
    )
    share = torch.zeros(whole_length(126 * 1000, parts) // parts)
    for part in range(parts):
        entry = {"step": torch.tensor(7.0), "exp_avg": share, "exp_avg_sq": share}
        torch.save(
            {
                "optimizer_state_dict": {
                    "zero_stage": 1,
                    "partition_count": parts,
                    "single_partition_of_fp32_groups": [share],
                    "base_optimizer_state": {
                        "state": {0: entry},
                        "param_groups": [{"lr": 0.1, "params": [0]}],
                    },
                }
            },
            folder / f"bf16_zero_pp_rank_{part}_mp_rank_00_optim_states.pt",
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
