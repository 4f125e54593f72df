"""Command lines of small runs."""

import sysconfig
from pathlib import Path

FILES = ("argparse.py", "ast.py", "inspect.py", "typing.py")


def command(*parts: list[str] | str) -> list[str]:
    """All parts in one list; a text holds words, with spaces between them."""
    split = (part.split() if isinstance(part, str) else part for part in parts)
    return [word for words in split for word in words]


LLAMA = command(
    "--model-family llama --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 "
    "--num-attention-heads 4 --num-query-groups 2 --seq-length 32"
)
GPT = command(
    "--model-family gpt --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--hidden-dropout 0 --attention-dropout 0"
)
BATCH = command("--global-batch-size 8 --micro-batch-size 2")
RATES = command(
    "--lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine --lr-warmup-iters 2 --init-method-std 0.1"
)
QUIET = command("--eval-iters 0 --log-interval 1")


def stdlib() -> list[str]:
    """Real text that is on every machine: some of Python's own sources, as --data-path with
    weights."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return ["--data-path", *[word for name in FILES for word in ("1", str(folder / name))]]


def mesh(tp: int, zero: int) -> list[str]:
    return ["--tensor-model-parallel-size", str(tp), "--zero-stage", str(zero)]
