"""Megatron-LM's older files (`--ckpt-format torch`): a folder for each model-parallel rank, with
its weights under local names and the DistributedOptimizer's buffers without any.

The model's dict has the order in which parameters were registered, from which `buckets` says where
each one lies in the buffers; every master is compared with its weight.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import expert_name, experts_of_rank
from megatron_ucp.core.flat import NO_SCALARS, FlatBuffer, alone
from megatron_ucp.core.grouping import kept
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import (
    CHUNK_OF_STAGE,
    DENSE_CUT,
    EXPERT_CUT,
    EXPERT_RANK,
    Coords,
    Mesh,
    on_stage,
)
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    NotFoundError,
    StateMismatchError,
    UnsupportedError,
)
from megatron_ucp.formats import expect
from megatron_ucp.formats.byte_files import Where
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.megatron.arguments import OF_VALUES, size
from megatron_ucp.formats.megatron.buffers import (
    BUFFER_STATES,
    EMBEDDING,
    HEAD,
    PipelinePart,
    PlacedBuffer,
    RunLayout,
    parts_of,
)
from megatron_ucp.formats.megatron.checkpoint import MegatronFolder, not_proved
from megatron_ucp.formats.megatron.groups import SavedGroup, saved_groups
from megatron_ucp.formats.megatron.names import (
    BUFFERS,
    DERIVED,
    global_name,
    second_matrix,
    whole_shape,
)
from megatron_ucp.formats.megatron.run_state import WhereOf, loss_scale_of
from megatron_ucp.formats.proof import are_masters
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.pt.refs import TensorRef

# ---- rank folder


OF_RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(?:_(\d\d\d))?")
MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
RANDOM = "rng_state"  # of the first file
_MOST_MISSING = 10_000  # folders of ranks


@dataclass(frozen=True, slots=True)
class RankFolder:
    """The folder of a model-parallel rank: tensor-parallel rank, stage, expert-parallel rank."""

    tp: int
    stage: int
    expert: int

    def name(self, mesh: Mesh) -> str:
        """As Megatron-LM calls it in a run on a mesh."""
        stage = f"_{self.stage:03d}" if mesh.pp > 1 else ""
        expert = f"_{self.expert:03d}" if mesh.ep > 1 else ""
        return f"mp_rank_{self.tp:02d}{stage}{expert}"


# ---- by position
#
# States of Megatron's optimizers that are not distributed, in its older files: they have no
# names, and lie group by group in the order in which the model registered what it trains.


InModelOrder = Sequence[tuple[str, TensorRef]]  # weights by name, in the order of the model
_OF_HALF = "fp32_from_fp16_params"  # masters of weights in half precision, by group
_FULL, _STEP = "float32", "step"


def inner_tree(tree: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """What torch's optimizer keeps of one of Megatron's."""
    return expect.key(tree, "optimizer", dict, file) if "optimizer" in tree else tree


def steps_in(inner: Mapping[str, Any], file: str) -> list[TensorRef]:
    """The tensors that count steps, of each parameter."""
    states = expect.key_or(inner, "state", {}, file).values()
    found = [expect.kind(one, dict, "the state of a parameter", file).get(_STEP) for one in states]
    return [ref for ref in found if isinstance(ref, TensorRef)]


@dataclass
class StatesByPosition:
    """`found` has the element-wise states of each parameter of a rank, masters among them."""

    file: str
    found: dict[str, dict[str, TensorRef]] = field(default_factory=dict)

    def add(self, tree: Mapping[str, Any], groups: Sequence[InModelOrder]) -> None:
        """Takes one optimizer, of whose `groups` these are the weights. Raises StateMismatchError
        where they are not, DamagedFileError."""
        inner, file = inner_tree(tree, self.file), self.file
        listed = expect.each(
            expect.key_or(inner, "param_groups", [], file), dict, "param_groups", file
        )
        states = expect.key_or(inner, "state", {}, file)
        for number, named in enumerate(groups):
            ids = listed[number].get("params") if number < len(listed) else None
            halves = [one for one in named if one[1].storage.dtype != _FULL]
            masters = iter(self._paired(halves, self._masters(tree, number)))
            for (name, weight), at in self._paired(named, ids):
                half = weight.storage.dtype != _FULL
                own = {MASTER: next(masters)[1] if half else weight}
                own |= self._of_param(states.get(at) or {})
                for state, ref in own.items():
                    self._check(name, state, weight, ref)
                self.found[name] = own

    def _masters(self, tree: Mapping[str, Any], number: int) -> Any:
        listed = tree.get(_OF_HALF) or []
        return listed[number] if number < len(listed) else []

    def _of_param(self, kept: Any) -> dict[str, TensorRef]:
        refs = expect.kind(kept, dict, "the state of a parameter", self.file).items()
        return {k: ref for k, ref in refs if isinstance(ref, TensorRef) and k != _STEP}

    def _paired(
        self, named: InModelOrder, listed: Any
    ) -> Iterator[tuple[tuple[str, TensorRef], Any]]:
        """Weights with what a list has at their places. Raises StateMismatchError."""
        count = len(listed) if isinstance(listed, list) else None
        if count != len(named):
            raise StateMismatchError(
                "a group of the optimizer has another number of parameters than the model",
                file=self.file,
                expected=f"{len(named)}: {', '.join(name for name, _ in named)}"[:200],
                found=count,
                fix="load the weights alone (Python: load_optimizer_states=False)",
            )
        return zip(named, listed, strict=True)

    def _check(self, name: str, state: str, weight: TensorRef, ref: Any) -> None:
        """Raises StateMismatchError for a state that is none of this parameter."""
        good = isinstance(ref, TensorRef) and ref.is_contiguous and ref.storage.dtype == _FULL
        if not good or ref.shape != weight.shape:
            raise StateMismatchError(
                "what the optimizer keeps at the place of a parameter is not its state",
                file=self.file,
                parameter=f"{name} ({state})",
                expected=f"{weight.shape} in {_FULL}",
                found=f"{getattr(ref, 'shape', ref)}"[:100],
                fix="load the weights alone (Python: load_optimizer_states=False)",
            )


def one_step(steps: Collection[float], file: str) -> float | None:
    """The step that all parameters of a file have; None where it counts none by tensors. Raises
    StateMismatchError."""
    if len(steps) > 1:
        raise StateMismatchError(
            "parameters were stepped a different number of times",
            file=file,
            expected="one step",
            found=", ".join(f"{step:g}" for step in sorted(steps)),
            fix="load the weights alone (Python: load_optimizer_states=False)",
        )
    return next(iter(steps), None)


# ---- the checkpoint


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")  # as a part numbers its own


@dataclass(frozen=True, slots=True)
class PlacedWeight:
    """A weight of a part of the pipeline, at an expert-parallel rank."""

    name: str
    part: PipelinePart
    expert_rank: int


class LegacyCheckpoint(MegatronFolder):
    """One opened tag folder. Raises a UcpError for anything that directories and pickles show;
    tensor bytes are not read."""

    def __init__(self, folder: Folder, told: CallerModel) -> None:
        super().__init__(folder, told)
        first = min(name for name in folder.names() if OF_RANK.fullmatch(name))
        self._main = f"{first}/{MODEL_FILE}"
        self.main_file = self.full_path(self._main)
        with self.closed_on_failure():
            self._read()

    def _read(self) -> None:
        if self._has_optimizer:
            self.refuse_optimizer()
        self._folders = self._scan()
        self._compare_files()
        self.groups = self._read_groups() if self._has_optimizer else []
        self._parts = parts_of(self.arguments, self.saved_on, self.main_file)
        self._check_layers()
        self._params = dict(self._specs())
        layout = RunLayout(
            self.arguments, self.saved_on, self._parts, self._params, self._registered
        )
        self._buffers = list(layout.buffers()) if self._has_buffers else []
        self._weights: list[PlacedWeight] = []
        self._group_of: Mapping[str, int] = {}  # of what has a buffer of its own
        found = self._build() if self._has_optimizer else self._build_weights()
        self.manifest = self.as_recorded(found)

    @property
    def _has_optimizer(self) -> bool:
        """Whether the optimizer's states are there, and wanted."""
        return bool(self.main_tree.get("optimizer")) and self.reads_states

    @property
    def _has_buffers(self) -> bool:
        """Whether data-parallel ranks shared these states; else each parameter has its own."""
        return self._has_optimizer and bool(self.arguments.get("use_distributed_optimizer"))

    # ------------------------------------------------ files

    @property
    def main_tree(self) -> Mapping[str, Any]:
        return self._tree(self._main)

    def _tree(self, name: str) -> Mapping[Any, Any]:
        """What a file holds; an older one of several optimizers lists them."""
        tree, path = self.file(name).tree, self.folder / name
        if isinstance(tree, list):
            tree = dict(enumerate(tree))
        return expect.kind(tree, dict, "the file", path)

    def _model(self, rank: RankFolder, chunk: int) -> Mapping[str, Any]:
        """The weights of a chunk of a rank, by their local names."""
        name = self._model_file(rank)
        key = "model" if self.saved_on.vpp == 1 else f"model{chunk}"
        held = expect.key(self._tree(name), key, dict, self.folder / name)
        expect.texts(list(held), key, self.folder / name)
        return held

    def open_file(self, name: str) -> PtFile:
        file = self._closing.enter_context(PtFile(self.folder.open(name), allow=OF_VALUES))
        self.evidence.compare(name, file.size_bytes, file.directory_sha256)
        return file

    def _scan(self) -> dict[RankFolder, str]:
        """The folder of each rank. Raises NotFoundError for those that are missing,
        UnsupportedError for a mesh whose experts are cut otherwise."""
        mesh = self.saved_on
        if self.arguments.get("num_experts") and mesh.cut_of_experts != mesh.cut_of_dense:
            raise UnsupportedError(
                "experts that are cut otherwise than the rest are not read from these files",
                file=self.main_file,
                found=str(mesh),
                fix="save it again with --ckpt-format torch_dist",
            )
        self._require_listable()
        ranks = itertools.product(range(mesh.pp), range(mesh.ep), range(mesh.tp))
        out = {rank: rank.name(mesh) for rank in (RankFolder(tp, pp, ep) for pp, ep, tp in ranks)}
        missing = [name for name in self._names(out) if not self.folder.is_file(name)]
        if missing:
            raise self._missing(
                self.folder / missing[0], f"those of {mesh}", f"{len(missing)} missing"
            )
        found = {name for name in self.folder.names() if OF_RANK.fullmatch(name)}
        if odd := sorted(found - {*out.values()}):
            raise ForeignFileError(
                "there are folders of ranks that the run did not have",
                file=self.folder / odd[0],
                expected=str(mesh),
                found=f"{len(odd)} such folders",
            )
        return out

    def _require_listable(self) -> None:
        """Raises NotFoundError where far more ranks are missing than a list of them could name."""
        mesh, here = self.saved_on, len(self.folder.names())
        wanted = mesh.pp * mesh.ep * mesh.tp
        if wanted > here + _MOST_MISSING:
            raise self._missing(str(self.folder), f"{wanted} folders, those of {mesh}", f"{here}")

    def _missing(self, file: str, expected: str, found: str) -> NotFoundError:
        return NotFoundError(
            "files of model-parallel ranks are missing",
            file=file,
            expected=expected,
            found=found,
            fix="restore them, or load another tag",
        )

    def _names(self, folders: Mapping[RankFolder, str]) -> list[str]:
        kinds = [MODEL_FILE, *([OPTIMIZER_FILE] if self._has_buffers else [])]
        return [f"{folder}/{kind}" for folder in folders.values() for kind in kinds]

    @property
    def file_names(self) -> list[str]:
        return self._names(self._folders)

    def _compare_files(self) -> None:
        """Raises ForeignFileError for a file of another iteration."""
        for folder in self._folders.values():
            found = self._tree(f"{folder}/{MODEL_FILE}").get("iteration")
            if found != self.main_tree.get("iteration"):
                raise ForeignFileError(
                    "a file is of another iteration than the others",
                    file=self.folder / f"{folder}/{MODEL_FILE}",
                    expected=self.main_tree.get("iteration"),
                    found=found,
                )

    def _model_file(self, rank: RankFolder) -> str:
        return f"{self._folders[rank]}/{MODEL_FILE}"

    def _optimizers(self, name: str) -> list[Mapping[str, Any]]:
        """The optimizer of a file, or each one of a chain; none where there is none."""
        found = self._tree(name).get("optimizer") or []
        listed = found if isinstance(found, list) else [found]
        return [*expect.each(listed, dict, "optimizer", self.full_path(name))]

    # ------------------------------------------------ structure

    def _read_groups(self) -> list[SavedGroup]:
        out: list[SavedGroup] = []
        for number, tree in enumerate(self._optimizers(self._main)):
            inner, file = inner_tree(tree, self.main_file), self.main_file
            refs = [] if self._has_buffers else steps_in(inner, file)
            step = one_step({self.scalar(file, ref) for ref in refs}, file)
            groups = inner.get("param_groups")
            out += saved_groups(groups, step, self._tensor, file, number)
        return out

    @kept
    def _kept(self, rank: RankFolder) -> Mapping[str, Mapping[str, TensorRef]]:
        """The states of each parameter of a rank, where they lie by position."""
        name = self._model_file(rank)
        named: dict[int, list[tuple[str, TensorRef]]] = defaultdict(list)
        for part in (part for part in self._parts if part.stage == rank.stage):
            for param, ref in self._local(part, rank.tp, rank.expert):
                if param in self._group_of:
                    named[self._group_of[param]].append((param, ref))
        found = StatesByPosition(self.full_path(name))
        for number, tree in enumerate(self._optimizers(name)):
            own = [n for n, group in enumerate(self.groups) if group.optimizer == number]
            found.add(tree, [named[group] for group in own])
        return found.found

    def _tensor(self, ref: TensorRef) -> InertObject:
        """A small tensor of the main file."""
        return self.tensor(self.main_file, ref)

    def _local(self, part: PipelinePart, tp: int, expert: int) -> Iterator[tuple[str, TensorRef]]:
        """The parameters of a part at a rank, by canonical name, in the order of the model."""
        first_expert = self._first_expert(expert)
        is_tied = self.arguments.get("untie_embeddings_and_output_weights") is False
        for name, ref in self._model(RankFolder(tp, part.stage, expert), part.chunk).items():
            if not isinstance(ref, TensorRef):
                continue
            found = global_name(name, part.first, first_expert)
            yield (EMBEDDING if is_tied and found == HEAD else found), ref

    @property
    def _experts(self) -> int:
        """Experts of a layer."""
        return size(self.arguments, "num_experts", 0)

    def _first_expert(self, rank: int) -> int:
        """The first of a rank's experts, by its number in the layer."""
        return experts_of_rank(rank, self._experts, self.saved_on.ep).start

    def _check_layers(self) -> None:
        """Raises ForeignFileError where a part has other layers than the arguments give it: those
        behind it would get the numbers of others. One part alone has all of them."""
        for part in self._parts if len(self._parts) > 1 else ():
            model = self._model(RankFolder(0, part.stage, 0), part.chunk)
            found = {int(name[1]) for key in model if (name := _LAYER.match(key))}
            if found != {*range(part.last - part.first)}:
                raise ForeignFileError(
                    "a stage has other layers than the arguments of the run say",
                    file=self.folder / self._model_file(RankFolder(0, part.stage, 0)),
                    expected=f"{part.last - part.first} layers, from number {part.first} on",
                    found=f"{len(found)}",
                    fix="load another tag, or save it again with --ckpt-format torch_dist",
                )

    def _registered(self, part: PipelinePart, expert: int) -> Sequence[str]:
        return [n for n, _ in self._local(part, 0, expert) if not n.endswith(BUFFERS)]

    def _specs(self) -> Iterator[tuple[str, ParamSpec]]:
        """Every parameter, whole."""
        mesh, experts = self.saved_on, self._experts
        for part, rank in itertools.product(self._parts, range(mesh.ep)):
            held = dict(self._local(part, 0, rank))
            for name, ref in held.items():
                found = expert_name(name)
                expert = (found.number, experts) if found and experts else None
                shape, second = whole_shape(name, ref.shape, mesh.tp), second_matrix(name)
                other = held.get(second)
                behind = other and whole_shape(second, other.shape, mesh.tp)
                kind = "buffer" if name.endswith(BUFFERS) else "trainable"
                spec = ParamSpec(name, shape, ref.storage.dtype, kind, expert=expert)
                if not name.endswith(DERIVED):
                    ruled = self._by_rules(spec, ref.shape)
                    yield name, ruled or self.cut(self.on_mesh(spec, behind))

    def _by_rules(self, spec: ParamSpec, local: Ints) -> ParamSpec | None:
        """A parameter as rules cut it, whose shape is `local` on a rank: they say its whole shape
        too. None where there are none for it. Raises RuleError."""
        known, rules = self.told.specs or {}, self.told.rules
        if spec.name in known or rules is None or not rules.rules or spec.kind == "buffer":
            return None
        ranks = self.saved_on.cuts(spec.expert is not None)
        found = rules.declare(spec.name, local, ranks)
        return replace(spec, shape=found.shape, layout=found.layout, extent=found.extent)

    def _build(self) -> Manifest:
        trained = [spec for spec in self._params.values() if spec.kind == "trainable"]
        groups = self.group_numbers(trained)
        flat = [self._flat_buffer(one, groups) for one in self._buffers]
        apart = {*self._params} - ({*groups} if self._has_buffers else set())
        self._group_of = {} if self._has_buffers else groups
        buffers = (*flat, *self._alone(apart))
        found = tuple(one.group for one in self.groups)
        params = tuple(self._params.values())
        run = self.described()
        manifest = Manifest(Keeper.LEGACY, self.saved_on, params, buffers, found, run=run)
        for number, buffer in enumerate(flat):
            for cut in manifest.cuts_of(buffer):
                for state in BUFFER_STATES.values():
                    self._check_size(self._ref(number, cut, state), buffer, number, cut)
        return manifest

    def _build_weights(self) -> Manifest:
        """The weights alone."""
        params = tuple(
            spec if spec.kind == "buffer" else replace(spec, kind="frozen")
            for spec in self._params.values()
        )
        buffers = tuple(self._alone(self._params.keys()))
        run = self.described()
        return Manifest(Keeper.WEIGHTS, self.saved_on, params, buffers, run=run)

    def _alone(self, names: Collection[str]) -> Iterator[FlatBuffer]:
        """Buffers of what is stored under a name, each rank's for itself."""
        for part, rank in itertools.product(self._parts, range(self.saved_on.ep)):
            for name, ref in self._local(part, 0, rank):
                spec = self._params.get(name)
                if spec is None or name not in names or (rank and spec.expert is None):
                    continue
                at = (*on_stage(part.stage), (CHUNK_OF_STAGE, part.chunk))
                at = at if spec.expert is None else (*at, (EXPERT_RANK, rank))
                axes = DENSE_CUT if spec.expert is None else EXPERT_CUT
                self._weights.append(PlacedWeight(name, part, rank))
                states, scalars = ((VALUE, spec.dtype),), NO_SCALARS
                if (group := self._group_of.get(name)) is not None:
                    kept = self._kept(RankFolder(0, part.stage, rank))[name]
                    states = tuple((state, "float32") for state in kept)
                    scalars = self.groups[group].scalars
                yield alone(name, ref.numel, states, group, scalars, at=at, axes=axes)

    def _where_weight(self, slot: Slot) -> Where:
        one = self._weights[slot.buffer - len(self._buffers)]
        ((_, tp),) = slot.cut
        held = dict(self._local(one.part, tp, one.expert_rank))
        rank = RankFolder(tp, one.part.stage, one.expert_rank)
        if slot.state != VALUE:
            return self.place(self._model_file(rank), self._kept(rank)[one.name][slot.state])
        return self._weight(rank, held, one.name, self.manifest.buffers[slot.buffer].length)

    def _weight(
        self, rank: RankFolder, held: Mapping[str, TensorRef], name: str, elems: int
    ) -> Where:
        """Where one of the weights that a rank has lies. Raises DamagedFileError for another size
        than that of the first rank."""
        file, ref = self._model_file(rank), held.get(name)
        if ref is None or not ref.is_contiguous or ref.numel != elems:
            raise DamagedFileError(
                "a rank's weights are not those of the others",
                file=self.folder / file,
                parameter=name,
                expected=f"{elems} elements",
                found="none" if ref is None else ref.shape,
            )
        return self.place(file, ref)

    def _flat_buffer(self, one: PlacedBuffer, groups: Mapping[str, int]) -> FlatBuffer:
        starts = {param: one.layout.unpadded_start(param) for param in one.layout.params}
        length = sum(bucket.used for bucket in one.layout.buckets)
        return self.flat_buffer(one, starts, length, groups)

    def _optimizer_file(self, one: PlacedBuffer, cut: Coords) -> str:
        """The file with a buffer at a place."""
        return f"{self._folders[_rank_of(one, cut)]}/{OPTIMIZER_FILE}"

    def _ref(self, number: int, cut: Coords, state: str) -> TensorRef:
        """A state of a buffer at a place."""
        one = self._buffers[number]
        name = self._optimizer_file(one, cut)
        tree, file = self._tree(name), self.folder / name
        optimizer = tree
        if isinstance(self.file(name).tree, list):
            optimizer = expect.kind(tree.get(one.optimizer), dict, "optimizer", file)
        if not optimizer.get("buckets_coalesced"):
            raise UnsupportedError(
                "the optimizer's file has a form of before February 2024",
                file=self.main_file,
                fix="load and save it again with a later Megatron-LM",
            )
        buffers = expect.kind(optimizer.get(one.number), dict, "a buffer", file)
        (by_state,) = expect.each([*buffers.values()][:1] or [None], dict, "a buffer", file)
        theirs = next(theirs for theirs, ours in BUFFER_STATES.items() if ours == state)
        return expect.kind(by_state.get(theirs), TensorRef, theirs, file)

    def _check_size(self, ref: Any, buffer: FlatBuffer, number: int, cut: Coords) -> None:
        good = isinstance(ref, TensorRef) and ref.is_contiguous
        if not good or (ref.shape, ref.storage.dtype) != ((buffer.length,), "float32"):
            raise StateMismatchError(
                "a buffer of the optimizer is not the one of the run that the arguments describe",
                file=self.folder / self._optimizer_file(self._buffers[number], cut),
                expected=f"{buffer.length} elements in float32",
                found=f"{getattr(ref, 'shape', ref)}"[:100],
                fix="load the weights alone, or another tag",
            )

    # ------------------------------------------------ what the operations ask for

    def check(self, name: str, allow: Collection[str] = ()) -> None:
        """Opens a file; with a rank's optimizer its masters are proved."""
        self.file(name)
        wrong: list[str] = []
        if self._group_of and name.endswith(f"/{MODEL_FILE}"):
            rank = next(rank for rank in self._folders if self._model_file(rank) == name)
            wrong += self._unproved_by_position(rank)
        for number, one in enumerate(self._buffers):
            for cut in self.saved_on.everywhere(one.axes):
                if self._optimizer_file(one, cut) == name:
                    wrong += self._unproved(number, cut)
        if wrong:
            raise not_proved(wrong, self.arguments, str(self.folder / name))

    def _unproved(self, number: int, cut: Coords) -> list[str]:
        """The parameters of a buffer at a place whose masters are not the weights beside them."""
        one = self._buffers[number]
        rank = _rank_of(one, cut)
        part = next(p for p in self._parts if (p.stage, p.chunk) == (one.stage, one.chunk))
        held = dict(self._local(part, rank.tp, rank.expert))
        masters = self.where(Slot(number, cut, 0, MASTER))
        out: list[str] = []
        for member in self.manifest.buffers[number].members:
            weight = self._weight(rank, held, member.param, member.size)
            near = self.is_clipped(member.param)
            if not are_masters(masters.run(member.start, member.size), weight, near):
                out.append(member.param)
        return out

    def _unproved_by_position(self, rank: RankFolder) -> list[str]:
        """The same of parameters that have buffers of their own."""
        kept, name, out = self._kept(rank), self._model_file(rank), list[str]()
        for part in (part for part in self._parts if part.stage == rank.stage):
            for param, ref in self._local(part, rank.tp, rank.expert):
                if (states := kept.get(param)) is not None:
                    masters, weights = (self.place(name, one) for one in (states[MASTER], ref))
                    if not are_masters(masters, weights, self.is_clipped(param)):
                        out.append(param)
        return out

    def where(self, slot: Slot) -> Where:
        """Place of a slot. Raises DamagedFileError."""
        if slot.buffer >= len(self._buffers):
            return self._where_weight(slot)
        one = self._buffers[slot.buffer]
        ref = self._ref(slot.buffer, slot.cut, slot.state)
        return self.place(self._optimizer_file(one, slot.cut), ref)

    @property
    def has_random_states(self) -> bool:
        return RANDOM in self.main_tree

    def random_entry(self, here: Mesh, rank: int) -> tuple[Any, WhereOf, str]:
        """Each model-parallel rank has its own file, written by the first of its copies."""
        at, (expert, _) = here.coord(rank), here.expert_place(rank)
        name = self._model_file(RankFolder(at.tp, at.pp, expert))
        entry = self._tree(name).get(RANDOM)
        path = self.full_path(name)
        return entry, lambda ref: self.place_apart(path, ref), path

    def scaler(self) -> LossScale:
        saved = next((tree.get("grad_scaler") for tree in self._optimizers(self._main)), None)
        return loss_scale_of(saved, self.arguments, self._tensor, self.iteration)

    def stateless(self) -> dict[str, None]:
        return {
            global_name(name, part.first, self._first_expert(rank)): None
            for part, rank in itertools.product(self._parts, range(self.saved_on.ep))
            for name, value in self._model(RankFolder(0, part.stage, rank), part.chunk).items()
            if value is None and name.endswith("._extra_state")
        }


def _rank_of(one: PlacedBuffer, cut: Coords) -> RankFolder:
    """The rank whose file has a buffer."""
    ((_, tp),) = cut
    return RankFolder(tp, one.stage, one.expert_rank)


class LegacyFormat:
    """Folders of `--ckpt-format torch`."""

    def recognises(self, folder: Folder) -> bool:
        return any(OF_RANK.fullmatch(n) and folder.is_folder(n) for n in folder.names())

    def open(self, folder: Folder, told: CallerModel) -> Checkpoint:
        return LegacyCheckpoint(folder, told)
