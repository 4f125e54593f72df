"""Optimizers are who they are; schedules and groups with numpy's values go on as the run's; what
can't be represented is refused when it is attached."""

import decimal
import enum
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences
from tests.engines.masters import base_of
from tests.engines.model import Setup, engine_around, make_engine, train
from tests.ranks import RankPool

KINDS = ("AdamW", "Adam", "RAdam", "NAdam", "FusedAdam")


def save_all(folder: str, zero: int, attach: bool) -> None:
    """A tag for each kind of Adam."""
    for kind in KINDS:
        engine = make_engine(Setup(zero, "bf16", kind), attach)
        train(engine, 2)
        engine.save_checkpoint(folder, tag=kind)
        engine.destroy()


def load_all(folder: str, zero: int, kind: str, **options: Any) -> dict[str, Any]:
    """For each tag: the error, or the notes, and whether the engine's groups say what they did."""
    out = {}
    for tag in KINDS:
        engine = make_engine(Setup(zero, "bf16", kind, seed=9), attach=False)
        before, rules = canonical(engine), _rules(engine)
        try:
            notes = list(ucp.load(engine, folder, tag, **options).notes)
            out[tag] = {"error": "", "notes": notes, "rules": _rules(engine) == rules}
        except ucp.UcpError as error:
            unchanged = not differences(before, canonical(engine))
            out[tag] = {"error": str(error), "unchanged": unchanged}
        engine.destroy()
    return out


def _rules(engine: Any) -> list[Any]:
    return [group.get("decoupled_weight_decay") for group in base_of(engine).param_groups]


def milestones(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, np.array([1, 3, 5]), 0.3)


def linspaced(optimizer: Any) -> Any:
    for group, rate in zip(optimizer.param_groups, np.linspace(1e-3, 1e-2, 2), strict=True):
        group["lr"] = rate
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def plain_milestones(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 5], 0.3)


SCHEDULES = {f.__name__: f for f in (milestones, linspaced, plain_milestones)}


def scheduled(zero: int, name: str, attach: bool) -> Any:
    engine = make_engine(Setup(zero), attach=False)
    engine.lr_scheduler = SCHEDULES[name](base_of(engine))
    return ucp.attach(engine) if attach else engine


def rates(engine: Any, steps: int) -> list[list[float]]:
    out = []
    for number in range(steps):
        train(engine, 1, first=number)
        out.append([float(group["lr"]) for group in base_of(engine).param_groups])
    return out


def resumed_rates(folder: str, name: str, attach: bool) -> dict[str, Any]:
    """The rates of a run, and those after a load of its checkpoint on the same and another stage,
    by this package and by stock, and from a conversion."""
    engine = scheduled(1, name, attach)
    train(engine, 1)
    engine.save_checkpoint(folder, tag=name)
    out: dict[str, Any] = {"run": rates(engine, 5)}
    engine.destroy()
    ucp.convert(Path(folder) / name, Path(folder) / "converted", target=ucp.Mesh(dp=1, zero=3))
    for way, zero, tag in (("same", 1, name), ("another", 3, name), ("converted", 3, "converted")):
        engine = scheduled(zero, name, attach=False)
        report = ucp.load(engine, folder, tag)
        out[way] = rates(engine, 5)
        out[f"{way} notes"] = [note for note in report.notes if "random" not in note]
        engine.destroy()
    engine = scheduled(1, name, attach=False)
    engine.load_checkpoint(folder, tag=name)
    out["stock"] = rates(engine, 5)
    engine.destroy()
    return out


