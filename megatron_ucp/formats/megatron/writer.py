"""Writes Megatron-core's distributed checkpoints (`torch_dist`, `fully_reshardable`), which
every mesh of Megatron loads: the plan of the `.distcp` files, and `common.pt`."""

import json
import math
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.manifest import FileEntry, Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import MASTER
from megatron_ucp.core.values import InertObject, alike
from megatron_ucp.errors import StateMismatchError
from megatron_ucp.formats.checkpoint import Extras
from megatron_ucp.formats.megatron.arguments import OF_WSD, Kind, is_schedule, written_arguments
from megatron_ucp.formats.megatron.distcp import INDEX_FILE, SUFFIX
from megatron_ucp.formats.megatron.groups import SCHEDULED, is_not_decayed
from megatron_ucp.formats.megatron.index_writer import PlacedChunk, PlannedFolder, saved
from megatron_ucp.formats.megatron.names import (
    ROUTER,
    Stacking,
    in_its_layer,
    key_before_experts,
    key_behind_experts,
    keys_of,
    number_of_layer,
    stacked_extra_states,
)
from megatron_ucp.formats.megatron.run_state import ARGUMENTS_KEY, OPERATIONS, SCHEDULER
from megatron_ucp.formats.megatron.torch_dist import BACKEND, COMMON_FILE, METADATA_FILE
from megatron_ucp.formats.optimizers import steps_in_group
from megatron_ucp.formats.output_folder import entry_of
from megatron_ucp.formats.param_groups import MEGATRON
from megatron_ucp.formats.pt.archive import Output, tensor_archive, write_pt
from megatron_ucp.formats.pt.refs import number_in
from megatron_ucp.formats.store import CLAIM, Location

# ---- common file
#
# The file `common.pt` of a distributed checkpoint of Megatron-LM: everything that is no tensor of
# a model or an optimizer, as Megatron-LM's own load asks for it.


# what `content_metadata` says of the keys, and a model is asked for them with
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
_SHARDING = "fully_reshardable"
_DISTRIBUTED_CONTENT = {
    "distrib_optim_sharding_type": _SHARDING,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    **CONTENT,
}
# what a group says only where a run overrides it for some parameters
_OVERRIDES = ("start_wd", "end_wd", "optimizer")
# what torch's AdamW reads of a group; a load replaces the running one's group by the saved one
_TORCH_DEFAULTS = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
    "bias_correction": True,
}


