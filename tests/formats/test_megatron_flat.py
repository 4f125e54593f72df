"""Megatron's files without names of the optimizer's states (dp_reshardable, and the legacy format):
every master must be the weight that the same folder stores under a name, and what does not fit is
refused before anything is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ucp.errors import (
    ForeignFileError,
    NotFoundError,
    StateMismatchError,
    UcpError,
    UnsupportedError,
)
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.megatron import dp_reshardable
from megatron_ucp.formats.megatron.buffers import RegistrationOrder
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import read_state
from tests.formats.megatron_files import (
    GOLDEN,
    LEGACY,
    TAG,
    by_torch,
    changed_arguments,
    copied,
    rewritten,
    stored_weights,
    swapped_chunks,
)
from tests.places import Place

FLAT = ("td_dpr_dp2_bf16", "td_dpr_pp2vpp2")
LAYER = (
    *("input_layernorm.weight", "self_attention.linear_proj.weight"),
    *("self_attention.linear_qkv.weight", "pre_mlp_layernorm.weight"),
    *("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"),
)


def unequal(checkpoint: Checkpoint, weights: dict[str, torch.Tensor]) -> list[str]:
    """Parameters whose masters, rounded, are not the weights."""
    assert {spec.name for spec in checkpoint.manifest.params} == set(weights)
    out: list[str] = []
    for name, weight in weights.items():
        master = read_state(checkpoint, name, "fp32").to(weight.dtype)
        if not torch.equal(master.view(torch.uint8), weight.reshape(-1).view(torch.uint8)):
            out.append(name)
    return out


@pytest.mark.parametrize("case", [*FLAT, LEGACY])
def test_every_master_is_the_stored_weight(case: str, place: Place) -> None:
    with open_checkpoint(place(GOLDEN / case)) as checkpoint:
        for name in checkpoint.file_names:
            checkpoint.check(name)
        weights = stored_weights(case)
        assert unequal(checkpoint, weights) == []
        one, other = (f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in (1, 2))
        weights[one], weights[other] = weights[other], weights[one]
        assert unequal(checkpoint, weights) == [one, other], "the comparison sees two that changed"


def test_moments_lie_where_the_masters_lie(place: Place) -> None:
    """By the order and the alignment that are written out here."""
    case = FLAT[0]
    order = ["embedding.word_embeddings.weight"]
    order += [f"decoder.layers.{layer}.{name}" for layer in range(4) for name in LAYER]
    order += ["decoder.final_layernorm.weight", "output_layer.weight"]
    key = next(k for k in by_torch(GOLDEN / case / TAG) if k.endswith("bucket_idx_0.exp_avg_sq"))
    flat, at = by_torch(GOLDEN / case / TAG)[key], 0
    with open_checkpoint(place(GOLDEN / case)) as checkpoint:
        for name in reversed(order):
            found, at = read_state(checkpoint, name, "exp_avg_sq"), -(-at // 64) * 64
            assert torch.equal(found, flat[at : at + found.numel()]), name
            at += found.numel()
    assert at == flat.numel() and flat.count_nonzero() > flat.numel() // 2


def test_place_steps_and_groups_of_virtual_stages(place: Place) -> None:
    with open_checkpoint(place(GOLDEN / "td_dpr_pp2vpp2")) as checkpoint:
        manifest = checkpoint.manifest
        extras = checkpoint.extras
    assert str(manifest.mesh) == "tp=1,pp=2,vpp=2,dp=1,zero=0"
    held = {
        name: dict(manifest.first_holder(name)[0].at)
        for name in ("decoder.layers.1.mlp.linear_fc1.weight", "output_layer.weight")
    }
    assert list(held.values()) == [{"pp": 1, "vpp": 0}, {"pp": 1, "vpp": 1}]
    assert manifest.group_of("decoder.final_layernorm.weight")["weight_decay"] == 0.0
    assert manifest.scalars_of("output_layer.weight") == {"step": 3.0}
    assert extras.counters["global_steps"] == 3


# ------------------------------------------------ what does not fit


def check_all(tag: Path) -> None:
    with open_checkpoint(tag) as checkpoint:
        for name in checkpoint.file_names:
            checkpoint.check(name)


def swap_layers(tag: Path) -> None:
    """The masters of two layers' second matrices change places, in one bucket."""
    key = next(k for k in by_torch(GOLDEN / FLAT[0] / TAG) if k.endswith("bucket_idx_0.param"))
    swapped_chunks(tag, (key, (2112,)), (key, (11456,)))  # type: ignore[arg-type]


