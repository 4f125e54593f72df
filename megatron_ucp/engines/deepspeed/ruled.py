"""A live model that a file of rules describes, where no family does."""

from typing import Any

from megatron_ucp.core.experts import is_expert
from megatron_ucp.core.layout import Partial
from megatron_ucp.core.rules import RuleSet
from megatron_ucp.engines.deepspeed.family import remember
from megatron_ucp.engines.deepspeed.stage import OwnStage, is_pipeline
from megatron_ucp.engines.megatron.derived import NoSizes
from megatron_ucp.errors import LayoutError, RuleError, UsageError
from megatron_ucp.families.base import Declared, Family, Model
from megatron_ucp.formats.deepspeed.declared import renamed
from megatron_ucp.formats.rule_file import read_rules
from megatron_ucp.reshard import agree

_Said = tuple[RuleSet, dict[str, str], dict[str, Declared]]  # rules, names in the pipeline, table


def model_by_rules(engine: Any, rules: Any, family: Any) -> Model:
    """An engine's model as a file of rules says it, which later loads remember. Collective. Raises
    RuleError, NotFoundError, LayoutError, UnsupportedError, UsageError on every rank."""
    with agree.together() as told:
        if family is not None:
            raise UsageError(
                "a family and rules both say how the model is sharded",
                expected="one of them",
                found=f"family={family!r:.80}, rules={rules!r:.80}",
                fix="leave one of the two out",
            )
        told.value = _said(engine, read_rules(rules))
    with agree.together():
        names, table = _joined(told.values)
        found = told.values[0][0]
    pipe = (lambda _: names) if names else None
    more: dict[str, Any] = {"divided": lambda _: (), "rules": found}
    model = Model(Family("", lambda _: table, found.source, pipe, **more), NoSizes())
    remember(engine, model)
    return model


def _said(engine: Any, rules: RuleSet) -> _Said:
    """Of what this rank holds."""
    own = OwnStage(engine, None)
    params = {name: param for param, named in own.names.items() for name in named}
    names = renamed(params, rules) if is_pipeline(engine) else {}
    table: dict[str, Declared] = {}
    for held, param in params.items():
        name = names.get(held, held)
        spec = rules.declare(name, tuple(own.own_shape(param)), own.mesh.cuts(is_expert(name)))
        table[name] = Declared(spec.shape, spec.layout, extent=spec.extent)
        _check_attributes(name, table[name], param, rules)
    return rules, names, table


def _check_attributes(name: str, declared: Declared, param: Any, rules: RuleSet) -> None:
    """Raises LayoutError where a layer of Megatron's marked its parameter as cut, and the rules say
    it otherwise: the shape of one rank can't show that."""
    if not getattr(param, "tensor_model_parallel", False):
        return
    dims = {cut.dim for cut in declared.layout.cuts()}
    if dims != {param.partition_dim} and not isinstance(declared.layout, Partial):
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
