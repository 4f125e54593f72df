"""A file of rules against a checkpoint: what no rule matches, what two match, what matches nothing,
what can't be true."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatron_ucp import say
from megatron_ucp.core.experts import is_expert
from megatron_ucp.core.layout import Partial, Replicate, same_layout
from megatron_ucp.core.manifest import FILE_NAME, ParamSpec
from megatron_ucp.core.rules import RuleSet, nearest
from megatron_ucp.errors import DamagedFileError, LayoutError, RuleError, UnsupportedError
from megatron_ucp.formats.deepspeed import tp_patterns
from megatron_ucp.formats.deepspeed.layout_sources import compared_name, compared_spec, renamed
from megatron_ucp.formats.rule_file import is_ours, read_rules
from megatron_ucp.reshard.execute import Finding, Progress, finding_of, some
from megatron_ucp.reshard.rules.survey import DIFFERENT, EQUAL, Held, Survey, survey

_T = TypeVar("_T")


@dataclass(frozen=True)
class Checked:
    """`findings` are what is wrong with the rules; `notes` say what could not be checked."""

    path: str
    rules: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    parameters: int

    def __bool__(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        found = some(len(self.findings), "finding")
        return f"{self.rules}: {found} for {self.parameters} parameters and buffers of {self.path}"


def rules(
    path: str | Path,
    *,
    check: str | Path | None = None,
    tag: str | None = None,
    progress: Progress | None = None,
) -> "str | Checked":
    """Drafts a file of rules for a model that no family covers, or checks such a file.

    Args:
        path: A tag folder, or the folder above it.
        check: A file of rules (docs/reference/rules.md) to compare with the checkpoint.
        tag: The tag in `path`, where it is not the newest.
        progress: `progress(done, total)` counts parameters.

    Returns:
        The text of a draft in TOML; with `check` what is wrong with the file, which is true where
        nothing is.

    Raises:
        RuleError: For a file that can't be used.
        NotFoundError: Where there is no checkpoint.

    Example:
        >>> import megatron_ucp as ucp
        >>> print(ucp.rules("runs/llama"))
    """
    from megatron_ucp.reshard.rules.draft import draft_rules

    if check is None:
        return draft_rules(path, tag, progress=progress)
    return check_rules(path, check, tag, progress=progress)


@say.shown("rules", "parameters")
def check_rules(
    path: str | Path, rules: str | Path, tag: str | None = None, progress: Progress | None = None
) -> Checked:
    """Compares the rules of a file with a checkpoint. `progress(done, total)` counts parameters.

    Raises RuleError for a file that can't be used, NotFoundError where there is no checkpoint, and
    other UcpErrors for one that can't be read.
    """
    found = read_rules(rules)
    with survey(path, tag, progress) as seen:
        return _Check(seen, found).run()


class _Check:
    """Collects what is wrong instead of stopping at the first."""

    def __init__(self, seen: Survey, rules: RuleSet) -> None:
        self._seen, self._rules = seen, rules
        self._manifest_file = str(seen.checkpoint.folder / FILE_NAME)
        self.findings: list[Finding] = []
        self.notes: list[str] = [*seen.checkpoint.led_here]

    def run(self) -> Checked:
        for held in self._seen.held:
            self._rules.check_length(held.name)
        named = self._check_names()
        if named is None:
            self.notes.append(
                "layouts were not checked, as the parameters of the pipeline have no names"
            )
        elif self._rules.rules:
            for held in self._seen.held:
                self._check_parameter(held, named.get(held.name, held.name))
            names = [named.get(held.name, held.name) for held in self._seen.held]
            self._check_used(
                [rule.pattern for rule in self._rules.rules],
                lambda name: [rule.pattern for rule in self._rules.rules if rule.matches(name)],
                names,
                "rule",
            )
        elif self._seen.tp > 1 and not self._seen.recorded and not self._seen.info:
            self.findings.append(
                Finding(
                    "the file has no rule, and the checkpoint does not say how it is cut",
                    self._rules.source,
                    expected="[[rule]]",
                    found="none",
                )
            )
        if self._seen.tp == 1:
            self.notes.append(
                "one tensor-parallel rank wrote the checkpoint: no value can contradict a layout"
            )
        return Checked(
            str(self._seen.checkpoint.folder),
            self._rules.source,
            tuple(self.findings),
            tuple(self.notes),
            len(self._seen.held),
        )

    def _tried(self, check: Callable[[], _T]) -> _T | None:
        """What a check returns. What it raises is a finding."""
        try:
            return check()
        except (RuleError, LayoutError, UnsupportedError, DamagedFileError) as error:
            self.findings.append(finding_of(error))
            return None

    def _check_names(self) -> dict[str, str] | None:
        """Canonical names by the [[pipeline]] entries, where the checkpoint needs them; None where
        they are wrong."""
        recorded, rules = self._seen.manifest.names, self._rules
        names = self._seen.stock_names or list(recorded)
        if not self._seen.stock_names and not (names and rules.pipeline):
            return {}
        self._check_used(
            [entry.pattern for entry in rules.pipeline],
            lambda pipe: [entry.pattern for entry in rules.pipeline if entry.matches(pipe)],
            names,
            "[[pipeline]] entry",
        )
        if not self._seen.stock_names:
            for pipe, name in recorded.items():
                self._tried(
                    lambda pipe=pipe, name=name: compared_name(
                        pipe, name, rules, self._manifest_file
                    )
                )
            return {}
        found = [self._tried(lambda pipe=pipe: rules.canonical(pipe)) for pipe in names]
        return None if None in found else self._tried(lambda: renamed(names, rules))

    def _check_used(
        self, patterns: list[str], matching: Callable[[str], list[str]], names: list[str], what: str
    ) -> None:
        used = {pattern for name in names for pattern in matching(name)}
        self.findings += [
            Finding(
                f"a {what} matches no parameter",
                self._rules.source,
                expected=f"the nearest is {nearest(pattern, names)}",
                found=pattern,
            )
            for pattern in patterns
            if pattern not in used and not is_ours(self._rules.source)
        ]

    def _check_parameter(self, held: Held, name: str) -> None:
        if held.kind == "buffer" and not self._rules.matching(name):
            return
        sizes = self._seen.manifest.mesh.cuts(is_expert(name))
        spec = self._tried(lambda: self._rules.declare(name, held.local, sizes))
        if spec is None:
            return
        layout = spec.layout
        if held.recorded is not None:
            self._tried(
                lambda: compared_spec(
                    held.recorded or spec, self._seen.manifest, self._rules, self._manifest_file
                )
            )
        elif self._seen.info and self._seen.tp > 1 and held.kind != "buffer":
            self._tried(lambda: self._check_info(held, spec))
        if isinstance(layout, Replicate) and held.copies == DIFFERENT:
            self.findings.append(
                Finding(
                    "a rule says Replicate, but the ranks hold different values",
                    self._rules.source,
                    name,
                    "the same bits on every rank",
                    "different ones",
                )
            )
        if not isinstance(layout, Replicate | Partial) and held.copies == EQUAL:
            self.findings.append(
                Finding(
                    "a rule cuts a parameter of which every rank holds the same values",
                    self._rules.source,
                    name,
                    "Replicate",
                    str(layout),
                )
            )

    def _check_info(self, held: Held, spec: ParamSpec) -> None:
        file, info, order = self._seen.checkpoint.main_file, self._seen.info, self._seen.order
        if tp_patterns.is_open(info, held.pipe, file, order):
            return
        stock = tp_patterns.declared(info, held.pipe, held.local, self._seen.tp, file, order).layout
        if same_layout(stock, spec.layout):
            return
        if not tp_patterns.is_matched(self._seen.info, held.pipe, file):
            self.notes.append(
                f"{spec.name}: {spec.layout}, where stock DeepSpeed's default is {stock}"
            )
            return
        raise RuleError(
            "a rule contradicts universal_checkpoint_info",
            file=self._rules.source,
            parameter=spec.name,
            expected=f"{stock}, as {file} says",
            found=spec.layout,
            fix="correct the rule, or remove it where the run's own patterns are right",
        )
