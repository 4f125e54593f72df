"""Whether the files of a tag belong together: one run, one step, one mesh; masters and weights."""

import math
import sys
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import Any

from megatron_ucp.core.experts import expert_place, file_rank
from megatron_ucp.core.flat import Fragment, Member, alone
from megatron_ucp.core.manifest import Manifest, Order
from megatron_ucp.core.mesh import Coords
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.values import same
from megatron_ucp.errors import ForeignFileError, StateMismatchError
from megatron_ucp.formats.checkpoint import TrainedWeights
from megatron_ucp.formats.deepspeed.manifest import compare_fields, difference, shares
from megatron_ucp.formats.deepspeed.optimizers import Contents, sharing
from megatron_ucp.formats.deepspeed.run import NativeRun
from megatron_ucp.formats.deepspeed.weights import shapes_by_group
from megatron_ucp.formats.param_groups import number
from megatron_ucp.formats.proof import is_rounded
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.pt.refs import ITEMSIZE, StorageRef, TensorRef

# ---- file checks


SAMPLES = 16  # parameters of one partition whose masters are compared with the weights
COMPARED = (Keeper.ZERO_1_OR_2, Keeper.BF16)  # the optimizers that keep masters beside weights
# slot of the masters, fragment, name, weight, file of the weight
_Sample = tuple[Slot, Fragment, str, TensorRef, str]
_Runs = tuple[_Sample, range, int]  # where runs of a sample begin, and how many elements each has
_Place = tuple[str, StorageRef, int]  # a file, a storage in it, and one of its elements


def check_file(run: NativeRun, name: str, allow: Collection[str] = ()) -> None:
    """Compares one file with the structure; see `Checkpoint.check`. Raises ForeignFileError for a
    file of another run, step or mesh, StateMismatchError where nothing says whose states are in
    it."""
    if name in run.names.optimizer.values():
        part, mp = next(key for key, n in run.names.optimizer.items() if n == name)
        rank = run.rank_of_file(part, mp)
        _check_optimizer_file(run, name, run.optimizer_tree(part, mp), rank)
        if "stale" not in allow and run.contents.keeper in COMPARED:
            check_weights(run, rank)
    elif name in run.names.expert_optimizer.values():
        _check_expert_optimizer(run, name)
    elif name in run.names.model.values():
        mp = _check_model_file(run, name)
        if run.lies_by_position:
            _check_positions(run, mp, allow)
    else:
        run.file(name)
        if name in {*run.names.layers.values(), *run.names.experts.values()}:
            run.weights.check(name)


def _check_positions(run: NativeRun, mp: int, allow: Collection[str]) -> None:
    """Of states that lie by position: whether the engine's groups list their parameters in the
    order of the model file, as Megatron-DeepSpeed's program does, and no frozen parameter has the
    shape of a trained one; where there are masters, whether they are the weights of the same name.
    Raises StateMismatchError, ForeignFileError."""
    rank, module = run.rank_of_file(0, mp), list(run.weights.module(mp))
    contents = run.stages[run.place_of_rank(rank)]
    members = [(m.group, m.param) for b in contents.buffers for m in b.members]
    params = run.manifest.by_name
    shapes = {params[name].shape for _, name in members}
    frozen = [p.name for p in params.values() if p.kind == "frozen" and p.shape in shapes]
    wrong = [
        other
        for (group, one), (next_group, other) in pairwise(members)
        if group == next_group and module.index(one) > module.index(other)
    ]
    if wrong or frozen:
        raise StateMismatchError(
            "the file keeps the optimizer's states by position, and nothing in it shows whose they "
            "are",
            file=run.full_path(run.model_of(mp)),
            parameter=(wrong + frozen)[0],
            expected="groups in the order of the model file, and no frozen parameter of one shape",
            found="another order" if wrong else "a frozen parameter",
            fix="build the optimizer's groups as the run that saved it did, with the same "
            "parameters frozen, or save with a manifest (megatron_ucp.attach)",
        )
    if contents.format.masters_key and "stale" not in allow:
        check_weights(run, rank, sys.maxsize, RUNS, RUN_ELEMS)


