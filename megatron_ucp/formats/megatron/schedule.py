"""Megatron's schedule of rates and weight decay, which two programs spell differently.

megatron-core keeps the weight decay as it grows, and in no file what only flags say;
`pretrain_gpt.py` keeps one weight decay, and all settings.
"""

from collections.abc import Mapping
from typing import Any

SCHEDULE = ("max_lr", "min_lr", "num_steps", "lr_decay_style")  # what every such state has
OF_WSD = ("wsd_decay_steps", "lr_wsd_decay_style")
_WARMUP, _FIRST_RATE = "lr_warmup_steps", "init_lr"
_GROWTH = ("start_wd", "end_wd", "wd_incr_style", "wd_incr_steps")
_DECAY = "weight_decay"


def is_schedule(state: Mapping[str, Any]) -> bool:
    """Whether a scheduler's state is of one that computes as Megatron's does."""
    return all(key in state for key in SCHEDULE)


def one_spelling(state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A schedule's state without what its spelling alone decides: two that are equal so set the
    same rates and weight decay from here on. Another scheduler's state is as it was.

    Source: `OptimizerParamScheduler.get_lr` and `get_wd` of megatron-core: the first rate counts in
    the warm-up alone, WSD's settings in WSD alone, and a weight decay that ends as it began is one.
    """
    if state is None or not is_schedule(state):
        return state
    out = dict(state)
    if out["lr_decay_style"] != "WSD":
        for key in OF_WSD:
            out.pop(key, None)
    warmup, samples = out.get(_WARMUP), out["num_steps"]
    is_over = isinstance(warmup, int) and isinstance(samples, int) and samples > warmup
    if warmup == 0 or is_over or out.get(_FIRST_RATE) == 0:  # 0 is what no flag says otherwise
        out.pop(_FIRST_RATE, None)
    if _DECAY not in out and all(key in out for key in _GROWTH[:2]):
        if out["start_wd"] == out["end_wd"]:
            out[_DECAY] = out["end_wd"]
            for key in _GROWTH:
                out.pop(key, None)
    return out
