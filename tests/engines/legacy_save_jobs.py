"""What the ranks do in the tests of saves of megatron-core's stack as Megatron-LM's older files."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.engines import rank_files
from megatron_ucp.engines.megatron.engine import legacy_save as saving
from megatron_ucp.engines.megatron.engine.present import PresentStates
from tests.engines.save_jobs import listing
from tests.engines.stack_background_jobs import attached, in_background
from tests.engines.stack_jobs import (
    Engine,
    Mcore,
    arguments,
    close,
    legacy_save,
    make,
    settle,
    train,
)
from tests.engines.stack_states import canonical, compare, rank_folder

LATEST = "latest_checkpointed_iteration.txt"


def save(engine: Engine, folder: str, **options: Any) -> Any:
    how = {"arguments": arguments(engine), "ckpt_format": "torch", **options}
    return ucp.save(engine.handle, folder, **how)


def saved_each_way(setup: Mcore, folder: str, **options: Any) -> dict[str, Any]:
    """One moment as stock saves it, and by this package in its two ways; what these report, and the
    fingerprint of the engine."""
    engine = make(setup)
    train(engine, 2)
    legacy_save(engine, Path(folder) / "stock" / "iter_0000002")
    out: dict[str, Any] = {"own": ucp.fingerprint(engine.handle)}
    for way in ("direct", "background"):
        one = attached(engine, save=way, **(options if way == "background" else {}))
        begun = save(one, f"{folder}/{way}")
        assert begun.is_under_way == (way == "background")
        ucp.wait(one.handle)
        out[way] = ucp.report(one.handle).save
    dist.barrier()
    close(engine)
    return out


def by_stock(setup: Mcore, folder: str) -> None:
    engine = make(setup)
    train(engine, 2)
    legacy_save(engine, Path(folder) / "iter_0000002")
    close(engine)


def trained_on(setup: Mcore, folder: str, plant: bool = False) -> dict[str, list[str]]:
    """A save in the background whose writer starts ten steps later; what differs between the state
    at the call and what a load of it gives, and what the steps changed. `plant`: what is taken
    stays the engine's own memory."""
    engine, background = in_background(setup)
    train(engine, 2)
    if plant:
        background.snapshot.copy = lambda memory: memory  # type: ignore[method-assign]
    held: list[Any] = []
    background.start = lambda *work: held.append(work)  # type: ignore[method-assign]
    flags = arguments(engine)
    save(engine, folder, arguments=flags)
    flags.num_layers = 77
    settle(engine)
    want = canonical(engine)
    assert not (Path(folder) / LATEST).exists()
    train(engine, 10, first=2)
    settle(engine)
    changed = compare(want, canonical(engine))
    del background.start
    background.start(*held[0])
    ucp.wait(engine.handle)
    close(engine)
    return {"found": _loaded(setup, folder, want), "changed": changed}


def _loaded(setup: Mcore, folder: str, want: dict[str, Any]) -> list[str]:
    fresh = make(setup)
    train(fresh, 1, first=99)
    try:
        ucp.load(fresh.handle, folder)
        return compare(want, canonical(fresh))
    except ucp.UcpError as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        close(fresh)


def torn(setup: Mcore, folder: str, way: str, checked: bool) -> dict[str, Any]:
    """A save during which the engine steps, when the optimizer's states are taken and the weights
    are not; then the same without a step. Not `checked`: nobody counts the steps."""
    engine = attached(make(setup), save=way)
    train(engine, 2)
    settle(engine)
    want, out = canonical(engine), dict[str, Any](error="")
    check, take = PresentStates.require_unstepped, saving.buffers_value
    if not checked:
        PresentStates.require_unstepped = lambda self: None  # type: ignore[method-assign]

    def stepping(stack: Any) -> Any:
        found = take(stack)
        train(engine, 1, first=50)
        settle(engine)
        return found

    saving.buffers_value = stepping
    try:
        save(engine, f"{folder}/torn")
        ucp.wait(engine.handle)
    except ucp.UcpError as error:
        out["error"] = f"{type(error).__name__}: {error}"
    PresentStates.require_unstepped = check  # type: ignore[method-assign]
    saving.buffers_value = take
    later = canonical(engine)
    save(engine, f"{folder}/whole")
    ucp.wait(engine.handle)
    close(engine)
    out["left"], out["changed"] = listing(f"{folder}/torn"), compare(want, later)
    out["whole"] = _loaded(setup, f"{folder}/whole", later)
    if not out["error"]:
        out["found"] = _loaded(setup, f"{folder}/torn", want)
    return out


