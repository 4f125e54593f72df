"""Megatron-DeepSpeed's own program goes on from its own saves, unpatched and patched, on other
meshes; from what this package converts, unpatched; and from a folder of Hugging Face's.

The program is that of its sources: a folder, or a .tar.gz, that MEGATRON_DEEPSPEED names. Losses
are those of the unbroken run, and every master, moment and step is gathered by code that knows
nothing of this package (`tests/stock/megatron_deepspeed`).
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ucp as ucp
from megatron_ucp.formats.deepspeed.target import Target
from tests.docs.pages import blocks_of
from tests.formats.golden.megatron_deepspeed_folders import FOLDER, FOLDERS, OF_ALL, ROTARY, SWIGLU
from tests.scripts import run_command
from tests.stock.megatron_deepspeed import BASE, TOKENS, Job
from tests.stock.server import Server

pytestmark = pytest.mark.ranks
ROOT = Path(__file__).parents[2]
BESIDE = ROOT.parent / "shared/golden/megatron_deepspeed/sources_4efb479d.tar.gz"
GIVEN = os.environ.get("MEGATRON_DEEPSPEED") or (str(BESIDE) if BESIDE.exists() else "")
if not GIVEN:
    pytest.skip(
        "the sources of Megatron-DeepSpeed's program are not there: MEGATRON_DEEPSPEED names none",
        allow_module_level=True,
    )
ALLOWED = 1e-6  # the order of additions

ALONE = "--no-pipeline-parallel"
TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
PP2 = "--pipeline-model-parallel-size 2"
LLAMA = f"{SWIGLU} --ffn-hidden-size 32"
RMS = "--normalization rmsnorm"
ULYSSES = "--ds-sequence-parallel-size 2"
RESIDUAL = "--mlp-type residual"


def experts(ranks: int, topk: int = 1, interval: int = 1) -> str:
    return (
        f"--num-experts 4 --expert-interval {interval} --moe-expert-parallel-size {ranks} "
        f"--create-moe-param-group --topk {topk} --moe-train-capacity-factor 4"
    )


@dataclass(frozen=True)
class Mesh:
    """The flags of a mesh, its ranks, the ZeRO stage and the dtype."""

    flags: str = ""
    world: int = 4
    zero: int = 1
    dtype: str = "fp32"
    model: str = ""
    program: str = "stock"
    without: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = f"{self.flags} {self.model}".replace("--", "").replace("-parallel-size", "")
        kind = "" if self.program == "stock" else f" {self.program}"
        return f"{words.strip()} world {self.world} z{self.zero} {self.dtype}{kind}"

    @property
    def job(self) -> dict[str, Any]:
        return {
            "world": self.world,
            "zero": self.zero,
            "dtype": self.dtype,
            "without": self.without,
        }


# what the program saves, once each
GPT = Mesh(f"{TP2} {PP2}")
SOURCES = {
    "gpt": GPT,
    "patched": replace(GPT, program="patched"),
    "pipeline": Mesh(PP2, 2),
    "z0": Mesh(f"{ALONE} {TP2}", 2, 0),
    "z2": Mesh(f"{ALONE} {TP2}", 4, 2),
    "z3": Mesh(ALONE, 2, 3),
    "z0-pipeline": Mesh(PP2, 2, 0, program="patched"),
    "llama": Mesh(TP2, 2, model=LLAMA),
    "llama-pipeline": Mesh(f"{TP2} {PP2}", model=LLAMA),
    "llama-patched": Mesh(f"{TP2} {PP2}", model=LLAMA, program="patched"),
    "rotary": Mesh(f"{ALONE} {TP2}", 4, 2, model=f"{LLAMA} {ROTARY}"),
    "rms": Mesh(TP2, 2, model=RMS),
    "bf16": Mesh(TP2, 2, dtype="bf16"),
    "fp16": Mesh(f"{TP2} {PP2}", dtype="fp16"),
    "fp16-z2": Mesh(ALONE, 2, 2, "fp16"),
    "ulysses": Mesh(f"{ALONE} {ULYSSES}", 4, 3),
    "experts": Mesh(f"{ALONE} {experts(2)}", 2, 2, program="older"),
    "experts-patched": Mesh(f"{ALONE} {experts(2)}", 2, 2, program="patched"),
    "experts-pipeline": Mesh(f"{PP2} {experts(2)}", program="older"),
    "experts-tp": Mesh(f"{ALONE} {TP2} {experts(2)}", program="patched"),
    "experts-interval": Mesh(f"{ALONE} {experts(2, 2, 2)}", 2, program="patched"),
    "residual": Mesh(f"{ALONE} {experts(2)} {RESIDUAL}", 2, program="patched"),
}
MOE1 = f"{ALONE} {experts(1)}"
OF_GPT = [
    Mesh(f"{TP2} {PP2}"),
    Mesh(PP2, 2),
    Mesh("", 1),
    Mesh("", 4),
    Mesh(TP4),
    Mesh(TP2, 2),
    Mesh(ALONE, 2),
    Mesh(f"{ALONE} {TP2}", 4, 2),
]
PAIRS: list[tuple[str, Mesh]] = [
    *(("gpt", mesh) for mesh in OF_GPT[1:-1]),
    *(("patched", mesh) for mesh in OF_GPT[1::3]),
    ("z0", Mesh(ALONE, 2)),
    ("z2", Mesh(PP2, 4)),
    ("z3", Mesh(ALONE, 2, 1)),
    ("llama", Mesh(PP2, 2)),
    ("rotary", Mesh(ALONE, 2)),
    ("bf16", Mesh("", 2, dtype="bf16")),
    ("experts", Mesh(MOE1, 1)),
    ("experts", Mesh(f"{PP2} {experts(2)}")),
]
LATER: list[tuple[str, Mesh]] = [
    ("gpt", OF_GPT[0]),
    ("gpt", OF_GPT[-1]),
    ("z3", Mesh(TP2, 2)),
    *(("patched", mesh) for mesh in OF_GPT if mesh not in OF_GPT[1::3]),
    ("pipeline", Mesh("", 2)),
    ("llama", Mesh(TP4)),
    ("ulysses", Mesh(TP2, 2)),
    ("fp16", Mesh(TP2, 2, dtype="fp16")),
    ("llama-patched", Mesh(f"{ALONE} {TP2}", 4, 2)),
    ("pipeline", Mesh(TP2, 2)),
    ("z0", Mesh(f"{ALONE} {TP2}", 2, 0)),
    ("z0-pipeline", Mesh(ALONE, 2)),
    ("z2", Mesh(f"{ALONE} {TP2}", 2, 0)),
    ("z3", Mesh("", 1, 0)),
    ("z3", Mesh(ALONE, 4, 3)),
    ("z3", Mesh(f"{ALONE} {TP2}", 4, 2)),
    ("z3", Mesh(f"{ALONE} {TP2}", 4, 3)),
    ("llama", Mesh("", 2)),
    ("llama-pipeline", Mesh("", 2)),
    ("llama-pipeline", Mesh(TP4)),
    ("rms", Mesh(PP2, 2)),
    ("bf16", Mesh(PP2, 2)),
    ("fp16", Mesh(PP2, 2, dtype="fp16")),
    ("fp16", Mesh("", 2, dtype="bf16")),
    ("fp16-z2", Mesh(TP2, 2, dtype="fp16")),
    ("ulysses", Mesh(ALONE, 2)),
    ("ulysses", Mesh(f"{ALONE} {ULYSSES}", 2)),
    ("experts", Mesh(f"{ALONE} {experts(2)}", 4)),
    ("experts-patched", Mesh(f"{ALONE} {experts(4)}")),
    ("experts-pipeline", Mesh(f"{PP2} {experts(1)}", 2)),
    ("experts-pipeline", Mesh(MOE1, 1)),
    ("experts-tp", Mesh(f"{ALONE} {TP2} {experts(2)}", 2)),
    ("experts-interval", Mesh(f"{ALONE} {experts(1, 2, 2)}", 1)),
    ("residual", Mesh(f"{MOE1} {RESIDUAL}", 1)),
    ("residual", Mesh(f"{ALONE} {experts(4)} {RESIDUAL}")),
]
# Losses of bf16 and fp16 are noisy on CPUs. Under Ulysses, and with a pipeline at ZeRO-0, the
# program trains a little otherwise than without; a token in a batch of its own meets other experts.
COMPUTED_OTHERWISE = {
    *("bf16", "fp16", "fp16-z2", "ulysses", "z0-pipeline", "experts-tp", "experts-interval"),
}


class Program:
    """The server of programs, and what was saved so far: each source once."""

    def __init__(self, folder: Path, sources: str) -> None:
        self.folder, self._count = folder, 0
        self.server = Server("tests.stock.megatron_deepspeed", sources)
        self._done: dict[Any, dict[str, Any]] = {}

    def job(self, **what: Any) -> Job:
        self._count += 1
        return Job(str(self.folder / f"{self._count}.pt"), str(self.folder), **what)

    def run(self, **what: Any) -> dict[str, Any]:
        return self.server.run(self.job(**what))

    def fails(self, **what: Any) -> str:
        """What the ranks of a job said that all end."""
        answer = self.server.ask(self.job(**what))
        assert all(answer["codes"]), answer
        return str(answer["said"])

    def saved(self, source: str) -> dict[str, Any]:
        """The program trains, saves at iteration 3, and trains on."""
        if source not in self._done:
            made = SOURCES[source]
            flags = f"{made.flags} {made.model} --save {self.folder / source}"
            found = self.run(flags=flags, saves=(3,), program=made.program, **made.job)
            self._done[source] = {**found, "folder": self.folder / source}
        return self._done[source]

    def resumed(self, source: str, mesh: Mesh, **more: Any) -> dict[str, Any]:
        """The program loads what was saved, on another mesh, and trains on: once, where nothing
        more is asked for."""
        if more:
            return self._resumed(source, mesh, **more)
        if (source, mesh) not in self._done:
            self._done[source, mesh] = self._resumed(source, mesh)
        return self._done[source, mesh]

    def _resumed(self, source: str, mesh: Mesh, **more: Any) -> dict[str, Any]:
        saved = self.saved(source)
        what: dict[str, Any] = {
            "flags": f"{mesh.flags} {SOURCES[source].model} --load {saved['folder']}",
            "program": "patched",
            "want": saved["file"],
            **mesh.job,
            **more,
        }
        return self.run(**what)

    def copy(self, source: str, to: Path) -> Path:
        return Path(shutil.copytree(self.saved(source)["folder"], to))


def prepared(given: str, name: str = "megatron_deepspeed") -> Path:
    """A folder with the sources, as `tests/megatron_deepspeed_env.sh` makes it."""
    command = ["bash", "tests/megatron_deepspeed_env.sh", given, name]
    subprocess.run(command, cwd=ROOT, check=True)
    caches = [*(ROOT / ".cache").glob("python*"), ROOT / ".cache"]
    folders = [one / name for one in caches]
    here = [one for one in folders if one.parent / "venv" == Path(sys.prefix)]
    return next(one for one in [*here, *reversed(folders)] if (one / ".whole").exists())


@pytest.fixture(scope="module")
def sources() -> Path:
    return prepared(GIVEN)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory, sources: Path) -> Iterator[Program]:
    found = Program(tmp_path_factory.mktemp("program"), str(sources))
    yield found
    found.server.close()
    shutil.rmtree(found.folder, ignore_errors=True)


def slow(cases: Sequence[tuple[str, Mesh]]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def largest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def same_state(found: dict[str, Any]) -> None:
    """No element of a master or moment differs, no step; the planted bit is seen."""
    assert found["differences"] == [] and found["elements"] > 20_000
    assert found["planted"], "one bit of a master was turned"


@pytest.mark.parametrize(("source", "mesh"), [*PAIRS, *slow(LATER)], ids=str)
@pytest.mark.cases(5)
def test_pair(program: Program, source: str, mesh: Mesh) -> None:
    saved, found = program.saved(source), program.resumed(source, mesh)
    same_state(found)
    assert found["counters"] == saved["counters 3"] and found["counters"]["iteration"] == 3
    assert len(found["losses"]) == 6
    if source not in COMPUTED_OTHERWISE:
        assert largest(found["losses"], saved["losses"][3:]) <= ALLOWED
        assert largest(saved["losses"][2:8], saved["losses"][3:]) > 1e-3, "steps differ"


# ------------------------------------------------ what else a run has


DROPOUT = "--attention-dropout 0.2 --hidden-dropout 0"
RATES = ("--attention-dropout", "--hidden-dropout")


@pytest.mark.parametrize(
    "flags", [f"{TP2} {PP2}", pytest.param(f"{ALONE} {TP2}", marks=pytest.mark.slow)]
)
def test_random_states_are_those_of_its_own_resume(program: Program, flags: str) -> None:
    """With dropout of attention, on one mesh: by its own load, with the lines, by the runner."""
    folder = program.folder / f"dropout{len(flags)}"
    saved = program.run(
        flags=f"{flags} {DROPOUT} --save {folder}", saves=(3,), program="stock", without=RATES
    )
    runs = {
        kind: program.run(
            flags=f"{flags} {DROPOUT} --load {folder}",
            program=kind,
            without=RATES,
            want=saved["file"],
        )
        for kind in ("stock", "patched", "runner")
    }
    for found in runs.values():
        same_state(found)
        assert found["random"] == runs["stock"]["random"]
        assert found["losses"] == runs["stock"]["losses"]
    tracked = [rank[3] for rank in runs["patched"]["random"]]
    assert tracked[0] != tracked[1], "tensor-parallel ranks drop others"


def test_another_mesh_seeds_each_rank_anew(program: Program) -> None:
    """As its own universal load does; of more data-parallel ranks each has the generators of its
    tensor-parallel rank."""
    found = program.resumed("z2", Mesh(f"{ALONE} {TP2}", 2, 2))
    tracked = [rank[3] for rank in found["random"]]
    assert tracked[0] != tracked[1]
    four = program.resumed("gpt", Mesh(TP4))
    assert len({str(rank[3]) for rank in four["random"]}) == 4


def test_the_runner_goes_on_on_another_mesh(program: Program) -> None:
    found = program.resumed("gpt", Mesh(PP2, 2), program="runner")
    same_state(found)
    assert largest(found["losses"], program.saved("gpt")["losses"][3:]) <= ALLOWED


def test_the_nine_lines_of_earlier_versions_go_on(program: Program) -> None:
    found = program.resumed("gpt", Mesh(PP2, 2), program="nine lines")
    same_state(found)


@pytest.mark.slow
def test_universal_checkpoint_is_the_same(program: Program) -> None:
    found = program.resumed(
        "gpt", Mesh(), flags=f"{TP4} --load {program.saved('gpt')['folder']} --universal-checkpoint"
    )
    same_state(found)


def test_another_save_into_the_same_folder(program: Program, tmp_path: Path) -> None:
    """On another mesh, by the patched program; then the newest one goes on, and an older one that
    `--load-tag` names."""
    folder = program.copy("gpt", tmp_path / "run")
    again = program.run(flags=f"{TP4} --load {folder} --save {folder}", saves=(6,))
    assert (folder / "latest").read_text() == "global_step6"
    assert (folder / "latest_checkpointed_iteration.txt").read_text().strip() == "6"
    found = program.run(flags=f"{PP2} --load {folder}", world=2, want=again["file"])
    same_state(found)
    assert found["counters"]["iteration"] == 6 and found["counters"]["consumed_train_samples"] == 24
    older = program.run(
        flags=f"--load {folder} --load-tag global_step3",
        world=1,
        want=program.saved("gpt")["file"],
    )
    same_state(older)
    assert older["counters"]["iteration"] == 3
    assert ucp.verify(folder).findings == ()


def test_the_unpatched_program_goes_on_from_the_patched_ones_save(program: Program) -> None:
    found = program.resumed("patched", GPT, program="stock")
    same_state(found)
    assert found["losses"] == program.saved("patched")["losses"][3:]


@pytest.mark.parametrize("kind", ["stock", "patched"])
def test_finetune_takes_the_weights_alone(program: Program, kind: str) -> None:
    """As its own load does on the mesh of the save."""
    saved, mesh = program.saved("gpt"), GPT if kind == "stock" else Mesh(PP2, 2)
    found = program.run(
        flags=f"{mesh.flags} --load {saved['folder']} --finetune",
        program=kind,
        look=True,
        **mesh.job,
    )
    assert found["counters"]["iteration"] == found["counters"]["consumed_train_samples"] == 0
    want, have = saved["state 3"]["full"], found["loaded"]["full"]
    masters = [key for key in want if key[1] == "fp32"]
    assert all(torch.equal(want[key], have[key]) for key in masters)
    moments = [value for (_, state), value in have.items() if state != "fp32"]
    assert not any(value.any() for value in moments)


def test_reset_iteration_begins_to_count_anew(program: Program) -> None:
    """Its counters, and neither masters nor moments."""
    saved = program.saved("gpt")
    ways = {"stock": GPT, "patched": Mesh(PP2, 2)}
    for kind, mesh in ways.items():
        found = program.run(
            flags=f"{mesh.flags} --load {saved['folder']} --reset-iteration",
            program=kind,
            want=saved["file"],
            **mesh.job,
        )
        same_state(found)
        assert found["counters"]["iteration"] == 0, kind


@pytest.mark.slow
def test_no_load_optim_is_not_asked_under_deepspeed(program: Program) -> None:
    """The program does not hand it on, so that all states come back: with its own load, too."""
    saved = program.saved("gpt")
    for kind, mesh in {"stock": GPT, "patched": Mesh(PP2, 2)}.items():
        found = program.run(
            flags=f"{mesh.flags} --load {saved['folder']} --no-load-optim",
            program=kind,
            want=saved["file"],
            **mesh.job,
        )
        same_state(found)


def test_another_schedule(program: Program) -> None:
    """Refused before anything moves, by the program's own rule; and taken with its flag."""
    saved = program.saved("gpt")
    flags, left = f"--load {saved['folder']} --lr 4e-3", ("--lr",)
    said = program.fails(flags=flags, world=2, without=left)
    assert "override-opt_param-scheduler" in said and "lr" in said
    said = program.fails(flags=flags, world=2, without=left, program="stock")
    assert "do not match" in said or "Error" in said
    found = program.run(
        flags=f"{flags} --override-opt_param-scheduler", world=2, without=left, look=True
    )
    scheduler = found["loaded"]["scheduler"]
    assert scheduler["max_lr"] == 4e-3 and scheduler["num_steps"] == 12, "it counts samples"


