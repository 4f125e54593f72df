"""What the ranks do in the tests of DeepSpeed's AutoTP: models of transformers that it cuts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

import megatron_ucp as ucp
from tests.engines import kinds
from tests.engines.autotp_states import canonical, fill, tensor_place
from tests.engines.canonical import base_of
from tests.engines.kinds import KINDS, Kind, refusal_of
from tests.engines.model import config_of, engine_around, muon_section, step_with, tokens_of

VOCAB, SEQUENCE, BATCH = 61, 8, 4  # 61 rows are 31 and 30
CHANGED = {
    "freeze": "model.layers.0.mlp.up_proj.weight",
    "unfreeze": "model.layers.0.self_attn.k_proj.weight",
}
FROZEN = ("layers.0.self_attn.k_proj.weight", "layers.1.input_layernorm.weight")


@dataclass(frozen=True)
class Auto:
    """A model on `tp` ranks times as many copies as the job has ranks for; at tp=1 without AutoTP.
    Kinds: "llama" (untied, biases, 3 key-value heads: at 2 ranks 2 and 1, at 4 ranks the last one
    has none; some parameters frozen), "even" (every dim divides), "gpt2" (tied, rows of the
    vocabulary cut), "phi3" (fused gate and up), "adapted" ("llama" with adapters of peft)."""

    kind: str
    tp: int
    zero: int
    dtype: str = "fp32"
    seed: int = 1
    offload: bool = False  # the optimizer, to the memory of the CPU
    fp32_sums: bool = False  # BF16_Optimizer at ZeRO-1
    muon: bool = False
    change: str = ""  # of what "llama" trains: "freeze" or "unfreeze" one parameter of CHANGED
    groups: str = ""  # of the optimizer: "halved", "joined", or with one weight decay: "alike"


def network(setup: Auto) -> Any:
    import transformers

    torch.manual_seed(setup.seed)
    if setup.kind == "gpt2":
        sizes = transformers.GPT2Config(
            vocab_size=VOCAB, n_embd=24, n_head=6, n_layer=2, n_positions=SEQUENCE, use_cache=False
        )
        sizes.attn_pdrop = sizes.embd_pdrop = sizes.resid_pdrop = 0.0
        return transformers.GPT2LMHeadModel(sizes)
    if setup.kind == "phi3":
        return transformers.Phi3ForCausalLM(
            transformers.Phi3Config(
                vocab_size=VOCAB,
                hidden_size=24,
                intermediate_size=34,
                num_hidden_layers=2,
                num_attention_heads=6,
                num_key_value_heads=3,
                max_position_embeddings=SEQUENCE,
                pad_token_id=0,
                use_cache=False,
            )
        )
    even = setup.kind == "even"
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=60 if even else VOCAB,
            hidden_size=24,
            intermediate_size=32 if even else 34,
            num_hidden_layers=2,
            num_attention_heads=4 if even else 6,
            num_key_value_heads=4 if even else 3,
            head_dim=4,
            max_position_embeddings=SEQUENCE,
            attention_bias=not even,
            use_cache=False,
        )
    )
    for name, param in model.named_parameters():
        other = name == CHANGED.get(setup.change)
        param.requires_grad_(even or name.endswith(FROZEN) == other)
    return adapted(model) if setup.kind == "adapted" else model


def adapted(model: Any) -> Any:
    """With adapters of peft on what AutoTP cuts."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))


# What AutoTP is told of models that it does not take by itself. GPT-2's Conv1D stays whole, its
# vocabulary is cut; of Phi-3 gate and up, which are one weight, each for itself.
TOLD: dict[str, list[dict[str, Any]]] = {
    "gpt2": [{"patterns": [r".*lm_head\.weight$"], "partition_type": "column"}],
    "phi3": [
        {
            "patterns": [r".*gate_up_proj\.weight$"],
            "partition_type": "column",
            "shape": [2, -1],
            "partition_dim": 0,
        },
        {"patterns": [r".*down_proj\.weight$"], "partition_type": "row"},
    ],
}


