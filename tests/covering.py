"""A part of many cases in which every two values still meet: an orthogonal array of what there is.

Faults of a conversion that needs three things at once are rare; two of them (a source's stage and a
target's dtype) are what most need.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

Row = tuple[Any, ...]


def met(row: Sequence[Any]) -> set[tuple[int, Any, int, Any]]:
    """Every two values of a row, with their columns."""
    return {(i, row[i], j, row[j]) for i, j in combinations(range(len(row)), 2)}


def covering(rows: Sequence[Row], columns: Callable[..., Sequence[Any]]) -> list[Row]:
    """The rows, as few as a greedy choice takes, in which every two values that meet in `rows` meet
    too. `columns` gives the values of a row's elements."""
    left = set[Any]().union(*(met(columns(*row)) for row in rows))
    chosen: list[Row] = []
    while left:
        best = max(rows, key=lambda row: len(met(columns(*row)) & left))
        chosen.append(best)
        left -= met(columns(*best))
    return [row for row in rows if row in chosen]
