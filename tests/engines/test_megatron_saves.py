"""`ucp.save` of megatron-core's own stack: loaded by megatron-core's own reader, and by this
package into both engines."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.errors import UcpError
from megatron_ucp.formats.proof import is_rounded
from tests.engines import kinds, megatron_jobs
from tests.engines.cross_jobs import Zero
from tests.engines.kinds import refusal_of
from tests.engines.megatron_jobs import Engine, Mcore, close, make, train, write
from tests.engines.megatron_states import biases, canonical, compare
from tests.engines.sources import Sources, check
from tests.engines.test_megatron_pairs import BUCKETS, CONSTANT, MOE, show
from tests.formats.megatron_files import by_torch, split
from tests.ranks import RankPool, RanksFailed
from tests.share import LOSS_STEPS


def own_buffers(setup: Mcore, folder: str) -> dict[str, Any]:
    """Buffers that differ from rank to rank: saved, and loaded on the same mesh; what is refused
    before the save; the error of a group's value that no file holds."""
    engine = make(setup)
    train(engine, 1)
    for value in biases(engine).values():
        value += dist.get_rank()
    want = {name: value.tolist() for name, value in biases(engine).items()}
    ucp.save(engine.handle, folder)
    for value in biases(engine).values():
        value.zero_()
    report = ucp.load(engine.handle, folder)
    have = {name: value.tolist() for name, value in biases(engine).items()}
    engine.handle.optimizer.chained_optimizers[0].optimizer.param_groups[0]["mine"] = object()
    said = refusal_of(lambda: ucp.save(engine.handle, folder))
    close(engine)
    return {"same": want == have, "want": want, "notes": list(report.notes), "error": said}


def load_own_buffers(setup: Mcore, folder: str, **options: Any) -> str:
    engine = make(setup)
    try:
        notes = ucp.load(engine.handle, folder, **options).notes
        return "\n".join(notes)
    except ucp.UcpError as error:
        return f"error: {error}"
    finally:
        close(engine)


def export_in_place(setup: Mcore, folder: str) -> list[tuple[int, ...]]:
    """Exports the weights from memory, and those of a save; where each master lies before the
    export, and after it."""
    from megatron_ucp.engines.megatron.optimizer import inner_optimizers, pieces_of

    engine = make(setup)
    train(engine, 1)
    inners = inner_optimizers(engine.optimizer)
    masters = [piece.master for inner in inners for piece in pieces_of(inner)]
    found = [tuple(master.data_ptr() for master in masters)]
    engine.handle.ucp.export_hf(f"{folder}/live", "float32")
    found.append(tuple(master.data_ptr() for master in masters))
    write(engine, Path(folder) / "saved", "ours")
    close(engine)
    return found


def regrouped(setup: Mcore, folder: str) -> tuple[list[str], list[str]]:
    """What differs after a load of a run whose groups another program made, into an engine that
    was built so too; and the notes."""
    engine = _with_swapped_decays(setup)
    train(engine, 2)
    ucp.save(engine.handle, folder)
    want = canonical(engine)
    close(engine)
    engine = _with_swapped_decays(replace(setup, seed=5))
    train(engine, 1, first=9)
    report = ucp.load(engine.handle, folder)
    found = compare(want, canonical(engine))
    close(engine)
    return found, [note for note in report.notes if "weight_decay" in note]


def _with_swapped_decays(setup: Mcore) -> Engine:
    """Matrices have no weight decay, norms have one."""
    engine = make(setup)
    (inner,) = engine.optimizer.chained_optimizers
    one, other = inner.optimizer.param_groups
    one["wd_mult"], other["wd_mult"] = other["wd_mult"], one["wd_mult"]
    return engine


# ------------------------------------------------ tests


