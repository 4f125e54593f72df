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
        source.weights.name_of(name, file): source.tensor(source.full_path(file), module[name])
        for name in _buffer_names(source, file)
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


def _buffer_names(source: "NativeCheckpoint", file: str) -> list[str]:
    tree = source.tree(file)
    module = tree.get("module") or {}
    return [name for name in tree.get("buffer_names") or [] if name in module]


def _buffers_that_differ(source: "NativeCheckpoint", first: str, name: str) -> list[str]:
    """Buffers whose records have other checksums; where files have none, other bytes."""
    ours, theirs = (source.tree(file).get("module") or {} for file in (first, name))
    out: list[str] = []
    for buffer in _buffer_names(source, name):
        refs: Any = (ours.get(buffer), theirs[buffer])
        canonical = source.weights.name_of(buffer, name)
        of_an_expert = number_and_count(canonical, source.expert_counts) is not None
        if of_an_expert or not all(isinstance(ref, TensorRef) for ref in refs):
            continue  # ranks have other experts
        records = [
            source.file(f).record(r.storage) for f, r in zip((first, name), refs, strict=True)
        ]
        placed = [(r.shape, r.stride, r.offset_elems, r.storage.dtype) for r in refs]
        sums = [(record.crc32, record.size_bytes) for record in records]
        equal = sums[0] == sums[1] and placed[0] == placed[1]
        if not (equal and records[0].crc32) and not same(
            *(
                source.tensor(source.full_path(f), r)
                for f, r in zip((first, name), refs, strict=True)
            )
        ):
            out.append(canonical)
    return out
