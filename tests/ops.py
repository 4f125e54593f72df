"""DeepSpeed's ops, which it compiles when they are first used: minutes, in which jobs of tests
would run out of their time.

    python tests/ops.py          builds what is not there
    python tests/ops.py locks    takes away what builds that were killed left

A build that was killed leaves its lock, and whoever needs the op waits for that lock for ever.
"""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(
    os.environ.get("TORCH_EXTENSIONS_DIR", Path(__file__).parents[1] / ".cache/torch_extensions")
)


def remove_dead_locks() -> None:
    """A build that is under way holds its lock open."""
    held = {file for process in Path("/proc").glob("[0-9]*") for file in _open_in(process)}
    for lock in FOLDER.rglob("lock"):
        if str(lock.resolve()) not in held:
            lock.unlink(missing_ok=True)


def _open_in(process: Path) -> list[str]:
    """The files that a process has open; none where it ended, or is somebody else's."""
    try:
        return [os.readlink(handle) for handle in (process / "fd").iterdir()]
    except OSError:
        return []


def are_built() -> bool:
    names = ("deepspeed_shm_comm", "fused_adam", "cpu_adam")
    return all(any(FOLDER.rglob(f"{name}.so")) for name in names)


def build() -> None:
    """The first one is what every init_distributed on a CPU wants."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.torch import build_shm_op

    build_shm_op()
    if get_accelerator().device_name() == "cpu":  # elsewhere DeepSpeed asks for another compiler
        for builder in ("FusedAdamBuilder", "CPUAdamBuilder"):
            get_accelerator().create_op_builder(builder).load()


def main(*words: str) -> int:
    """The exit code."""
    if words == ("build",):
        build()
        return 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    remove_dead_locks()
    if words == ("locks",) or are_built():
        return 0
    print("run: building DeepSpeed's ops, once (minutes)", flush=True)
    done = subprocess.run([sys.executable, __file__, "build"], capture_output=True, text=True)
    if done.returncode:
        print(done.stdout + done.stderr, file=sys.stderr)
        print("run: the ops could not be built; is there a C++ compiler (g++)?", file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
