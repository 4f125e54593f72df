"""Megatron-DeepSpeed's own program on CPU ranks: what one rank of a job does.

`pretrain_gpt.py` runs as it is, with the lines of our patch, or under `megatron_ucp.run`. Only what
the installed DeepSpeed and a CPU lack is a stand-in, and functions of its training loop are wrapped
to look at losses and states.
"""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from tests.stock import stand_ins
from tests.stock.server import flags_of

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "patches" / "megatron_deepspeed_pretrain_gpt.patch"
SEQUENCE, SAMPLES, LAST = 16, 4, 9  # LAST: the iteration at which each run ends
BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --micro-batch-size 1 "
    "--train-iters 12 --lr 5e-3 --min-lr 1e-4 --lr-decay-style cosine --log-interval 1 "
    "--eval-iters 0 --eval-interval 1000 --tokenizer-type NullTokenizer --vocab-size 125 "
    "--make-vocab-size-divisible-by 16 --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 "
    "--distributed-backend gloo --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-dropout-fusion --no-gradient-accumulation-fusion "
    "--no-async-tensor-model-parallel-allreduce --attention-dropout 0 --hidden-dropout 0 "
    "--num-workers 0 --init-method-std 0.15 --deepspeed --data-impl mmap --save-interval 1 "
    f"--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} "
    f"--global-batch-size {SAMPLES} --exit-interval {LAST}"
)
OLD_PATCH = Path(__file__).with_name("nine_lines.patch")  # of this package's earlier versions


PATCHES = {"patched": PATCH, "nine lines": OLD_PATCH}


@dataclass(frozen=True)
class Job:
    """What the ranks do. `flags` go behind those of BASE, of which those in `without` are left out.

    `program` is "stock", "patched", "nine lines" (with an earlier patch), "runner" (under
    `megatron_ucp.run`), or "older": stock, whose DeepSpeed saves experts as versions before 0.19.8
    did. It saves at the iterations in `saves`. `want`: a result whose state the loaded one must be.
    """

    out: str
    folder: str  # for the text, the DeepSpeed config and the patched program
    flags: str = ""
    world: int = 4
    zero: int = 1
    dtype: str = "fp32"
    program: str = "patched"
    saves: tuple[int, ...] = ()
    want: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    limit_s: float = 120
    without: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    logits: bool = False  # of some tokens, at tp=1 without pipeline
    look: bool = False  # whether the result has the state that the run begins with
    evaluates: bool = False  # whether the result has the losses of the evaluation
    text: str = "text"  # or "golden": what the golden folders were trained on
    converts: tuple[str, ...] = ()  # DeepSpeed's own converter alone: from, to


# ------------------------------------------------ imports, once for all jobs


def imported(folder: str) -> str:
    """Imports the program's modules from a folder with its sources; the version of the
    megatron.core that it brings."""
    import deepspeed
    import torch

    torch.set_num_threads(1)
    if "MEGATRON_CORE_FIRST" in os.environ:  # a folder with another megatron-core
        sys.path.insert(0, os.environ["MEGATRON_CORE_FIRST"])
        sys.path.append(folder)
    else:
        sys.path.insert(0, folder)
    sys.path.append(f"{folder}/site")
    stand_ins.install()
    _take_attention_masks()
    _gather_flat()
    import megatron.core.package_info as info
    import megatron.data.dataset_utils as data
    import megatron.training  # noqa: F401

    import megatron_ucp.engines.deepspeed.install  # noqa: F401  for the programs that use it

    deepspeed.utils.logger.setLevel("WARNING")
    data.compile_helper = lambda: None  # it was compiled before
    sys.modules["deepspeed.env_report"] = mock.MagicMock()  # it asks for every op: seconds
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    return str(info.__version__)


