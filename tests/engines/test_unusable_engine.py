"""Doors: an engine that is marked unusable gives nothing out by any of them; a fingerprint says of
settings, copies and padding what a load depends on, or another check does; a generator that was
restored is what the next draw sees."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import megatron_ucp as ucp
from megatron_ucp.engines import live
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.messages import DefaultRanks
from tests.engines import model, tensor_jobs
from tests.engines.kinds import kind_of
from tests.engines.megatron_jobs import Mcore
from tests.engines.model import SEQUENCE, VOCAB, Setup, engine_around
from tests.engines.tensor_jobs import Mega
from tests.ranks import RankPool

# ------------------------------------------------ unusable engines


def doors_of(setup: Any, engine: Any, handle: Any, folder: str) -> dict[str, Callable[[], Any]]:
    """All that steps an engine, writes what is in it, or says what it is."""
    found: dict[str, Callable[[], Any]] = {
        "ucp.save": lambda: handle.ucp.save(folder),
        "fingerprint": lambda: ucp.fingerprint(handle),
        "handle.fingerprint": lambda: handle.ucp.fingerprint(),
        "export": lambda: ucp.export_hf(handle, f"{folder}/hf"),
        "handle.export": lambda: handle.ucp.export_hf(f"{folder}/hf2"),
        "hold": lambda: ucp.hold(handle),
        "resize": lambda: ucp.resize(handle, SimpleNamespace(module=torch.nn.Linear(1, 1))),
    }
    if isinstance(setup, Mcore):
        chunk = engine.stack.chunks[0]
        return found | {
            "step": engine.optimizer.step,
            "optimizer.state_dict": engine.optimizer.state_dict,
            "sharded_state_dict": lambda: engine.optimizer.sharded_state_dict({}),
            "chunk.state_dict": chunk.state_dict,
            "forward": lambda: chunk(None, None, None),
        }
    module = engine.module
    engine.zero_gather_16bit_weights_on_model_save = lambda: True
    return found | {
        "step": engine.step,
        "save_checkpoint": lambda: engine.save_checkpoint(folder),
        "the class's save_checkpoint": lambda: type(engine).save_checkpoint(engine, folder),
        "save_16bit_model": lambda: engine.save_16bit_model(folder),
        "save_fp16_model": lambda: engine.save_fp16_model(folder),
        "the class's save_16bit_model": lambda: type(engine).save_16bit_model(engine, folder),
        "module_state_dict": engine.module_state_dict,
        "module.state_dict": module.state_dict,
        "engine.state_dict": engine.state_dict,
        "forward": lambda: engine(torch.zeros(1, SEQUENCE, dtype=torch.long)),
        "the module's forward": lambda: module(torch.zeros(1, SEQUENCE, dtype=torch.long)),
        "a client's": lambda: torch.save(module.state_dict(), f"{folder}/client.pt"),
    }


def unusable(setup: Any, folder: str) -> dict[str, Any]:
    """What each door of an engine says when a load of it failed; what lies in a folder then; and
    what the doors say after a load that was whole."""
    kind = kind_of(setup)
    engine = kind.make(setup)
    handle = kind.handle(engine)
    kind.train(engine, 1)
    handle.ucp.save(f"{folder}/good")
    before = ucp.fingerprint(handle).digest
    with mock.patch("megatron_ucp.reshard.files.execute", side_effect=OSError(5, "gone")):
        said = _said(lambda: ucp.load(handle, f"{folder}/good"))
        assert said.startswith("DamagedFileError"), said
    out = f"{folder}/out"
    Path(out).mkdir(exist_ok=True)
    dist.barrier()
    doors = doors_of(setup, engine, handle, out)
    found: dict[str, Any] = {"said": {name: _said(door) for name, door in doors.items()}}
    dist.barrier()
    found["left"] = [path.name for path in Path(out).rglob("*") if path.is_file()]
    dist.barrier()
    ucp.load(handle, f"{folder}/good")
    found["same"] = ucp.fingerprint(handle).digest == before
    doors = doors_of(setup, engine, handle, out)  # as the engine's methods are again
    again = [name for name in doors if "save" not in name and name not in ("step", "resize")]
    found["then"] = {name: _said(doors[name]) for name in again if "sharded" not in name}
    module = engine.stack.chunks[0] if isinstance(setup, Mcore) else engine.module
    found["hooks"] = len(module._state_dict_pre_hooks)
    kind.close(engine)
    return found


def broken_in_part(setup: Any, folder: str, fill: str) -> dict[str, Any]:
    """What an engine says whose load failed, once its weights alone are filled: what computes, and
    what steps or writes; and after a load of all of it."""
    kind = kind_of(setup)
    engine, other = kind.make(setup), kind.make(setup)
    handle = kind.handle(engine)
    kind.train(engine, 1)
    handle.ucp.save(f"{folder}/good")
    ucp.load(kind.handle(other), f"{folder}/good")
    with mock.patch("megatron_ucp.reshard.files.execute", side_effect=OSError(5, "gone")):
        assert _said(lambda: ucp.load(handle, f"{folder}/good")).startswith("DamagedFileError")
    fills: dict[str, Callable[[], Any]] = {
        "refit": lambda: ucp.refit(kind.handle(other), handle)(),
        "load": lambda: ucp.load(handle, f"{folder}/good", load_optimizer_states=False),
        "module": lambda: ucp.load(handle, f"{folder}/good", load_module_only=True),
    }
    fills[fill]()
    doors = doors_of(setup, engine, handle, f"{folder}/out")
    names = "module.state_dict", "module_state_dict"
    found: dict[str, Any] = {"whole": [_said(doors[name]) for name in names]}
    names = "step", "save_checkpoint", "engine.state_dict", "fingerprint"
    found["broken"] = [_said(doors[name]) for name in names]
    ucp.load(handle, f"{folder}/good")
    kind.train(engine, 1, first=1)
    kind.train(other, 1, first=1)
    found["same"] = ucp.fingerprint(handle).digest == ucp.fingerprint(kind.handle(other)).digest
    return found


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ------------------------------------------------ padding


def padded_bit(setup: Mega, folder: str, others: list[Mega]) -> list[str]:
    """A bit of a padded row of the vocabulary changes in all files of a save; what loads say."""
    engine = tensor_jobs.make(setup)
    tensor_jobs.train(engine, 2)
    engine.save_checkpoint(folder)
    weight = dict(engine.module.named_parameters())["embedding.word_embeddings.weight"]
    row = setup.true_vocab - (setup.tp - 1) * setup.vocab // setup.tp  # on the last rank
    first = weight.detach()[row, :2].clone().view(torch.uint8).numpy().tobytes()
    needle = agree.gather(first)[-1]
    tensor_jobs.close(engine)
    dist.barrier()
    if dist.get_rank() == 0:
        places = sum(_flip(path, needle) for path in sorted(Path(folder).rglob("*_states.pt")))
        assert places >= 2, "the row is in a file of the model and in one of the optimizer"
    dist.barrier()
    found: list[str] = []
    for other in others:
        engine = tensor_jobs.make(other)
        found.append(_said(partial(ucp.load, engine, folder)))
        tensor_jobs.close(engine)
    return found


def _flip(path: Path, needle: bytes) -> int:
    data = path.read_bytes()
    at, places = data.find(needle), 0
    while at >= 0:
        data = data[: at + 1] + bytes([data[at + 1] ^ 2]) + data[at + 2 :]
        at, places = data.find(needle, at + 8), places + 1
    path.write_bytes(data)
    return places


# ------------------------------------------------ copies that differ


def copies_that_differ(setup: Mega, folder: str, param: str) -> dict[str, Any]:
    """The last rank has another copy of a parameter, which is saved; what each way from there
    says."""
    from deepspeed.utils import safe_set_full_fp32_param

    engine = tensor_jobs.make(setup)
    tensor_jobs.train(engine, 1)
    weight = dict(engine.module.named_parameters())[param]
    if dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            weight.view(-1)[0] += 1.0
        if setup.zero:
            safe_set_full_fp32_param(weight, weight.detach().clone())
    engine.save_checkpoint(folder)
    own = weight.detach().clone()
    other = agree.gather(own)[0]
    found: dict[str, Any] = {"saved": [*ucp.report(engine).save.notes]}
    tensor_jobs.close(engine)
    alone = Mega(setup.family, 1, setup.zero, seed=5)
    for name, target in (("same", setup), ("other", alone)):
        engine = tensor_jobs.make(target)
        weight = dict(engine.module.named_parameters())[param]
        found[name] = _said(partial(ucp.load, engine, folder))
        report = ucp.load(engine, folder, allow={"replicas"})
        found[f"{name}, allowed"] = [*report.notes]
        want = own if name == "same" else other
        found[f"{name}, equal"] = bool(torch.equal(weight.detach(), want))
        tensor_jobs.close(engine)
    if dist.get_rank() == 0:
        found["convert"] = _said(lambda: ucp.convert(folder, f"{folder}/c1", mesh="dp=1,zero=1"))
        done = ucp.convert(folder, f"{folder}/c2", mesh="dp=1,zero=1", allow={"replicas"})
        found["convert, allowed"] = [*done.notes]
        found["export"] = [*ucp.export_hf(folder, f"{folder}/hf").notes]
    return found


# ------------------------------------------------ collectives that break

_BROKEN = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"


@contextmanager
def breaks_at(number: int) -> Iterator[list[int]]:
    """Inside, the collective of that number breaks on all ranks, and those after it; what is
    counted."""
    count, inside = [0], [False]  # of an agreement: its messages are no collectives of their own

    def breaking(real: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return real(*args, **kwargs)
            count[0] += 1
            if count[0] > number:
                raise RuntimeError(_BROKEN)
            inside[0] = real in agreements
            try:
                return real(*args, **kwargs)
            finally:
                inside[0] = False

        return collective

    agreements = [getattr(DefaultRanks, name) for name in ("lowest", "agreed", "delivered")]
    names = ("all_gather", "all_gather_into_tensor", "broadcast", "batch_isend_irecv", "barrier")
    with ExitStack() as left:
        for owner, real in [
            *((dist, getattr(dist, name)) for name in names),
            *((DefaultRanks, one) for one in agreements),
        ]:
            left.enter_context(mock.patch.object(owner, real.__name__, breaking(real)))
        yield count


def broken_collectives(setup: Any, folder: str, door: str) -> list[str]:
    """A door whose first collective breaks, whose second one does, and so on, until it is through:
    what is raised each time."""
    kind = kind_of(setup)
    engine = kind.make(setup)
    handle = kind.handle(engine)
    kind.train(engine, 1)
    handle.ucp.save(folder)
    said: list[str] = []
    for number in range(60):
        held = ucp.hold(handle) if door == "load, held" else None
        doors: dict[str, Callable[[], Any]] = {
            "load": lambda: ucp.load(handle, folder),
            "load, held": lambda held=held: ucp.load(handle, held),
            "load_checkpoint": lambda: handle.load_checkpoint(folder),
            "save": lambda number=number: handle.ucp.save(f"{folder}/{number}"),
            "hold": lambda: ucp.hold(handle),
            "fingerprint": lambda: ucp.fingerprint(handle),
            "export": lambda number=number: ucp.export_hf(handle, f"{folder}/hf{number}"),
        }
        with breaks_at(number) as count:
            said.append(_said(doors[door]))
        if count[0] <= number:
            break
        handle.ucp.load(folder)  # the one that was filled in part is whole again
    kind.close(engine)
    return said


# ------------------------------------------------ settings


SETTINGS: dict[str, Any] = {"nesterov": True, "my_own": "text", "maximize": True, "fused": False}


def settings_in_fingerprint() -> dict[str, tuple[bool, list[str]]]:
    """For each setting of a group whether the digest is another one with it, and what differs."""
    found: dict[str, tuple[bool, list[str]]] = {}
    engine = model.make_engine(Setup(1))
    before = ucp.fingerprint(engine)
    for name, value in SETTINGS.items():
        group = engine.optimizer.param_groups[0]
        had = group.get(name)
        group[name] = value
        now = ucp.fingerprint(engine)
        found[name] = now.digest != before.digest, now.differences(before)
        if had is None:
            del group[name]
        else:
            group[name] = had
    group["decoupled_weight_decay"] = False  # which makes Adam of AdamW
    now = ucp.fingerprint(engine)
    found["the rule"] = now.digest != before.digest, [text for *_, text in now.compared(before)]
    engine.destroy()
    return found


# ------------------------------------------------ generators


class Noisy(torch.nn.Module):
    """A model whose loss depends on the next draws."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCAB, 8)
        self.head = torch.nn.Linear(8, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.dropout(self.embed(tokens), 0.5)
        return self.head(hidden).square().mean()


def noisy_losses(folder: str, workers: int, stop: int) -> tuple[list[float], list[float]]:
    """Losses of a run with dropout after a save in the middle of an epoch, or at its end; and those
    of its restart."""

    data = torch.from_numpy(np.arange(8 * SEQUENCE).reshape(8, SEQUENCE) % VOCAB)

    def begun() -> tuple[Any, Any]:
        torch.manual_seed(3)
        net = Noisy()
        engine = engine_around(
            net,
            torch.optim.AdamW(net.parameters(), lr=0.05),
            {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}},
        )
        sampler = DistributedSampler(TensorDataset(data), shuffle=True, seed=1)
        whole: Any = TensorDataset(data)
        loader = DataLoader(whole, batch_size=2, sampler=sampler, num_workers=workers)
        resumable = ucp.ResumableLoader(loader)
        return ucp.attach(engine, loader=resumable), resumable

    def trained(engine: Any, loader: Any, steps: int) -> list[float]:
        losses: list[float] = []
        for epoch in range(loader.epoch, 9):
            loader.set_epoch(epoch)
            for (tokens,) in loader:
                loss = engine(tokens)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss))
                if engine.global_steps == stop and not Path(folder, "latest").exists():
                    engine.save_checkpoint(folder)
                if len(losses) == steps:
                    return losses
        return losses

    engine, loader = begun()
    whole = trained(engine, loader, stop + 5)
    engine.destroy()
    engine, loader = begun()
    engine.load_checkpoint(folder)
    again = trained(engine, loader, 5)
    engine.destroy()
    return whole[stop:], again


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(
    "setup", [Setup(3, "bf16"), Setup(1), Setup(0), Mcore(tp=2)], ids=lambda one: repr(one)[:24]
)
def test_an_unusable_engine_gives_nothing_out(ranks: RankPool, tmp_path: Path, setup: Any) -> None:
    for found in ranks.run(2, unusable, setup, str(tmp_path)):
        for door, said in found["said"].items():
            assert said.startswith("EngineUnusableError"), (door, said)
        assert found["left"] == [], "something was written"
        assert found["same"] and found["hooks"] == 0
        for door, said in found["then"].items():
            assert not said.startswith("EngineUnusableError"), door
        assert found["then"]["fingerprint"] == "" and found["then"]["hold"] == ""