def _check_expert_optimizer(run: NativeRun, name: str) -> None:
    """One of stage 0 against the first one of its expert-parallel rank."""
    mesh, tree = run.mesh, run.tree(name).get("optimizer")
    if run.contents.keeper == Keeper.NOBODY:  # nobody said whose the states in it are
        return
    (ep, mp), *_ = (at for at, n in run.names.expert_optimizer.items() if n == name)
    places = ((mp // mesh.tp, ep, etp) for etp in range(mesh.etp))
    place = next((place for place in places if file_rank(mesh, *place) == mp), None)
    if place is None or ep >= mesh.ep:
        raise ForeignFileError(
            "there is an optimizer file of more expert-parallel ranks than the run had",
            file=run.full_path(name),
            expected=f"{mesh.ep} expert-parallel ranks",
            found=f"rank {ep}, model-parallel rank {mp}",
        )
    rank = mesh.rank_of(expert_place(*place), 0)
    at = run.place_of_rank(rank)
    order = [
        [m.param for b in run.stages[at].buffers for m in b.members if m.group == group]
        for group in range(len(run.stages[at].groups))
    ]
    _check_optimizer_file(run, name, tree, rank, order)


def _check_optimizer_file(
    run: NativeRun, name: str, tree: Any, rank: int, order: Order | None = None
) -> None:
    file, place = run.full_path(name), run.place_of_rank(rank)
    first = run.stages[place]
    found = run.read_contents(first.format, tree, file, order, rank)
    _check_sharing(run, tree, found, rank, file)
    for what in ("keeper", "groups", "scalars", "buffers", "scaler"):
        ours, theirs = getattr(first, what), getattr(found, what)
        if what == "scaler":
            ours, theirs = ours.said, theirs.said
        if what == "groups":
            ours, theirs = ([dict(group.settings) for group in one] for one in (ours, theirs))
        if not (same(ours, theirs) if what == "groups" else ours == theirs):
            raise ForeignFileError(
                f"an optimizer file differs from the first one in its {what}",
                file=file,
                **difference(ours, theirs),
            )


def _check_sharing(run: NativeRun, tree: Any, found: Contents, rank: int, file: str) -> None:
    """Where a file of ZeRO-3 says which ranks share each sub-group: they must be those of the
    mesh, as nothing else shows whose experts lie in it."""
    for one, buffer in zip(sharing(tree, file) or (), found.buffers, strict=False):
        said = one.get("partition_ranks")
        want = [*run.mesh.partition_ranks(rank, buffer.held_along)]
        if said != want:
            raise ForeignFileError(
                "a sub-group was shared by other ranks than the mesh says",
                file=file,
                parameter=buffer.members[0].param if buffer.members else None,
                expected=f"ranks {want}",
                found=str(said)[:120],
            )


def _check_model_file(run: NativeRun, name: str) -> int:
    """Against the first one of the run, and what is flattened against the first one that holds as
    much; returns its model-parallel rank."""
    tree = run.tree(name)
    mp = next(mp for (_, mp), n in run.names.model.items() if n == name)
    # shares of different sizes were compared with their layout
    alike = mp if run.uneven else mp - mp % run.mesh.tp
    one, file = run.model_of(alike), run.full_path(name)
    first, at = run.tree(one), run.full_path(one)
    keys = ("global_steps", "skipped_steps", "dp_world_size", "mp_world_size", "ds_version")
    ours: dict[str, Any] = {key: number(run.meta.get(key)) for key in keys}
    theirs: dict[str, Any] = {key: number(tree.get(key)) for key in keys}
    ours["param_shapes"] = shapes_by_group(first, at)
    theirs["param_shapes"] = shapes_by_group(tree, file)
    compare_fields(ours, theirs, "a model file differs from the first one in", file)
    if run.contents.keeper in COMPARED:  # others have no masters, and `where` looks at the weights
        _check_headers(run, run.rank_of_file(0, mp))
    return mp


def _check_headers(run: NativeRun, rank: int) -> None:
    """Looks at all weights beside a rank's masters. Raises as `_require_like_master`."""
    buffers = run.manifest.buffers
    for index, cut, _ in run.manifest.parts_of(rank):
        for member in buffers[index].members if buffers[index].stepped else ():
            weight, beside = run.weight(member.param, cut)
            if isinstance(weight, TensorRef):
                _require_like_master(run, member, weight, beside)


def _require_like_master(run: NativeRun, member: Member, weight: TensorRef, beside: str) -> None:
    """Raises ForeignFileError where a weight has another size than its master, or another dtype
    than the run says."""
    want = member.size, run.manifest.by_name[member.param].dtype
    if (weight.numel, weight.storage.dtype) != want:
        raise ForeignFileError(
            "a weight has another size than its master, or another dtype than the run",
            file=run.full_path(beside),
            parameter=member.param,
            expected=f"{want[0]} elements of {want[1]}",
            found=f"shape {weight.shape} of {weight.storage.dtype}",
            fix="put the files of one save into the folder",
        )


def check_weights(
    run: NativeRun, rank: int, most: int = SAMPLES, runs: int = 1, run_elems: int = 1
) -> None:
    """Samples a partition: its masters, rounded, are the weights beside them, or it is of another
    run. Of at most that many parameters, evenly chosen, as many runs are compared as `spread`
    gives."""
    samples = _samples_of(run, rank, most, runs, run_elems)
    _prefetch(run, samples)
    for sample, starts, elems in samples:
        _check_runs(run, sample, starts, elems)


def _samples_of(
    run: NativeRun, rank: int, most: int = SAMPLES, runs: int = 1, run_elems: int = 1
) -> list[_Runs]:
    """What `check_weights` compares."""
    return [
        (sample, *spread(sample[1].high - sample[1].low, runs, run_elems))
        for sample in _sampled(run, rank, most)
    ]


def prefetch_checked(run: NativeRun, names: Collection[str], allow: Collection[str]) -> None:
    """Lets storage begin with what `check_file` reads of these files besides their ends: an object
    store answers many requests in the time of one."""
    for name in names:
        if name in run.names.optimizer.values():
            run.prefetch_scalars(name, run.tree(name))
    if "stale" in allow or run.contents.keeper not in COMPARED:
        return
    ranks = [run.rank_of_file(*at) for at, name in run.names.optimizer.items() if name in names]
    _prefetch(run, [one for rank in ranks for one in _samples_of(run, rank)])


def _prefetch(run: NativeRun, samples: Sequence[_Runs]) -> None:
    """Lets storage begin with what is compared next."""
    for sample, starts, elems in samples:
        for name, storage, first in _places(run, sample):
            size = ITEMSIZE[storage.dtype]
            for start in starts:
                run.file(name).prefetch(storage, (first + start) * size, elems * size)


def spread(elems: int, runs: int, run_elems: int) -> tuple[range, int]:
    """Where runs begin, and how many elements each has: all of few elements, else a single run in
    the middle, else runs at both ends and evenly between them."""
    if elems <= runs * run_elems:
        return range(1), elems
    if runs == 1:
        middle = (elems - run_elems + 1) // 2
        return range(middle, middle + 1), run_elems
    run_elems += (elems - run_elems) % (runs - 1)  # that the last one ends with the last element
    step = (elems - run_elems) // (runs - 1)
    return range(0, elems - run_elems + 1, step), run_elems


def _check_runs(run: NativeRun, sample: _Sample, starts: range, run_elems: int) -> None:
    """Raises ForeignFileError where a master, rounded, is not the weight."""
    import torch  # inspecting a checkpoint must not need it

    slot, fragment, name, weight, beside = sample
    where = run.where(slot)
    member = run.manifest.buffers[slot.buffer].members[fragment.member]
    _require_like_master(run, member, weight, beside)
    ours, theirs = (
        _elements(run.file(file), storage, first, starts, run_elems)
        for file, storage, first in _places(run, sample)
    )
    if not is_rounded(ours, theirs):
        model = run.file(beside)
        for file, record in ((where.file, where.record), (model, model.record(weight.storage))):
            file.check(record)  # damage is the cause of a difference, where there is some
        bits = [one.view(torch.uint8) for one in (ours.to(theirs.dtype), theirs)]
        index = int((bits[0] != bits[1]).nonzero()[0]) // ITEMSIZE[weight.storage.dtype]
        raise ForeignFileError(
            "the master weights are not those of the model file",
            file=where.file.path,
            parameter=name,
            expected=f"{theirs[index].item()} as in {beside}",
            found=f"{ours[index].item()}",
            fix="put the files of one save into the folder; if masters were changed on "
            'purpose, load with --allow stale (Python: allow={"stale"})',
        )


def _places(run: NativeRun, sample: _Sample) -> tuple[_Place, _Place]:
    """Where a fragment begins, as masters and as weights."""
    slot, fragment, _, weight, beside = sample
    masters, name = run.ref_of(slot)
    return (
        (name, masters.storage, masters.offset_elems + fragment.offset),
        (beside, weight.storage, weight.offset_elems + fragment.low),
    )


def _sampled(run: NativeRun, rank: int, most: int) -> Iterator[_Sample]:
    """Some fragments of a rank's partitions whose weights are in a file beside them."""
    manifest = run.manifest
    for index, cut, part in manifest.parts_of(rank):
        buffer = manifest.buffers[index]
        if not buffer.stepped:
            continue
        fragments = list(buffer.fragments(part))
        for fragment in fragments[:: max(1, len(fragments) // most)]:
            name = buffer.members[fragment.member].param
            weight, beside = run.weight(name, cut)
            # Of a tied parameter only the first stage's copy is in a layer file, and the others
            # need not be equal: what a stage has of a tied module without using it stays as it was
            # initialised.
            comparable = isinstance(weight, TensorRef) and weight.is_contiguous
            if comparable and manifest.is_read(name, index):
                yield Slot(index, cut, part, MASTER), fragment, name, weight, beside


def _elements(file: PtFile, storage: StorageRef, first: int, starts: range, run_elems: int) -> Any:
    """Runs, one after the other; they begin at `starts` after an element of a storage."""
    import torch

    size, run_bytes = ITEMSIZE[storage.dtype], run_elems * ITEMSIZE[storage.dtype]
    rows = range((first + starts[0]) * size, (first + starts[-1]) * size + 1, starts.step * size)
    data = bytearray(len(starts) * run_bytes)
    places = range(0, len(data), run_bytes)
    file.read_rows_into(file.record(storage), rows, run_bytes, memoryview(data), places)
    return torch.frombuffer(data, dtype=getattr(torch, storage.dtype))


# ---- trained weights
#
# The weights that a model computed with, which DeepSpeed saves beside the masters: half of their
# bytes in bf16.


# What is compared with the masters of each part of a parameter. One element of some parameters, as
# `check` compares them, says of which run all files are; but one file among many (of a layer, or of
# an expert) may be of a step before, from which few weights have changed: of an embedding the rows
# of the tokens that were seen. The first ones are the most frequent, and rows for padding and for
# tokens that were added, which programs write by hand, stand at the ends.
RUNS, RUN_ELEMS = 3, 512


def trained_weights(run: NativeRun) -> TrainedWeights | None:
    """The weights in the files of a checkpoint; None where they have not all of them, where there
    are no masters beside them, and where several are averaged: the mean of masters is rounded once.
    Raises ForeignFileError for one that is not its master, rounded."""
    if run.contents.keeper not in COMPARED or _averaged(run.manifest):
        return None
    manifest = _manifest(run)
    held: dict[tuple[int, Coords], tuple[TensorRef, str]] = {}
    for index, buffer in enumerate(manifest.buffers):
        want = buffer.length, dict(buffer.states)[VALUE]
        for cut in manifest.cuts_of(buffer):
            ref, name = run.weight(buffer.members[0].param, cut)
            if not isinstance(ref, TensorRef) or not ref.is_contiguous:
                return None
            if (ref.numel, ref.storage.dtype) != want:
                return None
            held[index, cut] = ref, name
    for part, mp in run.names.optimizer:
        check_weights(run, run.rank_of_file(part, mp), sys.maxsize, RUNS, RUN_ELEMS)
    return TrainedWeights(manifest, run, held)


def _averaged(manifest: Manifest) -> bool:
    """Whether ranks have copies of a parameter that may differ."""
    return any(
        spec.layout.mean_over and manifest.mesh.size(spec.layout.mean_over) > 1
        for spec in manifest.params
    )


def _manifest(run: NativeRun) -> Manifest:
    """Every parameter in a buffer of its own, in the dtype of training."""
    whole = run.manifest
    buffers = [buffer for buffer in whole.buffers if not buffer.stepped]
    for spec in whole.params:
        if spec.name not in whole.holders or not whole.first_holder(spec.name)[0].stepped:
            continue
        local = spec.layout.local_shape(spec.name, spec.shape, run.mesh.first_shares())
        axes, states = run.partition_ranks.axes(spec.name), ((VALUE, spec.dtype),)
        own = alone(spec.name, math.prod(local), states, axes=axes)
        buffers += shares(run, spec, own)
    return Manifest(Keeper.WEIGHTS, whole.mesh, whole.params, tuple(buffers), ties=whole.ties)
