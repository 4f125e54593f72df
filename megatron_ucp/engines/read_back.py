"""Whether a live value can be read again from the files that a save writes of it: it is pickled as
torch does, without the bytes of its tensors, and read as every load reads it."""

import io
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ucp.core.values import TENSOR, InertObject, coded, same
from megatron_ucp.engines.values import (
    WHAT_TRAVELS,
    inert,
    members_by_value,
    named_in,
    strange,
)
from megatron_ucp.errors import UcpError, UnsupportedError
from megatron_ucp.formats.pt.unpickle import VouchedClasses, loads, with_tensors

_PROTOCOL = 2  # torch.save's
_FILE = "the file of the save"
_MAX_VALUES = 2**21  # that a value has where shared parts count each time
_REFUSALS = (pickle.PicklingError, AttributeError, TypeError, ValueError, RecursionError)


def unreadable(value: Any, left: bool = False) -> str:
    """Why no load could read a value back as it is, "" where every load can. Where what is
    `strange` in it is `left` to the engine that loads, why none could read the rest."""
    if written_out(value, {}) > _MAX_VALUES:
        return f"more than {_MAX_VALUES} values, shared ones counted each time"
    try:
        found = _read(value, None if left else frozenset(named_in(value)))[0]
        if left:
            return ""
        want = inert(value, lambda tensor: _outline(str(tensor.dtype), tuple(tensor.shape)))
        have = with_tensors(found, lambda ref: _outline(f"torch.{ref.storage.dtype}", ref.shape))
        return "" if same(want, have) else "it is read as something else"
    except UcpError as error:
        return f"{error.problem} ({error.found})" if error.found else error.problem
    except _REFUSALS as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def names_of(value: Any) -> list[str]:
    """All classes and functions that a pickle of a value names and that are not on the closed
    list; none where it can't be pickled."""
    try:
        return sorted(_read(value, None)[1])
    except (UcpError, *_REFUSALS):
        return []


def _read(value: Any, known: frozenset[str] | None) -> tuple[Any, set[str]]:
    members = {(kind, one): name for kind, one, name in members_by_value(value)}
    vouched = VouchedClasses(lambda _: True, known, members)
    return loads(_pickled(value), file=_FILE, vouched=vouched), vouched.names


def written_out(item: Any, found: dict[int, int]) -> int:
    """Values in a value, those of shared parts each time; a cycle counts once."""
    parts: Any = ()
    if isinstance(item, dict):
        parts = [*item, *item.values()]
    elif isinstance(item, list | tuple | set | frozenset):
        parts = item
    if not parts or len(found) > _MAX_VALUES:
        return 1
    if id(item) not in found:
        found[id(item)] = 1
        found[id(item)] = 1 + sum(written_out(part, found) for part in parts)
    return found[id(item)]


def _outline(dtype: str, shape: tuple[int, ...]) -> InertObject:
    return InertObject(TENSOR, (dtype, tuple(shape)))


class _Pickler(pickle.Pickler):
    """Names storages as torch.save does, and writes no bytes of them."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, torch.storage.TypedStorage):
            kind = getattr(torch, obj._pickle_storage_type())
            return "storage", kind, str(id(obj)), "cpu", obj._size()
        if isinstance(obj, torch.UntypedStorage):
            return "storage", torch.UntypedStorage, str(id(obj)), "cpu", obj.nbytes()
        return None


def _pickled(value: Any) -> bytes:
    out = io.BytesIO()
    _Pickler(out, _PROTOCOL).dump(value)
    return out.getvalue()


# ------------------------------------------------ refused before a save


@dataclass(frozen=True)
class KeptValue:
    """A value that a save keeps: what messages call it, and whether a running program will have one
    in the same place (`live`). Of one `in_manifest` the manifest has a second copy."""

    name: str
    value: Any
    live: bool = True
    in_manifest: bool = False


def kept_of(
    name: str, scheduler: Any, groups: Sequence[Mapping[str, Any]], **how: bool
) -> Iterator[KeptValue]:
    """The state of a scheduler, which is called `name`, and the hyper-parameters of every group;
    `how` as in `KeptValue`."""
    if scheduler is not None:
        yield KeptValue(name, scheduler.state_dict(), how.get("live", True))
    for number, group in enumerate(groups):
        own = {key: value for key, value in group.items() if key != "params"}
        yield KeptValue(f"param_groups[{number}]", own, **how)


def refuse_strange(
    kept: Iterable[KeptValue],
    error: type[UcpError] = UnsupportedError,
    file: object = None,
    left: bool = False,
) -> None:
    """Raises an error of that class for a value that no load could give back as it is; `file` is
    the one that it would go into. What is strange may be `left` to the engine that loads."""
    for one in kept:
        odd = () if left else strange(one.value, one.name, one.live)
        found = next((f"{at}: {wrong}" for at, wrong in odd), "")
        if not found and (why := unreadable(one.value, left)):
            found = f"{one.name}: {why}"
        if not found and one.in_manifest and len(json.dumps(coded(inert(one.value)))) > _MAX_TEXT:
            found = f"{one.name}: more than {_MAX_TEXT} bytes as text"
        if found:
            raise error(
                "no load could give back a value as it is",
                file=file,
                expected=WHAT_TRAVELS + _LIVE if one.live else WHAT_TRAVELS,
                found=found,
                fix="give it as one of these (a parameter as .detach()), or keep it in a file of "
                "its own" + ("" if left or not one.live else _LEAVE),
            )


_LEAVE = '; or leave it to the engine that loads, with allow={"values"}'
_LIVE = ", objects of classes that are found in their modules and are their attributes alone"
_MAX_TEXT = 2**22  # of a group, of which a manifest may hold several
