"""Megatron-DeepSpeed's checkpoints, in both orders of the rows of query_key_value: read, converted
and resumed by rules that come with the package, and refused where nothing says the order."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.core.layout import Shard, ShardNC
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import LayoutError, RuleError, UnsupportedError
from megatron_ucp.formats.deepspeed.layout_sources import LayoutSource
from megatron_ucp.formats.deepspeed.megatron_deepspeed import (
    INTERLEAVED,
    SPLIT,
    arguments_of,
    flags_of_model,
    kept_by_each_rank,
    order_of,
)
from megatron_ucp.formats.deepspeed.megatron_deepspeed import rules_of as rules_of_run
from megatron_ucp.formats.deepspeed.tp_patterns import StockInfo
from megatron_ucp.formats.deepspeed.weights import by_dotted_name
from tests.engines import fork_jobs
from tests.engines.fork_jobs import HEADS, LAYERS, Fork
from tests.engines.sources import Sources
from tests.reshard import plain

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).resolve().parents[2]
FUSED = {
    f"language_model.encoder.layers.{layer}.self_attention.query_key_value.{end}"
    for layer in range(LAYERS)
    for end in ("weight", "bias")
}
SETUPS = [
    (2, Fork(2, "split")),
    (4, Fork(2, "interleaved", swiglu=True, tied=False)),
    (4, Fork(2, "split", pp=2, tied=False, swiglu=True)),
    (4, Fork(2, "interleaved", pp=2)),
]


def rules_of(setup: Fork, order: str = "") -> str:
    return f"megatron_deepspeed_{order or setup.order}{'_swiglu' if setup.swiglu else ''}"


def other(setup: Fork) -> str:
    """Rules of the other order."""
    return rules_of(setup, "split" if setup.order == "interleaved" else "interleaved")


def stock(sources: Sources, world: int, setup: Fork) -> Path:
    return Path(sources.get(world, setup, fork_jobs.save))


def oracle(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    return torch.load(folder / "oracle.pt")


def differing(want: dict[Any, torch.Tensor], have: dict[Any, torch.Tensor]) -> set[Any]:
    assert want.keys() == have.keys() and len(want) > 20
    return {key for key in want if not torch.equal(want[key], have[key])}


def masters(folder: Path, path: Path, rules: str | None) -> set[str]:
    """Names of masters that differ from the gather that was made by hand."""
    want = {name: one for (name, state), one in oracle(folder).items() if state == "fp32"}
    return differing(want, ucp.fp32_state_dict(path, rules=rules))


@pytest.mark.parametrize(("world", "setup"), SETUPS, ids=str)
def test_rules_read_both_orders(sources: Sources, world: int, setup: Fork, tmp_path: Path) -> None:
    """The negative control: with rules of the other order rows of query_key_value land elsewhere,
    and nothing else does."""
    folder = stock(sources, world, setup)
    assert masters(folder, folder, rules_of(setup)) == set()
    assert masters(folder, folder, other(setup)) == FUSED
    mesh = ucp.Mesh(tp=4, dp=1, zero=1)
    ucp.convert(folder, tmp_path / "four", target=mesh, rules=rules_of(setup), allow={"per_rank"})
    assert masters(folder, tmp_path / "four", None) == set()
    assert ucp.diff(folder, tmp_path / "four", rules=rules_of(setup)) == []
    ucp.convert(folder, tmp_path / "wrong", target=mesh, rules=other(setup), allow={"per_rank"})
    assert masters(folder, tmp_path / "wrong", None) == FUSED


@pytest.mark.parametrize(
    ("number", "world", "target"),
    [
        (0, 4, Fork(4, "split")),
        (0, 2, Fork(1, "split", pp=2)),
        (1, 2, Fork(1, "interleaved", swiglu=True, tied=False)),
        (2, 2, Fork(2, "split", tied=False, swiglu=True)),
        (3, 4, Fork(4, "interleaved")),
    ],
    ids=str,
)
def test_stock_files_resume_on_other_meshes(
    sources: Sources, number: int, world: int, target: Fork
) -> None:
    """From a pipeline into a model without one too, and back. What the program saved comes back as
    its client state, with its own class in it."""
    folder = stock(sources, *SETUPS[number])
    found = sources.ranks.run(
        world, fork_jobs.resume, target, str(folder), rules_of(target), timeout_s=120
    )[0]
    assert found["error"] == ""
    assert differing(oracle(folder), found["state"]) == set()
    assert found["iteration"] == 7 and {"model_type", "params_dtype"} <= {*found["args"]}


def test_an_attached_run_saves_what_resumes_without_rules(sources: Sources, tmp_path: Path) -> None:
    """Its manifest says the order; a model of the other one is refused, unchanged."""
    source = Fork(2, "split", pp=2)
    folder = Path(sources.get(4, source, fork_jobs.save, attach=rules_of(source)))
    assert (folder / "filled" / "ucp_manifest.json").is_file()
    assert masters(folder, folder, None) == set()
    assert ucp.verify(folder, deep=True).findings == ()
    ucp.convert(folder, tmp_path / "one", target=ucp.Mesh(tp=1, dp=2, zero=1))
    assert masters(folder, tmp_path / "one", None) == set()
    for target in (Fork(1, "split"), Fork(4, "split")):
        job = fork_jobs.resume, target, str(folder), rules_of(target)
        run = sources.ranks.run(target.tp, *job, timeout_s=120)
        assert differing(oracle(folder), run[0]["state"]) == set()
    refused = sources.ranks.run(
        2, fork_jobs.resume, Fork(2, "interleaved"), str(folder), other(source), timeout_s=120
    )
    assert all("contradicts the manifest" in one["error"] for one in refused)
    assert refused[0]["unchanged"]


@pytest.mark.parametrize("way", ["stock", "direct", "background"])
def test_nested_weights_of_every_writer(sources: Sources, way: str) -> None:
    """With a frozen parameter, which is in the weights alone."""
    source = Fork(2, "interleaved", frozen=True)
    rules = rules_of(source)
    folder = Path(sources.get(4, source, fork_jobs.save, attach=rules, save=way))
    assert ucp.verify(folder, deep=True).findings == ()
    target = Fork(1, "interleaved", frozen=True, seed=9)
    job = fork_jobs.resume, target, str(folder), rules
    (found,) = sources.ranks.run(1, *job, timeout_s=120)
    assert found["error"] == "" and differing(oracle(folder), found["state"]) == set()
    frozen = "language_model.embedding.position_embeddings.weight", "weights"
    assert not torch.equal(oracle(folder)[frozen], found["before"][frozen])


def test_what_the_arguments_decide(sources: Sources) -> None:
    """Fewer key-value heads: by head. The argument that came with the new order: thirds."""
    for setup in (Fork(2, "interleaved", groups=2), Fork(2, "split", said=True)):
        folder = stock(sources, 2, setup)
        assert masters(folder, folder, None) == set()


def test_an_order_that_nobody_says_is_refused(sources: Sources) -> None:
    """Stock's converter joins the ranks' rows one after the other, whatever they are."""
    folder = stock(sources, 2, Fork(2, "split"))
    with pytest.raises(RuleError) as refused:
        ucp.describe(folder)
    for word in ("query_key_value", "megatron_deepspeed_split", "megatron_deepspeed_interleaved"):
        assert word in str(refused.value)
    for rules in ("megatron_deepspeed_split", "megatron_deepspeed_interleaved"):
        assert ucp.plan(folder, "dp=2,zero=1", rules=rules).ranks


def test_a_fork_with_names_of_its_own_is_told_them(sources: Sources) -> None:
    """Each, on every rank, and the file to edit; with a rule for them it goes on."""
    folder = stock(sources, 2, Fork(2, "split"))
    fork = Fork(2, "split", other="mlp.scale.weight")
    found = sources.ranks.run(2, fork_jobs.resume, fork, str(folder), rules_of(fork), timeout_s=120)
    for one in found:
        assert "no rule matches 2 parameters" in one["error"]
        assert all(f"layers.{n}.mlp.scale.weight" in one["error"] for n in range(LAYERS))
        assert "megatron_deepspeed_split.toml" in one["error"]
    own = folder / "own.toml"
    text = (ROOT / "megatron_ucp/formats/rules/megatron_deepspeed_split.toml").read_text()
    rule = "[[rule]]\npattern = '.*scale\\.weight'\nlayout = \"Replicate\"\n\n"
    own.write_text(text.replace("[[rule]]", f"{rule}[[rule]]", 1))
    source = Path(sources.get(2, fork, fork_jobs.save, attach=str(own)))
    again = sources.ranks.run(
        1, fork_jobs.resume, replace(fork, tp=1), str(source), str(own), timeout_s=120
    )[0]
    assert again["error"] == "" and differing(oracle(source), again["state"]) == set()


def test_a_live_model_of_the_other_order_is_refused() -> None:
    name, shape = "language_model.encoder.layers.0.self_attention.query_key_value.weight", (24, 8)
    thirds, by_head = ShardNC("tp", 0, (8, 8, 8)), Shard("tp", 0)
    for order, right, wrong in ((SPLIT, thirds, by_head), (INTERLEAVED, by_head, thirds)):
        for layout in (right, wrong):
            specs = {name: ParamSpec(name, shape, "", layout=layout)}
            source = LayoutSource(Mesh(tp=2, dp=1), StockInfo({}, "file", order), specs)
            if layout is wrong:
                with pytest.raises(LayoutError, match="another order"):
                    source.find(name, (12, 8), "trainable")
            else:
                assert source.find(name, (12, 8), "trainable") is specs[name]


def test_a_tree_of_weights_that_never_ends() -> None:
    """A file may have a dictionary in itself, or a billion times: each is walked once."""
    own: dict[str, Any] = {"weight": 1}
    own["self"] = own
    assert len(by_dotted_name({"one": own})) == 2
    shared: dict[str, Any] = {"weight": 1}
    for _ in range(20000):
        shared = dict.fromkeys(("a", "b", "c", "d"), shared)
    assert len(by_dotted_name(shared)) < 1000
    tree = {"model": {"layers.0": {"weight": 1, "bias": 2}, "_extra_state": {"a": 1}, "none": {}}}
    assert by_dotted_name(tree) == {
        "model.layers.0.weight": 1,
        "model.layers.0.bias": 2,
        "model._extra_state": {"a": 1},
        "model.none": {},
    }


def test_arguments_that_are_none_decide_nothing() -> None:
    kind = "argparse.Namespace"
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS}
    assert arguments_of(None) == arguments_of({"ds_sequence_parallel_fpdt": False}) == {}
    assert arguments_of(InertObject(kind, (), heads)) == heads
    assert order_of({}) == order_of(heads) == ""
    assert order_of({**heads, "num_key_value_heads": 2}) == INTERLEAVED
    assert order_of({**heads, "num_key_value_heads": True}) == ""
    assert order_of({**heads, "ds_sequence_parallel_fpdt": False}) == SPLIT


def test_arguments_of_another_script_are_none_of_the_programs() -> None:
    """Any script under DeepSpeed may keep the arguments that DeepSpeed's own parser adds."""
    kind, own = "argparse.Namespace", {"deepspeed_config": "ds.json", "local_rank": 0}
    other = {"args": InertObject(kind, (), own), "rng_state": 1}
    ours = {"args": InertObject(kind, (), {**own, "padded_vocab_size": 128})}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    assert kept_by_each_rank(other) == frozenset() and flags_of_model(own) == {}
    assert rules_of_run({**own, **heads}) is None and order_of(heads) == INTERLEAVED
    assert kept_by_each_rank(ours) == {"args", "rng_state"}
    assert kept_by_each_rank({"args": own}) == frozenset(), "a dictionary is no namespace"


