"""What the ranks do in the tests of models with experts."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.families import find_family
from pretrain.mcore import experts, models, pipeline
from pretrain.mcore.experts import Experts
from tests.engines import tensor_jobs
from tests.engines.model_jobs import (
    GLOBAL_BATCH,
    LLAMA,
    SEQUENCE,
    attempting,
    close,
    engine_of,
    record_norms,
    train_step,
)

VOCAB = 32
MIXTRAL = models.ModelConfig(
    "mixtral",
    layers=2,
    hidden=16,
    head_dim=4,
    ffn=24,
    heads=4,
    groups=2,
    vocab=VOCAB,
    true_vocab=VOCAB,
    positions=SEQUENCE,
    init_std=0.15,
    experts=Experts(4, ffn=24, aux_loss=0.1, shared_ffn=8),
)


def with_experts(**changes: Any) -> models.ModelConfig:
    """The model with other experts."""
    assert MIXTRAL.experts is not None
    return replace(MIXTRAL, experts=replace(MIXTRAL.experts, **changes))


@dataclass(frozen=True)
class Cut:
    """How a model with experts is cut, and how DeepSpeed runs it. `etp` 0: as `tp`; `pp` 0: without
    DeepSpeed's pipeline."""

    ep: int = 1
    etp: int = 0
    tp: int = 1
    pp: int = 0
    zero: int = 0
    model: models.ModelConfig = MIXTRAL
    dtype: str = "fp32"
    fp32_sums: bool = False
    clip: float = 1e9  # the norm is computed, nothing is clipped
    plant: str = ""

    @property
    def accumulate(self) -> int:
        """Always one sequence in a micro batch: the auxiliary loss is that of a micro batch."""
        return GLOBAL_BATCH // (dist.get_world_size() // self.tp // (self.pp or 1))

    @property
    def saved_whole(self) -> bool:
        """Whether DeepSpeed saves all of the model; the builder refuses where not."""
        etp = self.etp or self.tp
        return etp <= self.tp <= etp * self.ep

    def __str__(self) -> str:
        return f"ep{self.ep}-etp{self.etp or self.tp}-tp{self.tp}-pp{self.pp}-zero{self.zero}"


def build(cut: Cut) -> Any:
    """Starts the groups and builds the model, or this rank's stage."""
    config = replace(cut.model, dtype=cut.dtype, sequence_parallel=cut.tp > 1)
    models.start(cut.tp, config.seed, cut.pp or 1, cut.ep, cut.etp or None)
    with mock.patch.object(experts, "check_files") if not cut.saved_whole else nullcontext():
        return pipeline.build_pipeline(config, cut.pp) if cut.pp else models.build(config)


def canonical(model: Any, cut: Cut) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters by canonical name."""
    stages, names = cut.model.model().pipe, experts.global_expert_names(model)
    return {
        stages[names[name]] if cut.pp else names[name]: param
        for name, param in model.named_parameters()
    }


def values(model: Any, cut: Cut) -> dict[str, torch.Tensor]:
    """Copies of this rank's parameters by canonical name, also at ZeRO-3."""
    import deepspeed

    held = canonical(model, cut)
    with deepspeed.zero.GatheredParameters(list(held.values())):
        return {name: param.detach().clone() for name, param in held.items()}


