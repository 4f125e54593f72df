"""The files of one DeepSpeed tag: their names, their keys, and each of them opened once."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.core.mesh import Coords, index_on
from megatron_ucp.errors import DamagedFileError, ForeignFileError, NotFoundError, UnsupportedError
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.manifest_beside import ManifestBeside
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.formats.pt.refs import storages_of
from megatron_ucp.formats.pt.unpickle import VouchedClasses

# ---- keys
#
# Keys of DeepSpeed's model files: its own, and so those of a program.


PATTERNS = "universal_checkpoint_info"
# What DeepSpeed itself puts into the model file; every other key is the user's client state.
OWN_KEYS = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "num_experts",
        "ds_autoep_layers",
        PATTERNS,
        "folding",
        "sparse_tensor_module_names",
    }
)
NEWEST = (0, 19)  # the latest version of DeepSpeed whose keys these are
COUNTERS = ("global_steps", "global_samples", "skipped_steps")
HELPERS = ("data_sampler", "random_ltd")  # curriculum learning, layer dropping
# Members of enums in the arguments that Megatron-DeepSpeed has in its client state: (class, value)
# -> name; and their classes.
MEMBERS_OF_ARGUMENTS = {
    ("megatron.core.enums.ModelType", 1): "encoder_or_decoder",
    ("megatron.core.enums.ModelType", 2): "encoder_and_decoder",
}
OF_ARGUMENTS = frozenset(kind for kind, _ in MEMBERS_OF_ARGUMENTS)


# ---- paths


MODEL = re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")
MODEL_PARTITION = re.compile(r"zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
OPTIMIZER = re.compile(
    r"(?P<pre>bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
EXPERT = re.compile(
    r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"
)
EXPERT_OPTIMIZER = re.compile(r"expp_rank_(?P<ep>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
LAYER = re.compile(r"layer_(?P<layer>\d+)(-model_(?P<tp>\d+))?-model_states\.pt")
REFUSED_FILES = {
    r"layer_\d+-(?!(model_\d+-)?model_states\.pt).*model_states\.pt": "layer files of a pipeline "
    "with other axes",
    r"expert_\d+_mp_rank_\d+_model_states\.pt": "expert files of an old DeepSpeed-MoE",
    r"offloaded_tensors": "tensors that were offloaded to NVMe",
}
_TENSOR_PARALLEL = "tp"


def tp_of(cut: Coords) -> int:
    """The tensor-parallel rank of a place."""
    return index_on(cut, _TENSOR_PARALLEL)


def at_tp(rank: int) -> Coords:
    """The place of a tensor-parallel rank."""
    return ((_TENSOR_PARALLEL, rank),)


def optimizer_name(part: int, mp: int, prefix: str = "") -> str:
    """The optimizer file of a partition of a model-parallel rank."""
    return f"{prefix}zero_pp_rank_{part}_mp_rank_{mp:02d}_optim_states.pt"


def model_name(mp: int, part: int | None = None) -> str:
    """The model file of a model-parallel rank; at ZeRO-3 each partition has one."""
    prefix = "" if part is None else f"zero_pp_rank_{part}_"
    return f"{prefix}mp_rank_{mp:02d}_model_states.pt"


def expert_file_name(layer: int, expert: int, mp: int) -> str:
    """The file of one expert: of the layer-th mixture of its stage, at a model-parallel rank."""
    return f"layer_{layer}_expert_{expert}_mp_rank_{mp:02d}_model_states.pt"


def expert_optimizer_name(ep: int, mp: int) -> str:
    """The optimizer file of an expert-parallel rank at stage 0."""
    return f"expp_rank_{ep}_mp_rank_{mp:02d}_optim_states.pt"


def layer_name(layer: int, tp: int) -> str:
    """The file of a pipeline's layer, by its position, at a tensor-parallel rank."""
    return f"layer_{layer:02d}-model_{tp:02d}-model_states.pt"


def missing_files(
    kind: str, count: int, first: str, expected: str, found: str, more: str = "", param: str = ""
) -> NotFoundError:
    """The error for `count` files of a kind that are not there, of which `first` is the first one;
    `more` is what else can be done than to restore them."""
    article = "an" if kind[0] in "aeiou" else "a"
    one = count == 1
    return NotFoundError(
        f"{article} {kind} is missing" if one else f"{count} {kind}s are missing",
        file=first,
        parameter=param or None,
        expected=expected,
        found=found,
        fix=f"restore {'it' if one else 'them'}, or load another tag{more}",
    )


def missing_layers(folder: Folder, count: int, layer: int, tp: int) -> NotFoundError:
    """The error for layer files of a pipeline, of which the first one is of a position and a
    tensor-parallel rank."""
    return missing_files(
        "layer file",
        count,
        folder / layer_name(layer, tp),
        f"position {layer}, tensor-parallel rank {tp}",
        "no such file",
        "; or build the model with as many layers as the run had",
    )


