"""`load`: any native checkpoint into a live DeepSpeed engine on any mesh.

Order: everything that metadata can show is found on all ranks first; then the engine is marked
unusable, filled, refreshed and marked usable again. No collective stands inside the arithmetic.
"""

import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Plan, Slot, Want, make_plan
from megatron_ucp.core.proof import prove
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.engines.deepspeed.family import model_of
from megatron_ucp.engines.deepspeed.live import IMPLEMENTATION, Live, dtype_name
from megatron_ucp.engines.deepspeed.refuse import refuse_engine
from megatron_ucp.engines.deepspeed.restore import Extras, restore_extras, set_scaler
from megatron_ucp.engines.deepspeed.unusable import mark_unusable, mark_usable
from megatron_ucp.engines.deepspeed.wrappers import LiveBuffer
from megatron_ucp.engines.loader import ResumableLoader
from megatron_ucp.engines.random_states import Restored
from megatron_ucp.errors import StateMismatchError, UcpError, UsageError
from megatron_ucp.formats.deepspeed.whole import check_file
from megatron_ucp.formats.optimizers import Kept, kept_by, require_equal
from megatron_ucp.formats.registry import Checkpoint, open_checkpoint
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.execute import TORCH_DTYPES, Counts, check_runs, execute, fresh
from megatron_ucp.reshard.match import (
    ALLOWANCES,
    Fit,
    group_values,
    has_masters,
    match_params,
    match_ties,
    one_value,
    source_states,
)


@dataclass(frozen=True)
class Report:
    """What a load did, on this rank. `notes` name everything that was not carried over bit for bit,
    or not at all."""

    path: str
    source: str
    target: str
    read_bytes: int
    checked_bytes: int
    unchecked_bytes: int
    seconds: float
    client_state: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    global_steps: int = 0


@dataclass
class _Job:
    """One load on its way: what to read into where, and what to set."""

    live: Live
    source: Checkpoint
    fit: Fit
    plan: Plan
    optimizer: bool
    hyper: list[Mapping[str, Any]]
    steps: list[Mapping[str, float]]
    kept: list[Kept | None]
    states: list[tuple[str, ...]]
    notes: list[str] = field(default_factory=list[str])


def load(
    engine: Any,
    path: str | Path,
    tag: str | None = None,
    *,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    hyper: str = "checkpoint",
    family: Any = None,
    checksums: bool = True,
    allow: Collection[str] = (),
    rng: bool = True,
    loader: ResumableLoader | None = None,
) -> Report:
    """Fills a DeepSpeed engine from a native checkpoint that any ZeRO stage on any number of ranks
    wrote. Collective.

    `family` names the model's family, which tensor parallelism needs (`attach` remembers it). `rng`
    restores random states; `loader` goes on where the save was. Neither happens with
    `load_module_only`. `hyper`: "checkpoint" restores each group's hyper-parameters, "config" keeps
    the engine's. `checksums` compares the CRC-32 of every record that the ranks read as a whole.
    `allow` names what else may happen (see `ALLOWANCES`); all of it is listed in the report. Raises
    a UcpError on every rank; the engine is unchanged where metadata could show the reason, and
    refuses to step and to save where it could not.
    """
    started = time.perf_counter()
    check_options(hyper=hyper, allow=allow)
    optimizer = load_optimizer_states and not load_module_only
    with agree.together():
        model = model_of(engine, family)
        refuse_engine(engine, model)
        live = Live(engine, model)
    with ExitStack() as opened:
        try:
            with agree.together() as stages:
                own = live.part(lambda _: ())
                stages.value = live.told(own)
            with agree.together():
                whole = live.join(own, stages.values)
                bare = whole.manifest
                source = opened.enter_context(
                    open_checkpoint(
                        path,
                        tag,
                        order=whole.order,
                        specs=bare.by_name if model else None,
                        names=model.pipe if model else None,
                    )
                )
                job = _prepare(live, bare, source, optimizer, hyper, frozenset(allow))
                extras = Extras.read(
                    source,
                    engine,
                    scheduler=load_lr_scheduler_states and not load_module_only,
                    groups=_origins(live, source),
                )
                randoms = (
                    Restored.plan(source, live.mesh(), agree.world()[0], live.place())
                    if rng
                    else Restored(None)
                )
                position = None if load_module_only else _position(source, loader)
                if checksums:
                    source.check_used()
        except UcpError:
            live.wrapper.restore()
            raise
        mark_unusable(engine)
        filled = agree.collect(lambda: _fill(job, checksums))
        read_bytes, checked, unchecked = _checksums(filled, source)
        live.wrapper.refresh()
        _finish(job, engine, hyper)
        if not load_module_only:
            restore_extras(engine, extras, job.notes)
            _restore_run(randoms, loader, position, job.notes)
        mark_usable(engine)
        client_state = extras.client_state
    return Report(
        str(source.folder),
        str(source.manifest.mesh),
        str(live.mesh()),
        read_bytes,
        checked,
        unchecked,
        time.perf_counter() - started,
        client_state,
        tuple(job.notes),
        int(engine.global_steps),
    )


