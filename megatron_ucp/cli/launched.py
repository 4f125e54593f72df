"""A command that torchrun starts on several processes, of one machine or of several: they form a
process group, share the work and end together. Rank 0 speaks for all.

    torchrun --nnodes 2 --nproc_per_node 4 ... -m megatron_ucp convert runs/llama out --to universal

Where one of them dies, torchrun ends the others."""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from megatron_ucp.errors import RankError

_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_LONGEST = timedelta(days=1)  # while rank 0 reads an export back, the others wait
_END = timedelta(seconds=10)  # that the others wait for the last word of rank 0
_ENDED = "megatron_ucp has ended"


def is_launched() -> bool:
    """Whether torchrun started this very process, and others beside it. What such a process starts
    in turn inherits its variables, and works alone: its parent is the rank that they speak of."""
    own = {name: os.environ.get(name, "") for name in _OF_A_RANK}
    if "TORCHELASTIC_RUN_ID" not in os.environ or not all(map(str.isdigit, own.values())):
        return False
    return int(own["WORLD_SIZE"]) > 1 and own != _variables_of(os.getppid())


def _variables_of(process: int) -> dict[str, str]:
    """Which rank a process was started as; nothing where this system does not say so."""
    try:
        data = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in data.decode(errors="replace").split("\0"))
    return {name: value for name, _, value in pairs if name in _OF_A_RANK}


@contextlib.contextmanager
def launched() -> Iterator[int]:
    """Inside, this process is one of a command's; gives its rank. Rank 0 ends first where it has to
    speak: torchrun ends all others when one ends with an error."""
    rank = int(os.environ["RANK"])
    with contextlib.ExitStack() as silenced:
        if rank > 0:
            nowhere = silenced.enter_context(open(os.devnull, "w", encoding="utf-8"))
            silenced.enter_context(contextlib.redirect_stdout(nowhere))
        yield rank
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # who keeps the store is gone
            if rank > 0:
                _get_default_store().wait([_ENDED], _END)
            else:
                _get_default_store().set(_ENDED, "")


def form() -> None:
    """Meets the others: from here on they are ranks of torch.distributed. Raises RankError."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost process is told by ours
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", timeout=_LONGEST)
    except (RuntimeError, ValueError) as error:
        raise RankError(
            "the processes that torchrun started did not meet",
            found=str(error).strip().partition("\n")[0][:200],
            fix="start the command on every node, with the same --nnodes and rendezvous",
        ) from error
