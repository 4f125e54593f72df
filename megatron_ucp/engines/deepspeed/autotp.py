"""How DeepSpeed's AutoTP cut the parameters of a live engine, as each of them says itself."""

from collections.abc import Mapping
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layout import Layout, Replicate
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import LayoutError, UnsupportedError
from megatron_ucp.formats.deepspeed.autotp import affine_layout
from megatron_ucp.formats.deepspeed.paths import at_tp

Layouts = Mapping[str, tuple[Ints, Layout]]  # by name: whole shape, layout


def is_autotp(engine: Any) -> bool:
    """Whether AutoTP cut the engine's model among several ranks."""
    return int(engine.autotp_size()) > 1


def layouts_of(engine: Any, tp: int, rank: int) -> Layouts:
    """Whole shape and layout of every parameter of an engine that AutoTP cut for `tp` ranks, of
    which this is the `rank`-th; empty for another engine. What AutoTP left alone is whole.

    Raises UnsupportedError for what AutoTP itself can't describe and for what `affine_layout`
    refuses, LayoutError where a live parameter has another shape than it says.
    """
    if not is_autotp(engine):
        return {}
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    _refuse_unsupported(engine)
    out: dict[str, tuple[Ints, Layout]] = {}
    for name, param in engine.module.named_parameters(remove_duplicate=False):
        local = tuple(getattr(param, "ds_shape", param.shape))
        said = getattr(param, DS_AUTOTP_UC_META, None)
        if not said:
            out[name] = local, Replicate()
            continue
        shape, layout = affine_layout(said["conversion"]["affine_map"], name, None)
        share = layout.local_shape(name, shape, Mesh(tp=tp).place(at_tp(rank)))
        if share != local:
            raise LayoutError(
                "a live parameter has another shape than AutoTP says of it",
                parameter=name,
                expected=f"{share} of {shape} at tensor-parallel rank {rank} of {tp}",
                found=local,
                fix="this is a kind of layer that DeepSpeed's AutoTP describes wrongly: leave it "
                "out of tensor_parallel.partition_config",
            )
        out[name] = shape, layout
    return out


def _refuse_unsupported(engine: Any) -> None:
    """Raises UnsupportedError for parameters that AutoTP cut without describing how."""
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    reasons: dict[str, str] = {}
    for name, param in engine.module.named_parameters():
        said = getattr(param, DS_AUTOTP_UC_META, None)
        told = said["conversion"] if said else {}
        if said and (told.get("unsupported_reason") or told.get("affine_map") is None):
            reasons[name] = told.get("unsupported_reason") or "it does not say how it cut it"
    if reasons:
        name, why = next(iter(reasons.items()))
        raise UnsupportedError(
            "DeepSpeed marks parameters that AutoTP cut as ones that can't be put together",
            parameter=", ".join(reasons)[:200],
            expected="layouts that are described",
            found=f"{name}: {why}",
            fix="leave `attach` out: DeepSpeed's own save and load resume on the same mesh",
        )


def is_uneven(layouts: Layouts, tp: int) -> bool:
    """Whether ranks have shares of different sizes of some parameter."""
    places = [Mesh(tp=tp).place(at_tp(rank)) for rank in range(tp)]
    return any(
        len({layout.local_shape(name, shape, place) for place in places}) > 1
        for name, (shape, layout) in layouts.items()
    )
