"""Writes a folder that an FSDP2 program loads: its own `dcp.load`, or `accelerator.load_state`.

Such a program has the weights that its optimizer steps, and no others: the masters are written as
weights. Tensors have the names of the model in transformers where the source is of a family, else
their own.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from megatron_ucp.core.flat import FlatBuffer, alone
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.manifest import RECORDED, FileEntry, Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot, Want
from megatron_ucp.core.tensor_parts import TensorPart
from megatron_ucp.core.values import TENSOR, InertObject
from megatron_ucp.errors import StateMismatchError, UnsupportedError, some_of
from megatron_ucp.families.arguments import with_model
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.dcp.checkpoint import (
    INDEX_DIGESTS,
    MODEL_FOLDER,
    OPTIMIZER_FOLDER,
    SCHEDULERS,
)
from megatron_ucp.formats.dcp.writer import IndexedFolder
from megatron_ucp.formats.hugging_face.checkpoint import CONFIG_FILE
from megatron_ucp.formats.megatron.index_writer import KeyPath
from megatron_ucp.formats.optimizers import DECOUPLED, rule_of
from megatron_ucp.formats.output_folder import entry_of
from megatron_ucp.formats.pt.archive import Output, write_pt
from megatron_ucp.formats.pt.unpickle import named_in
from megatron_ucp.formats.store import Location
from megatron_ucp.reshard.folder import FolderOutput
from megatron_ucp.reshard.hugging_face.names import needs_family, twin_of
from megatron_ucp.reshard.match import match_ties
from megatron_ucp.reshard.target import (
    Conversion,
    NamedGroup,
    SourceSettings,
    named_groups,
)
from megatron_ucp.reshard.transfer import SinkPart
from megatron_ucp.reshard.writers import name_folder, refuse_muon, signed

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
    dictionaries that the program saves. `folders` are those that Accelerate looks into."""

    model: KeyPath = ("model",)
    optimizer: KeyPath = ("optim",)
    folders: tuple[str, str] = ("", "")


_PLAIN_KEYS = FolderKeys()
_ACCELERATE = FolderKeys(
    optimizer=("optimizer",), folders=(f"{MODEL_FOLDER}/", f"{OPTIMIZER_FOLDER}/")
)


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


def _output(
    origin: SourceSettings, wanted: Conversion, folder: Location, layout: FolderKeys
) -> FolderOutput:
    refuse_muon(wanted, "folder for FSDP2")
    match_ties(wanted.source, wanted.file)
    found = _Written(origin, wanted, layout)
    origin.notes += found.notes
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
        self.shares, self.specs, self.config = self._names()
        model = IndexedFolder(layout.folders[0])
        same = layout.folders[0] == layout.folders[1]
        optimizer = model if same else IndexedFolder(layout.folders[1])
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
        self._settings(by_tensor)
        self._aliases()
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

    def _tensor(self, tensor: str, names: Sequence[str]) -> None:
        """Adds a tensor, of which each name is a slice or all."""
        for name in names:
            share = self.shares[name]
            spec, within = self.specs[share.param], share.slice_of
            shape = share.stored_shape(spec)
            whole = shape if within is None else within.whole_shape(shape)
            start = (0,) * len(whole)
            stored = shape
            if within is not None:
                start = (within.first, *start[1:])
                stored = shape if within.rows else (1, *shape)
            number, states = len(self.buffers), self._states(share.param)
            scalars = self.source.scalars_of(share.param)
            group = self._group_of.get(share.param)
            size = 1
            for one in shape:
                size *= one
            self.buffers.append(
                alone(
                    share.param,
                    size,
                    tuple(states.items()),
                    group,
                    scalars,
                    axes=(),
                    chunk=share.chunk,
                )
            )
            self.held.setdefault(share.param, share.held(spec))
            for state, dtype in states.items():
                slot = Slot(number, (), 0, state)
                plan, path = self._place(tensor, state)
                plan.tensor(path, dtype, whole, start, stored, slot)
        self._check_one_group(tensor, names)

    def _states(self, param: str) -> dict[str, str]:
        """Name and dtype of each state of a parameter that is written."""
        states = self.source.states_of(param)
        if param in self._group_of:
            return {state: dtype for state, dtype in states.items() if state != VALUE}
        return {VALUE: states[VALUE]}

    def _place(self, tensor: str, state: str) -> tuple[IndexedFolder, KeyPath]:
        if state in (MASTER, VALUE):
            return self.model, (*self.layout.model, tensor)
        return self.optimizer, (*self.layout.optimizer, "state", tensor, state)

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
            path = (*self.layout.optimizer, "state", tensor, name)
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
        tensors = grouped(
            (self._group_of.get(self.shares[names[0]].param), tensor)
            for tensor, names in by_tensor.items()
        )
        for number, one in enumerate(self.groups):
            first = (*self.layout.optimizer, "param_groups", number)
            said = {"initial_lr": one.group.settings.get("lr"), **one.group.settings}
            for key, value in said.items():
                if value is not None or key != "initial_lr":
                    self._setting((*first, key), value)
            names = tensors.get(number, [])
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
        for param, aliases in ties.items():
            key = ".".join(map(str, (*self.layout.model, param)))
            if key in self.model.shapes:
                for alias in aliases:
                    self.model.copy((*self.layout.model, alias), key)
        config = self.config or {}
        if self.source.family and config.get("tie_word_embeddings") and _HEAD not in self.shares:
            key = ".".join((*map(str, self.layout.model), next(iter(self.shares))))
            self.model.copy((*self.layout.model, _HEAD), key)

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
            run=self.source.run,
        )
        wants: list[Want] = [
            (Slot(number, (), 0, state), state)
            for number, buffer in enumerate(self.buffers)
            for state, _ in buffer.states
        ]
        files = tuple(layout for plan in self.plans for layout in plan.layouts())
        part = SinkPart(target, tuple(wants))
        publish = partial(self._publish, folder, target, [file.name for file in files])
        return FolderOutput((part,), files, self._close, publish)

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
        for (name, share), buffer in zip(self._in_order(), self.buffers, strict=True):
            spec = self.specs[share.param]
            shape = share.stored_shape(spec)
            specs[name] = ParamSpec(name, shape, spec.dtype, spec.kind)
            (member,) = buffer.members
            buffers.append(
                alone(name, member.size, buffer.states, member.group, member.scalars, axes=())
            )
        return replace(target, params=tuple(specs.values()), buffers=tuple(buffers))

    def _in_order(self) -> list[tuple[str, TensorPart]]:
        by_tensor = grouped((self._tensor_name(n, s), n) for n, s in self.shares.items())
        return [(name, self.shares[name]) for names in by_tensor.values() for name in names]


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
