"""A third engine as somebody would add one: plain torch in one process, a module and an optimizer.

`Program` is what trains. All else is what the package asks of an engine: a description of what lies
where (`describe`), what a load does with it (`LiveProgram`), the handle with its operations, and a
save.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron_ucp.core.flat import NO_SCALARS, FlatBuffer, Scalars, alone
from megatron_ucp.core.join_ranks import Stage
from megatron_ucp.core.manifest import RUN, BufferPart, Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper, dtype_name
from megatron_ucp.core.plan import Slot
from megatron_ucp.engines.handle import Handle
from megatron_ucp.engines.hold import HoldOptions, MemoryRun, lent
from megatron_ucp.engines.live import (
    LiveShards,
    built_groups,
    flat_view,
    group_of,
    require_usable,
    scalar_state,
    set_groups,
)
from megatron_ucp.engines.record import run_of
from megatron_ucp.engines.run_state import SEED, STEPS, CommonState, DrawnState, RunState
from megatron_ucp.engines.save import PendingSave, SaveOptions, SaveReport, SaveRequest, save_engine
from megatron_ucp.engines.values import LiveValues, Values, inert
from megatron_ucp.formats.checkpoint import CallerModel, Extras
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.optimizers import kept_by
from megatron_ucp.formats.output_folder import Syncs
from megatron_ucp.formats.tags import LATEST
from megatron_ucp.reshard.engine import Wants
from megatron_ucp.reshard.fingerprint import sums_of_rank
from tests.formats.toy_format import ToyFiles


class Program:
    """A module that torch's AdamW trains."""

    def __init__(self, module: torch.nn.Module, lr: float = 1e-3) -> None:
        self.module = module
        trained = [param for param in module.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=lr)
        self.global_steps = 0
        self.ucp = ProgramHandle(self, module, None)

    def step(self, loss: torch.Tensor) -> None:
        """One step."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.global_steps += 1


# ---- what lies where


class Shard:
    """What the one rank has: each trained parameter in a buffer of its own, and the others."""

    at = ()

    def __init__(self, program: Program) -> None:
        self.program, self.param_groups = program, program.optimizer.param_groups
        named = dict(program.module.named_parameters())
        numbers = {id(p): n for n, group in enumerate(self.param_groups) for p in group["params"]}
        self.trained = {name: param for name, param in named.items() if id(param) in numbers}
        self.group = {name: numbers[id(param)] for name, param in self.trained.items()}
        frozen = {name: param for name, param in named.items() if name not in self.trained}
        self.values: dict[str, torch.Tensor] = {**frozen, **dict(program.module.named_buffers())}

    def stage(self, present: bool) -> Stage:
        """With the states that the optimizer has now, or with the masters alone."""
        params = [_spec(name, param, "trainable") for name, param in self.trained.items()]
        frozen = {name for name, _ in self.program.module.named_parameters()}
        for name, value in self.values.items():
            params.append(_spec(name, value, "frozen" if name in frozen else "buffer"))
        buffers = [self._buffer(name, present) for name in self.trained]
        values = [
            alone(name, value.numel(), ((VALUE, dtype_name(value.dtype)),))
            for name, value in self.values.items()
        ]
        groups = [
            group_of(group, ("params",), "torch.AdamW", self.program.optimizer)
            for group in self.param_groups
        ]
        return Stage(tuple(params), tuple(buffers), tuple(groups), tuple(values))

    def _buffer(self, name: str, present: bool) -> FlatBuffer:
        param = self.trained[name]
        held = self.program.optimizer.state[param] if present else {}
        kept = [(state, value) for state, value in held.items() if state != "step"]
        states = ((MASTER, "float32"), *((s, dtype_name(value.dtype)) for s, value in kept))
        scalars = {"step": float(held["step"])} if "step" in held else NO_SCALARS
        return alone(name, param.numel(), states, self.group[name], scalars)


def _spec(name: str, tensor: torch.Tensor, kind: str) -> ParamSpec:
    return ParamSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype), kind)


def describe(program: Program, present: bool = False) -> "LiveProgram":
    """The engine as it is. Nothing in it is changed."""
    shard = Shard(program)
    return LiveProgram(shard, shard.stage(present))


class LiveProgram(LiveShards):
    """The engine as a load fills it, and as a save and a hold read it."""

    has_optimizer = True
    has_one_step = False

    def __init__(self, shard: Shard, stage: Stage) -> None:
        program = shard.program
        super().__init__(shard, program, [program.module], [stage], [()], "use one process")
        self.shard, self.program, joined = shard, shard.program, self.joined
        self.manifest = Manifest(
            Keeper.ZERO_0, Mesh(), joined.params, joined.buffers, joined.groups
        )
        self._trained, self._values = self.numbered(
            [*shard.trained.values()], [*shard.values.values()]
        )

    def told(self) -> CallerModel:
        return CallerModel(like=self.manifest)

    def parts(self) -> list[BufferPart]:
        return self.manifest.parts_of(0)

    def tensor(self, slot: Slot) -> torch.Tensor:
        if slot.state == VALUE:
            return flat_view(self._values[slot.buffer].detach())
        param = self._trained[slot.buffer]
        if slot.state == MASTER:
            return flat_view(param.detach())
        return flat_view(self.program.optimizer.state[param][slot.state])

    def state_dtype(self, buffer: int, state: str) -> str:
        return "float32"

    def ready(self, wants: Wants) -> "ReadyProgram":
        values = Values.of(wants.source, "values" in wants.options.allow)
        groups, left = built_groups(self.param_groups, wants.groups, wants)
        common = CommonState.prepare(wants.source, values, wants.options, Mesh(), (0, 0))
        return ReadyProgram(self.program, common, wants, groups, (*left, *values.notes))

    def prepare(self, states: Mapping[int, Sequence[str]] = MappingProxyType({})) -> None:
        for number, kept in states.items():
            param = self._trained[number]
            self.program.optimizer.state[param] = {
                state: torch.zeros_like(param, dtype=torch.float32) for state in kept
            }

    def filled(
        self, ready: "ReadyProgram | None", scalars: Mapping[int, Sequence[Scalars]]
    ) -> list[str]:
        """The masters are the weights."""
        if ready is None:
            return []
        self.program.optimizer.zero_grad()
        for buffer, members in scalars.items():
            param, group = self._trained[buffer], self.manifest.groups[0].settings
            for key, value in members[0].items():
                kept = scalar_state(value, kept_by("torch.AdamW", group), group, param)
                self.program.optimizer.state[param][key] = kept
        return set_groups(self.param_groups, ready.groups, ready.wants.carried) + ready.apply()


# ---- what the engine is besides elements


def read_state(
    program: Program, client_state: Mapping[str, Any], drawn_now: Any, folder: Path = Path()
) -> RunState:
    """What a save writes and a hold keeps."""
    facts = {STEPS: program.global_steps, SEED: torch.initial_seed(), RUN: run_of(program).id}
    own = LiveValues({}, client_state, None, False, {})
    return RunState.of_ranks(lambda: (facts, own), drawn_now, folder)


@dataclass(frozen=True)
class ReadyProgram:
    """What a load sets besides elements."""

    program: Program
    common: CommonState
    wants: Wants
    groups: Sequence[Mapping[str, Any]]
    notes: tuple[str, ...]

    @property
    def client_state(self) -> Mapping[str, Any]:
        return self.common.client_state

    def apply(self) -> list[str]:
        if self.wants.options.module_only:
            return []
        self.program.global_steps = self.common.counters.get(STEPS, 0)
        return self.common.apply()


# ---- operations


@dataclass(frozen=True)
class ProgramSave(SaveRequest):
    """A save in the toy format."""

    client_state: Mapping[str, Any]

    def take(self, sync: Syncs, left: ExitStack) -> PendingSave:
        from megatron_ucp.formats import output_folder

        left.enter_context(output_folder.begin(self.folder, self.tag, sync.right))
        live, options = describe(self.engine, present=True), self.options
        drawn_now = partial(DrawnState.now, options.loader, options.rng)
        state = read_state(self.engine, self.client_state, drawn_now, self.aside)
        slots = {
            Slot(*part, name): live.tensor(Slot(*part, name))
            for part in live.parts()
            for name, _ in live.manifest.buffers[part[0]].states
        }
        said = {"counters": {STEPS: self.steps}, "client_state": dict(self.client_state)}
        files = ToyFiles(self.aside, slots, said, sums_of_rank(live), sync)
        return PendingSave(
            live.manifest.mesh, lambda: live.manifest, lambda: live.manifest, state, files
        )


class ProgramHandle(Handle):
    """What stands behind `program.ucp`."""

    def describe(self) -> LiveProgram:
        return describe(self.program)

    def present(self) -> LiveProgram:
        return describe(self.program, present=True)

    def to_fill(self, family: Any) -> LiveProgram:
        return self.describe()

    def require_usable(self) -> None:
        require_usable(self.program)

    def lent(self, how: HoldOptions) -> MemoryRun:
        program = self.program
        state = read_state(program, how.client_state, how.drawn_now)
        client = {key: inert(value) for key, value in how.client_state.items()}
        extras = Extras({STEPS: program.global_steps}, None, LossScale(), None, client)
        return lent(self.present(), state, extras, how)

    def save(self, save_dir: Any, **client_state: Any) -> SaveReport:
        self.require_usable()
        steps = self.program.global_steps
        where = Path(save_dir), f"step{steps}", steps
        return save_engine(ProgramSave(self.program, *where, SaveOptions(), LATEST, client_state))
