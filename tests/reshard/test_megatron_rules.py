"""Rules for folders of Megatron: what they say of legacy ones at tp=2, and that rules which say
the same as megatron-core's names give the same manifest."""

from pathlib import Path

import pytest

from megatron_ucp.formats.registry import open_checkpoint
from tests.formats.megatron_files import GOLDEN

# what tensor parallelism cuts, by its dim
CUT = {r".*(?:embeddings|output_layer|linear_qkv)": 0, r".*(?:linear_proj|linear_fc2)": 1}
LEGACY = ["legacy_tp2pp2", "rng_legacy_tp2dp2"]


def rule(pattern: str, *said: str) -> str:
    return "\n".join(["[[rule]]", f"pattern = '{pattern}\\.weight'", *said])


def rules(cut: dict[str, int]) -> str:
    shard = 'layout = "Shard"', 'axis = "tp"'
    dims = [rule(name, *shard, f"dim = {dim}") for name, dim in cut.items()]
    gated = rule(".*linear_fc1", 'layout = "ShardNC"', 'axis = "tp"', "dim = 0", "parts = 2")
    return "\n".join(["format = 1", *dims, gated, rule(".*norm", 'layout = "Replicate"')])


@pytest.mark.parametrize("case", LEGACY)
def test_rules_say_whole_shapes(case: str, tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(rules(CUT))
    with open_checkpoint(GOLDEN / case) as one, open_checkpoint(GOLDEN / case, rules=file) as two:
        known = one.manifest.by_name
        for spec in two.manifest.params:
            assert spec.shape == known[spec.name].shape
            assert spec.layout == known[spec.name].layout, spec.name
        for name in two.file_names:  # masters are proved by the weights
            two.check(name)
    file.write_text(rules(dict.fromkeys(CUT, 1)))
    with open_checkpoint(GOLDEN / case, rules=file) as wrong:
        shape = wrong.manifest.by_name["output_layer.weight"].shape
        assert shape != known["output_layer.weight"].shape
