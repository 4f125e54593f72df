"""The blocks of the pages that code says: flags, options, errors, patches, support, figures.

A block stands between `<!-- generated: KIND WORD -->` and `<!-- end of generated -->`. What stands
in between is what `TEXTS[KIND](WORD)` gives; a test compares, and `python -m tests.docs.update`
writes it.
"""

import argparse
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import megatron_ucp_patches as patches

import megatron_ucp as ucp
from megatron_ucp import errors
from megatron_ucp.cli import COMMANDS, _parser
from megatron_ucp.reshard import options as option_tables
from pretrain import flags
from tests.docs import support
from tests.docs.pages import GENERATED, ROOT

Row = tuple[str, ...]


def filled(text: str) -> str:
    """A page with each of its blocks as the code says it."""

    def block(found: re.Match[str]) -> str:
        return f"{found['begin']}\n{TEXTS[found['kind']](found['word'].strip())}\n{found['end']}"

    return GENERATED.sub(block, text)


def table(head: Row, rows: Iterator[Row] | list[Row]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell(one) for one in line)} |" for line in lines)


def listed(rows: Iterator[Row] | list[Row]) -> str:
    """A name and what is said of it, one line each."""
    return "\n".join(f"- {name}: {' '.join(text.split())}" for name, text in rows)


def cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


# ---- the command line


def commands() -> dict[str, argparse.ArgumentParser]:
    (found,) = [one for one in _parser()._actions if isinstance(one, argparse._SubParsersAction)]
    return {name: found.choices[name] for name in COMMANDS}


