"""A checkpoint of megatron-core's GPTModel for its hybrid model, or the other way round.

A HybridModel (`MambaModel` in megatron-core 0.16) counts attention, MLP and experts as layers of
their own, along its pattern: what is layer i of a GPTModel are its i-th layer of attention and its
i-th one of MLP or experts there. No value changes, nor any state of the optimizer: parameters have
other names. The rules are those of megatron-core's guide for the migration to hybrid models.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.manifest import DIVERGED, FINGERPRINT, Manifest, Tie
from megatron_ucp.errors import ModelMismatchError
from megatron_ucp.formats.checkpoint import Checkpoint, Extras
from megatron_ucp.formats.per_rank import OwnValues, PerRank

HYBRID = "hybrid"
_NORM, _HYBRID_NORM = "decoder.final_layernorm.", "decoder.final_norm."
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_ATTENTION = ("self_attention.", "input_layernorm.")
_MLP = ("mlp.", "pre_mlp_layernorm.")


@dataclass(frozen=True)
class Renumbering:
    """The layers of a hybrid model that have the attention, and those that have the MLP or the
    experts, of each layer of a GPTModel. `to_hybrid`: names of a GPTModel become those of the
    hybrid model, else the other way round."""

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    to_hybrid: bool

    def name(self, name: str) -> str:
        """What the other model calls a parameter."""
        old, new = (_NORM, _HYBRID_NORM) if self.to_hybrid else (_HYBRID_NORM, _NORM)
        if name.startswith(old):
            return new + name.removeprefix(old)
        found = _LAYER.match(name)
        if found is None:
            return name
        number, rest = int(found[1]), found[2]
        if self.to_hybrid:
            places = self.attention if rest.startswith(_ATTENTION) else self.mlp
            return f"decoder.layers.{places[number]}.{rest}"
        places = self.attention if number in self.attention else self.mlp
        return f"decoder.layers.{places.index(number)}.{rest}"


def between(source: Collection[str], target: Collection[str], file: str) -> Renumbering | None:
    """How the names of a checkpoint become those of a model, where one of the two is a GPTModel and
    the other one a hybrid model; None for any other two. Raises ModelMismatchError where the hybrid
    model has other layers."""
    to_hybrid = _has(source, _NORM) and _has(target, _HYBRID_NORM)
    if not to_hybrid and not (_has(source, _HYBRID_NORM) and _has(target, _NORM)):
        return None
    hybrid, gpt = (target, source) if to_hybrid else (source, target)
    attention, mlp = _layers_with(hybrid, _ATTENTION), _layers_with(hybrid, _MLP)
    layers = {number for number, _ in _in_layers(gpt)}
    others = {number for number, _ in _in_layers(hybrid)} - {*attention, *mlp}
    if others or {*attention} & {*mlp} or not len(attention) == len(mlp) == len(layers):
        raise ModelMismatchError(
            "a GPTModel and a hybrid model have other layers",
            file=file,
            expected=f"{len(layers)} layers of attention, as many of MLP or experts, and no other",
            found=f"{len(attention)}, {len(mlp)} and {len(others)} others in the hybrid model",
            fix="build the hybrid model with a pattern of as many pairs, such as *-*-",
        )
    return Renumbering(attention, mlp, to_hybrid)


def _has(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _in_layers(names: Iterable[str]) -> Iterable[tuple[int, str]]:
    """Of each name in a layer the layer's number, and the name there."""
    found = (_LAYER.match(name) for name in names)
    return [(int(one[1]), one[2]) for one in found if one is not None]


def _layers_with(names: Iterable[str], prefixes: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(
        sorted({number for number, rest in _in_layers(names) if rest.startswith(prefixes)})
    )


# ------------------------------------------------ a checkpoint in other names


def for_model(source: Checkpoint, target: Manifest, allow: Collection[str]) -> Checkpoint:
    """The checkpoint in the names of a model, where these are those of the same layers counted
    otherwise, and that is allowed; else as it is. Raises ModelMismatchError where it is not."""
    file = str(source.folder)
    found = between(source.manifest.by_name, target.by_name, file)
    if found is None:
        return source
    if HYBRID not in allow:
        kinds = "a GPTModel", "a hybrid model of the same layers"
        raise ModelMismatchError(
            "the checkpoint is of a model that counts its layers otherwise",
            file=file,
            expected=kinds[found.to_hybrid],
            found=kinds[not found.to_hybrid],
            fix=f'load it with allow={{"{HYBRID}"}}, which changes names and no value',
        )
    return cast("Checkpoint", _Renamed(source, found))


class _Renamed:
    """A checkpoint whose parameters have the names of another model. All that has no name of a
    parameter in it is asked of the checkpoint itself."""

    def __init__(self, source: Checkpoint, names: Renumbering) -> None:
        self._source, self._names = source, names
        self.manifest = renamed(source.manifest, names)
        recorded = source.recorded
        self.recorded = None if recorded is None else renamed(recorded, names)
        way = "GPTModel to hybrid model" if names.to_hybrid else "hybrid model to GPTModel"
        self.notes = [*source.notes, f"layers renumbered, as allowed: {way}"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    @property
    def extras(self) -> Extras:
        found = self._source.extras
        return replace(
            found,
            stateless=_with_keys(found.stateless, self._names),
            modules=_with_keys(found.modules, self._names),
        )

    def differs(self, name: str) -> PerRank:
        found = self._source.differs(name)
        return replace(found, buffers=frozenset(map(self._names.name, found.buffers)))

    def of_rank(self, rank: int) -> OwnValues:
        found = self._source.of_rank(rank)
        return replace(found, buffers=_with_keys(found.buffers, self._names))


def renamed(manifest: Manifest, names: Renumbering) -> Manifest:
    """A manifest in the names of the other model."""
    run = dict(manifest.run)
    if FINGERPRINT in run:
        run[FINGERPRINT] = _with_keys(run[FINGERPRINT], names)
    if DIVERGED in run:
        run[DIVERGED] = [names.name(name) for name in run[DIVERGED]]
    return replace(
        manifest,
        params=tuple(replace(spec, name=names.name(spec.name)) for spec in manifest.params),
        buffers=tuple(_in_names(buffer, names) for buffer in manifest.buffers),
        ties=tuple(_tied(tie, names) for tie in manifest.ties),
        family="",
        run=run,
        names={pipe: names.name(name) for pipe, name in manifest.names.items()},
    )


def _in_names(buffer: FlatBuffer, names: Renumbering) -> FlatBuffer:
    members = tuple(replace(one, param=names.name(one.param)) for one in buffer.members)
    return replace(buffer, members=members)


def _tied(tie: Tie, names: Renumbering) -> Tie:
    aliases = tuple(names.name(alias) for alias in tie.aliases)
    return replace(tie, canonical=names.name(tie.canonical), aliases=aliases)


def _with_keys(values: Mapping[str, Any], names: Renumbering) -> dict[str, Any]:
    return {names.name(name): value for name, value in values.items()}
