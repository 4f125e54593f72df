"""Every kind of engine that the tests know, found by the class of its setup, and the jobs that all
kinds share: a run that saves, a load on another mesh, a load that should fail, stock's own load.

A module that makes engines enters its setup's class here:

    KINDS[Mega] = Kind(make, train, plant, close)
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.engines.record import record_of
from tests.engines import canonical as zero_states
from tests.engines.canonical import base_of, everywhere
from tests.engines.fingerprints import unchecked, unlike
from tests.engines.masters import runs_of
from tests.share import LOSS_STEPS, tags_of

CLIENT_STATE = {"note": "mine", "data": torch.arange(5)}  # of the tag `trained`


def plant_fault(engine: Any, fault: str) -> None:
    """One small wrong thing in an engine of DeepSpeed, which a comparison has to see."""
    base = base_of(engine)
    _, _, count, master, offset, g = max(runs_of(engine), key=lambda run: run[2])
    held = base.state[master]
    flat = master.data.view(-1)
    if fault == "one bit":
        flat.view(torch.int32)[offset] ^= 1
    elif fault == "two elements swapped":
        flat[offset], flat[offset + 1] = flat[offset + 1].clone(), flat[offset].clone()
    elif fault == "one moment":
        held["exp_avg"].view(-1)[offset + count - 1] = 0.5
    elif fault == "one trend":
        held["trend"].view(-1)[offset + count - 1] = 0.5
    elif fault == "one step":
        held["step"] += 1
    elif fault == "the partition of another rank":
        rank, world = dist.get_rank(), dist.get_world_size()
        master.data.copy_(everywhere(master.data)[(rank + 1) % world])
    elif fault == "one group's weight decay":
        base.param_groups[g]["weight_decay"] += 0.01
    elif fault == "a buffer":
        engine.module.calls += 1
    else:
        raise ValueError(fault)


def group_settings(engine: Any) -> list[dict[str, Any]]:
    """Every key of every parameter group of an optimizer, but for the parameters."""
    return [
        {k: float(v) if isinstance(v, torch.Tensor) else v for k, v in group.items()}
        for group in ({**group, "params": None} for group in base_of(engine).param_groups)
    ]


def save_checkpoint(engine: Any, folder: Path, tag: str) -> None:
    """By DeepSpeed's method, with a client state in the tag `trained`."""
    engine.save_checkpoint(folder, tag=tag, client_state=CLIENT_STATE if tag == "trained" else {})


def attach_engine(engine: Any, setup: Any, **options: Any) -> Any:
    """An engine of DeepSpeed with this package's methods."""
    return ucp.attach(engine, family=getattr(setup, "family", None), **options)


@dataclass(frozen=True)
class Kind:
    """How an engine of a setup is made, trained, saved, filled, looked at and closed; and how a
    fault is planted in it. `handle` is what this package takes."""

    make: Callable[..., Any]
    train: Callable[..., list[float]]
    plant: Callable[[Any, str], None] = plant_fault
    close: Callable[[Any], None] = lambda engine: engine.destroy()
    handle: Callable[[Any], Any] = lambda engine: engine
    fill: Callable[[Any], None] = zero_states.fill
    canonical: Callable[[Any], dict[str, Any]] = zero_states.canonical
    differences: Callable[..., list[str]] = zero_states.differences
    # lets weights arrive that are on their way between the ranks
    settle: Callable[[Any], None] = lambda engine: None
    write: Callable[..., None] = save_checkpoint
    attach: Callable[..., Any] = attach_engine
    # what has to be known in the process while an engine is there, as a family
    known: Callable[[], AbstractContextManager[None]] = nullcontext
    # whether the engine that saved trains on itself; otherwise a second one, that never saved
    trains_on: bool = False
    # whether a load compares all that it moves with the fingerprint of the save, in which rows of
    # padding are not
    compares_all: bool = True
    # steps of something else that an engine has trained before it loads
    stale_steps: int = 0

    def settled_state(self, engine: Any) -> dict[str, Any]:
        """The canonical state, once all weights have arrived."""
        self.settle(engine)
        return self.canonical(engine)


KINDS: dict[type, Kind] = {}


