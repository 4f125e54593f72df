"""The index of a torch_dist folder, read by C's unpickler in another process: what is read one by
one is the oracle, on golden folders, on damaged ones, and on synthetic ones of torch's own
pickle."""

import pickle
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.index import Drawn, drawn, pickled, write_folder
from megatron_ucp.errors import DamagedFileError, UcpError
from megatron_ucp.formats.folder import LocalFolder
from megatron_ucp.formats.megatron import index as reader
from megatron_ucp.formats.megatron.arguments import OF_METADATA
from megatron_ucp.formats.megatron.distcp import ArchivePlace, Blocks, Chunk, aligned
from megatron_ucp.formats.megatron.index import Index, parsed_index, read_index, tiling_fault
from megatron_ucp.formats.pt import unpickle
from megatron_ucp.formats.pt.unpickle import loads
from tests.formats.craft import mutated, pickle_of

METADATA = "torch.distributed.checkpoint.metadata"
GOLDEN = sorted((Path(__file__).parent / "golden").rglob(".metadata"))


@pytest.fixture(autouse=True)
def by_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small indexes too are read by the process that reads large ones."""
    monkeypatch.setattr(reader, "_SMALL_BYTES", 0)


def plain(index: Index) -> Any:
    """All that an index says."""
    tensors = {key: (one.dtype, one.shape, [*one.chunks]) for key, one in index.tensors.items()}
    return tensors, dict(index.objects)


def one_by_one(data: bytes) -> Index:
    tree = loads(data, file="x", allow=OF_METADATA, max_bytes=len(data))
    return reader._one_by_one(tree, "x")


def outcome(read: Any, data: bytes) -> Any:
    """What is read, or the error."""
    try:
        return plain(read(data))
    except UcpError as error:
        return type(error).__name__, error.problem, error.parameter, str(error.found)


def taken(data: bytes) -> Index | None:
    """What is read at once; None where it isn't."""
    return reader._of_child(data)


def synthetic(layers: int = 3, experts: int = 4, cuts: int = 12) -> bytes:
    """The pickle of an index with some thousand chunks."""
    at, tensors = Counter[str](), list[Drawn]()
    for key, shape, boxes in drawn(random.Random(1), layers, experts, cuts):
        for state in ("", "optimizer.state.exp_avg."):
            chunks = []
            for number, (start, size) in enumerate(boxes):
                file = f"__{number % 7}_0.distcp"
                chunks.append((start, size, file, at[file], 1500 + number))
                at[file] += 1500 + number
            tensors.append((state + key, "float32", shape, chunks))
    return pickled(tensors)


# ---- what torch writes


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: "-".join(path.parts[-4:-1]))
def test_golden_indexes_are_read_by_another_process(path: Path) -> None:
    data = path.read_bytes()
    found = taken(data)
    assert found is not None and plain(found) == plain(one_by_one(data))


def test_a_synthetic_index_is_read_by_another_process() -> None:
    data = synthetic()
    assert plain(parsed_index(data, "x")) == plain(one_by_one(data))
    metadata = pickle.loads(data)
    chunks = sum(len(one.chunks) for one in metadata.state_dict_metadata.values())
    assert len(metadata.storage_data) == chunks > 800
    found = taken(data)
    assert found is not None and len(found.file_numbers) == chunks


def test_an_index_is_small_when_it_is_sent() -> None:
    index = parsed_index(synthetic(layers=8, cuts=60), "x")
    sent = pickle.dumps(index)
    assert len(sent) < 56 * len(index.file_numbers)
    again: Index = pickle.loads(sent)
    assert plain(again) == plain(index)
    have, want = (
        [(tensor.key, chunk) for tensor, chunk in one.chunks_in("__3_0.distcp")]
        for one in (again, index)
    )
    assert have == want and want


def test_what_a_file_holds_of_tensors(tmp_path: Path) -> None:
    write_folder(tmp_path / "x", 2, 2, 5)
    index = read_index(LocalFolder(tmp_path / "x"))
    every = [
        (tensor, chunk)
        for name in index.file_names
        for tensor, chunk in index.chunks_in(name)
        if chunk.place.file == name
    ]
    assert (
        len(every)
        == len(index.file_numbers)
        == sum(len(one.chunks) for one in index.tensors.values())
    )
    assert all(chunk in [*tensor.chunks] for tensor, chunk in every[::17])
    assert index.chunks_in("other") == ()


# ---- what nobody writes


