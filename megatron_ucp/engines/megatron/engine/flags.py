"""The flags of Megatron-LM's running program, as a file may hold them."""

from argparse import Namespace
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import torch

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.engines.megatron.engine.inner import inner_optimizers, kind_of
from megatron_ucp.engines.megatron.engine.stack import MegatronStack
from megatron_ucp.engines.megatron.names import bare_model
from megatron_ucp.errors import UsageError
from megatron_ucp.formats.megatron.arguments import SIZES, written_arguments
from megatron_ucp.formats.megatron.closed_list import OF_VALUES

_PLAIN = (bool, int, float, str, type(None))


def plain_flags(arguments: Mapping[str, Any] | Any) -> dict[str, Any]:
    """A Namespace or a mapping as plain values; dtypes become their names. What no file should hold
    (enums, functions) is left out: Megatron-LM takes its own."""
    out: dict[str, Any] = {}
    for name, value in _said(arguments).items():
        if isinstance(value, torch.dtype):
            out[str(name)] = str(value)
        elif _is_plain(value):
            out[str(name)] = value
    return out


def flags_of_model(stack: MegatronStack) -> dict[str, bool]:
    """The flag by which a reader knows that weights and masters were scaled apart, where the model
    says it: of a save that is given no flags."""
    return {"qk_clip": True} if getattr(bare_model(stack.chunks[0]).config, "qk_clip", None) else {}


def _said(arguments: Mapping[str, Any] | Any) -> Mapping[Any, Any]:
    return vars(arguments) if hasattr(arguments, "__dict__") else dict(arguments or {})


def _is_plain(value: Any, known: Callable[[Any], bool] = lambda value: False) -> bool:
    """Whether a value is a number, a text, or made of such, or of what is `known`."""
    if isinstance(value, list | tuple):
        return all(_is_plain(one, known) for one in value)
    if isinstance(value, dict):
        return all(_is_plain(one, known) for pair in value.items() for one in pair)
    return known(value) or isinstance(value, _PLAIN) and not isinstance(value, Enum)


# ------------------------------------------------ in files that are pickles of the program's own

# by the object that has it: what it is called there, of flags that say how the buffers lie and what
# is in them
_OF_MODEL = {
    "num_layers": "num_layers",
    "num_experts": "num_moe_experts",
    "moe_layer_freq": "moe_layer_freq",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split": "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split": "account_for_loss_in_pipeline_split",
    "swiglu": "gated_linear_unit",
    "add_bias_linear": "add_bias_linear",
    "qk_clip": "qk_clip",
    "bf16": "bf16",
    "fp16": "fp16",
}
_OF_BUFFERS = {
    "overlap_grad_reduce": "overlap_grad_reduce",
    "ddp_bucket_size": "bucket_size",
    "ddp_pad_buckets_for_high_nccl_busbw": "pad_buckets_for_high_nccl_busbw",
}
_OF_OPTIMIZER = {
    "apply_wd_to_qk_layernorm": "apply_wd_to_qk_layernorm",
    "clip_grad": "clip_grad",
    "decoupled_lr": "decoupled_lr",
    "loss_scale_window": "loss_scale_window",
    "hysteresis": "hysteresis",
    "min_loss_scale": "min_loss_scale",
}
_LAYOUT = "pipeline_model_parallel_layout"


def flags_of_program(
    stack: MegatronStack, manifest: Manifest, arguments: Any, rng: bool
) -> Namespace:
    """The flags as Megatron-LM's older files hold them: all that are given, enums and dtypes too,
    with the sizes of the mesh that there is; what is not given as the stack says it. Functions, and
    objects of classes that no reader knows, are left out. Raises UsageError where the sizes of the
    model are not known."""
    kind, samples = kind_of(stack.optimizer), stack.consumed_samples
    known = written_arguments(plain_flags(arguments), manifest, stack.mesh, samples, kind)
    if not known:
        raise UsageError(
            "the sizes of the model are not known, and Megatron-LM's older files say all by them",
            expected="Megatron-LM's flags",
            found="none",
            fix="give them: ucp.save(..., arguments=args)",
        )
    sure = (*SIZES, "world_size", "consumed_train_samples", "use_distributed_optimizer")
    known.pop("dist_ckpt_optim_fully_reshardable")
    given = {str(k): v for k, v in _said(arguments).items() if _is_plain(v, _is_known)}
    last = {"ckpt_format": "torch", "no_save_rng": not rng}
    return Namespace(
        **{**known, **_of_stack(stack), **given, **{name: known[name] for name in sure}, **last}
    )


def _is_known(value: Any) -> bool:
    """Whether readers know the class of an enum's member; dtypes are known."""
    if isinstance(value, Enum):
        module, name = type(value).__module__, type(value).__qualname__
        return f"{module}.{name}" in OF_VALUES.names or OF_VALUES.may_be_enum(module, name)
    return isinstance(value, torch.dtype)


def _of_stack(stack: MegatronStack) -> dict[str, Any]:
    """What the stack says of its buffers."""
    bare, inner = bare_model(stack.chunks[0]), inner_optimizers(stack.optimizer)[0]
    tables = (
        (bare.config, _OF_MODEL),
        (stack.chunks[0].ddp_config, _OF_BUFFERS),
        (inner.config, _OF_OPTIMIZER),
    )
    said = {
        name: getattr(config, own, None) for config, table in tables for name, own in table.items()
    }
    layout = getattr(bare.config, _LAYOUT, None)
    said[_LAYOUT] = None if layout is None else str(layout)
    tied = getattr(bare, "share_embeddings_and_output_weights", False)
    return {**said, "untie_embeddings_and_output_weights": not tied}
