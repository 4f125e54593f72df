"""Which optimizers step the masters of megatron-core's stack: torch's, Transformer Engine's and
Apex' Adam, known by their names. Neither Transformer Engine nor Apex has to be there."""

from typing import Any

from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.optimizers import full_name, in_table, name_in_table

_MASTERS = "masters lie in the optimizer"
# attributes of the fused ones under which states are other numbers, or lie elsewhere
_VARIANTS = {
    "capturable": "its step and rates are tensors that CUDA graphs hold",
    "master_weights": _MASTERS,
    "use_master": _MASTERS,
    "store_param_remainders": "of masters the trailing bits alone are kept",
    "use_decoupled_grad": "gradients have another dtype than masters",
}
# in names of optimizers whose step takes whole matrices: Megatron-LM gives each rank some of them
_WHOLE_MATRICES = ("muon", "orthogonalized", "shampoo", "soap")
_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype")
_FP32 = "torch.float32"


def refuse_unknown(optimizer: Any) -> None:
    """Raises UnsupportedError for an optimizer whose states are not known, or that keeps them in a
    form that can't be carried bit by bit."""
    name, full = name_in_table(type(optimizer)), full_name(type(optimizer))
    bases = " ".join(base.__name__.lower() for base in type(optimizer).__mro__)
    if not in_table(name) and any(word in bases for word in _WHOLE_MATRICES):
        raise UnsupportedError(
            "optimizers that step whole matrices are not supported in megatron-core's stack",
            expected="Adam of torch, Transformer Engine or Apex",
            found=full,
            fix="train with --optimizer adam, or save and load with Megatron-LM's own functions on "
            "the same mesh",
        )
    if not in_table(name):
        raise UnsupportedError(
            "the states of this optimizer are not known",
            expected="Adam of torch, Transformer Engine or Apex",
            found=full,
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
            found=f"{full} with {one}={getattr(optimizer, one)}",
            fix="leave --use-precision-aware-optimizer and its options out",
        )
