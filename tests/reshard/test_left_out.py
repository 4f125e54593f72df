"""What a run keeps besides its tensors is in a conversion's output, or a note says that it is not:
in every format."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.core.manifest_json import from_json, to_json
from megatron_ucp.formats.output_folder import entries_of
from megatron_ucp.formats.registry import open_checkpoint

GOLDEN = Path(__file__).parents[1] / "formats" / "golden"
OUTPUTS: dict[str, dict[str, Any]] = {
    "native": {"target": ucp.Target.of("dp=3,zero=2")},
    "universal": {"to": "universal"},
    "dcp": {"to": "dcp"},
    "accelerate": {"to": "accelerate"},
    "torch_dist": {"to": "torch_dist"},
}
POSITION = {"epoch": 1, "samples": 12}
BESIDE = {"mine": "of the program"}
HELPERS = {"random_ltd": {"layers": 3}, "data_sampler": {"consumed_samples": 12}}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A save of an attached engine with a client state, states of DeepSpeed's helpers, and the
    position of a loader."""
    folder = tmp_path_factory.mktemp("left out") / "global_step3"
    shutil.copytree(GOLDEN / "attached_zero1", folder)
    (file,) = folder.glob("mp_rank_*")
    tree = torch.load(file, weights_only=False)
    torch.save({**tree, **HELPERS, **BESIDE}, file)
    manifest = from_json((folder / FILE_NAME).read_text(), "x")
    files = tuple(entries_of(folder, [one.name for one in manifest.files]))
    changed = replace(manifest, files=files, run={**manifest.run, "data": POSITION})
    (folder / FILE_NAME).write_text(to_json(changed))
    return folder


@pytest.mark.parametrize("output", OUTPUTS)
def test_nothing_is_left_out_in_silence(source: Path, tmp_path: Path, output: str) -> None:
    folder = tmp_path / ("iter_0000003" if output == "torch_dist" else "global_step3")
    notes = " ".join(ucp.convert(source, folder, **OUTPUTS[output]).notes)
    with open_checkpoint(folder) as written:
        kept = {**written.extras.client_state, **written.extras.helpers}
        assert written.extras.data_position == POSITION
    for name, value in {**BESIDE, **HELPERS}.items():
        is_kept = kept.get(name) == value
        assert is_kept or ("left out" in notes and name in notes), name
        assert is_kept == (output in ("native", "universal"))
