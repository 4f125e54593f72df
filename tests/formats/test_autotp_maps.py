"""The layout that an affine map of DeepSpeed's AutoTP says, made by DeepSpeed's own functions."""

from typing import Any

import pytest

from megatron_ucp.core.layout import Layout, Replicate, Shard, ShardNC, ShardRuns
from megatron_ucp.errors import DamagedFileError, UnsupportedError
from megatron_ucp.formats.deepspeed.tp_patterns import affine_layout

affine = pytest.importorskip("deepspeed.checkpoint.affine")
SPLIT, FUSED, SCATTERED = (
    affine.contiguous_split_map,
    affine.sub_param_map,
    affine.block_gather_map,
)


@pytest.mark.parametrize(
    ("made", "layout"),
    [
        (affine.replicated_map((5, 4), 2), Replicate()),
        (SPLIT((6, 4), [3, 3], 0), Shard("tp", 0)),
        (SPLIT((6, 4), [2, 2], 1), Shard("tp", 1)),
        (SPLIT((61, 4), [31, 30], 0), ShardRuns("tp", 0, (((0, 31),), ((31, 61),)))),
        (SPLIT((4, 3), [2, 1, 0], 1), ShardRuns("tp", 1, (((0, 2),), ((2, 3),), ()))),
        (FUSED((8, 4), [4, 4], [[2, 2], [2, 2]], 0), ShardNC("tp", 0, (4, 4))),
        (FUSED((8, 4), [4, 2, 2], [[2, 2], [1, 1], [1, 1]], 0), ShardNC("tp", 0, (4, 2, 2))),
        (
            FUSED((6, 4), [3, 3], [[2, 1], [2, 1]], 0),
            ShardRuns("tp", 0, (((0, 2), (3, 5)), ((2, 3), (5, 6)))),
        ),
        (
            SCATTERED((8, 2), {0: [2, 0], 1: [1, 3]}, 2, 0),
            ShardRuns("tp", 0, (((4, 6), (0, 2)), ((2, 4), (6, 8)))),
        ),
    ],
)
def test_the_simplest_layout(made: Any, layout: Layout) -> None:
    assert affine_layout(made.to_dict(), "w", None) == (made.logical_shape, layout)


def _transposed(entry: dict[str, Any]) -> None:
    entry["ranks"][0]["pieces"][0]["source"][1].reverse()


def _scaled(entry: dict[str, Any]) -> None:
    entry["ranks"][1]["pieces"][0]["scale"] = 0.5


def _short(entry: dict[str, Any]) -> None:
    entry["ranks"][1]["pieces"] = []


def _two_dims(entry: dict[str, Any]) -> None:
    entry["ranks"][1]["shard_shape"] = [30, 2]


@pytest.mark.parametrize("change", [_transposed, _scaled, _short, _two_dims])
def test_what_is_no_cut_of_one_dim_is_refused(change: Any) -> None:
    entry = SPLIT((61, 4), [31, 30], 0).to_dict()
    change(entry)
    with pytest.raises(UnsupportedError) as caught:
        affine_layout(entry, "w", "file")
    assert caught.value.parameter == "w"


def test_a_part_that_several_ranks_hold_is_refused() -> None:
    """GPT-BigCode's keys and values: DeepSpeed lets the copies drift apart."""
    made = affine.segmented_map((10, 4), [(6, False), (4, True)], 0, 2, [[4, 2]])
    with pytest.raises(UnsupportedError, match="several ranks hold"):
        affine_layout(made.to_dict(), "w", None)


def test_another_version_and_another_structure() -> None:
    entry = SPLIT((4, 4), [2, 2], 0).to_dict()
    with pytest.raises(UnsupportedError, match="another version"):
        affine_layout(entry, "w", None, version=2)
    for broken in ({}, {"logical_shape": 3, "ranks": {}}, {**entry, "ranks": {0: {}}}):
        with pytest.raises(DamagedFileError):
            affine_layout(broken, "w", "file")
