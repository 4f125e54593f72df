"""By which rule a run's optimizer stepped, where its groups don't say it: DeepSpeed's own Adams are
made by the config, which the model files hold."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.formats.optimizers import rule_untold


def with_rules(groups: Sequence[ParamGroup], config: Any) -> tuple[ParamGroup, ...]:
    """Groups with the rule that the config names, where they are an Adam's and don't tell which."""
    made = _made_by(config)
    return tuple(
        replace(group, steps_as=made[0])
        if made[0] and rule_untold(group) and group.settings.get("eps") == made[1].get("eps", 1e-8)
        else group
        for group in groups
    )


def _made_by(config: Any) -> tuple[str, Mapping[str, Any]]:
    """The rule of an Adam that DeepSpeed's `_configure_basic_optimizer` makes, "" of others, and
    the parameters that it gives it. A program that brings its own optimizer may still have the
    section: its eps, where it is another one, shows that."""
    section = config.get("optimizer") if isinstance(config, dict) else None
    kind = section.get("type") if isinstance(section, dict) else None
    params = section.get("params") if isinstance(section, dict) else None
    params = params if isinstance(params, dict) else {}
    name = kind.lower() if isinstance(kind, str) else ""
    decoupled = name == "adamw" or (name in ("adam", "muon") and params.get("adam_w_mode", True))
    rule = "AdamW" if decoupled else "Adam" if name in ("adam", "muon") else ""
    return rule, params
