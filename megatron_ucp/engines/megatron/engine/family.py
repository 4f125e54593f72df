"""The family of a live stack, at the sizes of its own config, compared with what the model says
itself; or that alone."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from megatron_ucp import say
from megatron_ucp.core.manifest import ParamSpec
from megatron_ucp.core.mesh import DENSE_CUT, EXPERT_CUT, Mesh
from megatron_ucp.engines.megatron.derived import (
    DeclaredTable,
    derived_table,
    joined_keys,
    model_by_itself,
    require_agreement,
    said_together,
    stored_keys,
)
from megatron_ucp.engines.megatron.names import bare_model, canonical_names
from megatron_ucp.errors import LayoutError, UsageError
from megatron_ucp.families import families, model_of_module
from megatron_ucp.families.base import Declared, Family, Model
from megatron_ucp.families.measure import measured
from megatron_ucp.formats.megatron.writer import ModelKeys
from megatron_ucp.reshard import agree


def table_of(chunks: Sequence[Any], mesh: Mesh) -> DeclaredTable:
    """What the chunks of all ranks say of how their parameters are cut. Collective. Raises
    UnsupportedError, LayoutError on every rank."""
    rank = torch.distributed.get_rank()
    at = mesh.at(rank, dict(mesh.holding()[0]))
    place = mesh.place(mesh.at(rank, (*DENSE_CUT, *EXPERT_CUT)))

    def own() -> DeclaredTable:
        models = [bare_model(chunk) for chunk in chunks]
        tables = [derived_table(one, canonical_names(one), place) for one in models]
        return {name: declared for table in tables for name, declared in table.items()}

    return said_together(own, at, rank == mesh.rank_of(at, 0))


def keys_of_chunks(chunks: Sequence[Any], params: Mapping[str, ParamSpec]) -> ModelKeys:
    """The keys under which the chunks of all ranks ask for what a save holds. Collective. Raises
    UnsupportedError on every rank."""
    with agree.together() as told:
        models = [bare_model(chunk) for chunk in chunks]
        told.value = [stored_keys(one, canonical_names(one)) for one in models]
    return joined_keys([keys for own in told.values for keys in own], params)


def model_of(
    module: Any, table: Mapping[str, Declared], tp: int, family: str | Family | None
) -> Model:
    """The family at the sizes of the bare model `module`, which says of itself what `table` has.
    Without one, the first registered family that is built as the model is (norms, biases, gates,
    positions, experts) and whose table has all of its parameters; where none is, the table alone.

    Raises UsageError for a family that does not fit, LayoutError where the tensor-parallel size
    does not divide the model, or where family and model say different things.
    """
    found = _fitting(module, table) if family is None else family
    if found is None:
        say.note(
            "no family describes this model: how it is cut is what the model says itself; an "
            "export to Hugging Face needs a family"
        )
        return model_by_itself(dict(table))
    model = model_of_module(found, module, tp)
    require_agreement(model, table)
    return model


def _fitting(module: Any, names: Collection[str]) -> Family | None:
    for family in families().values():
        try:
            model = Model(family, (family.measure or measured)(module))
            fits = _is_built_so(model) and set(names) <= model.table.keys()
        except (UsageError, LayoutError):
            continue
        if fits:
            return family
    return None


def _is_built_so(model: Model) -> bool:
    """Whether the family's builder makes models of these sizes."""
    built, sizes = model.family.builder, model.sizes
    if built is None or built.experts != hasattr(sizes, "experts"):
        return False
    flags = {**built.flags, "positions": sizes.positions if built.learned_positions else 0}
    return all(getattr(sizes, name) == value for name, value in flags.items())
