"""What a converted checkpoint is for: a mesh, and what a mesh alone does not say.

Formulas of the buffers: see `formats/deepspeed/buffers`. Which optimizer wrapper DeepSpeed chooses:
`_do_optimizer_sanity_check` and `_configure_zero_optimizer` of DeepSpeed 0.19.8's engine.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.core import flat
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import MASTER, Keeper, dtype_name
from megatron_ucp.errors import UsageError
from megatron_ucp.formats.deepspeed.buffers import (
    GroupOnRank,
    elems_of,
    parameter_alignment,
    round_robin,
    sub_groups,
)
from megatron_ucp.formats.deepspeed.config import SECTIONS, DeepSpeedConfig
from megatron_ucp.formats.deepspeed.optimizers import uncut_states

TRAINING_DTYPES = ("float32", "bfloat16", "float16")
# DeepSpeed keeps its states in one flat buffer per group even without ZeRO
FLAT_AT_STAGE_0 = "deepspeed.FusedAdam"
SUB_GROUP_SIZE = 1_000_000_000  # DeepSpeed's default, in elements of one rank
_ZERO = {
    "sub_group_size": "sub_group_size",
    "alignment": "parameter_alignment",
    "round_robin": "round_robin_gradients",
}


@dataclass(frozen=True)
class Target:
    """The job that a conversion is for. What is None is as in the source.

    Args:
        mesh: Its mesh, or a string such as "tp=2,dp=4".
        dtype: That of the training copies, such as "bf16" or `torch.bfloat16`.
        optimizer: The class of its optimizer, such as "torch.AdamW".
        groups: The names in each parameter group, in the order of the optimizer.
        stages: How the layers of a pipeline are divided: "uniform", "parameters", "layers", or
            their numbers.
        sub_group_size: That of ZeRO-3, in elements of one rank.
        alignment: DeepSpeed's `zero_optimization.parameter_alignment`.
        round_robin: DeepSpeed's `round_robin_gradients`.
        grad_accum_fp32: DeepSpeed's `data_types.grad_accum_dtype: fp32`.
        offloaded: DeepSpeed's `offload_optimizer.device: cpu`, which moves nothing but Muon's
            momentum.
        pipeline: Whether its model is a PipelineModule on one stage too. Default: as the arguments
            say that Megatron-DeepSpeed saved; else with several stages alone.

    Raises:
        UsageError: For a job that DeepSpeed does not run, or that nothing is converted for.

    Example:
        >>> import megatron_ucp as ucp
        >>> ucp.Target(ucp.Mesh(dp=4, zero=3), dtype="bf16").dtype
        'bfloat16'
    """

    mesh: Mesh
    dtype: str | None = None
    optimizer: str | None = None
    groups: tuple[tuple[str, ...], ...] | None = None
    stages: str | tuple[int, ...] | None = None
    sub_group_size: int | None = None
    alignment: bool | None = None
    round_robin: bool | None = None
    grad_accum_fp32: bool | None = None
    offloaded: bool | None = None
    pipeline: bool | None = None

    def __post_init__(self) -> None:
        if isinstance(self.mesh, str):
            object.__setattr__(self, "mesh", Mesh.parse(self.mesh))
        if not isinstance(self.mesh, Mesh):
            raise UsageError(
                "a target is for a mesh",
                expected='a text such as "tp=2,dp=4,zero=1", or ucp.Mesh(tp=2, dp=4, zero=1)',
                found=repr(self.mesh)[:200],
                fix="give such a mesh",
            )
        self.mesh.require_possible()
        if self.dtype is not None:
            object.__setattr__(self, "dtype", dtype_name(self.dtype))
        _check_words(self)
        size = self.sub_group_size
        if self.dtype not in (None, *TRAINING_DTYPES) or (
            size is not None and (type(size) is not int or size < 1)
        ):
            raise UsageError(
                "this is no target",
                expected=f"dtype {' or '.join(TRAINING_DTYPES)}, sub_group_size of at least 1",
                found=f"{self.dtype}, {size!r}",
                fix="correct the dtype (--dtype) or the size (--sub-group-size); Python: "
                "Target(dtype=, sub_group_size=)",
            )
        if (self.mesh.pp > 1 or self.pipeline) and self.mesh.zero > 1:
            raise UsageError(
                "DeepSpeed's pipeline takes ZeRO 0 and 1 only",
                expected="zero=0 or zero=1",
                found=self.mesh,
                fix="name the ZeRO stage of the job: add zero=1 to the mesh; or leave --pipeline "
                "(Python: pipeline=) out",
            )
        if self.mesh.cp * self.mesh.vpp > 1:
            raise UsageError(
                "DeepSpeed has no context parallelism and no virtual stages: it could not train on "
                "this mesh",
                expected="tp, pp, dp, sp, ep, etp and zero",
                found=self.mesh,
                fix="leave cp and vpp out. A run of Megatron-LM with them loads files of every "
                "mesh as they are",
            )

    @classmethod
    def of(cls, mesh: "Target | Mesh | str", **more: Any) -> "Target":
        """A target from what people write: a mesh, or a string such as "tp=2,dp=4". `more` are
        other fields. Raises UsageError."""
        if isinstance(mesh, Target):
            return mesh
        return cls(Mesh.parse(mesh) if isinstance(mesh, str) else mesh, **more)

    def with_zero_of(self, source: Mesh) -> "Target":
        """With a ZeRO stage: the source's, where nobody named one. Raises UsageError."""
        if self.mesh.says_zero:
            return self
        return replace(self, mesh=replace(self.mesh, zero=source.zero))

    def completed(self, config: Mapping[str, Any]) -> "Target":
        """What is None, as a DeepSpeed config says it; its ZeRO stage does not count. Raises
        UsageError."""
        known = DeepSpeedConfig(config)
        settings = known.zero
        size = settings.get("sub_group_size", SUB_GROUP_SIZE)
        if not isinstance(size, int | float) or size < 1:
            raise UsageError(
                "sub_group_size is a number of elements",
                expected="at least 1",
                found=size,
                fix="correct sub_group_size in the section zero_optimization of the "
                "DeepSpeed config",
            )
        offloaded = known.is_offloaded  # no BF16_Optimizer then
        said: dict[str, Any] = {
            "dtype": self.dtype or _dtype(known),
            "sub_group_size": int(size),
            "alignment": bool(settings.get("parameter_alignment")),
            "round_robin": bool(settings.get("round_robin_gradients")),
            "grad_accum_fp32": known.grad_accum_dtype in ("fp32", "float32") and not offloaded,
            "offloaded": offloaded,
        }
        return replace(
            self, **{key: value for key, value in said.items() if getattr(self, key) is None}
        )

    def keeper(self, dtype: str) -> Keeper:
        """Which wrapper holds the optimizer: "zero0", "zero12", "bf16" (BF16_Optimizer) or
        "zero3"."""
        stage = self.mesh.zero
        if stage == 3:
            return Keeper.ZERO_3
        staged = stage == 0 and (self.mesh.pp > 1 or self.pipeline)
        if dtype == "bfloat16" and (staged or (stage == 1 and self.grad_accum_fp32)):
            return Keeper.BF16
        return Keeper.ZERO_0 if stage == 0 else Keeper.ZERO_1_OR_2

    def buffers(self, group: GroupOnRank, keeper: Keeper, dtype: str) -> Iterator[FlatBuffer]:
        """The flat buffers of one parameter group under a wrapper; `dtype` is that of training."""
        tensors = group.tensors
        if keeper == Keeper.ZERO_3:
            sizes, most = [elems_of(t) for t in tensors], self.sub_group_size or SUB_GROUP_SIZE
            for chosen in sub_groups(sizes, group.partitions, most):
                yield group.each_cut([tensors[i] for i in chosen])
        elif keeper != Keeper.ZERO_0:
            yield self._flattened(group, keeper, dtype)
        elif group.optimizer == FLAT_AT_STAGE_0 and dtype != "float32":
            yield group.not_cut(tensors)
        else:
            yield from (group.alone(name, size) for name, size in group.sizes)

    def _flattened(self, group: GroupOnRank, keeper: Keeper, dtype: str) -> FlatBuffer:
        """One buffer for the whole group."""
        tensors, alignment = group.tensors, 1
        if keeper == Keeper.ZERO_1_OR_2 and self.round_robin and group.partitions > 1:
            tensors = [tensors[i] for i in round_robin(len(tensors), group.partitions)]
        if keeper == Keeper.ZERO_1_OR_2 and self.alignment:
            alignment = parameter_alignment({"float32": 4}.get(dtype, 2))
        starts, used = flat.aligned_starts([elems_of(tensor) for tensor in tensors], alignment)
        uncut = uncut_states(group.settings, keeper, bool(self.offloaded))
        return group.cut_as_one(tensors, starts, used, uncut)


