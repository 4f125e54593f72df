"""The fingerprint of a training state: one on every mesh, in every format and engine; changed by
the smallest fault, which it names."""

import itertools
import json
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from isal.isal_zlib import crc32

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.core.manifest import FILE_NAME
from megatron_ucp.formats.output_folder import entry_of
from megatron_ucp.reshard.checksums import KnownSums, linear, of_runs, shifted, standard
from tests.engines import background_save_jobs
from tests.engines.model import Setup
from tests.engines.sources import Sources
from tests.engines.tensor_jobs import Mega, Staged
from tests.ranks import RankPool

SOURCE = Setup(1, "bf16")


# ------------------------------------------------ arithmetic


@pytest.mark.parametrize(
    "shape", [(7,), (1,), (6, 5), (3, 1, 4), (200,), (101, 2), (2, 3, 40)], ids=str
)
def test_runs_of_a_tensor_add_up_to_its_crc(shape: tuple[int, ...]) -> None:
    """Runs at constant strides, each of 12 bytes in rows of 20, against zlib's CRC of all bytes
    with zeros between."""
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 256, (int(np.prod(shape)), 12), dtype=np.uint8)
    whole = np.zeros((*shape, 20), dtype=np.uint8)
    whole[..., 3:15] = rows.reshape(*shape, 12)
    strides = whole.strides[:-1]
    total = shifted(of_runs(rows, shape, strides), 5)
    assert standard(total, whole.nbytes) == crc32(whole.tobytes())


def test_parts_in_any_order_add_up() -> None:
    dice = random.Random(3)
    whole = dice.randbytes(100_003)
    cuts = [0, *sorted(dice.sample(range(1, len(whole)), 50)), len(whole)]
    runs = list(itertools.pairwise(cuts))
    dice.shuffle(runs)
    total = 0
    for low, high in runs:
        total ^= shifted(linear(whole[low:high]), len(whole) - high)
    assert standard(total, len(whole)) == crc32(whole)
    (low, high), *_ = runs
    total ^= shifted(linear(whole[low:high]), len(whole) - high)  # a run that is missing
    assert standard(total, len(whole)) != crc32(whole)


def test_known_sums_are_those_of_exactly_their_bytes() -> None:
    plan = random.Random(7)
    for _ in range(200):
        data = plan.randbytes(plan.randint(2, 400))
        first = plan.randrange(10**6)
        edges = sorted({plan.randint(0, len(data)) for _ in range(plan.randint(0, 5))})
        known = KnownSums(first + edge for edge in edges)
        at = [0, *sorted({plan.randint(0, len(data)) for _ in range(3)}), len(data)]
        for low, high in itertools.pairwise(at):  # as it is written, in pieces
            assert known.crc32(data[low:high], first + low) == crc32(data[low:high])
        for low, high in itertools.combinations(sorted({*edges, *at}), 2):
            assert known.linear(first + low, high - low) == linear(data[low:high])
        assert known.linear(first, len(data) + 1) is None
        assert known.linear(first - 1, len(data)) is None
        inner = {*range(len(data))} - {*edges, *at}
        for low in inner:
            assert known.linear(first + low, len(data) - low) is None
            assert known.linear(first, low) is None


# ------------------------------------------------ one state, one fingerprint


@pytest.mark.ranks
@pytest.mark.parametrize(
    "target",
    [Setup(0, "bf16"), Setup(2, "bf16"), Setup(3, "bf16"), Setup(1, "bf16", groups=3)],
    ids=lambda one: f"stage {one.zero}, {one.groups} groups",
)
def test_engine_files_and_an_engine_that_loaded_them_have_one(
    ranks: RankPool, tmp_path: Path, target: Setup
) -> None:
    for (engine, files, loaded), before in ranks.run(
        2, background_save_jobs.fingerprints, SOURCE, str(tmp_path), target
    ):
        assert engine.digest == files.digest
        assert engine.table == loaded.table
        assert engine.differences(loaded) == []
        assert before > 10, "the engine was equal before the load"


