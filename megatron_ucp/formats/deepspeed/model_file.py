"""What a model file says besides its tensors: how parameters are flattened, in which dtype it
trains, which names are one."""

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.grouping import grouped
from megatron_ucp.core.manifest import Tie
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.foreign import at_key_or, of_kind, sizes, texts
from megatron_ucp.formats.pt.unpickler import TensorRef

Tree = Mapping[str, Any]
_FROZEN, _SHARED = "frozen_param_shapes", "shared_params"


def shapes_by_group(meta: Tree, file: str) -> list[dict[str, Ints]] | None:
    """`param_shapes` of a model file, which older versions wrote as one dict for all; None at stage
    0. Raises DamagedFileError."""
    shapes = meta.get("param_shapes")
    shapes = [shapes] if isinstance(shapes, dict) else shapes
    if shapes is None or (
        isinstance(shapes, list)
        and all(
            isinstance(named, dict)
            and all(
                isinstance(name, str)
                and isinstance(shape, tuple)
                and all(type(n) is int and n >= 0 for n in shape)
                for name, shape in named.items()
            )
            for named in shapes
        )
    ):
        return shapes
    raise DamagedFileError(
        "the model file does not say how parameters are flattened",
        file=file,
        expected="param_shapes: names and shapes",
        found=type(shapes).__name__,
    )


def frozen_shapes(meta: Tree, file: str) -> dict[str, Ints]:
    """Names and shapes of frozen parameters, as a model file says them. Raises DamagedFileError."""
    said = at_key_or(meta, _FROZEN, {}, file)
    return {of_kind(name, str, _FROZEN, file): sizes(one, name, file) for name, one in said.items()}


def buffer_names(meta: Tree, file: str) -> list[str]:
    """What a model file says of module buffers. Raises DamagedFileError."""
    return texts(meta.get("buffer_names"), "buffer_names", file)


def shared_params(meta: Tree, file: str) -> dict[str, str]:
    """Further names of parameters, with the first ones. Raises DamagedFileError."""
    said = at_key_or(meta, _SHARED, {}, file)
    texts([*said, *said.values()], _SHARED, file)
    return said


def training_dtype(meta: Tree, module: Tree, names: Iterable[str]) -> str:
    """Of the weights of a model file: as its config says; older files have none, but weights."""
    config = meta.get("ds_config")
    if config is None:
        found = [ref.storage.dtype for ref in map(module.get, names) if isinstance(ref, TensorRef)]
        return found[0] if found else "float32"
    for key, dtype in (("bf16", "bfloat16"), ("bfloat16", "bfloat16"), ("fp16", "float16")):
        section = config.get(key) if isinstance(config, dict) else None
        if isinstance(section, dict) and section.get("enabled"):
            return dtype
    return "float32"


def find_ties(meta: Tree, module: Tree, flat: Iterable[str], file: str) -> tuple[Tie, ...]:
    """Names that share memory in the file, plus what its `shared_params` says; the name that is
    flattened comes first. DeepSpeed takes parameters without elements for one, as their memory
    begins at one place: they are not."""
    flat, shapes = set(flat), frozen_shapes(meta, file)
    by_place = grouped(
        ((ref.storage.key, ref.offset_elems, ref.shape), name)
        for name, ref in module.items()
        if isinstance(ref, TensorRef) and ref.numel
    )
    groups: dict[str, list[str]] = {}
    for names in by_place.values():
        first = next((name for name in names if name in flat), names[0])
        groups.setdefault(first, []).extend(name for name in names if name != first)
    for alias, name in shared_params(meta, file).items():
        shape = shapes.get(name, getattr(module.get(name), "shape", ()))
        is_empty = name not in flat and 0 in shape
        if not is_empty and alias not in groups.setdefault(name, []):
            groups[name].append(alias)
    return tuple(Tie(name, tuple(aliases)) for name, aliases in groups.items() if aliases)