RESUME, STOCK = kinds.resume, megatron_jobs.stock_load
# layers with experts and without, one that sees every token, and routers' biases, which are buffers
MIXTURE: dict[str, Any] = {"family": "mixtral", "every": 2, "shared": 8, "bias": True}
# several buckets, and overlaps: of such runs stock's own writer loses elements
SOURCES: dict[str, tuple[int, Any]] = {
    "dp4": (4, Mcore(**BUCKETS, **CONSTANT)),
    "tp2pp2vpp2": (4, Mcore("gpt", tied=True, tp=2, pp=2, vpp=2, dtype="bf16")),
    # three ranks of four have nothing, which stock's own writer does not take
    "padded": (4, Mcore(pad=True, layers=2)),
    "dropout": (4, Mcore(tp=2, dropout=0.2)),
    "fp16": (2, Mcore(dtype="fp16", layers=2, **CONSTANT)),
    "moe": (4, Mcore(ep=2, overlap=True, bucket=1000, **MOE)),
    "mixture": (4, Mcore(ep=2, pp=2, **MIXTURE)),
    # optimizers that every data-parallel rank has whole
    "plain32": (2, Mcore(distributed=False, layers=2, **CONSTANT)),
    "plain16": (2, Mcore("gpt", distributed=False, tied=True, tp=2, layers=2, dtype="bf16")),
    "plainmoe": (2, Mcore(distributed=False, ep=2, **MOE)),
}


@pytest.mark.parametrize(
    ("source", "world", "target"),
    [
        ("dp4", 4, Mcore(tp=2, pp=2, vpp=1, **CONSTANT)),
        ("dp4", 4, Mcore(pp=2, vpp=2, **CONSTANT)),
        ("tp2pp2vpp2", 2, Mcore("gpt", tied=True, dtype="bf16")),
        ("moe", 4, Mcore(ep=4, **MOE)),
        ("mixture", 4, Mcore(ep=4, **MIXTURE)),
        ("plain32", 2, Mcore(distributed=False, pp=2, layers=2, **CONSTANT)),
        ("plain16", 2, Mcore("gpt", distributed=False, tied=True, layers=2, dtype="bf16")),
        ("plainmoe", 4, Mcore(distributed=False, ep=4, **MOE)),
    ],
    ids=show,
)
def test_stock_loads_it(sources: Sources, source: str, world: int, target: Mcore) -> None:
    ranks, setup = SOURCES[source]
    folder = sources.get(ranks, setup, kind="ours")
    check(sources.ranks.run(world, STOCK, target, folder, ("filled", "trained")))


def test_stock_loads_it_under_the_keys_of_transformer_engine(sources: Sources) -> None:
    """Its layers with experts have another key for the norm before them."""
    ranks, setup = SOURCES["mixture"]
    folder = sources.get(ranks, setup, kind="ours")
    target = Mcore(ep=2, **MIXTURE)
    check(sources.ranks.run(4, STOCK, target, folder, ("filled",), other_keys=True))


@pytest.mark.parametrize(
    ("source", "world", "target"),
    [
        ("dp4", 2, Mcore(tp=2, **CONSTANT)),
        ("tp2pp2vpp2", 4, Mcore("gpt", tied=True, dtype="bf16", **BUCKETS)),
        ("moe", 4, Mcore(tp=2, ep=2, **MOE)),
        ("moe", 1, Mcore(distributed=False, **MOE)),
        ("mixture", 4, Mcore(tp=2, ep=2, **MIXTURE)),
        pytest.param("mixture", 4, Mcore(pp=2, vpp=2, **MIXTURE), marks=pytest.mark.slow),
        ("padded", 2, Mcore(layers=2)),
        ("fp16", 4, Mcore(dtype="fp16", layers=2, tp=2, **CONSTANT)),
        ("plain16", 2, Mcore("gpt", tied=True, layers=2, dtype="bf16")),
        ("plainmoe", 1, Mcore(distributed=False, **MOE)),
    ],
    ids=show,
)
@pytest.mark.cases(6)
def test_pair(sources: Sources, source: str, world: int, target: Mcore) -> None:
    ranks, setup = SOURCES[source]
    folder = sources.get(ranks, setup, kind="ours")
    check(sources.resume(world, target, folder))


def test_another_bias_of_a_router_is_seen(sources: Sources) -> None:
    ranks, setup = SOURCES["mixture"]
    folder = sources.get(ranks, setup, kind="ours")
    found = sources.resume(ranks, setup, folder, tags=("filled",), plant="one bias")
    for rank in found:
        said = rank["differences"]["filled"]
        assert said == ["values decoder.layers.0.mlp.router.expert_bias"]


