"""The names that released folders of transformers' models have, and those of its memory.

Since transformers 5 many models have other names in memory than in their files, and some of them
other tensors: `from_pretrained` renames and merges (the experts of a layer become one tensor), and
`save_pretrained` does the opposite. Files are what vLLM, SGLang, llama.cpp and earlier versions
read. transformers says it all by its own tables (`transformers.conversion_mapping`); this module
asks it, about a model without memory, of the class that a config names, and with tensors that are
traced (see `traced`) in the place of weights. Nothing is asked where transformers is not installed.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layout import Chunks, Replicate
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.tensor_parts import Slice, TensorPart
from megatron_ucp.reshard.hugging_face.traced import (
    Traced,
    TracedPart,
    UntracedError,
    contiguous_strides,
)

TensorShares = Mapping[str, TensorPart]
_COUNTS = re.compile(r".*(layers?|depths?|blocks?|stages?|experts)")  # keys of a config
# what the class of a model raises for sizes and settings that are none
_OF_A_CONFIG = (
    *(ArithmeticError, AttributeError, ImportError, LookupError, OSError),
    *(NotImplementedError, RuntimeError, TypeError, ValueError),
)
_SPARE_LAYERS = 64  # that a config may say beyond the parameters of a checkpoint
# a model that was loaded under memory's names remembers that, and would write them again
_TO_RELEASED = (
    "load this folder with from_pretrained, del model._weight_conversions, and save_pretrained"
)


def is_installed() -> bool:
    """Whether transformers is there, in a version that has these tables."""
    try:
        import transformers.conversion_mapping  # pyright: ignore[reportUnusedImport]
        import transformers.core_model_loading  # pyright: ignore[reportUnusedImport]  # noqa: F401
    except (ImportError, OSError, RuntimeError):  # none, an earlier one, or one that is broken
        return False
    return True


@dataclass(frozen=True)
class ReleasedNames:
    """What transformers says of the files of a model. `shares`: tensor of a released folder -> what
    it holds of which parameter; `lost`: why no files can be said, "" where they can."""

    model: Any
    shares: TensorShares
    lost: str = ""

    @property
    def are_others(self) -> bool:
        """Whether files have any other name, or other tensors, than memory."""
        return any(name != share.param for name, share in self.shares.items())

    def of_folder(self, files: Mapping[str, Ints]) -> TensorShares:
        """What each tensor of a folder holds, as `from_pretrained` would take it; a tensor of which
        transformers says nothing is a parameter of its own name. A parameter of which the folder
        has some tensors is listed with all of them. `files` are the shapes of the tensors."""
        params = {share.param for share in self.shares.values()}
        told = self._told(files, params)
        free = params - {share.param for share in told.values()}
        known = {tensor_of(name, share) for name, share in told.items()}
        others = {name: self.renamed(name, params) for name in files if name not in known}
        return told | {n: TensorPart(param if param in free else n) for n, param in others.items()}

    def _told(self, files: Mapping[str, Ints], params: set[str]) -> dict[str, TensorPart]:
        """The shares of the parameters of which a folder has tensors under released names; none
        where more of the folder's names are memory's, as in an earlier export."""
        released = {tensor_of(name, share) for name, share in self.shares.items()}
        if sum(name in params for name in files) > sum(name in released for name in files):
            return {}
        by_param: dict[str, dict[str, TensorPart]] = {}
        for name, share in self.shares.items():
            by_param.setdefault(share.param, {})[name] = share
        out: dict[str, TensorPart] = {}
        for shares in by_param.values():
            if any(tensor_of(name, share) in files for name, share in shares.items()):
                out |= shares
        return out

    def renamed(self, name: str, params: Collection[str]) -> str:
        """The parameter that a tensor of this name is to `from_pretrained`; the name itself where
        it is none."""
        from transformers.core_model_loading import rename_source_key

        renamings, prefix = self._forward
        known = dict.fromkeys(params, True)
        found = rename_source_key(name, renamings, [], prefix, known)[0]
        if found not in params and name in params:
            found = name
        return found if found in params else name

    @cached_property
    def _forward(self) -> tuple[list[Any], str]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming

        every = get_model_conversion_mapping(self.model)
        renamings = [one for one in every if isinstance(one, WeightRenaming)]
        return renamings, str(self.model.base_model_prefix)


def tensor_of(name: str, share: TensorPart) -> str:
    """The tensor of a folder that a share lies in."""
    return name if share.slice_of is None else share.slice_of.tensor


def released_names(
    config: Mapping[str, Any], params: Mapping[str, ParamSpec], architecture: str = ""
) -> ReleasedNames | None:
    """What transformers says of the files of the model whose parameters these are. `architecture`
    names its class; without it the config does, or the first class of its `model_type` that has the
    parameters. None where transformers is not installed, or has no such class."""
    if not is_installed() or not _is_plausible(config, params):
        return None
    for name in _classes(config, architecture):
        model = _without_memory(name, config)
        if model is not None and _has(model, params):
            return _reverted(model, params)
    return None


class ModelClass:
    """The class of transformers that a config says, as a model without memory."""

    def __init__(self, model: Any) -> None:
        self._model, self.title = model, type(model).__name__
        found: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            found.setdefault(id(param), []).append(name)
        # the names of each parameter: several of a tied one
        self.names: list[Sequence[str]] = [*found.values()]

    def prefix_in(self, params: Collection[str]) -> str:
        """What stands before all names of the class in those of a checkpoint, where it is the model
        inside a module of the user's; "" where nothing does, or the names are not all there."""
        for first in self.names[0]:
            for name in params:
                prefix = name.removesuffix(first)
                has_all = all(any(prefix + one in params for one in some) for some in self.names)
                if prefix in (name, "") or not has_all:
                    continue
                inner = {one.removeprefix(prefix) for one in params}
                return prefix if len(inner) == len(params) else ""
        return ""

    def drawn(self, params: Collection[str]) -> list[str]:
        """Parameters of which there is no tensor under a name that `from_pretrained` takes for
        theirs: it draws them at random."""
        lacking = [some[0] for some in self.names if not any(one in params for one in some)]
        if not lacking:
            return []
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        tables = get_model_conversion_mapping(self._model)
        if any(isinstance(one, WeightConverter) for one in tables):
            return []  # tensors under other names may be merged to them
        told, every = ReleasedNames(self._model, {}), {n for some in self.names for n in some}
        taken = {told.renamed(one, every) for one in params}
        return [name for name in lacking if name not in taken]

    def others(self, params: Mapping[str, ParamSpec]) -> list[str]:
        """Parameters that the class has not, by their names."""
        every = {name for some in self.names for name in some}
        return [n for n, spec in params.items() if spec.kind != "buffer" and n not in every]

    def in_float32(self, params: Collection[str]) -> list[str]:
        """Parameters and buffers that the class keeps in float32, whatever the model's dtype is."""
        parts = getattr(self._model, "_keep_in_fp32_modules_strict", None) or ()
        wanted = re.compile("|".join(rf"(?:.*\.)?{re.escape(one)}(?:\..*)?" for one in parts))
        return [name for name in params if parts and wanted.fullmatch(name)]


