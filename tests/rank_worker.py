"""The processes behind `tests.ranks.RankPool`: a server that imports once, and its forks, each one
rank, which run what comes down their pipes."""

import argparse
import contextlib
import faulthandler
import importlib
import os
import pickle
import queue
import random
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests import raised
from tests.connected import connect
from tests.rank_reset import freeze_imports, take_down
from tests.ranks import remove_buffers

GPU = Path("/dev/nvidiactl")
PRELOADED = (
    "deepspeed",
    "deepspeed.module_inject",
    "deepspeed.moe.layer",
    "pytest",
    "torch._dynamo",  # the first step of an optimizer imports it, in seconds
    "megatron_ucp.engines.deepspeed.engine",
    "megatron_ucp.engines.load",
    "megatron_ucp.engines.megatron.save",
    "pretrain.mcore.models",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
    "transformers.models.llama.modeling_llama",
)


def prepare() -> None:
    """The environment of the ranks, and what all of them need."""
    os.environ.pop("LOCAL_SIZE", None)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
    os.environ["TORCH_COMPILE_DISABLE"] = "1"  # of Muon's few steps; a compilation takes 40 s
    if not GPU.exists():
        os.environ["DS_ACCELERATOR"] = "cpu"
    preload(PRELOADED)
    ask_the_processor_once()


def ask_the_processor_once() -> None:
    """DeepSpeed asks for the processor's features twice for each op that a process loads, and each
    answer takes more than a second."""
    with contextlib.suppress(ImportError):
        import cpuinfo

        features = cpuinfo.get_cpu_info()
        cpuinfo.get_cpu_info = lambda: features


def preload(names: Iterable[str]) -> None:
    """Import what the ranks need before they are forked. Not where there is a GPU: a process that
    asked for it can't be forked, so each rank imports for itself there."""
    if GPU.exists():
        return
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    freeze_imports()


def serve(pipe: Connection, life: int, stacks: Path) -> None:
    """A worker's life: get ready, say so, run jobs until the pipe ends."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"))
    threading.Thread(target=die_with_parent, args=(life, stacks.parent), daemon=True).start()
    import deepspeed
    import megatron_ucp_patches as patches
    import torch

    torch.set_num_threads(1)
    # The shared-memory op takes world size and rank once per process, in C++. Training does not use
    # it; without it DeepSpeed takes gloo for all. (The attribute deepspeed.comm.torch is PyTorch
    # itself, hence sys.modules.)
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.utils.logger.setLevel("WARNING")
    if deepspeed.__version__ in patches.find("zero3_gathers_waited").versions:
        patches.apply("zero3_gathers_waited")
    results_without_a_manager()
    job = [""]
    raised.record(lambda: job[0])
    freeze_imports()
    pipe.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            call = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        environment, folder, job[0] = dict(os.environ), os.getcwd(), call["function"]
        succeeded, answer = True, b""
        try:
            share_patches(stacks.with_name("patches"))
            answer = pickle.dumps((True, run_job(**call)))
            share_patches(stacks.with_name("patches"))
            take_down()
        except (
            BaseException
        ):  # SystemExit and pytest's outcomes too: whatever it was, the test must hear of it
            failure = time.monotonic(), traceback.format_exc()
            succeeded, answer = False, pickle.dumps((False, failure))
        pipe.send_bytes(answer)
        if not succeeded:
            # after the traceback's frames are gone: then our sockets close, which wakes the peers
            take_down()
        os.environ.clear()
        os.environ |= environment
        os.chdir(folder)


def share_patches(file: Path) -> None:
    """Patches stay where a job applied them. Those that some workers have, all get: else the ranks
    of a larger job would call other collectives than their peers."""
    import megatron_ucp_patches as patches

    there = file.read_text().split() if file.exists() else []
    for name in there:
        patches.apply(name)
    with file.open("a") as out:
        out.writelines(f"{name}\n" for name in sorted(patches._applied - {*there}))


def results_without_a_manager() -> None:
    """Megatron-Core's save hands the results of its writers on in a queue that a process of its own
    keeps; that process imports torch in seconds, once for each rank. Saves that return when they
    are done fill and empty the queue in one process."""
    with contextlib.suppress(ImportError):
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        filesystem_async._results_queue = queue.Queue()


def run_job(
    function: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rank: int,
    world: int,
    port: int,
    store: str,
    timeout_s: float,
    gloo: bool,
) -> Any:
    import deepspeed
    import numpy
    import torch

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_PORT": str(port),
    }
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    connect(gloo, rank, world, store, timeout_s)
    module, _, name = function.partition(":")
    accelerator: Any = type(deepspeed.get_accelerator())
    supported = accelerator.is_fp16_supported
    try:
        result = getattr(importlib.import_module(module), name)(*args, **kwargs)
    finally:
        accelerator.is_fp16_supported = supported  # a job may allow fp16 for all of its run
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # no rank closes its sockets while another still works
    return result


def die_with_parent(life: int, folder: Path) -> None:
    """Wait until the test process is gone, then take the rank and its children away, wherever they
    hang."""
    os.read(life, 1)
    remove_buffers(int(os.environ.get("MASTER_PORT", "0")))
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def start(server: socket.socket, stacks: Path, pipe: int, life: int, log: int) -> int:
    """Forks a worker; its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        server.close()
        os.setsid()  # its children can be killed as a group
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for handle in (1, 2):
            os.dup2(log, handle)
        os.close(log)
        serve(Connection(pipe), life, stacks)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="The server behind tests.ranks.ForkServer; not for use by hand."
    )
    parser.add_argument("--socket", type=int, required=True, help="requests come down this one")
    server = socket.socket(fileno=parser.parse_args().socket)
    prepare()
    while True:
        request, handles, _, _ = socket.recv_fds(server, 4096, 3)
        if not request:
            return
        what, value = pickle.loads(request)
        if what == "start":
            answer = start(server, Path(value), *handles)
            for handle in handles:
                os.close(handle)
        elif what == "import":
            answer = 0
            preload([value])
        else:
            keep = os.WNOWAIT if what == "status" else 0
            found = os.waitid(os.P_PID, value, os.WEXITED | keep)
            answer = found.si_status if found else 0
        server.send(str(answer).encode())


if __name__ == "__main__":  # Megatron-Core's save spawns a Manager, which imports this module again
    main()
