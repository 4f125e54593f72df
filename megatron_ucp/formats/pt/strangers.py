"""Names in a pickle that are not on the closed list: where they may stand as names, and which they
are."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ucp.core.values import Global, Stand
from megatron_ucp.errors import UnsafePickleError


@dataclass
class Strangers:
    """Names that are not on the closed list and may stand as names, as somebody vouches for them:
    those `known` (None: all), under a key of the tree that `is_value` and in parameter groups,
    where a program's own values are. They may name an object too; nothing of it is made. `members`
    says the names of members of enums, by (class, value). `names` are those that were found."""

    is_value: Callable[[str], bool]
    known: frozenset[str] | None = None
    members: Mapping[tuple[str, Any], str] = field(default_factory=dict[tuple[str, Any], str])
    names: set[str] = field(default_factory=set[str])

    def take(self, qualname: str) -> bool:
        """Whether a name may stand as one; it is noted then."""
        if self.known is not None and qualname not in self.known:
            return False
        self.names.add(qualname)
        return True


def refuse_outside(tree: object, strangers: Strangers, file: str) -> None:
    """Raises UnsafePickleError for a name that is not on the closed list in any other place."""
    outside = [
        value
        for key, value in (tree.items() if isinstance(tree, dict) else [(None, tree)])
        if not (isinstance(key, str) and (key == PARAM_GROUPS or strangers.is_value(key)))
    ]
    for item in named_in(outside, without=PARAM_GROUPS):
        if item.qualname in strangers.names:
            raise not_listed(item.qualname, file)


PARAM_GROUPS = "param_groups"  # of every optimizer's state dict


def not_listed(qualname: str, file: str | None) -> UnsafePickleError:
    """A name in a pickle that nothing here knows."""
    shown = ascii(qualname[:200])
    return UnsafePickleError(
        f"the pickle asks for {shown}, which is not on the closed list",
        file=file,
        found=shown,
        expected="tensors, plain Python values and DeepSpeed's own records",
        fix=UnsafePickleError.fix + '; in Python a load with allow={"values"} leaves such a '
        "value of a scheduler, a group or the client state out",
    )


def named_in(value: object, without: str | None = None) -> Iterator[Global | Stand]:
    """Every name of a class or function in a value, and every object of one; not what dictionaries
    have under the key `without`."""
    seen = set[int]()
    left = [value]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Stand | Global):
            yield item
        if isinstance(item, Stand):
            left += [*item.args, *item.state.values()]
        elif isinstance(item, Mapping):
            left += [
                *item,
                *(part for key, part in item.items() if without is None or key != without),
            ]
        elif isinstance(item, list | tuple | set | frozenset | deque):
            left += item
