"""What one flag says of others: rows that hold for every run, and the forms that they have."""

import argparse
from typing import Any

from megatron_ucp.errors import UsageError

# a flag, what it needs beside it, and how that is written
NEEDS = (
    *((name, "save", "DIR") for name in ("save_interval", "keep_latest", "async_save")),
    ("keep_memory_every", "save", "DIR"),
    *((name, "load", "DIR") for name in ("ckpt_step", "load_tag", "universal_checkpoint")),
    *((name, "load", "DIR") for name in ("finetune", "use_checkpoint_args")),
    *((name, "load", "DIR") for name in ("allow_vocab_resize", "allow_other_data")),
    ("elastic", "save", "DIR"),
    ("elastic", "global_batch_size", "N"),
    ("elastic", "save_interval", "N"),
    ("elastic_meshes", "elastic", ""),
    ("elastic_batch_tolerance", "elastic", ""),
)
# what is said once, and the flags that say it
ONE_OF = (
    ("the precision is one", "bf16", "fp16"),
    ("the data comes from one place", "mock_data", "data_path"),
    (
        "the schedule's settings come from one place",
        "override_opt_param_scheduler",
        "use_checkpoint_opt_param_scheduler",
    ),
    ("the tag to load is given once", "ckpt_step", "load_tag"),
    ("the length of the run is given once", "train_iters", "train_samples", "train_tokens"),
    *(
        ("a length of the schedule is given once", f"{name}_iters", f"{name}_samples")
        for name in ("lr_decay", "lr_warmup", "lr_wsd_decay")
    ),
    ("the warm-up is given once", "lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
)


def flag_of(name: str) -> str:
    """The flag of an attribute."""
    return f"--{name.replace('_', '-')}"


def check_rows(args: argparse.Namespace) -> None:
    """Raises UsageError for a flag without what it needs, and for what is said twice."""
    for problem, *names in ONE_OF:
        values = {flag_of(name): getattr(args, name) for name in names}
        given = [name for name, value in values.items() if value is not None and value is not False]
        if len(given) > 1:
            raise UsageError(problem, expected="one flag", found=" and ".join(given))
    for name, needed, value in NEEDS:
        if getattr(args, name) and not getattr(args, needed):
            raise UsageError(
                f"{flag_of(name)} needs {flag_of(needed)}",
                expected=f"{flag_of(needed)} {value}".rstrip(),
                found="nothing",
            )


def check_divides(
    args: argparse.Namespace, name: str, whole: int, what: str, fix: str | None = None
) -> None:
    """Raises UsageError where a flag's size does not divide `whole`, which `what` names."""
    size: Any = getattr(args, name)
    if whole % size:
        problem = f"{flag_of(name)} does not divide {what}"
        raise UsageError(problem, expected=f"a divisor of {whole}", found=size, fix=fix)
