"""Odd models: what stock's own load gets right is right across stages too, or refused by name when
the engine is attached."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.errors import UnsupportedError
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import refusal_of
from tests.engines.model import NETS, Setup, make_engine, train
from tests.engines.odd_models import NAMED
from tests.ranks import RankPool

if taken := NETS.keys() & NAMED.keys():  # warm ranks keep what one job imported for the next
    raise ValueError(f"two models of one name: {sorted(taken)}")
NETS |= NAMED
STEPS, MORE = 2, 3
Change = Callable[[Any], None]


def freeze_one(engine: Any) -> None:
    """A parameter of the optimizer is not trained from here on."""
    engine.module.down.bias.requires_grad_(False)


CHANGES: dict[str, Change] = {"freeze_one": freeze_one}


def snapshot(engine: Any) -> dict[str, Any]:
    """The canonical state, and what modules keep besides tensors."""
    kept = engine.module.meter.kept if hasattr(engine.module, "meter") else None
    return {**canonical(engine), "kept": repr(kept)}


def compared(want: dict[str, Any], have: dict[str, Any]) -> list[str]:
    kept = [] if want["kept"] == have["kept"] else [f"{want['kept']} became {have['kept']}"]
    return differences(want, have) + kept


def saved(
    net: str, folder: Path, zero: int, attach: bool, change: str = "", dtype: str = "fp32"
) -> dict[str, Any]:
    """Trains and saves; the state there and the losses of the steps after it."""
    engine = make_engine(Setup(zero, dtype, net=net), attach)
    train(engine, STEPS)
    if change:
        CHANGES[change](engine)
        train(engine, 1, first=STEPS)
    engine.save_checkpoint(str(folder), tag="odd")
    found = {"state": snapshot(engine), "losses": train(engine, MORE, first=STEPS + 1)}
    engine.destroy()
    return found


def loaded(
    net: str,
    folder: Path,
    zero: int,
    want: dict[str, Any],
    change: str = "",
    native: bool = False,
    dtype: str = "fp32",
) -> dict[str, Any]:
    """Loads into a fresh engine: what differs, before and after, and in the losses; or the
    error."""
    engine = make_engine(Setup(zero, dtype, net=net, seed=9), attach=not native)
    if change:
        CHANGES[change](engine)
    out: dict[str, Any] = {"error": "", "before": len(compared(want["state"], snapshot(engine)))}
    try:
        if native:
            engine.load_checkpoint(str(folder), tag="odd")
        else:
            out["notes"] = ucp.load(engine, folder, tag="odd").notes
        out["after"] = compared(want["state"], snapshot(engine))
        losses = train(engine, MORE, first=STEPS + 1)
        out["loss"] = max(abs(a - b) for a, b in zip(want["losses"], losses, strict=True))
    except ucp.UcpError as error:
        out["error"] = f"{type(error).__name__}: {error}"
        out["unchanged"] = out["before"] == len(compared(want["state"], snapshot(engine)))
    engine.destroy()
    return out


def cross(
    net: str,
    folder: str,
    source: int,
    targets: tuple[int, ...],
    change: str = "",
    dtype: str = "fp32",
    natives: bool = True,
) -> dict[str, Any]:
    """A save of an attached engine and one of stock's, and loads of both at several stages; by
    stock's own load too at the stage of the save. Stock's files of stage 0 are for that alone."""
    found: dict[str, Any] = {}
    for kind in ("attached", "stock"):
        own = Path(folder) / kind
        want = saved(net, own, source, kind == "attached", change, dtype)
        for zero in targets if source or kind == "attached" else ():
            key = f"{kind} {source} to {zero}"
            found[key] = loaded(net, own, zero, want, change, dtype=dtype)
        if natives:
            control = loaded(net, own, source, want, change, True, dtype)
            found[f"{kind} {source}, control"] = control
    return found


def refused(net: str, zero: int = 1) -> str:
    """What attaching an engine says."""
    return refusal_of(lambda: make_engine(Setup(zero, net=net)).destroy())


def planted(folder: str) -> list[list[str]]:
    """What the comparison says of a count that is wrong by one, and of a transposed buffer with two
    elements swapped."""
    out: list[list[str]] = []
    for net, fault in (("ExtraState", miscount), ("Turned", swap_two)):
        own = Path(folder) / net
        want = saved(net, own, 1, True)
        engine = make_engine(Setup(1, net=net, seed=9))
        ucp.load(engine, own, tag="odd")
        fault(engine.module)
        out.append(compared(want["state"], snapshot(engine)))
        engine.destroy()
    return out


def miscount(module: Any) -> None:
    module.meter.kept["count"] += 1


def swap_two(module: Any) -> None:
    one, other = module.turned[0, 1].clone(), module.turned[1, 0].clone()
    module.turned[0, 1], module.turned[1, 0] = other, one


def converted(folder: str) -> dict[str, Any]:
    """Loads of what `convert` makes of a save; by stock's own load too."""
    out: dict[str, Any] = {}
    for net in ("ExtraState", "Turned"):
        own = Path(folder) / net
        want = saved(net, own, 1, True)
        for to, zero in (("native", 3), ("native", 1), ("universal", 1)):
            made = own / f"{to}{zero}"
            if torch.distributed.get_rank() == 0:
                mesh = ucp.Mesh(dp=2, zero=zero) if to == "native" else None
                ucp.convert(own / "odd", made / "odd", to=to, target=mesh)
            torch.distributed.barrier()
            key = f"{net} {to} {zero}"
            out[key] = loaded(net, made, zero, want)
            if key.endswith("native 1"):
                out[f"{key}, control"] = loaded(net, made, zero, want, native=True)
    return out


