"""Values by key, and what is made when somebody asks for it."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast, overload

_Self = TypeVar("_Self")
_Keys = ParamSpec("_Keys")
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """The values of each key, keys and values in the order in which they come."""
    out: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        out.setdefault(key, []).append(value)
    return out


def kept(
    make: Callable[Concatenate[_Self, _Keys], _Value],
) -> Callable[Concatenate[_Self, _Keys], _Value]:
    """A method that makes what it gives for its arguments once, and keeps it with its object. They
    are given by position."""

    @wraps(make)
    def ask(self: _Self, *keys: _Keys.args, **none: _Keys.kwargs) -> _Value:
        held = vars(self).setdefault(make.__qualname__, {})
        if keys not in held:
            held[keys] = make(self, *keys, **none)
        return held[keys]

    return ask


class MadeWhenAsked(Sequence[_Value]):
    """A sequence of which `made(number)` makes an item. It equals a tuple of the same items, and is
    pickled as that."""

    __slots__ = ()

    @abstractmethod
    def made(self, number: int) -> _Value: ...

    @overload
    def __getitem__(self, number: int) -> _Value: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[_Value, ...]: ...
    def __getitem__(self, number: int | slice) -> _Value | tuple[_Value, ...]:
        if isinstance(number, slice):
            return tuple(self[at] for at in range(*number.indices(len(self))))
        return self.made(range(len(self))[number])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(cast("Sequence[Any]", other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, ([*self],)
