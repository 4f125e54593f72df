"""The manifest that follows from a tag's files alone, compared with the one that was recorded."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import number_and_count, with_all_experts
from megatron_ucp.core.flat import FlatBuffer, Member, alone
from megatron_ucp.core.manifest import ARGUMENTS, Manifest, ParamSpec, Tie
from megatron_ucp.core.mesh import expert_rank_of
from megatron_ucp.core.names import VALUE, Keeper
from megatron_ucp.core.values import ClassName, alike, shown
from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    ModelMismatchError,
    RuleError,
    UnsupportedError,
    some_of,
)
from megatron_ucp.formats.byte_files import same_bytes
from megatron_ucp.formats.deepspeed.config import DeepSpeedConfig
from megatron_ucp.formats.deepspeed.files import PATTERNS, at_tp
from megatron_ucp.formats.deepspeed.lost_states import NOT_SAVED, not_saved
from megatron_ucp.formats.deepspeed.megatron_deepspeed import arguments_of, flags_of_model
from megatron_ucp.formats.deepspeed.optimizers import (
    PlainFile,
)
from megatron_ucp.formats.deepspeed.run import NativeRun
from megatron_ucp.formats.deepspeed.weights import (
    buffer_names,
    frozen_shapes,
    is_extra_state,
    shapes_by_group,
    training_dtype,
)
from megatron_ucp.formats.megatron.run_state import ARGUMENTS_KEY
from megatron_ucp.formats.param_groups import number
from megatron_ucp.formats.pt.refs import TensorRef

# ---- evidence
#
# A recorded manifest against what the files say.


def difference(ours: object, theirs: object) -> dict[str, str]:
    """The first entries that differ, short enough for a message."""
    if (
        isinstance(ours, list | tuple)
        and isinstance(theirs, list | tuple)
        and len(ours) == len(theirs)
    ):
        for a, b in zip(ours, theirs, strict=True):
            if not alike(a, b):
                return difference(a, b)
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return _first_entry(dict[Any, Any](ours), dict[Any, Any](theirs))
    return {"expected": shown(ours), "found": shown(theirs)}


def _first_entry(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> dict[str, str]:
    """The first key under which two mappings that are not equal differ."""
    both = ours.keys() & theirs.keys()
    key = next(
        key for key in {**ours, **theirs} if key not in both or not alike(ours[key], theirs[key])
    )
    if key in both:
        inner = difference(ours[key], theirs[key])
        return {side: f"{key}: {text}"[:200] for side, text in inner.items()}
    sides = {"expected": ours, "found": theirs}
    return {side: f"{'' if key in held else 'no '}{key}"[:200] for side, held in sides.items()}


def compare(recorded: Manifest, derived: Manifest, file: str) -> None:
    """Raises ForeignFileError where the manifest describes another save than the files hold."""
    stepped = len([buffer for buffer in derived.buffers if buffer.stepped])
    said, found = _aspects(recorded, stepped), _aspects(derived, stepped)
    if not any(found["groups"]) or _says(said["groups"], found["groups"]):
        found["groups"] = said["groups"]
    if not stepped:  # without an optimizer no file says what is trained
        kinds = {name: kind for name, (_, kind, _) in said["shapes"].items() if kind == "trainable"}
        shapes = found["shapes"].items()
        found["shapes"] = {
            n: (shape, kinds.get(n, kind), order) for n, (shape, kind, order) in shapes
        }
    counters = {key: value for key, value in derived.run.items() if key != ARGUMENTS}
    said |= {key: recorded.run.get(key) for key in counters}
    found |= counters
    compare_fields(said, found, "manifest and files disagree in the", file)


def compare_fields(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], problem: str, file: str
) -> None:
    """Raises ForeignFileError for the first field that differs: its name follows `problem` in the
    message."""
    for what, value in ours.items():
        if value != theirs[what]:
            raise ForeignFileError(
                f"{problem} {what}", file=file, **difference(value, theirs[what])
            )


def _listed_values(buffers: Sequence[FlatBuffer]) -> dict[str, dict[Any, FlatBuffer]]:
    """What lies under each name: files say which layer holds a value, not which stage."""
    out: dict[str, dict[Any, FlatBuffer]] = {}
    for buffer in buffers:
        name = ", ".join(member.param for member in buffer.members)
        out.setdefault(name, {})[buffer.members] = replace(buffer, at=())
    return out


def _aspects(manifest: Manifest, stepped: int) -> dict[str, Any]:
    """What manifest and files both say, by its name in an error; the first `stepped` buffers are
    those of the optimizer."""
    mesh, buffers = manifest.mesh, manifest.buffers[:stepped]
    return {
        "engine": manifest.keeper,
        "mesh": (mesh.tp, mesh.pp, mesh.partitions, mesh.ep, mesh.etp),
        "scalars": [[member.scalars for member in buffer.members] for buffer in buffers],
        "optimizer buffers": buffers,
        "values": _listed_values(manifest.buffers[stepped:]),
        "shapes": {p.name: (p.shape, p.kind, p.order) for p in manifest.params},
        "groups": [group.settings for group in manifest.groups],
    }


def _says(said: Any, found: Any) -> bool:
    """Whether a manifest's value is the one that a file has."""
    if isinstance(said, list | tuple) and isinstance(found, list | tuple):
        return len(said) == len(found) and all(map(_says, said, found))
    if isinstance(said, dict) and isinstance(found, Mapping):
        return said.keys() == found.keys() and all(_says(said[key], found[key]) for key in said)
    if isinstance(said, ClassName) and not isinstance(found, ClassName):
        return True  # left to the engine that loads: the manifest has its class alone
    return alike(said, found)