# with dropout: the generators of every rank come back, those of tensor-parallel regions too
@pytest.mark.parametrize(
    "source", ["dp4", "dropout", "fp16", "tp2pp2vpp2", "moe", "plain32", "plain16"]
)
def test_the_same_mesh_goes_on_with_identical_bits(sources: Sources, source: str) -> None:
    ranks, setup = SOURCES[source]
    folder = sources.get(ranks, setup, kind="ours")
    found = sources.resume(ranks, setup, folder, tags=("trained",), three=True)
    check(found)
    assert all(rank["after"] == [] for rank in found)


@pytest.mark.parametrize("target", [Zero(zero=1), Zero(zero=3)], ids=show)
def test_pair_under_deepspeed(sources: Sources, target: Zero) -> None:
    folder = sources.get(*SOURCES["dp4"], kind="ours")
    check(sources.resume(2, target, folder, more=LOSS_STEPS, load_lr_scheduler_states=False), 1e-5)


@pytest.mark.parametrize("target", [Mcore, Zero])
@pytest.mark.parametrize("make", [Mcore, Zero])
def test_what_no_shape_shows(sources: Sources, make: Any, target: Any) -> None:
    """Other heads are refused, where queries, keys and values have as many; what a run may change
    on purpose is said, and what is as it was is not."""
    kind = {"kind": "ours"} if make is Mcore else {}
    folder = sources.get(1, make(heads=8, layers=1), more=3, **kind)
    with pytest.raises(RanksFailed, match=r"expected: heads=8\s*\n.*found: heads=2"):
        sources.resume(1, target(heads=2, layers=1), folder)
    for base, told in ((10000, False), (5000, True)):
        model = target(heads=8, layers=1, rotary_base=base)
        (found,) = sources.resume(1, model, folder, load_lr_scheduler_states=make is target)
        check([found])
        for notes in found["notes"].values():
            said = [note for note in notes if "computes something else" in note]
            assert told == bool(said)
            words = "rotary_base 10000.0 in the checkpoint, 5000.0 in the model"
            assert all(note.endswith(f"something else: {words}") for note in said)


def test_the_loss_scale_crosses_engines(sources: Sources) -> None:
    """With it all bits of the masters: both scale by a power of two."""
    folder = sources.get(*SOURCES["fp16"], kind="ours")
    found = sources.resume(
        2, Zero(zero=2, dtype="fp16", layers=2), folder, load_lr_scheduler_states=False
    )
    check(found)
    assert all(rank["scale"]["cur_scale"] == rank["saved_scale"]["scale"] for rank in found)


@pytest.mark.parametrize("source", ["dp4", "fp16", "plain32"])
def test_an_export_of_the_memory_moves_none_of_it(
    ranks: RankPool, source: str, tmp_path: Path
) -> None:
    world, setup = SOURCES[source]
    for before, after in ranks.run(world, export_in_place, setup, str(tmp_path)):
        assert before and before == after
    ucp.export_hf(tmp_path / "saved", tmp_path / "files", dtype="float32")
    names = [path.name for path in (tmp_path / "files").iterdir()]
    assert "model.safetensors" in names
    for name in names:
        live, saved = (tmp_path / folder / name for folder in ("live", "files"))
        assert live.read_bytes() == saved.read_bytes(), name


def test_torchs_own_reader_and_the_verbs_read_it(sources: Sources) -> None:
    folder = Path(sources.get(*SOURCES["moe"], kind="ours"))
    (tag,) = (folder / "trained").glob("iter_*")
    want = torch.load(folder / "oracle.pt", weights_only=False)["states"]["trained"]
    compared: dict[tuple[str, str], int] = {}
    for name, state, values in split(by_torch(tag)):
        known = want["weights"][name] if state == "weight" else want["full"][name, state]
        assert torch.equal(values, known), (name, state)
        compared[name, state] = compared.get((name, state), 0) + 1
    assert len(compared) == len(want["weights"]) + len(want["full"])
    twice = {name for (name, _), count in compared.items() if count > 1}
    assert twice == {f"decoder.layers.{n}.pre_mlp_layernorm.weight" for n in range(2)}
    assert not ucp.verify(folder / "trained", deep=True).findings
    assert ucp.describe(folder / "trained").run["global_steps"] == 3
    assert f"{tag}: Megatron-LM's torch_dist\n" in str(ucp.inspect(folder / "trained"))


