"""Writes a folder that an FSDP2 program loads: its own `dcp.load`, or `accelerator.load_state`.

Such a program has the weights that its optimizer steps, and no others: the masters are written as
weights. Tensors have the names of the model in transformers where the source is of a family, else
their own.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import FlatBuffer, alone
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.manifest import RECORDED, FileEntry, Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot, Want
from megatron_ucp.core.tensor_parts import Slice, TensorPart
from megatron_ucp.core.values import TENSOR, InertObject
from megatron_ucp.errors import NotFoundError, StateMismatchError, UnsupportedError, some_of
from megatron_ucp.families.arguments import with_model
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.dcp.checkpoint import (
    INDEX_DIGESTS,
    MODEL_FOLDER,
    OPTIMIZER_FOLDER,
    SCHEDULERS,
)
from megatron_ucp.formats.dcp.torchtitan import (
    EMBEDDING,
    GATE,
    HEAD,
    ROUTER_BIAS,
    Heads,
    TitanNames,
    is_torchtitan,
    titan_names,
)
from megatron_ucp.formats.dcp.writer import DcpFolder
from megatron_ucp.formats.hugging_face.checkpoint import CONFIG_FILE
from megatron_ucp.formats.megatron.index_writer import KeyPath
from megatron_ucp.formats.optimizers import DECOUPLED, rule_of
from megatron_ucp.formats.output_folder import entry_of
from megatron_ucp.formats.pt.archive import Output, write_pt
from megatron_ucp.formats.pt.unpickle import named_in
from megatron_ucp.formats.store import Location, location
from megatron_ucp.reshard.folder import FolderOutput
from megatron_ucp.reshard.hugging_face.names import config_for, needs_family, twin_of
from megatron_ucp.reshard.match import match_ties
from megatron_ucp.reshard.target import Conversion, NamedGroup, SourceSettings, named_groups
from megatron_ucp.reshard.transfer import SinkPart
from megatron_ucp.reshard.writers import left_out, name_folder, refuse_muon, signed

_HEAD = "lm_head.weight"  # of every model of transformers that gives logits
_RULES = ("AdamW", "Adam")
# What torch's AdamW has in each of its groups: a strict load asks for all of it.
_OF_ADAM: Mapping[str, Any] = {
    "weight_decay": 0.0,
    "lr": 0.0,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class FolderKeys:
    """How a folder is laid out: the folder and the path of the model and of its optimizer in the
    dictionaries that the program saves. `folders` are those that Accelerate looks into.
    `is_flat`: names are torchtitan's, and the optimizer's dictionary is flat."""

    model: KeyPath = ("model",)
    optimizer: KeyPath = ("optim",)
    folders: tuple[str, str] = ("", "")
    is_flat: bool = False

    def of_state(self, tensor: str, state: str) -> KeyPath:
        """Where a state of a tensor lies."""
        if self.is_flat:
            return (*self.optimizer, f"state.{tensor}.{state}")
        return (*self.optimizer, "state", tensor, state)


_PLAIN_KEYS = FolderKeys()
_ACCELERATE = FolderKeys(
    optimizer=("optimizer",), folders=(f"{MODEL_FOLDER}/", f"{OPTIMIZER_FOLDER}/")
)
_TORCHTITAN = FolderKeys((), ("optimizer",), is_flat=True)


def plain(
    origin: SourceSettings, wanted: Conversion, config: Mapping[str, Any] | None, folder: Location
) -> FolderOutput:
    """One folder, as `dcp.save({"model": ..., "optim": ...})` writes it."""
    return _output(origin, wanted, folder, _PLAIN_KEYS)


def accelerate(
    origin: SourceSettings, wanted: Conversion, config: Mapping[str, Any] | None, folder: Location
) -> FolderOutput:
    """Two folders beside each other, as Accelerate's FSDP2 plugin and Trainer have them."""
    return _output(origin, wanted, folder, _ACCELERATE)


def torchtitan(
    origin: SourceSettings, wanted: Conversion, config: Mapping[str, Any] | None, folder: Location
) -> FolderOutput:
    """One folder, as torchtitan's checkpointer writes it, under its names."""
    return _output(origin, wanted, folder, _TORCHTITAN)


def _output(
    origin: SourceSettings, wanted: Conversion, folder: Location, layout: FolderKeys
) -> FolderOutput:
    refuse_muon(wanted, "folder for FSDP2")
    match_ties(wanted.source, wanted.file)
    found = _Written(origin, wanted, layout)
    origin.notes += [*found.notes, *left_out(origin.extras)]
    return found.output(folder)


