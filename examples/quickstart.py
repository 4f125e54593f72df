"""Saves at ZeRO-1 on four ranks, resumes on other meshes straight from these files, and shows that nothing was lost.

Started by `quickstart.sh`, which sets up the environment. Each phase is one launch of `train.py`. Exit code 0 when every
state is bit-equal after every load and every loss stays within TOLERANCE of the uninterrupted run, else 1.
"""

import argparse
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
TOLERANCE = 1e-5
STOP_S = 10.0
PRCTL = ctypes.CDLL(None).prctl  # looked up here: nothing but the call may happen between fork and exec
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Mesh:
    zero: int
    ranks: int

    def __str__(self) -> str:
        return f"ZeRO-{self.zero}, {self.ranks} rank" + ("s" if self.ranks > 1 else "")

    @property
    def name(self) -> str:
        return f"zero{self.zero}_ranks{self.ranks}"


@dataclass(frozen=True)
class Row:
    """One resume: what it read, what differs, and how far each loss is from the uninterrupted run."""

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
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(130))
    out: Path = args.out.resolve()
    source, targets = Mesh(1, 4), [Mesh(*target) for target in args.resume]
    started = time.monotonic()
    until = ["--steps", str(args.steps + args.more)]
    rows = []
    try:
        if not args.reuse:
            clean(out)
            launch(source, out, [*until, "--save-at", str(args.steps)],
                   f"train {args.steps} steps, save, {args.more} steps on")
        reference = read_losses(out / f"{source.name}.json", args.steps + args.more)
        for mesh in targets:
            name = f"resumed_{mesh.name}"
            fault = ["--plant-fault"] if args.plant_fault else []
            launch(mesh, out, [*until, "--resume", *fault], f"resume, {args.more} steps", name)
            rows.append(make_row(mesh, json.loads((out / f"{name}.json").read_text()), reference))
    except KeyboardInterrupt:
        print("\nquickstart: interrupted; all ranks are stopped", file=sys.stderr)
        return 130
    table = make_table(rows, args.more)
    (out / "table.md").write_text(table)
    plot(reference, rows, args.steps, out / "losses.png")
    print(f"\nSaved at {source}, step {args.steps}: {rows[0].parameters:,} parameters, whose masters and two moments take "
          f"{12 * rows[0].parameters:,} bytes.\nResumed straight from these files:\n\n{table}")
    for row in rows:
        for what in row.different[:5]:
            print(f"NOT EQUAL after the load at {row.mesh}: {what}")
    print(f"Loss curves: {out / 'losses.png'}\n{time.monotonic() - started:.0f} s in all")
    return 0 if rows and all(row.good for row in rows) else 1


def read_losses(path: Path, steps: int) -> list[float]:
    """The losses of the uninterrupted run."""
    losses = json.loads(path.read_text())["losses"] if path.is_file() else []
    if len(losses) != steps:
        sys.exit(f"quickstart: {path} holds {len(losses)} losses, not {steps}: leave out --reuse, or give that run's arguments")
    return losses


