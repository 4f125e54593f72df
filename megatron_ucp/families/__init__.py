"""Model families: tables of names, shapes and layouts, and what else is decided with them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.errors import LayoutError, UsageError, did_you_mean
from megatron_ucp.families import deepseek_v3, gpt, gpt_oss, llama, megatron_deepspeed, mixtral
from megatron_ucp.families.family import Family, Model, measured
from megatron_ucp.families.settings import described_sizes

_OURS = (
    *(gpt.FAMILY, llama.LLAMA, mixtral.MIXTRAL, llama.MISTRAL, llama.QWEN2, llama.QWEN3),
    *(mixtral.QWEN3_MOE, deepseek_v3.FAMILY, gpt_oss.FAMILY),
    *megatron_deepspeed.FAMILIES,
)
_FAMILIES: dict[str, Family] = {family.name: family for family in _OURS}


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
        raise _no_family(family, "give a Family; docs/own-model.md shows how to write one")
    _FAMILIES[family.name] = family


def families() -> Mapping[str, Family]:
    """All families by name, ours first; what is registered later appears in it."""
    return MappingProxyType(_FAMILIES)


def _no_family(found: object, fix: str) -> UsageError:
    return UsageError(
        "this is no family",
        expected="a megatron_ucp.families.family.Family",
        found=repr(found)[:200],
        fix=fix,
    )


def find_family(family: str | Family) -> Family:
    """A family by its name, or itself. Raises UsageError."""
    if isinstance(family, Family):
        return family
    if not isinstance(cast("object", family), str):
        raise _no_family(family, "give its name, such as llama, or a Family (docs/own-model.md)")
    if family not in _FAMILIES:
        raise UsageError(
            "there is no such family",
            expected=", ".join(sorted(_FAMILIES)),
            found=family,
            fix=did_you_mean(
                family,
                _FAMILIES,
                "choose one of these, or register your own with megatron_ucp.register_family",
            ),
        )
    return _FAMILIES[family]


def recorded_model(manifest: Manifest) -> Model | None:
    """The model that a manifest says; None where it says none of a family that is there."""
    family = _FAMILIES.get(manifest.family)
    try:
        sizes = None if family is None else described_sizes(manifest.run, family.sizes)
    except TypeError:  # sizes of another version of the family
        return None
    return None if family is None or sizes is None else Model(family, sizes)


def model_of_module(family: str | Family, module: Any, tp: int) -> Model:
    """A family at the sizes of a live model that is cut into `tp` parts. Raises UsageError,
    LayoutError."""
    chosen = find_family(family)
    model = Model(chosen, (chosen.measure or measured)(module))
    model.check_cut(tp)
    return model


def model_as_built(module: Any, shapes: Mapping[str, Ints], first: object = "") -> Model | None:
    """The first family, `first` before all others, whose builder makes the model `module` and whose
    table has all of its parameters with their `shapes`; None where no family is so: one whose
    layers have widths of their own is of none."""
    for family in sorted(_FAMILIES.values(), key=lambda one: one.name != first):
        builder = family.builder
        if builder is None:
            continue
        try:
            model = Model(family, (family.measure or measured)(module))
            fits = builder.experts == hasattr(model.sizes, "experts")
            fits = fits and model.sizes.layers <= len(shapes) and builder.makes(model.sizes)
            if fits and shapes.items() <= {n: one.shape for n, one in model.table.items()}.items():
                return model
        except (UsageError, LayoutError, AttributeError):  # what it measures is not there
            continue
    return None
