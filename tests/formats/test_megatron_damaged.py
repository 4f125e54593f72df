"""Damaged and hostile folders of Megatron: each is refused by name before a tensor is read, and
nothing that a pickle names is run."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ucp.errors import (
    DamagedFileError,
    ForeignFileError,
    NotFoundError,
    StateMismatchError,
    UcpError,
    UnsafePickleError,
    UnsupportedError,
)
from megatron_ucp.formats.checkpoint import CallerModel
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import verify
from tests.formats.hostile_pickles import System
from tests.formats.megatron_files import (
    GOLDEN,
    TAG,
    changed_arguments,
    copied,
    cut,
    index_of,
    lost,
    negative,
    no_index,
    outside,
    rewritten,
    swapped_chunks,
)

CASE = "td_full_tp2dp2"
FC2 = "optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"
WEIGHT = "decoder.layers.mlp.linear_fc2.weight"


def check_all(tag: Path) -> None:
    with open_checkpoint(tag) as checkpoint:
        for name in checkpoint.file_names:
            checkpoint.check(name)
        assert checkpoint.extras.counters["global_steps"] == 3


def chunks_of(metadata: Any, key: str = WEIGHT) -> list[Any]:
    return metadata.state_dict_metadata[key].chunks


def moved_chunk(metadata: Any) -> None:
    """One chunk of the index lies where another one does, and leaves a gap."""
    import torch

    chunk = chunks_of(metadata)[1]
    index = next(i for i in metadata.storage_data if i.fqn == WEIGHT and i.offset == chunk.offsets)
    place = metadata.storage_data.pop(index)
    chunk.offsets = torch.Size((*chunk.offsets[:-1], 8))
    metadata.storage_data[type(index)(WEIGHT, chunk.offsets)] = place


def dropped_chunk(metadata: Any) -> None:
    chunk = chunks_of(metadata).pop()
    index = next(i for i in metadata.storage_data if i.fqn == WEIGHT and i.offset == chunk.offsets)
    del metadata.storage_data[index]


def lost_place(metadata: Any) -> None:
    del metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == WEIGHT)]


def shared_bytes(metadata: Any) -> None:
    one, other = [i for i in metadata.storage_data if i.fqn == WEIGHT][:2]
    metadata.storage_data[one] = metadata.storage_data[other]


def orphan(metadata: Any) -> None:
    """States of a parameter that is not there."""
    for key in [k for k in metadata.state_dict_metadata if k == WEIGHT]:
        del metadata.state_dict_metadata[key]
    for index in [i for i in metadata.storage_data if i.fqn == WEIGHT]:
        del metadata.storage_data[index]


def lost_state(metadata: Any) -> None:
    key = FC2.replace(".param.", ".exp_avg_sq.")
    del metadata.state_dict_metadata[key]
    for index in [i for i in metadata.storage_data if i.fqn == key]:
        del metadata.storage_data[index]


def huge(metadata: Any) -> None:
    """A grid of chunks that no file has, in a small index."""
    import torch

    entry = metadata.state_dict_metadata[WEIGHT]
    entry.size = torch.Size((2**40, 2**40, 2**40))


def transformed(metadata: Any) -> None:
    place = next(iter(metadata.storage_data.values()))
    object.__setattr__(place, "transform_descriptors", ["zstd"])


def other_kind(tag: Path) -> None:
    """`common.pt` of a run with expert parallelism."""

    def change(tree: Any) -> None:
        tree["optimizer"] = {0: tree["optimizer"], 1: tree["optimizer"]}

    rewritten(tag / "common.pt", change)


def shifted_masters(tag: Path) -> None:
    """As megatron-core's error does where a bucket has padding: a slice begins elsewhere."""
    changed_arguments(tag, overlap_grad_reduce=True)
    swapped_chunks(tag, (FC2, (1, 0, 0)), (FC2, (2, 0, 0)))  # type: ignore[arg-type]


def backend(tag: Path) -> None:
    (tag / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))


def said(**arguments: Any) -> Callable[[Path], None]:
    return lambda tag: changed_arguments(tag, **arguments)


def common(change: Callable[[Any], object]) -> Callable[[Path], None]:
    return lambda tag: rewritten(tag / "common.pt", change)


def groups(change: Callable[[list[Any]], object]) -> Callable[[Path], None]:
    return common(lambda tree: change(tree["optimizer"]["optimizer"]["param_groups"]))


def swapped(*with_it: Any) -> Callable[[Path], None]:
    return lambda tag: swapped_chunks(tag, (FC2, (1, 0, 0)), with_it)  # type: ignore[arg-type]


def third_group(found: list[Any]) -> None:
    found.append({**found[0], "lr": 1.0})


def no_schedule(tree: Any) -> None:
    tree["opt_param_scheduler"] = [1]


