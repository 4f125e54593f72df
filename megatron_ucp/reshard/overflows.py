"""Finite values that a dtype can't hold: they would become infinite without a word."""

import math
import threading
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from megatron_ucp.core.box import strides
from megatron_ucp.core.dtypes import dtype_name
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import LOSSLESS, Cast, Copy, Op, Plan, Side
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import InexactError, some_of
from megatron_ucp.formats.base import Readable
from megatron_ucp.reshard.engine import Engine
from megatron_ucp.reshard.execute import TORCH_DTYPES, execute

_NARROW = "float16"  # the others that train have the range of float32
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
Lost = Mapping[tuple[str, str], int]  # (name of a tensor, dtype) -> how many values


def lost_values(exact: torch.Tensor, rounded: torch.Tensor) -> int:
    """How many finite values became none."""
    return int((exact.isfinite() & ~rounded.isfinite()).sum())


def too_large(found: Lost, file: str, verb: str) -> InexactError:
    """The error for tensors with values that their dtype can't hold; of several dtypes, the
    first tensor's."""
    parameter, dtype = min(found)
    counts = sorted((name, count) for (name, own), count in found.items() if own == dtype)
    listed = [f"{name}: {count}" for name, count in counts]
    return InexactError(
        f"values are too large for {dtype}",
        file=file,
        parameter=parameter,
        expected=f"at most {torch.finfo(TORCH_DTYPES[dtype]).max:g}",
        found=f"larger values in {some_of(listed, between='; ')}",
        fix=f"{verb} in bfloat16 or float32",
    )


def is_finite(values: torch.Tensor) -> bool:
    """Whether all of them are."""
    return not len(values) or all(math.isfinite(float(one)) for one in torch.aminmax(values))


class Overflows:
    """Counts the finite values of each tensor that its dtype can't hold. Several threads use one;
    a total is `found` once they are done."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

    def compare(self, name: str, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """Looks at some values of a tensor, before and after they were rounded."""
        if lost := lost_values(exact, rounded):
            key = name, dtype_name(rounded.dtype)
            with self._lock:
                self.found[key] = self.found.get(key, 0) + lost


def refuse_lost(found: Iterable[Lost], file: str, verb: str) -> None:
    """Raises InexactError that lists every tensor with values which its dtype can't hold, of what
    all ranks found. What several ranks have copies of counts once."""
    total = Counter[tuple[str, str]]()
    for one in found:
        total |= Counter(one)
    if total:
        raise too_large(total, file, verb)


def is_looked_at(
    source: Manifest, param: str, state: str, want: str, as_trained: bool = True
) -> bool:
    """Whether values of a source's state may be lost in the dtype `want`. What the run itself
    computed with (`as_trained`), its masters rounded to the dtype of its training, is as it was."""
    have = source.states_of(param)[state]
    if have == want or (have, want) in LOSSLESS or not {have, want} <= _FLOATS:
        return False
    return not as_trained or state != MASTER or source.by_name[param].dtype != want


def param_of(op: Op, target: Manifest) -> str:
    """The parameter of which an operation fills some elements."""
    return target.member(op.target.slot.buffer, op.member).param


def may_overflow(source: Manifest, target: Manifest) -> bool:
    """Whether a load may make infinite weights of a checkpoint's finite ones: it was trained in
    another dtype. The same on every rank."""
    known = source.by_name
    return any(
        spec.dtype == _NARROW and spec.name in known and known[spec.name].dtype != _NARROW
        for spec in target.params
    )


def lost_in_casts(engine: Engine, source: Readable, plan: Plan) -> Lost:
    """What this rank's memory, which was filled, lost of the checkpoint's values as they were
    rounded. Raises DamagedFileError where the source can't be read again."""
    out: dict[tuple[str, str], int] = {}
    for op in plan.ops:
        if not isinstance(op, Cast) or op.lossless:
            continue
        values = _memory_of(engine, op)
        name = param_of(op, engine.manifest)
        key = name, dtype_name(values.dtype)
        if not is_looked_at(source.manifest, name, op.source.slot.state, key[1]):
            continue
        if values.isfinite().all():
            continue
        if lost := lost_values(_read_again(source, op).to(values.device), values):
            out[key] = out.get(key, 0) + lost
    return out


def _read_again(source: Readable, op: Copy) -> torch.Tensor:
    """The values of a copy as they are saved, in its shape."""
    dtype = TORCH_DTYPES[source.where(op.source.slot).dtype]
    flat = torch.empty(math.prod(op.shape), dtype=dtype)
    exact = Copy(op.source, Side(op.target.slot, 0, strides(op.shape)), op.shape, op.member, op.box)
    execute(Plan((), (exact,), ()), source.where, lambda _: flat)
    return flat.view(op.shape)


def _memory_of(engine: Engine, op: Op) -> torch.Tensor:
    """What an operation filled."""
    flat = engine.tensor(op.target.slot)
    first = flat.storage_offset() + op.target.offset
    return torch.as_strided(flat, op.shape, op.target.strides, first)


def lost_in_weights(engine: Engine, plan: Plan) -> Lost:
    """What weights will lose of the masters, where they are narrower."""
    out: dict[tuple[str, str], int] = {}
    specs = engine.manifest.by_name
    for op in plan.ops:
        name = param_of(op, engine.manifest)
        if op.target.slot.state != MASTER or specs[name].dtype != _NARROW:
            continue
        values = _memory_of(engine, op)
        if lost := lost_values(values, values.to(TORCH_DTYPES[_NARROW])):
            out[name, _NARROW] = out.get((name, _NARROW), 0) + lost
    return out
