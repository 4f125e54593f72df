"""From one mesh to another without files: `hold` keeps a run in the memory of the ranks that
stay, `load` fills the new engine with it; `resize` does both where the world stays the same."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from megatron_ucp import say
from megatron_ucp.core.manifest import ORIGIN, BufferPart
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines.background import wait_together
from megatron_ucp.engines.load import MemorySource, collector_paused, load
from megatron_ucp.engines.record import HANDLE, run_of
from megatron_ucp.engines.run_state import STEPS, DrawnState, ResumableLoader, RunState
from megatron_ucp.errors import RankError, UsageError
from megatron_ucp.formats.checkpoint import Extras
from megatron_ucp.formats.in_memory import RunInMemory
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine, Holder, LoadOptions, Report
from megatron_ucp.reshard.fingerprint import (
    diverged,
    joined_sums,
    recorded_as,
    recorded_in,
    sums_of_rank,
    table_of,
)
from megatron_ucp.reshard.kept_moves import SharedMemories
from megatron_ucp.reshard.load import resume_from_memory
from megatron_ucp.reshard.memory_layout import HostMemory, MemorySink, on_the_first, ranks_that_stay
from megatron_ucp.reshard.options import check_switch
from megatron_ucp.reshard.transfer import TransferRun, transfer

# ---- what a resize moves from
#
# A live run as what it is besides elements, and who holds these: what a resize moves from,
# whatever trains in it.


@dataclass(frozen=True)
class HoldOptions:
    """What is taken along: a `client_state`, the position of a `loader` (None: that of the loader
    that the engine was attached with), random states, and a fingerprint of all elements. `place` is
    what stands for position and random states where the program has drawn more since."""

    client_state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    loader: ResumableLoader | None = None
    rng: bool = True
    checksums: bool = True
    place: DrawnState | None = None

    def drawn_now(self) -> DrawnState:
        """Position and random states, as they are kept."""
        return self.place or DrawnState.now(self.loader, self.rng)


def lent(holder: Holder, state: RunState, extras: Extras, options: HoldOptions) -> "MemoryRun":
    """Puts together what all ranks have besides elements, which the `holder` has. Collective.
    Raises a UcpError on every rank."""
    manifest = holder.manifest
    table, apart = _summed(holder) if options.checksums else ({}, [])
    files = agree.gather(state.files)
    manifest = replace(manifest, run={**state.facts, **recorded_as(table, apart)})
    run = RunInMemory(
        f"memory of {manifest.mesh}/step {state.facts.get(STEPS, 0)}",
        manifest,
        manifest,
        replace(extras, data_position=state.facts.get("data")),
        {name: data for own in files for name, data in own.items()},
        [*state.notes, *diverged(apart)],
    )
    return MemoryRun(run, holder)


def _summed(holder: Holder) -> tuple[dict[str, dict[str, str]], list[str]]:
    """As `table_of` of what all ranks hold. Collective."""
    with agree.together():
        own = sums_of_rank(holder)
    joined = joined_sums(own)
    return agree.of_first(lambda: table_of(holder.manifest, joined))


@dataclass(frozen=True)
class _LiveRun(MemorySource):
    """A run in a live engine that all ranks of this world have: nobody joined, and nobody left."""

    run: RunInMemory
    holder: Holder

    def resume(self, engine: Engine, options: LoadOptions) -> Report:
        return resume_from_memory(engine, self.run, self.holder, options)


# ---- hold, and resize


@dataclass
class MemoryRun(MemorySource):
    """A run whose elements lie in the memory of ranks, as this rank has it: what `hold` returns,
    and what a resize moves from.

    `run` is what it is besides elements, `holder` has this rank's elements (both None on a rank
    that joins), and `held_by` says which rank has each part. `id` is the same on all ranks that
    have the run. `release()` lets go of the memory, as a load does that was whole.
    """

    run: RunInMemory | None = field(default=None, repr=False)
    holder: Any = field(default=None, repr=False)
    held_by: Mapping[BufferPart, int] = field(default_factory=dict[BufferPart, int], repr=False)
    id: str = field(default="", repr=False)
    is_released: bool = field(default=False, repr=False)

    @property
    def known(self) -> RunInMemory:
        """What the run is besides elements. Raises UsageError where this rank does not know."""
        if self.run is None:
            raise UsageError("nothing is held", found=repr(self), fix="give what ucp.hold returned")
        return self.run

    @property
    def size_bytes(self) -> int:
        """Host memory that the elements on this rank take beside those of an engine."""
        return self.holder.size_bytes if isinstance(self.holder, HostMemory) else 0

    @property
    def is_empty(self) -> bool:
        """Whether this rank keeps nothing: it joined, or others keep all that it had."""
        return not self.size_bytes

    def resume(self, engine: Engine, options: LoadOptions) -> Report:
        left = "what is held is whole on this rank; the new engine is not usable"
        with agree.as_rank_error("the load", left):
            run, held_by = _everywhere(self)
            holder = self.holder or HostMemory(run.manifest, [])
            _require_whole(run, held_by, holder)
            report = resume_from_memory(engine, run, holder, options)
        self.release()
        return report

    def release(self) -> None:
        """Lets go of the memory. The run can't be loaded from it again."""
        if isinstance(self.holder, HostMemory):
            self.holder.release()
        self.run = self.holder = None
        self.is_released = True


