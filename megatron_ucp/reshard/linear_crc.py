"""The CRC-32 of a whole tensor from parts of it that different ranks hold, in any order.

A CRC whose register starts at zero is linear: that of the whole is the XOR of each part's, shifted
by the bytes that lie behind the part (see `crc32_combine` of zlib, which shifts by a product of
polynomials modulo that of CRC-32). So ranks sum what they have, and nobody needs the whole.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from itertools import repeat
from typing import Any

import numpy as np
from isal.isal_zlib import crc32, crc32_combine

_ONES = 0xFFFFFFFF
_FEW = 48  # sums
_Rows = Any  # numpy: uint8 of runs, bytes of a run
_Sums = Any  # numpy: uint32


def linear(data: Any) -> int:
    """The CRC-32 of bytes with a register that starts at zero and is not inverted at the end."""
    return int(crc32(data, _ONES)) ^ _ONES


def standard(total: int, size_bytes: int) -> int:
    """The usual CRC-32 of `size_bytes` bytes, of which all parts' sums make up `total`."""
    return total ^ int(crc32_combine(_ONES, 0, size_bytes)) ^ _ONES


def shifted(sum_: int, size_bytes: int) -> int:
    """The sum of a part behind which so many bytes of the whole lie."""
    return int(crc32_combine(sum_, 0, size_bytes))


def of_runs(rows: _Rows, shape: Sequence[int], strides_bytes: Sequence[int]) -> int:
    """The sum of runs of equal length, row by row in `rows`, up to the end of the last one. Run
    number i, as an index of `shape`, begins `strides_bytes` times that index behind the first."""
    if len(rows) == 1:
        return linear(rows[0])
    found = np.fromiter(map(crc32, rows, repeat(_ONES)), dtype=np.uint32, count=len(rows))
    sums = (found ^ np.uint32(_ONES)).reshape(tuple(shape))
    for stride in reversed(strides_bytes):
        sums = _folded(sums, stride)
    return int(sums)


def _folded(sums: _Sums, stride_bytes: int) -> _Sums:
    """Adds up the last dim, whose parts begin `stride_bytes` behind each other: two at a time, and
    the last few one by one, for which a call of numpy takes longer."""
    while sums.shape[-1] > 1 and sums.size > _FEW:
        if sums.shape[-1] % 2:  # zeros in front of the whole change nothing
            sums = np.concatenate([np.zeros_like(sums[..., :1]), sums], axis=-1)
        sums = _shifted_each(sums[..., 0::2], stride_bytes) ^ sums[..., 1::2]
        stride_bytes *= 2
    rows = sums.reshape(-1, sums.shape[-1]).tolist()
    total = [reduce(lambda one, next_: shifted(one, stride_bytes) ^ next_, row) for row in rows]
    return np.array(total, dtype=np.uint32).reshape(sums.shape[:-1])


def _shifted_each(sums: _Sums, size_bytes: int) -> _Sums:
    tables = _tables(size_bytes)
    places = np.ascontiguousarray(sums, dtype="<u4").view(np.uint8).reshape(*sums.shape, 4)
    out = tables[0].take(places[..., 0])
    for number in (1, 2, 3):
        out ^= tables[number].take(places[..., number])
    return out


@lru_cache(maxsize=256)
def _tables(size_bytes: int) -> Any:
    """What a shift makes of each byte of a sum, at each of its four places."""
    bits = [shifted(1 << bit, size_bytes) for bit in range(32)]
    tables = np.zeros((4, 256), dtype=np.uint32)
    for number in range(4):
        for bit in range(8):
            with_bit = np.arange(256) >> bit & 1 == 1
            tables[number, with_bit] ^= np.uint32(bits[8 * number + bit])
    return tables
