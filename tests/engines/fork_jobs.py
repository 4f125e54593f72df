"""What the ranks do in the tests of Megatron-DeepSpeed's checkpoints: tiny models with the names,
attributes, nested weights, patterns and arguments of its GPT, under stock DeepSpeed."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import megatron_ucp as ucp
from pretrain.mcore import models
from tests.engines.canonical import canonical, fill
from tests.engines.model import config_of, engine_around
from tests.engines.tensor_jobs import close

LAYERS, HIDDEN, HEADS, BATCH = 2, 8, 4, 4
INFO = "universal_checkpoint_info"


@dataclass(frozen=True)
class Fork:
    """`order` of the rows of query_key_value: "split" (thirds of each rank), "interleaved" (by
    head). `said`: whether the arguments say that it is split. `pp`: 0 without a pipeline.
    `misspelled`: the pattern of learned positions, as the fork has it in an untied pipeline."""

    tp: int
    order: str
    pp: int = 0
    zero: int = 1
    swiglu: bool = False
    said: bool = False
    groups: int = HEADS
    tied: bool = True
    seed: int = 1
    misspelled: bool = False
    frozen: bool = False
    hidden: int = HIDDEN
    ffn: int = 12
    vocab: int = 16
    positions: int = 6  # 0: rotary ones, which are no parameters
    biases: bool = True
    rms: bool = False
    optimizer: str = "AdamW"
    other: str = ""  # a parameter more of each layer, by a name of the fork's own


Shapes = dict[str, tuple[tuple[int, ...], int | None, int]]


def shapes_of_layer(setup: Fork) -> Shapes:
    """Whole shape, the dim that is cut, and of how many parts each rank has a share."""
    hidden = setup.hidden
    rows = hidden // HEADS * (HEADS + 2 * setup.groups)
    wide, halves = (2 * setup.ffn, 2) if setup.swiglu else (setup.ffn, 1)
    thirds = 3 if setup.order == "split" else 1
    out: Shapes = {
        "self_attention.query_key_value.weight": ((rows, hidden), 0, thirds),
        "self_attention.query_key_value.bias": ((rows,), 0, thirds),
        "self_attention.dense.weight": ((hidden, hidden), 1, 1),
        "self_attention.dense.bias": ((hidden,), None, 1),
        "mlp.dense_h_to_4h.weight": ((wide, hidden), 0, halves),
        "mlp.dense_h_to_4h.bias": ((wide,), 0, halves),
        "mlp.dense_4h_to_h.weight": ((hidden, setup.ffn), 1, 1),
        "mlp.dense_4h_to_h.bias": ((hidden,), None, 1),
    }
    if not setup.biases:
        out = {name: one for name, one in out.items() if not name.endswith(".bias")}
    out |= {setup.other: ((hidden,), None, 1)} if setup.other else {}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        out |= {f"{norm}.{name}": one for name, one in shapes_of_norm(setup).items()}
    return out


def shapes_of_norm(setup: Fork) -> Shapes:
    return {end: ((setup.hidden,), None, 1) for end in ("weight", "bias")[: 2 - setup.rms]}


def shapes_of_words(setup: Fork, name: str = "word_embeddings.weight") -> Shapes:
    return {name: ((setup.vocab, setup.hidden), 0, 1)}


def shapes_of_embedding(setup: Fork) -> Shapes:
    places = {"position_embeddings.weight": ((setup.positions, setup.hidden), None, 1)}
    return {**shapes_of_words(setup), **(places if setup.positions else {})}


class Part(torch.nn.Module):
    """Parameters by dotted name, each with the attributes that the fork's layers set. What it
    computes is of no interest, as long as every parameter has a gradient."""

    def __init__(self, held: dict[str, Any], tp: int) -> None:
        super().__init__()
        for name, (shape, dim, parts) in held.items():
            local = tuple(n // tp if at == dim else n for at, n in enumerate(shape))
            param: Any = torch.nn.Parameter(torch.ones(local))
            param.tensor_model_parallel = dim is not None
            # the fork says a stride of 1 of all; the gather of these tests asks for the truth
            param.partition_dim, param.partition_stride = (-1 if dim is None else dim), parts
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for one in path:
                if one not in module._modules:
                    module.add_module(one, torch.nn.Module())
                module = module._modules[one]  # type: ignore[assignment]
            module.register_parameter(last, param)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + sum(p.square().mean() for p in self.parameters())


def info_of(setup: Fork) -> dict[str, Any]:
    """What the fork writes: nothing of query_key_value, and at tp=1 nothing of what is row-parallel
    or replicated."""
    first = r"\d+" if setup.pp else r"language_model.encoder.layers.\d+"
    final = r"\d+" if setup.pp else "language_model.encoder.final_layernorm"
    words = "tied_modules.embed" if setup.pp else "language_model.embedding"
    head = r"\d+.lm_head.weight" if setup.pp else "language_model.output_layer.weight"
    if setup.pp and not setup.tied:
        words = r"\d+"
    info: dict[str, Any] = {"universal_checkpoint_version": 0.2, "original_vocab_size": setup.vocab}
    info["vocabulary_parameter_patterns"] = [f"{words}.word_embeddings.weight"]
    if not setup.tied:
        info["vocabulary_parameter_patterns"].append(head)
    if setup.tp > 1:
        layer = [name for name, (_, dim, _) in shapes_of_layer(setup).items() if dim is None]
        info["tp_replicated_parameter_patterns"] = [
            *(f"{first}.{name}" for name in layer),
            *(f"{final}.{end}" for end in shapes_of_norm(setup)),
            f"{'tied_modules.embed' if setup.misspelled else words}.position_embeddings.weight",
        ]
        rows = ("mlp.dense_4h_to_h.weight", "self_attention.dense.weight")
        info["parameter_with_row_parallelism_patterns"] = [f"{first}.{name}" for name in rows]
    if setup.swiglu:
        gated = (f"mlp.dense_h_to_4h.{end}" for end in ("weight", "bias"))
        info["parameter_with_2_sub_params_cat_dim_0"] = [f"{first}.{name}" for name in gated]
    return info


def client_state(setup: Fork, iteration: int = 7) -> dict[str, Any]:
    from megatron.core.enums import ModelType

    args = argparse.Namespace(
        num_attention_heads=HEADS,
        num_key_value_heads=setup.groups,
        tensor_model_parallel_size=setup.tp,
        swiglu=setup.swiglu,
        model_type=ModelType.encoder_or_decoder,
        params_dtype=torch.float32,
        consumed_train_samples=28,
        attn_mask=torch.ones(1, 1, 2, 2, dtype=torch.bool).tril(),
        rank=dist.get_rank(),
        deepspeed_config="deepspeed.json",
        padded_vocab_size=setup.vocab,
    )
    if setup.said:
        args.ds_sequence_parallel_fpdt = False
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "tokens": 0,
        "rng_state": [{"torch_rng_state": torch.arange(3) + dist.get_rank()}],
        INFO: info_of(setup),
    }


class Plain(Part):
    """Without a pipeline: its weights are saved as a tree."""

    def __init__(self, setup: Fork) -> None:
        embedding = shapes_of_embedding(setup)
        held = {f"language_model.embedding.{name}": one for name, one in embedding.items()}
        for layer in range(LAYERS):
            head = f"language_model.encoder.layers.{layer}."
            held |= {head + name: one for name, one in shapes_of_layer(setup).items()}
        norm = shapes_of_norm(setup)
        held |= {f"language_model.encoder.final_layernorm.{n}": one for n, one in norm.items()}
        if not setup.tied:
            held |= shapes_of_words(setup, "language_model.output_layer.weight")
        super().__init__(held, setup.tp)
        self.setup = setup
        if setup.frozen:
            model: Any = self.language_model
            weight = model.embedding.position_embeddings.weight
            weight.requires_grad = False
            weight.data += torch.arange(weight.numel()).view_as(weight) * setup.seed

    def universal_checkpoint_info(self) -> dict[str, Any]:
        return info_of(self.setup)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        model: Any = self.language_model
        embedding = {
            n: m.state_dict(keep_vars=keep_vars) for n, m in model.embedding._modules.items()
        }
        out = {"embedding": embedding, "encoder": model.encoder.state_dict(keep_vars=keep_vars)}
        if not self.setup.tied:
            out["output_layer"] = model.output_layer.state_dict(keep_vars=keep_vars)
        return {"language_model": out}


def staged(setup: Fork) -> Any:
    """Positions: a cast, the embedding, the layers, the norm, the head."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    world = dist.get_world_size()
    topology = PipeModelDataParallelTopology(
        num_pp=setup.pp, num_mp=setup.tp, num_dp=world // setup.tp // setup.pp
    )
    words = shapes_of_embedding(setup), setup.tp
    specs: list[Any] = [lambda hidden: hidden * 1.0]
    specs.append(
        TiedLayerSpec("embed", Part, *words, tied_weight_attr="words")
        if setup.tied
        else LayerSpec(Part, *words)
    )
    specs += [LayerSpec(Part, shapes_of_layer(setup), setup.tp) for _ in range(LAYERS)]
    specs.append(LayerSpec(Part, shapes_of_norm(setup), setup.tp))
    specs.append(
        TiedLayerSpec("embed", Part, *words, tied_weight_attr="words")
        if setup.tied
        else LayerSpec(Part, shapes_of_words(setup, "lm_head.weight"), setup.tp)
    )

    class Staged(PipelineModule):
        def universal_checkpoint_info(self) -> dict[str, Any]:
            return info_of(setup)

    return Staged(layers=specs, topology=topology, loss_fn=lambda out, _: out.mean())


