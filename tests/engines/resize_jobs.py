"""What the ranks do in the tests of resizes: one engine trains, another one on another mesh goes on
from its memory."""

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from contextlib import nullcontext as nothing
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.engines.deepspeed import optimizer
from megatron_ucp.reshard import kept_moves
from tests.connected import connect
from tests.engines import canonical as zero_states
from tests.engines import megatron_states, model
from tests.engines.canonical import everywhere
from tests.engines.fingerprints import unchecked
from tests.engines.kinds import Kind, kind_of, refusal_of
from tests.engines.masters import runs_of
from tests.rank_reset import take_down


def compared(one: Any, other: Any) -> Callable[[dict[str, Any], dict[str, Any]], list[str]]:
    """What compares the states of two setups: all of it, where both have the same engine."""
    return (
        zero_states.differences
        if kind_of(one).fill is kind_of(other).fill
        else (megatron_states.compare)
    )


def pair(
    source: Any,
    target: Any,
    filled: bool = False,
    more: int = 0,
    hold: dict[str, Any] | None = None,
    load: dict[str, Any] | None = None,
    window: int = 8 * 2**20,
) -> dict[str, Any]:
    """Trains an engine, holds it, builds another one in its place that has trained something else,
    loads, and compares. `filled`: with provenance values. `more` steps afterwards, beside the same
    ones of the engine that was never resized. `hold` and `load` are options of these. What moves at
    once has `window` bytes."""
    with mock.patch.object(kept_moves, "round_bytes", lambda world: window):
        return _pair(source, target, filled, more, hold, load)


def _pair(
    source: Any, target: Any, filled: bool, more: int, hold: Any, load: Any
) -> dict[str, Any]:
    one, other = kind_of(source), kind_of(target)
    engine = one.make(source)
    one.train(engine, 3)
    if filled:
        one.fill(engine)
    want = one.settled_state(engine)
    held = ucp.hold(one.handle(engine), **(hold or {}))
    found: dict[str, Any] = {"held": held.size_bytes}
    found["after the hold"] = zero_states.differences(want, one.settled_state(engine))
    losses = one.train(engine, more, first=3) if more else []
    one.close(engine)
    engine = other.make(target)
    other.train(engine, 1, first=99)
    compare = compared(source, target)
    found["before"] = compare(want, other.settled_state(engine))
    report = ucp.load(other.handle(engine), held, **(load or {}))
    found |= {"notes": report.notes, "line": str(report), "left": held.size_bytes}
    found["fingerprint"] = unchecked(report)
    look(found, other, engine, want, compare)
    if more:
        again = other.train(engine, more, first=3)
        found["loss"] = max(abs(a - b) for a, b in zip(again, losses, strict=True))
    other.close(engine)
    return found


# ------------------------------------------------ how messages go


_Moves = kept_moves.KeptMoves
# name -> what is otherwise than it would be here
WAYS: dict[str, list[tuple[Any, str, Any]]] = {
    "paired sends": [],
    "one exchange": [(kept_moves, "is_one_exchange", lambda device: True)],
    "no broadcast": [(optimizer, "broadcast_each", lambda *_: None)],
}


def by_way(source: Any, target: Any, way: str, window: int, **options: Any) -> dict[str, Any]:
    """As `pair`, with provenance values, and messages that go in some way; to whom how many went,
    and whether in one exchange."""
    went: dict[int, set[bool]] = {}

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        _made(self, *args, **kwargs)
        for message in (one for row in self._going for one in row):
            went.setdefault(message.peer, set()).add(bool(self._exchanges))

    _made = _Moves.__init__
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(_Moves, "__init__", made))
        for where, name, value in WAYS[way]:
            patches.enter_context(mock.patch.object(where, name, value))
        found = pair(source, target, True, window=window, **options)
    return found | {"went": went}


def look(found: dict[str, Any], kind: Kind, engine: Any, want: Any, compare: Any) -> None:
    """Compares an engine with what it should be; and sees one bit that is planted, and taken out
    again."""
    found["differences"] = compare(want, kind.settled_state(engine))
    kind.plant(engine, "one bit")
    try:
        found["planted"] = compare(want, kind.settled_state(engine))
    except AssertionError as error:  # ranks have copies that differ
        found["planted"] = [str(error)]
    kind.plant(engine, "one bit")


