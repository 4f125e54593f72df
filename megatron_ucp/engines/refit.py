"""`refit`: the weights of a live engine into other engines, or into plain tensors, step after step:
planned once, moved as often as it is called."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from megatron_ucp import say
from megatron_ucp.core.manifest import ORIGIN, RECORDED, RUN, Manifest
from megatron_ucp.core.names import VALUE, dtype_name
from megatron_ucp.core.plan import LOSSLESS, Cast, Slot, joined
from megatron_ucp.core.tensor_parts import weights_manifest
from megatron_ucp.engines.handle import Handle, said_config
from megatron_ucp.engines.hold import params_of
from megatron_ucp.engines.live import LiveShards, flat_view
from megatron_ucp.engines.record import handle_of, run_of
from megatron_ucp.errors import ForeignFileError, ModelMismatchError, PlanError, UsageError, some_of
from megatron_ucp.families.settings import recorded
from megatron_ucp.formats.checkpoint import Extras
from megatron_ucp.formats.in_memory import RunInMemory
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.check import weight_of
from megatron_ucp.reshard.engine import Holder
from megatron_ucp.reshard.hugging_face.export import WEIGHT_DTYPES, training_dtype
from megatron_ucp.reshard.hugging_face.names import Twin, config_for, needs_family, twin_of
from megatron_ucp.reshard.kept_moves import KeptMoves, SharedMemories
from megatron_ucp.reshard.load import fit_for, notes_of_fit, parts_for
from megatron_ucp.reshard.memory_layout import HostMemory
from megatron_ucp.reshard.options import MEMORY, check_words
from megatron_ucp.reshard.transfer import (
    NARROW,
    Lost,
    Proved,
    SinkPart,
    lost_in_weights,
    may_overflow,
    param_of,
    proved,
    refuse_lost,
)

_T = TypeVar("_T")

# ---- report


@dataclass(frozen=True)
class RefitReport:
    """What a refit did. `filled_bytes` are those of all ranks' memory that got values,
    `moved_bytes` what of it came from other ranks; `planned` whether this call planned;
    `compared_bytes` what a checksum was compared of (None: nothing was asked). `notes` say what is
    not as in the source."""

    source: str
    target: str
    filled_bytes: int
    moved_bytes: int
    seconds: float
    planned: bool
    compared_bytes: int | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        seen = "no checksum was asked for"
        if self.compared_bytes is not None:
            seen = f"checksums of {say.part(self.compared_bytes, self.filled_bytes)} compared"
        return (
            f"refit {self.source} -> {self.target}: {say.amount(self.filled_bytes)}, "
            f"{say.amount(self.moved_bytes)} of it from other ranks, in "
            f"{say.duration(self.seconds)}; {seen}; the next ones say nothing"
        )


# ---- targets


_Wanted = tuple[tuple[SinkPart, ...], list[str]]  # and notes


class _Target(Protocol):
    """What is filled on this rank. `name` is for messages, and the same on all ranks that fill
    one of a kind."""

    name: str

    def parts(self, source: RunInMemory) -> "_Wanted":
        """What this rank wants of a source, and notes. Raises a UcpError."""
        ...

    def wants_more(self, source: Manifest) -> bool:
        """Whether it takes more than the weights that the source computes with: it has masters, or
        a wider dtype."""
        ...

    def tensor(self, slot: Slot) -> torch.Tensor: ...

    def lies_at(self) -> object: ...

    def begin(self) -> None:
        """Before the first write of a call. Collective among the ranks that have one."""
        ...

    def lost(self, source: Manifest, plans: Sequence[Proved]) -> Lost:
        """What of finite values the target will not have, though they were moved."""
        ...

    def finish(self) -> None:
        """After the last one: it may be used. Collective among the ranks that have one."""
        ...


class _EngineTarget:
    """An engine, without an optimizer or with one, of which the masters are filled."""

    def __init__(self, handle: Handle, allow: frozenset[str]) -> None:
        self._handle, self._allow = handle, allow
        self.live: Any = handle.describe()
        self.live.prepare()
        self.name = str(self.live.manifest.mesh)

    def parts(self, source: RunInMemory) -> _Wanted:
        target, live = self.live.manifest, self.live
        live.check(source, False)
        fit = fit_for(source.manifest, target, self._allow, False, source.name)
        described = notes_of_fit(fit, source.manifest)
        return parts_for(live, target, fit, self._allow), described

    def wants_more(self, source: Manifest) -> bool:
        if self.live.has_optimizer:
            return True
        target = self.live.manifest.by_name
        return any(
            spec.name in target and (spec.dtype, target[spec.name].dtype) in LOSSLESS
            for spec in source.params
        )

    def tensor(self, slot: Slot) -> torch.Tensor:
        return self.live.tensor(slot)

    def lies_at(self) -> object:
        return self._handle.lies_at(self.live.has_optimizer)

    def begin(self) -> None:
        self._make_whole = self.live.broken(None)

    def lost(self, source: Manifest, plans: Sequence[Proved]) -> Lost:
        """Weights that are narrower than their masters."""
        if not self.live.has_optimizer or not may_overflow(source, self.live.manifest):
            return {}
        return lost_in_weights(self.live, joined([one.plan for one in plans]))

    def finish(self) -> None:
        self.live.filled(None, {})
        self._make_whole()


class _TensorsTarget:
    """Tensors of a Hugging Face model by name, on this rank."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], config: Any, family: str) -> None:
        # the caller's own: what it replaces or adds is seen by the next call
        self._tensors, self._config, self._family = tensors, config, family
        self._flat: list[torch.Tensor] = []
        self.name = "tensors of a Hugging Face model"

    def parts(self, source: RunInMemory) -> _Wanted:
        manifest = source.manifest
        found = None if self._config is None else config_for(manifest, self._config, None)
        family = found.family if found is not None and needs_family(manifest) else self._family
        tree: Any = manifest.run.get(_CONFIG) if found is None else found.tree
        twin = twin_of(manifest, tree, family, training_dtype(manifest), source.name)
        if lost := sorted(self._tensors.keys() - twin.shares.keys()):
            raise ModelMismatchError(
                "the model has no tensor of a name that was asked for",
                file=source.name,
                parameter=some_of(lost),
                expected=some_of([*twin.shares]),
                found=f"{len(lost)} of {len(self._tensors)} names"
                + _why_lost(lost[0], manifest, twin),
                fix="give the names of the Hugging Face model that the weights are of",
            )
        rows, wants, flat = [], [], list[torch.Tensor]()
        for name, tensor in self._tensors.items():
            share = twin.shares[name]
            shape = share.stored_shape(twin.specs[share.param])
            if tuple(tensor.shape) != tuple(shape):
                raise ModelMismatchError(
                    "a tensor has another shape than in the Hugging Face model",
                    file=source.name,
                    parameter=name,
                    expected=tuple(shape),
                    found=tuple(tensor.shape),
                    fix="give a tensor of that shape",
                )
            slot = Slot(len(rows), (), 0, VALUE)
            rows.append((share, dtype_name(tensor.dtype)))
            state, saved = weight_of(manifest, share.param)
            if rows[-1][1] != saved and not {rows[-1][1], saved} <= {*WEIGHT_DTYPES}:
                raise ModelMismatchError(
                    "weights can't be rounded to the dtype of a tensor",
                    file=source.name,
                    parameter=name,
                    expected=", ".join(dict.fromkeys((saved, *WEIGHT_DTYPES))),
                    found=rows[-1][1],
                    fix="give a tensor in one of these, and quantise what it gets",
                )
            wants.append((slot, state))
            flat.append(flat_view(tensor.detach()))
        self._flat = flat
        target = weights_manifest(twin.specs, rows)
        part = SinkPart(target, tuple(wants), NARROW, True, tuple(self._tensors))
        return (part,), [*twin.notes]

    def wants_more(self, source: Manifest) -> bool:
        trained = training_dtype(source)
        return any((trained, dtype_name(one.dtype)) in LOSSLESS for one in self._tensors.values())

    def tensor(self, slot: Slot) -> torch.Tensor:
        return self._flat[slot.buffer]

    def lies_at(self) -> object:
        rows = self._tensors.items()
        return [(name, one.data_ptr(), one.shape, one.stride(), one.dtype) for name, one in rows]

    def begin(self) -> None:
        """Whoever holds the tensors sees them change."""

    def lost(self, source: Manifest, plans: Sequence[Proved]) -> Lost:
        return {}

    def finish(self) -> None:
        """They are what they are."""


