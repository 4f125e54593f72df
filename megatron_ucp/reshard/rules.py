"""A file of rules compared with a checkpoint: what no rule matches, what two match, what matches
nothing, what can't be true."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron_ucp import say
from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import is_expert
from megatron_ucp.core.layers import TIED
from megatron_ucp.core.manifest import FILE_NAME, Manifest, ParamSpec
from megatron_ucp.core.rules import NOTHING_KNOWN, RuleSet, nearest
from megatron_ucp.errors import (
    DamagedFileError,
    LayoutError,
    RuleError,
    UnsupportedError,
    UsageError,
)
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.deepspeed import tp_patterns
from megatron_ucp.formats.deepspeed.layout_sources import (
    compared_name,
    compared_spec,
    renamed,
    says_layouts,
)
from megatron_ucp.formats.deepspeed.megatron_deepspeed import arguments_of, order_of
from megatron_ucp.formats.megatron.run_state import ARGUMENTS_KEY
from megatron_ucp.formats.pt.refs import ITEMSIZE
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.formats.rule_file import is_ours, read_rules
from megatron_ucp.formats.tags import find_tag
from megatron_ucp.reshard.check import HeldAt, read_copy
from megatron_ucp.reshard.findings import Finding, Progress, finding_of, some

_T = TypeVar("_T")
_BLOCK_BYTES = 4 * 2**20
EQUAL, CONSTANT, DIFFERENT = "equal", "constant", "different"


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
        count = some(len(self.findings), "finding")
        return f"{self.rules}: {count} for {self.parameters} parameters and buffers of {self.path}"


def rules(
    path: str | Path,
    *,
    check: str | Path | None = None,
    tag: str | None = None,
    progress: Progress | None = None,
) -> Checked:
    """Compares a file of rules, for a model that no family covers, with a checkpoint.

    Args:
        path: A tag folder, or the folder above it.
        check: The file of rules (docs/reference/rules.md).
        tag: The tag in `path`, where it is not the newest.
        progress: `progress(done, total)` counts parameters.

    Returns:
        What is wrong with the file, which is true where nothing is.

    Raises:
        UsageError: Without `check`: rules are written by hand.
        RuleError: For a file that can't be used.
        NotFoundError: Where there is no checkpoint.

    Example:
        >>> import megatron_ucp as ucp
        >>> ucp.rules("runs/llama", check="rules.toml").findings
    """
    if check is None:
        raise UsageError(
            "there is no file of rules to check, and none is drafted any more",
            expected="--check FILE (Python: check=)",
            found="none",
            fix="write the rules by hand (docs/reference/rules.md): `megatron-ucp inspect --all` "
            "lists the names and shapes of the checkpoint",
        )
    return check_rules(path, check, tag, progress=progress)


@say.shown("rules", "parameters")
def check_rules(
    path: str | Path, rules: str | Path, tag: str | None = None, progress: Progress | None = None
) -> Checked:
    """Compares the rules of a file with a checkpoint. `progress(done, total)` counts parameters.

    Raises RuleError for a file that can't be used, NotFoundError where there is no checkpoint, and
    other UcpErrors for one that can't be read.
    """
    given = read_rules(rules)
    with _survey(path, tag, progress) as seen:
        return _Check(seen, given).run()


@dataclass(frozen=True)
class _Held:
    """One parameter: the shape that a rank holds; whether the tensor-parallel ranks' copies are the
    same bytes (CONSTANT: the same, and one value only, or of one rank); the spec, where a manifest
    says it. `pipe` is its name in stock DeepSpeed's patterns, which is that of the pipeline where
    there is one."""

    name: str
    pipe: str
    local: Ints
    kind: str
    copies: str
    recorded: ParamSpec | None


@dataclass(frozen=True)
class _Survey:
    """What an opened checkpoint says of its layouts by itself. `stock_names` are names in a
    pipeline that nothing maps to canonical ones; `info` is stock DeepSpeed's
    `universal_checkpoint_info`, or empty, and `order` what the run's arguments say of
    query_key_value."""

    checkpoint: Checkpoint
    held: tuple[_Held, ...]
    info: Mapping[str, Any]
    order: str
    stock_names: list[str]

    @property
    def manifest(self) -> Manifest:
        return self.checkpoint.manifest

    @property
    def tp(self) -> int:
        """Ranks that have shares of one parameter."""
        return self.manifest.mesh.tp

    @property
    def recorded(self) -> bool:
        """Whether there is a manifest that says how parameters are cut."""
        return self.checkpoint.recorded is not None and says_layouts(self.manifest)


@contextmanager
def _survey(path: str | Path, tag: str | None, progress: Progress | None) -> Iterator[_Survey]:
    """Opens a checkpoint without being told how it is cut, and compares the ranks' copies of each
    parameter up to the first byte that differs. Raises a UcpError."""
    place = find_tag(path, tag)
    has_manifest = (place.folder / FILE_NAME).is_file()
    with open_checkpoint(place.folder, rules=None if has_manifest else NOTHING_KNOWN) as checkpoint:
        checkpoint.path_notes = place.notes
        manifest, held = checkpoint.manifest, list[_Held]()
        pipes = {name: pipe for pipe, name in manifest.names.items()}
        for spec in manifest.params:
            held.append(
                _Held(
                    spec.name,
                    pipes.get(spec.name, spec.name),
                    manifest.local_shape(spec.name),
                    spec.kind,
                    _copies(checkpoint, spec.name),
                    spec if has_manifest and says_layouts(manifest) else None,
                )
            )
            if progress is not None:
                progress(len(held), len(manifest.params))
        stock_names = list(manifest.names) or [
            param.name for param in held if re.match(rf"[0-9]+\.|{TIED}\.", param.name)
        ]
        yield _Survey(
            checkpoint,
            tuple(held),
            checkpoint.extras.patterns,
            order_of(arguments_of(checkpoint.extras.client_state.get(ARGUMENTS_KEY))),
            [] if has_manifest else stock_names,
        )


def _copies(checkpoint: Checkpoint, name: str) -> str:
    """How the tensor-parallel ranks' values of a parameter compare."""
    manifest = checkpoint.manifest
    b, m = manifest.holders[name][0]
    buffer = manifest.buffers[b]
    places = [HeldAt(b, m, cut) for cut in manifest.cuts_of(buffer)]
    if len(places) < 2:
        return CONSTANT
    state, dtype = buffer.states[0]
    size, width, values = buffer.members[m].size, ITEMSIZE[dtype], set[bytes]()
    step = _BLOCK_BYTES // width
    for low in range(0, size, step):
        first, *others = (
            read_copy(checkpoint, place, state, dtype, low, min(low + step, size))
            for place in places
        )
        if any(other != first for other in others):
            return DIFFERENT
        values.add(first[:width])
        if len(values) == 1 and first != first[:width] * (len(first) // width):
            values.add(b"")  # more than one value
    return EQUAL if len(values) > 1 else CONSTANT


class _Check:
    """Collects what is wrong instead of stopping at the first."""

    def __init__(self, seen: _Survey, rules: RuleSet) -> None:
        self._seen, self._rules = seen, rules
        self._manifest_file = str(seen.checkpoint.folder / FILE_NAME)
        self.findings: list[Finding] = []
        self.notes: list[str] = [*seen.checkpoint.path_notes]

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

    def _check_parameter(self, held: _Held, name: str) -> None:
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
        if layout.is_whole and held.copies == DIFFERENT:
            self.findings.append(
                Finding(
                    "a rule says Replicate, but the ranks hold different values",
                    self._rules.source,
                    name,
                    "the same bits on every rank",
                    "different ones",
                )
            )
        if not (layout.is_whole or layout.mean_over) and held.copies == EQUAL:
            self.findings.append(
                Finding(
                    "a rule cuts a parameter of which every rank holds the same values",
                    self._rules.source,
                    name,
                    "Replicate",
                    str(layout),
                )
            )

    def _check_info(self, held: _Held, spec: ParamSpec) -> None:
        file, info, order = self._seen.checkpoint.main_file, self._seen.info, self._seen.order
        if tp_patterns.is_open(info, held.pipe, file, order):
            return
        stock = tp_patterns.declared(info, held.pipe, held.local, self._seen.tp, file, order).layout
        if stock == spec.layout:
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
