"""What a converted checkpoint is for: a mesh, and what a mesh alone does not say.

Formulas of the buffers: see `core/zero`. Which optimizer wrapper DeepSpeed chooses:
`_do_optimizer_sanity_check` and `_configure_zero_optimizer` of DeepSpeed 0.19.8's engine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from megatron_ucp.core import flat
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import UsageError

DTYPES = ("float32", "bfloat16", "float16")
# DeepSpeed keeps its states in one flat buffer per group even without ZeRO
FLAT_AT_STAGE_0 = "deepspeed.FusedAdam"
SUB_GROUP_SIZE = 1_000_000_000  # DeepSpeed's default, in elements of one rank
_ZERO = {
    "sub_group_size": "sub_group_size",
    "alignment": "parameter_alignment",
    "round_robin": "round_robin_gradients",
}
_SECTIONS = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Target:
    """`dtype` is that of the training copies, `optimizer` the class ("torch.AdamW"), `groups` the
    names in each parameter group in the order of the optimizer, `stages` how the pipeline's layers
    are divided (see `Layers.stages`). The other fields are DeepSpeed's settings: `sub_group_size`
    in elements of one rank, `alignment` is `zero_optimization.parameter_alignment`, `round_robin`
    is `round_robin_gradients`, `grad_accum_fp32` is `data_types.grad_accum_dtype: fp32`. What is
    None is as in the source.
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

    def __post_init__(self) -> None:
        if self.dtype not in (None, *DTYPES) or (
            self.sub_group_size is not None and self.sub_group_size < 1
        ):
            raise UsageError(
                "this is no target",
                expected=f"dtype {' or '.join(DTYPES)}, sub_group_size of at least 1",
                found=f"{self.dtype}, {self.sub_group_size}",
            )
        if self.mesh.pp > 1 and self.mesh.zero > 1:
            raise UsageError(
                "DeepSpeed's pipeline takes ZeRO 0 and 1 only",
                expected="zero=0 or zero=1",
                found=self.mesh,
            )
        if self.mesh.cp * self.mesh.vpp * self.mesh.ep * self.mesh.etp > 1:
            raise UsageError(
                "this axis is not converted", expected="tp, pp, dp, sp and zero", found=self.mesh
            )

    def completed(self, config: Mapping[str, Any]) -> "Target":
        """What is None, as a DeepSpeed config says it; its ZeRO stage does not count. Raises
        UsageError."""
        settings = _section(config, "zero_optimization")
        size: Any = settings.get("sub_group_size", SUB_GROUP_SIZE)
        if not isinstance(size, int | float) or size < 1:
            raise UsageError(
                "sub_group_size is a number of elements", expected="at least 1", found=size
            )
        offloaded = (
            _section(settings, "offload_optimizer").get("device") == "cpu"
        )  # no BF16_Optimizer then
        said: dict[str, Any] = {
            "dtype": self.dtype or _dtype(config),
            "sub_group_size": int(size),
            "alignment": bool(settings.get("parameter_alignment")),
            "round_robin": bool(settings.get("round_robin_gradients")),
            "grad_accum_fp32": _section(config, "data_types").get("grad_accum_dtype")
            in ("fp32", "float32")
            and not offloaded,
        }
        return replace(
            self, **{key: value for key, value in said.items() if getattr(self, key) is None}
        )

    def engine(self, dtype: str) -> str:
        """Which wrapper holds the optimizer: "zero0", "zero12", "bf16" (BF16_Optimizer) or
        "zero3"."""
        stage = self.mesh.zero
        if stage == 3:
            return "zero3"
        if dtype == "bfloat16" and (
            (stage == 0 and self.mesh.pp > 1) or (stage == 1 and self.grad_accum_fp32)
        ):
            return "bf16"
        return "zero0" if stage == 0 else "zero12"

    def buffers(
        self,
        engine: str,
        dtype: str,
        optimizer: str,
        group: Sequence[tuple[str, int]],
        number: int,
        states: Sequence[tuple[str, str]],
    ) -> Iterator[FlatBuffer]:
        """The flat buffers of one parameter group: `group` has names and rank-local elements in the
        optimizer's order, `states` are (name, dtype) with the masters first."""
        parts = self.mesh.partitions
        kept = tuple(states)
        if engine == "zero3":
            sizes = [size for _, size in group]
            for chosen in flat.sub_groups(sizes, parts, self.sub_group_size or SUB_GROUP_SIZE):
                starts, used = flat.aligned_starts([-(-sizes[i] // parts) for i in chosen])
                members = tuple(
                    Member(group[i][0], start, sizes[i])
                    for i, start in zip(chosen, starts, strict=True)
                )
                yield FlatBuffer(members, used, parts, "each", kept, number)
        elif engine == "zero0" and not (optimizer == FLAT_AT_STAGE_0 and dtype != "float32"):
            for name, size in group:
                yield FlatBuffer((Member(name, 0, size),), size, 1, "whole", kept, number)
        else:
            if engine == "zero12" and self.round_robin and parts > 1:
                group = [group[i] for i in flat.round_robin(len(group), parts)]
            alignment = (
                flat.parameter_alignment({"float32": 4}.get(dtype, 2))
                if engine == "zero12" and self.alignment
                else 1
            )
            starts, used = flat.aligned_starts([size for _, size in group], alignment)
            members = tuple(
                Member(name, start, size) for (name, size), start in zip(group, starts, strict=True)
            )
            if engine == "zero0":
                yield FlatBuffer(members, used, 1, "whole", kept, number)
            else:
                yield FlatBuffer(
                    members, flat.whole_length(used, parts), parts, "whole", kept, number
                )


def config_for(target: Target, config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """A DeepSpeed config changed to what the target is, so that the files say how they are laid
    out; what else it says stays."""
    out, said = dict(config), Target(target.mesh, dtype).completed(config)
    changed = {
        key: value
        for name, key in _ZERO.items()
        if (value := getattr(target, name)) not in (None, getattr(said, name))
    }
    out["zero_optimization"] = {
        **_section(config, "zero_optimization"),
        **changed,
        "stage": target.mesh.zero,
    }
    if target.grad_accum_fp32 not in (None, said.grad_accum_fp32):
        out["data_types"] = {
            **_section(config, "data_types"),
            "grad_accum_dtype": "fp32" if target.grad_accum_fp32 else None,
        }
    for key in _SECTIONS:
        if key in out or _SECTIONS[key] == dtype and key != "bfloat16":
            out[key] = {**_section(config, key), "enabled": _SECTIONS[key] == dtype}
    return out


def with_states(states: Mapping[str, str], master: str) -> tuple[tuple[str, str], ...]:
    """(name, dtype) with the masters first."""
    return ((MASTER, master), *((name, dtype) for name, dtype in states.items()))


def _dtype(config: Mapping[str, Any]) -> str:
    """Raises UsageError for a value that somebody else fills in later, such as "auto"."""
    for key, dtype in _SECTIONS.items():
        enabled = _section(config, key).get("enabled", False)
        if not isinstance(enabled, bool | int):
            raise UsageError(
                "the config leaves the training dtype open",
                expected=f"{key}.enabled: true or false",
                found=enabled,
                fix="write the value that the job will have, or give the dtype (--dtype)",
            )
        if enabled:
            return dtype
    return "float32"


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}
