"""Rules as data: whole shapes from the shares of ranks, exactly one rule per name, names of a
pipeline."""

import pytest

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layout import (
    Extent,
    Partial,
    Replicate,
    Shard,
    ShardHy,
    ShardNC,
)
from megatron_ucp.core.rules import LONGEST_NAME, Rename, Rule, RuleSet, nearest
from megatron_ucp.errors import LayoutError, RuleError, UnsupportedError

RULES = RuleSet(
    "model.toml",
    (
        Rule(r"layers\.\d+\.fc1\.weight", Shard("tp", 0)),
        Rule(r"layers\.\d+\.fc2\.weight", Shard("tp", 1)),
        Rule(r".*\.bias", Replicate()),
    ),
)


@pytest.mark.parametrize(
    ("rule", "local", "shape", "layout"),
    [
        (Rule("a", Replicate()), (3, 4), (3, 4), Replicate()),
        (Rule("a", Partial("tp")), (3, 4), (3, 4), Partial("tp")),
        (Rule("a", Replicate()), (), (), Replicate()),
        (Rule("a", Shard("tp", 1)), (3, 4), (3, 8), Shard("tp", 1)),
        (Rule("a", ShardHy((("tp", 0),))), (3, 4), (6, 4), ShardHy((("tp", 0),))),
        (Rule("a", ShardNC("tp", 0, (2, 4))), (3, 4), (6, 4), ShardNC("tp", 0, (2, 4))),
        (Rule("a", ShardNC("tp", 0, ()), 3), (6, 4), (12, 4), ShardNC("tp", 0, (4, 4, 4))),
    ],
)
def test_the_whole_parameter_follows_from_a_share(
    rule: Rule, local: Ints, shape: Ints, layout: object
) -> None:
    spec = rule.declare("a", local, {"tp": 2})
    assert (spec.shape, spec.layout, spec.extent) == (shape, layout, None)
    assert spec.layout.local_shape("a", spec.shape, {"tp": (2, 1)}) == local


def test_at_tp1_a_rule_keeps_the_shape() -> None:
    assert (
        Rule("a", ShardNC("tp", 0, (), 3), 2).declare("a", (6, 4), {"tp": 1}).shape
        == (6, 4)
        == Rule("a", ShardNC("tp", 0, (2, 4))).declare("a", (6, 4), {"tp": 1}).shape
    )


def test_vocabulary() -> None:
    rule = Rule("a", Shard("tp", 0), vocabulary=45)
    assert rule.declare("a", (24, 8), {"tp": 2}).extent == Extent(45, 48)
    for local in ((22, 8), ()):
        with pytest.raises((RuleError, LayoutError)):
            rule.declare("a", local, {"tp": 2})


@pytest.mark.parametrize(
    ("rule", "local", "error", "words"),
    [
        (Rule("a", Shard("tp", 2)), (3, 4), LayoutError, "a dim that the parameter does not have"),
        (Rule("a", Shard("tp", 0)), (), LayoutError, "a dim that the parameter does not have"),
        (
            Rule("a", ShardNC("tp", 1, (), 1), 2),
            (3,),
            LayoutError,
            "a dim that the parameter does not have",
        ),
        (Rule("a", ShardNC("tp", 0, (2, 2))), (3, 4), LayoutError, "do not add up"),
        (Rule("a", ShardNC("tp", 0, (3, 3))), (3, 4), LayoutError, "can't be cut"),
        (Rule("a", ShardNC("tp", 0, (), 1), 4), (3, 4), RuleError, "equal parts"),
        (Rule("a", Shard("ep", 0)), (3, 4), UnsupportedError, "an axis that does not cut"),
        (Rule("a", Partial("ep")), (3, 4), UnsupportedError, "an axis that does not cut"),
    ],
)
def test_a_share_that_the_layout_can_not_have(
    rule: Rule, local: Ints, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as raised:
        RuleSet("model.toml", (rule,)).declare("a", local, {"tp": 2})
    assert "model.toml" in str(raised.value) and "parameter: a\n" in str(raised.value)


def test_exactly_one_rule_per_name() -> None:
    assert RULES.find("layers.11.fc2.weight").layout == Shard("tp", 1)
    with pytest.raises(RuleError, match="no rule matches") as raised:
        RULES.find("layers.0.fc3.weight")
    assert r"layers\.\d+\.fc" in str(raised.value)
    with pytest.raises(RuleError, match="no rule matches"):
        RULES.find("x.layers.0.fc1.weight")  # the whole name
    with pytest.raises(RuleError, match="two rules match"):
        RuleSet("model.toml", (*RULES.rules, Rule(r"layers\.0\..*", Replicate()))).find(
            "layers.0.fc1.weight"
        )
    with pytest.raises(RuleError, match="too long"):
        RULES.find("a" * LONGEST_NAME + ".bias")
    assert RULES.find("a" * (LONGEST_NAME - 5) + ".bias").layout == Replicate()


def test_nearest_sees_layer_numbers_as_one() -> None:
    patterns = [r"h\.\d+\.mlp\.fc1\.weight", r"h\.\d+\.mlp\.fc2\.weights"]
    assert (
        nearest("h.7.mlp.fc2.weight", patterns)
        == patterns[1]
        == nearest("h.12345.mlp.fc2.weight", patterns)
    )
    assert nearest("a", []) == "none"


def test_equal_layouts() -> None:
    assert Shard("tp", 1) == ShardHy((("tp", 1),))
    assert Shard("tp", 0) != ShardNC("tp", 0, (2, 2))
    assert Replicate() != Partial("tp")
    assert Shard("tp", 0) != Shard("tp", 1)


NAMES = RuleSet(
    "model.toml",
    (),
    (
        Rename(r"(?P<position>\d+)\.(?P<rest>.+)", "layers.{position-1}.{rest}"),
        Rename(r"tied_modules\.embed\.(?P<rest>.+)", "embed.{rest}"),
    ),
)


def test_names_of_a_pipeline() -> None:
    assert NAMES.canonical("12.mlp.weight") == "layers.11.mlp.weight"
    assert NAMES.canonical("tied_modules.embed.weight") == "embed.weight"
    assert NAMES.may_share("tied_modules.embed.weight") and not NAMES.may_share("12.mlp.weight")
    assert (
        Rename("(?P<n>[0-9])", "{n+10}").apply("7") == "17" and Rename("x", "y").apply("z") is None
    )
    with pytest.raises(RuleError, match=r"no .* entry matches"):
        NAMES.canonical("head.weight")
    with pytest.raises(RuleError, match=r"two .* entries match"):
        RuleSet("model.toml", (), (*NAMES.pipeline, Rename("1.*", "x"))).canonical("12.mlp.weight")
    with pytest.raises(RuleError, match="a group that is no number"):
        RuleSet("model.toml", (), (Rename("(?P<n>.*)", "{n+1}"),)).canonical("x")
    with pytest.raises(RuleError, match="too long"):
        NAMES.canonical("1." + "x" * LONGEST_NAME)
