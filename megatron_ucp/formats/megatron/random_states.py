"""Random generators as Megatron-LM keeps them: an entry is a list of one dict for all data-parallel
ranks, or with `--data-parallel-random-init` of one for each of them.

Source: what `get_rng_state` of Megatron-LM's training program saves (core_v0.16.1).
"""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

from megatron_ucp.core.values import Stand
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.base import TWISTER_WORDS, Generators, Where
from megatron_ucp.formats.foreign import at_key, each, no_such, of_kind
from megatron_ucp.formats.plain_values import number
from megatron_ucp.formats.pt.unpickler import TensorRef

WhereOf = Callable[[TensorRef], Where]  # where the elements of a tensor lie

_MAX_BYTES = 2**16  # more than any generator of torch keeps


def generators(entry: Sequence[Any], data_rank: int, place: WhereOf, file: str) -> Generators:
    """The generators of a data-parallel rank, in the form of `Checkpoint.random_states`. Raises
    DamagedFileError for what is no generator's."""
    saved = each(entry, dict, "rng_state", file)[data_rank if len(entry) > 1 else 0]
    python = at_key(saved, "random_rng_state", tuple, file)
    numpy = at_key(saved, "np_rng_state", tuple, file)
    if len(python) != 3 or len(numpy) != 5:
        raise no_such("random_rng_state of 3 and np_rng_state of 5 values", python, file)
    out: dict[str, bytes | list[int] | list[float]] = {
        **_of_python(*python, file),
        **_of_numpy(*numpy, file),
        "torch": _bytes(saved.get("torch_rng_state"), "torch_rng_state", place, file),
        "cuda": _bytes(saved.get("cuda_rng_state"), "cuda_rng_state", place, file),
    }
    for name, ref in at_key(saved, "rng_tracker_states", dict, file).items():
        out[f"megatron.{name}"] = _bytes(ref, name, place, file)
    return out


def _of_python(
    version: Any, words: Any, left: Any, file: str
) -> dict[str, list[int] | list[float]]:
    """What `random.getstate` gives: its version, 624 words and a position in them, and a normal
    number that is left of a pair."""
    gauss = math.nan if left is None else of_kind(left, float, "python_gauss", file)
    listed = of_kind(words, tuple, "random_rng_state", file)
    return {"python": [_whole(n, file) for n in (version, *listed)], "python_gauss": [gauss]}


def _of_numpy(
    kind: Any, words: Any, position: Any, is_left: Any, left: Any, file: str
) -> dict[str, list[int] | list[float]]:
    """What `numpy.random.get_state` gives: its kind, 624 words, a position in them, and whether a
    normal number is left of a pair, and which."""
    if kind != "MT19937" or not isinstance(words, Stand):
        raise no_such("numpy's generator MT19937", kind, file)
    data = words.get("data")
    known = (words.get("dtype"), words.get("shape")) == ("<u4", (TWISTER_WORDS,))
    if not known or not isinstance(data, bytes) or len(data) != 4 * TWISTER_WORDS:
        raise no_such(f"{TWISTER_WORDS} words of numpy's generator", words, file)
    return {
        "numpy": list(struct.unpack(f"<{TWISTER_WORDS}I", data)),
        "numpy_place": [_whole(number(position), file), _whole(number(is_left), file)],
        "numpy_gauss": [of_kind(number(left), float, "numpy_gauss", file)],
    }


def _whole(value: Any, file: str) -> int:
    if type(value) is not int or not 0 <= value < 2**32:
        raise no_such("a word of a generator", value, file)
    return value


def _bytes(ref: Any, name: str, place: WhereOf, file: str) -> bytes:
    good = isinstance(ref, TensorRef) and len(ref.shape) == 1 and ref.is_contiguous
    if not good or ref.storage.dtype != "uint8" or not 0 < ref.numel <= _MAX_BYTES:
        raise DamagedFileError(
            "the state of a generator is no row of bytes",
            file=file,
            parameter=name,
            expected=f"uint8, up to {_MAX_BYTES} of them",
            found=repr(ref)[:200],
        )
    where, data = place(ref), bytearray(ref.numel)
    where.file.read_into(where.record, where.offset_bytes, memoryview(data))
    return bytes(data)
