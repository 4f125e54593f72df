"""A small training program of Megatron-LM's own parts: what one rank of a job does.

All of it is stock (`megatron.training` from 0.19 on is in megatron-core's wheel): arguments, model,
optimizer, train step, save and load. Only the attention of context parallelism and what needs a GPU
are stand-ins.
"""

import contextlib
import functools
import importlib.machinery
import os
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.stock.server import flags_of

SAMPLES, SEQUENCE, VOCAB = 4, 16, 63
BASE = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
    "--num-query-groups 2 --ffn-hidden-size 64 --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--init-method-std 0.15 --attention-dropout 0 --hidden-dropout 0 "
    "--micro-batch-size 1 --train-iters 20 --eval-iters 0 --save-interval 1000 --lr 3e-3 "
    "--min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --weight-decay 0.1 --clip-grad 1.0 "
    "--mock-data --tokenizer-type NullTokenizer --make-vocab-size-divisible-by 32 "
    "--transformer-impl local --use-cpu-initialization --distributed-backend gloo "
    "--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion "
    "--no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --disable-jit-fuser "
    "--no-check-for-nan-in-loss-and-grad "
    f"--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --vocab-size {VOCAB} "
    f"--global-batch-size {SAMPLES}"
)
ON_CPU = (
    *("no_torch_compile", "current_device_is_cpu", "rng_tracker_on_cpu", "cuda_literals_on_cpu"),
    *("cuda_type_names_on_cpu", "cuda_streams_on_cpu", "moe_router_gemm", "moe_dispatch_on_cpu"),
    "adamw_load",
)


@dataclass(frozen=True)
class Job:
    """What the ranks do. `flags` go behind those of BASE, of which those in `without` are left out.
    `ours`: this package's load and save stand in the place of stock's. `want`: a file with what
    the state must be after the load. `out`: where the result goes."""

    out: str
    flags: str = ""
    world: int = 4
    iterations: int = 3
    more: int = 0  # iterations after the save
    ours: bool = False
    other: str = ""  # a folder of another kind of model, which this package loads into this one
    without: tuple[str, ...] = ()
    want: str = ""
    limit_s: float = 120
    environment: dict[str, str] = field(default_factory=dict)


# ------------------------------------------------ imports, once for all jobs