def _position(source: Checkpoint, loader: ResumableLoader | None) -> Mapping[str, Any] | None:
    """The data position of the checkpoint, once it is known to fit the loader. Raises
    StateMismatchError, UnsupportedError."""
    found = source.manifest.run.get("data")
    if loader is not None and found is not None:
        loader.check(found, str(source.folder))
    return found


def _restore_run(
    randoms: Restored,
    loader: ResumableLoader | None,
    position: Mapping[str, Any] | None,
    notes: list[str],
) -> None:
    """Random states and the data position."""
    randoms.apply()
    if randoms.note:
        notes.append(randoms.note)
    if loader is not None and position is not None:
        loader.load_state_dict(position)
    elif loader is not None or position is not None:
        notes.append(
            "the data position was not restored: "
            + ("no loader was given" if loader is None else "the checkpoint has none")
        )


def check_options(
    hyper: str = "checkpoint",
    checksums: bool = True,
    allow: Collection[str] = (),
    rng: bool = True,
    **unknown: Any,
) -> None:
    """Raises UsageError for an option of `load` that is not known, before anybody trains for hours
    with it."""
    if unknown:
        raise UsageError(
            "an option is not known",
            expected="hyper, checksums, allow, rng",
            found=", ".join(sorted(unknown)),
        )
    if hyper not in ("checkpoint", "config"):
        raise UsageError(
            "hyper says where hyper-parameters come from",
            expected="checkpoint or config",
            found=hyper,
        )
    wrong = sorted(set(allow) - set(ALLOWANCES)) if not isinstance(allow, str) else [allow]
    if wrong:
        raise UsageError(
            "allow names what may happen", expected=" ".join(ALLOWANCES), found=", ".join(wrong)
        )


def _prepare(
    live: Live,
    bare: Manifest,
    source: Checkpoint,
    optimizer: bool,
    hyper: str,
    allow: frozenset[str],
) -> _Job:
    """Everything that needs no tensor byte; raises before anything is written. `bare` is the engine
    with masters alone.

    Every rank looks at all stages of the engine, and plans for its own."""
    file = str(source.folder)
    fit = match_params(source.manifest, bare, allow, file)
    if not has_masters(
        source.manifest, (spec.name for spec in bare.params if spec.kind == "trainable")
    ):
        if optimizer:
            raise StateMismatchError(
                "the checkpoint holds no optimizer",
                file=file,
                fix="load with load_optimizer_states=False",
            )
        fit.master = VALUE
    replicas = match_ties(source.manifest, optimizer, file)
    states, steps, kept = _states(live, bare, source, optimizer, file)
    dtypes = [live.state_dtype(buffer.states[0][1]) for buffer in bare.buffers]
    target = replace(
        bare,
        buffers=tuple(
            replace(b, states=(b.states[0], *((s, dtype) for s in found)))
            for b, dtype, found in zip(bare.buffers, dtypes, states, strict=True)
        ),
    )
    wanted = group_values(target, source.manifest.group_of, file) if optimizer else []
    plan = make_plan(source.manifest, target, _wants(live, target, fit), allow)
    prove(plan, source.manifest, target)
    for slot in plan.sources:
        source.where(slot)
    rank, world = agree.world()
    for name in source.file_names[rank::world]:  # the ranks share the work
        check_file(source, name, stale="stale" in allow)
    own = slice(live.first_buffer, live.first_buffer + len(live.buffers))
    groups = wanted[
        live.first_group : live.first_group + len(getattr(live.wrapper.base, "param_groups", []))
    ]
    job = _Job(
        live,
        source,
        fit,
        plan,
        optimizer,
        groups if hyper == "checkpoint" else [],
        steps[own],
        kept[own],
        states[own],
    )
    job.notes += source.notes
    job.notes += [f"replicas not compared: {name}" for name in replicas]
    _describe(job, target)
    return job


