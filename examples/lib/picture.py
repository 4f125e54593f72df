"""The picture of the quickstart and of the evaluation: the loss curves, which lie on each other."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .resumes import TOLERANCE

if TYPE_CHECKING:
    from quickstart import Mesh, Row


def plot(source: "Mesh", reference: list[float], rows: "list[Row]", saved: int, path: Path) -> None:
    """The whole run, the steps after the save, and how far each resumed run is from the
    uninterrupted one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (whole, near, apart) = plt.subplots(
        3, 1, figsize=(9, 11 + len(rows) / 10), height_ratios=[3, 3, 2], layout="constrained"
    )
    figure.suptitle(f"A run saved at {source}, resumed on other meshes straight from its files")
    label = f"uninterrupted, {source}"
    for axes, first in ((whole, 0), (near, saved)):
        steps = range(first, len(reference))
        axes.plot(steps, reference[first:], color="0.75", linewidth=6, label=label)
        axes.set_ylabel("loss (nats per byte)")
        axes.set_xlabel("step")
    colors = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for number, row in enumerate(rows):
        draw(row, number, len(rows), colors[number % len(colors)], whole, near, apart)
    saved_at = whole.axvline(saved, color="0.3", linestyle=":", label=f"saved before step {saved}")
    whole.set_title("The whole run")
    near.set_title("After the save: the resumed runs lie on the uninterrupted one")
    allowed = limit(apart)
    for axes in (near, apart):
        axes.xaxis.get_major_locator().set_params(integer=True)
    for axes in (whole, near, apart):
        axes.grid(alpha=0.3)
    handles = [*near.get_legend_handles_labels()[0], saved_at, allowed]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=110)


def draw(row: "Row", number: int, rows: int, color: str, whole: Any, near: Any, apart: Any) -> None:
    """One resumed run in all three parts."""
    steps = range(row.first_step, row.first_step + len(row.losses))
    markers, label = "osD^v<>", f"resumed at {row.mesh}"
    style = {"color": color, "marker": markers[number % len(markers)], "label": label}
    whole.plot(steps, row.losses, linewidth=1, color=color, label=label)
    # The curves lie on each other: each marks steps of its own, so that all are seen.
    marked = {"markersize": 7, "markevery": (number, max(1, rows))}
    near.plot(steps, row.losses, linewidth=1, **marked, **style)
    apart.plot(steps, [max(d, 1e-9) for d in row.distances], linewidth=1, markersize=5, **style)


def limit(apart: Any) -> Any:
    """The lowest part: what is allowed, on a logarithmic scale."""
    apart.set_title("Distance to the uninterrupted run")
    apart.set(
        yscale="log",
        ylim=(7e-10, 1e-2),
        xlabel="step",
        ylabel="|difference of loss|\n(bottom: 1e-9 or less)",
    )
    return apart.axhline(TOLERANCE, color="0.3", linestyle="--", label=f"allowed: {TOLERANCE:g}")
