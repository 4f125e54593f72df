"""DeepSpeed's Muon, whose momentum lies as whole matrices at ZeRO-1 and 2: between any two stages
and numbers of ranks, bit for bit.

`Twins` has matrices of three shapes, of which every cut among two or four ranks splits some. The
momentum is gathered by DeepSpeed's own list of what touches a partition (`masters.matrices_of`).
"""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.engines.deepspeed import optimizer
from megatron_ucp.errors import UnsupportedError, UsageError
from megatron_ucp.formats.deepspeed.optimizers import in_its_order
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.reshard import fingerprint, load
from megatron_ucp.reshard.plan import plan
from tests.engines import kinds
from tests.engines.canonical import canonical, differences, everywhere
from tests.engines.kinds import oracle_of, refusal_of
from tests.engines.masters import matrices_of
from tests.engines.model import Setup, make_engine
from tests.engines.sources import Sources, check, check_fails, without_manifest
from tests.engines.tensor_jobs import Mega, Staged
from tests.reshard.test_preview import READS, compare
from tests.share import LOSS_STEPS


def cast(setup: Setup, folder: str, **options: Any) -> tuple[list[str], list[str]]:
    """Differences after a load into an engine that keeps the momentum in another dtype, whose
    elements must be those of the checkpoint in it; and the notes of the load."""
    engine = make_engine(setup)
    want = oracle_of(folder)["states"]["filled"]
    notes = ucp.load(engine, folder, tag="filled", **options).notes
    have = canonical(engine)
    for key, value in want["full"].items():
        if key[1] == "momentum_buffer":
            assert value.dtype != have["full"][key].dtype
            want["full"][key] = value.to(have["full"][key].dtype)
    found = differences(want, have)
    engine.destroy()
    return found, [*notes]


def damaged_copy(setup: Setup, folder: str, compares: bool) -> tuple[str, int]:
    """What a load says, and of how many copies, where a bit of a matrix is another one in every
    partition but the first that keeps it. `compares`: with copies compared."""
    engine = make_engine(setup)
    stock, flipped, said = fingerprint.sums_of, list[str](), "nothing"

    def sums(manifest: Any, wants: Any, read: Any, *args: Any, **more: Any) -> Any:
        flipped.extend(_flip_copies(manifest, wants, read))
        return stock(manifest, wants, read, *args, **{**more, "copies": compares})

    with mock.patch.object(load, "sums_of", sums):
        said = refusal_of(lambda: ucp.load(engine, folder, tag="filled"), "nothing")
    engine.destroy()
    return said, sum(everywhere(len(flipped)))


def _flip_copies(manifest: Any, wants: Any, read: Any) -> Iterator[str]:
    for slot, state in wants:
        buffer = manifest.buffers[slot.buffer].of(state)
        for one in buffer.fragments(slot.part) if buffer.rule == "uncut" else ():
            member = buffer.members[one.member]
            if buffer.owners(member, 0, 1)[0] != slot.part:
                read(slot, one.offset, one.offset + 1).view(torch.int32)[0] ^= 1
                yield member.param


def faulty(setup: Setup, folder: str, fault: str) -> dict[str, Any]:
    """What a comparison says of a load in which something went wrong, as `resume` says it."""
    engine = make_engine(setup)
    want = oracle_of(folder)["states"]["filled"]
    found = {"before": {"filled": differences(want, canonical(engine))}}
    asked = mock.patch.object(optimizer, "uncut_states", return_value=())
    try:
        with asked if fault == "as a partition" else contextlib.nullcontext():
            ucp.load(engine, folder, tag="filled")
        if fault in ("one element", "one copy"):
            ((master, _),) = matrices_of(engine)
            momentum = engine.optimizer.optimizer.state[master]["momentum_buffer"]
            # the first matrix of the first rank is whole there, that of the last one is split
            at_fault = 0 if fault == "one element" else dist.get_world_size() - 1
            momentum[0] += dist.get_rank() == at_fault
        seen = differences(want, canonical(engine))
    except (AssertionError, RuntimeError, ucp.UcpError) as error:
        seen = [f"{type(error).__name__}: {error}"]
    finally:
        engine.destroy()
    return found | {"differences": {"filled": seen}}


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks
STOCK, ATTEMPT = kinds.stock_load, kinds.attempt
OFFLOAD = (("offload_optimizer", {"device": "cpu"}),)
GAPS = (("parameter_alignment", True), ("round_robin_gradients", True))
WIDE = (("data_types", {"grad_accum_dtype": "fp32"}),)  # BF16_Optimizer at ZeRO-1
FUSED = (("torch_adam", False),)