def hold(
    engine: Any,
    mesh: Mesh | str | None = None,
    ranks: int | None = None,
    *,
    client_state: Mapping[str, Any] | None = None,
    loader: ResumableLoader | None = None,
    rng: bool | None = None,
    checksums: bool | None = None,
) -> MemoryRun:
    """Keeps a run in host memory, so that the program can build another world around it: another
    mesh, fewer ranks or more. Between two steps; collective. The engine is as before.

    Args:
        engine: An attached engine; None in a process that joins the new world and has nothing.
        mesh: The mesh to come, such as "dp=3,zero=3": as many ranks stay as it has.
        ranks: How many ranks stay: the first ones of this world. The others keep nothing, and may
            leave; what they alone have is dealt to those that stay. Default: as many as the mesh
            has, else all.
        client_state: Values of the program, as of `save_checkpoint`; `load` gives them back.
        loader: The data loader whose position is kept. Default: that of `attach`.
        rng: Whether random states are kept. Default: as `attach` was told, else true.
        checksums: Whether the fingerprint of the state is taken, and compared with what is held and
            what is loaded. Default: as `attach` was told, else true.

    Returns:
        What `load(engine, held)` takes, on all ranks of the new world.

    Raises:
        UcpError: On every rank, before anything moved: the run can't be held so.
        RankError: A rank died while elements moved; the engine is whole on the others.

    Example:
        >>> held = ucp.hold(engine, mesh="dp=3,zero=3", ranks=3)
        >>> engine = rebuild(ranks=3)  # process groups, model, engine: the program's own
        >>> report = ucp.load(engine, held)
    """
    if engine is None:
        return MemoryRun()
    options = _taking(engine, client_state, loader, rng, checksums)
    left = "the engine is whole on this rank, and can go on or be saved"
    with agree.as_rank_error("the hold", left):
        wished = _checked(engine, mesh, ranks, options)
        return _held(lent_by(engine, options), wished, ranks)


def resize(
    old_engine: Any,
    new_engine: Any,
    *,
    client_state: Mapping[str, Any] | None = None,
    **options: Any,
) -> Report:
    """Fills a live engine with what another one of the same ranks holds, from memory to memory.
    Between two steps; collective. The old engine is only read.

    Args:
        old_engine: An attached engine.
        new_engine: An engine of the same model on another mesh, with an optimizer or without one.
        client_state: Values of the program, which the report gives back.
        options: As of `load`.

    Returns:
        What was done, as of `load`.

    Raises:
        UcpError: As `load`.

    Example:
        >>> report = ucp.resize(trainer, evaluator, load_module_only=True)
    """
    of_both = (options.get(name) for name in ("loader", "rng", "checksums"))
    how = _taking(old_engine, client_state, *of_both)
    left = "the old engine is whole on this rank"
    with agree.as_rank_error("the resize", left), collector_paused():
        _checked(old_engine, None, None, how)
        _refuse_shared(old_engine, new_engine)
        taken = lent_by(old_engine, how)
        return load(new_engine, _LiveRun(taken.known, taken.holder), **options)


def _taking(
    engine: Any, client_state: Mapping[str, Any] | None, loader: Any, rng: Any, checksums: Any
) -> HoldOptions:
    """What is taken along; what is not said (None) is as `attach` was told."""
    attached = getattr(getattr(engine, HANDLE, None), "options", {})
    rng = attached.get("rng", True) if rng is None else rng
    checksums = attached.get("checksums", True) if checksums is None else checksums
    return HoldOptions(dict(client_state or {}), loader, rng, checksums)


def lent_by(engine: Any, options: HoldOptions) -> MemoryRun:
    """An attached engine as a run. A save that is under way is there before. Collective."""
    wait_together(engine)
    taken: MemoryRun = getattr(engine, HANDLE).lent(options)
    run = taken.known
    manifest = replace(run.original, run={**run.original.run, ORIGIN: run_of(engine).origin})
    return replace(taken, run=replace(run, original=manifest, manifest=manifest))


