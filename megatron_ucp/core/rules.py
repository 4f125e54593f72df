"""Declared layouts for parameter names: exactly one rule per name."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ucp.core.layout import Layout, Replicate
from megatron_ucp.errors import RuleError


@dataclass(frozen=True)
class Rule:
    """`layout` for names that match `pattern` in full (a regular expression).

    `attributes` are what the live parameter must carry (`tensor_model_parallel`, `partition_dim`, ...), by name of the
    layer spec; a spec that maps to None can't be trusted there and only the local shape is checked.
    """

    pattern: str
    layout: Layout
    attributes: Mapping[str, Mapping[str, object] | None] = field(default_factory=dict[str, "Mapping[str, object] | None"])

    def matches(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None


@dataclass(frozen=True)
class RuleSet:
    """The rules of one family or of one user's file; `source` is the file to edit."""

    source: str
    rules: tuple[Rule, ...]

    def find(self, name: str) -> Rule:
        """The one rule for a name. Raises RuleError where none or two match."""
        found = [rule for rule in self.rules if rule.matches(name)]
        if len(found) == 1:
            return found[0]
        if found:
            raise RuleError("two rules match one parameter", file=self.source, parameter=name, expected="one rule",
                            found=" and ".join(rule.pattern for rule in found[:2]),
                            fix=f"make the patterns in {self.source} exclude each other")
        near = difflib.get_close_matches(name, [rule.pattern.replace("\\", "") for rule in self.rules], n=1, cutoff=0)
        raise RuleError("no rule matches a parameter", file=self.source, parameter=name,
                        expected="one rule", found=f"none; the nearest is {near[0] if near else 'none'}",
                        fix=f"add a rule for it to {self.source}")


# tp = 1: every parameter is whole, so its layout says nothing and needs no declaration.
PLAIN = RuleSet("a model without tensor parallelism", (Rule(".*", Replicate()),))
