"""What the ranks do in the tests of saves into object stores."""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.formats import store
from megatron_ucp.formats.store import StoreOptions, configure
from tests.engines.canonical import canonical
from tests.engines.kinds import attached, refusal_of
from tests.engines.model import Setup, make_engine, train
from tests.object_server import Remote

PART, TIMEOUT, GIVE_UP = "TESTS_PART_BYTES", "TESTS_TIMEOUT_S", "TESTS_GIVE_UP_S"


def in_store(environment: Mapping[str, str], job: Callable[..., Any], *args: Any) -> Any:
    """A job of ranks that were started before the store was. What is larger than PART goes in
    parts, where `environment` says it."""
    os.environ.update(environment)
    before = store.PART_BYTES
    store.PART_BYTES = int(environment.get(PART, before))
    timeout_s = float(environment.get(TIMEOUT, 20))
    give_up_s = float(environment.get(GIVE_UP, min(2, timeout_s)))
    configure(StoreOptions(timeout_s=timeout_s, give_up_s=give_up_s))
    try:
        return job(*args)
    finally:
        for name in environment:
            os.environ.pop(name)
        configure(StoreOptions())
        store.PART_BYTES = before


def saved_and_loaded(setup: Setup, other: Setup, url: str, way: str) -> dict[str, Any]:
    """Saves three steps, the last two twice, and keeps two; an engine of another kind loads what
    the pointer names. The states of both, and what is listed."""
    engine = attached(setup, save=way, keep_latest=2)
    for step in (1, 2, 2, 3, 3):
        train(engine, 1, first=step)
        engine.save_checkpoint(url, tag=f"step{step}", client_state={"seen": step})
        ucp.wait(engine)
    states = canonical(engine)
    target = make_engine(other, attach=False)
    report = ucp.load(target, url)
    return {
        "saved": states,
        "loaded": canonical(target),
        "client_state": report.client_state,
        "read": report.read_bytes,
        "listed": [(one.tag, one.whole, one.pointer) for one in ucp.ls(url).tags],
        "notes": ucp.ls(url).notes,
    }


def failing(setup: Setup, url: str, way: str) -> dict[str, Any]:
    """A save into a store that is failing: what each rank is told; then one that is not."""
    engine = attached(setup, save=way)
    train(engine, 1)
    said, began = "", time.monotonic()
    try:
        engine.save_checkpoint(url, tag="step1")
        ucp.wait(engine)
    except ucp.UcpError as error:
        said = f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - began
    engine.destroy()
    return {"said": said, "took_s": took_s}


def saved_state(setup: Setup, url: str) -> dict[str, Any]:
    """A save, and the state that it is of."""
    engine = attached(setup, save="direct")
    train(engine, 2)
    engine.save_checkpoint(url, tag="step2")
    return canonical(engine)


def loaded(setup: Setup, url: str) -> dict[str, Any]:
    """A load from a store that may be failing: what each rank is told, and the state where it is
    whole."""
    engine = make_engine(setup, attach=False)
    ucp.attach(engine)
    said, began = "", time.monotonic()
    said = refusal_of(lambda: ucp.load(engine, url))
    took_s = time.monotonic() - began
    return {"said": said, "took_s": took_s, "state": None if said else canonical(engine)}


def save_once(setup: Setup, url: str, tag: str) -> str:
    """One save; what was raised."""
    engine = attached(setup, save="direct")
    train(engine, 1)
    return refusal_of(lambda: engine.save_checkpoint(url, tag=tag))


DELAY_S = 0.25  # of each request: those that go at once overlap, on a loaded machine too


def counted(setup: Setup, url: str, server: Remote, is_save: bool) -> int:
    """A save, or the load of one, by all ranks; `server` counts the requests of that alone, each of
    which takes a while."""
    engine = attached(setup, save="direct")
    train(engine, 1)
    engine.save_checkpoint(url, tag="step1")
    engine.save_checkpoint(url, tag="step2")
    dist.barrier()
    if dist.get_rank() == 0:
        server.ask("forget_requests")
        server.fault("delay", value=DELAY_S)
    dist.barrier()
    if is_save:
        train(engine, 1, first=2)
        engine.save_checkpoint(url, tag="step3")
    else:
        ucp.load(engine, url)
    return engine.global_steps