class _WithoutTriton:
    """Modules that import triton at their top, and of which these models call nothing, get an empty
    one while they are imported."""

    NAMES = (
        "megatron.core.transformer.moe.paged_stash",
        "megatron.core.transformer.moe.ops.paged_stash",
        "megatron.core.ssm.ops.",
    )

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith(self.NAMES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        source = Path(spec.origin).read_text() if spec is not None and spec.origin else ""
        if spec is None or spec.loader is None or "import triton" not in source:
            return spec
        stock = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            # what it imports of megatron-core comes first: that finds no triton, as ever
            for line in source.splitlines():
                if line.startswith("from megatron.") and " import " in line:
                    importlib.import_module(line.split()[1])
            with _module("triton"), _module("triton.language"):
                stock(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def _module(name: str) -> Iterator[None]:
    """A module of this name that has whatever is asked for."""
    before = sys.modules.get(name)
    stand_in: Any = types.ModuleType(name)
    stand_in.__getattr__ = lambda attribute: _Anything()
    stand_in.__version__ = "3.0.0"
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before


class _Anything:
    """A decorator with or without arguments, or a module with such."""

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        return _Anything()


def imported(folder: str) -> str:
    """Imports Megatron-LM, of a folder where one is named; its version."""
    import typing

    import torch
    import typing_extensions

    if not hasattr(typing, "override"):  # of Python 3.12
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if folder:
        sys.path.insert(0, folder)
    sys.meta_path.insert(0, _WithoutTriton())  # type: ignore[arg-type]
    stub: Any = types.ModuleType("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    stub.enable_batch_invariant_mode = lambda *_: None
    stub.is_batch_invariant_mode_enabled = lambda: False
    sys.modules[stub.__name__] = stub
    import megatron_ucp_patches

    for name in ON_CPU:
        megatron_ucp_patches.apply(name)
    _without_gpu()
    import megatron.core
    import megatron.training.initialize as initialize
    import megatron.training.training

    import megatron_ucp.megatron_lm  # noqa: F401

    initialize._compile_dependencies = lambda: None  # CUDA's
    found = Path(megatron.core.__file__).resolve()
    if folder and not found.is_relative_to(Path(folder).resolve()):
        raise SystemExit(f"{found} was imported, and not what lies in {folder}")
    return str(megatron.core.__version__).partition("+")[0]


def _without_gpu() -> None:
    """What Megatron-LM's program asks of CUDA beside what megatron-core does."""
    import torch

    cuda: Any = torch.cuda
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_properties = lambda *_: SimpleNamespace(
        major=8, minor=0, total_memory=1 << 34, name="cpu"
    )
    cuda.set_device = lambda *_: None
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_: torch.set_rng_state(state)
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, functools.partial(_on_cpu, getattr(torch, name)))
    for name in ("memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *_: 0)
        setattr(cuda, f"max_{name}", lambda *_: 0)


def _on_cpu(factory: Any, *args: Any, device: Any = None, pin_memory: bool = False, **more: Any):
    """A tensor for a GPU, on the CPU."""
    import torch

    is_gpu = device is not None and torch.device(device).type == "cuda"
    return factory(*args, device="cpu" if is_gpu else device, **more)


# ------------------------------------------------ one rank of a job


def run(job: Job, rank: int, store: str) -> None:
    """Builds, loads as the flags say, trains, saves, trains on; rank 0 writes the result."""
    import torch
    import torch.distributed as dist

    torch.cuda.device_count = lambda: job.world
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world))
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", **job.environment)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.world)
    sys.argv = ["pretrain_gpt.py", *flags_of(job, BASE)]
    args, container = _arguments()
    if args.context_parallel_size > 1:
        from tests.stock import context_parallel

        context_parallel.install()
    if args.multi_latent_attention:
        _latent_attention_of_local_layers()
    import megatron.training.training as training

    if job.ours:
        from megatron_ucp import megatron_lm

        training.load_checkpoint = megatron_lm.load_checkpoint
        training.save_checkpoint = megatron_lm.save_checkpoint
    program = _built(args, container)
    if job.other:
        _load_of_another_model(program, job.other)
    result: dict[str, Any] = {"iteration": args.iteration, "samples": args.consumed_train_samples}
    if job.want:
        result |= _compared(program, job.want)
    result["losses"] = _trained(program, job.iterations)
    if args.save:
        training.save_checkpoint_and_time(
            args.iteration + job.iterations,
            program.stack.chunks,
            program.optimizer,
            program.scheduler,
            12345,
            {},
        )
        result["state"] = _state(program)
    result["after"] = _trained(program, job.more, job.iterations)
    if rank == 0:
        torch.save(result, job.out)
    dist.barrier()
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _arguments() -> tuple[Any, Any]:
    """The flags, and what pretrain_gpt.py makes of them."""
    from megatron.training import get_args, initialize
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        hybrid_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config_of = hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
    container = pretrain_cfg_container_from_args(args, config_of(args))
    initialize.initialize_megatron(allow_no_cuda=True)
    return get_args(), container


def _latent_attention_of_local_layers() -> None:
    """megatron-core's own attention has no words for widths of keys and values, and needs none;
    classes of Transformer Engine are asked for by `isinstance`, where it is not there either."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    stock = DotProductAttention.__init__

    def init(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **more: Any):
        stock(self, *args, **more)

    DotProductAttention.__init__ = init  # type: ignore[method-assign]
    for name in ("TEColumnParallelLinear", "TELinear", "Linear"):
        if not isinstance(getattr(multi_latent_attention, name, None), type):
            setattr(multi_latent_attention, name, type(name, (), {}))


def _built(args: Any, container: Any) -> Any:
    """The model with its optimizer and schedule, and what was loaded in them: as the tests of the
    stack know an engine (see `tests.engines.megatron_states`)."""
    import megatron.training.training as training
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection

    chunks, optimizer, scheduler = training.setup_model_and_optimizer(
        ModelType.encoder_or_decoder,
        checkpointing_context={},
        cfg_container=container,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    bare = []
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        bare.append(chunk)
    counts = SimpleNamespace(iteration=0, consumed_samples=0, skipped_iterations=0)
    return SimpleNamespace(
        args=args,
        stack=SimpleNamespace(chunks=chunks, bare=bare),
        optimizer=optimizer,
        scheduler=scheduler,
        handle=counts,
        setup=SimpleNamespace(distributed=args.use_distributed_optimizer),
    )


def _load_of_another_model(program: Any, folder: str) -> None:
    """A GPTModel's checkpoint into a hybrid model, or back: refused unless it is asked for."""
    import megatron_ucp as ucp

    stack = ucp.attach_megatron(program.stack.chunks, program.optimizer, program.scheduler)
    with contextlib.suppress(ucp.UcpError):
        ucp.load(stack, folder)
        raise SystemExit("it was loaded without being asked for")
    ucp.load(stack, folder, allow={"hybrid"})
    program.args.iteration, program.args.consumed_train_samples = (
        stack.iteration,
        stack.consumed_samples,
    )


def _trained(program: Any, iterations: int, before: int = 0) -> list[float]:
    """Steps on samples that depend on their numbers alone; the mean losses over all ranks."""
    import megatron.training.training as training
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as groups
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.core.utils import get_model_config

    args, chunks = program.args, program.stack.chunks
    config = get_model_config(chunks[0])
    config.deallocate_pipeline_outputs = False  # of views, on a CPU
    config.grad_scale_func = program.optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    parts, part = groups.get_context_parallel_world_size(), groups.get_context_parallel_rank()

    def cut(tokens: Any) -> Any:
        """This rank's two chunks of a sequence, of which the first ranks have the outer ones."""
        pieces = tokens.chunk(2 * parts, -1)
        return tokens if parts == 1 else torch.cat([pieces[part], pieces[-1 - part]], -1)

    def forward(samples: Iterator[Any], model: Any) -> Any:
        ids = next(samples)
        mask = None if parts > 1 else torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
        at = cut(torch.arange(SEQUENCE)[None])
        output = model(cut(ids[:, :-1]), at, mask, labels=cut(ids[:, 1:]))
        return output, lambda out: (
            out.float().sum() / SEQUENCE,
            {"lm loss": out.detach().float().mean().view(1).clone()},
        )

    copies, copy = groups.get_data_parallel_world_size(), groups.get_data_parallel_rank()
    first = args.iteration + before
    losses: list[float] = []
    for iteration in range(first, first + iterations):
        drawn = [
            torch.randint(
                0,
                VOCAB + 1,
                (1, SEQUENCE + 1),
                generator=torch.Generator().manual_seed(1000 * iteration + sample),
            )
            for sample in range(copy, SAMPLES, copies)
        ]
        data = [RerunDataIterator(iter(drawn)) for _ in chunks]
        found, *_ = training.train_step(
            forward,
            data if len(chunks) > 1 else data[0],
            chunks,
            program.optimizer,
            program.scheduler,
            config,
            get_forward_backward_func(),
            iteration=iteration,
        )
        loss = (
            torch.stack([one.mean() for one in found.values()]).sum() if found else torch.zeros(())
        )
        loss = loss.clone()
        dist.all_reduce(loss, group=groups.get_data_parallel_group(with_context_parallel=True))
        dist.broadcast(loss, dist.get_world_size() - 1)  # a rank of the last stage
        losses.append(float(loss) / (copies * parts))
        args.consumed_train_samples += SAMPLES
    return losses


# ------------------------------------------------ states, by code that knows nothing of the package


def _state(program: Any) -> dict[str, Any]:
    from tests.engines.megatron_states import canonical

    for chunk in program.stack.chunks if program.setup.distributed else ():
        chunk.start_param_sync(force_sync=True)
    return canonical(program)


def _compared(program: Any, want: str) -> dict[str, Any]:
    """What differs from a saved state, and whether one bit that is planted would be seen."""
    import torch

    from tests.engines.megatron_states import compare, held

    expected = torch.load(want, weights_only=False)["state"]
    have = _state(program)
    _, _, _, master, _, _ = held(program)[0]
    bit = master.view(-1).view(torch.int32)[:1]
    with torch.no_grad():
        bit ^= 1  # on every rank, as some have copies
    seen = compare(expected, _with_masters_of_now(program, have))
    with torch.no_grad():
        bit ^= 1  # on every rank, as some have copies
    elements = sum(value.numel() for value in expected["full"].values())
    return {"differences": compare(expected, have), "planted": seen, "elements": elements}


def _with_masters_of_now(program: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A state, but for the masters."""
    from tests.engines.canonical import everywhere
    from tests.engines.megatron_states import _stepped_here

    full = {key: value.clone() for key, value in state["full"].items()}
    for own in everywhere(_stepped_here(program)):
        for name, _, index, flat, _, _ in own:
            full[name, "fp32"].view(-1)[index] = flat["fp32"]
    return {**state, "full": full}
