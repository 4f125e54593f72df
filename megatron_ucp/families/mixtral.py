"""Mixtral on megatron-core's local layer spec: a LLaMA whose layers have experts instead of an MLP,
and a router that sends each token to some of them.

Experts have global numbers in canonical names, and each one's two matrices are parameters of their
own (megatron-core's SequentialMLP). Which rank holds which: rank r of the ep ranks has the experts
r x E / ep to (r + 1) x E / ep. etp cuts an expert as tp cuts an MLP; the shared expert is cut along
tp.

Beside the parameters a router may have the buffer `mlp.router.expert_bias` (E elements, fp32, the
same on every rank).
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.core.layers import Layers
from megatron_ucp.core.shares import Share
from megatron_ucp.errors import UsageError
from megatron_ucp.families import llama, pipe
from megatron_ucp.families.architecture import FREQUENCY, Architecture, as_one
from megatron_ucp.families.base import (
    Declared,
    Divided,
    Family,
    Sizes,
    dense,
    gated,
    row,
    whole,
)
from megatron_ucp.families.hugging_face import (
    Config,
    HuggingFace,
    attention,
    check_config,
    common,
    gated_halves,
    read_architecture,
    read_common,
    with_layers,
)
from megatron_ucp.families.layer import attention_and_mlp, transformer
from megatron_ucp.families.measure import measured

MIXTURE = replace(llama.BUILDER, experts=True)
ROUTER, EXPERT, SHARED = "mlp.router.", "mlp.experts.local_experts.", "mlp.shared_experts."


@dataclass(frozen=True, kw_only=True)
class MixtralSizes(Sizes):
    """`experts` of a layer, of the width `expert_ffn` (0: `ffn`) each; `shared_ffn` is the width of
    the expert that sees every token (0: there is none). Layers 0, `every`, 2 x `every` ... have
    experts, the others an MLP."""

    experts: int
    expert_ffn: int = 0
    shared_ffn: int = 0
    every: int = 1

    @property
    def width(self) -> int:
        """Of one half of an expert's gated MLP."""
        return self.expert_ffn or self.ffn


def table(sizes: MixtralSizes) -> dict[str, Declared]:
    """Every parameter of the model. Raises UsageError for sizes that are no Mixtral."""
    MIXTURE.check(sizes, "Mixtral")
    if sizes.experts < 1 or sizes.every < 1:
        raise UsageError(
            "these sizes are no Mixtral",
            expected="at least one expert, in every first, second, ... layer",
            found=f"{sizes.experts} experts in every layer number {sizes.every}",
            fix="give a number of experts of at least 1, and as the step of its layers 1, 2, ...",
        )
    return transformer(sizes, lambda number: layer(sizes, number))


def layer(sizes: MixtralSizes, number: int) -> dict[str, Declared]:
    """A transformer layer, with experts or without."""
    out = attention_and_mlp(sizes)
    if number % sizes.every:
        return out
    out = {name: declared for name, declared in out.items() if not name.startswith("mlp.")}
    out[f"{ROUTER}weight"] = whole(sizes.experts, sizes.hidden)
    for expert in range(sizes.experts):
        prefix = f"{EXPERT}{expert}."
        for part, declared in {
            "linear_fc1.weight": gated(sizes.width, sizes.hidden, axis="etp"),
            "linear_fc2.weight": row(sizes.hidden, sizes.width, axis="etp"),
        }.items():
            out[prefix + part] = replace(declared, expert=(expert, sizes.experts))
    if sizes.shared_ffn:
        out[f"{SHARED}linear_fc1.weight"] = gated(sizes.shared_ffn, sizes.hidden)
        out[f"{SHARED}linear_fc2.weight"] = row(sizes.hidden, sizes.shared_ffn)
    return out


def divided(sizes: MixtralSizes) -> tuple[Divided, ...]:
    """What tensor parallelism cuts: an MLP only where layers have one, and a shared expert."""
    kept = [one for one in dense(sizes) if one.what != "ffn_hidden_size" or sizes.every > 1]
    shared = [Divided("the width of the shared expert", sizes.shared_ffn)]
    return (*kept, *(shared if sizes.shared_ffn else []))


def names(sizes: MixtralSizes) -> dict[str, str]:
    """Name in the pipeline -> canonical name, for every parameter."""
    return pipe.with_layers(sizes, lambda number: layer(sizes, number))


def layers(held: Collection[str]) -> Layers:
    """The list of layers of a model that has the parameters `held`."""
    sizes, usual = pipe.sizes_of(held), _usual_names()
    of_layer: list[list[str]] = [[] for _ in range(sizes.layers)]
    for name in held:  # buffers may be among them
        found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if found and re.sub(r"(?<=local_experts\.)\d+", "0", found[2]) in usual:
            of_layer[int(found[1])].append(found[2])
    return pipe.listed(sizes, pipe.with_layers(sizes, of_layer.__getitem__))


