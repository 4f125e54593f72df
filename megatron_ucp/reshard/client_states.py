"""The client states of two checkpoints, compared in type and bits."""

import hashlib
from collections.abc import Iterator
from typing import Any

from megatron_ucp.core.values import TENSOR, Stand, same, shown
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.megatron.extras import CLIENT_KEYS, MEGATRONS_OWN
from megatron_ucp.formats.pt.unpickler import with_tensors
from megatron_ucp.formats.pt.values import TensorRef
from megatron_ucp.reshard.execute import bytes_of, tensor_at, tensor_of


def unequal(one: Checkpoint, two: Checkpoint) -> Iterator[tuple[str, str, str]]:
    """Where the values of a key differ first, or which side lacks it: the place, and both sides as
    text. What Megatron keeps in its own place is not compared where one of the runs is
    Megatron's."""
    states = [checkpoint.extras.client_state for checkpoint in (one, two)]
    of_megatron = any(not MEGATRONS_OWN.isdisjoint(state) for state in states)
    for key in {**states[0], **states[1]}:
        if of_megatron and key in CLIENT_KEYS:
            continue
        place = f"client_state[{shown(key)}]"
        if any(key not in state for state in states):
            texts = [shown(state[key]) if key in state else "missing" for state in states]
            yield place, texts[0], texts[1]
            continue
        sides = [
            _with_digests(checkpoint, state[key])
            for checkpoint, state in zip((one, two), states, strict=True)
        ]
        try:
            if same(*sides):
                continue
            place, a, b = _first(place, sides[0], sides[1])
        except (TypeError, ValueError, RecursionError):  # no text is written of it
            yield f"{place}, which can't be compared", shown(sides[0]), shown(sides[1])
            continue
        texts = [shown(a), shown(b)]
        if texts[0] == texts[1]:  # another type, or what a short text leaves out
            texts = [f"{type(side).__name__} {shown(side)}" for side in (a, b)]
        yield place, texts[0], texts[1]


def _with_digests(source: Checkpoint, value: Any) -> Any:
    """A value with a digest in the place of each tensor, which is read for it alone."""

    def digest(found: Any) -> Stand:
        is_there = isinstance(found, TensorRef)
        tensor = tensor_at(source.place_of(found), found) if is_there else tensor_of(found)
        data = hashlib.sha256(bytes_of(tensor.contiguous())).hexdigest()
        shape = str(tuple(tensor.shape))
        return Stand(TENSOR, (str(tensor.dtype), shape, data[:24]))

    return with_tensors(value, digest, file=source.main_file)


def _first(place: str, a: Any, b: Any) -> tuple[str, Any, Any]:
    """The first place inside two values where they differ."""
    if type(a) is dict and type(b) is dict and a.keys() == b.keys():
        pairs = ((key, a[key], b[key]) for key in a)
    elif type(a) is type(b) and type(a) in (list, tuple) and len(a) == len(b):
        pairs = ((number, *both) for number, both in enumerate(zip(a, b, strict=True)))
    else:
        return place, a, b
    for key, left, right in pairs:
        if not same(left, right):
            return _first(f"{place}[{shown(key)}]", left, right)
    return place, a, b
