"""What DeepSpeed's AutoTP says of its own shares that no pattern can: sizes that differ from rank
to rank, values that are scaled."""

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_ucp.core.box import Ints
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.deepspeed.model_file import shapes_by_group
from megatron_ucp.formats.deepspeed.stock_info import affine_shares, usable
from megatron_ucp.formats.pt.unpickler import TensorRef

if TYPE_CHECKING:
    from megatron_ucp.formats.deepspeed.native import NativeCheckpoint

_UNSUPPORTED = "autotp_unsupported_parameter_patterns"
_FIX = (
    "convert it with DeepSpeed's own ds_to_universal and take the universal folder, or resume on "
    "the same mesh with DeepSpeed's own load"
)


def refuse_autotp(checkpoint: "NativeCheckpoint") -> None:
    """Raises UnsupportedError for a parameter whose shares are no equal parts of it, where the
    model files hold the shares that their `universal_checkpoint_info` describes. Other shapes are
    left to those who compare files."""
    info: Any = checkpoint.meta.get("universal_checkpoint_info")
    said = isinstance(info, dict) and checkpoint.recorded is None
    if checkpoint.counts.tp == 1 or checkpoint.pipeline or not said:
        return
    ranks = range(checkpoint.counts.tp)
    held = [_shapes(checkpoint, rank) for rank in ranks]
    for pattern, shares, why in _odd(info, checkpoint.main_file):
        name = next((name for name in held[0] if re.match(pattern, name)), None)
        if name is None or shares not in ([], [each.get(name) for each in held]):
            continue
        raise UnsupportedError(
            f"a parameter that AutoTP cut has {why}, which this version does not read",
            file=checkpoint.main_file,
            parameter=name,
            expected=f"{checkpoint.counts.tp} equal shares",
            found=" and ".join(map(str, shares)) or why,
            fix=_FIX,
        )


def _odd(info: Mapping[str, Any], file: str) -> Iterator[tuple[str, list[Ints], str]]:
    """Pattern, shapes of the shares (none: they don't matter) and what is odd, for each parameter
    that is no case of equal shares."""
    said: Any = info.get(_UNSUPPORTED) or {}
    reasons: Mapping[str, Any] = said if isinstance(said, dict) else {}
    for pattern, reason in reasons.items():
        yield from ((one, [], str(reason)[:200]) for one in usable([pattern], _UNSUPPORTED, file))
    for pattern, (shares, scaled) in affine_shares(info, file).items():
        if len({*shares}) > 1:
            yield pattern, shares, "shares of different sizes"
        elif scaled:
            yield pattern, shares, "scaled values"


def _shapes(checkpoint: "NativeCheckpoint", tp: int) -> dict[str, Ints]:
    """What a tensor-parallel rank has of each parameter, before ZeRO cuts it."""
    module = checkpoint.weights.module(tp)
    out = {name: ref.shape for name, ref in module.items() if isinstance(ref, TensorRef)}
    for named in shapes_by_group(checkpoint.tree(checkpoint.model_of(tp))) or []:
        out |= named
    return out
