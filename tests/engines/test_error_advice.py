"""Each refusal of a load ends in an advice that leads to a load."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from tests.engines.canonical import canonical, differences
from tests.engines.model import Setup, make_engine, train
from tests.ranks import RankPool

STEPS = 4  # of one walk, at most


def followed(error: ucp.UcpError, call: dict[str, Any]) -> dict[str, Any] | None:
    """The same call, as the advice of an error says; None where it names nothing to give."""
    advice = error.what_to_do or ""
    if words := re.search(r"allow=\{(.*?)\}", advice):
        found = {*call.get("allow", ())} | {*re.findall(r'"(\w+)"', words[1])}
        return None if found == {*call.get("allow", ())} else {**call, "allow": found}
    if switch := re.search(r"(load_\w+)=(True|False)", advice):
        return {**call, switch[1]: switch[2] == "True"}
    if path := re.search(
        r"(?:the newest is|did you mean|give the folder:) (\S+?)\??(?: Else|$|,)", advice
    ):
        return {**call, "path": path[1]}
    if "tag" in advice and (tags := re.search(r"tags: (\w+)", error.found or "")):
        return {**call, "tag": tags[1]}
    return None


def rebuilt(error: ucp.UcpError, setup: Setup) -> Setup | None:
    """The setup of an engine that is built as the advice says; None where it says nothing of it."""
    advice = error.what_to_do or ""
    if "parameter group of their own" in advice:
        return replace(setup, extra={**setup.extra, "apart": NEW[setup.net]})
    if advice.startswith("build the model with the configuration"):
        return replace(setup, net="Net")
    return None


def walked(setup: Setup, path: str, **options: Any) -> tuple[list[str], Any]:
    """What a load says, and what the loads say that follow the advice ("" at a good end); and the
    state of the engine then."""
    call: dict[str, Any] | None = {"path": path, **options}
    said: list[str] = []
    engine = make_engine(setup)
    for _ in range(STEPS):
        try:
            ucp.load(engine, **call)
        except ucp.UcpError as error:
            said.append(f"{type(error).__name__}: {error.problem} -> {error.what_to_do}")
            if (other := rebuilt(error, setup)) is not None:
                engine.destroy()
                setup, engine = other, make_engine(other)
            elif (call := followed(error, call)) is None:
                break
        else:
            said.append("")
            break
    state = canonical(engine)
    engine.destroy()
    return said, state


# of a model that has more than the run's: what is new
NEW: dict[str, list[str]] = {
    "Thawed": ["frozen.weight"],
    "Grown": ["more.weight"],
    "Longer": ["more.weight", "more.bias"],
    "Untied": ["head.weight"],
}
# what is refused -> the engine, or the path, or the options
REFUSED: dict[str, dict[str, Any]] = {
    "a frozen layer is trained": {"net": "Thawed"},
    "a layer more": {"net": "Grown"},
    "a tail more": {"net": "Longer"},
    "a bias less": {"net": "Shorter"},
    "a head of its own": {"net": "Untied"},
    "a buffer more": {"net": "MoreBuffers"},
    "another rule": {"optimizer": "RAdam"},
    "another scheduler": {"extra": {"schedule": "StepLR"}},
    "a level too high": {"path": "{folder}/.."},
    "misspelt": {"path": "{folder}x"},
    "a file": {"path": "{folder}/latest"},
    "a tag that is not there": {"tag": "global_step77"},
}


def walks(folder: str) -> dict[str, Any]:
    """Each refusal with the walk from it; whether the engine then has the run's states."""
    source = make_engine(Setup(1))
    train(source, 2)
    run = f"{folder}/checkpoint-2"
    source.save_checkpoint(run)
    found: dict[str, Any] = {}
    for name, how in REFUSED.items():
        how = dict(how)
        path = how.pop("path", "{folder}").replace("{folder}", run)
        options = {key: how.pop(key) for key in ("tag",) if key in how}
        said, state = walked(Setup(1, seed=9, **how), path, **options)
        found[name] = said, bool(how) or not differences(canonical(source), state)
    return found


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks


def test_the_advice_of_each_refusal_leads_to_a_load(ranks: RankPool, tmp_path: Path) -> None:
    (found,) = ranks.run(1, walks, str(tmp_path), timeout_s=100)
    assert found.keys() == REFUSED.keys()
    for name, (said, is_the_run) in found.items():
        assert len(said) >= 2 and said[-1] == "", (name, said)
        assert is_the_run, name
