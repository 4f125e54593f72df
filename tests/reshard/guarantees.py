"""What every transfer guarantees: one body for each guarantee, whatever the pair. On ranks all of
them run it."""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import megatron_ucp as ucp
from megatron_ucp.core import plan as planning
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.store import StorePath
from megatron_ucp.reshard import agree, files, kept_moves
from megatron_ucp.reshard import folder as folder_sink
from tests.object_server import Remote
from tests.places import Place
from tests.reshard.pairs import PLACE, TIED, Pair, Toys, spoil


def out_of(folder: Path) -> Any:
    place = StorePath("s3://bucket") if PLACE.is_store else folder
    return place / "out" / "iter_0000007"


@contextlib.contextmanager
def prepared(pair: Pair, folder: Path, large: bool = False) -> Iterator[Any]:
    """The source; what lives on ranks goes at the end."""
    out_of(folder).parent.mkdir(parents=True, exist_ok=True)
    source = pair.source(folder, large)
    try:
        yield source
    finally:
        if not isinstance(source, Path):
            source.close()


# parts of names: every model of these tests has one of them
NEEDED = ("final_layernorm", "model.norm.", "ln_f", "lora_B")


def plan_is_proved(pair: Pair, folder: Path) -> None:
    """A planner with a defect forgets a parameter: nothing is written."""
    supply = planning._Planner._supply

    def lacking(own: Any, slot: Any, state: str, index: int, member: Any, want: Any) -> Any:
        if not any(norm in member.param for norm in NEEDED):
            yield from supply(own, slot, state, index, member, want)

    with prepared(pair, folder) as source:
        begun: list[str] = []
        opened = mock.patch.object(
            output_folder.OutFile, "__init__", lambda self, path: begun.append(str(path))
        )
        with mock.patch.object(planning._Planner, "_supply", lacking), opened:
            said = pair.attempt(source, out_of(folder))
        assert said.startswith("PlanError") and not begun
        if pair.beside:
            assert pair.nothing_counts(source, out_of(folder))
        elif isinstance(source, Toys):
            assert not source.taken.entered
        else:
            assert not source.sink_is_unusable(), "the engine was touched"
        said = pair.attempt(source, out_of(folder))
        assert said == "", said


def lost_values_are_refused(pair: Pair, folder: Path) -> None:
    """A finite value that has no place in the dtype of the output."""
    assert pair.narrow is not None
    with prepared(pair, folder, large=True) as source:
        said = pair.attempt(source, out_of(folder), **pair.narrow)
        assert "InexactError: values are too large" in said
        assert pair.nothing_counts(source, out_of(folder))


def files_are_compared(pair: Pair, folder: Path) -> None:
    """A file of another save among those of the source."""
    with prepared(pair, folder) as source:
        tag = source if isinstance(source, Path) else next(source.folder.glob("iter_*"))
        if agree.world()[0] == 0:
            spoil(tag)
        agree.gather(0)
        said = pair.attempt(source, out_of(folder))
        assert said.startswith(("ForeignFileError", "DamagedFileError"))
        assert not pair.beside or pair.nothing_counts(source, out_of(folder))