def own_keys(folder: str) -> dict[str, Any]:
    """A group holds a key that the engine's group has not, and one that has another value there."""
    engine = make_engine(Setup(1))
    base_of(engine).param_groups[0]["layer_id"] = np.int64(3)
    base_of(engine).param_groups[0]["foreach"] = False
    train(engine, 1)
    engine.save_checkpoint(folder, tag="tag")
    engine.destroy()
    out: dict[str, Any] = {}
    for way, options in {
        "all": {},
        "weights": {"load_module_only": True},
        "masters": {"load_optimizer_states": False},
        "config": {"hyper": "config"},
    }.items():
        engine = make_engine(Setup(3), attach=False)
        notes = ucp.load(engine, folder, "tag", **options).notes
        group = base_of(engine).param_groups[0]
        out[way] = repr(group.get("layer_id")), group["foreach"], list(notes)
        engine.destroy()
    return out


def refused_at_attach() -> dict[str, str]:
    """What attach says of values that no load could give back, and with "values" allowed, which
    is no way out where a file can't hold them, or nobody can read the rest of it."""
    out = {}
    makes = {
        "open file": lambda: open("/dev/null"),  # noqa: SIM115
        "lambda": lambda: lambda: 1,
        "structured array": lambda: np.zeros(2, [("x", "f4")]),
        "local class": lambda: type("Local", (), {})(),
    }
    for name, make in makes.items():
        for place in ("scheduler", "group"):
            for allow in ((), ("values",)):
                engine = make_engine(Setup(1), attach=False)
                if place == "scheduler":
                    engine.lr_scheduler.mine = make()
                else:
                    base_of(engine).param_groups[0]["mine"] = make()
                try:
                    ucp.attach(engine, allow=allow)
                    out[f"{name}, {place}, {len(allow)}"] = ""
                except ucp.UcpError as error:
                    out[f"{name}, {place}, {len(allow)}"] = str(error)
                engine.destroy()
    return out


class Mine(enum.Enum):
    HERS = 1


def left_to_the_engine(folder: str, attach: bool) -> dict[str, Any]:
    """A value of a scheduler that is beyond us: the rest loads, where that is allowed."""
    engine = make_engine(Setup(1), attach)
    engine.lr_scheduler.mine = Mine.HERS
    train(engine, 2)
    engine.save_checkpoint(folder, tag="tag")
    want = engine.lr_scheduler.last_epoch
    engine.destroy()
    out: dict[str, Any] = {"want": want}
    for allow in ((), ("values",)):
        engine = make_engine(Setup(1), attach=False)
        engine.lr_scheduler.mine = "the engine's"
        try:
            report = ucp.load(engine, folder, "tag", allow=allow)
            notes = [note for note in report.notes if "mine" in note]
            out[str(allow)] = engine.lr_scheduler.mine, engine.lr_scheduler.last_epoch, notes
        except ucp.UcpError as error:
            out[str(allow)] = type(error).__name__, str(error)
        engine.destroy()
    return out


class Slotted:
    __slots__ = ("one",)

    def __init__(self) -> None:
        self.one = 1


class Sub(dict[str, int]):
    pass


# values of which a save passed, and which no load took
LATE: dict[str, Any] = {
    "range as key": lambda: {range(3): 1},
    "dtype as key": lambda: {np.dtype("f4"): 1},
    "long key": lambda: {tuple(range(2000)): 1},
    "deep key": lambda: {((((((((((1,),),),),),),),),),): 1},
    "shared too often": lambda: _doubled(24),
    "deep by sharing": lambda: _nested(200),
    "subclass": lambda: Sub(a=1),
    "slots": Slotted,
    "uuid": lambda: uuid.UUID(int=5),
    "decimal": lambda: decimal.Decimal("1.5"),
    "generator": torch.Generator,
    "empty text of numpy": lambda: [np.str_("")],  # whose pickle says another dtype
}
# of these the class is strange, and the rest of the file can be read
BY_CLASS = ("subclass", "slots", "uuid", "decimal", "generator", "empty text of numpy")
# values that look alike, and come back
FINE: dict[str, Any] = {
    "nan in a set": lambda: {float("nan")},
    "shared": lambda: _doubled(10),
    "nested": lambda: _nested(60),
    "keys": lambda: {(1, ("a", None)): 1, np.int64(3): 2, torch.float32: 3},
}


