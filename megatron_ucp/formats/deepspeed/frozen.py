"""What no optimizer steps: frozen parameters and module buffers, where model files keep them."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import FlatBuffer, Member, alone
from megatron_ucp.core.states import VALUE
from megatron_ucp.errors import DamagedFileError, UnsupportedError, some_of
from megatron_ucp.formats.deepspeed.weights import is_extra_state
from megatron_ucp.formats.pt.unpickler import TensorRef

# name, shape on a rank, kind, the dims as the file stores them (None: as they are), where it lies
Found = tuple[str, Ints, str, Ints | None, FlatBuffer]


def values(
    meta: Mapping[str, Any],
    module: Mapping[str, Any],
    buffer_names: Collection[str],
    known: Collection[str],
    partitions: int | None,
    fragment: Callable[[str], Any],
    file: str,
) -> Iterator[Found]:
    """One buffer for each value that is not among the `known` names.

    `meta` and `module` are of the first model file, `buffer_names` canonical names of module
    buffers. `partitions` are those of ZeRO-3, None at other stages; `fragment` gives the first one
    of a frozen parameter. Raises DamagedFileError for a value that is missing, UnsupportedError for
    an entry that is neither a parameter nor a buffer.
    """
    frozen: Mapping[str, Any] = meta.get("frozen_param_shapes") or {}
    # Older ZeRO-3 files don't name the buffers, which are all that has bytes there, nor keep frozen
    # parameters.
    old = partitions is not None and "buffer_names" not in meta
    named = [name for name in module if not is_extra_state(name) or name in buffer_names]
    for name in dict.fromkeys([*named, *frozen]):
        ref = module.get(name)
        held = isinstance(ref, TensorRef) and ref.numel > 0
        if name in known or (old and not held and name not in frozen):
            continue
        if partitions is not None and not old and name not in {*frozen, *buffer_names}:
            if held:
                raise unexplained(name, set(buffer_names) - set(module), file)
            continue  # what stands for a parameter whose own name is in another place
        is_frozen = name not in buffer_names and not (old and held)
        parts = partitions if is_frozen else None
        value = ref if parts is None else fragment(name)
        if not isinstance(value, TensorRef):
            raise DamagedFileError("the value of a parameter is missing", file=file, parameter=name)
        shape: Ints = ref.shape if isinstance(ref, TensorRef) else ()
        if name in frozen:
            shape = tuple(frozen[name])
        kind = "frozen" if is_frozen else "buffer"
        buffer = _buffer(name, math.prod(shape), value.storage.dtype, parts)
        yield name, shape, kind, _order(value) if parts is None else None, buffer


def _order(value: TensorRef) -> Ints | None:
    """The dims as the file stores them, where that is another order than theirs."""
    return None if value.is_contiguous else value.order


def unexplained(name: str, lacking: Collection[str], file: str) -> UnsupportedError:
    """For an entry of the weights whose name is none of the model's, of which some are `lacking`
    there."""
    return UnsupportedError(
        "the weights have an entry that is no parameter and no buffer of the model: a hook of its "
        "state dict renames or adds entries, and nothing in the files says what it is",
        file=file,
        parameter=name,
        expected=f"one of {some_of(sorted(lacking))}" if lacking else "no such entry",
        found="a name that the model does not have",
        fix="load it into an engine of the same model, whose hook says what it is, or with "
        "DeepSpeed's own load on the same mesh (native=True)",
    )


def _buffer(name: str, size: int, dtype: str, parts: int | None) -> FlatBuffer:
    states = ((VALUE, dtype),)
    if parts is None:
        return alone(name, size, states)
    return FlatBuffer((Member(name, 0, size),), -(-size // parts), parts, "each", states)
