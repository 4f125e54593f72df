"""A training job that is killed again and again, on nodes that come and go: it ends with the losses
of one that never was.

    bash examples/preemption.sh                     ten kills; results in runs/preemption
    bash examples/preemption.sh --kills 3 --iterations 30

Each life is the same command with another mesh: `pretrain_gpt.py --save DIR --load DIR
--universal-checkpoint`, killed by SIGKILL, all ranks at once, at a random moment; the last one may
finish. A killed life's losses after its last save don't count: the next one computes them again.
Exit code 0 when every loss is within 1e-5 of the uninterrupted run's.
"""

import argparse
import contextlib
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lib import launcher  # beside this file
from lib.resumes import TOLERANCE
from lib.small_model import SMALL_MODEL

HERE = Path(__file__).resolve().parent
MESHES = [(2, 1, 1), (1, 2, 2), (1, 1, 0), (1, 2, 3), (2, 1, 3), (1, 1, 1)]  # tp, dp, ZeRO stage
FLAGS = [*SMALL_MODEL, "--global-batch-size", "8"]


def main() -> int:
    args = parse()
    out: Path = args.out.resolve()
    clean(out)
    print(f"without interruption: {args.iterations} iterations", flush=True)
    started = time.monotonic()
    live(MESHES[0], args, out, "whole", None)
    want = read_losses(out / "whole.jsonl")
    whole_s = time.monotonic() - started
    losses = killed_again_and_again(args, out, want)
    good = losses.keys() == want.keys() and all(abs(losses[i] - want[i]) <= TOLERANCE for i in want)
    both = losses.keys() & want.keys()
    largest = max((abs(losses[i] - want[i]) for i in both), default=float("nan"))
    verdict = "as if nothing had happened" if good else "NOT the uninterrupted run"
    print(
        f"{len(losses)} of {len(want)} losses, the largest difference {largest:.1e} (allowed "
        f"{TOLERANCE:.0e}): {verdict}; {whole_s:.0f} s without interruption, "
        f"{time.monotonic() - started - whole_s:.0f} s with {args.kills} kills"
    )
    return 0 if good else 1


def killed_again_and_again(
    args: argparse.Namespace, out: Path, want: dict[int, float]
) -> dict[int, float]:
    """The losses of all lives, each on a mesh of its own; of an iteration the last one counts."""
    dice = random.Random(args.seed)
    losses: dict[int, float] = {}
    for number in range(args.kills + 1):
        # The first life decides the padded vocabulary, which follows from tp: without that it would
        # be another model.
        tp, dp, zero = mesh = dice.choice(MESHES) if number else MESHES[0]
        last = number == args.kills
        killed = live(mesh, args, out, f"life{number}", None if last else dice, saves=True)
        if last and killed:
            break
        found = read_losses(out / f"life{number}.jsonl")
        resumed = min(found, default=max(losses, default=0) + 1)
        differs = max((abs(found[i] - want[i]) for i in found), default=0.0)
        losses = {**losses, **found}
        print(
            f"life {number + 1:2}: tp={tp}, dp={dp}, ZeRO-{zero}: from iteration {resumed:3} to "
            f"{max(found, default=resumed - 1):3}, {'killed' if killed else 'finished'}; largest "
            f"loss difference {differs:.1e}",
            flush=True,
        )
    return losses


def live(
    mesh: tuple[int, int, int],
    args: argparse.Namespace,
    out: Path,
    name: str,
    dice: random.Random | None,
    saves: bool = False,
) -> bool:
    """One life of the job on a mesh; with dice it is killed at a random moment after its first
    iterations (``--at-least``). Whether it was."""
    port = launcher.free_port()
    command = command_of(mesh, args.iterations, port, out / f"{name}.jsonl")
    if saves:
        checkpoint = str(out / "checkpoint")
        command += ["--save", checkpoint, "--load", checkpoint, "--universal-checkpoint"]
        command += ["--save-interval", "2", "--keep-latest", "3"]
    with (out / f"{name}.log").open("w") as log:
        job = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            if dice is not None:
                wait_for_losses(job, out / f"{name}.jsonl", args.at_least)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    job.wait(timeout=dice.uniform(0, args.longest))
            else:
                job.wait(timeout=600)
        finally:
            killed = job.poll() is None
            launcher.kill(job)
    remove_buffers(port)
    if not killed and job.returncode:
        said = out / f"{name}.log"
        sys.exit(f"preemption: {name} ended with {job.returncode}; its output is in {said}")
    return killed


def command_of(mesh: tuple[int, int, int], iterations: int, port: int, log: Path) -> list[str]:
    tp, dp, zero = mesh
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    launcher += ["--nproc_per_node", str(tp * dp), "--master_port", str(port)]
    program = [str(HERE.parent / "pretrain" / "pretrain_gpt.py"), *FLAGS]
    program += ["--tensor-model-parallel-size", str(tp), "--zero-stage", str(zero)]
    program += ["--train-iters", str(iterations), "--data-path", str(HERE.parent / "LICENSE")]
    return [*launcher, *program, "--log-json", str(log)]


def wait_for_losses(job: "subprocess.Popen[bytes]", path: Path, at_least: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and job.poll() is None and len(read_losses(path)) < at_least:
        time.sleep(0.05)


def read_losses(path: Path) -> dict[int, float]:
    """Loss by iteration; a line that was cut by the kill does not count."""
    found: dict[int, float] = {}
    for line in path.read_text().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            entry: Any = json.loads(line)
            found[entry["iteration"]] = entry["lm_loss"]
    return found


def remove_buffers(port: int) -> None:
    """Killed ranks leave DeepSpeed's shared-memory buffers of 66 MiB each."""
    for path in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        path.unlink(missing_ok=True)


def clean(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    for path in [*out.glob("life*.*"), *out.glob("whole.*")]:
        path.unlink()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Kill a training job at random moments; compare its losses."
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument(
        "--longest",
        type=float,
        default=2.0,
        help="seconds from a life's first losses to its kill, at most",
    )
    parser.add_argument(
        "--at-least",
        type=int,
        default=1,
        help="losses that a life logs before the moment of its kill is drawn",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments and the meshes")
    parser.add_argument("--out", type=Path, default=Path("runs/preemption"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
