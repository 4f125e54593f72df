"""Names in a DeepSpeed pipeline and the canonical ones: a PipelineModule names parameters by
position in its list of layers.

`3.mlp.linear_fc1.weight` is a parameter of the layer at position 3; `tied_modules.embed.weight` one
of a module that several stages hold. Layer files hold the part after the position, or after the key
of the tied module.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_ucp.core.flat import ContradictionError
from megatron_ucp.core.layers import TIED
from megatron_ucp.errors import ModelMismatchError

_PIPE = re.compile(rf"([0-9]{{1,6}}|{TIED}\.[^.]+)\..+")


@dataclass(frozen=True)
class PipeNames:
    """`canonical` maps the name of every parameter in the pipeline to its canonical one."""

    canonical: Mapping[str, str]

    def __post_init__(self) -> None:
        for pipe in self.canonical:
            if not _PIPE.fullmatch(pipe):
                raise ContradictionError(f"{pipe!r} is no name in a pipeline")

    @cached_property
    def tied(self) -> frozenset[str]:
        """Canonical names of what several stages may hold."""
        return frozenset(
            name for pipe, name in self.canonical.items() if pipe.startswith(f"{TIED}.")
        )

    @cached_property
    def _heads(self) -> dict[str, dict[str, str]]:
        """By position or tied module: the rest of the name -> canonical name."""
        out: dict[str, dict[str, str]] = {}
        for pipe, name in self.canonical.items():
            head, rest = _split(pipe)
            out.setdefault(head, {})[rest] = name
        return out

    @property
    def layers(self) -> list[int]:
        """Positions that hold parameters of their own, in order."""
        return sorted(int(head) for head in self._heads if head.isdigit())

    def find(self, pipe: str, file: str | None = None) -> str:
        """The canonical name of a parameter, or of a buffer of a module that has parameters. Raises
        ModelMismatchError."""
        if pipe in self.canonical:
            return self.canonical[pipe]
        return self._renamed(*_split(pipe), file)

    def of_layer(self, layer: int, key: str, keys: frozenset[str], file: str) -> str:
        """The canonical name of `key` in the file of a layer that holds `keys`. Raises
        ModelMismatchError."""
        if str(layer) in self._heads:
            return self._renamed(str(layer), key, file)
        for head, names in self._heads.items():
            if head.startswith(f"{TIED}.") and names.keys() <= keys:
                return self._renamed(head, key, file)
        return self._renamed(str(layer), key, file)

    def _renamed(self, head: str, rest: str, file: str | None) -> str:
        known = self._heads.get(head, {})
        if rest in known:
            return known[rest]
        prefixes = {name.removesuffix(end) for end, name in known.items()}
        # a parameter must be declared; what lies beside parameters at the same place, a buffer,
        # gets the same prefix
        if (
            len(prefixes) == 1
            and not rest.endswith((".weight", ".bias"))
            and rest not in ("weight", "bias")
        ):
            return f"{prefixes.pop()}{rest}"
        raise ModelMismatchError(
            "the pipeline holds a parameter that the model lacks",
            file=file,
            parameter=f"{head}.{rest}",
            expected=f"positions 0 to {max(self.layers, default=0)}",
            found=f"{rest} at {head}",
        )


def _split(pipe: str) -> tuple[str, str]:
    parts = pipe.split(".")
    count = 2 if parts[0] == TIED else 1
    return ".".join(parts[:count]), ".".join(parts[count:])
