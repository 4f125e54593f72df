"""The flat buffers of Megatron's DistributedOptimizer as arithmetic: laws that hold whatever the
sizes, what stock files say of their own buckets, and upstream's own division of layers."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.megatron.buffers import (
    Bucket,
    GradBuffer,
    InBuffer,
    Registered,
    bucket_cap,
    grad_buffer,
    parts_of,
)

SIZES = st.sampled_from([1, 31, 64, 100, 2048, 4097])
PARAMS = st.lists(st.tuples(SIZES, st.integers(0, 5)), min_size=1, max_size=9).map(
    lambda rows: [Registered(f"p{at}", elems, alone == 0) for at, (elems, alone) in enumerate(rows)]
)
CAPS = st.sampled_from([None, 1, 500, 3000])


def faults(found: GradBuffer, params: list[Registered], ranks: int, cap: int | None) -> list[str]:
    """Which laws a layout breaks. Nothing here builds one."""
    alone = {param.name for param in params if param.own_bucket}
    out: list[str] = []
    if [param.name for param in found.params] != [param.name for param in reversed(params)]:
        out.append("order")
    edges = [bucket.start for bucket in found.buckets[1:]] + [found.buckets[-1].stop]
    if found.buckets[0].start or edges != [bucket.stop for bucket in found.buckets]:
        out.append("gaps between buckets")
    for number, bucket in enumerate(found.buckets):
        held = [param for param in found.params if param.bucket == number]
        following = next((p.name for p in found.params if p.bucket == number + 1), "")
        out += _places(bucket, held, following in alone, math.lcm(ranks, 128))
        is_last = number == len(found.buckets) - 1
        may_end = is_last or following in alone
        out += _closing(bucket, held, cap, [param.name in alone for param in held], may_end)
    return out


def _places(bucket: Bucket, held: list[InBuffer], slack_allowed: bool, multiple: int) -> list[str]:
    out: list[str] = []
    ends = [param.start + param.elems for param in held]
    if any(b.start < a for a, b in zip(ends, held[1:], strict=False)):
        out.append("overlap")
    if any(param.start % 64 for param in held) or held[0].start != bucket.start:
        out.append("starts")
    # a bucket that an own one follows ends where that could have begun
    slack = bucket.start + bucket.used - ends[-1]
    if not 0 <= slack < 64 or (slack and not slack_allowed):
        out.append("used")
    rest = bucket.stop - bucket.start - bucket.used
    if bucket.stop % multiple or not 0 <= rest < multiple:
        out.append("end")
    return out


def _closing(
    bucket: Bucket, held: list[InBuffer], cap: int | None, alone: list[bool], may_end: bool
) -> list[str]:
    out: list[str] = []
    if any(alone) and len(held) > 1:
        out.append("an own bucket is shared")
    if cap is not None and len(held) > 1:
        before = held[-2].start + held[-2].elems - bucket.start
        out += ["closed too late"] if before >= cap else []
    full = cap is not None and bucket.used >= cap
    return out if may_end or full or any(alone) else [*out, "closed too early"]


@given(PARAMS, st.integers(1, 6), CAPS)
def test_laws(params: list[Registered], ranks: int, cap: int | None) -> None:
    assert faults(grad_buffer(params, ranks, cap), params, ranks, cap) == []


def test_a_parameter_that_moves_breaks_a_law() -> None:
    params = [Registered("a", 100), Registered("b", 64), Registered("c", 31)]
    good = grad_buffer(params, 2)
    moved = GradBuffer((good.params[1], good.params[0], good.params[2]), good.buckets)
    late = GradBuffer(
        good.params, (*good.buckets[:-1],) + (good.buckets[-1].__class__(0, 384, 100),)
    )
    assert faults(good, params, 2, None) == []
    assert "order" in faults(moved, params, 2, None) and faults(late, params, 2, None)


@given(PARAMS, st.integers(1, 6), CAPS)
def test_places_without_padding_between_buckets(
    params: list[Registered], ranks: int, cap: int | None
) -> None:
    found = grad_buffer(params, ranks, cap)
    at = [found.unpadded_start(param) for param in found.params]
    ends = [a + param.elems for a, param in zip(at, found.params, strict=True)]
    assert at[0] == 0 and all(b >= a for a, b in zip(ends, at[1:], strict=False))
    assert ends[-1] == sum(bucket.used for bucket in found.buckets)  # the last has no slack


def test_the_sizes_that_stock_files_say() -> None:
    """`per_bucket_numel` and `per_bucket_numel_unpadded` of the golden folder td_dpr_dp2_bf16."""
    layer = [32, 32 * 32, 64 * 32, 32, 128 * 32, 32 * 64]
    sizes = [64 * 32, *(n for _ in range(4) for n in layer), 32, 64 * 32]
    found = grad_buffer([Registered(str(at), n) for at, n in enumerate(sizes)], 2)
    assert [(b.stop, b.used) for b in found.buckets] == [(41600, 41536)]
    wide = grad_buffer([Registered(str(at), n) for at, n in enumerate(sizes)], 2, wide=True)
    assert [(b.stop, b.used) for b in wide.buckets] == [(65536, 41536)]


def test_only_the_first_chunk_of_the_first_stage_has_several_buckets() -> None:
    assert bucket_cap(2, True, None, 0, 0) == 40_000_000
    assert bucket_cap(64, True, None, 0, 0) == 64_000_000
    assert bucket_cap(2, True, 6000, 0, 0) == 6000
    assert [bucket_cap(2, *rest) for rest in ((False, 6000, 0, 0), (True, 6000, 1, 0))] == [
        None
    ] * 2
    assert bucket_cap(2, True, 6000, 0, 1) is None


# ------------------------------------------------ stages


def layers_of(mesh: Mesh, **said: Any) -> dict[tuple[int, int], list[int]]:
    parts = parts_of(said, mesh, "common.pt")
    return {(part.stage, part.chunk): list(range(part.first, part.last)) for part in parts}


SPLITS = [
    (8, 2, 2, {}),
    (8, 2, 4, {}),
    (12, 3, 2, {}),
    (8, 2, 1, {"decoder_first_pipeline_num_layers": 3}),
    (4, 2, 1, {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3}),
    (8, 2, 2, {"decoder_first_pipeline_num_layers": 2}),
    (12, 4, 2, {"decoder_last_pipeline_num_layers": 6}),
    (
        6,
        2,
        2,
        {
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
        },
    ),
    (7, 2, 1, {"account_for_loss_in_pipeline_split": True}),
]


@pytest.mark.parametrize(("layers", "pp", "vpp", "more"), SPLITS)
def test_layers_are_divided_as_megatron_does(
    layers: int, pp: int, vpp: int, more: dict[str, Any]
) -> None:
    """Against megatron-core's own functions."""
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = SimpleNamespace(
        num_layers=layers,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=more.get("decoder_first_pipeline_num_layers"),
        num_layers_in_last_pipeline_stage=more.get("decoder_last_pipeline_num_layers"),
        account_for_embedding_in_pipeline_split=more.get("account_for_embedding_in_pipeline_split"),
        account_for_loss_in_pipeline_split=more.get("account_for_loss_in_pipeline_split"),
    )
    found = layers_of(Mesh(pp=pp, vpp=vpp), num_layers=layers, **more)
    assert sorted(n for held in found.values() for n in held) == list(range(layers))
    for (stage, chunk), held in found.items():
        at: Any = config
        offset = get_transformer_layer_offset(at, chunk if vpp > 1 else None, stage)
        assert held[:1] in ([], [offset])


def test_a_layout_that_is_written_out() -> None:
    found = layers_of(Mesh(pp=2, vpp=2), num_layers=6, pipeline_model_parallel_layout="Et|ttt|tt|L")
    assert found == {(0, 0): [0], (1, 0): [1, 2, 3], (0, 1): [4, 5], (1, 1): []}
    same = layers_of(
        Mesh(pp=2, vpp=2), num_layers=6, pipeline_model_parallel_layout="Et|t*3|(t)*2|L"
    )
    assert same == found


@pytest.mark.parametrize("layout", ["Et|tt", "Em|ttt|tt|L", "(t|)*999" * 200, 7, "t" * 20_000])
def test_a_layout_that_can_not_be_read_is_refused(layout: object) -> None:
    with pytest.raises(UnsupportedError, match="divided among the stages"):
        layers_of(Mesh(pp=2, vpp=2), num_layers=6, pipeline_model_parallel_layout=layout)
