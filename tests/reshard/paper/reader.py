"""What the files of a conversion hold, read by plain torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.formats.deepspeed.target import Target
from tests.engines.canonical import join
from tests.reshard.paper import layout
from tests.reshard.paper.model import Model, position

Found = Iterator[tuple[str, str, torch.Tensor]]  # (name, state, a rank's part of the tensor)


def read(folder: Path) -> dict[str, Any]:
    return {path.name: torch.load(path, weights_only=False) for path in sorted(folder.glob("*.pt"))}


@dataclass
class Held:
    """Whole tensors and numbers by parameter."""

    full: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)
    steps: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def put(self, name: str, state: str, value: torch.Tensor) -> None:
        old = self.full.setdefault((name, state), value)
        if not same(old, value):
            self.problems.append(f"two stages disagree on {state} of {name}")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit, with the dtype and the shape."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(_raw(one), _raw(other))


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.zeros(0)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class Rank:
    """A model-parallel rank of a target, and the files in which its tensors lie."""

    trees: dict[str, Any]
    model: Model
    target: Target
    stage: int
    tp: int
    groups: layout.Groups
    shape: layout.Shapes
    out: Held

    @property
    def mesh(self) -> Mesh:
        return self.target.mesh

    @property
    def number(self) -> int:
        return self.stage * self.mesh.tp + self.tp

    @property
    def bf16_optimizer(self) -> bool:
        """DeepSpeed's wrapper of that name: flat masters of whole groups, also at stage 0."""
        at_zero_0 = self.mesh.zero == 0 and self.mesh.pp > 1
        at_zero_1 = self.mesh.zero == 1 and self.target.grad_accum_fp32
        return self.target.dtype == "bfloat16" and (at_zero_0 or at_zero_1)

    def model_file(self, number: int) -> Any:
        first = "zero_pp_rank_0_" if self.mesh.zero == 3 else ""
        return self.trees[f"{first}mp_rank_{number:02d}_model_states.pt"]

    def optimizer_files(self) -> list[Any]:
        """One for each data-parallel rank."""
        first = "bf16_" if self.target.dtype == "bfloat16" else ""
        rest = f"mp_rank_{self.number:02d}_optim_states.pt"
        return [
            self.trees[f"{first}zero_pp_rank_{d}_{rest}"]["optimizer_state_dict"]
            for d in range(self.mesh.dp)
        ]

    def elems(self, name: str) -> int:
        return math.prod(self.shape[name])

    def weight(self, name: str) -> torch.Tensor:
        """A training copy, a buffer, a frozen parameter: from the layer file, or the model file."""
        if self.mesh.pp == 1:
            return self.model_file(self.tp)["module"][name]
        at = position(name, self.model.sizes.layers)
        rest = layout.named(self.model, name, True).removeprefix("tied_modules.embed.")
        file = self.trees[f"layer_{at:02d}-model_{self.tp:02d}-model_states.pt"]
        return file[rest.removeprefix(f"{at}.")]


def held_by(trees: dict[str, Any], model: Model, target: Target) -> Held:
    """Everything that the files of a conversion to `target` say."""
    out, shape = Held(), layout.local_shapes(model, target.mesh.tp)
    for stage, groups in enumerate(layout.expected_groups(model, target)):
        local: dict[tuple[str, str], list[torch.Tensor]] = {}
        for tp in range(target.mesh.tp):
            rank = Rank(trees, model, target, stage, tp, groups, shape, out)
            for found in (_optimizer(rank), _values(rank)):
                for name, state, value in found:
                    local.setdefault((name, state), []).append(value)
        for (name, state), parts in local.items():
            out.put(name, state, join(parts, layout.cut_of(name, model.sizes.gated)))
    return out


def _optimizer(rank: Rank) -> Found:
    """What a model-parallel rank trains."""
    if rank.mesh.zero == 0 and not rank.bf16_optimizer:
        yield from _unpartitioned(rank)
        return
    files = rank.optimizer_files()
    buffers = layout.buffers_of(rank.groups, rank.shape, rank.target, rank.bf16_optimizer)
    if rank.mesh.zero:
        _check_param_shapes(rank, buffers)
    for index, (at, names) in enumerate(buffers):
        entries = _entries(rank, files, index, at, names)
        for state in ("fp32", *rank.model.states):
            flats = _flats(rank, files, entries, index, state)
            cut = _chunks if rank.mesh.zero == 3 else _views
            for name, value in cut(rank, flats, names):
                yield name, state, value


def _check_param_shapes(rank: Rank, buffers: layout.Buffers) -> None:
    pipeline = rank.mesh.pp > 1
    said = [
        [(name, tuple(size)) for name, size in one.items()]
        for one in rank.model_file(rank.number)["param_shapes"]
    ]
    want = [
        [(layout.named(rank.model, name, pipeline), rank.shape[name]) for name in names]
        for _, names in buffers
    ]
    if said != want:
        rank.out.problems.append(f"param_shapes of rank {rank.number} are {said} and not {want}")


