"""The rows of the table of formats for Megatron's checkpoints."""

from pathlib import Path

from megatron_ucp.formats.base import Checkpoint, Told
from megatron_ucp.formats.megatron.dp_reshardable import DpReshardableCheckpoint
from megatron_ucp.formats.megatron.index import INDEX_FILE, read_index
from megatron_ucp.formats.megatron.named_states import split_keys
from megatron_ucp.formats.megatron.torch_dist import TorchDistCheckpoint, check_backend


class TorchDistFormat:
    """Folders of `--ckpt-format torch_dist`; other ones with torch's index are refused by name."""

    def recognises(self, folder: Path) -> bool:
        return (folder / INDEX_FILE).is_file()

    def open(self, folder: Path, told: Told) -> Checkpoint:
        check_backend(folder)
        index = read_index(folder)
        states = split_keys(index.tensors, str(folder / INDEX_FILE))
        flat = states.flat and not told.weights
        kind = DpReshardableCheckpoint if flat else TorchDistCheckpoint
        return kind(folder, told, index, states)
