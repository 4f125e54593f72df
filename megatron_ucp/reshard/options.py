"""The options of loads and saves: what is allowed at which door, and how a value is checked."""

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megatron_ucp.errors import UsageError, did_you_mean
from megatron_ucp.formats.store import Location, StoreOptions, absolute, configure

if TYPE_CHECKING:
    from megatron_ucp.formats.deepspeed.target import Target


# ---- formats
#
# What `convert` writes, and what for. How each is written, `convert.WRITABLE` says.


OUTPUTS = {
    "native": "DeepSpeed's own files for one mesh; the default with --mesh",
    "universal": "the default without",
    "torch_dist": "for Megatron-LM",
    "dcp": "for FSDP2",
    "accelerate": "for FSDP2 under Accelerate or Trainer",
    "torchtitan": "for torchtitan, under its names",
}

# ---- allowances
#
# What a caller may allow to happen besides exact copies: each word, and where it acts. A word
# that can't act where it is given is refused, so that nobody counts on it.
#
# | door | what it is |
# |---|---|
# | load | `load` of an engine from files |
# | memory | `load` from what `hold` keeps, and `resize` |
# | convert, export, import | the tools |
#
# `attach` takes every word of a load: what it got is for all loads of the engine, and a word that
# one of them has no use for does nothing there.


LOAD, MEMORY, CONVERT, EXPORT, IMPORT = "load", "memory", "convert", "export", "import"
OF_LOADS = frozenset({LOAD, MEMORY})
OF_FILES = frozenset({LOAD})


@dataclass(frozen=True)
class Allowance:
    """What a word lets happen, and the `doors` at which it acts. `needs` is what a load must have,
    or the word changes nothing. `of_parts`: the word may name parameters by what their names begin
    with ("new:vision_tower")."""

    meaning: str
    doors: frozenset[str] = OF_LOADS
    needs: str = ""
    of_parts: bool = False


