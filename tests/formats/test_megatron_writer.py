"""The plan of a torch_dist folder: several writers fill its files at the places that it says, each
with runs of its own, and torch's own reader finds every element where it belongs."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from isal.isal_zlib import crc32, crc32_combine

from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.formats.checkpoint import Extras
from megatron_ucp.formats.folder import LocalFile, LocalFolder
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.megatron.index import read_index
from megatron_ucp.formats.megatron.index_writer import saved
from megatron_ucp.formats.megatron.writer import (
    WEIGHT,
    CommonFile,
    PlannedChunk,
    TorchDistPlan,
    WantedTensor,
    declared_keys,
    finish_files,
    plan_torch_dist,
)
from megatron_ucp.formats.pt.archive import Output
from tests.formats.megatron_files import by_torch

ROWS, COLUMNS, LAYERS = 6, 4, 2
Box = tuple[tuple[int, ...], tuple[int, ...]]


def model(alike: bool) -> dict[str, ParamSpec]:
    names = [f"decoder.layers.{n}.mlp.linear_fc2.weight" for n in range(LAYERS)]
    names += [f"decoder.layers.{n}.input_layernorm.weight" for n in range(LAYERS if alike else 1)]
    shapes = {n: (ROWS, COLUMNS) if "fc2" in n else (ROWS,) for n in names}
    return {n: ParamSpec(n, shape, "bfloat16") for n, shape in shapes.items()}


def values(param: str, state: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Different for every parameter, state and element."""
    first = 100 * sum(map(ord, param + state)) % 10_000
    count = ROWS * COLUMNS
    return torch.arange(first, first + count).to(getattr(torch, dtype))[: _elems(shape)].view(shape)


def _elems(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def boxes(shape: tuple[int, ...], cuts: int) -> tuple[Box, ...]:
    """Even slices of the last dim, as rows of a RowParallelLinear are cut."""
    width = shape[-1] // cuts
    rest = shape[:-1]
    return tuple(
        ((*(0 for _ in rest), at * width), (*rest, (at + 1) * width)) for at in range(cuts)
    )


def put(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def fill(folder: Path, plan: TorchDistPlan, chunk: PlannedChunk, pieces: int) -> None:
    """As several writers do: each writes a flat run of the chunk, one of them what is around."""
    start, stop = chunk.box
    shape = tuple(b - a for a, b in zip(start, stop, strict=True))
    spec_shape = model(True).get(chunk.tensor.param)
    whole = values(
        chunk.tensor.param,
        chunk.tensor.state,
        spec_shape.shape if spec_shape else (),
        chunk.tensor.dtype,
    )
    data = whole[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))].contiguous()
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert len(raw) == math.prod(shape) * data.element_size() and data.shape == shape
    edges = [len(raw) * at // pieces for at in range(pieces + 1)]
    crc = 0
    for low, high in pairwise(edges):
        put(folder / chunk.file, chunk.data_offset + low, raw[low:high])
        crc = crc32_combine(crc, crc32(raw[low:high]), high - low)
    for at, around in chunk.around({chunk.data_offset: crc}):
        put(folder / chunk.file, at, around)


def write(folder: Path, alike: bool, cuts: int, files: int, pieces: int) -> TorchDistPlan:
    params = model(alike)
    tensors = [
        WantedTensor(
            name, state, "bfloat16" if state == WEIGHT else "float32", boxes(spec.shape, cuts)
        )
        for name, spec in params.items()
        for state in (WEIGHT, "fp32", "exp_avg")
    ]
    plan = plan_torch_dist(params, tensors, declared_keys(params), files)
    plan.add_object("rng_state/shard_0.0_1.1", saved([{"a": 1}]))
    folder.mkdir()
    for name, size in plan.sizes.items():
        with open(folder / name, "wb") as file:
            file.truncate(size)
    for name, at, data in plan.objects.values():
        put(folder / name, at, data)
    for chunk in plan.chunks:
        fill(folder, plan, chunk, pieces)
    finish_files(folder, plan, Output("common.pt", {"iteration": 1}))
    return plan


@pytest.mark.parametrize(
    ("alike", "cuts", "files", "pieces"), [(True, 1, 1, 1), (True, 2, 3, 4), (False, 2, 2, 3)]
)
def test_what_several_writers_wrote(
    alike: bool, cuts: int, files: int, pieces: int, tmp_path: Path
) -> None:
    plan = write(tmp_path / "x", alike, cuts, files, pieces)
    assert len(plan.sizes) == files
    found, params = by_torch(tmp_path / "x"), model(alike)
    by_state: dict[tuple[str, str], list[PlannedChunk]] = {}
    for chunk in plan.chunks:
        by_state.setdefault((chunk.tensor.param, chunk.tensor.state), []).append(chunk)
    for (name, state), chunks in by_state.items():
        want = values(name, state, params[name].shape, chunks[0].tensor.dtype)
        stored = found[chunks[0].key]
        have = stored[chunks[0].at.index] if chunks[0].at.index else stored
        assert torch.equal(have, want), (name, state)
    index = read_index(LocalFolder(tmp_path / "x"))
    for name in index.file_names:
        file = index.opened(LocalFile(tmp_path / "x" / name), name)
        assert file.has_checksums
        for record, _ in file.all_records():
            file.check(record)
    (key,) = [key for key in index.objects if key.startswith("rng_state")]
    name = index.objects[key].file
    assert index.opened(LocalFile(tmp_path / "x" / name), name).value(key) == {"a": 1}


def test_layers_that_differ_get_keys_of_their_own(tmp_path: Path) -> None:
    keys = {chunk.key for chunk in write(tmp_path / "x", False, 1, 1, 1).chunks}
    assert "decoder.layers.1.mlp.linear_fc2.weight" in keys
    assert "decoder.layers.mlp.linear_fc2.weight" not in keys
    again = {chunk.key for chunk in write(tmp_path / "y", True, 1, 1, 1).chunks}
    assert "decoder.layers.self_attention.linear_qkv.layer_norm_weight" in again


def test_a_chunk_whose_bytes_changed_is_found(tmp_path: Path) -> None:
    plan = write(tmp_path / "x", True, 1, 1, 2)
    chunk = plan.chunks[0]
    with open(tmp_path / "x" / chunk.file, "r+b") as file:
        file.seek(chunk.data_offset)
        file.write(b"\x7f")
    index = read_index(LocalFolder(tmp_path / "x"))
    opened = index.opened(LocalFile(tmp_path / "x" / chunk.file), chunk.file)
    tensor = index.tensors[chunk.key]
    record = opened.record_of_chunk(tensor, tensor.chunks[0])
    with pytest.raises(Exception, match="wrong checksum"):
        opened.check(record)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 3), st.integers(1, 4))
