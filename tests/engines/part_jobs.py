"""What the ranks do in the tests of models that are another one in part: other rows of a
vocabulary, parts that a checkpoint lacks, words that allow something."""

from typing import Any

import torch

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import oracle_of
from tests.engines.model import Setup, make_engine, train


def resize(setup: Setup, folder: str, step: bool = True) -> dict[str, Any]:
    """A load into a model with other rows: refused without the allowance; with it, what is not as
    it should be: rows that both have from the checkpoint, the others as they were, states zero."""
    oracle = oracle_of(folder)["states"]["filled"]
    engine = make_engine(setup)
    before = canonical(engine)
    out: dict[str, Any] = {"refusal": "", "id": ""}
    try:
        ucp.load(engine, folder, tag="filled")
    except ucp.UcpError as error:
        out |= {"refusal": str(error), "id": error.id}
    out["unchanged"] = differences(before, canonical(engine)) == []
    report = ucp.load(engine, folder, tag="filled", allow={"vocab"})
    have = canonical(engine)
    wrong, compared = [], 0
    for key, want in oracle["full"].items():
        found, rows = have["full"][key], min(len(want), len(have["full"][key]))
        own = before["full"].get(key, torch.zeros_like(found))
        rest = own[rows:] if key[1] == "fp32" else torch.zeros_like(found[rows:])
        same = torch.equal(found[:rows], want[:rows]) and torch.equal(found[rows:], rest)
        compared += len(found) - rows
        wrong += [] if same else [key]
    out |= {"wrong": wrong, "new": compared, "notes": report.notes, "steps": report.global_steps}
    out["scalars"] = [k for k, v in oracle["scalars"].items() if have["scalars"].get(k) != v]
    out["weights"] = [
        name
        for name, weight in have["weights"].items()
        if (name, "fp32") in have["full"]
        and not torch.equal(weight, have["full"][name, "fp32"].to(weight.dtype))
    ]
    if step:
        train(engine, 1)
    engine.destroy()
    return out


def attempts(setup: Setup, folder: str, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Loads into one engine with each of the options given: the error, whether the engine is as
    before, the notes."""
    engine = make_engine(setup)
    out: list[dict[str, Any]] = []
    for options in given:
        before = canonical(engine)
        found: dict[str, Any] = {"error": "", "notes": ()}
        try:
            found["notes"] = ucp.load(engine, folder, tag="trained", **options).notes
        except ucp.UcpError as error:
            found["error"] = f"{type(error).__name__}: {error}"
        found["unchanged"] = differences(before, canonical(engine)) == []
        out.append(found)
    engine.destroy()
    return out


WAYS: dict[str, dict[str, Any]] = {
    "load": {},
    "states out": {"load_optimizer_states": False},
    "module only": {"load_module_only": True},
    "scheduler out": {"load_lr_scheduler_states": False},
}


def each_word(setup: Setup, folder: str, words: list[str]) -> dict[str, dict[str, str]]:
    """For each way to load, and each word that is allowed there, what the load says against it."""
    engine = make_engine(setup)
    out: dict[str, dict[str, str]] = {}
    for way in (*WAYS, "held", "resize"):
        out[way] = {word: _said(engine, setup, folder, way, word) for word in words}
    engine.destroy()
    return out


def _said(engine: Any, setup: Setup, folder: str, way: str, word: str) -> str:
    try:
        if way == "held":
            ucp.load(engine, ucp.hold(engine), allow={word})
        elif way == "resize":
            other = make_engine(setup)
            try:
                ucp.resize(engine, other, allow={word})
            finally:
                other.destroy()
        else:
            ucp.load(engine, folder, tag="trained", allow={word}, **WAYS[way])
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    return ""
