"""Random models as checkpoints of every kind without an engine, and what their files hold, put
together by plain torch.

The reader here shares no code with the package: formulas are those of DeepSpeed's documentation of
its own buffers, names and cuts those of megatron-core. The first checkpoint of a model is written
by the package's writer on one rank, where nothing is cut; everything else is a conversion.
"""

import math
import random
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.layout import Replicate
from megatron_ucp.core.manifest import Manifest, ParamSpec
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import MASTER, VALUE
from megatron_ucp.families import find_family
from megatron_ucp.families.base import Sizes
from megatron_ucp.formats import durable
from megatron_ucp.formats.deepspeed.native import OWN_KEYS
from megatron_ucp.formats.deepspeed.native_writer import NativeWriter, Run
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.pt.output import Output, Weight
from megatron_ucp.formats.pt.writer import write_pt
from megatron_ucp.reshard.execute import bytes_of
from megatron_ucp.reshard.target import target_manifest
from tests.engines.canonical import join, provenance

SHORT = {"bfloat16": "bf16", "float16": "fp16"}
# (class, element-wise states, has a step); the last one is a run before its first step
OPTIMIZERS = [
    ("torch.AdamW", ("exp_avg", "exp_avg_sq"), True),
    ("torch.AdamW", ("exp_avg", "exp_avg_sq"), True),
    ("deepspeed.FusedAdam", ("exp_avg", "exp_avg_sq"), True),
    ("torch.SGD", ("momentum_buffer",), False),
    ("torch.AdamW", (), False),
]
VALUES = {
    "calls": ((), "int64"),
    "mask": ((3, 2), "bool"),
    "none": ((0, 3), "float32"),
    "table": ((5,), "float32"),
    "turns": ((3,), "complex64"),
    "half": ((2, 2), "bfloat16"),
    "bytes": ((7,), "uint8"),
}


@dataclass(frozen=True)
class Model:
    """`kinds` of each parameter; `groups` have (settings, step, names in the optimizer's order)."""

    family: str
    sizes: Sizes
    dtype: str
    optimizer: str
    states: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    kinds: dict[str, str]
    dtypes: dict[str, str]
    groups: list[tuple[dict[str, Any], dict[str, float], list[str]]]
    numbers: dict[str, int] = field(default_factory=dict)

    def truth(self, name: str, state: str = "fp32") -> torch.Tensor:
        """A whole tensor."""
        kind, shape = self.kinds[name], torch.Size(self.shapes[name])
        if kind == "trainable":
            return provenance(self.numbers[name], state, shape)
        found = provenance(self.numbers[name], "fp32", shape)
        dtype = getattr(torch, self.dtypes[name])
        return (
            found
            if dtype == torch.float32
            else (found * 1000).to(torch.int64) % 2 == 1
            if dtype == torch.bool
            else torch.complex(found, -found)
            if dtype.is_complex
            else found.to(dtype)
            if dtype.is_floating_point
            else (found * 1e6).abs().to(dtype)
        )

    @property
    def extra(self) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind != "trainable"]


def plain_model(
    shapes: dict[str, tuple[int, ...]],
    dtype: str = "float32",
    kinds: dict[str, str] | None = None,
    dtypes: dict[str, str] | None = None,
    optimizer: str = "torch.AdamW",
    **settings: Any,
) -> Model:
    """One group, no family."""
    kinds = dict.fromkeys(shapes, "trainable") | (kinds or {})
    names = [name for name in shapes if kinds[name] == "trainable"]
    group = {"lr": 0.1, "weight_decay": 0.5} | settings, {"step": 3.0}, names
    return Model(
        "",
        Sizes(0, 1, 1, 1, 1, 1, 1, 1),
        dtype,
        optimizer,
        ("exp_avg", "exp_avg_sq"),
        shapes,
        kinds,
        dict.fromkeys(shapes, dtype) | (dtypes or {}),
        [group],
        {name: number for number, name in enumerate(shapes)},
    )


def position(name: str, layers: int) -> int:
    """Of a parameter in the pipeline's list of layers."""
    if name.startswith("decoder.layers."):
        return int(name.split(".")[2]) + 1
    return {"embedding": 0, "output_layer": layers + 2}.get(name.split(".")[0], layers + 1)


