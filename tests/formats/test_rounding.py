"""Masters against the weights that they are rounded to, bit for bit."""

import pytest
import torch

from megatron_ucp.formats.proof import is_rounded

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elems", [0, 1, 3, 4, 7, 8, 1001])
def test_every_bit_counts(dtype: torch.dtype, elems: int) -> None:
    masters = torch.arange(elems, dtype=torch.float32) / 7 - 3
    weights = masters.to(dtype)
    assert is_rounded(masters, weights)
    for place in {0, elems // 2, elems - 1} if elems else ():
        for bit in (0, 3, 8 * weights.itemsize - 1):
            other = weights.clone()
            other.view(torch.uint8)[place * weights.itemsize + bit // 8] ^= 1 << bit % 8
            assert not is_rounded(masters, other)


def test_zeros_have_signs_and_no_number_is_itself() -> None:
    zeros = torch.zeros(9)
    assert not is_rounded(zeros, -zeros.bfloat16())
    nans = torch.full((9,), torch.nan)
    assert is_rounded(nans, nans.bfloat16())


def test_fewer_weights_than_masters() -> None:
    masters = torch.ones(16)
    for elems in (0, 4, 15):
        assert not is_rounded(masters, masters[:elems].bfloat16())