@pytest.mark.ranks
def test_conversions_and_meshes_keep_it(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, background_save_jobs.fingerprints, SOURCE, str(tmp_path / "a"), SOURCE)
    want = ucp.fingerprint(tmp_path / "a")
    assert len(want.table) == 11 and len(want.digest) == 64
    ucp.convert(tmp_path / "a", tmp_path / "native", target=ucp.Mesh(dp=3, zero=3))
    ucp.convert(tmp_path / "a", tmp_path / "universal", to="universal")
    ucp.convert(tmp_path / "a", tmp_path / "torch_dist", to="torch_dist")
    for name in ("native", "universal", "torch_dist"):
        assert ucp.fingerprint(tmp_path / name).differences(want) == [], name
        assert ucp.diff(tmp_path / "a", tmp_path / name, fingerprint=True) == [], name


# ------------------------------------------------ faults


@pytest.mark.ranks
def test_a_bit_that_flips_in_memory_once_it_was_read(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, background_save_jobs.fingerprints, SOURCE, str(tmp_path), SOURCE)
    for rank in (None, 1):
        job, setup = background_save_jobs.flipped_once_read, replace(SOURCE, seed=9)
        for said in ranks.run(2, job, setup, str(tmp_path), rank):
            is_seen = said.startswith("ForeignFileError: ") and "is not what was saved" in said
            assert is_seen == (rank is not None), said


@dataclass
class Shard:
    """One state of one group in the file of a rank, and the same in the file of another one; `at`
    is the number of an element."""

    own: torch.Tensor
    other: torch.Tensor
    at: int


def flip(shard: Shard) -> None:
    shard.own.view(torch.int32)[shard.at] ^= 1


def swap(shard: Shard) -> None:
    own, at = shard.own, shard.at
    assert own[at] != own[at + 1]
    own[at], own[at + 1] = own[at + 1].clone(), own[at].clone()


def drop(shard: Shard) -> None:
    shard.own.zero_()


def double(shard: Shard) -> None:
    shard.own.copy_(shard.other)


FAULTS: dict[str, Callable[[Shard], None]] = {
    "a flipped bit": flip,
    "two swapped elements": swap,
    "a dropped shard": drop,
    "a doubled shard": double,
}
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def shards(tree: Any, state: str) -> list[torch.Tensor]:
    held = tree["optimizer_state_dict"]
    if state == "fp32":
        return held["single_partition_of_fp32_groups"]
    return [one[state] for one in held["base_optimizer_state"]["state"].values()]


def damaged(good: Path, copy: Path, rank: int, state: str, fault: str, dice: random.Random) -> str:
    """A copy of a tag in which one record of one file has a fault. The file is written anew, with
    checksums of its own, and the manifest says it is that file. Returns the parameter that has it,
    as DeepSpeed says in the file."""
    shutil.copytree(good, copy)
    paths = sorted(copy.glob("*optim_states.pt"))
    tree, other = (torch.load(paths[at], weights_only=False) for at in (rank, rank - 1))
    mappings = tree["optimizer_state_dict"]["param_slice_mappings"]
    # the largest parameter is cut by tp: of one that is not, tensor ranks have copies
    largest = [max(one, key=lambda name, one=one: one[name].numel) for one in mappings]
    group = max(range(len(mappings)), key=lambda n: mappings[n][largest[n]].numel)
    own, name, places = shards(tree, state)[group].detach(), largest[group], mappings[group]
    at = places[name].start + dice.randrange(places[name].numel - 1)
    FAULTS[fault](Shard(own, shards(other, state)[group].detach(), at))
    torch.save(tree, paths[rank])
    manifest = json.loads((copy / FILE_NAME).read_text())
    entry = entry_of(paths[rank])
    manifest["files"] = [
        [entry.name, entry.size_bytes, entry.sha256] if name == entry.name else [name, size, sha]
        for name, size, sha in manifest["files"]
    ]
    (copy / FILE_NAME).write_text(json.dumps(manifest))
    return name


