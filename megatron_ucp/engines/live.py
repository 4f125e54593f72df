"""A live engine as its ranks together, whatever trains in it: its tensors, its optimizer's
groups, what its model computes, and whether a failed load left it unusable."""

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, cast

import torch

from megatron_ucp.core.box import Ints, dims_in_memory
from megatron_ucp.core.experts import number_and_count
from megatron_ucp.core.join_ranks import JoinedStages, Stage, join
from megatron_ucp.core.manifest import RECORDED, Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import Coords, Mesh
from megatron_ucp.core.names import Keeper, dtype_name
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.values import alike, shown
from megatron_ucp.engines.record import record_of
from megatron_ucp.engines.values import Values, inert
from megatron_ucp.errors import (
    EngineUnusableError,
    LayoutError,
    ModelMismatchError,
    SaveError,
    UnsupportedError,
)
from megatron_ucp.families.arguments import with_model
from megatron_ucp.families.family import Model
from megatron_ucp.families.settings import architecture_of
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint
from megatron_ucp.formats.hugging_face.checkpoint import CONFIG_FILE
from megatron_ucp.formats.optimizers import DECOUPLED, Kept, is_scalar, steps_as
from megatron_ucp.formats.store import location
from megatron_ucp.reshard.engine import Wants
from megatron_ucp.reshard.hugging_face.names import check_config, other_settings, settings_of

# ---- live tensors
#
# Live tensors as manifests describe them, whatever engine holds them.


def spec_of(
    model: Model | None,
    mesh: Mesh,
    experts: Mapping[str, int],
    name: str,
    local: tuple[int, ...],
    tensor: Any,
    kind: str,
) -> ParamSpec:
    """A parameter as its family declares it, after the live one, which has the shape `local` on
    this rank, was compared with the declaration; without a family each is whole. `experts` are
    those of each layer, by its canonical name. Raises LayoutError."""
    dtype = dtype_name(tensor.dtype)
    expert = number_and_count(name, experts)
    if model is None or kind == "buffer":
        return ParamSpec(name, local, dtype, kind, expert=expert)
    declared = model.find(name)
    share = declared.layout.local_shape(name, declared.shape, mesh.first_shares())
    if share != local:
        raise LayoutError(
            "a live parameter has another shape than its family declares",
            parameter=name,
            found=local,
            expected=f"{share} of {declared.shape} at tp={mesh.tp}",
            fix=f"check that the model is a {model.family.name} with the sizes of its config",
        )
    for attribute, value in declared.attributes.items():
        # absent where the layer spec sets none: the shape was checked
        found = getattr(tensor, attribute, value)
        if found != value:
            raise LayoutError(
                f"a live parameter's attribute {attribute} contradicts its family",
                parameter=name,
                expected=value,
                found=found,
                fix=f"check {model.family.source}",
            )
    return replace(declared.spec(name, dtype, kind), expert=expert)


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor. Raises UnsupportedError for one with gaps."""
    if not tensor.is_contiguous():
        raise UnsupportedError(
            "a live tensor is not contiguous",
            found=f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            fix="make it contiguous when the model is built",
        )
    return tensor.view(-1)


def order_of(tensor: torch.Tensor) -> Ints | None:
    """The dims in the order in which the memory stores them, where that is not their own. Raises
    UnsupportedError for a tensor whose memory has gaps, or is shared by its elements."""
    if tensor.is_contiguous():
        return None
    order = dims_in_memory(tuple(tensor.shape), tensor.stride())
    if order is None:
        flat_view(tensor)
    return order


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, flat, its dims in the order of `order_of`."""
    order = order_of(tensor)
    return flat_view(tensor if order is None else tensor.permute(order))