def muon(zero: int, dtype: str = "fp32", config: Any = (), **kwargs: Any) -> Setup:
    """Without clipping, which DeepSpeed does before Newton-Schulz at some stages and behind it at
    others."""
    config = (("gradient_clipping", 0.0), *config)
    return Setup(zero, dtype, "muon", net="Twins", config=config, **kwargs)


SOURCES = {
    "dp2z1": (2, muon(1)),
    "dp4z3": (4, muon(3)),
    "dp1z0": (1, muon(0)),
    "dp2z1off": (2, muon(1, zero_config=OFFLOAD)),
    "dp2z2bf16": (2, muon(2, "bf16", options=FUSED)),
    "dp2z1bf16": (2, muon(1, "bf16")),
    "dp4bf16": (4, muon(1, "bf16", WIDE)),
    "dp2z2gaps": (2, muon(2, zero_config=GAPS)),
    "dp2z1fp16": (2, muon(1, "fp16")),
    "dp1z0fp16": (1, muon(0, "fp16")),
}
PAIRS = [
    ("dp2z1", 4, muon(1)),
    ("dp2z1", 2, muon(3)),
    ("dp2z1", 1, muon(0)),
    ("dp2z1", 4, muon(2, zero_config=OFFLOAD)),
    ("dp4z3", 2, muon(2)),
    ("dp4z3", 4, muon(1, zero_config=GAPS)),
    ("dp4z3", 1, muon(3, zero_config=OFFLOAD)),
    ("dp1z0", 4, muon(2)),
    ("dp1z0", 2, muon(0)),
    ("dp2z1off", 2, muon(1)),
    ("dp2z2gaps", 4, muon(1)),
    ("dp2z2bf16", 4, muon(3, "bf16", options=FUSED)),
    ("dp2z2bf16", 4, muon(2, "bf16", options=FUSED)),
    ("dp2z1bf16", 4, muon(1, "bf16")),
    ("dp2z1bf16", 1, muon(3, "bf16")),
    ("dp4bf16", 2, muon(1, "bf16", WIDE)),
    ("dp4bf16", 2, muon(1, "bf16", zero_config=OFFLOAD)),
    ("dp4bf16", 1, muon(0, "bf16")),
    ("dp2z1fp16", 4, muon(3, "fp16")),
    ("dp2z1fp16", 4, muon(2, "fp16")),
    ("dp1z0fp16", 2, muon(1, "fp16", zero_config=OFFLOAD)),
]


def source(sources: Sources, name: str) -> str:
    ranks, setup = SOURCES[name]
    more = LOSS_STEPS if setup.dtype == "fp32" else 0
    return sources.get(ranks, setup, more=more)


def resume(sources: Sources, name: str, ranks: int, setup: Setup, **options: Any) -> list[dict]:
    folder = options.pop("folder", None) or source(sources, name)
    return sources.resume(ranks, replace(setup, seed=9), folder, **options)


