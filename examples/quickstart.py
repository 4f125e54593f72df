"""Trains megatron-core's LLaMA at tp=2, dp=2, ZeRO-1, saves, resumes on other meshes straight from
these files, and shows that nothing was lost.

Started by `quickstart.sh`, which sets up the environment. Each phase is one launch of
`train_megatron.py`, which takes the flags of `pretrain/pretrain_gpt.py`. Exit code 0 when every
state is bit-equal after every load and every loss stays within TOLERANCE of the uninterrupted run,
else 1.
"""

import argparse
import json
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib import launcher  # beside this file
from lib.picture import plot
from lib.resumes import TOLERANCE, equal_states, table

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "runs"
BATCH = 8

# Grouped queries with fewer groups (2) than tensor-parallel ranks (4) in one of the cases; a byte
# is a token.
MODEL = shlex.split(
    "--model-family llama --num-layers 4 --hidden-size 128 --ffn-hidden-size 384 "
    "--num-attention-heads 4 --num-query-groups 2 --seq-length 128 "
    "--make-vocab-size-divisible-by 64"
)
# The same with a mixture of experts instead of each MLP, two of which see each token.
EXPERTS = [
    *MODEL,
    *shlex.split("--model-family mixtral --ffn-hidden-size 192 --num-experts 4"),
]
TRAINING = shlex.split(
    f"--global-batch-size {BATCH} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--weight-decay 0.1 --adam-beta2 0.95 --split 1 --eval-iters 0 --log-interval 10"
)


@dataclass(frozen=True)
class Mesh:
    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 1
    sp: bool = False
    """Megatron's sequence parallelism, within the tensor-parallel ranks."""
    ep: int = 0
    """Ranks among which the experts are divided; tp cuts each one. 0: the model has none."""

    def __str__(self) -> str:
        stages = f"pp={self.pp}, " if self.pp > 1 else ""
        experts = f", ep={self.ep}" if self.ep else ""
        dense = f"tp={self.tp}, {stages}dp={self.dp}{experts}, ZeRO-{self.zero}"
        return dense + (", SP" if self.sp else "")

    @property
    def name(self) -> str:
        experts = f"_ep{self.ep}" if self.ep else ""
        return f"tp{self.tp}_pp{self.pp}_dp{self.dp}_zero{self.zero}{experts}" + "_sp" * self.sp

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def flags(self) -> list[str]:
        # a pipeline needs micro batches to have more than one stage at work
        micro = BATCH // self.dp // (2 if self.pp > 1 else 1)
        flags = shlex.split(
            f"--tensor-model-parallel-size {self.tp} --pipeline-model-parallel-size {self.pp} "
            f"--zero-stage {self.zero} --micro-batch-size {micro}"
        )
        if self.ep:
            flags += ["--expert-model-parallel-size", str(self.ep)]
        # megatron-core trains experts of several tensor-parallel ranks with it alone
        sequences = self.sp or (self.ep and self.tp > 1)
        return [*flags, "--sequence-parallel"] if sequences else flags


SOURCE = Mesh(tp=2, dp=2, zero=1)
TARGETS = [Mesh(1, 1, 4, 3), Mesh(4, 1, 1, 1), Mesh(1, 1, 1, 0)]


@dataclass(frozen=True)
class Row:
    """One resume: what it read, what differs, and how far each loss is from the uninterrupted
    run."""

    mesh: Mesh
    read_bytes: int
    seconds: float
    parameters: int
    compared: int
    different: list[str]
    first_step: int
    losses: list[float]
    distances: list[float]

    @property
    def good(self) -> bool:
        return not self.different and bool(self.distances) and max(self.distances) <= TOLERANCE


def main() -> int:
    args = parse()
    stop_on_signals()
    out: Path = args.out.resolve()
    started = time.monotonic()
    try:
        rows, reference = compare(
            args.source,
            args.resume,
            out,
            args.steps,
            args.more,
            args.reuse,
            args.plant_fault,
            args.checkpoint or (RUNS / "llama" if out == RUNS / "quickstart" else None),
        )
    except KeyboardInterrupt:
        print("\nquickstart: interrupted; all ranks are stopped", file=sys.stderr)
        return 130
    shown = make_table(rows, args.more)
    (out / "table.md").write_text(shown)
    plot(args.source, reference, rows, args.steps, out / "losses.png")
    print(
        f"\nSaved at {args.source}, step {args.steps}: {rows[0].parameters:,} parameters, whose "
        "masters and two moments take "
        f"{12 * rows[0].parameters:,} bytes.\nResumed straight from these files:\n\n{shown}"
    )
    for row in rows:
        for what in row.different[:5]:
            print(f"NOT EQUAL after the load at {row.mesh}: {what}")
    print(f"Loss curves: {out / 'losses.png'}\n{time.monotonic() - started:.0f} s in all")
    return 0 if rows and all(row.good for row in rows) else 1


def stop_on_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(130))