def _doubled(levels: int) -> Any:
    value: Any = [1]
    for _ in range(levels):
        value = [value, value]
    return value


def _nested(levels: int) -> Any:
    value: Any = [1]
    for _ in range(levels):
        value = [value]
    return value


def late(folder: str, place: str) -> dict[str, Any]:
    """What a save says of each value in a place, and whether a load gives back what it took. Where
    groups and schedulers are allowed to hold anything, the rest has to load."""
    out: dict[str, Any] = {}
    for name, make in {**LATE, **FINE}.items():
        for allow in ((), ("values",)) if place != "client state" and name in LATE else ((),):
            engine = make_engine(Setup(1), attach=False)
            engine = ucp.attach(engine, allow=allow)
            train(engine, 1)
            client = {"mine": make()} if place == "client state" else {}
            if place == "scheduler":
                engine.lr_scheduler.mine = make()
            elif place == "group":
                base_of(engine).param_groups[0]["mine"] = make()
            tag = f"{len(out)}"
            try:
                engine.save_checkpoint(folder, tag=tag, client_state=client)
                said = "saved"
            except ucp.UcpError as error:
                said = type(error).__name__
            if said == "saved":
                said += ", " + _loaded(folder, tag, place, allow)
            out[f"{name}{', allowed' if allow else ''}"] = said
            engine.destroy()
    return out


def _loaded(folder: str, tag: str, place: str, allow: Any) -> str:
    engine = make_engine(Setup(1), attach=False)
    try:
        report = ucp.load(engine, folder, tag, allow=allow)
        return "loaded" if report.global_steps == 1 else "lost"
    except ucp.UcpError as error:
        return str(error)
    finally:
        engine.destroy()


def on_one_rank(folder: str) -> str:
    """A client state that only one rank can't save: all of them say so."""
    engine = make_engine(Setup(1))
    client = {"mine": _nested(200) if torch.distributed.get_rank() == 1 else 1}
    try:
        engine.save_checkpoint(folder, tag="tag", client_state=client)
    except ucp.UcpError as error:
        return type(error).__name__
    finally:
        engine.destroy()
    return "saved"


def in_another_order(folder: str) -> list[str]:
    """Notes of a save where ranks filled their dictionaries in another order."""
    engine = make_engine(Setup(1))
    keys = ["a", "b", (1, 2)]
    order = keys if torch.distributed.get_rank() else keys[::-1]
    client = {"mine": dict.fromkeys(order, 1), "count": Counter(dict.fromkeys(order, 2))}
    base_of(engine).param_groups[0]["mine"] = dict.fromkeys(order, 1)
    engine.save_checkpoint(folder, tag="tag", client_state=client)
    notes = list(engine.ucp_save_report.notes)
    engine.destroy()
    return notes


def _sequential(optimizer: Any) -> Any:
    kinds = torch.optim.lr_scheduler
    parts = [kinds.LinearLR(optimizer, 0.2, 1.0, 2), kinds.CosineAnnealingLR(optimizer, 9)]
    return kinds.SequentialLR(optimizer, parts, [3])


def _chained(optimizer: Any) -> Any:
    kinds = torch.optim.lr_scheduler
    parts = [kinds.LambdaLR(optimizer, lambda n: 1 / (1 + n)), kinds.ExponentialLR(optimizer, 0.9)]
    return kinds.ChainedScheduler(parts, optimizer)


NESTED = {"SequentialLR": _sequential, "ChainedScheduler": _chained}


def _in_groups(schedule: str, way: str, attach: bool) -> Any:
    """An engine with two rates for four parameters; `way` says how the groups stand."""

    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1))
    first, last = ({"params": list(part.parameters())} for part in net)
    groups = [{**first, "lr": 1e-2}, {**last, "lr": 1e-4}]
    if way == "swapped":
        groups.reverse()
    if way == "split":
        groups = [{**g, "params": [p]} for g in reversed(groups) for p in g["params"]]
    optimizer = torch.optim.AdamW(groups)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
    }
    engine = engine_around(net, optimizer, config, lr_scheduler=NESTED[schedule](optimizer))
    return ucp.attach(engine) if attach else engine


