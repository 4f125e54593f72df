"""A machine without a GPU: DeepSpeed's Muon leaves its small functions as they are instead of
compiling them."""

from . import Patch
from .no_torch_compile import unwrap, without_compiler


def change() -> None:
    with without_compiler():
        from deepspeed.runtime.zero.muon import original_muon
    unwrap(original_muon)  # where it was imported before


PATCH = Patch(
    package="deepspeed",
    versions=("0.19.8",),
    only_without_gpu=True,
    upstream="deepspeed.runtime.zero.muon.original_muon.muon_update",
    why="the first step of Muon starts a C++ compiler, about 40 s, and fails where there is none; "
    "every ZeRO engine imports the compiler, about 4 s of each rank's start",
    until="upstream compiles where Muon takes its first step, and not without a GPU",
    change=change,
)
