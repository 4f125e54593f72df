"""The family of a live stack, at the sizes of its own config."""

from collections.abc import Collection
from typing import Any

from megatron_ucp.errors import LayoutError, UnsupportedError, UsageError
from megatron_ucp.families import families, model_of_module
from megatron_ucp.families.base import Family, Model
from megatron_ucp.families.measure import measured


def model_of(module: Any, names: Collection[str], tp: int, family: str | Family | None) -> Model:
    """The family at the sizes of the bare model `module`, whose parameters have the canonical
    `names`. Without one, the first registered family that is built as the model is (norms, biases,
    gates, positions, experts) and whose table has all of them.

    Raises UsageError for a family that does not fit, UnsupportedError where none does, LayoutError
    where the tensor-parallel size does not divide the model.
    """
    if family is None:
        family = _fitting(module, names)
    return model_of_module(family, module, tp)


def _fitting(module: Any, names: Collection[str]) -> Family:
    for family in families().values():
        try:
            model = Model(family, (family.measure or measured)(module))
            fits = _is_built_so(model) and set(names) <= model.table.keys()
        except (UsageError, LayoutError):
            continue
        if fits:
            return family
    raise UnsupportedError(
        "no family has the parameters of this model",
        expected=", ".join(families()),
        found=", ".join(sorted(names)[:3]),
        fix="register a family with megatron_ucp.register_family, and name it: family=",
        id="layout-unknown",
    )


def _is_built_so(model: Model) -> bool:
    """Whether the family's builder makes models of these sizes."""
    built, sizes = model.family.builder, model.sizes
    if built is None or built.experts != hasattr(sizes, "experts"):
        return False
    flags = {**built.flags, "positions": sizes.positions if built.learned_positions else 0}
    return all(getattr(sizes, name) == value for name, value in flags.items())
