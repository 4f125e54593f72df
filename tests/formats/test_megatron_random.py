"""Random states in Megatron's own files: read as torch reads them, and refused by name where they
are none."""

import pickle
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.engines.run_state import Restored
from megatron_ucp.errors import DamagedFileError, UcpError, UnsafePickleError
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import verify
from tests.formats.hostile_pickles import System
from tests.formats.megatron_files import GOLDEN, TAG, changed_arguments, copied, rewritten
from tests.formats.megatron_random import (
    RUNS,
    alike,
    key_of,
    renamed,
    replaced,
    saved_states,
    without,
)

CASE = "rng_tp2dp2"
MESH = RUNS[CASE]
KEY = key_of(CASE, 1)
SHARD = Callable[[dict[str, Any]], Any]


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    """Those of this process come back."""
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(kept[0])
    np.random.set_state(kept[1])
    random.setstate(kept[2])


def planned(tag: Path, mesh: Mesh = MESH, rank: int = 1) -> Restored:
    """What a rank's load does with the generators; the bytes that it read are compared."""
    with open_checkpoint(tag) as checkpoint:
        found = Restored.plan(checkpoint, mesh, rank, (0, 0))
        checkpoint.check_read()
    return found


def live() -> dict[str, Any]:
    """As Megatron-LM saves them."""
    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }


def wanted(case: str, rank: int) -> dict[str, Any]:
    saved = saved_states(case, rank)
    return {name: saved[name] for name in live()}


# torch imports megatron-core to read the legacy files whole


@pytest.mark.parametrize("case", RUNS)
def test_every_rank_gets_what_torch_reads(case: str) -> None:
    for rank in range(RUNS[case].world):
        torch.manual_seed(1)
        assert not alike(live(), wanted(case, rank)), "the generators were equal before"
        found = planned(GOLDEN / case / TAG, RUNS[case], rank)
        assert found.note is None and found.states is not None
        found.apply()
        assert alike(live(), wanted(case, rank))
        tracked = saved_states(case, rank)["rng_tracker_states"]
        assert len(tracked) == 3
        for name, state in tracked.items():
            assert torch.equal(found.states[f"megatron.{name}"], state)


def test_the_comparison_sees_one_flipped_bit() -> None:
    planned(GOLDEN / CASE / TAG).apply()
    assert alike(live(), wanted(CASE, 1))
    state: Any = np.random.get_state()
    state[1][5] ^= 1
    np.random.set_state(state)
    assert not alike(live(), wanted(CASE, 1))


@pytest.mark.parametrize("case", RUNS)
def test_ranks_differ(case: str) -> None:
    """Or a rank could get another one's."""
    first, last = (saved_states(case, rank) for rank in (0, RUNS[case].world - 1))
    assert not alike(first, last)


@pytest.mark.parametrize(
    ("case", "mesh", "says"),
    [
        (CASE, Mesh(dp=4), r"another mesh \(tp=2,pp=1,dp=2"),
        (CASE, Mesh(tp=2, pp=2), "another mesh"),
        (CASE, Mesh(tp=2, sp=2), "another mesh"),
        ("rng_moe_ep2", Mesh(dp=2), "another mesh"),
        ("rng_moe_ep2", Mesh(dp=4, ep=2), "another mesh"),
        ("rng_legacy_tp2dp2", Mesh(tp=2, dp=4), "another mesh"),
        ("td_full_tp2dp2", Mesh(tp=2, dp=2), r"saved without them \(no_save_rng\)"),
        ("legacy_tp2pp2", Mesh(tp=2, pp=2), r"saved without them \(no_save_rng\)"),
    ],
)
def test_where_there_are_none_the_note_says_why(case: str, mesh: Mesh, says: str) -> None:
    found = planned(GOLDEN / case / TAG, mesh)
    assert found.states is None
    assert re.search(says, str(found.note))
    assert str(found.note).endswith("this process's own go on")


