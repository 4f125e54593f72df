"""Stage-0 files without a manifest: optimizer states lie there by position, without names. Which
parameters they belong to, and the proof of it."""

import hashlib
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import in_order
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.names import MASTER, Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.errors import StateMismatchError
from megatron_ucp.formats.byte_files import ByteFile, Record
from megatron_ucp.formats.deepspeed.files import at_tp
from megatron_ucp.formats.deepspeed.optimizers import (
    PlainFile,
)
from megatron_ucp.formats.deepspeed.run import NativeRun
from megatron_ucp.formats.proof import are_masters
from megatron_ucp.formats.pt.refs import ITEMSIZE, TensorRef

MATCHED = (
    "optimizer states were matched by position, in the order of the engine's groups: files of "
    "stage 0 without a manifest name no parameters of theirs"
)
_WINDOW_ELEMS = 1 << 20  # compared at once
_FIX = (
    "build the optimizer's groups as the run that saved it did, with the same parameters frozen, "
    "or save with a manifest (megatron_ucp.attach)"
)


def by_position(run: NativeRun) -> bool:
    """Whether nothing but their position says whose the optimizer's states are."""
    return run.recorded is None and run.contents.keeper == Keeper.ZERO_0


def check_positions(run: NativeRun, mp: int, allow: Collection[str], optimizer: bool) -> None:
    """Compares the order of the caller's groups with what the file of a model-parallel rank shows.

    Masters are casts of the weights, which have names: all of them are compared. What they can't
    show (there are none in fp32, or two parameters have the same weights) is taken where the groups
    list it in the order of the model file and no frozen parameter could be meant; `allow` with
    "positions" takes it anyway, with "stale" it lets masters differ from the weights. Without the
    `optimizer` masters alone count. Raises StateMismatchError.
    """
    found = _Positions(run, *divmod(mp, run.mesh.tp))
    shown = found.has_masters and "stale" not in allow
    if shown:
        found.compare_masters()
    if "positions" not in allow and (found.has_masters or (optimizer and found.has_states)):
        found.check_order(shown)


@dataclass(frozen=True)
class _Positions:
    """The parameters of one stage and tensor-parallel rank that an optimizer steps."""

    run: NativeRun
    stage: int
    tp: int

    @cached_property
    def stepped(self) -> list[tuple[int, FlatBuffer]]:
        """Numbers of the stage's buffers in the manifest, and the buffers."""
        own = (), at_tp(self.tp)  # a rank's own buffers, where shares are of different sizes
        return [
            (number, buffer)
            for number, buffer in enumerate(self.run.manifest.buffers)
            if buffer.stepped and buffer.stage == self.stage and buffer.share in own
        ]

    @cached_property
    def module(self) -> Mapping[str, Any]:
        return self.run.weights.module(self.tp)

    @cached_property
    def _shapes(self) -> Counter[Ints]:
        return Counter(ref.shape for ref in self.module.values() if isinstance(ref, TensorRef))

    @property
    def has_masters(self) -> bool:
        return not isinstance(self.run.stage(self.stage).format, PlainFile)

    @property
    def has_states(self) -> bool:
        kept = [buffer for _, buffer in self.stepped]
        return any(len(b.states) > 1 or any(m.scalars for m in b.members) for b in kept)

    @property
    def file(self) -> str:
        mp = self.stage * self.run.mesh.tp + self.tp
        return self.run.full_path(self.run.model_of(mp))

    def compare_masters(self) -> None:
        """Raises StateMismatchError for masters that are not those of the weights under their
        name."""
        for number, buffer in self.stepped:
            for member in buffer.members:
                # of a tied parameter the first stage's copy is in a layer file, and no other
                first = self.run.manifest.is_read(member.param, number)
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
        axes = self.run.manifest.buffers[number].axes
        cut = tuple((axis, self.tp % self.run.mesh.size(axis)) for axis in axes)
        masters = self.run.where(Slot(number, cut, 0, MASTER))
        beside = self.run.place(self.run.weights.file_of(member.param, self.tp), weight)
        return not are_masters(masters.run(member.start, member.size), beside)

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

    def _check_frozen(self, looks: Mapping[str, Hashable], shown: bool) -> None:
        """Raises StateMismatchError where a frozen parameter looks like one that is stepped."""
        twins: dict[Hashable, str] = {}
        for name, look in looks.items():
            twins.setdefault(look, name)
        known = self.run.manifest.by_name
        for name in self.module:
            frozen = name in known and known[name].kind == "frozen"
            look = self._look(name, shown) if frozen else None
            if look and look in twins:
                self._refuse(twins[look], f"{name}, which is frozen, could be meant", shown)

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
        file = self.run.file(self.run.weights.file_of(name, self.tp))
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
