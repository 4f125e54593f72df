"""Plans: what they predict is what a load reads, on paper it is what arithmetic says, and the verb
shows and refuses it."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from benchmarks.paper import paper_manifest, paper_sizes, state_file
from megatron_ucp.cli import main
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Copy
from megatron_ucp.errors import LayoutError
from megatron_ucp.families import find_family
from megatron_ucp.families.family import Sizes
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.pt.file import PtFile
from megatron_ucp.reshard import execute
from megatron_ucp.reshard import plan as preview
from megatron_ucp.reshard.target import Conversion, target_manifest
from tests.engines.model import Setup
from tests.engines.sources import Sources
from tests.engines.tensor_jobs import Mega, Staged
from tests.reshard import preview_jobs
from tests.reshard.test_execute import COLUMNS, ROWS, plan_of, where_of

READS = preview_jobs.reads
SPLIT = {"zero_optimization": {"sub_group_size": 30}, "bf16": {"enabled": True}}


# ------------------------------------------------ and a real load

# (ranks of the source, source, ranks of the target, target, its DeepSpeed config)
NETS: dict[str, tuple[int, Setup, int, Setup, Any]] = {
    "ZeRO-1 to ZeRO-3": (2, Setup(1, "bf16"), 4, Setup(3, "bf16"), None),
    "ZeRO-3 to ZeRO-1": (4, Setup(3, "bf16"), 2, Setup(1, "bf16"), None),
    "the same mesh": (2, Setup(1, "bf16"), 2, Setup(1, "bf16"), None),
    "ZeRO-0 to ZeRO-2": (2, Setup(0, "bf16"), 4, Setup(2, "bf16"), None),
    "ZeRO-3 to ZeRO-0": (4, Setup(3, "fp32"), 2, Setup(0, "fp32"), None),
    "into sub-groups": (
        2,
        Setup(1, "bf16"),
        2,
        Setup(3, "bf16", zero_config=(("sub_group_size", 30),)),
        SPLIT,
    ),
}
# tp, pp (0: an engine without a pipeline), dp, ZeRO
STAGES: dict[str, tuple[Staged, int, tuple[int, int, int, int]]] = {
    "tp=2 to ZeRO-3": (Staged("llama", 2, 1, layers=2), 4, (1, 0, 4, 3)),
    "dp=4 to tp=4": (Staged("gpt", 1, 1, layers=2), 4, (4, 0, 1, 1)),
    "ZeRO-3 to tp=2": (Staged("llama", 1, 3, layers=2), 2, (2, 0, 2, 1)),
    "two stages to none": (Staged("llama", 1, 1, pp=2), 4, (2, 0, 2, 3)),
    "none to four stages, tied": (Staged("gpt", 1, 3, pp=0, tied=True), 2, (1, 4, 1, 1)),
    "frozen norms and buffers in stages": (
        Staged("llama", 1, 1, pp=2, extras=True),
        2,
        (1, 3, 1, 1),
    ),
    "two stages to two of tp=2": (Staged("gpt", 1, 1, pp=2, tied=True), 4, (2, 2, 1, 1)),
}


def compare(predicted: preview.Preview, loads: list[dict[str, Any]]) -> None:
    assert [one.rank for one in predicted.ranks] == list(range(len(loads)))
    for one, load in zip(predicted.ranks, loads, strict=True):
        assert dict(one.files) == load["files"] and one.read_bytes == load["read_bytes"] > 0
        assert (one.copies, one.state_bytes) == (load["copies"], load["state_bytes"])
        assert one.peak_bytes == one.state_bytes + execute.STAGING_BYTES


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("universal", [False, True])
def test_a_plan_is_what_a_load_reads(
    sources: Sources, tmp_path: Path, name: str, universal: bool
) -> None:
    before, source, after, target, config = NETS[name]
    folder = Path(sources.get(before, source)) / "filled"
    if universal:
        ucp.convert(folder, tmp_path / "universal", to="universal")
        folder = tmp_path / "universal"
    found = preview.plan(folder, Target(Mesh(dp=after, zero=target.zero)), ds_config=config)
    compare(found, sources.ranks.run(after, READS, replace(target, seed=9), str(folder)))
    assert {file for one in found.ranks for file in one.files} <= {
        p.relative_to(folder).as_posix() for p in folder.rglob("*.pt")
    }


@pytest.mark.parametrize("name", STAGES)
def test_a_plan_of_other_axes_is_what_a_load_reads(sources: Sources, name: str) -> None:
    source, ranks, (tp, pp, dp, zero) = STAGES[name]
    folder = Path(sources.get(ranks, source, more=0)) / "filled"
    found = preview.plan(
        folder, Target(Mesh(tp=tp, pp=pp or 1, dp=dp, zero=zero), stages="uniform" if pp else None)
    )
    setup = replace(source, tp=tp, pp=pp, zero=zero, seed=9)
    compare(found, sources.ranks.run(tp * (pp or 1) * dp, READS, setup, str(folder)))


def test_the_plan_of_another_stage_is_another_plan(sources: Sources) -> None:
    """What shows that `compare` compares."""
    folder = str(Path(sources.get(2, Setup(1, "bf16"))) / "filled")
    loads = sources.ranks.run(2, READS, Setup(1, "bf16", seed=9), folder)
    for target in (Mesh(dp=2, zero=3), Mesh(dp=2, zero=0)):
        with pytest.raises(AssertionError):
            compare(preview.plan(folder, Target(target)), loads)
    compare(preview.plan(folder, Target(Mesh(dp=2, zero=2))), loads)  # cut alike


def test_checksums_read_gaps_besides(sources: Sources) -> None:
    """What nobody needs of a record is padding; the plan does not count it."""
    folder = str(Path(sources.get(2, Setup(1, "bf16"))) / "filled")
    found = preview.plan(folder, Target(Mesh(dp=4, zero=3)))
    read = sum(
        load["read_bytes"]
        for load in sources.ranks.run(4, READS, Setup(3, "bf16", seed=9), folder, checksums=True)
    )
    assert (
        0 <= read - sum(one.read_bytes for one in found.ranks) <= 9 * 8
    )  # 3 records of 3 buffers: at most two elements each


@pytest.mark.parametrize(
    ("shape", "source", "target"),
    [
        ((ROWS, 256), (0, (COLUMNS, 1)), (0, (256, 1))),  # row by row
        ((ROWS, 1), (5, (COLUMNS, 1)), (0, (1, 1))),  # one element of each row
        ((8, 256), (128, (COLUMNS, 1)), (0, (256, 1))),  # small: over the gaps
        ((2, 3), (0, (COLUMNS, 1)), (0, (3, 1))),
        ((100,), (7, (1,)), (0, (1,))),
        ((ROWS, COLUMNS), (0, (COLUMNS, 1)), (0, (COLUMNS, 1))),
    ],
)
def test_bytes_of_one_copy(
    tmp_path: Path, shape: tuple[int, ...], source: Any, target: Any
) -> None:
    torch.save(torch.zeros(ROWS, COLUMNS), tmp_path / "x.pt")
    plan, out = plan_of(shape, source, target), torch.empty(ROWS * COLUMNS)
    op = plan.ops[0]
    assert isinstance(op, Copy)
    with PtFile(tmp_path / "x.pt") as file:
        counts = execute.execute(plan, lambda _: where_of(file), lambda _: out)
    assert preview.read_size(op, op.source, 4) == counts.read_bytes


# ------------------------------------------------ arithmetic

NET_ELEMS, NET_FROZEN_BYTES, NET_BUFFER_BYTES = (
    11 * 7 + 13 * 7 + 13 + 7 * 13 + 7 + 7 + 7 + 1,
    7 * 7 * 4,
    7 * 4 + 8,
)


@pytest.mark.parametrize(("dp", "zero"), [(1, 1), (2, 1), (4, 2), (4, 3), (3, 3)])
def test_the_ranks_read_every_state_once(sources: Sources, dp: int, zero: int) -> None:
    """Masters and two moments; each rank needs the buffers, and the frozen parameter that only
    ZeRO-3 cuts."""
    found = preview.plan(
        sources.get(2, Setup(1, "fp32")), Target(Mesh(dp=dp, zero=zero)), tag="filled"
    )
    assert found.stored_bytes == 12 * NET_ELEMS + NET_FROZEN_BYTES + NET_BUFFER_BYTES
    copies = dp * NET_BUFFER_BYTES + (1 if zero == 3 else dp) * NET_FROZEN_BYTES
    assert sum(one.read_bytes for one in found.ranks) == 12 * NET_ELEMS + copies
    assert sum(one.state_bytes for one in found.ranks) >= 12 * NET_ELEMS + copies  # padding


def on_paper(
    family: str, sizes: Sizes, source: Mesh, target: Target, config: Any = None
) -> preview.Preview:
    """The plan of a model and meshes that do not exist."""
    whole = paper_manifest(find_family(family), sizes)
    layers = find_family(family).layers
    stages = layers([spec.name for spec in whole.params]) if layers else None

    def on(one: Target, config: Any) -> Manifest:
        one = replace(one, dtype="bfloat16", stages="layers")
        return target_manifest(Conversion(whole, one.completed(config), family, stages))

    held = on(Target(source), {})
    return preview.of_manifests(held, on(target, config or {}), lambda slot: state_file(held, slot))


# LLaMA 3 with 70 billion parameters
SIZES = "layers=80,hidden=8192,heads=64,groups=8,ffn=28672,vocab=128256"
LAYER = 8192 * (64 + 2 * 8) * 128 + 8192 * 8192 + 3 * 8192 * 28672
CUT, WHOLE = 80 * LAYER + 2 * 128256 * 8192, (2 * 80 + 1) * 8192


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("tp=8,pp=4,dp=32,zero=1", "tp=4,pp=8,dp=32,zero=1"),
        ("tp=8,pp=4,dp=32,zero=1", "dp=1024,zero=2"),
    ],
)
def test_a_plan_of_1024_ranks(source: str, target: str) -> None:
    sizes = paper_sizes("llama", SIZES)
    found = on_paper("llama", sizes, Mesh.parse(source), Target(Mesh.parse(target)))
    tp = Mesh.parse(target).tp
    assert CUT + WHOLE == 70_553_706_496 and len(found.ranks) == 1024
    assert found.stored_bytes == 12 * (CUT + WHOLE)  # fp32 masters and two moments
    assert sum(rank.read_bytes for rank in found.ranks) == 12 * (
        CUT + tp * WHOLE
    )  # norms are whole on every tp rank
    assert all(rank.read_bytes == sum(rank.files.values()) for rank in found.ranks)


@pytest.mark.parametrize(
    ("family", "tied", "biases"), [("gpt", 0, 1), ("gpt", 1, 1), ("llama", 0, 0)]
)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_small_model_on_paper(family: str, tied: int, biases: int, zero: int) -> None:
    hidden, layers, vocab, ffn, tp, dp = 12, 3, 40, 48, 2, 3
    gate = 2 if family == "llama" else 1
    given = f"layers={layers},hidden={hidden},heads=4,vocab={vocab},tied={tied}"
    sizes = paper_sizes(family, given + (",positions=1024" if family == "gpt" else ""))
    found = on_paper(family, sizes, Mesh(tp=4, dp=2, zero=1), Target(Mesh(tp=tp, dp=dp, zero=zero)))
    cut = layers * (hidden * hidden * 4 + (gate + 1) * hidden * ffn) + (2 - tied) * vocab * hidden
    cut += layers * biases * (3 * hidden + ffn)
    whole = (2 * layers + 1) * hidden * (1 + biases) + biases * (
        layers * 2 * hidden + 1024 * hidden
    )
    assert found.stored_bytes == 12 * (cut + whole)
    assert sum(one.read_bytes for one in found.ranks) == 12 * (cut + tp * whole) * (
        dp if zero == 0 else 1
    )


def test_a_plan_takes_the_settings_of_the_job() -> None:
    """Gaps after parameters make the buffers longer, and nothing else is read."""
    sizes, source = (
        paper_sizes("gpt", "layers=2,hidden=12,heads=4,vocab=30,positions=1024"),
        Mesh(dp=2, zero=1),
    )
    plain = on_paper("gpt", sizes, source, Target(Mesh(dp=2, zero=2)))
    given = on_paper("gpt", sizes, source, Target(Mesh(dp=2, zero=2), alignment=True))
    said = on_paper(
        "gpt",
        sizes,
        source,
        Target(Mesh(dp=2, zero=2)),
        {"zero_optimization": {"parameter_alignment": True}},
    )
    states, reads = [
        [sum(getattr(one, what) for one in found.ranks) for found in (plain, given, said)]
        for what in ("state_bytes", "read_bytes")
    ]
    assert states[0] < states[1] and given == said and len(set(reads)) == 1


# ------------------------------------------------ the verb


def test_text_and_json(sources: Sources, capsys: pytest.CaptureFixture[str]) -> None:
    folder = sources.get(2, Setup(1, "bf16"))
    assert main(["plan", folder, "--tag", "filled", "--mesh", "dp=4,zero=3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    head = {"schema_version", "exit_code"}
    assert found.keys() - head == {"source_mesh", "mesh", "ranks", "stored_bytes", "notes"}
    meshes = [Mesh(**found[name]) for name in ("source_mesh", "mesh")]
    assert meshes == [Mesh(dp=2, zero=1), Mesh(dp=4, zero=3)] and found["notes"] == []
    first = found["ranks"][0]
    assert first.keys() == {
        "rank",
        "coord",
        "files",
        "copies",
        "state_bytes",
        "peak_bytes",
        "read_bytes",
    }
    assert first["coord"].keys() == {"tp", "pp", "cp", "sp", "dp"}
    assert [rank["coord"]["dp"] for rank in found["ranks"]] == [0, 1, 2, 3]
    assert set(first["files"]) <= {path.name for path in (Path(folder) / "filled").iterdir()}
    assert main(["plan", folder, "--tag", "filled", "--mesh", "dp=4,zero=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tp=1,pp=1,dp=2,zero=1  to  tp=1,pp=1,dp=4,zero=3" and len(lines) == 7
    total = sum(rank["read_bytes"] for rank in found["ranks"])
    times = total / found["stored_bytes"]
    assert (
        lines[-1]
        == f"all ranks read {total / 1e6:,.1f} MB, {times:.3f} times the states of the checkpoint"
    )


def test_a_table_of_many_ranks_is_cut(sources: Sources, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", sources.get(2, Setup(1, "bf16")), "--mesh", "dp=40,zero=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 32 + 2 and lines[-2] == "and 8 ranks more: --json has them all"


@pytest.mark.parametrize("mesh", ["dp=3,zero=1", "dp=1"])
def test_a_picture(sources: Sources, tmp_path: Path, mesh: str) -> None:
    from matplotlib.image import imread

    words = ["plan", sources.get(2, Setup(1, "bf16")), "--mesh", mesh]
    assert main([*words, "--picture", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = torch.from_numpy(imread(tmp_path / "plan.png"))
    assert len(torch.unique(pixels.reshape(-1, pixels.shape[-1]), dim=0)) > 8


def test_a_picture_without_matplotlib(
    sources: Sources,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = ["plan", sources.get(2, Setup(1, "bf16")), "--mesh", "dp=2,zero=1"]
    assert main([*words, "--picture", str(tmp_path / "plan.png")]) == 2
    assert "a picture needs matplotlib" in capsys.readouterr().err and not list(tmp_path.iterdir())


REFUSALS: list[tuple[str, list[str]]] = [
    ("a plan is for one mesh", ["{llama}"]),
    ("no tag folder", ["{tmp}", "--mesh", "dp=2"]),
    ("does not divide attention heads", ["{llama}", "--mesh", "tp=8"]),
    ("ZeRO 0 and 1 only", ["{llama}", "--mesh", "pp=2,dp=2,zero=3"]),
    ("this axis is not converted", ["{llama}", "--mesh", "ep=2,dp=2,zero=1"]),
    ("this is no mesh", ["{llama}", "--mesh", "dp=0"]),
    (
        "the picture can't be written",
        ["{llama}", "--mesh", "dp=2", "--picture", "{tmp}/none/plan.png"],
    ),
    (
        "the picture can't be written",
        ["{llama}", "--mesh", "dp=2", "--picture", "{tmp}/plan.docx"],
    ),
    ("there is no such file", ["{llama}", "--mesh", "dp=2", "--ds-config", "{tmp}/none.json"]),
    ("--simulate", ["{llama}", "--mesh", "dp=2", "--simulate", "llama"]),
    ("--rates", ["{llama}", "--mesh", "dp=2", "--rates", "storage=2GB/s"]),
]


@pytest.mark.parametrize(("words", "arguments"), REFUSALS, ids=range(len(REFUSALS)))
def test_refused_with_a_message(
    sources: Sources,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: str,
    arguments: list[str],
) -> None:
    places = {"tmp": tmp_path, "llama": sources.get(4, Mega("llama", 2, 1), more=0)}
    assert main(["plan", *(argument.format(**places) for argument in arguments)]) == 2
    out, message = capsys.readouterr()
    assert (
        out == ""
        and message.startswith("megatron-ucp: ")
        and words in message
        and "Traceback" not in message
    )


def test_refused_for_a_checkpoint(sources: Sources, capsys: pytest.CaptureFixture[str]) -> None:
    plain, llama = (
        sources.get(2, Setup(1, "bf16")),
        sources.get(4, Mega("llama", 2, 1), more=0),
    )
    for folder, mesh, words in (
        (plain, "tp=2", "nobody declared"),
        (plain, "pp=2", "not known"),
        (llama, "tp=5", "does not divide attention heads"),
    ):
        assert main(["plan", folder, "--mesh", mesh]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("target", ["dp=8,ep=4,zero=1", "dp=4,ep=2,etp=2,tp=2", "dp=8,zero=3"])
def test_a_mixture_on_paper(target: str) -> None:
    sizes = paper_sizes("mixtral", "layers=2,hidden=64,heads=4,vocab=256,experts=4")
    source = Mesh(dp=4, ep=2, zero=1)
    found = on_paper("mixtral", sizes, source, Target(Mesh.parse(target)))
    # every rank its own part; what tensor parallelism does not cut both of its ranks read
    read = sum(rank.read_bytes for rank in found.ranks)
    assert (read == found.stored_bytes) == ("tp=2" not in target)
    with pytest.raises(LayoutError, match="does not divide the experts"):
        on_paper("mixtral", sizes, source, Target(Mesh(dp=3, ep=3, zero=1)))


@pytest.mark.parametrize("tp", [3, 8])
def test_heads_that_a_mesh_does_not_divide(sources: Sources, tmp_path: Path, tp: int) -> None:
    """The dry run and a conversion refuse what no engine could be built for, though every shape of
    the files can be cut so."""
    folder = str(Path(sources.get(2, Mega("llama", 2, 1))) / "trained")
    for refused in (
        lambda mesh: ucp.plan(folder, mesh),
        lambda mesh: ucp.convert(folder, tmp_path / f"out{mesh}", mesh=mesh),
    ):
        with pytest.raises(ucp.LayoutError) as raised:
            refused(f"tp={tp},dp=1")
        assert "attention heads" in raised.value.problem
        assert "1, 2, 4" in raised.value.what_to_do
        refused("tp=4,dp=1")  # as the advice says
