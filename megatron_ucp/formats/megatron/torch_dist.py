"""Megatron-core's distributed checkpoints (`torch_dist`), opened."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatron_ucp.core.flat import ChunkBuffers, FlatBuffer, alone
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.layout import Chunks, Layout, Replicate, Shard, ShardNC
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import DENSE_CUT, EXPERT_CUT, Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import DamagedFileError, ForeignFileError, UnsupportedError
from megatron_ucp.formats import expect
from megatron_ucp.formats.byte_files import Where, same_bytes
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.megatron.arguments import LOCAL_MODULES, OF_VALUES
from megatron_ucp.formats.megatron.checkpoint import MegatronFolder, not_proved
from megatron_ucp.formats.megatron.distcp import INDEX_FILE, Blocks, Chunk, DistcpFile, StoredTensor
from megatron_ucp.formats.megatron.groups import SavedGroup, saved_groups
from megatron_ucp.formats.megatron.names import (
    BUFFERS,
    CORE_ATTENTION,
    extra_state_name,
    is_cut_in_parts,
    second_matrix,
)
from megatron_ucp.formats.megatron.params import NamedStates, StoredParam, blocks_of
from megatron_ucp.formats.megatron.run_state import WhereOf, loss_scale_of
from megatron_ucp.formats.proof import are_masters_of, boxes_of, elems_in
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.pt.refs import ITEMSIZE, TensorRef

if TYPE_CHECKING:
    from megatron_ucp.formats.megatron.index import Index

COMMON_FILE, METADATA_FILE = "common.pt", "metadata.json"
COMMON_KEY = "common_state/shard_0_1"  # since megatron-core 0.19 the object with the common tree
BACKEND = "torch_dist"
_HEAD = "output_layer.weight"
_RANDOM = "rng_state/"


class TorchDistCheckpoint(MegatronFolder):
    """One opened folder. Parameters are read by their names, in the chunks that the index lists:
    the mesh of the run that saved it does not matter.

    The common tree (arguments, groups, scheduler: all that is no tensor of the model) lies in
    `common.pt`, or since megatron-core 0.19 as an object in one of the `.distcp` files. Where both
    are there the file counts, as in megatron-core.

    Raises a UcpError for anything that the index, the common tree and the sizes of files can show.
    Tensor bytes are not read.
    """

    def __init__(
        self, folder: Folder, told: CallerModel, index: "Index", states: NamedStates
    ) -> None:
        super().__init__(folder, told)
        self.index, self.states = index, states
        is_file = folder.is_file(COMMON_FILE) or COMMON_KEY not in index.objects
        self._common_file = COMMON_FILE if is_file else None
        self.main_file = self.full_path(self._common_file or index.objects[COMMON_KEY].file)
        # the states of each parameter with buffers of its chunks
        self._held: dict[str, Mapping[str, StoredParam]] = {}
        self._chunks = ChunkBuffers({}, self._chunk_buffer)
        with self.closed_on_failure():
            if self.reads_states:
                self.states.check()
                self.refuse_optimizer()
                self.groups = self._read_groups()
            self.manifest = self._build()

    # ------------------------------------------------ the common tree

    @cached_property
    def main_tree(self) -> Mapping[str, Any]:
        tree = self.file(COMMON_FILE).tree if self._common_file else self.object(COMMON_KEY)
        if not isinstance(tree, dict):
            raise DamagedFileError(
                "a state file holds no dictionary", file=self.main_file, found=type(tree).__name__
            )
        return tree

    @cached_property
    def _optimizers(self) -> Sequence[Mapping[str, Any]]:
        """The tree of each optimizer: one, or with expert parallelism one for what is no expert's
        and one for experts. Raises ForeignFileError where the arguments say the other kind; they
        leave it open where experts are cut otherwise than the rest, and not spread."""
        tree = expect.key_or(self.main_tree, "optimizer", {}, self.main_file)
        trees = [*tree.values()] if tree and set(tree) == {*range(len(tree))} else [tree]
        spread: Any = self.arguments.get("expert_model_parallel_size")
        is_open = type(spread) is not int or self.has_experts_cut_alone or self.other_optimizer
        if tree and not is_open and len(trees) != (2 if spread > 1 else 1):
            raise ForeignFileError(
                "the common tree is of a run with another kind of expert parallelism",
                file=self.main_file,
                expected="two optimizers" if spread > 1 else "one optimizer",
                found=f"{len(trees)}",
            )
        return expect.each(trees, dict, "optimizer", self.main_file)

    def _read_groups(self) -> list[SavedGroup]:
        out: list[SavedGroup] = []
        for number, tree in enumerate(self._optimizers):
            file = self.main_file
            inner = expect.key(tree, "optimizer", dict, file) if "optimizer" in tree else tree
            common = expect.key_or(inner, "state", {}, file).get("common_step")
            step = None
            if common is not None:
                step = self.scalar(file, expect.kind(common, TensorRef, "common_step", file))
            listed = expect.key_or(inner, "param_groups", [], file)
            out += saved_groups(
                listed, step, lambda ref: self.tensor(self.main_file, ref), self.main_file, number
            )
        return out

    # ------------------------------------------------ structure

    def _build(self) -> Manifest:
        params: list[ParamSpec] = []
        groups: dict[str, int | None] = {}
        membership = self.membership()
        for name, weight in self.states.weights.items():
            spec = self._spec(weight)
            held = self.states.held(name) if spec.kind == "trainable" else None
            spec = self.whole(spec, held or {VALUE: weight})
            params.append(spec)
            groups[name] = None if held is None else membership.number(spec)
        self._chunks = self.chunk_buffers(groups)
        found = Manifest(
            Keeper.TORCH_DIST if self.groups else Keeper.WEIGHTS,
            Mesh(),
            tuple(params),
            self._chunks,
            tuple(one.group for one in self.groups),
            run=self.described(),
        )
        return self.as_recorded(found)

    def _spec(self, weight: StoredParam) -> ParamSpec:
        """A parameter as a mesh cuts it, before it is known whether an optimizer steps it."""
        kind = "trainable" if self.groups else "frozen"
        if weight.name.endswith(BUFFERS):
            kind = "buffer"
        spec = ParamSpec(weight.name, weight.shape, weight.dtype, kind, expert=weight.expert)
        behind = self.states.weights.get(second_matrix(weight.name))
        spec = self.on_mesh(spec, behind and behind.shape)
        if spec.on_mesh is None:
            spec = replace(spec, on_mesh=self._cut_as_stored(spec, weight))
        return spec

    def _cut_as_stored(self, spec: ParamSpec, weight: StoredParam) -> Layout | None:
        """The layout of a parameter of which nobody says how tensor parallelism cuts it. Parts with
        keys of their own are cut each for itself. Of any other one each chunk is what one rank had:
        None where they are not even parts along one dim, and of a run without tensor parallelism,
        whose chunks say nothing of other runs."""
        (axis,) = DENSE_CUT if spec.expert is None else EXPERT_CUT
        ranks, boxes = self.saved_on.size(axis), [box for (box,) in weight.blocks]
        if weight.rows and is_cut_in_parts(spec.name):
            return ShardNC(axis, 0, weight.rows)
        if ranks == 1:
            return None
        if len(boxes) == 1:
            return Replicate()
        for dim, size in enumerate(spec.shape):
            part = size // ranks
            even = [
                (
                    tuple(number * part if at == dim else 0 for at in range(len(spec.shape))),
                    tuple(
                        (number + 1) * part if at == dim else n for at, n in enumerate(spec.shape)
                    ),
                )
                for number in range(ranks)
            ]
            if sorted(boxes) == even:
                return Shard(axis, dim)
        return None

    def whole(self, spec: ParamSpec, states: Mapping[str, StoredParam]) -> ParamSpec:
        """A parameter as chunks of its states hold it whole, on no mesh."""
        self._held[spec.name] = states
        if spec.kind == "trainable" and MASTER not in states:
            spec = replace(spec, kind="frozen")
        return replace(spec, layout=Chunks(blocks_of(states)))

    def chunk_buffers(self, groups: Mapping[str, int | None]) -> ChunkBuffers:
        """A buffer for each chunk of some parameters, which are stepped in these groups."""
        self._group_of = groups
        counts = {name: len(blocks_of(self._held[name])) for name in groups}
        return ChunkBuffers(counts, self._chunk_buffer)

    def _chunk_buffer(self, name: str, number: int) -> FlatBuffer:
        held, group = self._held[name], self._group_of[name]
        scalars = {} if group is None else self.groups[group].scalars
        states = tuple((state, param.dtype) for state, param in held.items())
        size = blocks_of(held).elems(number)
        return alone(name, size, states, group, scalars, axes=(), chunk=number)

    # ------------------------------------------------ what the operations ask for

    @property
    def file_names(self) -> list[str]:
        return [*filter(None, [self._common_file]), *self.index.file_names]

    def place(self, name: str, ref: TensorRef) -> Where:
        """As of any folder; a tensor of the common tree lies where that does."""
        if self._common_file is None and self.full_path(name) == self.main_file:
            return self.place_in(COMMON_KEY, ref)
        return super().place(name, ref)

    def check(self, name: str, allow: Collection[str] = ()) -> None:
        """Opens a file, and proves the masters of the weights in it."""
        file = self.file(name)
        weights = self._weights_by_file.get(name, ())
        wrong = [weight.name for weight in weights if not self._is_proved(weight)]
        if wrong:
            raise not_proved(wrong, self.arguments, file.path)
        for pair in self.states.copies:
            if name in {chunk.place.file for chunk in pair[0].chunks[:1]}:
                self._check_copy(*pair)

    def _check_copy(self, one: StoredTensor, other: StoredTensor) -> None:
        """Raises ForeignFileError where a tensor that lies under two keys is not the same."""
        blocks = Blocks.of(one)
        for number, chunk in enumerate(one.chunks):
            copies = (blocks.where(number, (tensor,), self.file) for tensor in (one, other))
            if not same_bytes(*copies):
                raise ForeignFileError(
                    "a tensor lies under two keys, and they differ",
                    file=self.folder / INDEX_FILE,
                    parameter=one.key,
                    expected=f"what {other.key} holds",
                    found=f"other values from {chunk.start} on",
                    fix="load another tag",
                )

    @cached_property
    def _weights_by_file(self) -> Mapping[str, Sequence[StoredParam]]:
        """Each weight in the file that has its first chunk."""
        weights = self.states.weights.values()
        return grouped(
            (one.blocks.chunk(0, one.tensors)[1].place.file, one) for one in weights if one.blocks
        )

    def _is_proved(self, weight: StoredParam) -> bool:
        """Whether the masters that are stored beside a weight, rounded, are that weight; true where
        none are stored."""
        if MASTER not in self.manifest.states_of(weight.name):
            return True
        masters = {
            box: self.where(slot).run(at, elems_in(box))
            for box, slot, at in boxes_of(self.manifest, weight.name, MASTER)
        }
        weights = {
            box: weight.where(number, self.file) for number, (box,) in enumerate(weight.blocks)
        }
        return masters == weights or are_masters_of(
            masters, weights, weight.shape, self.is_clipped(weight.name)
        )

    def locate(self, slots: Collection[Slot]) -> dict[Slot, Where]:
        """What says where their chunks lie is asked for at once."""
        for slot in slots:
            for chunk in self.chunks_of(slot):
                self.file(chunk.place.file).prefetch_chunk(chunk)
        return super().locate(slots)

    def chunks_of(self, slot: Slot) -> Sequence[Chunk]:
        """The chunks that a slot lies in."""
        name, number = self._chunks.place(slot.buffer)
        held = self._held[name][slot.state]
        return (held.blocks.chunk(number, held.tensors)[1],)

    def where(self, slot: Slot) -> Where:
        """Place of a slot. Raises DamagedFileError."""
        return self.where_in_chunk(slot.buffer, slot.state)

    def where_in_chunk(self, number: int, state: str) -> Where:
        """Place of a state of the number-th buffer of a chunk."""
        name, chunk = self._chunks.place(number)
        return self._held[name][state].where(chunk, self.file)

    def open_file(self, name: str) -> PtFile | DistcpFile:
        stored = self.folder.open(name)
        if name == COMMON_FILE:
            return self._closing.enter_context(PtFile(stored, allow=OF_VALUES))
        return self._closing.enter_context(self.index.opened(stored, name))

    def scaler(self) -> LossScale:
        """The loss scale; the optimizers of a chain have the same."""
        saved = [tree["grad_scaler"] for tree in self._optimizers if "grad_scaler" in tree]
        return loss_scale_of(
            saved[0] if saved else None,
            self.arguments,
            lambda ref: self.tensor(self.main_file, ref),
            self.iteration,
        )

    def stateless(self) -> dict[str, None]:
        """The layers' extra states that hold nothing. One of each size is looked at: an empty one
        has the same bytes everywhere. Those of Transformer Engine's modules are written for every
        model (see `stacked_extra_states`): other modules don't have them."""
        is_local = self.arguments.get("transformer_impl") == LOCAL_MODULES
        empty: dict[int, bool] = {}
        out: dict[str, None] = {}
        for key, place in self.index.objects.items():
            name = extra_state_name(key)
            if name is None or (is_local and f".{CORE_ATTENTION}." in name):
                continue
            if place.size_bytes not in empty:
                empty[place.size_bytes] = self.object(key) is None
            if empty[place.size_bytes]:
                out[name] = None
        if out and _HEAD in self.manifest.by_name:
            out[f"{_HEAD.rpartition('.')[0]}._extra_state"] = None  # which Megatron leaves out
        return out

    @property
    def has_random_states(self) -> bool:
        return any(key.startswith(_RANDOM) for key in self.index.objects)

    def random_entry(self, here: Mesh, rank: int) -> tuple[Any, WhereOf, str] | str:
        """An entry stands for the ranks of a stage that have one tensor-parallel rank, or for one
        of them alone, as with expert parallelism."""
        at = here.coord(rank)
        place, sizes = (at.pp, at.tp), (here.pp, here.tp)
        shared = _shard(place, sizes)
        own = _shard((*place, here.partition_of(rank)), (*sizes, here.partitions))
        key = own if own in self.index.objects else shared
        if key in self.index.objects and not (key == shared and here.experts_apart):
            file = str(self.folder / self.index.objects[key].file)
            return self.object(key), lambda ref: self.place_in(key, ref), file
        if key in self.index.objects:  # of a Megatron-LM between 0.16.1 and its pull request 6858
            return "the checkpoint has one rank's for ranks that have different experts"
        if here.partitions != self.saved_on.partitions:
            return self.of_another_mesh
        raise DamagedFileError(
            "the random states of a rank are missing",
            file=self.folder / INDEX_FILE,
            expected=f"{shared} or {own}",
            found="those of other ranks",
        )

    def object(self, key: str) -> Any:
        """An object that is no tensor, by its key; tensors in it are references (see
        `place_in`). Raises DamagedFileError."""
        return self.file(self.index.objects[key].file).value(key)

    def place_in(self, key: str, ref: TensorRef) -> Where:
        """Place of a tensor in such an object. Raises DamagedFileError."""
        file, dtype = self.file(self.index.objects[key].file), ref.storage.dtype
        record = file.record_of(key, ref)
        self.note_read(file, record)
        return Where(file, record, ref.offset_elems * ITEMSIZE[dtype], ref.numel, dtype)


def _shard(place: tuple[int, ...], sizes: tuple[int, ...]) -> str:
    """The key of a rank's random states."""
    return f"{_RANDOM}shard_{'.'.join(map(str, place))}_{'.'.join(map(str, sizes))}"


def check_backend(folder: Folder) -> None:
    """Raises UnsupportedError for what another program, or another format of Megatron, wrote."""
    metadata = folder.json(METADATA_FILE) if folder.is_file(METADATA_FILE) else {}
    said = metadata.get("sharded_backend")
    if said != BACKEND:
        raise UnsupportedError(
            "this is no distributed checkpoint that Megatron-core writes by default",
            file=folder / METADATA_FILE,
            expected=f"sharded_backend {BACKEND}",
            found=said or f"no {METADATA_FILE}: torch_dcp or fsdp_dtensor",
            fix=f"save it again with --ckpt-format {BACKEND}, which Megatron-FSDP lacks: train "
            "without --use-megatron-fsdp for it",
        )
