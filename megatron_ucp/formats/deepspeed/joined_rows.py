"""What stock DeepSpeed's converter makes of query_key_value, of which Megatron-DeepSpeed's patterns
say nothing: it joins the ranks' rows one after the other."""

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_ucp.core.layout import Shard
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.values import Stand
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.deepspeed.keys import PATTERNS
from megatron_ucp.formats.deepspeed.stock_info import INTERLEAVED, is_fused, is_matched, order_of


def refuse_joined(
    meta: Mapping[str, Any], file: str, held: Iterable[tuple[str, ParamSpec]]
) -> None:
    """Raises UnsupportedError where such rows may be thirds of each rank, which are in no order
    then. `meta` is a model file of the run that was converted; `held` are parameters with their
    names in it."""
    arguments, info = meta.get("args"), meta.get(PATTERNS)
    said = arguments.state if isinstance(arguments, Stand) else {}
    ranks = said.get("tensor_model_parallel_size", meta.get("mp_world_size"))
    if ranks == 1 or order_of(arguments) == INTERLEAVED:
        return
    for name, spec in held:
        told = order_of(arguments) == "" and isinstance(spec.layout, Shard)
        known = told or (isinstance(info, dict) and is_matched(info, name, file))
        if is_fused(name) and not known:
            raise UnsupportedError(
                "the rows of query_key_value may be in no order: DeepSpeed's converter joined what "
                f"{ranks} tensor-parallel ranks had, one after the other",
                file=file,
                parameter=spec.name,
                expected="rows that are by head, as rules or the arguments of the run say",
                found="neither says so",
                fix="load or convert the native checkpoint, which megatron-ucp joins as its rules "
                "say; if the rows are by head, give --rules megatron_deepspeed_interleaved",
                id="layout-unknown",
            )