def prefixed(folder: str, zero: int, attach: bool) -> dict[str, str]:
    """What loads say of models that were wrapped on one side only."""
    own, out = Path(folder), dict[str, str]()
    for net in ("Net", "Wrapped", "Compiled"):
        saved(net, own / net, zero, attach)
    for source, target in (
        ("Net", "Compiled"),
        ("Compiled", "Net"),
        ("Net", "Wrapped"),
        ("Wrapped", "Net"),
        ("Net", "Wider"),
    ):
        engine = make_engine(Setup(zero, net=target), attach=False)
        before = canonical(engine)
        for allow in ((), ("missing", "extra", "new")):
            try:
                ucp.load(engine, own / source, tag="odd", allow=allow)
            except ucp.UcpError as error:
                out[f"{source} {target} {len(allow)}"] = f"{type(error).__name__}: {error}"
        if differences(before, canonical(engine)):
            raise AssertionError("the engine was changed")
        engine.destroy()
    return out


def under_inference_mode(folder: str) -> dict[str, Any]:
    """Loads inside of torch.inference_mode, by both ways; training goes on after them."""
    out: dict[str, Any] = {}
    for zero, dtype in ((0, "fp32"), (0, "bf16"), (1, "fp32"), (1, "bf16"), (3, "fp32")):
        own = Path(folder) / f"{zero}{dtype}"
        want = saved("Net", own, zero, True, dtype=dtype)
        for through in ("load", "load_checkpoint"):
            engine = make_engine(Setup(zero, dtype, seed=9))
            before = len(compared(want["state"], snapshot(engine)))
            with torch.inference_mode():
                if through == "load":
                    ucp.load(engine, own, tag="odd")
                else:
                    engine.load_checkpoint(str(own), tag="odd")
            after = compared(want["state"], snapshot(engine))
            losses = train(engine, MORE, first=STEPS + 1)
            loss = max(abs(a - b) for a, b in zip(want["losses"], losses, strict=True))
            found = {"error": "", "before": before, "after": after, "loss": loss}
            out[f"{through} {zero} {dtype}"] = found
            engine.destroy()
    return out


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks
STAGES = {0: (0, 3), 1: (1,), 3: (3, 1)}


def require_right(found: dict[str, Any], count: int) -> None:
    """Every load got all of it, and had something to get. Losses are then the same; another stage
    adds in another order, which may change their last bit (under torch 2.14 it does)."""
    assert len(found) == count
    for key, load in found.items():
        assert not load["error"], (key, load["error"])
        assert load["before"] > 10, key  # the comparison sees another model
        source, _, target = key.partition(" to ")
        allowed = 0.0 if not target or source.endswith(target) else 1e-6
        assert load["after"] == [] and load["loss"] <= allowed, (key, load)


def loads_of(source: int, targets: tuple[int, ...]) -> int:
    """How many loads `cross` makes: stock's files of stage 0 are loaded by stock alone."""
    return (2 if source else 1) * len(targets) + 2


@pytest.mark.parametrize("net", ["ExtraState", "Turned", "Alias", "Brackets"])
def test_loads_are_right_where_stocks_are(ranks: RankPool, tmp_path: Path, net: str) -> None:
    for source, targets in STAGES.items():
        for found in ranks.run(2, cross, net, str(tmp_path / str(source)), source, targets):
            require_right(found, loads_of(source, targets))


