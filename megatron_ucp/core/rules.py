"""Declared layouts for parameter names: exactly one rule per name. A family declares in Python, a
user in a file."""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layers import TIED
from megatron_ucp.core.layout import Cuts, Extent, Layout, Partial, Replicate
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.mesh import DENSE_CUT
from megatron_ucp.errors import LayoutError, RuleError, UnsupportedError, some_of

# In characters; it bounds the work of matching, as patterns bound the ways in which they match.
LONGEST_NAME = 512


@dataclass(frozen=True)
class NamePattern:
    """A regular expression for whole names."""

    pattern: str

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    def matches(self, name: str) -> bool:
        return self.compiled.fullmatch(name) is not None


@dataclass(frozen=True)
class Rule(NamePattern):
    """`layout` for names that match `pattern` in full (a regular expression).

    `equal_parts` (0: none) is the number of equal fused parts of a ShardNC that lists no sizes;
    `vocabulary` the true rows of a padded one; `first_counts` is as in `ParamSpec`.
    """

    layout: Layout
    equal_parts: int = 0
    vocabulary: int | None = None
    first_counts: bool = False

    def declare(self, name: str, local: Ints, sizes: Mapping[str, int]) -> ParamSpec:
        """The whole parameter of which a rank holds `local`; `sizes` are those of the mesh axes
        that cut the files.

        Raises LayoutError where the layout can't have such a share, UnsupportedError for another
        axis, RuleError for a vocabulary that is larger than the parameter.
        """
        shape, layout = list(local), self.layout
        copied = (layout.mean_over,) if layout.mean_over else ()
        for axis in (*copied, *(cut.axis for cut in layout.cuts())):
            if axis not in sizes:
                raise UnsupportedError(
                    "a rule names an axis that does not cut this checkpoint's files",
                    parameter=name,
                    expected=" or ".join(sizes),
                    found=axis,
                    fix="correct the rule",
                )
        for cut in layout.cuts():
            if cut.dim < len(shape):
                shape[cut.dim] *= sizes[cut.axis]
        layout = self._with_parts(name, shape)
        layout.pieces(name, tuple(shape), {axis: (size, 0) for axis, size in sizes.items()})
        if self.vocabulary is not None and not (shape and self.vocabulary <= shape[0]):
            raise RuleError(
                "a rule says more rows of vocabulary than the parameter has",
                parameter=name,
                expected=f"at most {shape[0] if shape else 0}",
                found=self.vocabulary,
                fix="correct the rule",
            )
        return ParamSpec(
            name,
            tuple(shape),
            "",
            layout=layout,
            extent=None if self.vocabulary is None else Extent(self.vocabulary, shape[0]),
            first_counts=self.first_counts,
        )

    def _with_parts(self, name: str, shape: list[int]) -> Layout:
        cut = self.layout.only_cut
        if cut is None or not self.equal_parts or cut.dim >= len(shape):
            return self.layout
        rows = shape[cut.dim]
        if rows % self.equal_parts:
            raise RuleError(
                "a parameter can't be divided into the equal parts that its rule says",
                parameter=name,
                expected=f"a multiple of {self.equal_parts} in dim {cut.dim}",
                found=rows,
                fix="correct the rule",
            )
        parts = (rows // self.equal_parts,) * self.equal_parts
        return Cuts((replace(cut, parts=parts),))


@dataclass(frozen=True)
class Rename(NamePattern):
    """The canonical `name` of what matches `pattern` in a pipeline; `{group}`, `{group+1}`,
    `{group-1}` stand for named groups.

    `tied`: several names may get the same canonical one (those of `tied_modules` may always).
    """

    name: str
    tied: bool = False

    def apply(self, pipe: str) -> str | None:
        """The canonical name, or None where the pattern does not match. Raises ValueError for a
        number that is none."""
        found = self.compiled.fullmatch(pipe)
        if found is None:
            return None
        groups = found.groupdict("")
        return FIELD.sub(
            lambda f: str(int(groups[f[1]]) + int(f[2])) if f[2] else groups[f[1]], self.name
        )


FIELD = re.compile(r"\{([A-Za-z_]\w*)([+-][0-9]{1,6})?\}")


@dataclass(frozen=True)
class RuleSet:
    """The rules of one user's file; `source` is the file to edit. `pipeline` names a pipeline's
    parameters."""

    source: str
    rules: tuple[Rule, ...]
    pipeline: tuple[Rename, ...] = ()

    def matching(self, name: str) -> list[Rule]:
        """Every rule that matches. Raises RuleError for a name that is too long to match."""
        self.check_length(name)
        return [rule for rule in self.rules if rule.matches(name)]

    def find(self, name: str) -> Rule:
        """The one rule for a name. Raises RuleError where none or two match."""
        found = self.matching(name)
        if len(found) == 1:
            return found[0]
        if found:
            raise RuleError(
                "two rules match one parameter",
                file=self.source,
                parameter=name,
                expected="one rule",
                found=" and ".join(rule.pattern for rule in found[:2]),
                fix=f"make the patterns in {self.source} exclude each other",
            )
        raise RuleError(
            "no rule matches a parameter",
            file=self.source,
            parameter=name,
            expected="one rule",
            found=f"none; the nearest is {nearest(name, [rule.pattern for rule in self.rules])}",
            fix=f"add a rule for it to {self.source}",
        )

    def check_names(self, names: Iterable[str]) -> None:
        """Raises RuleError that lists the names which no rule matches, where there are several."""
        lacking = [name for name in names if not self.matching(name)]
        if len(lacking) > 1:
            raise RuleError(
                f"no rule matches {len(lacking)} parameters",
                file=self.source,
                parameter=some_of(lacking),
                expected="one rule for each",
                found="none",
                fix=f"add rules for them to {self.source}, or to a copy of it that you name",
            )

    def declare(self, name: str, local: Ints, sizes: Mapping[str, int]) -> ParamSpec:
        """`Rule.declare` of the one rule for a name; its errors name the file."""
        try:
            return self.find(name).declare(name, local, sizes)
        except (LayoutError, RuleError, UnsupportedError) as error:
            error.file = self.source
            raise

    def canonical(self, pipe: str) -> str:
        """The canonical name of a parameter of a pipeline. Raises RuleError where no entry or two
        match."""
        self.check_length(pipe)
        try:
            found = {
                entry.pattern: name
                for entry in self.pipeline
                if (name := entry.apply(pipe)) is not None
            }
        except ValueError as error:
            raise RuleError(
                "a name is computed from a group that is no number",
                file=self.source,
                parameter=pipe,
                found=str(error),
                fix="let the group of the pattern match digits alone, such as (\\d+)",
            ) from None
        if len(found) == 1:
            return next(iter(found.values()))
        raise RuleError(
            "two [[pipeline]] entries match one name"
            if found
            else "no [[pipeline]] entry matches a name",
            file=self.source,
            parameter=pipe,
            expected="one entry",
            found=" and ".join(list(found)[:2])
            or f"none; the nearest is {nearest(pipe, [entry.pattern for entry in self.pipeline])}",
            fix=f"edit the [[pipeline]] entries of {self.source}",
        )

    def may_share(self, pipe: str) -> bool:
        """Whether another name of the pipeline may have the same canonical one."""
        return pipe.startswith(f"{TIED}.") or any(
            entry.tied and entry.matches(pipe) for entry in self.pipeline
        )

    def check_length(self, name: str) -> None:
        """Raises RuleError for a name that is too long to match."""
        if len(name) > LONGEST_NAME:
            raise RuleError(
                "a name is too long for rules",
                file=self.source,
                parameter=f"{name[:80]}...",
                expected=f"at most {LONGEST_NAME} characters",
                found=len(name),
                fix="give the module of this parameter a shorter name",
            )


def nearest(text: str, among: Iterable[str]) -> str:
    """The most similar one of some names and patterns; "none" where there is none."""
    plain = {_plain(one): one for one in among}
    return plain.get(_closest(_plain(text), tuple(plain)), "none")


@lru_cache(maxsize=1024)  # the parameters of a hundred layers have the same plain text
def _closest(text: str, among: tuple[str, ...]) -> str:
    return next(iter(difflib.get_close_matches(text, among, n=1, cutoff=0)), "")


def _plain(text: str) -> str:
    """Layer numbers and the pattern for numbers look alike, and a pattern has no backslashes."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "0", text.replace(r"\d+", "0").replace("\\", ""))


class _NothingKnown(RuleSet):
    """Under Partial every rank holds a copy of its own: all that is known before somebody says
    more. A checkpoint opened so has the shapes that one rank holds."""

    def declare(self, name: str, local: Ints, sizes: Mapping[str, int]) -> ParamSpec:
        return ParamSpec(name, local, "", layout=Partial(*DENSE_CUT))


_ANY = Rule("(?s:.*)", Replicate())  # says that every name has a rule
NOTHING_KNOWN = _NothingKnown("nothing", (_ANY,), (Rename("(?P<name>(?s:.*))", "{name}"),))
