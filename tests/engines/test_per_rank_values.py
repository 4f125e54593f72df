"""Values that differ from rank to rank: each rank gets its own back on the same mesh, and on
another one they are refused, or those of rank 0 are taken where that is allowed."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines.model import WIDTH, config_of, engine_around
from tests.ranks import RankPool


class Meter(torch.nn.Module):
    """Keeps a number besides tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": (self.seen,)}

    def set_extra_state(self, state: Any) -> None:
        (self.seen,) = state["seen"]


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 5)
        self.norm = torch.nn.BatchNorm1d(5)
        self.down = torch.nn.Linear(5, 1)
        self.meter = Meter()
        self.register_buffer("shared", torch.arange(3.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(inputs)))


def make(zero: int, attach: bool = True) -> Any:
    torch.manual_seed(5)
    net = Normed()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    config = config_of(zero, 4, gradient_clipping=0.0)
    engine = engine_around(net, optimizer, config, lr_scheduler=None)
    engine.lr_scheduler = schedule  # DeepSpeed would step it without a metric
    return ucp.attach(engine) if attach else engine


def train(engine: Any, steps: int = 2) -> None:
    scheduler, engine.lr_scheduler = engine.lr_scheduler, None
    for number in range(steps):
        seed = 100 * dist.get_rank() + number
        inputs = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = engine(inputs).square().mean()
        engine.backward(loss)
        engine.step()
        scheduler.step(loss.item())
        engine.module.meter.seen += 1 + dist.get_rank()
    engine.lr_scheduler = scheduler


def buffers(engine: Any) -> dict[str, Any]:
    return {name: buffer.tolist() for name, buffer in engine.module.named_buffers()}


def client_state() -> dict[str, Any]:
    return {"place": {"rank": dist.get_rank(), "seen": torch.arange(3) + dist.get_rank()}, "run": 7}


def held(engine: Any, client: Any) -> dict[str, Any]:
    """All that may differ, as values that pickle takes."""
    place = client.get("place", {})
    shown = {**place, "seen": place["seen"].tolist()} if place else {}
    best = engine.lr_scheduler.best if engine.lr_scheduler is not None else None
    own = {"buffers": buffers(engine), "seen": engine.module.meter.seen, "place": shown}
    return {**own, "run": client.get("run"), "best": best}


def save(zero: int, folder: str, attach: bool, tag: str, alike: bool = False) -> dict[str, Any]:
    """What this rank had when it saved."""
    engine = make(zero, attach)
    if not alike:
        train(engine)
    client = {"run": 7} if alike else client_state()
    engine.save_checkpoint(folder, tag=tag, client_state=client)
    out = held(engine, client)
    out["notes"] = list(engine.ucp_save_report.notes) if attach else []
    engine.destroy()
    return out


def load(zero: int, folder: str, tag: str, stock: bool = False, **options: Any) -> dict[str, Any]:
    """What this rank has after a load, or the error."""
    engine = make(zero, attach=False)
    before = buffers(engine)
    try:
        if stock:
            _, client = engine.load_checkpoint(folder, tag=tag)
            notes: tuple[str, ...] = ()
        else:
            report = ucp.load(engine, folder, tag, **options)
            client, notes = report.client_state, report.notes
    except ucp.UcpError as error:
        out = {"error": str(error), "unchanged": before == buffers(engine)}
    else:
        out = {**held(engine, client), "notes": list(notes)}
    engine.destroy()
    return out


def convert(folder: str, tag: str, to: str, zero: int, dp: int = 2, **options: Any) -> str:
    """The error of a conversion, "" without one."""
    target = ucp.Target(mesh=ucp.Mesh(dp=dp, zero=zero))
    try:
        ucp.convert(Path(folder) / tag, Path(folder) / to, target=target, **options)
    except ucp.UcpError as error:
        return str(error)
    return ""