def make(setup: Fork) -> Any:
    """An engine."""

    rows = BATCH * setup.tp * (setup.pp or 1) // dist.get_world_size()
    config = config_of(setup.zero, rows, gradient_clipping=0.0)
    models.start(setup.tp, seed=7, pp=setup.pp or 1)
    Part.words = property(lambda part: part.word_embeddings.weight)  # type: ignore[attr-defined]
    torch.manual_seed(setup.seed)
    model: Any = staged(setup) if setup.pp else Plain(setup)
    params = [param for param in model.parameters() if param.requires_grad]
    engine = engine_around(
        model,
        getattr(torch.optim, setup.optimizer)(params, lr=3e-3),
        config,
        lr_scheduler=lambda opt: LambdaLR(opt, lambda step: 1.0 / (1 + step)),
        mpu=None if setup.pp else models.mpu(),
    )
    if setup.pp:  # by this the gather names a pipeline's parameters; here the embedding is layer 0
        engine.module.config = argparse.Namespace(num_layers=LAYERS + 1)
    return engine


def train(engine: Any) -> None:
    rows = BATCH // engine.dp_world_size
    if hasattr(engine, "num_stages"):
        engine.train_batch(iter([(torch.ones(rows, HIDDEN), torch.ones(rows))] * 8))
        return
    engine.backward(engine(torch.ones(rows, engine.module.setup.hidden)).mean())
    engine.step()