def random_model(dice: random.Random) -> Model:
    family, layers, heads = dice.choice(["gpt", "llama"]), dice.randint(1, 3), dice.choice([2, 4])
    head_dim, groups = dice.choice([2, 3]), dice.choice([n for n in (1, 2, 4) if heads % n == 0])
    plain, vocab = family == "llama", 4 * dice.randint(1, 5)
    sizes = Sizes(
        layers,
        heads * head_dim,
        heads,
        groups,
        head_dim,
        dice.choice([4, 8, 12]),
        vocab,
        vocab,
        positions=0 if plain else dice.choice([0, 5]),
        tied=dice.random() < 0.5,
        gated=plain,
        biases=not plain,
        norm_biases=not plain,
    )
    shapes = {name: declared.shape for name, declared in find_family(family).table(sizes).items()}
    dtype = dice.choice(["float32", "bfloat16"])
    if dice.random() < 0.6:
        shapes |= {"decoder.layers.0.mlp.gain": (1,), f"decoder.layers.{layers - 1}.mlp.warmth": ()}
    shapes = {
        name: shapes[name] for name in sorted(shapes, key=lambda name: position(name, layers))
    }
    frozen = (
        {
            name
            for name in shapes
            if dice.random() < 0.2 and name != "embedding.word_embeddings.weight"
        }
        if dice.random() < 0.5
        else set()
    )
    kinds = {name: "frozen" if name in frozen else "trainable" for name in shapes}
    dtypes = dict.fromkeys(shapes, dtype)
    for name, (shape, kind) in VALUES.items() if dice.random() < 0.6 else ():
        full = f"decoder.layers.{dice.randrange(layers)}.mlp.{name}"
        shapes[full], kinds[full], dtypes[full] = shape, "buffer", kind
    optimizer, states, steps = dice.choice(OPTIMIZERS)
    trainable = [name for name in shapes if kinds[name] == "trainable"]
    count = min(dice.randint(1, 3), len(trainable))
    chosen = [*range(count), *(dice.randrange(count) for _ in trainable[count:])]
    dice.shuffle(chosen)
    settings: dict[str, Any] = (
        {"lr": 0.1, "momentum": 0.9}
        if optimizer == "torch.SGD"
        else {"lr": 0.1, "betas": (0.9, 0.95)}
    )
    each = [
        (
            {**settings, "lr": 0.1 + g / 16, "weight_decay": g / 8},
            {"step": 3.0 + 2 * g} if steps else {},
            [name for name, at in zip(trainable, chosen, strict=True) if at == g],
        )
        for g in range(count)
    ]
    return Model(
        family,
        sizes,
        dtype,
        optimizer,
        states,
        shapes,
        kinds,
        dtypes,
        each,
        {name: number for number, name in enumerate(shapes)},
    )


def random_target(dice: random.Random, model: Model, groups: Any = None) -> Target:
    """A mesh on which the model can be cut, with everything that a mesh does not say."""
    sizes = model.sizes
    cut = [
        tp
        for tp in (1, 2, 4)
        if sizes.heads % tp == 0 and sizes.qkv % tp == 0 and sizes.vocab % tp == 0
    ]
    pp = dice.choice([1, 1, 1, 2, 3])
    zero = dice.choice([0, 1] if pp > 1 else [0, 1, 2, 3])
    bounds = sorted(dice.sample(range(1, sizes.layers + 3), pp - 1))
    stages = tuple(b - a for a, b in zip([0, *bounds], [*bounds, sizes.layers + 3], strict=True))
    mesh = Mesh(tp=dice.choice(cut), pp=pp, dp=dice.choice([1, 2, 3, 5, 8]), zero=zero)
    other = {"float32": "bfloat16", "bfloat16": "float32"}[model.dtype]
    rounded = (
        model.dtype == "float32" and "frozen" in model.kinds.values()
    )  # they have no masters to come back from
    return Target(
        mesh,
        other if dice.random() < 0.15 and not rounded else model.dtype,
        None,
        groups,
        stages if pp > 1 else None,
        dice.choice([1, 20, 100, 10**9]),
        dice.random() < 0.3,
        dice.random() < 0.3,
        dice.random() < 0.3,
    )


