"""What the default run may cost, in processor seconds of all that it starts: `tests/run.sh` runs
this behind everything else.

    python -m tests.test_budget     takes the last run for what each test function is to cost

Another number in `budget.json` is a decision: its commit says what the seconds are for.
"""

import json
import os
import statistics
from pathlib import Path
from typing import Any

from tests import processor_time
from tests.ranks import ROOT

BUDGET = Path(__file__).with_name("budget.json")
LAST = ROOT / os.environ.get("CACHE", ".cache")
BEFORE_TESTS = ("set-up", "ops", "newest")  # of an environment that is made once
LISTED_S = 0.02  # that a function costs to stand in the budget
NAMED = 10
# Runs of one commit on one machine differ by a tenth within hours, of which the piece of work that
# is always the same sees a part.
ALLOWED = 1.12


Functions = dict[str, tuple[float, int]]  # processor seconds, and of how many cases


def last_run() -> tuple[float, float, Functions]:
    """Of the last run of tests/run.sh: processor seconds of all that is no set-up, those of a piece
    of work that is always the same, and those of each test function."""
    parts = processor_time.read(LAST / "seconds.jsonl")
    spent = sum(one["processor_s"] for one in parts if one["name"] not in BEFORE_TESTS)
    unit = statistics.median(one["unit_s"] for one in parts)
    return spent, unit, json.loads((LAST / "seconds.json").read_text())


def over(budget: dict[str, Any], spent: float, unit: float, functions: Functions) -> str:
    """What is wrong with a run; nothing where it stays within its budget. A machine that is slower,
    by itself or by what else it does, has more seconds in proportion."""
    slower = max(1.0, unit / budget["unit_s"])
    if spent <= budget["processor_s"] * slower * ALLOWED:
        return ""
    expected = budget["functions"]
    grown = {
        name: now / slower - expected.get(name, (0.0, 0))[0] for name, (now, _) in functions.items()
    }
    first = sorted(grown, key=lambda name: -grown[name])[:NAMED]
    lines = [f"{grown[name]:+8.1f} s  {name}" for name in first]
    head = f"{spent:.0f} processor seconds, of {budget['processor_s'] * slower:.0f}; most grew"
    return "\n".join([head, *lines])


def test_the_run_stays_within_its_budget() -> None:
    said = over(json.loads(BUDGET.read_text()), *last_run())
    assert not said, said


def test_what_grew_is_named() -> None:
    budget = {"processor_s": 100, "unit_s": 0.1, "functions": {"a": (60.0, 1), "b": (39.0, 2)}}
    functions = {"a": (60.0, 1), "b": (59.0, 2)}
    functions |= {f"new {number}": (1.0, 1) for number in range(20)}
    assert over(budget, 111.0, 0.1, functions) == ""
    assert over(budget, 139.0, 0.2, functions) == "", "a machine that is half as fast"
    first, *named = over(budget, 139.0, 0.1, functions).splitlines()
    assert "139" in first and "100" in first
    assert named[0].split() == ["+20.0", "s", "b"] and len(named) == NAMED


if __name__ == "__main__":
    _, unit, functions = last_run()
    listed = {
        name: (round(now, 2), cases)
        for name, (now, cases) in sorted(functions.items())
        if now >= LISTED_S
    }
    budget = {**json.loads(BUDGET.read_text()), "unit_s": round(unit, 4), "functions": {}}
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(row)}" for name, row in listed.items())
    text = json.dumps(budget).replace('"functions": {}', f'"functions": {{\n{rows}\n}}')
    BUDGET.write_text(text + "\n")
