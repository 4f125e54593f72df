"""What model files say of layers that DeepSpeed's AutoEP divided: the experts of a rank are slices
of three stacked parameters.

Keys: `_save_moe_checkpoint` of DeepSpeed 0.19.8, which is also what gives the parameters their
names in expert files.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import (
    ExpertName,
    expert_name,
    experts_of_rank,
    refuse_slices,
    slices_of,
)
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import DamagedFileError, UnsupportedError
from megatron_ucp.formats import expect
from megatron_ucp.formats.param_groups import number

_STACKS = ("w1", "w2", "w3")  # of each mixture: gate, down, up
LAYERS = ("ds_autoep_layers", "autoep_layers")
FOLDED = "folding"
_IN_FILE = re.compile(r"(?P<stack>.+)\.(?P<number>\d{1,6})")


def stacks_in(experts: str) -> list[str]:
    """The stacked parameters of a mixture, by the name of the module with the experts."""
    return [f"{experts}.{weight}" for weight in _STACKS]


@dataclass(frozen=True)
class AutoEP:
    """Stacked parameters with the experts of their whole layers, divided among `ranks`: rank i has
    the i-th run of them. Nothing is stacked in a model without such layers."""

    ranks: int = 1
    experts: Mapping[str, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.experts)

    def name_in_module(self, key: str) -> str:
        """What the module would call a tensor of an expert file, with the expert's own number."""
        found = _IN_FILE.fullmatch(key)
        if found is None or found["stack"] not in self.experts:
            return key
        return ExpertName(found["stack"], int(found["number"]), "").name

    def in_slices(self, named: Mapping[str, Ints], file: str) -> dict[str, Ints]:
        """Names and shapes on a rank, with slices, numbered from 0, in the place of each stacked
        parameter. Raises DamagedFileError where the shape is not that of the rank's experts."""
        refuse_slices(named, file)
        out: dict[str, Ints] = {}
        for name, shape in named.items():
            if name not in self.experts:
                out[name] = shape
                continue
            count = self.experts[name] // self.ranks
            if not shape or shape[0] != count:
                raise DamagedFileError(
                    "a stacked parameter has other experts than the layer has on a rank",
                    file=file,
                    parameter=name,
                    expected=f"{count} experts",
                    found=f"shape {shape}",
                )
            out |= dict.fromkeys(slices_of(name, count), tuple(shape[1:]))
        return out


def autoep_of(meta: Mapping[str, Any], file: str) -> AutoEP:
    """What a model file says. Raises UnsupportedError for experts that are divided otherwise than
    in equal runs, DamagedFileError for what says nothing."""
    layers = next((meta[key] for key in LAYERS if meta.get(key)), [])
    if not layers:
        return AutoEP()
    if FOLDED in meta:
        raise UnsupportedError(
            "AutoEP was folded with AutoTP in this run, which is not supported",
            file=file,
            found=FOLDED,
            fix="load it with DeepSpeed at the same sizes",
        )
    ranks: set[int] = set()
    experts: dict[str, int] = {}
    for layer in layers if isinstance(layers, list) else [None]:
        size, count, prefix = _said(layer, file)
        _check_placement(layer, size, count, file)
        ranks.add(size)
        experts |= dict.fromkeys(stacks_in(prefix), count)
    if len(ranks) > 1:
        raise UnsupportedError(
            "the layers' experts are divided among different numbers of ranks",
            file=file,
            expected="one expert-parallel size for all layers",
            found=", ".join(map(str, sorted(ranks))),
            fix="load it with DeepSpeed on the mesh that wrote it, and save it with one "
            "expert-parallel size",
        )
    return AutoEP(ranks.pop(), experts)


def _said(layer: Any, file: str) -> tuple[int, int, str]:
    """Ranks, experts and the name of the module with the experts. Raises DamagedFileError."""
    said = expect.section(layer)
    size, count, prefix = (said.get(k) for k in ("ep_size", "num_experts", "expert_key_prefix"))
    if _is_count(size) and _is_count(count) and isinstance(prefix, str):
        return size, count, prefix
    raise DamagedFileError(
        "the model file does not say how AutoEP divided its experts",
        file=file,
        expected="ep_size, num_experts and expert_key_prefix of each layer",
        found=repr(number(size))[:80],
    )


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 1 <= value <= 2**24


def _check_placement(layer: Any, ranks: int, count: int, file: str) -> None:
    """Raises UnsupportedError unless rank i has the i-th run of the experts."""
    want = [list(experts_of_rank(rank, count, ranks)) for rank in range(ranks)]
    said = expect.section(layer, "expert_placement").get("ranks")
    found = want if layer.get("expert_placement") is None else _experts_of_ranks(said)
    if count % ranks or found != want:
        raise UnsupportedError(
            "AutoEP divided the experts otherwise than in equal runs, which is not supported",
            file=file,
            parameter=str(layer.get("expert_key_prefix")),
            expected=f"{count} experts in {ranks} runs, rank by rank",
            found=str(found)[:120],
            fix="load it with DeepSpeed on the mesh that wrote it, and save it with "
            "experts in equal runs",
        )


def _experts_of_ranks(said: Any) -> Any:
    """The experts of each rank, in the order of the ranks."""
    entries: Iterable[Any] = said if isinstance(said, list) else []
    known = {one.get("rank"): one.get("experts") for one in entries if isinstance(one, dict)}
    return [known.get(rank) for rank in range(len(known))]


def group_name(ranks: int) -> str:
    """What DeepSpeed calls the groups of ranks among which experts are divided."""
    return f"ep_size_{ranks}"


def key_in_file(name: str) -> str | None:
    """What an expert file calls a slice of a stacked parameter; None for anything else."""
    part = expert_name(name)
    return f"{part.layer}.{part.number}" if part is not None and part.is_slice else None


def layers_tree(names: Iterable[str], mesh: Mesh, rank: int) -> list[dict[str, Any]] | None:
    """What a rank's model file says of its stacked experts; None where there are none. `names` are
    those of all parameters."""
    counts: dict[str, int] = {}
    for part in filter(None, map(expert_name, names)):
        if part.is_slice:
            counts[part.mixture] = max(counts.get(part.mixture, 0), part.number + 1)
    ep, _ = mesh.expert_place(rank)
    copies = mesh.expert_data_group(rank)
    out: list[dict[str, Any]] = []
    for layer, (mixture, count) in enumerate(counts.items()):
        runs = [list(experts_of_rank(rank, count, mesh.ep)) for rank in range(mesh.ep)]
        out.append(
            {
                "moe_layer_id": layer,
                "module_path": mixture.removesuffix("experts").removesuffix("."),
                "num_experts": count,
                "num_local_experts": len(runs[ep]),
                "ep_size": mesh.ep,
                "expert_placement": {
                    "version": 1,
                    "num_experts": count,
                    "ep_size": mesh.ep,
                    "ranks": [{"rank": r, "experts": run} for r, run in enumerate(runs)],
                },
                "expert_key_prefix": mixture,
                "checkpoint_format": "zero3_partitioned" if mesh.zero == 3 else "per_expert_files",
                "checkpoint_format_version": 1 if mesh.zero == 3 else None,
                "ep_group_name": group_name(mesh.ep),
                "ep_rank": ep,
                "expert_data_parallel_rank": copies.index(rank),
                "expert_data_parallel_world_size": len(copies),
                "global_expert_start": runs[ep][0],
                "global_expert_end": runs[ep][-1] + 1,
            }
        )
    return out or None
