"""The files that DeepSpeed itself would have written for a manifest, as trees; see `deepspeed`,
which reads them.

Keys and structure: `_common_checkpoint_state` and the `state_dict` of each optimizer wrapper of
DeepSpeed 0.19.8.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import (
    by_layer,
    expert_place,
    file_rank,
    is_stacked,
    name_in_file,
    stored_tensors,
)
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.layout import Replicate
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.mesh import EXPERT_CUT, Mesh
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import VALUE
from megatron_ucp.core.values import Stand
from megatron_ucp.formats.base import Extras
from megatron_ucp.formats.deepspeed.autoep import LAYERS, key_in_file, layers_tree
from megatron_ucp.formats.deepspeed.native_optimizer import OptimizerTrees
from megatron_ucp.formats.deepspeed.native_structure import Own, RunSettings
from megatron_ucp.formats.deepspeed.paths import (
    at_tp,
    expert_file_name,
    expert_optimizer_name,
    layer_name,
    model_name,
    optimizer_name,
)
from megatron_ucp.formats.deepspeed.stock_info import patterns_of
from megatron_ucp.formats.of_ranks import OwnValues
from megatron_ucp.formats.pt.output import Output, Weight
from megatron_ucp.formats.pt.values import TensorRef


class NativeWriter(OptimizerTrees):
    """The files of a manifest. `layers` are those of its pipeline."""

    def __init__(self, manifest: Manifest, run: RunSettings, layers: Layers | None) -> None:
        super().__init__(manifest, run, layers)
        self._info = self._patterns()

    def outputs(self) -> Iterator[Output]:
        """Every file."""
        mesh = self.mesh
        for stage in range(mesh.pp):
            for tp in range(mesh.tp):
                ranks = mesh.sharers_at(stage, tp)
                for rank in ranks if mesh.zero == 3 else ranks[:1]:
                    yield self._model(self._own(rank))
                if self._is_split:
                    for rank in ranks:
                        yield self._optimizer(self._own(rank))
            yield from self._experts(stage)
        for position in range(len(self.layers.held)) if self.layers and not self._staged else ():
            for tp in range(mesh.tp):
                if output := self._layer(position, tp):
                    yield output

    def _expert_counts(self, stage: int) -> list[int]:
        """Experts of each mixture of a stage that lie in files of their own."""
        return [len(names) for names in by_layer(self._held_apart(stage))]

    def _held_apart(self, stage: int) -> list[str]:
        """What lies in such files of a stage."""
        here = {m.param for b in self.manifest.buffers if b.stage == stage for m in b.members}
        return [s.name for s in self.manifest.params if s.name in here and self._apart(s.name)]

    def _patterns(self) -> Any:
        """How stock's own converter has to put parameters together: the source's word was for the
        source's mesh and names."""
        if any(spec.layout != Replicate() for spec in self.manifest.params):
            return patterns_of(self.manifest.params, self._named)
        info = self.run.extras.patterns
        # a universal folder's says the version alone
        return info if info and {*info} != {"universal_checkpoint_version"} else None

    # ------------------------------------------------ model files

    def _model(self, own: Own) -> Output:
        mesh, mp = self.mesh, self._mp(own.stage, own.tp)
        output = Output(model_name(mp, own.part if mesh.zero == 3 else None))
        split = self._is_split
        shared = {alias: tie.canonical for tie in self.manifest.ties for alias in tie.aliases}
        output.tree = {
            "module": None if self.layers and not self._staged else self._module(output, own),
            "buffer_names": [self._own_name(name, own) for _, name in self._values(own, "buffer")],
            "optimizer": None if split else self._unpartitioned(output, own),
            "param_shapes": self._param_shapes(own) if split and mesh.zero else None,
            **self._frozen(output, own),
            "shared_params": shared if split else None,
            **run_fields(output, self.run, mesh, self._scheduler_of(own)),
            **{key: output.adopt(value) for key, value in self._client_state(own).items()},
        }
        output.tree |= self._of_experts(output, own)
        return output

    @property
    def _is_split(self) -> bool:
        """Whether the optimizer is partitioned, and lies in files of its own."""
        return self.manifest.keeper != Keeper.ZERO_0

    def _own_values(self, own: Own) -> OwnValues | None:
        """What a rank has otherwise than others, where it has a model file of its own."""
        each = self.mesh.zero == 3 and self.run.apart.what
        return self.run.apart.ranks[own.rank] if each else None

    def _client_state(self, own: Own) -> Mapping[Any, Any]:
        shared, values = self.run.extras.client_state, self._own_values(own)
        return shared if values is None else values.over(shared, self.run.apart.what)

    def _scheduler_of(self, own: Own) -> Any:
        values = self._own_values(own)
        if values is None or not self.run.apart.what.scheduler:
            return self.run.scheduler(own.stage)
        return values.scheduler

    def _of_experts(self, output: Output, own: Own) -> dict[str, Any]:
        """What a model file says of experts; without any how parameters are cut, for stock."""
        if counts := self._expert_counts(own.stage):
            names = (spec.name for spec in self.manifest.params)
            return {"num_experts": counts, LAYERS[0]: layers_tree(names, self.mesh, own.rank)}
        if self._info:
            return {"universal_checkpoint_info": output.adopt(self._info)}
        return {}

    def _frozen(self, output: Output, own: Own) -> dict[str, Any]:
        """What ZeRO-2 and 3 say of frozen parameters."""
        params = self.manifest.params
        experts = any(spec.kind == "frozen" and self._apart(spec.name) for spec in params)
        # stock's load would give every expert-parallel rank those of the first one: without any it
        # goes by the files of the experts
        if self.mesh.zero < 2 or (self.mesh.zero == 2 and experts):
            return {"frozen_param_shapes": None, "frozen_param_fragments": None}
        frozen = [(b, name) for b, name in self._values(own, "frozen") if not self._apart(name)]
        shapes = OrderedDict((self._named(name), _size(self._local(name))) for _, name in frozen)
        fragments = self._fragments(output, frozen, own)
        return {"frozen_param_shapes": shapes, "frozen_param_fragments": fragments}

    def _module(self, output: Output, own: Own) -> dict[str, Any]:
        """`state_dict` of the module."""
        out: dict[str, Any] = OrderedDict()
        here = {m.param for number in own.parts for m in self.manifest.buffers[number].members}
        for spec in self.manifest.params:
            if spec.name in here and not self._apart(spec.name):
                out[self._named(spec.name)] = self._entry(output, spec, own)
        for tie in self.manifest.ties if not self.layers else ():
            out.update(dict.fromkeys(tie.aliases, out[tie.canonical]))
        for name, value in self._stateless(here).items():
            if name not in out:
                out[name] = _nothing(output, value)
        return out | module_states(output, self.run.extras, self._own_values(own))

    def _entry(self, output: Output, spec: ParamSpec, own: Own) -> TensorRef:
        """A tensor of a rank's module: at ZeRO-3 parameters are empty."""
        if spec.kind == "buffer" or (spec.kind == "frozen" and self.mesh.zero < 3):
            return self._value(output, spec.name, own)
        if self.mesh.zero == 3:
            return output.tensor(b"", spec.dtype, (0,))
        weight = Weight(spec.name, at_tp(own.tp))
        return output.tensor(weight, spec.dtype, self._local(spec.name))

    @property
    def _staged(self) -> bool:
        """Whether DeepSpeed keeps a pipeline's weights in model files: where there are experts
        that have files of their own."""
        return any(self._apart(spec.name) for spec in self.manifest.params)

    def _stateless(self, here: Collection[str]) -> dict[str, Any]:
        """Entries that hold nothing of the modules with the parameters `here`, by the names that
        the engine gives them; those of experts with files of their own DeepSpeed does not keep."""
        kept = self.run.extras.stateless
        found = {name: value for name, value in kept.items() if not self._apart(name)}
        if not self.layers:
            return dict(found)
        modules = {name.rpartition(".")[0]: self._named(name).rpartition(".")[0] for name in here}
        parts = {name: name.rpartition(".") for name in found}
        return {
            f"{modules[head]}.{rest}": found[name]
            for name, (head, _, rest) in parts.items()
            if head in modules
        }

    def _value(self, output: Output, name: str, own: Own) -> TensorRef:
        number = self._number[own.stage, name]
        dtype = self.manifest.buffers[number].states[0][1]
        values = self._own_values(own)
        if values is not None and name in values.buffers:
            return cast("TensorRef", output.adopt(values.buffers[name]))
        return output.tensor(own.slot(number, VALUE), dtype, self._local(name))

    def _fragments(
        self, output: Output, frozen: Sequence[tuple[int, str]], own: Own
    ) -> dict[str, Any]:
        """Frozen parameters as ZeRO keeps them: whole at stage 2, this rank's chunk at stage 3."""
        out: dict[str, Any] = {}
        for number, name in frozen:
            buffer = self.manifest.buffers[number]
            cut = self.mesh.zero == 3
            slot = own.slot(number, VALUE)
            out[self._named(name)] = output.tensor(
                slot, buffer.states[0][1], (buffer.length,) if cut else self._local(name)
            )
        return out

    def _param_shapes(self, own: Own) -> list[dict[str, Stand]]:
        """Names and shapes of the module's tensors in each buffer."""
        out: list[dict[str, Stand]] = []
        for _, buffer in self._buffers(own):
            named: dict[str, Stand] = OrderedDict()
            for names in stored_tensors(member.param for member in buffer.members):
                shape, stacked = self._local(names[0]), is_stacked(names[0])
                whole = (len(names), *shape) if stacked else shape
                named[self._in_module(names[0], own)] = _size(whole)
            out.append(named)
        return out

    def _experts(self, stage: int) -> Iterator[Output]:
        """The files of a stage's experts, and at stage 0 the optimizers of its expert-parallel
        ranks."""
        mesh = self.mesh
        held = self._held_apart(stage)
        if mesh.zero == 3:  # there they lie in the optimizer files alone
            return
        for etp in range(mesh.etp if held else 0):
            for layer, names in enumerate(by_layer(held)):
                for number, params in names.items():
                    ep = number * mesh.ep // len(names)
                    mp = file_rank(mesh, stage, ep, etp)
                    yield self._expert(layer, number, mp, etp, params)
            for ep in range(0 if self._is_split else mesh.ep):
                output = Output(expert_optimizer_name(ep, file_rank(mesh, stage, ep, etp)))
                own = self._own(mesh.rank_of(expert_place(stage, ep, etp), 0))
                output.tree = {"optimizer": self._unpartitioned(output, own)}
                yield output

    def _expert(self, layer: int, number: int, mp: int, etp: int, params: list[str]) -> Output:
        """The file of one expert, whose name has its number in the whole layer."""
        output = Output(expert_file_name(layer, number, mp))
        tree: dict[str, Any] = OrderedDict()
        for name in params:
            spec, (buffer, _) = self.manifest.by_name[name], self.manifest.first_holder(name)
            cut = tuple((axis, etp) for axis in buffer.axes)
            payload: Weight | Slot = Weight(name, cut)
            if spec.kind != "trainable":
                payload = Slot(self._number[buffer.stage, name], cut, 0, VALUE)
            key = key_in_file(name) or name_in_file(self._named(name))
            tree[key] = output.tensor(payload, spec.dtype, self._local(name))
        output.tree = tree
        return output

    def _layer(self, position: int, tp: int) -> Output | None:
        """The weights at one position of the pipeline; None where it has none."""
        layers = self.layers
        if layers is None or position not in layers.filed:
            return None
        output = Output(layer_name(position, tp))
        names = dict(zip(layers.held[position], layers.canonical[position], strict=True))
        stage = self._stage_with({*names.values()})
        own = self._own(self.mesh.sharers_at(stage, tp)[0])
        by_name = self.manifest.by_name
        tree: dict[str, Any] = OrderedDict(
            (key, self._entry(output, by_name[name], own)) for key, name in names.items()
        )
        modules = {name.removesuffix(key) for key, name in names.items() if name.endswith(key)}
        for name, value in self.run.extras.stateless.items():
            for module in modules:
                if module and name.startswith(module):
                    tree[name.removeprefix(module)] = _nothing(output, value)
        output.tree = tree
        return output

    def _stage_with(self, params: Collection[str]) -> int:
        """The first stage that holds one of some parameters."""
        holding = (b for b in self.manifest.buffers if any(m.param in params for m in b.members))
        return next((buffer.stage for buffer in holding), 0)


