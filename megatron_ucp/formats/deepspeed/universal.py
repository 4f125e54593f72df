"""DeepSpeed's universal folders, read and written: those of stock's converter in both of its
forms, and our own."""

import math
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import counts_of, is_stacked, number_and_count, slices_of
from megatron_ucp.core.flat import FlatBuffer, alone
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.layers import TIED
from megatron_ucp.core.manifest import FILE_NAME, Manifest, ParamGroup, ParamSpec, Tie
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.rules import RuleSet
from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    NotFoundError,
    UnsupportedError,
    some_of,
)
from megatron_ucp.formats import expect
from megatron_ucp.formats.byte_files import Where
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint, Extras
from megatron_ucp.formats.deepspeed.autoep import autoep_of
from megatron_ucp.formats.deepspeed.config import DeepSpeedConfig
from megatron_ucp.formats.deepspeed.extras import from_meta
from megatron_ucp.formats.deepspeed.files import TagFolder, is_universal, missing_files, model_name
from megatron_ucp.formats.deepspeed.layout_sources import LayoutSource, compared, refuse_joined
from megatron_ucp.formats.deepspeed.lost_states import NOT_SAVED
from megatron_ucp.formats.deepspeed.manifest import run_of
from megatron_ucp.formats.deepspeed.megatron_deepspeed import rules_for
from megatron_ucp.formats.deepspeed.tp_patterns import StockInfo, fused, sub_shape
from megatron_ucp.formats.deepspeed.weights import (
    PipeNames,
    buffer_names,
    frozen_shapes,
    is_extra_state,
    no_extra_state,
    shapes_by_group,
    shared_params,
    training_dtype,
)
from megatron_ucp.formats.deepspeed.writer import (
    RunSettings,
    group_tree,
    module_states,
    run_fields,
    scalar_tensor,
    scaler_of,
)
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.optimizers import ELEMENT, counts_steps, untold_states
from megatron_ucp.formats.param_groups import param_groups, step_of
from megatron_ucp.formats.pt.archive import Output
from megatron_ucp.formats.pt.refs import TensorRef

# ---- universal writer
#
# DeepSpeed's universal folder for a manifest: one file per parameter and state, in one form that
# stages 1, 2 and 3 load.
#
# Stock's converter writes two forms, each for some stages. Where its loaders look (DeepSpeed
# 0.19.8): `load_hp_checkpoint_state_from_checkpoint_dir` (stages 1 and 2) wants shaped atoms in
# dicts, `step.pt` beside them and `mp_rank_00_model_states.pt`;
# `load_hp_checkpoint_state_from_checkpoint_dir_stage3` takes the same atoms, the step from
# `optimizer_state.pt` and `zero_pp_rank_0_mp_rank_00_model_states.pt`.


UNIVERSAL_VERSION = 0.4
STEP, ATOMS, GLOBAL = "step", "zero", "optimizer_state.pt"
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_SUB_PARAMS = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,250}")


