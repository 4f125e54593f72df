"""What Megatron-LM's older files (`--ckpt-format torch`) hold of this rank's part of a stack: the
values that its own program gives to `torch.save`, asked of megatron-core's own functions.

Their reader derives from the flags in them where everything lies in the optimizer's buffers: so
these are compared with the live buffers before anything is written.
"""

import random
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import MASTER
from megatron_ucp.engines.megatron.engine.inner import pieces_of
from megatron_ucp.engines.megatron.engine.live import LiveMegatron
from megatron_ucp.engines.megatron.engine.present import PresentStates
from megatron_ucp.engines.megatron.engine.stack import MegatronStack
from megatron_ucp.engines.megatron.names import bare_model, canonical_names
from megatron_ucp.errors import SaveError, StateMismatchError, UnsupportedError, some_of
from megatron_ucp.formats.megatron.arguments import size
from megatron_ucp.formats.megatron.extras import OPERATIONS, SCHEDULER
from megatron_ucp.formats.megatron.flat import (
    BUFFER_STATES,
    EMBEDDING,
    HEAD,
    PlacedBuffer,
    RunLayout,
)
from megatron_ucp.formats.megatron.folder import WITHOUT_MASTERS
from megatron_ucp.formats.megatron.groups import Membership, SavedGroup
from megatron_ucp.formats.megatron.names import BUFFERS, global_name
from megatron_ucp.formats.megatron.rank_folder import RANDOM, RankFolder
from megatron_ucp.formats.megatron.stages import PipelinePart, parts_of
from megatron_ucp.reshard import agree

_OTHERWISE = "save it as torch_dist: leave ckpt_format (--ckpt-format) out"


def folder_of(mesh: Mesh, rank: int) -> RankFolder:
    """Where a rank's files lie, which its copies share."""
    at, (expert, _) = mesh.coord(rank), mesh.expert_place(rank)
    return RankFolder(at.tp, at.pp, expert)


# ------------------------------------------------ before anything is written


def refuse(present: PresentStates, stack: MegatronStack) -> None:
    """Raises UnsupportedError for what these files, or their readers, have no place for."""
    mesh = stack.mesh
    stubs = [one for one in _chained(stack) if one.is_stub_optimizer]
    held = sorted(state for state, _ in present.states)
    has_experts = any(spec.expert is not None for spec in present.manifest.params)
    empty = [live for live in present.live.own.buffers if not live.pieces]
    frozen = [spec.name for spec in present.manifest.params if spec.kind == "frozen"]
    _require("an optimizer that steps every parameter", not frozen, f"frozen: {some_of(frozen)}")
    _require("a parameter to step at every stage", not stubs, "a stage without any")
    known = not mesh.zero or held == sorted({*BUFFER_STATES.values()} - {MASTER})
    _require("exp_avg and exp_avg_sq", known, ", ".join(held))
    alike = not has_experts or mesh.cut_of_experts == mesh.cut_of_dense
    _require("experts that are cut as the rest is", alike, str(mesh))
    _require("a piece of each bucket on every rank", not empty, f"{len(empty)} buckets without one")


def _require(expected: str, is_so: object, found: str) -> None:
    if not is_so:
        raise UnsupportedError(
            "this can't be saved in Megatron-LM's older files (ckpt_format torch)",
            expected=expected,
            found=found,
            fix=_OTHERWISE,
        )


def require_described(live: LiveMegatron, flags: Namespace, file: str) -> None:
    """Raises UnsupportedError where the flags describe other stages, groups or buffers than this
    rank has: a load would take elements for others."""
    mesh, said = live.manifest.mesh, vars(flags)
    here, names = folder_of(mesh, live.own.rank), _names_as_read(live, said, file)
    _require_groups(live, said, file)

    def registered(part: PipelinePart, expert: int) -> Sequence[str]:
        return names.get(part, ()) if expert in (0, here.expert) else ()

    if mesh.zero:
        layout = RunLayout(said, mesh, [*names], live.manifest.by_name, registered)
        found = [_placed(one) for one in layout.buffers() if _is_of(one, here)]
        _compare("buffers", found, _buffers_of(live))
    else:
        _require_in_order(live, [name for own in names.values() for name in own])


