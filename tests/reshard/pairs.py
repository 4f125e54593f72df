"""Every pair of a source and a sink that a transfer joins, each as a user starts it. A new pair is
one row of PAIRS."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file

import megatron_ucp as ucp
from megatron_ucp import say
from megatron_ucp.core.manifest import BufferPart, Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.formats.store import Location
from megatron_ucp.reshard import agree, kept_moves
from megatron_ucp.reshard.files import FileSource
from megatron_ucp.reshard.kept_moves import SharedMemories
from megatron_ucp.reshard.target import Conversion, target_manifest
from megatron_ucp.reshard.transfer import (
    Lost,
    Proved,
    SinkPart,
    TransferRun,
    proved,
    transfer,
)
from tests.places import Place
from tests.reshard import paper, twins
from tests.reshard.test_export_edges import with_values


@dataclass
class Placed:
    """Where the folders of a test lie; a test, or what it runs on ranks, sets it."""

    place: Place = field(default_factory=lambda: Place(None))

    @property
    def is_store(self) -> bool:
        return self.place.is_store


PLACE = Placed()
LARGE = {"decoder.final_layernorm.weight": 1e6}  # no float16 holds it
TIED = "replicas not compared: embedding.word_embeddings.weight"


@dataclass(frozen=True)
class Pair:
    """`source` makes what is read, with a value that is LARGE where that is asked for; `move` does
    the work, and returns its notes. `narrow` are options with which LARGE has no place (None: no
    value is rounded). `beside` is the file of an output that says what lies there ("": it is no
    folder). `world` ranks do it, 0: none. `notes_ties`: the source has copies on several stages,
    and the work has notes. `plans`: values go by a plan; else each rank writes what it has."""

    source: Callable[[Path, bool], Any]
    move: Callable[..., Any]
    narrow: Mapping[str, Any] | None = None
    beside: str = ""
    reads: str = "files"
    world: int = 0
    notes_ties: bool = True
    plans: bool = True

    def attempt(self, source: Any, out: Location, callback: Any = None, **options: Any) -> str:
        """What a transfer says that fails; "" for one that does not."""
        try:
            with progress_of(callback):
                self.moved(source, out, **options)
        except (ucp.UcpError, KeyboardInterrupt) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def moved(self, source: Any, out: Location, **options: Any) -> Any:
        """Does the work, from where the test has put the source, with what lies beside it."""
        if isinstance(source, Path):
            source = PLACE.place(source.parent) / source.name
        return self.move(source, out, **options)

    def nothing_counts(self, source: Any, out: Location) -> bool:
        """Whether nothing of an output is there, or may be used."""
        agree.gather(0)
        if self.beside:
            left = [path.name for path in out.parent.iterdir()] if out.parent.is_dir() else []
            return not [name for name in left if out.name in name]
        return source.sink_is_unusable()


@contextlib.contextmanager
def progress_of(callback: Any) -> Iterator[None]:
    """Inside, whatever shows progress calls this."""
    if callback is None:
        yield
        return
    shown = mock.patch.object(say, "progress", lambda *_: contextlib.nullcontext(callback))
    with shown:
        yield


# ------------------------------------------------ files


def gpt(folder: Path, large: bool) -> Path:
    """A checkpoint of two pipeline stages, both of which hold the tied embedding."""
    model = twins.model("gpt")
    model = with_values(model, LARGE) if large else model
    whole = paper.write(model, folder / "whole" / "step7")
    out = folder / "source" / "step7"
    ucp.convert(whole, out, target=Target(ucp.Mesh(pp=2, dp=2, zero=1), stages="layers"))
    return out


def frozen(folder: Path, large: bool) -> Path:
    """As `gpt`; one with a large value has it in a parameter that no optimizer steps."""
    if not large:
        return gpt(folder, large)
    model = paper.plain_model({"a": (4, 3), "b": (5,)}, "bfloat16", {"b": "frozen"})
    return paper.write(with_values(model, {"b": 1e5}), folder / "source" / "step7")


def hugging_face(folder: Path, large: bool) -> Path:
    """A folder in fp64, which an import has to round."""
    source = gpt(folder, False)
    ucp.export_hf(source, folder / "hf", dtype="float32")
    (file,) = (folder / "hf").glob("*.safetensors")
    tensors = {name: value.double() for name, value in load_file(file).items()}
    if large:
        tensors["transformer.ln_f.weight"][1] = 1e300
    save_file(tensors, file)
    return folder / "hf"


def converted(to: str, **more: Any) -> Callable[..., Any]:
    return lambda source, out, **options: ucp.convert(source, out, to=to, **{**more, **options})


def imported(source: Path, out: Path, **options: Any) -> Any:
    return ucp.import_hf(source, out, mesh="dp=2,zero=1", allow={"narrow"}, **options)


def spoil(source: Path) -> None:
    """One file is that of another save."""
    manifest = source / "ucp_manifest.json"
    if manifest.exists():
        tree = json.loads(manifest.read_text())
        tree["files"][0][2] = "0" * 64
        manifest.write_text(json.dumps(tree))
    else:
        (file,) = source.glob("*.safetensors")
        file.write_bytes(file.read_bytes()[:-1])


def adapter(folder: Path, large: bool) -> Path:
    """A run of a low-rank adapter; its config lies beside it."""
    from tests.engines import lora_jobs

    out = folder / "lora"
    engine = lora_jobs.make(lora_jobs.Adapted("rslora", 0))
    lora_jobs.train(engine, 1)
    if large:
        named = dict(engine.module.named_parameters())
        factor = next(param for name, param in named.items() if "lora_B" in name)
        factor.data.fill_(1e8)
    engine.save_checkpoint(str(out), tag="step7")
    engine.module.save_pretrained(out / "peft")
    engine.destroy()
    return out / "step7"


def adapted(source: Path, out: Path, **options: Any) -> Any:
    return ucp.export_hf(source, out, config=source.parent / "peft", **options)


# ------------------------------------------------ engines


class Live:
    """megatron-core's own stack on every rank; what lies beside it is a save of it."""

    def __init__(self, folder: Path, large: bool) -> None:
        from tests.engines.megatron_jobs import Mcore, make, train

        self.engine = make(Mcore("gpt", pp=2, tied=True, layers=2, heads=2))
        train(self.engine, 1)
        self.folder = folder / "saved"
        if large:
            for inner in self.engine.optimizer.chained_optimizers:
                for group in inner.optimizer.param_groups:
                    for master in group["params"]:
                        master.data.view(-1)[0] = 1e6
        ucp.save(self.engine.handle, folder / "stack")
        if agree.world()[0] == 0:
            tag = "iter_0000001"
            ucp.convert(folder / "stack", self.folder / tag, mesh="pp=2,zero=1", latest=True)
        agree.gather(0)

    def sink_is_unusable(self) -> bool:
        return is_unusable(self.engine)

    def close(self) -> None:
        from tests.engines.megatron_jobs import close

        close(self.engine)


