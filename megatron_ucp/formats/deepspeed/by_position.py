"""Stage-0 files without a manifest: optimizer states lie there by position, without names. Which
parameters they belong to, and the proof of it."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, combinations, pairwise
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import in_order
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.manifest import Order
from megatron_ucp.core.names import MASTER, Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import StateMismatchError
from megatron_ucp.formats.checkpoint import ByteFile, Record
from megatron_ucp.formats.deepspeed.files import at_tp
from megatron_ucp.formats.deepspeed.optimizers import (
    FusedFlatFile,
    PlainFile,
    entry_of,
    groups_of,
    is_empty,
    reader_for,
)
from megatron_ucp.formats.deepspeed.run import NamedWeights, SlotPlaces, shape_of
from megatron_ucp.formats.deepspeed.weights import PipeNames
from megatron_ucp.formats.foreign import at_key_or, of_kind
from megatron_ucp.formats.proof import Run, same_run
from megatron_ucp.formats.pt.unpickler import ITEMSIZE, TensorRef

# ---- stage order
#
# Which parameters each stage's optimizer keeps, at stage 0 without a manifest: the files say only
# how many in each group.
#
# A stage is a run of layers, so the counts of its groups leave one way to cut the list of layers.


def orders_of(step: NamedWeights, order: Order | None) -> list[Order | None]:
    """What `order` is for each stage, whose optimizer of stage 0 says only how many parameters
    it keeps."""
    same: list[Order | None] = [order] * step.mesh.pp
    if order is None or step.recorded is not None or step.names.optimizer or not step.pipeline:
        return same
    found = [step.optimizer_of(stage * step.mesh.tp) for stage in range(step.mesh.pp)]
    if any(tree is None for tree, _ in found):
        return same
    sizes = [group_sizes(of_kind(tree, dict, "optimizer", file), file) for tree, file in found]
    in_elements = sizes[0][1]
    module = step.weights.module()

    def weigh(name: str) -> int:
        return math.prod(shape_of(step, module, name)) if in_elements else 1

    counts = [size for size, _ in sizes]
    return [*of_stages(order, PipeNames(step.pipe_names), counts, weigh, found[0][1])]


def group_sizes(tree: Mapping[str, Any], file: str) -> tuple[list[int], bool]:
    """How much each parameter group of a stage-0 optimizer file holds, and whether that is elements
    (or parameters). Raises DamagedFileError."""
    row = reader_for(tree, file)
    if isinstance(row, FusedFlatFile):
        return [ref.numel for ref in row.masters(tree, file)], True
    base = row.base(tree, file)
    states, groups = at_key_or(base, "state", {}, file), groups_of(base, file)
    listed = [group.get("params", []) for group in groups]
    stepped = [
        len([i for i in indices if i in states and not is_empty(entry_of(states, i, file))])
        for indices in listed
    ]
    return (stepped if any(stepped) else [*map(len, listed)]), False


def of_stages(
    order: Sequence[Sequence[str]],
    names: PipeNames,
    sizes: Sequence[Sequence[int]],
    weigh: Callable[[str], int],
    file: str,
) -> list[list[list[str]]]:
    """For each stage the names of each of its groups, in the optimizer's order. `order` has those
    of all stages, `sizes` what each stage's groups hold, added up by `weigh`. Raises
    StateMismatchError where no cut fits."""
    layer = positions_of(names)
    stops = [*names.layers, max(names.layers, default=0) + 1]
    tied = [name for group in order for name in group if name in names.tied]
    out: list[list[list[str]]] = []
    first = 0
    for number, wanted in enumerate(sizes):
        found = _cut(
            order,
            layer,
            tied,
            wanted,
            weigh,
            first,
            stops[-1:] if number == len(sizes) - 1 else [stop for stop in stops if stop > first],
            number == 0,
        )
        if found is None:
            raise StateMismatchError(
                "the groups of a pipeline stage are not those of any run of the model's layers",
                file=file,
                expected=f"stage {number} with the layers from {first}",
                found=f"groups of {list(wanted)}",
                fix="build the optimizer's groups as the run that saved it did, or save with a "
                "manifest "
                "(megatron_ucp.attach)",
            )
        groups, first = found
        out.append(groups)
    return out


def positions_of(names: PipeNames) -> dict[str, int]:
    """The position of the layer of each parameter that one stage alone holds."""
    return {
        name: int(pipe.partition(".")[0])
        for pipe, name in names.canonical.items()
        if name not in names.tied
    }


def folds(counts: Sequence[int], held: Sequence[int]) -> bool:
    """Whether DualPipeV could have divided layers of `counts` parameters among ranks that keep
    `held` of them: there the r-th rank has the r-th run of layers from the front and the r-th from
    the back."""
    sums = [0, *accumulate(counts)]
    left = {(0, len(counts))}  # layers that the ranks further in may have between them
    for wanted in held[:-1]:
        left = {
            (a, b)
            for first, stop in left
            for a in range(first + 1, stop)
            for b in range(a, stop)
            if sums[a] - sums[first] + sums[stop] - sums[b] == wanted
        }
    return any(sums[b] - sums[a] == held[-1] for a, b in left)


def _cut(
    order: Sequence[Sequence[str]],
    layer: Mapping[str, int],
    tied: Sequence[str],
    wanted: Sequence[int],
    weigh: Callable[[str], int],
    first: int,
    stops: Sequence[int],
    is_first: bool,
) -> tuple[list[list[str]], int] | None:
    """The groups of the stage that begins at layer `first`, and the layer after it."""
    # the first stage holds all of a tied module, a later one some of it or nothing
    shares = (
        [tuple(tied)]
        if is_first
        else list(chain.from_iterable(combinations(tied, n) for n in range(len(tied) + 1)))
    )
    for stop in stops:
        for share in shares:
            groups = [
                [name for name in group if name in share or first <= layer.get(name, -1) < stop]
                for group in order
            ]
            groups = [group for group in groups if group]
            if [sum(map(weigh, group)) for group in groups] == list(wanted):
                return groups, stop
    return None


# ---- position proof
#
# Stage-0 files without a manifest: the optimizer's states lie there by position, under the names
# that the caller's groups have there. What shows that these are the right ones.


MATCHED = (
    "optimizer states were matched by position, in the order of the engine's groups: files of "
    "stage 0 without a manifest name no parameters of theirs"
)
_WINDOW_ELEMS = 1 << 20  # compared at once
_FIX = (
    "build the optimizer's groups as the run that saved it did, with the same parameters frozen, "
    "or save with a manifest (megatron_ucp.attach)"
)


def by_position(step: SlotPlaces) -> bool:
    """Whether nothing but their position says whose the optimizer's states are."""
    return step.recorded is None and step.contents.keeper == Keeper.ZERO_0