def test_evaluation_of_a_checkpoint(program: Program) -> None:
    """With nothing to train the loss is that of the mesh that saved."""
    folder, losses = program.saved("z2")["folder"], list[list[float]]()
    for kind, mesh in (("stock", SOURCES["z2"]), ("patched", Mesh("", 1))):
        flags = f"{mesh.flags} --load {folder} --skip-train --eval-iters 2"
        job = {**mesh.job, "without": ("--eval-iters",), "evaluates": True}
        losses.append(program.run(flags=flags, program=kind, **job)["evaluated"])
    assert len(losses[0]) > 0 and largest(*losses) <= ALLOWED


# ------------------------------------------------ refusals


def test_another_model_is_refused_on_every_rank(program: Program) -> None:
    """What the program would find out once everything moved, and what its shapes show."""
    folder = program.saved("gpt")["folder"]
    heads = ("--num-attention-heads",)
    said = program.fails(flags=f"--num-attention-heads 2 --load {folder}", world=2, without=heads)
    for rank in (0, 1):
        assert f"rank {rank}:" in said
    assert said.count("ModelMismatchError") >= 2 and "num_attention_heads=4" in said
    layers = ("--num-layers",)
    said = program.fails(flags=f"--num-layers 3 --load {folder}", world=2, without=layers)
    assert said.count("NotFoundError") >= 2 and "as many layers as the run had" in said