class UniversalWriter:
    """The files of a manifest whose every buffer is one whole parameter (tp=1, no partitions).
    Groups are those of an optimizer without pipeline. `pipe` gives other names (of a pipeline) to
    parameters. Raises UnsupportedError for a name that can't be a folder's."""

    def __init__(self, manifest: Manifest, run: RunSettings, pipe: Mapping[str, str]) -> None:
        self.manifest, self.run = manifest, run
        self._names = {spec.name: pipe.get(spec.name, spec.name) for spec in manifest.params}
        for name in self._names.values():
            if not _NAME.fullmatch(name):
                raise UnsupportedError(
                    "a parameter's name can't be the name of a folder",
                    parameter=name,
                    expected="letters, digits, dots, _ and -",
                    fix="convert to native",
                )

    def outputs(self) -> Iterator[Output]:
        """Every file."""
        for name in MODEL_FILES:
            yield self._model(name)
        yield self._global()
        for number, buffer in enumerate(self.manifest.buffers):
            spec = self.manifest.by_name[buffer.members[0].param]
            folder = f"{ATOMS}/{self._names[spec.name]}"
            for state, dtype in buffer.states:
                output = Output(f"{folder}/{MASTER if state == VALUE else state}.pt")
                output.tree = {
                    **_cut(spec),
                    _PARAM: output.tensor(Slot(number, (), 0, state), dtype, spec.shape),
                }
                yield output
            scalars = buffer.members[0].scalars
            if STEP in scalars:
                output = Output(f"{folder}/{STEP}.pt")
                output.tree = self._step(output, scalars[STEP])
                yield output

    def _step(self, output: Output, step: float) -> Any:
        return int(step) if self.run.int_steps else scalar_tensor(output, step)

    def _groups(self) -> list[tuple[ParamGroup, list[str]]]:
        """Each parameter group, and the names in its order."""
        out: list[list[str]] = [[] for _ in self.manifest.groups]
        for buffer in self.manifest.buffers:
            for member in buffer.members:
                if member.group is not None:
                    out[member.group].append(member.param)
        return list(zip(self.manifest.groups, out, strict=True))

    def _of_kind(self, kind: str) -> list[ParamSpec]:
        return [spec for spec in self.manifest.params if spec.kind == kind]

    def _model(self, name: str) -> Output:
        """What a load takes besides atoms: counters, scheduler, client state, and which parameters
        belong together."""
        output, run, extras = Output(name), self.run, self.run.extras
        shared = {alias: tie.canonical for tie in self.manifest.ties for alias in tie.aliases}
        frozen = [spec.name for spec in self._of_kind("frozen")]
        output.tree = {
            "module": OrderedDict(module_states(output, extras)),
            "optimizer": None,
            "buffer_names": [self._names[spec.name] for spec in self._of_kind("buffer")],
            "param_shapes": [self._shapes(names) for _, names in self._groups()],
            "frozen_param_shapes": self._shapes(frozen),
            "frozen_param_fragments": None,
            "shared_params": shared,
            **run_fields(output, run, Mesh(), run.scheduler(0)),
            "universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION},
            **{key: output.adopt(value) for key, value in extras.client_state.items()},
        }
        return output

    def _shapes(self, names: list[str]) -> dict[str, InertObject]:
        """Whole shapes under the names of the folder."""
        by_name = self.manifest.by_name
        return OrderedDict(
            (self._names[name], InertObject("torch.Size", (by_name[name].shape,))) for name in names
        )

    def _global(self) -> Output:
        """What is not per parameter, at the places where each stage's loader looks."""
        output = Output(f"{ATOMS}/{GLOBAL}")
        scaler, dynamic = scaler_of(self.run)
        members = [member for buffer in self.manifest.buffers for member in buffer.members]
        steps = [member.scalars[STEP] for member in members if STEP in member.scalars]
        groups = [group_tree(output, group, [at]) for at, (group, _) in enumerate(self._groups())]
        state = {0: {STEP: self._step(output, steps[0])}} if steps else {}
        output.tree = {
            "loss_scaler": scaler,
            "dynamic_loss_scale": dynamic,
            "overflow": False,
            "clip_grad": self.run.clip_grad,
            "param_groups": groups,
            "partition_count": 1,
            "ds_version": self.run.version,
            "zero_stage": InertObject("deepspeed.runtime.zero.config.ZeroStageEnum", (1,)),
            "optimizer_state_dict": {"state": state, "param_groups": groups},
        }
        return output


def _cut(spec: ParamSpec) -> dict[str, Any]:
    """How stock cuts the atom for a tensor-parallel target: along which dim, and which
    sub-parameters each for itself."""
    if (cut := spec.layout.fused) is not None:
        if len(set(cut.parts)) == 1 and cut.dim == 0:
            return {"cat_dim": 0, "param_n_sub_params": len(cut.parts)}
        entry = fused([re.escape(spec.name)], sub_shape(cut, spec.shape))
        return {"cat_dim": cut.dim, "sub_param_shape": InertObject(_SUB_PARAMS, (), entry)}
    cuts = spec.layout.cuts()
    return {"cat_dim": cuts[0].dim if cuts else 0}


# ---- universal
#
# A folder holds `zero/NAME/STATE.pt` for every parameter, which is whole there, and copies of
# model files that say which parameters belong together (reference: `ds_to_universal.py` of
# DeepSpeed 0.19.8).


_PARAM = "param"
_ENDS_BYTES = 4 * 2**10  # of a file with one tensor, whose directory has 700 bytes
_GLOBAL = f"{ATOMS}/{GLOBAL}"


