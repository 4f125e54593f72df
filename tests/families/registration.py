"""Families that are known for a while."""

import contextlib
from collections.abc import Iterator

import megatron_ucp as ucp
from megatron_ucp import families
from megatron_ucp.families.family import Family


@contextlib.contextmanager
def registered(*own: Family) -> Iterator[None]:
    """They are known inside."""
    before = dict(families._FAMILIES)
    for family in own:
        ucp.register_family(family)
    try:
        yield
    finally:
        families._FAMILIES.clear()
        families._FAMILIES.update(before)
