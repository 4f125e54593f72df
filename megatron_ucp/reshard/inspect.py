"""What a checkpoint is, in the words of those who ask."""

import textwrap
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import FINGERPRINT, RECORDED, Manifest, ParamSpec
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.families.arguments import with_model
from megatron_ucp.formats.deepspeed.doctor import NOT_SAVED
from megatron_ucp.formats.hugging_face.checkpoint import CONFIG_FILE, read_json
from megatron_ucp.formats.megatron.distcp import SUFFIX
from megatron_ucp.formats.registry import find_checkpoint
from megatron_ucp.reshard.describe import experts, look, sizes
from megatron_ucp.reshard.newest_tag import time_of_save

# How the program calls what an engine's name says; the others are DeepSpeed's.
_FORMATS = {
    Keeper.UNIVERSAL: "DeepSpeed's universal folder",
    Keeper.TORCH_DIST: "Megatron-LM's torch_dist",
    Keeper.LEGACY: "Megatron-LM's legacy torch format",
    Keeper.WEIGHTS: "a Hugging Face folder, weights alone",
}
_OF_MEGATRON = (Keeper.MEGATRON, Keeper.TORCH_DIST, Keeper.LEGACY)
_STATES = {MASTER: "master weights", VALUE: "values"}
_WIDTH, _INDENT = 100, 13  # of lines with settings
_KNOWN = (
    *("global_steps", "skipped_steps", "saved_at", "ds_version", "moved_latest"),
    *(NOT_SAVED, FINGERPRINT),
)


@dataclass(frozen=True)
class ParamRow:
    """One parameter or buffer: its logical `shape`, the `dtype` of its training copy, the number of
    its group (None: of none), the states of its optimizer, other names of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    group: int | None
    states: tuple[str, ...]
    also: tuple[str, ...]


@dataclass(frozen=True)
class Inspected:
    """What `inspect` found. As text it is the lines that people ask for; `details()` are the rest.

    `states` are state -> (dtypes, bytes of all parameters, each once).
    """

    path: str
    manifest: Manifest
    states: Mapping[str, tuple[tuple[str, ...], int]]
    notes: tuple[str, ...]

    @property
    def rows(self) -> list[ParamRow]:
        """Every parameter and buffer."""
        manifest = self.manifest
        ties = {tie.canonical: tie.aliases for tie in manifest.ties}
        return [_row(manifest, spec, ties.get(spec.name, ())) for spec in manifest.params]

    @property
    def elems(self) -> int:
        """Elements of all parameters and buffers."""
        return sum(spec.elems for spec in self.manifest.params)

    def __str__(self) -> str:
        lines = [f"{name:12} {text}" for name, text in self._lines() if text]
        lines += [_named("not saved", str(one)) for one in self.manifest.run.get(NOT_SAVED) or ()]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])

    def details(self) -> str:
        """Steps and versions, groups, states, the model's sizes, the table of parameters."""
        heads = ("name", "shape", "dtype", "kind", "group", "states", "also")
        return "\n".join([*_details(self), "", *say.table([heads, *map(_texts, self.rows)])])

    @property
    def _model_type(self) -> str:
        """What config.json calls the model; empty where there is none."""
        file = Path(self.path) / CONFIG_FILE
        kind = read_json(file).get("model_type", "") if file.is_file() else ""
        return kind if isinstance(kind, str) else ""

    def _lines(self) -> Iterator[tuple[str, str]]:
        manifest, run = self.manifest, self.manifest.run
        yield "checkpoint", f"{self.path}: {_format(manifest)}"
        yield "model", _model(manifest, self.elems, self._model_type)
        skipped = run.get("skipped_steps") or 0
        more = f" ({skipped:,} skipped)" if skipped else ""
        is_weights = manifest.keeper == Keeper.WEIGHTS
        yield "step", "" if is_weights else f"{run.get('global_steps', 0):,}{more}"
        mesh = manifest.written_on
        ranks = mesh.world
        layout = str(mesh)
        if manifest.keeper in _OF_MEGATRON:  # whose optimizer knows no stages
            layout = layout.removesuffix(",zero=0")
        yield "mesh", "" if is_weights else f"{layout} ({ranks:,} rank{'s' if ranks != 1 else ''})"
        yield "optimizer", _optimizer(manifest)
        yield "tensors", _dtypes(self.states)
        yield "saved", _saved(manifest, Path(self.path))
        files = len(manifest.files)
        yield (
            "size",
            f"{say.amount(manifest.size_bytes)} in {files:,} file{'s' if files != 1 else ''}",
        )


def inspect(
    path: str | Path, *, tag: str | None = None, rules: str | Path | None = None
) -> Inspected:
    """What a checkpoint is: format, model, step, mesh, optimizer, dtypes, date, size. Reads no
    tensor.

    Args:
        path: A tag folder, the folder above it, or a Hugging Face folder.
        tag: The tag in `path`, where it is not the newest.
        rules: A file of rules (docs/reference/rules.md), where no family knows the layouts.

    Returns:
        What was found; printed it is a few lines, and `manifest` has all of it.

    Raises:
        NotFoundError: Where there is no checkpoint.
        UcpError: For one that can't be read.

    Example:
        >>> import megatron_ucp as ucp
        >>> ucp.inspect("runs/llama").manifest.mesh.tp
        2
    """
    found = find_checkpoint(path, tag)
    manifest = with_model(look(found.folder, None, rules))
    return Inspected(str(found.folder), manifest, sizes(manifest), found.notes)


