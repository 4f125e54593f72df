"""What is missing of an engine's save is missed by every verb, and by the load of a real engine.
`tests/reshard/absence.py` has the law and the table."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from megatron_ucp.core.manifest import FILE_NAME
from tests.engines import autoep_jobs, autotp_jobs
from tests.engines.kinds import Kind, kind_of, oracle_of
from tests.engines.model import Setup
from tests.engines.moe_jobs import Moe
from tests.engines.moe_pipe_jobs import Piped
from tests.engines.sources import Sources
from tests.engines.tensor_jobs import Staged
from tests.engines.test_mixtral import mixtral
from tests.reshard.absence import Save, Table, linked, plain_of

EXACT = "exact"


def loads(setup: Any, oracle: str, tags: list[str]) -> list[str]:
    """Loads each tag folder into one engine, which has other values before: `EXACT` where it has
    what the engine had that saved, else what the load says."""
    kind, want = kind_of(setup), oracle_of(oracle)["states"]["trained"]
    with kind.known():
        engine = kind.make(setup)
        found = [_load(kind, engine, tag, want) for tag in tags]
        kind.close(engine)
    return found


def _load(kind: Kind, engine: Any, tag: str, want: dict[str, Any]) -> str:
    kind.fill(engine)
    if not kind.differences(want, kind.canonical(engine)):
        return "the engine had these values before the load: nothing is shown"
    try:
        ucp.load(engine, tag)
    except ucp.UcpError as error:
        return f"{type(error).__name__}: {error}"
    other = kind.differences(want, kind.canonical(engine))
    return f"other values: {other[:3]}" if other else EXACT


pytestmark = pytest.mark.ranks
Run = tuple[int, Any]  # on how many ranks, a setup
RUNS: dict[str, Run] = {
    **{
        f"ZeRO-{zero} {dtype}": (2, Setup(zero, dtype))
        for zero in range(4)
        for dtype in ("bf16", "fp32")
    },
    **{f"DeepSpeed's experts, ZeRO-{zero}": (4, Moe(2, zero)) for zero in range(3)},
    **{f"AutoEP, ZeRO-{zero}": (4, autoep_jobs.Auto(2, zero)) for zero in (0, 1, 3)},
    "megatron-core's experts": (4, mixtral(2)),
    "megatron-core's experts, stage 0": (4, mixtral(2, zero=0)),
    "megatron-core's experts, tp=2": (4, mixtral(2, tp=2)),
    "megatron-core's experts, tp=2, stage 0": (4, mixtral(2, tp=2, zero=0)),
    "megatron-core's experts, tp=2, etp=1": (4, mixtral(2, tp=2, etp=1)),
    "megatron-core's experts, pp=2": (4, mixtral(2, pp=2)),
    "a pipeline, stage 0": (4, Staged("gpt", 2, 0, pp=2)),
    "a pipeline, ZeRO-1": (4, Staged("gpt", 2, 1, pp=2)),
    "a pipeline with tied embeddings": (4, Staged("gpt", 1, 1, pp=2, tied=True)),
    "DeepSpeed's experts in a pipeline": (4, Piped(2, 1, pp=2)),
    **{f"AutoTP, ZeRO-{zero}": (4, autotp_jobs.Auto("even", 2, zero)) for zero in (0, 1, 3)},
    "AutoTP, uneven": (4, autotp_jobs.Auto("llama", 2, 1)),
}


# stage 0 without one is refused, whatever is missing
NEEDS_MANIFEST = {kind for kind in RUNS if "stage 0" in kind or "ZeRO-0" in kind}


@pytest.mark.parametrize(
    ("kind", "attached"),
    [(kind, attached) for kind in RUNS for attached in {True, kind in NEEDS_MANIFEST}],
)
def test_what_is_missing_of_a_save(
    sources: Sources, tmp_path: Path, kind: str, attached: bool
) -> None:
    world, saved = RUNS[kind]
    source = Path(sources.get(world, saved, more=0))
    shutil.copytree(source / "trained", tmp_path / "copied")
    if not attached:  # as stock DeepSpeed would have written it
        plain_of(tmp_path / "copied")

    def by_ranks(_: Save, runs: list[Path]) -> list[str]:
        tags = [str(run / "trained") for run in runs]
        job = loads, replace(saved, seed=9), str(source), tags
        ranks = sources.ranks.run(world, *job, timeout_s=400)
        # ranks agree what a load did, but for their own numbers in a message
        assert all(
            [one == EXACT for one in rank] == [one == EXACT for one in ranks[0]] for rank in ranks
        )
        return ranks[0]

    save = Save(linked(tmp_path / "copied", tmp_path / "run", "trained"), "trained")
    table = Table(save, tmp_path, by_ranks)
    wrong = table.wrong()
    if kind in NEEDS_MANIFEST:  # what its manifest alone says is missed by loads, and only so
        refusals = [fault for fault in wrong if "nothing says whose they are" in fault]
        assert {fault.split(":")[0] for fault in refusals} == {f"file {FILE_NAME}"}
        wrong = [fault for fault in wrong if fault not in refusals]
    assert wrong == []
    # stages that share a tied module each write its file: one of them has all of it
    shared = (
        {"file layer_00-model_00-model_states.pt"} if "tied" in kind and not attached else set()
    )
    assert table.cases > 0 and {*table.spare} <= {"file ucp_manifest.json", *shared}
