"""How a run lies in the memory of the ranks that stay, while the program builds its new engine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ucp.core.manifest import SAVED_ON, BufferPart, Manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UsageError
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.in_memory import RunInMemory, TakenRun
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.reshard.match import scheduler_for
from megatron_ucp.reshard.memories import evenly
from megatron_ucp.reshard.source_settings import Origin
from megatron_ucp.reshard.target import target_manifest, universal_manifest
from megatron_ucp.reshard.wanted import Wanted


@dataclass(frozen=True)
class HeldLayout:
    """`run` is what was taken, whose elements will lie as `manifest` says; `takers` are the parts
    that each rank of the world keeps."""

    run: TakenRun
    manifest: Manifest
    takers: Sequence[Sequence[BufferPart]]


def as_it_lies(run: TakenRun, ranks: Sequence[Sequence[BufferPart]]) -> HeldLayout:
    """Every rank keeps what it has."""
    return HeldLayout(run, run.manifest, ranks)


def on_mesh(run: TakenRun, mesh: Mesh, world: int) -> HeldLayout:
    """As DeepSpeed lays it out on a mesh: its rank r is rank r of the world now. Raises a UcpError
    where nobody knows how that mesh holds the run."""
    wanted = _wanted(run, Target(mesh).with_zero_of(run.manifest.mesh))
    manifest = target_manifest(wanted)
    stay = wanted.target.mesh.world
    takers = [manifest.parts_of(rank) if rank < stay else [] for rank in range(world)]
    return HeldLayout(_regrouped(run, manifest), manifest, takers)


def spread(run: TakenRun, ranks: int, world: int) -> HeldLayout:
    """Whole tensors, as many bytes on each of the first ranks as on the others. For any engine and
    mesh to come. Raises a UcpError."""
    manifest = universal_manifest(_wanted(run, Target(Mesh())))
    said = {**run.manifest.run, SAVED_ON: str(run.manifest.mesh)}
    manifest = replace(manifest, run=said)
    parts = [(number, (), 0) for number in range(len(manifest.buffers))]
    sizes = [_bytes_of(manifest, number) for number, _, _ in parts]
    nobody: set[int] = set()
    owners = evenly([(size, nobody) for size in sizes], ranks)
    takers: list[list[BufferPart]] = [[] for _ in range(world)]
    for part, owner in zip(parts, owners, strict=True):
        takers[owner].append(part)
    return HeldLayout(_regrouped(run, manifest), manifest, takers)


def _bytes_of(manifest: Manifest, number: int) -> int:
    buffer = manifest.buffers[number]
    return sum(buffer.of(state).elems(0) * ITEMSIZE[dtype] for state, dtype in buffer.states)


def _wanted(run: TakenRun, target: Target) -> Wanted:
    return Origin(RunInMemory(run, run.manifest), False).wanted(target, None)


def _regrouped(run: TakenRun, manifest: Manifest) -> TakenRun:
    """With what a scheduler keeps for each group in the order of the manifest's groups."""
    firsts: dict[int, str] = {}
    for _, member, group in manifest.stepped():
        firsts.setdefault(group, member.param)
    held = run.manifest
    origins = [held.group_number(firsts[number]) for number in range(len(manifest.groups))]
    scheduler = scheduler_for(run.extras.scheduler, origins, len(held.groups))
    return replace(run, extras=replace(run.extras, scheduler=scheduler))


def ranks_that_stay(mesh: Mesh | None, ranks: int | None, world: int) -> int:
    """How many ranks keep what is held. Raises UsageError for numbers that don't fit."""
    wanted = mesh.world if mesh is not None else ranks
    stay = world if wanted is None else wanted
    if ranks is not None and (isinstance(ranks, bool) or not 1 <= ranks <= world):
        raise UsageError(
            "ranks says how many ranks of this world stay",
            expected=f"1 to {world}",
            found=repr(ranks),
            fix="give such a number, or leave ranks out where the world grows",
        )
    if mesh is not None and ranks is not None and mesh.world != ranks:
        raise UsageError(
            "the mesh has another number of ranks than stay",
            expected=f"a mesh of {ranks} ranks",
            found=f"{mesh}, which has {mesh.world}",
            fix="leave ranks out, or correct the mesh",
        )
    return min(stay, world)