def _states(
    live: Live, bare: Manifest, source: Checkpoint, optimizer: bool, file: str
) -> tuple[list[tuple[str, ...]], list[Mapping[str, float]], list[Kept | None]]:
    """Per buffer of the engine: names of element-wise states, scalar states, and what the optimizer
    keeps."""
    states: list[tuple[str, ...]] = []
    steps: list[Mapping[str, float]] = []
    kept: list[Kept | None] = []
    for buffer in bare.buffers:
        if not optimizer or buffer.states[0][0] == VALUE:
            states.append(())
            steps.append({})
            kept.append(None)
            continue
        keeps = kept_by(
            live.optimizer_name(), bare.groups[buffer.group] if buffer.group is not None else {}
        )
        found = one_value(
            buffer.members,
            lambda name: {s: True for s in source_states(source.manifest, name)},
            "states",
            file,
        )
        scalars = one_value(buffer.members, source.manifest.scalars_of, "steps", file)
        if found or scalars:  # no states at all: a checkpoint from before the first step
            first = buffer.members[0].param
            require_equal(keeps.element, found, first, file)
            require_equal(keeps.scalar, scalars, first, file)
        states.append(tuple(found))
        steps.append(scalars)
        kept.append(keeps)
    return states, steps, kept


def _wants(live: Live, target: Manifest, fit: Fit) -> list[Want]:
    """Every slot of this rank, and the source state that fills it."""
    wants: list[Want] = []
    for number, part in live.parts():
        buffer = target.buffers[number]
        if buffer.states[0][0] == VALUE and buffer.members[0].param in fit.skipped:
            continue
        wants += [
            (Slot(number, live.cut, part, state), fit.master if state == MASTER else state)
            for state, _ in buffer.states
        ]
    return wants


def _origins(live: Live, source: Checkpoint) -> list[int | None]:
    """For each of this rank's parameter groups the group of the checkpoint that its first parameter
    comes from."""
    out: list[int | None] = [None] * len(getattr(live.wrapper.base, "param_groups", []))
    for buffer in live.buffers:
        if buffer.group is not None and out[buffer.group] is None and buffer.params:
            held = source.manifest.holders.get(live.names[buffer.params[0]])
            out[buffer.group] = source.manifest.buffers[held[0][0]].group if held else None
    return out


def _describe(job: _Job, target: Any) -> None:
    """Notes for what metadata already shows to be not exact or not carried over."""
    rounded = sorted(
        {
            target.buffers[op.target.slot.buffer].members[op.member].param
            for op in job.plan.ops
            if getattr(op, "lossless", True) is False
        }
    )
    for what, names in (
        ("rounded to a narrower dtype", rounded),
        ("kept from the engine: not in the checkpoint", job.fit.skipped),
        ("dropped: not in the model", job.fit.dropped),
        ("vocabulary resized", job.fit.resized),
    ):
        if names:
            job.notes.append(
                f"{what}: {', '.join(names[:5])}"
                + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            )


def _fill(job: _Job, checksums: bool) -> Counts:
    """Moves the bytes. From here on a failure leaves the engine unusable."""
    if job.optimizer:
        for live, states in zip(job.live.buffers, job.states, strict=True):
            _allocate(job.live, live, states)
    return execute(job.plan, job.source.where, job.live.tensor, checksums=checksums)