class LiveTwo(Live):
    """As `Live`, with another engine beside it, which is filled."""

    def __init__(self, folder: Path, large: bool) -> None:
        from tests.engines.megatron_jobs import Mcore, built, train

        super().__init__(folder, large)
        self.other = built(Mcore("gpt", pp=2, tied=True, layers=2, heads=2, seed=9))
        train(self.other, 1)

    def sink_is_unusable(self) -> bool:
        return is_unusable(self.other)


def is_unusable(engine: Any) -> bool:
    """Whether a stack refuses to step."""
    try:
        engine.optimizer.step()
    except ucp.EngineUnusableError:
        return True
    return False


def into_another(live: LiveTwo, out: Path, **_: Any) -> Any:
    return ucp.resize(live.engine.handle, live.other.handle)


def loaded(live: Live, out: Path, **_: Any) -> Any:
    return ucp.load(live.engine.handle, str(PLACE.place(live.folder)))


def live_export(live: Live, out: Path, **options: Any) -> Any:
    return live.engine.handle.ucp_export_hf(out, **options)


def saved(live: Live, out: Path, **_: Any) -> Any:
    live.engine.handle.iteration = int(out.name.removeprefix("iter_"))
    return ucp.save(live.engine.handle, out.parent)


# ------------------------------------------------ toys


@dataclass
class Toy:
    """Memory of this rank under a mesh: a source and a sink."""

    manifest: Manifest
    held: dict[Slot, torch.Tensor]
    entered: bool = False
    done: bool = False

    @classmethod
    def on(cls, manifest: Manifest) -> "Toy":
        """With memory for what this rank holds, its values not set."""
        rank = agree.world()[0]
        held: dict[Slot, torch.Tensor] = {}
        for number, cut, part in manifest.parts_of(rank):
            buffer = manifest.buffers[number]
            for state, dtype in buffer.states:
                elems = buffer.of(state).elems(part)
                slot = Slot(number, cut, part, state)
                held[slot] = torch.full((elems,), float("nan"), dtype=getattr(torch, dtype))
        return cls(manifest, held)

    def parts(self) -> list[BufferPart]:
        return self.manifest.parts_of(agree.world()[0])

    def read(self, slot: Slot, first: int, last: int) -> torch.Tensor:
        return self.held[slot][first:last]


