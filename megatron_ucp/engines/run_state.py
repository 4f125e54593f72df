"""The state of a run that is no element of a tensor: counters, schedule, random generators, the
position in the data. A save writes it, a hold keeps it, a load sets it.

Example: of step 80 the elements of all weights and moments lie in large files; that it is step 80,
the learning rate's schedule, what dropout draws next and which sample comes next is run state.
"""

import copy
import hashlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines.values import LiveValues, Values
from megatron_ucp.errors import DamagedFileError, StateMismatchError, UnsupportedError
from megatron_ucp.formats import per_rank
from megatron_ucp.formats.checkpoint import TWISTER_WORDS, Checkpoint
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.per_rank import RANDOM_STATES
from megatron_ucp.formats.store import Location
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import KeepsPosition, LoadOptions

# ---- random states
#
# Random generators of a rank: kept beside a save, the same again on the same mesh, derived anew
# on another one.


# Generators for tensor-parallel regions, by the module that keeps them. Looked up there only where
# a program uses it.
_TRACKERS = {
    "megatron": "megatron.core.tensor_parallel.random",
    "deepspeed": "deepspeed.runtime.activation_checkpointing.checkpointing",
}
# Names of generators that draw otherwise on every rank, for what only it has. All others (of
# dropout between tensor-parallel regions, of hidden states that are mixed) are shared there.
_OF_EACH_RANK = frozenset({"model-parallel-rng", "expert-parallel-rng"})
_ALWAYS = frozenset({"torch", "numpy", "numpy_place", "numpy_gauss", "python", "python_gauss"})
_GPU_BYTES = 16  # of a CUDA generator: its seed and offset
SEED, STEPS = "seed", "global_steps"  # keys of the manifest's `run`
CONVERTED = (
    "converted_from"  # the mesh whose ranks had the generators, which a conversion leaves behind
)


def file_name(rank: int) -> str:
    return f"{RANDOM_STATES}{rank:05d}.safetensors"


def states() -> dict[str, torch.Tensor]:
    """The generators of torch, numpy, Python, the GPU, and every tracker of tensor-parallel
    regions, as tensors."""
    _, keys, place, has_gauss, gauss = np.random.get_state()
    version, internal, gauss_next = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.array(keys, dtype=np.int64)),
        "numpy_place": torch.tensor([place, has_gauss]),
        "numpy_gauss": torch.tensor([gauss], dtype=torch.float64),
        # by way of numpy, which takes a third of the time
        "python": torch.from_numpy(np.array([version, *internal], dtype=np.int64)),
        "python_gauss": torch.tensor(
            [math.nan if gauss_next is None else gauss_next], dtype=torch.float64
        ),
    }
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    for owner, tracker in _trackers().items():
        for name, state in tracker.get_states().items():
            found[f"{owner}.{name}"] = _state_of(state)
    return {name: state.cpu().contiguous().clone() for name, state in found.items()}


def _trackers() -> dict[str, Any]:
    return {
        owner: sys.modules[module].get_cuda_rng_tracker()
        for owner, module in _TRACKERS.items()
        if module in sys.modules
    }


@dataclass(frozen=True)
class Restored:
    """What a load does with the generators, known before it writes anything: `states` to set, or
    `seed` to derive from."""

    note: str | None
    states: dict[str, torch.Tensor] | None = None
    seed: int | None = None
    rank: int = 0

    @classmethod
    def plan(cls, source: Checkpoint, here: Mesh, rank: int, place: tuple[int, int]) -> "Restored":
        """Reads this rank's file where the mesh is the same, and where our own saves left none what
        the format's own program keeps. `place`: this rank's data-parallel rank and pipeline stage.

        Raises DamagedFileError.
        """
        manifest, file = source.recorded, str(source.folder / file_name(rank))
        kept = source.beside(file_name(0)) is not None
        run: Mapping[str, Any] = {} if manifest is None else manifest.run
        if manifest is None or SEED not in run or not (kept or CONVERTED in run):
            found = source.random_states(here, rank)
            if isinstance(found, str):
                return cls(f"random states: {found}, this process's own go on")
            return cls._exactly({name: _tensor(found[name]) for name in found}, source.main_file)
        if kept and manifest.mesh.has_ranks_of(here):
            return cls._exactly(_parse(source.beside(file_name(rank)), file), file)
        text = " ".join(map(str, (run[SEED], run.get(STEPS, 0), *place)))
        return cls(
            "random states: derived from the seed, the step and this rank's coordinates, as the "
            "mesh is another one",
            seed=_seed_of(text),
            rank=rank,
        )

    @classmethod
    def _exactly(cls, saved: dict[str, torch.Tensor], file: str) -> "Restored":
        """Sets generators to what they were. Those of a GPU and of a machine without one can't be
        set to each other's, and a tracker may have names that the other has not: these go on, and
        the note says which. Raises DamagedFileError for what no generator can be set to."""
        _check(saved, file)
        live = {name: state for name, state in states().items() if name not in _ALWAYS}
        shapes = {name: state.shape for name, state in saved.items()}
        kept = [name for name, state in live.items() if shapes.get(name) != state.shape]
        if "cuda" in saved and "cuda" not in live and saved["cuda"].numel() == _GPU_BYTES:
            kept.append("cuda")
        note = (
            "random states: this process's own go on for "
            f"{', '.join(kept)}, as the checkpoint has none that fit them"
        )
        fitting = {name: state for name, state in saved.items() if name not in kept}
        return cls(note if kept else None, states=fitting)

    def apply(self) -> None:
        """Sets the generators of this rank."""
        if self.states is not None:
            _set(self.states)
        elif self.seed is not None:
            _derive(self.seed, self.rank)


