"""torchtitan's folders: its names and orders, put together by plain torch, for each family and
each cut; and what its own checkpointer wrote."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp import errors
from megatron_ucp.formats.dcp import torchtitan
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import verify
from tests.formats.cut_dcp import save_cut
from tests.formats.test_dcp import GOLDEN
from tests.formats.titan_names import fused, to_torchtitan
from tests.reshard import paper, twins
from tests.reshard.test_dcp import OfState, tree_of, wrong_elements

KINDS = {
    "llama": "llama3",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "deepseek_v3": "deepseek_v3",
    "gpt_oss": "gpt_oss",
}
SIZES = {**twins.SIZES, "deepseek_v3": replace(twins.DEEPSEEK, predictions=0)}
STATES = ("exp_avg", "exp_avg_sq")


def model_of(family: str) -> paper.Model:
    if family != "deepseek_v3":
        return twins.model(family)
    odd = {**twins.ARCHITECTURES[family].odd}
    del odd["mtp_num_layers"]
    return twins.model(family, SIZES[family], odd=odd)


def wanted(model: paper.Model, state: str) -> dict[str, torch.Tensor]:
    """What torchtitan has of a state, by the names of its weights."""
    found = twins.expected(OfState(model, state))  # type: ignore[arg-type]
    sizes = model.sizes
    return to_torchtitan(found, KINDS[model.family], sizes.heads, sizes.groups)


def has_bias(name: str) -> bool:
    return name.endswith("expert_bias_E")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Path]]:
    """A folder for torchtitan of each family's run on paper, written once."""
    place = tmp_path_factory.mktemp("titan")

    def make(family: str) -> tuple[Any, Path]:
        model, out = model_of(family), place / family / "out"
        if not out.exists():
            source = paper.write(model, place / family / "in" / "step7")
            ucp.convert(source, out, to="torchtitan")
        return model, out

    return make


def unlike(tree: Any, model: paper.Model) -> list[str]:
    """What a folder holds otherwise than torchtitan would."""
    wrong: list[str] = []
    weights = wanted(model, "fp32")
    for name, value in weights.items():
        if name not in tree or not torch.equal(tree[name], value):
            wrong.append(name)
    own = {"optimizer", "lr_scheduler", "train_state"}
    beside = tree.keys() - weights.keys() - own
    assert all(has_bias(name) and not tree[name].any() for name in beside)
    trained = [name for name in fused(weights, model.sizes.groups) if not has_bias(name)]
    for state in STATES:
        found = fused(wanted(model, state), model.sizes.groups)
        for name in trained:
            if not torch.equal(tree["optimizer"][f"state.{name}.{state}"], found[name]):
                wrong.append(f"{name} {state}")
    for name in trained:
        if tree["optimizer"][f"state.{name}.step"] != 3.0:
            wrong.append(f"{name} step")
    keys = {f"param_groups.{name}.lr" for name in trained}
    keys |= {f"state.{n}.{s}" for n in trained for s in (*STATES, "step")}
    listed = {k for k in tree["optimizer"] if k.startswith("state.") or k.endswith(".lr")}
    return wrong + sorted(map(str, listed ^ keys))


