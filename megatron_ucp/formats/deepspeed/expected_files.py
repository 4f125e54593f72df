"""Which files a tag of DeepSpeed's own must have, and how many ranks of which kind wrote them."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from megatron_ucp.core.experts import file_rank
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import DamagedFileError, ForeignFileError, UnsupportedError
from megatron_ucp.formats.deepspeed.experts import ExpertFiles
from megatron_ucp.formats.deepspeed.files import (
    TagFiles,
    TagFolder,
    expert_file_name,
    expert_optimizer_name,
    missing_files,
    missing_layers,
    model_name,
    optimizer_name,
)
from megatron_ucp.formats.deepspeed.lost_states import saved_no_bf16_optimizer
from megatron_ucp.formats.deepspeed.run import OpenedFiles, RunRanks
from megatron_ucp.formats.deepspeed.weights import shapes_by_group
from megatron_ucp.formats.plain_values import number

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


# ---- rank counts
#
# How many ranks of which kind wrote the files of a tag folder.


def count_ranks(opened: OpenedFiles, experts: ExpertFiles) -> tuple[Mesh, int]:
    """The mesh without its ZeRO stage, as the model file says it, and the optimizer files of one
    model-parallel rank (1 without any). Raises as `require_rank_files`, and DamagedFileError for
    what is no number of ranks."""
    folder, meta, file = opened.files, opened.meta, opened.main_file
    dp, ranks = (_count(meta, key, file) for key in ("dp_world_size", "mp_world_size"))
    require_rank_files(opened, dp, ranks)
    partitions = dp if has_optimizer_files(opened) else 1
    stages, tp = _degrees(opened, ranks)
    ep, etp = _of_experts(folder, meta, file, tp, experts)
    return Mesh(tp=tp, pp=stages, dp=dp, ep=ep, etp=etp), partitions


def _of_experts(
    folder: TagFolder, meta: Mapping[str, Any], file: str, tp: int, experts: ExpertFiles
) -> tuple[int, int]:
    """Expert-parallel and expert-tensor-parallel ranks."""
    if folder.recorded is not None:
        return folder.recorded.mesh.ep, folder.recorded.mesh.etp
    config: Any = meta.get("ds_config")
    if isinstance(config, dict) and config.get(_OTHER_ORDER) and meta.get("num_experts"):
        raise UnsupportedError(
            "the ranks of this run were divided in another order among the experts",
            file=file,
            expected=f"no {_OTHER_ORDER}",
            found=_OTHER_ORDER,
            fix="load it with DeepSpeed at the same sizes",
        )
    if folder.names.experts or _is_in_shards(folder, meta, experts):
        return experts.ranks(meta, file), _cuts_of_experts(folder.names, tp)
    if meta.get("num_experts"):
        counts: Any = meta["num_experts"]
        known = [n for n in (counts if isinstance(counts, list) else []) if type(n) is int]
        raise missing_files(
            "expert file",
            max(2, sum(known)),
            folder.folder / expert_file_name(0, 0, 0),
            f"a file of each of {known or number(counts)} experts: without them "
            "local numbers say nothing",
            "no such file",
        )
    return 1, tp


def _cuts_of_experts(names: TagFiles, tp: int) -> int:
    """Ranks that cut an expert: each one has a file of it. DeepSpeed's own layers have one share or
    one copy on each tensor-parallel rank."""
    files = Counter((layer, number, mp // tp) for layer, number, mp in names.experts)
    most = max(files.values(), default=tp)
    return next(size for size in range(most, tp + 1) if tp % size == 0)


_OTHER_ORDER = "use_data_before_expert_parallelism"


def _is_in_shards(folder: TagFolder, meta: Mapping[str, Any], experts: ExpertFiles) -> bool:
    """Whether the experts lie in the optimizer files alone, as AutoEP's do at ZeRO-3."""
    return bool(experts.autoep) and any(part is not None for part, _ in folder.names.model)


def _count(meta: Mapping[str, Any], key: str, file: str) -> int:
    """A number of ranks in the model file; 1 where it says nothing."""
    value = meta.get(key)
    if value is not None and (type(value) is not int or not 1 <= value <= 2**24):
        raise DamagedFileError(
            f"the model file says no number of ranks in {key}",
            file=file,
            expected="a whole number from 1",
            found=repr(number(value))[:80],
        )
    return value or 1


def _degrees(opened: OpenedFiles, ranks: int) -> tuple[int, int]:
    """Pipeline stages and tensor-parallel ranks."""
    folder = opened.files
    if not opened.pipeline:
        return 1, ranks
    degrees = opened.meta.get("checkpoint_parallel_dimensions")
    tp: Any = degrees.get("tp_degree") if isinstance(degrees, dict) else None
    if tp is None:  # older files: there is a layer file for every tensor-parallel rank
        tp = 1 + max((rank for _, rank in folder.names.layers), default=0)
    if type(tp) is not int or tp < 1 or ranks % tp:
        raise DamagedFileError(
            "the model file does not say how its ranks divide into stages and tensor-parallel "
            "ranks",
            file=opened.main_file,
            expected=f"a divisor of {ranks}",
            found=repr(number(tp))[:80],
        )
    return ranks // tp, tp