def save_as_the_fork(engine: Any, folder: str, setup: Fork, tag: str) -> None:
    """With its client state, and without a pipeline by the state dict that it puts there."""
    stock = engine.module.state_dict
    if not setup.pp:

        def nested(destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
            return engine.module.state_dict_for_save_checkpoint(prefix, keep_vars)

        engine.module.state_dict = nested
    engine.save_checkpoint(folder, tag=tag, client_state=client_state(setup))
    if not setup.pp:
        engine.module.state_dict = stock


def gathered(engine: Any) -> dict[tuple[str, str], torch.Tensor]:
    """Every master and moment, whole, by the name in a model without a pipeline."""
    found = canonical(engine)
    tensors = {**found["full"], **{(name, "weights"): w for name, w in found["weights"].items()}}
    return {(without_stages(name), state): one for (name, state), one in tensors.items()}


def without_stages(name: str) -> str:
    if name.startswith("language_model."):
        return name
    name = name.replace("embedding.embed.", "embedding.").replace("decoder.layers.0.", "embedding.")
    if name.startswith("decoder.layers."):
        number, _, rest = name.removeprefix("decoder.layers.").partition(".")
        name = f"encoder.layers.{int(number) - 1}.{rest}"
    name = name.replace("output_layer.lm_head.", "output_layer.").replace("decoder.", "encoder.")
    return f"language_model.{name}"


def save(setup: Fork, folder: str, attach: str | None = None, **options: Any) -> None:
    """Trains a step, fills with provenance values, saves `filled`; the gather beside it."""
    engine = make(setup)
    if attach is not None:
        ucp.attach(engine, rules=attach, **options)
    train(engine)
    fill(engine)
    save_as_the_fork(engine, folder, setup, "filled")
    found = gathered(engine)
    if dist.get_rank() == 0:
        torch.save(found, Path(folder) / "oracle.pt")
    close(engine)


def resume(
    setup: Fork,
    folder: str,
    rules: str | None,
    tag: str | None = "filled",
    schedule: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Loads a tag into a fresh engine with these rules: the gather, what came as client state."""
    engine = make(setup)
    before = gathered(engine)
    out: dict[str, Any] = {"error": "", "before": before}
    try:
        ucp.attach(engine, rules=rules, **options)
        _, client = engine.load_checkpoint(folder, tag=tag, load_lr_scheduler_states=schedule)
        out |= {"state": gathered(engine), "iteration": client["iteration"]}
        out["args"] = sorted(vars(client["args"]))
    except ucp.UcpError as error:
        out["error"] = f"{type(error).__name__}: {error}"
        after = gathered(engine)
        out["unchanged"] = all(torch.equal(one, after[key]) for key, one in before.items())
    close(engine)
    return out if dist.get_rank() == 0 else {"error": out["error"]}