def _names_as_read(
    live: LiveMegatron, said: Mapping[str, Any], file: str
) -> dict[PipelinePart, list[str]]:
    """The parameters of each of this rank's parts, in the order of the model, as a reader of the
    flags names them. Raises UnsupportedError where the live ones have other names."""
    here = folder_of(live.manifest.mesh, live.own.rank)
    parts = [p for p in parts_of(said, live.manifest.mesh, file) if p.stage == here.stage]
    first_expert = here.expert * (size(said, "num_experts", 0) // live.manifest.mesh.ep)
    tied = not said["untie_embeddings_and_output_weights"]
    names: dict[PipelinePart, list[str]] = {}
    for part, chunk in zip(parts, live.own.chunks, strict=True):
        canonical = canonical_names(bare_model(chunk))
        as_read = [
            EMBEDDING if tied and name == HEAD else global_name(name, part.first, first_expert)
            for name in canonical
        ]
        _compare("layers or experts", as_read, [*canonical.values()])
        names[part] = [name for name in as_read if not name.endswith(BUFFERS)]
    return names


def _require_groups(live: LiveMegatron, said: Mapping[str, Any], file: str) -> None:
    """Raises UnsupportedError where a parameter is in another group than Megatron-LM's rules give
    it: the files list none, so a load would give it the settings of another one, or its states.
    And for flags of optimizers whose files are not read."""
    odd = [what for name, what in WITHOUT_MASTERS.items() if said.get(name)]
    _require("flags of an optimizer whose files hold fp32 masters", not odd, some_of(odd))
    membership = Membership.by_arguments(
        [SavedGroup(g, None) for g in live.own.groups()], said, file
    )
    for name, own in live.own.own_groups().items():
        try:
            found = membership.numbers(live.manifest.by_name[name])
        except StateMismatchError:
            found = []
        # states lie group by group where ranks don't share them
        alike = own in found if live.manifest.mesh.zero else found[:1] == [own]
        _require("groups of parameters by Megatron-LM's own rules", alike, f"another for {name}")


def _require_in_order(live: LiveMegatron, names: Sequence[str]) -> None:
    """Raises UnsupportedError where an optimizer steps a group's parameters in another order than
    the model has them: its states would be taken for others'."""
    places = {name: number for number, name in enumerate(names)}
    for inner in live.own.inner:
        stepped = {piece.master: live.own.names[piece.param] for piece in pieces_of(inner)}
        for group in inner.optimizer.param_groups:
            own = [stepped[master] for master in group["params"]]
            in_order = own == sorted(own, key=places.__getitem__)
            _require("parameters stepped in the order of the model", in_order, some_of(own))


def _is_of(one: PlacedBuffer, here: RankFolder) -> bool:
    is_own = not one.optimizer or one.expert_rank == here.expert
    return one.stage == here.stage and is_own


def _placed(one: PlacedBuffer) -> tuple[int, dict[str, int]]:
    """How many elements the files have of a buffer, and where each parameter begins."""
    layout = one.layout
    starts = {param.name: layout.unpadded_start(param) for param in layout.params}
    return sum(bucket.used for bucket in layout.buckets), starts


def _buffers_of(live: LiveMegatron) -> list[tuple[int, dict[str, int]]]:
    """The same of the live buffers."""
    out: list[tuple[int, dict[str, int]]] = []
    for inner in live.own.inner:
        for buffer in inner.buffers:
            starts: dict[str, int] = {}
            for bucket, before in _unpadded(buffer):
                for param in bucket.params_list:
                    start = buffer.param_index_map[param][0] - bucket.offset
                    starts[live.own.names[param]] = before + start
            out.append((buffer.numel_unpadded, starts))
    return out


def _unpadded(buffer: Any) -> list[tuple[Any, int]]:
    """The buckets of a buffer, and where each begins in the files, which leave out what fills one
    up."""
    out: list[tuple[Any, int]] = []
    before = 0
    for bucket in buffer.buckets:
        out.append((bucket, before))
        before += bucket.numel_unpadded
    return out


def _compare(what: str, found: Any, live: Any) -> None:
    if found != live:
        raise UnsupportedError(
            f"the flags describe other {what} than the stack has",
            expected=str(live)[:200],
            found=str(found)[:200],
            fix=f"give the flags that the stack was built with, or {_OTHERWISE}",
        )


# ------------------------------------------------ what the files hold


def model_value(stack: MegatronStack, flags: Namespace, generators: Any) -> dict[str, Any]:
    """The value in a rank's first file, whose tensors are the live ones. Raises SaveError."""
    out: dict[str, Any] = {
        "args": flags,
        "checkpoint_version": 3.0,
        "iteration": stack.iteration,
    }
    for number, chunk in enumerate(stack.chunks):
        key = "model" if len(stack.chunks) == 1 else f"model{number}"
        out[key] = bare_model(chunk).state_dict_for_save_checkpoint()
    try:
        out["optimizer"] = stack.optimizer.state_dict()
    except AssertionError as error:  # megatron-core's word where it finds no step
        raise SaveError(
            "megatron-core's optimizer does not give its state", found=str(error), fix=_OTHERWISE
        ) from error
    if stack.scheduler is not None:
        out[SCHEDULER] = stack.scheduler.state_dict()
    if generators:
        out[RANDOM] = generators
    return {**out, OPERATIONS: stack.floating_point_operations}


def generators_of(flags: Namespace) -> list[dict[str, Any]]:
    """The random generators as Megatron-LM's program has them: of this rank, or of all that share
    its part of the model where they draw apart. Collective."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker: Any = get_cuda_rng_tracker()
    is_there = torch.cuda.is_available()
    own = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if is_there else torch.get_rng_state(),
        "rng_tracker_states": tracker.get_states(),
    }
    if not getattr(flags, "data_parallel_random_init", False):
        return [own]
    copies: Any = parallel_state.get_data_parallel_group()
    every = agree.gather(own)
    return [every[rank] for rank in torch.distributed.get_process_group_ranks(copies)]


def buffers_value(stack: MegatronStack) -> Any:
    """The value in the second file of the rank that is the first one to share buffers: of one
    optimizer, or a list of those of a chain. None on every other rank. Collective; every rank's
    elements are gathered, as megatron-core does it."""
    if not stack.mesh.zero:
        return None
    found = [one.get_parameter_state_dp_zero() for one in _chained(stack)]
    if all(one is None for one in found):
        return None
    return found[0] if len(found) == 1 else found


def _chained(stack: MegatronStack) -> list[Any]:
    return getattr(stack.optimizer, "chained_optimizers", [stack.optimizer])


def buffers_held(live: LiveMegatron, value: Any) -> dict[Slot, torch.Tensor]:
    """What such a value has of each of the live buffers, as one partition."""
    own = dict(zip(live.own_numbers, live.own.buffers, strict=True))
    cuts = {number: cut for number, cut, _ in live.parts()}
    numbers = iter(own)
    values = value if isinstance(value, list) else [value]
    out: dict[Slot, torch.Tensor] = {}
    for inner, held in zip(live.own.inner, values, strict=True):
        for index, buffer in enumerate(inner.buffers):
            for bucket, at in _unpadded(buffer):
                number = next(numbers)
                (states,) = held[index].values() if held is not None else ({},)
                for name, state in BUFFER_STATES.items() if states else ():
                    memory = states[name][at : at + bucket.numel_unpadded]
                    out[Slot(number, cuts[number], 0, state)] = memory
    return out
