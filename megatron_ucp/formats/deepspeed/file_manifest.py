"""The manifest that follows from a tag's files alone."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import number_and_count
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import Manifest, ParamSpec, Tie
from megatron_ucp.core.mesh import expert_rank_of
from megatron_ucp.errors import ModelMismatchError, RuleError
from megatron_ucp.formats.deepspeed.doctor import NOT_SAVED, not_saved
from megatron_ucp.formats.deepspeed.flat_order import shape_of
from megatron_ucp.formats.deepspeed.frozen import unexplained, values_of
from megatron_ucp.formats.deepspeed.model_file import (
    frozen_shapes,
    shapes_by_group,
    training_dtype,
)
from megatron_ucp.formats.deepspeed.native_steps import Optimizers
from megatron_ucp.formats.deepspeed.paths import at_tp
from megatron_ucp.formats.deepspeed.stage_0_files import PlainFile
from megatron_ucp.formats.deepspeed.steppers import with_rules
from megatron_ucp.formats.open_file import same_bytes
from megatron_ucp.formats.plain_values import number
from megatron_ucp.formats.pt.values import TensorRef


def manifest_of(step: Optimizers) -> Manifest:
    """The manifest that follows from the files alone, with what it says of states that were
    not saved."""
    found = _held(step)
    _refuse_renamed(step, found)
    names, meta = step.names, step.meta
    has_optimizer = bool(names.optimizer or names.expert_optimizer or meta.get("optimizer"))
    lost = not_saved(meta.get("ds_config"), found, has_optimizer)
    return replace(found, run={**found.run, NOT_SAVED: lost}) if lost else found


def _held(step: Optimizers) -> Manifest:
    found = step.contents
    module = step.weights.module()
    members = [member.param for buffer in found.buffers for member in buffer.members]
    flat = dict.fromkeys(members)
    shapes = _flat_shapes(step)
    dtype = training_dtype(step.meta, module, shapes)
    ties = _ties(step, flat)
    params = _params(step, flat, shapes, dtype)
    if step.uneven:
        _check_shares(step, params)
    # a save without frozen weights leaves further names of tied ones in the model file
    told = step.recorded.ties if step.recorded else ()
    aliases = {alias for tie in (*ties, *told) for alias in tie.aliases}
    values = _values(step, module, {*flat, *aliases})
    return Manifest(
        found.keeper,
        replace(step.mesh, zero=_zero_stage(step)),
        (*params, *(spec for spec, _ in values)),
        (*found.buffers, *(share for spec, one in values for share in shares(step, spec, one))),
        with_rules(found.groups, step.meta.get("ds_config")),
        ties,
        names=step.pipe_names if step.pipeline else {},
        run=run_of(step.meta),
    )


def run_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest's `run` says, of a model file."""
    return {key: number(meta.get(key)) for key in ("global_steps", "skipped_steps", "ds_version")}


def _ties(step: Optimizers, flat: Collection[str]) -> tuple[Tie, ...]:
    ties = step.weights.ties(flat)
    return (*ties, *_told_ties(step, flat, {alias for tie in ties for alias in tie.aliases}))


def _told_ties(step: Optimizers, flat: Collection[str], known: Collection[str]) -> Iterator[Tie]:
    """What the caller's model ties, where the files hold every name, which is not `known` as a tie:
    stock writes a mixture's model file at stage 0 so. Raises ModelMismatchError for names with
    other bytes than the first one."""
    like, module = step.told.like if step.recorded is None else None, step.weights.module()
    for tie in like.ties if like is not None else ():
        names = (tie.canonical, *tie.aliases)
        held = [name for name in names if isinstance(module.get(name), TensorRef)]
        first = next((name for name in held if name in flat), None)
        copies = tuple(name for name in held if name not in flat and name not in known)
        if first is None or not copies:
            continue
        for name in copies:
            if not all(_is_copy(step, first, name, tp) for tp in range(step.mesh.tp)):
                raise ModelMismatchError(
                    "two parameters are one in the model, and two in the checkpoint",
                    file=step.main_file,
                    parameter=name,
                    expected=f"the bytes of {first}, to which the model ties it",
                    found="others",
                    fix="build the model untied, as the run that wrote it did",
                )
        yield Tie(first, copies)


def _is_copy(step: Optimizers, first: str, name: str, tp: int) -> bool:
    """Whether two entries of the weights of a tensor-parallel rank are the same."""
    refs = [step.weights.module(tp)[one] for one in (first, name)]
    if refs[0].shape != refs[1].shape or not all(ref.is_contiguous for ref in refs):
        return False
    files = (step.weights.file_of(one, tp) for one in (first, name))
    return same_bytes(*map(step.files.place, files, refs))


def _params(
    step: Optimizers, flat: Iterable[str], shapes: Mapping[str, Ints], dtype: str
) -> list[ParamSpec]:
    """What the optimizer steps; `shapes` are those of the first rank, as far as files say."""
    # in a plain optimizer's file the weights are the masters, of whatever dtype the model is
    module = step.weights.module()
    plain = any(isinstance(reader, PlainFile) for reader in step.readers)
    return [
        _spec(
            step,
            name,
            shapes[name] if name in shapes else shape_of(step, module, name),
            step.weight_dtype(name) if plain else dtype,
            "trainable",
        )
        for name in flat
    ]