@pytest.mark.parametrize("family", KINDS)
def test_the_names_and_orders_of_torchtitan(
    family: str, written: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    model, out = written(family)
    tree = tree_of(out, tmp_path)
    assert unlike(tree, model) == []
    assert tree["train_state"]["step"] == tree["lr_scheduler"]["last_epoch"]
    name = next(name for name in wanted(model, "fp32") if ".attention.wo.weight" in name)
    key = f"state.{name}.exp_avg"
    tree["optimizer"][key] = tree["optimizer"][key].flip(0)
    tree[name] = tree[name].flip(0)
    assert unlike(tree, model) == [name, f"{name} exp_avg"]


def test_without_the_turns_of_llama3_the_order_is_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchtitan.Heads, "there", lambda self, which, row: row)
    model = model_of("llama")
    ucp.convert(paper.write(model, tmp_path / "in" / "step7"), tmp_path / "out", to="torchtitan")
    found = unlike(tree_of(tmp_path / "out", tmp_path), model)
    assert {name.partition(".attention.")[2].split(" ")[0] for name in found} == {
        *(f"qkv_linear.{one}.weight" for one in ("wq", "wk", "wqkv")),
    }


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("pieces", [(1,), (3,), (5,)], ids=str)
def test_a_family_reads_it(
    family: str,
    pieces: tuple[int, ...],
    written: Callable[[str], tuple[Any, Path]],
    tmp_path: Path,
) -> None:
    """However ranks had cut the tensors, each element is where megatron-core's modules have it."""
    model, out = written(family)
    flat: dict[str, Any] = {}
    for key, value in tree_of(out, tmp_path).items():
        more = {f"{key}.{n}": v for n, v in value.items()} if isinstance(value, dict) else {}
        flat |= more or {key: value}
    save_cut(flat, tmp_path / "cut", pieces)
    (tmp_path / "cut" / "config.json").write_bytes((out / "config.json").read_bytes())
    assert wrong_elements(tmp_path / "cut", family, model) == []


@pytest.mark.parametrize("family", KINDS)
def test_exports_are_those_of_the_run(
    family: str, written: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    """By the names of transformers, without any family."""
    _, out = written(family)
    ucp.export_hf(out, tmp_path / "hf", dtype="float32", config=out)
    ucp.export_hf(out.parent / "in" / "step7", tmp_path / "own", dtype="float32")
    both = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("hf", "own")]
    assert both[0] == both[1]
    assert verify(out, deep=True).findings == ()


# ---- what torchtitan's own checkpointer wrote


@pytest.fixture
def golden(tmp_path: Path) -> tuple[Path, Any]:
    shutil.copytree(GOLDEN / "torchtitan", tmp_path / "golden")
    return tmp_path / "golden", torch.load(GOLDEN / "torchtitan.pt", weights_only=False)


def flat_of(folder: Path, tmp_path: Path) -> dict[str, Any]:
    """All that a folder holds, by key."""
    tree = tree_of(folder, tmp_path)
    weights = {key: value for key, value in tree.items() if isinstance(value, torch.Tensor)}
    return {"weights": weights, "optimizer": tree["optimizer"], "scheduler": tree["lr_scheduler"]}


def differ(one: Any, other: Any) -> list[str]:
    out: list[str] = []
    for part in ("weights", "optimizer", "scheduler"):
        out += sorted(map(str, one[part].keys() ^ other[part].keys()))
        for key in one[part].keys() & other[part].keys():
            a, b = one[part][key], other[part][key]
            same = torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            out += [] if same and type(a) is type(b) else [key]
    return out


@pytest.mark.parametrize("mesh", ["dp=2,zero=1", "dp=3,zero=3"])
def test_there_and_back(golden: tuple[Path, Any], mesh: str, tmp_path: Path) -> None:
    folder, held = golden
    assert differ(flat_of(folder, tmp_path), held) == []
    ucp.convert(folder, tmp_path / "mid", mesh=mesh)
    shutil.copy(folder / "config.json", tmp_path / "mid")
    done = ucp.convert(tmp_path / "mid", tmp_path / "out", to="torchtitan")
    assert any("exclude_from_loading dataloader" in note for note in done.notes)
    found = flat_of(tmp_path / "out", tmp_path)
    assert differ(found, held) == []
    key = "state.layers.0.attention.qkv_linear.wqkv.weight.exp_avg"
    found["optimizer"][key][0, 0] += 1
    assert differ(found, held) == [key]


def test_every_verb(golden: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = golden
    ucp.convert(folder, tmp_path / "mid", mesh="dp=2,zero=1")
    shutil.copy(folder / "config.json", tmp_path / "mid")
    ucp.convert(tmp_path / "mid", tmp_path / "out", to="torchtitan")
    folders = (folder, tmp_path / "mid", tmp_path / "out")
    assert len({str(ucp.fingerprint(one)) for one in folders}) == 1
    for one in folders:
        assert verify(one, deep=True).findings == ()
    assert [d for d in ucp.diff(tmp_path / "mid", tmp_path / "out") if d.parameter] == []


def config(folder: Path, **changes: Any) -> None:
    said = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(said))


