"""What the tests read of a Markdown page: its blocks of code, its links, its sentences.

A block ```console holds `$ command` lines, each followed by exactly what it prints (numbers apart;
a line `...` stands for any lines). A block ```bash holds commands whose output is not shown. Both
are run, page by page, in a work folder (`tests/docs/work.py`), unless an HTML comment stands
directly before the block: `<!-- run by tests/path.py::test_name -->`, a test that runs these
scripts, or `<!-- not run: reason -->` with a reason of `REASONS`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
REASONS = {
    "a script of your own",
    "paths of your own",
    "installs packages",
    "needs Megatron-LM",
    "needs several GPUs or machines",
    "changes the checkout",
}
LANGUAGES = {"console", "bash", "python", "json", "toml", "text", "diff", "bibtex"}
LINK = re.compile(r"(?<!\!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
PICTURE = re.compile(r"!\[[^\]]*\]\((?P<target>[^)\s]+)\)")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LIST_ITEM = re.compile(r"^\s*(?:[-*]|\d+\.)\s+")
GENERATED = re.compile(
    r"(?P<begin><!-- generated: (?P<kind>\w+)(?P<word>[^\n]*?) -->)\n"
    r"(?P<body>.*?)(?P<end><!-- end of generated -->)",
    re.DOTALL,
)
MOST_WORDS = 30
INTERNAL = re.compile(r"\b(twins?|doors?|told|on paper|verbs?|asked|missed)\b", re.IGNORECASE)


@dataclass
class Command:
    """One command of a block and what it prints; `shown` is None in a block ```bash."""

    text: str
    shown: list[str] | None
    line: int


@dataclass
class Block:
    language: str
    lines: list[str]
    line: int
    """Of its first line, from 1."""
    comment: str = ""
    commands: list[Command] = field(default_factory=list)


def user_pages() -> list[Path]:
    """Relative to the root."""
    docs = ROOT / "docs"
    found = [ROOT / "README.md", *sorted(docs.glob("*.md")), *sorted(docs.glob("reference/*.md"))]
    return [path.relative_to(ROOT) for path in found]


def all_pages() -> list[Path]:
    others = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]
    others += [ROOT / "examples" / "README.md", ROOT / "tests" / "README.md"]
    return sorted({path.relative_to(ROOT) for path in others} | set(user_pages()))


def blocks_of(text: str) -> list[Block]:
    found: list[Block] = []
    inside: Block | None = None
    before = ""
    for number, line in enumerate(text.split("\n"), 1):
        if inside is not None:
            if line.strip() == "```":
                inside.commands = commands_of(inside)
                inside, before = None, ""
            else:
                inside.lines.append(line)
        elif line.lstrip().startswith("```"):
            comment = re.fullmatch(r"\s*<!--\s*(.*?)\s*-->\s*", before)
            inside = Block(line.strip()[3:], [], number + 1, comment[1] if comment else "")
            found.append(inside)
        else:
            before = line
    if inside is not None:
        raise ValueError(f"a block that begins at line {inside.line} has no end")
    return found


def commands_of(block: Block) -> list[Command]:
    if block.language == "console":
        return console_commands(block)
    if block.language == "bash":
        return [
            Command(text, None, line)
            for text, line in joined(block.lines, block.line)
            if text.strip() and not text.lstrip().startswith("#")
        ]
    return []


def console_commands(block: Block) -> list[Command]:
    found: list[Command] = []
    continues = False
    for number, line in enumerate(block.lines, block.line):
        if continues:
            found[-1].text += "\n" + line
            continues = line.endswith("\\")
        elif line.startswith("$ "):
            found.append(Command(line[2:], [], number))
            continues = line.endswith("\\")
        elif not found:
            raise ValueError(f"line {number}: output before a command")
        else:
            shown = found[-1].shown
            assert shown is not None
            shown.append(line)
    return found


def joined(lines: list[str], first: int) -> Iterator[tuple[str, int]]:
    """Lines with those that continue them."""
    text, start = "", first
    for number, line in enumerate(lines, first):
        start = start if text else number
        text += ("\n" if text else "") + line
        if not line.endswith("\\"):
            yield text, start
            text = ""


def prose(text: str) -> str:
    """Without blocks of code and comments."""
    kept, inside = [], False
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        if not inside and not fence:
            kept.append(line)
        inside = inside != fence
    return COMMENT.sub("", "\n".join(kept))


def anchors_of(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    found: dict[str, int] = {}
    anchors = set()
    for line in prose(text).split("\n"):
        heading = re.match(r"#{1,6}\s+(.*)", line)
        if heading:
            words = LINK.sub(r"\1", heading[1]).replace("`", "").strip().lower()
            name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
            count = found.get(name, 0)
            found[name] = count + 1
            anchors.add(f"{name}-{count}" if count else name)
    return anchors | set(re.findall(r'<a (?:id|name)="([^"]+)"', text))


def link_faults(page: Path, text: str) -> Iterator[str]:
    """Links of a page (relative to the root) that lead nowhere, and pictures that are not there."""
    targets = [found["target"] for found in (*LINK.finditer(prose(text)), *PICTURE.finditer(text))]
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page.parent / name).resolve() if name else ROOT / page
        if not path.exists():
            yield f"{page}: {target}: no such file"
        elif anchor:
            other = text if not name else path.read_text()
            if anchor not in anchors_of(other):
                yield f"{page}: {target}: no such heading"


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page, without code, tables and the targets of links."""
    paragraph: list[str] = []
    for line in [*prose(text).split("\n"), ""]:
        ends = not line.strip() or line.startswith(("#", "|", ">")) or LIST_ITEM.match(line)
        if ends and paragraph:
            yield from split(" ".join(paragraph))
            paragraph = []
        if line.strip() and not line.lstrip().startswith(("#", "|")):
            paragraph.append(LIST_ITEM.sub("", line, count=1).strip("> "))


def split(paragraph: str) -> list[str]:
    plain = LINK.sub(r"\g<text>", re.sub(r"`[^`]*`", "code", paragraph))
    return [one for one in re.split(r"(?<=[.!?])[)*]*\s+", plain) if one.strip()]


def language_faults(page: Path, text: str) -> Iterator[str]:
    text = GENERATED.sub("", text)  # the code's own words
    for sentence in sentences(text):
        words = re.findall(r"[\w'’./=-]*\w[\w'’./=-]*", sentence)
        if len(words) > MOST_WORDS:
            yield f"{page}: {len(words)} words: {sentence}"
    for line in prose(text).split("\n"):
        for word in INTERNAL.findall(re.sub(r"`[^`]*`", "", line)):
            yield f"{page}: {word!r} in: {line.strip()}"
