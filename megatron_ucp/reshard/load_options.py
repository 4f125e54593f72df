"""What a load is asked for."""

from collections.abc import Callable, Collection
from typing import Any

from megatron_ucp.errors import UsageError
from megatron_ucp.reshard.allowances import OF_LOADS, check_words
from megatron_ucp.reshard.arguments import check_switch


def check_options(
    hyper: str = "checkpoint",
    checksums: bool = True,
    allow: Collection[str] = (),
    rng: bool = True,
    per_rank: Callable[[str, list[Any]], Any] | None = None,
) -> None:
    """Raises UsageError for an option of `load` that can't be, before anybody trains for hours with
    it."""
    check_switch("checksums", checksums)
    check_switch("rng", rng)
    if hyper not in ("checkpoint", "config"):
        raise UsageError(
            "hyper says where hyper-parameters come from",
            expected="checkpoint or config",
            found=hyper,
            fix='give hyper="checkpoint" or hyper="config"',
        )
    if per_rank is not None and not callable(per_rank):
        raise UsageError(
            "per_rank is a function of a name and the values of all ranks",
            expected="function(name, values)",
            found=repr(per_rank)[:200],
            fix="give a function, or leave per_rank out",
        )
    check_words(allow, OF_LOADS)
