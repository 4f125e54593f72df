"""What every checkpoint of Megatron gives to the operations above, whatever its files are."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.flat import FlatBuffer, Member
from megatron_ucp.core.layout import Chunks, Layout, Replicate, ShardRuns
from megatron_ucp.core.manifest import ARGUMENTS, RECORDED, SAVED_ON, Manifest, ParamSpec
from megatron_ucp.core.mesh import DENSE_CUT, EXPERT_CUT, Mesh
from megatron_ucp.core.names import Keeper
from megatron_ucp.errors import StateMismatchError, UnsupportedError, some_of
from megatron_ucp.formats import expect
from megatron_ucp.formats.checkpoint import (
    NO_RANDOM_STATES,
    CallerModel,
    Checkpoint,
    Extras,
    Generators,
)
from megatron_ucp.formats.folder import Folder
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.manifest_beside import ManifestBeside
from megatron_ucp.formats.megatron.arguments import mesh_of, plain_arguments
from megatron_ucp.formats.megatron.buffers import BUFFER_STATES, InBuffer, PlacedBuffer
from megatron_ucp.formats.megatron.groups import Membership, SavedGroup
from megatron_ucp.formats.megatron.names import layout_of
from megatron_ucp.formats.megatron.run_state import (
    WhereOf,
    counters_of,
    extras_of,
    generators,
    iteration_of,
)


class MegatronFolder(Checkpoint):
    """An opened tag folder; a context manager that closes its files. Subclasses set `manifest`."""

    def __init__(self, folder: Folder, told: CallerModel) -> None:
        super().__init__(folder)
        self.told = told
        self.groups: Sequence[SavedGroup] = []

    # ------------------------------------------------ what subclasses give

    @property
    @abstractmethod
    def main_tree(self) -> Mapping[str, Any]:
        """What that file holds."""

    @property
    @abstractmethod
    def has_random_states(self) -> bool:
        """Whether there are those of any rank."""

    @abstractmethod
    def random_entry(self, here: Mesh, rank: int) -> tuple[Any, WhereOf, str] | str:
        """The stored entry with the generators of a rank of a mesh that cuts the model as the run
        did, where the tensors in it lie, and its file; or why there is none."""

    # ------------------------------------------------ what the operations ask for

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The run's arguments as plain values; empty where the files hold none."""
        return plain_arguments(self.main_tree.get("args"))

    @cached_property
    def iteration(self) -> int:
        return iteration_of(self.main_tree, self.main_file)

    @cached_property
    def saved_on(self) -> Mesh:
        """The mesh of the run that saved it."""
        return mesh_of(self.arguments)

    @property
    def has_experts_cut_alone(self) -> bool:
        """Whether experts are cut otherwise than the rest, and no expert parallelism spreads them:
        Megatron-LM keeps them among the others then, and sums their gradients over other ranks than
        those that have copies."""
        mesh = self.saved_on
        alone = mesh.ep == 1 and mesh.cut_of_experts != mesh.cut_of_dense
        return alone and bool(self.arguments.get("num_experts"))

    @cached_property
    def evidence(self) -> ManifestBeside:
        found = ManifestBeside(self.folder, ())
        self._closing.callback(found.close)
        return found

    @cached_property
    def extras(self) -> Extras:
        with self.closed_on_failure():
            return super().extras

    @property
    def notes(self) -> list[str]:
        """What a reader should know of how the checkpoint was understood."""
        if self.manifest.keeper == Keeper.WEIGHTS:
            states = "no states of an optimizer"
            if self.other_optimizer and not self.told.weights:
                states = f"the states of the optimizer {self.other_optimizer} are not supported"
            return [*self.path_notes, f"weights alone: {states}"]
        lower = (one.name for one in self.manifest.params if one.dtype != "float32")
        return [*self.path_notes, *([CLIPPED] if any(map(self.is_clipped, lower)) else [])]

    def is_clipped(self, name: str) -> bool:
        """Whether a weight may differ from its rounded master in the last place: `--qk-clip` scales
        the matrices of queries and keys after a step, the weight and its master apart."""
        return bool(self.arguments.get("qk_clip")) and name.endswith(_OF_QUERIES_AND_KEYS)

    def _counters(self) -> dict[str, int]:
        """Iterations, samples and skipped iterations."""
        return counters_of(self.iteration, self.arguments, self.groups)

    def read_extras(self) -> Extras:
        found = self._counters(), self.scaler(), False, self.stateless()
        return extras_of(self.main_tree, self.arguments, *found, self.main_file)

    @abstractmethod
    def scaler(self) -> LossScale:
        """The loss scale; none without one."""

    @abstractmethod
    def stateless(self) -> Mapping[str, None]:
        """The layers' extra states that hold nothing."""

    def random_states(self, here: Mesh, rank: int) -> Generators | str:
        """Megatron-LM keeps those of each model-parallel rank: of its first copy alone, where the
        copies draw alike. Raises DamagedFileError."""
        if self.arguments.get("no_save_rng"):
            return "the checkpoint was saved without them (no_save_rng)"
        if not self.has_random_states:
            return NO_RANDOM_STATES
        if not self._is_cut_as(here):
            return self.of_another_mesh
        with self.closed_on_failure():
            found = self.random_entry(here, rank)
            if isinstance(found, str):
                return found
            entry, place, file = found
            ranks = expect.kind(entry, list, "rng_state", file)
            if not ranks:
                raise expect.other_structure("rng_state of data-parallel ranks", None, file)
            if len(ranks) not in (1, here.dp):
                return self.of_another_mesh
            return generators(entry, here.coord(rank).dp, place, file)

    def _is_cut_as(self, here: Mesh) -> bool:
        """Whether a mesh cuts the model as the run did; it may have another number of copies."""
        ran, experts = self.saved_on, bool(self.arguments.get("num_experts"))
        alike = (here.tp, here.pp, here.sp) == (ran.tp, ran.pp, ran.sp)
        return alike and (not experts or (here.ep, here.etp) == (ran.ep, ran.etp))

    @property
    def of_another_mesh(self) -> str:
        """Why there are no random states for a rank."""
        return f"the checkpoint's are of the ranks of another mesh ({self.saved_on})"

    # ------------------------------------------------ parts of a manifest

    def membership(self) -> Membership:
        """Which parameter is in which group."""
        return Membership.by_arguments(
            self.groups, self.arguments, self.main_file, self.recorded, self.told.like
        )

    def group_numbers(self, specs: Iterable[ParamSpec]) -> dict[str, int]:
        """The group of each of some parameters, which the optimizer steps."""
        membership = self.membership()
        return {spec.name: membership.number(spec) for spec in specs}

    def on_mesh(self, spec: ParamSpec, behind: Ints | None) -> ParamSpec:
        """A parameter with the layout that tensor parallelism gives it in `on_mesh`: as a caller or
        rules say, else as Megatron's own modules are cut. `behind` is the shape of the second
        matrix of its MLP. Raises RuleError."""
        if (declared := self.told.declared(spec)) is not None:
            return replace(spec, on_mesh=declared.layout, extent=declared.extent)
        return replace(
            spec, on_mesh=layout_of(spec.name, spec.shape, behind[-1] if behind else None)
        )

    def cut(self, spec: ParamSpec) -> ParamSpec:
        """A parameter as the ranks of the run that saved it held it. Raises UnsupportedError where
        nobody says how they cut it; one rank held it whole, which says nothing of several."""
        if spec.on_mesh is None and self.saved_on.tp > 1:
            raise UnsupportedError(
                "how a parameter was cut is not known",
                file=self.main_file,
                parameter=spec.name,
                expected="a name of megatron-core's GPTModel",
                fix="give --rules FILE (Python: rules=)",
                id="layout-unknown",
            )
        layout = spec.on_mesh or (_uncut(spec) if spec.shape else Replicate())
        return replace(spec, layout=layout, on_mesh=None)

    @cached_property
    def other_optimizer(self) -> str:
        """The optimizer of the run, where it is none of those whose states are read: such as Muon,
        which steps a matrix as a whole; "" where it is one of them."""
        name = self.arguments.get("optimizer")
        return "" if name in (None, *STEPPING_ELEMENTS) else str(name)[:100]

    @property
    def reads_states(self) -> bool:
        """Whether the states of the optimizer are read, and not the weights alone."""
        return not self.told.weights and not self.other_optimizer

    def refuse_optimizer(self) -> None:
        """Raises UnsupportedError for optimizers whose files hold no fp32 masters."""
        for name, what in WITHOUT_MASTERS.items():
            if self.arguments.get(name):
                raise UnsupportedError(
                    f"the checkpoint was written with {what}, which is not supported",
                    file=self.main_file,
                    expected=f"{name}=False",
                    found=f"{name}={self.arguments[name]}",
                    fix="save it again without that option",
                )

    def as_recorded(self, found: Manifest) -> Manifest:
        """With what the manifest beside the files knows of the model: its family and sizes, which
        rows of a vocabulary are data, and how a mesh cuts what nobody else says."""
        kept = self.recorded
        if kept is None or RECORDED not in kept.run:
            return found
        known = {(spec.name, spec.shape): spec for spec in kept.params}
        params = tuple(
            _as_recorded(spec, known.get((spec.name, spec.shape))) for spec in found.params
        )
        run = {key: value for key, value in found.run.items() if key != ARGUMENTS}
        run[RECORDED] = kept.run[RECORDED]
        return replace(found, params=params, family=kept.family, run=run)

    def flat_buffer(
        self,
        one: PlacedBuffer,
        starts: Mapping[InBuffer, int],
        length: int,
        groups: Mapping[str, int],
    ) -> FlatBuffer:
        """A buffer as the files hold it; `starts` say where its parameters begin there, `groups`
        the group of each."""
        members: list[Member] = []
        for param, start in starts.items():
            group = groups[param.name]
            scalars = self.groups[group].scalars
            members.append(Member(param.name, start, param.elems, group, scalars))
        states = tuple((state, "float32") for state in BUFFER_STATES.values())
        return FlatBuffer(tuple(members), length, 1, "whole", states, one.at, one.axes)

    def described(self) -> dict[str, Any]:
        """What a manifest's `run` says."""
        out: dict[str, Any] = {**self._counters()}
        if self.arguments:
            out |= {SAVED_ON: str(self.saved_on), ARGUMENTS: _of_model(self.arguments)}
        elif self.recorded is not None:
            out[SAVED_ON] = str(self.recorded.written_on)
        return out


