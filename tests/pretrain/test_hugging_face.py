"""The training program starts from a Hugging Face folder on any mesh, and leaves one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import megatron_ucp as ucp
from tests.pretrain import jobs
from tests.pretrain.common import BATCH, QUIET, RATES, command, mesh
from tests.pretrain.source import JOB
from tests.ranks import RankPool
from tests.reshard import paper, twins

STATES = jobs.states
DATA = ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"]
RUN = command(BATCH, RATES, QUIET, DATA, "--seq-length 8 --train-iters 4")
SIZES = {
    "llama": replace(twins.LLAMA, vocab=256, true_vocab=256),
    "gpt": replace(twins.GPT, vocab=256, true_vocab=256),
    "mixtral": replace(twins.MIXTRAL, vocab=256, true_vocab=256),
    "qwen3_moe": replace(twins.QWEN3_MOE, vocab=256, true_vocab=256),
}
KNOWN = ["--universal-checkpoint", "--use-checkpoint-args"]


def folder_of(family: str, tmp_path: Path, **computed: Any) -> tuple[paper.Model, Path]:
    """A folder with fp32 weights that all differ."""
    model = twins.model(family, SIZES[family], "float32", **computed)
    source = paper.write(model, tmp_path / "source" / "tag")
    return model, Path(ucp.export_hf(source, tmp_path / "hf").path)


TARGETS = [
    ("llama", 4, mesh(2, 3)),
    ("gpt", 4, [*mesh(2, 1), "--pipeline-model-parallel-size", "2"]),
    ("mixtral", 2, [*mesh(1, 1), "--expert-model-parallel-size", "2"]),
    ("qwen3_moe", 2, [*mesh(1, 1), "--expert-model-parallel-size", "2"]),
]


@pytest.mark.parametrize(("family", "world", "on"), TARGETS)
def test_masters_are_those_of_the_folder(
    ranks: RankPool, tmp_path: Path, family: str, world: int, on: list[str]
) -> None:
    model, folder = folder_of(family, tmp_path)
    argv = command(RUN, KNOWN, on, f"--load {folder}")
    for rank in ranks.run(world, STATES, argv, timeout_s=120):
        masters = {name: full for (name, state), full in rank["full"].items() if state == "fp32"}
        wanted = {name: model.truth(name) for name in model.shapes}
        assert twins.same({n: m.view(wanted[n].shape) for n, m in masters.items()}, wanted) == []
        assert {state for _, state in rank["full"]} == {"fp32"}
    assert "begin afresh" in ranks.run(world, STATES, argv, timeout_s=120)[0]["said"]


def test_out_at_the_end(ranks: RankPool, tmp_path: Path) -> None:
    """The same files from memory as from what was saved at the same iteration."""
    _, folder = folder_of("llama", tmp_path)
    out, saved = tmp_path / "out", tmp_path / "saved"
    ends = ["--export-hf", str(out), "--save", str(saved)]
    argv = command(RUN, KNOWN, mesh(2, 1), f"--load {folder}", ends)
    found = ranks.run(4, JOB, argv, timeout_s=120)[-1]
    assert "error" not in found and (found["first"], found["iteration"]) == (0, 4)
    ucp.export_hf(saved, tmp_path / "again")
    names = {path.name for path in out.iterdir()}
    own = {"config.json", "generation_config.json", "model.safetensors"}
    assert names == {*own, "ucp_export.json"}
    for name in names:
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert ucp.diff(saved, out) == [] and ucp.diff(folder, out) != []


COMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "as GPT-2 itself": ("gpt", {"activation": "gelu_tanh"}),
    "as Llama 3.1": ("llama", {"rope_factor": 8.0, "norm_epsilon": 1e-6}),
}


@pytest.mark.parametrize("what", COMPUTED)
def test_what_no_tensor_shows_is_the_folders(ranks: RankPool, tmp_path: Path, what: str) -> None:
    """The config comes out as it went in, a longest sequence among it that no step had."""
    family, computed = COMPUTED[what]
    _, folder = folder_of(family, tmp_path, **computed)
    out = tmp_path / "out"
    argv = command(RUN, KNOWN, mesh(1, 1), f"--load {folder} --export-hf {out}")
    found = ranks.run(2, JOB, argv, timeout_s=120)[-1]
    assert "error" not in found, found
    before, after = (json.loads((one / "config.json").read_text()) for one in (folder, out))
    assert before == after and before["vocab_size"] == 256
    if family == "llama":  # no table of positions ends there
        shutil.rmtree(out)
        found = ranks.run(2, JOB, [*argv, "--seq-length", "64"], timeout_s=120)[-1]
        assert "error" not in found, found
        after = json.loads((out / "config.json").read_text())
        assert after == before | {"max_position_embeddings": 64}


def test_what_can_not_be(ranks: RankPool, tmp_path: Path) -> None:
    """Another mesh without the flag, flags that contradict the config, a vocabulary that does not
    divide, an output that exists."""
    _, folder = folder_of("llama", tmp_path)
    load = ["--load", str(folder)]
    sizes = [word for word in KNOWN if word != "--universal-checkpoint"]
    for argv, problem in (
        (command(RUN, sizes, load), "is a Hugging Face folder"),
        (command(RUN, KNOWN, load, f"--export-hf {folder}"), "the output exists"),
        (command(RUN, KNOWN, load, "--ckpt-step 3"), "has no tags"),
        (
            command(RUN, KNOWN[:1], load, "--model-family llama --num-layers 2")
            + ["--hidden-size", "16", "--num-attention-heads", "2", "--ffn-hidden-size", "24"],
            "flags contradict the checkpoint: --num-attention-heads",
        ),
    ):
        (found,) = ranks.run(1, JOB, argv, timeout_s=60)
        assert found.get("error") == "UsageError" and problem in found["text"], found
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    (found,) = ranks.run(1, JOB, command(RUN, KNOWN, load), timeout_s=60)
    assert found.get("error") == "UnsupportedError" and "hidden_act gelu" in found["text"]
