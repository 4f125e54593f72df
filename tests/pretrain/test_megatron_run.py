"""The training program on megatron-core's own stack: the same model, data and schedule as under
DeepSpeed, whose files it resumes."""

import shutil
from pathlib import Path

import pytest

import megatron_ucp as ucp
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.registry import open_checkpoint
from pretrain.checkpoint import arguments_of_run
from tests.formats.megatron_files import GOLDEN, changed_arguments, copied
from tests.pretrain.common import BATCH, QUIET, RATES, command
from tests.pretrain.source import ITERATIONS, JOB, SAVED, Source, check_resumed
from tests.ranks import RankPool

MEGATRON = ["--engine", "megatron"]
SHARED = [*MEGATRON, "--use-distributed-optimizer"]
DATA = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "63"]
STOCK = command(BATCH, RATES, QUIET, DATA, "--seq-length 16 --train-iters 4")
MESHES = {
    "tp2pp2": ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"],
    "layout": [
        *["--pipeline-model-parallel-size", "2", "--pipeline-model-parallel-layout", "E|t|t|L"],
    ],
    "overlap": [
        *["--overlap-grad-reduce", "--overlap-param-gather", "--ddp-bucket-size", "4000"],
    ],
}


def test_it_trains_as_under_deepspeed(ranks: RankPool, llama: Source) -> None:
    tp = ["--tensor-model-parallel-size", "2"]  # decides the padding of the vocabulary
    found = ranks.run(4, JOB, llama.argv(SHARED, tp, MESHES["layout"]))[-1]
    assert found["losses"] == pytest.approx(llama.result["losses"], rel=0, abs=1e-5)
    rates = [part for part in found["said"].split("|") if "learning rate" in part]
    assert rates == [p for p in llama.result["said"].split("|") if "learning rate" in p]


@pytest.mark.parametrize("mesh", MESHES)
def test_it_resumes_deepspeeds_files(ranks: RankPool, llama: Source, mesh: str) -> None:
    argv = llama.resume(SHARED, MESHES[mesh], "--universal-checkpoint")
    check_resumed(llama, ranks.run(4, JOB, argv)[-1])


def test_one_rank_with_a_plain_optimizer(ranks: RankPool, gpt: Source) -> None:
    check_resumed(gpt, ranks.run(1, JOB, gpt.resume(MEGATRON, "--universal-checkpoint"))[-1])


