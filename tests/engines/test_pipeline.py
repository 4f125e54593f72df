"""Pipeline stages: any number of stages, tensor-parallel size, number of ranks and ZeRO stage to
any other, with and without a pipeline on either side.

The oracle joins stages by the fixed names of a GPTModel and cuts by megatron-core's own attributes.
"""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ucp import describe
from megatron_ucp.reshard.diff import diff
from tests.engines.pipeline_jobs import Staged
from tests.engines.sources import Sources, without_manifest
from tests.engines.test_tensor_parallel import expect

pytestmark = pytest.mark.ranks
JOBS = "tests.engines.pipeline_jobs:"
Mesh = tuple[
    int, int, int, int
]  # stages (0: an engine without a pipeline), tensor-parallel size, data-parallel size, ZeRO
PIPED: list[Mesh] = [
    (pp, tp, dp, zero)
    for pp in (1, 2, 4)
    for tp in (1, 2)
    for dp in (1, 2, 4)
    if pp * tp * dp <= 4
    for zero in (0, 1)
]
WHOLE: list[Mesh] = [(0, tp, dp, zero) for tp in (1, 2) for dp in (1, 2) for zero in (0, 1, 2, 3)]
SOURCES: list[Mesh] = [
    (2, 1, 2, 1),
    (4, 1, 1, 0),
    (2, 2, 1, 1),
    (2, 2, 1, 0),
    (0, 2, 2, 3),
    (0, 1, 2, 1),
]
TARGETS: list[Mesh] = [
    (2, 1, 1, 0),
    (2, 1, 1, 1),
    (2, 1, 2, 0),
    (2, 1, 2, 1),
    (2, 2, 1, 0),
    (2, 2, 1, 1),
    (4, 1, 1, 0),
    (4, 1, 1, 1),
    (1, 2, 2, 1),
    (1, 1, 1, 0),
    (0, 1, 1, 0),
    (0, 2, 2, 1),
    (0, 1, 2, 2),
    (0, 2, 1, 3),
    (0, 1, 4, 3),
    (1, 1, 4, 1),
]
KINDS = [("gpt", True), ("llama", False), ("gpt", False), ("llama", True)]


def ranks_of(mesh: Mesh) -> int:
    return max(mesh[0], 1) * mesh[1] * mesh[2]


def setup(mesh: Mesh, family: str, **kwargs: Any) -> Staged:
    return Staged(family, mesh[1], mesh[3], pp=mesh[0], **kwargs)


def source(
    sources: Sources, mesh: Mesh, family: str, attach: bool = True, more: int = 0, **kwargs: Any
) -> str:
    return sources.get(
        ranks_of(mesh), setup(mesh, family, **kwargs), JOBS + "save", attach=attach, more=more
    )


def resume(
    sources: Sources,
    mesh: Mesh,
    family: str,
    folder: str,
    more: int = 0,
    plant: str = "",
    **kwargs: Any,
) -> list[dict]:
    return sources.ranks.run(
        ranks_of(mesh),
        JOBS + "resume",
        setup(mesh, family, seed=9, **kwargs),
        folder,
        more,
        plant,
        timeout_s=180,
    )


def check(found: list[dict]) -> None:
    for rank in found:
        assert rank["differences"] and all(d == [] for d in rank["differences"].values()), rank[
            "differences"
        ]
        assert all(len(d) > 20 for d in rank["before"].values()), (
            "the engine was equal before the load"
        )


def show(value: object) -> str:
    return "pp{}tp{}dp{}z{}".format(*value) if isinstance(value, tuple) else str(value)


def sampled() -> list[tuple[str, bool, Mesh, Mesh]]:
    """Every target once, every kind of model, each source several times."""
    pairs = []
    for number, target in enumerate(TARGETS):
        others = [s for s in SOURCES if s != target and (s[0] or target[0])]
        pairs.append((*KINDS[number % 4], others[number % len(others)], target))
    return pairs


PAIRS = sampled()


def test_the_sample_is_what_it_says() -> None:
    assert len(PAIRS) >= 16 and {(family, tied) for family, tied, _, _ in PAIRS} == set(KINDS)
    crossings = {(a[0] > 0, b[0] > 0) for _, _, a, b in PAIRS}
    assert crossings == {(True, True), (True, False), (False, True)}
    assert {a for _, _, a, _ in PAIRS} == set(SOURCES)


@pytest.mark.parametrize(("family", "tied", "origin", "target"), PAIRS, ids=show)
def test_pair(sources: Sources, family: str, tied: bool, origin: Mesh, target: Mesh) -> None:
    found = resume(sources, target, family, source(sources, origin, family, tied=tied), tied=tied)
    check(found)
    replicas = tied and origin[0] > 1
    assert all(
        ("replicas not compared: embedding.word_embeddings.weight" in notes) == replicas
        for rank in found
        for notes in rank["notes"].values()
    )


