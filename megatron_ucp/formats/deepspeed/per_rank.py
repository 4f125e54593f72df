"""What ranks have of their own, where DeepSpeed writes a model file for each: at ZeRO-3 for every
rank, else for each model-parallel one."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.core.experts import number_and_count
from megatron_ucp.core.values import TENSOR, InertObject, same
from megatron_ucp.formats.deepspeed.files import OWN_KEYS
from megatron_ucp.formats.deepspeed.run import NativeRun
from megatron_ucp.formats.per_rank import SCHEDULER, OwnValues, PerRank
from megatron_ucp.formats.pt.refs import TensorRef
from megatron_ucp.formats.pt.unpickle import with_tensors


def differs_in(run: NativeRun, name: str) -> PerRank:
    """What of a model file differs: of the client state from the first file, of the rest from the
    file of its place's first rank, as places have other layers and groups. Nothing of other
    files."""
    place = next((at for at, file in run.names.model.items() if file == name), None)
    if place is None:
        return PerRank()
    found = PerRank(client_state=_keys_that_differ(_Pair(run, run.model_name, name)))
    if name == (first := run.model_of(place[1])):
        return found
    pair = _Pair(run, first, name)
    schedules = [run.tree(file).get(SCHEDULER) for file in (first, name)]
    return replace(
        found,
        buffers=frozenset(_buffers_that_differ(pair)),
        scheduler=not pair.same(*schedules),
    )


def _keys_that_differ(pair: "_Pair") -> frozenset[Any]:
    """Keys of the client state of which one of two files has another value, or none."""
    if pair.first == pair.name:
        return frozenset()
    ours, theirs = (_client(pair.run, file) for file in (pair.first, pair.name))
    both = ours.keys() & theirs.keys()
    apart = {key for key in both if not pair.same(ours[key], theirs[key])}
    return frozenset(apart | (ours.keys() ^ theirs.keys()))


def held_by(run: NativeRun, rank: int) -> OwnValues:
    """All that a rank's model file has of what may differ, read when it is asked for."""
    part, mp = run.file_place(rank)
    file = run.model_of(mp, part)
    module = run.tree(file).get("module") or {}
    buffers = {run.weights.name_of(name, file): module[name] for name in _held_names(run, file)}
    scheduler = _read(run, file, run.tree(file).get(SCHEDULER))
    client = _client(run, file)
    return OwnValues(_Read(run, file, buffers), _Read(run, file, client), scheduler)


class _Read(Mapping[Any, Any]):
    """Values of a file whose tensors are read for each one that is asked for."""

    def __init__(self, run: NativeRun, file: str, values: Mapping[Any, Any]) -> None:
        self._run, self._file, self._values = run, file, values

    def __getitem__(self, key: Any) -> Any:
        return _read(self._run, self._file, self._values[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


def _client(run: NativeRun, file: str) -> dict[Any, Any]:
    """The client state of a file, its tensors by place."""
    return {key: value for key, value in run.tree(file).items() if key not in OWN_KEYS}


def _read(run: NativeRun, file: str, value: Any) -> Any:
    path = run.full_path(file)
    return with_tensors(value, lambda found: _tensor(run, path, found))


def _tensor(run: NativeRun, path: str, found: Any) -> Any:
    """With no limit but the size of the file."""
    return run.tensor(path, found, found.numel) if isinstance(found, TensorRef) else found


@dataclass(frozen=True)
class _Pair:
    """Two files of which values are compared: large tensors by the CRC-32 of their records, or of
    others by a digest."""

    run: NativeRun
    first: str
    name: str

    def same(self, one: Any, other: Any) -> bool:
        return self._by(self._summed, one, other) or self._by(self._digested, one, other)

    def _by(self, short: Callable[[str, Any], Any], one: Any, other: Any) -> bool:
        """Whether values are the same with a short form of each tensor."""
        return same(
            *(
                with_tensors(value, lambda found, file=file: short(file, found))
                for file, value in ((self.first, one), (self.name, other))
            )
        )

    def _summed(self, file: str, found: Any) -> Any:
        if not isinstance(found, TensorRef):
            return found
        record = self.run.file(file).record(found.storage)
        if not record.crc32 or found.span_bytes <= _READ_BYTES:
            return self._digested(file, found)
        placed = (found.shape, found.stride, found.offset_elems, found.storage.dtype)
        return InertObject(TENSOR, (placed, record.crc32, record.size_bytes))

    def _digested(self, file: str, found: Any) -> Any:
        if not isinstance(found, TensorRef):
            return found
        value = _tensor(self.run, self.run.full_path(file), found)
        digest = hashlib.sha256(value.state.pop("data")).hexdigest()
        return InertObject(TENSOR, (digest,), value.state)


def _held_names(run: NativeRun, file: str) -> list[str]:
    """Buffers, and extra states of modules, in a model file."""
    tree = run.tree(file)
    module = tree.get("module") or {}
    states = (name for name in module if str(name).endswith(EXTRA_STATE))
    return [name for name in (*(tree.get("buffer_names") or []), *states) if name in module]


def _buffers_that_differ(pair: _Pair) -> list[str]:
    """What a model file has otherwise than the first one, of buffers and extra states."""
    run, name = pair.run, pair.name
    ours, theirs = (run.tree(file).get("module") or {} for file in (pair.first, name))
    out: list[str] = []
    for held in _held_names(run, name):
        canonical = run.weights.name_of(held, name)
        of_an_expert = number_and_count(canonical, run.expert_counts) is not None
        if of_an_expert or held not in ours:
            continue  # ranks have other experts
        if not pair.same(ours[held], theirs[held]):
            out.append(canonical)
    return out


EXTRA_STATE = "_extra_state"
_READ_BYTES = 2**20  # up to so many are read
