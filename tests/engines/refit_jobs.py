"""What the ranks do in the tests of refits: one engine trains, and its weights go into another one,
or into plain tensors, after each step."""

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import megatron_ucp as ucp
from megatron_ucp.engines import refit
from megatron_ucp.reshard import kept_moves, messages
from pretrain.mcore import models
from tests.engines import autotp_states, model, resize_jobs
from tests.engines import canonical as zero_states
from tests.engines.autotp_jobs import Auto
from tests.engines.kinds import Kind, kind_of, refusal_of
from tests.engines.tensor_jobs import Mega

Differ = list[str]
# what a rank could ask of all others
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast"),
    *("reduce_scatter_tensor", "all_to_all_single", "barrier", "gather", "scatter"),
)


class Groups:
    """megatron-core's global groups, of which each engine here has its own: it trains with those
    that it was made with. Nothing is destroyed."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self._home: dict[str, Any] = parallel_state.__dict__
        self._empty = self.now()

    def now(self) -> dict[str, Any]:
        """Those that are there."""
        return {
            name: value
            for name, value in self._home.items()
            if name.startswith("_") and name.isupper()
        }

    def made(self, make: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
        """An engine, and the groups that it was made with."""
        self._home.update(self._empty)
        return make(), self.now()

    def use(self, groups: dict[str, Any]) -> None:
        """From now on these are there."""
        self._home.update(groups)


@dataclass
class Both:
    """An engine that trains, and one that is filled, which has an optimizer or is `idle`."""

    source: Any
    target: Any
    idle: bool = True
    padded: bool = False  # with more rows of a vocabulary

    def __post_init__(self) -> None:
        one, other = map(kind_of, (self.source, self.target))
        self._kinds = one, other
        self._groups = Groups()
        self.old, self._own = self._groups.made(lambda: one.make(self.source))
        self.new, self._others = self._groups.made(lambda: self._filled(other))
        self.handles = one.handle(self.old), self.new if self.idle else other.handle(self.new)
        self._groups.use(self._own)

    def _filled(self, kind: Kind) -> Any:
        return without_optimizer(kind, self.target) if self.idle else kind.make(self.target)

    def train(self, step: int) -> None:
        self._kinds[0].train(self.old, 1, first=step)

    def of_target(self, make: Callable[..., Any], *args: Any) -> Any:
        """What is made of the new engine, in its own groups."""
        self._groups.use(self._others)
        try:
            return make(self.new, *args)
        finally:
            self._groups.use(self._own)

    def train_target(self, step: int) -> list[float]:
        return self.of_target(self._kinds[1].train, 1, step)

    def another(self, setup: Any) -> Any:
        """One more engine."""
        kind = kind_of(setup)
        found, _ = self._groups.made(lambda: kind.make(setup))
        self._groups.use(self._own)
        return kind.handle(found)

    def wrong(self) -> Differ:
        """What of the new engine is not as in the old one."""
        want = self._kinds[0].settled_state(self.old)
        if self.idle:
            return self.of_target(lambda new: wrong_weights(want, new, self.target, self.padded))
        return wrong_masters(want, self.of_target(self._kinds[1].settled_state))


def without_optimizer(kind: Kind, setup: Any) -> Any:
    """An engine of DeepSpeed around the model of a setup, for its forward pass alone."""
    import deepspeed

    if getattr(setup, "extra", {}).get("evaluate"):
        return kind.make(setup)
    own = kind.make(setup)
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "steps_per_print": 10**9}
    if setup.dtype != "fp32":
        config[setup.dtype] = {"enabled": True}
    mpu = models.mpu() if hasattr(setup, "tp") else None
    made = deepspeed.initialize(model=own.module, config=config, mpu=mpu, dist_init_required=False)[
        0
    ]
    return ucp.attach(made, family=getattr(setup, "family", None))


def wrong_weights(want: dict[str, Any], engine: Any, setup: Any, padded: bool = False) -> Differ:
    """What of an engine without an optimizer is not what another one computes with; in another
    dtype, not its masters in that one. Where it is `padded`, more rows are zeros."""
    have = (autotp_states if isinstance(setup, Auto) else zero_states).weights(engine)
    out = [f"{name} is missing" for name in want["weights"].keys() - have.keys()]
    for name, value in want["weights"].items():
        if name not in have:
            continue
        if have[name].dtype != value.dtype:
            value = want["full"].get((name, "fp32"), value).to(have[name].dtype)
        own = have[name]
        if padded and own.shape != value.shape:
            out += [f"rows of {name}"] if own[len(value) :].any() else []
            own = own[: len(value)]
        if not torch.equal(zero_states.bits(value), zero_states.bits(own)):
            out.append(name)
    return out


def wrong_masters(want: dict[str, Any], have: dict[str, Any]) -> Differ:
    """What of an engine with an optimizer is not what another one has; its weights are its masters
    in their dtype."""
    out = []
    for (name, state), value in want["full"].items():
        own = have["full"].get((name, state)) if state == "fp32" else value
        if own is None or not torch.equal(zero_states.bits(value), zero_states.bits(own)):
            out.append(name)
        weight = have["weights"][name]
        if state == "fp32" and own is not None:
            if not torch.equal(zero_states.bits(own.to(weight.dtype)), zero_states.bits(weight)):
                out.append(f"the weight of {name}")
    return out


def pair(
    source: Any, target: Any, idle: bool, padded: bool = False, steps: int = 3
) -> dict[str, Any]:
    """Refits after each of some steps, and compares with a gather that knows nothing of the
    package's layouts."""
    both = Both(source, target, idle, padded)
    both.train(0)
    move = ucp.refit(*both.handles, allow={"vocab"} if padded else ())
    found: dict[str, Any] = {"before": both.wrong(), "wrong": [], "planned": [], "compared": []}
    for step in range(1, steps + 1):
        both.train(step)
        with torch.inference_mode(step == 2):  # a trainer may evaluate meanwhile
            report = move(checksums=step == steps)
        found["wrong"] += both.wrong()
        found["planned"].append(report.planned)
        found["compared"].append(report.compared_bytes)
    found |= {"filled": report.filled_bytes, "moved": report.moved_bytes}
    _plant(both.new)
    try:
        found["planted"] = both.wrong()
    except AssertionError as error:  # copies differ
        found["planted"] = [str(error)]
    return found