OPTIMIZER, SCHEDULER = "the optimizer's states", "the scheduler"
WEIGHTS_ALONE, KEPT_STEPS = "load_optimizer_states=False", 'an engine with keep="memory"'
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
    "scheduler": Allowance(
        "the engine's scheduler may get the state of one of another class",
        needs=SCHEDULER,
    ),
    "optimizer": Allowance(
        "the engine's optimizer may step by another rule than the run's",
        needs=OPTIMIZER,
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
        needs=WEIGHTS_ALONE,
    ),
    "hybrid": Allowance(
        "a GPTModel's layers become those of a hybrid model, which counts otherwise, or back",
        OF_FILES,
    ),
    "memory": Allowance(
        "a newer step in memory may be taken in the place of the tag that is named",
        OF_FILES,
        needs=KEPT_STEPS,
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


def words_at(door: str) -> list[str]:
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


def check_acting(allow: Collection[str], wanted: Collection[str]) -> None:
    """Raises UsageError for a word that can change nothing in a load of what is `wanted`."""
    for word in sorted(allow):
        row = TABLE[_word(word)]
        if row.needs and row.needs not in wanted:
            raise UsageError(
                f'allow={{"{word}"}} can do nothing in this load',
                expected=row.meaning,
                found=f"a load without {row.needs}",
                fix=f"leave it out, or load with {row.needs}",
            )


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


# ---- arguments
#
# Arguments that several functions take, checked before anything else happens.


_SECTIONS = ("bf16", "fp16", "bfloat16", "zero_optimization", "optimizer", "checkpoint")


def plain_path(path: Any) -> str:
    """A path as text. Raises UsageError for what is none."""
    if isinstance(path, str | os.PathLike) and str(path):
        return os.fspath(path)
    raise UsageError(
        "this is no path",
        expected="the path of a folder",
        found=repr(path)[:200],
        fix="give a path as text, such as runs/llama",
    )


def absolute_path(path: Any) -> Location:
    """The path of a folder as it is meant at the call, wherever the program goes before it is used.
    Raises UsageError for what is no path."""
    return absolute(plain_path(path))


def require_known(options: Iterable[str], known: Sequence[str]) -> None:
    """Raises UsageError, with the nearest known one, for options that a function does not take."""
    if unknown := [name for name in options if name not in known]:
        raise UsageError(
            "an option is not known",
            expected=", ".join(known),
            found=", ".join(sorted(unknown)),
            fix=did_you_mean(unknown[0], known, "give one of these options"),
        )


def check_switch(name: str, value: object) -> None:
    """Raises UsageError for a switch that is neither on nor off: "no" is true in Python."""
    if not isinstance(value, bool):
        raise UsageError(
            f"{name} is a switch",
            expected="True or False",
            found=repr(value)[:200],
            fix=f"give {name}=True or {name}=False",
        )


# ---- the options of `attach`
#
# One row for each: what takes it, how its value is checked, and its type in the section of a
# DeepSpeed config. What functions take, what they refuse and what the pages list follows from the
# rows.


ValueCheck = Callable[[str, object], None]  # of name and value; raises UsageError


def _wrong(name: str, what: str, expected: str, value: object, fix: str) -> UsageError:
    return UsageError(
        f"{name} is {what}", parameter=name, expected=expected, found=repr(value)[:200], fix=fix
    )


@dataclass(frozen=True)
class NumberOption:
    """A number of `units`: `least` or more (`is_above`: more than that), `most` at most; None where
    it may be left out."""

    units: str
    least: int
    most: int | None = None
    is_whole: bool = True
    is_above: bool = False
    is_optional: bool = False

    def __call__(self, name: str, value: object) -> None:
        if (value is None and self.is_optional) or self._fits(value):
            return
        what = f"a {'whole ' if self.is_whole else ''}number of {self.units}"
        low = f"more than {self.least}" if self.is_above else f"at least {self.least}"
        expected = low if self.most is None else f"{low}, at most {self.most:,}"
        left_out = f", or leave {name} out" if self.is_optional else ""
        raise _wrong(name, what, expected, value, f"give such a number{left_out}")

    def _fits(self, value: object) -> bool:
        kinds = (int,) if self.is_whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            return False
        is_low = value <= self.least if self.is_above else value < self.least
        return not is_low and (self.most is None or value <= self.most)


def one_of(*words: str) -> ValueCheck:
    """The check of an option that is one of some words."""

    def check(name: str, value: object) -> None:
        if value not in words:
            fix = f"give {name} as one of these"
            raise _wrong(name, "none of its words", " or ".join(words), value, fix)

    return check


def _allow(_: str, value: object) -> None:
    check_words(value, OF_LOADS)


def _path(_: str, value: object) -> None:
    if value is not None:
        plain_path(value)


def _function(name: str, value: object) -> None:
    if value is not None and not callable(value):
        fix = f"give a function, or leave {name} out"
        raise _wrong(name, "a function of no arguments", "a function", value, fix)


def _store(_: str, value: object) -> None:
    if value is not None:
        StoreOptions.of(cast("Any", value))


def _anything(_: str, value: object) -> None:
    """The module that uses it checks it."""


# What takes an option: the description of the model, every load, every save, saves in the
# background, in-memory checkpoints.
MODEL, LOADS, SAVES, IN_BACKGROUND, IN_MEMORY = "model", "loads", "saves", "background", "memory"
STORES = "stores"  # every request to an object store, of the whole process
STOCK, DIRECT, BACKGROUND = WAYS = ("stock", "direct", "background")


@dataclass(frozen=True)
class Option:
    """One option: what takes it (`of`), how a value is checked, and its type in the section of a
    DeepSpeed config (None: it can't be said there)."""

    of: tuple[str, ...]
    check: ValueCheck
    kind: type | tuple[type, ...] | None = None


_YEAR_S = 366 * 24 * 3600  # the operating system waits no longer at once
_DEADLINE = NumberOption("seconds", 0, _YEAR_S, is_whole=False, is_above=True, is_optional=True)
OPTIONS = {
    "hyper": Option((LOADS,), one_of("checkpoint", "config"), str),
    "checksums": Option((LOADS,), check_switch, bool),
    "allow": Option((LOADS,), _allow, list),
    "family": Option((LOADS, MODEL), _anything, str),
    "rules": Option((MODEL,), _anything, str),
    "rng": Option((LOADS, SAVES), check_switch, bool),
    "loader": Option((LOADS, SAVES), _anything),
    "read": Option((LOADS,), one_of("once", "each"), str),
    "durable": Option((SAVES,), check_switch, bool),
    "keep_latest": Option((SAVES,), NumberOption("tags", 1, is_optional=True), int),
    "save": Option((SAVES,), one_of(*WAYS), str),
    "busy": Option((IN_BACKGROUND,), one_of("wait", "skip"), str),
    "deadline": Option((IN_BACKGROUND,), _DEADLINE, (int, float)),
    "on_error": Option((IN_BACKGROUND,), one_of("raise", "warn"), str),
    "snapshot_bytes": Option((IN_BACKGROUND,), NumberOption("bytes", 0, is_optional=True), int),
    "keep_snapshot": Option((IN_BACKGROUND,), check_switch, bool),
    "keep": Option((IN_MEMORY,), one_of("memory"), str),
    "every": Option((IN_MEMORY,), NumberOption("steps", 1), int),
    "copies": Option((IN_MEMORY,), NumberOption("machines", 0), int),
    "folder": Option((IN_MEMORY,), _path, str),
    "client_state": Option((IN_MEMORY,), _function),
    "store": Option((STORES,), _store, dict),
}


def options_for(user: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of some options that loads take, or saves, or what else."""
    return {name: value for name, value in options.items() if user in OPTIONS[name].of}


def use_store(options: Mapping[str, Any]) -> None:
    """From here on this process asks object stores as the option `store` says, if it is given."""
    if options.get("store") is not None:
        configure(StoreOptions.of(options["store"]))


def check_given(options: Mapping[str, Any]) -> None:
    """Raises UsageError for a value that can't be, before anybody trains for hours with it."""
    for name, value in options.items():
        OPTIONS[name].check(name, value)


def check_fields(options: object) -> None:
    """As `check_given`, of the fields of a dataclass that are options."""
    found = vars(options)
    check_given({name: found[name] for name in found if name in OPTIONS})


# ---- arguments of the tools


def one_target(mesh: Any, target: Any, **more: Any) -> "Target | None":
    """The target that a caller gave, as a mesh or as a target; None where neither was given. Raises
    UsageError."""
    if mesh is not None and target is not None:
        raise UsageError(
            "a mesh and a target were given",
            expected="one of them: a target has a mesh",
            found=f"{mesh} and {target}"[:200],
            fix="leave the mesh out",
        )
    given = target if mesh is None else mesh
    from megatron_ucp.formats.deepspeed.target import Target  # not for who only parses words

    return None if given is None else Target.of(given, **more)


def needed_target(mesh: Any, target: Any, what: str) -> "Target":
    """As `one_target`, of `what` needs one. Raises UsageError where neither was given."""
    given = one_target(mesh, target)
    if given is None:
        raise no_mesh(what)
    return given


def no_mesh(what: str) -> UsageError:
    """The error where nobody said a mesh, which `what` is for."""
    return UsageError(
        f"{what} for one mesh",
        expected="a mesh, such as tp=1,dp=4,zero=1",
        found="none",
        fix="give --mesh (Python: mesh=)",
    )


def parsed_config(ds_config: Any) -> Mapping[str, Any] | None:
    """A DeepSpeed config that a caller gave, as a mapping or by its file; None for None. Raises
    UsageError."""
    if ds_config is None:
        return None
    if isinstance(ds_config, Mapping):
        return _with_sections(ds_config, "")
    found = read_json(plain_path(ds_config))
    if not isinstance(found, dict):
        raise UsageError(
            "this file is no DeepSpeed config",
            file=ds_config,
            expected="a JSON object",
            found=type(found).__name__,
            fix="give the config that the job passes to DeepSpeed",
        )
    return _with_sections(found, str(ds_config))


def _with_sections(config: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """A DeepSpeed config. Raises UsageError where a section that is read is none."""
    wrong = [name for name in _SECTIONS if not isinstance(config.get(name, {}), Mapping)]
    if wrong:
        raise UsageError(
            "a section of the DeepSpeed config is no object",
            file=file or None,
            expected=f'"{wrong[0]}": {{...}}',
            found=repr(config[wrong[0]])[:200],
            fix="correct the config",
        )
    return config


def read_json(path: str) -> Any:
    """The value in a JSON file. Raises UsageError."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        missing = isinstance(error, FileNotFoundError)
        found = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            "there is no such file" if missing else "the file can't be read as JSON",
            file=path,
            expected="a JSON file",
            found="nothing" if missing else found,
            fix="check the path and what is in the file",
        ) from None


# ---- ds section
#
# The section of a DeepSpeed config that attaches engines.


SECTION = "universal_checkpoint"
SECTION_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "enabled": bool,
    **{name: row.kind for name, row in OPTIONS.items() if row.kind is not None},
}


def options_of(config: Any, enabled: bool = False) -> dict[str, Any] | None:
    """Options of the section "universal_checkpoint" of a parsed DeepSpeed config; None where it is
    not enabled: neither by the section, nor by the stock key `"checkpoint": {"load_universal":
    true}`, nor by whoever asks (`enabled`), whom the section may contradict.

    Raises UsageError for an unknown key or value.
    """
    section = config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise UsageError(
            f'"{SECTION}" of the DeepSpeed config is a section',
            expected='{"enabled": true}',
            found=repr(section),
            fix='write it as {"enabled": true}, or leave it out',
        )
    unknown = sorted(
        key
        for key, value in section.items()
        if key not in SECTION_KEYS or not isinstance(value, SECTION_KEYS[key])
    )
    if unknown:
        raise UsageError(
            f'the section "{SECTION}" of the DeepSpeed config has a key or value that is not known',
            expected=", ".join(f"{k}: {_ds_word(t)}" for k, t in SECTION_KEYS.items()),
            found=", ".join(f"{k}: {section[k]!r}" for k in unknown),
            fix="correct the key or its value (docs/reference/python.md, Settings)",
        )
    options = {key: value for key, value in section.items() if key != "enabled"}
    check_given(options_for(LOADS, options))
    stock = config.get("checkpoint")
    enabled |= isinstance(stock, Mapping) and bool(stock.get("load_universal"))
    return options if section.get("enabled", enabled) else None


def _ds_word(kind: type | tuple[type, ...]) -> str:
    return "number" if isinstance(kind, tuple) else kind.__name__
