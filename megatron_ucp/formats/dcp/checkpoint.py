"""A folder that torch.distributed.checkpoint wrote for an FSDP2 program, opened: Accelerate's two
folders, torchtitan's flat one, a user's own.

The masters of such a run are its weights, in the dtype in which its optimizer steps them. Each
parameter is whole in the index, in the chunks that ranks had of it, whatever mesh that was: files
say no placements, and need none.
"""

import hashlib
import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

from megatron_ucp.core.box import Bounds, Ints
from megatron_ucp.core.flat import FlatBuffer, alone
from megatron_ucp.core.grouping import grouped, kept
from megatron_ucp.core.layout import Chunks
from megatron_ucp.core.manifest import FILE_NAME, RECORDED, Manifest, ParamGroup, ParamSpec, Tie
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.tensor_parts import Interleaved, Slice, TensorPart
from megatron_ucp.core.values import same
from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    ModelMismatchError,
    NotFoundError,
    StateMismatchError,
    UnsupportedError,
    some_of,
)
from megatron_ucp.formats import expect
from megatron_ucp.formats.byte_files import Record, Where, Zeros, same_bytes
from megatron_ucp.formats.checkpoint import CallerModel, Checkpoint, Extras, tensor_at
from megatron_ucp.formats.dcp.torchtitan import (
    FURTHER,
    ROUTER_BIAS,
    Heads,
    fused_of,
    has_turns,
    is_torchtitan,
    titan_names,
    twin_shapes,
)
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.hugging_face.checkpoint import CONFIG_FILE
from megatron_ucp.formats.hugging_face.stacked import joined
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.manifest_beside import ManifestBeside
from megatron_ucp.formats.megatron.arguments import OF_VALUES
from megatron_ucp.formats.megatron.distcp import (
    INDEX_FILE,
    Blocks,
    DistcpFile,
    StoredTensor,
    aligned,
)
from megatron_ucp.formats.megatron.torch_dist import check_backend
from megatron_ucp.formats.optimizers import check_known, counts_steps, is_element, untold_states
from megatron_ucp.formats.param_groups import param_groups, step_of
from megatron_ucp.formats.pt.archive import contiguous
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.pt.refs import ITEMSIZE, TensorRef, number_in

if TYPE_CHECKING:
    from megatron_ucp.formats.megatron.index import Index


# ---- keys
#
# What the keys of a DCP folder say: which are weights, which states of an optimizer, which the
# settings of its parameter groups.
#
# DCP flattens nested dictionaries, and joins their keys with dots. So `dcp.save({"model": ...,
# "optim": ...})` has the keys `model.FQN`, `optim.state.FQN.exp_avg` and `optim.param_groups.0.lr`,
# and torchtitan's flat state dict the keys `FQN`, `optimizer.state.FQN.exp_avg` and
# `optimizer.param_groups.FQN.lr`. FQN is the name of a parameter as the program's model has it.
#
# Source: `get_optimizer_state_dict` and its flattening in torch.distributed.checkpoint.state_dict
# (torch 2.13), Accelerate 1.15 and torchtitan 0.3.0.


# What a flat state dict has beside parameters and their optimizer.
SCHEDULER, TRAIN_STATE = "lr_scheduler.", "train_state."
_BESIDE = (SCHEDULER, TRAIN_STATE, "dataloader.", "dataloader", "rng", "epoch", "step")
_GROUPS = re.compile(r"((?:[^.]+\.)*?)param_groups\.")
_MODEL = "model."
_AVERAGES = re.compile(r"(.*\.)?(model_)?(ema|averaged?|swa)(_model|_weights)?\.")


@dataclass(frozen=True)
class GroupKeys:
    """One parameter group: the key of each of its settings. `params` is the key of the list of its
    parameters' names; where settings lie by parameter, `names` are these."""

    settings: Mapping[str, str]
    params: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Keys:
    """`weights`: the key of each parameter or buffer by its name; `states`: of each state by name
    and state; `groups` as the files list them; `beside`: keys of what is neither, such as the
    scheduler; `prefix` of the weights and `optimizer` of the optimizer's keys; `stated` are the
    names of which the optimizer says anything, of which one may stand for several weights."""

    weights: Mapping[str, str]
    states: Mapping[str, Mapping[str, str]]
    groups: tuple[GroupKeys, ...] = ()
    beside: tuple[str, ...] = ()
    prefix: str = ""
    optimizer: str = ""
    left: tuple[str, ...] = ()
    stated: frozenset[str] = frozenset()


def read_keys(
    tensors: Collection[str],
    objects: Collection[str],
    known: Collection[str],
    listed: Mapping[str, tuple[str, ...]],
    file: str,
) -> Keys:
    """What the keys say. `known` are names of the caller's model (none: nobody says them), and
    `listed` what the lists of parameters say, by their keys. Raises UnsupportedError for several
    optimizers and for states by position; DamagedFileError, StateMismatchError."""
    optimizer = optimizer_prefix([*tensors, *objects], file)
    states, groups, rest = dict[str, dict[str, str]](), dict[str, dict[str, str]](), list[str]()
    for key in [*tensors, *objects]:
        if optimizer is None or not key.startswith(optimizer):
            rest.append(key)
            continue
        inner = key.removeprefix(optimizer)
        if inner.startswith("state."):
            name, _, state = inner.removeprefix("state.").rpartition(".")
            states.setdefault(name, {})[state] = key
        elif inner.startswith("param_groups."):
            name, _, setting = inner.removeprefix("param_groups.").rpartition(".")
            groups.setdefault(name, {})[setting] = key
        else:
            rest.append(key)
    if optimizer is not None:
        _refuse_positions(states, file)
    found = _groups(groups, file)
    stated = {
        *states,
        *(name for one in found for name in (*one.names, *listed.get(one.params, ()))),
    }
    names = {weight for name in stated for weight in fused_of(name)}
    states = {weight: own for name, own in states.items() for weight in fused_of(name)}
    found = tuple(
        replace(one, names=tuple(w for name in one.names for w in fused_of(name))) for one in found
    )
    here = {*tensors}
    weights = [key for key in rest if key in here]
    prefix, left = _weights_prefix(weights, sorted(names), known, file)
    held = {
        key.removeprefix(prefix): key
        for key in weights
        if key.startswith(prefix) and (prefix or not key.startswith(_BESIDE))
    }
    taken = {*held.values()}
    beside = tuple(key for key in rest if key not in taken)
    return Keys(held, states, found, beside, prefix, optimizer or "", left, frozenset(stated))