def parts_of(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """The modules, and all in them, each once. In a fraction of the time of `modules()`, which
    makes a name for each: a save asks several times while training waits."""
    found: dict[torch.nn.Module, None] = {}
    waiting: list[torch.nn.Module | None] = [*modules]
    while waiting:
        part = waiting.pop()
        if part is not None and part not in found:
            found[part] = None
            waiting += part._modules.values()
    return [*found]


def params_of(parts: Iterable[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """The parameters of `parts_of` modules, each once."""
    held = {id(p): p for part in parts for p in part._parameters.values() if p is not None}
    return [*held.values()]


# what decides which entries a module has in its state dict, and under which names
_OF_STATE_DICT = (
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
)


def tensors_lie_at(
    modules: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer] = (),
    masters: Sequence[torch.Tensor] = (),
) -> list[object]:
    """Where parameters and buffers lie, and the `masters` that `optimizers` step, with their
    states: another list where a tensor, its memory, how many a group has, or a name in the state
    dict of a module, is another one. Counts of steps are left out: nobody looks at their
    memory again, and some optimizers keep a new tensor for each step."""
    parts = parts_of(modules)
    params = params_of(parts)
    held = [getattr(param, "ds_tensor", param) for param in params]  # of ZeRO-3 the partition
    held += [one for part in parts for one in part._buffers.values() if one is not None]
    for master in masters:
        states = next((one.state[master] for one in optimizers if master in one.state), {})
        held.append(master)
        for name, one in states.items():
            if isinstance(one, torch.Tensor) and not is_scalar(name):
                held.append(one)
    groups = [len(group["params"]) for one in optimizers for group in one.param_groups]
    who = [*map(id, modules), *map(id, params), *map(id, masters)]
    dicts = [[tuple(one.__dict__[kept]) for kept in _OF_STATE_DICT] for one in parts]
    places = [(one.data_ptr(), one.shape, one.stride(), one.dtype) for one in held]
    return [who, groups, dicts, places]


def on_cpu(partitions: Sequence[torch.Tensor]) -> bool:
    """Whether gloo, and not NCCL, moves them."""
    return all(partition.device.type == "cpu" for partition in partitions)


def broadcast_each(partitions: Sequence[torch.Tensor], group: Any) -> None:
    """Gives every rank of a group all partitions of a buffer, which are listed in the order of the
    group's ranks; each one is written where it is. For those on the CPU. Collective.

    gloo's all-gather collects in fresh memory of the whole buffer's size first. Broadcasts take a
    quarter of its time, and a load needs no memory on top of the engine's own.
    """
    ranks = torch.distributed.get_process_group_ranks(group)
    sent: list[Any] = [
        torch.distributed.broadcast(partition.data, rank, group, async_op=True)
        for rank, partition in zip(ranks, partitions, strict=True)
    ]
    for work in sent:
        work.wait()


# ---- optimizer groups
#
# Steps and hyper-parameters as a live torch optimizer keeps them.


# How an optimizer is run on some hardware, not what a run sets.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
# What a group says of a variant of Adam that is not used: another Adam need not know the word.
_USUAL = {"amsgrad": False, "maximize": False, "bias_correction": True}
# What torch's and megatron-core's schedules keep in the groups that they move.
_OF_SCHEDULES = frozenset({"initial_lr", "max_lr"})


def scalar_state(
    value: float, keeps: Kept, group: Mapping[str, Any], master: torch.Tensor
) -> torch.Tensor | int:
    """A scalar state as the optimizer keeps it. A tensor of its own for every master: optimizers
    step it in place."""
    if keeps.step == "int":
        return int(value)
    on_device = group.get("capturable") or group.get("fused")
    device = master.device if on_device else torch.device("cpu")
    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    return torch.tensor(value, dtype=torch.float64 if wide else torch.float32, device=device)


def group_of(group: Mapping[str, Any], without: Container[str], name: str, base: Any) -> ParamGroup:
    """A live parameter group as a manifest describes it; `name` is that of its optimizer `base` in
    the table."""
    settings = {str(key): inert(value) for key, value in group.items() if key not in without}
    said = {**settings, **decay_of(base)}
    return ParamGroup(settings, name, steps_as=steps_as(name, said))


def decay_of(optimizer: Any) -> dict[str, bool]:
    """What torch's groups say of the kind of weight decay, and the fused ones by an attribute."""
    mode = getattr(optimizer, "adam_w_mode", None)
    return {} if mode is None else {DECOUPLED: bool(mode)}


def built_groups(
    live: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]], wants: Wants
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The hyper-parameters that groups get as live values, and notes of those that are left out.
    Raises UnsafePickleError."""
    out: list[Mapping[str, Any]] = []
    values = Values(str(wants.source.folder), "values" in wants.options.allow)
    for number, settings in enumerate(saved):
        like = {key: value for key, value in live[number].items() if key != "params"}
        out.append(values.built(dict(settings), f"param_groups[{number}]", like))
    return out, [f"left as the engine has it: {one}" for one in values.left]


def set_groups(
    groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]], carried: bool
) -> list[str]:
    """Gives groups of an optimizer what `built_groups` gave, if it gave any; returns notes."""
    notes: list[str] = []
    for number, settings in enumerate(saved):
        set_group(number, groups[number], settings, carried, notes)
    return notes


def set_group(
    number: int, group: dict[str, Any], saved: Mapping[str, Any], carried: bool, notes: list[str]
) -> None:
    """Gives a group of an optimizer the hyper-parameters of a checkpoint; what changes by it, and
    what is not carried, becomes a note. Not so a rate that a schedule moves: it is another one at
    every step. `carried`: the optimizer is the one of the checkpoint, so that keys which the group
    lacks are the program's own."""
    for key, value in saved.items():
        if key == DECOUPLED:
            continue  # of the optimizer's class, which was compared
        old, same = group.get(key), key in group and alike(inert(group[key]), inert(value))
        if key in _IMPLEMENTATION:
            if key in group and not same:
                notes.append(
                    f"group {number}: {key} {old} of the engine stays, the checkpoint has {value}: "
                    "it says how the optimizer runs, not what it computes"
                )
            continue
        if key not in group and not carried and key != "initial_lr":
            if key not in _USUAL or value != _USUAL[key]:
                notes.append(f"group {number}: {key}={shown(value)} is not known to this optimizer")
            continue
        is_moved = key == "lr" and not _OF_SCHEDULES.isdisjoint(group)
        if key in group and not is_moved and not same:
            notes.append(
                f"group {number}: {key} {shown(old)} of the engine's configuration became "
                f"{shown(value)} of the checkpoint"
            )
        _set(group, key, value)


def _set(group: dict[str, Any], key: str, value: Any) -> None:
    """A tensor that others may hold (a rate that a compiled step reads) is filled and stays."""
    old = group.get(key)
    with torch.no_grad():
        if isinstance(old, torch.Tensor) and not isinstance(value, torch.Tensor):
            old.fill_(value)
        elif isinstance(old, torch.Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype):
            old.copy_(value)
        else:
            group[key] = value


# ---- same model
#
# Whether a live model computes what the model in a checkpoint did, where no tensor's shape shows
# it.


_HEADS = ("heads", "groups", "head_dim")  # of a family's sizes
CONFIG = "config"  # of what a manifest records of a model of transformers
_OF_THE_RUN = ("positions",)  # the longest sequence may change from one run to the next


def check_model(source: Checkpoint, model: Model, module: Any) -> None:
    """Raises ModelMismatchError for a Hugging Face folder of a model that computes something else,
    and for other attention heads than those of the run that saved a checkpoint."""
    keeper, says_model = source.manifest.keeper, RECORDED in source.manifest.run
    if keeper == Keeper.WEIGHTS or (keeper == Keeper.DCP and not says_model):
        check_config(location(str(source.folder)), model, architecture_of(module))
    own = asdict(model.sizes)
    for name, saved in _recorded(source, "sizes").items():
        if name in _HEADS and own.get(name, saved) != saved:
            raise ModelMismatchError(
                "the model has other attention heads than the run that saved the checkpoint",
                file=str(source.folder),
                expected=f"{name}={saved}",
                found=f"{name}={own[name]}",
                fix="build the model as the run did",
            )


def computes_otherwise(source: Checkpoint, model: Model | None, module: Any) -> list[str]:
    """A note where a live model computes something else than the one in the checkpoint. Some of
    that is changed on purpose, such as the rotary base for longer sequences."""
    if model is None:
        return _other_settings(source, module)
    live = architecture_of(module)
    own: dict[str, Any] = {} if live is None else _flat(asdict(live))
    saved = _flat(_recorded(source, "architecture"))
    both = sorted({*own, *saved}) if own and saved else []
    found = [
        f"{name} {saved.get(name)} in the checkpoint, {own.get(name)} in the model"
        for name in both
        if name not in _OF_THE_RUN and own.get(name) != saved.get(name)
    ]
    return [f"the model computes something else: {'; '.join(found)}"] if found else []


def recorded_settings(module: Any) -> dict[str, Any]:
    """What a manifest says of a model of transformers; nothing of another one."""
    found = settings_of(config_of(module))
    return {CONFIG: found} if found else {}


def _other_settings(source: Checkpoint, module: Any) -> list[str]:
    if source.manifest.keeper != Keeper.WEIGHTS:
        return other_settings(_recorded(source, CONFIG), config_of(module), "the checkpoint")
    folder = source.folder
    said = settings_of(folder.json(CONFIG_FILE)) if folder.is_file(CONFIG_FILE) else {}
    return other_settings(said, config_of(module), CONFIG_FILE)


def config_of(module: Any) -> Mapping[str, Any]:
    """The config of a model of transformers, also of one that peft wrapped."""
    said = getattr(getattr(module, "config", None), "to_dict", None)
    return {} if said is None else said()


def class_name(module: Any) -> str:
    """The name of the class of a model of transformers; of one that a program derives from such a
    class, with the module that has it, so that it is nobody else's."""
    kind = type(module)
    is_theirs = kind.__module__.partition(".")[0] == "transformers"
    return kind.__name__ if is_theirs else f"{kind.__module__}.{kind.__qualname__}"


def _recorded(source: Checkpoint, part: str) -> Mapping[str, Any]:
    """What a checkpoint says of its model; nothing where it does not."""
    said: object = with_model(source.manifest).run.get(RECORDED)
    found = cast("Mapping[str, object]", said).get(part) if isinstance(said, dict) else None
    return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}


