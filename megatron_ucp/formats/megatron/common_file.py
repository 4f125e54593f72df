"""The file `common.pt` of a distributed checkpoint of Megatron-LM: everything that is no tensor of
a model or an optimizer, as Megatron-LM's own load asks for it."""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.values import Stand, alike
from megatron_ucp.errors import StateMismatchError
from megatron_ucp.formats.base import Extras
from megatron_ucp.formats.megatron.arguments import written_arguments
from megatron_ucp.formats.megatron.extras import ARGUMENTS_KEY, OPERATIONS, SCHEDULER
from megatron_ucp.formats.megatron.groups import SCHEDULED, is_not_decayed
from megatron_ucp.formats.megatron.kinds import Kind
from megatron_ucp.formats.megatron.schedule import OF_WSD, is_schedule
from megatron_ucp.formats.megatron.torch_dist import COMMON_FILE
from megatron_ucp.formats.optimizers import steps_in_group
from megatron_ucp.formats.plain_values import MEGATRON
from megatron_ucp.formats.pt.output import Output
from megatron_ucp.formats.pt.values import number_in

# what `content_metadata` says of the keys, and a model is asked for them with
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
_SHARDING = "fully_reshardable"
_DISTRIBUTED_CONTENT = {
    "distrib_optim_sharding_type": _SHARDING,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    **CONTENT,
}
# what a group says only where a run overrides it for some parameters
_OVERRIDES = ("start_wd", "end_wd", "optimizer")
# what torch's AdamW reads of a group; a load replaces the running one's group by the saved one
_TORCH_DEFAULTS = {
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
    "decoupled_weight_decay": True,
    "bias_correction": True,
}


