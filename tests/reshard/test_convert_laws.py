"""Conversions of random models between random meshes: every file put together by plain torch, and
the laws.

A conversion is right where its files hold the truth bit by bit (`paper.problems`, which shares no
code with the package). A->B->A is the identity, A->B->C is A->C, A->universal->B is A->B, file by
file.
"""

import hashlib
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard import files as module
from megatron_ucp.reshard.check import weight_differences
from tests.reshard import paper
from tests.share import every

# the seeds are alike: each is another model on other meshes
CASES = [
    *range(8),
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in every(range(8, 300))),
]


def digest(folder: Path) -> str:
    return hashlib.sha256(
        b"".join(p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file())
    ).hexdigest()


def orders(dice: random.Random, model: paper.Model, targets: list[Target]) -> list[Target]:
    """A pipeline does not keep the order of groups that a stage lacks: there each target is
    told."""
    complete = all(
        len(groups) == len(model.groups)
        for target in targets
        for groups in paper.expected_groups(model, target)
    )
    if complete and dice.random() < 0.6:
        return targets
    names = [list(names) for _, _, names in model.groups]
    if dice.random() < 0.5:
        for one in names:
            dice.shuffle(one)
    return [replace(target, groups=tuple(map(tuple, names))) for target in targets]


def converted(model: paper.Model, source: Path, target: Target, folder: Path) -> None:
    """A conversion that is whole, and holds the truth."""
    before = digest(source)
    ucp.convert(source, folder, target=target, allow=frozenset({"narrow"}))
    assert digest(source) == before
    assert paper.problems(paper.read(folder), model, target) == []
    assert ucp.verify(folder, deep=True).findings == ()
    with open_checkpoint(folder) as found:
        copies: Any = found.copies()
        assert (copies is not None) or target.mesh.zero not in (1, 2)
        assert copies is None or weight_differences(found, copies) == []


@pytest.mark.parametrize("seed", CASES)
def test_laws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    dice = random.Random(seed)
    model = paper.random_model(dice)
    a, b, c = orders(dice, model, [paper.random_target(dice, model) for _ in range(3)])
    monkeypatch.setattr(
        module, "WINDOW_BYTES", dice.choice([16, 64, 2**21])
    )  # where windows begin and end is no matter
    first = paper.write(model, tmp_path / "first" / "step7")

    def to(source: Path, target: Target, name: str) -> Path:
        converted(model, source, target, tmp_path / name)
        assert [d for d in ucp.diff(first, tmp_path / name) if "dtype" not in d.what] == []
        return tmp_path / name

    there = to(first, a, "a")
    other = to(there, b, "b")
    assert paper.differences(to(other, a, "back"), there) == []
    assert paper.differences(to(other, c, "through"), to(there, c, "straight")) == []
    universal = tmp_path / "universal"
    ucp.convert(there, universal, to="universal", target=Target(ucp.Mesh(), groups=b.groups))
    assert ucp.verify(universal, deep=True).findings == () and ucp.diff(there, universal) == []
    assert paper.differences(to(universal, b, "from_universal"), other) == []


# ------------------------------------------------ negative controls


def shaped(dice: random.Random) -> tuple[paper.Model, Target]:
    """A LLaMA with two groups of keys and values, on one rank without ZeRO in bf16: every tensor
    has its own shape."""
    while True:
        model = paper.random_model(dice)
        if (
            (model.family, model.sizes.groups, model.dtype, model.optimizer)
            == ("llama", 2, "bfloat16", "torch.AdamW")
            and model.states
            and "frozen" not in model.kinds.values()
        ):
            return model, Target(
                ucp.Mesh(zero=0), "bfloat16", None, None, None, 10**9, False, False, False
            )


def master(files: dict[str, Any], model: paper.Model, name: str) -> torch.Tensor:
    """The fp32 master of a parameter, as it lies in the file."""
    order = [n for _, _, names in model.groups for n in names]
    flat = [
        tensor
        for group in files["mp_rank_00_model_states.pt"]["optimizer"]["fp32_groups"]
        for tensor in group
    ]
    return flat[order.index(name)]


def one_bit(files: dict[str, Any], model: paper.Model) -> None:
    master(files, model, "embedding.word_embeddings.weight").view(torch.int32)[3, 1] ^= 1


def gate_and_up(files: dict[str, Any], model: paper.Model) -> None:
    found = master(files, model, "decoder.layers.0.mlp.linear_fc1.weight")
    found.copy_(torch.cat(found.chunk(2)[::-1]))


def two_groups_of_keys(files: dict[str, Any], model: paper.Model) -> None:
    found = master(files, model, "decoder.layers.0.self_attention.linear_qkv.weight")
    found.copy_(torch.cat(found.chunk(2)[::-1]))


def two_moments(files: dict[str, Any], model: paper.Model) -> None:
    entry = files["mp_rank_00_model_states.pt"]["optimizer"]["optimizer_state_dict"]["state"][0]
    entry["exp_avg"], entry["exp_avg_sq"] = entry["exp_avg_sq"], entry["exp_avg"]


def a_step(files: dict[str, Any], model: paper.Model) -> None:
    files["mp_rank_00_model_states.pt"]["optimizer"]["optimizer_state_dict"]["state"][0][
        "step"
    ] += 1


def a_weight_decay(files: dict[str, Any], model: paper.Model) -> None:
    files["mp_rank_00_model_states.pt"]["optimizer"]["optimizer_state_dict"]["param_groups"][0][
        "weight_decay"
    ] += 0.5


def a_weight(files: dict[str, Any], model: paper.Model) -> None:
    files["mp_rank_00_model_states.pt"]["module"]["decoder.final_layernorm.weight"].view(
        torch.int16
    )[0] ^= 1


FAULTS = [one_bit, gate_and_up, two_groups_of_keys, two_moments, a_step, a_weight_decay, a_weight]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(tmp_path: Path, fault: Any) -> None:
    model, target = shaped(random.Random(5))
    first = paper.write(model, tmp_path / "first" / "step7")
    ucp.convert(first, tmp_path / "out", target=target)
    files = paper.read(tmp_path / "out")
    assert paper.problems(files, model, target) == []
    fault(files, model)
    assert paper.problems(files, model, target) != []


def test_two_ranks_that_changed_places_are_seen(tmp_path: Path) -> None:
    model, target = shaped(random.Random(5))
    first = paper.write(model, tmp_path / "first" / "step7")
    for mesh in (ucp.Mesh(tp=2, zero=1), ucp.Mesh(dp=2, zero=3), ucp.Mesh(dp=2, zero=1)):
        folder = tmp_path / str(mesh)
        ucp.convert(first, folder, target=replace(target, mesh=mesh))
        files = paper.read(folder)
        assert paper.problems(files, model, replace(target, mesh=mesh)) == []
        one, other = (name for name in files if "optim" in name)
        files[one], files[other] = files[other], files[one]
        assert paper.problems(files, model, replace(target, mesh=mesh)) != []


def test_a_difference_between_folders_is_seen(tmp_path: Path) -> None:
    model, target = shaped(random.Random(5))
    first = paper.write(model, tmp_path / "first" / "step7")
    for name in ("one", "other"):
        ucp.convert(first, tmp_path / name, target=target)
    assert paper.differences(tmp_path / "one", tmp_path / "other") == []
    path = tmp_path / "other" / "mp_rank_00_model_states.pt"
    tree = torch.load(path, weights_only=False)
    two_moments({path.name: tree}, model)
    torch.save(tree, path)
    assert paper.differences(tmp_path / "one", tmp_path / "other") != []
