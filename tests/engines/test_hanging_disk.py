"""Saves whose disk hangs until after their deadline: a pointer never moves to an older save, what
was confirmed stays, what is said of a save that was given up is so, and the next one is saved."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import pytest

import megatron_ucp as ucp
from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.engines import background as beside
from megatron_ucp.formats.output_folder import manifest_of
from tests.engines.kinds import attached, kind_of
from tests.engines.megatron_jobs import Mcore
from tests.engines.model import Setup
from tests.ranks import RankPool

SETUPS = {"deepspeed": Setup(1), "stack": Mcore(layers=2, style="constant")}
DEADLINE_S = 1.0
TRIES = 5  # on a busy machine the deadline may come before the call
WRITER = "ucp-save"  # the name of a thread that saves


class Disk:
    """`os.fsync`, `os.rename` and `os.replace`; the one that is armed hangs, before or after it
    does its work."""

    CALLS = ("fsync", "rename", "replace")

    def __init__(self) -> None:
        self.stock = {name: getattr(os, name) for name in self.CALLS}
        self.at: tuple[str, int, str] | None = None  # the call, how many come before it, when
        self.reached: list[threading.Thread] = []
        self.awake = threading.Event()

    def arm(self, call: str, count: int, when: str) -> None:
        self.at, self.reached, self.awake = (call, count, when), [], threading.Event()

    def wake(self) -> None:
        """All that hang go on, and end."""
        self.at = None
        self.awake.set()
        for thread in self.reached:
            thread.join(60)
            assert not thread.is_alive()

    def call(self, name: str, *args: Any) -> None:
        if not self._hangs(name):
            self.stock[name](*args)
            return
        assert self.at is not None
        when, awake = self.at[2], self.awake
        self.at = None
        self.reached.append(threading.current_thread())
        if when == "after":
            self.stock[name](*args)
        awake.wait(120)
        if when == "before":
            self.stock[name](*args)

    def _hangs(self, name: str) -> bool:
        if self.at is None or self.at[0] != name or threading.current_thread().name != WRITER:
            return False
        call, count, when = self.at
        self.at = (call, count - 1, when)
        return count == 0

    @contextmanager
    def patched(self) -> Iterator[None]:
        def instead(name: str) -> Callable[..., None]:
            return lambda *args: self.call(name, *args)

        with (
            mock.patch.multiple(os, **{name: instead(name) for name in self.CALLS}),
            mock.patch.object(beside, "_LONGER_S", 0.1),
            mock.patch.object(beside, "at_lowest_priority", lambda: None),
        ):
            try:
                yield
            finally:
                self.wake()


class Run:
    """An engine that saves tags with ever higher numbers, and what must hold at any moment."""

    def __init__(self, kind: str, folder: Path, keep: int | None) -> None:
        self.kind, self.folder, self.keep = kind, folder, keep
        self.step, self.confirmed, self.faults = 0, list[int](), list[str]()
        if kind == "deepspeed":
            own, pointer = {"keep_latest": keep}, "latest"
        else:
            own, pointer = {}, "latest_checkpointed_iteration.txt"
        self.engines = kind_of(SETUPS[kind])
        self.engine = attached(SETUPS[kind], save="background", **own)
        self.pointer, self.handle = folder / pointer, self.engines.handle(self.engine)
        found = beside.background_of(self.handle)
        assert found is not None
        self.background = found
        self._highest, self._ends, self._looks = 0, False, threading.Lock()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def save(self, deadline: float | None) -> str:
        """One step and a save of it; what is said, where it failed."""
        self.background.options = replace(self.background.options, deadline=deadline)
        self.step += 1
        self.engines.train(self.engine, 1, first=self.step)
        try:
            if self.kind == "deepspeed":
                self.engine.save_checkpoint(self.folder, tag=f"step{self.step}")
            else:
                own: dict[str, Any] = {"keep_latest": self.keep}
                ucp.save(self.handle, self.folder, **own)
            ucp.wait(self.handle)
        except ucp.UcpError as error:
            return str(error)
        self.confirmed.append(self.step)
        return ""

    def named(self) -> int:
        return number(self.pointer.read_text()) if self.pointer.exists() else 0

    def path(self, step: int) -> Path:
        return self.folder / (f"step{step}" if self.kind == "deepspeed" else f"iter_{step:07d}")

    def _watch(self) -> None:
        while not self._ends:
            self.look()
            time.sleep(0.002)

    def look(self) -> None:
        """The pointer names a whole tag, and no older one than before; what was confirmed is there
        until a newer one is, whole and named."""
        with self._looks:  # both threads look, each at what is named then
            self._look()

    def _look(self) -> None:
        confirmed = list(self.confirmed)
        named = self.named()
        if named < self._highest:
            self.faults.append(f"the pointer moved from {self._highest} back to {named}")
        self._highest = max(self._highest, named)
        if named and not (self.path(named) / FILE_NAME).exists() and named == self.named():
            self.faults.append(f"the pointer names {named}, which is not there")
        needed = confirmed if self.keep is None else [one for one in confirmed if one >= named]
        for one in needed:
            if not self.path(one).exists() and (self.keep is None or self.named() <= one):
                self.faults.append(f"{one} was confirmed, and is gone")

    def end(self, is_last: bool = True) -> list[str]:
        self._ends = True
        self._watcher.join()
        self.look()
        return self.faults + [f"{name} was left" for name in left(self.folder) if is_last]

    def untrue(self, said: str) -> list[str]:
        """What an error says that is not so. A step that hangs may have been done."""
        tag = self.path(self.step)
        is_there, is_named = tag.exists(), self.named() == self.step
        if "may still come" in said:
            return []
        out = []
        if is_there != ("is there and whole" in said):
            out.append(f"{tag.name} is {'' if is_there else 'not '}there: {said}")
        if is_named != (f"`{self.pointer.name}` names" in said):
            out.append(f"the pointer does {'' if is_named else 'not '}name it: {said}")
        return out


def number(text: str) -> int:
    found = re.search(r"(\d+)\s*$", text)
    return int(found[1]) if found else 0


def left(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if one.name.startswith("."))


def hung(kind: str, folder: str, keep: int | None, call: str, when: str) -> dict[str, Any]:
    """A save hangs at the first, the second, ... of its calls and is given up; the next one is
    confirmed; then the first one goes on."""
    run, disk = Run(kind, Path(folder), keep), Disk()
    said: dict[str, int] = {}
    untrue: list[str] = []
    count = positions = tries = 0
    with disk.patched():
        while tries < TRIES:
            assert run.save(None) == ""
            disk.arm(call, count, when)
            error = run.save(DEADLINE_S)
            if not disk.reached:
                disk.wake()
                if not error:
                    break  # no save makes so many calls
                tries += 1
                continue
            untrue += [] if error else ["a save that hangs was confirmed"]
            untrue += run.untrue(error)
            said[error.partition("given up: ")[2].partition("\n")[0][:60]] = count
            again = run.save(None)
            untrue += [f"the next save: {again}"] if again else []
            untrue += [] if run.named() == run.step else ["the next save is not named"]
            disk.wake()
            run.look()
            untrue += [] if run.named() == run.step else ["the pointer moved back"]
            count, positions, tries = count + 1, positions + 1, 0
        assert run.save(None) == ""
    return {"faults": run.end(), "untrue": untrue, "positions": positions, "said": said}


class Lives:
    """Engines one after the other in one folder, whose saves hang at random calls and wake at
    random moments, and whose clock jumps."""

    def __init__(self, kind: str, folder: Path, seed: int) -> None:
        self.dice, self.disk, self.folder = Random(seed), Disk(), folder
        self.keep = self.dice.choice([None, 1, 2])
        self.run, self.faults, self.hangs = Run(kind, folder, self.keep), list[str](), 0
        self._shift, self._clock = 0.0, time.time

    def clock(self) -> float:
        return self._clock() + self._shift

    def another(self) -> None:
        """A new engine, which goes on from the newest tag."""
        before = self.run
        self.disk.wake()
        self.faults += before.end(is_last=False)
        before.engines.close(before.engine)
        self.run = Run(before.kind, self.folder, self.keep)
        ucp.load(self.run.handle, self.folder)
        self.run.confirmed, self.run.step = before.confirmed, before.step
        self.run._highest = before._highest
        if before.kind != "deepspeed":  # its tags have the numbers of iterations
            self.run.handle.iteration = before.step

    def save(self) -> None:
        dice, disk = self.dice, self.disk
        self._shift = dice.choice([0.0, -3600.0, 50.0, -5.0])
        if not disk.reached and dice.random() < 0.5:
            when = dice.choice(["before", "after"])
            disk.arm(dice.choice(Disk.CALLS), dice.randrange(10), when)
        error = self.run.save(DEADLINE_S if disk.at else None)
        if error:
            self.hangs += bool(disk.reached)
            self.faults += self.run.untrue(error)
        if error and not disk.reached and "deadline" not in error and "agree" not in error:
            self.faults.append(error)
        if dice.random() < 0.5:
            disk.wake()
            disk.reached = []
        self.run.look()

    def end(self) -> list[str]:
        self.disk.wake()
        run = self.run
        assert run.save(None) == ""
        there = [run.path(one) for one in run.confirmed if run.path(one).exists()]
        stamps = [manifest_of(path).saved_at or 0.0 for path in there]
        self.faults += [] if stamps == sorted(stamps) else [f"stamps in no order: {stamps}"]
        self.faults += [] if run.named() == run.step else ["the last save is not named"]
        return self.faults + run.end()


def lives(kind: str, folder: str, seed: int, saves: int, count: int) -> dict[str, Any]:
    """So many lives of so many saves each."""
    all_of_them = Lives(kind, Path(folder), seed)
    with (
        all_of_them.disk.patched(),
        mock.patch.object(time, "time", all_of_them.clock),
    ):
        for life in range(count):
            if life:
                all_of_them.another()
            for _ in range(saves):
                all_of_them.save()
        faults = all_of_them.end()
    confirmed = len(all_of_them.run.confirmed)
    return {"faults": faults, "hangs": all_of_them.hangs, "confirmed": confirmed}


# ------------------------------------------------ tests


pytestmark = pytest.mark.ranks
CASES = [
    (kind, keep, call, when)
    for kind in ("deepspeed", "stack")
    for keep in (1, None)
    for call, when in [
        ("fsync", "before"),
        *((c, w) for c in ("rename", "replace") for w in ("before", "after")),
    ]
]
DEFAULT = [
    ("deepspeed", 1, "fsync", "before"),
    ("deepspeed", 1, "rename", "before"),
    ("stack", 1, "replace", "before"),
]


@pytest.mark.parametrize(
    ("kind", "keep", "call", "when"),
    [
        *DEFAULT,
        *(pytest.param(*one, marks=pytest.mark.slow) for one in CASES if one not in DEFAULT),
    ],
)
def test_a_save_that_was_given_up_changes_nothing_any_more(
    ranks: RankPool, tmp_path: Path, kind: str, keep: int | None, call: str, when: str
) -> None:
    (found,) = ranks.run(1, hung, kind, str(tmp_path), keep, call, when, timeout_s=600)
    assert found["faults"] == [] and found["untrue"] == []
    least = {"fsync": 7, "rename": 1 if keep is None else 2, "replace": 2}
    assert found["positions"] >= least[call], found
    if call == "fsync":
        assert {one.partition(",")[0] for one in found["said"]} >= {"nothing of it counts"}
        assert any("is there and whole" in one for one in found["said"]), found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepspeed", "stack"])
@pytest.mark.parametrize("seed", range(10))
def test_random_lives(ranks: RankPool, tmp_path: Path, kind: str, seed: int) -> None:
    (found,) = ranks.run(1, lives, kind, str(tmp_path), seed, 8, 10, timeout_s=900)
    assert found["faults"] == []
    assert found["hangs"] > 3 and found["confirmed"] > 20


def test_what_watches_finds_a_pointer_that_moves_back(tmp_path: Path) -> None:
    run = object.__new__(Run)
    run.kind, run.folder, run.keep, run.step = "deepspeed", tmp_path, 1, 2
    run.pointer, run.confirmed, run.faults, run._highest = tmp_path / "latest", [1], [], 0
    run._looks = threading.Lock()
    for step in (2, 1):
        run.path(step).mkdir()
        (run.path(step) / "ucp_manifest.json").touch()
        run.pointer.write_text(f"step{step}")
        run.look()
    assert run.faults == ["the pointer moved from 2 back to 1"]
    run.path(1).rename(tmp_path / "elsewhere")
    run.look()
    assert run.faults[-1] == "1 was confirmed, and is gone"
    assert run.untrue("given up: step2 is there and whole") == []
    assert run.untrue("nothing of it counts")[0].startswith("step2 is there")
