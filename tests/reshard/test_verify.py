"""`verify` on real checkpoints: nothing to say about good ones, and every damage found."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.core.plan import Slot, padding
from megatron_ucp.errors import NotFoundError
from megatron_ucp.formats.deepspeed.native import NativeCheckpoint
from megatron_ucp.formats.folder import LocalFolder
from megatron_ucp.formats.pt.file import PtFile
from tests.core.strategies import SHARE
from tests.engines.model import Setup
from tests.engines.sources import Sources, drop_record, without_manifest
from tests.engines.tensor_jobs import Mega, Staged

pytestmark = pytest.mark.ranks
FLIPS = round(1000 * SHARE)  # a thousand in `tests/run.sh all`
NO_OPTIMIZER = {"attach": False, "more": 0}


def tensor_parallel(sources: Sources) -> str:
    return sources.get(2, Mega("llama", 2, 1))


@pytest.mark.parametrize(("dp", "zero"), [(1, 0), (2, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("deep", [False, True])
def test_a_good_checkpoint(sources: Sources, dp: int, zero: int, deep: bool) -> None:
    found = ucp.verify(sources.get(dp, Setup(zero, "bf16")), deep=deep)
    assert found.findings == () and found.notes == () and found.files >= 1
    size = sum(p.stat().st_size for p in Path(found.path).glob("*.pt"))
    assert 0.4 * size < found.read_bytes < size if deep else found.read_bytes == 0


def test_a_good_checkpoint_at_tp2(sources: Sources) -> None:
    assert ucp.verify(tensor_parallel(sources), deep=True).findings == ()


@pytest.mark.parametrize("zero", [1, 3])
def test_every_flipped_byte_of_a_tensor_is_found(
    sources: Sources, tmp_path: Path, zero: int
) -> None:
    folder = shutil.copytree(
        Path(sources.get(2, Setup(zero, "bf16"))) / "trained", tmp_path / "copy"
    )
    places = []
    for path in sorted(folder.glob("*.pt")):
        with PtFile(path) as file:
            places += [
                (path, file.records[n].offset_bytes + i)
                for n in file.records
                if "/data/" in n
                for i in range(file.records[n].size_bytes)
            ]
    dice = random.Random(zero)
    for path, at in dice.sample(places, FLIPS // 2):
        with open(path, "r+b") as file:
            file.seek(at)
            old = file.read(1)
            file.seek(at)
            file.write(bytes([old[0] ^ (1 << dice.randrange(8))]))
            file.flush()
            found = ucp.verify(folder, deep=True).findings
            assert all(one.file == str(path) for one in found if "checksum" in one.what)
            assert any("checksum" in one.what for one in found), (path, at, found)
            file.seek(at)
            file.write(old)
    assert ucp.verify(folder, deep=True).findings == ()


def test_missing_and_foreign_files(
    sources: Sources, broken: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = broken()
    path = next((folder / "filled").glob("*rank_1*optim*"))
    other = next((folder / "trained").glob("*rank_1*optim*"))
    shutil.copy(other, path)
    assert main(["verify", str(folder / "filled"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert found[0]["file"] == str(path) and "not the one that was saved" in found[0]["what"]
    path.unlink()
    assert main(["verify", str(folder), "--tag", "filled"]) == 1
    assert "is missing" in capsys.readouterr().out
    drop_record(next((folder / "trained").glob("*rank_1*optim*")), 0)
    assert ucp.verify(without_manifest(folder) / "trained").findings


def rewritten(path: Path, change: Any) -> None:
    tree = torch.load(path, weights_only=False)
    change(tree)
    torch.save(tree, path)


def test_nan_is_found_unless_it_is_allowed(sources: Sources, broken: Any) -> None:
    folder = without_manifest(broken()) / "trained"
    path = next(folder.glob("*rank_1*optim*"))

    def change(tree: Any) -> None:
        tree["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][3] = float(
            "nan"
        )

    rewritten(path, change)
    found = ucp.verify(folder, deep=True)
    assert found.findings == (), "a run that diverged is no damage"
    assert noted(found) == [path.name]
    for other in (ucp.verify(folder, deep=True, allow_nan=True), ucp.verify(folder)):
        assert noted(other) == [] and other.findings == ()


def noted(found: Any) -> list[str]:
    """The files in which a note says that there is NaN."""
    said = [note for note in found.notes if note.startswith("NaN, ")]
    return [note.partition(" diverged, in ")[2].partition(": ")[0] for note in said]


def test_nan_in_the_padding_is_none(sources: Sources, tmp_path: Path) -> None:
    """ZeRO-3 saves padding that nobody ever set."""
    folder = (
        without_manifest(Path(shutil.copytree(sources.get(4, Setup(3, "bf16")), tmp_path / "copy")))
        / "filled"
    )
    path = next(folder.glob("*rank_3*optim*"))
    with NativeCheckpoint(LocalFolder(folder)) as checkpoint:
        buffer = checkpoint.manifest.buffers[0]
        unused = [fill.start for fill in padding(buffer, Slot(0, (("tp", 0),), 3, "fp32"))]
        used = next(buffer.fragments(3)).offset
    assert unused

    def plant(at: int) -> None:
        def change(tree: Any) -> None:
            tree["optimizer_state_dict"]["fp32_flat_groups"][0].data[at] = float("nan")

        rewritten(path, change)

    for at in unused:
        plant(at)
    found = ucp.verify(folder, deep=True)
    assert found.findings == () and noted(found) == []
    plant(used)
    assert noted(ucp.verify(folder, deep=True)) == [path.name]


def test_copies_that_differ_are_found(sources: Sources, tmp_path: Path) -> None:
    """Every tensor-parallel rank has its own copy of a norm: one of them gets another moment."""
    folder = shutil.copytree(Path(tensor_parallel(sources)) / "trained", tmp_path / "copy")
    with PtFile(next(folder.glob("*mp_rank_01_optim*"))) as file:
        before = file.directory_sha256

    def change(tree: Any) -> None:
        groups = tree["optimizer_state_dict"]["base_optimizer_state"]["state"]
        groups[1]["exp_avg"][0] += 1  # the group of norms

    rewritten(next(folder.glob("*mp_rank_01_optim*")), change)
    manifest = json.loads((folder / "ucp_manifest.json").read_text())
    with PtFile(
        next(folder.glob("*mp_rank_01_optim*"))
    ) as file:  # the manifest says that this is the file
        assert file.directory_sha256 != before
        manifest["files"] = [
            [n, file.size_bytes, file.directory_sha256] if sha == before else [n, size, sha]
            for n, size, sha in manifest["files"]
        ]
    (folder / "ucp_manifest.json").write_text(json.dumps(manifest))
    assert ucp.verify(folder).findings == ()
    found = ucp.verify(folder, deep=True).findings
    assert {one.what for one in found} == {"two copies of the state exp_avg differ"} and len(
        found
    ) == 1
    assert found[0].parameter.endswith("layernorm.weight") and found[0].found == "tp 0 and tp 1"


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_copy_on_another_stage(sources: Sources, tmp_path: Path, tied: bool) -> None:
    origin = sources.get(2, Staged("llama", 1, 1, pp=2, tied=tied), more=0)
    folder = Path(shutil.copytree(Path(origin) / "trained", tmp_path / "copy"))
    assert ucp.verify(folder, deep=True).findings == ()
    path = next(folder.glob("*mp_rank_01_optim*"))
    head = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
    last = [b for b in ucp.describe(folder).buffers if b.at == (("pp", 1),)]
    index, start = next(
        (i, m.start) for i, b in enumerate(last) for m in b.members if m.param == head
    )

    def change(tree: Any) -> None:
        state = tree["optimizer_state_dict"]["base_optimizer_state"]["state"]
        state[index]["exp_avg_sq"][start + 3] += 1

    rewritten(path, change)
    vouch_for(path)
    found = ucp.verify(folder, deep=True).findings
    differ = [("embedding.word_embeddings.weight", "two copies of the state exp_avg_sq differ")]
    assert [(one.parameter, one.what) for one in found] == (differ if tied else [])


def vouch_for(path: Path) -> None:
    """Makes the manifest say of a file what it is now."""
    manifest = path.parent / "ucp_manifest.json"
    data = json.loads(manifest.read_text())
    with PtFile(path) as file:
        for row in data["files"]:
            if row[0] == path.name:
                row[1:] = [file.size_bytes, file.directory_sha256]
    manifest.write_text(json.dumps(data))


def test_a_file_without_checksums_is_a_note_and_no_damage(sources: Sources, broken: Any) -> None:
    folder = without_manifest(broken()) / "trained"
    path = next(folder.glob("*rank_0*optim*"))
    torch.serialization.set_crc32_options(False)
    try:
        rewritten(path, lambda tree: None)
    finally:
        torch.serialization.set_crc32_options(True)
    found = ucp.verify(folder, deep=True)
    assert found.findings == () and found.notes == (f"{path.name} has no checksums",)


def test_what_is_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotFoundError, match="no checkpoint"):
        ucp.verify(tmp_path)
    assert main(["verify", str(tmp_path / "nowhere")]) == 2
    assert "no such checkpoint folder" in capsys.readouterr().err
