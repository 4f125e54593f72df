"""Plain values beside tensors come back in type and bits, in every place and by every way, or are
refused by name before anything is written."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_ucp as ucp
from tests.engines.masters import base_of
from tests.engines.model import GLOBAL_BATCH, WIDTH, config_of, engine_around
from tests.engines.value_kinds import KINDS, LIVE_KINDS, exactly, strangers, table
from tests.ranks import RankPool

PLACES = ("scheduler", "group", "client state")


class Holding(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler whose state holds values of every kind."""

    def __init__(self, optimizer: Any, kept: dict[str, Any]) -> None:
        self.kept = kept
        super().__init__(optimizer, rate)


def rate(step: int) -> float:
    return 1.0 / (1 + step)


def values(which: int, live: bool = True) -> dict[str, Any]:
    """A value of every kind: those that are saved (0), or others (1)."""
    kinds = {**KINDS, **(LIVE_KINDS if live else {})}
    return {name: make()[which] for name, make in kinds.items()}


NAMED = tuple(LIVE_KINDS)  # whose classes nobody vouches for in stock files, but an engine


def engine_with(zero: int, which: int, attach: bool = True, without: tuple[str, ...] = ()) -> Any:
    """An engine whose scheduler and groups hold values."""

    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 5), torch.nn.Linear(5, 1))
    kept = {name: value for name, value in values(which).items() if name not in without}
    held = {f"kept {name}": value for name, value in kept.items()}
    optimizer = torch.optim.AdamW([{"params": list(net.parameters()), **held}], lr=1e-2)
    config = config_of(zero, GLOBAL_BATCH // dist.get_world_size(), gradient_clipping=0.0)
    engine = engine_around(net, optimizer, config, lr_scheduler=Holding(optimizer, kept))
    return ucp.attach(engine) if attach else engine


def step(engine: Any, number: int = 0) -> None:
    inputs = torch.rand(2, WIDTH, generator=torch.Generator().manual_seed(number))
    engine.backward(engine(inputs).square().mean())
    engine.step()


def held_in(engine: Any, client_state: Any) -> dict[str, dict[str, Any]]:
    """What an engine holds now, by place and kind."""
    group = base_of(engine).param_groups[0]
    return {
        "scheduler": engine.lr_scheduler.kept,
        "group": {k.removeprefix("kept "): v for k, v in group.items() if k.startswith("kept ")},
        "client state": client_state,
    }


def compare(engine: Any, client_state: Any) -> dict[str, list[str]]:
    """By place: kinds that did not come back, and classes of the package that are there."""
    want, out = values(0), {}
    for place, have in held_in(engine, client_state).items():
        kinds = want if place != "client state" else values(0, live=False)
        out[place] = [name for name in kinds if not exactly(kinds[name], have.get(name))]
        out[place] += strangers(have)
    out["group"] += strangers(base_of(engine).param_groups)
    out["scheduler"] += strangers(vars(engine.lr_scheduler) | {"optimizer": None})
    return out


def load(zero: int, folder: str, tag: str, without: tuple[str, ...] = ()) -> dict[str, list[str]]:
    engine = engine_with(zero, 1)
    before = compare(engine, values(1, live=False))
    _, client_state = engine.load_checkpoint(folder, tag=tag)
    out = compare(engine, client_state)
    out["group"] = [name for name in out["group"] if name not in without]
    out["scheduler"] = [name for name in out["scheduler"] if name not in without]
    step(engine, 7)
    engine.destroy()
    alike = [name for place in before.values() for name in place]
    missed = {*KINDS, *LIVE_KINDS} - {*alike, "function of a module"}
    return {**out, "the same before": sorted(missed)}


def save(folder: str, tag: str, attach: bool, without: tuple[str, ...] = ()) -> None:
    engine = engine_with(1, 0, attach, without)
    step(engine)
    engine.save_checkpoint(folder, tag=tag, client_state=values(0, live=False))
    engine.destroy()


def converted(folder: str, tag: str) -> str:
    """To another mesh, and back; the error, "" without one."""
    with contextlib.chdir(folder):
        there, back = Path(f"{tag}_there"), Path(f"{tag}_back")
        try:
            ucp.convert(tag, there, target=ucp.Target(mesh=ucp.Mesh(dp=2, zero=3)))
            ucp.convert(there, back, target=ucp.Target(mesh=ucp.Mesh(dp=2, zero=1)))
        except ucp.UcpError as error:
            return str(error)
    return ""


def to_megatron(folder: str, tag: str) -> str:
    """The error of a conversion for Megatron, "" without one."""
    try:
        ucp.convert(Path(folder) / tag, Path(folder) / "megatron", to="torch_dist")
    except ucp.UcpError as error:
        return str(error)
    return ""


def matrix(folder: str) -> dict[str, dict[str, list[str]]]:
    """Of every way: by place the kinds that did not come back."""
    out = {}
    for tag, attach, without in (
        ("attached", True, ()),
        ("stock", False, ()),
        ("stock without classes", False, NAMED),
    ):
        save(folder, tag, attach, without)
        out[f"{tag}, same mesh"] = load(1, folder, tag, without)
        out[f"{tag}, another"] = load(3, folder, tag, without)
        errors = [converted(folder, tag) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(errors)
        if error := errors[0]:
            out[f"{tag}, converted"] = {"error": [error]}
            continue
        out[f"{tag}, converted"] = load(3, folder, f"{tag}_there", without)
        out[f"{tag}, converted back"] = load(1, folder, f"{tag}_back", without)
    return out


def stock_of_converted(folder: str) -> dict[str, list[str]]:
    """Stock DeepSpeed's own load of a converted folder."""
    engine = engine_with(3, 1, attach=False)
    _, client_state = engine.load_checkpoint(folder, tag="attached_there")
    out = compare(engine, client_state)
    engine.destroy()
    return out


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]


def test_every_kind_in_every_place_by_every_way(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, matrix, str(tmp_path), timeout_s=300)
    wanted = table(found[0])
    assert "NO" not in wanted
    page = (ROOT / "docs" / "reference" / "formats.md").read_text()
    assert wanted in page, f"put this there:\n{wanted}"
    for rank in found:
        (refused,) = rank.pop("stock, converted")["error"]
        assert "value_kinds" in refused and "closed list" in refused
        assert len(rank) == 10
        for way, places in rank.items():
            assert places == {key: [] for key in places}, way
    error = to_megatron(str(tmp_path), "attached")
    assert "a parameter group holds" in error and "value_kinds.Mode" in error
    assert not (tmp_path / "megatron").exists()
    for rank in ranks.run(2, stock_of_converted, str(tmp_path)):
        assert rank == {key: [] for key in rank}


@pytest.mark.parametrize("kind", [*KINDS, *LIVE_KINDS])
def test_the_comparison_sees_another_value(kind: str) -> None:
    one, other = {**KINDS, **LIVE_KINDS}[kind]()
    assert exactly(one, one)
    assert kind == "function of a module" or not exactly(one, other)
