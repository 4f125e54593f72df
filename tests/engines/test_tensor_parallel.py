"""GPT and LLaMA of megatron-core under DeepSpeed: any tensor-parallel size, number of ranks and
ZeRO stage to any other.

The oracle joins and cuts by megatron-core's own parameter attributes, not by the package's tables.
"""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.covering import covering, met
from tests.engines import kinds, tensor_jobs
from tests.engines.sources import Sources, of_states, patterns_alone
from tests.engines.sources import check as check_loads
from tests.engines.tensor_jobs import Mega
from tests.reshard.plain import stock_converted
from tests.share import LOSS_STEPS, every

pytestmark = pytest.mark.ranks
check = partial(check_loads, different=20)  # of values, by the load
MESHES = [
    (tp, dp, zero) for tp in (1, 2, 4) for dp in (1, 2, 4) if tp * dp <= 4 for zero in (0, 1, 2, 3)
]
Mesh = tuple[int, int, int]
SOURCES: list[Mesh] = [(2, 2, 1), (1, 2, 3), (4, 1, 2), (2, 1, 0), (2, 2, 3), (1, 4, 1)]


def source(sources: Sources, mesh: Mesh, family: str, **kwargs: Any) -> str:
    more = {key: kwargs.pop(key) for key in ("attach", "more") if key in kwargs}
    return sources.get(mesh[0] * mesh[1], Mega(family, mesh[0], mesh[2], **kwargs), **more)


def resume(
    sources: Sources, mesh: Mesh, family: str, folder: str, more: int = 0, **kwargs: Any
) -> list[dict]:
    options = {key: kwargs.pop(key) for key in ("plant", "tags") if key in kwargs}
    setup = Mega(family, mesh[0], mesh[2], seed=9, **kwargs)
    return sources.resume(mesh[0] * mesh[1], setup, folder, more=more, **options)


def pair(sources: Sources, origin: Mesh, target: Mesh, family: str, **kwargs: Any) -> list[dict]:
    """One kind of model on both meshes."""
    folder = source(sources, origin, family, more=0, **kwargs)
    return resume(sources, target, family, folder, **kwargs)


def columns(family: str, origin: Mesh, target: Mesh) -> tuple[object, ...]:
    """What meets by twos: the family, both tensor-parallel sizes, and the target's stage."""
    return family, origin[0], target[0], target[2]


ALL_PAIRS = [(f, a, b) for f in ("gpt", "llama") for a in MESHES for b in MESHES]
PAIRS = covering([pair for pair in ALL_PAIRS if pair[1] in SOURCES and pair[1] != pair[2]], columns)
LOSSES = PAIRS[::2]


def show(value: object) -> str:
    return "tp{}dp{}z{}".format(*value) if isinstance(value, tuple) else str(value)


def test_every_two_values_meet() -> None:
    """The law of the pairs: whatever two of these an engine can have, some pair has."""
    possible = [pair for pair in ALL_PAIRS if pair[1] != pair[2]]
    assert set().union(*(met(columns(*pair)) for pair in PAIRS)) == set().union(
        *(met(columns(*pair)) for pair in possible)
    )
    assert len(PAIRS) <= 12 and len(LOSSES) == 6


@pytest.mark.cases()
@pytest.mark.parametrize(("family", "origin", "target"), PAIRS, ids=show)
def test_pair(sources: Sources, family: str, origin: Mesh, target: Mesh) -> None:
    tied, losses = family == "gpt", (family, origin, target) in LOSSES
    folder = source(sources, origin, family, tied=tied)
    more = LOSS_STEPS if losses else 0
    found = resume(sources, target, family, folder, more=more, tied=tied)
    check(found, 1e-5 if losses else None)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "origin", "target"), every(ALL_PAIRS), ids=show)
def test_every_pair(sources: Sources, family: str, origin: Mesh, target: Mesh) -> None:
    check(pair(sources, origin, target, family, tied=family == "gpt"))


@pytest.mark.parametrize(("groups", "heads"), [(1, 4), (2, 4), (4, 4), (2, 8)])
@pytest.mark.parametrize(
    ("origin", "target"), [((4, 1, 1), (1, 1, 0)), ((1, 1, 0), (4, 1, 3))], ids=show
)
def test_key_value_groups_fewer_than_equal_to_and_more_than_tp(
    sources: Sources, groups: int, heads: int, origin: Mesh, target: Mesh
) -> None:
    check(pair(sources, origin, target, "llama", groups=groups, heads=heads))


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gpt", False)])
def test_tied_and_untied(sources: Sources, family: str, tied: bool) -> None:
    check(pair(sources, (2, 2, 3), (1, 2, 2), family, tied=tied))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("origin", "target"), [((2, 2, 1), (4, 1, 3)), ((2, 2, 3), (1, 2, 0))], ids=show
)
def test_low_precision(sources: Sources, dtype: str, origin: Mesh, target: Mesh) -> None:
    check(pair(sources, origin, target, "llama", dtype=dtype))


