"""The log of an elastic run, start by start, and what it has to be."""

import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .resumes import TOLERANCE


@dataclass
class Start:
    """One start of all ranks: what it found, its losses by iteration, when each was logged."""

    entry: dict[str, Any]
    losses: dict[int, float] = field(default_factory=dict[int, float])
    times: list[float] = field(default_factory=list[float])

    @property
    def last(self) -> int:
        """The last iteration that was logged."""
        return max(self.losses, default=self.entry["after_iteration"])

    @property
    def shared(self) -> str:
        """The global batch, by micro batch, ranks and accumulation."""
        batch, micro, steps = (
            self.entry[name]
            for name in ("global_batch_size", "micro_batch_size", "gradient_accumulation")
        )
        return f"{batch} = {micro} x {batch // micro // steps} x {steps}"


def read(path: Path) -> list[Start]:
    """The starts in what `--log-json` wrote."""
    found: list[Start] = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        entry = json.loads(line)
        if "start" in entry:
            found.append(Start(entry))
        else:
            found[-1].losses[entry["iteration"]] = entry["lm_loss"]
            found[-1].times.append(entry["time"])
    return found


def lost_steps(starts: list[Start]) -> list[int]:
    """Iterations that each start but the first one computed again."""
    return [a.last - b.entry["after_iteration"] for a, b in itertools.pairwise(starts)]


def wrong_losses(starts: list[Start], want: dict[int, float]) -> list[str]:
    """What is not as in an uninterrupted run, whose losses by iteration these are: a loss of any
    start, also one that a later start computed again; an iteration that none computed."""
    apart = [
        f"iteration {iteration} on {start.entry['start']}: loss {loss}, not {want.get(iteration)}"
        for start in starts
        for iteration, loss in start.losses.items()
        if not abs(loss - want.get(iteration, float("nan"))) <= TOLERANCE
    ]
    missing = want.keys() - {iteration for start in starts for iteration in start.losses}
    return apart + [f"no start computed iteration {iteration}" for iteration in sorted(missing)]
