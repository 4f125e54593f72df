"""Runs that the tests of several files resume: each is trained once."""

from pathlib import Path

import pytest

from tests.pretrain.common import GPT, LLAMA
from tests.pretrain.source import Source, make_source
from tests.ranks import RankPool


@pytest.fixture(scope="session")
def llama(ranks: RankPool, tmp_checkpoints: Path) -> Source:
    return make_source(ranks, LLAMA, tmp_checkpoints / "pretrain_llama")


@pytest.fixture(scope="session")
def gpt(ranks: RankPool, tmp_checkpoints: Path) -> Source:
    return make_source(ranks, GPT, tmp_checkpoints / "pretrain_gpt")
