"""Opens a checkpoint, whatever its format."""

from collections.abc import Mapping
from pathlib import Path

from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.rules import RuleSet
from megatron_ucp.formats.deepspeed.native import NativeCheckpoint, Order
from megatron_ucp.formats.deepspeed.paths import is_universal, resolve
from megatron_ucp.formats.deepspeed.universal import UniversalCheckpoint
from megatron_ucp.formats.rule_file import read_rules

Checkpoint = NativeCheckpoint | UniversalCheckpoint


def open_checkpoint(
    path: str | Path,
    tag: str | None = None,
    rules: str | Path | RuleSet | None = None,
    *,
    order: Order | None = None,
    specs: Mapping[str, ParamSpec] | None = None,
    names: Mapping[str, str] | None = None,
) -> Checkpoint:
    """A checkpoint of any format, to look into and to read; a context manager.

    `rules` is a file of rules (docs/rules.md), or what was read from one: how parameters are cut
    and named, where the checkpoint does not say so itself. `order`, `specs` and `names` are what an
    engine knows of itself (see NativeCheckpoint). A stage-0 checkpoint without a manifest keeps
    optimizer states by position only: without `order` it is read without its optimizer. Raises a
    UcpError.
    """
    folder = resolve(path, tag)
    found = rules if rules is None or isinstance(rules, RuleSet) else read_rules(rules)
    if is_universal(folder):
        return UniversalCheckpoint(folder, specs, names, found)
    return NativeCheckpoint(folder, None, order, order is None, specs, names, found)
