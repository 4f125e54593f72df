"""A pipeline's list of layers, and the grammar of names in it: `POSITION.rest` for what lies at a
position, `tied_modules.KEY.rest` for a module that several stages hold."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

TIED = "tied_modules"


@dataclass(frozen=True)
class Layers:
    """A pipeline's list of layers. `held` has for each position: name in its layer file -> name in
    the pipeline, of which `names` gives the canonical one. Several positions may hold one (a tied
    module); `filed` are those with a layer file (of a tied module that is called through a function
    DeepSpeed writes none)."""

    held: tuple[Mapping[str, str], ...]
    names: Mapping[str, str]
    filed: frozenset[int]

    @cached_property
    def canonical(self) -> tuple[tuple[str, ...], ...]:
        """Canonical names at each position."""
        return tuple(tuple(self.names[pipe] for pipe in held.values()) for held in self.held)

    def with_values(self, names: Collection[str]) -> "Layers":
        """With what lies beside a layer's parameters too: buffers, and parameters that no family
        lists."""
        held, known = [dict(at) for at in self.held], dict(self.names)
        own = [
            (at, rest, self.names[pipe])
            for at, layer in enumerate(self.held)
            for rest, pipe in layer.items()
            if pipe == f"{at}.{rest}"
        ]
        prefixes = {
            name.removesuffix(rest): at
            for at, rest, name in own
            if name.endswith(rest) and name != rest
        }
        for name in set(names) - {*known.values()}:
            found = [prefix for prefix in prefixes if name.startswith(prefix)]
            if found:
                at = prefixes[max(found, key=len)]
                rest = name.removeprefix(max(found, key=len))
                held[at][rest] = f"{at}.{rest}"
                known[f"{at}.{rest}"] = name
        return Layers(tuple(held), known, self.filed)
