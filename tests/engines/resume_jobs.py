"""What the ranks do in the tests of what lies beside tensors: client state, gradients between
steps, schedulers, engines without an optimizer, ranks that fail alone."""

import argparse
import datetime
import enum
import os
import types
import zoneinfo
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.errors import LayoutError
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import oracle_of
from tests.engines.model import Setup, make_engine, train

# ------------------------------------------------ client state


def own_values() -> dict[str, Any]:
    shared = [np.arange(3)]
    return {
        "array": np.arange(6, dtype=np.float32).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "text": np.array(["a", "bcd"]),
        "scalar": np.float64(0.1),
        "int": np.int32(7),
        "flag": np.bool_(True),
        "args": argparse.Namespace(lr=0.1, dtype=torch.bfloat16, inner=argparse.Namespace(a=[1])),
        "space": types.SimpleNamespace(a=1),
        "dtype": torch.float16,
        "name": "torch.float16",
        "shape": torch.Size([2, 3]),
        "tuple": (2, 3),
        "keys": {np.int64(3): "three", (1, torch.float32): "pair"},
        "deep": [{"x": (torch.Size([1]), {np.float32(2.0)})}],
        "one": shared,
        "other": shared,
        "tensor": torch.arange(4),
    }


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return (
            a.dtype == b.dtype
            and a.flags.f_contiguous == b.flags.f_contiguous
            and bool((a == b).all())
        )
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, argparse.Namespace | types.SimpleNamespace):
        return same(vars(a), vars(b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, list | tuple | set):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def client_state(setup: Setup, folder: str) -> list[str]:
    """Names of values that came back changed."""
    engine = make_engine(setup)
    want = own_values()
    engine.save_checkpoint(folder, client_state=want)
    _, have = engine.load_checkpoint(folder)
    changed = [key for key in want if not same(want[key], have.get(key))]
    changed += [] if have["one"] is have["other"] else ["shared"]
    changed += [] if engine.ucp_report.client_state is have else ["report"]
    have["array"][0, 0] = 5  # may be written to
    engine.destroy()
    return changed


class Kind(enum.Enum):
    ONE = 1


def _in_itself() -> list[Any]:
    out: list[Any] = [1]
    out.append({"again": out})
    return out


REFUSED: dict[str, Any] = {
    "zone": lambda: {"at": datetime.datetime.now(zoneinfo.ZoneInfo("UTC"))},
    "parameter": lambda: {"ema": {"w": torch.nn.Parameter(torch.ones(2))}},
    "member": lambda: {"a": [Kind.ONE]},
    "class": lambda: {"kind": Kind},
    "structured": lambda: {"a": np.zeros(2, [("x", "f4")])},
    "objects": lambda: {"a": np.array([None])},
    "sparse": lambda: {"a": torch.eye(2).to_sparse()},
    "subclass": lambda: {"a": type("Mine", (dict,), {})()},
    "itself": lambda: {"a": _in_itself()},
    "reserved": lambda: {"global_steps": 3},
    "no dict": lambda: [1],
    "on rank 1": lambda: {"a": Kind.ONE if dist.get_rank() == 1 else "/a"},
}


def refused_client_states(setup: Setup, folder: str) -> dict[str, tuple[str, str, list[str]]]:
    """For each: class of the error, message, what lies in the folder after it."""
    engine = make_engine(setup)
    out = {}
    for name, make in REFUSED.items():
        said = "", ""
        try:
            engine.save_checkpoint(folder, client_state=make())
        except ucp.UcpError as error:
            said = type(error).__name__, str(error)
        dist.barrier()  # rank 0 takes the folder aside away
        out[name] = (*said, sorted(os.listdir(folder)))
        dist.barrier()
    engine.destroy()
    return out


# ------------------------------------------------ between two steps


def half_step(engine: Any, seed: int = 77, step: bool = True) -> None:
    tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(seed))
    engine.backward(engine(tokens[dist.get_rank() % 2 :][:1]))
    if step:
        engine.step()