def resaved(folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    tree = tree_of(folder, tmp_path)
    flat = {key: value for key, value in tree.items() if not isinstance(value, dict)}
    for part in ("optimizer", "lr_scheduler", "train_state"):
        flat |= {f"{part}.{key}": value for key, value in tree[part].items()}
    change(flat)
    kept = (folder / "config.json").read_bytes()
    shutil.rmtree(folder)
    save_cut(flat, folder, (2,))
    (folder / "config.json").write_bytes(kept)


def further(flat: dict[str, Any]) -> None:
    flat["mtp_layers.0.enorm.weight"] = torch.ones(16)


def no_query(flat: dict[str, Any]) -> None:
    del flat["layers.0.attention.qkv_linear.wq.weight"]


def narrow(flat: dict[str, Any]) -> None:
    key = "optimizer.state.layers.0.attention.qkv_linear.wqkv.weight.exp_avg"
    flat[key] = flat[key][:-1].clone()


REFUSED: dict[str, tuple[Any, type[errors.UcpError], str]] = {
    "layers for further tokens": (further, errors.UnsupportedError, "further tokens are not read"),
    "no queries": (no_query, errors.StateMismatchError, "weights are not in the folder"),
    "a state with too few rows": (narrow, errors.UnsupportedError, "no number for each element"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, golden: tuple[Path, Any], tmp_path: Path) -> None:
    change, kind, text = REFUSED[case]
    resaved(golden[0], tmp_path, change)
    with pytest.raises(kind, match=text):
        open_checkpoint(golden[0])


def test_the_heads_are_told_by_the_config(golden: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = golden
    config(folder, num_attention_heads=3)
    with pytest.raises(errors.ModelMismatchError, match="another model than the tensors"):
        open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(errors.NotFoundError, match=r"how many heads(.|\n)*copy the config.json"):
        open_checkpoint(folder)


def test_a_bias_of_a_router_that_transformers_has_not(
    written: Callable[[str], tuple[Any, Path]], tmp_path: Path
) -> None:
    """Zeros change nothing, and are left out; others stay, as what the model lacks."""
    _, out = written("qwen3_moe")
    shutil.copytree(out, tmp_path / "out")
    (tmp_path / "out" / "ucp_manifest.json").unlink()
    with open_checkpoint(tmp_path / "out") as found:
        assert any("biases of routers that are zeros" in note for note in found.notes)
        assert not any(map(has_bias, found.manifest.by_name))

    def biased(flat: dict[str, Any]) -> None:
        flat["layers.0.moe.expert_bias_E"][1] = 0.5

    resaved(tmp_path / "out", tmp_path, biased)
    with open_checkpoint(tmp_path / "out") as found:
        (name,) = [name for name in found.manifest.by_name if has_bias(name)]
        assert found.manifest.by_name[name].kind == "buffer"


def test_a_model_that_torchtitan_has_not(tmp_path: Path) -> None:
    source = paper.write(twins.model("gpt"), tmp_path / "in" / "step7")
    with pytest.raises(
        errors.UnsupportedError, match=r"torchtitan has no model(.|\n)*convert to dcp"
    ):
        ucp.convert(source, tmp_path / "out", to="torchtitan")


def test_a_llama_of_which_nobody_says_the_heads(tmp_path: Path) -> None:
    shapes = {
        "model.embed_tokens.weight": (48, 16),
        "model.norm.weight": (16,),
        **{f"model.layers.0.{n}_layernorm.weight": (16,) for n in ("input", "post_attention")},
        **{f"model.layers.0.self_attn.{n}_proj.weight": (16, 16) for n in "qkvo"},
    }
    settings = {"betas": (0.9, 0.99), "eps": 1e-8}
    model = paper.plain_model(shapes, "float32", optimizer="torch.AdamW", **settings)
    source = paper.write(model, tmp_path / "in" / "step7")
    with pytest.raises(errors.NotFoundError, match=r"how many heads(.|\n)*beside the checkpoint"):
        ucp.convert(source, tmp_path / "out", to="torchtitan")
