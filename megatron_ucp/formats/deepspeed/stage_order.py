"""Which parameters each stage's optimizer keeps, at stage 0 without a manifest: the files say only
how many in each group.

A stage is a run of layers, so the counts of its groups leave one way to cut the list of layers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, combinations
from typing import Any

from megatron_ucp.core.manifest import Order
from megatron_ucp.errors import StateMismatchError
from megatron_ucp.formats.deepspeed.flat_order import shape_of
from megatron_ucp.formats.deepspeed.native_steps import NamedWeights
from megatron_ucp.formats.deepspeed.optimizer_files import entry_of, groups_of
from megatron_ucp.formats.deepspeed.optimizer_formats import reader_for
from megatron_ucp.formats.deepspeed.pipe_names import PipeNames
from megatron_ucp.formats.deepspeed.stage_0_files import FusedFlatFile, is_empty
from megatron_ucp.formats.foreign import at_key_or, of_kind


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
