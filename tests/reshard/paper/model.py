"""Random models with known values, and the meshes on which they can be cut."""

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.families import find_family
from megatron_ucp.families.family import Sizes
from megatron_ucp.formats.deepspeed.target import Target
from tests.engines.canonical import provenance

# settings, scalar states, names in the optimizer's order
Group = tuple[dict[str, Any], dict[str, float], list[str]]
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
    groups: list[Group]
    numbers: dict[str, int] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)  # what else a manifest says of the run

    def truth(self, name: str, state: str = "fp32") -> torch.Tensor:
        """A whole tensor."""
        kind, shape = self.kinds[name], torch.Size(self.shapes[name])
        if kind == "trainable":
            return provenance(self.numbers[name], state, shape)
        found = provenance(self.numbers[name], "fp32", shape)
        dtype = getattr(torch, self.dtypes[name])
        if dtype == torch.float32:
            return found
        if dtype == torch.bool:
            return (found * 1000).to(torch.int64) % 2 == 1
        if dtype.is_complex:
            return torch.complex(found, -found)
        return found.to(dtype) if dtype.is_floating_point else (found * 1e6).abs().to(dtype)

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
    """All draws are made in one order: a seed names the same model for ever."""
    family, sizes = random_sizes(dice)
    dtype = dice.choice(["float32", "bfloat16"])
    shapes = random_shapes(dice, family, sizes)
    kinds, dtypes = random_kinds(dice, shapes), dict.fromkeys(shapes, dtype)
    for name, (shape, kind) in VALUES.items() if dice.random() < 0.6 else ():
        full = f"decoder.layers.{dice.randrange(sizes.layers)}.mlp.{name}"
        shapes[full], kinds[full], dtypes[full] = shape, "buffer", kind
    optimizer, states, steps = dice.choice(OPTIMIZERS)
    trainable = [name for name in shapes if kinds[name] == "trainable"]
    return Model(
        family,
        sizes,
        dtype,
        optimizer,
        states,
        shapes,
        kinds,
        dtypes,
        random_groups(dice, trainable, optimizer, steps),
        {name: number for number, name in enumerate(shapes)},
    )


def random_sizes(dice: random.Random) -> tuple[str, Sizes]:
    """A family and its sizes."""
    family, layers, heads = dice.choice(["gpt", "llama"]), dice.randint(1, 3), dice.choice([2, 4])
    head_dim, groups = dice.choice([2, 3]), dice.choice([n for n in (1, 2, 4) if heads % n == 0])
    plain, vocab = family == "llama", 4 * dice.randint(1, 5)
    return family, Sizes(
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


def random_shapes(dice: random.Random, family: str, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Of the family's parameters, and perhaps of two that it does not know, in the order of the
    pipeline."""
    shapes = {name: declared.shape for name, declared in find_family(family).table(sizes).items()}
    last = sizes.layers - 1
    if dice.random() < 0.6:
        shapes |= {"decoder.layers.0.mlp.gain": (1,), f"decoder.layers.{last}.mlp.warmth": ()}
    ordered = sorted(shapes, key=lambda name: position(name, sizes.layers))
    return {name: shapes[name] for name in ordered}


def random_kinds(dice: random.Random, shapes: dict[str, tuple[int, ...]]) -> dict[str, str]:
    """Which parameters are frozen: none in half of the models, and never the embedding."""
    frozen: set[str] = set()
    if dice.random() < 0.5:
        embedding = "embedding.word_embeddings.weight"
        frozen = {name for name in shapes if dice.random() < 0.2 and name != embedding}
    return {name: "frozen" if name in frozen else "trainable" for name in shapes}


def random_groups(
    dice: random.Random, trainable: list[str], optimizer: str, steps: bool
) -> list[Group]:
    """The parameters over one to three groups; each group has settings and a step of its own."""
    count = min(dice.randint(1, 3), len(trainable))
    chosen = [*range(count), *(dice.randrange(count) for _ in trainable[count:])]
    dice.shuffle(chosen)
    own = {"momentum": 0.9} if optimizer == "torch.SGD" else {"betas": (0.9, 0.95)}
    groups: list[Group] = []
    for number in range(count):
        settings = {"lr": 0.1 + number / 16, **own, "weight_decay": number / 8}
        names = [name for name, at in zip(trainable, chosen, strict=True) if at == number]
        groups.append((settings, {"step": 3.0 + 2 * number} if steps else {}, names))
    return groups


def random_target(dice: random.Random, model: Model, groups: Any = None) -> Target:
    """A mesh on which the model can be cut, with everything that a mesh does not say."""
    sizes = model.sizes
    divided = (sizes.heads, sizes.qkv, sizes.vocab)
    cut = [tp for tp in (1, 2, 4) if all(size % tp == 0 for size in divided)]
    pp = dice.choice([1, 1, 1, 2, 3])
    zero = dice.choice([0, 1] if pp > 1 else [0, 1, 2, 3])
    edges = [0, *sorted(dice.sample(range(1, sizes.layers + 3), pp - 1)), sizes.layers + 3]
    stages = tuple(high - low for low, high in pairwise(edges))
    mesh = Mesh(tp=dice.choice(cut), pp=pp, dp=dice.choice([1, 2, 3, 5, 8]), zero=zero)
    other = {"float32": "bfloat16", "bfloat16": "float32"}[model.dtype]
    # frozen parameters have no masters to come back from
    rounded = model.dtype == "float32" and "frozen" in model.kinds.values()
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