def test_copies_of_a_rank_share_them_on_any_number() -> None:
    """As in Megatron-LM, whose data-parallel ranks draw alike unless it is told otherwise."""
    for rank in (1, 3, 5, 7):
        planned(GOLDEN / CASE / TAG, Mesh(tp=2, dp=4), rank).apply()
        assert alike(live(), wanted(CASE, 1))


def test_with_experts_one_ranks_are_not_all_ranks(tmp_path: Path) -> None:
    """As Megatron-LM saved them for a time: one entry for ranks that have different experts."""
    case = "rng_moe_ep2"
    tag = copied(case, tmp_path / case)
    without(tag, key_of(case, 0))
    renamed(tag, key_of(case, 1), "rng_state/shard_0.0_1.1")
    found = planned(tag, RUNS[case])
    assert found.states is None and "one rank's for ranks that have" in str(found.note)


@pytest.mark.parametrize("case", RUNS)
def test_a_folder_with_them_is_whole_to_the_other_verbs(case: str) -> None:
    assert verify(GOLDEN / case / TAG, deep=True).findings == ()


# ------------------------------------------------ damaged and hostile


def entry(**changed: Any) -> SHARD:
    return lambda saved: [{**saved, **changed}]


def numpys(change: Callable[[list[Any]], None]) -> SHARD:
    def shard(saved: dict[str, Any]) -> Any:
        parts = list(saved["np_rng_state"])
        change(parts)
        return [{**saved, "np_rng_state": tuple(parts)}]

    return shard


def pythons(change: Callable[[list[int]], None]) -> SHARD:
    def shard(saved: dict[str, Any]) -> Any:
        version, words, left = saved["random_rng_state"]
        words = list(words)
        change(words)
        return [{**saved, "random_rng_state": (version, tuple(words), left)}]

    return shard