def failing(setup: Mcore, folder: str, way: str, how: str) -> dict[str, Any]:
    """A good save, one that fails on rank 0 as it writes, a good one."""
    engine = attached(make(setup), save=way, **({"deadline": 1.0} if how == "hangs" else {}))
    train(engine, 1)
    save(engine, folder)
    ucp.wait(engine.handle)
    train(engine, 1, first=1)
    out: dict[str, Any] = {"error": "", "message": ""}
    with _broken(how if dist.get_rank() == 0 else ""):
        try:
            save(engine, folder)
            ucp.wait(engine.handle)
        except ucp.UcpError as error:
            out["error"], out["message"] = type(error).__name__, str(error)
        dist.barrier()
    out["left"], out["latest"] = listing(folder), (Path(folder) / LATEST).read_text()
    dist.barrier()
    if how == "hangs":
        time.sleep(3.0)
    save(engine, folder)
    ucp.wait(engine.handle)
    want = canonical(engine)
    close(engine)
    out["then"] = _loaded(setup, folder, want)
    return out


@contextmanager
def _broken(how: str) -> Any:
    write = rank_files._written

    def broken(one: Any) -> Any:
        if how == "dies":
            os._exit(7)
        if how == "hangs":
            time.sleep(3.0)
        raise OSError(28, "No space left on device", str(one.path))

    if how:
        rank_files._written = broken
    yield
    rank_files._written = write


def stock_load(setup: Mcore, folder: str) -> dict[str, Any]:
    """What `stack_jobs.save` wrote, by megatron-core's own functions, as Megatron-LM calls them."""
    oracle = torch.load(Path(folder) / "oracle.pt", weights_only=False)
    engine = make(setup)
    train(engine, 1, first=99)
    before = canonical(engine, settled=not setup.gather)
    found: dict[str, Any] = {"differences": {}, "before": {}}
    for tag in ("filled", "trained"):
        apart = {"scheduler": {}, "counters": None}  # of the training program
        want = {**oracle["states"][tag], **apart}
        own = next(Path(folder, tag).glob("iter_*")) / rank_folder(engine)
        tree = torch.load(own / "model_optim_rng.pt", weights_only=False)
        several = len(engine.stack.bare) > 1
        for number, bare in enumerate(engine.stack.bare):
            bare.load_state_dict(tree[f"model{number}" if several else "model"])
        with torch.no_grad():  # it writes into leaves where the weights are the masters
            engine.optimizer.load_state_dict(tree["optimizer"])
            if setup.distributed:
                engine.optimizer.load_parameter_state(str(own / "distrib_optim.pt"))
        found["before"][tag] = compare(want, before)
        found["differences"][tag] = compare(want, {**canonical(engine), **apart})
    close(engine)
    return found


def refused(setup: Mcore, folder: str, given: dict[str, Any], **options: Any) -> str:
    """What a save says; `given` are flags that differ from the stack's own."""
    engine = make(setup)
    train(engine, 1)
    flags = arguments(engine)
    vars(flags).update(given)
    try:
        save(engine, folder, **{"arguments": flags, **options})
        return ""
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        close(engine)


@contextmanager
def before_buffers(change: Callable[[str, torch.nn.Module], None]) -> Iterator[None]:
    """Inside, what gets buffers is changed before, module by module."""
    from megatron.core.distributed import DistributedDataParallel

    stock = DistributedDataParallel.__init__

    def made(self: Any, config: Any, ddp_config: Any, module: Any, **given: Any) -> None:
        for name, one in module.named_modules():
            change(name, one)
        stock(self, config, ddp_config, module, **given)

    with mock.patch.object(DistributedDataParallel, "__init__", made):
        yield