def class_of(
    config: Mapping[str, Any] | None, params: Mapping[str, ParamSpec]
) -> ModelClass | None:
    """The class that a config says; None where transformers is not installed, or has none such."""
    said: Any = config and config.get("architectures")
    name = said[0] if isinstance(said, list) and said else None
    if config is None or not isinstance(name, str):
        return None
    if not is_installed() or not _is_plausible(config, params):
        return None
    model = _without_memory(name, config)
    return (
        ModelClass(model) if model is not None and any(True for _ in model.parameters()) else None
    )


def _is_plausible(
    config: Mapping[str, Any], params: Mapping[str, ParamSpec], tensors: int = 0
) -> bool:
    """Whether a model of this config is no larger than the checkpoint: a model is built of it, and
    config.json may be anybody's."""
    sizes = [size for spec in params.values() for size in spec.shape]
    most = max([tensors, len(params), *sizes]) + _SPARE_LAYERS
    stack: list[tuple[str, Any]] = [("", config)]
    while stack:
        key, one = stack.pop()
        if isinstance(one, dict):
            stack += [(str(name), value) for name, value in cast("dict[str, Any]", one).items()]
        elif isinstance(one, list | tuple):
            stack += [(key, value) for value in cast("list[Any]", one)]
        elif type(one) is int and one > most and _COUNTS.match(key):
            return False
    return True