def optimizer_prefix(keys: Iterable[str], file: str) -> str | None:
    """What the keys of the optimizer begin with; None where there is none. Raises UnsupportedError
    for several optimizers."""
    found = {match[1] for key in keys if (match := _GROUPS.match(key)) is not None}
    if len(found) > 1:
        raise UnsupportedError(
            "the folder holds the states of several optimizers",
            file=file,
            expected="one, such as optim.state and optim.param_groups",
            found=some_of(sorted(found)),
            fix="save each model with its optimizer into a folder of its own",
        )
    return next(iter(found), None)


def params_keys(keys: Iterable[str], file: str) -> list[str]:
    """The keys of the lists of parameters of groups that are numbered."""
    known = [*keys]
    prefix = optimizer_prefix(known, file)
    if prefix is None:
        return []
    pattern = re.compile(rf"{re.escape(prefix)}param_groups\.\d+\.params")
    return [key for key in known if pattern.fullmatch(key)]


def _refuse_positions(states: Collection[str], file: str) -> None:
    if states and all(name.isdecimal() for name in states):
        raise UnsupportedError(
            "the optimizer's states lie by position, and nothing says of which parameters they are",
            file=file,
            expected="state.FQN.exp_avg, as get_optimizer_state_dict names them",
            found=some_of([f"state.{name}" for name in sorted(states)]),
            fix="save with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict in "
            "the place of optimizer.state_dict()",
        )


def _groups(groups: Mapping[str, Mapping[str, str]], file: str) -> tuple[GroupKeys, ...]:
    """Groups by number, each with its list of parameters; or the settings of each parameter."""
    numbered = {
        name: keys for name, keys in groups.items() if name.isdecimal() and "params" in keys
    }
    if not numbered:
        return tuple(GroupKeys(keys, names=(name,)) for name, keys in groups.items())
    if odd := sorted({*groups} - {*numbered}):
        raise DamagedFileError(
            "parameter groups are listed in two ways",
            file=file,
            expected="numbers, each with its list of parameters",
            found=some_of(odd),
        )
    numbers = [*map(str, range(len(numbered)))]
    if numbered.keys() != {*numbers}:
        raise DamagedFileError(
            "a parameter group is missing",
            file=file,
            expected=f"groups 0 to {len(numbered) - 1}",
            found=", ".join(sorted(numbered, key=int)),
        )
    return tuple(
        GroupKeys({k: v for k, v in keys.items() if k != "params"}, keys["params"])
        for keys in map(numbered.__getitem__, numbers)
    )


def _weights_prefix(
    weights: list[str], names: list[str], known: Collection[str], file: str
) -> tuple[str, tuple[str, ...]]:
    """What the keys of weights begin with, and other sets of weights that are left out: averages
    beside the model. Raises StateMismatchError where the weights of `names`, which an optimizer
    steps, are not there."""
    fitting = (
        _prefixes_of_states(weights, names, file) if names else _prefixes_of_model(weights, known)
    )
    kept = [p for p in fitting if not _AVERAGES.fullmatch(p)] or fitting
    prefix = _MODEL if _MODEL in kept else min(kept, key=len)
    if len(kept) > 1 and prefix != _MODEL:
        raise UnsupportedError(
            "the folder holds several sets of weights with these names",
            file=file,
            expected="one, such as those below `model`",
            found=some_of(sorted(kept)),
            fix="save the model below `model`, and others elsewhere",
        )
    return prefix, tuple(sorted({*fitting} - {prefix}))


def _prefixes_of_states(weights: list[str], names: list[str], file: str) -> list[str]:
    """The prefixes below which all weights are that an optimizer steps. Raises
    StateMismatchError."""
    keys, first = {*weights}, names[0]
    ends = [key.removesuffix(first) for key in weights if key.endswith(first)]
    fitting = [p for p in ends if (not p or p[-1] == ".") and all(p + n in keys for n in names)]
    if fitting:
        return fitting
    lost = [name for name in names if not any(key.endswith(name) for key in weights)]
    raise StateMismatchError(
        "the optimizer has states of parameters whose weights are not in the folder",
        file=file,
        parameter=some_of(lost or names),
        expected="the weights beside the states: Accelerate's pytorch_model_fsdp_0 beside "
        "optimizer_0, or one folder with both",
        found=some_of(weights) if weights else "no weights",
        fix="give the folder that holds both",
    )


def _prefixes_of_model(weights: list[str], known: Collection[str]) -> list[str]:
    """The prefixes below which most of the `known` names are. Where nobody says any: `model.`, if
    nothing but averages is beside it."""
    if not known:
        own = [key for key in weights if not key.startswith(_BESIDE)]
        inside = [key.startswith(_MODEL) or bool(_AVERAGES.match(key)) for key in own]
        return [_MODEL] if own and all(inside) else [""]
    keys, parts = {*weights}, [key.split(".") for key in weights]
    starts = {".".join([*part[:n], ""]) for part in parts for n in (1, 2) if n < len(part)}
    counts = {p: sum(p + name in keys for name in known) for p in ("", *sorted(starts))}
    most = max(counts.values())
    return [p for p, count in counts.items() if count == most > 0] or [*counts]


# ---- the checkpoint


