"""The right of a save to publish: who gives a save up takes it, and nothing of it changes any more
what others see, whenever its thread comes back."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_ucp.core.manifest_json import from_json
from megatron_ucp.engines import save as saves
from megatron_ucp.engines.memory import KeptShare, KeptStep, _newest_first
from megatron_ucp.errors import SaveError, UsageError
from megatron_ucp.formats import locks, output_folder
from megatron_ucp.formats.locks import PublishRight
from megatron_ucp.formats.tags import LATEST, names_a_later_save
from tests.formats.test_tags import RUN, STATE, manifest, save


def sync_of(folder: Path, tag: str) -> output_folder.Syncs:
    return output_folder.Syncs(right=PublishRight(output_folder.aside_of(folder, tag)))


def publish(folder: Path, tag: str, at: float, sync: output_folder.Syncs) -> None:
    """As the end of a save."""
    with output_folder.begin(folder, tag, sync.right) as aside:
        (aside / STATE).write_text(tag)
        said = from_json(manifest(tag, at, tag=tag, run_id=RUN).encode(), "")
        saves.publish(aside, folder, said, LATEST, sync)
        output_folder.prune(folder, 1, RUN, sync.right)


class Hanging(threading.Thread):
    """A save whose call number `count` of a function of `os` waits for `awake`."""

    def __init__(self, folder: Path, tag: str, at: float, call: str, count: int) -> None:
        super().__init__(daemon=True)
        self.sync, self.awake, self.hangs = sync_of(folder, tag), threading.Event(), False
        self._given, self._call, self._left = (folder, tag, at), call, count
        self._reached = threading.Event()

    def run(self) -> None:
        with suppress(SaveError, OSError):
            publish(*self._given, self.sync)
        self._reached.set()

    def instead(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            if threading.current_thread() is self:
                self._left -= 1
                if self._left == -1:
                    self.hangs = True
                    self._reached.set()
                    self.awake.wait(60)
            return stock(*args)

        return called

    def given_up(self) -> bool:
        """Starts it, and gives it up where it hangs; whether it does."""
        with mock.patch.object(os, self._call, self.instead(getattr(os, self._call))):
            self.start()
            assert self._reached.wait(60)
        self.sync.right.take()
        return self.hangs

    def wake(self) -> None:
        self.awake.set()
        self.join(60)
        assert not self.is_alive()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    save(tmp_path, "step1", "one", 1.0)
    yield tmp_path


@pytest.mark.parametrize("call", ["fsync", "replace", "rename"])
def test_it_changes_nothing_after_it_was_given_up(folder: Path, call: str) -> None:
    """At each call; the next save is named meanwhile, and stays named."""
    for count in range(20):
        number = 10 * (count + 1)
        late = Hanging(folder, f"step{number}", float(number), call, count)
        if not late.given_up():
            late.wake()
            break
        before = sorted(os.listdir(folder)), (folder / LATEST).read_text()
        outcome = late.sync.right.outcome
        assert ("is there and whole" in outcome) == (f"step{number}" in before[0]), outcome
        assert (f"names step{number}" in outcome) == (f"step{number}" == before[1]), outcome
        publish(folder, f"step{number + 1}", number + 1.0, sync_of(folder, "x"))
        late.wake()
        assert (folder / LATEST).read_text() == f"step{number + 1}"
        assert (folder / f"step{number + 1}" / STATE).read_text() == f"step{number + 1}"
    assert count >= {"fsync": 5, "replace": 2, "rename": 2}[call]


def test_one_that_keeps_its_right_moves_the_pointer_back(folder: Path) -> None:
    late = Hanging(folder, "step2", 2.0, "fsync", 0)
    with (
        mock.patch.object(PublishRight, "take", lambda self: None),
        mock.patch.object(saves, "names_a_later_save", lambda *_: False),
    ):
        assert late.given_up()
        publish(folder, "step3", 3.0, sync_of(folder, "step3"))
        late.wake()
        assert (folder / LATEST).read_text() == "step2", "the tests above find nothing"


def test_without_the_right_nothing_is_published(folder: Path) -> None:
    sync = sync_of(folder, "step2")
    sync.right.take()
    with pytest.raises(SaveError, match="given up"):
        publish(folder, "step2", 2.0, sync)
    assert (folder / LATEST).read_text() == "step1" and not (folder / "step2").exists()
    assert "nothing of it counts" in sync.right.outcome


def test_nothing_is_named_behind_the_deadline(folder: Path) -> None:
    sync = sync_of(folder, "step2")
    sync.right.until = time.monotonic() - 1
    with pytest.raises(SaveError, match="deadline"):
        publish(folder, "step2", 2.0, sync)
    assert sorted(os.listdir(folder)) == [LATEST, "step1"], "it cleared up"


def test_the_next_save_of_the_tag_waits_only_for_what_may_still_change_it(folder: Path) -> None:
    for call, count, is_free in (("fsync", 0, True), ("rename", 0, False)):
        late = Hanging(folder, "again", 2.0, call, count)
        assert late.given_up()
        aside = output_folder.aside_of(folder, "again")
        if is_free:
            locks.require_left(aside)
            publish(folder, "again", 3.0, sync_of(folder, "again"))
            assert (folder / LATEST).read_text() == "again"
        else:
            with pytest.raises(SaveError, match="given up, and may still write"):
                locks.require_left(aside)
            with (
                pytest.raises(SaveError, match=r"this very process, which hangs: names"),
                output_folder.begin(folder, "again"),
            ):
                pass
        late.wake()
        locks.require_left(aside)
        output_folder.clear(folder / "again")


def test_a_pointer_stays_with_a_later_save_of_the_run_and_with_no_other(folder: Path) -> None:
    save(folder, "step2", "two", 20.0)

    def is_later(at: float, run: str) -> bool:
        said = from_json(manifest("x", at, tag="x", run_id=run).encode(), "")
        return names_a_later_save(folder / LATEST, said)

    assert is_later(19.0, RUN) and not is_later(21.0, RUN)
    assert not is_later(19.0, "another run")
    publish(folder, "old", 5.0, sync_of(folder, "old"))
    assert (folder / LATEST).read_text() == "step2" and (folder / "old").is_dir()
    (folder / LATEST).write_text("gone")
    assert not is_later(19.0, RUN)


def test_stamps_are_an_order_whatever_the_clock_does(folder: Path) -> None:
    with mock.patch.object(time, "time", lambda: next(clock)):
        clock = iter([2e9, 1e9, 1e9 - 5, 3e9])
        stamps = [saves.stamp() for _ in range(4)]
        assert stamps == sorted(set(stamps)) and stamps[-1] == 3e9
        clock = iter([1.0, 1.0])
        assert saves.stamp(4e9) > 4e9
        assert saves.stamp(float("nan"), float("inf"), None) < 5e9
    saves._last_stamp = 0.0


def test_steps_of_one_life_are_ordered_by_their_numbers() -> None:
    def step(life: str, steps: int, kept_at: float) -> KeptStep:
        share = KeptShare(life, steps % 2, 0, f"{life}{steps}", steps, kept_at, 1, "run", ())
        return KeptStep(share.id, {"here": [share]})

    set_back = [step("a", 5, 100.0), step("a", 6, 50.0)]
    for given in (set_back, set_back[::-1]):
        assert [one.id for one in _newest_first(given)] == ["a6", "a5"]
    lives = [step("b", 3, 200.0), *set_back, step("c", 9, 10.0)]
    assert [one.id for one in _newest_first(lives)] == ["b3", "a6", "a5", "c9"]


@pytest.mark.parametrize("tag", [LATEST, "latest_checkpointed_iteration.txt", "latest_universal"])
def test_a_tag_is_no_pointer(tmp_path: Path, tag: str) -> None:
    with pytest.raises(UsageError, match="name of a pointer"), output_folder.begin(tmp_path, tag):
        pass
    assert os.listdir(tmp_path) == []