def _classes(config: Mapping[str, Any], architecture: str) -> Iterator[str]:
    """Names of classes of transformers that a model of a config may be of, without repeats; none
    where the class is none of transformers', whose names in files are those of memory."""
    import transformers
    from transformers.models.auto import modeling_auto

    said: Any = [architecture] if architecture else config.get("architectures") or ()
    names = [name for name in said if isinstance(name, str)]
    if any(not hasattr(transformers, name) for name in names):
        return
    kind = config.get("model_type")
    for table, mapping in vars(modeling_auto).items():
        if table.startswith("MODEL_") and table.endswith("_NAMES"):
            found: Any = mapping.get(kind) if isinstance(kind, str) else None
            names += [found] if isinstance(found, str) else [*(found or ())]
    yield from dict.fromkeys(names)


def _without_memory(name: str, config: Mapping[str, Any]) -> Any:
    """A model of a class of transformers on the meta device; None where there is no such class, or
    its config is of another one. Code beside a config is never run."""
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    cls: Any = getattr(transformers, name, None)
    base = transformers.PreTrainedModel
    if not (isinstance(cls, type) and issubclass(cls, base)) or cls.config_class is None:
        return None
    if cls.config_class.model_type != config.get("model_type"):
        return None
    # what is no weight, and may ask for a library or a device that is not here
    told = {key: value for key, value in config.items() if key != "quantization_config"}
    told = {**_with_floats(told), "attn_implementation": "eager"}
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        # the program's random numbers stay as they are, whatever a class draws
        with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
            return cls(cls.config_class.from_dict(told))
    except (StrictDataclassError, *_OF_A_CONFIG):  # which its own class does not take
        return None
    finally:
        transformers.logging.set_verbosity(level)


