"""Host memory that holds what a save writes while training goes on."""

import torch


class SnapshotMemory:
    """Buffers that are allocated once and used again by the next save, which takes as much in the
    same order; pinned where there is a GPU. `most_bytes` of them at most (None: as many as are
    asked for)."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = most_bytes
        self._buffers: list[torch.Tensor] = []
        self._taken = 0

    @property
    def size_bytes(self) -> int:
        """What is held now."""
        return sum(len(buffer) for buffer in self._buffers)

    def begin(self) -> None:
        """All of it is free again."""
        self._taken = 0

    def copy(self, memory: torch.Tensor) -> torch.Tensor | None:
        """A copy of flat bytes; None where there is no room for it. What comes from a GPU is there
        once its stream is."""
        buffer = self.room(len(memory))
        if buffer is None:
            return None
        return buffer.copy_(memory, non_blocking=buffer.is_pinned())

    def room(self, size_bytes: int) -> torch.Tensor | None:
        """So many bytes, of whatever value; None where there is no room for them."""
        buffer = self._next(size_bytes)
        return None if buffer is None else buffer[:size_bytes]

    def _next(self, size: int) -> torch.Tensor | None:
        if self._taken == len(self._buffers):
            self._buffers.append(torch.empty(0, dtype=torch.uint8))
        at = self._taken
        if len(self._buffers[at]) < size:
            rest = self.size_bytes - len(self._buffers[at])
            if self._most_bytes is not None and rest + size > self._most_bytes:
                return None
            self._buffers[at] = torch.empty(0, dtype=torch.uint8)  # goes before its successor comes
            self._buffers[at] = _allocated(size)
        self._taken += 1
        return self._buffers[at]

    def release(self) -> None:
        """Gives all memory back."""
        self._buffers.clear()
        self._taken = 0


def _allocated(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
