"""A first file of rules from what a checkpoint says by itself; what it can't know is marked and
left open."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ucp import say
from megatron_ucp.core.experts import is_expert
from megatron_ucp.core.layout import (
    Extent,
    Layout,
    Partial,
    Replicate,
    Shard,
    ShardHy,
    ShardNC,
    ShardRuns,
)
from megatron_ucp.core.mesh import DENSE_CUT, EXPERT_CUT
from megatron_ucp.errors import UcpError, UsageError
from megatron_ucp.formats.deepspeed import tp_patterns
from megatron_ucp.formats.output_folder import Syncs, replace_text
from megatron_ucp.formats.rule_file import FORMAT, UNKNOWN
from megatron_ucp.reshard.execute import Progress
from megatron_ucp.reshard.rules.survey import DIFFERENT, EQUAL, ONE, Held, Survey, survey


@dataclass(frozen=True)
class _Known:
    """What is known of a parameter, and whence; a layout of None is left open."""

    source: str
    layout: Layout | None
    extent: Extent | None = None


@say.shown("rules", "parameters")
def draft_rules(path: str | Path, tag: str | None = None, progress: Progress | None = None) -> str:
    """The text of a TOML file. `progress(done, total)` counts parameters. Raises a UcpError for a
    checkpoint that can't be read."""
    with survey(path, tag, progress) as seen:
        lines = [
            f"# Drafted from {_plain(str(seen.checkpoint.folder))} ({seen.manifest.mesh}).",
            f'# Every rule says what it was taken from. "{UNKNOWN}" must be filled in; what says '
            "CHECK may be wrong.",
            f"format = {FORMAT}",
        ]
        lines += _pipeline(seen)
        groups: dict[str, list[Held]] = {}
        for held in seen.held:
            if held.kind != "buffer" or (
                held.recorded is not None and not isinstance(held.recorded.layout, Replicate)
            ):
                groups.setdefault(_pattern(held.name), []).append(held)
        for pattern, members in groups.items():
            lines += _rules(seen, pattern, members)
        return "\n".join(lines) + "\n"


def write_draft(text: str, out: str | Path, overwrite: bool = False) -> None:
    """Writes a draft whole or not at all. Raises UsageError for a file that exists, or can't be
    written."""
    path = Path(out)
    if path.exists() and not overwrite:
        raise UsageError(
            "the file for the draft exists",
            file=path,
            expected="a new file",
            found="one that is there",
            fix="give another --out, or --force to replace it",
        )
    try:
        replace_text(path, text, Syncs(True))
    except OSError as error:
        raise UsageError(
            "the draft can't be written", file=path, found=error.strerror, fix="give another --out"
        ) from None


def _rules(seen: Survey, pattern: str, members: list[Held]) -> Iterator[str]:
    """One rule for all of a pattern, or one for each name where they are not cut alike."""
    known = [_known(seen, held) for held in members]
    if known[0] is None:
        yield from _rule(pattern, members, _by_values(members))
        return
    bodies = [_body(one) for one in known if one is not None]
    if all(body == bodies[0] for body in bodies):
        yield from _rule(pattern, members, known[0])
        return
    for held, one in zip(members, known, strict=True):
        if one is not None:
            yield from _rule(re.escape(held.name), [held], one)


def _known(seen: Survey, held: Held) -> _Known | None:
    """What metadata says; None where it says nothing."""
    if held.recorded is not None:
        return _Known("from the manifest", held.recorded.layout, held.recorded.extent)
    if not seen.info:
        return None
    file = seen.checkpoint.main_file
    try:
        spec = tp_patterns.declared(seen.info, held.pipe, held.local, seen.tp, file, seen.order)
    except UcpError as error:
        return _Known(f"universal_checkpoint_info is no help: {error.problem}", None)
    if tp_patterns.is_matched(seen.info, held.pipe, file):
        return _Known("from universal_checkpoint_info", spec.layout, spec.extent)
    if tp_patterns.is_fused(held.pipe):
        return _Known(f"{seen.order} rows, as the arguments of the run say", spec.layout)
    return _Known(
        "stock DeepSpeed's default: no pattern of universal_checkpoint_info matches; CHECK",
        spec.layout,
    )