def _usual_names() -> set[str]:
    """What `layer` may give, with the number 0 for every expert's."""
    sizes = MixtralSizes(
        1, 1, 1, 1, 1, 1, 1, 1, gated=True, biases=False, norm_biases=False, experts=1, shared_ffn=1
    )
    return {*layer(sizes, 0), *attention_and_mlp(sizes)}


def measure(module: Any) -> MixtralSizes:
    """From a megatron-core GPTModel, or a PipelineModule with the same attributes. Raises
    UsageError for a model without experts."""
    config: Any = getattr(module, "config", None)
    if not getattr(config, "num_moe_experts", None):
        raise UsageError(
            "the family mixtral describes a megatron-core GPTModel with experts",
            expected="a config with num_moe_experts",
            found=type(module).__qualname__,
            fix="give the family that the model was built with",
        )
    every = as_one(FREQUENCY, config.moe_layer_freq)
    if not isinstance(every, int):
        raise UsageError(
            "which layers have experts is a list that no number says, which is not supported",
            expected="moe_layer_freq as a number, or a list such as [1, 0, 1, 0]",
            found=config.moe_layer_freq,
            fix="build a model with experts in every n-th layer, or load it into an "
            "engine of the same mesh with the run's own program",
        )
    return MixtralSizes(
        **vars(measured(module)),
        experts=config.num_moe_experts,
        expert_ffn=config.moe_ffn_hidden_size,
        shared_ffn=config.moe_shared_expert_intermediate_size or 0,
        every=every,
    )


# ------------------------------------------------ Mixtral of Hugging Face


def tensors(sizes: MixtralSizes) -> dict[str, Share]:
    """What each tensor of MixtralForCausalLM holds, by the names on disk, where each expert has
    tensors of its own (transformers 5 stacks them in memory)."""
    return with_layers(sizes, _layer)


def _layer(sizes: MixtralSizes, prefix: str, canonical: str) -> dict[str, Share]:
    out = attention(sizes, f"{prefix}self_attn.", f"{canonical}self_attention.")
    out[f"{prefix}block_sparse_moe.gate.weight"] = Share(f"{canonical}{ROUTER}weight")
    for expert in range(sizes.experts):
        theirs = f"{prefix}block_sparse_moe.experts.{expert}."
        ours, names = f"{canonical}{EXPERT}{expert}.linear_fc", ("w1.weight", "w3.weight")
        out |= gated_halves(theirs, f"{ours}1.weight", names, sizes.width, sizes.hidden)
        out[f"{theirs}w2.weight"] = Share(f"{ours}2.weight")
    return out


def config(sizes: MixtralSizes, architecture: Architecture) -> dict[str, Any]:
    """config.json of Mixtral."""
    return {
        **common(sizes, architecture),
        "intermediate_size": sizes.width,
        "num_experts_per_tok": architecture.topk,
        "num_local_experts": sizes.experts,
        "output_router_logits": False,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }


def refuses(sizes: MixtralSizes, architecture: Architecture) -> list[str]:
    """What MixtralForCausalLM does not have."""
    out = llama.refuses(sizes, architecture)
    said = " ".join(out)
    if sizes.shared_ffn and "moe_shared_expert" not in said:
        out.append(f"a shared expert of the width {sizes.shared_ffn}")
    if sizes.every > 1 and "moe_layer_freq" not in said:
        out.append(f"experts in every layer number {sizes.every} only")
    if architecture.topk < 2:
        out.append("one expert for each token: Hugging Face gives it the weight 1")
    return out


def read(found: Config) -> tuple[MixtralSizes, Architecture]:
    """Sizes and architecture of a Mixtral. Raises UnsupportedError for what is not computed
    here."""
    check_config(found, {"router_jitter_noise": (0.0,)})
    sizes = MixtralSizes(
        **read_common(found, int(found["vocab_size"])),
        experts=int(found["num_local_experts"]),
    )
    topk = int(found.get("num_experts_per_tok", 2))
    return sizes, read_architecture(found, 1e-5, 1e6, topk=topk)


FAMILY = Family(
    "mixtral",
    table,
    "megatron_ucp/families/mixtral.py",
    names,
    layers,
    divided=divided,
    builder=MIXTURE,
    defaults={**llama.DEFAULTS, "num_experts": 8},
    paper={"experts": 8},
    sizes=MixtralSizes,
    measure=measure,
    hugging_face=HuggingFace("mixtral", "MixtralForCausalLM", tensors, config, read, refuses),
)
