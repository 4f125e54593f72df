"""Which files a tag of DeepSpeed's own must have: derived from what its model files say of the run,
never from what lies in the folder.

| what says it | what must be there |
|---|---|
| `mp_world_size`, and at ZeRO-3 `dp_world_size` | a model file of each rank |
| `param_shapes`, or ZeRO-3 | an optimizer file of each partition of each model-parallel rank |
| names in `param_shapes` of a pipeline | a file of each layer, of each tensor-parallel rank |
| `num_experts` | a file of each expert; at stage 0 an optimizer file of each expert-parallel rank |

DeepSpeed writes model files first. So a save that was killed lacks a whole class of files, which
no other file of that class can show.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from megatron_ucp.core.experts import file_rank
from megatron_ucp.errors import ForeignFileError
from megatron_ucp.formats.deepspeed.doctor import saved_no_bf16_optimizer
from megatron_ucp.formats.deepspeed.model_file import shapes_by_group
from megatron_ucp.formats.deepspeed.native_steps import OpenedFiles, RunRanks
from megatron_ucp.formats.deepspeed.paths import (
    TagFiles,
    expert_file_name,
    expert_optimizer_name,
    missing_files,
    missing_layers,
    model_name,
    optimizer_name,
)

_WEIGHTS = (
    "; or take the weights alone, without the optimizer's states: --allow weights (Python: "
    'allow={"weights"}, of a load with load_optimizer_states=False too)'
)


def first_model_file(names: TagFiles) -> str:
    """The model file that says what kind of run wrote the others: that of the first rank, or where
    it is missing of the first one that is left."""
    return names.model[min(names.model, key=lambda at: (at[0] is not None, at[1], at[0] or 0))]


def is_partitioned(names: TagFiles) -> bool:
    """Whether each partition has a model file, as at ZeRO-3, where no model file holds weights."""
    return all(part is not None for part, _ in names.model)


def has_optimizer_files(opened: OpenedFiles) -> bool:
    """Whether the run's optimizer lies in files of its own, one for each partition of each
    model-parallel rank. Of a load of the weights alone nobody asks for them."""
    if opened.told.weights:
        return False
    said = opened.meta.get("param_shapes") is not None
    lost = saved_no_bf16_optimizer(opened.meta.get("ds_config"), opened.meta.get("ds_version"))
    return bool(opened.names.optimizer) or is_partitioned(opened.names) or (said and not lost)


def require_rank_files(opened: OpenedFiles, dp: int, ranks: int) -> None:
    """Raises NotFoundError where a model file or an optimizer file of the run's ranks is missing,
    ForeignFileError where there is one too many. `ranks` are the model-parallel ones."""
    folder, names = opened.files.folder, opened.names
    parts: Iterable[int | None] = range(dp) if is_partitioned(names) else (None,)
    wanted = ((part, rank) for rank in range(ranks) for part in parts)
    count = ranks * (dp if is_partitioned(names) else 1)
    said = f"model-parallel ranks 0 to {ranks - 1}" if ranks > 1 else "model-parallel rank 0"
    if is_partitioned(names):
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
        raise _too_many(opened, "model files than the run had ranks", said, names.model.values())
    if has_optimizer_files(opened):
        _require_optimizer_files(opened, dp, ranks)


def _require_optimizer_files(opened: OpenedFiles, dp: int, ranks: int) -> None:
    folder, names = opened.files.folder, opened.names
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
            "" if is_partitioned(names) else _WEIGHTS,
        )
    if len(names.optimizer) != dp * ranks:
        found = names.optimizer.values()
        raise _too_many(opened, "optimizer files than the run had partitions", said, found)


def require_layer_files(step: RunRanks) -> None:
    """Raises NotFoundError where a pipeline lacks the file of a layer whose parameters a stage's
    model file lists."""
    if not step.pipeline or step.meta.get("module") is not None:
        return
    wanted = [
        (int(layer), rank)
        for stage in range(step.mesh.pp)
        for layer in sorted(_layers(step, step.model_of(stage * step.mesh.tp)), key=int)
        for rank in range(step.mesh.tp)
    ]
    if lost := _lost(wanted, len({*wanted}), step.names.layers):
        number, (layer, rank) = lost
        raise missing_layers(step.files.folder, number, layer, rank)


def _layers(step: RunRanks, file: str) -> set[str]:
    """Positions of the layers whose parameters a model file lists."""
    listed = shapes_by_group(step.files.tree(file), step.files.full_path(file)) or []
    heads = {name.partition(".")[0] for named in listed for name in named}
    return {head for head in heads if head.isdecimal() and len(head) < 8}


# ------------------------------------------------ experts


def require_expert_files(step: RunRanks) -> None:
    """Raises NotFoundError where an expert of a stage has no file, or at stage 0 an expert-parallel
    rank no optimizer file."""
    if not step.meta.get("num_experts") or (step.experts.autoep and is_partitioned(step.names)):
        return
    wanted = list(dict.fromkeys(_experts(step)))
    if lost := _lost(wanted, len(wanted), step.names.experts):
        number, (layer, expert, rank) = lost
        raise missing_files(
            "expert file",
            number,
            step.files.folder / expert_file_name(layer, expert, rank),
            f"a file of each of {len(wanted)} experts and ranks that cut them",
            f"no file of expert {expert} of mixture {layer}, model-parallel rank {rank}",
        )
    if has_optimizer_files(step) or step.told.weights:
        return
    places = [
        (ep, file_rank(step.mesh, stage, ep, etp))
        for stage in range(step.mesh.pp)
        for ep in range(step.mesh.ep)
        for etp in range(step.mesh.etp)
    ]
    if gone := _lost(places, len({*places}), step.names.expert_optimizer):
        number, (ep, rank) = gone
        raise missing_files(
            "expert optimizer file",
            number,
            step.files.folder / expert_optimizer_name(ep, rank),
            f"{step.mesh.ep} expert-parallel ranks, as the groups of the optimizer say",
            f"no file of expert-parallel rank {ep}, model-parallel rank {rank}",
            _WEIGHTS,
        )


def _experts(step: RunRanks) -> Iterator[tuple[int, int, int]]:
    """(Mixture of the stage, expert, model-parallel rank) of each expert file, as the stages' model
    files count their experts."""
    mesh = step.mesh
    for stage in range(mesh.pp):
        counts: Any = step.files.tree(step.model_of(stage * mesh.tp)).get("num_experts")
        for layer, count in enumerate(counts if isinstance(counts, list) else []):
            if type(count) is not int or count % mesh.ep or not 0 < count < 2**20:
                continue  # the readers of the experts say what is wrong with it
            for number in range(count):
                for etp in range(mesh.etp):
                    ep = number * mesh.ep // count
                    yield layer, number, file_rank(mesh, stage, ep, etp)


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


def _too_many(
    opened: OpenedFiles, what: str, expected: str, found: Collection[str]
) -> ForeignFileError:
    return ForeignFileError(
        f"there are more {what}",
        file=opened.files.folder,
        expected=expected,
        found=f"{len(found)} files",
        fix="put the files of one save, and no others, into the folder",
    )
