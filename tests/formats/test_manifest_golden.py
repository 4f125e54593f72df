"""Checkpoints that an attached engine saved, with their manifests: read bit for bit, and written
anew as they are. Manifests of other versions are refused.

They were saved by two ranks with the engine attached, filled with provenance values; the arrays
beside them were gathered from the live engine without the package (see `golden/make.py`).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.core.manifest import FILE_NAME, Manifest
from megatron_ucp.core.manifest_json import FORMAT_VERSION, from_json, to_json
from megatron_ucp.errors import DamagedFileError, ForeignFileError
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import read_state

GOLDEN = Path(__file__).parent / "golden"
HYPER = ("lr", "weight_decay", "betas", "eps", "initial_lr")
CASES = ("attached_zero0_fp32", "attached_zero1", "attached_zero3")


@pytest.mark.parametrize("case", CASES)
def test_every_state_is_read_bit_for_bit(case: str) -> None:
    assert json.loads((GOLDEN / case / FILE_NAME).read_text())["version"] == FORMAT_VERSION
    with numpy.load(GOLDEN / f"{case}.npz") as arrays, open_checkpoint(GOLDEN / case) as checkpoint:
        rest = json.loads(str(arrays["json"]))
        names = [name for name in arrays.files if name != "json"]
        assert len(names) > 20
        for key in names:
            name, state = key.split("|")
            found = read_state(checkpoint, name, state)
            want = torch.from_numpy(arrays[key]).reshape(-1)
            assert torch.equal(found.view(torch.uint8), want.view(torch.uint8)), key
        _check_members(checkpoint.manifest, rest)


def _check_members(manifest: Manifest, rest: Any) -> None:
    """Steps and hyper-parameters are the engine's."""
    assert manifest.optimizer == "torch.AdamW"
    for spec in manifest.params:
        if spec.kind == "trainable":
            steps = {"step": rest["scalars"][f"{spec.name}|step"]}
            assert manifest.scalars_of(spec.name) == steps and steps["step"] > 0
            hyper, group = rest["hyper"][spec.name], manifest.group_of(spec.name)
            said = {k: list(v) if isinstance(v, tuple) else v for k, v in group.items()}
            assert {k: said[k] for k in HYPER} == {k: hyper[k] for k in HYPER}


@pytest.mark.parametrize("case", CASES)
def test_it_is_whole_and_can_be_said_anew(case: str, tmp_path: Path) -> None:
    assert ucp.verify(GOLDEN / case, deep=True).findings == ()
    folder = tmp_path / "tag"
    shutil.copytree(GOLDEN / case, folder)
    path = folder / FILE_NAME
    manifest = from_json(path.read_text(), str(path))
    path.write_text(to_json(manifest))
    assert json.loads(path.read_text())["version"] == FORMAT_VERSION == 3
    assert from_json(path.read_text(), str(path)) == manifest
    assert ucp.diff(GOLDEN / case, folder) == []


def test_a_step_that_the_manifest_has_otherwise_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "tag"
    shutil.copytree(GOLDEN / "attached_zero1", folder)
    data = json.loads((folder / FILE_NAME).read_text())
    data["buffers"][0]["scalars"]["step"] += 1
    (folder / FILE_NAME).write_text(json.dumps(data))
    assert any("disagree in the scalars" in one.what for one in ucp.verify(folder).findings)
    with pytest.raises(ForeignFileError, match="disagree in the scalars"):
        ucp.diff(folder, folder)


@pytest.mark.parametrize("version", [1, 2, 4, None])
def test_another_version_is_refused_by_name(tmp_path: Path, version: int | None) -> None:
    folder = tmp_path / "tag"
    shutil.copytree(GOLDEN / "attached_zero1", folder)
    data = json.loads((folder / FILE_NAME).read_text())
    (folder / FILE_NAME).write_text(json.dumps({**data, "version": version}))
    with pytest.raises(DamagedFileError, match="no manifest that this version reads") as refused:
        ucp.inspect(folder)
    assert refused.value.found == (None if version is None else str(version))
    assert "remove the manifest" in refused.value.what_to_do
    (folder / FILE_NAME).unlink()
    assert ucp.diff(folder, GOLDEN / "attached_zero1") == [], "DeepSpeed's own files say it all"
