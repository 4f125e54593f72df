"""Files of rules: what they say, and what is refused, by name, before anything is read with it."""

import time
from pathlib import Path

import pytest

from megatron_ucp.core.layout import Partial, Replicate, Shard, ShardHy, ShardNC
from megatron_ucp.core.rules import LONGEST_NAME, Rename, Rule, RuleSet
from megatron_ucp.errors import (
    DamagedFileError,
    LayoutError,
    NotFoundError,
    RuleError,
    UnsupportedError,
)
from megatron_ucp.formats.deepspeed import tp_patterns
from megatron_ucp.formats.rule_file import problem_of, read_rules

GOOD = r"""
format = 1
[[rule]]
pattern = 'a\.\d+'
layout = "Replicate"
[[rule]]
pattern = 'b'
layout = "Partial"
axis = "tp"
[[rule]]
pattern = 'c'
layout = "Shard"
axis = "tp"
dim = 1
vocabulary = 32000
[[rule]]
pattern = 'd'
layout = "ShardHy"
along = [["tp", 0], ["ep", 1]]
[[rule]]
pattern = 'e'
layout = "ShardNC"
axis = "tp"
dim = 0
parts = [11008, 11008]
unit = 2
[[rule]]
pattern = 'f'
layout = "ShardNC"
axis = "tp"
dim = 0
parts = 2
[[pipeline]]
pattern = '(?P<position>\d+)\.(?P<rest>.+)'
name = 'decoder.layers.{position-1}.{rest}'
tied = true
"""
RULE = "format = 1\n[[rule]]\npattern = 'a'\n"
SHARD = RULE + 'layout = "Shard"\naxis = "tp"\ndim = 0\n'
NC = RULE + 'layout = "ShardNC"\naxis = "tp"\ndim = 0\n'
NAME = "format = 1\n[[pipeline]]\npattern = '(?P<n>[0-9]+)'\n"


def read(tmp_path: Path, text: str | bytes) -> RuleSet:
    path = tmp_path / "rules.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_rules(path)