def planted(fault: str) -> Any:
    """One thing undone, for a negative control."""
    import megatron_ucp_patches as patches
    from deepspeed.runtime import bf16_optimizer, utils
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
    from deepspeed.runtime.pipe import engine, schedule
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    if not fault:
        return nullcontext()
    for name in (*experts.PATCHES, *pipeline.PATCHES):
        patches.apply(name)

    def stock(holder: Any, name: str) -> Any:
        return mock.patch.object(holder, name, getattr(holder, name).__wrapped__)

    if fault == "experts as megatron-core leaves them":
        return mock.patch.object(experts, "experts_are_apart", lambda: False)
    if fault == "stock norm without ZeRO":
        return stock(DeepSpeedEngine, "clip_fp32_gradients")
    if fault == "stock norm in half precision":
        return stock(FP16_UnfusedOptimizer, "unscale_and_clip_grads")
    if fault == "stock norm of BF16_Optimizer":
        theirs = utils.get_norm_with_moe_layers
        return mock.patch.object(bf16_optimizer, "get_norm_with_moe_layers", theirs)
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    if fault == "no scale from the loss":
        return mock.patch.object(experts, "with_auxiliary_losses", lambda loss, _: loss)
    methods: Any = engine.PipelineEngine._INSTRUCTION_MAP
    plain = methods[schedule.BackwardPass].__wrapped__
    return mock.patch.dict(methods, {schedule.BackwardPass: plain})


def gradients(cut: Cut) -> dict[str, Any]:
    """Of one global batch: what one step of plain gradient descent with the rate 1 takes from each
    parameter, under whatever ZeRO stage. With the norm, the loss, and this rank's place."""
    with planted(cut.plant):
        return _gradients(cut)


def _gradients(cut: Cut) -> dict[str, Any]:
    from megatron.core import parallel_state

    model = build(cut)
    before = values(model, cut)
    optimizer = torch.optim.SGD(models.param_groups(model, lr=1.0, weight_decay=0.0))
    engine = engine_of(cut, model, optimizer, gradient_clipping=cut.clip)
    norms = record_norms(engine)
    loss = train_step(engine, cut, 0)
    after = values(engine.module, cut)
    found = {
        "loss": loss,
        "norms": norms,
        "auxiliary": experts.auxiliary_losses(engine.module.config, cut.accumulate),
        "gradients": {name: before[name] - after[name] for name in before},
        "tensor": parallel_state.get_tensor_model_parallel_rank(),
        "expert_tensor": parallel_state.get_expert_tensor_parallel_rank(),
    }
    close(engine)
    return found


def live(cuts: list[Cut]) -> list[dict[str, Any]]:
    """First values and attributes of this rank's parameters, by canonical name, for each cut."""
    from megatron.core import parallel_state

    found = []
    for cut in cuts:
        model = build(cut)
        held, measure = canonical(model, cut), find_family("mixtral").measure
        assert measure is not None
        found.append(
            {
                "measured": measure(model),
                "tensor": parallel_state.get_tensor_model_parallel_rank(),
                "expert_tensor": parallel_state.get_expert_tensor_parallel_rank(),
                "expert": parallel_state.get_expert_model_parallel_rank(),
                "values": {name: param.detach().clone() for name, param in held.items()},
                "attributes": {name: dict(param.__dict__) for name, param in held.items()},
            }
        )
        models.stop()
    return found


def groups_match(cut: Cut) -> dict[str, tuple[list[int], list[int]]]:
    """Ranks of each group of experts in megatron-core and in DeepSpeed, and what is left of
    DeepSpeed's after `stop`."""
    from deepspeed.utils import groups
    from megatron.core import parallel_state

    build(cut)
    name = f"ep_size_{cut.ep}"
    pairs = {
        "experts": (
            parallel_state.get_expert_model_parallel_group(),
            groups._EXPERT_PARALLEL_GROUP,
        ),
        "copies": (
            parallel_state.get_expert_data_parallel_group(),
            groups._EXPERT_DATA_PARALLEL_GROUP,
        ),
    }
    ranks = dist.get_process_group_ranks
    found = {key: (ranks(ours), ranks(theirs[name])) for key, (ours, theirs) in pairs.items()}
    models.stop()
    found["left"] = ([], [*groups._EXPERT_PARALLEL_GROUP, *groups._EXPERT_DATA_PARALLEL_GROUP])
    return found