def compare(
    source: Mesh,
    targets: list[Mesh],
    out: Path,
    steps: int,
    more: int,
    reuse: bool = False,
    plant_fault: bool = False,
    checkpoint: Path | None = None,
) -> tuple[list[Row], list[float]]:
    """Trains and saves on one mesh, resumes on others; what came of each, and the losses of the
    uninterrupted run. The checkpoint goes into OUT/checkpoint, if nobody says another folder."""
    folder = checkpoint or out / "checkpoint"
    flags = [
        *(EXPERTS if source.ep else MODEL),
        *TRAINING,
        "--train-iters",
        str(steps + more),
        "--lr-warmup-iters",
        str(min(10, steps // 2)),
        "--data-path",
        sysconfig.get_paths()["stdlib"],
    ]
    if not reuse:
        clean(out, folder)
        save = ["--save-at", str(steps), "--save-interval", str(steps), "--save", str(folder)]
        launch(source, out, [*flags, *save], f"train {steps} steps, save, {more} steps on")
    reference = read_losses(out / f"{source.name}.json", steps + more)
    rows = []
    for mesh in targets:
        name = f"resumed_{mesh.name}"
        fault = ["--plant-fault"] if plant_fault else []
        load = ["--load", str(folder), "--universal-checkpoint", *fault]
        launch(mesh, out, [*flags, *load], f"resume, {more} steps", name)
        rows.append(make_row(mesh, json.loads((out / f"{name}.json").read_text()), reference))
    return rows, reference


def read_losses(path: Path, steps: int) -> list[float]:
    """The losses of the uninterrupted run."""
    losses = json.loads(path.read_text())["losses"] if path.is_file() else []
    if len(losses) != steps:
        sys.exit(
            f"quickstart: {path} holds {len(losses)} losses, not {steps}: leave out --reuse, or "
            "give that run's arguments"
        )
    return losses


def clean(out: Path, checkpoint: Path) -> None:
    """Removes what an earlier run left, and nothing else: the folder may be anybody's."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)
    for pattern in (
        "states.pt",
        "table.md",
        "losses.png",
        "*tp?_pp?_dp?_zero?*.json",
        "*tp?_pp?_dp?_zero?*.log",
    ):
        for path in out.glob(pattern):
            path.unlink()


def launch(mesh: Mesh, out: Path, arguments: list[str], what: str, name: str | None = None) -> None:
    """Runs `train_megatron.py` on a mesh, to its end."""
    name = name or mesh.name
    script = [str(HERE / "train_megatron.py"), "--out", str(out), "--name", name]
    log = out / f"{name}.log"
    print(f"{mesh!s:26} {what} ...", end=" ", flush=True)
    started = time.monotonic()
    code = launcher.run(mesh.ranks, [*script, *mesh.flags, *arguments], log)
    print(f"{time.monotonic() - started:.1f} s", flush=True)
    if code:
        # from there on the launcher's
        said, _, _ = log.read_text(errors="replace").partition("torch/distributed/elastic/")
        print("\n".join(said.splitlines()[-40:-1]), file=sys.stderr)
        sys.exit(f"quickstart: {mesh} ended with exit code {code}; all of its output is in {log}")


def make_row(mesh: Mesh, result: dict[str, Any], reference: list[float]) -> Row:
    after = reference[result["first_step"] :]
    distances = [abs(a - b) for a, b in zip(result["losses"], after, strict=True)]
    return Row(mesh, distances=distances, **result)


def make_table(
    rows: list[Row], more: int, first: str = "resumed at", names: list[str] | None = None
) -> str:
    """The results as a Markdown table; `names` are the first column."""
    heads = (first, "bytes read", "seconds", "states bit-equal")
    lines = [
        (
            name,
            f"{row.read_bytes:,}",
            f"{row.seconds:.2f}",
            equal_states(len(row.different), row.compared),
            f"{max(row.distances, default=float('nan')):.1e}",
        )
        for name, row in zip(names or [str(row.mesh) for row in rows], rows, strict=True)
    ]
    return table((*heads, f"largest loss difference, next {more} steps"), lines)


def mesh_argument(text: str) -> Mesh:
    found = re.fullmatch(r"tp=([124]),(?:pp=([124]),)?dp=([1248]),zero=([0123])(,sp)?", text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not tp=T,pp=P,dp=D,zero=Z, with T and P of 1, 2, 4, D of 1, 2, 4, 8 and "
            "Z "
            "from 0 to 3, and perhaps ,sp after it"
        )
    tp, pp, dp, zero, sp = found.groups()
    return Mesh(int(tp), int(pp or 1), int(dp), int(zero), bool(sp))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="quickstart.sh", description="Save on four ranks, resume on other meshes."
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=RUNS / "quickstart",
        help="folder for results and picture (default runs/quickstart); an earlier run's are "
        "replaced",
    )
    parser.add_argument(
        "--checkpoint",
        type=Path,
        help="folder for the checkpoint, which is replaced (default runs/llama; with --out "
        "OUT/checkpoint)",
    )
    parser.add_argument("--steps", type=int, default=80, help="steps before the save (default 80)")
    parser.add_argument("--more", type=int, default=20, help="steps after it (default 20)")
    parser.add_argument(
        "--resume",
        type=mesh_argument,
        nargs="+",
        default=TARGETS,
        metavar="MESH",
        help="meshes to resume on (default tp=1,dp=4,zero=3 tp=4,dp=1,zero=1 tp=1,dp=1,zero=0)",
    )
    parser.add_argument(
        "--source",
        type=mesh_argument,
        default=SOURCE,
        metavar="MESH",
        help="mesh to save on (default tp=2,dp=2,zero=1)",
    )
    parser.add_argument(
        "--reuse",
        action="store_true",
        help="resume from the checkpoint of an earlier run with the same --steps and --more",
    )
    parser.add_argument(
        "--plant-fault",
        action="store_true",
        help="flip one bit after each load: shows that the check sees a fault (exit code 1)",
    )
    args = parser.parse_args()
    if args.steps < 1 or args.more < 1:
        parser.error("--steps and --more are at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