def test_the_padded_vocabulary_may_change_where_that_is_allowed(program: Program) -> None:
    """126 tokens in 128 rows; in 160 rows the new ones are padding."""
    saved = program.saved("gpt")
    flags, left = (
        f"{PP2} --make-vocab-size-divisible-by 80 --load {saved['folder']}",
        ("--make-vocab-size-divisible-by",),
    )
    said = program.fails(flags=flags, world=2, without=left)
    assert said.count("the padded vocabulary has another size") >= 2 and 'allow={"vocab"}' in said
    config = {"universal_checkpoint": {"allow": ["vocab"]}}
    found = program.run(flags=flags, world=2, without=left, config=config, look=True)
    words = ("language_model.embedding.word_embeddings.weight", "fp32")
    want, have = saved["state 3"]["full"][words], found["loaded"]["full"][words]
    assert have.shape[0] == 160 and torch.equal(want[:126], have[:126])
    rest = [key for key in saved["state 3"]["full"] if key[0] != words[0]]
    assert rest and all(
        torch.equal(saved["state 3"]["full"][key], found["loaded"]["full"][key]) for key in rest
    )


def test_zero_3_makes_one_group_and_says_so(program: Program) -> None:
    """At ZeRO-3 its vectors and matrices are one group without weight decay, as a partitioned
    parameter has one dim: refused, but where the job's own hyper-parameters are asked for."""
    mesh = Mesh(ALONE, 2, 3)
    saved = program.saved("z2")
    said = program.fails(flags=f"{ALONE} --load {saved['folder']}", **mesh.job)
    assert "weight_decay: 0.1 and 0.0" in said and 'hyper="config"' in said
    config = {"universal_checkpoint": {"hyper": "config"}}
    found = program.resumed("z2", mesh, config=config)
    assert found["differences"] and all("became" in one for one in found["differences"])


