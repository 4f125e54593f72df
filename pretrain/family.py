"""What a model's family decides about the command line: flags that it fixes, defaults, help."""

import argparse
from collections.abc import Callable, Mapping

from megatron_ucp.errors import UsageError
from megatron_ucp.families import families, find_family
from megatron_ucp.families.family import Family

USUAL = "gpt"  # where --model-family is left out


def trained_families() -> dict[str, Family]:
    """The families that this program can train: megatron-core's modules build them."""
    return {name: family for name, family in families().items() if family.builder is not None}


def fixed_by(family: Family) -> dict[str, object]:
    """What a family fixes, by attribute; its `defaults` are what a flag may change."""
    builder = family.builder
    if builder is None:
        return {}
    return {
        "normalization": builder.normalization,
        "swiglu": builder.gated,
        "position_embedding_type": builder.position_embedding_type,
        "disable_bias_linear": not builder.biases,
    }


def check_fixed(args: argparse.Namespace, flags: Mapping[str, str]) -> None:
    """Raises UsageError for a flag that says other than the family, naming the families that say
    so. `flags`: attribute -> name of the flag."""
    for attribute, value in fixed_by(find_family(args.model_family)).items():
        flag_value = getattr(args, attribute)
        if flag_value == value:
            continue
        others = [
            name
            for name, family in trained_families().items()
            if fixed_by(family)[attribute] == flag_value
        ]
        instead = f", or use --model-family {' or '.join(others)}" if others else ""
        raise UsageError(
            f"{flags[attribute]} contradicts --model-family {args.model_family}",
            expected=value,
            found=f"{flags[attribute]} {flag_value}",
            fix=f"leave it out{instead}",
        )


def default_by_family(attribute: str, usual: float | None) -> Callable[[], str]:
    """Help of a number: the `usual` default (None: there is none), and those of families that have
    another."""

    def text() -> str:
        defaults = {
            name: family.defaults.get(attribute, usual) for name, family in families().items()
        }
        others = [f"{name} {value:g}" for name, value in defaults.items() if value != usual]
        return "default " + ", ".join([*([] if usual is None else [f"{usual}"]), *others])

    return text


def default_for(attribute: str, value: bool) -> Callable[[], str]:
    """Help of a switch: the families for which it is the default."""

    def text() -> str:
        names = [
            name for name, family in families().items() if family.defaults.get(attribute) is value
        ]
        return f"default for {', '.join(names)}" if names else ""

    return text