def _allocate(live: Live, buffer: LiveBuffer, states: tuple[str, ...]) -> None:
    """Exactly the states that the checkpoint has; tensors that exist with the right size are
    kept."""
    held = live.wrapper.base.state[buffer.master]
    for key in [key for key in held if key not in states]:
        del held[key]
    for key in states:
        old = held.get(key)
        dtype = TORCH_DTYPES[live.state_dtype(dtype_name(buffer.master.dtype))]
        if (
            not isinstance(old, torch.Tensor)
            or old.shape != buffer.master.shape
            or old.dtype != dtype
        ):
            held[key] = fresh(buffer.master.detach(), dtype)


def _checksums(filled: list[Counts], source: Checkpoint) -> tuple[int, int, int]:
    """Compares the sums of all ranks' runs, each rank a share of the records. Collective.

    Returns bytes: read by this rank; checked and not checked, summed over all ranks.
    """
    rank, world = agree.world()
    runs = [run for counts in filled for run in counts.runs]
    records = {key: record for counts in filled for key, record in counts.records.items()}
    unsummed = sum(counts.unsummed_bytes for counts in filled)
    if not runs:
        return filled[rank].read_bytes, 0, unsummed
    sums = agree.collect(lambda: check_runs(runs, records, source.opened, rank=rank, world=world))
    return (
        filled[rank].read_bytes + sums[rank][2],
        sum(checked for checked, _, _ in sums),
        unsummed + sum(unchecked for _, unchecked, _ in sums),
    )


def _finish(job: _Job, engine: Any, hyper: str) -> None:
    """Steps, hyper-parameters and the loss scale."""
    if not job.optimizer:
        return
    base = job.live.wrapper.base
    for buffer, scalars, keeps in zip(job.live.buffers, job.steps, job.kept, strict=True):
        group = base.param_groups[buffer.group] if buffer.group is not None else {}
        held = base.state[buffer.master]
        for key, value in scalars.items():
            held[key] = _scalar(key, value, keeps, group, buffer.master)
        if not held:
            del base.state[buffer.master]  # as before the first step
    for number, (group, saved) in enumerate(zip(base.param_groups, job.hyper, strict=False)):
        _set_group(number, group, saved, job.notes)
    if hyper == "config":
        job.notes.append("hyper-parameters kept from the engine's configuration, as asked")
    elif not any(job.hyper):
        job.notes.append(
            "hyper-parameters kept from the engine: the checkpoint holds none (elastic format)"
        )
    set_scaler(engine, job.live.wrapper, job.source.contents.scaler, job.notes)


def _scalar(
    key: str, value: float, keeps: Kept | None, group: Mapping[str, Any], master: torch.Tensor
) -> Any:
    """A scalar state as the optimizer keeps it. A tensor of its own for every master: optimizers
    step it in place."""
    if keeps is not None and keeps.step == "int":
        return int(value)
    device = master.device if group.get("capturable") or group.get("fused") else torch.device("cpu")
    dtype = (
        torch.float64
        if torch.get_default_dtype() == torch.float64 and not group.get("fused")
        else torch.float32
    )
    return torch.tensor(value, dtype=dtype, device=device)


def _set_group(
    number: int, group: dict[str, Any], saved: Mapping[str, Any], notes: list[str]
) -> None:
    for key, value in saved.items():
        if key in IMPLEMENTATION:
            continue
        if key not in group and key != "initial_lr":
            notes.append(f"group {number}: {key}={value} is not known to this optimizer")
            continue
        old = group.get(key)
        if isinstance(old, torch.Tensor):
            old.fill_(value)
            continue
        if (
            key in group
            and old != value
            and tuple(old if isinstance(old, list) else [old])
            != tuple(value if isinstance(value, tuple) else [value])
        ):
            notes.append(
                f"group {number}: {key} {old} of the engine's configuration became {value} of the "
                "checkpoint"
            )
        group[key] = list(value) if isinstance(old, list) else value
