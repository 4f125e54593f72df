"""What the ranks do in the tests of HF Trainer and Accelerate: both call `deepspeed.initialize`
themselves."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import megatron_ucp as ucp
from megatron_ucp.engines.record import record_of
from tests.engines import autotp_states
from tests.engines.canonical import canonical

VOCAB, SEQUENCE, GLOBAL_BATCH, SAMPLES = 32, 8, 4, 64
ON: Mapping[str, Any] = {"universal_checkpoint": {"enabled": True}}


def tiny_llama(tied: bool) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=20,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQUENCE,
            tie_word_embeddings=tied,
            use_cache=False,
        )
    )


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    model = tiny_llama(tied=True)
    model.register_buffer("mark", torch.full((3,), float(seed)))
    return model


def make_data() -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(VOCAB, (SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(7))
    return [{"input_ids": row, "labels": row} for row in tokens]


def ds_config(zero: int, batch: int = GLOBAL_BATCH, **extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": batch // torch.distributed.get_world_size(),
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": 0},
        **extra,
    }


def states(engine: Any, scheduler: Any) -> dict[str, Any]:
    """The canonical state; the trainers keep the scheduler outside of the engine."""
    held, engine.lr_scheduler = engine.lr_scheduler, scheduler
    gather: Any = canonical
    if engine.autotp_size() > 1:
        engine.plain_shapes = {n: p.shape for n, p in make_model(1).named_parameters()}
        gather = autotp_states.canonical
    try:
        return gather(engine)
    finally:
        engine.lr_scheduler = held


@contextlib.contextmanager
def as_in_a_new_process(installed: bool) -> Iterator[None]:
    """`ucp.install`, and what it and the trainers leave in the process taken away afterwards."""
    import os

    import deepspeed
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    stock = deepspeed.initialize
    try:
        # Accelerate finds no backend by itself for DeepSpeed on several CPU ranks, and takes each
        # for the only one.
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
        if installed:
            ucp.install()
        yield
    finally:
        deepspeed.initialize = stock
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()


def trainer(
    folder: str, zero: int, steps: int, installed: bool = True, **how: Any
) -> dict[str, Any]:
    """Trains up to step `steps` under `transformers.Trainer`, with `batch` samples in a step.

    Returns the losses by step, the samples that this rank took in each, the states when it saved
    (`save_at`), and those on_train_begin, after a resume.
    """
    with as_in_a_new_process(installed):
        return _trainer(folder, zero, steps, **how)


def _trainer(
    folder: str,
    zero: int,
    steps: int,
    save_at: int | None = None,
    resume: str | None = None,
    seed: int = 1,
    config: Mapping[str, Any] = ON,
    batch: int = GLOBAL_BATCH,
) -> dict[str, Any]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    found: dict[str, Any] = {"samples": []}
    data = make_data()
    numbers = {tuple(row["input_ids"].tolist()): number for number, row in enumerate(data)}

    class Noting(Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            rows = inputs["input_ids"].tolist()
            found["samples"].append([numbers[tuple(row)] for row in rows])
            return super().training_step(model, inputs, *args, **kwargs)

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found["begin"] = states(run.deepspeed, run.lr_scheduler)
            found["report"] = getattr(run.deepspeed, "ucp_report", None)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == save_at:
                found["saved"] = states(run.deepspeed, run.lr_scheduler)

    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=batch // torch.distributed.get_world_size(),
        deepspeed=ds_config(zero, batch, **config),
        learning_rate=1e-2,
        weight_decay=0.1,
        lr_scheduler_type="linear",
        max_grad_norm=1.0,
        warmup_steps=2,
        save_strategy="steps" if save_at else "no",
        save_steps=save_at or 500,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        accelerator_config={"use_configured_state": True},
    )
    run = Noting(model=make_model(seed), args=arguments, train_dataset=data, callbacks=[Watch()])
    run.train(resume_from_checkpoint=resume)
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    found["losses"] = {entry["step"]: entry["loss"] for entry in logged}
    return found


def adapted(seed: int) -> Any:
    """Another adapter for each seed, around one base."""
    from peft import LoraConfig, get_peft_model

    base = make_model(1)
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], bias="lora_only")
    model = get_peft_model(base, config)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data.normal_(std=0.1)
        elif "norm" in name:  # beside the adapter, in a group of its own
            param.requires_grad_(True)
    return model


def _training(seed: int, adapter: bool) -> tuple[Any, torch.optim.Optimizer, Any]:
    """A model, an optimizer with two groups, and a scheduler, as they come to Accelerate."""
    model = adapted(seed) if adapter else make_model(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return model, optimizer, scheduler


@as_in_a_new_process(installed=True)
def accelerator(
    folder: str,
    zero: int,
    steps: int,
    save_at: int | None = None,
    load: bool = False,
    seed: int = 1,
    adapter: bool = False,
) -> dict[str, Any]:
    """Trains up to step `steps` under `accelerate.Accelerator`; saves before step `save_at`, or
    loads first. Of an `adapter` of peft the frozen weights are not saved."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    # Else Accelerate advances the scheduler once per rank and step, so that the rate depends on the
    # number of ranks.
    run = Accelerator(
        step_scheduler_with_optimizer=False,
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ds_config(zero, **ON)),
    )
    engine, wrapped, scheduler = run.prepare(*_training(seed, adapter))
    found: dict[str, Any] = {"losses": {}}
    if load:
        found["fresh"] = states(engine, scheduler)
        run.load_state(folder, **({"load_module_strict": False} if adapter else {}))
        found["begin"], found["report"] = states(engine, scheduler), engine.ucp_report
    data, rank, world = make_data(), run.process_index, run.num_processes
    while engine.global_steps < steps:
        if engine.global_steps == save_at:
            run.save_state(folder, **({"exclude_frozen_parameters": True} if adapter else {}))
            found["saved"] = states(engine, scheduler)
        first = engine.global_steps * GLOBAL_BATCH
        batch = [data[n % SAMPLES]["input_ids"] for n in range(first, first + GLOBAL_BATCH)]
        tokens = torch.stack(batch).chunk(world)[rank]
        loss = engine(input_ids=tokens, labels=tokens).loss
        run.backward(loss)
        wrapped.step()
        scheduler.step()
        wrapped.zero_grad()
        every = torch.as_tensor(run.gather(loss.detach().reshape(1)))
        found["losses"][engine.global_steps] = every.double().mean().item()
    return found