def check_positions(step: SlotPlaces, mp: int, allow: Collection[str], optimizer: bool) -> None:
    """Compares the order of the caller's groups with what the file of a model-parallel rank shows.

    Masters are casts of the weights, which have names: all of them are compared. What they can't
    show (there are none in fp32, or two parameters have the same weights) is taken where the groups
    list it in the order of the model file and no frozen parameter could be meant; `allow` with
    "positions" takes it anyway, with "stale" it lets masters differ from the weights. Without the
    `optimizer` masters alone count. Raises StateMismatchError.
    """
    found = _Positions(step, *divmod(mp, step.mesh.tp))
    shown = found.has_masters and "stale" not in allow
    if shown:
        found.compare_masters()
    if "positions" not in allow and (found.has_masters or (optimizer and found.has_states)):
        found.check_order(shown)


@dataclass(frozen=True)
class _Positions:
    """The parameters of one stage and tensor-parallel rank that an optimizer steps."""

    step: SlotPlaces
    stage: int
    tp: int

    @cached_property
    def stepped(self) -> list[tuple[int, FlatBuffer]]:
        """Numbers of the stage's buffers in the manifest, and the buffers."""
        own = (), at_tp(self.tp)  # a rank's own buffers, where shares are of different sizes
        return [
            (number, buffer)
            for number, buffer in enumerate(self.step.manifest.buffers)
            if buffer.stepped and buffer.stage == self.stage and buffer.share in own
        ]

    @cached_property
    def module(self) -> Mapping[str, Any]:
        return self.step.weights.module(self.tp)

    @cached_property
    def _shapes(self) -> Counter[Ints]:
        return Counter(ref.shape for ref in self.module.values() if isinstance(ref, TensorRef))

    @property
    def has_masters(self) -> bool:
        return not isinstance(self.step.format_of(self.stage), PlainFile)

    @property
    def has_states(self) -> bool:
        kept = [buffer for _, buffer in self.stepped]
        return any(len(b.states) > 1 or any(m.scalars for m in b.members) for b in kept)

    @property
    def file(self) -> str:
        mp = self.stage * self.step.mesh.tp + self.tp
        return self.step.files.full_path(self.step.model_of(mp))

    def compare_masters(self) -> None:
        """Raises StateMismatchError for masters that are not those of the weights under their
        name."""
        for number, buffer in self.stepped:
            for member in buffer.members:
                # of a tied parameter the first stage's copy is in a layer file, and no other
                first = self.step.manifest.is_read(member.param, number)
                if first and self._differs(number, member):
                    raise StateMismatchError(
                        "masters in the optimizer's states are not those of the weights that the "
                        "engine's groups have at their place",
                        file=self.file,
                        parameter=member.param,
                        expected="masters that are its weights when they are rounded",
                        found="other values",
                        fix=f"{_FIX}; if masters were changed on purpose, load with "
                        '--allow stale (Python: allow={"stale"})',
                    )

    def _differs(self, number: int, member: Member) -> bool:
        weight = self.module[member.param]
        if not isinstance(weight, TensorRef) or not weight.is_contiguous:
            return False
        axes = self.step.manifest.buffers[number].axes
        cut = tuple((axis, self.tp % self.step.mesh.size(axis)) for axis in axes)
        masters = self.step.where(Slot(number, cut, 0, MASTER))
        beside = self.step.files.place(self.step.weights.file_of(member.param, self.tp), weight)
        return not same_run(Run(masters, member.start), Run(beside, 0), member.size)

    def check_order(self, shown: bool) -> None:
        """Raises StateMismatchError where the order of the groups could be another one than that of
        the run: `shown` says that masters with other weights were compared."""
        names = self._trained()
        looks = {name: self._look(name, shown) for group in names for name in group}
        self._check_frozen(looks, shown)
        counts = Counter(looks.values())
        # files have an expert each, the module may have a parameter for all experts of a layer
        place = {name: number for number, name in enumerate(in_order(self.module))}
        for group in names:
            doubtful = [name for name in group if counts[looks[name]] > 1]
            listed = doubtful if shown or not doubtful else group
            for one, other in pairwise(listed):
                if place[one] > place[other]:
                    text = f"the groups have {one} before {other}, the model file has it behind"
                    self._refuse(doubtful[0], text, shown)
        if not shown and self.step.mesh.pp > 1:
            self._check_runs()

    def _check_frozen(self, looks: Mapping[str, Hashable], shown: bool) -> None:
        """Raises StateMismatchError where a frozen parameter looks like one that is stepped."""
        twins: dict[Hashable, str] = {}
        for name, look in looks.items():
            twins.setdefault(look, name)
        known = self.step.manifest.by_name
        for name in self.module:
            frozen = name in known and known[name].kind == "frozen"
            look = self._look(name, shown) if frozen else None
            if look and look in twins:
                self._refuse(twins[look], f"{name}, which is frozen, could be meant", shown)

    def _check_runs(self) -> None:
        """Raises StateMismatchError where the stages may be those of DualPipeV, each of which has
        two runs of layers: how many parameters they keep is all that the files say of them."""
        layer, held = positions_of(PipeNames(self.step.pipe_names)), Counter[int]()
        counts = Counter[int]()
        for buffer in self.step.manifest.buffers:
            for member in buffer.members if buffer.stepped else ():
                if member.param in layer:
                    held[buffer.stage] += 1
                    counts[layer[member.param]] += 1
        of_layers = [counts[number] for number in range(max(counts, default=0) + 1)]
        of_stages = [held[stage] for stage in range(self.step.mesh.pp)]
        if folds(of_layers, of_stages):
            text = "stages that DualPipeV could have made too, with two runs of layers each"
            self._refuse(self._trained()[0][0], text, False)

    def _trained(self) -> list[list[str]]:
        """Names of each group at each place that have elements."""
        groups = grouped(
            ((member.group, buffer.at), member.param)
            for _, buffer in self.stepped
            for member in buffer.members
            if member.size and member.param in self.module
        )
        return list(groups.values())

    def _look(self, name: str, shown: bool) -> Hashable:
        """What tells a parameter from another one of the file, None where it has no elements: its
        shape; where masters were compared its weights, too."""
        ref = self.module[name]
        if not isinstance(ref, TensorRef) or not ref.numel:
            return None
        if not shown or not ref.is_contiguous or self._shapes[ref.shape] == 1:
            return ref.shape
        file = self.step.files.file(self.step.weights.file_of(name, self.tp))
        dtype, found = ref.storage.dtype, hashlib.sha256()
        for part in _windows(file, file.record(ref.storage), dtype, ref.offset_elems, ref.numel):
            found.update(part)
        return ref.shape, found.digest()

    def _refuse(self, name: str, why: str, shown: bool) -> None:
        same = "the same weights" if shown else "the same shape"
        raise StateMismatchError(
            "the file keeps the optimizer's states by position, and nothing in it shows whose they "
            "are",
            file=self.file,
            parameter=name,
            expected=f"parameters of {same} in the order of the model file, none of them frozen",
            found=why,
            fix=f"{_FIX}. Where they are those of the run that saved it, load with "
            'allow={"positions"} (Python)',
        )


def _windows(
    file: ByteFile, record: Record, dtype: str, first: int, count: int
) -> Iterator[bytearray]:
    """`count` elements of a record from element `first` on, some at a time."""
    size = ITEMSIZE[dtype]
    for at in range(0, count, _WINDOW_ELEMS):
        data = bytearray(min(_WINDOW_ELEMS, count - at) * size)
        file.read_into(record, (first + at) * size, memoryview(data))
        yield data
