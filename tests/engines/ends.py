"""A training script whose last save is in the background when it ends, in every way that it can.

    python -m tests.engines.ends FOLDER --end script                      # as a user does
    torchrun --nproc-per-node 2 -m tests.engines.ends FOLDER --end raise-last
    python -m tests.engines.ends FOLDER --trials deepspeed:exit3:4:20 stack:script:2:20

`--trials` has engines, ends, numbers of ranks, and how often each. Each rank then is a fork of this
process, which has imported everything; it returns from here and ends as the interpreter ends any
script. A line of JSON says what became of each trial.
"""

import argparse
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SAVES = 3
LIMIT_S = 240
ENDS = (
    "script",  # the last line
    "raise-last",  # an error on the last rank, while the others go on
    "raise-all",
    "exit0",
    "exit3",
    "sigterm",  # to every rank, from outside
    "interrupt",  # Ctrl-C
    "destroyed",  # the process groups go first
    "dropped",  # nothing refers to the engine any more
    # the save is lost:
    "refused",  # by the disk, on the last rank
    "refused-exit3",
    "refused-sigterm",
    "warned",  # as `refused`, and the program asked for a warning alone
    "hangs",  # the disk of the last rank never answers
    "died",  # the last rank, without a word
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="End a script while its last save is under way.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--end", choices=ENDS, default="script")
    parser.add_argument("--engine", choices=("deepspeed", "stack"), default="deepspeed")
    parser.add_argument("--trials", nargs="*", default=[])
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that each fsync takes")
    parser.add_argument("--deadline", type=float)
    return parser.parse_args()


class Disk:
    """`os.fsync`, as a slow disk, or one that refuses or hangs."""

    def __init__(self, slow_s: float) -> None:
        self.slow_s, self.fault, self._fsync = slow_s, "", os.fsync
        os.fsync = self  # type: ignore[assignment]

    def __call__(self, handle: int) -> None:
        time.sleep(3600 if self.fault == "hangs" else self.slow_s)
        if self.fault == "refused":
            raise OSError(28, "No space left on device")
        self._fsync(handle)


class Training:
    """Either engine, with one step and one save."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        own: dict[str, Any] = {"save": "background", "deadline": args.deadline}
        if args.end == "warned":
            own["on_error"] = "warn"
        from tests.engines.kinds import attached, kind_of
        from tests.engines.megatron_jobs import Mcore
        from tests.engines.model import Setup

        stack = Mcore(layers=2, style="constant")
        setup = Setup(2, "bf16") if args.engine == "deepspeed" else stack
        self.kind, self.engine = kind_of(setup), attached(setup, **own)

    def step_and_save(self, step: int) -> None:
        self.kind.train(self.engine, 1, first=step)
        self.engine.save_checkpoint(self.args.folder)


def train_and_end(args: argparse.Namespace, rank: int, ranks: int) -> None:
    disk, is_last = Disk(args.slow), rank == ranks - 1
    training = Training(args)
    for step in range(SAVES):
        if step == SAVES - 1 and is_last:
            disk.fault = args.end.partition("-")[0].replace("warned", "refused")
        training.step_and_save(step)
        if step < SAVES - 1:
            wait(training)
    print(f"rank {rank} comes to its end", flush=True)
    (args.folder / f"ends{rank}").touch()
    end(args.end, training, is_last)


def wait(training: Training) -> None:
    import megatron_ucp as ucp

    ucp.wait(getattr(training.engine, "handle", training.engine))


def end(how: str, training: Training, is_last: bool) -> None:
    if how == "raise-all" or (how == "raise-last" and is_last):
        raise ValueError("an error of the program")
    if how == "raise-last" or how.endswith("sigterm"):
        time.sleep(LIMIT_S)  # until its agent, or somebody else, ends it
    if "exit" in how:
        sys.exit(int(how[-1]))
    if how == "interrupt":
        signal.raise_signal(signal.SIGINT)
    if how == "destroyed":
        import torch.distributed as dist

        dist.destroy_process_group()
    if how == "dropped":
        import gc

        training.__dict__.clear()
        gc.collect()
    if how == "died" and is_last:
        os._exit(9)


# ------------------------------------------------ how ranks are started


def connect_as_a_user() -> tuple[int, int]:
    import deepspeed
    import torch

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo"}
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def forked(args: argparse.Namespace) -> int | None:
    """Forks the ranks of a trial; in each of them its number, and none in this process, which waits
    for them and prints what became of them."""
    args.folder.mkdir(parents=True)
    pids: list[int] = []
    for rank in range(args.ranks):
        pid = os.fork()
        if not pid:
            with open(args.folder / f"said{rank}", "w") as said:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
            return rank
        pids.append(pid)
    print(json.dumps(outcome(args, pids)), flush=True)
    return None


def outcome(args: argparse.Namespace, pids: list[int]) -> dict[str, Any]:
    wait_for_ends(args, pids)
    codes: dict[int, int] = {}
    if args.end.endswith("sigterm"):
        threading.Thread(target=terminate, args=(pids, codes), daemon=True).start()
    while len(codes) < len(pids):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        if args.end == "raise-last" and len(codes) == 1:  # as torchrun does
            for other in pids:
                if other != pid:
                    os.kill(other, signal.SIGTERM)
    code = [codes[pid] for pid in pids]
    return {"case": args.case, "codes": code, **left(args.folder, args.ranks)}


def terminate(pids: list[int], codes: dict[int, int]) -> None:
    """Sends SIGTERM until each process has ended. Python runs a handler between two calls: one that
    comes as `time.sleep` begins would wait for its end."""
    while left := [pid for pid in pids if pid not in codes]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(5)


def wait_for_ends(args: argparse.Namespace, pids: list[int]) -> None:
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        if all((args.folder / f"ends{rank}").exists() for rank in range(args.ranks)):
            return
        time.sleep(0.005)


def left(folder: Path, ranks: int) -> dict[str, Any]:
    """What a trial left, and what its ranks said."""
    import megatron_ucp as ucp

    found = ucp.newest_whole(folder)
    said = [(folder / f"said{rank}").read_text() for rank in range(ranks)]
    return {
        "newest": found.folder.name[-1],
        "latest": [
            (folder / name).read_text()[-1]
            for name in ("latest", "latest_checkpointed_iteration.txt")
            if (folder / name).exists()
        ],
        "unfinished": sorted(p.name for p in folder.iterdir() if p.name.startswith(".")),
        "said": said,
    }


def cases(trials: str) -> list[str]:
    """`engine:end:ranks`, as often as it says behind."""
    case, _, times = trials.rpartition(":")
    return [case] * int(times)


def main() -> None:
    args = arguments()
    faulthandler.enable()
    if not args.trials:
        args.folder.mkdir(parents=True, exist_ok=True)
        train_and_end(args, *connect_as_a_user())
        return
    from tests.engines import killed

    killed.prepare()
    top = args.folder
    for number, case in enumerate(each for one in args.trials for each in cases(one)):
        args.case, args.folder = case, top / f"trial{number}"
        args.engine, args.end, args.ranks = case.split(":")
        args.ranks = int(args.ranks)
        if args.end == "hangs":
            args.deadline = args.deadline or 3.0
        rank = forked(args)
        if rank is not None:
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)
            killed.connect(rank, args.ranks, args.folder / "store", LIMIT_S)
            train_and_end(args, rank, args.ranks)
            return


if __name__ == "__main__":
    main()