class UniversalCheckpoint(TagFolder):
    """One opened universal folder. `told.specs` or `told.rules` declare layouts, which stock's
    folders do not hold.

    Raises a UcpError for anything that its directories and pickles can show. Tensor bytes are not
    read.
    """

    def __init__(self, folder: Folder, told: CallerModel) -> None:
        super().__init__(folder, told.classes)
        self._weights = told.weights  # the optimizer's states are not wanted, and may be lost
        with self.closed_on_failure():
            self._read(told)

    def _read(self, told: CallerModel) -> None:
        recorded, rules, first = self.recorded, told.rules, self._first_of_ranks()[0]
        self.main_file = self.full_path(first)
        self.meta: Mapping[str, Any] = self.tree(first)
        known = told.specs if recorded is None else recorded.by_name
        if known is None and rules is None:
            rules = rules_for(self.meta, self.main_file)
        self.declared = LayoutSource(Mesh(), StockInfo({}, self.main_file), known, rules)
        canonical = told.names if recorded is None else recorded.names
        self._pipe = PipeNames(canonical) if canonical else None
        if not self.folder.is_file(_GLOBAL):
            problem = "a file of the universal folder is missing"
            raise self._lost(problem, _GLOBAL, "no such file", expected=GLOBAL)
        self._global = self.tree(_GLOBAL)
        self._stacked = autoep_of(self.meta, self.main_file).experts  # whole layers here
        self._atoms = self._find_atoms()
        self.folder.prefetch(self.file_names, _ENDS_BYTES)
        self._check_listed()
        self._experts = {**counts_of(self._atoms), **self._stacked}
        self.manifest = self._manifest(self._groups(), recorded)
        self._require_model_files()
        self._require_states()
        self._compare_with(recorded, rules)

    def _require_model_files(self) -> None:
        """Raises NotFoundError where a model-parallel rank of the run that was converted has no
        model file, which says what is in its groups."""
        there = {mp for _, mp in self.names.model}
        told = self.meta.get("mp_world_size")
        count = told if type(told) is int else 1
        first = next((rank for rank in range(count) if rank not in there), None)
        if first is not None:
            raise missing_files(
                "model file",
                max(1, count - len(there)),
                self.folder / model_name(first),
                f"model-parallel ranks 0 to {count - 1}",
                f"{len(there)} of them",
            )

    def _require_states(self) -> None:
        """Raises NotFoundError where a trained parameter lacks a state that its group's optimizer
        keeps: one that another parameter of the group has, or that the hyper-parameters tell of.
        A manifest lists the states itself."""
        if self.recorded is not None or self._weights:
            return
        stepped = [buffer for buffer in self.manifest.buffers if buffer.group is not None]
        took_steps = self.manifest.taken_steps > 0
        lost: list[tuple[str, str]] = []  # of each file: the parameter, the state
        for number, group in enumerate(self.manifest.groups):
            held = {
                buffer.first_param: [state for state, _ in buffer.states if state != MASTER]
                for buffer in stepped
                if buffer.group == number
            }
            states = dict.fromkeys(state for found in held.values() for state in found)
            wanted = [*states, *(untold_states(group.settings, [*states]) if took_steps else ())]
            lost += [
                (name, state)
                for name, found in held.items()
                for state in wanted
                if state not in found
            ]
            if wanted and counts_steps(group.settings, wanted):
                lost += [(n, STEP) for n in held if STEP not in self.manifest.scalars_of(n)]
        if lost:
            name, state = lost[0]
            raise missing_files(
                "state file",
                len(lost),
                self.folder / self._file(name, state),
                "the states that the group's optimizer keeps of each parameter",
                f"no {state} of {name}",
                "; or convert again",
                name,
            )

    def check(self, name: str, allow: Collection[str] = ()) -> None:
        """Opens a file. With the one that names them also: whether each frozen parameter and each
        buffer has its value, which stock's converter leaves out. Raises NotFoundError."""
        super().check(name, allow)
        if self.full_path(name) != self.main_file or "missing" in allow:
            return
        if lost := self._lost_values():
            raise missing_files(
                "value",
                len(lost),
                self.folder / f"{ATOMS}/{lost[0]}/{MASTER}.pt",
                "a file of each frozen parameter and buffer that the model file lists",
                some_of(lost),
                "; or convert again with megatron-ucp; or keep the engine's values: "
                'allow={"missing"}',
            )

    def _lost_values(self) -> list[str]:
        """Frozen parameters and buffers that the model file lists, and that no file holds."""
        said = [*buffer_names(self.meta, self.main_file), *frozen_shapes(self.meta, self.main_file)]
        tied = shared_params(self.meta, self.main_file)
        named = [own for one in said if one not in tied for own in self._own_names(self._name(one))]
        return [one for one in dict.fromkeys(named) if one not in self._atoms]

    def _compare_with(self, recorded: Manifest | None, rules: RuleSet | None) -> None:
        """What the manifest beside the files and rules say must be so; without a manifest, that
        stock's converter joined the ranks' rows rightly."""
        if recorded is None:
            held = ((self._atoms.get(spec.name, ""), spec) for spec in self.manifest.params)
            refuse_joined(self.meta, self.main_file, held)
            return
        self._compare(recorded)
        if rules is not None:
            self.manifest = compared(self.manifest, rules, self.full_path(FILE_NAME))

    def _find_atoms(self) -> dict[str, str]:
        """The folder of each parameter, by its canonical name."""
        out: dict[str, str] = {}
        for atom in self.folder.names(ATOMS):
            is_param = self.folder.is_folder(f"{ATOMS}/{atom}")
            for name in self._own_names(self._name(atom)) if is_param else ():
                out.setdefault(name, atom)
        return out

    def _own_names(self, name: str) -> list[str]:
        """A parameter's name, or those of the experts that it holds."""
        return slices_of(name, self._stacked[name]) if name in self._stacked else [name]

    def _check_listed(self) -> None:
        """Raises ForeignFileError for an atom that the manifest does not list, NotFoundError for
        one that it lists and that is not there. Earlier manifests list none of them."""
        listed = [name for name in self.evidence.files if name.startswith(f"{ATOMS}/")]
        there = set(self.file_names)
        needed = f"/{MASTER}.pt" if self._weights else ""
        lost = [name for name in listed if name not in there and name.endswith(needed)]
        if lost:
            raise missing_files(
                "state file",
                len(lost),
                self.folder / lost[0],
                f"{len(listed)} files, as the manifest lists them",
                some_of(lost, 4),
                "; or convert again",
            )
        extra = sorted(there - set(self.evidence.files)) if listed else []
        if extra:
            raise ForeignFileError(
                "a state file is not part of the folder that the manifest describes",
                file=self.folder / extra[0],
                found=f"{len(extra)} such files",
            )

    @property
    def notes(self) -> list[str]:
        """What a reader should know of how parameters are cut."""
        return [*self.path_notes, *self.declared.notes]

    def _lost(self, problem: str, file: str, found: str, **more: str) -> NotFoundError:
        fix = "restore it, or convert again"
        return NotFoundError(problem, file=self.folder / file, found=found, fix=fix, **more)

    def _name(self, folder: str) -> str:
        # an nn.Sequential has such names too
        plain = self.recorded is not None and self._pipe is None
        if plain or not re.match(rf"[0-9]+\.|{TIED}\.", folder):
            return folder
        if self._pipe is not None:
            return self._pipe.find(folder, self.folder / f"{ATOMS}/{folder}")
        if self.declared.rules is not None and self.declared.rules.pipeline:
            return self.declared.rules.canonical(folder)
        raise UnsupportedError(
            "a universal folder of a pipeline needs a family or rules",
            file=self.folder / f"{ATOMS}/{folder}",
            fix="give --rules (Python: rules=) a file with [[pipeline]] entries",
            id="layout-unknown",
        )

    # ---------------------------------------------------------------- structure

    def _groups(self) -> list[dict[str, Ints]]:
        """Names and shapes of each parameter group, in the order of the optimizer, as the model
        files say."""
        listed = self._param_groups()
        out: list[dict[str, Ints]] = [{} for _ in listed]
        for file in self._first_of_ranks():
            shapes = self._listed_shapes(file)
            numbers = self._group_numbers(listed, len(shapes), file)
            for number, named in zip(numbers, shapes, strict=True):
                for param, shape in named.items():
                    name = self._name(param)
                    own = tuple(shape)[1:] if name in self._stacked else tuple(shape)
                    out[number].update(dict.fromkeys(self._own_names(name), own))
        return out

    def _listed_shapes(self, file: str) -> list[dict[str, Any]]:
        """Names and shapes that belong together in a model file."""
        shapes = shapes_by_group(self.tree(file), self.full_path(file))
        if shapes is None:
            raise UnsupportedError(
                "a model file of the universal folder does not say which parameters belong "
                "together",
                file=self.full_path(file),
                expected="param_shapes",
                found="none",
                fix="convert the native checkpoint with megatron-ucp convert",
            )
        return shapes

    def _group_numbers(self, groups: list[Any], count: int, file: str) -> Sequence[int]:
        """The group of each of `count` entries of a model file: ZeRO-3 has one for each sub-group,
        which is a parameter here."""
        where = self.full_path(_GLOBAL)
        sizes = [len(expect.key_or(group, "params", [], where)) for group in groups]
        if count != len(groups) and sum(sizes) == count:
            return [number for number, size in enumerate(sizes) for _ in range(size)]
        if count > len(groups):
            raise ForeignFileError(
                "the model file and the optimizer of a universal folder have different groups",
                file=self.full_path(file),
                expected=len(groups),
                found=count,
            )
        return range(count)

    def _first_of_ranks(self) -> list[str]:
        """One model file of each model-parallel rank of the run that was converted."""
        first: dict[int, str] = {}
        for (_, mp), name in sorted(self.names.model.items(), key=lambda item: item[0][0] or -1):
            first.setdefault(mp, name)
        return [first[mp] for mp in sorted(first)]

    def _param_groups(self) -> list[Any]:
        base = expect.section(self._global, "optimizer_state_dict")
        groups = base.get("param_groups") or self._global.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise DamagedFileError(
                "the universal folder does not say its parameter groups",
                expected="param_groups",
                file=self.full_path(_GLOBAL),
                found=type(groups).__name__,
            )
        return groups

    def _manifest(self, groups: list[dict[str, Ints]], recorded: Manifest | None) -> Manifest:
        found = list(self._trainable(groups, recorded))
        found += self._values({spec.name for spec, _ in found})
        file = self.full_path(_GLOBAL)
        told = param_groups(self._param_groups(), lambda ref: self.tensor(file, ref), file)
        said = DeepSpeedConfig(self.meta.get("ds_config")).with_rules(told)
        run = run_of(self.meta)
        if lost := self._lost_values():
            run[NOT_SAVED] = [f"values of frozen parameters or buffers: {some_of(lost)}"]
        params, buffers = tuple(spec for spec, _ in found), tuple(buffer for _, buffer in found)
        if recorded is None:
            return Manifest(Keeper.UNIVERSAL, Mesh(), params, buffers, said, self._ties(), run=run)
        if len(recorded.groups) == len(said):
            said = tuple(
                replace(group, optimizer=other.optimizer, steps_as=other.steps_as)
                for group, other in zip(said, recorded.groups, strict=True)
            )
        return replace(
            recorded,
            keeper=Keeper.UNIVERSAL,
            mesh=Mesh(),
            params=params,
            buffers=buffers,
            groups=said,
            run={**recorded.run, **run},
        )

    def _ties(self) -> tuple[Tie, ...]:
        """Further names of parameters, as the model file says them."""
        said = shared_params(self.meta, self.main_file)
        named = grouped((self._name(name), self._name(alias)) for alias, name in said.items())
        return tuple(Tie(name, tuple(aliases)) for name, aliases in named.items())

    def _trainable(
        self, groups: list[dict[str, Ints]], recorded: Manifest | None
    ) -> Iterator[tuple[ParamSpec, FlatBuffer]]:
        """Parameters of the optimizer, each in a buffer of its own."""
        trained = (
            [spec.dtype for spec in recorded.params if spec.kind == "trainable"] if recorded else []
        )
        dtype = trained[0] if trained else training_dtype(self.meta, {}, ())
        for group, named in enumerate(groups):
            for name, shape in named.items():
                states, kept = self._states(name)
                whole = self._shape(name, MASTER, shape)
                spec = self._spec(name, whole, dtype, "trainable")
                yield spec, alone(name, math.prod(whole), states, group, kept, axes=())

    def _values(self, flat: set[str]) -> Iterator[tuple[ParamSpec, FlatBuffer]]:
        """What no optimizer steps."""
        buffers = {self._name(name) for name in buffer_names(self.meta, self.main_file)}
        aliases = {self._name(name) for name in shared_params(self.meta, self.main_file)}
        for name in [name for name in self._atoms if name not in flat and name not in aliases]:
            value = self._atom(name, MASTER)
            if no_extra_state(name, value):
                continue
            dtype = value.storage.dtype
            kind = "buffer" if name in buffers else "frozen"
            spec = self._spec(name, value.shape, dtype, kind)
            yield spec, alone(name, value.numel, ((VALUE, dtype),), axes=())

    def _spec(self, name: str, shape: Ints, dtype: str, kind: str) -> ParamSpec:
        spec = None if is_stacked(name) else self.declared.find(name, shape, kind)
        # another shape is an error of the comparison with the target
        if spec is None or spec.shape != shape:
            spec = ParamSpec(name, shape, dtype)
        expert = number_and_count(name, self._experts)
        return replace(spec, dtype=dtype, kind=kind, expert=expert)

    def _states(self, name: str) -> tuple[tuple[tuple[str, str], ...], Mapping[str, float]]:
        """Element-wise states of a parameter with the masters first, and its step."""
        found = {file.removesuffix(".pt") for file in self._files_of(self._folder(name))}
        if MASTER not in found:
            problem = "a parameter of the universal folder has lost its master weights"
            rest = ", ".join(sorted(found)) or "nothing"
            raise self._lost(problem, self._file(name, MASTER), rest, parameter=name)
        odd = sorted(found - {MASTER, STEP} - ELEMENT)
        if odd:
            raise UnsupportedError(
                "the universal folder holds a state that is not known",
                file=self.folder / self._file(name, odd[0]),
                parameter=name,
                expected=" ".join(sorted(ELEMENT)),
                found=odd[0],
                fix="register its optimizer (ucp.register_optimizer), or move the file away",
            )
        states = [MASTER, *sorted(found & ELEMENT)]
        if len(states) > 1 and STEP not in found and self._steps_apart:
            problem = "a parameter of the universal folder has lost its step"
            rest = ", ".join(sorted(found))
            raise self._lost(problem, self._file(name, STEP), rest, parameter=name)
        kept = self._step(name) if STEP in found else self._common_step() if len(states) > 1 else {}
        return tuple((state, self._atom(name, state).storage.dtype) for state in states), kept

    @cached_property
    def _steps_apart(self) -> bool:
        """Whether parameters have their own steps, as in all but stock's folders of ZeRO-3."""
        return any(
            self.folder.is_file(f"{ATOMS}/{atom}/{STEP}.pt") for atom in self._atoms.values()
        )

    def _step(self, name: str) -> Mapping[str, float]:
        file = self._file(name, STEP)
        return {STEP: self._number(self.file(file).tree, file)}

    def _number(self, value: Any, file: str) -> float:
        path = self.full_path(file)
        if isinstance(value, TensorRef):
            return step_of(self.scalar(path, value), path)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise DamagedFileError("a step is no number", file=path, found=type(value).__name__)
        return step_of(expect.number(value, STEP, path), path)

    def _common_step(self) -> Mapping[str, float]:
        """Stock's folders of ZeRO-3 keep one step for all parameters."""
        value = expect.section(self._global, "optimizer_state_dict", "state", 0).get(STEP)
        return {} if value is None else {STEP: self._number(value, _GLOBAL)}

    def _folder(self, name: str) -> str:
        if name not in self._atoms:
            problem = "a parameter is missing in the universal folder"
            expected = f"{len(self._atoms)} folders and one of this name"
            raise self._lost(problem, ATOMS, "none", parameter=name, expected=expected)
        return self._atoms[name]

    def _path(self, name: str) -> str:
        return self.folder / f"{ATOMS}/{self._folder(name)}"

    def _files_of(self, atom: str) -> list[str]:
        """The names of the files in a parameter's folder."""
        return [name for name in self.folder.names(f"{ATOMS}/{atom}") if name.endswith(".pt")]

    def _file(self, name: str, state: str) -> str:
        return f"{ATOMS}/{self._folder(name)}/{state}.pt"

    def _atom(self, name: str, state: str) -> TensorRef:
        """The tensor of a state."""
        file = self._file(name, state)
        tree = self.file(file).tree
        ref = tree.get(_PARAM) if isinstance(tree, dict) else tree
        if not isinstance(ref, TensorRef) or not ref.is_contiguous:
            raise DamagedFileError(
                "a file of a universal folder holds no tensor",
                file=self.full_path(file),
                parameter=name,
                found=type(ref).__name__,
            )
        return self._slice(ref, name, file) if is_stacked(name) else ref

    def _slice(self, ref: TensorRef, name: str, file: str) -> TensorRef:
        """One expert of a stacked tensor, which stock's folders of ZeRO-3 hold flat."""
        number, count = number_and_count(name, self._stacked) or (0, 1)
        size, rest = divmod(ref.numel, count)
        if rest or (len(ref.shape) > 1 and ref.shape[0] != count):
            raise ForeignFileError(
                "a stacked parameter has other experts than the model file says",
                file=self.full_path(file),
                parameter=name,
                expected=f"{count} experts",
                found=f"shape {ref.shape}",
            )
        shape, stride = (ref.shape[1:], ref.stride[1:]) if len(ref.shape) > 1 else ((size,), (1,))
        return replace(
            ref, offset_elems=ref.offset_elems + number * size, shape=shape, stride=stride
        )

    def _shape(self, name: str, state: str, said: Ints) -> Ints:
        """Stock's folders of ZeRO-3 hold flat tensors, and the model file their shapes; those of a
        tensor-parallel run say the shape of one rank there."""
        found = self._atom(name, state).shape
        flat = len(found) == 1 and len(said) != 1
        if flat and found[0] != math.prod(said):
            raise ForeignFileError(
                "a parameter of the universal folder has another size than the model file says",
                file=self._path(name),
                parameter=name,
                expected=said,
                found=found,
            )
        return said if flat else found

    def _compare(self, recorded: Manifest) -> None:
        """Raises ForeignFileError or NotFoundError where the folder is not what was written."""
        both = self.manifest, recorded
        params = [{spec.name: (spec.shape, spec.kind) for spec in m.params} for m in both]
        states = [dict(map(_kept, m.buffers)) for m in both]
        for what, (one, other) in {"parameters": params, "states, groups or steps": states}.items():
            odd = sorted(name for name in {*one, *other} if one.get(name) != other.get(name))
            if odd:
                raise ForeignFileError(
                    f"manifest and files disagree in the {what}",
                    file=self.folder / FILE_NAME,
                    parameter=odd[0],
                    expected=other.get(odd[0]),
                    found=one.get(odd[0]),
                    fix="restore the files of one conversion, or convert again",
                )

    # ---------------------------------------------------------------- what the operations ask for

    def where(self, slot: Slot) -> Where:
        """Place of a slot. Raises DamagedFileError or ForeignFileError."""
        buffer = self.manifest.buffers[slot.buffer]
        name = buffer.members[0].param
        state = MASTER if slot.state == VALUE else slot.state
        ref = self._atom(name, state)
        dtype = dict(buffer.states)[slot.state]
        if ref.numel != buffer.length or ref.storage.dtype != dtype:
            raise ForeignFileError(
                "a state has another size or type than its parameter",
                parameter=name,
                file=self._path(name),
                expected=f"{buffer.length} of {dtype}",
                found=f"{ref.shape} of {ref.storage.dtype}",
            )
        return self.place(self._file(name, state), ref)

    @property
    def file_names(self) -> list[str]:
        """Every file with state in it, relative to the folder."""
        atoms = [
            f"{ATOMS}/{atom}/{name}"
            for atom in sorted(self._atoms.values())
            for name in self._files_of(atom)
        ]
        return [*self.names.names, _GLOBAL, *atoms]

    def read_extras(self) -> Extras:
        scaler = LossScale.pickled(self._global.get("loss_scaler"))
        scheduler = self.meta.get("lr_scheduler")
        module = expect.key_or(self.meta, "module", {}, self.main_file)
        kept = {name: value for name, value in module.items() if is_extra_state(name)}
        return from_meta(self, self.meta, self._global, scheduler, scaler, kept)


def _kept(buffer: FlatBuffer) -> tuple[str, tuple[Any, ...]]:
    """The parameter of a buffer, and what is kept of it."""
    member = buffer.members[0]
    return member.param, (dict(buffer.states), buffer.group, dict(member.scalars))


class UniversalFormat:
    """DeepSpeed's universal folders."""

    def recognises(self, folder: Folder) -> bool:
        return is_universal(folder)

    def open(self, folder: Folder, told: CallerModel) -> Checkpoint:
        return UniversalCheckpoint(folder, told)