def refused(installed: bool, config: Mapping[str, Any], **arguments: Any) -> str:
    """The error of a `trainer` run that has to fail. On one rank only: others would wait."""
    try:
        trainer(installed=installed, config=config, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it was not refused"


def installed(config: Any) -> bool | str:
    """Whether `install` attaches an engine with this config and its options; what it says where it
    refuses."""
    import deepspeed

    stock = deepspeed.initialize
    ucp.install()
    try:
        engine = deepspeed.initialize(
            model=torch.nn.Linear(1, 1), config=config, dist_init_required=False
        )[0]
    except ucp.UcpError as error:
        return str(error)
    finally:
        deepspeed.initialize = stock
    return record_of(engine).attachment is not None


def first_start(folder: str) -> list[Any]:
    """What the engine's own load says to folders without a checkpoint."""
    from tests.engines.model import Setup, make_engine

    engine = make_engine(Setup(1))
    out: list[Any] = [engine.load_checkpoint(folder), engine.load_checkpoint(folder + "/not/there")]
    for tag, path in (("global_step1", folder), (None, folder)):
        try:
            if tag is None:
                (Path(folder) / "latest").write_text("gone")
            engine.load_checkpoint(path, tag=tag)
        except ucp.UcpError as error:
            out.append(type(error).__name__)
    return out