def clean(out: Path) -> None:
    """Removes what an earlier run left, and nothing else: the folder may be anybody's."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    for pattern in ("states.pt", "table.md", "losses.png", "*zero?_ranks?.json", "*zero?_ranks?.log"):
        for path in out.glob(pattern):
            path.unlink()


def launch(mesh: Mesh, out: Path, arguments: list[str], what: str, name: str | None = None) -> None:
    """Runs `train.py` on a mesh, to its end. Leaves no process behind, whatever happens."""
    name, port = name or mesh.name, free_port()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(mesh.ranks), "--master_addr",
               "127.0.0.1", "--master_port", str(port), str(HERE / "train.py"), "--zero", str(mesh.zero), "--out", str(out),
               "--name", name, *arguments]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    # With it DeepSpeed makes 66 MiB of shared memory per rank, which a rank that is stopped would leave.
    environment.pop("LOCAL_SIZE", None)
    log = out / f"{name}.log"
    print(f"{mesh!s:16} {what} ...", end=" ", flush=True)
    started = time.monotonic()
    with log.open("w") as output:
        # A session of its own: Ctrl-C comes to this process alone, which then stops the ranks in order.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   start_new_session=True, preexec_fn=end_with_parent, env=environment)
        try:
            code = process.wait()
        finally:
            stop(process)
    print(f"{time.monotonic() - started:.1f} s", flush=True)
    if code:
        said, _, _ = log.read_text(errors="replace").partition("torch/distributed/elastic/")  # from there on the launcher's
        print("\n".join(said.splitlines()[-40:-1]), file=sys.stderr)
        sys.exit(f"quickstart: {mesh} ended with exit code {code}; all of its output is in {log}")


def end_with_parent() -> None:
    """In the launcher, before it starts: a SIGTERM when this process is killed, so that no rank goes on alone."""
    PRCTL(PR_SET_PDEATHSIG, signal.SIGTERM)


def stop(process: "subprocess.Popen[bytes]") -> None:
    """Ends the launcher and every rank under it; does nothing after a normal end."""
    if process.poll() is not None:
        return
    # Each rank has a session of its own, so that no signal to a group would reach all.
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        for member in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.terminate()
        for member in psutil.wait_procs(family, timeout=STOP_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def make_row(mesh: Mesh, result: dict[str, Any], reference: list[float]) -> Row:
    first = result["first_step"]
    distances = [abs(a - b) for a, b in zip(result["losses"], reference[first:], strict=True)]
    return Row(mesh, result["read_bytes"], result["seconds"], result["parameters"], result["compared"],
               result["different"], first, result["losses"], distances)


def make_table(rows: list[Row], more: int) -> str:
    """The results as a Markdown table."""
    head = ["resumed at", "bytes read", "seconds", "states bit-equal", f"largest loss difference, next {more} steps"]
    cells = [[str(row.mesh), f"{row.read_bytes:,}", f"{row.seconds:.2f}",
              f"yes ({row.compared:,} values)" if not row.different else f"NO ({len(row.different)} differ)",
              f"{max(row.distances, default=float('nan')):.1e}"] for row in rows]
    widths = [max(len(line[i]) for line in [head, *cells]) for i in range(len(head))]
    lines = [head, ["-" * width for width in widths], *cells]
    return "".join("| " + " | ".join(f"{cell:{w}}" for cell, w in zip(line, widths, strict=True)) + " |\n" for line in lines)


def plot(reference: list[float], rows: list[Row], saved: int, path: Path) -> None:
    """The whole run, the steps after the save, and how far each resumed run is from the uninterrupted one."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    figure, (whole, near, apart) = plt.subplots(3, 1, figsize=(9, 11), height_ratios=[3, 3, 2], layout="constrained")
    figure.suptitle("A run saved at ZeRO-1 on 4 ranks, resumed on other meshes straight from its files")
    steps = range(len(reference))
    markers, colors = "osD^v<>", plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for axes, first in ((whole, 0), (near, saved)):
        axes.plot(steps[first:], reference[first:], color="0.75", linewidth=6, label="uninterrupted, ZeRO-1, 4 ranks")
        axes.set_ylabel("loss (nats per byte)")
        axes.set_xlabel("step")
    for i, row in enumerate(rows):
        mine = range(row.first_step, row.first_step + len(row.losses))
        style = {"color": colors[i % len(colors)], "marker": markers[i % len(markers)], "label": f"resumed at {row.mesh}"}
        whole.plot(mine, row.losses, linewidth=1, color=style["color"], label=style["label"])
        # The curves lie on each other: each marks steps of its own, so that all are seen.
        near.plot(mine, row.losses, linewidth=1, markersize=7, markevery=(i, max(1, len(rows))), **style)
        apart.plot(mine, [max(d, 1e-9) for d in row.distances], linewidth=1, markersize=5, **style)
    whole.axvline(saved, color="0.3", linestyle=":", label=f"saved before step {saved}")
    whole.set_title("The whole run")
    near.set_title("After the save: the resumed runs lie on the uninterrupted one")
    apart.set_title("Distance to the uninterrupted run")
    apart.axhline(TOLERANCE, color="0.3", linestyle="--", label=f"allowed: {TOLERANCE:g}")
    apart.set(yscale="log", ylim=(7e-10, 1e-3), xlabel="step", ylabel="|difference of loss|\n(bottom: 1e-9 or less)")
    for axes in (near, apart):
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (whole, near, apart):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", **({"ncols": len(rows) + 1, "loc": "upper center"} if axes is apart else {}))
    figure.savefig(path, dpi=110)


def mesh_argument(text: str) -> tuple[int, int]:
    zero, _, ranks = text.partition(":")
    if zero not in ("0", "1", "2", "3") or ranks not in ("1", "2", "4", "8"):
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE:RANKS with stage 0 to 3 and 1, 2, 4 or 8 ranks")
    return int(zero), int(ranks)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="quickstart.sh", description="Save at ZeRO-1 on four ranks, resume on other meshes.")
    parser.add_argument("--out", type=Path, default=HERE.parent / "runs" / "quickstart",
                        help="folder for checkpoint, results and picture (default runs/quickstart); "
                             "an earlier run's are replaced")
    parser.add_argument("--steps", type=int, default=80, help="steps before the save (default 80)")
    parser.add_argument("--more", type=int, default=20, help="steps after it (default 20)")
    parser.add_argument("--resume", type=mesh_argument, nargs="+", default=[(3, 4), (2, 2), (0, 1)], metavar="STAGE:RANKS",
                        help="meshes to resume on (default 3:4 2:2 0:1)")
    parser.add_argument("--reuse", action="store_true",
                        help="resume from the checkpoint of an earlier run with the same --steps and --more")
    parser.add_argument("--plant-fault", action="store_true",
                        help="flip one bit after each load: shows that the check sees a fault (exit code 1)")
    args = parser.parse_args()
    if args.steps < 1 or args.more < 1:
        parser.error("--steps and --more are at least 1")
    return args


if __name__ == "__main__":
    sys.exit(main())