def _plant(engine: Any) -> None:
    """One element that all ranks have otherwise."""
    chunks = engine.handle.chunks if hasattr(engine, "handle") else [engine.module]
    params = [param for chunk in chunks for param in chunk.parameters()]
    with torch.no_grad():
        for param in sorted(params, key=lambda param: not param.requires_grad):
            held = getattr(param, "ds_tensor", param)
            if held.numel():
                held.data.view(-1)[:1] += 1
                return


# ------------------------------------------------ what a call does


@contextmanager
def counted(found: dict[str, int]) -> Iterator[None]:
    """Counts what ranks ask of each other inside, beside messages with values."""

    def counting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] = found.get(name, 0) + 1
            return own(*args, **kwargs)

        return call

    move = messages.DefaultRanks.move

    def moved(self: Any, sent: Any, sizes: Any) -> Any:
        found["messages"] = found.get("messages", 0) + 1
        found["bytes"] = found.get("bytes", 0) + sum(map(len, sent.values()))
        return move(self, sent, sizes)

    patches = [mock.patch.object(messages.DefaultRanks, "move", moved)]
    patches += [
        mock.patch.object(dist, name, counting(name, getattr(dist, name))) for name in COLLECTIVES
    ]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def rss_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def many(source: Any, target: Any, calls: int) -> dict[str, Any]:
    """A trainer that steps, and a rollout that gets its weights, again and again."""
    both = Both(source, target)
    move = ucp.refit(*both.handles, checksums=50)
    found: dict[str, Any] = {"wrong": [], "planned": 0, "compared": 0, "asked": {}}
    for step in range(calls):
        both.train(step)
        asked: dict[str, int] = {}
        with counted(asked):
            report = move()
        if report.compared_bytes is None:
            for name, count in asked.items():
                found["asked"][name] = max(count, found["asked"].get(name, 0))
        found["planned"] += report.planned
        found["compared"] += report.compared_bytes is not None
        found["wrong"] += both.wrong()
        if step == calls // 4:
            found["rss"] = rss_bytes()
    found["grown"] = rss_bytes() - found["rss"]
    return found