def worlds(
    steps: list[tuple[int, Any, dict[str, Any]]], store: str, gloo: bool = False, more: int = 0
) -> dict[str, Any]:
    """A run that goes from one world to the next one: each has so many of the ranks of this job,
    an engine of a setup, and options of the `hold` that ends it. Ranks that are not in a world
    wait for the next one, and then have nothing; those that left keep what they had, which must be
    nothing. In the last world `more` steps, beside the same ones of the first engine."""
    found: dict[str, Any] = {"differences": [], "held": [], "lines": []}
    run = _Run(steps[0][1], steps[-1][1], more, found)
    held = ucp.hold(None)
    for number, (world, setup, asked) in enumerate(steps):
        take_down()
        rank = dist_rank()
        if rank >= world:
            held = ucp.hold(None)
            continue
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}  # DeepSpeed believes these
        connect(gloo, rank, world, f"{store}{number}", 120)
        kind, is_last = kind_of(setup), number == len(steps) - 1
        engine = kind.make(setup)
        if number:
            run.goes_on(setup, engine, held)
        else:
            run.begins(engine)
        if not is_last:
            held = ucp.hold(kind.handle(engine), **asked)
            found["held"].append(held.size_bytes)
        run.trains_on(engine, setup, is_last and number > 0)
        kind.close(engine)
        del engine  # or it would be closed again, without a world
    return found


def dist_rank() -> int:
    """This process among those of the job, whatever the world is now."""
    return int(os.environ["LOCAL_RANK"])


class _Run:
    """What a rank remembers of a run that goes through worlds: the state of the `first` engine, and
    the losses of `more` steps that it took after the hold."""

    def __init__(self, first: Any, last: Any, more: int, found: dict[str, Any]) -> None:
        self.first, self.last, self.more, self.found = first, last, more, found
        self.want: Any = None
        self.losses: list[float] | None = None

    def begins(self, engine: Any) -> None:
        kind = kind_of(self.first)
        kind.train(engine, 3)
        self.want = kind.settled_state(engine)

    def goes_on(self, setup: Any, engine: Any, held: Any) -> None:
        kind, compare = kind_of(setup), compared(setup, self.first)
        own_schedule = compare is megatron_states.compare
        handle = kind.handle(engine)
        report = ucp.load(handle, held, load_lr_scheduler_states=not own_schedule)
        self.want = everywhere(self.want)[0]
        self.found["differences"].append(compare(self.want, kind.settled_state(engine)))
        self.found["lines"].append(str(report))

    def trains_on(self, engine: Any, setup: Any, is_last: bool) -> None:
        if not self.more or not (is_last or self.losses is None):
            return
        kind = kind_of(setup)
        if not is_last:
            self.losses = kind.train(engine, self.more, first=3)
            return
        losses = everywhere(self.losses)[0]
        again = kind.train(engine, self.more, first=3)
        self.found["loss"] = max(abs(a - b) for a, b in zip(again, losses, strict=True))


def both(source: Any, target: Any, more: int = 0, **options: Any) -> dict[str, Any]:
    """`ucp.resize` of one live engine into another one of the same ranks."""
    one, other = kind_of(source), kind_of(target)
    old = one.make(source)
    one.train(old, 3)
    new = other.make(target)
    if not options.get("load_module_only"):
        other.train(new, 1, first=99)
    want = one.settled_state(old)
    compare = compared(source, target)
    found: dict[str, Any] = {"before": compare(want, other.settled_state(new))}
    if isinstance(source, model.Setup):
        found["needed"] = needed_bytes(old, new)
    report = ucp.resize(one.handle(old), other.handle(new), **options)
    found["moved"] = report.read_bytes
    found |= {"notes": report.notes, "line": str(report), "client": report.client_state}
    look(found, other, new, want, compare)
    found["after the hold"] = zero_states.differences(want, one.settled_state(old))
    if more:
        losses, again = (
            kind.train(engine, more, first=3) for kind, engine in ((one, old), (other, new))
        )
        found["loss"] = max(abs(a - b) for a, b in zip(again, losses, strict=True))
    one.close(old)
    other.close(new)
    return found


def needed_bytes(old: Any, new: Any) -> int:
    """What a rank of the new engine needs of masters and of both moments that its old one has
    not, element by element."""
    have, need = (
        {
            (name, at)
            for name, first, count, *_ in runs_of(engine)
            for at in range(first, first + count)
        }
        for engine in (old, new)
    )
    return len(need - have) * 3 * 4


def refusals(setup: Any) -> dict[str, list[str]]:
    """What holds and loads say that can't be; after each the engine is as it was, and trains."""
    kind = kind_of(setup)
    engine = kind.make(setup)
    kind.train(engine, 2)
    handle = kind.handle(engine)
    before = kind.settled_state(engine)
    found: dict[str, list[str]] = {}
    for name, call in _impossible(handle).items():
        found[name] = [refusal_of(call, "nothing was refused")]
        found[name] += zero_states.differences(before, kind.settled_state(engine))
    kind.train(engine, 1)
    kind.close(engine)
    return found