# ------------------------------------------------ the first checkpoint


def write(model: Model, folder: Path, **meta: Any) -> Path:
    """A tag folder of one rank at ZeRO-1."""
    table = find_family(model.family).table(model.sizes) if model.family else {}
    specs = [
        ParamSpec(
            name,
            shape,
            model.dtypes[name],
            model.kinds[name],
            table[name].layout if name in table else Replicate(),
        )
        for name, shape in model.shapes.items()
    ]
    states = ((MASTER, "float32"), *((state, "float32") for state in model.states))
    buffers = [
        FlatBuffer(
            (Member(name, 0, size := math.prod(model.shapes[name])),),
            size,
            1,
            "whole",
            states,
            number,
        )
        for number, (_, _, names) in enumerate(model.groups)
        for name in names
    ]
    buffers += [
        FlatBuffer(
            (Member(name, 0, size := math.prod(model.shapes[name])),),
            size,
            1,
            "whole",
            ((VALUE, model.dtypes[name]),),
        )
        for name in model.extra
    ]
    scalars = [dict(step) for _, step, names in model.groups for _ in names] + [
        {} for _ in model.extra
    ]
    run = {"global_steps": 7, "skipped_steps": 1, "ds_version": "0.19.8"}
    paper = Manifest(
        "zero0",
        Mesh(),
        tuple(specs),
        tuple(buffers),
        tuple(settings for settings, _, _ in model.groups),
        tuple(scalars),
        optimizer=model.optimizer,
        family=model.family,
        run=run,
    )
    manifest = target_manifest(
        paper, Target(Mesh(zero=1), model.dtype).completed({}), None, "paper"
    )
    config = {"zero_optimization": {"stage": 1}, "gradient_clipping": 1.5}
    if model.dtype in SHORT:
        config[SHORT[model.dtype]] = {"enabled": True}
    said = {**run, "global_samples": 28, "note": {"mine": [1, 2.5, None]}, **meta}
    rates = [settings["lr"] for settings, _, _ in model.groups]
    scheduler = {"base_lrs": rates, "last_epoch": 7, "_last_lr": rates[::-1]}
    writer = NativeWriter(
        manifest,
        Run(
            said,
            OWN_KEYS,
            config,
            "0.19.8",
            model.dtype,
            {},
            1.5,
            "FusedAdam" in model.optimizer,
            {},
            lambda stage: scheduler,
        ),
        None,
    )
    folder.mkdir(parents=True)
    outputs = list(writer.outputs())
    for output in outputs:
        write_pt(
            folder / output.name,
            output.tree,
            lambda ref, output=output: [_payload(model, manifest, output, ref.key)],
        )
    entries = tuple(durable.entry_of(folder / output.name) for output in outputs)
    (folder / "ucp_manifest.json").write_text(
        to_json(replace(manifest, files=entries, save_id="0" * 32))
    )
    return folder


def _payload(model: Model, manifest: Manifest, output: Output, key: str) -> bytes:
    payload = output.payloads[key]
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, Weight):
        found = model.truth(payload.param).to(getattr(torch, model.dtype))
    else:
        assert isinstance(payload, Slot)
        buffer = manifest.buffers[payload.buffer]
        if payload.state == VALUE:
            found = model.truth(buffer.members[0].param)
        else:
            found = torch.cat(
                [model.truth(m.param, payload.state).reshape(-1) for m in buffer.members]
            )
            found = torch.cat([found, torch.zeros(buffer.length - len(found))])
    return bytes(bytes_of(found.contiguous().reshape(-1))) if found.numel() else b""


# ------------------------------------------------ what files hold, without the package


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
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(
            *(
                t.contiguous().reshape(-1).view(torch.uint8) if t.numel() else torch.zeros(0)
                for t in (one, other)
            )
        )
    )


def cut_of(name: str, gated: bool) -> tuple[int, int] | None:
    """(dim, parts that are cut each for itself), as megatron-core does."""
    end = ".".join(name.split(".")[-2:])
    if end in ("linear_fc1.weight", "linear_fc1.bias"):
        return 0, 2 if gated else 1
    if end in ("linear_proj.weight", "linear_fc2.weight"):
        return 1, 1
    return (
        (0, 1)
        if end
        in ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias")
        else None
    )