def _flat(said: Mapping[str, Any]) -> dict[str, Any]:
    """An architecture with its odd settings beside the others."""
    odd: object = said.get("odd")
    more = cast("Mapping[str, Any]", odd) if isinstance(odd, dict) else {}
    return {**{name: value for name, value in said.items() if name != "odd"}, **more}


# ---- not stepped meanwhile


def require_unstepped(before: Mapping[str, float], now: Mapping[str, float]) -> None:
    """Raises SaveError where an optimizer counts other steps than when the save began."""
    if now != before:
        other = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        was, is_ = ({key: said.get(key) for key in other[:3]} for said in (before, now))
        raise SaveError(
            "the optimizer stepped while its state was taken for a save",
            expected=f"{was}, as when the save began",
            found=f"{is_}: elements of two steps",
            fix="save from the thread that trains, between two steps",
            id="",
        )


# ---- unusable
#
# Marks parts of an engine as broken, while and after a load fails: what is in them is no state of
# the run, and no door gives it out. An engine with a broken part refuses to step, and to be saved,
# exported, held or proved, by DeepSpeed's and Megatron's own methods too; with broken weights it
# computes nothing either. What fills a part makes that part whole again, and nothing else does.

WEIGHTS, STATES = "weights", "states of the optimizer"

# Methods of engines, and of optimizers of megatron-core, that train with what is there or write it.
# Some are called by the others: a caller may go by the class, around what an engine has itself.
_OF_WEIGHTS = (
    *("forward", "eval_batch", "save_16bit_model", "save_fp16_model"),
    *("module_state_dict", "_consolidated_16bit_state_dict"),
    *("_zero3_consolidated_16bit_state_dict", "_replace_module_consolidated_state_dict"),
)
_OF_ALL = (
    *("step", "train_batch", "save_checkpoint"),
    *("_save_checkpoint", "_save_zero_checkpoint", "_save_moe_checkpoint"),
    *("state_dict", "sharded_state_dict", "save_parameter_state"),
)