def test_a_planted_fault_is_seen(ranks: RankPool, tmp_path: Path) -> None:
    """In what modules keep besides tensors, and in a buffer that lies transposed."""
    for faults in ranks.run(2, planted, str(tmp_path)):
        assert [len(fault) for fault in faults] == [1, 1], faults


def test_hooks_that_rename_entries(ranks: RankPool, tmp_path: Path) -> None:
    for net in ("Hooked", "HookedBuffer"):
        for source, targets in STAGES.items():
            folder = str(tmp_path / f"{net}{source}")
            for found in ranks.run(2, cross, net, folder, source, targets):
                require_right(found, loads_of(source, targets))


def test_hooked_files_without_the_model(ranks: RankPool, tmp_path: Path) -> None:
    """The manifest says what a hook called the entries. Stock's files don't: what may be one of
    several things is refused, and not as damage."""
    for net, source, entry, name in (
        ("HookedBuffer", 3, "factor", "scale"),
        ("Hooked", 1, "old_up.weight", "up.weight"),
        ("Hooked", 2, "old_up.weight", "up.weight"),
    ):
        folder = tmp_path / f"{net}{source}"
        (found,) = ranks.run(1, cross, net, str(folder), source, (source,))
        require_right(found, 4)
        assert ucp.verify(folder / "attached", deep=True).findings == ()
        with pytest.raises(UnsupportedError, match="a hook of its state dict") as error:
            ucp.describe(folder / "stock")
        assert f"parameter: {entry}\n" in str(error.value) and name in str(error.value)


def test_parameters_without_elements(ranks: RankPool, tmp_path: Path) -> None:
    for source, targets in {0: (0,), 1: (1, 2), 2: (2, 1)}.items():
        folder = str(tmp_path / str(source))
        for found in ranks.run(2, cross, "Nothings", folder, source, targets):
            require_right(found, loads_of(source, targets))


def test_parameters_frozen_midway(ranks: RankPool, tmp_path: Path) -> None:
    """Their states stay, also at stage 0, as they do under ZeRO; another stage, which has one step
    for all of a group, refuses the two steps."""
    for source, targets in {0: (0, 3), 1: (1, 3)}.items():
        job = cross, "Net", str(tmp_path / str(source)), source, targets
        for found in ranks.run(2, *job, change="freeze_one"):
            if not source:
                assert "different steps" in found.pop("attached 0 to 3")["error"]
            require_right(found, len(found))


def test_conversions_of_odd_models(ranks: RankPool, tmp_path: Path) -> None:
    """What modules keep, and transposed buffers, go into native and universal folders."""
    for found in ranks.run(2, converted, str(tmp_path)):
        require_right(found, 8)


def test_what_no_save_could_hold_is_refused_when_it_is_attached(ranks: RankPool) -> None:
    for net, words in {
        "Expanded": ("wide", "memory of its own", "contiguous()"),
        "Gapped": ("part", "memory of its own", "contiguous()"),
        "Strange": ("meter._extra_state", "odd_models.Strange", "get_extra_state"),
        "Changed": ("scale", "hook", "another tensor"),
        "Added": ("version", "hook", "any names"),
        "LikeSlices": ("experts.w1[3]", "AutoEP", "another name"),
    }.items():
        for said in ranks.run(2, refused, net):
            assert said.startswith("UnsupportedError") and all(w in said for w in words), said


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_prefix_on_one_side_only_is_named(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    for attach in (True, False) if zero else (True,):
        for said in ranks.run(2, prefixed, str(tmp_path / str(attach)), zero, attach):
            for allowed in (0, 3):
                for source, target, words in (
                    ("Net", "Compiled", ("prefix _orig_mod. added", "model.compile()")),
                    ("Compiled", "Net", ("prefix _orig_mod. removed", "torch.compile")),
                    ("Net", "Wrapped", ("prefix module. added", "inside the wrapper")),
                    ("Wrapped", "Net", ("prefix module. removed", "wrap the model as")),
                ):
                    error = said[f"{source} {target} {allowed}"]
                    assert error.startswith("ModelMismatchError"), error
                    assert all(word in error for word in words), error
            assert "the prefix" not in said["Net Wider 0"]  # another model is another model


def test_a_load_under_inference_mode(ranks: RankPool, tmp_path: Path) -> None:
    """Weights are ordinary tensors after it: the run that goes on is the one that was saved."""
    for found in ranks.run(2, under_inference_mode, str(tmp_path)):
        require_right(found, 10)
