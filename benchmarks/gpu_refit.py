"""A refit within one process on one GPU, beside `copy_` of the same bytes.

    torchrun --nproc-per-node 1 -m benchmarks.gpu_refit    # a minute; 12 GB of GPU memory

A trainer of DeepSpeed at ZeRO-1 in bf16 with AdamW, of a billion parameters, and a rollout without
an optimizer. In each repetition: a step of the trainer, a refit, and a loop of `copy_` over the
same parameters, in turns. After the last refit every weight is compared bit by bit. Prints its
figures; without a GPU it says so.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import megatron_ucp as ucp
from benchmarks.cases import Mesh
from benchmarks.model import POSITIONS, VOCABULARY, Gpt2, make_engine

SIZE = {"width": 1792, "layers": 24}
REPETITIONS = 10


def main() -> int:
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU")
        return 1
    import deepspeed

    deepspeed.init_distributed()
    trainer = make_engine(Mesh(1), SIZE)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}
    rollout: Any = deepspeed.initialize(model=Gpt2(**SIZE), config=config)[0]
    tokens = torch.randint(VOCABULARY, (1, POSITIONS), device=trainer.device)
    seconds: dict[str, list[float]] = {"refit": [], "copy_": []}
    planned: list[Any] = []
    first = timed(lambda: planned.append(ucp.refit(trainer, rollout)))
    ways: dict[str, Callable[[], Any]] = {
        "refit": planned[0],
        "copy_": lambda: copy(trainer.module, rollout.module),
    }
    for number in range(REPETITIONS + 1):
        trainer.backward(trainer(tokens))
        trainer.step()
        for way in ways if number % 2 else reversed(ways):
            clear(rollout.module)
            seconds[way].append(timed(ways[way]))
    clear(rollout.module)
    report = planned[0](checksums=True)
    pairs = zip(trainer.module.parameters(), rollout.module.parameters(), strict=True)
    unlike = sum(not torch.equal(one, other) for one, other in pairs)
    medians = {way: statistics.median(found[1:]) for way, found in seconds.items()}
    print(
        f"{torch.cuda.get_device_name()}: {report.filled_bytes:,} bytes, {unlike} tensors unequal"
    )
    print(f"planned in {first:.3f} s; compared {report.compared_bytes:,} bytes")
    for way, found in medians.items():
        print(f"{way}: {found * 1e3:.2f} ms, {report.filled_bytes / found / 1e9:.0f} GB/s")
    print(f"refit / copy_: {medians['refit'] / medians['copy_']:.3f}")
    return int(unlike > 0)


def timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


@torch.no_grad()
def copy(source: Any, target: Any) -> None:
    for one, other in zip(source.parameters(), target.parameters(), strict=True):
        other.copy_(one)


@torch.no_grad()
def clear(module: Any) -> None:
    for param in module.parameters():
        param.zero_()


if __name__ == "__main__":
    raise SystemExit(main())