@pytest.mark.parametrize("path", GOLDEN[::3], ids=lambda path: "-".join(path.parts[-4:-1]))
def test_damaged_indexes_are_read_as_one_by_one(path: Path) -> None:
    data, found = path.read_bytes(), Counter[str]()
    for seed in range(60):
        changed = mutated(data, seed)
        want = outcome(one_by_one, changed)
        assert outcome(lambda changed: parsed_index(changed, "x"), changed) == want, seed
        found["error" if isinstance(want[0], str) else "index"] += 1
    assert len(found) == 2, found


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bits_are_read_as_one_by_one(seed: int) -> None:
    rng, data = random.Random(seed), bytearray(synthetic(layers=2, experts=2, cuts=6))
    for _ in range(rng.randint(1, 2)):
        data[rng.randrange(2000, len(data) - 50)] ^= 1 << rng.randrange(8)
    changed = bytes(data)
    want = outcome(one_by_one, changed)
    assert outcome(lambda changed: parsed_index(changed, "x"), changed) == want


def _twice(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["output_layer.weight"].chunks
    chunks.append(chunks[0])


def _lost(metadata: Any) -> None:
    metadata.storage_data.pop(next(i for i in metadata.storage_data if i.fqn.startswith("outp")))


def _left(metadata: Any) -> None:
    metadata.state_dict_metadata.pop("output_layer.weight")


def _overlaps(metadata: Any) -> None:
    import torch

    chunks = metadata.state_dict_metadata["output_layer.weight"].chunks
    chunks[1].sizes = torch.Size((chunks[1].sizes[0] + 1, *chunks[1].sizes[1:]))


def _gap(metadata: Any) -> None:
    one = metadata.state_dict_metadata["output_layer.weight"]
    one.size = type(one.size)((one.size[0] + 1, *one.size[1:]))


def _other_dims(metadata: Any) -> None:
    import torch

    one = metadata.state_dict_metadata["output_layer.weight"].chunks[0]
    one.sizes = torch.Size((*one.sizes, 1))


def _bad_name(metadata: Any) -> None:
    [*metadata.storage_data.values()][7].relative_path = "../x"


def _negative(metadata: Any) -> None:
    [*metadata.storage_data.values()][7].offset = -5


def _compressed(metadata: Any) -> None:
    [*metadata.storage_data.values()][7].transform_descriptors = ["zstd"]


CHANGES = [_twice, _lost, _left, _overlaps, _gap, _other_dims, _bad_name, _negative, _compressed]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_what_is_wrong_is_said_as_one_by_one(change: Any) -> None:
    metadata = pickle.loads(synthetic(layers=2, experts=2, cuts=6))
    change(metadata)
    data = pickle.dumps(metadata, protocol=4)
    want = outcome(one_by_one, data)
    assert isinstance(want[0], str) and "Error" in want[0], "nothing is wrong"
    assert outcome(lambda data: parsed_index(data, "x"), data) == want


def test_two_keys_of_the_same_places_are_one_tensor() -> None:
    metadata = pickle.loads(synthetic(layers=2, experts=2, cuts=6))
    key, other = "output_layer.weight", "lm_head.weight"
    metadata.state_dict_metadata[other] = metadata.state_dict_metadata[key]
    for index, place in [*metadata.storage_data.items()]:
        if index.fqn == key:
            metadata.storage_data[type(index)(other, index.offset)] = place
    data = pickle.dumps(metadata, protocol=4)
    found = taken(data)
    assert found is not None and plain(found) == plain(one_by_one(data))
    assert key in found.tensors and other not in found.tensors


# ---- hostile ones


def built(state: bytes) -> bytes:
    """An index whose `planner_data` is what these opcodes make."""
    name = b"c" + METADATA.encode() + b"\nMetadata\n)\x81"
    entries = b"}(X\x13\x00\x00\x00state_dict_metadata}X\x0c\x00\x00\x00storage_data}"
    return pickle_of(name + entries + b"X\x0c\x00\x00\x00planner_data" + state + b"ub")


DEEP = b"(" * 10**5 + b"t" * 10**5
HOSTILE = {
    "an int of 2 GB": b"\x8b\xff\xff\xff\x7f1",
    "a text of 2^60 bytes": b"\x8d" + (2**60).to_bytes(8, "little") + b"x",
    "a program": b"cos\nsystem\nX\x04\x00\x00\x00true\x85R",
    "nested a hundred thousand times": DEEP,
    "a hash that doubles sixty times": b"})" + b"q\x01h\x01\x86" * 60 + b"Ns",
    "truncated": b"X\xff\x00\x00\x00",
}


def test_an_empty_index_is_one() -> None:
    found = taken(built(b"N"))
    assert found is not None and plain(found) == ({}, {}) == plain(one_by_one(built(b"N")))


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_indexes_are_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the limits of the other process, and then by name."""
    monkeypatch.setattr(reader, "_SECONDS", 1)
    data = built(HOSTILE[what])
    assert taken(data) is None
    with pytest.raises(UcpError):
        parsed_index(data, "x")


def test_a_memo_of_all_memory_is_none() -> None:
    """C's unpickler keeps an array of as many entries as the largest number says, ours does not."""
    data = built(b"Nr\xff\xff\xff\x7f")
    assert taken(data) is None and plain(parsed_index(data, "x")) == ({}, {})


def test_a_rank_that_may_start_no_process_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise PermissionError

    data = synthetic()
    monkeypatch.setattr(reader.subprocess, "run", forbidden)
    assert taken(data) is None and plain(parsed_index(data, "x")) == plain(one_by_one(data))


# ---- limits


def test_a_large_index_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many chunks it has, also where it is read one by one; what takes more opcodes than
    torch does is refused."""
    monkeypatch.setattr(unpickle, "MAX_OPERATIONS", 1000)
    monkeypatch.setattr(unpickle, "MAX_PICKLE_BYTES", 1000)
    data = synthetic()
    assert plain(one_by_one(data)) == plain(parsed_index(data, "x"))
    with pytest.raises(DamagedFileError, match="operations"):
        one_by_one(pickle_of(b"N0" * 5000 + b"N"))
    with pytest.raises(DamagedFileError, match="operations"):
        parsed_index(pickle_of(b"N0" * 5000 + b"N"), "x")
    with pytest.raises(DamagedFileError, match="larger"):
        loads(data, file="x", allow=OF_METADATA)


# ---- whether chunks are the whole


def index_of(shape: tuple[int, ...], boxes: list[tuple[Any, Any]]) -> Index:
    chunks = [
        Chunk(tuple(start), tuple(size), ArchivePlace("x", number, 1))
        for number, (start, size) in enumerate(boxes)
    ]
    return reader._of_tensors([reader.StoredTensor("a", "float32", shape, chunks)], {})


def painted(shape: tuple[int, ...], boxes: list[tuple[Any, Any]]) -> bool:
    """Whether each element is in one box."""
    counts = np.zeros(shape, int)
    for start, size in boxes:
        if any(a + n > of for a, n, of in zip(start, size, shape, strict=True)):
            return False
        counts[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
    return bool((counts == 1).all())


def split(rng: random.Random, start: list[int], size: list[int]) -> list[tuple[Any, Any]]:
    """A box in random parts."""
    dims = [dim for dim, n in enumerate(size) if n > 1]
    if not dims or rng.random() < 0.25:
        return [(start, size)]
    dim = rng.choice(dims)
    at = rng.randrange(1, size[dim])
    low, high, moved = [*size], [*size], [*start]
    low[dim], high[dim], moved[dim] = at, size[dim] - at, start[dim] + at
    return split(rng, start, low) + split(rng, moved, high)


def test_random_tilings_and_what_is_none() -> None:
    wholes = others = 0
    for seed in range(400):
        rng = random.Random(seed)
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
        boxes = split(rng, [0] * len(shape), [*shape])
        rng.shuffle(boxes)
        assert tiling_fault(index_of(shape, boxes)) is None
        number, (start, size) = 0, boxes[0]
        changed = [*boxes]
        dim = rng.randrange(len(shape))
        moved = [*start]
        moved[dim] = max(0, moved[dim] + rng.choice((-1, 1)))
        match rng.randrange(3):
            case 0:
                changed[number] = (moved, size)
            case 1:
                changed[number] = (start, [n + (d == dim) for d, n in enumerate(size)])
            case _:
                changed[number] = rng.choice(boxes)
        is_whole = painted(shape, changed)
        assert (tiling_fault(index_of(shape, changed)) is None) == is_whole, seed
        wholes, others = wholes + is_whole, others + (not is_whole)
    assert wholes > 20 and others > 200


def test_boxes_that_no_plane_divides() -> None:
    around = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1))]
    assert tiling_fault(index_of((3, 3), [*around, ((1, 1), (1, 1))])) is None
    assert tiling_fault(index_of((3, 3), [*around, ((0, 0), (1, 1))])) == ("a", "two overlap")


def test_borders_at_many_places_are_no_damage() -> None:
    """Each layer of a stack is cut at other places."""
    rng, boxes = random.Random(0), list[tuple[Any, Any]]()
    for layer in range(200):
        rows = [0, *sorted(rng.sample(range(1, 9000), 3)), 9000]
        for low, high in pairwise(rows):
            at = rng.randrange(1, 7000)
            boxes.append(((layer, low, 0), (1, high - low, at)))
            boxes.append(((layer, low, at), (1, high - low, 7000 - at)))
    assert tiling_fault(index_of((200, 9000, 7000), boxes)) is None
    fault = tiling_fault(index_of((200, 9000, 7000), boxes[1:]))
    assert fault == ("a", "they leave a gap")


def test_what_is_wrong_with_chunks() -> None:
    whole = [((0, 0), (2, 3)), ((2, 0), (2, 3)), ((0, 3), (4, 1))]
    for boxes, what in (
        (whole, ""),
        (whole[:2], "gap"),
        ([*whole, ((1, 1), (1, 1))], "overlap"),
        ([*whole[:2], ((0, 2), (4, 1))], "overlap"),
        ([((0, 0), (4, 5))], r"outside, at \(0, 0\)"),
    ):
        _, found = tiling_fault(index_of((4, 4), boxes)) or ("", "")
        assert bool(found) == bool(what) and re.search(what, found)
    assert tiling_fault(index_of((), [((), ())])) is None
    assert tiling_fault(index_of((), [])) == ("a", "they leave a gap")


# ---- blocks of parameters


def within(start: Any, stop: Any) -> tuple[slice, ...]:
    return tuple(slice(int(a), int(b)) for a, b in zip(start, stop, strict=True))


def assert_read(blocks: Blocks, boxes: list[tuple[Any, Any]], stored: Any, param: Any) -> None:
    """The blocks, read of the chunks `boxes` of a stored tensor, are a parameter, each element
    once."""
    out = np.full(param.shape, -1)
    for number, ((start, stop),) in enumerate(blocks):
        first, size = boxes[blocks.chunks[number]]
        memory = stored[within(first, np.add(first, size))].reshape(-1)[blocks.offsets[number] :]
        box = within(start, stop)
        assert (out[box] == -1).all()
        out[box] = memory[: blocks.elems(number)].reshape(out[box].shape)
    assert (out == param).all()


def test_stacked_parameters_in_chunks_that_cross_them() -> None:
    crossed = 0
    for seed in range(150):
        rng = random.Random(seed)
        shape = tuple(rng.randint(1, 5) for _ in range(3))
        counts, stored = shape[: rng.randrange(3)], np.arange(np.prod(shape)).reshape(shape)
        boxes = split(rng, [0] * 3, [*shape])
        each = Blocks.of(index_of(shape, boxes).tensors["a"]).stacked(counts)
        params = stored.reshape(-1, *shape[len(counts) :])
        for blocks, param in zip(each, params, strict=True):
            assert_read(blocks, boxes, stored, param)
        crossed += sum(map(len, each)) > len(boxes)
    assert crossed > 30


def test_states_that_are_cut_at_other_rows() -> None:
    for seed in range(150):
        rng = random.Random(seed)
        shape = rng.randint(2, 9), rng.randint(2, 4)
        stored = np.arange(np.prod(shape)).reshape(shape)
        boxes: dict[str, list[tuple[Any, Any]]] = {}
        for state in "abc":
            borders = [
                0,
                *sorted(rng.sample(range(1, shape[0]), rng.randrange(shape[0]))),
                shape[0],
            ]
            boxes[state] = [((low, 0), (high - low, shape[1])) for low, high in pairwise(borders)]
            rng.shuffle(boxes[state])
        whole = {s: Blocks.of(index_of(shape, each).tensors["a"]) for s, each in boxes.items()}
        same = aligned(whole)
        assert same is not None and same["a"] == same["b"] == same["c"]
        for state, blocks in same.items():
            assert_read(blocks, boxes[state], stored, stored)
        columns = [((0, at), (shape[0], 1)) for at in range(shape[1])]
        whole["c"] = Blocks.of(index_of(shape, columns).tensors["a"])
        assert aligned(whole) is None
