"""The call stacks of docs/maintain/architecture.md, and what real runs call in which order."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.docs.pages import ROOT, blocks_of

PAGE = ROOT / "docs" / "maintain" / "architecture.md"
PACKAGE = f"{ROOT / 'megatron_ucp'}/"


def listed(heading: str) -> list[str]:
    """The functions that the page lists below a heading, in its order, classes left out."""
    section = PAGE.read_text().partition(f"\n### {heading}\n")[2].partition("\n#")[0]
    lines = [line for block in blocks_of(section) for line in block.lines]
    found = [re.match(r"(\w+(?:/\w+)+(?:\.\w+)+)\s", line) for line in lines]
    names = [one[1] for one in found if one]
    return [name for name in names if not name.rpartition(".")[2][0].isupper()]


def called(run: Callable[[], Any]) -> list[str]:
    """The functions of the package that a run calls in this thread, in the order of their first
    calls: `module.qualified_name`, as the page names them."""
    order: dict[str, None] = {}

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            module = Path(code.co_filename.removeprefix(PACKAGE)).with_suffix("")
            order.setdefault(f"{module}.{code.co_qualname}")

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return list(order)


def differ(heading: str, order: list[str], but: tuple[str, ...] = ()) -> str:
    """What the page says otherwise than a run; empty where nothing is. `but` are names of another
    way through the same journey."""
    wanted = [name for name in listed(heading) if name not in but]
    found = [name for name in order if name in wanted]
    return "" if found == wanted else f"the page lists {wanted}, and a run calls {found}"