def _as_recorded(spec: ParamSpec, kept: ParamSpec | None) -> ParamSpec:
    if kept is None:
        return replace(spec, extent=None)
    on_mesh = spec.on_mesh
    if on_mesh is None and isinstance(spec.layout, Chunks):
        on_mesh = kept.on_mesh if isinstance(kept.layout, Chunks) else kept.layout
    return replace(spec, extent=kept.extent, on_mesh=on_mesh)


STEPPING_ELEMENTS = ("adam", "sgd")  # optimizers of Megatron-LM that step each element for itself

# Options under which the optimizer's files hold no fp32 masters. Those of a precision-aware one do:
# Megatron-LM writes its states unscaled, whatever it keeps them in.
WITHOUT_MASTERS = {
    "optimizer_cpu_offload": "an optimizer that is offloaded to the CPU",
    "fp8_param_gather": "weights in fp8, of which no copy is stored that masters could show",
    "use_megatron_fsdp": "Megatron-FSDP",
    "use_torch_fsdp2": "torch's FSDP2",
}


def _uncut(spec: ParamSpec) -> Layout:
    """The layout of a parameter that one rank held, where nobody says how several would."""
    (axis,) = DENSE_CUT if spec.expert is None else EXPERT_CUT
    return ShardRuns(axis, 0, (((0, spec.shape[0]),),))