@pytest.mark.parametrize("fill", ["refit", "load", "module"])
def test_what_fills_a_part_opens_that_part_alone(
    ranks: RankPool, tmp_path: Path, fill: str
) -> None:
    """Weights that are filled may be written and computed with; moments that are nobody's may not
    be stepped with, whatever filled the weights."""
    for found in ranks.run(2, broken_in_part, Setup(1, "bf16"), str(tmp_path), fill):
        assert found["whole"] == ["", ""] and found["same"]
        for said in found["broken"]:
            assert said.startswith("EngineUnusableError") and "states of the optimizer" in said


# Methods whose names say that they train, compute, write or give out what an engine has, and that
# do not: they fill it, or take parts of a dictionary that somebody gives them.
HARMLESS = {
    *("load_checkpoint", "_load_checkpoint", "_load_zero_checkpoint", "load_universal_checkpoint"),
    *("load_module_state_dict", "load_moe_state_dict", "_get_non_moe_state_dict"),
}


def test_every_method_that_gives_values_out_has_a_door() -> None:
    """A new one of DeepSpeed's is asked: is it closed, or named here with those that are
    harmless?"""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    wanted = re.compile("forward|step|train_batch|eval_batch|_?(save|load)_.*|.*state_dict")
    theirs = {
        name
        for one in {*DeepSpeedEngine.__mro__, *PipelineEngine.__mro__}
        for name, value in vars(one).items()
        if one.__module__.startswith("deepspeed") and callable(value) and wanted.fullmatch(name)
    }
    assert len(theirs) > 15
    assert theirs - {*live._OF_ALL, *live._OF_WEIGHTS} == HARMLESS