# ---- frozen
#
# What no optimizer steps: frozen parameters and module buffers, where model files keep them.


@dataclass(frozen=True)
class FrozenValue:
    """A value as the files of a rank keep it: `order` are the dims as a file stores them (None: as
    they are), `partitions` those of ZeRO-3 that hold a frozen parameter together."""

    name: str
    shape: Ints
    dtype: str
    kind: str
    order: Ints | None
    partitions: int | None

    def buffer(self, axes: tuple[str, ...]) -> FlatBuffer:
        """A buffer of its own."""
        size, states = math.prod(self.shape), ((VALUE, self.dtype),)
        if self.partitions is None:
            return alone(self.name, size, states, axes=axes)
        length = -(-size // self.partitions)
        member = Member(self.name, 0, size)
        return FlatBuffer((member,), length, self.partitions, "each", states, axes=axes)


def values_of(
    run: NativeRun, module: Mapping[str, Any], known: Collection[str]
) -> Iterator[FrozenValue]:
    """Every value of a `module` of the first rank that is not among the `known` names.

    Raises DamagedFileError for one that is missing, UnsupportedError for an entry that is neither a
    parameter nor a buffer.
    """
    frozen = _frozen_shapes(run)
    buffers = _buffer_names(run)
    divided = run.contents.keeper == Keeper.ZERO_3
    # Older ZeRO-3 files don't name the buffers, which are all that has bytes there, nor keep frozen
    # parameters.
    old = divided and "buffer_names" not in run.meta
    named = [name for name in module if not is_extra_state(name) or name in buffers]
    for name in dict.fromkeys([*named, *frozen]):
        ref = module.get(name)
        held = isinstance(ref, TensorRef) and ref.numel > 0
        if name in known or (old and not held and name not in frozen):
            continue
        if divided and not old and name not in {*frozen, *buffers}:
            if held:
                raise unexplained(name, buffers - set(module), run.main_file)
            continue  # what stands for a parameter whose own name is in another place
        is_frozen = name not in buffers and not (old and held)
        parts = run.partition_ranks.dense if is_frozen and divided else None
        value = ref if parts is None else run.fragment(name, 0)
        shape = frozen.get(name, ref.shape if isinstance(ref, TensorRef) else ())
        yield _value(name, shape, "frozen" if is_frozen else "buffer", value, parts, run.main_file)


def _value(
    name: str, shape: Ints, kind: str, held: Any, partitions: int | None, file: str
) -> FrozenValue:
    if not isinstance(held, TensorRef):
        raise DamagedFileError("the value of a parameter is missing", file=file, parameter=name)
    is_as_told = partitions is not None or held.is_contiguous
    return FrozenValue(
        name, shape, held.storage.dtype, kind, None if is_as_told else held.order, partitions
    )


def _frozen_shapes(run: NativeRun) -> dict[str, Ints]:
    """Those of frozen parameters, as the first model file says; the files of experts have theirs,
    of all ranks."""
    stacked, shapes = run.experts.autoep.experts, frozen_shapes(run.meta, run.main_file)
    return {name: shape for name, shape in shapes.items() if name not in stacked}


def _buffer_names(run: NativeRun) -> set[str]:
    """The module buffers of all stages, by canonical name."""
    found = {
        run.weights.name_of(name, file)
        for file in run.first_of_stages
        for name in buffer_names(run.tree(file), run.full_path(file))
    }
    return with_all_experts(found, run.expert_counts)


def unexplained(name: str, lacking: Collection[str], file: str) -> UnsupportedError:
    """For an entry of the weights whose name is none of the model's, of which some are `lacking`
    there."""
    return UnsupportedError(
        "the weights have an entry that is no parameter and no buffer of the model: a hook of its "
        "state dict renames or adds entries, and nothing in the files says what it is",
        file=file,
        parameter=name,
        expected=f"one of {some_of(sorted(lacking))}" if lacking else "no such entry",
        found="a name that the model does not have",
        fix="load it into an engine of the same model, whose hook says what it is, or with "
        "DeepSpeed's own load on the same mesh (native=True)",
    )


# ---- file manifest
#
# The manifest that follows from a tag's files alone.


def manifest_of(run: NativeRun) -> Manifest:
    """The manifest that follows from the files alone, with what it says of states that were
    not saved."""
    found = _held(run)
    _refuse_renamed(run, found)
    names, meta = run.names, run.meta
    has_optimizer = bool(names.optimizer or names.expert_optimizer or meta.get("optimizer"))
    lost = not_saved(meta.get("ds_config"), found, has_optimizer)
    return replace(found, run={**found.run, NOT_SAVED: lost}) if lost else found


def _held(run: NativeRun) -> Manifest:
    found = run.contents
    module = run.weights.module()
    members = [member.param for buffer in found.buffers for member in buffer.members]
    flat = dict.fromkeys(members)
    shapes = _flat_shapes(run)
    dtype = training_dtype(run.meta, module, shapes)
    ties = _ties(run, flat)
    params = _params(run, flat, shapes, dtype)
    if run.uneven:
        _check_shares(run, params)
    # a save without frozen weights leaves further names of tied ones in the model file
    told = run.recorded.ties if run.recorded else ()
    aliases = {alias for tie in (*ties, *told) for alias in tie.aliases}
    values = _values(run, module, {*flat, *aliases})
    return Manifest(
        found.keeper,
        replace(run.mesh, zero=_zero_stage(run)),
        (*params, *(spec for spec, _ in values)),
        (*found.buffers, *(share for spec, one in values for share in shares(run, spec, one))),
        DeepSpeedConfig(run.meta.get("ds_config")).with_rules(found.groups),
        ties,
        names=run.pipe_names if run.pipeline else {},
        run=run_of(run.meta),
    )


def run_of(meta: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest's `run` says, of a model file."""
    counters = {
        key: number(meta.get(key)) for key in ("global_steps", "skipped_steps", "ds_version")
    }
    flags = flags_of_model(arguments_of(meta.get(ARGUMENTS_KEY)), meta.get(PATTERNS))
    return {**counters, ARGUMENTS: flags} if flags else counters


def _ties(run: NativeRun, flat: Collection[str]) -> tuple[Tie, ...]:
    ties = run.weights.ties(flat)
    return (*ties, *_told_ties(run, flat, {alias for tie in ties for alias in tie.aliases}))


def _told_ties(run: NativeRun, flat: Collection[str], known: Collection[str]) -> Iterator[Tie]:
    """What the caller's model ties, where the files hold every name, which is not `known` as a tie:
    stock writes a mixture's model file at stage 0 so. Raises ModelMismatchError for names with
    other bytes than the first one."""
    like, module = run.told.like if run.recorded is None else None, run.weights.module()
    for tie in like.ties if like is not None else ():
        names = (tie.canonical, *tie.aliases)
        held = [name for name in names if isinstance(module.get(name), TensorRef)]
        # of the weights alone none is flattened
        first = next((name for name in held if name in flat or not flat), "")
        copies = tuple(name for name in held if name not in {*flat, *known, first})
        if not first or not copies:
            continue
        for name in copies:
            if not all(_is_copy(run, first, name, tp) for tp in range(run.mesh.tp)):
                raise ModelMismatchError(
                    "two parameters are one in the model, and two in the checkpoint",
                    file=run.main_file,
                    parameter=name,
                    expected=f"the bytes of {first}, to which the model ties it",
                    found="others",
                    fix="build the model untied, as the run that wrote it did",
                )
        yield Tie(first, copies)


def _is_copy(run: NativeRun, first: str, name: str, tp: int) -> bool:
    """Whether two entries of the weights of a tensor-parallel rank are the same."""
    refs = [run.weights.module(tp)[one] for one in (first, name)]
    if refs[0].shape != refs[1].shape or not all(ref.is_contiguous for ref in refs):
        return False
    files = (run.weights.file_of(one, tp) for one in (first, name))
    return same_bytes(*map(run.place, files, refs))


def _params(
    run: NativeRun, flat: Iterable[str], shapes: Mapping[str, Ints], dtype: str
) -> list[ParamSpec]:
    """What the optimizer steps; `shapes` are those of the first rank, as far as files say."""
    # in a plain optimizer's file the weights are the masters, of whatever dtype the model is
    module = run.weights.module()
    plain = any(isinstance(stage.format, PlainFile) for stage in run.stages)
    return [
        _spec(
            run,
            name,
            shapes[name] if name in shapes else run.shape_of(module, name),
            run.weight_dtype(name) if plain else dtype,
            "trainable",
        )
        for name in flat
    ]


def _flat_shapes(run: NativeRun) -> dict[str, Ints]:
    """Rank-local shapes of what is flattened, as the model files say: of other expert-parallel
    ranks than the first only where no expert file has their experts' shapes."""
    out: dict[str, Ints] = {}
    everywhere = not run.names.experts
    for at in run.places:
        if expert_rank_of(at) and not everywhere:
            continue
        rank = run.mesh.rank_of(at, 0)
        file = run.model_of(run.file_place(rank)[1])
        name_of = run.names_at(rank, file)
        for named in shapes_by_group(run.tree(file), run.full_path(file)) or []:
            inside = run.experts.autoep.in_slices(named, run.full_path(file))
            for name, shape in inside.items():
                out.setdefault(name_of(name), shape)  # the first rank's
    return out


def _check_shares(run: NativeRun, params: Sequence[ParamSpec]) -> None:
    """Raises ModelMismatchError where another tensor-parallel rank than the first one has
    another share than the layout says."""
    for tp in range(1, run.mesh.tp):
        file = run.model_of(tp)
        held = dict(run.weights.module(tp))
        for named in shapes_by_group(run.tree(file), run.full_path(file)) or []:
            held |= named
        for spec in params:
            want = spec.layout.local_shape(spec.name, spec.shape, run.mesh.place(at_tp(tp)))
            found = getattr(held.get(spec.name), "shape", held.get(spec.name))
            if found != want and 0 not in want:
                _is_another(run, spec, found, want, file)


def _is_another(run: NativeRun, spec: ParamSpec, found: Any, want: Ints, file: str) -> NoReturn:
    raise ModelMismatchError(
        "the checkpoint's share of a parameter is not what its layout says",
        parameter=spec.name,
        file=run.full_path(file),
        found=found,
        expected=f"{want} of {spec.shape} at tp={run.mesh.tp}",
    )


def shares(run: NativeRun, spec: ParamSpec, buffer: FlatBuffer) -> Iterator[FlatBuffer]:
    """The buffer of a value: of one that ranks have different shares of, those of all ranks."""
    cuts = run.mesh.everywhere(buffer.axes) if run.uneven else []
    local = [
        spec.layout.local_shape(spec.name, spec.shape, dict(run.mesh.place(at))) for at in cuts
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
    run: NativeRun, module: Mapping[str, Any], known: set[str]
) -> list[tuple[ParamSpec, FlatBuffer]]:
    """Frozen parameters and module buffers, one flat buffer for each."""
    return [
        (
            replace(_spec(run, one.name, one.shape, one.dtype, one.kind), order=one.order),
            one.buffer(run.partition_ranks.axes(one.name)),
        )
        for one in values_of(run, module, known)
    ]


def _refuse_renamed(run: NativeRun, found: Manifest) -> None:
    """Raises UnsupportedError where the weights lack parameters of the optimizer, and what
    looks like a frozen one may be one of them under another name. At ZeRO-3 the weights of
    both are elsewhere."""
    module = run.weights.module()
    lacking = [s for s in found.params if s.kind == "trainable" and s.name not in module]
    said = frozen_shapes(run.meta, run.main_file)
    frozen = [s for s in found.params if s.kind == "frozen" and s.name not in said]
    if lacking and frozen and found.keeper != Keeper.ZERO_3:
        alike = [s.name for s in frozen if s.shape in {one.shape for one in lacking}]
        name = next(iter(alike), frozen[0].name)
        raise unexplained(name, [s.name for s in lacking], run.main_file)


def _spec(run: NativeRun, name: str, local: Ints, dtype: str, kind: str) -> ParamSpec:
    """The parameter with the declared layout, whose share of one rank must have the shape in
    the file."""
    declared = run.layouts.find(name, local, kind)
    expert = number_and_count(name, run.expert_counts)
    # where nothing cuts it another shape is an error of the comparison with the target
    cut = run.mesh.cut_of_dense if expert is None else run.mesh.cut_of_experts
    other = cut == 1 and (declared is None or declared.shape != local)
    if other or (declared is None and kind == "buffer"):
        return ParamSpec(name, local, dtype, kind, expert=expert)
    if declared is None:
        raise RuleError(
            "a tensor-parallel parameter of the checkpoint is not declared",
            parameter=name,
            file=run.main_file,
            expected="a parameter of the family",
            found="none",
            fix="build the model as the run that wrote the checkpoint did",
        )
    shares = run.mesh.first_shares()
    share = declared.layout.local_shape(name, declared.shape, shares)
    if share != local:
        _is_another(run, declared, local, share, run.model_name)
    return replace(declared, dtype=dtype, kind=kind, expert=expert)


def _zero_stage(run: NativeRun) -> int:
    keeper = run.contents.keeper
    if keeper == Keeper.ZERO_1_OR_2:
        return 2 if run.optimizer_tree(0).get("zero_stage") == 2 else 1
    return {Keeper.ZERO_3: 3, Keeper.BF16: 1}.get(keeper, 0)