def _check_words(target: Target) -> None:
    """Raises UsageError for groups, stages or an optimizer of other types than they have."""
    groups = target.groups
    stages = target.stages
    is_list = isinstance(groups, list | tuple) and all(isinstance(g, list | tuple) for g in groups)
    if groups is not None and not (
        is_list and all(isinstance(name, str) for group in groups for name in group)
    ):
        raise UsageError(
            "groups are lists of names of parameters",
            expected='(("a.weight",), ("a.bias",))',
            found=repr(groups)[:200],
            fix="give one list for each group (--groups; Python: Target(groups=))",
        )
    numbers = isinstance(stages, list | tuple) and all(type(count) is int for count in stages)
    if not (stages is None or isinstance(stages, str) or numbers):
        raise UsageError(
            "this says no division of a pipeline",
            expected="uniform, parameters, layers, or a number of layers for each stage",
            found=repr(stages)[:200],
            fix="give one of these (--stages; Python: Target(stages=))",
        )
    if not isinstance(target.optimizer, str | None):
        raise UsageError(
            "an optimizer is named by its class",
            expected='"torch.AdamW", or none to keep the source\'s',
            found=repr(target.optimizer)[:200],
            fix="give the name as text (--optimizer; Python: Target(optimizer=))",
        )


def config_for(target: Target, config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A DeepSpeed config changed to what the target is, so that the files say how they are laid
    out; what else it says stays."""
    out, said = dict(config), Target(target.mesh, dtype).completed(config)
    known = DeepSpeedConfig(config)
    settings = {**known.zero, "stage": target.mesh.zero}
    for name, key in _ZERO.items():
        if (value := getattr(target, name)) not in (None, getattr(said, name)):
            settings[key] = value
    if target.offloaded not in (None, said.offloaded):
        settings["offload_optimizer"] = {"device": "cpu" if target.offloaded else "none"}
    out["zero_optimization"] = settings
    if target.grad_accum_fp32 not in (None, said.grad_accum_fp32):
        wanted = "fp32" if target.grad_accum_fp32 else None
        out["data_types"] = {**known.section("data_types"), "grad_accum_dtype": wanted}
    for key, trained in SECTIONS.items():
        if key in out or (trained == dtype and key != "bfloat16"):
            out[key] = {**known.section(key), "enabled": trained == dtype}
    return out


def with_states(states: Mapping[str, str], master: str) -> tuple[tuple[str, str], ...]:
    """(name, dtype) with the masters first."""
    return ((MASTER, master), *((name, dtype) for name, dtype in states.items()))


def _dtype(config: DeepSpeedConfig) -> str:
    """Raises UsageError for a value that somebody else fills in later, such as "auto"."""
    for key, dtype in SECTIONS.items():
        enabled = config.section(key).get("enabled", False)
        if not isinstance(enabled, bool | int):
            raise UsageError(
                "the config leaves the training dtype open",
                expected=f"{key}.enabled: true or false",
                found=enabled,
                fix="write the value that the job will have, or give the dtype (--dtype; Python: "
                "Target(dtype=))",
            )
        if enabled:
            return dtype
    return "float32"
