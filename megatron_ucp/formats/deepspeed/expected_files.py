"""Which files a tag of DeepSpeed's own must have."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from megatron_ucp.core.experts import file_rank
from megatron_ucp.errors import ForeignFileError
from megatron_ucp.formats.deepspeed.files import (
    expert_file_name,
    expert_optimizer_name,
    missing_files,
    missing_layers,
    model_name,
    optimizer_name,
)
from megatron_ucp.formats.deepspeed.run import NativeRun
from megatron_ucp.formats.deepspeed.weights import shapes_by_group

# ---- expected files
#
# Which files a tag of DeepSpeed's own must have: derived from what its model files say of the
# run, never from what lies in the folder.
#
# | what says it | what must be there |
# |---|---|
# | `mp_world_size`, and at ZeRO-3 `dp_world_size` | a model file of each rank |
# | `param_shapes`, or ZeRO-3 | an optimizer file of each partition of each model-parallel rank |
# | names in `param_shapes` of a pipeline | a file of each layer, of each tensor-parallel rank |
# | `num_experts` | a file of each expert; at stage 0 an optimizer file of each of their ranks |
#
# DeepSpeed writes model files first. So a save that was killed lacks a whole class of files,
# which no other file of that class can show.


_WEIGHTS = (
    "; or take the weights alone, without the optimizer's states: --allow weights (Python: "
    'allow={"weights"}, of a load with load_optimizer_states=False too)'
)


def require_rank_files(run: NativeRun) -> None:
    """Raises NotFoundError where a model file or an optimizer file of the run's ranks is missing,
    ForeignFileError where there is one too many."""
    folder, names, dp, ranks = run.folder, run.names, run.dp, run.model_ranks
    parts: Iterable[int | None] = range(dp) if names.is_partitioned else (None,)
    wanted = ((part, rank) for rank in range(ranks) for part in parts)
    count = ranks * (dp if names.is_partitioned else 1)
    said = f"model-parallel ranks 0 to {ranks - 1}" if ranks > 1 else "model-parallel rank 0"
    if names.is_partitioned:
        said = f"{dp} partitions of {said}"
    if lost := _lost(wanted, count, names.model):
        number, (part, rank) = lost
        raise missing_files(
            "model file",
            number,
            folder / model_name(rank, part),
            said,
            f"{len(names.model)} model file{'s' if len(names.model) != 1 else ''}",
        )
    if max(rank for _, rank in names.model) >= ranks:
        raise _too_many(run, "model files than the run had ranks", said, names.model.values())
    if run.has_optimizer_files:
        _require_optimizer_files(run, dp, ranks)


def _require_optimizer_files(run: NativeRun, dp: int, ranks: int) -> None:
    folder, names = run.folder, run.names
    said = f"{dp} partitions of {ranks} model-parallel ranks"
    if len(names.prefixes) > 1:
        raise ForeignFileError(
            "optimizer files of two precisions lie in one folder",
            file=folder,
            expected="one prefix",
            found=" and ".join(repr(prefix) for prefix in names.prefixes),
        )
    wanted = ((part, rank) for part in range(dp) for rank in range(ranks))
    if lost := _lost(wanted, dp * ranks, names.optimizer):
        number, (part, rank) = lost
        raise missing_files(
            "optimizer file",
            number,
            folder / optimizer_name(part, rank, next(iter(names.prefixes), "")),
            said,
            f"no file of partition {part}, model-parallel rank {rank}",
            "" if names.is_partitioned else _WEIGHTS,
        )
    if len(names.optimizer) != dp * ranks:
        found = names.optimizer.values()
        raise _too_many(run, "optimizer files than the run had partitions", said, found)


def require_layer_files(run: NativeRun) -> None:
    """Raises NotFoundError where a pipeline lacks the file of a layer whose parameters a stage's
    model file lists."""
    if not run.pipeline or run.meta.get("module") is not None:
        return
    wanted = [
        (int(layer), rank)
        for stage in range(run.mesh.pp)
        for layer in sorted(_layers(run, run.model_of(stage * run.mesh.tp)), key=int)
        for rank in range(run.mesh.tp)
    ]
    if lost := _lost(wanted, len({*wanted}), run.names.layers):
        number, (layer, rank) = lost
        raise missing_layers(run.folder, number, layer, rank)


def _layers(run: NativeRun, file: str) -> set[str]:
    """Positions of the layers whose parameters a model file lists."""
    listed = shapes_by_group(run.tree(file), run.full_path(file)) or []
    heads = {name.partition(".")[0] for named in listed for name in named}
    return {head for head in heads if head.isdecimal() and len(head) < 8}


# ------------------------------------------------ experts


def require_expert_files(run: NativeRun) -> None:
    """Raises NotFoundError where an expert of a stage has no file, or at stage 0 an expert-parallel
    rank no optimizer file."""
    if not run.meta.get("num_experts") or (run.experts.autoep and run.names.is_partitioned):
        return
    wanted = list(dict.fromkeys(_experts(run)))
    if lost := _lost(wanted, len(wanted), run.names.experts):
        number, (layer, expert, rank) = lost
        raise missing_files(
            "expert file",
            number,
            run.folder / expert_file_name(layer, expert, rank),
            f"a file of each of {len(wanted)} experts and ranks that cut them",
            f"no file of expert {expert} of mixture {layer}, model-parallel rank {rank}",
        )
    if run.has_optimizer_files or run.told.weights:
        return
    places = [
        (ep, file_rank(run.mesh, stage, ep, etp))
        for stage in range(run.mesh.pp)
        for ep in range(run.mesh.ep)
        for etp in range(run.mesh.etp)
    ]
    if gone := _lost(places, len({*places}), run.names.expert_optimizer):
        number, (ep, rank) = gone
        raise missing_files(
            "expert optimizer file",
            number,
            run.folder / expert_optimizer_name(ep, rank),
            f"{run.mesh.ep} expert-parallel ranks, as the groups of the optimizer say",
            f"no file of expert-parallel rank {ep}, model-parallel rank {rank}",
            _WEIGHTS,
        )


def _experts(run: NativeRun) -> Iterator[tuple[int, int, int]]:
    """(Mixture of the stage, expert, model-parallel rank) of each expert file, as the stages' model
    files count their experts."""
    mesh = run.mesh
    for stage in range(mesh.pp):
        counts: Any = run.tree(run.model_of(stage * mesh.tp)).get("num_experts")
        for layer, count in enumerate(counts if isinstance(counts, list) else []):
            if type(count) is not int or count % mesh.ep or not 0 < count < 2**20:
                continue  # the readers of the experts say what is wrong with it
            for expert in range(count):
                for etp in range(mesh.etp):
                    ep = expert * mesh.ep // count
                    yield layer, expert, file_rank(mesh, stage, ep, etp)


# ------------------------------------------------ counting


_MOST_COUNTED = 2**20  # places; a hostile file can say more ranks than any machine has


def _lost(wanted: Iterable[Any], count: int, there: Mapping[Any, str]) -> tuple[int, Any] | None:
    """How many of `count` places have no file, and the first one of these; None where each has
    one."""
    missing = (place for place in wanted if place not in there)
    first = next(missing, None)
    if first is None:
        return None
    more = count - len(there) - 1 if count > _MOST_COUNTED else sum(1 for _ in missing)
    return 1 + more, first


def _too_many(run: NativeRun, what: str, expected: str, found: Collection[str]) -> ForeignFileError:
    return ForeignFileError(
        f"there are more {what}",
        file=run.folder,
        expected=expected,
        found=f"{len(found)} files",
        fix="put the files of one save, and no others, into the folder",
    )