def options(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The options of a command with what they are for, without those that only ask for help."""
    found = {}
    for action in parser._actions:
        if (
            action.option_strings
            and action.help not in (None, argparse.SUPPRESS)
            and (action.dest != "help")
        ):
            value = f" {action.metavar}" if action.metavar else ""
            name = f"{action.option_strings[0]}{value}"
            found[name] = code(action.help or "")
    return found


def shared() -> dict[str, str]:
    """The options that three commands or more have, each with one meaning."""
    count = Counter(row for parser in commands().values() for row in options(parser).items())
    return {name: text for (name, text), times in count.items() if times > 2}


def cli(word: str) -> str:
    if word == "shared":
        return listed([(f"`{name}`", text) for name, text in shared().items()])
    parser = commands()[word]
    positional = [one for one in parser._actions if not one.option_strings]
    usage = [parser.prog]
    for one in positional:
        name = one.metavar or one.dest.upper()
        usage.append(f"[{name}]" if one.nargs == "?" else str(name))
    known = shared()
    own = {name: text for name, text in options(parser).items() if name not in known}
    names = [name.split()[0] for name in options(parser) if name in known]
    others = [f"`{name}`" for name in names if name not in ("--json", "--quiet")]
    lines = [f"`{' '.join(usage)}`", ""]
    if own:
        lines += [listed([(f"`{name}`", words(text)) for name, text in own.items()]), ""]
    if others:
        lines += [f"Shared: {', '.join(others)}."]
    return "\n".join(lines).rstrip()


def words(text: str) -> str:
    """The words of --allow are explained in one place."""
    return re.sub(r"(between commas)\. (.*)", _named, text)


def _named(found: re.Match[str]) -> str:
    names = re.findall(r"(?:^|; )(\w+): ", found[2])
    return f"{found[1]}: {', '.join(f'`{name}`' for name in names)}"


# ---- Python

PUBLIC = ("attach", "load", "hold", "resize", "refit", "attach_megatron", "save")
DOORS = {
    option_tables.LOAD: "files",
    option_tables.MEMORY: "memory",
    option_tables.CONVERT: "`convert`",
    option_tables.EXPORT: "`export_hf`",
    option_tables.IMPORT: "`import_hf`",
}


def arguments(word: str) -> str:
    """The arguments of a function or class, from its docstring, with the defaults of its
    signature."""
    module, _, name = word.rpartition(".")
    home: Any = import_module(f"megatron_ucp.{module}") if module else ucp
    what = getattr(home, name)
    defaults = {
        one.name: one.default
        for one in inspect.signature(what).parameters.values()
        if one.default not in (one.empty, None)
    }
    by_text: dict[str, list[str]] = {}
    for argument, text in described(what):
        if argument != "beside":
            default = f" Default: {defaults[argument]!r}." if argument in defaults else ""
            by_text.setdefault(code(text) + default, []).append(f"`{argument}`")
    lines = [f"- {', '.join(names)}: {text}" for text, names in by_text.items()]
    return "\n".join(" ".join(line.split()) for line in lines)


def described(what: Any) -> Iterator[tuple[str, str]]:
    """The section `Args:` of a docstring."""
    text = inspect.getdoc(what) or ""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    if section is None:
        return
    for one in re.split(r"^    (?=\w+: )", section[1], flags=re.MULTILINE)[1:]:
        name, _, rest = one.partition(": ")
        yield name, rest


def code(text: str) -> str:
    """Without addresses of pages, which links of the page give."""
    return re.sub(r" \(docs/[\w/.-]+\.md(?: lists them)?\)", "", text)


def functions(word: str) -> str:
    """What each other function does: the first sentence of its docstring."""
    own = {"attach", "load", "save", "hold", "resize", "refit", "attach_megatron", "report"}
    own |= {
        "fingerprint",
        "initialize",
        "install",
        "register_optimizer",
    }  # which have sections of their own
    names = [name for name in ucp.__all__ if name.islower() and name not in own]
    return "\n".join(f"- `ucp.{name}`: {first(getattr(ucp, name))}" for name in names)


def first(what: Any) -> str:
    text = " ".join((inspect.getdoc(what) or "").split())
    return re.split(r"(?<=[.])\s", text)[0]


def allow(word: str) -> str:
    rows = []
    for name, row in option_tables.TABLE.items():
        where = ", ".join(text for door, text in DOORS.items() if door in row.doors)
        also = f'; `"{name}:PART"` those whose names begin with PART' if row.of_parts else ""
        rows.append((f'`"{name}"`', where, row.meaning + also))
    return table(("word", "acts at", "what it lets happen"), rows)


def section(word: str) -> str:
    return ", ".join(f"`{key}`" for key in option_tables.SECTION_KEYS) + "."


def error_classes(word: str) -> str:
    kinds = [one for one in vars(errors).values() if isinstance(one, type)]
    ours = [one for one in kinds if issubclass(one, errors.UcpError) and one is not errors.UcpError]
    head = ("error", "when", "`megatron-ucp help`")
    rows = []
    for one in ours:
        text = " ".join((inspect.getdoc(one) or "").split())
        link = f"[{one.id}](../troubleshooting.md#{one.id})" if one.id else ""
        rows.append((f"`{one.__name__}`", text, link))
    return table(head, rows)


def support_table(word: str) -> str:
    """What is supported. `support.TABLES` names the tests of each row too."""
    head, rows = support.TABLES[word]
    return table(("", *head), [row[:-1] for row in rows])


# ---- benchmarks

RESULTS = ROOT / "benchmarks" / "results"
COLUMNS = {"ways": "124M", "memory": "124M", "ways of 354M": "354M"}
MESH = re.compile(r"(?:(tp|pp|ep)(\d))?z(\d)")


def figures(word: str) -> str:
    """The ratios of a benchmark as its results have them, beside the aim of each; ✗: missed."""
    if word in SENTENCES:
        return SENTENCES[word]()
    tree = json.loads((RESULTS / f"{word}.json").read_text())
    if word == "load":
        return loads(tree)
    if word == "megatron_deepspeed":
        return pairs_of_program(tree["pairs"])
    by_what: dict[str, dict[str, str]] = {}
    columns: list[str] = []
    for group, what, one in claims(tree, ()):
        if "the bound" in what or what.startswith("the same"):
            continue  # of the program itself: nothing that anybody compares
        column = COLUMNS.get(", ".join(group), ", ".join(group))
        columns += [] if column in columns else [column]
        by_what.setdefault(what.removeprefix(f"{group[-1]}, "), {})[column] = shown(one)
    rows = [(what, *(cells.get(one, "") for one in columns)) for what, cells in by_what.items()]
    return table(("", *columns), rows)


def pairs_of_program(pairs: Sequence[Mapping[str, str]]) -> str:
    """Of Megatron-DeepSpeed's program: what its own way makes of each pair."""
    heads = ("model", "saved on", "loaded on", "`ds_to_universal` and its own load", "here")
    rows = [
        (*(row[key] for key in ("model", "source", "target")), row["stock"], row["here"])
        for row in pairs
    ]
    return table(heads, [tuple(cell.replace("|", "/") for cell in row) for row in rows])


def claims(tree: Any, path: Row) -> Iterator[tuple[Row, str, dict[str, Any]]]:
    if isinstance(tree, list):
        for one in tree:
            yield from claims(one, path)
    elif isinstance(tree, dict):
        if "what" in tree and "ratio" in tree:
            yield path or ("ratio",), tree["what"], tree
        for key, value in tree.items():
            yield from claims(value, path if key in ("claims", "ratios", "found") else (*path, key))


def shown(one: dict[str, Any]) -> str:
    limit, sign = one["limit"], "≥" if one["kind"] == "at least" else "≤"
    aim = f" ({sign}{limit:.3g})" if limit else ""
    return f"{one['ratio']:.3g}{aim}{'' if one.get('met') in (True, None) else ' ✗'}"


def results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def other_writers() -> str:
    """What training waits for, and when the bytes are on disk, of this package and others."""
    found = results("save")["others"]
    names = {
        '`save="background"` of DeepSpeed\'s engine': "background",
        "DeepSpeed's own save": "stock",
        "torch's `async_save` with its defaults": "torch's async_save",
        '`save="background"` of megatron-core\'s stack': "stack in the background",
        "megatron-core's `dist_checkpointing.save`": "megatron-core's save",
    }
    rows = [
        (text, f"{found[f'{name} blocked']:.2f} s", f"{found[f'{name} seconds']:.2f} s")
        for text, name in names.items()
    ]
    return table(("", "training waits", "on disk after"), rows)


def reading() -> str:
    """What a load reads and takes, at most, of all loads."""
    parts = results("load").values()
    read = {who: worst(parts, "bytes", "ratio", who) for who in ("ucp", "stock")}
    taken = {who: worst(parts, "memory", "anonymous_over_after", who) for who in ("ucp", "stock")}
    ours, stock = (f"{taken[who] / 2**20:.0f}" for who in ("ucp", "stock"))
    return (
        f"Each rank reads at most {read['ucp']:.4f} times the bytes that it needs (counted by "
        f"`strace`; DeepSpeed {read['stock']:.2f}). It takes at most {ours} MiB on top of the "
        f"engine's own memory, DeepSpeed {stock}."
    )


def worst(parts: Any, table: str, key: str, who: str) -> float:
    return max(
        one[key]
        for part in parts
        for name, ranks in part.get(table, {}).items()
        if name.startswith(f"{who} ")
        for one in ranks
    )


def steps_beside() -> str:
    ratio = results("save")["steps per second"]["ratio"]
    return f"Training steps while a background save goes on: {ratio:.2f} times as many a second."


def many_ranks() -> str:
    manifest, table = results("save")["manifest"], results("inspect")["manifest"]
    model = results("derive")
    last = results("agreement")["on paper"][-1]
    now, before = (last[key]["load"] / 1e6 for key in ("bytes received", "bytes before"))
    memory = model["peak memory in bytes"] / 2**20
    return (
        f"The manifest of a run on {manifest['ranks']:,} ranks with {manifest['parameters']:.1e} "
        f"parameters has {manifest['bytes'] / 1e6:.0f} MB; `inspect` of one that lists "
        f"{table['files']:,} files takes {table['seconds']:.2f} s. A model of DeepSeek-V3's shape "
        f"({model['elements'] / 1e9:.0f} billion elements) for {model['ranks']:,} ranks: a plan "
        f"takes {model['plan']['ratio']:.1f} s, and its process {memory:.0f} MiB at most.\n\n"
        f"A load on {last['ranks']:,} ranks brings a rank {now:.1f} MB of agreement, where a "
        f"gather from all ranks brought {before:,.0f} MB, and "
        f"{last['seconds of Python']['load, rank 0']:.2f} s of Python on the busiest one."
    )


def ratios(tree: Any) -> dict[str, float]:
    return {what: one["ratio"] for _, what, one in claims(tree, ())}


def loads(tree: Any) -> str:
    found = ratios(tree)
    rows = []
    for what, ratio in found.items():
        names = re.fullmatch(r"load (\w+) to (\w+) / stock load of \w+", what)
        if names:
            checked = found[f"{what}, checksums compared"]
            tool = found.get(f"stock convert + load / load, {names[1]} to {names[2]}")
            cells = (f"{ratio:.2f}", f"{checked:.2f}", f"{tool:.0f}" if tool else "")
            rows.append((f"{mesh(names[1])} into {mesh(names[2])}", *cells))
    head = (
        "`ucp.load`",
        "time / own load",
        "with checksums",
        "DeepSpeed's conversion and load / time",
    )
    return table(head, rows)


def mesh(name: str) -> str:
    axis, size, stage = MESH.fullmatch(name).groups()  # type: ignore[union-attr]
    return f"{axis}={size}, ZeRO-{stage}" if axis else f"ZeRO-{stage}"


def load_range() -> str:
    """One sentence: the least and the most of the loads of a dense model, with checksums."""
    found = ratios(json.loads((RESULTS / "load.json").read_text()))
    which = [
        ratio
        for what, ratio in found.items()
        if re.fullmatch(r"load (?!ep)\w+ to \w+ / stock load of \w+, checksums compared", what)
    ]
    more = ratios(json.loads((RESULTS / "fingerprint.json").read_text()))
    share = more["a load, on top of one by checksums alone"]
    return (
        f"With checksums on, a load takes {min(which):.2f} to {max(which):.2f} of the time of "
        "DeepSpeed's own load of the target's layout; comparing the fingerprint instead changes "
        f"that by {share:+.0%}."
    )


SENTENCES: dict[str, Callable[[], str]] = {
    "range": load_range,
    "others": other_writers,
    "reading": reading,
    "steps": steps_beside,
    "ranks": many_ranks,
}

# ---- programs beside the package

WITHOUT_GPU = "A machine without a GPU: "


def patch_rows(word: str) -> str:
    """The patches by what they are for, each with what holds with it: the first sentence of its
    module."""
    groups: dict[str, list[Row]] = {}
    for name in patches.names():
        one = patches.find(name)
        same = one.versions == patches.MEGATRON_CORE
        group = f"{one.package}, {'every tested version' if same else ranged(one.versions)}"
        text = first(import_module(f"megatron_ucp_patches.{name}"))
        group += ", on a machine without a GPU" if text.startswith(WITHOUT_GPU) else ""
        groups.setdefault(group, []).append((f"`{name}`", text.removeprefix(WITHOUT_GPU)))
    return "\n\n".join(f"**{group}**\n\n{listed(rows)}" for group, rows in groups.items())


def ranged(versions: Row) -> str:
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"


def trainer_flags(word: str) -> str:
    """The flags of a group; those that need no word are listed below."""
    rows, bare = [], []
    for one in flags.GROUPS[word]:
        default = "" if "default" in one.text and not one.allowed else default_of(one)
        names = ", ".join(f"`{name}`" for name in (one.name, *one.aliases))
        names += f" ({default})" if default else ""
        if one.text:
            rows.append((names, one.text))
        else:
            bare.append(names)
    lines = [listed(rows)]
    return "\n".join([*lines, "", f"Also: {'; '.join(bare)}."] if bare else lines)


def default_of(one: Any) -> str:
    if one.allowed:
        given = f"; default {one.default}" if one.default not in (None, False) else ""
        return f"{', '.join(map(str, one.allowed))}{given}"
    if one.default in (None, False, True) or one.kind is bool:
        return ""
    return f"{one.default:g}" if isinstance(one.default, float) else str(one.default)


def foreign(word: str) -> str:
    """Flags of Megatron that are accepted without effect, with the values that some must have."""
    plain = [f"`{name}`" for name in flags.IGNORED]
    rows = [f"`{name} {' or '.join(values)}`" for name, values in flags.NEUTRAL.items()]
    return f"{', '.join(plain + rows)}."


TEXTS: dict[str, Callable[[str], str]] = {
    "cli": cli,
    "arguments": arguments,
    "functions": functions,
    "allow": allow,
    "section": section,
    "errors": error_classes,
    "support": support_table,
    "figures": figures,
    "patches": patch_rows,
    "flags": trainer_flags,
    "foreign": foreign,
}