@dataclass
class CommonFile:
    """What is written there. `manifest` says the parameters, their groups and steps; `mesh` is the
    one that the files are for: with expert parallelism experts have an optimizer of their own.
    `kind` is that optimizer; `chained` says otherwise whether experts have one of their own;
    `notes` say what does not cross."""

    manifest: Manifest
    extras: Extras
    mesh: Mesh
    file: str = ""
    kind: Kind = Kind.DISTRIBUTED
    chained: bool | None = None
    notes: list[str] = field(default_factory=list[str])

    def output(self) -> Output:
        """The file, with the bytes of its tensors. Raises StateMismatchError for parameters of one
        group of Megatron that have different hyper-parameters or steps."""
        out = Output(COMMON_FILE)
        content = _DISTRIBUTED_CONTENT if self.kind is Kind.DISTRIBUTED else CONTENT
        arguments = self._arguments()
        iteration = self.extras.counters.get("global_steps", 0)
        out.tree = {
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "optimizer": self._optimizers(out),
            SCHEDULER: self._scheduler(),
            OPERATIONS: self.extras.client_state.get(OPERATIONS, 0),
            "content_metadata": dict(content),
        }
        if arguments:
            out.tree["args"] = InertObject("argparse.Namespace", (), arguments)
        else:
            self.notes.append(
                "the sizes of the model are not known: Megatron-LM will load it without arguments "
                "and without the number of consumed samples"
            )
        return out

    # ------------------------------------------------ optimizer

    def _optimizers(self, out: Output) -> dict[Any, Any]:
        chained = self.mesh.ep > 1 if self.chained is None else self.chained
        groups = self._groups(chained)
        if not chained:
            return self._optimizer(out, [group for found in groups for group in found])
        return {number: self._optimizer(out, found) for number, found in enumerate(groups)}

    def _optimizer(self, out: Output, groups: list[dict[str, Any]]) -> dict[str, Any]:
        inner: dict[str, Any] = {"param_groups": out.adopt(groups)}
        if self.kind is not Kind.DISTRIBUTED:
            inner["state"] = {} if self._steps_in_groups else self._common_step(out, groups)
        if self.kind is Kind.FP32:
            return inner
        found: dict[str, Any] = {"optimizer": inner}
        if self.kind is Kind.DISTRIBUTED:
            found["param_state_sharding_type"] = _SHARDING
        if scaler := self._scaler(out):
            found["grad_scaler"] = scaler
        return found

    @property
    def _steps_in_groups(self) -> bool:
        """Whether the plain optimizers keep the step in their groups: a run with Transformer
        Engine's or Apex' Adam loads no `common_step`, one with torch's asks for it."""
        return any(steps_in_group(group.optimizer) for group in self.manifest.groups)

    def _common_step(self, out: Output, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """The step of torch's Adam, which the plain optimizers keep once for all of its groups."""
        steps = {group.pop("step") for group in groups if "step" in group}
        if not steps:
            return {}
        (step,) = steps  # a live optimizer of megatron-core has one
        return {"common_step": out.tensor(struct.pack("<f", step), "float32", ())}

    def _groups(self, chained: bool) -> list[list[dict[str, Any]]]:
        """The groups of what is no expert's and, apart, of experts, each in Megatron's order: what
        has no settings of its own first."""
        first: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
        for spec in self.manifest.params:
            if spec.kind == "trainable":
                expert = chained and spec.expert is not None
                own = self._group(spec, expert)
                between = [own.get(key, -math.inf) for key in SCHEDULED]
                identity = (expert, -own["wd_mult"], *between, own.get("optimizer", ""))
                name, known = first.setdefault(identity, (spec.name, own))
                self._check_alike((name, known), (spec.name, own))
        found = [(key, group) for key, (_, group) in sorted(first.items())]
        groups = [[group for (apart, *_), group in found if apart == is_here] for is_here in (0, 1)]
        return groups if chained else groups[:1]

    def _check_alike(
        self, one: tuple[str, Mapping[str, Any]], other: tuple[str, Mapping[str, Any]]
    ) -> None:
        keys = [
            key for key in {**one[1], **other[1]} if not alike(one[1].get(key), other[1].get(key))
        ]
        if keys:
            raise StateMismatchError(
                "parameters of one group of Megatron's optimizer have different hyper-parameters "
                "or steps",
                file=self.file,
                parameter=f"{one[0]} and {other[0]}",
                expected=f"equal {', '.join(sorted(keys))}",
                found="; ".join(
                    f"{key}: {one[1].get(key)} and {other[1].get(key)}" for key in keys
                ),
                fix="Megatron tells groups apart by weight decay, rates, overrides and experts "
                "alone",
            )

    def _group(self, spec: ParamSpec, expert: bool) -> dict[str, Any]:
        """The group that Megatron has for a parameter."""
        number = self.manifest.group_number(spec.name)
        group = self.manifest.groups[number or 0]
        settings = dict(group.settings)
        kept: Mapping[str, Any] = group.marks.get(MEGATRON) or {}
        wd_mult = 0.0 if is_not_decayed(spec, self._decays_qk_norms) else 1.0
        step = self.manifest.scalars_of(spec.name).get("step")
        scheduler = self.extras.scheduler or {}
        rate = self._float(settings.get("lr"))
        if settings.get("weight_decay") and not kept.get("wd_mult", wd_mult):
            self._note(
                "vectors and biases have weight decay, which Megatron's scheduler takes away"
            )
        return {
            "is_expert_parallel": expert,
            "default_config": bool(kept.get("default_config", True)),
            "wd_mult": float(kept.get("wd_mult", wd_mult)),
            "lr_mult": float(kept.get("lr_mult", 1.0)),
            "is_decoupled_lr": bool(kept.get("is_decoupled_lr", False)),
            "max_lr": kept.get("max_lr", scheduler.get("max_lr", rate)),
            "min_lr": kept.get("min_lr", scheduler.get("min_lr", 0.0)),
            **{key: kept[key] for key in _OVERRIDES if key in kept},
            **_TORCH_DEFAULTS,
            **settings,
            # Transformer Engine's and Apex' kernels take no float
            **({} if step is None else {"step": int(step)}),
        }

    @property
    def _decays_qk_norms(self) -> bool:
        said = self.extras.client_state.get(ARGUMENTS_KEY)
        return isinstance(said, Mapping) and bool(said.get("apply_wd_to_qk_layernorm"))

    def _float(self, value: Any) -> float:
        """A hyper-parameter, which may be a tensor."""
        return (
            number_in(value, self.file) if isinstance(value, InertObject) else float(value or 0.0)
        )

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    # ------------------------------------------------ the rest

    def _scaler(self, out: Output) -> dict[str, Any]:
        """The loss scale, where it changes."""
        found = self.extras.scaler
        if not found.dynamic:
            return {}
        said = {"scale_window": 1000, "delayed_shift": 2, **found.said}
        scale = struct.pack("<f", float(said["cur_scale"]))
        return {
            "scale": out.tensor(scale, "float32", (1,)),
            "growth_tracker": found.good_steps(int(said["scale_window"])),
            "hysteresis_tracker": int(said.get("cur_hysteresis", said["delayed_shift"])),
        }

    def _scheduler(self) -> dict[str, Any]:
        """The state of Megatron's scheduler, which counts samples; a constant one where the source
        has another."""
        found = self.extras.scheduler or {}
        samples = self.extras.counters.get("global_samples", 0)
        decays = [self._float(group.settings.get("weight_decay")) for group in self.manifest.groups]
        rates = [self._float(group.settings.get("lr")) for group in self.manifest.groups]
        decay, rate = max(decays, default=0.0), max(rates, default=0.0)
        usual: dict[str, Any] = {
            "max_lr": rate,
            "lr_warmup_steps": 0,
            "num_steps": samples,
            "lr_decay_style": "constant",
            "lr_decay_steps": max(1, samples),
            "min_lr": 0.0,
            "start_wd": decay,
            "end_wd": decay,
            "wd_incr_style": "constant",
            "wd_incr_steps": max(1, samples),
        }
        if is_schedule(found):
            self._note_flags(found)
            return {key: found.get(key, value) for key, value in usual.items()}
        self._note(
            "the scheduler is none of Megatron's: a constant one stands in its place, so resume "
            "with --override-opt_param-scheduler and the flags of the run"
        )
        return usual

    def _note_flags(self, found: Mapping[str, Any]) -> None:
        """Says which settings of a schedule Megatron keeps in no file: its run takes its flags."""
        style = found["lr_decay_style"]
        names = ("init_lr", *(OF_WSD if style == "WSD" else ()))
        left = [f"{name} {found[name]}" for name in names if found.get(name)]
        if left:
            self._note(
                "Megatron's files have no place for these settings of the schedule, so give their "
                f"flags again: {', '.join(left)}"
            )

    def _arguments(self) -> dict[str, Any]:
        said = self.extras.client_state.get(ARGUMENTS_KEY)
        known = dict(said) if isinstance(said, Mapping) else {}
        samples = self.extras.counters.get("global_samples", 0)
        return written_arguments(known, self.manifest, self.mesh, samples, self.kind)


# ---- writer
#
# The plan of the `.distcp` files: each state of a parameter in chunks, under the keys that
# Megatron-LM has for it.


WEIGHT = "weight"  # what a plan calls the training copy of a parameter
ADAM_STATES = (MASTER, "exp_avg", "exp_avg_sq")  # of Adam, which are all that Megatron-LM loads
_METADATA = {
    "sharded_backend": BACKEND,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class WantedTensor:
    """A state of a parameter that is to be written, in the chunks `boxes` (start and stop in the
    parameter), which together are the whole of it. `owners` are the ranks that write them, each
    into a file of its own (none: they go into the smallest file)."""

    param: str
    state: str
    dtype: str
    boxes: tuple[tuple[Ints, Ints], ...]
    owners: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedChunk(PlacedChunk):
    """Box number `number` of a wanted tensor. `at` is the key of the weight, and `key` that of the
    state: "optimizer.state.exp_avg.output_layer.weight"."""

    tensor: WantedTensor
    number: int
    at: Stacking

    @property
    def box(self) -> tuple[Ints, Ints]:
        return self.tensor.boxes[self.number]


TorchDistPlan = PlannedFolder[PlannedChunk]


@dataclass(frozen=True)
class ModelKeys:
    """What a model asks for when it loads: the keys of each parameter, and those of the extra
    states of its modules, which hold nothing. `copies` are further keys of a parameter that a model
    has under several names, as T5 has its embeddings."""

    params: Mapping[str, tuple[Stacking, ...]]
    extra_states: Sequence[str]
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    def cut(self, name: str, box: tuple[Ints, Ints]) -> list[tuple[Ints, Ints]]:
        """A box of a parameter in pieces that lie under one key each. Those of a contiguous box
        follow each other in its memory."""
        start, stop = box
        out: list[tuple[Ints, Ints]] = []
        for at in self.params[name]:
            if at.last is None:
                return [box]
            first, last = max(at.first, start[0]), min(at.last, stop[0])
            if first < last:
                out.append(((first, *start[1:]), (last, *stop[1:])))
        return out


def declared_keys(params: Mapping[str, ParamSpec], apart: bool = False) -> ModelKeys:
    """The keys of a model of megatron-core's GPT modules with these parameters. `apart`: each layer
    has keys of its own, which a run asks for to which a list says what its layers hold, whatever it
    says."""
    stacked = layers_are_alike(params) and not apart
    keys = {name: keys_of(spec, stacked) for name, spec in params.items()}
    return ModelKeys(keys, [*stacked_extra_states(params, stacked)])


def plan_torch_dist(
    params: Mapping[str, ParamSpec],
    tensors: Sequence[WantedTensor],
    keys: ModelKeys,
    files: int = 1,
    kind: Kind = Kind.DISTRIBUTED,
) -> TorchDistPlan:
    """The plan for states of parameters, spread over so many files. `params` are all of the model,
    by canonical name; no box of a tensor lies under two `keys` (see `ModelKeys.cut`). `kind` is
    the optimizer that they are for."""
    plan = TorchDistPlan(files)
    for key, data in dict.fromkeys(keys.extra_states, saved([None])).items():
        plan.add_object(key, data)
    mixtures = {number_of_layer(name) for name in params if name.endswith(ROUTER)}
    for tensor in tensors:
        for at in _keys_to_write(tensor, keys, mixtures):
            key, whole = _stored_key(tensor, at.key, kind), params[tensor.param].shape
            rows = whole[:1] if at.last is None else (at.last - at.first,)
            whole = (*(n + 1 for n in at.index), *rows, *whole[1:])
            _, known = plan.shapes.get(key, (tensor.dtype, whole))
            plan.shapes[key] = tensor.dtype, tuple(map(max, known, whole))
            _place(tensor, key, at, plan)
            for other in keys.copies.get(tensor.param, ()):
                plan.copies[_stored_key(tensor, other, kind)] = key
    return plan


def _stored_key(tensor: WantedTensor, key: str, kind: Kind) -> str:
    """The key of a state of the parameter that has a `key` among the weights."""
    if tensor.state == WEIGHT:
        return key
    return f"optimizer.state.{kind.value if tensor.state == MASTER else tensor.state}.{key}"


def _place(tensor: WantedTensor, key: str, at: Stacking, plan: TorchDistPlan) -> None:
    """Adds the chunks of a state under one key."""
    for number, (start, stop) in enumerate(tensor.boxes):
        if at.last is not None and not at.first <= start[0] < at.last:
            continue
        shape = (1,) * len(at.index) + tuple(b - a for a, b in zip(start, stop, strict=True))
        if at.last is not None:
            start = (start[0] - at.first, *start[1:])
        archive = tensor_archive(tensor.dtype, shape)
        place = plan.take(archive.size_bytes, tensor.owners[number] if tensor.owners else None)
        first = (*at.index, *start)
        plan.chunks.append(
            PlannedChunk(key, tensor.dtype, first, shape, *place, archive, tensor, number, at)
        )


def _keys_to_write(
    tensor: WantedTensor, keys: ModelKeys, mixtures: Collection[int | None]
) -> Iterator[Stacking]:
    """The keys of a tensor; of the norm of a layer with experts both: that of megatron-core's own
    modules and that of Transformer Engine's (a load passes over keys that it does not ask for)."""
    for at in keys.params[tensor.param]:
        yield at
        if number_of_layer(tensor.param) in mixtures:
            others = key_before_experts(at.key), key_behind_experts(at.key)
            yield from (Stacking(other, at.index) for other in others if other is not None)


def layers_are_alike(params: Mapping[str, ParamSpec]) -> bool:
    """Whether all layers of a list have the same parameters of the same shapes: Megatron stacks
    those under one key."""
    lists: dict[str, dict[int, set[tuple[str, Ints]]]] = {}
    for name, spec in params.items():
        if (found := in_its_layer(name)) is not None:
            of, number, rest = found
            lists.setdefault(of, {}).setdefault(number, set()).add((rest, spec.shape))
    for layers in lists.values():
        kinds = list(layers.values())
        if sorted(layers) != list(range(len(layers))) or any(one != kinds[0] for one in kinds):
            return False
    return True


# ------------------------------------------------ writing


def finish_files(folder: Location, plan: TorchDistPlan, common: Output) -> None:
    """Writes what is no chunk: `common.pt`, the index, and the file that says the format, last.
    Raises OSError, UnsupportedError."""
    write_pt(folder / common.name, common.tree, lambda storage: [_bytes(common, storage.key)])
    (folder / plan.index_file).write_bytes(plan.index_bytes())
    (folder / METADATA_FILE).write_text(json.dumps(_METADATA))


def entries_of(folder: Location) -> list[FileEntry]:
    """A manifest's lines about the files, but the index, whose name is none that a manifest may
    list. Raises OSError."""
    return [
        entry_in(path) for path in sorted(folder.iterdir()) if path.name not in (INDEX_FILE, CLAIM)
    ]


def entry_in(path: Location) -> FileEntry:
    """A manifest's line about a file. Of a large one the size alone: the index says its places, and
    each chunk has its CRC-32. Raises OSError."""
    is_large = path.suffix == SUFFIX
    return FileEntry(path.name, path.stat().st_size) if is_large else entry_of(path)


def _bytes(output: Output, key: str) -> bytes:
    found = output.payloads[key]
    if not isinstance(found, bytes):
        raise TypeError(f"the storage {key} of {output.name} is no plain bytes")
    return found