def _why_lost(name: str, manifest: Manifest, twin: Twin) -> str:
    """Why a model has no tensor of a name, where that is one that people ask for."""
    if twin.is_adapter:
        return "; the weights are those of an adapter, under the names of peft's file"
    tied = next((tie.canonical for tie in manifest.ties if name in tie.aliases), "")
    return f"; the model ties {name} to {tied}" if tied else ""


# ---- refit


_CONFIG = "model_config"  # of what the source says of its model beside the manifest
_FAILED, _CHANGED, _AS_IT_WAS = range(3)  # what ranks tell each other before each refit


@dataclass
class _Known:
    """What was planned."""

    manifest: Manifest  # of the source, with what its model is
    memories: SharedMemories
    plans: Sequence[Proved]
    has_masters: bool
    lies_at: object
    source: str
    target: str
    notes: tuple[str, ...]
    moves: KeptMoves
    filled_bytes: int
    moved_bytes: int


class _Members:
    """The ranks of the default group that have a `what`, as a group of their own where these are
    not all. Making one is collective. Raises UsageError on every rank where none has one."""

    def __init__(self, what: str, is_here: bool, every: Sequence[bool]) -> None:
        ranks = [rank for rank, one in enumerate(every) if one]
        if not ranks:
            raise UsageError(
                f"no rank has a {what}",
                expected=f"an engine as {what} on at least one rank",
                found="None on all of them",
                fix="give None on those ranks alone that have none",
            )
        self.is_here, self.are_all = is_here, len(ranks) == len(every)
        self.group = None if self.are_all else dist.new_group(ranks)

    def among(self) -> AbstractContextManager[None]:
        """Inside, these ranks are all; on others nothing is to be agreed on inside."""
        return agree.among(self.group) if self.is_here else nullcontext()

    def told(self, make: Callable[[], _T]) -> _T:
        """What `make` returns on these ranks, where it is the same, on all. Collective."""
        if self.are_all:
            return make()
        with agree.gathering() as block:
            if self.is_here:
                with self.among():
                    block.value = make()
        return next(one for one in block.values if one is not None)


