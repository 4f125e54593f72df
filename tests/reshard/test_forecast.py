"""Forecasts of a load: what they say of two and four ranks is what these count, and of thousands
what arithmetic says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.cli import main
from megatron_ucp.errors import UsageError
from megatron_ucp.reshard import forecast
from megatron_ucp.reshard import plan as preview
from megatron_ucp.reshard.forecast import Rates
from tests.engines.model import Setup
from tests.engines.sources import Sources
from tests.engines.tensor_jobs import Mega
from tests.reshard import forecast_jobs

# ranks, what they train, and its mesh
LOADS: dict[str, tuple[int, Any, str]] = {
    "ZeRO-1 on 2": (2, Setup(1, "bf16"), "dp=2,zero=1"),
    "ZeRO-1 on 4": (4, Setup(1, "bf16"), "dp=4,zero=1"),
    "ZeRO-3 on 4": (4, Setup(3, "bf16"), "dp=4,zero=3"),
    "ZeRO-3 on 2": (2, Setup(3, "bf16"), "dp=2,zero=3"),
    "tp=2 on 4": (4, Mega("llama", 2, 1), "tp=2,dp=2,zero=1"),
    "one place of megatron-core's on 2": (2, Mega("llama", 1, 1), "tp=1,dp=2,zero=1"),
    "tp=2 on 2": (2, Mega("llama", 2, 1), "tp=2,dp=1,zero=1"),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", LOADS)
def test_a_forecast_is_what_ranks_count(sources: Sources, name: str) -> None:
    world, setup, mesh = LOADS[name]
    if isinstance(setup, Mega):
        folder = Path(sources.get(4, Mega("llama", 1, 1), more=0)) / "filled"
    else:
        folder = Path(sources.get(2, Setup(1, "bf16"))) / "filled"
    found = preview.plan(folder, mesh, rates=Rates())
    (row,) = [one for one in found.forecast if one.ranks == world]
    job = forecast_jobs.counted
    counted = sources.ranks.run(world, job, replace(setup, seed=9), str(folder))
    reads = [rank["read_bytes"] for rank in counted]
    assert (row.most_bytes, row.all_bytes) == (max(reads), sum(reads)) and min(reads) > 0
    assert row.files == max(len(rank["files"]) for rank in counted)
    more = forecast.OF_FAMILY if isinstance(setup, Mega) else 0
    fates, values = forecast.FATES + more, forecast.VALUES + more
    for rank in counted:
        assert rank["calls"] == {"lowest": fates, "agreed": values}
    assert row.steps == fates + values
    received = max(rank["received"] for rank in counted)
    assert received <= row.received_bytes < 2 * received
    other = next(one for one in found.forecast if one.ranks != world)
    assert (other.most_bytes, other.all_bytes) != (max(reads), sum(reads))


def test_seconds_are_arithmetic(tmp_path: Path) -> None:
    """A 7B on 8 ranks, its states in 16 files."""
    text = "layers=32,hidden=4096,heads=32,groups=32,ffn=11008,vocab=32000"
    sizes = preview.paper_sizes("llama", text)
    source, target = ucp.Mesh(dp=16, zero=1), ucp.Target(ucp.Mesh(dp=8, zero=1))
    rates = Rates(storage=2e9, shared=10e9, network=1e9, latency=1e-3, open=0.01)
    rows = preview.simulate("llama", sizes, source, target, rates=rates).forecast
    assert [row.ranks for row in rows] == [2, 8, 32, 128, 512, 2048, 8192]
    stored = 12 * sum(spec.elems for spec in preview.paper_manifest(*_model(text)).params)
    for row in rows:
        assert row.all_bytes == pytest.approx(stored, rel=0.001)
        assert row.most_bytes == pytest.approx(stored / row.ranks, rel=0.001)
        reading = max(row.most_bytes / 2e9, row.all_bytes / 10e9)
        levels = row.ranks.bit_length() - 1
        assert row.messages == levels * row.steps == levels * 23
        agreeing = 2 * 23 * levels * 1e-3 + row.received_bytes / 1e9
        assert row.seconds == pytest.approx(reading + row.files * 0.01 + agreeing)
    assert [row.limit for row in rows[:3]] == ["storage", "shared storage", "shared storage"]
    # what a rank receives grows with the levels of the tree alone
    assert len({row.received_bytes / (row.ranks.bit_length() - 1) for row in rows}) == 1


def _model(text: str) -> Any:
    from megatron_ucp.families import find_family

    return find_family("llama"), preview.paper_sizes("llama", text)


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--simulate", "llama", "--source-mesh", "dp=2,zero=1", "--mesh", "dp=4,zero=1"]
    words += ["--sizes", "layers=2,hidden=64,heads=4,ffn=176,vocab=512"]
    assert main(words) == 0 and "mostly" not in capsys.readouterr().out
    assert main([*words, "--rates", "storage=2GB/s,latency=50us"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["1,024", "4,096", "16,384"]
    assert max(lines[-8:-1], key=lambda line: line.count("#")).count("#") <= 30
    assert main([*words, "--rates", "latency=1ms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["forecast"]
    assert [row["ranks"] for row in rows] == [1, 4, 16, 64, 256, 1024, 4096, 16384]
    assert rows[0]["messages"] == 0 and rows[-1]["messages"] == 14 * rows[-1]["steps"]
    for wrong in ("storage=2", "disk=2GB/s", "latency=2GB", "storage=fast", "storage=0GB/s"):
        if wrong == "storage=2":  # bytes
            assert Rates.parse(wrong).storage == 2.0
            continue
        with pytest.raises(UsageError, match="no rate of a cluster"):
            Rates.parse(wrong)
