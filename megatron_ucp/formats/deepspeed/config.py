"""What a DeepSpeed config says of how a run trained and of how its files are laid out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.formats import expect
from megatron_ucp.formats.optimizers import rule_untold

SECTIONS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}  # -> dtype of training


class DeepSpeedConfig:
    """A config that may be anybody's: what is no mapping says nothing, like a section that is none.

    Example: `DeepSpeedConfig({"bf16": {"enabled": True}}).dtype` is "bfloat16".
    """

    def __init__(self, tree: object) -> None:
        self.tree = expect.section(tree)

    def section(self, *keys: str) -> Mapping[str, Any]:
        """A section, or one inside of another."""
        return expect.section(self.tree, *keys)

    @property
    def zero(self) -> Mapping[str, Any]:
        return self.section("zero_optimization")

    @property
    def dtype(self) -> str:
        """That of training."""
        return next(
            (d for key, d in SECTIONS.items() if self.section(key).get("enabled")), "float32"
        )

    @property
    def is_offloaded(self) -> bool:
        """Whether the optimizer is in the CPU's memory."""
        device = self.section("zero_optimization", "offload_optimizer").get("device")
        return device == "cpu" or self.zero.get("cpu_offload") is True

    @property
    def grad_accum_dtype(self) -> Any:
        """The dtype in which gradients are summed, as it is written there."""
        return self.section("data_types").get("grad_accum_dtype")

    def with_rules(self, groups: Sequence[ParamGroup]) -> tuple[ParamGroup, ...]:
        """Groups with the rule by which the config's Adam steps ("AdamW"), where they are an
        Adam's and don't tell which. A program that brings its own optimizer may still have the
        section: its eps, where it is another one, shows that.

        Source: `_configure_basic_optimizer` of DeepSpeed's engine.
        """
        kind, params = self.section("optimizer").get("type"), self.section("optimizer", "params")
        name = kind.lower() if isinstance(kind, str) else ""
        if name not in ("adam", "adamw", "muon"):
            return tuple(groups)
        decoupled = name == "adamw" or params.get("adam_w_mode", True)
        rule, eps = "AdamW" if decoupled else "Adam", params.get("eps", 1e-8)
        return tuple(
            replace(group, steps_as=rule)
            if rule_untold(group) and group.settings.get("eps") == eps
            else group
            for group in groups
        )