def load_in_the_middle(setup: Setup, folder: str, plant: bool = False) -> dict[str, Any]:
    """Two engines load: a fresh one, and one that has taken a half step. Both train on."""
    engine = make_engine(setup)
    train(engine, 2)
    engine.save_checkpoint(folder)
    engine.destroy()
    out: dict[str, Any] = {}
    found = []
    for how in ("fresh", "half", "unstepped"):
        engine = make_engine(setup)
        if how != "fresh":
            half_step(engine, step=how == "half")
        with (
            mock.patch("megatron_ucp.engines.deepspeed.live.drop_gradients", return_value=[])
            if plant
            else mock.MagicMock()
        ):
            engine.load_checkpoint(folder)
        out[how] = [note for note in engine.ucp_report.notes if "waited for a step" in note]
        losses = train(engine, 4, first=2)
        found.append((losses, canonical(engine)))
        engine.destroy()
    (losses, want), *others = found
    out["differences"] = [
        line
        for other, have in others
        for line in differences(want, have) + [""] * (other != losses)
    ]
    return out


def save_in_the_middle(setup: Setup, folder: str) -> dict[str, Any]:
    engine = make_engine(setup)
    train(engine, 2)
    engine.save_checkpoint(folder, tag="whole")
    out: dict[str, Any] = {"whole": engine.ucp_save_report.notes}
    half_step(engine)
    engine.save_checkpoint(folder, tag="half")
    out["half"] = engine.ucp_save_report.notes
    engine.destroy()
    engine = make_engine(setup)
    engine.load_checkpoint(folder, tag="half")
    out["load"] = engine.ucp_report.notes
    engine.destroy()
    return out


# ------------------------------------------------ schedulers


# ------------------------------------------------ without an optimizer


def evaluate(setup: Setup, folder: str, of: str = "weights", plant: bool = False) -> dict[str, Any]:
    """Loads a training checkpoint into an engine that has no optimizer; what differs."""
    import deepspeed

    saved = oracle_of(folder)["states"]["trained"]
    engine = make_engine(setup)
    _, state = engine.load_checkpoint(folder, tag="trained")
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(list(named.values())):
        have = {name: param.detach().clone() for name, param in named.items()}
    if plant:
        next(iter(have.values())).view(-1)[0] += 1
    want = dict(saved["weights"])
    if of == "masters":
        want |= {name: v for (name, key), v in saved["full"].items() if key == "fp32"}
    wrong = [n for n in have if not torch.equal(want[n].to(have[n].dtype), have[n])]
    buffers = dict(engine.module.named_buffers())
    wrong += [n for n, value in saved["values"].items() if not torch.equal(value, buffers[n])]
    out = {"wrong": wrong, "count": len(have), "finite": is_steady(engine)}
    out |= {"steps": engine.global_steps, "note": state["note"]}
    engine.destroy()
    return out


@torch.no_grad()
def large(net: torch.nn.Module) -> None:
    """Two weights that are too large for fp16, of which one is so in any dtype."""
    first = next(one for one in net.parameters() if one.numel() > 1).view(-1)
    first[0], first[1] = 1e5, float("inf")


def evaluate_large(origin: Setup, targets: list[Setup], folder: str) -> list[dict[str, Any]]:
    """Loads weights that are too large for fp16 into engines without an optimizer."""
    make = replace(origin, extra={**origin.extra, "prepare": large})
    engine = make_engine(make)
    engine.save_checkpoint(folder, tag="large")
    engine.destroy()
    out: list[dict[str, Any]] = []
    for target in targets:
        engine = make_engine(target)
        try:
            ucp.load(engine, folder, tag="large")
            out.append({"error": "", "found": ""})
        except ucp.UcpError as error:
            out.append({"error": f"{type(error).__name__}: {error}", "found": error.found})
        engine.destroy()
    return out