def _parse(data: bytes | None, file: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        found = load(data or b"")
    except SafetensorError as error:
        raise DamagedFileError(
            "a file of random states can't be read", file=file, found=str(error)
        ) from None
    return found


def _tensor(value: bytes | Sequence[int] | Sequence[float]) -> torch.Tensor:
    """In the form of `states`."""
    if isinstance(value, bytes):
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    kind = torch.float64 if isinstance(value[0], float) else torch.int64
    return torch.tensor(value, dtype=kind)


def _check(saved: Mapping[str, torch.Tensor], file: str) -> None:
    """Setting them comes after everything else was written: what torch, numpy and Python would
    refuse, or take as something else, is found now. Raises DamagedFileError."""
    for name, own in states().items():
        theirs = saved.get(name)
        if name in _ALWAYS and (theirs is None or _form(theirs) != _form(own)):
            raise DamagedFileError(
                "a file of random states is not complete",
                file=file,
                parameter=name,
                expected=_form(own),
                found="nothing of it" if theirs is None else _form(theirs),
            )
    _check_values(saved, file)


def _form(state: torch.Tensor) -> str:
    return f"{state.dtype} {tuple(state.shape)}"


def _check_values(saved: Mapping[str, torch.Tensor], file: str) -> None:
    for name, state in saved.items():
        if name not in _ALWAYS and not _is_of_torch(state):
            _refuse(name, _form(state), file)
    words = torch.cat([saved["numpy"], saved["python"][1:-1]])
    places = torch.stack([saved["numpy_place"][0], saved["python"][-1]])
    for name, found, most in (
        ("numpy, python", words, 2**32 - 1),
        ("place", places, TWISTER_WORDS),
    ):
        if not bool(((found >= 0) & (found <= most)).all()):
            _refuse(name, "a word or a place that no generator has", file)
    try:
        torch.Generator().set_state(saved["torch"])
        np.random.RandomState().set_state(_of_numpy(saved))
        random.Random().setstate(_of_python(saved))
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        _refuse("torch, numpy or python", str(error)[:200], file)


def _is_of_torch(state: torch.Tensor) -> bool:
    """Whether a generator of torch can be set to it, on a GPU or on a CPU."""
    if state.dtype != torch.uint8 or state.dim() != 1:
        return False
    if state.numel() == _GPU_BYTES:
        return True
    try:
        torch.Generator().set_state(state)
    except RuntimeError:
        return False
    return True


def _refuse(name: str, found: str, file: str) -> NoReturn:
    raise DamagedFileError(
        "random states are no states of a generator",
        file=file,
        parameter=name,
        found=found,
        fix="load another tag, or with rng=False",
    )


def _of_numpy(saved: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """As numpy's `set_state` takes it."""
    place, has_gauss = saved["numpy_place"].tolist()
    words = saved["numpy"].numpy().astype(np.uint32)
    return "MT19937", words, place, has_gauss, saved["numpy_gauss"].item()


def _of_python(saved: Mapping[str, torch.Tensor]) -> tuple[Any, ...]:
    """As Python's `setstate` takes it."""
    version, *internal = saved["python"].tolist()
    gauss_next = saved["python_gauss"].item()
    return version, tuple(internal), None if math.isnan(gauss_next) else gauss_next


def _set(saved: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(saved["torch"])
    np.random.set_state(_of_numpy(saved))
    random.setstate(_of_python(saved))
    if "cuda" in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["cuda"])
    _track(lambda name, state: saved.get(name, _state_of(state)))


def _derive(seed: int, rank: int) -> None:
    """Tensor-parallel ranks share all but their regions' generators: replicated parameters need the
    same dropout there."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)

    def drawn_from(name: str, state: Any) -> torch.Tensor:
        text = f"{seed} {name}"
        if name.partition(".")[2] in _OF_EACH_RANK:
            text = f"{text} {rank}"
        kind = "cuda" if _state_of(state).numel() == _GPU_BYTES else "cpu"
        return torch.Generator(kind).manual_seed(_seed_of(text)).get_state()

    _track(drawn_from)


def _track(state_for: Callable[[str, Any], torch.Tensor]) -> None:
    """Sets every generator that the live trackers have, by "OWNER.NAME" and its present state.
    Which there are, and of which kind, the program has decided: none is added, and none becomes
    another kind (megatron-core's graph-safe ones are generators, the others their states)."""
    for owner, tracker in _trackers().items():
        live: dict[str, Any] = tracker.get_states()
        found: dict[str, Any] = {
            name: state_for(f"{owner}.{name}", state) for name, state in live.items()
        }
        for name, state in live.items():
            if isinstance(state, torch.Generator):
                state.set_state(found[name])
                found[name] = state
        if found:
            tracker.set_states(found)


def _state_of(tracked: Any) -> torch.Tensor:
    """Of what a tracker keeps: the state of a generator, or a generator."""
    return tracked if isinstance(tracked, torch.Tensor) else tracked.get_state()


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1


# ---- loader
#
# A torch DataLoader over a DistributedSampler that goes on where a save was, also on another
# number of ranks.


_NEEDED = ("num_replicas", "rank", "dataset", "epoch", "drop_last", "set_epoch")


class ResumableLoader:
    """Wraps a `DataLoader` whose sampler is a `DistributedSampler`, or one of its kind; iterates as
    it does, and goes on where a save was, on any number of ranks.

    Such a sampler deals the epoch's order out like cards, so that the ranks together have always
    had a prefix of it: how many samples that is says all, on any number of ranks. Counted is what
    the loop got, not what workers fetched ahead.

    Args:
        loader: The `DataLoader`.

    Raises:
        UnsupportedError: For another sampler.

    Example:
        >>> sampler = DistributedSampler(data, seed=1)
        >>> loader = ucp.ResumableLoader(DataLoader(data, batch_size=4, sampler=sampler))
        >>> ucp.attach(engine, loader=loader)  # saves keep its position, loads restore it
        >>> for epoch in range(loader.epoch, epochs):
        ...     loader.set_epoch(epoch)
        ...     for batch in loader:
        ...         train(batch)
    """

    def __init__(self, loader: Any) -> None:
        batches: Any = getattr(loader, "batch_sampler", None)
        sampler = getattr(batches, "sampler", None)
        missing = [name for name in _NEEDED if not hasattr(sampler, name)]
        if missing:
            raise UnsupportedError(
                "the loader's sampler is none of DistributedSampler's kind",
                found=type(sampler).__qualname__,
                expected=f"a batch sampler over one with {', '.join(_NEEDED)}",
                fix="use DataLoader(..., batch_size=, sampler=DistributedSampler(...)), also on "
                "one rank",
            )
        self.loader: Any = loader
        self.sampler: Any = sampler
        self.samples = 0  # of the epoch, handed out by all ranks together
        self._start = 0  # where the next iteration begins
        self._is_restored = False  # and has not been iterated since
        batches.sampler = _Rest(self)

    @property
    def epoch(self) -> int:
        return int(self.sampler.epoch)

    def set_epoch(self, epoch: int) -> None:
        """As the sampler's. Another epoch than the present one begins at its first sample."""
        if epoch != self.epoch:
            self._start = self.samples = 0
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        start, replicas = self._start, int(self.sampler.num_replicas)
        rest = len(self.sampler.dataset) - start
        share = rest // replicas if self.sampler.drop_last else -(-rest // replicas)  # of this rank
        self.samples, handed = start, 0
        for batch in self._begun():
            handed = min(handed + int(self.loader.batch_sampler.batch_size), share)
            self.samples = start + handed * replicas
            yield batch

    def _begun(self) -> Iterator[Any]:
        """The iteration of the loader that begins now. Torch draws a seed of its workers as one
        begins; the first one after a load draws it of a copy: what was restored is what the
        program draws next, as in the run that saved, whose iteration had begun before."""
        if not self._is_restored:
            return iter(self.loader)
        self._is_restored = False
        with torch.random.fork_rng(devices=[]):
            return iter(self.loader)

    def take_start(self) -> int:
        """Where the iteration that begins now starts; the one after it starts at the beginning."""
        start, self._start = self._start, 0
        return start

    def order_from(self, start: int) -> list[int]:
        """This rank's share of the epoch's order after its first `start` samples, as
        DistributedSampler deals it."""
        replicas, rank = int(self.sampler.num_replicas), int(self.sampler.rank)
        whole = self._whole()
        rest = whole[start:]
        if self.sampler.drop_last:
            rest = rest[: len(rest) // replicas * replicas]
        elif short := -len(rest) % replicas:
            rest += (whole * (short // len(whole) + 1))[
                :short
            ]  # the epoch's first ones again, as there
        return rest[rank::replicas]

    def _whole(self) -> list[int]:
        """The epoch's order: what the sampler gives to one replica of one."""
        alone, count = copy.copy(self.sampler), len(self.sampler.dataset)
        alone.num_replicas, alone.rank, alone.num_samples, alone.total_size = 1, 0, count, count
        return list(alone)

    # ---------------------------------------------------------------- position

    def state_dict(self) -> dict[str, Any]:
        """Position in samples; the same on every rank and on every number of ranks."""
        return {"epoch": self.epoch, "samples": self.samples, **self._identity()}

    def _identity(self) -> dict[str, Any]:
        return {
            "dataset": len(self.sampler.dataset),
            "seed": getattr(self.sampler, "seed", None),
            "shuffle": getattr(self.sampler, "shuffle", None),
        }

    def check(self, state: Mapping[str, Any], file: str | None = None) -> None:
        """Raises StateMismatchError where the position counts in another order than this
        loader's."""
        saved = {key: state.get(key) for key in self._identity()}
        if saved != self._identity():
            raise StateMismatchError(
                "the data position belongs to another order of samples",
                file=file,
                expected=saved,
                found=self._identity(),
                fix="build dataset and sampler as the run did, or load without loader=",
            )
        if (ours := self.order_from(0)) != (theirs := list(self.sampler)):
            raise UnsupportedError(
                "the sampler deals its samples out in another way than DistributedSampler",
                expected=f"{ours[:4]}...",
                found=f"{theirs[:4]}...",
                fix="keep the data position yourself, in client_state",
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after the position. Raises as `check`."""
        self.check(state)
        self.sampler.set_epoch(int(state["epoch"]))
        self._start = self.samples = min(int(state["samples"]), len(self.sampler.dataset))
        self._is_restored = True


def restore_position(loader: KeepsPosition | None, position: Mapping[str, Any] | None) -> list[str]:
    """Gives a loader the position of a checkpoint; notes where there is only one of them."""
    if loader is not None and position is not None:
        loader.load_state_dict(position)
    elif loader is not None or position is not None:
        why = "no loader was given" if loader is None else "the checkpoint has none"
        return [f"the data position was not restored: {why}"]
    return []


class _Rest:
    """What the batch sampler draws from: the sampler, less what was handed out before."""

    def __init__(self, owner: ResumableLoader) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[int]:
        return iter(self._owner.order_from(self._owner.take_start()))

    def __len__(self) -> int:
        return len(self._owner.sampler)


# ---- what a save writes, and a hold keeps


@dataclass(frozen=True)
class DrawnState:
    """What a program moves that draws data: random states (None: they are not kept), and what a
    manifest says of the position of a loader."""

    random: Mapping[str, torch.Tensor] | None
    position: Mapping[str, Any]

    @classmethod
    def now(cls, loader: ResumableLoader | None, rng: bool) -> "DrawnState":
        position = {} if loader is None else {"data": loader.state_dict()}
        return cls(states() if rng else None, position)


@dataclass(frozen=True)
class RunState:
    """What one rank has of a run besides elements. `facts` are lines of the manifest's `run`, the
    same on all ranks; `texts` and `random` what this rank alone has, by the names of small files;
    `notes` say what no load on another mesh gets. Nothing of it changes when the engine trains on.
    A conversion carries only the facts that `reshard/writers.CARRIED` lists.
    """

    facts: Mapping[str, Any]
    texts: Mapping[str, bytes]
    random: Mapping[str, Mapping[str, torch.Tensor]]
    notes: tuple[str, ...] = ()

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The small files of this rank. Those of random states are made when they are asked for: a
        save in the background does that beside training."""
        from safetensors.torch import save

        return {**self.texts, **{name: save({**held}) for name, held in self.random.items()}}

    @classmethod
    def of_ranks(
        cls,
        read: Callable[[], tuple[Mapping[str, Any], LiveValues]],
        drawn_now: Callable[[], DrawnState],
        folder: Location,
        notes: Sequence[str] = (),
    ) -> "RunState":
        """What `read` gives on each rank: facts, and the values that the rank has for itself. Those
        are compared, and what differs is kept for each. Errors name the file in `folder`.
        Collective. Raises SaveError."""
        rank, texts = agree.world()[0], dict[str, bytes]()
        with agree.gathering() as block:
            found, own = read()
            place = drawn_now()
            facts = copy.deepcopy({**found, **place.position})
            block.value = own.digest()
        if differing := own.differing(block.values):
            name = per_rank.file_name(rank)
            with agree.together():
                texts[name] = own.text(folder / name, differing).encode()
            facts[per_rank.PER_RANK] = differing.as_value()
            notes = [*notes, f"differs from rank to rank, and is kept for each: {differing}"]
        drawn = {} if place.random is None else {file_name(rank): place.random}
        return cls(facts, texts, drawn, tuple(notes))


# ---- Megatron's schedule
#
# Megatron's schedules count samples, and hold settings that a run may change.


NUM_STEPS = "num_steps"  # of such a schedule: the samples that it has seen
_COUNTS = (NUM_STEPS, "num_tokens")


def counts_samples(scheduler: Any) -> bool:
    """Whether a scheduler is one of Megatron's."""
    return hasattr(scheduler, "use_checkpoint_opt_param_scheduler")


def changed_settings(scheduler: Any, saved: Mapping[str, Any], file: str) -> dict[str, Any]:
    """Settings of Megatron's schedule that the checkpoint changes; of another one none. Raises
    StateMismatchError where they differ and the schedule is told neither to take the checkpoint's
    nor to keep its own."""
    if NUM_STEPS not in saved or not counts_samples(scheduler):
        return {}
    own = {key: value for key, value in scheduler.state_dict().items() if key not in _COUNTS}
    if "weight_decay" in saved:  # a schedule that does not let it grow
        saved = {"start_wd": saved["weight_decay"], "end_wd": saved["weight_decay"], **saved}
    different = {key: saved[key] for key in own if key in saved and saved[key] != own[key]}
    if not different or keeps_own_settings(scheduler):
        return {}
    if scheduler.use_checkpoint_opt_param_scheduler:
        return different
    raise StateMismatchError(
        "the schedule differs from the checkpoint's",
        file=file,
        expected=", ".join(f"{key}={value}" for key, value in different.items()),
        found=", ".join(f"{key}={own[key]}" for key in different),
        fix="--use-checkpoint-opt_param-scheduler takes the checkpoint's settings, "
        "--override-opt_param-scheduler keeps these",
    )


def keeps_own_settings(scheduler: Any) -> bool:
    """Whether changed settings of the schedule win over the checkpoint's."""
    return bool(getattr(scheduler, "override_opt_param_scheduler", False))


# ---- what a load sets
#
# What resumes in every engine in the same way.


@dataclass(frozen=True)
class CommonState:
    """Values of a checkpoint, ready to be set."""

    counters: Mapping[str, int]
    scaler: LossScale
    client_state: Mapping[str, Any]
    randoms: Restored
    position: Mapping[str, Any] | None
    loader: KeepsPosition | None

    @classmethod
    def prepare(
        cls,
        source: Checkpoint,
        values: Values,
        options: LoadOptions,
        mesh: Mesh,
        place: tuple[int, int],
    ) -> "CommonState":
        """`place` is this rank's data-parallel rank and pipeline stage. Raises StateMismatchError
        where the data position does not fit the loader."""
        saved = source.extras
        client = saved.client_state
        if options.own is not None:
            client = options.own.over(client, options.apart)
        position = None if options.module_only else saved.data_position
        if options.loader is not None and position is not None:
            options.loader.check(position, str(source.folder))
        rank = agree.world()[0]
        randoms = Restored.plan(source, mesh, rank, place) if options.rng else Restored(None)
        built = values.built(dict(client), "client_state")
        return cls(saved.counters, saved.scaler, built, randoms, position, options.loader)

    def apply(self) -> list[str]:
        """Sets random states and the data position; returns notes."""
        self.randoms.apply()
        notes = [self.randoms.note] if self.randoms.note else []
        return notes + restore_position(self.loader, self.position)