class Refit:
    """What `refit` returns: each call moves the weights as they are then. See `refit`."""

    def __init__(
        self,
        source: Any,
        target: Any,
        checksums: bool | int,
        family: Any,
        config: Any,
        allow: frozenset[str],
    ) -> None:
        self._checksums, self._calls, self._said = checksums, count(1), False
        has = source is not None, target is not None
        every = agree.gather(has)
        self._givers = _Members("source", has[0], [one for one, _ in every])
        self._takers = _Members("target", has[1], [one for _, one in every])
        self._target: _Target | None = None
        self._make_target = lambda: _made(target, family, config, allow)
        self._source: Handle | None = None
        self._holder: Holder | None = None
        self._source_of = lambda: None if source is None else handle_of(source, family)
        self._known = self._plan()

    @property
    def sent_bytes(self) -> int:
        """What this rank sends to others in each call."""
        return self._known.moves.sent_bytes

    # ------------------------------------------------ plans

    def _plan(self) -> _Known:
        """Describes both sides, plans, proves, and makes the buffers. Collective. Raises a
        UcpError on every rank."""
        with agree.together(), self._givers.among():
            self._source = self._source_of()
        with agree.together(), self._takers.among():
            self._target = self._make_target() if self._takers.is_here else None
        target = self._target
        manifest = self._givers.told(lambda: self._described(False))
        has_masters = agree.any_of(target is not None and target.wants_more(manifest))
        if has_masters:
            manifest = self._givers.told(lambda: self._described(True))
        mesh = str(manifest.mesh)
        memories = SharedMemories(f"weights of {mesh}", self._holder or HostMemory(manifest, []))
        with agree.gathering() as block:
            # what the source is besides elements, as far as weights need it
            nothing = Extras({}, None, LossScale(), None, {})
            run = RunInMemory(memories.file, manifest, manifest, nothing, {}, [])
            parts, notes = ((), []) if target is None else target.parts(run)
            plans = [proved(memories, part, number=number) for number, part in enumerate(parts)]
            name = "" if target is None else target.name
            block.value = name, (*notes, *_rounded(plans))
        goal = some_of([*dict.fromkeys(name for name, _ in block.values if name)])
        notes = tuple(dict.fromkeys(note for _, own in block.values for note in own))
        moves = KeptMoves(memories.held, plans, _nowhere if target is None else target.tensor)
        sizes = agree.total(moves.filled_bytes, moves.read_bytes)
        lies_at = self._lies_at(has_masters)
        return _Known(
            manifest, memories, plans, has_masters, lies_at, mesh, goal, notes, moves, *sizes
        )

    def _described(self, has_masters: bool) -> Manifest:
        """Of a source, with what its model is. Collective among the ranks that have one."""
        source = self._source
        if source is None:
            raise PlanError("a rank without a source describes nothing")
        self._holder = source.present() if has_masters else source.weights()
        manifest, model, run = self._holder.manifest, source.model, run_of(source.program)
        said: dict[str, Any] = {_CONFIG: said_config(source.module, model)}
        said |= {RUN: run.id, ORIGIN: run.origin}
        if model is not None:
            said[RECORDED] = recorded(model.sizes, source.module)
        return replace(manifest, run={**manifest.run, **said})

    def _lies_at(self, has_masters: bool) -> object:
        """Where everything lies on this rank."""
        return (
            None if self._source is None else self._source.lies_at(has_masters),
            None if self._target is None else self._target.lies_at(),
        )

    # ------------------------------------------------ each time

    def __call__(self, *, checksums: bool | None = None) -> RefitReport:
        """Moves what was planned. Between two steps; collective, on all ranks of the world.

        Args:
            checksums: Whether what was moved is compared with the source. Default: as `refit` was
                told.

        Returns:
            What was done.

        Raises:
            UcpError: On every rank. The source is as it was; what is filled is not usable then.
        """
        with agree.as_rank_error("the refit", "the source is whole on this rank"):
            return self._moved(checksums)

    def _moved(self, checksums: bool | None) -> RefitReport:
        started = time.perf_counter()
        number = next(self._calls)
        compare = bool(self._checksums) and not number % int(self._checksums)
        compare = compare if checksums is None else bool(checksums)
        planned = self._plan_again(compare)
        known, target = self._known, self._target
        kept = agree.KeptBack()
        # others wait for what this rank sends, whatever fails here
        with kept, self._takers.among():
            if target is not None:
                target.begin()
        with kept:
            _finish_gathers(known.memories.held.engine)
        lost = [known.moves.run(kept)]
        with kept:
            if target is not None:
                lost.append(target.lost(known.manifest, known.plans))
        with agree.together():
            kept.raise_kept()
            refuse_lost(lost, known.memories.file, "refit")
        seen = self._compared(known) if compare else None
        with self._takers.among():
            if target is not None:
                target.finish()
        report = RefitReport(
            known.source,
            known.target,
            known.filled_bytes,
            known.moved_bytes,
            time.perf_counter() - started,
            planned or number == 1,
            seen,
            known.notes,
        )
        if not self._said:
            self._said = True
            say.ended(str(report), report.notes)
        return report

    def _plan_again(self, compare: bool) -> bool:
        """Plans where an engine has changed on any rank; whether it did. Before that the ranks tell
        each other three numbers: a rank that plans, or compares, alone would wait for ever.
        Collective. Raises UsageError where some ranks compare."""
        known = self._known
        state, kept = _FAILED, agree.KeptBack()
        with kept:
            if self._source is not None:
                self._source.check_usable()
            state = _AS_IT_WAS if self._lies_at(known.has_masters) == known.lies_at else _CHANGED
        state, all_compare, none_compares = agree.lowest(state, compare, not compare)
        if not (all_compare or none_compares):
            raise UsageError(
                "the ranks ask for different things of one refit",
                expected="checksums=True on all ranks, or on none",
                found="both",
                fix="give every rank the same arguments",
            )
        if state == _FAILED:
            with agree.together():
                kept.raise_kept()
        if state == _CHANGED:
            self._known = self._plan()
        return state == _CHANGED

    def _compared(self, known: _Known) -> int:
        """How many bytes of all ranks have the checksum that they have in the source. Collective.
        Raises ForeignFileError on every rank where one has another one."""
        with agree.together():
            own = known.moves.sums_given()
        given = agree.delivered(own)
        with agree.gathering() as block:
            block.value, wrong = known.moves.compared(given)
            if wrong:
                raise ForeignFileError(
                    "what a refit moved is not what the source has",
                    file=known.memories.file,
                    parameter=some_of(wrong),
                    expected="the checksums of the source",
                    found=f"others, of {len(wrong)} parameters",
                    fix="let nobody step the source, or write into the target, while a refit is "
                    "under way; else the memory or the network is damaged",
                    id="",
                )
        return sum(block.values)