@dataclass(frozen=True)
class TagFiles:
    """The state files of one tag folder, by (partition, model-parallel rank); partition is None for
    unpartitioned. `layers` are a pipeline's, by (position, tensor-parallel rank); `experts` by
    (mixture of the stage, expert, model-parallel rank), `expert_optimizer` by (expert-parallel
    rank, model-parallel rank)."""

    folder: Folder
    model: Mapping[tuple[int | None, int], str]
    optimizer: Mapping[tuple[int, int], str]
    prefixes: tuple[str, ...] = field(default=())
    layers: Mapping[tuple[int, int], str] = field(default_factory=dict)
    experts: Mapping[tuple[int, int, int], str] = field(default_factory=dict)
    expert_optimizer: Mapping[tuple[int, int], str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        kinds = (self.model, self.optimizer, self.layers, self.experts, self.expert_optimizer)
        return sorted(name for kind in kinds for name in kind.values())

    @property
    def first_model(self) -> str:
        """The model file that says what kind of run wrote the others: that of the first rank, or
        where it is missing of the first one that is left."""
        return self.model[min(self.model, key=lambda at: (at[0] is not None, at[1], at[0] or 0))]

    @property
    def first_ones(self) -> list[str]:
        """The files that say what kind of run wrote all: of each model-parallel rank the first."""
        ranks = dict[tuple[bool, int], str]()
        for is_optimizer, kind in enumerate((self.model, self.optimizer)):
            for (_, mp), name in sorted(kind.items(), key=lambda one: one[0][0] or 0):
                ranks.setdefault((bool(is_optimizer), mp), name)
        return [*ranks.values()]

    @property
    def is_partitioned(self) -> bool:
        """Whether each partition has a model file, as at ZeRO-3, where none holds weights."""
        return all(part is not None for part, _ in self.model)

    @property
    def without_optimizer(self) -> "TagFiles":
        """The files that hold weights, at other stages than ZeRO-3."""
        return replace(self, optimizer={}, prefixes=(), expert_optimizer={})


def is_optimizer_file(name: str) -> bool:
    """Whether a file of that name holds states of an optimizer, and nothing else."""
    return any(pattern.fullmatch(name) for pattern in (OPTIMIZER, EXPERT_OPTIMIZER))


def without_sequence_ranks(names: TagFiles) -> TagFiles:
    """The files of a run without model-parallel ranks as what they are, whatever number of those is
    in their names: DeepSpeed 0.18.2 to 0.19.4 wrote the sequence-parallel rank there, which is the
    partition modulo their number. Other files as they are."""
    places = [*names.model, *names.optimizer]
    size = 1 + max(rank for _, rank in places)
    if any(rank != (part or 0) % size for part, rank in places):
        return names
    model = {(part, 0): name for (part, _), name in names.model.items()}
    optimizer = {(part, 0): name for (part, _), name in names.optimizer.items()}
    return replace(names, model=model, optimizer=optimizer)


def is_universal(folder: Folder) -> bool:
    """Whether a tag folder is one of DeepSpeed's universal format."""
    return folder.is_folder("zero")


def _add(held: dict[Any, str], place: tuple[Any, ...], folder: Folder, name: str) -> None:
    """Raises ForeignFileError where another file is for the same place: numbers may be written with
    zeros before them."""
    if held.setdefault(place, name) != name:
        raise ForeignFileError(
            "two files are for one place",
            file=folder / name,
            expected=held[place],
            found=name,
            fix="put the files of one save, and no others, into the folder",
        )


def _no_model(folder: Folder) -> NotFoundError:
    return NotFoundError(
        "the tag folder holds no model states",
        file=folder,
        expected="mp_rank_00_model_states.pt or zero_pp_rank_0_mp_rank_00_model_states.pt",
        found="no such file",
        fix="load another tag",
        id="no-checkpoint",
    )


def _check_known(folder: Folder, name: str) -> None:
    for pattern, what in REFUSED_FILES.items():
        if re.fullmatch(pattern, name):
            raise UnsupportedError(
                f"the checkpoint holds {what}, which this version does not read",
                file=folder / name,
                fix="resume on the mesh that wrote it with DeepSpeed's own load",
            )


def scan(folder: Folder) -> TagFiles:
    """The state files of a tag folder. Raises UnsupportedError for files that this version can't
    read by name, ForeignFileError for two of one place."""
    kinds = MODEL, MODEL_PARTITION, EXPERT, EXPERT_OPTIMIZER, LAYER, OPTIMIZER
    held: dict[re.Pattern[str], dict[Any, str]] = {pattern: {} for pattern in kinds}
    for name in folder.names():
        _check_known(folder, name)
        for pattern, files in held.items():
            if found := pattern.fullmatch(name):
                _add(files, _place(found), folder, name)
    model: dict[tuple[int | None, int], str] = {**held[MODEL_PARTITION]}
    model |= {(None, mp): name for (mp,), name in held[MODEL].items()}
    if not model:
        raise _no_model(folder)
    return TagFiles(
        folder,
        model,
        {(part, mp): name for (_, part, mp), name in held[OPTIMIZER].items()},
        tuple(sorted({prefix for prefix, *_ in held[OPTIMIZER]})),
        held[LAYER],
        held[EXPERT],
        held[EXPERT_OPTIMIZER],
    )


def _place(found: re.Match[str]) -> tuple[Any, ...]:
    """What a name says, in the order in which it says it."""
    said = found.groupdict()
    return tuple(v or "" if key == "pre" else int(v or 0) for key, v in said.items())


# ---- tag folder


CLASSES = "classes"  # of a manifest's run: that plain values of the program have
MEMBERS = "members"  # of a manifest's run: of enums that pickles name by value
_SCALAR_BYTES = 16
# keys of a model file under which a program's own values stand, beside its client state
_OF_PROGRAMS = frozenset({"lr_scheduler", *HELPERS})


class TagFolder(Checkpoint):
    """The files of DeepSpeed's folders; `evidence` is what the manifest beside them lists."""

    def __init__(
        self,
        folder: Folder,
        classes: frozenset[str] | None = frozenset(),
        without_optimizer: bool = False,
    ) -> None:
        super().__init__(folder)
        self._told_classes = classes
        self._without_optimizer = without_optimizer
        names = scan(folder)
        self.names: TagFiles = names.without_optimizer if without_optimizer else names
        folder.prefetch([FILE_NAME, *self.names.first_ones])
        self._closing.callback(self.evidence.close)

    @cached_property
    def evidence(self) -> ManifestBeside:
        if self._without_optimizer:
            return ManifestBeside(self.folder, self.names.names, is_optimizer_file)
        return ManifestBeside(self.folder, self.names.names)

    def open_file(self, name: str) -> PtFile:
        # a program's own values: elsewhere they are in parameter groups alone
        own = self.names.model.values()
        vouched = VouchedClasses(
            lambda key: name in own and (key in _OF_PROGRAMS or key not in OWN_KEYS),
            self._classes,
            self._members,
        )
        file = self._closing.enter_context(PtFile(self.folder.open(name), vouched=vouched))
        self.evidence.compare(name, file.size_bytes, file.directory_sha256)
        return file

    @cached_property
    def _classes(self) -> frozenset[str] | None:
        """Classes that values may name: the caller's own, and those that the save's manifest
        says. Nothing of them is imported."""
        said = self.recorded.run.get(CLASSES, ()) if self.recorded is not None else ()
        if self._told_classes is None or not isinstance(said, list | tuple):
            return self._told_classes
        return self._told_classes | OF_ARGUMENTS | {str(name) for name in said}

    @cached_property
    def _members(self) -> Mapping[tuple[str, Any], str]:
        """Members of enums that the save's program pickled by their values, as its manifest says:
        (class, value) -> name."""
        said = self.recorded.run.get(MEMBERS, ()) if self.recorded is not None else ()
        told = dict(map(self._member, said if isinstance(said, list | tuple) else [None]))
        return MEMBERS_OF_ARGUMENTS | told

    def _member(self, said: Any) -> tuple[tuple[str, Any], str]:
        known = isinstance(said, list | tuple) and len(said) == 3
        if not known or not isinstance(said[1], str | int | float | None):
            raise DamagedFileError("the manifest does not say members of enums", file=self.folder)
        return (str(said[0]), said[1]), str(said[2])

    @property
    def file_names(self) -> list[str]:
        """Every file with state in it, relative to the folder."""
        return self.names.names

    def tree(self, name: str) -> Any:
        """The pickled tree of a file, a dict."""
        tree = self.file(name).tree
        if not isinstance(tree, dict):
            raise DamagedFileError(
                "a state file holds no dictionary",
                file=self.full_path(name),
                found=type(tree).__name__,
            )
        return tree

    def prefetch_scalars(self, name: str, tree: object) -> None:
        """Lets storage begin with the small tensors in the tree of a file: an optimizer's steps."""
        for storage in storages_of(tree):
            if storage.size_bytes <= _SCALAR_BYTES:
                self.file(name).prefetch(storage, 0, storage.size_bytes)

    def check_beside(self) -> None:
        """Compares what the manifest lists besides state files. Raises ForeignFileError."""
        for name in self.evidence.files.keys() - set(self.file_names):
            if not (self._without_optimizer and is_optimizer_file(name)):
                self.evidence.read(name)