# ------------------------------------------------ what is converted


CONVERTED = [
    ("gpt", f"{TP2} {PP2}", "tp=2,pp=2,dp=1,zero=1", None, 4, 1),
    ("gpt", PP2, "tp=1,pp=2,dp=1,zero=1", None, 2, 1),
    ("gpt", TP4, "tp=4,dp=1,zero=1", True, 4, 1),
    ("gpt", f"{ALONE} {TP2}", "tp=2,dp=2,zero=2", False, 4, 2),
    ("z3", ALONE, "tp=1,dp=4,zero=3", None, 4, 3),
    ("llama", PP2, "tp=1,pp=2,dp=1,zero=1", None, 2, 1),
]


@pytest.mark.parametrize("to", ["native", "universal"])
@pytest.mark.parametrize("case", CONVERTED, ids=lambda case: f"{case[0]} {case[2]}")
def test_the_unpatched_program_loads_what_is_converted(
    program: Program, tmp_path: Path, case: tuple[Any, ...], to: str
) -> None:
    source, flags, mesh, pipeline, world, zero = case
    saved, out = program.saved(source), tmp_path / "out"
    folder = saved["folder"] / "global_step3"
    if to == "universal":
        # the names in such a folder are those of the one kind of modules
        target = None if pipeline is None else Target(ucp.Mesh(zero=1), pipeline=pipeline)
        ucp.convert(folder, out / "global_step3", to="universal", target=target, latest=True)
    else:
        target = Target(ucp.Mesh.parse(mesh), pipeline=pipeline)
        more = {"allow": {"per_rank"}, "latest": True}
        ucp.convert(folder, out / "global_step3", target=target, **more)
    asked = f"{flags} {SOURCES[source].model} --load {out}"
    found = program.run(
        flags=f"{asked} --universal-checkpoint" if to == "universal" else asked,
        world=world,
        zero=zero,
        program="stock",
        want=saved["file"],
    )
    same_state(found)
    assert largest(found["losses"], saved["losses"][3:]) <= ALLOWED


