"""What layers with quantized weights add to a model's state dict: scales, maps and settings beside
each weight, which are no parameters and no buffers.

They belong to frozen weights, and follow from the base model: its loader quantizes anew and makes
the same ones. So no load sets them. They are left out of the weights, and given to whoever compares
them with a live model's.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

# bitsandbytes: of a weight in 4 bits, behind its own name; of one in 8 bits, in the weight's place
_BITSANDBYTES = re.compile(
    r".+\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\.bitsandbytes__\w+)|"
    r"(?:.+\.)?(?:SCB|weight_format)"
)
# HQQ: of a layer, beside W_q. Most of these names say nothing by themselves.
_HQQ = re.compile(
    r"(?P<layer>.+)\.(?:nbits|group_size|shape|scale|zero|axis|packing|unpack_view_dtype|"
    r"view_as_float|quant_scale|quant_zero|compute_dtype|offload_meta|channel_wise|round_zero|"
    r"optimize|stores_quant_config|encoded_state_dict|max_scale|min_scale)"
)
_OF_EVERY_HQQ = ("nbits", "group_size", "axis")


def is_side_data(name: str, entries: Collection[str]) -> bool:
    """Whether an entry of a state dict with these `entries` is what a quantized layer adds."""
    if _BITSANDBYTES.fullmatch(name):
        return True
    found = _HQQ.fullmatch(name)
    return found is not None and all(f"{found['layer']}.{one}" in entries for one in _OF_EVERY_HQQ)


def without_side_data(
    module: Mapping[str, Any], own: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The entries of a state dict without those that quantized layers add, and those; `own` are
    the names of the model's parameters and buffers, as far as the files list them."""
    side = {
        name: value
        for name, value in module.items()
        if name not in own and is_side_data(name, module)
    }
    return {name: value for name, value in module.items() if name not in side}, side


def said_of_side_data(names: Collection[str]) -> list[str]:
    """A note of it; none where there is none."""
    if not names:
        return []
    return [
        f"the weights of the base are quantized: {len(names)} scales and settings beside them "
        f"({min(names)}, ...) are not set by any load, nor converted; the base's own loader makes "
        "them anew"
    ]