FILES = "files that the index lists are missing"
OTHER_BYTES = "not the one that the index says"
BY_DEFAULT = (UnsupportedError, "Megatron-core writes by default")
OF_EXPERTS = (ForeignFileError, "expert parallelism")
OFFLOADED = said(optimizer_cpu_offload=True)
REFUSED: dict[str, tuple[Callable[[Path], None], type[UcpError], str]] = {
    "a file is missing": (lost("__2_1.distcp"), NotFoundError, FILES),
    "common.pt is missing": (lost("common.pt"), NotFoundError, "not exist"),
    "a file is cut": (cut("__0_0.distcp", 71_000), DamagedFileError, "shorter than the index says"),
    "the index is cut": (cut(".metadata", 1000), DamagedFileError, "truncated"),
    "the index is empty": (cut(".metadata", 0), DamagedFileError, "malf"),
    "the index is a dict": (no_index, DamagedFileError, "another structure"),
    "chunks overlap": (index_of(moved_chunk), DamagedFileError, "overlap"),
    "chunks leave a gap": (index_of(dropped_chunk), DamagedFileError, "gap"),
    "a chunk lies nowhere": (index_of(lost_place), DamagedFileError, "lies nowhere"),
    "two chunks share bytes": (index_of(shared_bytes), DamagedFileError, "share bytes"),
    "a path upwards": (outside("../x"), DamagedFileError, "outside of its folder"),
    "an absolute path": (outside("/etc/passwd"), DamagedFileError, "outside of its"),
    "a negative place": (negative, DamagedFileError, "impossible place"),
    "a parameter of 2**120 elements": (index_of(huge), DamagedFileError, "gap"),
    "states without a parameter": (index_of(orphan), DamagedFileError, "that is not there"),
    "one state is missing": (index_of(lost_state), DamagedFileError, "has not all of the optim"),
    "a compressed file": (index_of(transformed), UnsupportedError, "stream transformation"),
    "chunks of two layers swapped": (
        *(swapped(FC2, (2, 0, 0)), StateMismatchError, "not the weights beside them"),
    ),
    "the bucket error of 0.16.1": (shifted_masters, StateMismatchError, "0.16.1 to 0.19.2"),
    "chunks of other tensors": (
        *(swapped("output_layer.weight", (0, 0)), DamagedFileError, OTHER_BYTES),
    ),
    "experts' optimizer in common.pt": (other_kind, *OF_EXPERTS),
    "one optimizer for experts": (said(expert_model_parallel_size=2), *OF_EXPERTS),
    "another backend": (backend, *BY_DEFAULT),
    "no metadata.json": (lost("metadata.json"), *BY_DEFAULT),
    "offloaded": (OFFLOADED, UnsupportedError, "offloaded to the CPU"),
    "a group that could be another": (
        *(groups(third_group), StateMismatchError, "which parameter group"),
    ),
    "a step that is a text": (
        *(groups(lambda found: found[0].update(step="3")), DamagedFileError, "a step is no number"),
    ),
    "an iteration that is a text": (
        *(
            common(lambda tree: tree.update(iteration="3")),
            DamagedFileError,
            "iteration is no number",
        ),
    ),
    "a scheduler that is a list": (common(no_schedule), DamagedFileError, "no dictionary"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused_by_name(what: str, tmp_path: Path) -> None:
    change, error, says = REFUSED[what]
    tag = copied(CASE, tmp_path / CASE)
    change(tag)
    with pytest.raises(error, match=says):
        check_all(tag)


def test_the_golden_folder_itself_is_whole() -> None:
    check_all(GOLDEN / CASE / TAG)


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_nothing_of_a_pickle_is_run(name: str, tmp_path: Path) -> None:
    tag, mark = copied(CASE, tmp_path / CASE), tmp_path / "mark"
    hostile = System(f"touch {mark}")
    if name == ".metadata":
        (tag / name).write_bytes(pickle.dumps(hostile, protocol=4))
    else:
        import torch

        torch.save({"args": hostile, "iteration": 3}, tag / name)
    with pytest.raises(UnsafePickleError, match="not on the closed list"):
        check_all(tag)
    assert not mark.exists()
    pickle.loads(pickle.dumps(hostile))
    assert mark.exists(), "the pickle would have run"


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    tag = copied(CASE, tmp_path / CASE)
    assert verify(tag, deep=True).findings == ()
    path = tag / "__1_1.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert any("checksum" in one.what for one in verify(tag, deep=True).findings)


LEGACY_REFUSED: dict[str, tuple[dict[str, Any], type[UcpError], str]] = {
    # each stage has two: they would get each other's numbers, or those of no layer
    "more layers": ({"num_layers": 8}, ForeignFileError, "expected: 4 layers, from number 0 on"),
    "no number of layers": ({"num_layers": None}, ForeignFileError, "expected: 0 layers"),
    "another first stage": (
        {"decoder_first_pipeline_num_layers": 1},
        ForeignFileError,
        "expected: 1 layers",
    ),
    "more ranks than are listed": (
        {"tensor_model_parallel_size": 10**12},
        NotFoundError,
        "2000000000000 folders",
    ),
}


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("what", LEGACY_REFUSED)
def test_legacy_folders_of_which_the_arguments_say_another_model(
    what: str, weights: bool, tmp_path: Path
) -> None:
    values, error, says = LEGACY_REFUSED[what]
    tag = copied("legacy_tp2pp2", tmp_path / "run")
    for name in sorted(path.name for path in tag.glob("mp_rank_*")):
        changed_arguments(tag, f"{name}/model_optim_rng.pt", **values)
    with pytest.raises(error, match=says), open_checkpoint(tag, told=CallerModel(weights=weights)):
        pass
