"""What a step takes of the data, where that is not what it was: on another number of ranks the same
settings are another batch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "trainer_state.json"  # the Trainer writes it into the folder that holds the tag
BATCH = "train_batch_size"  # of a manifest's run: samples of a step


def batch_of(engine: Any) -> int:
    """Samples of a step. Under AutoTP DeepSpeed counts those that tensor-parallel ranks share once
    for each of them."""
    return int(engine.train_batch_size()) // max(1, int(engine.autotp_size()))


def notes_of_batch(
    folder: Path,
    run: Mapping[str, Any],
    counters: Mapping[str, int],
    engine: Any,
    tp: int,
    counts_samples: bool,
) -> list[str]:
    """Notes where a step has another number of samples than it had, and where a loop that keeps
    its step alone goes on at another sample than the run had come to.

    `folder` is the tag's, `run` and `counters` the checkpoint's, whose files of a run under AutoTP
    count samples `tp` times. `counts_samples`: the data loader's position is kept in samples.
    """
    steps, taken = counters.get("global_steps", 0), counters.get("global_samples")
    if not steps or taken is None:
        return []
    of_trainer, batch = (folder.parent / FILE).is_file(), batch_of(engine)
    taken = int(taken) // (tp if of_trainer else 1)  # the Trainer's tensor parallelism is AutoTP
    is_known = of_trainer or tp == 1  # whether `taken` counts each sample once
    was = run.get(BATCH) or (taken / steps if is_known else batch)
    notes = [] if was == batch else [_changed(was, batch, engine)]
    if steps * batch != taken and of_trainer:
        notes.append(_of_the_trainer(steps, taken, batch))
    elif notes and is_known and steps * batch != taken and not counts_samples:
        notes.append(
            f"the run took {taken:,} samples: a loop that skips as many batches as there were "
            f"steps {_goes_on(steps * batch, taken)}"
        )
    return notes


def _changed(was: float, batch: int, engine: Any) -> str:
    micro = int(engine.train_micro_batch_size_per_gpu())
    accumulated = int(engine.gradient_accumulation_steps())
    ranks = max(1, batch // (micro * accumulated))
    now = f"{batch:,} ({micro} x {accumulated} accumulated x {ranks} data-parallel ranks)"
    product = "per-rank batch x accumulation"
    if was % ranks:
        low = int(was // ranks)
        sizes = f"{low} or {low + 1}" if low else "1"
        keep = f"{was:,g} does not divide by {ranks} ranks: {product} of {sizes} is nearest"
    else:
        keep = f"{product} of {int(was // ranks)} keeps it"
    return (
        f"a step has another batch: {was:,g} samples before, {now} now; the learning rate and the "
        f"schedule, which counts steps, stay the run's. {keep}"
    )


def _of_the_trainer(steps: int, taken: int, batch: int) -> str:
    """The Trainer keeps its step alone, and finds its epoch and the batches to skip by the number
    of steps that an epoch has now (transformers 5, `_init_training_state`)."""
    return (
        f"{FILE}: the run took {taken:,} samples in {steps:,} steps, and a step has {batch:,} now: "
        f"transformers' Trainer counts epochs anew and {_goes_on(steps * batch, taken)} (with "
        "ignore_data_skip it begins the epoch again). Keep per_device_train_batch_size x "
        "gradient_accumulation_steps x ranks"
    )


def _goes_on(found: int, taken: int) -> str:
    does = "repeats" if found < taken else "leaves out"
    return f"goes on after sample {found:,}, which {does} {abs(found - taken):,} samples"
