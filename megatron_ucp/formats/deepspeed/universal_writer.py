"""DeepSpeed's universal folder for a manifest: one file per parameter and state, in one form that
stages 1, 2 and 3 load.

Stock's converter writes two forms, each for some stages. Where its loaders look (DeepSpeed 0.19.8):
`load_hp_checkpoint_state_from_checkpoint_dir` (stages 1 and 2) wants shaped atoms in dicts,
`step.pt` beside them and `mp_rank_00_model_states.pt`;
`load_hp_checkpoint_state_from_checkpoint_dir_stage3` takes the same atoms, the step from
`optimizer_state.pt` and `zero_pp_rank_0_mp_rank_00_model_states.pt`.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ucp.core.layout import ShardNC
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.core.values import Stand
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.deepspeed.native_optimizer import group_tree, scalar_tensor, scaler_of
from megatron_ucp.formats.deepspeed.native_structure import RunSettings
from megatron_ucp.formats.deepspeed.native_writer import module_states, run_fields
from megatron_ucp.formats.deepspeed.stock_info import fused, sub_shape
from megatron_ucp.formats.pt.output import Output

UNIVERSAL_VERSION = 0.4
STEP, ATOMS, GLOBAL = "step", "zero", "optimizer_state.pt"
MODEL_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_SUB_PARAMS = "deepspeed.checkpoint.universal_checkpoint.SubparamShape"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,250}")


class UniversalWriter:
    """The files of a manifest whose every buffer is one whole parameter (tp=1, no partitions).
    Groups are those of an optimizer without pipeline. `pipe` gives other names (of a pipeline) to
    parameters. Raises UnsupportedError for a name that can't be a folder's."""

    def __init__(self, manifest: Manifest, run: RunSettings, pipe: Mapping[str, str]) -> None:
        self.manifest, self.run = manifest, run
        self._names = {spec.name: pipe.get(spec.name, spec.name) for spec in manifest.params}
        for name in self._names.values():
            if not _NAME.fullmatch(name):
                raise UnsupportedError(
                    "a parameter's name can't be the name of a folder",
                    parameter=name,
                    expected="letters, digits, dots, _ and -",
                    fix="convert to native",
                )

    def outputs(self) -> Iterator[Output]:
        """Every file."""
        for name in MODEL_FILES:
            yield self._model(name)
        yield self._global()
        for number, buffer in enumerate(self.manifest.buffers):
            spec = self.manifest.by_name[buffer.members[0].param]
            folder = f"{ATOMS}/{self._names[spec.name]}"
            for state, dtype in buffer.states:
                output = Output(f"{folder}/{MASTER if state == VALUE else state}.pt")
                output.tree = {
                    **_cut(spec),
                    "param": output.tensor(Slot(number, (), 0, state), dtype, spec.shape),
                }
                yield output
            scalars = buffer.members[0].scalars
            if STEP in scalars:
                output = Output(f"{folder}/{STEP}.pt")
                output.tree = self._step(output, scalars[STEP])
                yield output

    def _step(self, output: Output, step: float) -> Any:
        return int(step) if self.run.int_steps else scalar_tensor(output, step)

    def _groups(self) -> list[tuple[ParamGroup, list[str]]]:
        """Each parameter group, and the names in its order."""
        out: list[list[str]] = [[] for _ in self.manifest.groups]
        for buffer in self.manifest.buffers:
            for member in buffer.members:
                if member.group is not None:
                    out[member.group].append(member.param)
        return list(zip(self.manifest.groups, out, strict=True))

    def _of_kind(self, kind: str) -> list[ParamSpec]:
        return [spec for spec in self.manifest.params if spec.kind == kind]

    def _model(self, name: str) -> Output:
        """What a load takes besides atoms: counters, scheduler, client state, and which parameters
        belong together."""
        output, run, extras = Output(name), self.run, self.run.extras
        shared = {alias: tie.canonical for tie in self.manifest.ties for alias in tie.aliases}
        frozen = [spec.name for spec in self._of_kind("frozen")]
        output.tree = {
            "module": OrderedDict(module_states(output, extras)),
            "optimizer": None,
            "buffer_names": [self._names[spec.name] for spec in self._of_kind("buffer")],
            "param_shapes": [self._shapes(names) for _, names in self._groups()],
            "frozen_param_shapes": self._shapes(frozen),
            "frozen_param_fragments": None,
            "shared_params": shared,
            **run_fields(output, run, Mesh(), run.scheduler(0)),
            "universal_checkpoint_info": {"universal_checkpoint_version": UNIVERSAL_VERSION},
            **{key: output.adopt(value) for key, value in extras.client_state.items()},
        }
        return output

    def _shapes(self, names: list[str]) -> dict[str, Stand]:
        """Whole shapes under the names of the folder."""
        by_name = self.manifest.by_name
        return OrderedDict(
            (self._names[name], Stand("torch.Size", (by_name[name].shape,))) for name in names
        )

    def _global(self) -> Output:
        """What is not per parameter, at the places where each stage's loader looks."""
        output = Output(f"{ATOMS}/{GLOBAL}")
        scaler, dynamic = scaler_of(self.run)
        members = [member for buffer in self.manifest.buffers for member in buffer.members]
        steps = [member.scalars[STEP] for member in members if STEP in member.scalars]
        groups = [group_tree(output, group, [at]) for at, (group, _) in enumerate(self._groups())]
        state = {0: {STEP: self._step(output, steps[0])}} if steps else {}
        output.tree = {
            "loss_scaler": scaler,
            "dynamic_loss_scale": dynamic,
            "overflow": False,
            "clip_grad": self.run.clip_grad,
            "param_groups": groups,
            "partition_count": 1,
            "ds_version": self.run.version,
            "zero_stage": Stand("deepspeed.runtime.zero.config.ZeroStageEnum", (1,)),
            "optimizer_state_dict": {"state": state, "param_groups": groups},
        }
        return output


def _cut(spec: ParamSpec) -> dict[str, Any]:
    """How stock cuts the atom for a tensor-parallel target: along which dim, and which
    sub-parameters each for itself."""
    if isinstance(spec.layout, ShardNC):
        if len(set(spec.layout.parts)) == 1 and spec.layout.dim == 0:
            return {"cat_dim": 0, "param_n_sub_params": len(spec.layout.parts)}
        said = fused([re.escape(spec.name)], sub_shape(spec.layout, spec.shape))
        return {"cat_dim": spec.layout.dim, "sub_param_shape": Stand(_SUB_PARAMS, (), said)}
    cuts = spec.layout.cuts()
    return {"cat_dim": cuts[0].dim if cuts else 0}
