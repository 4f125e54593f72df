"""What Megatron saves besides element-wise states, in this package's form: counters, schedule,
loss scale, random generators."""

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from megatron_ucp.core.values import InertObject
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats import expect
from megatron_ucp.formats.byte_files import Where
from megatron_ucp.formats.checkpoint import TWISTER_WORDS, Extras, Generators
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.megatron.arguments import rate, size
from megatron_ucp.formats.megatron.groups import SavedGroup
from megatron_ucp.formats.param_groups import Tensors, number
from megatron_ucp.formats.pt.refs import TensorRef, number_in

# ---- counters and schedule
#
# The iteration that counts is the one beside the arguments; the one among them is 0 or stale.
# Skipped iterations are those that the optimizer's step did not count.


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
        raise expect.other_structure("whole numbers in the loss scale", growth, "")
    window, allowed = size(arguments, "loss_scale_window", 1000), size(arguments, "hysteresis", 2)
    hysteresis = allowed, allowed if left is None else int(left)
    least = rate(arguments, "min_loss_scale") or 1.0
    return LossScale.of_megatron(scale, int(growth), iteration, window, hysteresis, least)


def _number(value: Any, tensors: Tensors) -> float | None:
    if isinstance(value, TensorRef):
        return number_in(tensors(value), "")
    found = number(value)
    return expect.number(found, "the loss scale", "") if isinstance(found, int | float) else None


# ---- random states
#
# Random generators as Megatron-LM keeps them: an entry is a list of one dict for all
# data-parallel ranks, or with `--data-parallel-random-init` of one for each of them.
#
# Source: what `get_rng_state` of Megatron-LM's training program saves (core_v0.16.1).


WhereOf = Callable[[TensorRef], Where]  # where the elements of a tensor lie

_MAX_BYTES = 2**16  # more than any generator of torch keeps


def generators(entry: Sequence[Any], data_rank: int, place: WhereOf, file: str) -> Generators:
    """The generators of a data-parallel rank, in the form of `Checkpoint.random_states`. Raises
    DamagedFileError for what is no generator's."""
    saved = expect.each(entry, dict, "rng_state", file)[data_rank if len(entry) > 1 else 0]
    python = expect.key(saved, "random_rng_state", tuple, file)
    numpy = expect.key(saved, "np_rng_state", tuple, file)
    if len(python) != 3 or len(numpy) != 5:
        raise expect.other_structure(
            "random_rng_state of 3 and np_rng_state of 5 values", python, file
        )
    out: dict[str, bytes | list[int] | list[float]] = {
        **_of_python(*python, file),
        **_of_numpy(*numpy, file),
        "torch": _bytes(saved.get("torch_rng_state"), "torch_rng_state", place, file),
        "cuda": _bytes(saved.get("cuda_rng_state"), "cuda_rng_state", place, file),
    }
    for name, ref in expect.key(saved, "rng_tracker_states", dict, file).items():
        out[f"megatron.{name}"] = _bytes(ref, name, place, file)
    return out


def _of_python(
    version: Any, words: Any, left: Any, file: str
) -> dict[str, list[int] | list[float]]:
    """What `random.getstate` gives: its version, 624 words and a position in them, and a normal
    number that is left of a pair."""
    gauss = math.nan if left is None else expect.kind(left, float, "python_gauss", file)
    listed = expect.kind(words, tuple, "random_rng_state", file)
    return {"python": [_whole(n, file) for n in (version, *listed)], "python_gauss": [gauss]}


def _of_numpy(
    kind: Any, words: Any, position: Any, is_left: Any, left: Any, file: str
) -> dict[str, list[int] | list[float]]:
    """What `numpy.random.get_state` gives: its kind, 624 words, a position in them, and whether a
    normal number is left of a pair, and which."""
    if kind != "MT19937" or not isinstance(words, InertObject):
        raise expect.other_structure("numpy's generator MT19937", kind, file)
    data = words.get("data")
    known = (words.get("dtype"), words.get("shape")) == ("<u4", (TWISTER_WORDS,))
    if not known or not isinstance(data, bytes) or len(data) != 4 * TWISTER_WORDS:
        raise expect.other_structure(f"{TWISTER_WORDS} words of numpy's generator", words, file)
    return {
        "numpy": list(struct.unpack(f"<{TWISTER_WORDS}I", data)),
        "numpy_place": [_whole(number(position), file), _whole(number(is_left), file)],
        "numpy_gauss": [expect.kind(number(left), float, "numpy_gauss", file)],
    }


def _whole(value: Any, file: str) -> int:
    if type(value) is not int or not 0 <= value < 2**32:
        raise expect.other_structure("a word of a generator", value, file)
    return value


def _bytes(ref: Any, name: str, place: WhereOf, file: str) -> bytes:
    good = isinstance(ref, TensorRef) and len(ref.shape) == 1 and ref.is_contiguous
    if not good or ref.storage.dtype != "uint8" or not 0 < ref.numel <= _MAX_BYTES:
        raise DamagedFileError(
            "the state of a generator is no row of bytes",
            file=file,
            parameter=name,
            expected=f"uint8, up to {_MAX_BYTES} of them",
            found=repr(ref)[:200],
        )
    where, data = place(ref), bytearray(ref.numel)
    where.file.read_into(where.record, where.offset_bytes, memoryview(data))
    return bytes(data)