def _finish_gathers(holder: Holder) -> None:
    """Every rank of the source gets the weights that others stepped."""
    if isinstance(holder, LiveShards):
        holder.finish_gathers()


def _rounded(plans: Sequence[Proved]) -> list[str]:
    """A note of what is rounded, and was not so when the source was trained."""
    names = {
        param_of(op, one.part.target): None
        for one in plans
        for op in one.plan.ops
        if isinstance(op, Cast) and not op.lossless
    }
    return [f"rounded to a narrower dtype: {some_of([*names])}"] if names else []


def _nowhere(slot: Slot) -> torch.Tensor:
    raise PlanError("a rank without a target fills nothing", found=slot)


def _made(target: Any, family: Any, config: Any, allow: frozenset[str]) -> _Target:
    """What is filled, of whatever kind. Collective among the ranks that have one."""
    if isinstance(target, Mapping):
        return _TensorsTarget(target, config, str(getattr(family, "name", family or "")))
    return _EngineTarget(handle_of(target, family), allow)


def refit(
    source: Any,
    target: Any,
    *,
    checksums: bool | int = False,
    family: Any = None,
    config: str | Path | None = None,
    allow: Collection[str] = (),
) -> Refit:
    """Plans how the weights of an engine go into another one, or into plain tensors, and returns
    what moves them as often as it is called: a trainer's into its rollout after each step.
    Collective, on all ranks of the world.

    Args:
        source: An engine of DeepSpeed, attached or not, or what `attach_megatron` returned; None on
            ranks that have none.
        target: An engine of the same model on any mesh, with an optimizer or without one; or the
            tensors that this rank is to have of the Hugging Face model, by their names, in the
            dtypes that they are given in. None on ranks that have none.
        checksums: Whether each call compares what was moved with the source; a number: every so
            many calls.
        family: The model family, as of `load`.
        config: For tensors: the model's config.json, or its folder, where the engine does not say
            it.
        allow: As of `load`.

    Returns:
        A `Refit`: calling it moves the weights, and returns a report.

    Raises:
        UcpError: On every rank, before anything moved: the target can't be filled so.

    Weights are those that the source computes with; its masters, where the target has masters or a
    wider dtype. When a tensor of either side was replaced, the next call plans again by itself.
    `ucp.resize` moves all states.

    Example:
        >>> refit = ucp.refit(trainer, rollout)
        >>> for batch in batches:
        ...     train(trainer, batch)
        ...     refit()
    """
    with agree.as_rank_error("the refit", "nothing was moved"):
        agree.require_same(
            {
                "checksums": checksums,
                "family": agree.plain_option(family),
                "config": agree.plain_option(config),
                "allow": agree.plain_option(allow),
            }
        )
        with agree.together():
            _check(source, target, checksums, allow)
        return Refit(source, target, checksums, family, config, frozenset(allow))


