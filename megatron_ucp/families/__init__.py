"""Model families: tables of names, shapes and layouts, and what else is decided with them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import cast

from megatron_ucp.errors import UsageError
from megatron_ucp.families import gpt, llama, mistral, mixtral, qwen2, qwen3
from megatron_ucp.families.base import Family

_FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY for module in (gpt, llama, mixtral, mistral, qwen2, qwen3)
}


def register_family(family: Family) -> None:
    """Makes a family of models known by its name, so that `attach` and the tools take it. A second
    one of the same name replaces the first.

    Args:
        family: The family: a table of every parameter with its shape and layout
            (docs/own-model.md).

    Returns:
        Nothing.

    Raises:
        UsageError: For what is no family.

    Example:
        >>> ucp.register_family(Family("mine", table=table, sizes=Sizes))
    """
    if not isinstance(cast("object", family), Family):
        raise UsageError(
            "this is no family",
            expected="a megatron_ucp.families.base.Family",
            found=repr(family)[:200],
            fix="give a Family; docs/own-model.md shows how to write one",
        )
    _FAMILIES[family.name] = family


def families() -> Mapping[str, Family]:
    """All families by name, ours first; what is registered later appears in it."""
    return MappingProxyType(_FAMILIES)


def find_family(name: str) -> Family:
    """A family by name. Raises UsageError."""
    if not isinstance(cast("object", name), str) or name not in _FAMILIES:
        raise UsageError(
            "there is no such family",
            expected=", ".join(sorted(_FAMILIES)),
            found=repr(name)[:200] if not isinstance(cast("object", name), str) else name,
            fix="choose one of these, or register your own with megatron_ucp.register_family",
        )
    return _FAMILIES[name]
