"""What a conversion takes from its source besides tensors: config, scheduler, loss scale, the
layers of its pipeline."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.partition import Layers
from megatron_ucp.core.states import kept_by
from megatron_ucp.families import families
from megatron_ucp.formats.deepspeed.declared import says_layouts
from megatron_ucp.formats.deepspeed.model_file import training_dtype
from megatron_ucp.formats.deepspeed.native import OWN_KEYS, PER_GROUP, NativeCheckpoint
from megatron_ucp.formats.deepspeed.native_writer import Run
from megatron_ucp.formats.deepspeed.pipe_names import TIED
from megatron_ucp.formats.deepspeed.target import Target, config_for
from megatron_ucp.formats.pt.output import is_mark
from megatron_ucp.formats.pt.values import TensorRef
from megatron_ucp.formats.registry import Checkpoint

CLIP_GRAD = 1.0  # DeepSpeed's default


class Origin:
    """A source as a conversion sees it. `ruled`: a file of rules was given. `notes` say what had to
    be assumed."""

    def __init__(self, source: Checkpoint, ruled: bool) -> None:
        self.source, self.manifest = source, source.manifest
        config = source.meta.get("ds_config")
        self.no_config = not isinstance(config, dict)
        self.config: Mapping[str, Any] = config if isinstance(config, dict) else {}
        self.notes: list[str] = []
        self.declared = ruled or says_layouts(self.manifest)
        self.dtype = next(
            (spec.dtype for spec in self.manifest.params if spec.kind == "trainable"),
            training_dtype(source.meta, {}, ()),
        )

    @property
    def permuted(self) -> bool:
        """Whether the order of the groups is that of `round_robin_gradients`."""
        settings = self.config.get("zero_optimization")
        return (
            self.manifest.engine == "zero12"
            and isinstance(settings, dict)
            and bool(settings.get("round_robin_gradients"))
        )

    def completed(self, target: Target, config: Mapping[str, Any] | None) -> Target:
        """The target with everything that the config of its job says, or else the source's. Raises
        UsageError."""
        if config is None and self.no_config and target.dtype is None:
            target = replace(target, dtype=self.dtype)
        return target.completed(self.config if config is None else config)

    def layers(self) -> Layers | None:
        """The layers of the pipeline that the model has, or would have; None where nobody knows
        them."""
        names = [spec.name for spec in self.manifest.params]
        # not `find_family`: a family that this process does not know is no reason to refuse
        family = families().get(self.manifest.family)
        if family is not None and family.layers is not None:
            return family.layers(names).with_values(names)
        if not isinstance(self.source, NativeCheckpoint) or not self.source.pipeline:
            return None
        return _layers_of(self.source).with_values(names)

    def run(self, target: Target, manifest: Manifest, config: Mapping[str, Any]) -> Run:
        """What the files say besides the manifest. `config` is the DeepSpeed config of the
        target."""
        meta, contents = self.source.meta, self.source.contents
        stateless = (
            self.source.weights.stateless() if isinstance(self.source, NativeCheckpoint) else {}
        )
        dtype = target.dtype or self.dtype
        scaler = contents.scaler
        if dtype != "float16" and scaler.get("dynamic"):
            self.notes.append("the dynamic loss scale of fp16 has no place in the target")
        elif dtype == "float16" and self.dtype != "float16":
            scaler = _fresh_scaler(config)
            self.notes.append(
                f"the loss scale of fp16 begins anew, at {scaler['cur_scale']:g}: the source has "
                "none"
            )
        marked = sorted(
            {key for group in manifest.groups for key, value in group.items() if is_mark(value)}
        )
        if marked:
            self.notes.append(
                f"hyper-parameters that are no plain values are left out: {', '.join(marked)}"
            )
        return Run(
            meta,
            OWN_KEYS,
            config_for(target, config, dtype),
            str(meta.get("ds_version") or "0.19.8"),
            dtype,
            scaler,
            self._clip_grad(config),
            self._int_steps(manifest),
            stateless,
            lambda stage: self._scheduler(manifest, stage),
        )

    def _optimizer_tree(self) -> Mapping[str, Any]:
        if isinstance(self.source, NativeCheckpoint):
            tree = self.source.optimizer_of(0)[0]
            return tree if isinstance(tree, dict) else {}
        return self.source.optimizer_tree()

    def _clip_grad(self, config: Mapping[str, Any]) -> float:
        key = "gradient_clipping"
        for value in (
            config.get(key),
            self._optimizer_tree().get("clip_grad"),
            self.config.get(key),
        ):
            if isinstance(value, int | float) and not isinstance(value, bool):
                return float(value)
        return CLIP_GRAD

    def _int_steps(self, manifest: Manifest) -> bool:
        """Whether the target's optimizer keeps its step as an int: as its class does, or as the
        source has it."""
        if manifest.optimizer:
            return (
                kept_by(manifest.optimizer, manifest.groups[0] if manifest.groups else {}).step
                == "int"
            )
        tree = self._optimizer_tree()
        base: Any = tree.get("base_optimizer_state") or tree.get("optimizer_state_dict") or tree
        entries = base.get("state", {}) if isinstance(base, dict) else dict(enumerate(base))
        steps = (
            [entry.get("step") for entry in entries.values() if isinstance(entry, dict)]
            if isinstance(entries, dict)
            else []
        )
        return any(isinstance(step, int) and not isinstance(step, TensorRef) for step in steps)

    def _scheduler(self, manifest: Manifest, stage: int) -> Any:
        """The scheduler's state for one stage of the target: what it keeps per group comes from
        where each group's parameters were. Each stage of a pipeline wrote its own."""
        found = self.source.meta.get("lr_scheduler")
        if not isinstance(found, dict):
            return found
        firsts: dict[int, str] = {}
        for buffer in manifest.buffers:
            if buffer.group is not None and dict(buffer.at).get("pp", 0) == stage:
                firsts.setdefault(buffer.group, buffer.members[0].param)
        origins = [
            self.manifest.buffers[self.manifest.holders[name][0][0]].group
            for _, name in sorted(firsts.items())
        ]
        saved: list[Any] = [found]
        if isinstance(self.source, NativeCheckpoint) and self.source.pipeline_stages > 1:
            saved = [
                self.source.tree(name).get("lr_scheduler") or {}
                for name in self.source.first_of_stages
            ]
        out = dict(found)
        for key in PER_GROUP & found.keys():
            every = [
                self._number(value, stage) if len(saved) > 1 else value
                for stage, state in enumerate(saved)
                if isinstance(values := state.get(key), list)
                for value in values
            ]
            if len(every) == len(self.manifest.groups) and None not in origins:
                out[key] = [every[n] for n in origins if n is not None]
        return out

    def _number(self, value: Any, stage: int) -> Any:
        """A rate that is a tensor as a number: the files of other stages are not at hand where the
        scheduler is written."""
        if not isinstance(value, TensorRef) or not isinstance(self.source, NativeCheckpoint):
            return value
        return self.source.scalar(self.source.full_path(self.source.first_of_stages[stage]), value)


