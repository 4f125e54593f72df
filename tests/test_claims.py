"""What the pages claim is shown by the default run: `tests/run.sh` runs this behind everything
else.

    python -m tests.test_claims     prints each claim with a case of the last run that shows it
"""

import re

from megatron_ucp.errors import HELP_FILE
from tests.docs import support
from tests.ranks import ROOT
from tests.test_budget import LAST, last_run
from tests.test_errors import FOREIGN


def headings() -> list[str]:
    """The ids of errors, each of which has a section of its own."""
    found = re.findall(r"^## (.*)$", (ROOT / HELP_FILE).read_text(), re.MULTILINE)
    return [one for one in found if one not in FOREIGN]


def shown_ids() -> dict[str, str]:
    """Of each id that the last run raised: a test, or a job of ranks. Errors that test_errors makes
    up show nothing."""
    lines = [line.split("\t") for line in (LAST / "raised.tsv").read_text().splitlines()]
    return {one: where for one, where in reversed(lines) if "test_errors" not in where}


def shown_rows() -> dict[str, str]:
    """Of each row of the support tables: the functions that ran of a file that it names."""
    functions = last_run()[2]
    out: dict[str, str] = {}
    for name, (_, rows) in support.TABLES.items():
        for row in rows:
            files = [f"tests/{file}.py::" for file in row[-1].split(", ")]
            ran = [one for one in functions if one.startswith(tuple(files))]
            out[f"{name}: {row[0]}"] = ran[0] if ran else ""
    return out


def test_each_id_of_an_error_was_raised() -> None:
    assert not [one for one in headings() if one not in shown_ids()]


def test_each_row_of_the_support_tables_was_shown() -> None:
    assert not [row for row, test in shown_rows().items() if not test]


if __name__ == "__main__":
    for claim, case in {**shown_rows(), **shown_ids()}.items():
        print(f"{claim} | {case or 'NOBODY'}")
