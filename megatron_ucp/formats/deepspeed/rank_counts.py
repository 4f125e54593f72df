"""How many ranks of which kind wrote the files of a tag folder."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import DamagedFileError, UnsupportedError
from megatron_ucp.formats.deepspeed.expected_files import has_optimizer_files, require_rank_files
from megatron_ucp.formats.deepspeed.expert_files import ExpertFiles
from megatron_ucp.formats.deepspeed.native_steps import OpenedFiles
from megatron_ucp.formats.deepspeed.paths import TagFiles, expert_file_name, missing_files
from megatron_ucp.formats.deepspeed.tag_folder import TagFolder
from megatron_ucp.formats.plain_values import number


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