def _by_values(members: list[Held]) -> _Known:
    """What the ranks' copies of the parameters of one pattern show together."""
    seen = {held.copies for held in members}
    if ONE in seen:
        return _Known("can't be known from one tensor-parallel rank", None)
    if DIFFERENT in seen and all(len(held.local) == 1 for held in members):
        return _Known(
            "the ranks hold different values, and there is one dim to cut; CHECK: not fused parts, "
            "not Partial",
            Shard(*(EXPERT_CUT if is_expert(members[0].name) else DENSE_CUT), 0),
        )
    if DIFFERENT in seen:
        return _Known(
            "the ranks hold different values: it is cut, but along which dim can't be known", None
        )
    if EQUAL in seen:
        return _Known("seen: every rank holds the same values", Replicate())
    return _Known(
        "every rank holds one and the same constant: whether it is cut can't be known", None
    )


def _rule(pattern: str, members: list[Held], known: _Known) -> Iterator[str]:
    shapes = list(dict.fromkeys("x".join(map(str, held.local)) or "scalar" for held in members))
    count = "1 parameter" if len(members) == 1 else f"{len(members)} parameters"
    yield ""
    yield f"# {known.source}"
    yield (
        f"# {count}; a rank holds {', '.join(shapes[:3])}{' and others' if len(shapes) > 3 else ''}"
    )
    yield "[[rule]]"
    yield f"pattern = {_text(pattern)}"
    yield from _body(known)


_UNRULED = f'layout = "{UNKNOWN}"'


def _body(known: _Known) -> list[str]:
    """The keys of a rule beside its pattern."""
    layout = known.layout
    if isinstance(layout, ShardRuns):
        return ["# shares of different sizes: the files say them, and no rule does", _UNRULED]
    out = [_UNRULED if layout is None else f'layout = "{type(layout).__name__}"']
    if isinstance(layout, Partial | Shard | ShardNC):
        out.append(f'axis = "{layout.axis}"')
    if isinstance(layout, Shard | ShardNC):
        out.append(f"dim = {layout.dim}")
    if isinstance(layout, ShardNC):
        equal = len(set(layout.parts)) == 1
        out.append(f"parts = {len(layout.parts) if equal else list(layout.parts)}")
        out += [f"unit = {layout.unit}"] if layout.unit > 1 else []
    if isinstance(layout, ShardHy):
        out.append(f"along = {json.dumps(layout.along)}")
    return out + ([f"vocabulary = {known.extent.true}"] if known.extent else [])


# ------------------------------------------------ names


def _pattern(name: str) -> str:
    r"""The name as a pattern in which every part that is a number is `\d+`."""
    return r"\.".join(r"\d+" if part.isdecimal() else re.escape(part) for part in name.split("."))


def _pipeline(seen: Survey) -> Iterator[str]:
    names = seen.manifest.names
    if seen.stock_names:
        yield from (
            "",
            "# Names as the pipeline has them, by position. To compare with a model without a "
            "pipeline, say its names:",
            r"#   pattern = '(?P<position>\d+)\.(?P<rest>.+)'",
            "#   name = 'decoder.layers.{position-1}.{rest}'",
            *_entry("(?P<name>.+)", "{name}"),
        )
        return
    same_rest: dict[str, list[str]] = {}
    for pipe in names:
        head, _, rest = pipe.partition(".")
        same_rest.setdefault(rest if head.isdecimal() else pipe, []).append(pipe)
    yield from ("", "# from the manifest") if names else ()
    for rest, pipes in same_rest.items():
        templates = {_template(pipe, names[pipe]) for pipe in pipes}
        template = templates.pop()
        if template and not templates:
            yield from _entry(rf"(?P<position>\d+)\.{re.escape(rest)}", template)
            continue
        for pipe in pipes:
            yield from _entry(re.escape(pipe), names[pipe])


def _template(pipe: str, name: str) -> str:
    """The canonical name with its first number as a field that follows the position; "" where that
    is not possible."""
    head = pipe.partition(".")[0]
    found = re.fullmatch(r"([^{}0-9]+\.)([0-9]+)(\.[^{}]+)", name)
    if not head.isdecimal() or found is None:
        return ""
    shift = int(found[2]) - int(head)
    return f"{found[1]}{'{position' + (f'{shift:+d}' if shift else '') + '}'}{found[3]}"


def _entry(pattern: str, name: str) -> Iterator[str]:
    yield from ("[[pipeline]]", f"pattern = {_text(pattern)}", f"name = {_text(name)}", "")


def _text(text: str) -> str:
    """A TOML string; in single quotes, where backslashes are plain, if that can be."""
    return (
        f"'{text}'"
        if text.isprintable() and "'" not in text
        else json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
    )


def _plain(text: str) -> str:
    """Text for a comment, which ends with its line."""
    return text if text.isprintable() else json.dumps(text)