@pytest.mark.parametrize(("name", "world", "setup"), PAIRS)
@pytest.mark.cases(10)
def test_pair(sources: Sources, name: str, world: int, setup: Setup) -> None:
    fp32 = setup.dtype == "fp32"
    found = resume(sources, name, world, setup, more=LOSS_STEPS if fp32 else 0)
    check(found, 1e-5 if fp32 else None)
    assert any("momentum_buffer" in line for line in found[0]["before"]["filled"])


def test_copies_in_other_partitions_are_compared(sources: Sources) -> None:
    folder = source(sources, "dp4z3")
    job, setup = damaged_copy, muon(2, seed=9)
    for said, copies in sources.ranks.run(2, job, setup, folder, True):
        assert said.startswith("ForeignFileError: ") and "parameter: " in said and copies
    for said, copies in sources.ranks.run(2, job, setup, folder, False):
        assert said == "nothing" and copies, "the control"


@pytest.mark.parametrize("name", ["dp2z1", "dp2z1off", "dp4z3"])
def test_files_of_stock_deepspeed(sources: Sources, tmp_path: Path, name: str) -> None:
    """Without a manifest."""
    folder = without_manifest(Path(shutil.copytree(source(sources, name), tmp_path / "stock")))
    check(resume(sources, name, 2, muon(2), folder=str(folder)))


def test_states_of_another_optimizer_are_refused(sources: Sources) -> None:
    adam = sources.get(2, Setup(1, net="Twins"))
    for engine, folder in ((muon(1), adam), (Setup(1, net="Twins"), source(sources, "dp2z1"))):
        for rank in sources.ranks.run(2, ATTEMPT, engine, folder, "filled"):
            assert rank["error"] == "StateMismatchError" and rank["unchanged"], rank["message"]


def test_values_that_would_be_rounded(sources: Sources) -> None:
    """BF16_Optimizer keeps the momentum in fp32, ZeRO-3 in the dtype of communication."""
    run, setup = sources.ranks.run, muon(3, "bf16")
    for rank in run(2, ATTEMPT, setup, source(sources, "dp4bf16"), "filled"):
        assert rank["error"] == "InexactError" and "momentum_buffer" in rank["message"]
        assert rank["unchanged"]


CASTS = [
    ("dp2z1fp16", 4, muon(0, "fp16")),
    ("dp2z1bf16", 2, muon(1, "bf16", WIDE)),
    ("dp2z1bf16", 1, muon(2, "bf16", zero_config=OFFLOAD)),
    ("dp1z0fp16", 2, muon(3, "fp16")),
    ("dp4bf16", 2, muon(1, "bf16")),
]


@pytest.mark.parametrize(("name", "world", "setup"), CASTS)
def test_the_momentum_in_another_dtype(
    sources: Sources, name: str, world: int, setup: Setup
) -> None:
    """Wider as it is, narrower where that is allowed, and the report says it."""
    narrower = name in ("dp1z0fp16", "dp4bf16")
    options = {"allow": {"narrow"}} if narrower else {}
    for wrong, notes in sources.ranks.run(
        world, cast, replace(setup, seed=9), source(sources, name), **options
    ):
        assert wrong == []
        assert any("rounded to a narrower dtype: back.weight" in n for n in notes) == narrower


@pytest.mark.parametrize("fault", ["one element", "one copy", "as a partition"])
def test_a_planted_fault_is_seen(sources: Sources, fault: str) -> None:
    folder = source(sources, "dp4z3")
    check_fails(sources.ranks.run(2, faulty, muon(1, seed=9), folder, fault))
    check(sources.ranks.run(2, faulty, muon(1, seed=9), folder, ""))


CONVERTED = [
    ("dp2z1", Target(ucp.Mesh(dp=4, zero=1)), muon(1)),
    ("dp2z1", Target(ucp.Mesh(dp=2, zero=3)), muon(3)),
    ("dp4z3", Target(ucp.Mesh(dp=2, zero=2)), muon(2)),
    ("dp4z3", Target(ucp.Mesh(dp=2, zero=1), offloaded=True), muon(1, zero_config=OFFLOAD)),
    ("dp1z0", Target(ucp.Mesh(dp=4, zero=2), alignment=True), muon(2, zero_config=GAPS[:1])),
    ("dp2z1off", Target(ucp.Mesh(dp=1, zero=0)), muon(0)),
]