def _impossible(handle: Any) -> dict[str, Callable[[], Any]]:
    """Holds and loads that can't be, by what is wrong with them."""
    world = dist.get_world_size()
    free = ucp.hold(handle)
    free.release()
    return {
        "too many ranks": lambda: ucp.hold(handle, ranks=world + 1),
        "two numbers": lambda: ucp.hold(handle, mesh=f"dp={world}", ranks=world - 1),
        "no mesh": lambda: ucp.hold(handle, mesh="dq=2"),
        "ranks differ": lambda: ucp.hold(handle, ranks=1 + dist.get_rank() % 2),
        "not attached": lambda: ucp.hold(torch.nn.Linear(1, 1)),
        "into itself": lambda: ucp.resize(handle, handle),
        "nothing held": lambda: ucp.load(handle, ucp.hold(None)),
        "let go of": lambda: ucp.load(handle, free),
        "a tag": lambda: ucp.load(handle, ucp.hold(handle), tag="step1"),
        "a path here, memory there": lambda: ucp.load(
            handle, ucp.hold(None) if dist.get_rank() else "nowhere"
        ),
    }


def fails_while_moving(source: Any, target: Any, rank: int) -> dict[str, Any]:
    """One rank can't put what it takes: all raise, what is held stays, and another load is whole.
    Then a bit changes on its way, which the fingerprint sees."""
    one, other = kind_of(source), kind_of(target)
    engine = one.make(source)
    one.train(engine, 2)
    want = one.settled_state(engine)
    held = ucp.hold(one.handle(engine))
    one.close(engine)
    engine, found = other.make(target), dict[str, Any]()
    for name, put in (("fails", _failing), ("changes", _changing)):
        own = put if dist.get_rank() == rank else _copied
        with mock.patch.object(kept_moves, "_copied", own):
            found[name] = refusal_of(
                lambda: ucp.load(other.handle(engine), held), "nothing was refused"
            )
        try:
            other.train(engine, 1)
            found[f"{name}, then"] = "it trains"
        except ucp.EngineUnusableError:
            found[f"{name}, then"] = "it refuses"
    ucp.load(other.handle(engine), held)
    found["differences"] = compared(source, target)(want, other.settled_state(engine))
    other.close(engine)
    return found


def _failing(*_: Any) -> None:
    raise ucp.DamagedFileError("only here")


_copied = kept_moves._copied


def _changing(pairs: Any, lost: Any) -> None:
    _copied(pairs, lost)
    for pair in pairs:
        pair.into.add_(1)


def weights_alone(source: Any, target: Any) -> dict[str, Any]:
    """The weights of a trainer in an engine without an optimizer, of another dtype."""
    one, other = kind_of(source), kind_of(target)
    old = one.make(source)
    one.train(old, 2)
    new = other.make(target)
    before = zero_states.weights(new)
    report = ucp.resize(one.handle(old), other.handle(new))
    masters = one.settled_state(old)["full"]
    have = zero_states.weights(new)
    found = {
        "line": str(report),
        "as before": [n for n, v in before.items() if torch.equal(v, have[n])],
        "wrong": [
            name
            for (name, state), value in masters.items()
            if state == "fp32" and not torch.equal(value.to(have[name].dtype), have[name])
        ],
        "compared": sum(state == "fp32" for _, state in masters),
    }
    one.close(old)
    other.close(new)
    return found


def dies(source: Any, target: Any, rank: int, folder: str, moment: str) -> None:
    """One rank is killed while elements move, in a hold or in a load. Each of the others writes
    what it was told, how long after the death, and whether its own engine is as it was."""
    one, other = kind_of(source), kind_of(target)
    engine = one.make(source)
    one.train(engine, 2)
    own = [value.clone() for value in _own_tensors(engine)]
    file = Path(folder)
    handle, stay = one.handle(engine), dist.get_world_size() - 1
    doing: Callable[[], Any] = partial(ucp.hold, handle, ranks=stay)
    if moment != "hold":
        held = ucp.hold(handle)
        doing = partial(ucp.load, other.handle(other.make(target)), held)

    def killed(*_: Any) -> Any:
        (file / "death").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    dist.barrier()
    is_dead = dist.get_rank() == rank
    with mock.patch.object(kept_moves.KeptMoves, "_post", killed) if is_dead else nothing():
        said = refusal_of(doing, "nothing was told")
    seconds = time.time() - float((file / "death").read_text())
    same = all(map(torch.equal, own, _own_tensors(engine)))
    told = {"said": said, "seconds": seconds, "same": same}
    tell_and_leave(file, told)


def tell_and_leave(folder: Path, told: dict[str, Any]) -> None:
    """Writes what this rank was told, and ends once the others have: another one's end must not be
    what they hear of. A barrier would wait for the dead."""
    (folder / f"{dist.get_rank()}.saving").write_text(json.dumps(told))
    (folder / f"{dist.get_rank()}.saving").rename(folder / f"{dist.get_rank()}.json")
    while len([*folder.glob("*.json")]) < dist.get_world_size() - 1:
        time.sleep(0.01)
    os._exit(1)


def _own_tensors(engine: Any) -> list[torch.Tensor]:
    """Masters and moments of this rank."""
    kept = zero_states.base_of(engine).state
    return [
        tensor
        for master, states in kept.items()
        for tensor in (master.data, *states.values())
        if isinstance(tensor, torch.Tensor)
    ]
