"""Finite values that a dtype can't hold: they would become infinite without a word."""

import threading
from collections.abc import Callable, Mapping
from math import isfinite

import torch

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Plan
from megatron_ucp.core.states import MASTER
from megatron_ucp.engines.base import Engine
from megatron_ucp.errors import InexactError, some_of
from megatron_ucp.reshard.execute import TORCH_DTYPES

_NARROW = "float16"  # the others that train have the range of float32


def lost_values(exact: torch.Tensor, rounded: torch.Tensor) -> int:
    """How many finite values became none."""
    return int((exact.isfinite() & ~rounded.isfinite()).sum())


def too_large(found: Mapping[str, int], dtype: str, file: str, verb: str) -> InexactError:
    """The error for tensors (name -> how many values) that a dtype can't hold."""
    listed = [f"{name}: {count}" for name, count in sorted(found.items())]
    return InexactError(
        f"values are too large for {dtype}",
        file=file,
        parameter=min(found),
        expected=f"at most {torch.finfo(TORCH_DTYPES[dtype]).max:g}",
        found=f"larger values in {some_of(listed, between='; ')}",
        fix=f"{verb} in bfloat16 or float32",
    )


class Overflows:
    """Counts the finite values of each tensor that its dtype can't hold. Several threads use one;
    a total is `found` once they are done."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self._lock = threading.Lock()

    def look(self, name: str, rounded: torch.Tensor, exact: Callable[[], torch.Tensor]) -> None:
        """Looks at a window of a tensor; `exact` reads it again, as it was before it was rounded,
        where some of it is not finite."""
        if not len(rounded) or all(isfinite(float(one)) for one in torch.aminmax(rounded)):
            return
        if lost := lost_values(exact(), rounded):
            with self._lock:
                self.found[name] = self.found.get(name, 0) + lost


def may_overflow(source: Manifest, target: Manifest) -> bool:
    """Whether a load may make infinite weights of a checkpoint's finite ones: it was trained in
    another dtype. The same on every rank."""
    known = source.by_name
    return any(
        spec.dtype == _NARROW and spec.name in known and known[spec.name].dtype != _NARROW
        for spec in target.params
    )


def in_masters(engine: Engine, plan: Plan) -> dict[str, int]:
    """Of this rank's masters, which were filled: parameter -> how many values its weights can't
    hold."""
    out: dict[str, int] = {}
    specs = engine.manifest.by_name
    for op in plan.ops:
        name = engine.manifest.member(op.target.slot.buffer, op.member).param
        if op.target.slot.state != MASTER or specs[name].dtype != _NARROW:
            continue
        flat = engine.tensor(op.target.slot)
        first = flat.storage_offset() + op.target.offset
        values = torch.as_strided(flat, op.shape, op.target.strides, first)
        if lost := lost_values(values, values.to(TORCH_DTYPES[_NARROW])):
            out[name] = out.get(name, 0) + lost
    return out