def _of_model(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that say what the model computes, which a manifest records."""
    return {name: arguments[name] for name in _MODEL if name in arguments}


_MODEL = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("group_query_attention", "ffn_hidden_size", "padded_vocab_size", "vocab_size"),
    *("tokenizer_type", "max_position_embeddings", "position_embedding_type", "normalization"),
    *("layernorm_epsilon", "swiglu", "squared_relu", "openai_gelu", "bias_gelu_fusion"),
    *("add_bias_linear", "add_qkv_bias", "qk_layernorm", "qk_l2_norm", "rotary_base"),
    *("rotary_percent", "rotary_interleaved", "rotary_seq_len_interpolation_factor"),
    *("use_rope_scaling", "rope_scaling_factor", "untie_embeddings_and_output_weights"),
    *("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_layer_freq", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
    *("moe_router_topk_scaling_factor", "moe_router_enable_expert_bias", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_force_load_balancing", "moe_expert_capacity_factor"),
    *("moe_apply_probs_on_input", "moe_latent_size", "multi_latent_attention", "softmax_type"),
    *("experimental_attention_variant", "activation_func_clamp_value", "glu_linear_offset"),
    *("layernorm_zero_centered_gamma", "softmax_scale"),
    *("window_size", "no_rope_freq", "mtp_num_layers", "attention_output_gate"),
    *("apply_residual_connection_post_layernorm", "moe_router_load_balancing_type", "seed"),
    *(
        "model_family",
        "activation_func",
        "true_vocab_size",
    ),  # of folders that were converted to Megatron's
)


# of attention, and of multi-latent attention with and without low-rank queries
_OF_QUERIES_AND_KEYS = tuple(
    f".{module}.weight"
    for module in ("linear_qkv", "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
)
CLIPPED = (
    "--qk-clip scales weights of queries and keys and their masters apart: the weights are taken "
    "from the masters, which differ from the stored ones in the last place at most"
)


def not_proved(wrong: list[str], arguments: Mapping[str, Any], file: str) -> StateMismatchError:
    """The error for parameters whose masters are not the stored weights."""
    tied = not arguments.get("untie_embeddings_and_output_weights", True)
    several = arguments.get("overlap_grad_reduce") or (tied and mesh_of(arguments).pp > 1)
    reason = ""
    if several:
        reason = (
            " (megatron-core 0.16.1 to 0.19.2 saves wrong slices of buckets with padding, which "
            "this run may have had: they are lost)"
        )
    return StateMismatchError(
        f"the fp32 masters of parameters are not the weights beside them{reason}",
        file=file,
        parameter=wrong[0],
        expected="masters that, rounded, are the weights bit for bit",
        found=some_of(wrong, _NAMED),
        fix='load another tag, or the weights alone: --allow weights (Python: allow={"weights"})',
    )


_NAMED = 5
