"""What differs from rank to rank in a checkpoint."""

from collections.abc import Iterable

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.of_ranks import Apart, PerRank


def ranks_of(checkpoint: Checkpoint) -> Mesh:
    """The mesh whose ranks saved, which files without ranks do not say."""
    return (checkpoint.recorded or checkpoint.manifest).mesh


def apart_in(checkpoint: Checkpoint) -> Apart:
    """All of it, of all ranks of a checkpoint. Raises DamagedFileError."""
    what = differing(checkpoint, checkpoint.file_names)
    count = ranks_of(checkpoint).world if what else 0
    return Apart(what, [checkpoint.of_rank(rank).only(what) for rank in range(count)])


def differing(checkpoint: Checkpoint, names: Iterable[str]) -> PerRank:
    """What differs between some files of a checkpoint and the first ones of their kind."""
    found = PerRank()
    for name in names:
        found |= checkpoint.differs(name)
    return found