def _flat_shapes(step: Optimizers) -> dict[str, Ints]:
    """Rank-local shapes of what is flattened, as the model files say: of other expert-parallel
    ranks than the first only where no expert file has their experts' shapes."""
    out: dict[str, Ints] = {}
    everywhere = not step.names.experts
    for at in step.places:
        if expert_rank_of(at) and not everywhere:
            continue
        rank = step.mesh.rank_of(at, 0)
        file = step.model_of(step.file_place(rank)[1])
        name_of = step.names_at(rank, file)
        for named in shapes_by_group(step.files.tree(file), step.files.full_path(file)) or []:
            inside = step.experts.autoep.in_slices(named, step.files.full_path(file))
            for name, shape in inside.items():
                out.setdefault(name_of(name), shape)  # the first rank's
    return out


def _check_shares(step: Optimizers, params: Sequence[ParamSpec]) -> None:
    """Raises ModelMismatchError where another tensor-parallel rank than the first one has
    another share than the layout says."""
    for tp in range(1, step.mesh.tp):
        file = step.model_of(tp)
        held = dict(step.weights.module(tp))
        for named in shapes_by_group(step.files.tree(file), step.files.full_path(file)) or []:
            held |= named
        for spec in params:
            want = spec.layout.local_shape(spec.name, spec.shape, step.mesh.place(at_tp(tp)))
            found = getattr(held.get(spec.name), "shape", held.get(spec.name))
            if found != want and 0 not in want:
                _is_another(step, spec, found, want, file)


def _is_another(step: Optimizers, spec: ParamSpec, found: Any, want: Ints, file: str) -> NoReturn:
    raise ModelMismatchError(
        "the checkpoint's share of a parameter is not what its layout says",
        parameter=spec.name,
        file=step.files.full_path(file),
        found=found,
        expected=f"{want} of {spec.shape} at tp={step.mesh.tp}",
    )


def shares(step: Optimizers, spec: ParamSpec, buffer: FlatBuffer) -> Iterator[FlatBuffer]:
    """The buffer of a value: of one that ranks have different shares of, those of all ranks."""
    cuts = step.mesh.everywhere(buffer.axes) if step.uneven else []
    local = [
        spec.layout.local_shape(spec.name, spec.shape, dict(step.mesh.place(at))) for at in cuts
    ]
    if len({*local}) < 2:
        yield buffer
        return
    for at, shape in zip(cuts, local, strict=True):
        size = math.prod(shape)
        member = replace(buffer.members[0], size=size)
        length = -(-size // buffer.partitions) if buffer.rule == "each" else size
        if size:
            yield replace(buffer, members=(member,), length=length, at=at)


def _values(
    step: Optimizers, module: Mapping[str, Any], known: set[str]
) -> list[tuple[ParamSpec, FlatBuffer]]:
    """Frozen parameters and module buffers, one flat buffer for each."""
    return [
        (
            replace(_spec(step, one.name, one.shape, one.dtype, one.kind), order=one.order),
            one.buffer(step.spread.axes(one.name)),
        )
        for one in values_of(step, module, known)
    ]


def _refuse_renamed(step: Optimizers, found: Manifest) -> None:
    """Raises UnsupportedError where the weights lack parameters of the optimizer, and what
    looks like a frozen one may be one of them under another name. At ZeRO-3 the weights of
    both are elsewhere."""
    module = step.weights.module()
    lacking = [s for s in found.params if s.kind == "trainable" and s.name not in module]
    said = frozen_shapes(step.meta, step.main_file)
    frozen = [s for s in found.params if s.kind == "frozen" and s.name not in said]
    if lacking and frozen and found.keeper != Keeper.ZERO_3:
        alike = [s.name for s in frozen if s.shape in {one.shape for one in lacking}]
        name = next(iter(alike), frozen[0].name)
        raise unexplained(name, [s.name for s in lacking], step.main_file)


def _spec(step: Optimizers, name: str, local: Ints, dtype: str, kind: str) -> ParamSpec:
    """The parameter with the declared layout, whose share of one rank must have the shape in
    the file."""
    declared = step.declared.find(name, local, kind)
    expert = number_and_count(name, step.expert_counts)
    # where nothing cuts it another shape is an error of the comparison with the target
    cut = step.mesh.cut_of_dense if expert is None else step.mesh.cut_of_experts
    other = cut == 1 and (declared is None or declared.shape != local)
    if other or (declared is None and kind == "buffer"):
        return ParamSpec(name, local, dtype, kind, expert=expert)
    if declared is None:
        raise RuleError(
            "a tensor-parallel parameter of the checkpoint is not declared",
            parameter=name,
            file=step.main_file,
            expected="a parameter of the family",
            found="none",
            fix="build the model as the run that wrote the checkpoint did",
        )
    shares = step.mesh.shares()
    share = declared.layout.local_shape(name, declared.shape, shares)
    if share != local:
        _is_another(step, declared, local, share, step.model_name)
    return replace(declared, dtype=dtype, kind=kind, expert=expert)


def _zero_stage(step: Optimizers) -> int:
    keeper = step.contents.keeper
    if keeper == Keeper.ZERO_1_OR_2:
        return 2 if step.optimizer_tree(0).get("zero_stage") == 2 else 1
    return {Keeper.ZERO_3: 3, Keeper.BF16: 1}.get(keeper, 0)