def date(seconds: float) -> str:
    """A time since the epoch, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _dtypes(states: Mapping[str, tuple[tuple[str, ...], int]]) -> str:
    """The states of each dtype: "weights bfloat16; master weights, exp_avg float32"."""
    held: dict[str, list[str]] = {}
    for state, (dtypes, _) in states.items():
        held.setdefault(" and ".join(dtypes), []).append(_STATES.get(state, state))
    return "; ".join(f"{', '.join(names)} {dtype}" for dtype, names in held.items())


def _format(manifest: Manifest) -> str:
    version = manifest.run.get("ds_version")
    program = f"DeepSpeed {version}" if version else "DeepSpeed"
    usual = f"{program}, ZeRO stage {manifest.mesh.zero}"
    keeper = manifest.keeper
    if keeper == Keeper.MEGATRON:  # a manifest of this package's says who trained, not the format
        is_dist = any(file.name.endswith(SUFFIX) for file in manifest.files)
        keeper = Keeper.TORCH_DIST if is_dist else Keeper.LEGACY
    return _FORMATS.get(keeper, usual)


def _model(manifest: Manifest, elems: int, model_type: str) -> str:
    found = [f"{text}: {len(layers)} layers" for text, layers in experts(manifest).items()]
    mixtures = f"experts {'; '.join(found)}" if found else ""
    kind = manifest.family or model_type or "no family (any model of torch)"
    count = f"{len(manifest.params):,} tensors, {elems:,} elements"
    return ", ".join(filter(None, [kind, count, _vocabulary(manifest), mixtures]))


def _vocabulary(manifest: Manifest) -> str:
    """Rows of the vocabulary, where the checkpoint says what its model is."""
    said = manifest.run.get(RECORDED)
    sizes = said.get("sizes") if isinstance(said, Mapping) else None
    rows = sizes.get("vocab") if isinstance(sizes, Mapping) else None
    return f"vocabulary of {rows:,} rows" if isinstance(rows, int) else ""


def _optimizer(manifest: Manifest) -> str:
    if manifest.keeper == Keeper.WEIGHTS:
        return ""
    names = dict.fromkeys(filter(None, (group.optimizer for group in manifest.groups)))
    groups = f"{len(manifest.groups)} parameter group{'s' if len(manifest.groups) != 1 else ''}"
    return f"{', '.join(names) or 'not named by the files'}, {groups}"


def _saved(manifest: Manifest, folder: Path) -> str:
    if manifest.keeper == Keeper.WEIGHTS:
        return ""
    by = "with a manifest (an attached engine, or convert)"
    without = "without a manifest (plain DeepSpeed or Megatron-LM)"
    at = manifest.saved_at if manifest.saved_at is not None else time_of_save(folder)
    return f"{date(at)}, {by if manifest.save_id else without}"


def _row(manifest: Manifest, spec: ParamSpec, also: tuple[str, ...]) -> ParamRow:
    held = manifest.holders.get(spec.name)
    buffer = manifest.buffers[held[0][0]] if held else None
    states = tuple(state for state, _ in buffer.states) if buffer else ()
    group = None if buffer is None else buffer.group
    return ParamRow(spec.name, spec.shape, spec.dtype, spec.kind, group, states, also)


def _details(found: Inspected) -> Iterator[str]:
    manifest, run = found.manifest, dict(found.manifest.run)
    for key, value in run.items():
        text = _pairs(_flat(value)) if isinstance(value, Mapping) else value
        if key not in _KNOWN and text not in ("", None, (), []):
            yield _named(key, str(text))
    for number, group in enumerate(manifest.groups):
        said = {key: value for key, value in group.settings.items() if value is not None}
        yield _named(f"group {number}", f"{group.optimizer} {_pairs(said)}")
    for state, (dtypes, size) in found.states.items():
        yield _named(_STATES.get(state, state), f"{' '.join(dtypes)}, {say.amount(size)}")


def _named(name: str, text: str) -> str:
    """A name and what is said of it, in lines that a terminal shows whole."""
    indent = " " * _INDENT
    return textwrap.fill(
        text, _WIDTH, initial_indent=f"{name:{_INDENT - 1}} ", subsequent_indent=indent
    )


def _flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """One level of a tree of settings, without what is empty."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= _flat(value)
        elif value not in ("", None, {}, [], ()):
            out[key] = value
    return out


def _pairs(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def _texts(row: ParamRow) -> tuple[str, ...]:
    shape = "x".join(map(str, row.shape)) or "scalar"
    group = "-" if row.group is None else str(row.group)
    return row.name, shape, row.dtype, row.kind, group, " ".join(row.states), " ".join(row.also)