@pytest.fixture(scope="module")
def own(ranks: RankPool, llama: Source, tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The run of `llama` on megatron-core's stack, with checkpoints of its own."""
    folder = tmp_path_factory.mktemp("stack") / "run"
    tp = ["--tensor-model-parallel-size", "2"]
    argv = llama.argv(SHARED, tp, f"--save {folder} --save-interval {SAVED}")
    return Source(llama.model, folder, ranks.run(4, JOB, argv)[-1])


def test_its_files_resume_on_other_meshes(ranks: RankPool, own: Source) -> None:
    newest = own.folder / "latest_checkpointed_iteration.txt"
    assert newest.read_text() == str(ITERATIONS)
    argv = own.resume(SHARED, MESHES["overlap"], "--universal-checkpoint")
    check_resumed(own, ranks.run(4, JOB, argv)[-1])


def test_its_files_resume_under_deepspeed(ranks: RankPool, own: Source) -> None:
    argv = own.resume("--zero-stage 3 --universal-checkpoint")
    check_resumed(own, ranks.run(2, JOB, argv)[-1])


def test_on_the_same_mesh_not_a_bit_differs(ranks: RankPool, own: Source) -> None:
    tp = ["--tensor-model-parallel-size", "2"]
    result = ranks.run(4, JOB, own.resume(SHARED, tp, "--universal-checkpoint"))[-1]
    assert result["losses"] == own.result["losses"][SAVED:]


def test_the_end_of_a_run(ranks: RankPool, llama: Source, tmp_path: Path) -> None:
    """Older tags go, and the export from memory is that of the files: with several buckets, of
    which a rank has pieces."""
    out, saved = tmp_path / "out", tmp_path / "saved"
    flags = ["--save-interval", "1", "--keep-latest", "2", "--no-durable", "--export-hf", str(out)]
    argv = llama.argv(SHARED, MESHES["overlap"], f"--save {saved}", flags, iterations=4)
    said = ranks.run(2, JOB, argv)[0]["said"]
    tags = sorted(path.name for path in saved.iterdir() if path.is_dir())
    assert tags == ["iter_0000003", "iter_0000004"] and "removed iter_0000002" in said
    ucp.export_hf(saved, tmp_path / "again")
    for path in out.iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    assert ucp.diff(saved, out) == []
    assert ucp.diff(saved / tags[0], out) != []


def test_its_saves_go_on_while_it_trains(ranks: RankPool, own: Source, tmp_path: Path) -> None:
    tp = ["--tensor-model-parallel-size", "2"]
    saves = ["--save", str(tmp_path), "--save-interval", str(SAVED), "--async-save"]
    found = ranks.run(4, JOB, own.argv(SHARED, tp, saves))
    assert all(rank["losses"] == own.result["losses"] for rank in found)
    assert f"saving {tmp_path / 'iter_0000008'} at iteration 8" in found[-1]["said"]
    for tag in (f"iter_{SAVED:07}", f"iter_{ITERATIONS:07}"):
        assert ucp.diff(tmp_path / tag, own.folder / tag) == []
        assert not ucp.verify(tmp_path / tag).findings
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(ITERATIONS)


def test_a_tag_that_is_read_stays(ranks: RankPool, own: Source, tmp_path: Path) -> None:
    """Of two tags one would go."""
    copy = tmp_path / "run"
    shutil.copytree(own.folder, copy)
    tags = sorted(path.name for path in copy.iterdir() if path.is_dir())
    with open_checkpoint(copy, tags[0]):
        assert output_folder.prune(copy, 1) == [f"kept {tags[0]}: it is being read"]
    assert output_folder.prune(copy, 1) == [f"removed {tags[0]}"]
    assert (copy / tags[-1]).is_dir()


def test_a_conversion_for_megatron_is_no_difference(llama: Source, tmp_path: Path) -> None:
    """Another schedule is one."""
    tag = llama.folder / f"global_step{SAVED}"
    converted = tmp_path / "iter_0000004"
    ucp.convert(tag, converted, to="torch_dist", target=ucp.Mesh(tp=2, dp=2))
    assert ucp.diff(tag, converted) == []
    later = ucp.diff(llama.folder / f"global_step{ITERATIONS}", converted)
    assert "lr_scheduler" in [found.what for found in later]


def test_one_run_under_both_engines_goes_on_in_one_folder(
    ranks: RankPool, llama: Source, tmp_path: Path
) -> None:
    """Each start goes on where the one before it ended, whichever engine saved there."""
    where = ["--load", str(tmp_path), "--save", str(tmp_path), "--universal-checkpoint"]
    pointer = tmp_path / "latest_checkpointed_iteration.txt"
    engines = [["--zero-stage", "1"], SHARED, SHARED, ["--zero-stage", "3"]]
    for number, engine in enumerate(engines):
        first, last = 2 * number, 2 * number + 2
        found = ranks.run(2, JOB, llama.argv(where, engine, f"--exit-interval {last}"))
        assert (found[-1]["first"], found[-1]["iteration"]) == (first, last)
        newest = f"iter_{last:07d}" if engine == SHARED else f"global_step{last}"
        assert (tmp_path / "latest").read_text() == newest
        assert ucp.newest_whole(tmp_path).folder.name == newest
        if engine == SHARED:
            assert pointer.read_text() == str(last)
    assert "still names iter_0000006" in found[0]["said"]
    again = ranks.run(2, JOB, llama.argv(where, SHARED, "--exit-interval 9"))[-1]
    assert again["first"] == ITERATIONS and "names iter_0000006" in again["said"]


SCHEDULE = ["--use-checkpoint-opt_param-scheduler", "--universal-checkpoint"]


@pytest.mark.parametrize("case", ["td_full_tp2dp2", "td_full_moe_ep2"])
@pytest.mark.parametrize("engine", [["--engine", "deepspeed"], SHARED])
def test_the_arguments_of_megatrons_own_runs(ranks: RankPool, case: str, engine: list[str]) -> None:
    """Which say some of them in other words than this program's flags."""
    argv = [*STOCK, *engine, *SCHEDULE, "--load", str(GOLDEN / case), "--use-checkpoint-args"]
    found = ranks.run(1, JOB, argv, timeout_s=120)[-1]
    assert "error" not in found and (found["first"], found["iteration"]) == (3, 4)


def test_flags_that_contradict_megatrons_own_run(ranks: RankPool, tmp_path: Path) -> None:
    """What its tensors don't show."""
    tag = copied("td_full_tp2dp2", tmp_path / "run")
    sizes = ["--model-family", "llama", "--num-layers", "4", "--hidden-size", "32"]
    heads = ["--num-attention-heads", "4", "--num-query-groups", "2", "--ffn-hidden-size", "64"]
    argv = [*STOCK, *SCHEDULE, *sizes, *heads, "--load", str(tmp_path / "run")]
    assert "error" not in ranks.run(1, JOB, argv, timeout_s=120)[-1]
    changed_arguments(tag, layernorm_epsilon=1e-6)
    (found,) = ranks.run(1, JOB, argv, timeout_s=120)
    assert "contradict the checkpoint: --norm-epsilon" in found["text"]
    said = {"layernorm_epsilon": 1e-5, "num_attention_heads": 8, "num_query_groups": 1}
    said |= {"bias_gelu_fusion": True, "add_bias_linear": True}
    assert arguments_of_run(said, "gpt") == said | {
        **{"norm_epsilon": 1e-5, "num_query_groups": 8, "openai_gelu": True},
        "model_family": "gpt",
    }