@pytest.mark.parametrize("zero", [1, 3])
def test_sequence_parallelism(sources: Sources, zero: int) -> None:
    """Saved with it, resumed without it, and the losses of the run go on: its norm gradients were
    right."""
    folder = source(sources, (2, 2, zero), "llama", sequence_parallel=True)
    found = resume(sources, (1, 2, 1), "llama", folder, more=LOSS_STEPS)
    check(found, 1e-5)


@pytest.mark.parametrize(
    "fault",
    ["gate and up swapped", "two key-value groups swapped", "one group's weight decay", "one step"],
)
def test_the_comparison_sees_a_planted_fault(sources: Sources, fault: str) -> None:
    how = {"plant": fault, "tags": ("filled",)}
    found = resume(sources, (1, 1, 0), "llama", source(sources, (2, 2, 1), "llama"), **how)
    assert found[0]["differences"]["filled"] != []


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize(
    ("origin", "target"),
    [
        ((2, 2, 1), (1, 2, 3)),
        ((2, 2, 3), (4, 1, 1)),
        ((2, 1, 1), (1, 1, 2)),
        ((1, 2, 1), (2, 1, 1)),
    ],
    ids=show,
)
def test_s6_s7_stock_checkpoints_with_a_family(
    sources: Sources, family: str, origin: Mesh, target: Mesh
) -> None:
    """S6: a forgotten row-parallel pattern joins on the wrong dim. S7, and the fork: a tp=1 source
    without patterns is cut wrongly at tp=2. Here layouts come from the family on both sides,
    whatever the source wrote."""
    folder = source(sources, origin, family, attach=False, more=0)
    assert not list(Path(folder).rglob("ucp_manifest.json"))
    check(resume(sources, target, family, folder))


def attempt(sources: Sources, mesh: Mesh, setup: Mega, folder: str, **kwargs: Any) -> list[dict]:
    options = {"attach": False, "family": setup.family, **kwargs}
    return sources.ranks.run(mesh[0] * mesh[1], kinds.attempt, setup, folder, "trained", **options)


def expect(found: list[dict], kind: str, *words: str) -> None:
    for rank in found:
        assert rank["error"] == kind, rank["message"]
        assert all(word in rank["message"] for word in (*words, "what to do:")), rank["message"]
        assert rank["unchanged"]


def test_tensor_parallel_files_without_family_and_manifest(sources: Sources) -> None:
    """The model of the engine says how it is cut."""
    folder = source(sources, (2, 2, 1), "llama", attach=False, more=0)
    for rank in attempt(sources, (2, 1, 1), Mega("llama", 2, 1), folder, family=None):
        assert rank["error"] is None


def test_a_family_that_does_not_fit(sources: Sources) -> None:
    folder, mesh = source(sources, (2, 2, 1), "llama"), (2, 1, 1)
    found = attempt(sources, mesh, Mega("gpt", 2, 1), folder, family="llama")
    expect(found, "UsageError", "no LLaMA")
    found = attempt(sources, mesh, Mega("llama", 2, 1), folder, family="mamba")
    expect(found, "UsageError", "no such family", "gpt, gpt_oss, llama")


WEIGHT = "decoder.layers.0.mlp.linear_fc2.weight"
CHANGES: dict[Any, tuple[str, ...]] = {
    tensor_jobs.unknown_parameter: ("RuleError", "surprise", "nearest", "families/llama.py"),
    tensor_jobs.other_cut: ("LayoutError", "partition_dim", WEIGHT, "expected: 1", "found: 0"),
}


@pytest.mark.cases()
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_contradicts_its_family(sources: Sources, change: Any) -> None:
    """A parameter that no rule matches, and attributes that disagree."""
    folder = source(sources, (2, 2, 1), "llama")
    expect(
        attempt(sources, (2, 1, 1), Mega("llama", 2, 1), folder, change=change), *CHANGES[change]
    )


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"heads": 6, "groups": 6}, "attention heads"),
        ({"ffn": 26}, "ffn_hidden_size"),
        ({"heads": 12, "groups": 3}, "key-value groups"),
    ],
)
def test_a_tp_that_does_not_divide(sources: Sources, change: dict, word: str) -> None:
    setup = Mega("llama", 4, 1, **change)
    found = attempt(sources, (4, 1, 1), setup, source(sources, (2, 2, 1), "llama"))
    expect(found, "LayoutError", word, "use a tensor-parallel size")