def _take_attention_masks() -> None:
    """DeepSpeed's Ulysses takes the dim of the batch where the program gives it a mask, and heads
    apart where the program's attention has them in one dim."""
    import torch
    from deepspeed.sequence.layer import DistributedAttention

    stock = DistributedAttention.forward

    def forward(self: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
        if not rest or not isinstance(rest[0], torch.Tensor):
            return stock(self, query, key, value, *rest, **more)
        local = self.local_attn

        def with_heads(query: Any, *others: Any, **more: Any) -> Any:
            return local(query, *others, **more).view(query.shape)

        self.__dict__["local_attn"] = with_heads
        try:  # of tensors of (sequence, batch, head, size)
            found = stock(self, query, key, value, 1, None, *rest, **more)
        finally:
            del self.__dict__["local_attn"]
        return found.flatten(2)

    DistributedAttention.forward = forward  # type: ignore[method-assign]


def _gather_flat() -> None:
    """gloo gathers into a tensor of the shape alone that the ranks' tensors have together."""
    import torch.distributed as dist

    stock = dist.all_gather_into_tensor

    def gather(output_tensor: Any, input_tensor: Any, *rest: Any, **more: Any) -> Any:
        if output_tensor.shape[1:] != input_tensor.shape[1:]:
            output_tensor, input_tensor = output_tensor.view(-1), input_tensor.reshape(-1)
        return stock(output_tensor, input_tensor, *rest, **more)

    dist.all_gather_into_tensor = gather


TEXTS = {"text": (125, 60), "golden": (128, 100)}  # tokens there are, tokens of a document


def write_text(folder: Path, name: str) -> None:
    """600 documents of tokens, each of which follows from the one before."""
    import numpy as np
    import torch
    from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder

    count, length = TEXTS[name]
    builder = MMapIndexedDatasetBuilder(f"{folder}/{name}.bin", dtype=np.uint16)
    drawn = np.random.default_rng(1)
    follows = drawn.integers(0, count, (count, 8))
    for _ in range(600):
        tokens = [int(drawn.integers(count))]
        for _ in range(length - 1):
            tokens.append(int(follows[tokens[-1], drawn.integers(8)]))
        builder.add_item(torch.tensor(tokens))
        builder.end_document()
    builder.finalize(f"{folder}/{name}.idx")


# ------------------------------------------------ one rank of a job


def run(job: Job, rank: int, store: str) -> None:
    """The program from its first line on; rank 0 writes the result."""
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world))
    os.environ.update(LOCAL_SIZE=str(job.world), CUDA_DEVICE_MAX_CONNECTIONS="1", **job.environment)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=job.world)
    folder = Path(job.folder)
    if job.converts:
        _convert(*job.converts)
        return torch.save({}, job.out)
    if rank == 0 and not (folder / f"{job.text}.idx").exists():
        write_text(folder, job.text)
    if job.dtype == "fp16":
        from tests.ranks import allow_fp16_on_cpu

        allow_fp16_on_cpu()
    result: dict[str, Any] = {"losses": [], "said": ""}
    _watch(job, result)
    config = Path(f"{store}.{rank}.json")
    config.write_text(json.dumps(_config(job)))
    words = [*flags_of(job, BASE), "--deepspeed_config", str(config), "--zero-stage", str(job.zero)]
    words += ["--data-path", str(folder / job.text)]
    words += [] if job.dtype == "fp32" else [f"--{job.dtype}"]
    dist.barrier()
    try:
        _start(job, folder, rank, words)
    except SystemExit as ended:
        if ended.code:
            raise
    if rank == 0:
        torch.save(result, job.out)
    dist.barrier()


def _convert(source: str, target: str) -> None:
    """DeepSpeed's own converter, which imports the classes of the program's arguments."""
    from argparse import Namespace

    from deepspeed.checkpoint.ds_to_universal import main

    workers = {"num_extract_workers": 1, "num_merge_workers": 1}
    switches = {"keep_temp_folder": False, "strict": True, "inject_missing_state": False}
    main(Namespace(input_folder=source, output_folder=target, **workers, **switches))


