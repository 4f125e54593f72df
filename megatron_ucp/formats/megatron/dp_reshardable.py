"""Megatron-core's distributed checkpoints as Megatron-LM writes them by default (`dp_reshardable`):
the optimizer's states lie in buckets without names.

Which parameter lies where follows from the arguments of the run (see `buffers`). It is compared
with the sizes and borders that the files show, and every master with the weight that has its name.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Coords
from megatron_ucp.core.names import VALUE, Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import StateMismatchError, UnsupportedError, some_of
from megatron_ucp.formats import expect
from megatron_ucp.formats.byte_files import AssembledTensor, ByteFile, Record, Where
from megatron_ucp.formats.checkpoint import CallerModel, tensor_at
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.megatron.buffers import (
    BUFFER_STATES,
    InBuffer,
    PlacedBuffer,
    RunLayout,
    orders_to_try,
    parts_of,
    registered_names,
)
from megatron_ucp.formats.megatron.distcp import Chunk, StoredTensor, chunk_name
from megatron_ucp.formats.megatron.groups import SavedGroup, saved_groups
from megatron_ucp.formats.megatron.params import NamedStates
from megatron_ucp.formats.megatron.run_state import loss_scale_of
from megatron_ucp.formats.megatron.torch_dist import TorchDistCheckpoint
from megatron_ucp.formats.pt.refs import TensorRef

if TYPE_CHECKING:
    from megatron_ucp.formats.megatron.index import Index

_PREFIX = r"(?:chained_(?P<optimizer>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<group>\d+)\."
_KEY = re.compile(
    _PREFIX + r"gbuf_idx_(?P<buffer>\d+)\.dtype_\(torch\.(?P<dtype>\w+), torch\.\w+\)"
    r"\.bucket_idx_(?P<bucket>\d+)\.(?P<state>\w+)"
)
_OBJECT = re.compile(_PREFIX + r"(?P<what>optimizer|grad_scaler)/shard_[\d._]+")


@dataclass(frozen=True, slots=True)
class BucketKey:
    """What a bucket's key says, but for its state. `group` numbers the ranks that share it."""

    optimizer: int
    group: int
    buffer: int
    dtype: str
    bucket: int


