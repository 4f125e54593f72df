"""A machine without a GPU: megatron-core's tracker of generator states uses the CPU's generator."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from . import MEGATRON_CORE, Patch


def change() -> None:
    from megatron.core.tensor_parallel import random

    def get_state(
        device: Any = "cuda", clone: bool = False, graph_safe: bool = False
    ) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def add(self: Any, name: str, seed: int) -> None:
        if seed in self.seeds_ or name in self.states_:
            raise ValueError(f"the generator state {name} or its seed {seed} is there already")
        self._is_initialized = True
        self.seeds_.add(seed)
        self.states_[name] = torch.Generator().manual_seed(seed).get_state()

    @contextlib.contextmanager
    def fork(self: Any, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"the generator state {name} was not added")
        outer, outer_name = torch.get_rng_state(), self._current_state_name
        torch.set_rng_state(self.states_[name])
        self._current_state_name = name
        try:
            # upstream warns here when the CPU's generator has moved: it is the one that is meant to
            # move
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outer)
            self._current_state_name = outer_name

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    random.CudaRNGStatesTracker.add = add
    random.CudaRNGStatesTracker.fork = fork


PATCH = Patch(
    package="megatron-core",
    versions=MEGATRON_CORE,
    only_without_gpu=True,
    upstream="megatron.core.tensor_parallel.random: CudaRNGStatesTracker.add and fork, "
    "_get_cuda_rng_state, _set_cuda_rng_state",
    why="they read and set the state of a CUDA generator: seeding raises without a GPU, and with "
    "it attention dropout, "
    "sequence-parallel embeddings and recomputation, which run inside of fork()",
    until="upstream's tracker works with the generator of the current accelerator",
    change=change,
)
