"""The parameter groups of Megatron's optimizers: hyper-parameters, step, and which parameter is in
which group, which the files don't list.

Source: `_get_param_groups` and `get_standard_config_overrides` of megatron-core 0.16.1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.errors import DamagedFileError, StateMismatchError
from megatron_ucp.formats.foreign import as_float, each
from megatron_ucp.formats.megatron.arguments import rate
from megatron_ucp.formats.plain_values import MEGATRON, Tensors, param_groups
from megatron_ucp.formats.pt.unpickler import TensorRef
from megatron_ucp.formats.pt.values import number_in

# by these Megatron finds the group of a running optimizer that a saved one is for
IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
MEGATRON_KEYS = (*IDENTIFIERS, "max_lr", "min_lr", "default_config")
_EMBEDDING_OR_OUTPUT = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "output_layer.bias",
)
_TORCH_ONLY = "capturable"  # a hyper-parameter of torch's own Adam
_TE_ONLY = "bias_correction"  # one of Transformer Engine's


@dataclass(frozen=True)
class SavedGroup:
    """One group as it was saved. `optimizer` is the number of the optimizer in a chain that steps
    it: 0, or 1 for experts that expert parallelism spreads; `step` is None before the first one."""

    group: ParamGroup
    step: float | None
    optimizer: int = 0

    @property
    def scalars(self) -> dict[str, float]:
        """What each of its parameters keeps of single numbers."""
        return {} if self.step is None else {"step": self.step}

    @property
    def own(self) -> Mapping[str, Any]:
        """What Megatron alone keeps of it."""
        return self.group.marks[MEGATRON]


def saved_groups(
    trees: Any, common_step: float | None, tensors: Tensors, file: str, optimizer: int
) -> list[SavedGroup]:
    """The groups of one optimizer, of its `param_groups`. Raises DamagedFileError."""
    out: list[SavedGroup] = []
    for tree in each(trees, dict, "param_groups", file):
        own = {key: _own(tree, key) for key in MEGATRON_KEYS if _own(tree, key) is not None}
        rest = {key: value for key, value in tree.items() if _plain_key(key) not in MEGATRON_KEYS}
        if _TORCH_ONLY in rest and rest.get(_TE_ONLY) is True:
            del rest[_TE_ONLY]  # torch's Adam always corrects; the key is for whoever loads it next
        (plain,) = param_groups([rest], tensors)
        step = _step(tree.get("step"), common_step, tensors, file)
        group = ParamGroup(plain.settings, _class_name(plain.settings), {MEGATRON: own})
        out.append(SavedGroup(group, step, optimizer))
    # fused ones count in no group of which the rank that saved them has no parameter
    steps = {one.step for one in out} - {None}
    if len(steps) == 1:
        (step,) = steps
        out = [replace(one, step=step) for one in out]
    return out


def _plain_key(key: object) -> str:
    """NeMo writes `pre_wd_mult` for `wd_mult`."""
    return str(key).removeprefix("pre_")


def _own(tree: Mapping[str, Any], key: str) -> Any:
    return tree.get(key, tree.get(f"pre_{key}"))


def _step(value: Any, common: float | None, tensors: Tensors, file: str) -> float | None:
    """A step, which Megatron keeps as a number, as a tensor, or once for all groups."""
    if value is None:
        return common
    if isinstance(value, TensorRef):
        value = number_in(tensors(value), file)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise DamagedFileError("a step is no number", file=file, found=type(value).__name__)
    return as_float(value, "step", file)


def _class_name(settings: Mapping[str, Any]) -> str:
    """The optimizer, where its hyper-parameters show it: torch's, or nobody knows which one."""
    if _TORCH_ONLY not in settings or "betas" not in settings:
        return ""
    return "torch.AdamW" if settings.get("decoupled_weight_decay") else "torch.Adam"