def test_a_missing_tensor_parallel_rank(sources: Sources, broken: Any) -> None:
    for name in ("mp_rank_01_model_states.pt", "zero_pp_rank_1_mp_rank_01_optim_states.pt"):
        folder = Path(source(sources, (2, 2, 1), "llama", attach=False, more=0))
        path = folder / "trained" / name
        kept = path.read_bytes()
        path.unlink()
        try:
            found = attempt(sources, (2, 1, 1), Mega("llama", 2, 1), str(folder))
            expect(found, "NotFoundError", "missing")
        finally:
            path.write_bytes(kept)


def test_another_model_size(sources: Sources) -> None:
    folder = source(sources, (2, 2, 1), "llama")
    for change in ({"ffn": 32}, {"layers": 3}, {"layers": 1}, {"tied": True}):
        found = attempt(sources, (2, 1, 1), Mega("llama", 2, 1, **change), folder)
        expect(found, "ModelMismatchError", "parameter:")


def test_the_manifest_names_family_layouts_and_padding(sources: Sources) -> None:
    from megatron_ucp import describe
    from megatron_ucp.core.layout import Shard, ShardNC

    found = describe(Path(source(sources, (2, 2, 1), "llama", true_vocab=45, more=0)) / "trained")
    assert found.family == "llama" and (found.mesh.tp, found.mesh.dp, found.mesh.zero) == (2, 2, 1)
    spec = found.by_name["embedding.word_embeddings.weight"]
    assert spec.extent is not None and (spec.extent.true, spec.extent.stored) == (45, 48)
    assert spec.shape == (48, 16) and spec.layout == Shard("tp", 0)
    assert found.by_name["decoder.layers.1.mlp.linear_fc1.weight"].layout == ShardNC(
        "tp", 0, (24, 24)
    )


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("keep", ["affine map", "patterns"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_stock_tools_keep_working_on_our_saves(
    sources: Sources, tmp_path: Path, family: str, keep: str, before: int, after: int
) -> None:
    """Stock converter and stock load at other tensor-parallel sizes: bit-equal, by the affine map
    and by the patterns alone."""
    folder = tmp_path / "save"
    shutil.copytree(source(sources, (before, 1, 1), family), folder)
    if keep == "patterns":
        patterns_alone(folder)
    path, setup = folder / "universal" / "trained_universal", Mega(family, after, 1, seed=9)
    stock_converted(folder / "trained", path)
    job = kinds.stock_load, setup, str(path), str(folder), "trained", True
    for rank in sources.ranks.run(after, *job):
        assert of_states(rank["differences"]) == []


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("keep", ["patterns", "affine map"])
def test_a_stock_checkpoint_with_patterns_and_no_family(
    sources: Sources, tmp_path: Path, family: str, keep: str
) -> None:
    """Our own save without its manifest is what a stock run with universal_checkpoint_info
    writes. Nothing is left to stock's default: the model of the engine says how it is cut, where no
    map does."""
    folder = tmp_path / "save"
    shutil.copytree(source(sources, (2, 2, 3), family), folder)
    for path in folder.rglob("ucp_manifest.json"):
        path.unlink()
    if keep == "patterns":
        patterns_alone(folder)
    setup = Mega(family, 1, 1, seed=9)
    for rank in sources.resume(2, setup, folder, tags=("trained",), attach=False):
        assert rank["differences"] == {"trained": []}
        assert not any("stock DeepSpeed's default" in note for note in rank["notes"]["trained"])


@pytest.mark.parametrize(("rows", "note"), [(52, "4 rows added as zeros"), (44, "4 rows dropped")])
@pytest.mark.parametrize("target", [(2, 1, 1), (1, 2, 3), (1, 1, 0)], ids=show)
def test_another_padding_of_the_vocabulary(
    sources: Sources, target: Mesh, rows: int, note: str
) -> None:
    folder = source(sources, (2, 2, 1), "llama", true_vocab=41, more=0)
    setup = Mega("llama", target[0], target[2], seed=9, true_vocab=41, vocab=rows)
    for rank in sources.ranks.run(
        target[0] * target[1], tensor_jobs.resize_vocabulary, setup, folder
    ):
        assert "ModelMismatchError" in rank["refusal"] and "1, 2, 3, 4" in rank["refusal"]
        assert rank["wrong"] == [] and rank["compared"] > 30
        assert any("vocabulary resized" in n and note in n for n in rank["notes"])
