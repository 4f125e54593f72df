"""Model files of several ranks: large tensors are compared without a look at them, and read where
they differ."""

from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ucp.formats.deepspeed.files import TagFolder
from megatron_ucp.formats.deepspeed.native import differs_in, held_by
from megatron_ucp.formats.folder import LocalFolder

LARGE = 2**20 + 8
NAMES = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in (0, 1)]


class Source(TagFolder):
    """As much of a checkpoint of ZeRO-3 as they need."""

    weights: Any = SimpleNamespace(name_of=lambda name, file: name)
    expert_counts: Any = MappingProxyType[str, int]({})

    model_name: str = NAMES[0]

    def where(self, slot: object) -> Any:
        raise NotImplementedError

    def model_of(self, mp: int, part: int = 0) -> str:
        return NAMES[part]

    def file_place(self, rank: int) -> tuple[int, int]:
        return rank, 0


def tree_of(rank: int) -> dict[str, Any]:
    large = torch.arange(LARGE, dtype=torch.int32)
    module = {"shared": large, "own": large + rank, "small": torch.ones(2)}
    return {
        "module": module,
        "buffer_names": list(module),
        "lr_scheduler": {"best": torch.ones(()) * rank},
        "same": {"a": large, "b": [large[::2]]},
        "table": {"a": large + rank},
        # equal values that lie otherwise
        "view": large[rank:][: LARGE - 1] if rank == 0 else large[: LARGE - 1].clone(),
    }


@pytest.fixture
def source(tmp_path: Path) -> Any:
    for rank, name in enumerate(NAMES):
        torch.save(tree_of(rank), tmp_path / name)
    with Source(LocalFolder(tmp_path)) as found:
        yield found


def test_large_tensors_are_compared_and_read(source: Any) -> None:
    what = differs_in(source, NAMES[1])
    assert what.buffers == {"own"} and what.client_state == {"table"} and what.scheduler
    assert not differs_in(source, NAMES[0])
    for rank in (0, 1):
        own = held_by(source, rank).only(what)
        data = (tree_of(rank)["table"]["a"]).numpy().tobytes()
        assert own.buffers["own"].get("data") == data == own.client_state["table"]["a"].get("data")
        assert list(own.buffers) == ["own"] and list(own.client_state) == ["table"]


def test_what_all_ranks_share_is_not_read(source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    tensor = source.tensor

    def counted(file: str, ref: Any, *rest: Any) -> Any:
        read.append(ref.numel)
        return tensor(file, ref, *rest)

    monkeypatch.setattr(source, "tensor", counted)
    what = differs_in(source, NAMES[1])
    del read[:]
    own = held_by(source, 1).only(what)
    assert sorted(read) == [1, LARGE, LARGE] and own.scheduler is not None