@dataclass(frozen=True)
class Membership:
    """Finds the group of a parameter. `decays_qk_norms`: norms of queries and keys are decayed like
    matrices; `decoupled_lr` is the rate of embedding and head, where they have their own. `file` is
    for messages. `recorded` has the hyper-parameters of each parameter, where a manifest says them:
    a program may have made its groups by other rules than Megatron-LM's."""

    groups: Sequence[SavedGroup]
    file: str
    decays_qk_norms: bool = False
    decoupled_lr: float | None = None
    recorded: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    @classmethod
    def by_arguments(
        cls,
        groups: Sequence[SavedGroup],
        said: Mapping[str, Any],
        file: str,
        recorded: Manifest | None = None,
    ) -> "Membership":
        """As the arguments of a run, and a manifest beside its files, say it."""
        decays = said.get("apply_wd_to_qk_layernorm") or said.get("no_weight_decay_cond_type")
        known: dict[str, Mapping[str, Any]] = {}
        if recorded is not None:
            for _, member, group in recorded.stepped():
                known[member.param] = recorded.groups[group].settings
        return cls(groups, file, bool(decays), rate(said, "decoupled_lr"), known)

    def number(self, spec: ParamSpec) -> int:
        """The number of a parameter's group. Raises StateMismatchError where several could be it
        and differ, or none can."""
        return self.numbers(spec)[0]

    def numbers(self, spec: ParamSpec) -> list[int]:
        """Those of all that could be it, which are alike. Raises as `number`."""
        expert = spec.expert is not None and any(g.own.get(EXPERT_MARK) for g in self.groups)
        left = [n for n, g in enumerate(self.groups) if bool(g.own.get(EXPERT_MARK)) == expert]
        left = self._as_recorded(left, spec.name)
        if len({repr(_values(self.groups[n])) for n in left}) == 1:
            return left
        if self._has_own_rate(spec):
            left = self._narrowed(left, "max_lr", self.decoupled_lr)
        elif self.decoupled_lr is not None:
            others = [n for n in left if self.groups[n].own.get("max_lr") != self.decoupled_lr]
            left = others or left
        free = is_not_decayed(spec, self.decays_qk_norms)
        left = self._narrowed(left, "wd_mult", 0.0 if free else 1.0)
        alike = {repr(_values(self.groups[n])) for n in left}
        if len(alike) != 1:
            raise StateMismatchError(
                "the files do not say which parameter group steps a parameter",
                file=self.file,
                parameter=spec.name,
                expected="one group for its kind",
                found=f"{len(left)} of {len(self.groups)} groups",
                fix="load the weights alone (Python: load_optimizer_states=False)",
            )
        return left

    def _as_recorded(self, left: list[int], name: str) -> list[int]:
        """The groups with the hyper-parameters that a manifest says; all, where it says none, or
        none that is there."""
        known = self.recorded.get(name, {})

        def fits(settings: Mapping[str, Any]) -> bool:
            both = known.keys() & settings.keys()
            return all(_plain(known[key]) == _plain(settings[key]) for key in both)

        return [n for n in left if fits(self.groups[n].group.settings)] or left

    def _narrowed(self, left: list[int], key: str, value: object) -> list[int]:
        """The groups with a value; all, where no group has it (one without overrides)."""
        return [n for n in left if self.groups[n].own.get(key) == value] or left

    def _has_own_rate(self, spec: ParamSpec) -> bool:
        return self.decoupled_lr is not None and spec.name in _EMBEDDING_OR_OUTPUT


def is_not_decayed(spec: ParamSpec, decays_qk_norms: bool = False) -> bool:
    """Whether Megatron gives a parameter no weight decay: vectors and biases have none; norms of
    queries and keys may have it."""
    if decays_qk_norms and ("q_layernorm." in spec.name or "k_layernorm." in spec.name):
        return False
    return len(spec.shape) == 1 or spec.name.endswith(".bias")


EXPERT_MARK = "is_expert_parallel"


def _plain(value: Any) -> Any:
    return [*value] if isinstance(value, list | tuple) else value


def _values(one: SavedGroup) -> tuple[Any, ...]:
    settings, own = one.group.settings, one.own
    return sorted(settings.items(), key=str), sorted(own.items(), key=str), one.step
