"""x"""

import pytest

from tests.engines.autotp_jobs import Auto
from tests.engines.test_pairs import check

SAVE = "tests.engines.autotp_jobs:save"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("a", "b", "world"),
    [
        (Auto("llama", 2, 1), Auto("llama", 1, 0, seed=9), 1),
        (Auto("llama", 2, 1), Auto("llama", 2, 1, seed=9), 2),
        (Auto("llama", 2, 1), Auto("llama", 4, 3, seed=9), 4),
        (Auto("bigcode", 2, 1), Auto("bigcode", 1, 3, seed=9), 2),
        (Auto("gpt2", 2, 3), Auto("gpt2", 4, 0, seed=9), 4),
    ],
)
def test_pair(sources, a, b, world):
    folder = sources.get(2, a, SAVE)
    found = sources.ranks.run(world, "tests.engines.autotp_jobs:resume", b, folder, more=20)
    check(found)
    print(found[0]["loss"])
    assert found[0]["loss"] <= 1e-5
