"""How many ranks of which kind wrote the files of a tag folder."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import DamagedFileError, ForeignFileError, NotFoundError, UnsupportedError
from megatron_ucp.formats.deepspeed.expert_files import ExpertFiles
from megatron_ucp.formats.deepspeed.native_steps import OpenedFiles
from megatron_ucp.formats.deepspeed.paths import TagFiles, optimizer_name
from megatron_ucp.formats.deepspeed.tag_folder import TagFolder
from megatron_ucp.formats.plain_values import number


def count_ranks(opened: OpenedFiles, experts: ExpertFiles) -> tuple[Mesh, int]:
    """The mesh without its ZeRO stage, as the model file says it, and the optimizer files of one
    model-parallel rank (1 without any). As many files must be there: raises NotFoundError for one
    that is missing, ForeignFileError for one too many, DamagedFileError for what is no number of
    ranks."""
    folder, meta, file = opened.files, opened.meta, opened.main_file
    dp, ranks = (_count(meta, key, file) for key in ("dp_world_size", "mp_world_size"))
    partitions = _partitions(folder, dp, ranks)
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
        raise NotFoundError(
            "the expert files are missing, and without them local numbers say nothing",
            file=folder.folder,
            expected=f"layer_*_expert_*_model_states.pt for {meta['num_experts']} experts",
            found="no such file",
            fix="restore them, or load another tag",
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


def _partitions(folder: TagFolder, dp: int, ranks: int) -> int:
    """Optimizer files of one model-parallel rank."""
    names = folder.names
    prefixes = names.prefixes
    if not names.optimizer or not prefixes:
        return 1
    if len(names.prefixes) > 1:
        raise ForeignFileError(
            "optimizer files of two precisions lie in one folder",
            file=folder.folder,
            expected="one prefix",
            found=" and ".join(repr(prefix) for prefix in names.prefixes),
        )
    wanted = ((part, rank) for part in range(dp) for rank in range(ranks))
    missing = next((place for place in wanted if place not in names.optimizer), None)
    if missing is not None:
        raise NotFoundError(
            "an optimizer file is missing",
            file=folder.folder / optimizer_name(*missing, prefixes[0]),
            expected=f"{dp} partitions of {ranks} model-parallel ranks",
            found=f"no file of partition {missing[0]}, model-parallel rank {missing[1]}",
            fix="restore it, or load another tag",
        )
    if len(names.optimizer) != dp * ranks:
        raise ForeignFileError(
            "there are more optimizer files than the run had partitions",
            file=folder.folder,
            expected=dp * ranks,
            found=len(names.optimizer),
        )
    return dp


def _degrees(opened: OpenedFiles, ranks: int) -> tuple[int, int]:
    """Pipeline stages and tensor-parallel ranks."""
    folder = opened.files
    have = {mp for _, mp in folder.names.model}
    if len(have) != ranks or max(have) >= ranks:
        raise NotFoundError(
            "a model file is missing, or there is one too many",
            file=folder.folder,
            expected=f"model-parallel ranks 0 to {ranks - 1}",
            found=", ".join(map(str, sorted(have))),
            fix="restore the files of one save, or load another tag",
        )
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