EVERY = [
    (family, tied, a, b)
    for family, tied in KINDS
    for a in PIPED + WHOLE
    for b in PIPED + WHOLE
    if a[0] or b[0]
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied", "origin", "target"), random.Random(5).sample(EVERY, 60), ids=show
)
def test_more_pairs(sources: Sources, family: str, tied: bool, origin: Mesh, target: Mesh) -> None:
    check(resume(sources, target, family, source(sources, origin, family, tied=tied), tied=tied))


@pytest.mark.parametrize(
    ("family", "origin", "target"),
    [
        ("gpt", (2, 1, 2, 1), (0, 1, 2, 3)),
        ("llama", (0, 1, 2, 1), (2, 2, 1, 0)),
        ("gpt", (4, 1, 1, 0), (2, 1, 2, 1)),
    ],
    ids=show,
)
def test_the_losses_of_the_run_go_on(
    sources: Sources, family: str, origin: Mesh, target: Mesh
) -> None:
    tied = family == "gpt"
    found = resume(
        sources,
        target,
        family,
        source(sources, origin, family, more=20, tied=tied),
        more=20,
        tied=tied,
    )
    check(found)
    assert all(rank["loss"] <= 1e-5 for rank in found)


@pytest.mark.parametrize(
    ("before", "after"),
    [((1, 1, 3, 1), (1, 5)), ((1, 5), (2, 1, 2, 1)), ((5, 1), "uniform")],
    ids=str,
)
def test_uneven_stages(sources: Sources, before: Any, after: Any) -> None:
    """A stage with the embedding alone has one parameter group, so do the norm and head of an
    untied LLaMA's."""
    origin, target = (
        (len(p) if isinstance(p, tuple) else 4, 1, 1, zero) for p, zero in ((before, 1), (after, 0))
    )
    check(
        resume(
            sources,
            target,
            "llama",
            source(sources, origin, "llama", partition=before),
            partition=after,
        )
    )


@pytest.mark.parametrize(
    ("dtype", "sums", "origin", "target"),
    [
        ("bf16", False, (2, 1, 2, 0), (0, 1, 2, 3)),
        ("bf16", True, (2, 2, 1, 1), (2, 1, 2, 1)),
        ("bf16", False, (0, 1, 2, 3), (2, 1, 2, 0)),
        ("fp16", False, (2, 1, 1, 0), (1, 1, 2, 0)),
    ],
    ids=show,
)
def test_low_precision(
    sources: Sources, dtype: str, sums: bool, origin: Mesh, target: Mesh
) -> None:
    """The first and the third are BF16_Optimizer's at ZeRO 0, which stock DeepSpeed writes and
    can't read back."""
    folder = source(sources, origin, "gpt", tied=True, dtype=dtype, fp32_sums=sums)
    check(resume(sources, target, "gpt", folder, tied=True, dtype=dtype, fp32_sums=sums))


@pytest.mark.parametrize(
    ("origin", "target"), [((2, 1, 2, 1), (0, 1, 2, 3)), ((0, 2, 1, 2), (2, 2, 1, 0))], ids=show
)
def test_frozen_parameters_and_buffers(sources: Sources, origin: Mesh, target: Mesh) -> None:
    check(
        resume(
            sources,
            target,
            "gpt",
            source(sources, origin, "gpt", tied=True, extras=True),
            tied=True,
            extras=True,
        )
    )


@pytest.mark.parametrize(
    ("family", "origin", "target", "dtype"),
    [
        ("gpt", (4, 1, 1, 0), (2, 2, 1, 1), "fp32"),
        ("llama", (2, 2, 1, 1), (0, 1, 2, 2), "fp32"),
        ("llama", (2, 2, 1, 0), (2, 1, 1, 0), "fp32"),
        ("gpt", (2, 1, 2, 0), (2, 2, 1, 0), "bf16"),
        ("gpt", (0, 2, 1, 0), (4, 1, 1, 1), "fp32"),
    ],
    ids=show,
)
def test_stock_checkpoints_with_a_family(
    sources: Sources, family: str, origin: Mesh, target: Mesh, dtype: str
) -> None:
    tied = family == "gpt"
    folder = source(sources, origin, family, attach=False, tied=tied, dtype=dtype)
    assert not list(Path(folder).rglob("ucp_manifest.json"))
    check(resume(sources, target, family, folder, tied=tied, dtype=dtype))


