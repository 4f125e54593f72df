"""megatron-core's grouped experts, whose kernel needs a GPU, and experts one by one: the same
elements at other addresses. Meshes on which DeepSpeed can't train or save experts. Both are
planned, proved and carried out on shards made by hand."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ucp.core.flat import Member
from megatron_ucp.core.mesh import Mesh
from tests.reshard.synthetic import (
    EXPERTS,
    FC1,
    FC2,
    FFN,
    HIDDEN,
    Layout,
    carried,
    different,
    whole,
)

PLACES = [(1, 1), (2, 2), (4, 1), (1, 2), (4, 2), (2, 1)]  # expert-parallel, expert-tensor


def mesh(place: tuple[int, int], zero: int) -> Mesh:
    """Eight ranks."""
    ep, etp = place
    return Mesh(tp=2, dp=4, ep=ep, etp=etp, zero=zero)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("to_grouped", [True, False])
@pytest.mark.parametrize("at", range(len(PLACES)))
def test_grouped_and_one_by_one(tmp_path: Path, at: int, to_grouped: bool, zero: int) -> None:
    source = Layout(mesh(PLACES[at], zero), grouped=not to_grouped)
    other = mesh(PLACES[(at + 1) % len(PLACES)], 4 - zero)
    target = Layout(other, grouped=to_grouped)
    assert different(target, carried(source, target, tmp_path)) == []


@pytest.mark.parametrize("zero", [1, 3])
def test_grouped_on_both_sides(tmp_path: Path, zero: int) -> None:
    for at, place in enumerate(PLACES):
        source = Layout(mesh(place, zero), grouped=True)
        target = Layout(mesh(PLACES[at - 2], zero), grouped=True)
        assert different(target, carried(source, target, tmp_path)) == []


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("fault", ["two experts swapped", "gate and up swapped"])
def test_a_planted_fault_is_seen(tmp_path: Path, fault: str, grouped: bool) -> None:
    source = Layout(mesh((2, 2), 1), grouped, fault)
    target = Layout(mesh((1, 1), 1), not grouped)
    assert different(target, carried(source, target, tmp_path))


def test_the_label_of_grouped_experts_is_none(tmp_path: Path) -> None:
    """Their attribute partition_dim says 1, as if experts lay side by side."""
    source = Layout(mesh((2, 1), 1), True, "cut as its label says")
    target = Layout(mesh((1, 1), 1))
    assert different(target, carried(source, target, tmp_path))


def test_the_module_computes_with_what_was_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core's GroupedMLP itself, a loop in the place of its kernel, against each expert's
    own matrices: in whole numbers, so that both are exact."""
    from megatron.core.transformer.moe import experts

    if not hasattr(experts, "GroupedMLP"):
        pytest.skip("this megatron-core has no GroupedMLP any more: its files alone are read")
    monkeypatch.setattr(experts.gg, "ops", SimpleNamespace(gmm=gmm), raising=False)
    module = filled(tmp_path)
    counts = torch.tensor([2, 1, 3, 2])
    tokens = torch.randint(-3, 4, (8, HIDDEN)).double()
    probs = torch.randint(1, 4, (8,)).double()
    (out, _) = experts.GroupedMLP.forward(module, tokens, counts, probs)
    assert torch.equal(out, one_by_one(tokens, counts, probs)) and out.any()
    module.weight1 = module.weight1.view(EXPERTS, HIDDEN, -1).flip(0).reshape(HIDDEN, -1)
    (other, _) = experts.GroupedMLP.forward(module, tokens, counts, probs)
    assert not torch.equal(other, out)


