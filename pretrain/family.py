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
    built = family.builder
    if built is None:
        return {}
    return {
        "normalization": built.normalization,
        "swiglu": built.gated,
        "position_embedding_type": built.position_embedding_type,
        "disable_bias_linear": not built.biases,
    }


def check_fixed(args: argparse.Namespace, flags: Mapping[str, str]) -> None:
    """Raises UsageError for a flag that says other than the family, naming the families that say
    so. `flags`: attribute -> name of the flag."""
    for attribute, value in fixed_by(find_family(args.model_family)).items():
        said = getattr(args, attribute)
        if said == value:
            continue
        others = [
            name for name, one in trained_families().items() if fixed_by(one)[attribute] == said
        ]
        instead = f", or use --model-family {' or '.join(others)}" if others else ""
        raise UsageError(
            f"{flags[attribute]} contradicts --model-family {args.model_family}",
            expected=value,
            found=f"{flags[attribute]} {said}",
            fix=f"leave it out{instead}",
        )


def default_by_family(attribute: str, usual: float | None) -> Callable[[], str]:
    """Help of a number: the `usual` default (None: there is none), and those of families that have
    another."""

    def text() -> str:
        said = {name: one.defaults.get(attribute, usual) for name, one in families().items()}
        others = [f"{name} {value:g}" for name, value in said.items() if value != usual]
        return "default " + ", ".join([*([] if usual is None else [f"{usual}"]), *others])

    return text


def default_for(attribute: str, value: bool) -> Callable[[], str]:
    """Help of a switch: the families for which it is the default."""

    def text() -> str:
        found = [name for name, one in families().items() if one.defaults.get(attribute) is value]
        return f"default for {', '.join(found)}" if found else ""

    return text
