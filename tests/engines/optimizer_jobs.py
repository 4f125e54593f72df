"""What the ranks do in the tests of optimizers that a user brings."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import megatron_ucp as ucp
from megatron_ucp.engines.record import record_of
from megatron_ucp.formats import optimizers as table
from tests.engines import kinds
from tests.engines.canonical import canonical, differences
from tests.engines.kinds import refusal_of
from tests.engines.model import Setup, make_engine, train

LION = "tests.Lion"


@contextmanager
def registered() -> Iterator[None]:
    """The user's Lion is known in this process, and nowhere after."""
    ucp.register_optimizer(LION, element=["trend"], scalar=["turns"], step="int")
    try:
        yield
    finally:
        del table._TABLE[LION]
        table._REGISTERED.discard(LION)
        table.ELEMENT.discard("trend")
        table.SCALAR.discard("turns")


def save_lion(setup: Setup, folder: str) -> None:
    with registered():
        kinds.save(setup, folder, more=0, filled=False)


def resume_lion(setup: Setup, folder: str, plant: str = "") -> dict[str, Any]:
    with registered():
        return kinds.resume(setup, folder, ("trained",), plant=plant)


def attaching(setup: Setup, steps: int = 0, cut: int = 1) -> dict[str, Any]:
    """What `attach` says to an engine: the error, the notes it logged, and whether it changed
    anything."""
    logger = logging.getLogger("megatron_ucp")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    engine = make_engine(setup, attach=False)
    train(engine, steps)
    if cut != 1:
        engine.optimizer.optimizer.param_groups[0]["use_muon"] = True
    before = canonical(engine)
    out = {"error": "", "message": ""}
    logger.addHandler(handler)
    try:
        ucp.attach(engine)
    except ucp.UcpError as error:
        out = {"error": type(error).__name__, "message": str(error)}
    finally:
        logger.removeHandler(handler)
    out["unchanged"] = not differences(before, canonical(engine))
    out["attached"] = record_of(engine).attachment is not None
    out["said"] = "\n".join(said)
    engine.destroy()
    return out


ADAM = ("fp32", "exp_avg", "exp_avg_sq")


def save_chatty(setup: Setup, folder: str) -> dict[str, Any]:
    """A save of states that appear after the first step and that no manifest can describe; then
    both ways to load it."""
    engine = make_engine(setup)
    train(engine, 2)
    engine.save_checkpoint(folder, tag="trained")
    want = canonical(engine)
    out = {"notes": engine.ucp_save_report.notes}
    engine.destroy()
    engine = make_engine(setup)
    out["load"] = refusal_of(lambda: engine.load_checkpoint(folder))
    engine.destroy()
    engine = make_engine(setup)
    engine.load_checkpoint(folder, native=True)
    have = canonical(engine)
    kept = {key: value for key, value in want["full"].items() if key[1] in ADAM}
    out["native"] = bool(kept) and all(
        torch.equal(have["full"][key], value) for key, value in kept.items()
    )
    engine.destroy()
    return out