def test_a_bit_of_a_padded_row_is_seen(ranks: RankPool, tmp_path: Path) -> None:
    saved = Mega("gpt", 2, 1, true_vocab=21, vocab=24, seed=3)
    same = Mega("gpt", 2, 1, true_vocab=21, vocab=24, seed=5)
    other = Mega("gpt", 1, 1, true_vocab=21, vocab=24, seed=5)
    for found in ranks.run(2, padded_bit, saved, str(tmp_path), [same, other]):
        for said in found:
            assert said.startswith("DamagedFileError"), said


@pytest.mark.parametrize("zero", [0, 1])
def test_copies_that_differed_are_refused_on_every_mesh(
    ranks: RankPool, tmp_path: Path, zero: int
) -> None:
    param = "decoder.final_layernorm.weight"
    saved = Mega("llama", 2, zero)
    found, other = ranks.run(2, copies_that_differ, saved, str(tmp_path), param)
    for rank in (found, other):
        assert any("copies of one parameter differ" in note for note in rank["saved"])
        for name in ("same", "other"):
            assert rank[name].startswith("ForeignFileError") and param in rank[name], rank[name]
            assert 'allow={"replicas"}' in rank[name]
            said = " ".join(rank[f"{name}, allowed"])
            assert "copies differed between ranks" in said and param in said
            assert rank[f"{name}, equal"]
    assert found["convert"].startswith("ForeignFileError")
    assert any(param in note for note in found["convert, allowed"])
    assert any(param in note for note in found["export"])


