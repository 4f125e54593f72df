"""What a caller may allow to happen besides exact copies: each word, and where it acts. A word that
can't act where it is given is refused, so that nobody counts on it.

| door | what it is |
|---|---|
| load | `load` of an engine from files |
| memory | `load` from what `hold` keeps, and `resize` |
| convert, export, import | the tools |

`attach` takes every word of a load: what it got is for all loads of the engine, and a word that one
of them has no use for does nothing there.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from megatron_ucp.errors import UsageError, did_you_mean

LOAD, MEMORY, CONVERT, EXPORT, IMPORT = "load", "memory", "convert", "export", "import"
OF_LOADS = frozenset({LOAD, MEMORY})
OF_FILES = frozenset({LOAD})


@dataclass(frozen=True)
class Allowance:
    """What a word lets happen, and the `doors` at which it acts. `needs` is what a load must be
    asked for, by the fields of `LoadWanted` below, and `otherwise` what to do where it is not.
    `of_parts`: the word may name parameters by what their names begin with ("new:vision_tower")."""

    meaning: str
    doors: frozenset[str] = OF_LOADS
    needs: str = ""
    otherwise: str = "leave it out"
    of_parts: bool = False


_STATES = "leave it out, or load the optimizer's states"
TABLE = {
    "narrow": Allowance("values may be rounded to a narrower dtype", OF_LOADS | {CONVERT, IMPORT}),
    "mean": Allowance(
        "copies of a Partial parameter may be averaged", OF_LOADS | {CONVERT, EXPORT}
    ),
    "vocab": Allowance(
        "rows of a vocabulary may be dropped; new ones are zeros where they are padding, else as "
        "the engine has them"
    ),
    "missing": Allowance(
        "frozen parameters and buffers that the checkpoint lacks keep the engine's values",
        of_parts=True,
    ),
    "stale": Allowance(
        "masters may differ from the weights beside them; the masters are loaded",
        OF_FILES | {CONVERT, EXPORT},
    ),
    "replicas": Allowance(
        "copies that differed between ranks are loaded: elsewhere than on those ranks, one of them",
        OF_LOADS | {CONVERT},
    ),
    "positions": Allowance(
        "states in stage-0 files without a manifest are taken in the order of the groups", OF_FILES
    ),
    "scheduler": Allowance(
        "the engine's scheduler may get the state of one of another class",
        needs="scheduler",
        otherwise="leave it out, or load the scheduler",
    ),
    "optimizer": Allowance(
        "the engine's optimizer may step by another rule than the run's",
        needs="optimizer",
        otherwise=_STATES,
    ),
    "values": Allowance(
        "values of classes that this program has not are left as the engine has them, or out"
    ),
    "per_rank": Allowance(
        "what differed from rank to rank is rank 0's on another mesh", OF_LOADS | {CONVERT}
    ),
    "weights": Allowance(
        "the optimizer's states may be damaged or lost; the weights beside them are loaded",
        OF_FILES | {EXPORT},
        needs="weights",
        otherwise="give load_optimizer_states=False with it: the optimizer's states are what it "
        "leaves out",
    ),
    "hybrid": Allowance(
        "a GPTModel's layers become those of a hybrid model, which counts otherwise, or back",
        OF_FILES,
    ),
    "memory": Allowance(
        "a newer step in memory may be taken in the place of the tag that is named",
        OF_FILES,
        needs="steps_in_memory",
        otherwise='leave it out, or attach the engine with keep="memory"',
    ),
    "extra": Allowance("frozen parameters and buffers that the model lacks are dropped"),
    "unfreeze": Allowance(
        "parameters that were frozen are trained from here on, with fresh states"
    ),
    "freeze": Allowance(
        "parameters that were trained are frozen from here on; their states are dropped"
    ),
    "new": Allowance(
        "trainable parameters that the checkpoint lacks keep the engine's values, states afresh",
        of_parts=True,
    ),
}


@dataclass(frozen=True)
class LoadWanted:
    """What a load is asked for, as far as allowances need it: the states of an optimizer that the
    engine has, the state of the scheduler, steps that are kept in memory."""

    optimizer: bool = True
    scheduler: bool = True
    steps_in_memory: bool = True

    @property
    def weights(self) -> bool:
        """Whether weights are loaded without the optimizer's states."""
        return not self.optimizer


def words_at(door: str) -> list[str]:
    """The words that act at a door."""
    return [word for word, row in TABLE.items() if door in row.doors]


def check_words(allow: Any, doors: Collection[str]) -> None:
    """Raises UsageError for what is no collection of words that act at one of the doors."""
    known = [word for word, row in TABLE.items() if not row.doors.isdisjoint(doors)]
    if isinstance(allow, str) or not isinstance(allow, Collection):
        raise UsageError(
            "allow is a set of words that say what may happen",
            expected=f"some of {' '.join(known)}",
            found=repr(allow)[:200],
            fix='give a set, such as {"narrow"}',
        )
    wrong = [one for one in allow if not isinstance(one, str) or not _is_word(one)]
    if wrong:
        raise UsageError(
            "allow names what may happen",
            expected=f"some of {' '.join(known)}",
            found=", ".join(sorted(map(str, wrong)))[:200],
            fix=did_you_mean(wrong[0], known, 'give a set of these, such as allow={"narrow"}'),
        )
    idle = sorted(one for one in allow if _word(one) not in known)
    if idle:
        acts = "; ".join(f'"{one}" acts at {_named(TABLE[_word(one)])}' for one in idle)
        raise UsageError(
            "this is nothing that can be allowed here",
            expected=f"some of {' '.join(known)}",
            found=", ".join(idle),
            fix=f"leave it out: {acts}",
        )


def check_acting(allow: Collection[str], wanted: LoadWanted) -> None:
    """Raises UsageError for a word that can't act in a load of what is wanted."""
    for word in sorted(allow):
        needs = TABLE[_word(word)].needs
        if needs and not getattr(wanted, needs):
            raise UsageError(
                f'allow={{"{word}"}} can do nothing in this load',
                expected=TABLE[_word(word)].meaning,
                found=_NOT_WANTED[needs],
                fix=TABLE[_word(word)].otherwise,
            )


_NOT_WANTED = {
    "optimizer": "a load without the optimizer's states",
    "scheduler": "a load without the scheduler",
    "weights": "a load with the optimizer's states",
    "steps_in_memory": "an engine that keeps no steps in memory",
}
_DOORS = {
    LOAD: "load from files",
    MEMORY: "load from memory",
    CONVERT: "convert",
    EXPORT: "export_hf",
    IMPORT: "import_hf",
}


def is_allowed(word: str, name: str, allow: Collection[str]) -> bool:
    """Whether a word is allowed for a parameter, in general or by what its name begins with."""
    return word in allow or is_named(word, name, allow)


def is_named(word: str, name: str, allow: Collection[str]) -> bool:
    """Whether `allow` names a parameter, or something that it is in: "new:vision_tower"."""
    given = (one.partition(":") for one in allow)
    return any(
        head == word and colon and (name == part or name.startswith(f"{part}."))
        for head, colon, part in given
    )


def _word(given: str) -> str:
    return given.partition(":")[0]


def _is_word(given: str) -> bool:
    """Whether this is a word of the table, or one with a part of the model behind a colon."""
    word, colon, part = given.partition(":")
    return word in TABLE and (not colon or (bool(part) and TABLE[word].of_parts))


def _named(row: Allowance) -> str:
    return ", ".join(text for door, text in _DOORS.items() if door in row.doors)
