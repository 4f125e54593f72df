"""The settings of a model: what it computes besides what the shapes of its parameters say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, TypeVar, cast

from megatron_ucp.core.manifest import RECORDED

_LONG = 8192.0  # positions that megatron-core's scaled rotary base was trained with

# Fields of megatron-core's TransformerConfig, and of its GPTModel, that change what is computed:
# the values with which they change nothing. Of those below the line only where there are experts.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "qk_layernorm": (False,),
    "qk_l2_norm": (False,),
    "add_qkv_bias": (False,),
    "softmax_scale": (None,),
    "softmax_type": ("vanilla",),
    "layernorm_zero_centered_gamma": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_output_gate": (False,),
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (None,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0.0,),
    "window_size": (None,),
    "window_attn_skip_freq": (None,),
    "no_rope_freq": (None,),
    "mtp_num_layers": (None, 0),
    "heterogeneous_block_specs": (False,),
}
NEUTRAL_OF_EXPERTS: dict[str, tuple[object, ...]] = {
    "moe_layer_freq": (1,),
    "moe_shared_expert_intermediate_size": (None, 0),
    "moe_router_score_function": ("softmax",),
    "moe_router_pre_softmax": (False,),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_num_groups": (None, 1),
    "moe_router_group_topk": (None,),
    "moe_router_force_load_balancing": (False,),
    "moe_expert_capacity_factor": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    # sinkhorn alone weighs experts in another way; losses add nothing to what is computed
    "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
}


# Of latent attention, whose rotary embedding the config says; and where that is scaled (yarn), all
# of these.
NEUTRAL_OF_LATENT: dict[str, tuple[object, ...]] = {
    "rope_type": ("rope",),
    "mscale_all_dim": (0.0,),
}
SCALED_LATENT = (
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
# Of a GPTModel whose rotary embedding is scaled by yarn, all that its config says of these.
POSITION_KIND = "position_embedding_type"
YARN = (
    "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
    "yarn_correction_range_round_to_int",
)
WINDOW, FULL_EVERY = "window_size", "window_attn_skip_freq"
FREQUENCY, BALANCING = "moe_layer_freq", "moe_router_load_balancing_type"
SCORES, PRE_SOFTMAX = "moe_router_score_function", "moe_router_pre_softmax"
GROUPS, GROUPS_OF_TOKEN = "moe_router_num_groups", "moe_router_group_topk"
LATENT = "multi_latent_attention"


def every_of(frequency: object) -> int:
    """megatron-core's `moe_layer_freq` as a number: [1, 0, 1, 0] is 2, experts in every second
    layer. Raises ValueError for a list that no number describes, TypeError for what is neither a
    number nor a list."""
    if isinstance(frequency, int):
        return frequency
    if not isinstance(frequency, list | tuple):
        raise TypeError(f"{FREQUENCY} is neither a number nor a list")
    marks = [bool(mark) for mark in cast("Sequence[object]", frequency)]
    for every in range(1, len(marks) + 1):
        if marks == [not number % every for number in range(len(marks))]:
            return every
    raise ValueError(f"{FREQUENCY} is a list that no number says")


def full_every(marks: Sequence[object]) -> Any:
    """Which layers attend to all positions, where `marks` are true for layers with a window:
    [1, 1, 0, 1, 1, 0] is 3, every third layer. None: no layer does. Where no number describes the
    list, the list itself."""
    windows = [bool(mark) for mark in marks]
    if all(windows):
        return None
    for every in range(1, len(windows) + 1):
        if windows == [bool((number + 1) % every) for number in range(len(windows))]:
            return every
    return [int(window) for window in windows]


def as_one(name: str, value: Any) -> Any:
    """The value of a setting, as one value where megatron-core also takes a list. Of several ways
    to balance experts it takes the losses alone, which change nothing that is computed."""
    if name == BALANCING and isinstance(value, list | tuple):
        return "none"
    if name == FULL_EVERY and isinstance(value, list | tuple):
        return full_every(cast("Sequence[object]", value))
    if name == WINDOW and isinstance(value, list):
        return tuple(cast("Sequence[object]", value))
    try:
        return every_of(value) if name == FREQUENCY else value
    except (TypeError, ValueError):
        return value


@dataclass(frozen=True)
class Architecture:
    """Numbers that no parameter's shape shows, in megatron-core's words and with its defaults.

    `positions` is the longest sequence; `activation` is "gelu" (exact), "gelu_tanh" or "silu";
    `rope_factor` (0: none) scales long rotary wavelengths as Llama 3.1 does, `interpolation` (0:
    none) divides positions; a token goes to `topk` experts. `odd` has every other setting that
    changes what is computed, by its field's name.
    """

    positions: int = 0
    norm_epsilon: float = 1e-5
    activation: str = "gelu"
    rotary_base: float = 10000.0
    rope_factor: float = 0.0
    interpolation: float = 0.0
    topk: int = 0
    odd: Mapping[str, Any] = field(default_factory=dict[str, Any])


def recorded(sizes: Any, module: Any) -> dict[str, Any]:
    """The record of a live model in a manifest: its sizes, and its architecture where the module
    shows it."""
    architecture = architecture_of(module)
    record: dict[str, Any] = {"sizes": asdict(sizes)}
    return record if architecture is None else {**record, "architecture": asdict(architecture)}


S = TypeVar("S")  # the sizes of a family


def described(run: Mapping[str, Any], sizes: type[S]) -> tuple[S, Architecture] | None:
    """Sizes and architecture from the record of a model in a manifest's `run`; None where there is
    no such record, or the model was attached without a family. Raises TypeError or ValueError for
    what is no record."""
    record, architecture = _part(run, "sizes"), described_architecture(run)
    return (sizes(**record), architecture) if record and architecture else None


def described_sizes(run: Mapping[str, Any], sizes: type[S]) -> S | None:
    """The sizes from that record, whatever the architecture is; None where there are none. Raises
    as `described`."""
    record = _part(run, "sizes")
    return sizes(**record) if record else None


def described_architecture(run: Mapping[str, Any]) -> Architecture | None:
    """The architecture from that record, whatever the sizes are; None where there is none. Raises
    TypeError for what is no record."""
    architecture = _part(run, "architecture")
    return None if architecture is None else Architecture(**architecture)


def other_sizes(run: Mapping[str, Any], sizes: type[Any]) -> list[str]:
    """The names of the sizes in which a record differs from what a family has."""
    record = _part(run, "sizes")
    if not record:
        return []
    known = {one.name: one for one in fields(sizes)}
    needed = {
        name
        for name, one in known.items()
        if one.default is MISSING and one.default_factory is MISSING
    }
    return sorted(({*record} - {*known}) | (needed - {*record}))


def _part(run: Mapping[str, Any], part: str) -> dict[str, Any] | None:
    """A part of the record of a model; None where a manifest has none. Raises TypeError."""
    record: Any = run.get(RECORDED)
    table = cast("dict[str, Any]", record).get(part) if isinstance(record, dict) else None
    if table is not None and not isinstance(table, dict):
        raise TypeError(f"{part} is no table of names and values")
    return cast("dict[str, Any] | None", table)


def architecture_of(module: Any) -> Architecture | None:
    """The architecture of a megatron-core GPTModel, or of a PipelineModule with the same
    attributes; None for another module."""
    config: Any = getattr(module, "config", None)
    needed = ("layernorm_epsilon", "activation_func", "bias_activation_fusion")
    if any(not hasattr(config, name) for name in needed):
        return None
    rotary = getattr(module, POSITION_KIND, "") in ("rope", "yarn")
    if rotary and not hasattr(module, "rotary_base"):
        return None
    experts = bool(getattr(config, "num_moe_experts", None))
    architecture = Architecture(
        positions=int(getattr(module, "max_sequence_length", 0)),
        norm_epsilon=float(config.layernorm_epsilon),
        activation=_activation(config),
        topk=int(config.moe_router_topk) if experts else 0,
        odd=_odd(module, config, experts),
    )
    return _with_rotary(architecture, module) if rotary else architecture


def _activation(config: Any) -> str:
    name = str(getattr(config.activation_func, "__name__", config.activation_func))
    # megatron-core's fused kernel of bias and gelu computes the tanh form
    return "gelu_tanh" if name == "gelu" and config.bias_activation_fusion else name


def odd_settings(value_of: Callable[[str, object], Any], experts: bool) -> dict[str, Any]:
    """Settings that change what is computed; `value_of(name, usual)` is the value of a setting, or
    the usual one where nothing says it."""
    settings = NEUTRAL | (NEUTRAL_OF_EXPERTS if experts else {})
    if value_of(LATENT, False):
        settings |= NEUTRAL_OF_LATENT
        if value_of("rope_type", "yarn") == "yarn":
            settings |= dict.fromkeys(SCALED_LATENT, ())
    odd: dict[str, Any] = {}
    for name, values in settings.items():
        value = as_one(name, value_of(name, values[0] if values else None))
        if value not in values:
            odd[name] = value if isinstance(value, bool | int | float | str) else str(value)
    if odd.get(SCORES) == "sigmoid":  # there is no softmax then
        odd.pop(PRE_SOFTMAX, None)
    if GROUPS not in odd:
        odd.pop(GROUPS_OF_TOKEN, None)
    if WINDOW not in odd:
        odd.pop(FULL_EVERY, None)
    return odd


def _odd(module: Any, config: Any, experts: bool) -> dict[str, Any]:
    odd = odd_settings(
        lambda name, usual: getattr(module, name, getattr(config, name, usual)), experts
    )
    kind = getattr(module, POSITION_KIND, "learned_absolute")
    if kind not in ("rope", "learned_absolute"):
        odd[POSITION_KIND] = str(kind)
    yarn = {name: getattr(config, name, None) for name in YARN if kind == "yarn"}
    return odd | {name: value for name, value in yarn.items() if value is not None}


def _with_rotary(architecture: Architecture, module: Any) -> Architecture:
    """With what the rotary embedding computes; a GPTModel keeps of its scaling only the result."""
    rotary: Any = getattr(module, "rotary_pos_emb", None)
    owner: Any = module.config if getattr(module.config, LATENT, False) else module
    base = float(getattr(rotary, "rotary_base", owner.rotary_base))  # yarn's own
    interpolation = float(getattr(rotary, "seq_len_interpolation_factor", None) or 0.0)
    scaled = rotary is not None and bool(getattr(module, "rotary_scaling", False))
    factor = _rope_factor(rotary, base) if scaled else 0.0
    return replace(architecture, rotary_base=base, interpolation=interpolation, rope_factor=factor)


def _rope_factor(rotary: Any, base: float) -> float:
    """The factor by which the longest wavelength was scaled; 0 where none was long enough.

    megatron-core divides frequencies below 1/8192 turns by it, leaves those above 4/8192, and
    mixes both in between (`RotaryEmbedding._apply_scaling`).
    """
    count = len(rotary.inv_freq)
    plain = base ** (-(count - 1) / count)
    turns = _LONG * plain / (2 * 3.141592653589793)
    mixed = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
    if mixed == 1.0:
        return 0.0
    return round((1.0 - mixed) / (float(rotary.inv_freq[-1]) / plain - mixed), 3)