# ------------------------------------------------ Hugging Face


def logits_of(folder: Path, cosines: bool = False) -> torch.Tensor:
    """What transformers computes of the same tokens; with `cosines` by the program's angles."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    class Cosines(LlamaRotaryEmbedding):
        """The program hands on cosines and sines for the angles of queries and keys, and keeps what
        it makes of the first."""

        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            cosines, _ = super().forward(x, position_ids)
            return cosines.cos(), cosines.sin()

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    if cosines:
        model.model.rotary_emb.__class__ = Cosines
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits


def program_logits(program: Program, source: str, **more: Any) -> torch.Tensor:
    flags = f"{ALONE} {SOURCES[source].model} --load {program.saved(source)['folder']}"
    return program.run(flags=flags, world=1, logits=True, **more)["logits"][..., :126]


@pytest.mark.parametrize("source", ["gpt", "z3"])
def test_an_exported_gpt_computes_the_programs_logits(
    program: Program, tmp_path: Path, source: str
) -> None:
    ucp.export_hf(program.saved(source)["folder"], tmp_path / "hf")
    want, have = program_logits(program, source), logits_of(tmp_path / "hf")
    assert have.shape == want.shape == (3, 16, 126) and torch.equal(have, want)


def test_an_exported_llama_computes_the_programs_logits(program: Program, tmp_path: Path) -> None:
    """By the angles that the program takes since December 2024, which no class of transformers
    does: without a config, which says that they were mended, the export is refused."""
    folder = program.saved("rotary")["folder"]
    with pytest.raises(ucp.UcpError, match="cosines"):
        ucp.export_hf(folder, tmp_path / "refused")
    config = {
        "model_type": "llama",
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "vocab_size": 126,
        "max_position_embeddings": 16,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2}))
    with pytest.raises(ucp.UcpError, match="heads"):
        ucp.export_hf(folder, tmp_path / "refused", config=tmp_path / "config.json")
    (tmp_path / "config.json").write_text(json.dumps(config))
    ucp.export_hf(folder, tmp_path / "hf", config=tmp_path / "config.json")
    want = program_logits(program, "rotary")
    assert torch.equal(logits_of(tmp_path / "hf", cosines=True), want)
    assert largest(want.flatten().tolist(), logits_of(tmp_path / "hf").flatten().tolist()) > 0.01


@pytest.mark.skipif(
    "MEGATRON_DEEPSPEED_OLDER" not in os.environ,
    reason="MEGATRON_DEEPSPEED_OLDER names no sources of before #441, such as commit 6acc370a",
)
def test_older_code_with_key_value_groups(tmp_path: Path) -> None:
    """Which has rows by head, right rotary angles, and their table as a buffer that it does not
    save: on other meshes, with and without a pipeline, and as a Llama."""
    older = prepared(os.environ["MEGATRON_DEEPSPEED_OLDER"], "megatron_deepspeed_older")
    found, groups = Program(tmp_path, str(older)), f"{LLAMA} {ROTARY} --num-key-value-heads 2"
    pairs = {
        Mesh(f"{ALONE} {TP2}", 2): [Mesh(ALONE, 1), Mesh(f"{ALONE} {TP2}", 4, 2)],
        Mesh(f"{TP2} {PP2}"): [Mesh(PP2, 2), Mesh(ALONE, 2)],
        Mesh(ALONE, 2, 3): [Mesh(ALONE, 4, 3), Mesh(f"{ALONE} {TP2}", 2)],
    }
    for number, (mesh, targets) in enumerate(pairs.items()):
        folder = tmp_path / f"run{number}"
        flags = f"{mesh.flags} {groups} --save {folder}"
        saved = found.run(flags=flags, saves=(3,), program="stock", **mesh.job)
        for target in targets:
            again = found.run(
                flags=f"{target.flags} {groups} --load {folder}",
                program="runner",
                want=saved["file"],
                logits=target.world == 1,
                **target.job,
            )
            same_state(again)
            assert largest(again["losses"], saved["losses"][3:]) <= ALLOWED
            if target.world == 1:
                ucp.export_hf(folder, tmp_path / "hf")
                want = again["logits"][..., :126]
                assert (logits_of(tmp_path / "hf") - want).abs().max() < 2e-6
    found.server.close()


@pytest.mark.parametrize("kind", ["stock", "patched"])
def test_an_imported_llama_computes_the_same_logits(
    program: Program, tmp_path: Path, kind: str
) -> None:
    """By the angles of the program. The unpatched one loads what was written for its mesh; the
    patched one any, with --finetune and without."""
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=2,
        intermediate_size=32,
        vocab_size=126,
        rms_norm_eps=1e-5,
        max_position_embeddings=16,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    mesh = "tp=1,dp=1,zero=1" if kind == "stock" else "tp=2,pp=2,dp=1,zero=1"
    ucp.import_hf(
        tmp_path / "hf",
        tmp_path / "start" / "global_step0",
        mesh=mesh,
        family="megatron_deepspeed_split_llama",
        padded_vocab=128,
        latest=True,
    )
    want = logits_of(tmp_path / "hf", cosines=True)
    for flag in ("--finetune",) if kind == "stock" else ("--finetune", ""):
        found = program.run(
            flags=f"{ALONE} {LLAMA} {ROTARY} --load {tmp_path / 'start'} {flag}",
            world=1,
            program=kind,
            logits=True,
        )
        assert torch.equal(found["logits"][..., :126], want)
        assert found["counters"]["iteration"] == 0 and len(found["losses"]) == 9


# ------------------------------------------------ golden folders, paths


@pytest.mark.slow
def test_the_launch_lines_of_the_page(
    program: Program, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """docs/megatron-deepspeed.md, word for word: torchrun, DeepSpeed's launcher, and an edited
    program, on the golden folder, with the losses that its run had next."""
    text = (ROOT / "docs" / "megatron-deepspeed.md").read_text()
    commands = [one.text for block in blocks_of(text) for one in block.commands]
    lines = [one for one in commands if "pretrain_gpt.py" in one and "$FLAGS" in one]
    assert [one.split()[0] for one in lines] == ["torchrun", "deepspeed", "torchrun"]
    work = tmp_path / "program"
    shutil.copytree(sources, work, ignore=shutil.ignore_patterns("site"))
    program.run(flags="", world=1, zero=0, text="golden", saves=())  # which writes the text
    for ending in ("bin", "idx"):
        shutil.copy(program.folder / f"golden.{ending}", work)
    zero = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1}
    (work / "ds.json").write_text(json.dumps({**zero, "zero_optimization": {"stage": 1}}))
    more = f"{OF_ALL} --data-path golden --deepspeed_config ds.json --zero-stage 1"
    path = [ROOT / "tests/stock/site", ROOT, sources / "site"]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, path)))
    monkeypatch.setenv("FLAGS", f"{BASE} {more} --save-interval 100")
    monkeypatch.setenv("LOCAL_SIZE", "2")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    printed = (FOLDER / "gpt_tp2pp2_z1/next_losses.txt").read_text().split()[1::2]
    for line in lines:
        shutil.rmtree(work / "runs", ignore_errors=True)
        shutil.copytree(FOLDER / "gpt_tp2pp2_z1", work / "runs/gpt")
        if line == lines[-1]:
            (patch,) = [one for one in commands if one.startswith("git apply")]
            here = patch.replace("/path/to/megatron_ucp", str(ROOT))
            subprocess.run(here, shell=True, cwd=work, check=True, timeout=60)
        done = run_command(line, timeout=200, cwd=work, shell=True)
        assert done.returncode == 0, done.stdout + done.stderr
        losses = re.findall(r"iteration +[456]/ +8 .*? lm loss: (\S+) ", done.stdout)
        assert [*dict.fromkeys(losses)] == printed, done.stdout
        assert "tp=2,pp=2,dp=1,zero=1 ->" in done.stdout + done.stderr


@pytest.mark.parametrize("name", FOLDERS)
def test_golden_folders_go_on(program: Program, tmp_path: Path, name: str) -> None:
    """On another mesh, with the losses that the run which wrote them had next, to the digits that
    it printed."""
    made, folder = FOLDERS[name], Path(shutil.copytree(FOLDER / name, tmp_path / name))
    # the pipeline of a model with rotary positions can't be built in the program
    mesh = Mesh(ALONE, 2) if ROTARY in made.model else Mesh(TP2, 2)
    printed = [float(line.split()[1]) for line in (folder / "next_losses.txt").open()]
    found = program.run(
        flags=f"{mesh.flags} {made.model} {OF_ALL} --load {folder}",
        text="golden",
        **replace(mesh, dtype=made.dtype).job,
    )
    assert largest(found["losses"], printed) <= (ALLOWED if made.dtype == "fp32" else 0.01)


@pytest.mark.parametrize(
    "first",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["program first", "megatron-core first"],
)
def test_a_megatron_core_of_the_environment_beside_its_own(
    tmp_path: Path, sources: Path, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest one, in both orders on the path: a package without `__init__.py` is never found
    before one that has it."""
    subprocess.run(["bash", "tests/megatron_env.sh", "0.19.2"], cwd=ROOT, check=True)
    newest = ROOT / ".cache" / "megatron" / "0.19.2"
    if first:
        monkeypatch.setenv("MEGATRON_CORE_FIRST", str(newest))
    found = Program(tmp_path, str(sources))
    assert found.server.version == "0.2.0"
    folder = shutil.copytree(FOLDER / "gpt_tp2pp2_z1", tmp_path / "run")
    again = found.run(flags=f"{TP2} {OF_ALL} --load {folder}", world=2, text="golden")
    assert again["counters"]["iteration"] == 3 and len(again["losses"]) == 3
    found.server.close()
