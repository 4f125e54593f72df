"""An elastic run on one machine: four ranks on two nodes, one node is killed, three ranks go on, a
fourth joins.

    bash examples/elastic.sh                     results in runs/elastic
    bash examples/elastic.sh --iterations 60

All of them are one command, `torchrun --nnodes=1:2 pretrain_gpt.py --elastic`: nobody says to it
what happened. Exit code 0 when each loss is within 1e-5 of that of an uninterrupted run at the same
iteration, the killed node cost no more than the iterations since the last save, and the one that
joined cost none.
"""

import argparse
import shutil
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from lib.nodes import Node, Nodes, kill  # beside this file
from lib.resumes import table
from lib.small_model import SMALL_MODEL
from lib.starts import Start, lost_steps, read, wrong_losses

HERE = Path(__file__).resolve().parent
MESHES = "tp=2,dp=2,zero=1;dp=3,zero=3"
FLAGS = [*SMALL_MODEL, "--global-batch-size", "12", "--elastic", "--elastic-meshes", MESHES]
PARTS = ("noticing", "rendezvous", "imports", "groups", "engine", "load", "first step")


def command(out: Path, iterations: int, interval: int) -> list[str]:
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    text = [str(stdlib / name) for name in ("argparse.py", "ast.py", "inspect.py", "typing.py")]
    program = [str(HERE.parent / "pretrain" / "pretrain_gpt.py"), *FLAGS, "--data-path", *text]
    program += ["--train-iters", str(iterations), "--save-interval", str(interval)]
    return [*program, "--save", str(out / "checkpoint"), "--log-json", str(out / "log.jsonl")]


def wait_for(log: Path, node: Node, starts: int, iterations: int) -> None:
    """Until the log has so many starts, and iterations of the last one."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        found = read(log)
        if len(found) == starts and len(found[-1].losses) >= iterations:
            return
        if node.agent.poll() is not None:
            break
        time.sleep(0.05)
    sys.exit(f"elastic: {node.log.read_text()[-3000:]}\nelastic: the output is in {node.log}")


def run_through(nodes: Nodes, script: list[str], log: Path, each: int) -> tuple[Node, list[float]]:
    """The whole story; the node that stayed, and when things happened to it."""
    stays = nodes.start(3, script)
    dies = nodes.start(1, script)
    wait_for(log, stays, 1, each)
    kill(dies)
    killed = time.time()
    print(f"killed a node with its rank after iteration {read(log)[-1].last}", flush=True)
    wait_for(log, stays, 2, each)
    joined = time.time()
    print(f"a node joins after iteration {read(log)[-1].last}", flush=True)
    joins = nodes.start(1, script)
    for node in (stays, joins):
        end_of(nodes, node)
    return stays, [killed, joined]


def parts_of(happened: float, after: Start, node: Node) -> dict[str, float]:
    """Seconds from what happened to the next step. A rank's start-up is that of the slowest."""
    ranks = list(node.ranks.values())
    old = [rank for rank in ranks if rank.began < happened < (rank.ended or happened)]
    ended = max(rank.ended or happened for rank in old)
    new = [rank for rank in ranks if ended - 0.05 < rank.began < after.entry["time"]]
    began = max(rank.began for rank in new)
    seconds = after.entry["seconds"]
    entered = after.entry["time"] - sum(seconds.values())
    waits = {"noticing": ended - happened, "rendezvous": began - ended}
    step = min(after.times) - after.entry["time"]
    return waits | {"imports": entered - began} | seconds | {"first step": step}


def faults(starts: list[Start], want: dict[int, float], interval: int) -> list[str]:
    """What is not as it should be."""
    lost = lost_steps(starts)
    found = wrong_losses(starts, want)
    if len(starts) != 3 or lost[0] > interval or any(lost[1:]):
        found.append(f"{len(starts)} starts, of which {lost} iterations were lost")
    return found