def save_unlike(folder: str) -> str:
    """A group's setting differs from rank to rank: the error of the save."""
    from tests.engines.masters import base_of

    engine = make(1)
    base_of(engine).param_groups[0]["mine"] = dist.get_rank()
    try:
        engine.save_checkpoint(folder, tag="tag")
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        engine.destroy()
    return ""


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks
HELD = ("buffers", "seen", "place", "run", "best")


def own(rank: dict[str, Any]) -> dict[str, Any]:
    return {key: rank[key] for key in HELD}


@pytest.mark.parametrize("zero", [1, 3])
def test_each_rank_gets_its_own_back(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    want = ranks.run(2, save, zero, str(tmp_path), True, "tag")
    assert want[0]["buffers"] != want[1]["buffers"] and want[0]["place"] != want[1]["place"]
    assert want[0]["best"] != want[1]["best"] and want[0]["seen"] != want[1]["seen"]
    for rank in want:
        (note,) = rank["notes"]
        assert "norm.running_mean" in note and "client_state['place']" in note
        assert "shared" not in note and "'run'" not in note
    for target in (zero, 2 if zero == 1 else 1):
        have = ranks.run(2, load, target, str(tmp_path), "tag")
        assert list(map(own, have)) == list(map(own, want))


def test_stock_files_of_zero_3_give_each_rank_its_own(ranks: RankPool, tmp_path: Path) -> None:
    want = ranks.run(2, save, 3, str(tmp_path), False, "tag")
    stock = ranks.run(2, load, 3, str(tmp_path), "tag", stock=True)
    have = ranks.run(2, load, 3, str(tmp_path), "tag")
    assert list(map(own, have)) == list(map(own, want)) == list(map(own, stock))


def test_another_mesh_is_refused_or_has_those_of_rank_0(ranks: RankPool, tmp_path: Path) -> None:
    want = ranks.run(2, save, 3, str(tmp_path), True, "tag")
    (refused,) = ranks.run(1, load, 3, str(tmp_path), "tag")
    assert refused["unchanged"] and "norm.running_mean" in refused["error"]
    assert 'allow={"per_rank"}' in refused["error"]
    (first,) = ranks.run(1, load, 3, str(tmp_path), "tag", allow={"per_rank"})
    assert own(first) == own(want[0])
    assert any("norm.running_mean" in note and "rank 0" in note for note in first["notes"])


def test_conversions_carry_them_to_the_same_ranks(ranks: RankPool, tmp_path: Path) -> None:
    want = [own(rank) for rank in ranks.run(2, save, 3, str(tmp_path), False, "tag")]
    assert not convert(str(tmp_path), "tag", "z3", 3) and not convert(str(tmp_path), "z3", "z1", 1)
    assert [own(r) for r in ranks.run(2, load, 3, str(tmp_path), "z3", stock=True)] == want
    for zero, tag in ((3, "z3"), (1, "z1")):
        assert [own(r) for r in ranks.run(2, load, zero, str(tmp_path), tag)] == want
    assert ucp.diff(tmp_path / "tag", tmp_path / "z1") == []
    error = convert(str(tmp_path), "tag", "more", 3, dp=4)
    assert "norm.running_mean" in error and not (tmp_path / "more").exists()
    assert not convert(str(tmp_path), "tag", "more", 3, dp=4, allow={"per_rank"})
    found = ucp.diff(tmp_path / "tag", tmp_path / "more")
    assert [d.what for d in found] == ["values that differ from rank to rank"]


def test_what_all_ranks_share_is_not_kept_for_each(ranks: RankPool, tmp_path: Path) -> None:
    for rank in ranks.run(2, save, 1, str(tmp_path), True, "tag", alike=True):
        assert rank["notes"] == []
    assert not list((tmp_path / "tag").glob("ucp_rank_*"))


def test_groups_that_differ_are_refused_before_the_save(ranks: RankPool, tmp_path: Path) -> None:
    for said in ranks.run(2, save_unlike, str(tmp_path)):
        assert said.startswith("SaveError") and "param_groups[0]['mine']" in said
    assert list(tmp_path.iterdir()) == []