def expected_groups(model: Model, target: Target) -> list[list[tuple[int, list[str]]]]:
    """Of each stage: the groups that it has, with their names in the order of the optimizer."""
    client = (
        [list(names) for names in target.groups]
        if target.groups
        else [names for _, _, names in model.groups]
    )
    number = {name: g for g, (_, _, names) in enumerate(model.groups) for name in names}
    out, layers = [], model.sizes.layers
    edges = [0]
    for count in target.stages or (layers + 3,):
        edges.append(edges[-1] + int(count))
    for low, high in pairwise(edges):
        here = {n for n in model.shapes if low <= position(n, layers) < high}
        if model.sizes.tied and high == layers + 3:
            here.add("embedding.word_embeddings.weight")
        out.append(
            [
                (number[kept[0]], kept)
                for names in client
                if (kept := [n for n in names if n in here])
            ]
        )
    return out


def named(model: Model, name: str, pipeline: bool) -> str:
    """What the engine's module calls a parameter."""
    if not pipeline:
        return name
    at = position(name, model.sizes.layers)
    rest = (
        name.removeprefix("embedding.")
        .removeprefix("output_layer.")
        .removeprefix("decoder.final_layernorm.")
    )
    rest = rest.removeprefix(f"decoder.layers.{at - 1}.")
    return f"tied_modules.embed.{rest}" if model.sizes.tied and at == 0 else f"{at}.{rest}"


def held_by(trees: dict[str, Any], model: Model, target: Target) -> Held:
    """Everything that the files of a conversion to `target` say."""
    mesh, out = target.mesh, Held()
    local: dict[tuple[str, str], list[torch.Tensor]] = {}
    for stage, groups in enumerate(expected_groups(model, target)):
        local.clear()
        for tp in range(mesh.tp):
            mp = stage * mesh.tp + tp
            shape = {
                name: tuple(
                    n // mesh.tp if (cut := cut_of(name, model.sizes.gated)) and d == cut[0] else n
                    for d, n in enumerate(model.shapes[name])
                )
                for name in model.shapes
            }
            for name, state, value in _optimizer(trees, model, target, mp, groups, shape, out):
                local.setdefault((name, state), []).append(value)
            for name, state, value in _values(trees, model, target, stage, tp, shape):
                local.setdefault((name, state), []).append(value)
        for (name, state), parts in local.items():
            out.put(name, state, join(parts, cut_of(name, model.sizes.gated)))
    return out


