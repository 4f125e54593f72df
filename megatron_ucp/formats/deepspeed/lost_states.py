"""What stock DeepSpeed did not save of a run, or saved without what is needed to use it: known from
the run's config and from what lies in the files.

Sources, of DeepSpeed 0.19.8: `runtime/superoffload/`, `runtime/zenflow/`, `backup_optimizer` of
`runtime/zero/stage3.py`, `_get_param_fragment_func` of the engine; of 0.18.2: `DDP_BFLOAT16` and
`zero_optimizer_state` of the engine.
"""

from collections.abc import Sequence
from typing import Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.names import MASTER
from megatron_ucp.errors import StateMismatchError, UnsupportedError
from megatron_ucp.formats.deepspeed.config import DeepSpeedConfig

NOT_SAVED = "not_saved"  # of a manifest's run: sentences, each of which names its cause
_SUPER = (
    "SuperOffload (offload_optimizer.super_offload): the moments were in processes of their own, "
    "and DeepSpeed saved none of them"
)
_PARTIAL = (
    "partial offload (offload_optimizer.ratio below 1): what stayed on the GPU was stepped by a "
    "second optimizer, whose moments DeepSpeed did not save"
)
_ZENFLOW = (
    "ZenFlow (zero_optimization.zenflow): the columns that it chose were stepped by a second "
    "optimizer, which DeepSpeed did not save, and masters may be older than the weights"
)
_QUANTIZED = (
    "ZeRO++ (zero_quantized_nontrainable_weights): frozen weights were saved in 8 bits and their "
    "scales were not, so that nothing can restore them"
)
_BF16 = (
    "bf16 without ZeRO, or at ZeRO-1 with data_types.grad_accum_dtype fp32: DeepSpeed 0.17 to "
    "0.18.4 stepped it with an optimizer of which they saved neither masters nor moments"
)
_BF16_VERSIONS = ("0.17.", *(f"0.18.{patch}" for patch in range(5)))
_EIGHT_BITS = ("int8", "uint8")


def not_saved(config: Any, manifest: Manifest, has_optimizer: bool) -> list[str]:
    """What the files of a run lack, one sentence for each cause. `has_optimizer`: whether any of
    them holds one, with names or without."""
    known = DeepSpeedConfig(config)
    settings, offload = known.zero, known.section("zero_optimization", "offload_optimizer")
    out: list[str] = []
    if _lacks_moments(manifest):
        ratio = offload.get("ratio")
        out += [_SUPER] if offload.get("super_offload") else []
        out += [_PARTIAL] if isinstance(ratio, int | float) and ratio < 1 else []
    out += [_ZENFLOW] if settings.get("zenflow") else []
    version = manifest.run.get("ds_version")
    if not has_optimizer and manifest.taken_steps > 0 and saved_no_bf16_optimizer(config, version):
        out.append(_BF16)
    if settings.get("zero_quantized_nontrainable_weights") and _quantized(manifest):
        out.append(_QUANTIZED)
    return out


def said_of(manifest: Manifest) -> Sequence[str]:
    """What `not_saved` found, as the manifest carries it."""
    found = manifest.run.get(NOT_SAVED)
    return tuple(map(str, found)) if isinstance(found, list) else ()


def refuse_lost_moments(manifest: Manifest, file: str) -> None:
    """Raises StateMismatchError where moments that a run had were not saved, and the config says
    why."""
    found = [cause for cause in said_of(manifest) if cause in (_SUPER, _PARTIAL, _BF16)]
    if found:
        raise StateMismatchError(
            "the files do not hold all states of the optimizer",
            file=file,
            found="; ".join(found),
            fix="load a tag that was saved without it, or begin with fresh states "
            "(Python: load_optimizer_states=False)",
        )


def refuse_mics(config: Any, file: str) -> None:
    """Raises UnsupportedError for files of MiCS, which 0.19.8 has no more: ZeRO-3 divided over a
    part of the ranks."""
    size = DeepSpeedConfig(config).zero.get("mics_shard_size")
    if isinstance(size, int) and size > 0:
        raise UnsupportedError(
            "the checkpoint was written with MiCS, which this version does not read",
            file=file,
            expected="ZeRO-3 over all data-parallel ranks",
            found=f"mics_shard_size {size}",
            fix="load it with the DeepSpeed that wrote it, and save without mics_shard_size",
        )


def refuse_unusable(manifest: Manifest, file: str, allow: Any) -> None:
    """Raises UnsupportedError where what was not saved would make a load wrong without a sign:
    masters that are old (`allow` may name "stale"), frozen weights without their scales."""
    found = said_of(manifest)
    if _ZENFLOW in found and "stale" not in allow:
        raise UnsupportedError(
            "the files do not hold all that the run trained",
            file=file,
            found=_ZENFLOW,
            fix="load a tag that was saved without ZenFlow; or the masters as they are, with "
            '--allow stale (Python: allow={"stale"})',
        )
    if _QUANTIZED in found:
        raise UnsupportedError(
            "the files do not hold the frozen weights",
            file=file,
            parameter=_quantized(manifest)[0],
            found=_QUANTIZED,
            fix="save without zero_quantized_nontrainable_weights, from the weights that the run "
            "began with",
        )


def _lacks_moments(manifest: Manifest) -> bool:
    """Whether a buffer has masters alone, and yet the run took steps."""
    stepped = [buffer for buffer in manifest.buffers if buffer.stepped and buffer.members]
    return manifest.taken_steps > 0 and any(
        [state for state, _ in buffer.states] == [MASTER] for buffer in stepped
    )


def saved_no_bf16_optimizer(config: Any, version: Any) -> bool:
    """Whether a run's DeepSpeed saved nothing of the optimizer that it stepped in bf16: without
    ZeRO, or at ZeRO-1 with sums in fp32."""
    known = DeepSpeedConfig(config)
    bf16 = any(known.section(key).get("enabled") is True for key in ("bf16", "bfloat16"))
    stage, fp32_sums = known.zero.get("stage"), known.grad_accum_dtype == "fp32"
    without = not stage or (stage == 1 and fp32_sums)
    return bf16 and without and str(version).startswith(_BF16_VERSIONS)


def _quantized(manifest: Manifest) -> list[str]:
    """Frozen parameters in 8 bits."""
    specs = (spec for spec in manifest.params if spec.kind == "frozen")
    return [spec.name for spec in specs if spec.dtype in _EIGHT_BITS]