def kind_of(setup: Any) -> Kind:
    """By the class of a setup."""
    return next(KINDS[one] for one in type(setup).__mro__ if one in KINDS)


def attached(setup: Any, **options: Any) -> Any:
    """An engine, attached with options."""
    kind = kind_of(setup)
    engine = kind.make(setup, attach=False)
    kind.attach(engine, setup, **options)
    return engine


def state_after_load(
    setup: Any, folder: str, want: dict[str, Any], but: tuple[str, ...] = ()
) -> dict[str, Any]:
    """What differs from a state, `but` for parts of it, in an engine of another seed before and
    after it loads what the folder's pointer names; where a load is refused, what it says."""
    kind = kind_of(setup)

    def different(have: dict[str, Any]) -> list[str]:
        return kind.differences(want, {**have, **{part: want[part] for part in but}})

    engine = kind.make(replace(setup, seed=9))
    kind.train(engine, kind.stale_steps, first=99)
    found = {"before": different(kind.settled_state(engine))}
    try:
        engine.load_checkpoint(folder)
        found["differences"] = different(kind.canonical(engine))
    except ucp.UcpError as error:
        found["differences"] = [f"{type(error).__name__}: {error}"]
    kind.close(engine)
    return found


def refusal_of(call: Callable[[], Any], nothing: str = "") -> str:
    """The kind and the message of the error that this package refuses a call with."""
    try:
        call()
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    return nothing


def oracle_of(folder: str | Path) -> dict[str, Any]:
    """What the run that saved into a folder kept beside it."""
    return torch.load(Path(folder) / "oracle.pt", weights_only=False)


# ------------------------------------------------ jobs


def save(
    setup: Any,
    folder: str,
    steps: int = 3,
    attach: bool = True,
    more: int = LOSS_STEPS,
    filled: bool = True,
    **options: Any,
) -> None:
    """Trains, saves the tag `trained`, fills with provenance values, saves `filled`. Canonical
    states lie beside them, and the losses of `more` steps that follow. `options` are of the kind's
    `write`."""
    kind = kind_of(setup)
    oracle: dict[str, Any] = {"steps": steps, "losses": [], "states": {}, "groups": {}}
    with kind.known():
        engine = kind.make(setup, attach)
        kind.train(engine, steps)
        kind.write(engine, Path(folder), "trained", **options)
        oracle["states"]["trained"] = kind.canonical(engine)
        if kind.trains_on:
            oracle["losses"] = kind.train(engine, min(more, 3), first=steps)
            oracle["after"] = kind.settled_state(engine)
            oracle["losses"] += kind.train(engine, max(more - 3, 0), first=steps + 3)
        if filled:
            kind.fill(engine)
            kind.write(engine, Path(folder), "filled", **options)
            oracle["states"]["filled"] = kind.canonical(engine)
            if kind.canonical is zero_states.canonical:
                oracle["groups"]["filled"] = group_settings(engine)
        kind.close(engine)
        if more and not kind.trains_on:
            engine = kind.make(setup, attach=False)
            kind.train(engine, steps)  # the same run again, uninterrupted
            oracle["losses"] = kind.train(engine, more, first=steps)
            kind.close(engine)
    if dist.get_rank() == 0:
        torch.save(oracle, Path(folder) / "oracle.pt")


def place(folder: str, tag: str) -> tuple[str, str | None]:
    """What to load: Megatron's writer of this package makes a folder in that of the tag."""
    inside = Path(folder) / tag
    is_inside = (inside / "latest_checkpointed_iteration.txt").is_file()
    return (str(inside), None) if is_inside else (folder, tag)


