"""Which model a live DeepSpeed engine trains: its family, or the rules that describe it."""

import sys
from functools import partial
from typing import Any

from megatron_ucp.core.experts import is_expert
from megatron_ucp.core.mesh import DENSE_CUT, EXPERT_CUT
from megatron_ucp.core.rules import RuleSet
from megatron_ucp.engines.deepspeed.modules import is_autotp
from megatron_ucp.engines.deepspeed.program import rules_of_program, vocabulary_info
from megatron_ucp.engines.deepspeed.refuse import refuse_engine, refuse_model
from megatron_ucp.engines.deepspeed.shard import LocalShard, is_pipeline, parallel_of
from megatron_ucp.engines.mcore_model import (
    NoSizes,
    derived_table,
    model_by_itself,
    require_agreement,
    said_together,
)
from megatron_ucp.engines.record import record_of
from megatron_ucp.errors import LayoutError, RuleError, UsageError
from megatron_ucp.families import model_of_module
from megatron_ucp.families.family import Declared, Family, Model
from megatron_ucp.formats.deepspeed.layout_sources import renamed
from megatron_ucp.formats.deepspeed.tp_patterns import StockInfo
from megatron_ucp.formats.rule_file import read_rules
from megatron_ucp.reshard import agree

# ---- family
#
# The family of a live megatron-core model, at the sizes of its own config, compared with what the
# model says itself; or that alone.


def described_model(engine: Any, family: str | Family | None, rules: Any = None) -> Model | None:
    """The engine's model as a family or rules describe it; without either as an earlier call gave
    it, as Megatron-DeepSpeed's arguments decide it, or as it says itself. None for any other model.
    What the engine is refused for comes first. Collective.

    Raises UsageError for a module that is no megatron-core GPTModel, LayoutError where the
    tensor-parallel size does not divide it, and as `refuse_engine`, `_model_by_rules` and
    `refuse_model`, on every rank.
    """
    with agree.together():
        refuse_engine(engine)
        model = record_of(engine).model
        if family is not None and rules is None:
            model = model_of_module(family, engine.module, parallel_of(engine)[0][0])
            remember(engine, model)
        elif rules is None and model is None:
            rules = rules_of_program(engine.module)
    if rules is not None:
        model = _model_by_rules(engine, rules, family)
    parallel = sys.modules.get("megatron.core.parallel_state")
    has_groups = parallel is not None and parallel.model_parallel_is_initialized()
    says = has_groups and hasattr(engine.module, "sharded_state_dict") and not is_autotp(engine)
    if agree.all_of(says):
        model = _as_it_says(engine, model)
    with agree.together():
        refuse_model(engine, model)
    return model


def remember(engine: Any, model: Model) -> None:
    """For later calls that name no family."""
    record_of(engine).model = model


def _as_it_says(engine: Any, model: Model | None) -> Model | None:
    """The family's model, once what the engine's module says itself agrees with it; without a
    family what it says. Collective. Raises LayoutError on every rank."""
    with agree.together():
        own = LocalShard(engine, None)
    names = {name: own.names[param][0] for param, name in engine.param_names.items()}
    place = own.mesh.place(own.along((*DENSE_CUT, *EXPERT_CUT)))
    said = partial(derived_table, engine.module, names, place, whole=model is None)
    table = said_together(said, own.at, own.speaks)
    if model is None:
        model = model_by_itself(table)
        remember(engine, model)
    else:
        require_agreement(model, table)
    return model


# ---- ruled
#
# A live model that a file of rules describes, where no family does.


_Said = tuple[RuleSet, dict[str, str], dict[str, Declared]]  # rules, names in the pipeline, table


def _model_by_rules(engine: Any, rules: Any, family: Any) -> Model:
    """An engine's model as a file of rules says it, which later loads remember. Collective. Raises
    RuleError, NotFoundError, LayoutError, UnsupportedError, UsageError on every rank."""
    with agree.gathering() as told:
        if family is not None:
            raise UsageError(
                "a family and rules both say how the model is sharded",
                expected="one of them",
                found=f"family={family!r:.80}, rules={rules!r:.80}",
                fix="leave one of the two out",
            )
        told.value = _said(engine, rules if isinstance(rules, RuleSet) else read_rules(rules))
    with agree.together():
        names, table = _joined(told.values)
        found = told.values[0][0]
    pipe = (lambda _: names) if names else None
    more: dict[str, Any] = {"divided": lambda _: (), "rules": found}
    model = Model(Family("", lambda _: table, found.source, pipe, **more), NoSizes())
    remember(engine, model)
    return model


def _said(engine: Any, rules: RuleSet) -> _Said:
    own = LocalShard(engine, None)
    params = {name: param for param, named in own.names.items() for name in named}
    names = renamed(params, rules) if is_pipeline(engine) else {}
    table: dict[str, Declared] = {}
    rules.check_names(names.get(held, held) for held in params)
    info = vocabulary_info(engine.module)
    for held, param in params.items():
        name = names.get(held, held)
        spec = rules.declare(name, tuple(own.own_shape(param)), own.mesh.cuts(is_expert(name)))
        extent = spec.extent or StockInfo(info, rules.source).vocabulary_of(held, spec.shape)
        table[name] = Declared(
            spec.shape, spec.layout, extent=extent, first_counts=spec.first_counts
        )
        _check_attributes(name, table[name], param, rules)
    return rules, names, table


def _check_attributes(name: str, declared: Declared, param: Any, rules: RuleSet) -> None:
    """Raises LayoutError where a layer of Megatron's marked its parameter as cut, and the rules say
    it otherwise: the shape of one rank can't show that."""
    if not getattr(param, "tensor_model_parallel", False):
        return
    dims = {cut.dim for cut in declared.layout.cuts()}
    if dims != {param.partition_dim} and not declared.layout.mean_over:
        raise LayoutError(
            "a live parameter's attribute partition_dim contradicts its rule",
            file=rules.source,
            parameter=name,
            expected=f"cut on dim {param.partition_dim}, as its layer says",
            found=declared.layout,
            fix="correct the rule",
        )


def _joined(said: list[_Said]) -> tuple[dict[str, str], dict[str, Declared]]:
    """What all ranks say together. Raises RuleError for other rules on one rank, LayoutError for
    shares of other sizes."""
    names: dict[str, str] = {}
    table: dict[str, Declared] = {}
    first = said[0][0]
    for rank, (rules, own_names, own_table) in enumerate(said):
        if (rules.rules, rules.pipeline) != (first.rules, first.pipeline):
            raise RuleError(
                "ranks read different rules",
                file=rules.source,
                expected="those of rank 0",
                found=f"others on rank {rank}",
                fix="give all ranks the same file",
            )
        names |= own_names
        for name, one in own_table.items():
            if table.setdefault(name, one) != one:
                raise LayoutError(
                    "ranks have shares of different sizes of a parameter",
                    file=rules.source,
                    parameter=name,
                    expected=f"{table[name].shape} in the whole model",
                    found=f"{one.shape}, by the share of rank {rank}",
                    fix="correct the rule; what is not cut evenly needs a family",
                )
    return names, table