def test_no_two_archives_share_bytes(cuts: int, files: int) -> None:
    shape, params = (
        (ROWS, 12),
        {"output_layer.weight": ParamSpec("output_layer.weight", (ROWS, 12), "float32")},
    )
    tensors = [
        WantedTensor("output_layer.weight", s, "float32", boxes(shape, cuts)) for s in ("fp32", "x")
    ]
    plan = plan_torch_dist(params, tensors, declared_keys(params), files)
    for name, size in plan.sizes.items():
        spans = [(c.offset_bytes, c.archive.size_bytes) for c in plan.chunks if c.file == name]
        at = 0
        for start, length in sorted(spans):
            assert start == at
            at += length
        assert at == size


@pytest.mark.parametrize(
    ("style", "initial", "words"),
    [
        ("cosine", 0.0, ""),
        ("cosine", 1e-5, "init_lr 1e-05"),
        ("WSD", 0.0, "wsd_decay_steps 8, lr_wsd_decay_style linear"),
    ],
)
def test_settings_of_a_schedule_without_a_place(style: str, initial: float, words: str) -> None:
    """Megatron's own state leaves them out: its run takes them from flags."""
    schedule = {"max_lr": 1e-3, "min_lr": 0.0, "num_steps": 7, "lr_decay_style": style}
    more = {"init_lr": initial, "wsd_decay_steps": 8, "lr_wsd_decay_style": "linear"}
    extras = Extras({"global_steps": 1}, schedule | more, LossScale(), None, {})
    common = CommonFile(Manifest(Keeper.PAPER, Mesh(), (), (), ()), extras, Mesh())
    written = common.output().tree["opt_param_scheduler"]
    assert schedule.items() <= written.items() and not {*more} & {*written}
    said = [note for note in common.notes if "schedule" in note]
    assert len(said) == bool(words) and all(note.endswith(f": {words}") for note in said)