class ToySink:
    """Fills a toy of every rank from the memories of others."""

    verb, thorough = "train", True

    def __init__(self, toy: Toy) -> None:
        self.toy = toy
        wants = tuple((slot, slot.state) for slot in toy.held)
        self.parts = (SinkPart(toy.manifest, wants, frozenset({"narrow"})),)

    def __enter__(self) -> "ToySink":
        self.toy.entered = True
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def move(self, source: SharedMemories, parts: Sequence[Proved], run: TransferRun) -> None:
        # many messages, which end in the middle of everything
        with mock.patch.object(kept_moves, "round_bytes", lambda world: 56):
            source.fill(parts, self.toy.held.__getitem__, run, lambda _: False)
        self._lost = source.lost_values

    def lost(self) -> Lost:
        return self._lost

    def finish(self) -> None:
        pass

    def compare(self) -> None:
        """Nothing is recorded."""

    def publish(self) -> None:
        self.toy.done = True


@dataclass
class Toys:
    """One model on two meshes, and its checkpoint."""

    checkpoint: Path
    given: Toy
    taken: Toy

    def sink_is_unusable(self) -> bool:
        return not self.taken.done

    def close(self) -> None:
        pass


def toys(folder: Path, large: bool) -> Toys:
    """What each rank has on the first mesh is read from a checkpoint, slot by slot."""
    whole = folder / f"whole{int(large)}" / "step7"
    if agree.world()[0] == 0:
        model = twins.model("llama")
        paper.write(with_values(model, LARGE) if large else model, whole)
    agree.gather(0)
    with open_checkpoint(whole) as source:
        one = _manifest(source.manifest, ucp.Mesh(tp=2, dp=2, zero=1), str(whole))
        two = _manifest(source.manifest, ucp.Mesh(dp=4, zero=3), str(whole))
        return Toys(whole, filled(source, Toy.on(one)), Toy.on(two))


def filled(checkpoint: Any, toy: Toy) -> Toy:
    """A toy with the values of a checkpoint, read by the way of files."""
    source = FileSource(checkpoint)
    wants = tuple((slot, slot.state) for slot in toy.held)
    windows = source.windows(proved(source, SinkPart(toy.manifest, wants, frozenset({"narrow"}))))
    for slot, memory in toy.held.items():
        windows.fill(slot, 0, memory)
    return toy


def _manifest(source: Manifest, mesh: ucp.Mesh, file: str) -> Manifest:
    return target_manifest(Conversion(source, Target(mesh, dtype="bfloat16").completed({}), file))


def resized(found: Toys, out: Path, half: bool = False) -> Any:
    """From one mesh to the other, without files."""
    target = found.taken.manifest
    if half:
        buffers = tuple(
            replace(b, states=tuple((s, "float16") for s, _ in b.states)) for b in target.buffers
        )
        found.taken = Toy.on(replace(target, buffers=buffers))
    transfer(SharedMemories(str(out), found.given), ToySink(found.taken))
    return None


_HALF = Target(ucp.Mesh(), dtype="float16")
_LISTED = "ucp_export.json"
_MANIFEST = "ucp_manifest.json"
PAIRS: dict[str, Pair] = {
    "files to native": Pair(
        gpt, converted("native", mesh="dp=1,zero=1"), {"mesh": None, "target": _HALF}, _MANIFEST
    ),
    "files to universal": Pair(
        frozen, converted("universal"), {"target": _HALF, "allow": {"narrow"}}, _MANIFEST
    ),
    "files to torch_dist": Pair(gpt, converted("torch_dist"), {"target": _HALF}, _MANIFEST),
    "files to Hugging Face": Pair(
        gpt, lambda *a, **k: ucp.export_hf(*a, **k), {"dtype": "float16"}, _LISTED
    ),
    "Hugging Face to native": Pair(hugging_face, imported, {}, _MANIFEST, notes_ties=False),
    "an adapter to Hugging Face": Pair(
        adapter, adapted, {"dtype": "float16"}, _LISTED, world=1, notes_ties=False
    ),
    "files to an engine": Pair(Live, loaded, world=2),
    "memories to an engine": Pair(LiveTwo, into_another, reads="memories", world=2),
    "memories to Hugging Face": Pair(
        Live, live_export, {"dtype": "float16"}, _LISTED, "memories", 2
    ),
    "memories to torch_dist": Pair(
        Live, saved, None, _MANIFEST, "memories", 2, notes_ties=False, plans=False
    ),
    "memories to memories": Pair(toys, resized, {"half": True}, "", "toys", 4, notes_ties=False),
}
