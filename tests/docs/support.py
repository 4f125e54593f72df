"""What is supported, and which tests show it: the tables of `support.md`, by name. A table has the
names of its columns, and rows: what it is about, a mark for each column, the files of tests."""

import re
from pathlib import Path

Row = tuple[str, ...]


def table_of(section: str) -> tuple[str, tuple[Row, list[Row]]]:
    name, *lines = section.strip().splitlines()
    cells = [line.strip("| ").split("|") for line in lines if line.startswith("|")]
    head, _, *rows = [tuple(cell.strip() for cell in row) for row in cells]
    return name, (head[:-1], rows)


SECTIONS = re.split("^# ", Path(__file__).with_suffix(".md").read_text(), flags=re.MULTILINE)[1:]
TABLES: dict[str, tuple[Row, list[Row]]] = dict(map(table_of, SECTIONS))
