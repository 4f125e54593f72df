"""What transformers' Trainer makes of its own counters when a step has another number of samples
than it had."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "trainer_state.json"  # the Trainer writes it into the folder that holds the tag


def counted_anew(folder: Path, counters: Mapping[str, int], engine: Any, tp: int) -> list[str]:
    """A note where the Trainer goes on at another sample than the run had come to.

    `folder` is the tag's. Under AutoTP, where alone the Trainer has `tp` tensor-parallel ranks,
    DeepSpeed counts the samples that they share once for each of them. The Trainer keeps its step
    alone, and finds its epoch and the batches to skip by the number of steps that an epoch has now
    (transformers 5, `_init_training_state`).
    """
    if not (folder.parent / FILE).is_file():
        return []
    steps, taken = counters.get("global_steps", 0), counters.get("global_samples")
    batch = int(engine.train_batch_size()) // max(1, int(engine.autotp_size()))
    taken = None if taken is None else int(taken) // tp
    if taken is None or steps * batch == taken:
        return []
    found = steps * batch
    does = "repeats" if found < taken else "leaves out"
    return [
        f"{FILE}: the run took {taken:,} samples in {steps:,} steps, and a step has {batch:,} now: "
        f"transformers' Trainer counts epochs anew and goes on after sample {found:,}, which "
        f"{does} {abs(found - taken):,} samples (with ignore_data_skip it begins the epoch again). "
        "Keep per_device_train_batch_size x gradient_accumulation_steps x ranks"
    ]
