"""DeepSpeed's native checkpoints: which record of which file holds which slot.

The structure is rebuilt from what the files themselves say. A manifest beside them is evidence: it
adds layouts and the order of parameters that stage 0 does not store, and every file is compared
with it.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.core.experts import file_rank, number_and_count, rank_of_expert
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.join_ranks import check_replicas
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import FILE_NAME, Manifest
from megatron_ucp.core.mesh import EXPERTS
from megatron_ucp.core.names import MASTER, VALUE
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.values import TENSOR, InertObject, same
from megatron_ucp.errors import ForeignFileError, StoreError, UcpError, UnsupportedError
from megatron_ucp.formats import expect
from megatron_ucp.formats.byte_files import Where
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint, Extras, TrainedWeights
from megatron_ucp.formats.deepspeed.checks import (
    check_file,
    prefetch_checked,
    trained_weights,
)
from megatron_ucp.formats.deepspeed.extras import extras_of, layers_of, notes_of_keys
from megatron_ucp.formats.deepspeed.files import (
    OWN_KEYS,
    expert_file_name,
    expert_optimizer_name,
    is_universal,
    missing_files,
    missing_layers,
    model_name,
    optimizer_name,
    tp_of,
)
from megatron_ucp.formats.deepspeed.layout_sources import compared
from megatron_ucp.formats.deepspeed.lost_states import refuse_unusable, said_of
from megatron_ucp.formats.deepspeed.manifest import compare, manifest_of
from megatron_ucp.formats.deepspeed.optimizers import PlainFile, Unpartitioned, own_slice
from megatron_ucp.formats.deepspeed.run import NativeRun
from megatron_ucp.formats.deepspeed.weights import PipeNames, said_of_side_data, shapes_by_group
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.per_rank import PER_RANK, SCHEDULER, OwnValues, PerRank
from megatron_ucp.formats.pt.refs import TensorRef
from megatron_ucp.formats.pt.unpickle import with_tensors

# ---- expected files
#
# Which files a tag of DeepSpeed's own must have: derived from what its model files say of the
# run, never from what lies in the folder.
#
# | what says it | what must be there |
# |---|---|
# | `mp_world_size`, and at ZeRO-3 `dp_world_size` | a model file of each rank |
# | `param_shapes`, or ZeRO-3 | an optimizer file of each partition of each model-parallel rank |
# | names in `param_shapes` of a pipeline | a file of each layer, of each tensor-parallel rank |
# | `num_experts` | a file of each expert; at stage 0 an optimizer file of each of their ranks |
#
# DeepSpeed writes model files first. So a save that was killed lacks a whole class of files,
# which no other file of that class can show.


_WEIGHTS = (
    "; or take the weights alone, without the optimizer's states: --allow weights (Python: "
    'allow={"weights"}, of a load with load_optimizer_states=False too)'
)


def require_rank_files(run: NativeRun) -> None:
    """Raises NotFoundError where a model file or an optimizer file of the run's ranks is missing,
    ForeignFileError where there is one too many."""
    folder, names, dp, ranks = run.folder, run.names, run.dp, run.model_ranks
    parts: Iterable[int | None] = range(dp) if names.is_partitioned else (None,)
    wanted = ((part, rank) for rank in range(ranks) for part in parts)
    count = ranks * (dp if names.is_partitioned else 1)
    said = f"model-parallel ranks 0 to {ranks - 1}" if ranks > 1 else "model-parallel rank 0"
    if names.is_partitioned:
        said = f"{dp} partitions of {said}"
    if lost := _lost(wanted, count, names.model):
        number, (part, rank) = lost
        raise missing_files(
            "model file",
            number,
            folder / model_name(rank, part),
            said,
            f"{len(names.model)} model file{'s' if len(names.model) != 1 else ''}",
        )
    if max(rank for _, rank in names.model) >= ranks:
        raise _too_many(run, "model files than the run had ranks", said, names.model.values())
    if run.has_optimizer_files:
        _require_optimizer_files(run, dp, ranks)


def _require_optimizer_files(run: NativeRun, dp: int, ranks: int) -> None:
    folder, names = run.folder, run.names
    said = f"{dp} partitions of {ranks} model-parallel ranks"
    if len(names.prefixes) > 1:
        raise ForeignFileError(
            "optimizer files of two precisions lie in one folder",
            file=folder,
            expected="one prefix",
            found=" and ".join(repr(prefix) for prefix in names.prefixes),
        )
    wanted = ((part, rank) for part in range(dp) for rank in range(ranks))
    if lost := _lost(wanted, dp * ranks, names.optimizer):
        number, (part, rank) = lost
        raise missing_files(
            "optimizer file",
            number,
            folder / optimizer_name(part, rank, next(iter(names.prefixes), "")),
            said,
            f"no file of partition {part}, model-parallel rank {rank}",
            "" if names.is_partitioned else _WEIGHTS,
        )
    if len(names.optimizer) != dp * ranks:
        found = names.optimizer.values()
        raise _too_many(run, "optimizer files than the run had partitions", said, found)


def require_layer_files(run: NativeRun) -> None:
    """Raises NotFoundError where a pipeline lacks the file of a layer whose parameters a stage's
    model file lists."""
    if not run.pipeline or run.meta.get("module") is not None:
        return
    wanted = [
        (int(layer), rank)
        for stage in range(run.mesh.pp)
        for layer in sorted(_layers(run, run.model_of(stage * run.mesh.tp)), key=int)
        for rank in range(run.mesh.tp)
    ]
    if lost := _lost(wanted, len({*wanted}), run.names.layers):
        number, (layer, rank) = lost
        raise missing_layers(run.folder, number, layer, rank)


def _layers(run: NativeRun, file: str) -> set[str]:
    """Positions of the layers whose parameters a model file lists."""
    listed = shapes_by_group(run.tree(file), run.full_path(file)) or []
    heads = {name.partition(".")[0] for named in listed for name in named}
    return {head for head in heads if head.isdecimal() and len(head) < 8}


def require_expert_files(run: NativeRun) -> None:
    """Raises NotFoundError where an expert of a stage has no file, or at stage 0 an expert-parallel
    rank no optimizer file."""
    if not run.meta.get("num_experts") or (run.experts.autoep and run.names.is_partitioned):
        return
    wanted = list(dict.fromkeys(_experts(run)))
    if lost := _lost(wanted, len(wanted), run.names.experts):
        number, (layer, expert, rank) = lost
        raise missing_files(
            "expert file",
            number,
            run.folder / expert_file_name(layer, expert, rank),
            f"a file of each of {len(wanted)} experts and ranks that cut them",
            f"no file of expert {expert} of mixture {layer}, model-parallel rank {rank}",
        )
    if run.has_optimizer_files or run.told.weights:
        return
    places = [
        (ep, file_rank(run.mesh, stage, ep, etp))
        for stage in range(run.mesh.pp)
        for ep in range(run.mesh.ep)
        for etp in range(run.mesh.etp)
    ]
    if gone := _lost(places, len({*places}), run.names.expert_optimizer):
        number, (ep, rank) = gone
        raise missing_files(
            "expert optimizer file",
            number,
            run.folder / expert_optimizer_name(ep, rank),
            f"{run.mesh.ep} expert-parallel ranks, as the groups of the optimizer say",
            f"no file of expert-parallel rank {ep}, model-parallel rank {rank}",
            _WEIGHTS,
        )


def _experts(run: NativeRun) -> Iterator[tuple[int, int, int]]:
    """(Mixture of the stage, expert, model-parallel rank) of each expert file, as the stages' model
    files count their experts."""
    mesh = run.mesh
    for stage in range(mesh.pp):
        counts = run.tree(run.model_of(stage * mesh.tp)).get("num_experts")
        for layer, count in enumerate(counts if isinstance(counts, list) else []):
            if type(count) is not int or count % mesh.ep or not 0 < count < 2**20:
                continue  # the readers of the experts say what is wrong with it
            for expert in range(count):
                for etp in range(mesh.etp):
                    ep = rank_of_expert(expert, count, mesh.ep)
                    yield layer, expert, file_rank(mesh, stage, ep, etp)


_MOST_COUNTED = 2**20  # places; a hostile file can say more ranks than any machine has


def _lost(wanted: Iterable[Any], count: int, there: Mapping[Any, str]) -> tuple[int, Any] | None:
    """How many of `count` places have no file, and the first one of these; None where each has
    one."""
    missing = (place for place in wanted if place not in there)
    first = next(missing, None)
    if first is None:
        return None
    more = count - len(there) - 1 if count > _MOST_COUNTED else sum(1 for _ in missing)
    return 1 + more, first


def _too_many(run: NativeRun, what: str, expected: str, found: Collection[str]) -> ForeignFileError:
    return ForeignFileError(
        f"there are more {what}",
        file=run.folder,
        expected=expected,
        found=f"{len(found)} files",
        fix="put the files of one save, and no others, into the folder",
    )


# ---- values that differ by rank
#
# What ranks have of their own, where DeepSpeed writes a model file for each: at ZeRO-3 for every
# rank, else for each model-parallel one.


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


# ---- the checkpoint


_WEIGHTS_ALONE = "the weights alone were looked at, as allowed: master weights begin as these"
_BY_POSITION = (
    "optimizer states were matched by position, in the order of Megatron-DeepSpeed's model: files "
    "of stage 0 without a manifest name no parameters of theirs"
)


class NativeCheckpoint(NativeRun):
    """One opened tag folder. Rules that contradict a manifest are an error.

    Raises a UcpError for anything that its directories and pickles can show: a missing, truncated,
    foreign or hostile file. Tensor bytes are not read.
    """

    def __init__(self, folder: Folder, told: CallerModel | None = None) -> None:
        super().__init__(folder, told or CallerModel())
        self._used: dict[tuple[int, int, bool], int] = {}  # see `_used_elems`
        with self.closed_on_failure():
            if is_universal(folder):
                raise UnsupportedError(
                    "this is a universal folder, not a native one",
                    file=folder,
                    fix="open_checkpoint reads it",
                )
            require_rank_files(self)
            require_expert_files(self)
            require_layer_files(self)
            self.require_described()
            self.manifest = self._with_evidence(manifest_of(self))
            self.layouts.check_patterns()

    def _with_evidence(self, derived: Manifest) -> Manifest:
        """The recorded manifest, once it is known not to contradict the files; else what the files
        say. Raises ForeignFileError, RuleError, ModelMismatchError."""
        recorded, file = self.recorded, self.folder / FILE_NAME
        check_replicas(derived, PipeNames(self.pipe_names).tied, str(self.folder))
        if recorded is None:
            return derived
        compare(recorded, derived, file)
        recorded = replace(recorded, run={**derived.run, **recorded.run})
        if self.told.rules is not None:
            recorded = compared(recorded, self.told.rules, file)
        # An elastic file holds no hyper-parameters: there the manifest is the only evidence.
        if not any(group.settings for group in derived.groups):
            return recorded
        groups = tuple(
            replace(group, optimizer=known.optimizer, steps_as=known.steps_as)
            for group, known in zip(derived.groups, recorded.groups, strict=True)
        )
        return replace(recorded, groups=groups)

    # ------------------------------------------------ what the operations ask for

    @property
    def notes(self) -> list[str]:
        return [
            *self.path_notes,
            *([_WEIGHTS_ALONE] if self.told.weights else []),
            *self.layouts.notes,
            *([_BY_POSITION] if self.lies_by_position else []),
            *said_of(self.manifest),
            *said_of_side_data(self.weights.side_data()),
            *notes_of_keys(self.meta),
        ]

    def read_extras(self) -> Extras:
        return extras_of(self)

    def layers(self) -> Layers | None:
        return layers_of(self) if self.pipeline else None

    def copies(self) -> TrainedWeights | None:
        return trained_weights(self)

    def check(self, name: str, allow: Collection[str] = ()) -> None:
        # before any comparison of this rank's files: the cause, not what follows from it
        refuse_unusable(self.manifest, self.main_file, allow)
        check_file(self, name, allow)

    def check_headers(self, names: Sequence[str]) -> None:
        for name in names:
            check_file(self, name, ("stale",))

    def prefetch_checked(self, names: Collection[str], allow: Collection[str]) -> None:
        try:
            prefetch_checked(self, names, allow)
        except StoreError:
            raise
        except UcpError:  # who checks the file says it
            pass

    @property
    def _ranks_have_files(self) -> bool:
        """Whether model files alone show what differs from rank to rank: at ZeRO-3 all have one,
        else each model-parallel rank."""
        is_listed = self.recorded is not None and PER_RANK in self.recorded.run
        return (self.manifest.mesh.zero == 3 or self.model_ranks > 1) and not is_listed

    def differs(self, name: str) -> PerRank:
        return differs_in(self, name) if self._ranks_have_files else super().differs(name)

    def of_rank(self, rank: int) -> OwnValues:
        return held_by(self, rank) if self._ranks_have_files else super().of_rank(rank)

    # ------------------------------------------------ where slots lie

    def locate(self, slots: Collection[Slot]) -> dict[Slot, Where]:
        """The headers of their records are asked for at once."""
        for slot in slots:
            ref, name = self.ref_of(slot)
            self.file(name).prefetch(ref.storage, 0, 0)
        return super().locate(slots)

    def where(self, slot: Slot) -> Where:
        ref, name = self.ref_of(slot)
        return self.place(name, ref)

    def ref_of(self, slot: Slot) -> tuple[TensorRef, str]:
        buffer = self.manifest.buffers[slot.buffer]
        ref, name = self._ref(slot, buffer)
        param = buffer.members[0].param if buffer.members else None
        order = self.manifest.by_name[param].order if param else None
        if not isinstance(ref, TensorRef):
            raise ForeignFileError(
                f"a file lacks the state {slot.state} that the first file has",
                file=self.full_path(name),
                parameter=param,
                expected=f"{buffer.partition_elems} elements",
                found=type(ref).__name__,
            )
        used = self._used_elems(slot)
        dtype, most = dict(buffer.states)[slot.state], buffer.of(slot.state).elems(slot.part)
        fits = used <= ref.numel <= most
        if not ref.lies_in(order) or ref.storage.dtype != dtype or not fits:
            raise ForeignFileError(
                f"the state {slot.state} has another size or type than the run's structure says",
                file=self.full_path(name),
                parameter=param,
                expected=f"{used} to {most} contiguous elements of {dtype}",
                found=f"{ref.shape} of {ref.storage.dtype}",
            )
        return ref, name

    def _used_elems(self, slot: Slot) -> int:
        """Elements of a slot up to the end of its last parameter. Kept: every place of a checkpoint
        asks for it."""
        buffer = self.manifest.buffers[slot.buffer]
        key = slot.buffer, slot.part, slot.state in buffer.uncut
        if key not in self._used:
            fragments = buffer.of(slot.state).fragments(slot.part)
            self._used[key] = max((f.offset + f.high - f.low for f in fragments), default=0)
        return self._used[key]

    def _ref(self, slot: Slot, buffer: FlatBuffer) -> tuple[Any, str]:
        """What a slot's file has of it, and the name of the file."""
        param = buffer.first_param
        if slot.state == VALUE and buffer.rule == "each":
            tp = tp_of(slot.cut)
            return self.fragment(param, slot.part, tp), self.model_of(tp, slot.part)
        rank = self.mesh.rank_of((*buffer.at, *slot.cut), slot.part)
        reader = self.stages[self.place_of_rank(rank)].format
        plain = isinstance(reader, PlainFile) and not self.names.optimizer
        if slot.state == VALUE or (slot.state == MASTER and plain):
            return self.weight(param, slot.cut)
        tree, name = self.optimizer_of_rank(rank, not EXPERTS.isdisjoint(buffer.axes))
        index, file = self.contents.indices[slot.buffer], self.full_path(name)
        tree = expect.kind(tree, dict, "the optimizer", file)
        ref = reader.element(tree, index, slot.state, file)
        if isinstance(reader, Unpartitioned):
            ref = own_slice(ref, self.manifest.by_name[param].shape, param)
        return ref, name


class NativeFormat:
    """DeepSpeed's own files: what no other format recognises."""

    def recognises(self, folder: Folder) -> bool:
        return True

    def open(self, folder: Folder, told: CallerModel) -> Checkpoint:
        return NativeCheckpoint(folder, told)