MESHES: dict[str, tuple[int, Any]] = {
    "the same": (4, Mega("llama", 2, 1, "bf16", seed=9)),
    "zero=3": (2, Mega("llama", 1, 3, "bf16", seed=9)),
    "tp=2,zero=0": (2, Mega("llama", 2, 0, "bf16", seed=9)),
    "tp=4": (4, Mega("llama", 4, 2, "bf16", seed=9)),
    "pp=2": (4, Staged("llama", 1, 1, "bf16", layers=2, seed=9, pp=2)),
}


@pytest.mark.ranks
def test_a_fault_in_any_file_is_named_by_a_load_onto_any_mesh(
    sources: Sources, tmp_path: Path
) -> None:
    """Every fault in the masters and each moment of every file. Nothing else sees them: without
    checksums each is loaded."""
    source = sources.get(4, Mega("llama", 2, 1, "bf16"), more=3)
    dice, wanted = random.Random(5), dict[str, tuple[str, str]]()
    for number, (state, fault) in enumerate(itertools.product(STATES, FAULTS)):
        folder = f"{state}, {fault}"
        name = damaged(Path(source) / "filled", tmp_path / folder, number % 4, state, fault, dice)
        wanted[folder] = name, state
    for mesh, (world, setup) in MESHES.items():
        job = background_save_jobs.refused_loads
        for said in sources.ranks.run(world, job, setup, str(tmp_path), [*wanted]):
            for folder, (name, state) in wanted.items():
                refused, unseen = said[folder]
                assert refused.startswith("ForeignFileError: the "), (mesh, folder, refused)
                assert f"{name} ({state})" in refused, (mesh, folder, refused)
                assert unseen == "", (mesh, folder, unseen)
    for folder in wanted:
        with pytest.raises(ucp.ForeignFileError, match=r"is not what was saved|are not those of"):
            ucp.fingerprint(tmp_path / folder)


@pytest.mark.ranks
def test_a_flipped_bit_under_an_old_checksum_names_the_file(
    sources: Sources, tmp_path: Path
) -> None:
    """What the fingerprint covers is read without a checksum of the file: where it differs, the
    records are read again, and the damaged one is named."""
    source = sources.get(4, Mega("llama", 2, 1, "bf16"), more=3)
    files: dict[str, str] = {}
    for rank, state in enumerate(STATES):
        copy = shutil.copytree(Path(source) / "filled", tmp_path / state)
        path = sorted(copy.glob("*optim_states.pt"))[rank]
        (own, *_) = shards(torch.load(path, weights_only=False), state)
        data = bytearray(path.read_bytes())
        data[data.index(own.detach().numpy().tobytes()) + 5] ^= 16
        path.write_bytes(data)
        files[state] = path.name
    for world, setup in MESHES.values():
        job = background_save_jobs.refused_loads
        for said in sources.ranks.run(world, job, setup, str(tmp_path), [*STATES]):
            for state in STATES:
                refused, unseen = said[state]
                assert refused.startswith("DamagedFileError: "), refused
                assert f"/{files[state]}\n" in refused, refused
                assert unseen == "", unseen


@pytest.mark.ranks
def test_steps_and_hyper_parameters_are_part_of_it(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, background_save_jobs.fingerprints, SOURCE, str(tmp_path), SOURCE)
    want = ucp.fingerprint(tmp_path)
    for key, value in (("lr", 0.5), ("step", 7.0)):
        settings = {name: dict(one) for name, one in want.settings.items()}
        assert key in settings["up.weight"]
        settings["up.weight"][key] = value
        other = type(want)(want.table, settings)
        assert other.digest != want.digest
        assert other.differences(want) == ["up.weight (steps or hyper-parameters)"]


def test_what_has_none_is_refused() -> None:
    with pytest.raises(ucp.UsageError, match="no fingerprint"):
        ucp.fingerprint(3)