def _fresh_scaler(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A loss scaler before the first step, with the defaults of DeepSpeed's `fp16` section."""
    section = config.get("fp16")
    said: Mapping[str, Any] = section if isinstance(section, dict) else {}
    if said.get("loss_scale"):
        return {"dynamic": False, "cur_scale": float(said["loss_scale"])}
    hysteresis = int(said.get("hysteresis", 2))
    return {
        "dynamic": True,
        "cur_scale": 2.0 ** int(said.get("initial_scale_power", 16)),
        "cur_iter": 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": int(said.get("loss_scale_window", 1000)),
        "min_scale": said.get("min_loss_scale", 1),
        "delayed_shift": hysteresis,
        "cur_hysteresis": hysteresis,
        "consecutive_hysteresis": bool(said.get("consecutive_hysteresis", False)),
        "raise_error_at_min_scale": True,
    }


def _layers_of(source: NativeCheckpoint) -> Layers:
    """A pipeline's layers as its files show them. What later stages hold of a tied module without a
    file of its own stands at a position behind the last one."""
    names = source.manifest.names
    own: dict[int, dict[str, str]] = {}
    tied: dict[str, dict[str, str]] = {}
    for pipe in names:
        head, _, rest = pipe.partition(".")
        if head == TIED:
            key, _, rest = rest.partition(".")
            tied.setdefault(key, {})[rest] = pipe
        else:
            own.setdefault(int(head), {})[rest] = pipe
    filed = {layer for layer, _ in source.names.layers}
    count = 1 + max({*own, *filed}, default=-1)
    at: list[dict[str, str]] = [dict(own.get(position, {})) for position in range(count)]
    for position in sorted(filed - own.keys()):
        keys = set(source.tree(source.names.layers[position, 0]))
        at[position] = next((module for module in tied.values() if module.keys() <= keys), {})
    shared = {
        pipe for pipe, name in names.items() if len(source.manifest.holders.get(name, ())) > 1
    }
    placed = [pipe for held in at for pipe in held.values()]
    if shared - {pipe for pipe in placed if placed.count(pipe) > 1}:
        at.append(
            {
                rest: pipe
                for module in tied.values()
                for rest, pipe in module.items()
                if pipe in shared
            }
        )
    return Layers(tuple(at), names, frozenset(position for position in filed if position < len(at)))