def _start(job: Job, folder: Path, rank: int, words: list[str]) -> None:
    import megatron

    stock = Path(str(megatron.__file__)).parents[1] / "pretrain_gpt.py"
    if job.program == "runner":
        from megatron_ucp.run import run as run_it

        return run_it([str(stock), *words], False)
    path = stock
    if job.program in PATCHES:
        path = folder / f"patched.{os.getpid()}" / "pretrain_gpt.py"
        path.parent.mkdir()
        path.write_text(stock.read_text())
        subprocess.run(
            ["git", "apply", "-p1", str(PATCHES[job.program])],
            cwd=path.parent,
            check=True,
            timeout=60,
        )
    sys.argv = [str(path), *words]
    runpy.run_path(str(path), run_name="__main__")
    return None


def _config(job: Job) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": SAMPLES,
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**6,
        "zero_optimization": {"stage": job.zero},
    }
    if job.dtype == "bf16":
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    if job.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return config | job.config


def _watch(job: Job, result: dict[str, Any]) -> None:
    """Wraps functions of the program's loop, so that losses and states are seen."""
    import megatron.training as training

    train, step, save = training.train, training.train_step, training.save_checkpoint_and_time

    def watched_train(forward: Any, model: Any, *rest: Any) -> Any:
        result["counters"] = _counters()
        result["random"] = _random_states()
        if job.want:
            result.update(_compared(model[0], job.want))
        if job.look:
            result["loaded"] = _state(model[0])
        if job.logits:
            result["logits"] = _logits(model[0])
        return train(forward, model, *rest)

    def watched_step(*args: Any) -> Any:
        found = step(*args)
        held = found[0].get("lm loss")
        result["losses"].append(None if held is None else float(held))
        return found

    def watched_save(iteration: int, model: Any, *rest: Any) -> None:
        if iteration in job.saves:
            result[f"state {iteration}"] = _state(model[0])
            result[f"counters {iteration}"] = _counters()
            result[f"random {iteration}"] = _random_states()
            info = "deepspeed.runtime.engine.UNIVERSAL_CHECKPOINT_INFO"
            # of a model with a method of this name the save of 0.19.8 ends in a TypeError
            with mock.patch(info, "no_info") if job.program == "older" else nullcontext():
                save(iteration, model, *rest)

    evaluate = training.evaluate

    def watched_evaluate(*args: Any, **more: Any) -> Any:
        found = evaluate(*args, **more)
        result.setdefault("evaluated", []).append(float(found[0]["lm loss"]))
        return found

    if job.evaluates:
        training.evaluate = watched_evaluate
    training.train, training.train_step = watched_train, watched_step
    training.save_checkpoint_and_time = watched_save


TOKENS = [[(7 * at + 3 * row) % 125 for at in range(SEQUENCE)] for row in range(3)]


def _logits(engine: Any) -> Any:
    """What the model computes of TOKENS, causal, with its padded vocabulary: one row after the
    other, as its attention takes no more on a CPU."""
    import torch
    from megatron.utils import get_ltor_masks_and_position_ids

    engine.module.eval()
    rows: list[Any] = []
    for row in TOKENS:
        tokens = torch.tensor([row])
        mask, _, positions = get_ltor_masks_and_position_ids(tokens, 0, False, False, False)
        with torch.no_grad():
            found = engine.module(tokens, positions, mask)
        rows.append(found[0] if isinstance(found, tuple) else found)
    engine.module.train()
    return torch.cat(rows)


def _counters() -> dict[str, Any]:
    from megatron import get_args

    args = get_args()
    names = (
        "iteration",
        "consumed_train_samples",
        "consumed_valid_samples",
        "consumed_train_tokens",
    )
    return {name: getattr(args, name, None) for name in names}