def changes(source: Any, target: Any) -> dict[str, Any]:
    """What the next call sees by itself."""
    both = Both(source, target, idle=False)
    turned = torch.arange(9.0).view(3, 3)
    for engine, values in ((both.old, turned), (both.new, turned.clone().zero_())):
        engine.module.register_buffer("turned", values)
    move, new = ucp.refit(*both.handles), both.new
    found: dict[str, Any] = {}

    def call(name: str) -> None:
        both.train(len(found))
        planned = move().planned
        is_equal = torch.equal(new.module.turned, turned)
        found[name] = planned, [*both.wrong(), *([] if is_equal else ["turned"])]

    call("first")
    call("nothing")
    if dist.get_rank() == 0:
        param = next(iter(new.module.parameters()))
        param.data = param.data.clone()
    call("memory of a parameter, on one rank")
    new.module.turned.t_()
    call("strides of a buffer")
    parent = new.module.down
    fresh = torch.nn.Parameter(torch.zeros_like(parent.bias))
    for group in new.optimizer.param_groups:
        group["params"] = [fresh if one is parent.bias else one for one in group["params"]]
    new.param_names[fresh] = new.param_names.pop(parent.bias)
    parent.bias = fresh
    call("a parameter that is another one")
    first, second = new.optimizer.param_groups[:2]
    second["params"].append(first["params"].pop())
    call("a group")
    call("nothing again")
    return found


def failing(source: Any, target: Any, rank: int) -> dict[str, Any]:
    """One rank fails at some moments: all raise. The next call is whole."""

    both = Both(source, target)
    move = ucp.refit(*both.handles)
    move()

    def fails(*_: Any, **__: Any) -> Any:
        raise ucp.DamagedFileError("only here", id="")

    found: dict[str, Any] = {}
    places = {
        "before": (type(move), "_lies_at"),
        "while it moves": (kept_moves, "_copied"),
    }
    for step, (name, (where, what)) in enumerate(places.items()):
        both.train(step)
        own = fails if dist.get_rank() == rank else getattr(where, what)
        with mock.patch.object(where, what, own):
            found[name] = refusal_of(move, "nothing was refused")
        move()
        found[f"{name}, then"] = both.wrong()

    def changing(pairs: Any, lost: Any) -> None:
        own_copied(pairs, lost)
        for pair in pairs:
            pair.into.view(-1)[:1] += 1

    own_copied = kept_moves._copied
    with mock.patch.object(
        kept_moves, "_copied", changing if dist.get_rank() == rank else own_copied
    ):
        found["changed"] = refusal_of(lambda: move(checksums=True), "nothing was refused")
    try:
        both.new.module.state_dict()
        found["changed, then"] = "it is used"
    except ucp.EngineUnusableError:
        found["changed, then"] = "it refuses"
    move(checksums=True)
    found["whole again"] = both.wrong()
    return found


LAYER_NORM = "model.layers.0.input_layernorm.weight"