def _optimizer(
    trees: dict[str, Any], model: Model, target: Target, mp: int, groups: Any, shape: Any, out: Held
) -> Any:
    """(name, state, rank-local tensor) of what a model-parallel rank trains."""
    mesh, dtype, parts = target.mesh, target.dtype, target.mesh.dp
    bf16 = dtype == "bfloat16" and (
        (mesh.zero == 0 and mesh.pp > 1) or (mesh.zero == 1 and target.grad_accum_fp32)
    )
    model_file = trees[
        f"{'zero_pp_rank_0_' if mesh.zero == 3 else ''}mp_rank_{mp:02d}_model_states.pt"
    ]
    if mesh.zero == 0 and not bf16:
        yield from _unpartitioned(trees, model, model_file, groups, shape, mp, mesh, dtype, out)
        return
    pre = "bf16_" if dtype == "bfloat16" else ""
    files = [
        trees[f"{pre}zero_pp_rank_{d}_mp_rank_{mp:02d}_optim_states.pt"]["optimizer_state_dict"]
        for d in range(parts)
    ]
    buffers: list[
        tuple[int, list[str]]
    ] = []  # number of the group in the stage, names as they lie in the buffer
    for at, (_, names) in enumerate(groups):
        if mesh.zero == 3:
            held = target.sub_group_size or 0
            for name in names:
                if held >= (target.sub_group_size or 0):
                    buffers.append((at, []))
                    held = 0
                buffers[-1][1].append(name)
                held += -(-math.prod(shape[name]) // parts)
        else:
            turns = [i for d in range(parts) for i in range(d, len(names), parts)]
            buffers.append(
                (at, [names[i] for i in turns] if target.round_robin and not bf16 else names)
            )
    if mesh.zero:
        said = [
            [(name, tuple(size)) for name, size in one.items()]
            for one in model_file["param_shapes"]
        ]
        want = [[(named(model, n, mesh.pp > 1), shape[n]) for n in names] for _, names in buffers]
        if said != want:
            out.problems.append(f"param_shapes of rank {mp} are {said} and not {want}")
    for index, (at, names) in enumerate(buffers):
        base = [
            f["base_optimizer_state" if mesh.zero < 3 else "optimizer_state_dict"] for f in files
        ]
        entries = [b["state"].get(index, {}) for b in base]
        for name in names:
            _numbers(
                out,
                name,
                [float(e["step"]) for e in entries if "step" in e],
                [
                    b["param_groups"][at] if index in b["param_groups"][at]["params"] else {}
                    for b in base
                ],
            )
        for state in ("fp32", *model.states):
            key = "single_partition_of_fp32_groups" if mesh.zero < 3 else "fp32_flat_groups"
            flats = [
                f[key][index] if state == "fp32" else e[state]
                for f, e in zip(files, entries, strict=True)
            ]
            if mesh.zero == 3:
                offset = 0
                for name in names:
                    chunk = -(-math.prod(shape[name]) // parts)
                    whole = torch.cat([flat[offset : offset + chunk] for flat in flats])
                    yield (
                        name,
                        state,
                        _unpadded(out, whole, math.prod(shape[name]), name).reshape(shape[name]),
                    )
                    offset += chunk
                continue
            align = (4 if dtype == "float32" else 8) if target.alignment and not bf16 else 1
            starts, end = [], 0
            for name in names:
                starts.append(-(-end // align) * align)
                end = starts[-1] + math.prod(shape[name])
            size = -(-end // (2 * parts)) * 2
            flats = [torch.cat([flat, torch.zeros(size - len(flat))]) for flat in flats]
            _unpadded(out, whole := torch.cat(flats), end, names[-1])
            for name, start in zip(names, starts, strict=True):
                yield (
                    name,
                    state,
                    whole[start : start + math.prod(shape[name])].reshape(shape[name]),
                )


def _unpadded(out: Held, flat: torch.Tensor, size: int, name: str) -> torch.Tensor:
    if flat[size:].any():
        out.problems.append(f"the padding behind {name} is not zero")
    return flat[:size]


def _numbers(out: Held, name: str, steps: list[float], settings: list[dict[str, Any]]) -> None:
    for known, every in ((out.steps, steps), (out.settings, settings)):
        for value in every:
            plain = (
                {k: v for k, v in value.items() if k != "params"}
                if isinstance(value, dict)
                else value
            )
            if known.setdefault(name, plain) != plain:
                out.problems.append(f"files disagree on {name}: {known[name]} and {plain}")


def _unpartitioned(
    trees: dict[str, Any],
    model: Model,
    model_file: Any,
    groups: Any,
    shape: Any,
    mp: int,
    mesh: Mesh,
    dtype: str | None,
    out: Held,
) -> Any:
    kept = model_file["optimizer"]
    base = kept if dtype == "float32" else kept["optimizer_state_dict"]
    flat = model.optimizer == "deepspeed.FusedAdam" and dtype != "float32"
    index = 0
    for at, (_, names) in enumerate(groups):
        sizes = [math.prod(shape[name]) for name in names]
        for number, name in enumerate(names):
            entry = base["state"].get(at if flat else index, {})
            _numbers(
                out,
                name,
                [float(entry["step"])] if "step" in entry else [],
                [base["param_groups"][at]],
            )
            for state in ("fp32", *model.states):
                if flat:
                    found = kept["fp32_groups_flat"][at] if state == "fp32" else entry[state]
                    yield name, state, found.split(sizes)[number].reshape(shape[name])
                elif state == "fp32" and dtype == "float32":
                    yield (
                        name,
                        state,
                        _weight(trees, model, name, mp // mesh.tp, mp % mesh.tp, mesh),
                    )
                else:
                    yield (
                        name,
                        state,
                        entry[state] if state != "fp32" else kept["fp32_groups"][at][number],
                    )
            index += 1


def _weight(
    trees: dict[str, Any], model: Model, name: str, stage: int, tp: int, mesh: Mesh
) -> torch.Tensor:
    """A training copy, a buffer, a frozen parameter: from the layer file, or the model file."""
    if mesh.pp == 1:
        return trees[
            f"{'zero_pp_rank_0_' if mesh.zero == 3 else ''}mp_rank_{tp:02d}_model_states.pt"
        ]["module"][name]
    at = position(name, model.sizes.layers)
    rest = named(model, name, True).removeprefix("tied_modules.embed.").removeprefix(f"{at}.")
    return trees[f"layer_{at:02d}-model_{tp:02d}-model_states.pt"][rest]


def _values(
    trees: dict[str, Any], model: Model, target: Target, stage: int, tp: int, shape: Any
) -> Any:
    """Training copies, and what is not trained; at ZeRO-2 files hold frozen parameters twice."""
    mesh = target.mesh
    for name in model.shapes if stage == 0 else ():
        kind = model.kinds[name]
        if mesh.zero < 3 or kind == "buffer":
            yield name, "value", _weight(trees, model, name, stage, tp, mesh)
        if mesh.zero > 1 and kind == "frozen":
            ranks = [f"zero_pp_rank_{d}_" for d in range(mesh.dp)] if mesh.zero == 3 else [""]
            files = [f"{rank}mp_rank_{tp:02d}_model_states.pt" for rank in ranks]
            held = [trees[file]["frozen_param_fragments"][name] for file in files]
            if mesh.zero == 3:
                yield name, "value", torch.cat(held)[: math.prod(shape[name])].reshape(shape[name])
            else:
                yield name, "second", held[0]


def problems(trees: dict[str, Any], model: Model, target: Target) -> list[str]:
    """What differs from the truth, bitwise."""
    found = held_by(trees, model, target)
    out, seen = list(found.problems), 0
    for name, kind in model.kinds.items():
        twice = ("second",) if kind == "frozen" and target.mesh.zero == 2 else ()
        for state in ("fp32", *model.states) if kind == "trainable" else ("value", *twice):
            truth = model.truth(name, state)
            if kind == "frozen":
                truth = truth.to(getattr(torch, str(target.dtype)))
            have = found.full.get((name, state))
            seen += 1
            if have is None or not same(have, truth):
                out.append(f"{state} of {name}: {'missing' if have is None else 'another'}")
        if (
            kind == "trainable"
            and target.mesh.zero < 3
            and not same(
                found.full[name, "value"], model.truth(name).to(getattr(torch, str(target.dtype)))
            )
        ):
            out.append(f"weight of {name}")
    for settings, step, names in model.groups:
        out += [
            f"step of {n}: {found.steps.get(n)}"
            for n in names
            if found.steps.get(n) != step.get("step")
        ]
        out += [
            f"settings of {n}: {found.settings.get(n)}"
            for n in names
            if found.settings.get(n) != settings
        ]
    return out if seen else ["nothing was compared"]


def differences(one: Path, other: Path) -> list[str]:
    """Between two folders, file by file and value by value. A config says how its own run got
    there: it is left out."""
    trees = [read(folder) for folder in (one, other)]
    return _compared(*trees, "")


def _compared(one: Any, other: Any, path: str) -> list[str]:
    if type(one) is not type(other):
        return [f"{path}: {type(one)} and {type(other)}"]
    if isinstance(one, torch.Tensor):
        return [] if same(one, other) else [f"{path}: {one} and {other}"]
    if isinstance(one, dict):
        ordered = path.rpartition("param_shapes")[2].strip(".").isdigit()
        if set(one) != set(other) or (ordered and list(one) != list(other)):
            return [f"{path}: {list(one)} and {list(other)}"]
        return [
            d
            for key in one
            if key != "ds_config"
            for d in _compared(one[key], other[key], f"{path}.{key}")
        ]
    if path.endswith("buffer_names"):
        one, other = sorted(one), sorted(other)
    if isinstance(one, list | tuple) and len(one) == len(other):
        return [
            d
            for n, (a, b) in enumerate(zip(one, other, strict=True))
            for d in _compared(a, b, f"{path}.{n}")
        ]
    if hasattr(one, "__dict__") and not isinstance(one, type):
        return _compared(vars(one), vars(other), path)
    return [] if one == other else [f"{path}: {one} and {other}"]