def tensor_parallel(setup: Auto) -> dict[str, Any]:
    if setup.tp == 1:
        return {}
    section: dict[str, Any] = {"autotp_size": setup.tp}
    if setup.kind in TOLD:
        specs = TOLD[setup.kind]
        section["partition_config"] = {"use_default_specs": False, "layer_specs": specs}
    if setup.kind == "gpt2":
        section["vocab_parallel_lm_head"] = True
    return {"tensor_parallel": section}


def make(setup: Auto, attach: bool = True) -> Any:
    """An engine with two groups and LambdaLR."""

    net = network(setup)
    whole = {name: param.shape for name, param in net.named_parameters()}
    trained = [param for param in net.parameters() if param.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    if setup.change == "unfreeze":  # what begins afresh has a group of its own
        apart = dict(net.named_parameters())[CHANGED["unfreeze"]]
        groups[0]["params"] = [p for p in groups[0]["params"] if p is not apart]
        groups.append({"params": [apart], "weight_decay": 0.1})
    groups = regrouped(groups, setup.groups)
    # a larger epsilon: gradients that are 0 but for rounding (of biases of keys) must not steer
    optimizer = None if setup.muon else torch.optim.AdamW(groups, lr=3e-3, eps=1e-4)
    engine = engine_around(
        net,
        optimizer,
        ds_config(setup),
        model_parameters=groups,
        lr_scheduler=lambda opt: LambdaLR(opt, lambda step: 1.0 / (1 + 0.1 * step)),
    )
    engine.plain_shapes = whole
    return ucp.attach(engine) if attach else engine


def regrouped(groups: list[dict[str, Any]], how: str) -> list[dict[str, Any]]:
    """The same parameters in other groups (see `Auto.groups`)."""
    if how == "halved":
        halves = [(group, len(group["params"]) // 2) for group in groups]
        parts = [(g, part) for g, n in halves for part in (g["params"][:n], g["params"][n:])]
        return [{**group, "params": part} for group, part in parts]
    if how in ("alike", "joined"):
        groups = [{**group, "weight_decay": 0.1} for group in groups]
    if how == "joined":
        groups = [{**groups[0], "params": [p for group in groups for p in group["params"]]}]
    return groups


def ds_config(setup: Auto) -> dict[str, Any]:
    more, zero = tensor_parallel(setup), dict[str, Any]()
    if setup.offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if setup.fp32_sums:
        more["data_types"] = {"grad_accum_dtype": "fp32"}
    if setup.muon:
        more["optimizer"] = muon_section()
        zero["reduce_scatter"] = False  # which DeepSpeed asks for at ZeRO-3
    rows = BATCH // (dist.get_world_size() // setup.tp)
    config = config_of(setup.zero, rows, setup.dtype, zero, gradient_clipping=0.0, **more)
    if setup.dtype == "fp16":
        config["fp16"]["loss_scale_window"] = 3
    return config


def train(engine: Any, steps: int, first: int = 0) -> list[float]:
    """Losses of so many steps."""
    size, _ = tensor_place(engine)
    copies, copy = dist.get_world_size() // size, dist.get_rank() // size
    losses: list[float] = []
    for step in range(first, first + steps):
        rows = tokens_of(step, (BATCH, SEQUENCE), 60).chunk(copies)[copy]
        losses.append(step_with(engine, engine(input_ids=rows, labels=rows).loss))
    return losses


def from_hugging_face(setup: Auto, folder: str) -> list[str]:
    """Loads `in`, compares masters and weights with the file's tensors, and writes `out`."""
    from safetensors.torch import load_file

    want = load_file(Path(folder) / "in" / "model.safetensors")
    engine = make(setup)
    ucp.load(engine, Path(folder) / "in")
    found = canonical(engine)
    masters = {name: value for (name, key), value in found["full"].items() if key == "fp32"}
    wrong = [
        name
        for held in (masters, found["weights"])
        for name, value in held.items()
        if not torch.equal(value, want[name])
    ]
    engine.ucp_export_hf(Path(folder) / "out", "float32")
    engine.destroy()
    return wrong


def refused(setup: Auto, fault: str) -> dict[str, Any]:
    """What `attach` and `load` say of an engine with a parameter that can't be put together, and
    whether it trains on as if nobody had asked."""
    engine = make(setup, attach=False)
    want = train(engine, 3)
    engine.destroy()
    engine = make(setup, attach=False)
    said = engine.module.lm_head.weight.ds_autotp_universal_checkpoint_meta["conversion"]
    entry, options, words = said["affine_map"], {}, ""
    if fault == "unsupported":
        said["unsupported_reason"] = words = "its heads are paired"
    elif fault == "scaled":
        entry["ranks"][1]["pieces"][0]["scale"] = 0.5
        words = "scaled values"
    elif fault == "another shape":
        entry["ranks"][0], entry["ranks"][1] = entry["ranks"][1], entry["ranks"][0]
        words = "another shape than AutoTP says"
    elif fault == "held twice":
        for rank, rows in ((0, 31), (1, 32)):
            entry["ranks"][rank]["shard_shape"] = [rows, 24]
        words = "a part that several ranks hold"
    else:
        options, words = {"family": "gpt"}, "family"
    messages = both_say(engine, **options)
    same = train(engine, 3) == want
    engine.destroy()
    return {"messages": messages, "words": words, "same losses": same}


def both_say(engine: Any, **options: Any) -> list[str]:
    """What `attach` and `load` refuse an engine with."""
    out: list[str] = []
    for call in (
        lambda: ucp.attach(engine, **options),
        lambda: ucp.load(engine, "nowhere", **options),
    ):
        out.append(refusal_of(call, "nothing was refused"))
    return out


def without_adapters() -> list[str]:
    """What is said of an engine whose adapters AutoTP dropped, though the optimizer has them."""
    engine = make(Auto("adapted", 2, 0), attach=False)
    assert not [name for name, _ in engine.module.named_parameters() if "lora" in name]
    messages = both_say(engine)
    engine.destroy()
    return messages


# ------------------------------------------------ planted faults


def _masters(engine: Any, part: str) -> Any:
    """This rank's share of a parameter, which at stage 0 in fp32 is its master."""
    return next(p for name, p in engine.module.named_parameters() if part in name).data


def _boundary(engine: Any) -> None:
    """The last row of the first rank and the first row of the second one are swapped."""
    rows, rank = _masters(engine, "lm_head"), tensor_place(engine)[1]
    own = rows[-1 if rank == 0 else 0]
    other = own.clone()
    work = [
        dist.P2POp(dist.isend, own.clone(), 1 - rank),
        dist.P2POp(dist.irecv, other, 1 - rank),
    ]
    for one in dist.batch_isend_irecv(work):
        one.wait()
    own.copy_(other)


def _rolled(part: str, dim: int) -> Callable[[Any], None]:
    def plant(engine: Any) -> None:
        share = _masters(engine, part)
        share.copy_(share.roll(1, dim))

    return plant


def _moment(engine: Any) -> None:
    state = next(kept for kept in base_of(engine).state.values() if kept["exp_avg"].dim() > 1)
    state["exp_avg"].view(-1)[0] += 1


def _momentum(engine: Any) -> None:
    """What Newton-Schulz gets of a matrix; all copies of it have the same fault."""
    for kept in base_of(engine).state.values():
        if "momentum_buffer" in kept:
            kept["momentum_buffer"].view(-1)[0] += 1


def _step(engine: Any) -> None:
    for kept in base_of(engine).state.values():
        kept["step"] += 1
        return


def _decay(engine: Any) -> None:
    base_of(engine).param_groups[1]["weight_decay"] = 0.1


OF_MUON = ("a momentum of Muon",)
PLANTS: dict[str, Callable[[Any], None]] = {
    "rows at the boundary of two ranks": _boundary,
    "columns of a row-parallel weight": _rolled("o_proj.weight", 1),
    "a frozen share": _rolled(FROZEN[0], 0),
    "a moment": _moment,
    "a momentum of Muon": _momentum,
    "a step": _step,
    "a group's decay": _decay,
}


def plant_fault(engine: Any, fault: str) -> None:
    """One of PLANTS, or of those that every engine can have."""
    if fault in PLANTS:
        PLANTS[fault](engine)
    else:
        kinds.plant_fault(engine, fault)


KINDS[Auto] = Kind(make, train, plant_fault, fill=fill, canonical=canonical, trains_on=True)