def _freeze(name: str, module: torch.nn.Module) -> None:
    if name.endswith("final_layernorm"):
        module.requires_grad_(False)


def frozen(setup: Mcore, folder: str) -> str:
    with before_buffers(_freeze):
        return refused(setup, folder, {})


def regrouped(setup: Mcore, folder: str, how: str) -> str:
    """What a save says of groups that another program than Megatron-LM's made."""
    engine = make(setup)
    train(engine, 1)
    (inner,) = engine.optimizer.chained_optimizers
    one, other = inner.optimizer.param_groups
    if how == "others":
        one["wd_mult"], other["wd_mult"] = other["wd_mult"], one["wd_mult"]
    elif how == "alike":
        other.update({key: value for key, value in one.items() if key != "params"})
    else:
        one["params"][2:4] = reversed(one["params"][2:4])
    try:
        save(engine, folder)
        return ""
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        close(engine)


def regrouped_as_torch_dist(setup: Mcore, folder: str) -> tuple[list[str], list[str]]:
    """What differs after a load of a run whose groups another program made, into an engine that
    was built so too; and the notes."""
    engine = _with_swapped_decays(setup)
    train(engine, 2)
    ucp.save(engine.handle, folder)
    want = canonical(engine)
    close(engine)
    engine = _with_swapped_decays(replace(setup, seed=5))
    train(engine, 1, first=9)
    report = ucp.load(engine.handle, folder)
    found = compare(want, canonical(engine))
    close(engine)
    return found, [note for note in report.notes if "weight_decay" in note]


def _with_swapped_decays(setup: Mcore) -> Engine:
    """Matrices have no weight decay, norms have one."""
    engine = make(setup)
    (inner,) = engine.optimizer.chained_optimizers
    one, other = inner.optimizer.param_groups
    one["wd_mult"], other["wd_mult"] = other["wd_mult"], one["wd_mult"]
    return engine


def mixed(setup: Mcore, folder: str) -> list[str]:
    """A group with parameters in fp32 among others: its states lie as the model has them."""

    def in_fp32(name: str, module: torch.nn.Module) -> None:
        if name.endswith("0.input_layernorm"):
            forward = module.float().forward
            module.forward = lambda x: forward(x.float()).bfloat16()

    with before_buffers(in_fp32):
        engine = make(setup)
        train(engine, 2)
        save(engine, folder)
        want = canonical(engine)
        close(engine)
        return _loaded(setup, folder, want)


def without_flags(setup: Mcore, folder: str) -> list[str]:
    """Nothing is said of the run but by the stack."""
    engine = make(setup)
    train(engine, 2)
    save(engine, folder, arguments=None)
    want = canonical(engine)
    close(engine)
    return _loaded(replace(setup, seed=5), folder, want)


def load_refused(setup: Mcore, folder: str) -> str:
    engine = make(setup)
    train(engine, 1, first=9)
    try:
        ucp.load(engine.handle, folder)
        return ""
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        close(engine)


def twice(setup: Mcore, folder: str) -> list[str]:
    """Saves of other moments of one iteration, the first one of another mesh, then `keep_latest`;
    what lies in the tag's folder, and what a load finds."""
    engine = make(setup)
    train(engine, 2)
    if dist.get_rank() == 0:
        (Path(folder) / "iter_0000002" / "mp_rank_00_003").mkdir(parents=True)
        (Path(folder) / "iter_0000002" / "mine").mkdir()
    dist.barrier()
    save(engine, folder)
    train(engine, 1, first=2)
    engine.handle.iteration = 2
    save(engine, folder)
    for iteration in (3, 4):
        engine.handle.iteration = iteration
        save(engine, folder, keep_latest=2)
    want = {**canonical(engine), "counters": (4, engine.handle.consumed_samples, 1)}
    close(engine)
    return [*_loaded(setup, folder, want), *sorted(p.name for p in Path(folder).glob("*"))]
