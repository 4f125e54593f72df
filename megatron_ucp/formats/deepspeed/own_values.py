"""What ranks have of their own in files of ZeRO-3, where DeepSpeed writes a model file for each."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_ucp.core.values import same
from megatron_ucp.formats.deepspeed.experts import number_and_count
from megatron_ucp.formats.deepspeed.keys import OWN_KEYS
from megatron_ucp.formats.of_ranks import SCHEDULER, OwnValues, PerRank
from megatron_ucp.formats.pt.unpickler import TensorRef, with_tensors

if TYPE_CHECKING:
    from megatron_ucp.formats.deepspeed.native import NativeCheckpoint


def differs_in(source: "NativeCheckpoint", name: str) -> PerRank:
    """What of a model file differs from the one of its place's first rank; nothing of other
    files."""
    place = next((at for at, file in source.names.model.items() if file == name), None)
    if place is None or name == (first := source.model_of(place[1])):
        return PerRank()
    ours, theirs = _client(source, first), _client(source, name)
    keys = {key for key in {**ours, **theirs} if not _alike(ours, theirs, key)}
    schedules = [source.tree(file).get(SCHEDULER) for file in (first, name)]
    return PerRank(
        frozenset(_buffers_that_differ(source, first, name)),
        frozenset(keys),
        not same(
            *(_read(source, file, s) for file, s in zip((first, name), schedules, strict=True))
        ),
    )


def held_by(source: "NativeCheckpoint", rank: int) -> OwnValues:
    """All that a rank's model file has of what may differ."""
    part, mp = source.file_place(rank)
    file = source.model_of(mp, part)
    module = source.tree(file).get("module") or {}
    buffers = {
        source.weights.name_of(name, file): _read(source, file, module[name])
        for name in _held_names(source, file)
    }
    scheduler = _read(source, file, source.tree(file).get(SCHEDULER))
    return OwnValues(buffers, _client(source, file), scheduler)


def _alike(ours: Mapping[Any, Any], theirs: Mapping[Any, Any], key: Any) -> bool:
    return key in ours and key in theirs and same(ours[key], theirs[key])


def _client(source: "NativeCheckpoint", file: str) -> dict[Any, Any]:
    """The client state of a file, its tensors read."""
    tree = source.tree(file)
    return {k: _read(source, file, v) for k, v in tree.items() if k not in OWN_KEYS}


def _read(source: "NativeCheckpoint", file: str, value: Any) -> Any:
    path = source.full_path(file)
    return with_tensors(value, lambda found: _tensor(source, path, found))


def _tensor(source: "NativeCheckpoint", path: str, found: Any) -> Any:
    return source.tensor(path, found) if isinstance(found, TensorRef) else found


def _held_names(source: "NativeCheckpoint", file: str) -> list[str]:
    """Buffers, and extra states of modules, in a model file."""
    tree = source.tree(file)
    module = tree.get("module") or {}
    states = (name for name in module if str(name).endswith(EXTRA_STATE))
    return [name for name in (*(tree.get("buffer_names") or []), *states) if name in module]


def _buffers_that_differ(source: "NativeCheckpoint", first: str, name: str) -> list[str]:
    """What a model file has otherwise than the first one, of buffers and extra states."""
    ours, theirs = (source.tree(file).get("module") or {} for file in (first, name))
    out: list[str] = []
    for held in _held_names(source, name):
        canonical = source.weights.name_of(held, name)
        of_an_expert = number_and_count(canonical, source.expert_counts) is not None
        if of_an_expert or held not in ours:
            continue  # ranks have other experts
        pair = (first, ours[held]), (name, theirs[held])
        if not _same_records(source, pair) and not same(*(_read(source, *one) for one in pair)):
            out.append(canonical)
    return out


def _same_records(
    source: "NativeCheckpoint", pair: tuple[tuple[str, Any], tuple[str, Any]]
) -> bool:
    """Whether two tensors are large, and their records have equal sums."""
    (_, ref), (_, other) = pair
    if not isinstance(ref, TensorRef) or not isinstance(other, TensorRef):
        return False
    placed = [(r.shape, r.stride, r.offset_elems, r.storage.dtype) for r in (ref, other)]
    records = [source.file(file).record(r.storage) for file, r in pair]
    sums = [(record.crc32, record.size_bytes) for record in records]
    large = records[0].crc32 and records[0].size_bytes > _READ_BYTES
    return bool(large) and placed[0] == placed[1] and sums[0] == sums[1]


EXTRA_STATE = "_extra_state"
_READ_BYTES = 2**20  # up to so many are read and compared