def save_idle(setup: Setup, folder: str) -> dict[str, Any]:
    """A save of an engine that has no optimizer, which it loads again: the error, and what lies in
    the folder after."""
    engine = make_engine(setup)
    out: dict[str, Any] = {"error": "", "message": ""}
    try:
        engine.save_checkpoint(folder)
        ucp.load(engine, folder)
    except ucp.UcpError as error:
        out = {"error": type(error).__name__, "message": str(error)}
    dist.barrier()
    out["left"] = sorted(os.listdir(folder))
    engine.destroy()
    return out


def is_steady(engine: Any) -> bool:
    """Whether an evaluation gives a number, and the same one twice."""
    engine.eval()
    losses = [float(engine(torch.arange(10).reshape(2, 5) % 11)) for _ in range(2)]
    return losses[0] == losses[1] == losses[1]


# ------------------------------------------------ failures half-way


def stuck_latest(setup: Setup, folder: str) -> dict[str, Any]:
    """`latest` can't be replaced: the message, and what lies there."""
    from megatron_ucp.formats import output_folder

    engine = make_engine(setup)
    engine.save_checkpoint(folder, tag="first")
    train(engine, 1)
    stock = output_folder.move_pointer

    def move_pointer(path: Path, text: str, sync: Any, **more: Any) -> bool:
        if path.name == "latest":
            raise PermissionError(13, "Permission denied", str(path))
        return stock(path, text, sync, **more)

    with mock.patch.object(output_folder, "move_pointer", move_pointer):
        try:
            engine.save_checkpoint(folder, tag="second")
            message, kind = "", ""
        except ucp.UcpError as error:
            message, kind = str(error), type(error).__name__
    dist.barrier()
    out = {"error": kind, "message": message, "latest": (Path(folder) / "latest").read_text()}
    want = canonical(engine)
    engine.destroy()
    engine = make_engine(setup)
    engine.load_checkpoint(folder, tag="second")
    out["second"] = differences(want, canonical(engine))
    engine.save_checkpoint(folder, tag="third")
    out["then"] = (Path(folder) / "latest").read_text()
    engine.destroy()
    return out


def fails_alone(setup: Setup, folder: str, where: str, raw: bool) -> dict[str, Any]:
    """Describing the engine fails on rank 1 only, in a save or in a load."""
    from megatron_ucp.engines.deepspeed.shard import LocalShard

    engine = make_engine(setup)
    train(engine, 1)
    engine.save_checkpoint(folder, tag="good")
    train(engine, 1, first=1)
    before, listed = canonical(engine), sorted(os.listdir(folder))
    dist.barrier()  # the first rank begins its folder before it waits for anybody
    error = ValueError("planted") if raw else LayoutError("planted")
    fault = mock.patch.object(LocalShard, "part", side_effect=error)
    out: dict[str, Any] = {"error": ""}
    with fault if dist.get_rank() == 1 else mock.MagicMock():
        try:
            if where == "load":
                engine.load_checkpoint(folder)
            else:
                engine.save_checkpoint(folder, tag="bad")
        except Exception as found:
            out["error"] = type(found).__name__
    dist.barrier()
    out["unchanged"] = not differences(before, canonical(engine))
    out["folder"] = sorted(os.listdir(folder)) == listed
    train(engine, 1, first=2)  # nothing is left in the middle, ZeRO-3's parameters included
    engine.save_checkpoint(folder, tag="after")
    engine.load_checkpoint(folder, tag="after")
    engine.destroy()
    return out


def prepare_fails_alone(setup: Setup, folder: str) -> dict[str, Any]:
    """The last thing before the first write fails on rank 1 only: all refuse to go on."""
    from megatron_ucp.engines.deepspeed.optimizer import LiveZero3

    engine = make_engine(setup)
    fault = mock.patch.object(LiveZero3, "prepare", side_effect=LayoutError("planted"))
    out = {"error": "", "step": ""}
    with fault if dist.get_rank() == 1 else mock.MagicMock():
        try:
            ucp.load(engine, folder, tag="trained")
        except ucp.UcpError as error:
            out["error"] = type(error).__name__
    try:
        engine.step()
    except ucp.UcpError as error:
        out["step"] = type(error).__name__
    ucp.load(engine, folder, tag="trained")
    train(engine, 1)
    engine.destroy()
    return out