def flat_argument(**values: Any) -> Callable[[Path], None]:
    return lambda tag: changed_arguments(tag, **values)


def legacy_argument(**values: Any) -> Callable[[Path], None]:
    def change(tag: Path) -> None:
        for folder in sorted(tag.glob("mp_rank_*")):
            changed_arguments(folder, "model_optim_rng.pt", **values)

    return change


def other_iteration(tag: Path) -> None:
    file = tag / "mp_rank_01_001" / "model_optim_rng.pt"
    rewritten(file, lambda tree: tree.update(iteration=4))


def without_rank(tag: Path) -> None:
    (tag / "mp_rank_01_000" / "distrib_optim.pt").unlink()


def legacy_swap(tag: Path) -> None:
    """A rank's moments and masters are those of another rank: sizes fit, contents don't."""
    one, other = (tag / f"mp_rank_0{tp}_000" / "distrib_optim.pt" for tp in range(2))
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def test_each_order_that_was_tried_is_named_with_its_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(FLAT[0], tmp_path / "run")
    flat_argument(**SEVERAL)(folder)
    tried = dp_reshardable.orders_to_try

    def two(*asked: Any) -> list[RegistrationOrder]:
        first = next(tried(*asked))
        return [first, RegistrationOrder(first.templates[:1])]

    monkeypatch.setattr(dp_reshardable, "orders_to_try", two)
    with pytest.raises(StateMismatchError, match=r"order 1: bucket 0 .*; order 2: a name has no"):
        open_checkpoint(folder)


SEVERAL = {"overlap_grad_reduce": True, "ddp_bucket_size": 6000}
REFUSED: dict[str, tuple[str, Callable[[Path], None], type[UcpError], str]] = {
    "two layers that are swapped": (FLAT[0], swap_layers, StateMismatchError, "linear_fc2"),
    "several buckets said": (FLAT[0], flat_argument(**SEVERAL), StateMismatchError, "not those of"),
    "more layers said": (
        FLAT[1],
        flat_argument(num_layers=8),
        StateMismatchError,
        "not those of",
    ),
    "other virtual stages": (
        FLAT[1],
        flat_argument(virtual_pipeline_model_parallel_size=None),
        StateMismatchError,
        "not those of",
    ),
    "offloaded": (
        FLAT[0],
        flat_argument(optimizer_cpu_offload=True),
        UnsupportedError,
        "offloaded to the CPU",
    ),
    "fp8 weights": (FLAT[0], flat_argument(fp8_param_gather=True), UnsupportedError, "fp8"),
    "legacy: another number of layers": (
        LEGACY,
        legacy_argument(num_layers=5),
        UnsupportedError,
        "divided among the stages",
    ),
    "legacy: a rank's file for another's": (
        LEGACY,
        legacy_swap,
        StateMismatchError,
        "not the weights beside them",
    ),
    "legacy: another iteration": (LEGACY, other_iteration, ForeignFileError, "another iteration"),
    "legacy: a file is missing": (LEGACY, without_rank, NotFoundError, "are missing"),
    "legacy: experts that are cut otherwise, without expert parallelism": (
        LEGACY,
        legacy_argument(num_experts=4, expert_tensor_parallel_size=1),
        UnsupportedError,
        "cut otherwise than the rest",
    ),
    "legacy: another mesh": (
        LEGACY,
        legacy_argument(tensor_model_parallel_size=4),
        NotFoundError,
        "are missing",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what: str, tmp_path: Path) -> None:
    case, change, error, says = REFUSED[what]
    tag = copied(case, tmp_path / case)
    check_all(tag)
    change(tag)
    with pytest.raises(error, match=says):
        check_all(tag)
