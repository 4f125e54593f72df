"""Folders for FSDP2 that are written: torch's own reader finds what torch's own writer had put
there, in every layout, and every verb works on them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import megatron_ucp as ucp
from megatron_ucp.errors import StateMismatchError, UnsupportedError, UsageError
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import read_state, verify
from megatron_ucp.reshard.hugging_face.names import read_twin
from tests.formats.cut_dcp import save_cut
from tests.formats.test_dcp import GOLDEN
from tests.ranks import RankPool
from tests.reshard import paper, twins, work_sharing_jobs

MESHES = ("dp=2,zero=1", "dp=3,zero=3", "dp=1,zero=0")


def tree_of(folder: Path, tmp_path: Path) -> Any:
    """The nested dictionaries of a folder, by torch alone."""
    out = tmp_path / "tree.pt"
    dcp_to_torch_save(folder, out)
    return torch.load(out, weights_only=False)


def unlike(one: Any, other: Any, where: str = "") -> list[str]:
    """Places at which two trees of dictionaries, lists, tensors and values differ."""
    if isinstance(one, torch.Tensor):
        same = isinstance(other, torch.Tensor) and one.dtype == other.dtype
        return [] if same and torch.equal(one, other) else [where]
    if type(one) is not type(other):
        return [where]
    if isinstance(one, dict):
        odd = [f"{where}.{key}" for key in one.keys() ^ other.keys()]
        both = one.keys() & other.keys()
        return odd + [d for key in both for d in unlike(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, list | tuple) and len(one) == len(other):
        return [
            d
            for n, pair in enumerate(zip(one, other, strict=True))
            for d in unlike(*pair, f"{where}.{n}")
        ]
    return [] if one == other else [where]


def without_initial_rates(tree: Any) -> Any:
    """What a scheduler would add to each group is written always."""
    for group in tree["optim"]["param_groups"]:
        assert group.pop("initial_lr") in (1e-3, 5e-4)
    return tree


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", ["plain", "tied"])
def test_torch_reads_what_torch_had_written(case: str, mesh: str, tmp_path: Path) -> None:
    ucp.convert(GOLDEN / case, tmp_path / "mid", mesh=mesh)
    ucp.convert(tmp_path / "mid", tmp_path / "out", to="dcp")
    want, have = (tree_of(f, tmp_path) for f in (GOLDEN / case, tmp_path / "out"))
    for group in want["optim"]["param_groups"]:
        group.pop("initial_lr", None)
    assert unlike(want, without_initial_rates(have)) == []
    have["optim"]["state"]["inner.bias"]["exp_avg"][0] += 1
    assert unlike(want, have) == [".optim.state.inner.bias.exp_avg"]


def test_accelerates_two_folders(tmp_path: Path) -> None:
    source = GOLDEN / "accelerate"
    ucp.convert(source, tmp_path / "mid", mesh="dp=2,zero=2")
    ucp.convert(tmp_path / "mid", tmp_path / "out", to="accelerate")
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        want, have = (tree_of(f / name, tmp_path) for f in (source, tmp_path / "out"))
        assert unlike(want, have) == []
    schedules = [torch.load(f / "scheduler.bin") for f in (source, tmp_path / "out")]
    assert schedules[0] == schedules[1]


def test_by_way_of_a_universal_folder_and_straight(tmp_path: Path) -> None:
    ucp.convert(GOLDEN / "flat", tmp_path / "mid", to="universal")
    ucp.convert(tmp_path / "mid", tmp_path / "one", to="dcp")
    ucp.convert(GOLDEN / "flat", tmp_path / "two", to="dcp")
    trees = [tree_of(tmp_path / name, tmp_path) for name in ("one", "two")]
    assert unlike(*trees) == []


def test_every_verb(tmp_path: Path) -> None:
    ucp.convert(GOLDEN / "plain", tmp_path / "mid", mesh="dp=2,zero=1")
    ucp.convert(tmp_path / "mid", tmp_path / "out", to="dcp")
    folders = (GOLDEN / "plain", tmp_path / "mid", tmp_path / "out")
    assert len({str(ucp.fingerprint(folder)) for folder in folders}) == 1
    for folder in folders:
        assert verify(folder, deep=True).findings == ()
        ucp.export_hf(folder, tmp_path / f"hf{folder.name}", dtype="float32")
    exports = {(tmp_path / f"hf{f.name}" / "model.safetensors").read_bytes() for f in folders}
    assert len(exports) == 1
    assert [d for d in ucp.diff(tmp_path / "mid", tmp_path / "out") if d.parameter] == []
    assert "FSDP2" in str(ucp.inspect(tmp_path / "out"))


def test_weights_in_bf16_become_masters_exactly(tmp_path: Path) -> None:
    ucp.convert(GOLDEN / "bf16", tmp_path / "out", mesh="dp=2,zero=1")
    with open_checkpoint(GOLDEN / "bf16") as one, open_checkpoint(tmp_path / "out") as two:
        for spec in one.manifest.params:
            for state in one.manifest.states_of(spec.name):
                a, b = (read_state(c, spec.name, state) for c in (one, two))
                assert torch.equal(a.float(), b.float()), f"{spec.name} {state}"
        assert two.manifest.states_of("inner.weight")["fp32"] == "float32"


class OfState:
    """A model of which the truth is that of one state."""

    def __init__(self, model: paper.Model, state: str) -> None:
        self.family, self.sizes, self._model, self._state = model.family, model.sizes, model, state

    def truth(self, name: str) -> torch.Tensor:
        state = self._state if self._model.kinds[name] == "trainable" else "fp32"
        return self._model.truth(name, state)


@pytest.mark.parametrize("family", twins.SIZES)
def test_a_family_is_written_under_the_names_of_transformers(family: str, tmp_path: Path) -> None:
    model = twins.model(family)
    source = paper.write(model, tmp_path / "in" / "step7")
    ucp.convert(source, tmp_path / "out", to="dcp")
    tree = tree_of(tmp_path / "out", tmp_path)
    assert (tmp_path / "out" / "config.json").is_file()
    wrong: list[str] = []
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        want = twins.expected(OfState(model, state))  # type: ignore[arg-type]
        for name, value in want.items():
            found = tree["model"].get(name)
            if state != "fp32":
                found = tree["optim"]["state"].get(name, {}).get(state)
                if found is None:  # a buffer, or a tensor under a further name
                    assert name.endswith(BESIDE), name
                    continue
            if found is None or not torch.equal(found, value):
                wrong.append(f"{name} {state}")
    assert wrong == []
    first = next(name for name in tree["optim"]["state"] if name in want)
    tree["optim"]["state"][first]["exp_avg_sq"].view(-1)[-1] += 1
    assert not torch.equal(tree["optim"]["state"][first]["exp_avg_sq"], want[first])
    key = next(iter(tree["optim"]["state"]))
    assert {*tree["optim"]["state"][key]} == {"exp_avg", "exp_avg_sq", "step"}
    listed = [name for group in tree["optim"]["param_groups"] for name in group["params"]]
    assert sorted(listed) == sorted(tree["optim"]["state"])


BESIDE = ("e_score_correction_bias", "embed_tokens.weight", "shared_head.head.weight")


@pytest.mark.parametrize("to", ["dcp", "accelerate"])
def test_ranks_that_share_the_work_write_the_same_folder(
    to: str, ranks: RankPool, tmp_path: Path
) -> None:
    source = str(GOLDEN / "plain")
    ucp.convert(source, tmp_path / "one", to=to)
    out = str(tmp_path / "three")
    done = ranks.run(3, work_sharing_jobs.call, "convert", source, out, to=to, timeout_s=100)
    assert all("error" not in one for one in done)
    folders = [
        {p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.is_file()}
        for f in (tmp_path / "one", tmp_path / "three")
    ]
    assert folders[0] == folders[1] and len(folders[0]) > 8


# ---- what is refused


def test_a_checkpoint_without_an_optimizer(tmp_path: Path) -> None:
    with pytest.raises(StateMismatchError, match="holds no optimizer"):
        folder = tmp_path / "pytorch_model_fsdp_0"
        shutil.copytree(GOLDEN / "accelerate" / folder.name, folder)
        ucp.convert(folder, tmp_path / "out", to="dcp")


def test_an_optimizer_of_which_nobody_knows_the_decay(tmp_path: Path) -> None:
    shapes, settings = {"a": (4, 3), "b": (5,)}, {"betas": (0.9, 0.99), "eps": 1e-8}
    model = paper.plain_model(shapes, "bfloat16", optimizer="", **settings)
    source = paper.write(model, tmp_path / "in" / "step7")
    with pytest.raises(UnsupportedError, match=r"Adam's or AdamW's(.|\n)*--optimizer"):
        ucp.convert(source, tmp_path / "out", to="dcp")


@pytest.mark.parametrize("word", ["dtype", "stages"])
def test_what_has_no_place(word: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"dtype": "bf16", "stages": "layers"}
    target = ucp.Target(ucp.Mesh(), **{word: asked[word]})
    with pytest.raises(UsageError, match=word):
        ucp.convert(GOLDEN / "plain", tmp_path / "out", to="dcp", target=target)


# ---- read under the names of a family


@pytest.mark.parametrize("family", twins.SIZES)
@pytest.mark.parametrize("pieces", [(1,), (3,), (2, 3), (5, 1, 2)], ids=str)
def test_a_family_reads_the_names_of_transformers(
    family: str, pieces: tuple[int, ...], tmp_path: Path
) -> None:
    """However ranks had cut the tensors, each element is where the family has it."""
    model = twins.model(family)
    source = paper.write(model, tmp_path / "in" / "step7")
    ucp.convert(source, tmp_path / "out", to="dcp")
    save_cut(tree_of(tmp_path / "out", tmp_path), tmp_path / "cut", pieces)
    (tmp_path / "cut" / "config.json").write_bytes((tmp_path / "out" / "config.json").read_bytes())
    with open_checkpoint(source) as first:
        twin, _, _ = read_twin(tmp_path / "cut", family, first.manifest.by_name)
    wrong: list[str] = []
    with open_checkpoint(tmp_path / "cut", told=twin.told) as found:
        assert sorted(found.manifest.by_name) == sorted(model.shapes)
        for name in model.shapes:
            kind = model.kinds[name]
            for state in ("fp32", "exp_avg", "exp_avg_sq") if kind == "trainable" else ("value",):
                want = model.truth(name, "fp32" if state == "value" else state)
                rows = found.manifest.by_name[name].shape[:1]
                want = want[: rows[0]] if rows else want
                have = read_state(found, name, state)
                if not torch.equal(have.to(want.dtype), want.reshape(-1)):
                    wrong.append(f"{name} {state}")
            if kind == "trainable":
                assert found.manifest.scalars_of(name) == {"step": 3.0}
    assert wrong == []


def in_memory(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As transformers 5 has a mixture in memory: the experts of a layer in one tensor."""
    out: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[str, torch.Tensor]] = {}
    words = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    for name, value in found.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        layer, is_expert, rest = name.partition(".mlp.experts.")
        if not is_expert:
            out[name] = value
            continue
        number, matrix, _ = rest.split(".")
        experts.setdefault(layer, {})[f"{number}.{words.get(matrix, matrix)}"] = value
    for layer, own in experts.items():
        first, numbers = f"{layer}.mlp.experts.", range(len(own) // 3)
        both = [torch.cat([own[f"{n}.gate_proj"], own[f"{n}.up_proj"]]) for n in numbers]
        out[f"{first}gate_up_proj"] = torch.stack(both)
        out[f"{first}down_proj"] = torch.stack([own[f"{n}.down_proj"] for n in numbers])
    return out


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("pieces", [(1,), (3,)], ids=str)
def test_a_family_reads_experts_in_one_tensor(
    family: str, pieces: tuple[int, ...], tmp_path: Path
) -> None:
    """What FSDP2 saves of a mixture of transformers 5, for megatron-core's modules."""
    model = twins.model(family)
    ucp.convert(paper.write(model, tmp_path / "in" / "step7"), tmp_path / "out", to="dcp")
    tree = tree_of(tmp_path / "out", tmp_path)
    states: dict[str, dict[str, Any]] = {}
    for state in ("exp_avg", "exp_avg_sq"):
        own = {name: one[state] for name, one in tree["optim"]["state"].items()}
        for name, value in in_memory(own).items():
            states.setdefault(name, {"step": torch.tensor(3.0)})[state] = value
    tree["model"] = in_memory(tree["model"])
    tree["optim"]["state"] = states
    (group,) = tree["optim"]["param_groups"]
    group["params"] = list(states)
    assert any(len(value.shape) == 3 for value in tree["model"].values())
    save_cut(tree, tmp_path / "cut", pieces)
    (tmp_path / "cut" / "config.json").write_bytes((tmp_path / "out" / "config.json").read_bytes())
    assert wrong_elements(tmp_path / "cut", family, model) == []


def wrong_elements(folder: Path, family: str, model: Any) -> list[str]:
    """What of a folder is not the model's, whose family reads it: parameters and states with other
    elements. All of the model is there, at its third step."""
    twin, _, _ = read_twin(folder, family, model.shapes)
    wrong: list[str] = []
    with open_checkpoint(folder, told=twin.told) as found:
        assert sorted(found.manifest.by_name) == sorted(model.shapes)
        for name in model.shapes:
            trained = model.kinds[name] == "trainable"
            for state in ("fp32", "exp_avg", "exp_avg_sq") if trained else ("value",):
                want = model.truth(name, "fp32" if state == "value" else state)
                rows = found.manifest.by_name[name].shape[:1]
                want = want[: rows[0]] if rows else want
                if not torch.equal(read_state(found, name, state), want.reshape(-1)):
                    wrong.append(f"{name} {state}")
            if trained:
                assert found.manifest.scalars_of(name) == {"step": 3.0}
    return wrong


# ---- plans, and fingerprints


@pytest.mark.parametrize("case", ["plain", "flat", "accelerate", "bf16", "torchtitan"])
def test_a_plan_reads_each_byte_that_was_saved_once(case: str) -> None:
    held = torch.load(GOLDEN / f"{case}.pt", weights_only=False)
    states = held.get("optimizer") or {
        f"{name}.{state}": value
        for name, own in held["state"].items()
        for state, value in own.items()
    }
    moments = [value for name, value in states.items() if "exp_avg" in name]
    size = sum(value.nbytes for value in (*held["weights"].values(), *moments))
    (rank,) = ucp.plan(GOLDEN / case, "dp=1,zero=0").ranks
    assert len(moments) > 3 and rank.read_bytes == size
    ranks = ucp.plan(GOLDEN / case, "dp=3,zero=3").ranks
    assert sum(one.read_bytes for one in ranks) >= size > max(one.read_bytes for one in ranks)
    files = {name for one in (rank, *ranks) for name in one.files}
    assert files == {str(p.relative_to(GOLDEN / case)) for p in (GOLDEN / case).rglob("*.distcp")}


def test_a_plan_of_fewer_tensors_reads_less(tmp_path: Path) -> None:
    tree = tree_of(GOLDEN / "plain", tmp_path)
    name = "inner.bias"
    lost = tree["model"].pop(name), *tree["optim"]["state"].pop(name).values()
    for group in tree["optim"]["param_groups"]:
        group["params"] = [one for one in group["params"] if one != name]
    save_cut(tree, tmp_path / "less", (2,))
    both = [ucp.plan(f, "dp=1,zero=0").ranks[0] for f in (GOLDEN / "plain", tmp_path / "less")]
    size = sum(value.nbytes for value in lost if value.ndim)
    assert both[0].read_bytes - both[1].read_bytes == size > 0


@pytest.mark.parametrize("change", ["weight", "moment", "step", "rate", "nothing"])
def test_a_fingerprint_sees_every_change(change: str, tmp_path: Path) -> None:
    tree = tree_of(GOLDEN / "plain", tmp_path)
    state = tree["optim"]["state"]["inner.bias"]
    if change == "weight":
        tree["model"]["inner.bias"][0] += 1
    elif change == "moment":
        state["exp_avg_sq"][-1] += 1
    elif change == "step":
        state["step"] += 1
    elif change == "rate":
        tree["optim"]["param_groups"][0]["lr"] *= 2
    save_cut(tree, tmp_path / "other", (3,))
    one, other = (ucp.fingerprint(folder) for folder in (GOLDEN / "plain", tmp_path / "other"))
    found = other.differences(one)
    if change == "nothing":
        assert found == [] and str(one) == str(other)
    else:
        assert found != [] and str(one) != str(other)
        words = {"weight": "fp32", "moment": "exp_avg_sq"}
        assert any(words.get(change, "steps or hyper-parameters") in line for line in found), found