def _check(source: Any, target: Any, checksums: Any, allow: Any) -> None:
    check_words(allow, {MEMORY})
    if not isinstance(checksums, int) or checksums < 0:
        raise UsageError(
            "checksums says whether, or how often, what was moved is compared",
            expected="True, False, or a number: 10 for every tenth call",
            found=repr(checksums),
            fix="give one of these",
        )
    shared = set() if isinstance(target, Mapping) else params_of(source) & params_of(target)
    if shared:
        raise UsageError(
            "source and target of a refit have parameters in common: what is read would be written",
            expected="a model of its own for each of them",
            found=f"{len(shared)} parameters of both",
            fix="build another model for the engine that is filled",
        )
    odd = _odd_tensors(target) if isinstance(target, Mapping) else []
    if not odd and isinstance(target, Mapping) and (both := _in_one_memory(target)):
        raise UsageError(
            "two targets of a refit lie in one memory: the last one's values would stay",
            parameter=" and ".join(both),
            expected="memory of its own for each tensor",
            found="memory that they share",
            fix="give one of them, or tensors such as torch.empty(shape, dtype=..., device=...)",
        )
    if odd:
        raise UsageError(
            "a target of a refit is no tensor that can be filled",
            parameter=some_of(odd),
            expected="contiguous tensors by name",
            found=f"{len(odd)} others",
            fix="give tensors such as torch.empty(shape, dtype=..., device=...)",
        )


def _odd_tensors(tensors: Mapping[Any, Any]) -> list[str]:
    return [
        str(name)
        for name, one in tensors.items()
        if not (isinstance(name, str) and isinstance(one, torch.Tensor))
        or one.layout != torch.strided
        or not one.is_contiguous()
        or one.is_meta
        or (one.is_inference() and not torch.is_inference_mode_enabled())
    ]


def _in_one_memory(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of two tensors that have bytes in common; empty where none have."""
    rows = sorted((str(one.device), one.data_ptr(), one.nbytes, n) for n, one in tensors.items())
    for (device, start, size, name), (other, next_start, _, next_name) in pairwise(rows):
        if device == other and next_start < start + size:
            return [name, next_name]
    return []
