"""Rules in a TOML file: how the parameters of a model are cut, and what those of a pipeline are
called. See docs/reference/rules.md."""

import difflib
import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_ucp.core.layout import Layout, Partial, Replicate, Shard, ShardHy, ShardNC
from megatron_ucp.core.mesh import CUTTING
from megatron_ucp.core.rules import FIELD, LONGEST_NAME, Rename, Rule, RuleSet
from megatron_ucp.errors import NotFoundError, RuleError, UsageError

FORMAT = 1
_OURS = Path(__file__).parent / "rules"  # files that come with the package, known by name
UNKNOWN = "?"  # a layout that a draft leaves open
_LARGEST_BYTES = 2**20
_LARGEST_NUMBER = 2**40
# Keys of a [[rule]] beside the pattern, by layout: those that it needs, those that it may have.
_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Replicate": ((), ()),
    "Partial": (("axis",), ()),
    "Shard": (("axis", "dim"), ()),
    "ShardHy": (("along",), ()),
    "ShardNC": (("axis", "dim", "parts"), ("unit",)),
}
_OF_EVERY_LAYOUT = ("vocabulary", "copies")


class _Entry:
    """One table of the file, which takes its keys one by one and says what is wrong with which."""

    def __init__(self, table: object, what: str, file: str) -> None:
        self._what, self._file, self._pattern = what, file, None
        if not isinstance(table, dict):
            raise self.wrong(
                "an entry is no table", expected=f"[[{what}]]", found=type(table).__name__
            )
        self.table: Mapping[str, Any] = table
        self._pattern = table.get("pattern") if isinstance(table.get("pattern"), str) else None

    def wrong(self, problem: str, expected: object, found: object) -> RuleError:
        place = self._what if self._pattern is None else f"{self._what} {self._pattern[:200]}"
        return RuleError(
            f"{problem} ({place})",
            file=self._file,
            expected=expected,
            found=str(found)[:200],
            fix="correct the file; docs/reference/rules.md lists its keys",
        )

    def check_keys(self, needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
        known = (*needed, *optional)
        for key in self.table:
            if key not in known:
                near = difflib.get_close_matches(key[:80], known, n=1, cutoff=0)
                raise self.wrong(
                    "an unknown key",
                    expected=f"{', '.join(known)}; the nearest is {near[0]}",
                    found=key,
                )
        for key in needed:
            if key not in self.table:
                raise self.wrong(
                    f"the key {key} is missing",
                    expected=", ".join(needed),
                    found=", ".join(self.table),
                )

    def text(self, key: str) -> str:
        value = self.table[key]
        if not isinstance(value, str):
            raise self.wrong(f"{key} is no text", expected="a string", found=repr(value))
        return value

    def number(self, key: str, smallest: int = 0) -> int:
        return self.as_number(key, self.table[key], smallest)

    def as_number(self, key: str, value: object, smallest: int) -> int:
        if type(value) is not int or not smallest <= value <= _LARGEST_NUMBER:
            raise self.wrong(
                f"{key} is no number that can be used",
                expected=f"a whole number from {smallest}",
                found=repr(value),
            )
        return value

    def axis(self, value: object) -> str:
        if value not in CUTTING:
            raise self.wrong(
                "no axis of a mesh that cuts parameters",
                expected=" or ".join(CUTTING),
                found=repr(value),
            )
        return str(value)

    def pattern(self) -> str:
        pattern = self.text("pattern")
        if problem := problem_of(pattern):
            raise self.wrong(
                "a pattern can't be used",
                expected="a regular expression for whole names",
                found=problem,
            )
        return pattern


def read_rules(path: str | Path) -> RuleSet:
    """The rules of a file, or of one of the package's own, such as "megatron_deepspeed_split".
    Raises NotFoundError where there is none, RuleError for what is wrong in it, by entry and
    key."""
    ours = {own.stem: own for own in _OURS.glob("*.toml")}
    path = ours.get(path, path) if isinstance(path, str) else path
    file = str(path)
    if not isinstance(path, str | Path):  # open() takes the number of a file, too
        raise UsageError(
            "this is no path of a file of rules",
            expected="a file in TOML",
            found=repr(path)[:200],
            fix="give the path as text (--rules; Python: rules=)",
        )
    try:
        with open(path, "rb") as opened:
            data = opened.read(_LARGEST_BYTES + 1)
    except OSError as error:
        raise NotFoundError(
            "the file of rules can't be read",
            file=file,
            found=error.strerror,
            fix=f"check the path; or give the name of one of ours: {', '.join(sorted(ours))}",
            id="",
        ) from None
    if len(data) > _LARGEST_BYTES:
        raise RuleError(
            "the file of rules is too large",
            file=file,
            expected=f"at most {_LARGEST_BYTES} bytes",
            found="more",
            fix="give a file of rules: a short text in TOML (docs/reference/rules.md)",
        )
    try:
        tree = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise RuleError(
            "the file of rules is no TOML",
            file=file,
            expected="TOML in UTF-8",
            found=str(error)[:200],
            fix="correct the file; a pattern in 'single quotes' needs no doubled backslashes",
        ) from None
    return _rule_set(tree, file)


def _rule_set(tree: Mapping[str, Any], file: str) -> RuleSet:
    whole = _Entry(tree, "the file", file)
    whole.check_keys(("format",), ("rule", "pipeline"))
    if tree["format"] != FORMAT or type(tree["format"]) is not int:
        raise whole.wrong(
            "a format that this version does not read",
            expected=f"format = {FORMAT}",
            found=repr(tree["format"]),
        )
    for key in ("rule", "pipeline"):
        if not isinstance(tree.get(key, []), list):
            raise whole.wrong(
                f"{key} is no list of tables", expected=f"[[{key}]]", found=type(tree[key]).__name__
            )
    rules = [_Entry(table, "rule", file) for table in tree.get("rule", [])]
    names = [_Entry(table, "pipeline", file) for table in tree.get("pipeline", [])]
    if not rules and not names:
        raise whole.wrong(
            "the file says nothing", expected="[[rule]] or [[pipeline]]", found="neither"
        )
    if left := [entry for entry in rules if entry.table.get("layout") == UNKNOWN]:
        raise left[0].wrong(
            "the layout of a rule is left open",
            expected=" or ".join(_KEYS),
            found=f"{UNKNOWN} here, and in {len(left) - 1} more",
        )
    found = RuleSet(file, tuple(map(_rule, rules)), tuple(map(_rename, names)))
    _check_once(found, whole)
    return found


def _check_once(found: RuleSet, whole: _Entry) -> None:
    """Raises RuleError where two entries have one pattern."""
    for what, entries in (("rule", found.rules), ("pipeline", found.pipeline)):
        seen = set[str]()
        for entry in entries:
            if entry.pattern in seen:
                raise whole.wrong(
                    "two entries have one pattern",
                    expected=f"one [[{what}]] for each",
                    found=entry.pattern,
                )
            seen.add(entry.pattern)


def _rule(entry: _Entry) -> Rule:
    own = ("axis", "dim", "parts", "unit", "along")
    entry.check_keys(("pattern", "layout"), (*own, *_OF_EVERY_LAYOUT))
    pattern, name = entry.pattern(), entry.text("layout")
    if name not in _KEYS:
        near = difflib.get_close_matches(name[:80], list(_KEYS), n=1, cutoff=0)
        raise entry.wrong(
            "no such layout", expected=f"{', '.join(_KEYS)}; the nearest is {near[0]}", found=name
        )
    needed, optional = _KEYS[name]
    entry.check_keys(("pattern", "layout", *needed), (*optional, *_OF_EVERY_LAYOUT))
    copies = entry.table.get("copies", "alike")
    if copies not in ("alike", "first"):
        raise entry.wrong("copies is unknown", expected="alike or first", found=repr(copies))
    layout, equal_parts = _layout(entry, name)
    return Rule(
        pattern,
        layout,
        equal_parts,
        entry.number("vocabulary", 1) if "vocabulary" in entry.table else None,
        copies == "first",
    )


def _layout(entry: _Entry, name: str) -> tuple[Layout, int]:
    """The layout, and the number of equal parts of a ShardNC that lists no sizes."""
    table = entry.table
    if name == "Replicate":
        return Replicate(), 0
    if name == "ShardHy":
        return _hybrid(entry), 0
    axis = entry.axis(table["axis"])
    if name == "Partial":
        return Partial(axis), 0
    dim = entry.number("dim")
    if name == "Shard":
        return Shard(axis, dim), 0
    parts, unit = table["parts"], entry.number("unit", 1) if "unit" in table else 1
    if isinstance(parts, list) and len(parts) > 1:
        return ShardNC(
            axis, dim, tuple(entry.as_number("parts", part, 1) for part in parts), unit
        ), 0
    if isinstance(parts, list):
        raise entry.wrong(
            "parts lists fewer than two sizes",
            expected="sizes, or the number of equal parts",
            found=repr(parts),
        )
    return ShardNC(axis, dim, (), unit), entry.number("parts", 2)


def _hybrid(entry: _Entry) -> Layout:
    """Cuts along several axes."""
    along = entry.table["along"]
    if (
        not isinstance(along, list)
        or not along
        or not all(isinstance(one, list) and len(one) == 2 for one in along)
    ):
        raise entry.wrong(
            "along is no list of cuts", expected='[["tp", 0], ["ep", 1]]', found=repr(along)
        )
    cuts = tuple((entry.axis(axis), entry.as_number("along", dim, 0)) for axis, dim in along)
    if len({axis for axis, _ in cuts}) < len(cuts):
        raise entry.wrong("along names an axis twice", expected="each axis once", found=repr(along))
    first, *others = cuts
    return ShardHy(cuts) if others else Shard(*first)  # one layout has one name


def _rename(entry: _Entry) -> Rename:
    entry.check_keys(("pattern", "name"), ("tied",))
    pattern, name, tied = entry.pattern(), entry.text("name"), entry.table.get("tied", False)
    if type(tied) is not bool:
        raise entry.wrong(
            "tied is neither true nor false", expected="true or false", found=repr(tied)
        )
    groups = re.compile(pattern).groupindex
    if "{" in FIELD.sub("", name) or "}" in FIELD.sub("", name):
        raise entry.wrong(
            "a name has braces that name no group",
            expected="{group}, {group+1} or {group-1}",
            found=name,
        )
    for field in FIELD.finditer(name):
        if field[1] not in groups:
            raise entry.wrong(
                "a name uses a group that its pattern lacks",
                expected=", ".join(groups) or "none",
                found=field[1],
            )
    return Rename(pattern, name, tied)


# ---- patterns that can be matched in bounded time

_LONGEST_PATTERN = 1000  # characters
_MOST_WAYS = (LONGEST_NAME + 2) ** 2  # two `.*` in one pattern, each of which may be optional
_parser: Any = import_module("re._parser")  # what `re` itself compiles from
_compiler: Any = import_module("re._compiler")
_ONE_CHARACTER = ("LITERAL", "NOT_LITERAL", "IN", "ANY")
_TOO_MANY_WAYS = (
    "too many ways to match: at most two open repeats like .* in one pattern, none in another"
)


@lru_cache(maxsize=4096)
def problem_of(pattern: str) -> str:
    """Why a pattern is refused; "" for a good one.

    Python's matcher tries one way after the other, so the number of ways to match a name is
    bounded: a repeat may end anywhere unless the next character can't belong to it, a choice may go
    each way, and the ways of neighbours multiply. Example: `\\d+\\.` has one way, `.*a.*` about
    512 * 512.
    """
    if len(pattern) > _LONGEST_PATTERN:
        return f"a pattern of {len(pattern)} characters; at most {_LONGEST_PATTERN} are allowed"
    try:
        re.compile(pattern)
        parsed = _parser.parse(pattern)
        if parsed.state.flags != re.UNICODE:
            return "flags are not allowed in a pattern"
        return "" if _ways(parsed, is_last=True) <= _MOST_WAYS else _TOO_MANY_WAYS
    except (re.error, OverflowError, RecursionError) as error:
        return f"no regular expression: {error}"
    except ValueError as error:
        return str(error)


def _ways(parsed: Any, is_last: bool) -> int:
    """A bound of the ways in which a parsed sequence matches a name; nothing follows the `last`.
    Raises ValueError for what is not allowed."""
    ways = 1
    for number, (operator, argument) in enumerate(parsed):
        name, rest = str(operator), parsed[number + 1 :]
        ends = is_last and not len(rest)
        if name == "SUBPATTERN" and not (argument[1] or argument[2]):  # without flags
            ways *= _ways(argument[-1], ends)
        elif name == "ATOMIC_GROUP":
            ways *= _ways(argument, ends)
        elif name == "BRANCH":
            ways *= sum(_ways(branch, ends) for branch in argument[1])
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            ways *= _ways_of_repeat(argument, rest, is_last)
        elif name not in (*_ONE_CHARACTER, "AT"):
            what = "a back-reference" if name.startswith("GROUPREF") else "a look-around or flag"
            raise ValueError(f"{what} is not allowed in a pattern")
        if ways > _MOST_WAYS:
            return ways
    return ways


def _ways_of_repeat(argument: Any, rest: Any, is_last: bool) -> int:
    low, high, body = argument
    high = min(high, LONGEST_NAME)
    if high > 1 and body.getwidth()[0] == 0:
        raise ValueError("a repeat of what may be empty is not allowed in a pattern")
    inner = _ways(body, is_last=False)
    if inner > 1:
        return inner + 1 if high == 1 else _MOST_WAYS + 1
    return 1 if low == high or _ends_surely(body, rest, is_last) else high - low + 1


def _ends_surely(body: Any, rest: Any, is_last: bool) -> bool:
    """Whether a repeat of one character ends where the next one can't belong to it."""
    if len(body) != 1 or str(body[0][0]) not in _ONE_CHARACTER:
        return False
    if not len(rest):
        return is_last
    operator, argument = rest[0]
    return str(operator) == "LITERAL" and not _compiler.compile(body).fullmatch(chr(argument))