def run_fields(output: Output, run: RunSettings, mesh: Mesh, scheduler: Any) -> dict[str, Any]:
    """What a model file says of the run: scheduler, counters, the states of DeepSpeed's own
    helpers, sizes and config."""
    return {
        "lr_scheduler": output.adopt(scheduler),
        "data_sampler": output.adopt(run.extras.others.get("data_sampler")),
        "random_ltd": output.adopt(run.extras.others.get("random_ltd")),
        "skipped_steps": 0,
        "global_steps": 0,
        **run.extras.counters,
        "dp_world_size": mesh.partitions,
        "mp_world_size": mesh.tp * mesh.pp,
        "checkpoint_parallel_dimensions": {"pp_degree": mesh.pp, "tp_degree": mesh.tp},
        "ds_config": output.adopt(run.config),
        "ds_version": run.version,
    }


def module_states(output: Output, extras: Extras, own: OwnValues | None = None) -> dict[str, Any]:
    """What modules keep besides tensors, as entries of the weights; `own` is what a rank has
    otherwise."""
    of_rank = {} if own is None else own.buffers
    return {name: output.adopt(of_rank.get(name, value)) for name, value in extras.modules.items()}


def _nothing(output: Output, value: Any) -> Any:
    """An entry that holds nothing: None, or an empty tensor."""
    return (
        output.tensor(b"", value.storage.dtype, value.shape)
        if isinstance(value, TensorRef)
        else None
    )


def _size(shape: Ints) -> Stand:
    return Stand("torch.Size", (shape,))


def state_file(manifest: Manifest, slot: Slot) -> str:
    """The file in which DeepSpeed would keep a slot of a manifest that trains in bf16."""
    buffer, mesh = manifest.buffers[slot.buffer], manifest.mesh
    rank = mesh.rank_of((*buffer.at, *slot.cut), slot.part)
    mp = buffer.stage * mesh.tp + mesh.coord(rank).tp
    if buffer.stepped and manifest.keeper != Keeper.ZERO_0:
        return optimizer_name(mesh.partition_of(rank), mp, "bf16_")
    ep, etp = mesh.expert_place(rank)
    if buffer.stepped and buffer.axes == EXPERT_CUT:
        return expert_optimizer_name(ep, file_rank(mesh, buffer.stage, ep, etp))
    return model_name(mp, slot.part if mesh.zero == 3 else None)
