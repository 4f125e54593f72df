"""What no optimizer steps: frozen parameters and module buffers, where model files keep them."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import FlatBuffer, Member, alone
from megatron_ucp.core.states import VALUE
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.deepspeed.weights import no_extra_state
from megatron_ucp.formats.pt.unpickler import TensorRef

Found = tuple[str, Ints, str, FlatBuffer]  # name, shape on a rank, kind, where its value lies


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
    of a frozen parameter. Raises DamagedFileError for a value that is missing.
    """
    frozen: Mapping[str, Any] = meta.get("frozen_param_shapes") or {}
    # Older ZeRO-3 files don't name the buffers, which are all that has bytes there, nor keep frozen
    # parameters.
    old = partitions is not None and "buffer_names" not in meta
    named = [name for name, value in module.items() if not no_extra_state(name, value)]
    for name in dict.fromkeys([*named, *frozen]):
        ref = module.get(name)
        held = isinstance(ref, TensorRef) and ref.numel > 0
        if name in known or (old and not held and name not in frozen):
            continue
        is_frozen = name not in buffer_names and not (old and held)
        parts = partitions if is_frozen else None
        value = ref if parts is None else fragment(name)
        if not isinstance(value, TensorRef):
            raise DamagedFileError("the value of a parameter is missing", file=file, parameter=name)
        shape: Ints = ref.shape if isinstance(ref, TensorRef) else ()
        if name in frozen:
            shape = tuple(frozen[name])
        kind = "frozen" if is_frozen else "buffer"
        yield name, shape, kind, _buffer(name, math.prod(shape), value.storage.dtype, parts)


def _buffer(name: str, size: int, dtype: str, parts: int | None) -> FlatBuffer:
    states = ((VALUE, dtype),)
    if parts is None:
        return alone(name, size, states)
    return FlatBuffer((Member(name, 0, size),), -(-size // parts), parts, "each", states)
