"""Which optimizers step the masters of megatron-core's stack: torch's, Transformer Engine's and
Apex' Adam, known by their names. Neither Transformer Engine nor Apex has to be there."""

from typing import Any

from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.optimizers import in_table, name_in_table

_MASTERS = "masters lie in the optimizer"
# attributes of the fused ones under which states are other numbers, or lie elsewhere
_VARIANTS = {
    "capturable": "its step and rates are tensors that CUDA graphs hold",
    "master_weights": _MASTERS,
    "use_master": _MASTERS,
    "store_param_remainders": "of masters the trailing bits alone are kept",
    "use_decoupled_grad": "gradients have another dtype than masters",
}
_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype")
_FP32 = "torch.float32"


def full_name(optimizer: Any) -> str:
    """The class of an optimizer, with its module."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def refuse_unknown(optimizer: Any) -> None:
    """Raises UnsupportedError for an optimizer whose states are not known, or that keeps them in a
    form that can't be carried bit by bit."""
    name = name_in_table(type(optimizer))
    if not in_table(name):
        raise UnsupportedError(
            "the states of this optimizer are not known",
            expected="Adam of torch, Transformer Engine or Apex",
            found=full_name(optimizer),
            fix="train with --optimizer adam, or say what it keeps with ucp.register_optimizer "
            f'("{name}", ...) before attach_megatron',
        )
    odd = {one: why for one, why in _VARIANTS.items() if getattr(optimizer, one, None)}
    for one in _DTYPES:
        if str(getattr(optimizer, one, _FP32)) != _FP32:
            odd[one] = f"a moment is kept in {getattr(optimizer, one)}, scaled"
    if odd:
        one, why = next(iter(odd.items()))
        raise UnsupportedError(
            f"{one} of the optimizer is not supported: {why}",
            expected=f"masters and moments in float32, {', '.join(odd)} off",
            found=f"{full_name(optimizer)} with {one}={getattr(optimizer, one)}",
            fix="leave --use-precision-aware-optimizer and its options out",
        )


def decay_of(optimizer: Any) -> dict[str, bool]:
    """What torch's groups say of the kind of weight decay, and the fused ones by an attribute."""
    mode = getattr(optimizer, "adam_w_mode", None)
    return {} if mode is None else {"decoupled_weight_decay": bool(mode)}


def taken_as(optimizer: Any) -> list[str]:
    """A note where an optimizer's class is a subclass of one that is known."""
    name, kind = name_in_table(type(optimizer)), type(optimizer)
    if name == f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}":
        return []
    return [
        f"the optimizer {full_name(optimizer)} is taken as {name}, which it is a subclass of; if "
        "it keeps other states, say which with ucp.register_optimizer"
    ]
