"""The table of formats: opens a checkpoint, whatever its format. A new one is one more row."""

from pathlib import Path

from megatron_ucp.core.rules import RuleSet
from megatron_ucp.formats.base import Checkpoint, Format, Told
from megatron_ucp.formats.deepspeed.native import NativeFormat
from megatron_ucp.formats.deepspeed.paths import tag_folder
from megatron_ucp.formats.deepspeed.universal import UniversalFormat
from megatron_ucp.formats.rule_file import read_rules

# the first one that recognises a folder opens it
FORMATS: tuple[Format, ...] = (UniversalFormat(), NativeFormat())


def open_checkpoint(
    path: str | Path,
    tag: str | None = None,
    rules: str | Path | RuleSet | None = None,
    told: Told | None = None,
) -> Checkpoint:
    """A checkpoint of any format, to look into and to read; a context manager.

    `rules` is a file of rules (docs/rules.md), or what was read from one: how parameters are cut
    and named, where the checkpoint does not say so itself; `told` is what an engine knows. A
    stage-0 checkpoint without a manifest keeps optimizer states by position only: without
    `told.order` it is read without its optimizer. Raises a UcpError.
    """
    folder = tag_folder(path, tag)
    found = rules if rules is None or isinstance(rules, RuleSet) else read_rules(rules)
    known = told or Told()
    if found is not None:
        known = Told(known.order, known.specs, known.names, found)
    return format_of(folder).open(folder, known)


def format_of(folder: Path) -> Format:
    """The row that recognises a tag folder."""
    return next(row for row in FORMATS if row.recognises(folder))