def refusals(source: Any, target: Any) -> dict[str, Differ]:
    """What can't be refitted, and what is said; after each both engines are as they were."""
    both = Both(source, target)
    both.train(0)
    old, new = both.handles
    other = both.another(Mega("gpt", 1, 0, "bf16"))
    whole = {"word_embeddings": torch.zeros(4)}
    one = torch.zeros(16)

    def norm(dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        return {"model.norm.weight": one if dtype is None else one.to(dtype)}

    calls: dict[str, Callable[[], Any]] = {
        "one engine": lambda: ucp.refit(old, old),
        "nobody trains": lambda: ucp.refit(None, new),
        "nobody is filled": lambda: ucp.refit(old, None),
        "no engine": lambda: ucp.refit(old, torch.nn.Linear(1, 1)),
        "no such tensor": lambda: ucp.refit(old, whole),
        "another shape": lambda: ucp.refit(old, {"model.norm.weight": torch.zeros(3)}),
        "no tensor": lambda: ucp.refit(old, {"model.norm.weight": [0.0]}),
        "a dtype of no weights": lambda: ucp.refit(old, norm(torch.int8)),
        "one memory": lambda: ucp.refit(old, {**norm(), LAYER_NORM: one[:]}),
        "no number": lambda: ucp.refit(old, new, checksums="often"),  # type: ignore[arg-type]
        "no word": lambda: ucp.refit(old, new, allow={"anything"}),
        "ranks differ": lambda: ucp.refit(old, new, checksums=dist.get_rank()),
        "another model": lambda: ucp.refit(old, other),
    }
    move = ucp.refit(old, new)
    calls["ranks differ in a call"] = lambda: move(checksums=dist.get_rank() == 0)
    before, found = both.wrong(), dict[str, Differ]()
    for name, call in calls.items():
        found[name] = [refusal_of(call, "nothing was refused")]
        found[name] += [one for one in both.wrong() if one not in before]
    ucp.refit(old, new)()
    found["then"] = both.wrong()
    return found


def dies(source: Any, target: Any, rank: int, folder: str) -> None:
    """One rank is killed between two steps; each of the others writes what it was told."""
    move, file = ucp.refit(*Both(source, target).handles), Path(folder)
    move()
    dist.barrier()
    if dist.get_rank() == rank:
        (file / "death").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    said = refusal_of(move, "nothing was told")
    seconds = time.time() - float((file / "death").read_text())
    resize_jobs.tell_and_leave(file, {"said": said, "seconds": seconds})


# ------------------------------------------------ plain tensors, and ranks apart


def between_messages(source: Any, target: Any, folder: str) -> dict[str, Any]:
    """A program's messages are waited for while a refit, a save and a load go on, and are sent
    then: what arrived of each, by tag; what the refit and the load got wrong."""
    both = Both(source, target)
    both.train(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(world) if other != rank]
    places = {(other, tag): torch.zeros(3) for other in others for tag in PROGRAM_TAGS}
    coming = [dist.irecv(memory, other, tag=tag) for (other, tag), memory in places.items()]
    ucp.refit(*both.handles)()
    wrong = both.wrong()
    both.handles[0].ucp.save(folder)
    ucp.load(both.handles[0], folder)
    wrong += both.wrong()
    going = [
        dist.isend(torch.tensor([rank, other, tag]).float(), other, tag=tag)
        for other in others
        for tag in PROGRAM_TAGS
    ]
    for work in (*going, *coming):
        work.wait()
    arrived = {at: memory.tolist() for at, memory in places.items()}
    return {
        "wrong": wrong,
        "others'": [at for at in places if arrived[at] != [at[0], rank, at[1]]],
    }


PROGRAM_TAGS = (0, 1, 2, 3)


def late(source: Any, target: Any) -> bool:
    """The last rank gets weights of the source in the call, as it does where a gather is under way.
    Whether these went into the target."""
    both = Both(source, target)
    both.train(1)
    move = ucp.refit(*both.handles)
    move()

    def gathered(_: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.5)
            for param in both.old.module.parameters():
                param.ds_tensor.data.neg_()

    before = [param.detach().clone() for param in both.new.module.parameters()]
    with mock.patch.object(refit, "_finish_gathers", gathered):
        move()
    params = [*both.new.module.parameters()]
    came = [param.detach().clone() for param in params]
    move()
    assert not all(map(torch.equal, before, came)), "nothing was turned round"
    return all(map(torch.equal, came, params))


def tensors(source: Any, folder: str, dtype: str, takers: list[int]) -> dict[str, Any]:
    """The tensors of the Hugging Face model on some ranks, against the folder that an export
    writes."""
    one = kind_of(source)
    old = one.make(source)
    one.train(old, 1)
    ucp.export_hf(one.handle(old), folder, dtype=dtype)
    like = load_file(Path(folder) / "model.safetensors")
    rank = dist.get_rank()
    # the second taker has some of them alone
    own = {
        name: torch.full_like(value, 7)
        for number, (name, value) in enumerate(like.items())
        if rank in takers and (rank == takers[0] or number % 2)
    }
    move = ucp.refit(one.handle(old), own if rank in takers else None)
    found: dict[str, Any] = {"wrong": [], "count": len(own)}
    for step in (1, 2, 3):
        one.train(old, 1, first=step)
        if step == 3 and own:  # the caller's own mapping: one that it replaced
            name = next(iter(own))
            own[name] = torch.full_like(own[name], 7)
        report = move(checksums=True)
        again = f"{folder}_{step}"
        ucp.export_hf(one.handle(old), again, dtype=dtype)
        want = load_file(Path(again) / "model.safetensors")
        found["wrong"] += [
            name
            for name, value in own.items()
            if not torch.equal(zero_states.bits(value), zero_states.bits(want[name]))
        ]
        found["same as before"] = [n for n in own if torch.equal(like[n], want[n])]
    found["compared"] = report.compared_bytes, report.filled_bytes
    return found


def apart(trainers: list[int], rollouts: list[int], stages: tuple[int, int]) -> dict[str, Any]:
    """A trainer on some ranks of the world, a rollout on others, or on some of the same."""
    rank, groups = dist.get_rank(), {}
    for name, ranks in (("trainer", trainers), ("rollout", rollouts)):
        groups[name] = dist.new_group(ranks)
    old = _on(groups["trainer"], stages[0], 1) if rank in trainers else None
    new = _on(groups["rollout"], stages[1], 9, idle=True) if rank in rollouts else None
    move = ucp.refit(old, new)
    found: dict[str, Any] = {"wrong": [], "before": 0}
    for step in (0, 1):
        if old is not None:
            _stepped(old, step)
        want = _weights(old, trainers[0])
        if not step and new is not None:
            found["before"] = len(_unlike(want, _weights_here(new)))
        report = move(checksums=True)
        if new is not None:
            found["wrong"] += _unlike(want, _weights_here(new))
    found["moved"], found["compared"] = report.moved_bytes, report.compared_bytes
    return found


class _Mpu:
    """Groups of an engine that has some ranks of the world."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._alone = None

    def get_data_parallel_group(self) -> Any:
        return self._group

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._group)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._group)

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_group(self) -> Any:
        return None


def _on(group: Any, zero: int, seed: int, idle: bool = False) -> Any:
    """An engine on the ranks of a group alone."""
    import deepspeed

    torch.manual_seed(seed)
    net = model.NETS["Net"]()
    config = model.config_of(zero, 2, "bf16", gradient_clipping=0.0)
    trained = [param for param in net.parameters() if param.requires_grad]
    optimizer = None if idle else torch.optim.AdamW(trained, lr=1e-2)
    made = deepspeed.initialize(
        model=net, optimizer=optimizer, config=config, mpu=_Mpu(group), dist_init_required=False
    )
    return made[0]


def _stepped(engine: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(model.VOCAB, (2, model.SEQUENCE), generator=generator)
    engine.backward(engine(tokens))
    engine.step()


def _weights_here(engine: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def _weights(engine: Any, first: int) -> dict[str, torch.Tensor]:
    """Those of the rank `first`, on all ranks of the world."""
    held = [None if engine is None else _weights_here(engine)]
    dist.broadcast_object_list(held, first)
    return held[0] or {}


def _unlike(want: dict[str, torch.Tensor], have: dict[str, torch.Tensor]) -> Differ:
    return [name for name, value in want.items() if not torch.equal(value, have[name])]


def tried(both: "Both", move: Callable[[], Any]) -> tuple[str, str]:
    """What a refit says that is to fail, and whether the target may be used then."""
    said = refusal_of(move, "nothing was refused")
    try:
        both.train_target(50)
    except ucp.EngineUnusableError:
        return said, "it refuses"
    return said, "it trains"


def too_large(source: Any, target: Any) -> tuple[str, str]:
    """A master that the weights of the target can't hold: what is said, and whether the target may
    be used then."""
    both = Both(source, target, idle=False)
    both.train(0)
    both.old.optimizer.single_partition_of_fp32_groups[0].data[0] = 1e6
    return tried(both, ucp.refit(*both.handles, allow={"narrow"}))