def _checked(engine: Any, mesh: Any, ranks: int | None, options: HoldOptions) -> Mesh | None:
    """The mesh that was asked for, of all ranks alike. Collective. Raises UsageError."""
    asked = {
        "mesh": agree.plain_option(mesh),
        "ranks": ranks,
        "rng": options.rng,
        "checksums": options.checksums,
    }
    agree.require_same(asked)
    with agree.together():
        check_switch("rng", options.rng)
        check_switch("checksums", options.checksums)
        require_attached(engine)
        found = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
        ranks_that_stay(found, ranks, agree.world()[1])
    return found


def require_attached(engine: Any) -> None:
    """Raises UsageError for what is no attached engine."""
    if getattr(engine, HANDLE, None) is None:
        raise UsageError(
            "this is no attached engine",
            expected="an engine of DeepSpeed after ucp.attach, or what ucp.attach_megatron "
            "returned",
            found=type(engine).__name__,
            fix="attach the engine first: ucp.attach(engine)",
        )


def _refuse_shared(old_engine: Any, new_engine: Any) -> None:
    """Collective. Raises UsageError for two engines around one model."""
    with agree.together():
        one, other = (params_of(engine) for engine in (old_engine, new_engine))
        if one & other:
            raise UsageError(
                "the two engines have parameters in common: what is read would be written",
                expected="a model of its own for each engine",
                found=f"{len(one & other)} parameters of both",
                fix="build another model for the new engine; or ucp.hold(old_engine), build it, "
                "and ucp.load(new_engine, held)",
            )


def params_of(engine: Any) -> set[int]:
    """The parameters of an engine, by their numbers."""
    modules = getattr(engine, "chunks", None) or [getattr(engine, "module", None)]
    return {id(param) for module in modules if module is not None for param in module.parameters()}


# ------------------------------------------------ holding


def _held(lent: MemoryRun, mesh: Mesh | None, ranks: int | None) -> MemoryRun:
    here = agree.collect(lent.holder.parts)
    run, stay = lent.known, ranks_that_stay(mesh, ranks, agree.world()[1])
    takers = on_the_first(run.manifest, here, stay)
    memory = HostMemory(run.manifest, takers[agree.world()[0]])
    source = SharedMemories(run.name, lent.holder)
    sink = MemorySink(memory, recorded_in(run.original.run))
    with say.progress("hold") as advance:
        done = transfer(source, sink, run=TransferRun(progress=advance)).done
    held = MemoryRun(run, memory, _owners(takers), agree.of_first(lambda: uuid.uuid4().hex))
    kept, moved, keepers = agree.total(done, source.read_bytes, int(done > 0))
    amounts = f"{say.amount(kept)} on {keepers} ranks, {say.amount(moved)} of it from others"
    say.ended(f"held {run.name} in memory: {amounts}", run.notes)
    return held


def _owners(takers: Sequence[Sequence[BufferPart]]) -> dict[BufferPart, int]:
    """The first rank that holds each part."""
    out: dict[BufferPart, int] = {}
    for rank, parts in enumerate(takers):
        for part in parts:
            out.setdefault(part, rank)
    return out


# ------------------------------------------------ loading


def _everywhere(held: MemoryRun) -> tuple[RunInMemory, Mapping[BufferPart, int]]:
    """What is held and by whom, on a rank that joined too. Collective. Raises UsageError."""
    with agree.gathering() as block:
        if held.is_released:
            raise UsageError(
                "what was held was let go of",
                expected="what ucp.hold returned, once",
                found="a run that was loaded from it, or release()",
                fix="hold the run again, or load a save",
            )
        block.value = None if held.run is None else held.id
    ids = block.values
    found = {one for one in ids if one is not None}
    if len(found) != 1:
        raise UsageError(
            "the ranks don't hold one run",
            expected="what one ucp.hold returned, on at least one rank; ucp.hold(None) on others",
            found=f"{len(found)} runs on {len(ids)} ranks",
            fix="give every rank what its own ucp.hold returned, or load a save",
        )
    if None in ids:
        first = next(rank for rank, one in enumerate(ids) if one is not None)
        told = agree.gather((held.run, held.held_by) if agree.world()[0] == first else None)
        if held.run is None:
            return cast("tuple[RunInMemory, Mapping[BufferPart, int]]", told[first])
    return held.known, held.held_by


def _require_whole(run: RunInMemory, held_by: Mapping[BufferPart, int], holder: Holder) -> None:
    """Collective. Raises RankError where nobody here has a part of what was held."""
    here = {part for parts in agree.gather(holder.parts()) for part in parts}
    lost = sorted({rank for part, rank in held_by.items() if part not in here})
    if lost:
        raise RankError(
            "a part of what was held is not in this world",
            file=run.name,
            expected="every rank that stays, with what its ucp.hold returned",
            found=f"nothing of what ranks {', '.join(map(str, lost))} of the old world held",
            fix="build the new world of the ranks that stay and of new ones; or load the newest "
            "save",
        )