def report(starts: list[Start], parts: list[dict[str, float]], want: dict[int, float]) -> None:
    """Two tables: the starts, and where the seconds went."""
    ends = ["a node was killed", "a node joined", "done"]
    rows: list[tuple[str, ...]] = []
    for start, end, lost in zip(starts, ends, [*lost_steps(starts), 0], strict=True):
        apart = max(abs(loss - want[i]) for i, loss in start.losses.items())
        span = f"{start.entry['after_iteration'] + 1} to {start.last}"
        mesh, ranks = start.entry["start"], str(start.entry["ranks"])
        rows.append((ranks, mesh, start.shared, span, end, str(lost), f"{apart:.1e}"))
    heads = ("ranks", "mesh", "global batch", "iterations", "then", "lost", "largest difference")
    print()
    print(table(heads, rows))
    print("Seconds from what happened to the next step:\n")
    seconds = [
        (end, *(f"{part[name]:.1f}" for name in PARTS), f"{sum(part.values()):.1f}")
        for end, part in zip(ends, parts, strict=False)
    ]
    print(table(("", *PARTS, "all"), seconds), end="")


def draw(
    starts: list[Start], parts: list[dict[str, float]], want: dict[int, float], path: Path
) -> None:
    """The losses on those of the uninterrupted run, the ranks over the time, the seconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (losses, ranks, seconds) = plt.subplots(
        3, 1, figsize=(9, 10), height_ratios=[4, 2, 2], layout="constrained"
    )
    losses.plot(list(want), list(want.values()), color="0.8", linewidth=6, label="uninterrupted")
    begin = starts[0].times[0]
    for number, start in enumerate(starts):
        color, mesh = f"C{number}", f"{start.entry['ranks']} ranks, {start.entry['start']}"
        losses.plot(list(start.losses), list(start.losses.values()), color=color, label=mesh)
        times = [when - begin for when in start.times]
        ranks.fill_between(times, start.entry["ranks"], color=color, alpha=0.6)
    losses.set(xlabel="iteration", ylabel="loss (nats per byte)")
    losses.set_title("Each start goes on where the one before it was saved")
    losses.legend(fontsize="small")
    ranks.set(xlabel="seconds", ylabel="ranks at work", ylim=(0, 4.5))
    draw_seconds(parts, seconds)
    legend = seconds.get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=len(PARTS), fontsize="small")
    figure.savefig(path, dpi=110)


def draw_seconds(parts: list[dict[str, float]], axes: Any) -> None:
    """Where the seconds went, a bar for each restart."""
    for number, (name, part) in enumerate(zip(("killed", "joined"), parts, strict=True)):
        left = 0.0
        for place, what in enumerate(PARTS):
            label = what if not number else None
            axes.barh(name, part[what], left=left, color=f"C{place}", label=label)
            left += part[what]
    axes.set(xlabel="seconds to the next step")
    axes.invert_yaxis()


def end_of(nodes: Nodes, node: Node) -> None:
    """Waits until an agent is done; ends the example where it failed."""
    if nodes.wait(node, 300):
        sys.exit(f"elastic: {node.log.read_text()[-3000:]}\nelastic: see {node.log}")


def main() -> int:
    args = parse()
    out: Path = args.out.resolve()
    for name in ("whole", "elastic"):
        shutil.rmtree(out / name, ignore_errors=True)
        (out / name).mkdir(parents=True)
    print(f"without interruption: {args.iterations} iterations on four ranks", flush=True)
    with Nodes(out / "whole", most=1) as nodes:
        end_of(nodes, nodes.start(4, command(out / "whole", args.iterations, args.iterations)))
    (whole,) = read(out / "whole" / "log.jsonl")
    print("the same, elastic: two nodes, of three ranks and of one", flush=True)
    log = out / "elastic" / "log.jsonl"
    script = command(out / "elastic", args.iterations, args.interval)
    with Nodes(out / "elastic") as nodes:
        stays, happened = run_through(nodes, script, log, args.iterations // 3)
    starts = read(log)
    if not all(start.losses for start in starts):
        print("the run had ended before the node that joined trained: give more --iterations")
        return 1
    wrong = faults(starts, whole.losses, args.interval)
    if len(starts) == 3:
        after = zip(happened, starts[1:], strict=True)
        parts = [parts_of(when, start, stays) for when, start in after]
        report(starts, parts, whole.losses)
        draw(starts, parts, whole.losses, out / "elastic.png")
        print(f"\nthe picture is {out / 'elastic.png'}")
    print("\n".join(wrong) or "each loss is the one of the uninterrupted run")
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Kill a node of an elastic run; let one join.")
    parser.add_argument("--iterations", type=int, default=120)
    parser.add_argument("--interval", type=int, default=10, help="iterations between two saves")
    parser.add_argument("--out", type=Path, default=Path("runs/elastic"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
