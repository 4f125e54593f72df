"""A Mixtral's states as the ranks of a mesh would have them, made by hand: for meshes and modules
that nobody can train here.

The manifest says by the package's arithmetic which rank has what; what a rank's memory holds is
made with torch alone, from megatron-core's rank order and from what its modules do with their
weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from megatron_ucp.core import flat
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import DENSE_CUT, EXPERT_CUT, Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.core.plan import Slot, make_plan
from megatron_ucp.core.proof import prove
from megatron_ucp.families import families
from megatron_ucp.families.mixtral import MixtralSizes
from megatron_ucp.formats.byte_files import Where
from megatron_ucp.formats.deepspeed import buffers as formulas
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.reshard import execute

HIDDEN, FFN, EXPERTS = 8, 4, 4
SIZES = MixtralSizes(
    1, HIDDEN, 4, 4, 2, FFN, 8, 8, gated=True, biases=False, norm_biases=False, experts=EXPERTS
)
STATES = (("fp32", "float32"), ("exp_avg", "float32"), ("exp_avg_sq", "float32"))
TABLE = families()["mixtral"].table(SIZES)  # type: ignore[arg-type]
FULL = {name: declared.shape for name, declared in TABLE.items()}
FC1, FC2 = "linear_fc1.weight", "linear_fc2.weight"


def is_expert(name: str) -> bool:
    return ".local_experts." in name


def whole(name: str, state: str) -> torch.Tensor:
    """A whole tensor of provenance values: of (parameter, state, element) each one another number,
    which float32 holds."""
    number = list(FULL).index(name) * len(STATES) + [key for key, _ in STATES].index(state)
    size = torch.Size(FULL[name]).numel()
    values = torch.arange(size, dtype=torch.float64) + 512 * number + 1
    assert size <= 512 and float(values[-1]) < 2**24
    return values.float().reshape(FULL[name])


@dataclass(frozen=True)
class Layout:
    """A mesh, and whether the experts of a rank are stacked as megatron-core's GroupedMLP has them.
    `fault` makes one thing wrong in what the ranks hold."""

    mesh: Mesh
    grouped: bool = False
    fault: str = ""

    # ------------------------------------------------ as the package describes it

    @cached_property
    def manifest(self) -> Manifest:
        mesh, apart = self.mesh, self.mesh.experts_apart
        dense = [[name] for name in TABLE if not (apart and is_expert(name))]
        if not apart:
            dense = [names for names in dense if not is_expert(names[0])]
            dense += self._tensors(0)
        buffers = self._buffers(dense, mesh.partitions, DENSE_CUT, 0)
        for rank in range(mesh.ep if apart else 0):
            held = self._buffers(self._tensors(rank), mesh.expert_partitions, EXPERT_CUT, 1)
            at = (("ep", rank),) if mesh.ep > 1 else ()
            buffers += [replace(buffer, at=at) for buffer in held]
        groups = (ParamGroup({"lr": 1.0}), ParamGroup({"lr": 1.0}))
        return Manifest(Keeper.PAPER, mesh, tuple(map(self._spec, TABLE)), tuple(buffers), groups)

    def _spec(self, name: str) -> ParamSpec:
        spec = TABLE[name].spec(name, "float32", "trainable")
        transposed = self.grouped and is_expert(name)
        return replace(spec, order=(1, 0) if transposed else None)

    def _tensors(self, ep: int) -> list[list[str]]:
        """The tensors with the experts of an expert-parallel rank: two for all of them, or two for
        each."""
        names = [name for name in TABLE if is_expert(name)]
        share = EXPERTS // self.mesh.ep
        mine = [n for n in names if ep * share <= number_of(n) < (ep + 1) * share]
        if not self.grouped:
            return [[name] for name in mine]
        return [[n for n in mine if n.endswith(which)] for which in (FC1, FC2)]

    def _buffers(
        self, tensors: list[list[str]], parts: int, axes: tuple[str, ...], group: int
    ) -> list[FlatBuffer]:
        mesh = self.mesh
        shares = mesh.first_shares()

        def elems(name: str) -> int:
            spec = self._spec(name)
            return torch.Size(spec.layout.local_shape(name, spec.shape, shares)).numel()

        sizes = [sum(map(elems, names)) for names in tensors]
        each = mesh.zero == 3
        starts, used = flat.aligned_starts([-(-size // parts) if each else size for size in sizes])
        together = flat.slices if each else flat.one_after_another
        members = [
            member
            for names, start in zip(tensors, starts, strict=True)
            for member in together([Member(name, start, elems(name), group) for name in names])
        ]
        if each:
            return [FlatBuffer(tuple(members), used, parts, "each", STATES, axes=axes)]
        length = formulas.whole_length(used, parts)
        return [FlatBuffer(tuple(members), length, parts, "whole", STATES, axes=axes)]

    # ------------------------------------------------ as the ranks have it

    def memory(self, state: str) -> Iterator[tuple[int, torch.Tensor]]:
        """(Rank, one of its buffers: the dense one first)."""
        for rank in range(self.mesh.world):
            for tensors, parts, index in self._of_rank(rank, state):
                yield rank, self._partition(tensors, parts, index)

    def _of_rank(self, rank: int, state: str) -> Iterator[tuple[list[torch.Tensor], int, int]]:
        """A rank's tensors, buffer by buffer, with the number of its partitions, and which of them
        the rank has. megatron-core's order: tp fastest and then dp; for experts etp, ep, copies."""
        mesh = self.mesh
        tp, dp = rank % mesh.tp, rank // mesh.tp
        etp, rest = rank % mesh.etp, rank // mesh.etp
        ep, copy = rest % mesh.ep, rest // mesh.ep
        dense = [cut(name, state, mesh.tp, tp) for name in FULL if not is_expert(name)]
        experts = self._experts(ep, etp, state)
        if mesh.ep == 1 and mesh.etp == mesh.tp:
            yield dense + experts, mesh.dp, dp
        else:
            yield dense, mesh.dp, dp
            yield experts, mesh.world // (mesh.etp * mesh.ep), copy

    def _experts(self, ep: int, etp: int, state: str) -> list[torch.Tensor]:
        share = EXPERTS // self.mesh.ep
        own = list(range(ep * share, (ep + 1) * share))
        if self.fault == "two experts swapped" and len(own) > 1:
            own[0], own[1] = own[1], own[0]
        prefix = "decoder.layers.0.mlp.experts.local_experts"
        pairs = [
            [cut(f"{prefix}.{e}.{which}", state, self.mesh.etp, etp) for which in (FC1, FC2)]
            for e in own
        ]
        if self.fault == "gate and up swapped":
            pairs[-1][0] = pairs[-1][0].roll(pairs[-1][0].shape[0] // 2, 0)
        if not self.grouped:
            return [tensor for pair in pairs for tensor in pair]
        if self.fault == "cut as its label says":  # partition_dim 1 of [h, experts x 2F]
            return [
                torch.cat([fc1.T for fc1, _ in pairs], 1),
                torch.cat([fc2.T for _, fc2 in pairs]),
            ]
        # GroupedMLP.forward: weight1.view(experts, h, -1) and weight2.view(experts, -1, h), each
        # one multiplied from the right
        weight1 = torch.stack([fc1.T for fc1, _ in pairs]).view(HIDDEN, -1)
        weight2 = torch.stack([fc2.T for _, fc2 in pairs]).view(-1, HIDDEN)
        return [weight1, weight2]

    def _partition(self, tensors: list[torch.Tensor], parts: int, index: int) -> torch.Tensor:
        """What ZeRO gives the rank: of all tensors in a row, or of each of them."""
        flats = [tensor.reshape(-1) for tensor in tensors]
        if self.mesh.zero == 3:
            return torch.cat([padded(one, parts).view(parts, -1)[index] for one in flats])
        joined = torch.cat(flats)
        length = formulas.whole_length(len(joined), parts)
        joined = torch.cat([joined, joined.new_zeros(length - len(joined))])
        return joined.view(parts, -1)[index]

    def slots(self, state: str) -> dict[Slot, torch.Tensor]:
        """What every slot holds. Raises AssertionError where two ranks that share one disagree."""
        out: dict[Slot, torch.Tensor] = {}
        by_rank: dict[int, list[torch.Tensor]] = {}
        for rank, memory in self.memory(state):
            by_rank.setdefault(rank, []).append(memory)
        for rank, held in by_rank.items():
            for (number, place, part), memory in zip(
                self.manifest.parts_of(rank), held, strict=True
            ):
                slot = Slot(number, place, part, state)
                assert torch.equal(out.setdefault(slot, memory), memory), slot
        return out


def number_of(name: str) -> int:
    return int(name.partition(".local_experts.")[2].partition(".")[0])


def padded(one: torch.Tensor, parts: int) -> torch.Tensor:
    width = -(-len(one) // parts)
    return torch.cat([one, one.new_zeros(width * parts - len(one))])


def cut(name: str, state: str, size: int, rank: int) -> torch.Tensor:
    """A rank's share, by the attributes that megatron-core's own modules carry."""
    full, attributes = whole(name, state), TABLE[name].attributes
    if not attributes.get("tensor_model_parallel"):
        return full
    dim, stride = int(str(attributes["partition_dim"])), int(str(attributes["partition_stride"]))
    return torch.cat([part.chunk(size, dim)[rank] for part in full.chunk(stride, dim)], dim)


def carried(
    source: Layout, target: Layout, folder: Path, wanted: Callable[[str], bool] = lambda _: True
) -> dict[Slot, torch.Tensor]:
    """Every slot of the target, filled by a proved plan from files with the source's."""
    states = [state for state, _ in STATES if wanted(state)]
    held = {slot: memory for state in states for slot, memory in source.slots(state).items()}
    out = {
        slot: torch.full_like(memory, -7.0)
        for state in states
        for slot, memory in target.slots(state).items()
    }
    torch.save(list(held.values()), folder / "shards.pt")
    plan = make_plan(source.manifest, target.manifest, [(slot, slot.state) for slot in out])
    prove(plan, source.manifest, target.manifest)
    with PtFile(folder / "shards.pt") as file:
        tree: list = file.tree  # type: ignore[assignment]
        places = {
            slot: Where(file, file.record(ref.storage), ref.offset_elems * 4, ref.numel, "float32")
            for slot, ref in zip(held, tree, strict=True)
        }
        execute.execute(plan, places.__getitem__, out.__getitem__)
        execute.fill_padding(plan.fills, out.__getitem__)
    return out


def different(target: Layout, found: dict[Slot, torch.Tensor]) -> list[Slot]:
    """The slots that hold something else than the target's ranks would."""
    want = {slot: memory for state, _ in STATES for slot, memory in target.slots(state).items()}
    assert want.keys() == found.keys() and len(want) > 5
    return [slot for slot, memory in want.items() if not torch.equal(memory, found[slot])]