def mark_broken(program: Any, modules: Sequence[torch.nn.Module], parts: Collection[str]) -> None:
    """From now on these parts of the `program` (an engine of DeepSpeed, an optimizer of
    megatron-core) are broken. Its doors, and forward passes and state dicts of its `modules` where
    the weights are, raise EngineUnusableError."""
    _set_broken(program, modules, record_of(program).broken | {*parts})


def mark_whole(program: Any, modules: Sequence[torch.nn.Module], parts: Collection[str]) -> None:
    """These parts are filled. The others stay as they are."""
    _set_broken(program, modules, record_of(program).broken - {*parts})


def require_usable(program: Any) -> None:
    """Raises EngineUnusableError where a part is broken."""
    if broken := record_of(program).broken:
        _refuse(broken)


def _set_broken(program: Any, modules: Sequence[torch.nn.Module], broken: frozenset[str]) -> None:
    record = record_of(program)
    record.broken = broken
    for name, method in record.closed_doors.items():
        if method is None:
            program.__dict__.pop(name, None)
        else:
            program.__dict__[name] = method
    for hook in record.hooks:
        hook.remove()
    closed = (*(_OF_ALL if broken else ()), *(_OF_WEIGHTS if WEIGHTS in broken else ()))
    record.closed_doors = {
        name: program.__dict__.get(name) for name in closed if hasattr(program, name)
    }
    refuse = partial(_refuse, broken)
    program.__dict__.update(dict.fromkeys(record.closed_doors, refuse))

    def refuse_values(_module: Any, _prefix: str, keep_vars: bool) -> None:
        if not keep_vars:  # who asks for the parameters themselves looks at names, copies nothing
            refuse()

    record.hooks = []
    for module in modules if WEIGHTS in broken else ():
        record.hooks.append(module.register_state_dict_pre_hook(refuse_values))
        record.hooks.append(module.register_forward_pre_hook(refuse))