def put(at: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda parts: parts.__setitem__(at, value)


ZEROS = torch.zeros(5056, dtype=torch.uint8)
DAMAGED: dict[str, SHARD] = {
    "no list": lambda saved: saved,
    "an empty list": lambda saved: [],
    "no dictionary": lambda saved: [7],
    "one generator missing": lambda saved: [{"torch_rng_state": saved["torch_rng_state"]}],
    "torch: too short": entry(torch_rng_state=ZEROS[:5055].clone()),
    "torch: the bytes of a GPU": entry(torch_rng_state=ZEROS[:16].clone()),
    "torch: no state": entry(torch_rng_state=ZEROS + 255),
    "torch: numbers": entry(torch_rng_state=torch.zeros(5056)),
    "torch: rows": entry(torch_rng_state=ZEROS.view(2, 2528).clone()),
    "torch: strides": entry(torch_rng_state=torch.zeros(2 * 5056, dtype=torch.uint8)[::2]),
    "torch: empty": entry(torch_rng_state=ZEROS[:0].clone()),
    "torch: large": entry(torch_rng_state=torch.zeros(10**6, dtype=torch.uint8)),
    "torch: text": entry(torch_rng_state="x" * 5056),
    "GPU: neither kind": entry(cuda_rng_state=ZEROS[:17].clone()),
    "tracker: neither kind": entry(rng_tracker_states={"model-parallel-rng": ZEROS[:1].clone()}),
    "tracker: no state": entry(rng_tracker_states={"model-parallel-rng": ZEROS + 255}),
    "tracker: a list": entry(rng_tracker_states=[ZEROS]),
    "numpy: another generator": numpys(put(0, "PCG64")),
    "numpy: other words": numpys(put(1, np.zeros(624, dtype=np.int64))),
    "numpy: too few words": numpys(put(1, np.zeros(623, dtype=np.uint32))),
    "numpy: a place that is none": numpys(put(2, 625)),
    "numpy: a place below": numpys(put(2, -1)),
    "numpy: text": numpys(put(4, "0.0")),
    "numpy: too short": numpys(lambda parts: parts.pop()),
    "python: a word too large": pythons(put(7, 2**32)),
    "python: a word too many": pythons(lambda words: words.append(1)),
    "python: a word is a fraction": pythons(put(7, 1.5)),
    "python: a place that is none": pythons(put(624, 625)),
    "python: another version": lambda saved: [
        {**saved, "random_rng_state": (4, *saved["random_rng_state"][1:])}
    ],
}


@pytest.mark.parametrize("what", DAMAGED)
def test_what_is_no_generator_is_refused(what: str, tmp_path: Path) -> None:
    tag = copied(CASE, tmp_path / CASE)
    replaced(tag, KEY, DAMAGED[what](saved_states(CASE, 1)))
    before = live()
    with pytest.raises(DamagedFileError):
        planned(tag)
    assert alike(live(), before)
    planned(tag, rank=0)  # the other rank's are whole


def test_the_change_itself_is_no_damage(tmp_path: Path) -> None:
    tag = copied(CASE, tmp_path / CASE)
    replaced(tag, KEY, [saved_states(CASE, 1)])
    planned(tag).apply()
    assert alike(live(), wanted(CASE, 1))


def test_a_missing_rank_is_damage(tmp_path: Path) -> None:
    tag = copied(CASE, tmp_path / CASE)
    without(tag, KEY)
    with pytest.raises(DamagedFileError, match="the random states of a rank are missing"):
        planned(tag)
    without(tag, key_of(CASE, 0))
    assert "the checkpoint has none" in str(planned(tag).note)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    tag = copied(CASE, tmp_path / CASE)
    data = saved_states(CASE, 1)["rng_tracker_states"]["expert-parallel-rng"].numpy().tobytes()
    (path,) = [path for path in tag.glob("*.distcp") if data in path.read_bytes()]
    flipped = bytearray(path.read_bytes())
    flipped[flipped.index(data) + 100] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(UcpError, match="checksum"):
        planned(tag)


def test_legacy_files_are_refused_too(tmp_path: Path) -> None:
    case = "rng_legacy_tp2dp2"
    tag = copied(case, tmp_path / case)
    rewritten(tag / key_of(case, 1), lambda tree: tree["rng_state"][1].pop("np_rng_state"))
    planned(tag, RUNS[case], 1)
    with pytest.raises(DamagedFileError, match="np_rng_state"):
        planned(tag, RUNS[case], 3)
    rewritten(tag / key_of(case, 1), lambda tree: tree.pop("rng_state"))
    with pytest.raises(DamagedFileError, match="rng_state"):
        planned(tag, RUNS[case], 1)


def test_nothing_of_a_pickle_is_run(tmp_path: Path) -> None:
    tag, mark = copied(CASE, tmp_path / CASE), tmp_path / "mark"
    hostile = System(f"touch {mark}")
    replaced(tag, KEY, [{**saved_states(CASE, 1), "np_rng_state": hostile}])
    with pytest.raises(UnsafePickleError, match="not on the closed list"):
        planned(tag)
    assert not mark.exists()
    pickle.loads(pickle.dumps(hostile))
    assert mark.exists(), "the pickle would have run"


# ------------------------------------------------ what this machine has not


def test_a_gpus_generators_are_named_where_there_is_none(tmp_path: Path) -> None:
    """Of a run on a GPU: sixteen bytes of each."""
    tag, gpu = copied(CASE, tmp_path / CASE), torch.arange(16, dtype=torch.uint8)
    replaced(tag, KEY, entry(cuda_rng_state=gpu)(saved_states(CASE, 1)))
    found = planned(tag)
    assert "own go on for cuda, as the checkpoint has none that fit" in str(found.note)
    found.apply()
    assert alike(live(), wanted(CASE, 1))
    changed_arguments(tag, no_save_rng=True)
    assert "no_save_rng" in str(planned(tag).note)