def _entries(
    rank: Rank, files: list[Any], index: int, at: int, names: list[str]
) -> list[dict[str, Any]]:
    """The optimizer's states of a buffer on each rank; steps and settings are noted."""
    key = "base_optimizer_state" if rank.mesh.zero < 3 else "optimizer_state_dict"
    bases = [file[key] for file in files]
    entries = [base["state"].get(index, {}) for base in bases]
    steps = [float(entry["step"]) for entry in entries if "step" in entry]
    groups = [base["param_groups"][at] for base in bases]
    settings = [group if index in group["params"] else {} for group in groups]
    for name in names:
        _numbers(rank.out, name, steps, settings)
    return entries


def _flats(
    rank: Rank, files: list[Any], entries: list[dict[str, Any]], index: int, state: str
) -> list[torch.Tensor]:
    """The partitions of a flat buffer."""
    if state != "fp32":
        return [entry[state] for entry in entries]
    key = "single_partition_of_fp32_groups" if rank.mesh.zero < 3 else "fp32_flat_groups"
    return [file[key][index] for file in files]


def _chunks(
    rank: Rank, flats: list[torch.Tensor], names: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """ZeRO-3: each parameter is cut into equal chunks, one on each rank."""
    offset = 0
    for name in names:
        chunk = layout.chunk_elems(rank.shape[name], rank.target)
        whole = torch.cat([flat[offset : offset + chunk] for flat in flats])
        yield name, _unpadded(rank.out, whole, rank.elems(name), name).reshape(rank.shape[name])
        offset += chunk


def _views(
    rank: Rank, flats: list[torch.Tensor], names: list[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """ZeRO-1 and 2: parameters lie one behind the other in a flat buffer, which is cut into
    partitions."""
    align = 1
    if rank.target.alignment and not rank.bf16_optimizer:
        align = 4 if rank.target.dtype == "float32" else 8
    starts, end = [], 0
    for name in names:
        starts.append(-(-end // align) * align)
        end = starts[-1] + rank.elems(name)
    size = -(-end // (2 * rank.mesh.dp)) * 2
    whole = torch.cat([torch.cat([flat, torch.zeros(size - len(flat))]) for flat in flats])
    _unpadded(rank.out, whole, end, names[-1])
    for name, start in zip(names, starts, strict=True):
        yield name, whole[start : start + rank.elems(name)].reshape(rank.shape[name])


def _unpadded(out: Held, flat: torch.Tensor, size: int, name: str) -> torch.Tensor:
    if flat[size:].any():
        out.problems.append(f"the padding behind {name} is not zero")
    return flat[:size]


def _numbers(out: Held, name: str, steps: list[float], settings: list[dict[str, Any]]) -> None:
    plain = [{k: v for k, v in one.items() if k != "params"} for one in settings]
    for known, every in ((out.steps, steps), (out.settings, plain)):
        for value in every:
            if known.setdefault(name, value) != value:
                out.problems.append(f"files disagree on {name}: {known[name]} and {value}")


def _unpartitioned(rank: Rank) -> Found:
    """Stage 0: the optimizer's own state, in the model file."""
    kept = rank.model_file(rank.number)["optimizer"]
    fp32 = rank.target.dtype == "float32"
    base = kept if fp32 else kept["optimizer_state_dict"]
    flat = rank.model.optimizer == "deepspeed.FusedAdam" and not fp32
    index = 0
    for at, (_, names) in enumerate(rank.groups):
        sizes = [rank.elems(name) for name in names]
        for number, name in enumerate(names):
            entry = base["state"].get(at if flat else index, {})
            steps = [float(entry["step"])] if "step" in entry else []
            _numbers(rank.out, name, steps, [base["param_groups"][at]])
            for state in ("fp32", *rank.model.states):
                if flat:
                    found = kept["fp32_groups_flat"][at] if state == "fp32" else entry[state]
                    yield name, state, found.split(sizes)[number].reshape(rank.shape[name])
                elif state != "fp32":
                    yield name, state, entry[state]
                elif fp32:
                    yield name, state, rank.weight(name)
                else:
                    yield name, state, kept["fp32_groups"][at][number]
            index += 1


def _values(rank: Rank) -> Found:
    """Training copies, and what is not trained; at ZeRO-2 files hold frozen parameters twice."""
    zero = rank.mesh.zero
    for name in rank.model.shapes if rank.stage == 0 else ():
        kind = rank.model.kinds[name]
        if zero < 3 or kind == "buffer":
            yield name, "value", rank.weight(name)
        if zero > 1 and kind == "frozen":
            yield _frozen(rank, name)


def _frozen(rank: Rank, name: str) -> tuple[str, str, torch.Tensor]:
    file = f"mp_rank_{rank.tp:02d}_model_states.pt"
    if rank.mesh.zero < 3:
        return name, "second", rank.trees[file]["frozen_param_fragments"][name]
    files = [rank.trees[f"zero_pp_rank_{d}_{file}"] for d in range(rank.mesh.dp)]
    whole = torch.cat([file["frozen_param_fragments"][name] for file in files])
    return name, "value", whole[: rank.elems(name)].reshape(rank.shape[name])