@pytest.mark.parametrize(("name", "to", "setup"), CONVERTED)
def test_stock_deepspeed_loads_what_is_converted(
    sources: Sources, tmp_path: Path, name: str, to: Target, setup: Setup
) -> None:
    """From files without a manifest, but for those of stage 0, which name no parameters."""
    folder = Path(shutil.copytree(source(sources, name), tmp_path / "source"))
    if to.mesh.zero and name != "dp1z0":
        without_manifest(folder)
    out = tmp_path / "out" / "step7"
    ucp.convert(folder / "filled", out, target=to)
    for rank in sources.ranks.run(
        to.mesh.world, STOCK, replace(setup, seed=9), str(out), source(sources, name)
    ):
        assert rank["loaded"] and rank["before"] and rank["differences"] == []
    assert ucp.verify(out, deep=True).findings == ()
    assert ucp.diff(folder / "filled", out) == []


def momentum_of(file: Path) -> Any:
    tree = torch.load(file, weights_only=False)
    return tree, tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["momentum_buffer"]


def test_the_tools_on_files(sources: Sources, tmp_path: Path) -> None:
    """A matrix that two partitions touch is in both files, and both copies are looked at."""
    folder = without_manifest(
        Path(shutil.copytree(f"{source(sources, 'dp2z1')}/filled", tmp_path / "filled"))
    )
    assert ucp.verify(folder, deep=True).findings == ()
    last = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    tree, momentum = momentum_of(last)
    (buffer,) = (b for b in ucp.describe(folder).buffers if b.uncut)
    assert [
        len(momentum_of(folder / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt")[1]) for r in (0, 1)
    ] == [buffer.of("momentum_buffer").elems(part) for part in (0, 1)]
    assert sum(buffer.of("momentum_buffer").elems(part) for part in (0, 1)) > buffer.used()
    momentum[0] += 1
    torch.save(tree, last)
    (found,) = ucp.verify(folder, deep=True).findings
    assert "two copies of the state momentum_buffer differ" in found.what and found.parameter
    tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["momentum_buffer"] = momentum[
        : buffer.partition_elems
    ].clone()
    torch.save(tree, last)
    (found,) = ucp.verify(folder, deep=True).findings
    assert "momentum_buffer has another size" in found.what
    with pytest.raises(ucp.UcpError, match="momentum_buffer has another size"):
        ucp.convert(folder, tmp_path / "out" / "step7", target=Target(ucp.Mesh(dp=1, zero=1)))


@pytest.mark.parametrize(("world", "setup"), [(4, muon(1)), (1, muon(0)), (2, muon(3))])
def test_a_plan_is_what_a_load_reads(sources: Sources, world: int, setup: Setup) -> None:
    folder = f"{source(sources, 'dp2z1')}/filled"
    found = plan(folder, Target(ucp.Mesh(dp=world, zero=setup.zero)))
    compare(found, sources.ranks.run(world, READS, setup, folder))


MEGA = Mega("llama", 2, 1, muon=True)
ONE = replace(MEGA, tp=1, zero=2)


@pytest.mark.parametrize(
    ("world", "origin", "target_world", "target"),
    [(4, MEGA, 2, ONE), (2, ONE, 4, MEGA), (4, MEGA, 4, MEGA), (2, ONE, 2, replace(MEGA, zero=0))],
)
def test_another_tensor_parallel_size(
    sources: Sources, world: int, origin: Mega, target_world: int, target: Mega
) -> None:
    """States are bit-equal, and the report says that the next steps are others: Newton-Schulz runs
    on what a rank has of a matrix."""
    folder = sources.get(world, origin, more=0)
    found = sources.resume(target_world, replace(target, seed=9), folder)
    check(found)
    said = any("orthogonalizes" in note for note in found[0]["notes"]["filled"])
    assert said == (origin.tp != target.tp)


def test_a_conversion_to_another_tensor_parallel_size(sources: Sources, tmp_path: Path) -> None:
    folder = sources.get(4, MEGA, more=0)
    out = tmp_path / "out" / "step7"
    done = ucp.convert(f"{folder}/filled", out, target=ucp.Mesh(dp=2, zero=2))
    assert any("orthogonalizes" in note for note in done.notes)
    for rank in sources.ranks.run(2, STOCK, replace(ONE, seed=9), str(out), folder):
        assert rank["loaded"] and rank["before"] and rank["differences"] == []


def staged(pp: int, zero: int, tp: int = 1, dtype: str = "fp32") -> Staged:
    return Staged("llama", tp, zero, dtype=dtype, pp=pp, muon=True)


@pytest.mark.parametrize(
    ("world", "origin", "target_world", "target"),
    [
        (4, staged(2, 1), 2, staged(0, 2)),
        (2, staged(0, 1), 4, staged(2, 1)),
        (4, staged(2, 1), 4, staged(4, 0)),
        (4, staged(2, 0, tp=2), 2, staged(2, 1)),
        (4, staged(2, 1, 2, "bf16"), 2, staged(0, 3, 1, "bf16")),
        (4, staged(0, 3, 2, "bf16"), 4, staged(4, 1, 1, "bf16")),
        (4, staged(4, 1, 1, "fp16"), 4, staged(2, 1, 2, "fp16")),
        (2, staged(0, 3, 1, "fp16"), 4, staged(2, 1, 1, "fp16")),
    ],
)
def test_stages_of_a_pipeline(
    sources: Sources, world: int, origin: Staged, target_world: int, target: Staged
) -> None:
    """Which matrices a rank steps is the stage's affair; each of them is whole."""
    folder = sources.get(world, origin, more=0)
    found = sources.resume(target_world, replace(target, seed=9), folder)
    check(found)
    assert any("momentum_buffer" in line for line in found[0]["before"]["filled"])


def test_stages_of_stock_deepspeed(sources: Sources, tmp_path: Path) -> None:
    folder = Path(sources.get(4, staged(2, 1), more=0))
    stock = without_manifest(Path(shutil.copytree(folder, tmp_path / "stock")))
    check(sources.resume(2, replace(staged(0, 2), seed=9), str(stock)))


def test_the_order_of_a_group_that_nobody_knows(sources: Sources, tmp_path: Path) -> None:
    """Muon sorts by rank-local shapes: two that become equal were listed by a client that is
    gone."""
    shapes, source = {"a": (4, 3), "b": (4, 3)}, {"a": (8, 3), "b": (4, 3)}
    with pytest.raises(UsageError, match="order"):
        in_its_order(["a", "b"], shapes, source, "file")
    assert in_its_order(["b", "a"], shapes, source, "file") == ("b", "a")  # the client's order
    assert in_its_order(["b", "a"], source, source, "file") == ("a", "b")
    assert in_its_order(["b", "a"], source, source, "file", at_init=True) == ("b", "a")
    narrow, tall = {"w": (7, 90), "v": (13, 2)}, {"w": (7, 45), "v": (13, 2)}
    assert in_its_order(["v", "w"], tall, narrow, "file") == ("v", "w")  # by rows, not by size


def test_what_no_format_can_hold_is_refused(sources: Sources, tmp_path: Path) -> None:
    for to in ("universal", "torch_dist"):
        with pytest.raises(UnsupportedError, match="Muon"):
            ucp.convert(f"{source(sources, 'dp2z1')}/filled", tmp_path / to / "step7", to=to)
        assert not (tmp_path / to / "step7").exists()
