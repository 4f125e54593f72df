"""A third engine and a format of its own, written on the package's protocols alone: no module of
the package changes for them."""

from pathlib import Path
from typing import Any
from unittest import mock

import torch

import megatron_ucp as ucp
from megatron_ucp.formats import registry, tags
from tests.engines.toy import Program
from tests.formats.toy_format import STATES, ToyFormat
from tests.ranks import ROOT, RankPool


def net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    found = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3)
    )
    found[0].bias.requires_grad_(False)
    return found


def trained(seed: int = 0, steps: int = 2) -> Program:
    program = Program(net(seed))
    for _ in range(steps):
        program.step(program.module(torch.randn(4, 5)).square().mean())
    return program


def deepspeed_engine(seed: int) -> Any:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    module = net(seed)
    params = [param for param in module.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=module, model_parameters=params, config=config)
    return ucp.attach(engine)


def journeys(folder: str, plant: bool = False) -> dict[str, Any]:
    """Where a training state went, and whether its fingerprint is the one that it had. `plant`: a
    bit of the saved file is another one."""
    rows, endings = (ToyFormat(), *registry.FORMATS), (*tags.STATE_FILES, STATES)
    known = mock.patch.object(tags, "STATE_FILES", endings)
    with mock.patch.object(registry, "FORMATS", rows), known:
        return _journeys(Path(folder), plant)


def _journeys(folder: Path, plant: bool) -> dict[str, Any]:
    program, out = trained(), dict[str, Any]()
    want = ucp.fingerprint(program).table
    saved = program.ucp.save(folder, epoch=3)
    if plant:
        path = folder / "step2" / STATES
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        try:
            ucp.load(trained(7), folder)
        except ucp.UcpError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        return {"refused": ""}
    out["verified"] = [str(one) for one in ucp.verify(folder, deep=True).findings]
    out["files"] = sorted(path.name for path in Path(saved.path).iterdir())
    fresh = trained(7, steps=1)
    report = ucp.load(fresh, folder)
    out["own"] = ucp.fingerprint(fresh).table == want, fresh.global_steps, report.client_state
    out["notes"] = report.notes
    program.step(program.module(torch.ones(4, 5)).square().mean())
    fresh.step(fresh.module(torch.ones(4, 5)).square().mean())
    out["goes on"] = ucp.fingerprint(program).differences(ucp.fingerprint(fresh))
    want = ucp.fingerprint(program).table
    engine = deepspeed_engine(5)
    program.ucp.save(folder)
    ucp.load(engine, folder)
    out["into DeepSpeed"] = ucp.fingerprint(engine).table == want
    held = ucp.hold(program)
    other = deepspeed_engine(6)
    ucp.load(other, held)
    out["held, into DeepSpeed"] = ucp.fingerprint(other).table == want
    engine.save_checkpoint(str(folder / "deepspeed"))
    back = trained(9)
    ucp.load(back, folder / "deepspeed")
    out["back"] = ucp.fingerprint(back).table == want
    engine.destroy()
    other.destroy()
    return out


# ------------------------------------------------ tests


def test_a_third_engine_does_all_that_the_others_do(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, journeys, str(tmp_path))
    assert found.pop("own") == (True, 2, {"epoch": 3})
    assert found.pop("verified") == [] and found.pop("goes on") == []
    assert "toy_states.safetensors" in found.pop("files")
    assert found.pop("notes") == ()
    assert found == {"into DeepSpeed": True, "held, into DeepSpeed": True, "back": True}


def test_its_files_are_compared_with_what_was_saved(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, journeys, str(tmp_path), plant=True)
    assert found["refused"].startswith("ForeignFileError"), found


def test_they_are_as_small_as_the_pages_say() -> None:
    lines = {
        name: len((ROOT / "tests" / name).read_text().splitlines())
        for name in ("engines/toy.py", "formats/toy_format.py")
    }
    assert lines["engines/toy.py"] <= 270 and lines["formats/toy_format.py"] <= 125