def _with_floats(value: Any) -> Any:
    """A config with numbers for what stands for those that JSON lacks: {"__float__": "NaN"}."""
    if isinstance(value, dict):
        tree = cast("dict[str, Any]", value)
        if {*tree} == {"__float__"} and tree["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(tree["__float__"])
        return {key: _with_floats(one) for key, one in tree.items()}
    return (
        [_with_floats(one) for one in cast("list[Any]", value)]
        if isinstance(value, list)
        else value
    )


def _has(model: Any, params: Mapping[str, ParamSpec]) -> bool:
    """Whether a model has all of these parameters, of these shapes but for a resized vocabulary."""
    held: dict[str, Any] = model.state_dict()
    return all(
        name in held
        and len(held[name].shape) == len(spec.shape)
        and tuple(held[name].shape)[1:] == tuple(spec.shape)[1:]
        for name, spec in params.items()
        if spec.kind != "buffer"
    )


# ------------------------------------------------ from memory to files


def _reverted(model: Any, params: Mapping[str, ParamSpec]) -> ReleasedNames:
    """What `save_pretrained` of a model would write."""
    from transformers.core_model_loading import revert_weight_conversion

    ignored = {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}
    state: Any = {
        name: Traced.whole(name, spec.shape) for name, spec in params.items() if name not in ignored
    }
    try:
        found: Any = revert_weight_conversion(model, state)
        shares = _as_shares(found, params)
    except UntracedError as error:
        return ReleasedNames(model, {name: TensorPart(name) for name in state}, str(error))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # an operation that asks more of a tensor than its places, or a shape that it does not take
        why = f"{type(error).__name__}: {error}"[:200]
        return ReleasedNames(model, {name: TensorPart(name) for name in state}, why)
    return ReleasedNames(model, shares)


def _as_shares(found: Mapping[str, Traced], params: Mapping[str, ParamSpec]) -> TensorShares:
    """What each tensor of a folder holds, of traced ones. Raises UntracedError."""
    rows = [row for name, traced in found.items() for row in _rows(name, traced)]
    chunks: dict[str, list[tuple[tuple[Ints, Ints], ...]]] = {}
    placed: list[tuple[str, str, int, Ints | None, bool, Slice | None]] = []
    for name, parts, within in rows:
        param = parts[0].name
        boxes, order, stacked = _boxes(parts, params[param].shape)
        known = chunks.setdefault(param, [])
        placed.append((name, param, len(known), order, stacked, within))
        known.append(boxes)
    out: dict[str, TensorPart] = {}
    for name, param, number, order, stacked, within in placed:
        whole = chunks[param] == [(((0,) * len(params[param].shape), params[param].shape),)]
        layout = Replicate() if whole else Chunks(tuple(chunks[param]))
        share = TensorPart(param, layout, number if not whole else 0, order, stacked, within)
        out[name] = share
    return out


def _rows(name: str, traced: Traced) -> Iterator[tuple[str, Sequence[TracedPart], Slice | None]]:
    """A tensor of a folder as one row, or where it holds several parameters one above the other as
    a row for each, with the place in it. Raises UntracedError."""
    if len({part.name for part in traced.parts}) == 1 and len(traced.parts) == 1:
        yield name, traced.parts, None
        return
    rest = tuple(traced.shape[1:])
    at = 0
    for part in sorted(traced.parts, key=lambda part: part.start):
        if part.start != (at, *(0,) * len(rest)) or part.extent[1:] != rest:
            raise UntracedError(f"{name} has its parameters side by side")
        within = Slice(name, at, part.extent[0], traced.shape[0])
        yield f"{name}[{at}:{at + part.extent[0]}]", (replace_start(part),), within
        at += part.extent[0]


def replace_start(part: TracedPart) -> TracedPart:
    """A part as a tensor of its own."""
    return TracedPart((0,) * len(part.start), part.extent, part.name, part.offset, part.strides)


def _boxes(
    parts: Sequence[TracedPart], shape: Ints
) -> tuple[tuple[tuple[Ints, Ints], ...], Ints | None, bool]:
    """The box of a parameter that a tensor holds, the parameter's dims in the order of the
    tensor's, and whether the tensor lacks the first of them. Raises UntracedError."""
    (part,) = parts
    strides, left = contiguous_strides(shape), part.offset
    start: list[int] = []
    for stride, size in zip(strides, shape, strict=True):
        index = min(left // stride, size - 1) if stride else 0
        start.append(index)
        left -= index * stride
    if left:
        raise UntracedError(f"a tensor begins beside the elements of {part.name}")
    dims: list[int | None] = []
    for stride, extent in zip(part.strides, part.extent, strict=True):
        fits = [d for d, s in enumerate(strides) if s == stride and d not in dims and shape[d] > 1]
        dims.append(fits[0] if extent > 1 and fits else None)
        if extent > 1 and not fits:
            raise UntracedError(f"a tensor is no block of {part.name}")
    free = [d for d in range(len(shape)) if d not in dims]
    lacking = len(shape) - len(dims)
    if lacking not in (0, 1) or (lacking and 0 not in free):
        raise UntracedError(f"a tensor lacks dims of {part.name}")
    if lacking:
        free.remove(0)
    order = [free.pop(0) if dim is None else dim for dim in dims]
    stop = list(start)
    for dim, extent in zip(order, part.extent, strict=True):
        stop[dim] += extent
    if lacking:
        stop[0] += 1
        order.insert(0, 0)
    if any(high > size for high, size in zip(stop, shape, strict=True)):
        raise UntracedError(f"a tensor ends behind {part.name}")
    plain = order == sorted(order)
    return ((tuple(start), tuple(stop)),), None if plain else tuple(order), bool(lacking)


# ------------------------------------------------ what it means for a caller


def names_note(names: ReleasedNames | None, model_type: object) -> list[str]:
    """A note where an export has memory's names, and files of such a model may have others."""
    if names is not None and not names.lost:
        return []
    if names is not None:
        return [
            "tensors have the names of memory, which transformers 5 loads; released folders of "
            f"{model_type} have others, which can't be said without values ({names.lost}). To "
            f"write them: {_TO_RELEASED}"
        ]
    if is_installed() or not model_type:
        return []
    return [
        "transformers is not installed here: tensors have the names of memory, which transformers "
        f"5 loads. Where released folders of {model_type} have others, vLLM, SGLang and llama.cpp "
        "want those: export where transformers is installed"
    ]


def reader(
    config: Callable[[], Mapping[str, Any]], like: Manifest, architecture: str = ""
) -> Callable[[Mapping[str, Ints]], TensorShares | None]:
    """What a folder's tensors hold of a live model, or of another checkpoint's; None where
    transformers says nothing of it."""

    def tensors(files: Mapping[str, Ints]) -> TensorShares | None:
        names = released_names(config(), like.by_name, architecture)
        if names is None or names.lost:
            return None
        try:
            return names.of_folder(files)
        except _OF_A_CONFIG:  # tables of a version whose functions are others
            return None

    return tensors