def resume(
    setup: Any,
    folder: str,
    tags: tuple[str, ...] = (),
    more: int = 0,
    plant: str = "",
    three: bool = False,
    attach: bool = True,
    same_dtype: bool = True,
    known_keys: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Loads each tag into a fresh engine and compares; trains on after the last one. `three` steps
    on the source's mesh must end in the source's bits. `same_dtype` and `known_keys` say how
    canonical states are compared."""
    kind, oracle = kind_of(setup), oracle_of(folder)
    loose = {"same_dtype": same_dtype, "known_keys": known_keys}
    how = loose if kind.differences is zero_states.differences else {}
    found: dict[str, Any] = {"differences": {}, "before": {}, "reports": {}, "notes": {}}
    with kind.known():
        engine = kind.make(setup, attach)
        kind.train(engine, kind.stale_steps, first=99)
        before = kind.settled_state(engine)
        for tag in tags or tags_of(more):
            path, name = place(folder, tag)
            report = ucp.load(kind.handle(engine), path, tag=name, **options)
            found["reports"][tag], found["notes"][tag] = report, report.notes
            if plant:
                kind.plant(engine, plant)
            want = oracle["states"][tag]
            found["before"][tag] = kind.differences(want, before, **how)
            have = kind.canonical(engine)
            found["differences"][tag] = kind.differences(want, have, **how)
            found["scale"], found["saved_scale"] = have["scale"], want["scale"]
            # stock's files at stage 0 have no names for their states
            exact = how and same_dtype and not known_keys and not options
            if exact and report.fingerprint is not None:
                found["differences"][tag] += unlike(engine, folder, tag)
                found["differences"][tag] += unchecked(report) if kind.compares_all else []
        if more:
            pairs = zip(
                kind.train(engine, more, first=oracle["steps"]),
                oracle["losses"][:more],
                strict=True,
            )
            found["loss"] = max(abs(a - b) for a, b in pairs)
        if three:
            kind.train(engine, 3, first=oracle["steps"])
            found["after"] = kind.differences(oracle["after"], kind.settled_state(engine))
        kind.close(engine)
    return found


def attempt(
    setup: Any,
    folder: str,
    tag: str | None = None,
    through: str = "load",
    then: str | None = None,
    attach: bool = True,
    change: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
    **options: Any,
) -> dict[str, Any]:
    """A load that should fail: the error, whether the engine is bit for bit as before, and whether
    it refuses to go on. `change` is made to the engine for the time of the load. `then` loads
    another tag afterwards and steps."""
    kind = kind_of(setup)
    out: dict[str, Any] = {"error": None, "message": "", "unchanged": True}
    try:
        engine = kind.make(setup, attach)
    except ucp.UcpError as error:
        return out | {"error": type(error).__name__, "message": str(error)}
    kind.train(engine, 1)
    before = kind.canonical(engine)
    try:
        with change(engine):
            if through == "load":
                out["notes"] = ucp.load(kind.handle(engine), folder, tag=tag, **options).notes
            else:
                engine.load_checkpoint(folder, tag=tag)
    except Exception as error:
        out |= {"error": type(error).__name__, "message": str(error)}
    out["unchanged"] = kind.differences(before, kind.canonical(engine)) == []
    out["refuses"] = refuses(kind, engine, folder)
    if then:
        ucp.load(kind.handle(engine), folder, tag=then)
        before = kind.canonical(engine)
        kind.train(engine, 1)
        out["steps_after_a_good_load"] = kind.differences(before, kind.canonical(engine)) != []
    kind.close(engine)
    return out


def around_load(
    setup: Any,
    folder: str,
    tag: str = "filled",
    fault: str = "",
    plant: Callable[[Any, str], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The states of the run, and of another engine before a load, after it and after one more step;
    or the error. A fault is planted after the load, by the kind's `plant` or another one."""
    kind, oracle = kind_of(setup), oracle_of(folder)
    engine = kind.make(setup)
    before = kind.canonical(engine)
    try:
        report = ucp.load(kind.handle(engine), folder, tag=tag, **options)
    except ucp.UcpError as error:
        unchanged = kind.differences(before, kind.canonical(engine)) == []
        kind.close(engine)
        return {"error": f"{type(error).__name__}: {error}", "unchanged": unchanged}
    if fault:
        (plant or kind.plant)(engine, fault)
    found = {"want": oracle["states"][tag], "before": before, "notes": report.notes}
    found["after"] = kind.canonical(engine)
    kind.train(engine, 1, first=oracle["steps"])
    found["stepped"] = kind.canonical(engine)
    kind.close(engine)
    return found


def refuses(kind: Kind, engine: Any, folder: str) -> bool:
    """Whether an engine refuses all that would go on with what a load left in it. One that does
    refuses a step without a backward pass too; any other one trains and saves."""
    is_closed = bool(record_of(kind.handle(engine)).broken)
    doors: list[Callable[[], Any]] = [
        engine.step if is_closed else lambda: kind.train(engine, 1),
        # not into the folder itself: other tests read it too
        lambda: engine.save_checkpoint(f"{folder}_after", tag="after", save_latest=False),
    ]
    if is_closed:  # what is half of another model is none to give away
        doors.append(lambda: ucp.export_hf(engine, f"{folder}_half_loaded"))
    said: list[str] = []
    for door in doors:
        try:
            door()
        except ucp.UcpError as error:
            said.append(type(error).__name__)
    assert said in ([], ["EngineUnusableError"] * 3), f"the engine refuses only a part: {said}"
    return bool(said)


@contextmanager
def universal_folders(are_loaded: bool = True) -> Iterator[None]:
    """Engines of stock DeepSpeed that are made inside load universal folders."""
    import deepspeed

    made = deepspeed.initialize

    def initialize(*args: Any, config: dict[str, Any], **kwargs: Any) -> Any:
        config = {**config, "checkpoint": {"load_universal": True}} if are_loaded else config
        return made(*args, config=config, **kwargs)

    with mock.patch.object(deepspeed, "initialize", initialize):
        yield


def stock_load(
    setup: Any,
    path: str,
    oracle: str = "",
    tag: str = "filled",
    universal: bool = False,
    same_dtype: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Stock DeepSpeed's own load of a tag's folder into an engine that knows nothing of the
    package; what the `tag` beside the `oracle` has, that of the folder's parent by default, is
    what it must have then."""
    kind, folder = kind_of(setup), Path(path)
    want = oracle_of(oracle or folder.parent)["states"][tag]
    with kind.known():
        with universal_folders(universal):
            engine = kind.make(setup, attach=False)
        before = kind.differences(want, kind.canonical(engine), same_dtype)
        loaded, client = engine.load_checkpoint(str(folder.parent), tag=folder.name, **options)
        after = kind.differences(want, kind.canonical(engine), same_dtype)
        kind.close(engine)
    known = {key: client.get(key) for key in CLIENT_STATE} if client else {}
    return {
        "loaded": loaded is not None,
        "before": before,
        "differences": after,
        "client_state": known,
    }


def our_load(
    setup: Any, folder: str, oracle: str, tag: str = "filled", same_dtype: bool = True, **how: Any
) -> dict[str, Any]:
    """Our load of a folder of any format."""
    kind, want = kind_of(setup), oracle_of(oracle)["states"][tag]
    engine = kind.make(setup)
    before = kind.differences(want, kind.canonical(engine), same_dtype)
    report = ucp.load(kind.handle(engine), folder, **how)
    after = kind.differences(want, kind.canonical(engine), same_dtype)
    kind.close(engine)
    return {"before": before, "differences": after, "notes": report.notes}


def reshard(setup: Any, folder: str, out: str) -> None:
    """Loads the tag `trained` and saves it again on this mesh as the tag `again`."""
    kind = kind_of(setup)
    engine = kind.make(setup)
    ucp.load(kind.handle(engine), folder, tag="trained")
    engine.save_checkpoint(out, tag="again")
    kind.close(engine)


def fails_on_rank(setup: Any, folder: str, rank: int) -> dict[str, Any]:
    """A load in which one rank's disk fails after some bytes have moved."""
    from megatron_ucp.errors import DamagedFileError
    from megatron_ucp.reshard import files

    kind, stock = kind_of(setup), files.execute
    engine = kind.make(setup)

    def execute(plan: Any, *args: Any, **kwargs: Any) -> Any:
        stock(plan.__class__(plan.wants, plan.ops[:3], ()), *args, **kwargs)
        raise DamagedFileError("only here")

    out: dict[str, Any] = {"error": None, "message": ""}
    with mock.patch.object(files, "execute", execute if dist.get_rank() == rank else stock):
        try:
            ucp.load(kind.handle(engine), folder, tag="trained")
        except ucp.UcpError as error:
            out |= {"error": type(error).__name__, "message": str(error)}
    out["refuses"] = refuses(kind, engine, folder)
    kind.close(engine)
    return out
