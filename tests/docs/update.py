"""Puts into README and docs what the code says and what their commands print:

    python -m tests.docs.update [PAGE ...]      both
    python -m tests.docs.update --blocks        the generated blocks alone, in a second

For the commands the work folder is made anew, and the quickstart trains its 80 steps. Look at the
difference before you commit it: what is printed becomes what the pages say.
"""

import os
import sys
import tempfile
from pathlib import Path

from tests.docs import console, generated, work
from tests.docs.pages import ROOT, Block, all_pages, blocks_of
from tests.ranks import RankPool

STEPS = 80


def update(page: Path) -> list[str]:
    """Rewrites the outputs of one page, in this folder; the commands that failed."""
    path = ROOT / page
    lines, failed = path.read_text().split("\n"), []
    edits: list[tuple[int, int, list[str]]] = []
    for block in blocks_of(path.read_text()):
        if not console.is_elsewhere(block):
            failed += run_block(page, block, edits)
    for start, end, new in reversed(edits):
        lines[start:end] = new
    path.write_text("\n".join(lines))
    return failed


def run_block(page: Path, block: Block, edits: list[tuple[int, int, list[str]]]) -> list[str]:
    failed = []
    for command in block.commands:
        try:
            printed = console.run(command)
        except (Exception, SystemExit) as error:  # the other pages are still to be done
            failed.append(f"{page}:{command.line}: {error}")
            continue
        if command.shown is not None:
            start = command.line + command.text.count("\n")
            shown = console.as_shown(command.shown, printed)
            edits.append((start, start + len(command.shown), shown))
    return failed


def fill(page: Path) -> None:
    path = ROOT / page
    text = path.read_text()
    path.write_text(generated.filled(text))


def main() -> int:
    pages = [Path(name) for name in sys.argv[1:] if name != "--blocks"] or all_pages()
    for page in pages:
        fill(page)
    return 0 if "--blocks" in sys.argv else run_all(pages)


def run_all(pages: list[Path]) -> int:
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))
    failed = []
    pool = RankPool(2)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made"
        made.mkdir()
        try:
            work.make(made, pool, STEPS)
        finally:
            pool.close()
        for page in pages:
            with work.copied(made, Path(folder) / "work"):
                failed += update(page)
    print("\n".join(failed) or "all commands ran")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
