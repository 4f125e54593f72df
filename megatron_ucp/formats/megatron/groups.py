"""The parameter groups of Megatron's optimizers: hyper-parameters, step, and which parameter is in
which group, which the files don't list.

Source: `_get_param_groups` and `get_standard_config_overrides` of megatron-core 0.16.1 to 0.19.2,
and `param_group_identifier_keys`, by which it knows the group of a running optimizer that a saved
one is for. Until 0.18 those were the first four of `IDENTIFIERS`, so that groups which differ in
their rates alone overwrote each other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite
from typing import Any

from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.errors import DamagedFileError, StateMismatchError
from megatron_ucp.formats import expect
from megatron_ucp.formats.megatron.arguments import rate
from megatron_ucp.formats.param_groups import MEGATRON, Tensors, param_groups, step_of
from megatron_ucp.formats.pt.refs import TensorRef, number_in

# How a group came to be, and which optimizer steps it.
IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr", "optimizer")
# Between these the schedule moves its learning rate and its weight decay. The latter two are there
# where a run overrides them for some parameters (from 0.19 on).
SCHEDULED = ("max_lr", "min_lr", "start_wd", "end_wd")
MEGATRON_KEYS = (*IDENTIFIERS, *SCHEDULED, "default_config")
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
    for tree in expect.each(trees, dict, "param_groups", file):
        own = {key: _own(tree, key) for key in MEGATRON_KEYS if _own(tree, key) is not None}
        names = {key: str(key).removeprefix("pre_") for key in tree}
        rest = {key: tree[key] for key, name in names.items() if name not in MEGATRON_KEYS}
        if _TORCH_ONLY in rest and rest.get(_TE_ONLY) is True:
            del rest[_TE_ONLY]  # torch's Adam always corrects; the key is for whoever loads it next
        (plain,) = param_groups([rest], tensors, file)
        step = _step(tree.get("step"), common_step, tensors, file)
        group = ParamGroup(plain.settings, _class_name(plain.settings), {MEGATRON: own})
        out.append(SavedGroup(group, step, optimizer))
    # fused ones count in no group of which the rank that saved them has no parameter
    steps = {one.step for one in out} - {None}
    if len(steps) == 1:
        (step,) = steps
        out = [replace(one, step=step) for one in out]
    return out


def _own(tree: Mapping[str, Any], key: str) -> Any:
    """NeMo writes `pre_wd_mult` for `wd_mult`."""
    return tree.get(key, tree.get(f"pre_{key}"))


def _step(value: Any, common: float | None, tensors: Tensors, file: str) -> float | None:
    """A step, which Megatron keeps as a number, as a tensor, or once for all groups."""
    if value is None:
        return common
    if isinstance(value, TensorRef):
        value = number_in(tensors(value), file)
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise DamagedFileError("a step is no number", file=file, found=type(value).__name__)
    return step_of(expect.number(value, "step", file), file)


def _class_name(settings: Mapping[str, Any]) -> str:
    """The optimizer, where its hyper-parameters show it: torch's, or nobody knows which one."""
    if _TORCH_ONLY not in settings or "betas" not in settings:
        return ""
    return "torch.AdamW" if settings.get("decoupled_weight_decay") else "torch.Adam"