def _random_states() -> list[Any]:
    """Of all ranks: what each draws next, on and off the tracker."""
    import random

    import numpy as np
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    from tests.engines.canonical import everywhere

    tracked = {
        name: bytes(state.tolist()) for name, state in get_cuda_rng_tracker().get_states().items()
    }
    own = (
        bytes(torch.get_rng_state().tolist()),
        np.random.get_state()[1].tobytes(),
        random.getstate(),
        tracked,
    )
    return everywhere(own)


# ------------------------------------------------ states, by code that knows nothing of the package

Key = tuple[str, str]


def _state(engine: Any) -> dict[str, Any]:
    """Every master, moment and weight, whole, by the names of a model without pipeline; steps and
    hyper-parameters of each."""
    import torch
    from megatron import get_args
    from megatron.core import mpu

    from tests.engines.canonical import everywhere
    from tests.engines.masters import base_of

    args, base = get_args(), base_of(engine)
    named = _named(engine, args)
    shapes = {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in named.items()}
    pieces: list[Any] = []
    scalars: dict[str, Any] = {}
    for name, first, count, master, offset, group in _runs(engine, args):
        held = base.state.get(master, {})
        flat = {k: v for k, v in held.items() if isinstance(v, torch.Tensor) and v.dim()}
        for key, tensor in {"fp32": master.data, **flat}.items():
            part = tensor.detach().view(-1)[offset : offset + count].clone()
            pieces.append((name, key, first, part))
        settings = base.param_groups[group]
        hyper = {k: settings[k] for k in ("lr", "weight_decay", "betas", "eps")}
        steps = {k: float(v) for k, v in held.items() if k not in flat}
        scalars[name] = {**hyper, **steps, "betas": tuple(hyper["betas"])}
    place = mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank()
    gathered = everywhere((place, shapes, pieces, scalars))
    first_stage = {}
    for (stage, _), shapes, *_ in gathered:
        for name in shapes:
            first_stage[name] = min(stage, first_stage.get(name, stage))
    full: dict[Key, Any] = {}
    parts: dict[tuple[str, str, int, int], Any] = {}
    numbers: dict[str, Any] = {}
    for (stage, tp), shapes, found, own in gathered:
        for name, key, first, values in found:
            at = stage, 0 if _is_whole_expert(args, name) else tp
            empty = torch.full(shapes[name], float("nan")).view(-1)
            flat = parts.setdefault((name, key, *at), empty)
            flat[first : first + len(values)] = values
        for name, said in own.items():
            if numbers.setdefault(name, said) != said:
                raise AssertionError(f"ranks disagree on {name}: {numbers[name]} and {said}")
    all_shapes = {n: shape for _, shapes, *_ in gathered for n, shape in shapes.items()}
    size = mpu.get_tensor_model_parallel_world_size()
    for name, key, stage, tp in parts:
        if tp:
            continue
        ranks = range(1 if _is_whole_expert(args, name) else size)
        shares = [parts[name, key, stage, t].view(all_shapes[name]) for t in ranks]
        whole = _joined(args, name, shares)
        if whole.isnan().any():
            raise AssertionError(f"not all of {key} of {name} is there")
        if stage == first_stage[name]:
            full[name, key] = whole
        elif not name.endswith("position_embeddings.weight") and not torch.equal(
            full.get((name, key), whole), whole
        ):
            raise AssertionError(f"stages disagree on {key} of {name}")
    return {"full": full, "scalars": numbers, "scheduler": dict(vars(engine.lr_scheduler))}


def _runs(engine: Any, args: Any) -> list[Any]:
    """Every run of elements of a parameter that this rank's masters hold."""
    from tests.engines.masters import BY_WRAPPER, _unwrapped, wrapper_of

    known = {param: name for name, param in _named(engine, args).items()}
    of_kind = BY_WRAPPER.get(wrapper_of(engine), _unwrapped)
    return list(of_kind(engine.optimizer, known))