@pytest.mark.parametrize(
    "fault",
    ["two layers swapped", "one bit of a later stage", "one group's weight decay", "one step"],
)
def test_the_comparison_sees_a_planted_fault(sources: Sources, fault: str) -> None:
    found = resume(
        sources, (2, 1, 1, 0), "llama", source(sources, (2, 2, 1, 1), "llama"), plant=fault
    )
    assert all(rank["differences"]["filled"] for rank in found)


# ------------------------------------------------ what is refused, and what is written

STOCK: tuple[Mesh, str] = (2, 2, 1, 1), "gpt"


def attempt(sources: Sources, folder: Path, mesh: Mesh = (2, 1, 1, 1), **kwargs: Any) -> list[dict]:
    options = {key: kwargs.pop(key) for key in ("change", "given") if key in kwargs}
    return sources.ranks.run(
        ranks_of(mesh),
        JOBS + "attempt",
        setup(mesh, "gpt", **{"tied": True, **kwargs}),
        str(folder),
        timeout_s=120,
        **options,
    )


@pytest.fixture
def stock(sources: Sources, tmp_path: Path) -> Path:
    """A copy of a stock pipeline checkpoint with tied embeddings, to be damaged."""
    shutil.copytree(source(sources, *STOCK, attach=False, tied=True), tmp_path / "stock")
    return tmp_path / "stock"


def edit(path: Path, change: Any) -> None:
    state = torch.load(path, weights_only=False)
    change(state)
    torch.save(state, path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("layer_02-model_01-model_states.pt", ("layer file", "position 2, tensor-parallel rank 1")),
        ("layer_0*-model_01-model_states.pt", ("layer file", "tensor-parallel rank 1")),
        ("mp_rank_03_model_states.pt", ("model file", "model-parallel ranks 0 to 3")),
        ("zero_pp_rank_0_mp_rank_02_optim_states.pt", ("optimizer file", "model-parallel rank 2")),
    ],
)
def test_a_missing_file(sources: Sources, stock: Path, name: str, words: tuple[str, ...]) -> None:
    for path in (stock / "trained").glob(name):
        path.unlink()
    expect(attempt(sources, stock), "NotFoundError", *words)


def test_a_gap_in_the_layers(sources: Sources, stock: Path) -> None:
    for path in (stock / "trained").glob("layer_01-*"):
        path.unlink()
    expect(attempt(sources, stock), "NotFoundError", "layer file", "position 1")


def test_a_layer_file_of_another_model(sources: Sources, stock: Path) -> None:
    other = Path(source(sources, *STOCK, attach=False, tied=True, ffn=32)) / "trained"
    shutil.copy(other / "layer_01-model_01-model_states.pt", stock / "trained")
    expect(
        attempt(sources, stock),
        "ForeignFileError",
        "layer file differs",
        "decoder.layers.0.mlp.linear_fc1",
    )


def test_files_of_another_mesh(sources: Sources, stock: Path) -> None:
    other = Path(source(sources, (2, 1, 2, 1), "gpt", attach=False, tied=True)) / "trained"
    shutil.copy(other / "mp_rank_01_model_states.pt", stock / "trained")
    expect(attempt(sources, stock), "ForeignFileError", "model file differs")


def test_a_layer_file_of_another_run(sources: Sources, stock: Path) -> None:
    def other(state: dict) -> None:
        state["mlp.linear_fc1.weight"] = state["mlp.linear_fc1.weight"] + 1

    edit(stock / "trained" / "layer_02-model_01-model_states.pt", other)
    expect(
        attempt(sources, stock),
        "ForeignFileError",
        "master weights",
        "decoder.layers.1.mlp.linear_fc1.weight",
    )


def test_a_parameter_that_two_stages_hold_without_a_tie(sources: Sources, stock: Path) -> None:
    def steal(state: dict) -> None:
        shapes = state["param_shapes"][0]
        taken = next(name for name in shapes if name.endswith("mlp.linear_fc1.weight"))
        state["param_shapes"][0] = type(shapes)(
            ("1.mlp.linear_fc1.weight" if name == taken else name, shape)
            for name, shape in shapes.items()
        )

    for rank in ("02", "03"):
        edit(stock / "trained" / f"mp_rank_{rank}_model_states.pt", steal)
    expect(
        attempt(sources, stock),
        "ModelMismatchError",
        "not tied",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "stages 0, 1",
    )


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("step", ("different steps", "step 2.0", "3.0")),
        ("weight_decay", ("different hyper-parameters", "weight_decay 0.1")),
    ],
)
def test_a_tie_that_went_apart(
    sources: Sources, stock: Path, what: str, words: tuple[str, ...]
) -> None:
    def apart(state: dict) -> None:
        base = state["optimizer_state_dict"]["base_optimizer_state"]
        if what == "step":
            base["state"][0]["step"] += 1
        else:
            base["param_groups"][0]["weight_decay"] = 0.3

    for path in (stock / "trained").glob("*mp_rank_0[23]_optim_states.pt"):
        edit(path, apart)
    expect(
        attempt(sources, stock), "StateMismatchError", "embedding.word_embeddings.weight", *words
    )


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"layers": 4}, "NotFoundError"),
        ({"layers": 2}, "ModelMismatchError"),
        ({"ffn": 32}, "ModelMismatchError"),
    ],
)
def test_another_model_size(sources: Sources, stock: Path, change: dict, kind: str) -> None:
    expect(attempt(sources, stock, **change), kind)
    ours = Path(source(sources, *STOCK, tied=True))
    expect(attempt(sources, ours, **change), "ModelMismatchError", "parameter:")