def test_rules_that_a_live_layer_contradicts(sources: Sources) -> None:
    """A square matrix has the same share, whichever dim is cut: its layer knows."""
    folder = stock(sources, 2, Fork(2, "split"))
    text = (ROOT / "megatron_ucp/formats/rules/megatron_deepspeed_split.toml").read_text()
    wrong = folder / "wrong.toml"
    wrong.write_text(text.replace("dim = 1", "dim = 0"))
    found = sources.ranks.run(
        2, fork_jobs.resume, Fork(2, "split"), str(folder), str(wrong), timeout_s=120
    )
    assert all("partition_dim contradicts its rule" in one["error"] for one in found)
    assert found[0]["unchanged"]


def test_what_stocks_converter_joined(sources: Sources, tmp_path: Path) -> None:
    """It joins what no pattern matches rank by rank: right for rows by head, and a scramble of
    thirds, which nothing in its folder shows. (Without a pipeline it fails on the nested
    weights.)"""
    by_head, thirds = "megatron_deepspeed_interleaved", "megatron_deepspeed_split"
    cases = [
        (Fork(2, "interleaved", pp=1, groups=2), by_head, True),
        (Fork(2, "interleaved", pp=1), by_head, True),
        (Fork(2, "split", pp=1, said=True), thirds, False),
        (Fork(2, "split", pp=1), thirds, False),
        (Fork(1, "split", pp=1), thirds, True),
    ]
    setups = [setup for setup, *_ in cases]
    for setup, rules, right in cases:
        folder, out = stock(sources, setup.tp, setup), tmp_path / str(setups.index(setup))
        if not out.exists():
            # there, as it imports the classes of the arguments
            job = plain.stock_converted
            sources.ranks.run(1, job, folder / "filled", out, timeout_s=120)
        if right:
            assert masters(folder, out, rules) == set()
        else:
            with pytest.raises(UnsupportedError, match="may be in no order"):
                ucp.describe(out, rules=rules)
    scrambled = tmp_path / str(setups.index(Fork(2, "split", pp=1)))
    # who says so gets what is there
    assert masters(stock(sources, 2, Fork(2, "split", pp=1)), scrambled, by_head) == FUSED


