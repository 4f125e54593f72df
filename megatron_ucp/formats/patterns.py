"""Whether a regular expression that somebody wrote into a file can be matched in bounded time.

Python's matcher tries one way after the other. The number of ways is bounded from the parsed
pattern: a repeat of which the end is not certain from the next character may end anywhere, a choice
may go each way, and the ways of neighbours multiply.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

from megatron_ucp.core.rules import LONGEST_NAME

LONGEST_PATTERN = 1000  # characters
MOST_WAYS = (LONGEST_NAME + 2) ** 2  # two `.*` in one pattern, each of which may be optional
_REFUSED = {
    "ASSERT": "a look-around",
    "ASSERT_NOT": "a look-around",
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a back-reference",
}
_parser: Any = import_module("re._parser")  # what `re` itself compiles from


@lru_cache(maxsize=4096)
def problem_of(pattern: str) -> str:
    """Why a pattern is refused; "" for a good one."""
    if len(pattern) > LONGEST_PATTERN:
        return f"a pattern of {len(pattern)} characters; at most {LONGEST_PATTERN} are allowed"
    try:
        re.compile(pattern)
        parsed = _parser.parse(pattern)
        if parsed.state.flags != re.UNICODE:
            return "flags are not allowed in a pattern"
        ways = _ways(list(parsed), is_last=True)
    except (re.error, OverflowError, RecursionError) as error:
        return f"no regular expression: {error}"
    except ValueError as error:
        return str(error)
    return (
        ""
        if ways <= MOST_WAYS
        else "too many ways to match: at most two open repeats like .* in one pattern, none in "
        "another"
    )


def _ways(items: Sequence[Any], is_last: bool) -> int:
    """A bound of the ways in which a sequence matches a name. `is_last`: nothing follows it."""
    out = 1
    for number, (operator, argument) in enumerate(items):
        rest, kind = items[number + 1 :], str(operator)
        if kind in _REFUSED:
            raise ValueError(f"{_REFUSED[kind]} is not allowed in a pattern")
        if kind == "SUBPATTERN":
            if argument[1] or argument[2]:
                raise ValueError("flags are not allowed in a pattern")
            out *= _ways(list(argument[-1]), is_last and not rest)
        elif kind == "ATOMIC_GROUP":
            out *= _ways(list(argument), is_last and not rest)
        elif kind == "BRANCH":
            out *= sum(_ways(list(one), is_last and not rest) for one in argument[1])
        elif kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            out *= _repeated(argument, rest, is_last)
        if out > MOST_WAYS:
            return out
    return out


def _repeated(argument: Any, rest: Sequence[Any], is_last: bool) -> int:
    low, high, body = argument[0], min(argument[1], LONGEST_NAME), list(argument[2])
    if high > 1 and argument[2].getwidth()[0] == 0:
        raise ValueError("a repeat of what may be empty is not allowed in a pattern")
    inner = _ways(body, is_last=False)
    if inner > 1:
        return inner + 1 if high == 1 else MOST_WAYS + 1
    return 1 if low == high or _ends_surely(body, rest, is_last) else high - low + 1


def _ends_surely(body: Sequence[Any], rest: Sequence[Any], is_last: bool) -> bool:
    """Whether the repeat of one character ends where the next one can't belong to it."""
    if len(body) != 1 or str(body[0][0]) not in ("IN", "ANY", "LITERAL", "NOT_LITERAL"):
        return False
    if not rest:
        return is_last
    operator, argument = rest[0]
    return str(operator) == "LITERAL" and not _takes(body[0], argument)


def _takes(item: Any, character: int) -> bool:
    """Whether one item of a parsed pattern matches a character; yes where that is not plain."""
    operator, argument = str(item[0]), item[1]
    if operator == "LITERAL":
        return character == argument
    if operator == "NOT_LITERAL":
        return character != argument
    if operator != "IN" or not all(
        str(one[0]) in ("NEGATE", "LITERAL", "RANGE", "CATEGORY") for one in argument
    ):
        return True
    has = any(_member(one, character) for one in argument)
    return not has if str(argument[0][0]) == "NEGATE" else has


def _member(one: Any, character: int) -> bool:
    kind, argument = str(one[0]), one[1]
    if kind == "LITERAL":
        return character == argument
    if kind == "RANGE":
        return argument[0] <= character <= argument[1]
    classes = {
        "CATEGORY_DIGIT": r"\d",
        "CATEGORY_NOT_DIGIT": r"\D",
        "CATEGORY_WORD": r"\w",
        "CATEGORY_NOT_WORD": r"\W",
        "CATEGORY_SPACE": r"\s",
        "CATEGORY_NOT_SPACE": r"\S",
    }
    return kind == "CATEGORY" and re.fullmatch(classes[str(argument)], chr(character)) is not None