def _refuse(broken: Collection[str], *_: Any, **__: Any) -> None:
    raise EngineUnusableError(
        "a load failed after bytes were written into this engine",
        expected="its weights, and the states of its optimizer, of one save",
        found=f"its {' and '.join(sorted(broken, reverse=True))} of none",
    )


# ---- the engine of all ranks
#
# A live engine as all of its places together, of which this rank holds one: what is the same
# whatever trains in it.


class LocalPart(Protocol):
    """What a rank holds of its place."""

    @property
    def at(self) -> Coords: ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class LiveShards:
    """The engine as `stages` of all its `places`, of which this rank is `own`; `program` is what
    steps, and is marked while a load is on its way, with the `modules` that it has of the model on
    this rank. Raises ModelMismatchError where they don't fit, UnsupportedError where they are not
    whole."""

    manifest: Manifest  # what all ranks hold

    def __init__(
        self,
        own: LocalPart,
        program: Any,
        modules: Sequence[torch.nn.Module],
        stages: Sequence[Stage],
        places: Sequence[Coords],
        fix: str,
    ) -> None:
        found = [stage.at for stage in stages]
        if found != places:
            raise UnsupportedError(
                "the ranks of the engine don't make up whole stages",
                expected=str(places),
                found=str(found),
                fix=fix,
            )
        self.joined: JoinedStages = join(stages)
        self._here, self._program, self._modules = found.index(own.at), program, modules
        self.param_groups = own.param_groups
        first = self.joined.first_group[self._here]
        self.own_groups = slice(first, first + len(own.param_groups))  # of the manifest's

    def numbered(self, buffers: Sequence[Any], values: Sequence[Any]) -> list[dict[int, Any]]:
        """This rank's buffers of the optimizer, and its values, by their numbers in the
        manifest."""
        numbers = self.joined.buffer_numbers[self._here], self.joined.value_numbers[self._here]
        both = zip(numbers, (buffers, values), strict=True)
        return [dict(zip(*pair, strict=True)) for pair in both]

    def tensor(self, slot: Slot) -> torch.Tensor:
        raise NotImplementedError

    def read(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        return self.tensor(slot)[first:last]

    def finish_gathers(self) -> None:
        """Every rank gets the weights that others stepped, where some may be on their way."""

    def check(self, source: Checkpoint, optimizer: bool) -> None:
        """Raises a UcpError where the engine can't take the states of a checkpoint; `optimizer`
        says whether those of the optimizer are asked for."""

    def prepare(self, states: Mapping[int, Sequence[str]] = MappingProxyType({})) -> None:
        """Before the first write: what `tensor` gives is the engine's own memory afterwards, with
        room for exactly these `states` of some buffers. No other value is changed."""

    def broken(self, states: Mapping[int, Sequence[str]] | None) -> Callable[[], None]:
        parts = (WEIGHTS,) if states is None else (WEIGHTS, STATES)
        mark_broken(self._program, self._modules, parts)
        self.prepare(states or {})
        return partial(mark_whole, self._program, self._modules, parts)


def told_by(model: Model, manifest: Manifest) -> CallerModel:
    """What a family says of checkpoints of its model."""
    twin, rules = model.family.hugging_face, model.family.rules
    shares = None if twin is None else twin.tensors(model.sizes)
    return CallerModel(None, manifest.by_name, model.pipe, rules, shares, like=manifest)