# Accelerate's folders beside each other: `accelerator.save_state`, and Trainer's checkpoint-N.
MODEL_FOLDER, OPTIMIZER_FOLDER = "pytorch_model_fsdp_0", "optimizer_0"
_OTHER_MODEL = re.compile(r"pytorch_model_fsdp_[1-9]\d*")
_OTHER = re.compile(r"(pytorch_model_fsdp|optimizer)_[1-9]\d*")
SCHEDULERS = ("scheduler.pt", "scheduler.bin")  # Trainer's, Accelerate's
TRAINER_STATE = "trainer_state.json"
INDEX_DIGESTS = "dcp_indices"  # of a manifest's run: the SHA-256 of each index
MAX_INDEXED = 2**20  # elements of a tensor that is a plain value
_BUFFERS = re.compile(
    r"(.+\.)?(running_mean|running_var|num_batches_tracked|inv_freq|expert_bias|"
    r"tokens_per_expert|e_score_correction_bias|expert_bias_E|tokens_per_expert_E|freqs_cis|"
    r"rope\.cache)"
)
# what Megatron-LM writes beside the model in every format
_OF_MEGATRON = re.compile(
    r"(common_state/|checkpoint_version$|args($|\.)|opt_param_scheduler|rng_state)"
)
_FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class IndexFolder:
    """A folder with an index: its name with a slash ("": the checkpoint itself)."""

    name: str
    index: "Index"

    def file(self, name: str) -> str:
        return self.name + name


_ZEROS = ""  # the key of a state that no tensor has


@dataclass(frozen=True)
class PlacedBlock:
    """Block `number` of what chunks of the tensors of each state, by its key, have of a part of a
    parameter: `boxes` of it, one after the other along the layout's dim."""

    elems: int
    boxes: tuple[Bounds, ...]
    states: Mapping[str, Blocks]
    keys: Mapping[str, str]
    number: int