def _rates_by_parameter(engine: Any, steps: int, first: int) -> list[dict[str, float]]:
    names = {id(p): name for name, p in engine.module.named_parameters()}
    out: list[dict[str, float]] = []
    for number in range(first, first + steps):
        rows = torch.rand(4, 6, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(rows).square().mean())
        engine.step()
        groups = zip(engine.optimizer.bit16_groups, base_of(engine).param_groups, strict=True)
        out.append({names[id(p)]: float(g["lr"]) for params, g in groups for p in params})
    return out


def nested_rates(folder: str, schedule: str) -> dict[str, Any]:
    """The next rates of a run with schedulers in a scheduler, and those after a load in other
    groups, by parameter."""
    engine = _in_groups(schedule, "", attach=True)
    _rates_by_parameter(engine, 2, 0)
    engine.save_checkpoint(folder, tag=schedule)
    out: dict[str, Any] = {"run": _rates_by_parameter(engine, 4, 2)}
    engine.destroy()
    for way in ("same", "swapped", "split"):
        engine = _in_groups(schedule, way, attach=False)
        ucp.load(engine, folder, schedule)
        out[way] = _rates_by_parameter(engine, 4, 2)
        engine.destroy()
    return out


def _own_adam(decoupled: bool, by_config: bool) -> Any:
    """An engine with DeepSpeed's Adam on the host."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
        "steps_per_print": 10**9,
    }
    made: dict[str, Any] = {"model_parameters": net.parameters()}
    if by_config:
        params = {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": decoupled}
        config["optimizer"] = {"type": "Adam", "params": params}
    else:
        made = {"optimizer": DeepSpeedCPUAdam(net.parameters(), lr=1e-2, adamw_mode=decoupled)}
    return deepspeed.initialize(model=net, config=config, dist_init_required=False, **made)[0]


def own_adams(folder: str, by_config: bool) -> dict[tuple[bool, bool], str]:
    """What a load says of stock files of one Adam in an engine with one."""
    out: dict[tuple[bool, bool], str] = {}
    for wrote in (True, False):
        engine = _own_adam(wrote, by_config)
        engine.backward(engine(torch.ones(4, 6)).square().mean())
        engine.step()
        engine.save_checkpoint(folder, tag=str(wrote))
        engine.destroy()
        for loads in (True, False):
            engine = _own_adam(loads, by_config)
            try:
                out[wrote, loads] = " ".join(ucp.load(engine, folder, str(wrote)).notes)
            except ucp.UcpError as error:
                out[wrote, loads] = str(error)
            engine.destroy()
    return out


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks
DECOUPLED = {"AdamW", "FusedAdam"}


@pytest.mark.parametrize("attach", [True, False])
def test_another_rule_is_refused_unless_it_is_allowed(
    ranks: RankPool, tmp_path: Path, attach: bool
) -> None:
    ranks.run(1, save_all, str(tmp_path), 1, attach, timeout_s=200)
    for kind in ("AdamW", "Adam"):
        (refused,) = ranks.run(1, load_all, str(tmp_path), 1, kind)
        (allowed,) = ranks.run(1, load_all, str(tmp_path), 1, kind, allow={"optimizer"})
        for tag, found in refused.items():
            same = tag == kind or {tag, kind} == DECOUPLED
            if tag == "FusedAdam" and not attach:
                continue  # its files don't say which Adam it is
            if tag == "NAdam":  # keeps another state, which no allowance gives
                assert "keeps other states" in found["error"]
                continue
            assert bool(found["error"]) is not same, (tag, kind, found)
            if same:
                continue
            assert found["unchanged"] and 'allow={"optimizer"}' in found["error"]
            assert f"found: {kind}" in found["error"]
            assert allowed[tag]["rules"] and not allowed[tag]["error"]
            assert any("the engine steps by" in note for note in allowed[tag]["notes"])


def test_deepspeeds_own_adams_in_stock_files(ranks: RankPool, tmp_path: Path) -> None:
    (said,) = ranks.run(1, own_adams, str(tmp_path / "config"), True)
    for (wrote, loads), text in said.items():
        assert ("steps by another rule" in text) is (wrote != loads), text
        assert "don't say" not in text
    (said,) = ranks.run(1, own_adams, str(tmp_path / "own"), False)
    for text in said.values():  # nothing says it
        assert "the files don't say by which rule of Adam the run stepped" in text


@pytest.mark.parametrize("name", ["milestones", "linspaced", "plain_milestones"])
@pytest.mark.parametrize("attach", [True, False])
def test_the_next_rates_are_those_of_the_run(
    ranks: RankPool, tmp_path: Path, name: str, attach: bool
) -> None:
    (found,) = ranks.run(1, resumed_rates, str(tmp_path), name, attach, timeout_s=200)
    assert found["run"] == found["stock"] and found["run"][0] != found["run"][4]
    for way in ("same", "another", "converted"):
        assert found[way] == found["run"], way
        if attach:
            assert found[f"{way} notes"] == []


@pytest.mark.parametrize("schedule", ["SequentialLR", "ChainedScheduler"])
def test_schedulers_in_a_scheduler_follow_the_parameters(
    ranks: RankPool, tmp_path: Path, schedule: str
) -> None:
    (found,) = ranks.run(1, nested_rates, str(tmp_path), schedule)
    assert found["run"][0] != found["run"][3]
    for way in ("same", "swapped", "split"):
        assert found[way] == found["run"], way


def test_a_groups_own_keys(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, own_keys, str(tmp_path))
    assert found["all"][:2] == ("np.int64(3)", None)
    assert any("foreach" in note and "stays" in note for note in found["all"][2])
    for way in ("weights", "masters", "config"):
        assert found[way][:2] == ("None", None), way
    assert ucp.verify(tmp_path, deep=True).findings == ()


def test_what_no_load_could_give_back_is_refused_at_attach(ranks: RankPool) -> None:
    (found,) = ranks.run(1, refused_at_attach)
    assert len(found) == 16
    for case, said in found.items():
        assert said and ('allow={"values"}' in said) is case.endswith("0"), (case, said)
        assert "mine" in said or case.endswith("1"), (case, said)


@pytest.mark.parametrize("attach", [True, False])
def test_one_value_beyond_us_leaves_the_rest(ranks: RankPool, tmp_path: Path, attach: bool) -> None:
    (found,) = ranks.run(1, left_to_the_engine, str(tmp_path), attach)
    name, said = found["()"]
    assert (
        name == "UnsafePickleError" and ("mine" if attach else "test_rules_of_steps.Mine") in said
    )
    mine, epoch, (note,) = found["('values',)"]
    assert (mine, epoch) == ("the engine's", found["want"]) and "Mine" in note


@pytest.mark.parametrize("place", ["scheduler", "group", "client state"])
def test_a_save_that_passes_is_one_that_loads(ranks: RankPool, tmp_path: Path, place: str) -> None:
    (found,) = ranks.run(1, late, str(tmp_path), place, timeout_s=200)
    for name in LATE:
        assert found[name] == "SaveError", (name, found[name])
        if place != "client state":
            allowed = "saved, loaded" if name in BY_CLASS else "SaveError"
            assert found[f"{name}, allowed"] == allowed, name
    for name in FINE:
        assert found[name] == "saved, loaded", (name, found[name])


def test_what_one_rank_alone_can_not_save_is_an_error_on_all(
    ranks: RankPool, tmp_path: Path
) -> None:
    assert ranks.run(2, on_one_rank, str(tmp_path)) == ["SaveError", "SaveError"]


def test_the_order_of_a_mapping_is_no_difference(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, in_another_order, str(tmp_path)) == [[], []]
