"""DeepSpeed's universal folders, bit for bit as the states that they were made of, on the disk and
in an object store."""

from pathlib import Path

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.errors import DamagedFileError, UcpError
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.formats.store import Location
from megatron_ucp.reshard.check import read_state
from tests.places import Place
from tests.reshard import paper, twins


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint, and the universal folder that was made of it."""
    source = paper.write(twins.model("gpt"), tmp_path / "step7")
    ucp.convert(source, tmp_path / "universal", to="universal")
    return source, tmp_path / "universal"


def states(folder: Location) -> dict[tuple[str, str], torch.Tensor]:
    with open_checkpoint(folder) as checkpoint:
        checkpoint.check_all(checkpoint.file_names)
        manifest = checkpoint.manifest
        return {
            (spec.name, state): read_state(checkpoint, spec.name, state)
            for spec in manifest.params
            for state in manifest.states_of(spec.name)
        }


def test_every_state_is_read_bit_for_bit(folders: tuple[Path, Path], place: Place) -> None:
    source, folder = folders
    want, have = states(source), states(place(folder))
    assert have.keys() == want.keys() and len(want) > 30
    assert not [
        at for at in want if not torch.equal(have[at].view(torch.uint8), want[at].view(torch.uint8))
    ]
    # negative control: one bit of one state is another one
    path = next(folder.glob("zero/*final_layernorm.weight/exp_avg.pt"))
    tree = torch.load(path, weights_only=False)
    tree["param"].view(torch.int32).view(-1)[1] ^= 1
    torch.save(tree, path)
    (folder / "ucp_manifest.json").unlink()
    have = states(place(folder))
    differ = [
        at for at in want if not torch.equal(have[at].view(torch.uint8), want[at].view(torch.uint8))
    ]
    assert differ == [("decoder.final_layernorm.weight", "exp_avg")]


def test_a_flipped_bit_is_damage(folders: tuple[Path, Path], place: Place) -> None:
    path = next(folders[1].glob("zero/*word_embeddings.weight/fp32.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFileError):
        states(place(folders[1]))


def test_a_file_that_is_missing_is_named(folders: tuple[Path, Path], place: Place) -> None:
    next(folders[1].glob("zero/*final_layernorm.bias/exp_avg.pt")).unlink()
    with pytest.raises(UcpError, match=r"final_layernorm\.bias"):
        states(place(folders[1]))