def test_buffers_that_differ_from_rank_to_rank(ranks: RankPool, tmp_path: Path) -> None:
    setup = Mcore(**MIXTURE)
    found = ranks.run(2, own_buffers, setup, str(tmp_path))
    assert all(rank["same"] for rank in found) and found[0]["want"] != found[1]["want"]
    for rank in found:
        assert rank["error"].startswith("SaveError") and "mine" in rank["error"]
    job = load_own_buffers
    (refused,) = ranks.run(1, job, setup, str(tmp_path))
    assert refused.startswith("error: ") and "expert_bias" in refused
    (noted,) = ranks.run(1, job, setup, str(tmp_path), allow={"per_rank"})
    assert "expert_bias" in noted and not noted.startswith("error")


def test_groups_of_other_rules_than_megatrons(ranks: RankPool, tmp_path: Path) -> None:
    """The files list no group's parameters, but the manifest beside them says them."""
    setup = Mcore(layers=2, style="constant")
    job = regrouped
    assert ranks.run(2, job, setup, str(tmp_path)) == [([], []), ([], [])]


def clip(engine: Any) -> int:
    """Scales queries and keys as `--qk-clip` does behind a step: the weight and its master apart.
    How many weights on this rank are no longer their rounded masters."""
    from megatron_ucp.engines.megatron.optimizer import inner_optimizers, pieces_of

    pieces = [piece for one in inner_optimizers(engine.optimizer) for piece in pieces_of(one)]
    apart = 0
    for bare in engine.stack.bare:
        for name, param in bare.named_parameters():
            for piece in (one for one in pieces if one.param is param and "linear_qkv.w" in name):
                piece.master.data.mul_(0.731)
            if "linear_qkv.w" in name:
                param.data.mul_(0.731)
            for piece in (one for one in pieces if one.param is param):
                own = param.data.view(-1)[piece.first : piece.last]
                apart += int((piece.master.view(-1).to(own.dtype) != own).sum())
    return apart


def clipped(folder: str, setup: Mcore) -> dict[str, Any]:
    """A save behind a step that clipped, with and without the flag that says so."""
    engine = megatron_jobs.make(setup)
    megatron_jobs.train(engine, 2)
    said: dict[str, Any] = {"apart": clip(engine)}
    want = {**canonical(engine), "counters": None}
    for name in want["weights"]:  # a step begins from its masters, as after any load
        want["weights"][name] = want["full"][name, "fp32"].to(torch.bfloat16)
    for flag in (True, False):
        args = megatron_jobs.arguments(engine)
        args.qk_clip = flag
        ucp.save(engine.handle, f"{folder}/{flag}", arguments=args)
    config = engine.stack.bare[0].config
    with mock.patch.object(config, "qk_clip", True):  # no flags at all
        ucp.save(engine.handle, f"{folder}/model")
    megatron_jobs.train(engine, 1, first=2)
    for flag in (False, "model", True):
        try:
            report = ucp.load(engine.handle, f"{folder}/{flag}")
            said[str(flag)] = [note for note in report.notes if "--qk-clip" in note]
        except UcpError as error:
            said[str(flag)] = str(error)
    said["differs"] = compare(want, {**canonical(engine), "counters": None})
    megatron_jobs.close(engine)
    return said


@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
def test_masters_count_where_qk_clip_scaled_weights_apart(
    ranks: RankPool, tmp_path: Path, distributed: bool
) -> None:
    setup = Mcore(layers=2, dtype="bf16", distributed=distributed)
    job = clipped
    for said in ranks.run(2, job, str(tmp_path), setup):
        assert said["apart"] > 0, "there is something to tell"
        assert said["differs"] == []
        for flag in ("True", "model"):
            (note,) = said[flag]
            assert "taken from the masters" in note
        assert "masters of parameters are not the weights" in said["False"]
    assert not ucp.verify(tmp_path / "True", deep=True).findings
    assert ucp.verify(tmp_path / "False", deep=True).findings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_near_is_two_units_in_the_last_place(dtype: torch.dtype) -> None:
    """What was rounded once more is near; another element, and a sign, are not."""
    drawn = torch.randn(50_000, generator=torch.Generator().manual_seed(3)) * 0.02
    masters, weights = drawn * 0.731, (drawn.to(dtype) * 0.731).to(dtype)
    assert not is_rounded(masters, weights) and is_rounded(masters, weights, near=True)
    for wrong in (weights.roll(1), -weights, weights[:-1], weights * 1.02):
        assert not is_rounded(masters, wrong.to(dtype), near=True)
