"""The optimizers of all places of a run: read from the files of each place's first rank, and joined
as one."""

from dataclasses import replace
from typing import Any

from megatron_ucp.core.experts import LocalExperts, for_experts
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import Order
from megatron_ucp.core.mesh import stage_of
from megatron_ucp.core.stages import Stage, join
from megatron_ucp.errors import ForeignFileError
from megatron_ucp.formats.deepspeed.evidence import group_order
from megatron_ucp.formats.deepspeed.flat_order import flattened
from megatron_ucp.formats.deepspeed.muon import check_momentum
from megatron_ucp.formats.deepspeed.native_steps import NamedWeights, Optimizers, after
from megatron_ucp.formats.deepspeed.optimizer_files import Contents, OptimizerFile, OptimizerTree
from megatron_ucp.formats.deepspeed.optimizer_formats import reader_for
from megatron_ucp.formats.deepspeed.stage_0_files import PlainFile
from megatron_ucp.formats.deepspeed.stage_order import orders_of
from megatron_ucp.formats.foreign import of_kind
from megatron_ucp.formats.loss_scale import LossScale


def held_of(step: NamedWeights, positions_too: bool) -> Optimizers:
    """With the optimizer of every place (see `Mesh.holding`). Without `positions_too` one that lies
    in files by position alone is read in the order that the caller told. Raises a UcpError."""
    orders = orders_of(step, _own_order(step, step.told.order))
    readers: list[OptimizerFile] = []
    stages: list[Contents] = []
    for at in step.places:
        rank = step.mesh.rank_of(at, 0)
        if step.recorded is not None:
            wanted = group_order(step.recorded, at)
        else:
            wanted = _renumbered(step, orders[stage_of(at)], rank)
        reader, found = _first_of_place(step, rank, wanted, positions_too)
        readers.append(reader)
        stages.append(found)
        if stages[0].keeper != found.keeper:
            raise ForeignFileError(
                "the stages of the pipeline have different kinds of optimizers",
                file=step.files.full_path(step.optimizer_of_rank(rank)[1]),
                expected=stages[0].keeper,
                found=found.keeper,
            )
    return after(step, Optimizers, readers=readers, stages=stages, contents=_joined(step, stages))


def _first_of_place(
    step: NamedWeights, rank: int, wanted: Order | None, positions_too: bool
) -> tuple[OptimizerFile, Contents]:
    """What a place's first rank holds, in the order `wanted` where its file names nothing."""
    tree, name = step.optimizer_of_rank(rank)
    unnamed = not step.names.optimizer and wanted is None and positions_too
    if tree is None or unnamed or step.told.weights:
        return PlainFile(step.weight_dtype), Contents(Keeper.NOBODY, (), (), LossScale(), ())
    file = step.files.full_path(name)
    reader = reader_for(tree, file, step.weight_dtype, step.meta.get("ds_config"))
    return reader, read_contents(step, reader, (tree, file), wanted, rank)


def read_contents(
    step: NamedWeights, reader: OptimizerFile, held: tuple[Any, str], order: Order | None, rank: int
) -> Contents:
    """What the optimizer of a rank holds, with canonical names: its state dict, and its file."""
    tree, file = held
    found = OptimizerTree(
        of_kind(tree, dict, "the optimizer", file), file, lambda ref: step.files.tensor(file, ref)
    )
    contents = reader.contents(found, flattened(step, found, order, rank), step.spread)
    check_momentum(contents.groups, contents.buffers, file)
    return contents


def _own_order(step: NamedWeights, order: Order | None) -> Order | None:
    """The order that an engine told, for a rank of this run, which may have other numbers of
    experts."""
    if order is None or step.recorded is not None or not step.names.experts:
        return order
    own = LocalExperts.among(step.expert_counts, step.mesh.ep, 0)
    return for_experts(order, own.counts, str(step.files.folder))


def _renumbered(step: NamedWeights, order: Order | None, rank: int) -> Order | None:
    """The order at the first expert-parallel rank, for a rank with other experts."""
    ep, _ = step.mesh.expert_place(rank)
    if order is None or not ep:
        return order
    local = LocalExperts.among(step.expert_counts, step.mesh.ep, ep)
    return [[local.whole_name(name) for name in names] for names in order]


def _joined(step: NamedWeights, stages: list[Contents]) -> Contents:
    places = zip(step.places, stages, strict=True)
    joined = join([Stage((), found.buffers, found.groups, at=at) for at, found in places])
    indices = {
        number: index
        for numbers, found in zip(joined.numbers, stages, strict=True)
        for number, index in zip(numbers, found.indices, strict=True)
    }
    return replace(
        stages[0],
        buffers=joined.buffers,
        groups=joined.groups,
        indices=tuple(indices[number] for number in sorted(indices)),
    )
