"""The patches: each states what it is, is refused for an unknown version, and cures a defect that is there without it."""

import megatron_ucp_patches as patches
import pytest

from megatron_ucp.errors import UnsupportedError, UsageError
from tests.ranks import RankPool


def test_every_patch_says_what_it_is() -> None:
    assert "round_robin_links" in patches.names()
    for name in patches.names():
        patch = patches.find(name)
        assert patch.package in ("deepspeed", "megatron-core") and patch.versions
        assert all(len(text) > 20 for text in (patch.upstream, patch.why, patch.until)), name


def test_an_unknown_patch_and_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no such patch"):
        patches.apply("nothing")
    monkeypatch.setattr(patches, "version", lambda package: "99.0")
    with pytest.raises(UnsupportedError, match=r"does not know this version"):
        patches.apply("round_robin_links")


def wrong_reads(patched: bool) -> list[str]:
    """Parameters that DeepSpeed's accessor returns wrong under round robin."""
    import torch
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.utils import safe_get_full_fp32_param

    from tests.engines.model import Setup, make_engine, train

    stock = DeepSpeedZeroOptimizer._link_all_hp_params
    try:
        if patched:
            patches.apply("round_robin_links")
        engine = make_engine(Setup(1, "fp32", zero_config=(("round_robin_gradients", True),)), attach=False)
        train(engine, 1)
        wrong = []
        for name, param in engine.module.named_parameters():
            if param.requires_grad and not torch.equal(safe_get_full_fp32_param(param), param.detach()):
                wrong.append(name)
        engine.destroy()
        return wrong
    finally:
        DeepSpeedZeroOptimizer._link_all_hp_params = stock
        patches._applied.clear()


@pytest.mark.ranks
def test_round_robin_links(ranks: RankPool) -> None:
    assert all(wrong for wrong in ranks.run(2, "tests.test_patches:wrong_reads", False)), "the defect is gone: drop the patch"
    assert ranks.run(2, "tests.test_patches:wrong_reads", True) == [[], []]