def test_no_family(sources: Sources, stock: Path) -> None:
    expect(
        attempt(sources, stock, (2, 1, 1, 1), given=None),
        "UnsupportedError",
        "pipeline",
        "no family",
    )
    expect(
        attempt(sources, stock, (0, 1, 1, 1), given=None),
        "UnsupportedError",
        "pipeline checkpoint",
        "needs a family",
    )


def test_the_manifest_of_a_save(sources: Sources) -> None:
    folder = Path(source(sources, *STOCK, tied=True)) / "trained"
    found = describe(folder)
    assert str(found.mesh) == "tp=2,pp=2,dp=1,zero=1" and found.family == "gpt"
    assert {b.at for b in found.buffers} == {(("pp", 0),), (("pp", 1),)}
    assert [found.buffers[b].at for b, _ in found.holders["embedding.word_embeddings.weight"]] == [
        (("pp", 0),),
        (("pp", 1),),
    ]
    assert found.names["2.mlp.linear_fc1.weight"] == "decoder.layers.1.mlp.linear_fc1.weight"
    assert {f.name for f in found.files} >= {p.name for p in folder.glob("*_states.pt")}
    assert len([f for f in found.files if f.name.startswith("layer_")]) == 2 * 5


def test_diff_needs_no_family_for_our_own_saves(sources: Sources, tmp_path: Path) -> None:
    """The same run through another mesh and back is equal; with a byte changed it is not."""
    folder = source(sources, *STOCK, tied=True)
    out = tmp_path / "again"
    sources.ranks.run(
        4,
        JOBS + "reshard",
        setup((4, 1, 1, 0), "gpt", tied=True, partition=(1, 2, 2, 1), seed=9),
        folder,
        str(out),
    )
    assert diff(Path(folder) / "trained", out / "again") == []
    different = diff(Path(folder) / "trained", Path(folder) / "filled")
    assert {d.parameter for d in different} >= {
        "decoder.layers.1.mlp.linear_fc1.weight",
        "decoder.final_layernorm.bias",
    }


def test_without_its_manifest_our_save_is_read_like_stock(sources: Sources, tmp_path: Path) -> None:
    folder = tmp_path / "save"
    shutil.copytree(source(sources, (2, 1, 2, 1), "gpt", tied=True), folder)
    check(resume(sources, (0, 2, 1, 1), "gpt", str(without_manifest(folder)), tied=True))


def test_older_file_names_and_no_word_about_dimensions(sources: Sources, tmp_path: Path) -> None:
    """Without a topology's "model" axis layer files have no rank in their names, and older versions
    say no dimensions."""
    for number, mesh in enumerate([(2, 1, 2, 1), (2, 2, 1, 1)]):
        folder = tmp_path / str(number)
        shutil.copytree(source(sources, mesh, "gpt", attach=False, tied=True), folder)
        for path in folder.rglob("mp_rank_*_model_states.pt"):
            edit(path, lambda state: state.pop("checkpoint_parallel_dimensions"))
        for path in folder.rglob("layer_*-model_00-*.pt") if mesh[1] == 1 else ():
            path.rename(path.with_name(path.name.replace("-model_00", "")))
        check(resume(sources, (0, 1, 2, 1), "gpt", str(folder), tied=True))


def test_the_same_mesh_gets_its_random_states_back(sources: Sources) -> None:
    found = resume(sources, STOCK[0], "gpt", source(sources, *STOCK, tied=True), tied=True)
    check(found)
    assert not [
        note
        for rank in found
        for notes in rank["notes"].values()
        for note in notes
        if "random" in note
    ]


def test_a_failure_while_bytes_move(sources: Sources) -> None:
    """One rank's disk fails: every rank says so, and no rank's engine trains on or saves."""
    for rank in sources.ranks.run(
        4,
        JOBS + "fails_on_rank",
        setup((2, 2, 1, 1), "gpt", tied=True, seed=9),
        source(sources, *STOCK, tied=True),
        2,
    ):
        assert rank == {"error": "DamagedFileError", "refuses": ["EngineUnusableError"] * 2}
