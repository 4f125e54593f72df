"""Mixtral on megatron-core's local layer spec: a LLaMA whose layers have experts instead of an MLP,
and a router that sends each token to some of them; and Qwen3-MoE, a Qwen3 with experts in every
layer, or in every n-th.

Experts have global numbers in canonical names, and each one's two matrices are parameters of their
own (megatron-core's SequentialMLP). Which rank holds which: rank r of the ep ranks has the experts
r x E / ep to (r + 1) x E / ep. etp cuts an expert as tp cuts an MLP; the shared expert is cut along
tp.

Beside the parameters a router may have the buffer `mlp.router.expert_bias` (E elements, fp32, the
same on every rank).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from megatron_ucp.core.layers import Layers
from megatron_ucp.errors import UnsupportedError, UsageError
from megatron_ucp.families import llama, pipe
from megatron_ucp.families.family import (
    Builder,
    Config,
    Declared,
    Divided,
    Family,
    HuggingFace,
    Sizes,
    attention_and_mlp,
    bias,
    dense,
    gated,
    measured,
    no_such_sizes,
    row,
    transformer,
    whole,
)
from megatron_ucp.families.settings import FREQUENCY, PRE_SOFTMAX, Architecture, as_one, every_of
from megatron_ucp.families.twin import (
    ATTENTION_ROWS,
    MLP_ROWS,
    NORM_ROWS,
    Rows,
    by_rows,
    check_config,
    common,
    gate_and_up,
    read_architecture,
    read_common,
    same,
)

MIXTURE = replace(llama.BUILDER, experts=True)
SHARED_WIDTH = "moe_shared_expert_intermediate_size"
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

    def has_experts(self, number: int) -> bool:
        """Whether a layer has experts."""
        return not number % self.every


MixtureTable = Callable[[MixtralSizes], dict[str, Declared]]


def table_of(builder: Builder, title: str) -> MixtureTable:
    """What lists every parameter of a model that the builder makes. It raises UsageError for sizes
    that are no `title`."""

    def table(sizes: MixtralSizes) -> dict[str, Declared]:
        builder.check(sizes, title)
        if sizes.experts < 1 or sizes.every < 1:
            expected = "at least one expert, in every first, second, ... layer"
            found = f"{sizes.experts} experts in every layer number {sizes.every}"
            raise no_such_sizes(title, expected, found)
        return transformer(sizes, lambda number: layer(sizes, number))

    return table


def layer(sizes: MixtralSizes, number: int) -> dict[str, Declared]:
    """A transformer layer, with experts or without."""
    out = attention_and_mlp(sizes)
    if not sizes.has_experts(number):
        return out
    out = {name: declared for name, declared in out.items() if not name.startswith("mlp.")}
    out[f"{ROUTER}weight"] = whole(sizes.experts, sizes.hidden)
    if sizes.biases:
        out[f"{ROUTER}bias"] = bias(whole(sizes.experts))
    for expert in range(sizes.experts):
        prefix = f"{EXPERT}{expert}."
        for part, declared in _expert(sizes).items():
            out[prefix + part] = replace(declared, expert=(expert, sizes.experts))
    if sizes.shared_ffn:
        out[f"{SHARED}linear_fc1.weight"] = gated(sizes.shared_ffn, sizes.hidden)
        out[f"{SHARED}linear_fc2.weight"] = row(sizes.hidden, sizes.shared_ffn)
    return out


def _expert(sizes: MixtralSizes) -> dict[str, Declared]:
    """What an expert has. (Modules differ in the attributes of a bias that no rank cuts.)"""
    out = {
        "linear_fc1.weight": gated(sizes.width, sizes.hidden, axis="etp"),
        "linear_fc2.weight": row(sizes.hidden, sizes.width, axis="etp"),
    }
    if sizes.biases:
        out["linear_fc1.bias"] = bias(gated(sizes.width, axis="etp"))
        out["linear_fc2.bias"] = replace(bias(whole(sizes.hidden)), attributes={})
    return out


def divided(sizes: MixtralSizes) -> tuple[Divided, ...]:
    """What tensor parallelism cuts: an MLP only where layers have part, and a shared expert."""
    parts = [part for part in dense(sizes) if part.what != "ffn_hidden_size" or sizes.every > 1]
    shared = [Divided("the width of the shared expert", sizes.shared_ffn)]
    return (*parts, *(shared if sizes.shared_ffn else []))


def names(sizes: MixtralSizes) -> dict[str, str]:
    """Name in the pipeline -> canonical name, for every parameter."""
    return dict(pipe.layers(transformer(sizes, lambda number: layer(sizes, number))).names)


def layers(params: Collection[str]) -> Layers:
    """The list of layers of a model with these parameters; a router's bias is a buffer."""
    return pipe.layers([name for name in params if not name.endswith(f"{ROUTER}expert_bias")])