def _named(engine: Any, args: Any) -> dict[str, Any]:
    """This rank's parameters by the names of the model without pipeline."""
    from tests.engines.masters import _numbered

    params = dict(engine.module.named_parameters())
    return {_whole_name(args, _numbered(params, name)): params[name] for name in params}


def _whole_name(args: Any, name: str) -> str:
    """The name in the model without pipeline."""
    if name.startswith("language_model."):
        return name
    head, _, rest = name.partition(".")
    if head == "tied_modules":
        return f"language_model.embedding.{rest.partition('.')[2]}"
    number, layers = int(head), args.num_layers
    if number == 1:
        return f"language_model.embedding.{rest}"
    if number < layers + 2:
        return f"language_model.encoder.layers.{number - 2}.{rest}"
    if rest.startswith("lm_head."):
        return f"language_model.output_layer.{rest.removeprefix('lm_head.')}"
    return f"language_model.encoder.final_layernorm.{rest}"


def _is_whole_expert(args: Any, name: str) -> bool:
    return ".deepspeed_experts." in name and not args.enable_expert_tensor_parallelism


def _joined(args: Any, name: str, shares: list[Any]) -> Any:
    """One parameter from the shares of tensor-parallel ranks, as the program's layers cut it."""
    import torch

    kind = ".".join(name.split(".")[-2:])
    thirds = 3 if hasattr(args, "ds_sequence_parallel_fpdt") else 1  # by head, in older code
    dims = {
        **dict.fromkeys(("word_embeddings.weight", "output_layer.weight"), (0, 1)),
        **dict.fromkeys(("query_key_value.weight", "query_key_value.bias"), (0, thirds)),
        **dict.fromkeys(("dense_h_to_4h.weight", "dense_h_to_4h.bias"), (0, 1 + args.swiglu)),
        **dict.fromkeys(("dense.weight", "dense_4h_to_h.weight"), (1, 1)),
    }
    if len(shares) == 1:
        return shares[0]
    if kind not in dims:
        if not all(torch.equal(shares[0], one) for one in shares):
            raise AssertionError(f"tensor-parallel ranks disagree on {name}")
        return shares[0]
    dim, count = dims[kind]
    chunks = [share.chunk(count, dim) for share in shares]
    return torch.cat([torch.cat(same, dim) for same in zip(*chunks, strict=True)], dim)


def _compared(engine: Any, want: str) -> dict[str, Any]:
    """What differs from a saved state, and what of it when one bit is planted."""
    import torch
    from megatron import get_args

    saved = torch.load(want, weights_only=False)
    saved = next(value for key, value in saved.items() if key.startswith("state "))
    have = _state(engine)
    _, _, _, master, offset, _ = _runs(engine, get_args())[0]
    bit = master.data.view(-1)[offset : offset + 1].view(torch.int32)
    bit ^= 1
    try:
        planted = [*_differences(saved, _state_or_none(engine))]
    finally:
        bit ^= 1
    elements = sum(value.numel() for value in saved["full"].values())
    return {
        "differences": [*_differences(saved, have)],
        "planted": planted,
        "elements": elements,
        "loaded": have,
    }


def _state_or_none(engine: Any) -> dict[str, Any]:
    try:
        return _state(engine)
    except AssertionError as error:
        return {"full": {}, "scalars": {str(error): None}, "scheduler": {}}


def _differences(want: dict[str, Any], have: dict[str, Any]) -> Iterator[str]:
    import torch

    for key in sorted({*want["full"], *have["full"]}):
        one, other = want["full"].get(key), have["full"].get(key)
        if one is None or other is None or not torch.equal(one, other):
            yield f"{key}"
    for name in sorted({*want["scalars"], *have["scalars"]}):
        if want["scalars"].get(name) != have["scalars"].get(name):
            yield f"{name}: {want['scalars'].get(name)} became {have['scalars'].get(name)}"