class DpReshardableCheckpoint(TorchDistCheckpoint):
    """One opened folder of that form. Raises as TorchDistCheckpoint; StateMismatchError where the
    buckets are not those of the run that the arguments describe."""

    def __init__(
        self, folder: Folder, told: CallerModel, index: "Index", states: NamedStates
    ) -> None:
        self._buckets: list[tuple[PlacedBuffer, int]] = []  # of each flat buffer, with its number
        super().__init__(folder, told, index, states)

    def _read_groups(self) -> list[SavedGroup]:
        """The groups of each optimizer: every group of ranks saved them, and they are alike.
        Raises StateMismatchError where they are not."""
        found: dict[int, list[SavedGroup]] = {}
        for key, number in self._objects("optimizer"):
            tree = expect.kind(self.object(key), dict, key, self.folder)
            tensor = partial(self._tensor_in, key)
            own = saved_groups(tree.get("param_groups"), None, tensor, self.main_file, number)
            first = found.setdefault(number, own)
            if _values(first) != _values(own):
                raise StateMismatchError(
                    "ranks of one run saved different hyper-parameters or steps",
                    file=self.folder,
                    parameter=key,
                    expected=str(_values(first))[:200],
                    found=str(_values(own))[:200],
                    fix="load another tag; the ranks went apart during training",
                )
        return [group for _, groups in sorted(found.items()) for group in groups]

    def _objects(self, what: str) -> Iterator[tuple[str, int]]:
        """Keys of what each group of ranks saved, with the number of its optimizer."""
        for key in self.index.objects:
            if (found := _OBJECT.fullmatch(key)) and found["what"] == what:
                yield key, int(found["optimizer"] or 0)

    def _tensor_in(self, key: str, ref: TensorRef) -> InertObject:
        """A small tensor of an object."""
        return tensor_at(self.place_in(key, ref), ref)

    def scaler(self) -> LossScale:
        for key, _ in self._objects("grad_scaler"):
            tensor = partial(self._tensor_in, key)
            return loss_scale_of(self.object(key), self.arguments, tensor, self.iteration)
        return LossScale()

    # ------------------------------------------------ structure

    def _build(self) -> Manifest:
        self._refuse_experts_cut_alone()
        specs = {name: self._spec(weight) for name, weight in self.states.weights.items()}
        trained = {name: spec for name, spec in specs.items() if spec.kind != "buffer"}
        on_mesh = {name: self.cut(spec) for name, spec in trained.items()}
        numbers = self.group_numbers(trained.values())
        others = [name for name in specs if name not in trained]
        chunked = [self.whole(specs[n], {VALUE: self.states.weights[n]}) for n in others]
        self._chunks = self.chunk_buffers(dict.fromkeys(others))
        found = Manifest(
            Keeper.TORCH_DIST,
            self.saved_on,
            (*on_mesh.values(), *chunked),
            (),
            tuple(one.group for one in self.groups),
            run=self.described(),
        )
        return self._proved(found, self._fitting(on_mesh), numbers, [*self._chunks])

    def _proved(
        self,
        found: Manifest,
        placements: Sequence[Sequence[PlacedBuffer]],
        numbers: Mapping[str, int],
        chunks: Sequence[FlatBuffer],
    ) -> Manifest:
        """With the buffers of the run. Sizes may leave several placements open, such as those of
        two matrices of one size in two orders: then the first one counts whose masters are the
        weights, or the very first, of which `check` says what differs."""
        starts = [_starts(placed) for placed in placements]
        differing = {
            name for name, at in starts[0].items() if any(one[name] != at for one in starts)
        }
        for placed in (*placements, placements[0]):
            self._buckets = [(one, n) for one in placed for n in range(len(one.layout.buckets))]
            buffers = [self._flat_buffer(one, number, numbers) for one, number in self._buckets]
            self.manifest = replace(found, buffers=(*buffers, *chunks))
            if all(self._is_proved(self.states.weights[name]) for name in sorted(differing)):
                break
        return self.manifest

    def _refuse_experts_cut_alone(self) -> None:
        if self.has_experts_cut_alone:
            raise UnsupportedError(
                "experts that are cut otherwise than the rest, and not spread, are not read from "
                "buckets",
                file=self.main_file,
                expected="expert_tensor_parallel_size = tensor_model_parallel_size, or experts "
                "that expert parallelism spreads",
                found=str(self.saved_on),
                fix="save it again with --dist-ckpt-optim-fully-reshardable, or load the weights "
                'alone (Python: allow={"weights"}, load_optimizer_states=False)',
            )

    def _flat_buffer(self, one: PlacedBuffer, number: int, groups: Mapping[str, int]) -> FlatBuffer:
        """One bucket, without its end padding."""
        used = one.layout.buckets[number].used
        return self.flat_buffer(one, one.layout.starts(number), used, groups)

    def _fitting(self, params: Mapping[str, ParamSpec]) -> list[list[PlacedBuffer]]:
        """The buffers of the run, in each order of registration that fits the borders and sizes of
        the buckets. Raises StateMismatchError where none does."""
        mesh, said = self.saved_on, self.arguments
        parts = parts_of(said, mesh, self.main_file)
        fitting: list[list[PlacedBuffer]] = []
        faults: list[str] = []
        for number, order in enumerate(orders_to_try(self.told.registered, params), 1):
            names = {
                (part, rank): registered_names(part, rank, params, mesh, order)
                for part in parts
                for rank in range(mesh.ep)
            }
            if any(found is None for found in names.values()):
                faults.append(f"order {number}: a name has no place")
                continue
            layout = RunLayout(said, mesh, parts, params, lambda *at, names=names: names[at] or ())
            placed = list(layout.buffers())
            if fault := self._fault(placed):
                faults.append(f"order {number}: {fault}")
            elif placed not in fitting:
                fitting.append(placed)
        if fitting:
            return fitting
        raise StateMismatchError(
            "the buckets of the optimizer are not those of the run that the arguments describe",
            file=self.main_file,
            expected="parameters in an order of megatron-core's modules",
            found=some_of(faults, between="; ") or "a name without a place in any order",
            fix="save it again with --dist-ckpt-optim-fully-reshardable",
        )

    def _fault(self, placed: Sequence[PlacedBuffer]) -> str:
        """How the buckets that are expected differ from those in the files; "" where they don't."""
        left = {key for key, states in self._tensors.items() if states}
        for one in placed:
            for number, bucket in enumerate(one.layout.buckets):
                starts = one.layout.starts(number)
                for key in self._keys(one, number):
                    left.discard(key)
                    if fault := self._bucket_fault(key, bucket.used, starts):
                        whose = f"{'experts' if key.optimizer else 'dense'}, group {key.group}"
                        return f"bucket {key.bucket} of buffer {key.buffer} ({whose}): {fault}"
        return f"{len(left)} further buckets" if left else ""

    def _bucket_fault(self, key: BucketKey, elems: int, starts: Mapping[InBuffer, int]) -> str:
        states = self._tensors.get(key, {})
        if {*states} != {*BUFFER_STATES.values()}:
            return f"it has {', '.join(states) or 'no states'}"
        for tensor in states.values():
            if (tensor.shape, tensor.dtype) != ((elems,), "float32"):
                return f"{tensor.dtype} {tensor.shape} instead of {elems} elements"
            begins = {chunk.start[0] for chunk in tensor.chunks}
            for param, at in starts.items():
                if at not in begins:
                    return f"{param.name} would begin at element {at}, where no chunk does"
        return ""

    @cached_property
    def _tensors(self) -> dict[BucketKey, dict[str, StoredTensor]]:
        """Every bucket of the files: its states."""
        out: dict[BucketKey, dict[str, StoredTensor]] = {}
        for key, tensor in self.states.flat.items():
            found = _KEY.fullmatch(key)
            if found is None or found["state"] not in BUFFER_STATES:
                raise UnsupportedError(
                    "the checkpoint holds a state of the optimizer that is not known",
                    file=self.main_file,
                    expected=", ".join(BUFFER_STATES),
                    found=key,
                    fix="train with --optimizer adam, or save again with --ckpt-format "
                    "torch_dist and --dist-ckpt-optim-fully-reshardable",
                )
            optimizer, group, buffer, number = (
                int(found[name] or 0) for name in ("optimizer", "group", "buffer", "bucket")
            )
            bucket = BucketKey(optimizer, group, buffer, found["dtype"], number)
            out.setdefault(bucket, {})[BUFFER_STATES[found["state"]]] = tensor
        return out

    def _keys(self, one: PlacedBuffer, bucket: int) -> Iterator[BucketKey]:
        """The buckets of every rank along the axes that cut a buffer."""
        for cut in self.saved_on.everywhere(one.axes):
            yield self._key(one, bucket, cut)

    def _key(self, one: PlacedBuffer, bucket: int, cut: Coords) -> BucketKey:
        """The bucket of a rank. Groups count tensor parallelism first, then experts, then the
        pipeline."""
        ((axis, rank),) = cut
        ranks = self.saved_on.size(axis)
        outer = one.expert_rank + self.saved_on.ep * one.stage if one.optimizer else one.stage
        return BucketKey(one.optimizer, rank + ranks * outer, one.number, one.dtype, bucket)

    # ------------------------------------------------ bytes

    def chunks_of(self, slot: Slot) -> Sequence[Chunk]:
        if slot.buffer >= len(self._buckets):
            return super().chunks_of(replace(slot, buffer=slot.buffer - len(self._buckets)))
        return self._bucket(slot).chunks

    def _bucket(self, slot: Slot) -> StoredTensor:
        one, number = self._buckets[slot.buffer]
        return self._tensors[self._key(one, number, slot.cut)][slot.state]

    def where(self, slot: Slot) -> Where:
        """Place of a slot. Raises DamagedFileError."""
        if slot.buffer >= len(self._buckets):
            return self.where_in_chunk(slot.buffer - len(self._buckets), slot.state)
        tensor = self._bucket(slot)
        file = self.file(tensor.key)
        return Where(file, file.record, 0, tensor.shape[0], tensor.dtype)

    def open_file(self, name: str) -> Any:
        tensor = self.states.flat.get(name)
        if tensor is None:
            return super().open_file(name)
        parts: list[tuple[ByteFile, Record]] = []
        for chunk in sorted(tensor.chunks, key=lambda chunk: chunk.start):
            file = self.file(chunk.place.file)
            parts.append((file, file.record_of_chunk(tensor, chunk)))
        return AssembledTensor(self.folder / name, parts)

    def records(self, name: str) -> list[tuple[Record, str]]:
        """As of any folder. Between the parameters of a bucket is what was in the memory: a record
        of that has no dtype."""
        unused = self._unused
        return [(r, "" if r.name in unused else dtype) for r, dtype in super().records(name)]

    @cached_property
    def _unused(self) -> frozenset[str]:
        """Chunks that no parameter has elements in."""
        out: set[str] = set()
        for one, number in self._buckets:
            starts = one.layout.starts(number)
            used = {start: param.elems for param, start in starts.items()}
            for key in self._keys(one, number):
                for tensor in self._tensors[key].values():
                    out.update(_outside(tensor, used))
        return frozenset(out)


def _starts(placed: Sequence[PlacedBuffer]) -> dict[str, list[tuple[int, ...]]]:
    """Where each parameter begins, in every buffer that has it."""
    out: dict[str, list[tuple[int, ...]]] = {}
    for one in placed:
        for param in one.layout.params:
            at = (one.stage, one.chunk, one.expert_rank, one.number, param.start)
            out.setdefault(param.name, []).append(at)
    return out


def _outside(tensor: StoredTensor, used: Mapping[int, int]) -> Iterator[str]:
    starts = sorted(used)
    for chunk in tensor.chunks:
        (at,), (elems,) = chunk.start, chunk.shape
        before = bisect_right(starts, at) - 1
        after = starts[before + 1] if before + 1 < len(starts) else tensor.shape[0]
        ended = before < 0 or at >= starts[before] + used[starts[before]]
        if ended and at + elems <= after:
            yield chunk_name(tensor, chunk)


def _values(groups: Sequence[SavedGroup]) -> list[Any]:
    return [(dict(one.group.settings), dict(one.own), one.step) for one in groups]
