"""Stock's own way to another mesh, in Megatron-DeepSpeed's own program: `ds_to_universal` and
`--universal-checkpoint`, beside a load of the same save with this package.

    python -m benchmarks.megatron_deepspeed SOURCES     # two minutes

SOURCES is the folder that tests/megatron_deepspeed_env.sh makes of the program's sources. The
unpatched program trains a tiny GPT for three steps in fp32 on up to four CPU ranks, and saves. Each
target gathers every master and both moments, whole, by code that knows nothing of this package.
Not a benchmark of time: the pairs, and what is wrong in each. Results:
benchmarks/results/megatron_deepspeed.json, a table in docs/evidence.md.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import frame
from tests.stock.megatron_deepspeed import Job
from tests.stock.server import Server

TP2, TP4 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4"
PP2, ALONE = "--pipeline-model-parallel-size 2", "--no-pipeline-parallel"
UNTIED = (
    "--swiglu --untie-embeddings-and-output-weights --normalization rmsnorm "
    "--disable-bias-linear --ffn-hidden-size 32"
)
EXPERTS = (
    "--num-experts 4 --expert-interval 1 --moe-expert-parallel-size {} --create-moe-param-group "
    "--topk 1 --moe-train-capacity-factor 4"
)
TOKENS = 126  # of 128 rows of the vocabulary
# flags of the mesh, ranks, ZeRO stage, and what it is called
Mesh = tuple[str, int, int, str]
T2P2: Mesh = (f"{TP2} {PP2}", 4, 1, "tp=2, pp=2")
P2: Mesh = (PP2, 2, 1, "pp=2")
T2: Mesh = (TP2, 2, 1, "tp=2")
T4: Mesh = (TP4, 4, 1, "tp=4")
D2: Mesh = ("", 2, 1, "dp=2")
D4: Mesh = ("", 4, 1, "dp=4")
N1: Mesh = (ALONE, 2, 1, "dp=2, ZeRO-1, no pipeline")
N2: Mesh = (f"{ALONE} {TP2}", 4, 2, "tp=2, dp=2, ZeRO-2, no pipeline")
N3: Mesh = (ALONE, 2, 3, "dp=2, ZeRO-3, no pipeline")
N34: Mesh = (ALONE, 4, 3, "dp=4, ZeRO-3, no pipeline")
EP2: Mesh = (f"{ALONE} {EXPERTS.format(2)}", 2, 1, "ep=2, no pipeline")
EP4: Mesh = (f"{ALONE} {EXPERTS.format(4)}", 4, 1, "ep=4, no pipeline")
# the model: its flags, the program that saves it, its pairs
Row = tuple[str, str, str, list[tuple[Mesh, list[Mesh]]]]
PAIRS: list[Row] = [
    (
        "GPT",
        "",
        "stock",
        [(T2P2, [T2P2, P2, T2, T4, D4, N1]), (P2, [D4, T2]), (N2, [N2, N1]), (N3, [N34, N1])],
    ),
    ("LLaMA-like, untied", UNTIED, "stock", [(T2, [P2, T4]), (P2, [D2])]),
    ("GPT with experts", "", "older", [(EP2, [EP2, EP4])]),
]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    server = Server("tests.stock.megatron_deepspeed", str(Path(options.sources).resolve()))
    try:
        rows = [*Pairs(server, options.folder).rows(PAIRS[1:2] if options.tiny else PAIRS)]
    finally:
        server.close()
    for row in rows:
        print(*row.values(), sep="; ")
    return {"pairs": rows}


class Pairs:
    """Each source is saved and converted once, and goes to its targets."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder, self.count = server, folder, 0

    def job(self, mesh: Mesh | None, **what: Any) -> tuple[Job, dict[str, Any]]:
        self.count += 1
        flags, world, zero, _ = mesh or ("", 1, 1, "")
        what["flags"] = f"{flags} {what.get('flags', '')}"
        out = str(self.folder / f"{self.count}.pt")
        job = Job(out, str(self.folder), world=world, zero=zero, **what)
        return job, self.server.ask(job)

    def rows(self, pairs: list[Row]) -> Iterator[dict[str, Any]]:
        for model, flags, program, sources in pairs:
            for mesh, targets in sources:
                saved = self.folder / f"{self.count}"
                job, answer = self.job(
                    mesh, flags=f"{flags} --save {saved}", saves=(3,), program=program
                )
                assert not any(answer["codes"]), answer["said"]
                converted = self.converted(saved)
                for target in targets:
                    stock = converted or self.went_on(
                        target, job.out, f"{flags} --load {saved}u --universal-checkpoint", "stock"
                    )
                    here = self.went_on(target, job.out, f"{flags} --load {saved}", "patched")
                    yield {
                        "model": model,
                        "source": mesh[-1],
                        "target": target[-1],
                        "stock": stock,
                        "here": here,
                    }

    def converted(self, saved: Path) -> str:
        """Stock's converter; why it ended, or nothing."""
        out = Path(f"{saved}u")
        out.mkdir()
        tag = "global_step3"
        _, answer = self.job(None, converts=(str(saved / tag), str(out / tag)))
        (out / "latest").write_text(tag)
        return f"its converter ends: {last_line(answer)}" if any(answer["codes"]) else ""

    def went_on(self, mesh: Mesh, want: str, flags: str, program: str) -> str:
        """Whether a run holds what the save held: "equal", how much is otherwise, or why it
        ended."""
        job, answer = self.job(mesh, flags=flags, want=want, program=program)
        if any(answer["codes"]):
            return f"its load ends: {last_line(answer)}"
        found = torch.load(job.out, weights_only=False)
        assert found["planted"], "the planted bit was not seen"
        saved = torch.load(want, weights_only=False)["state 3"]["full"]
        wrong, padding = set[str](), set[str]()
        for (name, state), value in found["loaded"]["full"].items():
            before = saved[name, state]
            if not torch.equal(value, before):
                rows = TOKENS if is_vocabulary(name) else len(value)
                is_padding = torch.equal(value[:rows], before[:rows])
                (padding if is_padding else wrong).add(name)
        said = [f"{len(wrong)} parameters wrong"] if wrong else []
        said += ["padding of the vocabulary wrong"] if padding else []
        said += (
            ["other hyper-parameters"] if any("became" in d for d in found["differences"]) else []
        )
        return f"{', '.join(said)}: without a word" if said else "equal"


def is_vocabulary(name: str) -> bool:
    return name.endswith(("word_embeddings.weight", "output_layer.weight"))


def last_line(answer: dict[str, Any]) -> str:
    """The error of the first rank that says one."""
    lines = [line for line in answer["said"].splitlines() if ("Error" in line) and ":" in line]
    line = lines[0] if lines else answer["said"].strip().splitlines()[-1]
    return re.sub(r"(?<=No such file or directory).*|\[Errno 2\] ", "", line)[:100]


def more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sources", help="the program's, with its data helper compiled")


if __name__ == "__main__":
    raise SystemExit(frame.main("megatron_deepspeed", more=more))
