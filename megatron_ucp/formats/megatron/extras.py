"""What Megatron saves besides element-wise states, in this package's form.

The iteration that counts is the one beside the arguments; the one among them is 0 or stale. Skipped
iterations are those that the optimizer's step did not count.
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.base import Extras
from megatron_ucp.formats.foreign import as_float, no_such
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.megatron.arguments import rate, size
from megatron_ucp.formats.megatron.groups import SavedGroup
from megatron_ucp.formats.plain_values import Tensors, number
from megatron_ucp.formats.pt.unpickler import TensorRef
from megatron_ucp.formats.pt.values import number_in

ARGUMENTS_KEY = "args"  # of the client state, as `pretrain_gpt.py` keeps its flags there too
SCHEDULER = "opt_param_scheduler"
OPERATIONS = "num_floating_point_operations_so_far"
_VERSION, _ITERATION, _SAMPLES = "checkpoint_version", "iteration", "consumed_train_samples"
# of the client state, what Megatron's own files have a place for
CLIENT_KEYS = frozenset({ARGUMENTS_KEY, OPERATIONS, _VERSION, _ITERATION, _SAMPLES})
_SCALER = ("scale", "growth_tracker", "hysteresis_tracker")


def iteration_of(tree: Mapping[str, Any], file: str) -> int:
    """The iteration of the save. Raises DamagedFileError for what is no number."""
    value = tree.get("iteration", 0)
    if type(value) is not int or not 0 <= value < 2**63:
        raise DamagedFileError("the iteration is no number", file=file, found=type(value).__name__)
    return value


def counters_of(
    iteration: int, arguments: Mapping[str, Any], groups: Sequence[SavedGroup]
) -> dict[str, int]:
    """Iterations, samples and skipped iterations, as far as the files say them."""
    out = {"global_steps": iteration}
    samples = arguments.get("consumed_train_samples")
    if type(samples) is int and samples >= 0:
        out["global_samples"] = samples
    steps = [int(group.step) for group in groups if group.step is not None]
    out["skipped_steps"] = max(0, iteration - max(steps)) if steps else 0
    return out


def extras_of(
    tree: Mapping[str, Any],
    arguments: Mapping[str, Any],
    counters: Mapping[str, int],
    scaler: LossScale,
    int_steps: bool,
    stateless: Mapping[str, Any],
    file: str,
) -> Extras:
    """Of the tree that holds the arguments. Raises DamagedFileError."""
    scheduler = tree.get(SCHEDULER)
    if not isinstance(scheduler, dict | None):
        raise DamagedFileError(
            "the scheduler's state is no dictionary", file=file, found=type(scheduler).__name__
        )
    client: dict[str, Any] = {ARGUMENTS_KEY: dict(arguments)} if arguments else {}
    client[_ITERATION] = counters["global_steps"]
    if "global_samples" in counters:
        client[_SAMPLES] = counters["global_samples"]
    for key in (_VERSION, OPERATIONS):
        if tree.get(key) is not None:
            client[key] = number(tree[key])
    return Extras(
        counters,
        None if scheduler is None else {str(k): number(v) for k, v in scheduler.items()},
        scaler,
        None,
        client,
        clip_grad=rate(arguments, "clip_grad"),
        int_steps=int_steps,
        stateless=stateless,
    )


def loss_scale_of(
    tree: Any, arguments: Mapping[str, Any], tensors: Tensors, iteration: int
) -> LossScale:
    """The loss scale of a saved scaler, none of anything else. Raises DamagedFileError."""
    if not isinstance(tree, Mapping) or "scale" not in tree:
        return LossScale()
    scale, growth, left = (_number(tree.get(key), tensors) for key in _SCALER)
    if growth is None:
        return LossScale(False, scale)
    if not isfinite(growth) or not isfinite(left or 0):
        raise no_such("whole numbers in the loss scale", growth, "")
    window, allowed = size(arguments, "loss_scale_window", 1000), size(arguments, "hysteresis", 2)
    hysteresis = allowed, allowed if left is None else int(left)
    least = rate(arguments, "min_loss_scale") or 1.0
    return LossScale.of_megatron(scale, int(growth), iteration, window, hysteresis, least)


def _number(value: Any, tensors: Tensors) -> float | None:
    if isinstance(value, TensorRef):
        return number_in(tensors(value), "")
    found = number(value)
    return as_float(found, "the loss scale", "") if isinstance(found, int | float) else None