def measure(module: Any) -> MixtralSizes:
    """From a megatron-core GPTModel, or a PipelineModule with the same attributes. Raises
    UsageError for a model without experts."""
    config: Any = getattr(module, "config", None)
    if not getattr(config, "num_moe_experts", None):
        raise UsageError(
            "a family with experts describes a megatron-core GPTModel that has some",
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


def mixture(
    title: str,
    architecture: str,
    builder: Builder,
    rows: Rows,
    config: Callable[[MixtralSizes, Architecture], dict[str, Any]],
    read: Callable[[Config], tuple[MixtralSizes, Architecture]],
    refuses: Callable[[MixtralSizes, Architecture], list[str]],
) -> Family:
    """A family of models that are LLaMAs with experts; the rest is its twin's."""
    name, table = title.lower().replace("-", "_"), table_of(builder, title)
    return Family(
        name,
        table,
        "megatron_ucp/families/mixtral.py",
        names,
        layers,
        divided=divided,
        builder=builder,
        defaults={**llama.DEFAULTS, "num_experts": 8},
        sizes=MixtralSizes,
        measure=measure,
        hugging_face=HuggingFace(name, architecture, by_rows(table, rows), config, read, refuses),
    )


# ------------------------------------------------ Mixtral of Hugging Face


def rows(module: str, gate: str, up: str, down: str) -> Rows:
    """The tensors of a layer, by the names on disk, where each expert has tensors of its own
    (transformers 5 stacks them in memory): those of its `module` for experts."""
    expert = f"{module}experts.{{expert}}."
    return {
        **ATTENTION_ROWS,
        f"{ROUTER}weight": same(f"{module}gate.weight"),
        f"{EXPERT}{{expert}}.linear_fc1.weight": gate_and_up(expert, gate, up),
        f"{EXPERT}{{expert}}.linear_fc2.weight": same(f"{expert}{down}.weight"),
        **NORM_ROWS,
    }


def to_config(sizes: MixtralSizes, architecture: Architecture) -> dict[str, Any]:
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
    out = refused_mixture(sizes, architecture)
    if sizes.every > 1 and FREQUENCY not in architecture.odd:
        out.append(f"experts in every layer number {sizes.every} only")
    return out


def refused_mixture(sizes: MixtralSizes, architecture: Architecture, *known: str) -> list[str]:
    """What no mixture of transformers has that is a LLaMA but for experts; `known` are settings
    that this one has."""
    out = llama.refuses(sizes, architecture, *known)
    if sizes.shared_ffn and SHARED_WIDTH not in architecture.odd:
        out.append(f"a shared expert of the width {sizes.shared_ffn}")
    if architecture.topk < 2 and not architecture.odd.get(PRE_SOFTMAX):
        out.append("one expert for each token: Hugging Face gives it the weight 1")
    return out


def from_config(config: Config) -> tuple[MixtralSizes, Architecture]:
    """Sizes and architecture of a Mixtral. Raises UnsupportedError for what is not computed
    here."""
    check_config(config, {"router_jitter_noise": (0.0,)})
    sizes = MixtralSizes(
        **read_common(config, int(config["vocab_size"])),
        experts=int(config["num_local_experts"]),
    )
    topk = int(config.get("num_experts_per_tok", 2))
    return sizes, read_architecture(config, 1e-5, 1e6, topk=topk)


MIXTRAL = mixture(
    "Mixtral",
    "MixtralForCausalLM",
    MIXTURE,
    rows("block_sparse_moe.", "w1", "w3", "w2"),
    to_config,
    from_config,
    refuses,
)


# ------------------------------------------------ Qwen3-MoE of Hugging Face
#
# Its config may list any layers that have an MLP, and say that the weights of the chosen experts
# are taken as the softmax over all of them gives them: megatron-core's `moe_router_pre_softmax`.


def qwen3_moe_to_config(sizes: MixtralSizes, architecture: Architecture) -> dict[str, Any]:
    """config.json of Qwen3-MoE."""
    return {
        **common(sizes, architecture),
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [n for n in range(sizes.layers) if not sizes.has_experts(n)],
        "moe_intermediate_size": sizes.width,
        "norm_topk_prob": not architecture.odd.get(PRE_SOFTMAX, False),
        "num_experts": sizes.experts,
        "num_experts_per_tok": architecture.topk,
        "output_router_logits": False,
        "use_sliding_window": False,
    }


def qwen3_moe_refuses(sizes: MixtralSizes, architecture: Architecture) -> list[str]:
    """What Qwen3MoeForCausalLM does not have."""
    known = "qk_layernorm", PRE_SOFTMAX, FREQUENCY
    return refused_mixture(sizes, architecture, *known)


def qwen3_moe_from_config(config: Config) -> tuple[MixtralSizes, Architecture]:
    """Sizes and architecture of a Qwen3-MoE. Raises UnsupportedError for what is not computed
    here."""
    config, odd = llama.without_used_window(config), dict[str, Any](qk_layernorm=True)
    if (every := _every(config)) != 1:
        odd[FREQUENCY] = every
    if not config.get("norm_topk_prob", False):
        odd[PRE_SOFTMAX] = True
    sizes = MixtralSizes(
        **read_common(config, int(config["vocab_size"]), qk_norms=True),
        experts=int(config.get("num_experts", config.get("num_local_experts", 128))),
        expert_ffn=int(config.get("moe_intermediate_size", 768)),
        every=every,
    )
    topk = int(config.get("num_experts_per_tok", 8))
    return sizes, read_architecture(config, 1e-6, 10000.0, topk=topk, odd=odd)


def _every(config: Config) -> int:
    """Which layers have experts as a number. Raises UnsupportedError where none says it."""
    step = config.get("decoder_sparse_step", 1)
    without = [*(config.get("mlp_only_layers") or ())]
    layers = range(int(config["num_hidden_layers"]))
    marks = [number not in without and not (number + 1) % step for number in layers]
    try:
        return every_of(marks)
    except ValueError:
        raise UnsupportedError(
            "which layers have experts is nothing that a number says, which is not supported",
            expected="experts in every n-th layer, from the first one on",
            found=f"decoder_sparse_step {step}, mlp_only_layers {without}",
            fix="train such a model with transformers under DeepSpeed, which needs no family",
        ) from None


QWEN3_MOE = mixture(
    "Qwen3-MoE",
    "Qwen3MoeForCausalLM",
    replace(MIXTURE, qk_norms=True),
    {**rows("mlp.", "gate_proj", "up_proj", "down_proj"), **MLP_ROWS},
    qwen3_moe_to_config,
    qwen3_moe_from_config,
    qwen3_moe_refuses,
)