def test_every_key(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(GOOD)
    found = read_rules(tmp_path / "rules.toml")
    assert found.source == str(tmp_path / "rules.toml")
    assert found.rules == (
        Rule(r"a\.\d+", Replicate()),
        Rule("b", Partial("tp")),
        Rule("c", Shard("tp", 1), vocabulary=32000),
        Rule("d", ShardHy((("tp", 0), ("ep", 1)))),
        Rule("e", ShardNC("tp", 0, (11008, 11008), 2)),
        Rule("f", ShardNC("tp", 0, ()), 2),
    )
    assert read(tmp_path, RULE + 'layout = "ShardHy"\nalong = [["tp", 1]]').rules == (
        Rule("a", Shard("tp", 1)),
    )
    assert found.pipeline == (
        Rename(r"(?P<position>\d+)\.(?P<rest>.+)", "decoder.layers.{position-1}.{rest}", True),
    )


BAD = {
    "no TOML": ("format = ", "no TOML"),
    "not UTF-8": (b"format = 1 # \xff", "no TOML"),
    "deep": ("format = " + "[" * 100_000, "no TOML"),
    "a number of many digits": ("format = " + "9" * 5000, "no TOML"),
    "no format": ("[[rule]]\npattern = 'a'\nlayout = 'Replicate'", "the key format is missing"),
    "another format": (
        SHARD.replace("format = 1", "format = 2"),
        "a format that this version does not read",
    ),
    "format is true": (
        SHARD.replace("format = 1", "format = true"),
        "a format that this version does not read",
    ),
    "nothing": ("format = 1", "says nothing"),
    "unknown table": (SHARD + "[[rul]]\n", "the nearest is rule"),
    "rule is a table": ("format = 1\n[rule]\npattern = 'a'", "no list of tables"),
    "rule is a list of numbers": ("format = 1\nrule = [1]", "an entry is no table"),
    "unknown key": (SHARD + "axs = 1", "the nearest is axis"),
    "a key of another layout": (SHARD + "parts = 2", "an unknown key"),
    "no pattern": ("format = 1\n[[rule]]\nlayout = 'Replicate'", "the key pattern is missing"),
    "pattern is a number": (SHARD.replace("'a'", "3"), "pattern is no text"),
    "pattern is none": (SHARD.replace("'a'", "'('"), "no regular expression"),
    "layout is open": (RULE + "layout = '?'", "left open (rule a)"),
    "layout is unknown": (RULE + "layout = 'Shards'", "the nearest is Shard"),
    "layout is a number": (RULE + "layout = 0", "layout is no text"),
    "no dim": (SHARD.replace("dim = 0", ""), "the key dim is missing"),
    "dim is negative": (SHARD.replace("dim = 0", "dim = -1"), "a whole number from 0"),
    "dim is a fraction": (SHARD.replace("dim = 0", "dim = 0.0"), "dim is no number"),
    "dim is true": (SHARD.replace("dim = 0", "dim = true"), "dim is no number"),
    "dim is huge": (SHARD.replace("dim = 0", "dim = 9223372036854775807"), "dim is no number"),
    "axis is unknown": (SHARD.replace('"tp"', '"tpp"'), "no axis of a mesh"),
    "axis places": (SHARD.replace('"tp"', '"pp"'), "no axis of a mesh"),
    "axis is a list": (SHARD.replace('"tp"', '["tp"]'), "no axis of a mesh"),
    "vocabulary is zero": (SHARD + "vocabulary = 0", "a whole number from 1"),
    "one part": (NC + "parts = 1", "a whole number from 2"),
    "a list of one part": (NC + "parts = [4]", "fewer than two sizes"),
    "an empty part": (NC + "parts = [4, 0]", "a whole number from 1"),
    "a part of text": (NC + "parts = [4, 'x']", "parts is no number"),
    "unit is zero": (NC + "parts = 2\nunit = 0", "a whole number from 1"),
    "along is no list": (RULE + 'layout = "ShardHy"\nalong = "tp"', "no list of cuts"),
    "along is empty": (RULE + 'layout = "ShardHy"\nalong = []', "no list of cuts"),
    "along has triples": (RULE + 'layout = "ShardHy"\nalong = [["tp", 0, 1]]', "no list of cuts"),
    "along twice": (RULE + 'layout = "ShardHy"\nalong = [["tp", 0], ["tp", 1]]', "an axis twice"),
    "two rules of one pattern": (
        SHARD + SHARD.removeprefix("format = 1\n"),
        "two entries have one pattern",
    ),
    "name uses no group": (NAME + "name = '{m}'", "a group that its pattern lacks"),
    "name has other braces": (NAME + "name = '{n*2}'", "braces that name no group"),
    "name is a list": (NAME + "name = []", "name is no text"),
    "tied is text": (NAME + "name = 'x'\ntied = 'yes'", "tied is neither"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, case: str) -> None:
    text, words = BAD[case]
    with pytest.raises(RuleError) as raised:
        read(tmp_path, text)
    assert words in str(raised.value) and str(tmp_path / "rules.toml") in str(raised.value)


def test_missing_and_huge_files(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.toml", tmp_path):
        with pytest.raises(NotFoundError, match="can't be read"):
            read_rules(path)
    with pytest.raises(RuleError, match="too large"):
        read(tmp_path, SHARD + "#" * 2**20)
    read(tmp_path, SHARD + "#" * (2**20 - len(SHARD)))


# ------------------------------------------------ patterns

USUAL = [
    r"decoder\.layers\.\d+\.mlp\.fc1\.weight",
    r"(?P<position>\d+)\.(?P<rest>.+)",
    r".*\.mlp\..*",
    r"(?:.*\.)?mlp.*weight",
    r"[^.]+\.[^.]+\.[^.]+\.[^.]+\.x",
    r"(?:word|position)_embeddings\.(?:weight|bias)",
    r"(?:\d+\.)*x",
    r"\d+.mlp.experts.\d+.w",
    r"a{3}b?c+",
    r"h\.[0-9]+\.(ln_1|ln_2)\.\w+",
    r"^tied_modules.embed.weight$",
    "x" * 1000,
]
HOSTILE = [
    r"(a+)+b",
    r"(?:a|ab)*c",
    r"(a*)*b",
    r".*.*.*b",
    "a?" * 30 + "a" * 30,
    "(?:x|xy)" * 30 + "z",
    r"(?:a|aa){40}b",
    r"\d+\d+\d+\d+x",
    r"(\w+\s?)*x",
    r"(?:(?:){1000}){1000}",
    r"(a)\1",
    r"(?=a)b",
    r"(?<!a)b",
    r"(?i)a",
    r"(?i:a+)A",
    "(",
    "x" * 1001,
    r"(?P<a>.)(?(a)b|c)",
    r"(?:[a-z]+\d*)+x",
    r"(.*?,){20}P",
    "(" * 500 + ")" * 500,
    "a{99999999999}",
]


@pytest.mark.parametrize("pattern", USUAL)
def test_usual_patterns(pattern: str) -> None:
    assert problem_of(pattern) == ""


@pytest.mark.parametrize("pattern", HOSTILE, ids=range(len(HOSTILE)))
def test_patterns_without_a_bound_are_refused(pattern: str) -> None:
    assert problem_of(pattern) != ""


@pytest.mark.parametrize("piece", ["a", "1", ".mlp.", "1."])
def test_the_slowest_name_of_a_pattern_is_matched_soon(piece: str) -> None:
    name = piece * (LONGEST_NAME // len(piece))
    started = time.process_time()
    for pattern in [*USUAL, ".*a.*b", "(?:.*1)?.*1?b"]:
        if not problem_of(pattern):
            Rule(pattern, Replicate()).matches(name)
    assert time.process_time() - started < 2


# ------------------------------------------------ the patterns of stock DeepSpeed


@pytest.mark.parametrize(
    ("info", "error", "words"),
    [
        ({tp_patterns.ROW: [r"(a+)+b"]}, RuleError, "can't be used"),
        ({tp_patterns.ROW: [3]}, RuleError, "no text"),
        ({tp_patterns.ROW: "a"}, DamagedFileError, "another structure"),
        ({tp_patterns.SUB_PARAMS: {"patterns": ["a"]}}, DamagedFileError, "another structure"),
        ({tp_patterns.SUB_PARAMS: ["a"]}, DamagedFileError, "another structure"),
        ({tp_patterns.SUB_PARAMS: [{"patterns": ["a"]}]}, DamagedFileError, "partition_dim"),
        (
            {tp_patterns.SUB_PARAMS: [{"patterns": ["a"], "partition_dim": 5, "shape": [[2, 2]]}]},
            DamagedFileError,
            "a tuple with dim 5",
        ),
        (
            {tp_patterns.SUB_PARAMS: [{"patterns": ["a"], "partition_dim": 0, "shape": [[1, 3]]}]},
            UnsupportedError,
            "not cut evenly",
        ),
        ({tp_patterns.ROW: ["a"]}, LayoutError, "a dim that the parameter does not have"),
        ({tp_patterns.ROW: ["a"], tp_patterns.REPLICATED: ["a"]}, RuleError, "two patterns"),
    ],
)
def test_stock_patterns_that_can_not_be_used(
    info: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        tp_patterns.StockInfo(info, "mp_rank_00_model_states.pt").declared("a", (2,), 2)
    assert words in str(raised.value)


def test_stock_patterns() -> None:
    info = {
        tp_patterns.REPLICATED: ["a"],
        tp_patterns.SUB_PARAMS: [{"patterns": ["b"], "partition_dim": 1, "shape": [3, [2, 4]]}],
    }
    stock = tp_patterns.StockInfo(info, "")
    assert stock.declared("abc", (2,), 2).layout == Replicate()  # the start of a name
    assert stock.declared("b", (3, 3), 2).layout == ShardNC("tp", 1, (2, 4))
    assert stock.declared("c", (3, 3), 2).shape == (6, 3)
    assert stock.is_matched("b") and not stock.is_matched("c")
