"""DeepSpeed's AutoTP: what can't be read or resumed yet is called by its name, and no damage."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.errors import UnsupportedError
from tests.ranks import RankPool
from tests.reshard import twins

pytestmark = pytest.mark.ranks
ODD, EVEN = 61, 60
LAST = "lm_head.weight"


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(vocabulary, stage) -> the folder and what the engine's own doors said."""
    kept: dict[tuple[int, int], tuple[Path, list[str]]] = {}

    def get(vocab: int, zero: int) -> tuple[Path, list[str]]:
        if (vocab, zero) not in kept:
            folder = tmp_path_factory.mktemp("autotp")
            said = ranks.run(2, "tests.engines.autotp_jobs:save", vocab, zero, str(folder))
            kept[vocab, zero] = folder, said[0]
        return kept[vocab, zero]

    return get


def test_an_engine_that_autotp_cut_is_told_so(saved: Any) -> None:
    for message in saved(ODD, 1)[1]:
        assert message.startswith("UnsupportedError"), message
        assert "AutoTP" in message and "autotp_size 2" in message and "what to do:" in message
        assert "family=" not in message


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_shares_of_different_sizes_are_no_damage(saved: Any, zero: int) -> None:
    folder, _ = saved(ODD, zero)
    with pytest.raises(UnsupportedError, match="AutoTP") as caught:
        ucp.verify(folder)
    assert caught.value.parameter == "lm_head.weight"
    assert caught.value.found == "(31, 16) and (30, 16)"
    assert "ds_to_universal" in caught.value.what_to_do


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_equal_shares_are_read(saved: Any, zero: int) -> None:
    found = ucp.verify(saved(EVEN, zero)[0], deep=True)
    assert found.findings == () and found.read_bytes


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_equal_shares_go_to_hugging_face(saved: Any, tmp_path: Path, zero: int) -> None:
    """Whole tensors under the model's own names: the shares that stock saved, side by side."""
    folder, _ = saved(EVEN, zero)
    ucp.export_hf(folder, tmp_path / "out", verify=True)
    found = twins.read(tmp_path / "out")
    # the weights in files of ZeRO-3 are empty; the same run at ZeRO-1 comes to the same ones
    files = sorted((saved(EVEN, min(zero, 1))[0] / "cut").glob("mp_rank_*_model_states.pt"))
    shares = [torch.load(path, weights_only=False)["module"] for path in files]
    cut = {name: [share[name] for share in shares] for name in shares[0]}
    joined = [name for name in found if found[name].shape != cut[name][0].shape]
    assert {*found} == {*cut} and {"model.layers.0.mlp.down_proj.weight", LAST} <= {*joined}
    for name, tensor in found.items():
        dim = next((d for d, n in enumerate(cut[name][0].shape) if n != tensor.shape[d]), None)
        want = cut[name][0] if dim is None else torch.cat(cut[name], dim)
        assert tensor.dtype == torch.bfloat16 and torch.equal(tensor, want), name
        assert dim is None or not torch.equal(tensor, torch.cat(cut[name][::-1], dim))


def test_shares_that_nothing_describes_are_damage(saved: Any, tmp_path: Path) -> None:
    """Negative control: the map says other sizes than the files have."""
    (tmp_path / "cut").mkdir()
    for path in (saved(ODD, 1)[0] / "cut").iterdir():
        tree = torch.load(path, weights_only=False)
        if "universal_checkpoint_info" in tree:
            params = tree["universal_checkpoint_info"]["affine_map"]["params"]
            (entry,) = [entry for pattern, entry in params.items() if "lm_head" in pattern]
            entry["ranks"][1]["shard_shape"] = [29, 16]
        torch.save(tree, tmp_path / "cut" / path.name)
    found = [finding.what for finding in ucp.verify(tmp_path / "cut").findings]
    assert any("differs from the first one in param_shapes" in what for what in found)
