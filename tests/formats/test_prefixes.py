"""Prefixes on one side only, told from models that are others."""

import pytest

from megatron_ucp.formats.wrapped_model import other_prefix

NAMES = ["up.weight", "down.weight", "scale"]


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "model.inner."])
def test_a_prefix_is_named(prefix: str) -> None:
    long = [prefix + name for name in NAMES]
    for saved, wanted, what in ((NAMES, long, "added"), (long, NAMES, "removed")):
        for fewer in (saved, [*saved, f"{saved[0]}.more"]):
            error = other_prefix(fewer, wanted, "file")
            assert error is not None and f"the prefix {prefix} {what}" in str(error)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (NAMES, NAMES),
        (NAMES, [*NAMES, *(f"ema.{name}" for name in NAMES)]),
        ([*NAMES, *(f"ema.{name}" for name in NAMES)], [f"ema.{name}" for name in NAMES]),
        (NAMES, ["module.up.weight", "module.other", "third"]),
        (NAMES, ["left.weight", "right.weight"]),
        ([], NAMES),
        (NAMES, []),
    ],
)
def test_other_models_are_not_taken_for_wrapped_ones(saved: list[str], wanted: list[str]) -> None:
    assert other_prefix(saved, wanted, "file") is None
