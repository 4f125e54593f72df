"""Which meshes of a conversion experts can be put on."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_ucp.core.experts import check_files, in_own_file, is_stacked
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import EXPERT_RANK, Mesh
from megatron_ucp.errors import LayoutError, UnsupportedError, UsageError
from megatron_ucp.formats.deepspeed.autoep import group_name


def check_experts(source: Manifest, mesh: Mesh, file: str) -> None:
    """Raises UsageError for expert-parallel ranks of a model without experts, LayoutError where
    they don't divide its experts."""
    for spec in source.params:
        _expert_rank(spec, mesh, file)
    if mesh.ep > 1 and not any(spec.expert for spec in source.params):
        raise UsageError(
            "this axis is not converted: the model has no experts",
            file=file,
            expected=f"{EXPERT_RANK}=1",
            found=mesh,
            fix="leave this axis out of the mesh (--mesh; Python: mesh=)",
        )


def check_trained(source: Manifest, mesh: Mesh, file: str) -> None:
    """Raises UnsupportedError for experts that DeepSpeed does not train at ZeRO-3 (all but AutoEP's
    where other ranks share them, its own layers' in any case), and as `check_files`."""
    for spec in source.params:
        if not spec.expert:
            continue
        check_files(mesh.cut_of_dense, mesh.ep, mesh.cut_of_experts, file)
        of_deepspeed = in_own_file(spec.name, False)
        if mesh.zero == 3 and not is_stacked(spec.name) and (of_deepspeed or mesh.experts_apart):
            raise UnsupportedError(
                "DeepSpeed does not train these experts at ZeRO-3"
                + ("" if of_deepspeed else " on ranks of their own"),
                file=file,
                parameter=spec.name,
                expected="ZeRO 0, 1 or 2" + ("" if of_deepspeed else f", or {EXPERT_RANK}=1"),
                found=mesh,
                fix="choose such a mesh (--mesh; Python: mesh=)",
            )


def check_stages(
    by_stage: Sequence[Collection[str]], source: Manifest, mesh: Mesh, file: str
) -> None:
    """Raises UnsupportedError for a stage without experts, where other ranks share them:
    DeepSpeed's pipeline waits for ever there."""
    experts = {spec.name for spec in source.params if spec.expert}
    without = [stage for stage, names in enumerate(by_stage) if experts.isdisjoint(names)]
    if mesh.experts_apart and experts and without:
        raise UnsupportedError(
            "a stage of the pipeline has no layer with experts",
            file=file,
            expected=f"experts on each of {len(by_stage)} stages",
            found=f"none on stage {without[0]}",
            fix="use fewer stages, or another division of the layers",
        )


def held_by(
    by_stage: Sequence[frozenset[str]], source: Manifest, mesh: Mesh, file: str
) -> list[list[frozenset[str]]]:
    """What a place of a mesh holds of the parameters of each stage, by stage and expert-parallel
    rank: everything but other ranks' experts.

    Raises LayoutError where the expert-parallel ranks don't divide the experts.
    """
    out: list[list[frozenset[str]]] = []
    for names in by_stage:
        ranks = {name: _expert_rank(source.by_name[name], mesh, file) for name in names}
        of: list[set[str]] = [set() for _ in range(mesh.ep)]
        for name, rank in ranks.items():
            for held in of if rank is None else [of[rank]]:
                held.add(name)
        out.append([frozenset(held) for held in of])
    return out


def _expert_rank(spec: ParamSpec, mesh: Mesh, file: str) -> int | None:
    """The expert-parallel rank that has an expert's parameter; None of what all have."""
    if spec.expert is None:
        return None
    number, count = spec.expert
    if count % mesh.ep:
        works = [n for n in range(1, count + 1) if not count % n]
        raise LayoutError(
            "the expert-parallel size does not divide the experts of a layer",
            file=file,
            parameter=spec.name,
            expected=f"a divisor of {count}",
            found=mesh.ep,
            fix=f"use an expert-parallel size of {', '.join(map(str, works))}",
            id="does-not-divide",
        )
    return number // (count // mesh.ep)


def notes_of_groups(source: Manifest, mesh: Mesh, listed: bool) -> list[str]:
    """What to know of parameter groups: DeepSpeed's own experts have some of their own at any
    size, others where other ranks share them alone."""
    ordinary = any(spec.expert and not in_own_file(spec.name, False) for spec in source.params)
    if listed or not ordinary or mesh.experts_apart or not source.mesh.experts_apart:
        return []
    return [
        "the experts keep parameter groups of their own, as in the source: list the groups "
        "(--groups) for a job that has them among all others, as megatron-core's at "
        f"{EXPERT_RANK}=1"
    ]


def notes_of_universal(source: Manifest) -> list[str]:
    """What to know of a universal folder with experts."""
    if not any(spec.expert for spec in source.params):
        return []
    return [
        f"stock DeepSpeed reads experts of this folder rightly at {EXPERT_RANK}=1 alone: it takes "
        "those of every rank for the first ones; convert to native files for more ranks"
    ]


def marks_on(marks: Mapping[str, Any], mesh: Mesh, source: Mesh) -> dict[str, Any]:
    """What marks a group on a mesh: DeepSpeed calls one of experts as their expert-parallel size,
    and looks for the ranks that share them under the name."""
    if marks.get("name") != group_name(source.ep):
        return dict(marks)
    return {**marks, "name": group_name(mesh.ep)}