def refusals() -> dict[str, str]:
    """On four ranks: what each wrong call raises."""
    found: dict[str, str] = {}
    attempt = attempting(found)
    attempt("too many", lambda: models.start(1, 1, 1, 3))
    attempt("stages", lambda: models.start(1, 1, 2, 4))
    for name, cut in {
        "dense": Cut(2, model=LLAMA),
        "experts": Cut(2, model=with_experts(number=3)),
        "width": Cut(2, 2, 2, model=with_experts(ffn=23)),
        "file for two": Cut(2, 2, 1),
        "file for none": Cut(1, 1, 2),
        "stage without": Cut(2, pp=2, model=with_experts(every=2)),
    }.items():
        attempt(name, lambda cut=cut: build_plainly(cut))
        models.stop()
    models.start(2, 1)
    attempt("sequence", lambda: models.build(MIXTRAL))
    models.stop()
    return found


def grouped() -> str:
    """What is said of an engine with megatron-core's grouped experts, which need a GPU: here an
    engine whose experts only have the class."""
    cut = Cut(1)
    model = build(cut)
    engine = engine_of(cut, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    module = next(layer.experts for _, layer in experts.moe_layers(engine.module))
    module.__class__ = type("GroupedMLP", (type(module),), {})
    return refused(engine)


def refused(engine: Any) -> str:
    """What `attach` says against an engine, which is gone then; "" where it takes it."""
    return tensor_jobs.refusal(engine, lambda: ucp.attach(engine, family="mixtral"))


def build_plainly(cut: Cut) -> None:
    """As `build`, with every check."""
    config = replace(cut.model, sequence_parallel=cut.tp > 1)
    models.start(cut.tp, 1, cut.pp or 1, cut.ep, cut.etp or None)
    if cut.pp:
        pipeline.build_pipeline(config, cut.pp)
    else:
        models.build(config)


def native(cut: Cut, folder: str, load: bool) -> dict[str, torch.Tensor]:
    """This rank's parameters by canonical name after a step that DeepSpeed by itself saved, or
    after it loaded them into another model."""
    seed = 99 if load else cut.model.seed
    model = build(replace(cut, model=replace(cut.model, seed=seed)))
    optimizer = torch.optim.AdamW(models.param_groups(model, lr=3e-3, weight_decay=0.1))
    engine = engine_of(cut, model, optimizer, gradient_clipping=cut.clip)
    if load:
        engine.load_checkpoint(folder, tag="one")
    else:
        train_step(engine, cut, 0)
        engine.save_checkpoint(folder, tag="one")
    found = values(engine.module, cut)
    close(engine)
    return found


def train(cut: Cut, steps: int = 20) -> dict[str, Any]:
    """Losses and gradient norms of a run with AdamW, by step; the buffers at its end."""
    model = build(cut)
    # eps as in `model_jobs`: a gradient that is 0 but for rounding must not move a weight
    groups = models.param_groups(model, lr=3e-3, weight_decay=0.1)
    engine = engine_of(cut, model, torch.optim.AdamW(groups, eps=1e-4), gradient_clipping=cut.clip)
    norms, losses = record_norms(engine), []
    for step in range(steps):
        losses.append(train_step(engine, cut, step))
        experts.update_expert_bias(engine.module, engine.module.config)
    buffers = {name: value.clone() for name, value in engine.module.named_buffers()}
    close(engine)
    return {"losses": losses, "norms": norms, "buffers": buffers}


def without_groups(cut: Cut) -> str:
    """What `attach` says of experts that DeepSpeed does not know the groups of."""
    model = build(cut)
    engine = engine_of(cut, model, torch.optim.SGD(models.param_groups(model, 1.0, 0.0)))
    for param in engine.module.parameters():
        param.__dict__.pop("group_name", None)
    return refused(engine)


def unwritten(cut: Cut, folder: str) -> str:
    """What a save says of an engine that trains, and whose files would lack something."""
    model = build(cut)
    engine = engine_of(cut, model, torch.optim.SGD(models.param_groups(model, 1.0, 0.0)))
    attach = partial(ucp.attach, engine, family="mixtral")
    return tensor_jobs.refusal(engine, lambda: attach().save_checkpoint(folder))