class DcpCheckpoint(Checkpoint):
    """One opened folder. Raises a UcpError for anything that indices, small objects and the sizes
    of files can show; bytes of tensors are not read, but for a weight without states that may be
    another one under a second name."""

    def __init__(self, folder: Folder, told: CallerModel) -> None:
        super().__init__(folder)
        self.told = told
        with self.closed_on_failure():
            self._folders = self._index_folders()
            _ = self.evidence
            self._by_file = {
                one.file(name): one for one in self._folders for name in one.index.file_names
            }
            self.main_file = self._main_file()
            self._stored = self._all_tensors()
            self._folder_of = {key: one for one in self._folders for key in one.index.tensors}
            self._objects = {key: one for one in self._folders for key in one.index.objects}
            self.keys = self._read_keys()
            self.groups, self._group_of = self._read_groups()
            self._unstepped: dict[str, tuple[str, ...]] = {}  # parameters -> states of others
            self._check_states()
            self._ties: tuple[Tie, ...] = ()
            self._blocks: list[PlacedBlock] = []
            self._specs: Mapping[str, ParamSpec] | None = None  # of parts under other names
            self._state_slices: Mapping[str, Slice] = {}
            self._left_out: list[str] = []
            self.manifest = self._build()

    # ------------------------------------------------ what lies there

    def _index_folders(self) -> list[IndexFolder]:
        from megatron_ucp.formats.megatron.index import index_in

        if self.folder.is_file(INDEX_FILE):
            return [IndexFolder("", index_in(self.folder))]
        pattern = _OTHER_MODEL if self.told.weights else _OTHER
        others = [name for name in self.folder.names() if pattern.fullmatch(name)]
        if others:
            raise UnsupportedError(
                "the folder holds several models or optimizers that one Accelerator prepared",
                file=self.folder / others[0],
                expected=f"{MODEL_FOLDER} and {OPTIMIZER_FOLDER} alone",
                found=some_of(others),
                fix="copy each with its optimizer into a folder of its own, under the names "
                f"{MODEL_FOLDER} and {OPTIMIZER_FOLDER}",
            )
        wanted = [MODEL_FOLDER]
        if self.folder.is_folder(OPTIMIZER_FOLDER) and not self.told.weights:
            wanted.append(OPTIMIZER_FOLDER)
        return [IndexFolder(f"{name}/", index_in(self.folder, f"{name}/")) for name in wanted]

    def _main_file(self) -> str:
        for name in SCHEDULERS:
            if self.folder.is_file(name):
                return self.full_path(name)
        return self.full_path(f"{self._folders[0].name}{INDEX_FILE}")

    @property
    def _index_file(self) -> str:
        return self.full_path(f"{self._folders[-1].name}{INDEX_FILE}")

    def _all_tensors(self) -> dict[str, StoredTensor]:
        first, *others = self._folders
        for one in others:
            for key in one.index.tensors:
                if key in first.index.tensors:
                    raise ForeignFileError(
                        "a tensor lies in both folders",
                        file=self._index_file,
                        parameter=key,
                        found=f"{first.name} and {one.name}",
                        fix="restore the folders of one save",
                    )
        return {key: found for one in self._folders for key, found in one.index.tensors.items()}

    def _weight(self, name: str) -> StoredTensor:
        return self._stored[self.keys.weights[name]]

    def _read_keys(self) -> Keys:
        known = [*(self.told.shares or {}), *self.told.own]
        if is_torchtitan(self._stored.keys()):  # whose names are nobody's here
            known = []
        keys = [*self._stored, *self._objects]
        listed = {key: self._params(key) for key in params_keys(keys, self._index_file)}
        self._listed = listed
        return read_keys([*self._stored], [*self._objects], known, listed, self._index_file)

    def _params(self, key: str) -> tuple[str, ...]:
        """The names of a group's parameters. Raises UnsupportedError for positions."""
        if key not in self._objects:
            raise expect.other_structure(f"{key}: a list of names", None, self._index_file)
        found = self._object(key)
        if isinstance(found, list) and found and all(type(one) is int for one in found):
            raise UnsupportedError(
                "a parameter group lists its parameters by position",
                file=self._index_file,
                parameter=key,
                expected="names, as get_optimizer_state_dict lists them",
                found=some_of([*map(str, found)]),
                fix="save with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict in "
                "the place of optimizer.state_dict()",
            )
        return tuple(expect.texts(found, key, self._index_file))

    # ------------------------------------------------ values

    def _object(self, key: str) -> Any:
        """What an object's archive holds; tensors in it are references."""
        one = self._objects[key]
        return self.file(one.file(one.index.objects[key].file)).stored_value(key)

    def _value(self, key: str) -> Any:
        """A value that lies as an object, or as a small tensor, which it stays."""
        if key in self._objects:
            return self._object(key)
        tensor = self._stored[key]
        if math.prod(tensor.shape) > MAX_INDEXED or len(tensor.chunks) != 1:
            raise UnsupportedError(
                "a tensor among plain values is too large",
                file=self._index_file,
                parameter=key,
                expected=f"at most {MAX_INDEXED} elements in one chunk",
                found=str(tensor.shape),
                fix="save the checkpoint again with its program",
            )
        return self._chunk_value(key, 0)

    def _chunk_value(self, key: str, number: int) -> Any:
        """A small chunk of a tensor, as a tensor of its own."""
        tensor = self._stored[key]
        where = self._where(key, Blocks.of(tensor), number)
        self.note_read(where.file, where.record)
        return tensor_at(where, contiguous("0", where.dtype, tensor.chunks[number].shape))

    def _number(self, key: str) -> float:
        """A number that lies as an object or as a tensor of one element."""
        found = self._value(key)
        if isinstance(found, bool) or not isinstance(found, int | float):
            if not hasattr(found, "get"):
                raise expect.other_structure(f"{key}: a number", found, self._index_file)
            found = number_in(cast("Any", found), self._index_file)
        if not math.isfinite(found):
            raise DamagedFileError(
                "a number is none", file=self._index_file, parameter=key, found=found
            )
        return float(found)

    # ------------------------------------------------ groups

    def _read_groups(self) -> tuple[tuple[ParamGroup, ...], dict[str, int]]:
        """The groups, and the number of each parameter's. Of settings by parameter those that are
        alike are one group."""
        if self.told.weights:
            return (), {}
        out: list[ParamGroup] = []
        numbers: dict[str, int] = {}
        for group in self.keys.groups:
            found = self._settings(group)
            number = next(
                (n for n, one in enumerate(out) if group.names and _is_alike(one, found)), len(out)
            )
            if number == len(out):
                out.append(found)
            listed = self._listed.get(group.params, ())
            for name in (*group.names, *(w for one in listed for w in fused_of(one))):
                if name in numbers:
                    raise DamagedFileError(
                        "a parameter is in two groups", file=self._index_file, parameter=name
                    )
                numbers[name] = number
        for name in self.keys.states:
            if name not in numbers:
                raise DamagedFileError(
                    "a parameter has states, and is in no group",
                    file=self._index_file,
                    parameter=name,
                )
        return tuple(out), numbers

    def _settings(self, group: GroupKeys) -> ParamGroup:
        tree = {name: self._value(key) for name, key in group.settings.items()}
        for name, value in tree.items():
            if isinstance(value, TensorRef):
                raise expect.other_structure(
                    f"{group.settings[name]}: a value", value, self.main_file
                )
        (plain,) = param_groups([tree], _as_it_is, self._index_file)
        return replace(plain, optimizer=_class_name(plain.settings))

    def _check_states(self) -> None:
        """Raises StateMismatchError for a parameter that lacks a state which its optimizer keeps
        after the first step, where any parameter has some. One that has none at all got no gradient
        yet, or is frozen where the caller's model says so."""
        if not any(self.keys.states.values()):
            return
        like = self.told.own
        for name, number in [*self._group_of.items()]:
            settings, found = self.groups[number].settings, {*self.keys.states.get(name, ())}
            if not found and name in like and like[name].kind == "frozen":
                del self._group_of[name]
                continue
            lost = untold_states(settings, found)
            if counts_steps(settings, found) and "step" not in found:
                lost.append("step")
            if lost and not found and {*lost} <= {*self._usual_states(number)}:
                self._unstepped[name] = self._usual_states(number)
            elif lost:
                raise StateMismatchError(
                    "states of the optimizer are missing",
                    file=self._index_file,
                    parameter=name,
                    expected="those that its other parameters have; one that got no gradient has "
                    "none",
                    found=f"no {', '.join(lost)}",
                    fix="load the weights alone (Python: load_optimizer_states=False, "
                    'allow={"weights"})',
                )

    @cached_property
    def _kinds_of_states(self) -> dict[int, set[tuple[str, ...]]]:
        """The states of the parameters of each group that have any: one kind where all have the
        same ones."""
        pairs = (
            (self._group_of[n], tuple(sorted(one))) for n, one in self.keys.states.items() if one
        )
        return {number: {*kinds} for number, kinds in grouped(pairs).items()}

    def _usual_states(self, number: int) -> tuple[str, ...]:
        """The states that all parameters of a group have which have any; of a group without such
        ones those of all groups. Empty where they are not the same."""
        kinds = self._kinds_of_states.get(number) or {
            *itertools.chain(*self._kinds_of_states.values())
        }
        return next(iter(kinds)) if len(kinds) == 1 else ()

    # ------------------------------------------------ structure

    def _build(self) -> Manifest:
        tensors = self._parts()
        states = {name: self._states_of(name, part) for name, part in tensors.items()}
        self._leave_out_ties(tensors, states)
        by_param = grouped((part.param, (name, part)) for name, part in tensors.items())
        specs: list[ParamSpec] = []
        buffers: list[FlatBuffer] = []
        for param, held in by_param.items():
            spec, own = self._param(param, held, states)
            specs.append(spec)
            buffers += own
        found = Manifest(
            Keeper.DCP if self.groups else Keeper.WEIGHTS,
            Mesh(),
            tuple(specs),
            tuple(buffers),
            self.groups,
            self._ties,
            run=dict(self._counters),
        )
        return self._as_recorded(found)

    def _parts(self) -> dict[str, TensorPart]:
        """What each tensor, or each slice of one, holds of which parameter: all of the one of its
        name; or as the caller's family says it, where the folder has the names of Hugging Face."""
        names, shares = self.keys.weights, self.told.shares
        if is_torchtitan(names.keys()):
            return self._parts_of_torchtitan()
        own = {} if self.told.specs is None else self.told.specs
        if shares is None or all(name in own for name in names):
            return {name: TensorPart(name) for name in names}
        whole = {self._tensor_name(name, part) for name, part in shares.items()}
        if whole - {*names}:  # experts in one tensor, as a model has them in memory
            shares = joined(shares, {name: self._weight(name).shape for name in names})
            if shares is None:
                return {name: TensorPart(name) for name in names}
            whole = {self._tensor_name(name, part) for name, part in shares.items()}
        more = {name: TensorPart(name) for name in names if name not in whole}
        self._specs = own
        return {**shares, **more}

    # ------------------------------------------------ torchtitan

    def _parts_of_torchtitan(self) -> dict[str, TensorPart]:
        """As `_parts`, by way of the names in transformers. Raises UnsupportedError for layers that
        nothing is known of, ModelMismatchError for tensors of another model than the caller's."""
        shapes = {name: self._weight(name).shape for name in self.keys.weights}
        if further := [name for name in shapes if name.startswith(FURTHER)]:
            raise UnsupportedError(
                "torchtitan's layers that predict further tokens are not read",
                file=self._index_file,
                parameter=some_of(further),
                fix="save the model without them",
            )
        there, lost = twin_shapes(shapes)
        shares, specs = self._as_the_caller(there)
        missing = sorted({self._tensor_name(*one) for one in shares.items()} - {*there})
        if missing:
            raise ModelMismatchError(
                "the folder lacks tensors of the model",
                file=self._index_file,
                parameter=some_of(missing),
                expected=f"{len(shares)} tensors, under torchtitan's names",
                found=f"{len(there)}",
                fix="build the model with the configuration that was trained",
            )
        whole = {self._tensor_name(*one) for one in shares.items()}
        shares = {**shares, **{name: TensorPart(name) for name in there if name not in whole}}
        plain = {name: ParamSpec(name, shape, "float32") for name, shape in there.items()}
        self._specs = {**plain, **specs}
        sizes = {name: spec.shape for name, spec in self._specs.items()}
        is_fused = any(len(fused_of(name)) > 1 for name in self.keys.stated)
        turns = has_turns(shapes)
        heads = self._heads(shapes, turns) if is_fused or turns else None
        found, _ = titan_names(shares, sizes, heads, is_fused)
        self._state_slices = found.states
        return {**found.shares, **self._beside_twins(lost)}

    def _as_the_caller(
        self, there: Mapping[str, Ints]
    ) -> tuple[Mapping[str, TensorPart], Mapping[str, ParamSpec]]:
        """What the caller's model has of tensors under the names of transformers, and its
        parameters; nothing where nobody says it."""
        told = self.told
        if told.shares is not None and told.specs is not None:
            return told.shares, told.specs
        shares = None if told.tensors is None or told.like is None else told.tensors(there)
        return {n: p for n, p in (shares or {}).items() if p.param in told.own}, told.own

    def _beside_twins(self, names: Sequence[str]) -> dict[str, TensorPart]:
        """Tensors that no model of transformers has, under their own names. Biases of routers that
        are zeros change nothing, and are left out."""
        zeros = [name for name in names if name.endswith(ROUTER_BIAS) and self._is_zero(name)]
        if zeros:
            self._left_out.append(f"biases of routers that are zeros: {some_of(zeros)}")
        return {name: TensorPart(name) for name in names if name not in zeros}

    def _is_zero(self, name: str) -> bool:
        """Whether all bytes of a small weight are."""
        key = self.keys.weights[name]
        return all(
            math.prod(chunk.shape) <= MAX_INDEXED
            and not any(self._chunk_value(key, number).get("data"))
            for number, chunk in enumerate(self._stored[key].chunks)
        )

    def _heads(self, shapes: Mapping[str, Ints], turns: bool) -> Heads:
        """The heads of attention: of the model's config beside the files, or as other tensors show
        them. Raises NotFoundError where nothing does, ModelMismatchError for a wrong config."""
        first = next(name for name in shapes if name.endswith(".qkv_linear.wq.weight"))
        rows = [shapes[first.replace(".wq.", f".w{which}.")][0] for which in "qk"]
        layer = first.partition("qkv_linear.")[0]
        if f"{layer}q_norm.weight" in shapes:
            size = shapes[f"{layer}q_norm.weight"][0]
        elif f"{layer}sinks" in shapes:
            size = rows[0] // max(shapes[f"{layer}sinks"][0], 1)
        else:
            size = rows[0] // self._said_heads()
        heads, groups = (each // max(size, 1) for each in rows)
        if [heads * size, groups * size] != rows or not groups or heads % groups or size % 2:
            raise ModelMismatchError(
                "config.json is of another model than the tensors",
                file=self.folder / CONFIG_FILE,
                parameter=first,
                expected=f"heads that divide {rows[0]} rows of queries and {rows[1]} of keys",
                found=f"heads of the size {size}",
                fix="give the config.json of the model that was trained",
            )
        return Heads(heads, groups, size, turns)

    def _said_heads(self) -> int:
        """The number of heads that the model's config says, beside the files or in a manifest of
        ours. Raises NotFoundError."""
        said: Any = {}
        if self.folder.is_file(CONFIG_FILE):
            said = self.folder.json(CONFIG_FILE)
        elif self.recorded is not None:
            said = expect.key_or(self.recorded.run, RECORDED, {}, self.folder).get("config")
        found = said.get("num_attention_heads") if isinstance(said, dict) else None
        if type(found) is int and found > 0:
            return found
        raise NotFoundError(
            "nothing in the folder says how many heads attention has, and torchtitan orders the "
            "rows of queries and keys by them",
            file=self.folder / CONFIG_FILE,
            expected="num_attention_heads",
            fix="copy the config.json of the model, as transformers has it, into the folder",
            id="no-config",
        )

    # ------------------------------------------------ parameters

    def _tensor_name(self, name: str, part: TensorPart) -> str:
        return name if part.slice_of is None else part.slice_of.tensor

    def _states_of(self, name: str, part: TensorPart) -> dict[str, str]:
        """The key of each element-wise state of a tensor. Raises UnsupportedError for a state that
        is not known, or is not element-wise."""
        tensor = self._tensor_name(name, part)
        if tensor in self._unstepped and not self.told.weights:
            return {one: _ZEROS for one in self._unstepped[tensor] if is_element(one)}
        found = {} if self.told.weights else self.keys.states.get(tensor, {})
        if not found:
            return {}
        check_known(found, self._index_file)
        shape, within = self._weight(tensor).shape, self._state_slices.get(name)
        if within is not None:
            shape = (within.of, *shape[1:])
        out: dict[str, str] = {}
        for state, key in found.items():
            if not is_element(state):
                continue
            have = self._stored.get(key)
            if have is None or have.shape != shape or have.dtype not in _FLOATS:
                raise UnsupportedError(
                    "a state of the optimizer is no number for each element of its parameter",
                    file=self._index_file,
                    parameter=f"{tensor}: {state}",
                    expected=f"{shape} in {', '.join(_FLOATS[:3])}",
                    found="an object" if have is None else f"{have.shape} in {have.dtype}",
                    fix="load the weights alone (Python: load_optimizer_states=False)",
                )
            out[state] = key
        return out

    def _scalars(self, tensor: str) -> dict[str, float]:
        found = self.keys.states.get(tensor, {})
        if self.told.weights:
            return {}
        scalars = {s: self._number(k) for s, k in found.items() if not is_element(s)}
        if "step" in scalars:
            step_of(scalars["step"], self._index_file, tensor)
        return scalars

    @cached_property
    def _scalars_of(self) -> dict[str, dict[str, float]]:
        """Single numbers of each tensor's states. One that was never stepped has those of its group
        that were stepped most: an engine that steps a group as a whole counts so, too."""
        found = {name: self._scalars(name) for name in self.keys.weights}
        most: dict[tuple[int, str], float] = {}
        for name, number in self._group_of.items() if self._unstepped else ():
            for state, value in found.get(name, {}).items():
                most[number, state] = max(value, most.get((number, state), 0.0))
        for name, states in self._unstepped.items() if not self.told.weights else ():
            number = self._group_of[name]
            found[name] = {s: most.get((number, s), 0.0) for s in states if not is_element(s)}
        return found

    def _param(
        self,
        param: str,
        held: Sequence[tuple[str, TensorPart]],
        states: Mapping[str, Mapping[str, str]],
    ) -> tuple[ParamSpec, list[FlatBuffer]]:
        """A parameter with a buffer for each block. Raises StateMismatchError where its tensors are
        stepped differently, or are in different dtypes."""
        tensors = [self._tensor_name(*one) for one in held]
        group, dtype = self._stepped(param, held, states)
        first = VALUE if group is None else MASTER
        keys = [
            {first: self.keys.weights[tensor], **states[name]}
            for (name, _), tensor in zip(held, tensors, strict=True)
        ]
        shape = self._shape(param, held)
        blocks = [
            block
            for (name, part), own in zip(held, keys, strict=True)
            for block in self._blocks_of(name, part, shape, own)
        ]
        self._blocks += blocks
        kept = tuple(
            (state, "float32" if key == _ZEROS else self._stored[key].dtype)
            for state, key in keys[0].items()
        )
        scalars = {} if group is None else self._scalars_of[tensors[0]]
        buffers = [
            alone(param, block.elems, kept, group, scalars, axes=(), chunk=number)
            for number, block in enumerate(blocks)
        ]
        kind = "trainable"
        if group is None:
            kind = "buffer" if _BUFFERS.fullmatch(param) or dtype not in _FLOATS else "frozen"
        return self._spec(param, shape, dtype, kind, held[0][1], blocks), buffers

    def _stepped(
        self,
        param: str,
        held: Sequence[tuple[str, TensorPart]],
        states: Mapping[str, Mapping[str, str]],
    ) -> tuple[int | None, str]:
        """The number of a parameter's group (None: nobody steps it), and its dtype. Raises
        StateMismatchError."""
        tensors = [self._tensor_name(*one) for one in held]
        dtypes = {self._weight(name).dtype for name in tensors}
        kinds = {
            (self._group_of.get(n), tuple(states[name]), tuple(sorted(self._scalars_of[n].items())))
            for (name, _), n in zip(held, tensors, strict=True)
        }
        if len(kinds) > 1 or len(dtypes) > 1:
            raise StateMismatchError(
                "the tensors of one parameter are stepped differently",
                file=self._index_file,
                parameter=param,
                expected="one group, one step, the same states and dtype",
                found=f"{some_of(tensors)}: {sorted(map(str, kinds))[:2]}, {sorted(dtypes)}"[:300],
                fix="load it into a model that has these tensors as parameters of their own",
            )
        ((group, _, _),), (dtype,) = kinds, dtypes
        return group, dtype

    def _spec(
        self,
        param: str,
        shape: Ints,
        dtype: str,
        kind: str,
        part: TensorPart,
        blocks: Sequence[PlacedBlock],
    ) -> ParamSpec:
        """A parameter that lies in these blocks; `part` is the first of its tensors."""
        known = None if self._specs is None else self._specs.get(param)
        expert = None if known is None else known.expert
        dim = part.layout.dim if isinstance(part.layout, Chunks | Interleaved) else 0
        layout = Chunks(tuple(block.boxes for block in blocks), dim)
        spec = ParamSpec(param, shape, dtype, kind, layout, order=part.order, expert=expert)
        return self._on_mesh(spec)

    def _shape(self, param: str, held: Sequence[tuple[str, TensorPart]]) -> Ints:
        """The whole shape of a parameter. Raises StateMismatchError where a tensor has another one
        than the caller's model asks for."""
        ((name, part), *_) = held
        if self._specs is None or param not in self._specs:
            return self._weight(name).shape
        spec = self._specs[param]
        for name, part in held:
            rows = self._rows(name, part, spec)
            spec = spec if rows is None else replace(spec, shape=(rows, *spec.shape[1:]))
            want, have = part.stored_shape(spec), self._tensor_shape(name, part)
            if want != have:
                raise StateMismatchError(
                    "a tensor has another shape than the model asks for",
                    file=self._index_file,
                    parameter=name,
                    expected=want,
                    found=have,
                    fix="build the model with the configuration that was trained",
                )
        return spec.shape

    def _rows(self, name: str, part: TensorPart, spec: ParamSpec) -> int | None:
        """The rows of a vocabulary that the folder has, without an engine's padding."""
        if spec.extent is None or part.slice_of is not None:
            return None
        return self._tensor_shape(name, part)[0]

    def _tensor_shape(self, name: str, part: TensorPart) -> Ints:
        whole = self._weight(self._tensor_name(name, part)).shape
        if part.slice_of is None:
            return whole
        return part.slice_of.sliced_shape(whole) or whole

    def _on_mesh(self, spec: ParamSpec) -> ParamSpec:
        """A parameter as tensor parallelism cuts it: as the caller or rules say it. Nothing in the
        files does."""
        declared = self.told.declared(spec)
        if declared is None:
            return spec
        extent = None if spec.shape != declared.shape else declared.extent
        return replace(spec, on_mesh=declared.layout, extent=extent)

    def _leave_out_ties(
        self, tensors: dict[str, TensorPart], states: Mapping[str, Mapping[str, str]]
    ) -> None:
        """A tied parameter lies under each of its names, and its states under the first. A matrix
        that no optimizer steps, and has the bytes of one that it steps, is that one."""
        if not self.groups:
            return
        own = self.told.own  # no further names there
        ties: dict[str, list[str]] = {}
        stepped = grouped(
            ((self._weight(n).dtype, self._weight(n).shape), n)
            for n in self.keys.weights
            if n in self._group_of
        )
        for name in [name for name in tensors if name in self.keys.weights]:
            tensor = self._weight(name)
            if name in self._group_of or len(tensor.shape) != 2 or tensors[name].param in own:
                continue
            others = stepped.get((tensor.dtype, tensor.shape), ())
            found = next((other for other in others if self._are_same(name, other)), None)
            if found is not None:
                ties.setdefault(tensors[found].param, []).append(tensors[name].param)
                del tensors[name]
        self._ties = tuple(Tie(name, tuple(aliases)) for name, aliases in ties.items())

    def _are_same(self, *names: str) -> bool:
        keys = [self.keys.weights[name] for name in names]
        one, other = (Blocks.of(self._stored[key]) for key in keys)
        return one == other and all(
            same_bytes(*(self._where(key, one, number) for key in keys))
            for number in range(len(one))
        )

    # ------------------------------------------------ blocks

    def _blocks_of(
        self, name: str, part: TensorPart, shape: Ints, keys: Mapping[str, str]
    ) -> Iterator[PlacedBlock]:
        """What chunks of the tensors of a part's states, by their `keys`, have of a parameter of a
        `shape`. Raises UnsupportedError for states that are cut otherwise than it."""
        others = self._state_slices.get(name, part.slice_of)
        stored = {
            state: self._sliced(key, part.slice_of if state in (MASTER, VALUE) else others)
            for state, key in keys.items()
            if key != _ZEROS
        }
        states = aligned(stored)
        if states is None:
            first, *rest = stored
            state = next(state for state in rest if stored[state] != stored[first])
            raise UnsupportedError(
                "a state is cut otherwise than its parameter",
                file=self._index_file,
                parameter=keys[state],
                expected=f"the {len(stored[first])} chunks of {keys[first]}",
                found=f"{len(stored[state])} others",
                fix="save weights and states from one mesh",
            )
        blocks = next(iter(states.values()))
        for number, ((start, stop),) in enumerate(blocks):
            elems = blocks.elems(number)
            if elems:
                yield PlacedBlock(elems, (*part.boxes(shape, start, stop),), states, keys, number)
            elif not math.prod(shape) and number == 0:
                yield PlacedBlock(0, (((0,) * len(shape), shape),), states, keys, number)

    def _sliced(self, key: str, within: Slice | None) -> Blocks:
        """What the chunks of a tensor have of a slice of it."""
        if within is None:
            return Blocks.of(self._stored[key])
        if not within.rows:
            return self._matrices(key)[within.first]
        low, high = within.first, within.first + within.rows
        parts = Blocks.of(self._stored[key]).cut(0, [0, low, high, within.of])
        inside = (parts.starts[:, 0] >= low) & (parts.stops[:, 0] <= high)
        return parts.taken(inside).moved(-low)

    @kept
    def _matrices(self, key: str) -> list[Blocks]:
        """What the chunks of a stack of matrices have of each of them."""
        tensor = self._stored[key]
        return Blocks.of(tensor).stacked(tensor.shape[:1])

    def _where(self, key: str, blocks: Blocks, number: int) -> Where:
        return blocks.where(number, (self._stored[key],), partial(self._opened_for, key))

    def _opened_for(self, key: str, name: str) -> DistcpFile:
        """The file of that name beside the index that has a key."""
        return self.file(self._folder_of[key].file(name))

    # ------------------------------------------------ the run

    @cached_property
    def _counters(self) -> dict[str, int]:
        """Steps as a trainer's file or torchtitan says them, else those of the optimizer."""
        taken = [int(one["step"]) for one in self._scalars_of.values() if "step" in one]
        steps = max(taken, default=0)
        said = None
        if self.folder.is_file(TRAINER_STATE):
            said = self.folder.json(TRAINER_STATE).get("global_step")
        elif (key := f"{TRAIN_STATE}step") in self.keys.beside:
            said = int(self._number(key))
        elif self.recorded is not None:
            said = self.recorded.run.get("global_steps")
        if type(said) is not int or not 0 <= said < 2**63:
            said = steps
        skipped = max(0, said - steps) if taken else 0
        found = {"global_steps": said, "skipped_steps": skipped}
        samples = None if self.recorded is None else self.recorded.run.get("global_samples")
        return {**found, "global_samples": samples} if type(samples) is int else found

    def _as_recorded(self, found: Manifest) -> Manifest:
        """With what a manifest of ours beside the files knows of the model."""
        kept = self.recorded
        is_twin = self._specs is not None and self.told.shares is not None
        if kept is None or RECORDED not in kept.run or is_twin:
            return found
        return replace(found, family="", run={**found.run, RECORDED: kept.run[RECORDED]})

    @cached_property
    def evidence(self) -> ManifestBeside:
        """Raises ForeignFileError where a program saved over what the manifest describes."""
        from megatron_ucp.formats.megatron.index import MAX_INDEX_BYTES

        found = ManifestBeside(self.folder, ())
        self._closing.callback(found.close)
        run = {} if found.manifest is None else found.manifest.run
        for name, digest in expect.key_or(run, INDEX_DIGESTS, {}, self.folder).items():
            data = self.folder.small(name, MAX_INDEX_BYTES) if name in self.folder else b""
            if hashlib.sha256(data).hexdigest() != digest:
                raise ForeignFileError(
                    "the index is not the one that the manifest describes",
                    file=self.folder / name,
                    fix=f"remove {FILE_NAME}, where a program saved into this folder again; else "
                    "restore the files of one save",
                )
        return found

    @property
    def notes(self) -> list[str]:
        out = [*self.path_notes]
        if self.manifest.keeper == Keeper.WEIGHTS:
            out.append("weights alone: no states of an optimizer")
        out += [f"left out: {one}" for one in self._left_out]
        if self._unstepped and not self.told.weights:
            out.append(
                f"{len(self._unstepped)} parameters have no states, as those that got no gradient, "
                f"and begin with zeros: {some_of([*self._unstepped])}"
            )
        if self.keys.left:
            out.append(f"left out: other weights beside the model: {some_of(self.keys.left)}")
        lower = sorted(
            {s.dtype for s in self.manifest.params if s.kind == "trainable"} - {"float32"}
        )
        if lower and self.groups:
            out.append(
                f"the run stepped its weights in {', '.join(lower)}, without masters in fp32: what "
                "goes on with masters takes finer steps"
            )
        return out

    def unread(self) -> list[str]:
        """Files and folders beside those that are read, such as the state of an fp16 run's loss
        scale."""
        scheduler = next((name for name in SCHEDULERS if self.folder.is_file(name)), "")
        read = {FILE_NAME, CONFIG_FILE, TRAINER_STATE, MODEL_FOLDER, OPTIMIZER_FOLDER, scheduler}
        return sorted(
            name
            for name in self.folder.names()
            if name not in read and not name.startswith(".") and not name.endswith(".distcp")
        )

    def read_extras(self) -> Extras:
        stateless = {
            key.removeprefix(self.keys.prefix): None
            for key in self.keys.beside
            if key.endswith("._extra_state") and key in self._objects and self._object(key) is None
        }
        return Extras(self._counters, self._scheduler(), LossScale(), None, {}, stateless=stateless)

    def _scheduler(self) -> Mapping[str, Any] | None:
        """The scheduler's state: of a file beside the folders, or flat among the keys."""
        for name in SCHEDULERS:
            if self.folder.is_file(name):
                tree = self.file(name).tree
                return expect.kind(tree, dict, name, self.full_path(name))
        keys = [key for key in self.keys.beside if key.startswith(SCHEDULER)]
        flat = {key.removeprefix(SCHEDULER): self._value(key) for key in keys}
        return flat or None

    # ------------------------------------------------ what the operations ask for

    @property
    def file_names(self) -> list[str]:
        return sorted(self._by_file)

    def locate(self, slots: Collection[Slot]) -> dict[Slot, Where]:
        """What says where their chunks lie is asked for at once."""
        for slot in slots:
            block = self._blocks[slot.buffer]
            if slot.state in block.states:
                key = block.keys[slot.state]
                _, chunk = block.states[slot.state].chunk(block.number, (self._stored[key],))
                self._opened_for(key, chunk.place.file).prefetch_chunk(chunk)
        return super().locate(slots)

    def where(self, slot: Slot) -> Where:
        block = self._blocks[slot.buffer]
        if slot.state in block.states:
            return self._where(block.keys[slot.state], block.states[slot.state], block.number)
        record = Record("", 0, block.elems * ITEMSIZE["float32"], 0)
        return Where(Zeros(), record, 0, block.elems, "float32")

    def open_file(self, name: str) -> PtFile | DistcpFile:
        stored, one = self.folder.open(name), self._by_file.get(name)
        if one is None:
            return self._closing.enter_context(PtFile(stored, allow=OF_VALUES))
        return self._closing.enter_context(one.index.opened(stored, name.removeprefix(one.name)))


def _as_it_is(tensor: Any) -> Any:
    """A small tensor among settings, which was read before."""
    return tensor


def _is_alike(one: ParamGroup, other: ParamGroup) -> bool:
    return one.settings.keys() == other.settings.keys() and all(
        same(one.settings[key], other.settings[key]) for key in one.settings
    )


def _class_name(settings: Mapping[str, Any]) -> str:
    """The optimizer, where its hyper-parameters show it: torch's."""
    if not {"betas", "eps", "amsgrad", "capturable"} <= settings.keys():
        return ""
    return "torch.AdamW" if settings.get("decoupled_weight_decay") else "torch.Adam"


class DcpFormat:
    """Folders of torch.distributed.checkpoint that no Megatron wrote."""

    def recognises(self, folder: Folder) -> bool:
        if folder.is_file(f"{MODEL_FOLDER}/{INDEX_FILE}"):
            return True
        if not folder.is_file(INDEX_FILE):
            return False
        return not folder.is_file("metadata.json") and not folder.is_file("common.pt")

    def open(self, folder: Folder, told: CallerModel) -> Checkpoint:
        """Raises UnsupportedError for a folder of Megatron's in another format."""
        if folder.is_file(INDEX_FILE):
            from megatron_ucp.formats.megatron.index import index_in

            index = index_in(folder)
            if any(_OF_MEGATRON.match(key) for key in (*index.objects, *index.keys)):
                check_backend(folder)
        return DcpCheckpoint(folder, told)