def filled(folder: Path) -> SimpleNamespace:
    """What the module's forward pass looks at, with weights from shards of experts one by one."""
    target = Layout(Mesh(), grouped=True)
    found = carried(Layout(mesh((2, 2), 3)), target, folder, lambda state: state == "fp32")
    ((slot, memory),) = found.items()
    members = target.manifest.buffers[slot.buffer].members
    starts = {which: start_of(members, which) for which in (FC1, FC2)}
    size = EXPERTS * HIDDEN * FFN
    return SimpleNamespace(
        config=SimpleNamespace(bf16=True, moe_apply_probs_on_input=False, hidden_size=HIDDEN),
        activation_recompute=False,
        num_local_experts=EXPERTS,
        weight1=small(memory[starts[FC1] :][: 2 * size].view(HIDDEN, -1)),
        weight2=small(memory[starts[FC2] :][:size].view(-1, HIDDEN)),
        activation_func_with_probs=gated,
    )


def start_of(members: tuple[Member, ...], which: str) -> int:
    """Where a stacked tensor begins."""
    last = tuple(f".local_experts.{number}.{which}" for number in range(EXPERTS))
    return min(member.start for member in members if member.param.endswith(last))


def one_by_one(tokens: torch.Tensor, counts: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """What the experts make of the tokens that each one gets."""
    out = []
    parts = zip(tokens.split(counts.tolist()), probs.split(counts.tolist()), strict=True)
    for number, (x, p) in enumerate(parts):
        name = f"decoder.layers.0.mlp.experts.local_experts.{number}"
        fc1, fc2 = (small(whole(f"{name}.{which}", "fp32")) for which in (FC1, FC2))
        out.append(gated(x @ fc1.T, p.unsqueeze(-1)) @ fc2.T)
    return torch.cat(out)


def gmm(
    x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, trans_b: bool
) -> torch.Tensor:
    """The kernel, as a loop."""
    parts = x.split(counts.tolist())
    return torch.cat([part @ one for part, one in zip(parts, weights, strict=True)])


def small(values: torch.Tensor) -> torch.Tensor:
    """Whole numbers whose products float64 holds."""
    return values.double() % 97


def gated(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return gate * up * probs


MESHES = {
    "an expert is cut more than attention": Mesh(tp=1, dp=4, ep=2, etp=2, zero=1),
    "cut more, in one run of experts": Mesh(tp=1, dp=4, ep=1, etp=2, zero=2),
    "cut four times": Mesh(tp=2, dp=4, ep=2, etp=4, zero=1),
    "fewer ranks for all experts than cut attention": Mesh(tp=4, dp=2, ep=2, etp=1, zero=1),
    "one of four": Mesh(tp=4, dp=1, ep=1, etp=1, zero=1),
    "ZeRO-3 on two expert-parallel ranks": Mesh(tp=1, dp=4, ep=2, zero=3),
    "ZeRO-3 on four, cut": Mesh(tp=2, dp=4, ep=4, zero=3),
    "ZeRO-3 and cut more": Mesh(tp=1, dp=8, ep=2, etp=2, zero=3),
}
TRAINED = Mesh(tp=2, dp=2, ep=2, zero=1)


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("grouped", [False, True])
def test_to_a_mesh_that_trains_and_back(tmp_path: Path, name: str, grouped: bool) -> None:
    here, there = Layout(MESHES[name], grouped), Layout(TRAINED)
    assert different(there, carried(here, there, tmp_path)) == []
    assert different(here, carried(there, here, tmp_path)) == []


def test_between_them(tmp_path: Path) -> None:
    every = [Layout(mesh) for mesh in MESHES.values()]
    for source, target in zip(every, every[1:] + every[:1], strict=True):
        assert different(target, carried(source, target, tmp_path)) == []


@pytest.mark.parametrize("name", MESHES)
def test_a_swapped_expert_is_seen(tmp_path: Path, name: str) -> None:
    here = Layout(MESHES[name], fault="two experts swapped")
    fine = Layout(TRAINED)
    swapped = different(fine, carried(here, fine, tmp_path))
    assert bool(swapped) == (MESHES[name].ep < 4)  # with one expert on a rank nothing is swapped
