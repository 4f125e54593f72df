"""States of schedulers: the lists that they have with one value per parameter group, also in the
states of other schedulers inside them (torch's SequentialLR and ChainedScheduler have a list of
these).

Example: of two stages with 1 and 2 groups `of_all_stages` makes `{"base_lrs": [a, b, c]}`.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from megatron_ucp.formats.checkpoint import PER_GROUP

_COUNTED = ("base_lrs", "min_lrs")  # rates of every group, in each scheduler of torch that has them


def regrouped(states: Sequence[Any], of: Callable[[list[Any]], Any]) -> Any:
    """The first of several states of one scheduler, with other lists per group: `of` gets the lists
    that all states have in one place (None: a state has none there), and returns the new one.
    Nothing of `states` changes."""
    return _Walk(of).over(list(states))


def of_all_stages(first: Any, stages: Sequence[tuple[Any, int]]) -> Any:
    """The state `first` of a scheduler with lists for the groups of all pipeline stages, one stage
    after the other. `stages` has the state of each stage, and how many groups the stage has; a list
    of another length stays as it is in `first`."""
    counts = [count for _, count in stages]

    def of(lists: list[Any]) -> Any:
        found = [values if isinstance(values, list) else None for values in lists[1:]]
        if [None if values is None else len(values) for values in found] != counts:
            return lists[0]
        return [value for values in found for value in values or ()]

    return regrouped([first, *(state for state, _ in stages)], of)


def without_groups(state: Any) -> Any:
    """A scheduler's state with None in the place of each list per group."""
    return regrouped([state], lambda _: None)


def counted_groups(state: Any) -> Iterator[list[Any]]:
    """The lists that have one rate for each group."""
    found: list[list[Any]] = []
    _Walk(lambda _: None, lambda key, value: key in _COUNTED and found.append(value)).over([state])
    yield from found


class _Walk:
    """Over the dictionaries and lists of some states at once. What is shared, or holds itself, is
    walked once: values of a hostile file can share parts so often that a plain walk never ends."""

    def __init__(
        self, of: Callable[[list[Any]], Any], seen: Callable[[str, list[Any]], Any] | None = None
    ) -> None:
        self.of, self.seen = of, seen
        self._made: dict[tuple[int, ...], Any] = {}

    def over(self, states: list[Any]) -> Any:
        """What changes is a copy; the rest stays what it is, shared as it was."""
        first, ids = states[0], tuple(map(id, states))
        if ids in self._made or not (isinstance(first, dict) or _is_list_of_states(first)):
            return self._made.get(ids, first)
        self._made[ids] = out = copy.copy(first)
        if isinstance(first, dict):
            for key in first:
                beside = [s.get(key) if isinstance(s, dict) else None for s in states]
                out[key] = self._part(key, beside)
            changed = any(out[key] is not first[key] for key in first)
        else:
            for number in range(len(first)):
                out[number] = self.over([_item(state, number) for state in states])
            changed = any(one is not other for one, other in zip(out, first, strict=True))
        if not changed:
            self._made[ids] = first
        return self._made[ids]

    def _part(self, key: Any, beside: list[Any]) -> Any:
        if key not in PER_GROUP or not isinstance(beside[0], list):
            return self.over(beside)
        if self.seen is not None:
            self.seen(key, beside[0])
        return self.of(beside)


def _is_list_of_states(value: Any) -> bool:
    return type(value) is list and all(isinstance(one, dict) for one in value)


def _item(state: Any, number: int) -> Any:
    return state[number] if type(state) is list and number < len(state) else None