BROKEN = ("load", "load, held", "load_checkpoint", "save", "hold", "fingerprint", "export")


@pytest.mark.parametrize("door", BROKEN)
@pytest.mark.parametrize(
    "setup",
    [
        Setup(1),
        pytest.param(Mega("llama", 2, 1), marks=pytest.mark.slow),
        pytest.param(Mcore(), marks=pytest.mark.slow),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_collective_that_breaks_is_a_rank_error(
    ranks: RankPool, tmp_path: Path, setup: Any, door: str
) -> None:
    if isinstance(setup, Mcore) and door == "load_checkpoint":
        setup = Setup(3)  # a stack has none
    if isinstance(setup, Setup) and door == "export":
        setup = Mega("gpt", 1, 1, groups=4)  # a model without a config has no export
    for said in ranks.run(2, broken_collectives, setup, str(tmp_path), door):
        *broken, last = said
        assert last == "" and len(broken) >= 2
        for text in broken:
            assert text.startswith("RankError"), text


def test_every_setting_is_in_the_fingerprint(ranks: RankPool) -> None:
    (found,) = ranks.run(1, settings_in_fingerprint)
    for name in SETTINGS:
        changes, differences = found[name]
        if name == "fused":  # how torch computes a step: no value depends on it
            assert not changes and not differences
        else:
            assert changes and differences, name
    assert found["the rule"][0] and "stepped as=AdamW" in found["the rule"][1][0]


def test_a_kept_fingerprint_that_is_not_its_digest_is_refused(tmp_path: Path) -> None:
    table = {"a": {"value": "float32 00000000"}}
    digest = ucp_digest(table)
    path = tmp_path / "kept.json"
    for said, is_right in ((digest, True), ("0" * 64, False)):
        kept = {"digest": said, "table": table, "settings": {}}
        path.write_text(json.dumps({"fingerprint": kept}))
        if is_right:
            assert ucp.fingerprint(path).digest == digest
        else:
            with pytest.raises(ucp.UsageError, match="is not what its digest was made of"):
                ucp.fingerprint(path)


def ucp_digest(table: Any) -> str:
    """As `megatron-ucp inspect --fingerprint` prints it."""
    from megatron_ucp.reshard.fingerprint import Fingerprint

    return Fingerprint(table, {}).digest


@pytest.mark.parametrize(("workers", "stop"), [(0, 3), (0, 4), (2, 3)])
def test_losses_with_dropout_are_the_runs(
    ranks: RankPool, tmp_path: Path, workers: int, stop: int
) -> None:
    """In the middle of an epoch of two steps, and at its end."""
    job = noisy_losses
    for whole, again in ranks.run(2, job, str(tmp_path), workers, stop, timeout_s=100):
        assert whole == again and len({*whole}) == 5