# ------------------------------------------------ without moving data


@pytest.mark.ranks
def test_diff_takes_a_fingerprint_in_a_file(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = sources.get(2, SOURCE)
    trained, filled = f"{folder}/trained", f"{folder}/filled"

    def tool(*words: str) -> tuple[int, str]:
        code = main([*words])
        return code, capsys.readouterr().out

    kept = tmp_path / "trained.json"
    code, text = tool("--json", "inspect", trained, "--fingerprint")
    kept.write_text(text)
    assert code == 0 and ucp.fingerprint(kept).digest == ucp.fingerprint(trained).digest
    assert tool("diff", str(kept), trained) == (0, "equal\n")
    for words in ((str(kept), filled), (filled, str(kept)), (trained, filled, "--fingerprint")):
        code, text = tool("diff", *words, "--limit", "99")
        assert code == 1 and "\nup.weight: exp_avg: float32 " in text
    tree = json.loads(kept.read_text())
    tree["fingerprint"]["settings"]["up.weight"]["lr"] = 0.5
    del tree["fingerprint"]["digest"]
    kept.write_text(json.dumps(tree))
    code, text = tool("diff", str(kept), trained)
    assert code == 1 and text.startswith("up.weight: steps or hyper-parameters: lr=0.5 and lr=")


@pytest.mark.ranks
def test_what_holds_no_fingerprint_is_refused(sources: Sources, tmp_path: Path) -> None:
    folder, stock = f"{sources.get(2, SOURCE)}/trained", tmp_path / "stock"
    shutil.copytree(folder, stock)
    (stock / FILE_NAME).unlink()
    with pytest.raises(ucp.UsageError, match="no fingerprint was saved") as caught:
        ucp.diff(folder, stock, fingerprint=True)
    assert caught.value.file == str(stock)
    assert ucp.fingerprint(stock).table == ucp.fingerprint(folder).table
    for text in ("[]", "{}", '{"fingerprint": {"table": {"a": 3}, "settings": {}}}', "{"):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(ucp.UsageError) as caught:
            ucp.diff(tmp_path / "wrong.json", folder)
        assert caught.value.file == str(tmp_path / "wrong.json") and caught.value.what_to_do


# ------------------------------------------------ what a load says


@pytest.mark.ranks
def test_a_load_says_how_much_was_compared(sources: Sources, tmp_path: Path) -> None:
    folder = sources.get(2, SOURCE)
    shutil.copytree(f"{folder}/trained", tmp_path / "stock")
    (tmp_path / "stock" / FILE_NAME).unlink()
    job = background_save_jobs.reports
    for whole, stock, wider, unchecked in sources.ranks.run(
        2, job, Setup(3, "bf16", seed=9), f"{folder}/trained", str(tmp_path / "stock")
    ):
        found = whole.fingerprint
        assert found.done_bytes == found.loaded_bytes > 3000
        assert f"fingerprint of {found.done_bytes / 1000:.1f} kB compared" in str(whole)
        assert stock.fingerprint is None
        assert "(of whole records: no fingerprint was saved)" in str(stock)
        # a frozen weight and a buffer have another dtype in the files
        part = wider.fingerprint
        assert found.done_bytes // 2 < part.done_bytes < part.loaded_bytes
        assert re.search(r"fingerprint of [\d.]+ of [\d.]+ kB compared", str(wider))
        assert unchecked.fingerprint is None and "checksums not compared" in str(unchecked)


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [1, 3])
def test_what_was_summed_as_it_was_written_is_not_summed_again(
    ranks: RankPool, tmp_path: Path, zero: int
) -> None:
    target = Setup(zero, "bf16", seed=9)
    for found in ranks.run(2, background_save_jobs.summed_again, SOURCE, target, str(tmp_path)):
        assert min(found["stock"], found["engine"], found["load"]) > 3000
        assert found["background"] == 0
        assert found["direct"] < 200  # copies of what the first rank writes, which may differ