def test_a_pattern_that_matches_nothing(sources: Sources, tmp_path: Path) -> None:
    """Of an untied pipeline with learned positions the fork spells their pattern wrong, so that
    stock's converter joins the copies of all ranks, one above the other."""
    text = (ROOT / "megatron_ucp/formats/rules/megatron_deepspeed_split.toml").read_text()
    names = tmp_path / "names.toml"
    names.write_text("format = 1\n\n" + text[text.index("[[pipeline]]") :])
    setup = Fork(2, "split", pp=1, tied=False, said=True, misspelled=True)
    folder = stock(sources, 2, setup)
    with pytest.raises(RuleError, match="matches no parameter") as refused:
        ucp.describe(folder, rules=names)
    for word in ("language_model.embedding.position_embeddings.weight", "tied_modules.embed"):
        assert word in str(refused.value)
    assert masters(folder, folder, rules_of(setup)) == set()
    right = stock(sources, 2, replace(setup, misspelled=False))
    assert masters(right, right, str(names)) == set()


def test_one_ranks_patterns_are_not_followed(sources: Sources, tmp_path: Path) -> None:
    """At tp=1 the fork leaves out what is row-parallel or replicated."""
    folder, mesh = stock(sources, 1, Fork(1, "split")), ucp.Mesh(tp=2, dp=1, zero=1)
    with pytest.raises(ucp.UcpError, match="rules"):
        ucp.convert(folder, tmp_path / "two", target=mesh)
    ucp.convert(folder, tmp_path / "two", target=mesh, rules=rules_of(Fork(1, "split")))
    assert masters(folder, tmp_path / "two", None) == set()