@dataclass
class CommonFile:
    """What is written there. `manifest` says the parameters, their groups and steps; `mesh` is the
    one that the files are for: with expert parallelism experts have an optimizer of their own.
    `kind` is that optimizer; `chained` says otherwise whether experts have one of their own;
    `notes` say what does not cross."""

    manifest: Manifest
    extras: Extras
    mesh: Mesh
    file: str = ""
    kind: Kind = Kind.DISTRIBUTED
    chained: bool | None = None
    notes: list[str] = field(default_factory=list[str])

    def output(self) -> Output:
        """The file, with the bytes of its tensors. Raises StateMismatchError for parameters of one
        group of Megatron that have different hyper-parameters or steps."""
        out = Output(COMMON_FILE)
        content = _DISTRIBUTED_CONTENT if self.kind is Kind.DISTRIBUTED else CONTENT
        arguments = self._arguments()
        iteration = self.extras.counters.get("global_steps", 0)
        out.tree = {
            "checkpoint_version": 3.0,
            "iteration": iteration,
            "optimizer": self._optimizers(out),
            SCHEDULER: self._scheduler(),
            OPERATIONS: self.extras.client_state.get(OPERATIONS, 0),
            "content_metadata": dict(content),
        }
        if arguments:
            out.tree["args"] = Stand("argparse.Namespace", (), arguments)
        else:
            self.notes.append(
                "the sizes of the model are not known: Megatron-LM will load it without arguments "
                "and without the number of consumed samples"
            )
        return out

    # ------------------------------------------------ optimizer

    def _optimizers(self, out: Output) -> dict[Any, Any]:
        chained = self.mesh.ep > 1 if self.chained is None else self.chained
        groups = self._groups(chained)
        if not chained:
            return self._optimizer(out, [group for found in groups for group in found])
        return {number: self._optimizer(out, found) for number, found in enumerate(groups)}

    def _optimizer(self, out: Output, groups: list[dict[str, Any]]) -> dict[str, Any]:
        inner: dict[str, Any] = {"param_groups": out.adopt(groups)}
        if self.kind is not Kind.DISTRIBUTED:
            inner["state"] = {} if self._steps_in_groups else self._common_step(out, groups)
        if self.kind is Kind.FP32:
            return inner
        found: dict[str, Any] = {"optimizer": inner}
        if self.kind is Kind.DISTRIBUTED:
            found["param_state_sharding_type"] = _SHARDING
        if scaler := self._scaler(out):
            found["grad_scaler"] = scaler
        return found

    @property
    def _steps_in_groups(self) -> bool:
        """Whether the plain optimizers keep the step in their groups: a run with Transformer
        Engine's or Apex' Adam loads no `common_step`, one with torch's asks for it."""
        return any(steps_in_group(group.optimizer) for group in self.manifest.groups)

    def _common_step(self, out: Output, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """The step of torch's Adam, which the plain optimizers keep once for all of its groups."""
        steps = {group.pop("step") for group in groups if "step" in group}
        if not steps:
            return {}
        (step,) = steps  # a live optimizer of megatron-core has one
        return {"common_step": out.tensor(struct.pack("<f", step), "float32", ())}

    def _groups(self, chained: bool) -> list[list[dict[str, Any]]]:
        """The groups of what is no expert's and, apart, of experts, each in Megatron's order: what
        has no settings of its own first."""
        first: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
        for spec in self.manifest.params:
            if spec.kind == "trainable":
                expert = chained and spec.expert is not None
                own = self._group(spec, expert)
                between = [own.get(key, -math.inf) for key in SCHEDULED]
                identity = (expert, -own["wd_mult"], *between, own.get("optimizer", ""))
                name, known = first.setdefault(identity, (spec.name, own))
                self._check_alike((name, known), (spec.name, own))
        found = [(key, group) for key, (_, group) in sorted(first.items())]
        groups = [[group for (apart, *_), group in found if apart == is_here] for is_here in (0, 1)]
        return groups if chained else groups[:1]

    def _check_alike(
        self, one: tuple[str, Mapping[str, Any]], other: tuple[str, Mapping[str, Any]]
    ) -> None:
        keys = [
            key for key in {**one[1], **other[1]} if not alike(one[1].get(key), other[1].get(key))
        ]
        if keys:
            raise StateMismatchError(
                "parameters of one group of Megatron's optimizer have different hyper-parameters "
                "or steps",
                file=self.file,
                parameter=f"{one[0]} and {other[0]}",
                expected=f"equal {', '.join(sorted(keys))}",
                found="; ".join(
                    f"{key}: {one[1].get(key)} and {other[1].get(key)}" for key in keys
                ),
                fix="Megatron tells groups apart by weight decay, rates, overrides and experts "
                "alone",
            )

    def _group(self, spec: ParamSpec, expert: bool) -> dict[str, Any]:
        """The group that Megatron has for a parameter."""
        number = self.manifest.group_number(spec.name)
        group = self.manifest.groups[number or 0]
        settings = dict(group.settings)
        kept: Mapping[str, Any] = group.marks.get(MEGATRON) or {}
        wd_mult = 0.0 if is_not_decayed(spec, self._decays_qk_norms) else 1.0
        step = self.manifest.scalars_of(spec.name).get("step")
        scheduler = self.extras.scheduler or {}
        rate = self._float(settings.get("lr"))
        if settings.get("weight_decay") and not kept.get("wd_mult", wd_mult):
            self._note(
                "vectors and biases have weight decay, which Megatron's scheduler takes away"
            )
        return {
            "is_expert_parallel": expert,
            "default_config": bool(kept.get("default_config", True)),
            "wd_mult": float(kept.get("wd_mult", wd_mult)),
            "lr_mult": float(kept.get("lr_mult", 1.0)),
            "is_decoupled_lr": bool(kept.get("is_decoupled_lr", False)),
            "max_lr": kept.get("max_lr", scheduler.get("max_lr", rate)),
            "min_lr": kept.get("min_lr", scheduler.get("min_lr", 0.0)),
            **{key: kept[key] for key in _OVERRIDES if key in kept},
            **_TORCH_DEFAULTS,
            **settings,
            # Transformer Engine's and Apex' kernels take no float
            **({} if step is None else {"step": int(step)}),
        }

    @property
    def _decays_qk_norms(self) -> bool:
        said = self.extras.client_state.get(ARGUMENTS_KEY)
        return isinstance(said, Mapping) and bool(said.get("apply_wd_to_qk_layernorm"))

    def _float(self, value: Any) -> float:
        """A hyper-parameter, which may be a tensor."""
        return number_in(value, self.file) if isinstance(value, Stand) else float(value or 0.0)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    # ------------------------------------------------ the rest

    def _scaler(self, out: Output) -> dict[str, Any]:
        """The loss scale, where it changes."""
        found = self.extras.scaler
        if not found.dynamic:
            return {}
        said = {"scale_window": 1000, "delayed_shift": 2, **found.said}
        scale = struct.pack("<f", float(said["cur_scale"]))
        return {
            "scale": out.tensor(scale, "float32", (1,)),
            "growth_tracker": found.good_steps(int(said["scale_window"])),
            "hysteresis_tracker": int(said.get("cur_hysteresis", said["delayed_shift"])),
        }

    def _scheduler(self) -> dict[str, Any]:
        """The state of Megatron's scheduler, which counts samples; a constant one where the source
        has another."""
        found = self.extras.scheduler or {}
        samples = self.extras.counters.get("global_samples", 0)
        decays = [self._float(group.settings.get("weight_decay")) for group in self.manifest.groups]
        rates = [self._float(group.settings.get("lr")) for group in self.manifest.groups]
        decay, rate = max(decays, default=0.0), max(rates, default=0.0)
        usual: dict[str, Any] = {
            "max_lr": rate,
            "lr_warmup_steps": 0,
            "num_steps": samples,
            "lr_decay_style": "constant",
            "lr_decay_steps": max(1, samples),
            "min_lr": 0.0,
            "start_wd": decay,
            "end_wd": decay,
            "wd_incr_style": "constant",
            "wd_incr_steps": max(1, samples),
        }
        if is_schedule(found):
            self._note_flags(found)
            return {key: found.get(key, value) for key, value in usual.items()}
        self._note(
            "the scheduler is none of Megatron's: a constant one stands in its place, so resume "
            "with --override-opt_param-scheduler and the flags of the run"
        )
        return usual

    def _note_flags(self, found: Mapping[str, Any]) -> None:
        """Says which settings of a schedule Megatron keeps in no file: its run takes its flags."""
        style = found["lr_decay_style"]
        names = ("init_lr", *(OF_WSD if style == "WSD" else ()))
        left = [f"{name} {found[name]}" for name in names if found.get(name)]
        if left:
            self._note(
                "Megatron's files have no place for these settings of the schedule, so give their "
                f"flags again: {', '.join(left)}"
            )

    def _arguments(self) -> dict[str, Any]:
        said = self.extras.client_state.get(ARGUMENTS_KEY)
        known = dict(said) if isinstance(said, Mapping) else {}
        samples = self.extras.counters.get("global_samples", 0)
        return written_arguments(known, self.manifest, self.mesh, samples, self.kind)
