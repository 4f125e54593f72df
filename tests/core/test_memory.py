"""The order of dims in memory, compared with torch's own word for it."""

import itertools

import pytest
import torch

from megatron_ucp.core.box import dims_in_memory


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (3, 1, 2), (1, 1), (2, 3, 4), (2, 1, 3, 1)])
def test_every_order_of_dims(shape: tuple[int, ...]) -> None:
    for perm in itertools.permutations(range(len(shape))):
        tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).permute(perm)
        order = dims_in_memory(tuple(tensor.shape), tensor.stride())
        assert order is not None and sorted(order) == list(range(len(shape)))
        assert tensor.permute(order).reshape(-1).tolist() == list(range(tensor.numel()))
        assert tensor.is_contiguous() == (order == tuple(range(len(shape))))


def test_gaps_and_shared_memory_have_none() -> None:
    whole = torch.rand(4, 6)
    for tensor in (whole[:, :3], whole[::2], whole[:1].expand(4, 6), whole.t()[:, ::2]):
        assert dims_in_memory(tuple(tensor.shape), tensor.stride()) is None


def test_no_elements_have_any_order() -> None:
    assert dims_in_memory((0, 3), (1, 7)) == (0, 1)
