"""The checkpoint that is converted where nothing else is said."""

from pathlib import Path

import pytest

from tests.reshard import paper
from tests.reshard.plain import SHAPES


@pytest.fixture
def model() -> paper.Model:
    return paper.plain_model(SHAPES)


@pytest.fixture
def source(model: paper.Model, tmp_path: Path) -> Path:
    return paper.write(model, tmp_path / "source" / "step7")