@dataclass(frozen=True)
class Membership:
    """Finds the group of a parameter. `decays_qk_norms`: norms of queries and keys are decayed like
    matrices; `decoupled_lr` is the rate of embedding and head, where they have their own. `file` is
    for messages. `recorded` has the group of each parameter, where a manifest says it: a program
    may have made its groups by other rules than Megatron-LM's. `live` says it of the caller's
    engine, which is asked where nothing else tells groups apart, as megatron-core itself does."""

    groups: Sequence[SavedGroup]
    file: str
    decays_qk_norms: bool = False
    decoupled_lr: float | None = None
    recorded: Mapping[str, ParamGroup] = field(default_factory=dict)
    live: Mapping[str, ParamGroup] = field(default_factory=dict)

    @classmethod
    def by_arguments(
        cls,
        groups: Sequence[SavedGroup],
        said: Mapping[str, Any],
        file: str,
        recorded: Manifest | None = None,
        live: Manifest | None = None,
    ) -> "Membership":
        """As the arguments of a run, a manifest beside its files, and the caller's engine say
        it."""
        decays = said.get("apply_wd_to_qk_layernorm") or said.get("no_weight_decay_cond_type")
        known, own = _groups_of(recorded), _groups_of(live)
        return cls(groups, file, bool(decays), rate(said, "decoupled_lr"), known, own)

    def number(self, spec: ParamSpec) -> int:
        """The number of a parameter's group. Raises StateMismatchError where several could be it
        and differ, or none can."""
        return self.numbers(spec)[0]

    def numbers(self, spec: ParamSpec) -> list[int]:
        """Those of all that could be it, which are alike: as the rules leave them, the one that
        says most first. A rule that would leave none says nothing. Raises as `number`."""
        marked = [bool(group.own.get(EXPERT_MARK)) for group in self.groups]
        is_expert = spec.expert is not None and any(marked)
        left = [number for number, mark in enumerate(marked) if mark == is_expert]
        decay = 0.0 if is_not_decayed(spec, self.decays_qk_norms) else 1.0
        rules = (
            ("the manifest", lambda: self._as_recorded(left, spec.name)),
            ("decoupled_lr", lambda: self._by_rate(left, spec.name)),
            (
                "weight decay",
                lambda: [n for n in left if self.groups[n].own.get("wd_mult") == decay],
            ),
            ("the engine's groups", lambda: self._as_live(left, spec.name, IDENTIFIERS)),
            ("the engine's schedule", lambda: self._as_live(left, spec.name, SCHEDULED)),
        )
        told = {str(left): "experts"}  # the groups that were left, by the rule that left them
        for who, narrowed in rules:
            if len(self._kinds(left)) > 1:
                left = narrowed() or left
                told.setdefault(str(left), who)
        if len(self._kinds(left)) != 1:
            raise StateMismatchError(
                "the files do not say which parameter group steps a parameter",
                file=self.file,
                parameter=spec.name,
                expected="one group for its kind",
                found=", ".join(f"groups {numbers} by {who}" for numbers, who in told.items()),
                fix="load it into an engine whose groups have the same overrides, or load the "
                "weights alone (Python: load_optimizer_states=False)",
            )
        return left

    def _kinds(self, numbers: Iterable[int]) -> set[str]:
        """What some groups have, those that are alike once."""
        return {self._texts[number] for number in numbers}

    @cached_property
    def _texts(self) -> list[str]:
        return [repr(_values(group)) for group in self.groups]

    def _as_recorded(self, left: list[int], name: str) -> list[int]:
        """The groups with the hyper-parameters that a manifest says."""
        known = self.recorded.get(name)
        if known is None:
            return left
        marks = known.marks.get(MEGATRON) or {}

        def fits(one: SavedGroup) -> bool:
            return _agree(known.settings, one.group.settings) and _agree(marks, one.own)

        return [n for n in left if fits(self.groups[n])]

    def _by_rate(self, left: list[int], name: str) -> list[int]:
        """The groups with the rate of embedding and head, or those without it."""
        if self.decoupled_lr is None:
            return left
        rates = {n: self.groups[n].own.get("max_lr") for n in left}
        has_it = name in _EMBEDDING_OR_OUTPUT
        return [n for n, rate in rates.items() if (rate == self.decoupled_lr) == has_it]

    def _as_live(self, left: list[int], name: str, keys: Sequence[str]) -> list[int]:
        """The groups that have what the engine's group of a parameter has under these keys; all,
        where the engine has not a group like each of them: then it says nothing of the others."""
        marks = {param: group.marks.get(MEGATRON) or {} for param, group in self.live.items()}
        live = {param: [own.get(key) for key in keys] for param, own in marks.items()}
        saved = {n: [self.groups[n].own.get(key) for key in keys] for n in left}
        if name not in live or any(one not in live.values() for one in saved.values()):
            return left
        return [n for n in left if saved[n] == live[name]]


def is_not_decayed(spec: ParamSpec, decays_qk_norms: bool = False) -> bool:
    """Whether Megatron gives a parameter no weight decay: vectors and biases have none; norms of
    queries and keys may have it."""
    if decays_qk_norms and ("q_layernorm." in spec.name or "k_layernorm." in spec.name):
        return False
    return len(spec.shape) == 1 or spec.name.endswith(".bias")


EXPERT_MARK = "is_expert_parallel"


def _groups_of(manifest: Manifest | None) -> dict[str, ParamGroup]:
    """The group of each parameter that an optimizer steps."""
    if manifest is None:
        return {}
    return {member.param: manifest.groups[group] for _, member, group in manifest.stepped()}


def _agree(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two groups have the same under the keys that both have."""
    return all(_plain(one[key]) == _plain(other[key]) for key in one.keys() & other.keys())


def _plain(value: Any) -> Any:
    return [*value] if isinstance(value, list | tuple) else value


def _values(one: SavedGroup) -> tuple[Any, ...]:
    settings, own = one.group.settings, one.own
    return sorted(settings.items(), key=str), sorted(own.items(), key=str), one.step
