"""Every failure that a user can meet: a named error that carries its facts.

Each leaf says in its docstring when it is raised. The message is always built from the fields, in
one order, so that a reader finds the file, the parameter, what was expected, what was found and
what to do at the same place each time.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import ClassVar

HELP_FILE = "docs/troubleshooting.md"  # which an installation has, too: `megatron-ucp help ID`


class UcpError(Exception):
    """Base of all errors of this package.

    `problem` is one sentence. The other fields are shown when given. Errors cross process borders
    (they are gathered from all ranks), so every field must be a plain string, number or tuple.
    `id` is the heading of docs/troubleshooting.md that says more; empty where none does.
    """

    fix: ClassVar[str] = ""  # what to do, when the raising line knows nothing better
    id: str = ""  # the heading, when the raising line gives none

    def __init__(
        self,
        problem: str,
        *,
        file: object = None,
        parameter: str | None = None,
        expected: object = None,
        found: object = None,
        fix: str | None = None,
        id: str | None = None,
    ) -> None:
        self.problem = problem
        self.file = None if file is None else str(file)
        self.parameter = parameter
        self.expected = None if expected is None else str(expected)
        self.found = None if found is None else str(found)
        self.what_to_do = type(self).fix if fix is None else fix
        if id is not None:
            self.id = id
        super().__init__(problem)

    @property
    def help(self) -> str:
        """The command that says more; empty where nothing does."""
        return f"megatron-ucp help {self.id}" if self.id else ""

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.problem, self.__dict__)

    def __str__(self) -> str:
        rows = [
            ("file", self.file),
            ("parameter", self.parameter),
            ("expected", self.expected),
            ("found", self.found),
            ("what to do", self.what_to_do or None),
            ("help", self.help or None),
        ]
        return "\n".join(
            [self.problem] + [f"  {name}: {value}" for name, value in rows if value is not None]
        )


def _rebuild(kind: type[UcpError], problem: str, fields: dict[str, object]) -> UcpError:
    error = kind(problem)
    error.__dict__.update(fields)
    return error


def did_you_mean(word: object, known: Iterable[str], otherwise: str) -> str:
    """What to do about a word that is not known: the nearest one that is, or else the advice."""
    near = get_close_matches(str(word)[:80], [*known], n=1)
    return f"did you mean {near[0]}? Else {otherwise}" if near else otherwise


def some_of(names: Sequence[str], most: int = 8, between: str = ", ") -> str:
    """The first names, or faults, for a message, and how many there are more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more


class UsageError(UcpError):
    """An argument, a flag or a config value that can't be used."""


class NotFoundError(UcpError):
    """A checkpoint, a tag or a file of it does not exist."""

    fix = "restore it, or load another tag"
    id = "missing-file"


class DamagedFileError(UcpError):
    """A file is truncated, has a wrong checksum, or is no file of the kind that its name says."""

    fix = "restore the file from its origin, or load an older tag"
    id = "damaged-file"


class UnsafePickleError(UcpError):
    """A pickle asks for a class or function that is not on the closed list. Nothing of it was
    run."""

    fix = (
        "do not load this file with any other tool; if you trust its author, save it again "
        "without that object"
    )
    id = "unsafe-pickle"


class ForeignFileError(UcpError):
    """A file belongs to another run, another step or another mesh than the files beside it."""

    fix = "put the files of one save into the folder, or load another tag"
    id = "foreign-file"


class LayoutError(UcpError):
    """A parameter can't be cut as its layout says, or a live parameter disagrees with the
    layout."""

    fix = (
        "correct the rule or the family that gives the parameter this layout (--rules, --family; "
        "Python: rules=, family=)"
    )


class RuleError(UcpError):
    """No rule, or more than one, matches a parameter."""

    fix = "correct the file of rules (--rules; Python: rules=; docs/reference/rules.md)"
    id = "rules"


class ModelMismatchError(UcpError):
    """Checkpoint and model differ in parameters, shapes, kinds or buffers."""

    fix = "build the model with the configuration that the checkpoint was trained with"
    id = "model-mismatch"


class StateMismatchError(UcpError):
    """The optimizer's states, groups, hyper-parameters or steps can't be carried over exactly."""

    id = "optimizer-differs"


class InexactError(UcpError):
    """The only way to load would change values, and the argument that allows it was not given."""

    id = "inexact"


class UnsupportedError(UcpError):
    """A feature of DeepSpeed that is known and refused by name."""

    id = "unsupported"


class PlanError(UcpError):
    """The plan does not produce every target element exactly once. A defect of this package or an
    incomplete source."""

    fix = "report this with the output of `megatron-ucp inspect` for the checkpoint"


class SaveError(UcpError):
    """A save failed. Nothing of it counts, `latest` and all older tags are as they were; unless the
    message says that the tag is there and `latest` could not follow."""

    fix = "free space or mend permissions on every rank, and save again"
    id = "disk-full"


class StoreError(UcpError):
    """An object store did not answer, refused, or sent something else than it was asked for, within
    the time that requests are tried again. It says nothing of what lies there: whoever takes other
    errors for what a checkpoint is, or is not, lets this one through."""

    fix = "look at the store, the network and the credentials, then try again"
    id = "object-store"


class RankError(UcpError):
    """Another rank failed; this rank stopped before it touched anything, or was marked unusable
    like all others."""

    fix = (
        "read the first error in the output of the other ranks, mend that, and start the run again"
    )
    id = "another-rank"


class EngineUnusableError(UcpError):
    """A load failed after bytes were written into the engine; until what it broke is filled again
    the engine refuses to step, to save and to be exported, and with broken weights to compute."""

    fix = "load a whole checkpoint into it, or build the engine again"
    id = "engine-unusable"