class _Written:
    """A folder on paper."""

    def __init__(self, origin: SourceSettings, wanted: Conversion, layout: FolderKeys) -> None:
        self.origin, self.wanted, self.layout = origin, wanted, layout
        self.notes: list[str] = []
        self.source = with_model(wanted.source)
        self.file = wanted.file
        self.groups = [self._as_torch(one) for one in named_groups(wanted)]
        self._check_states()
        self.twins, self.specs, self.config = self._names()
        self.shares, self.state_slices = self.twins, dict[str, Slice]()
        if layout.is_flat:
            found = self._as_torchtitan()
            self.shares, self.state_slices = found.shares, found.states
        model = DcpFolder(layout.folders[0])
        same = layout.folders[0] == layout.folders[1]
        optimizer = model if same else DcpFolder(layout.folders[1])
        self.model, self.optimizer = model, optimizer
        self.plans = [model] if same else [model, optimizer]
        self.buffers: list[FlatBuffer] = []
        self.held: dict[str, ParamSpec] = {}
        self._group_of = {
            name: number for number, one in enumerate(self.groups) for name in one.names
        }
        by_tensor = grouped((self._tensor_name(n, s), n) for n, s in self.shares.items())
        for tensor, names in by_tensor.items():
            self._tensor(tensor, names)
        by_state = grouped((self._state_tensor(n, s), n) for n, s in self.shares.items())
        for tensor, names in by_state.items():
            self._check_one_group(tensor, names)
        self._settings(by_state)
        self._aliases()
        if layout.is_flat:
            self._of_the_run()
            return
        if layout is _ACCELERATE and self._scheduler is None:
            self.notes.append(
                "the source has no scheduler of torch's: there is no scheduler.bin, so prepare the "
                "program's own after load_state, or write it at that step"
            )
        elif self._scheduler is not None and layout is not _ACCELERATE:
            self.notes.append(
                "the scheduler's state has no place in this layout: build it at the step of the "
                "run (last_epoch), or convert to accelerate"
            )

    # ------------------------------------------------ what is written

    def _names(
        self,
    ) -> tuple[Mapping[str, TensorPart], Mapping[str, ParamSpec], Mapping[str, Any] | None]:
        """What each tensor holds of which parameter: as the family's twin in transformers has it,
        else each parameter under its own name."""
        if not self.source.family:
            if needs_family(self.source):
                self.notes.append(
                    "the source has megatron-core's names and says no family: the tensors keep them"
                )
            return {n: TensorPart(n) for n in self.source.by_name}, self.wanted.params, None
        twin = twin_of(self.source, None, "", "float32", self.file)
        cut = [n for n, s in twin.specs.items() if s.shape != self.source.by_name[n].shape]
        if cut:
            self.notes.append(f"without the padding of the vocabulary: {some_of(cut)}")
        specs = {n: replace(s, order=None) for n, s in twin.specs.items()}
        return twin.shares, specs, twin.config

    def _tensor_name(self, name: str, share: TensorPart) -> str:
        return name if share.slice_of is None else share.slice_of.tensor

    def _state_tensor(self, name: str, share: TensorPart) -> str:
        """Under which tensor's name the states of a part lie."""
        within = self.state_slices.get(name)
        return self._tensor_name(name, share) if within is None else within.tensor

    def _tensor(self, tensor: str, names: Sequence[str]) -> None:
        """Adds a tensor, of which each name is a slice or all."""
        for name in names:
            share = self.shares[name]
            spec = self.specs[share.param]
            shape = share.stored_shape(spec)
            number, states = len(self.buffers), self._states(share.param)
            self.buffers.append(
                alone(
                    share.param,
                    math.prod(shape),
                    tuple(states.items()),
                    self._group_of.get(share.param),
                    self.source.scalars_of(share.param),
                    axes=(),
                    chunk=share.chunk,
                )
            )
            self.held.setdefault(share.param, share.held(spec))
            for state, dtype in states.items():
                slot = Slot(number, (), 0, state)
                is_weight = state in (MASTER, VALUE)
                within = (
                    share.slice_of if is_weight else self.state_slices.get(name, share.slice_of)
                )
                whole, start, stored = shape, (0,) * len(shape), shape
                if within is not None:
                    whole = within.whole_shape(shape)
                    start = (within.first, *(0,) * (len(whole) - 1))
                    stored = shape if within.rows else (1, *shape)
                plan, path = self.model, (*self.layout.model, tensor)
                if not is_weight:
                    plan = self.optimizer
                    path = self.layout.of_state(self._state_tensor(name, share), state)
                plan.tensor(path, dtype, whole, start, stored, slot)

    def _states(self, param: str) -> dict[str, str]:
        """Name and dtype of each state of a parameter that is written."""
        states = self.source.states_of(param)
        if param in self._group_of:
            return {state: dtype for state, dtype in states.items() if state != VALUE}
        return {VALUE: states[VALUE]}

    def _check_one_group(self, tensor: str, names: Sequence[str]) -> None:
        """Raises StateMismatchError where slices of one tensor are stepped differently, and adds
        their steps."""
        import torch

        params = [self.shares[name].param for name in names]
        found = {
            (self._group_of.get(p), tuple(sorted(self.source.scalars_of(p).items())))
            for p in params
        }
        if len(found) > 1:
            raise StateMismatchError(
                "parameters that are one tensor of the folder are stepped differently",
                file=self.file,
                parameter=tensor,
                expected="one group and one step",
                found=f"{some_of(params)}: {found}"[:200],
                fix="convert to native, which keeps them apart",
            )
        ((group, scalars),) = found
        if group is None:
            return
        for name, value in scalars:
            path = self.layout.of_state(tensor, name)
            number = torch.tensor(value, dtype=torch.float32)
            if float(number) != value:
                raise UnsupportedError(
                    "a single number of the optimizer is none of float32, as torch keeps it",
                    file=self.file,
                    parameter=f"{tensor}: {name}",
                    found=value,
                    fix="save the checkpoint again with its program",
                )
            self.optimizer.small_tensor(path, number)

    # ------------------------------------------------ groups

    def _as_torch(self, one: NamedGroup) -> NamedGroup:
        """A group as torch's own class has it. Raises UnsupportedError where nothing says by which
        rule it was stepped."""
        settings = dict(one.group.settings)
        if "betas" not in settings or "eps" not in settings:
            return one
        rule = rule_of(one.group)
        if rule not in _RULES:
            raise UnsupportedError(
                "nothing says whether the weight decay was Adam's or AdamW's",
                file=self.file,
                parameter=some_of(one.names),
                expected="AdamW, or Adam",
                found=rule or "neither the class of the optimizer nor decoupled_weight_decay",
                fix='say the optimizer (--optimizer; Python: Target(optimizer="torch.AdamW"))',
            )
        known = {**_OF_ADAM, **settings, DECOUPLED: rule == "AdamW"}
        return replace(one, group=replace(one.group, settings=known))

    def _settings(self, by_tensor: Mapping[str, Sequence[str]]) -> None:
        """Adds the groups' settings; `by_tensor` are the parts whose states lie under a name."""
        tensors = grouped(
            (self._group_of.get(self.shares[names[0]].param), tensor)
            for tensor, names in by_tensor.items()
        )
        for number, one in enumerate(self.groups):
            said = {"initial_lr": one.group.settings.get("lr"), **one.group.settings}
            said = {k: v for k, v in said.items() if v is not None or k != "initial_lr"}
            names = tensors.get(number, [])
            if self.layout.is_flat:
                for name, (key, value) in itertools.product(names, said.items()):
                    self._setting((*self.layout.optimizer, f"param_groups.{name}.{key}"), value)
                continue
            first = (*self.layout.optimizer, "param_groups", number)
            for key, value in said.items():
                self._setting((*first, key), value)
            if not self.source.family:
                places = {name: place for place, name in enumerate(one.names)}
                names = sorted(names, key=lambda name: places.get(name, len(places)))
            self.optimizer.value((*first, "params"), list(names))

    def _setting(self, path: KeyPath, value: Any) -> None:
        if isinstance(value, InertObject) and value.qualname == TENSOR:
            self.optimizer.small_tensor(path, _tensor(value))
            return
        if not _is_plain(value):
            raise UnsupportedError(
                "a parameter group holds a value that is none of Python's own, which a folder for "
                "FSDP2 has no place for",
                file=self.file,
                parameter=".".join(map(str, path)),
                found=type(value).__name__,
                fix="convert to native, which loads on any mesh",
            )
        self.optimizer.value(path, value)

    def _aliases(self) -> None:
        """A tied parameter is listed under each of its names, as torch saves it."""
        ties = {tie.canonical: tie.aliases for tie in self.source.ties}
        if self.layout.is_flat:
            if any(HEAD in aliases for aliases in ties.values()):
                self.model.copy((HEAD,), EMBEDDING)
            ties = {}
        for param, aliases in ties.items():
            key = ".".join(map(str, (*self.layout.model, param)))
            if key in self.model.shapes:
                for alias in aliases:
                    self.model.copy((*self.layout.model, alias), key)
        config = self.config or {}
        if self.source.family and config.get("tie_word_embeddings") and _HEAD not in self.shares:
            key = ".".join((*map(str, self.layout.model), next(iter(self.shares))))
            self.model.copy((*self.layout.model, _HEAD), key)

    # ------------------------------------------------ torchtitan

    def _as_torchtitan(self) -> TitanNames:
        """The names and orders of torchtitan. Raises UnsupportedError for a model that is none of
        its, NotFoundError where nobody says the number of heads."""
        shapes = {name: spec.shape for name, spec in self.specs.items()}
        queries = next(
            (n for n in self.twins if n.endswith("layers.0.self_attn.q_proj.weight")), ""
        )
        heads = None
        if queries and not any(name.endswith(".kv_b_proj.weight") for name in self.twins):
            own = {which: queries.replace(".q_proj", f".{which}_proj") for which in "qk"}
            rows = [
                self.twins[n].stored_shape(self.specs[self.twins[n].param])[0] for n in own.values()
            ]
            count = self._heads()
            size = rows[0] // count
            turns = not any(name.endswith((".q_norm.weight", ".sinks")) for name in self.twins)
            heads = Heads(count, rows[1] // size, size, turns)
        found, lost = titan_names(self.twins, shapes, heads, True)
        if lost or not is_torchtitan(found.shares):
            raise UnsupportedError(
                "torchtitan has no model with these tensors",
                file=self.file,
                parameter=some_of(lost or list(self.twins)),
                expected="a Llama, Qwen3, DeepSeek-V3 (without layers for further tokens) or "
                "gpt-oss, under the names of transformers",
                found=self.source.family or "no such family",
                fix="convert to dcp, which keeps the names of transformers",
            )
        return found

    def _heads(self) -> int:
        """The number of heads, as the model's config says it."""
        recorded: Any = self.source.run.get(RECORDED)
        known: Any = recorded.get("config") if isinstance(recorded, dict) else None
        found = None
        if self.config is None and (beside := self._config_beside()) is not None:
            self.config = beside
        for said in (self.config, known):
            count = said.get("num_attention_heads") if isinstance(said, Mapping) else None
            found = found or (count if type(count) is int and count > 0 else None)
        if found is None:
            raise NotFoundError(
                "nothing says how many heads attention has, and torchtitan orders the rows of "
                "queries and keys by them",
                file=self.file,
                expected="num_attention_heads",
                fix="put the config.json of the model, as transformers has it, beside the "
                "checkpoint",
                id="no-config",
            )
        return found

    def _config_beside(self) -> Mapping[str, Any] | None:
        found = config_for(self.source, None, location(self.file))
        return None if found is None else found.tree

    def _of_the_run(self) -> None:
        """What torchtitan's checkpointer asks for besides model and optimizer."""
        schedule = self._scheduler or {}
        steps = self.origin.extras.counters.get("global_steps", 0)
        self.model.value(("lr_scheduler", "last_epoch"), schedule.get("last_epoch", steps))
        self.model.value(("train_state", "step"), steps)
        self.model.value(("train_state", "ntokens_seen"), 0)
        for name in sorted(self.model.shapes):
            if (
                name.endswith(GATE)
                and (bias := name.removesuffix(GATE) + ROUTER_BIAS) not in self.model.shapes
            ):
                self.model.small_tensor((bias,), _zeros(self.model.shapes[name][1][:1]))
        self.notes.append(
            "torchtitan's count of tokens begins at 0, and its data loader at the first batch: "
            "give --checkpoint.exclude_from_loading dataloader"
        )

    # ------------------------------------------------ what is refused

    def _check_states(self) -> None:
        """Raises StateMismatchError where a trained parameter has no states."""
        for one in self.groups:
            for name in one.names:
                states = self.source.states_of(name)
                lost = MASTER not in states or (
                    "betas" in one.group.settings
                    and ("exp_avg" not in states or "step" not in self.source.scalars_of(name))
                )
                if lost:
                    raise StateMismatchError(
                        "the checkpoint does not hold the states that a strict load asks for",
                        file=self.file,
                        parameter=name,
                        expected="masters, moments and a step",
                        found=", ".join([*states, *self.source.scalars_of(name)]) or "none",
                        fix="convert a checkpoint that was saved after its first step",
                    )

    # ------------------------------------------------ the folder

    def output(self, folder: Location) -> FolderOutput:
        target = Manifest(
            Keeper.DCP,
            Mesh(),
            tuple(self.held.values()),
            tuple(self.buffers),
            tuple(one.group for one in self.groups),
            run={**self._samples(), **self.source.run},
        )
        wants: list[Want] = [
            (Slot(number, (), 0, state), state)
            for number, buffer in enumerate(self.buffers)
            for state, _ in buffer.states
        ]
        files = tuple(layout for plan in self.plans for layout in plan.files())
        part = SinkPart(target, tuple(wants))
        publish = partial(self._publish, folder, target, [file.name for file in files])
        return FolderOutput((part,), files, self._close, publish)

    def _samples(self) -> dict[str, Any]:
        """How many the run took, which no file of FSDP2's has a place for."""
        found = self.origin.extras.counters.get("global_samples")
        return {} if found is None else {"global_samples": found}

    def _close(self, aside: Location) -> None:
        for plan in self.plans:
            (aside / plan.index_file).write_bytes(plan.index_bytes())
        for name, text in self._beside().items():
            (aside / name).write_text(text, encoding="utf-8")
        if self.layout is _ACCELERATE and self._scheduler is not None:
            for name in SCHEDULERS:
                out = Output(name)
                out.tree = out.adopt(dict(self._scheduler))
                write_pt(
                    aside / name,
                    out.tree,
                    lambda ref, out=out: [cast("bytes", out.payloads[ref.key])],
                )

    @property
    def _scheduler(self) -> Mapping[str, Any] | None:
        """The scheduler's state, where torch's classes have such a one."""
        found = self.origin.extras.scheduler
        if found is None or "last_epoch" not in found or any(True for _ in named_in([found])):
            return None
        return found

    def _beside(self) -> dict[str, str]:
        out: dict[str, str] = {}
        if self.config is not None:
            out[CONFIG_FILE] = json.dumps(self.config, indent=2, sort_keys=True) + "\n"
        return out

    def _publish(
        self, folder: Location, target: Manifest, names: Sequence[str], aside: Location
    ) -> None:
        listed = [*names, *self._beside()]
        listed += [name for name in SCHEDULERS if (aside / name).is_file()]
        entries = tuple(_entry(aside, name, name in names) for name in listed)
        digests = {
            plan.index_file: hashlib.sha256((aside / plan.index_file).read_bytes()).hexdigest()
            for plan in self.plans
        }
        manifest = target
        if self.source.family:  # whose files have the names of transformers
            run = {key: value for key, value in target.run.items() if key != RECORDED}
            manifest = self._as_tensors(replace(target, run=run))
        source: Checkpoint = self.origin.source
        said = {INDEX_DIGESTS: digests}
        name_folder(folder, signed(manifest, source, entries, said), aside)

    def _as_tensors(self, target: Manifest) -> Manifest:
        """The manifest with each tensor of the files as a parameter of its own."""
        specs: dict[str, ParamSpec] = {}
        buffers: list[FlatBuffer] = []
        for name, share in self.twins.items():
            spec = self.specs[share.param]
            shape = share.stored_shape(spec)
            specs[name] = ParamSpec(name, shape, spec.dtype, spec.kind)
            states = tuple(self._states(share.param).items())
            group, scalars = self._group_of.get(share.param), self.source.scalars_of(share.param)
            buffers.append(alone(name, math.prod(shape), states, group, scalars, axes=()))
        return replace(target, params=tuple(specs.values()), buffers=tuple(buffers))


def _zeros(shape: Ints) -> Any:
    import torch

    return torch.zeros(shape)


def _entry(aside: Location, name: str, is_large: bool) -> FileEntry:
    if is_large:
        return FileEntry(name, (aside / name).stat().st_size)
    return entry_of(aside / name, name)


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN


def _tensor(value: InertObject) -> Any:
    import torch

    data: Any = value.get("data")
    dtype = getattr(torch, str(value.get("dtype")))
    shape: Any = value.get("shape")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape).clone()