def it_is_on_disk_before_it_has_its_name(pair: Pair, folder: Path) -> None:
    """On every rank, all that it wrote."""
    written, synced, events = set[str](), set[str](), list[str]()
    fsync, sync_all, rename = os.fsync, folder_sink.sync_all, os.rename
    opened = output_folder.OutFile.__init__

    def begin(self: Any, path: Path) -> None:
        written.add(Path(path).name)
        opened(self, path)

    def one(handle: int) -> None:
        synced.add(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    def everything(aside: Path) -> None:
        sync_all(aside)
        synced.update(path.name for path in aside.rglob("*"))

    def named(old: Any, new: Any) -> None:
        if Path(new).name == out_of(folder).name:
            events.append("named" if written <= synced else f"before {written - synced}")
        rename(old, new)

    with (
        prepared(pair, folder) as source,
        mock.patch.object(output_folder.OutFile, "__init__", begin),
        mock.patch("os.fsync", one),
        mock.patch.object(folder_sink, "sync_all", everything),
        mock.patch("os.rename", named),
    ):
        said = pair.attempt(source, out_of(folder))
        assert said == "", said
    assert written and written <= synced
    found = agree.gather(events)
    assert [one for each in found for one in each] == ["named"]


def one_writes_a_folder(pair: Pair, folder: Path) -> None:
    """Another process writes the output."""
    out = out_of(folder)
    with prepared(pair, folder) as source, contextlib.ExitStack() as held:
        aside = output_folder.aside_of(out.parent, out.name)
        if agree.world()[0] == 0:
            held.enter_context(output_folder.held(aside))
            (aside / "file").write_text("")
        agree.gather(0)
        said = pair.attempt(source, out)
        assert "is writing this" in said and (aside / "file").exists() and not out.exists()
        agree.gather(0)


def a_manifest_lies_beside(pair: Pair, folder: Path) -> None:
    """The output says what it is."""
    with prepared(pair, folder) as source:
        said = pair.attempt(source, out_of(folder))
        assert said == "", said
        assert (out_of(folder) / pair.beside).is_file()
        if pair.beside == "ucp_manifest.json":
            assert ucp.verify(out_of(folder), deep=True).findings == ()


def copies_of_stages_are_noted(pair: Pair, folder: Path) -> None:
    """Of what several stages hold the first one's is read."""
    with prepared(pair, folder) as source:
        assert TIED in pair.moved(source, out_of(folder)).notes


def an_engine_whose_load_failed_is_no_source(pair: Pair, folder: Path) -> None:
    """What it holds is a mixture of two models."""

    def failing(*_: Any, **__: Any) -> Any:
        raise ucp.DamagedFileError("only here")

    with prepared(pair, folder) as source:
        with mock.patch.object(files, "execute", failing), contextlib.suppress(ucp.UcpError):
            ucp.load(source.engine.handle, source.folder)
        assert pair.attempt(source, out_of(folder)).startswith("EngineUnusableError")
        if pair.beside:
            assert pair.nothing_counts(source, out_of(folder))
        else:
            assert not source.sink_is_unusable(), "the other engine was touched"


def progress_is_shown_and_stops(pair: Pair, folder: Path) -> None:
    """Ctrl-C at the first byte; then one that is whole, of which all bytes are counted."""

    def interrupted(done: int, total: int) -> None:
        raise KeyboardInterrupt

    counted: list[tuple[int, int]] = []
    with prepared(pair, folder) as source:
        assert pair.attempt(source, out_of(folder), interrupted)
        assert pair.nothing_counts(source, out_of(folder))
        assert pair.attempt(source, out_of(folder), lambda *at: counted.append(at)) == ""
    assert counted and counted == sorted(counted)
    assert counted[-1][0] == counted[-1][1] > 0, counted[-1]


def a_rank_that_fails_is_every_ranks_failure(pair: Pair, folder: Path) -> None:
    """The disk of the last rank is full, or gives nothing back."""
    full = OSError(28, "No space left on device")
    with prepared(pair, folder) as source, contextlib.ExitStack() as failing:
        if agree.world()[0] == agree.world()[1] - 1:
            failing.enter_context(
                mock.patch.object(output_folder.OutFile, "write", side_effect=full)
            )
            failing.enter_context(mock.patch.object(files, "execute", side_effect=full))
            failing.enter_context(mock.patch.object(kept_moves, "_copied", side_effect=full))
        said = pair.attempt(source, out_of(folder))
        failing.close()
        assert said.startswith(("SaveError", "DamagedFileError")) and "No space left" in said, said
        assert pair.nothing_counts(source, out_of(folder))
        shutil.rmtree(out_of(folder), ignore_errors=True)


TOYS = 4  # ranks, of which each has memory and no engine
# each with the pairs that it is of; all others have nothing that it could be about
GUARANTEES: dict[str, tuple[Callable[[Pair, Path], None], Callable[[Pair], bool]]] = {
    body.__name__: (body, of)
    for body, of in (
        (plan_is_proved, lambda pair: pair.plans),
        (lost_values_are_refused, lambda pair: pair.narrow is not None),
        (files_are_compared, lambda pair: pair.reads == "files"),
        (it_is_on_disk_before_it_has_its_name, lambda pair: bool(pair.beside)),
        (one_writes_a_folder, lambda pair: bool(pair.beside)),
        (a_manifest_lies_beside, lambda pair: bool(pair.beside)),
        (copies_of_stages_are_noted, lambda pair: pair.notes_ties),
        (an_engine_whose_load_failed_is_no_source, lambda pair: pair.reads == "memories"),
        (progress_is_shown_and_stops, lambda pair: pair.world < TOYS),
        (
            a_rank_that_fails_is_every_ranks_failure,
            lambda pair: pair.world > 1 and pair.reads != "toys",
        ),
    )
}


# Of a source and an output in a store; how that is written, and by whom alone, tests of stores say.
AT_A_STORE = (
    "plan_is_proved",
    "lost_values_are_refused",
    "files_are_compared",
    "a_manifest_lies_beside",
    "copies_of_stages_are_noted",
)


def on_rank(guarantee: str, pair: str, folder: str, server: Remote | None = None) -> None:
    """A guarantee of a pair that lives on ranks."""
    from tests.reshard.pairs import PAIRS

    PLACE.place = Place(server)
    try:
        GUARANTEES[guarantee][0](PAIRS[pair], Path(folder))
    finally:
        PLACE.place = Place(None)
