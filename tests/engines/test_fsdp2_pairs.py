"""FSDP2, DeepSpeed and megatron-core's own stack take each other's checkpoints: every weight,
moment, step and rate, bit by bit, and the losses that follow. Programs without this package save
and load the folders of FSDP2."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import megatron_ucp as ucp
from tests.docs.recipe_jobs import recipe
from tests.engines import fsdp2_jobs, titan_jobs
from tests.engines.fsdp2_jobs import Plain
from tests.formats import fsdp2_runs
from tests.formats.test_dcp import GOLDEN
from tests.ranks import RankPool
from tests.reshard.test_torchtitan import differ, flat_of

pytestmark = pytest.mark.ranks
pytest.importorskip("transformers", reason="these programs train a model of transformers")

STEPS, MORE = 3, 10
NO_PLACE = "the scheduler's state has no place in this layout"
SETTINGS = ("lr", "weight_decay", "betas", "eps")


class Runs:
    """Runs of programs, each made once."""

    def __init__(self, ranks: RankPool, folder: Path) -> None:
        self._ranks, self.folder, self._made = ranks, folder, dict[str, Any]()

    @property
    def model(self) -> str:
        """The folder of transformers that all begin with."""
        folder = str(self.folder / "start")
        if "start" not in self._made:
            self._ranks.run(1, fsdp2_jobs.start, folder=folder, timeout_s=120)
            self._made["start"] = True
        return folder

    def program(self, world: int, kind: str, folder: object = "-", **options: object) -> Any:
        """What a program that begins with that model reports; an option that is True is a word."""
        words = {"model": self.model, **options}
        how = [
            text
            for name, value in words.items()
            for text in (f"--{name.replace('_', '-')}", *([] if value is True else [str(value)]))
        ]
        return fsdp2_runs.run(world, kind, str(folder), *how)

    def fsdp2(self, world: int, kind: str = "fsdp", layout: str = "plain") -> tuple[str, Any]:
        """A folder that a program saved, and what it held; its losses after that."""
        key = f"{kind}-{layout}-{world}"
        folder = str(self.folder / key)
        if key not in self._made:
            found = self.program(world, kind, folder, layout=layout, steps=STEPS)
            more = self.program(world, kind, steps=STEPS + MORE)
            self._made[key] = {**found, "more": more["losses"][STEPS:]}
        return folder, self._made[key]

    def trainer(self) -> tuple[Path, Any]:
        """Trainer's folder, what it held, and the losses of a run that was not broken."""
        folder = self.folder / "trainer"
        if "trainer" not in self._made:
            held = self.program(2, "trainer", folder, steps=STEPS, total=STEPS)
            more = self.program(2, "trainer", self.folder / "more", steps=99, total=STEPS + MORE)
            self._made["trainer"] = {**held, "more": more["losses"][STEPS:]}
        return folder / f"checkpoint-{STEPS}", self._made["trainer"]

    def _trained(self, key: str, world: int, job: Any, **options: Any) -> tuple[str, Any]:
        folder = str(self.folder / key)
        if key not in self._made:
            own = {"folder": folder, "model": self.model, "more": MORE, **options}
            self._made[key] = self._ranks.run(world, job, timeout_s=200, **own)[0]
        return folder, self._made[key]

    def deepspeed(self, world: int, setup: Plain) -> tuple[str, Any]:
        key = f"zero{setup.zero}tp{setup.tp}-{world}"
        return self._trained(key, world, fsdp2_jobs.trained, setup=setup)

    def megatron(self, world: int, tp: int) -> tuple[str, Any]:
        return self._trained(f"megatron-tp{tp}-{world}", world, fsdp2_jobs.train_stack, tp=tp)

    def resumed(self, world: int, setup: Plain, folder: object, **options: Any) -> Any:
        """An engine under DeepSpeed that loaded a folder, and went on."""
        own = {"setup": setup, "folder": str(folder), "model": self.model, "steps": MORE, **options}
        found = self._ranks.run(world, fsdp2_jobs.resume, timeout_s=200, **own)[0]
        assert found["error"] == ""
        return found


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("fsdp2"))


def unlike(held: Any, states: Any) -> list[str]:
    """What an FSDP2 program held otherwise than an engine under DeepSpeed, whose states have the
    same names."""
    out: list[str] = []
    group_of = {name: group for group in held["groups"] for name in group["params"]}
    names = {name for name, _ in states["full"]}
    assert names == {*held["states"]} == {*group_of}
    for name in sorted(names):
        want = {"fp32": held["weights"][name], **held["states"][name]}
        step = want.pop("step")
        have = {state: value for (n, state), value in states["full"].items() if n == name}
        assert want.keys() == have.keys()
        out += [f"{name} {s}" for s in want if not same_bits(want[s], have[s])]
        out += [f"{name} step"] * (float(step) != states["scalars"][name, "step"])
        for key in SETTINGS:
            if tuple_of(group_of[name][key]) != tuple_of(states["hyper"][name][key]):
                out.append(f"{name} {key}")
    return out


def tuple_of(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = one.contiguous().reshape(-1), other.contiguous().reshape(-1)
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def near(one: list[float], other: list[float]) -> bool:
    assert len(one) == len(other) == MORE
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-5


# ---- FSDP2 to DeepSpeed

INTO_DEEPSPEED = [
    ((2, "fsdp", "plain"), 2, Plain(1)),
    ((2, "fsdp", "accelerate"), 2, Plain(3)),
    ((4, "fsdp", "plain"), 2, Plain(2, tp=2)),
    ((4, "fsdp", "flat"), 1, Plain(0)),
    ((4, "hsdp", "plain"), 2, Plain(1)),
    ((4, "tp", "plain"), 2, Plain(3)),
]


@pytest.mark.parametrize(("source", "world", "setup"), INTO_DEEPSPEED, ids=str)
@pytest.mark.slow
def test_fsdp2_into_deepspeed(runs: Runs, source: Any, world: int, setup: Plain) -> None:
    folder, held = runs.fsdp2(*source)
    found = runs.resumed(world, setup, folder)
    assert unlike(held, found["states"]) == []
    assert near(found["losses"], held["more"])


@pytest.mark.parametrize("state", ["fp32", "exp_avg", "exp_avg_sq", "step", "lr"])
@pytest.mark.slow
def test_the_comparison_sees_a_fault(runs: Runs, state: str) -> None:
    folder, held = runs.fsdp2(2)
    found = runs.resumed(1, Plain(0), folder, steps=0)
    name = "model.layers.1.mlp.up_proj.weight"
    if state == "step":
        found["states"]["scalars"][name, "step"] += 1
    elif state == "lr":
        found["states"]["hyper"][name]["lr"] *= 2
    else:
        found["states"]["full"][name, state].view(-1)[-1] += 1e-3
    assert unlike(held, found["states"]) == [f"{name} {state}"]


# ---- DeepSpeed to FSDP2

FROM_DEEPSPEED = [
    (2, Plain(1), "dcp", (2, "fsdp", "plain")),
    (2, Plain(3), "accelerate", (2, "fsdp", "accelerate")),
    (2, Plain(2, tp=2), "dcp", (4, "fsdp", "plain")),
    (1, Plain(0), "dcp", (4, "hsdp", "plain")),
    (2, Plain(1), "dcp", (4, "tp", "plain")),
]


def written(folder: str, to: str, out: Path) -> str:
    """The folder of a run, converted for FSDP2."""
    done = ucp.convert(folder, out, to=to)
    assert NO_PLACE not in str(done.notes) or to == "dcp"
    return str(out)


@pytest.mark.parametrize(("world", "setup", "to", "target"), FROM_DEEPSPEED, ids=str)
def test_deepspeed_into_fsdp2(
    runs: Runs, tmp_path: Path, world: int, setup: Plain, to: str, target: Any
) -> None:
    run = runs.deepspeed(world, setup)
    folder, source = written(run[0], to, tmp_path / "out"), run[1]
    ranks_there, kind, layout = target
    found = runs.program(ranks_there, kind, layout=layout, load=folder, steps=MORE)
    assert unlike(found["begun"], source["states"]) == []
    assert near(found["losses"], source["losses"])
    found["begun"]["states"]["model.norm.weight"]["exp_avg"][-1] += 1e-3
    assert unlike(found["begun"], source["states"]) == ["model.norm.weight exp_avg"]


# ---- Megatron


def as_megatron(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of transformers' Llama as megatron-core's modules have them, by plain torch: queries,
    keys and values of a group of heads after each other in one matrix, gate and up too."""
    out = {
        "embedding.word_embeddings.weight": found["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": found["model.norm.weight"],
        "output_layer.weight": found["lm_head.weight"],
    }
    for layer in range(2):
        here, there = f"model.layers.{layer}", f"decoder.layers.{layer}"
        q, k, v = (found[f"{here}.self_attn.{n}_proj.weight"] for n in "qkv")
        groups = [each.chunk(2) for each in (q, k, v)]
        out[f"{there}.self_attention.linear_qkv.weight"] = torch.cat(
            [part for group in zip(*groups, strict=True) for part in group]
        )
        up = [found[f"{here}.mlp.{n}_proj.weight"] for n in ("gate", "up")]
        out[f"{there}.mlp.linear_fc1.weight"] = torch.cat(up)
        out |= {
            f"{there}.self_attention.linear_proj.weight": found[f"{here}.self_attn.o_proj.weight"],
            f"{there}.mlp.linear_fc2.weight": found[f"{here}.mlp.down_proj.weight"],
            f"{there}.input_layernorm.weight": found[f"{here}.input_layernorm.weight"],
            f"{there}.pre_mlp_layernorm.weight": found[f"{here}.post_attention_layernorm.weight"],
        }
    return out


def unlike_megatron(held: Any, states: Any) -> list[str]:
    """As `unlike`, of a stack of megatron-core's."""
    names = [*held["weights"]]
    kinds = {"fp32": held["weights"]}
    for state in ("exp_avg", "exp_avg_sq"):
        kinds[state] = {name: held["states"][name][state] for name in names}
    out: list[str] = []
    whole = {(n, s): v for s, found in kinds.items() for n, v in as_megatron(found).items()}
    assert whole.keys() == states["full"].keys()
    out += [
        f"{name} {s}" for (name, s), v in whole.items() if not same_bits(v, states["full"][name, s])
    ]
    steps = {float(held["states"][name]["step"]) for name in names}
    out += [f"{key} {value}" for key, value in states["scalars"].items() if {value} != steps]
    for name, own in states["hyper"].items():
        dims = whole[name, "fp32"].ndim
        (group,) = [g for g in held["groups"] if (g["weight_decay"] > 0) == (dims > 1)]
        out += [f"{name} {key}" for key in SETTINGS if tuple_of(group[key]) != tuple_of(own[key])]
    return out


@pytest.mark.parametrize(
    ("source", "world", "tp"),
    [((2, "fsdp", "accelerate"), 2, 2), ((4, "fsdp", "plain"), 2, 1), ((4, "tp", "plain"), 2, 2)],
    ids=str,
)
@pytest.mark.slow
def test_fsdp2_into_megatron(
    runs: Runs, ranks: RankPool, tmp_path: Path, source: Any, world: int, tp: int
) -> None:
    folder, held = runs.fsdp2(*source)
    job, options = fsdp2_jobs.resume_stack, {"tp": tp, "folder": folder, "timeout_s": 200}
    refused = ranks.run(world, job, **options)[0]["error"]
    assert refused.startswith("NotFoundError") and "config.json" in refused, "heads are not told"
    config = Path(folder) / "config.json"
    config.write_bytes((Path(runs.model) / "config.json").read_bytes())
    try:
        found = ranks.run(world, job, steps=MORE, **options)[0]
    finally:
        config.unlink()
    assert found["error"] == ""
    assert unlike_megatron(held, found["states"]) == []
    assert near(found["losses"], held["more"])
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    moment = found["states"]["full"][name, "exp_avg"]
    moment[:2] = moment[:2].flip(0).clone()
    assert unlike_megatron(held, found["states"]) == [f"{name} exp_avg"]


@pytest.mark.parametrize(
    ("world", "tp", "to", "target"),
    [(2, 2, "dcp", (2, "fsdp", "plain")), (2, 1, "accelerate", (4, "fsdp", "accelerate"))],
    ids=str,
)
@pytest.mark.slow
def test_megatron_into_fsdp2(
    runs: Runs, tmp_path: Path, world: int, tp: int, to: str, target: Any
) -> None:
    run = runs.megatron(world, tp)
    folder, source = written(run[0], to, tmp_path / "out"), run[1]
    ranks_there, kind, layout = target
    found = runs.program(ranks_there, kind, layout=layout, load=folder, steps=MORE)
    assert unlike_megatron(found["begun"], source["states"]) == []
    assert near(found["losses"], source["losses"])
    found["begun"]["states"]["lm_head.weight"]["exp_avg"][-1] += 1e-3
    name = "output_layer.weight exp_avg"
    assert unlike_megatron(found["begun"], source["states"]) == [name]


@pytest.mark.slow
def test_hugging_face_and_back_by_all_of_them(runs: Runs, ranks: RankPool, tmp_path: Path) -> None:
    """From a folder of transformers to FSDP2, DeepSpeed, Megatron, FSDP2 and a folder of
    transformers: what is exported on the way is the same, byte by byte, and so are moments."""
    folder, held = runs.fsdp2(2)
    first = tmp_path / "first"
    shutil.copytree(folder, first)
    shutil.copy(Path(runs.model) / "config.json", first)
    zero, stack, last = (str(tmp_path / name) for name in ("zero", "stack", "last"))
    ranks.run(2, fsdp2_jobs.pass_on, zero=1, tp=1, folder=str(first), out=zero, timeout_s=200)
    ranks.run(2, fsdp2_jobs.pass_on_stack, tp=2, folder=zero, out=stack, timeout_s=200)
    ucp.convert(stack, last, to="dcp")
    exports: list[bytes] = []
    for number, source in enumerate((first, zero, stack, last)):
        out = tmp_path / f"hf{number}"
        own = {} if source in (zero, stack) else {"config": runs.model}
        ucp.export_hf(source, out, dtype="float32", **own)
        exports.append(weights_of(out))
    assert len({*exports}) == 1
    found = runs.program(4, "fsdp", load=last, steps=0)
    assert same_states(held, found["begun"]) == []
    found["begun"]["states"]["lm_head.weight"]["exp_avg_sq"][0, 0] += 1
    assert same_states(held, found["begun"]) == ["lm_head.weight"]


def weights_of(folder: Path) -> bytes:
    """All tensors of a folder of transformers, by name, with dtype and shape."""
    found = load_file(folder / "model.safetensors")
    texts = (f"{n}{v.dtype}{[*v.shape]}".encode() + v.numpy().tobytes() for n, v in found.items())
    return b"".join(sorted(texts))


def same_states(one: Any, other: Any) -> list[str]:
    """Parameters of which two programs hold something else."""
    assert one["weights"].keys() == other["weights"].keys()
    return [
        name
        for name, value in one["weights"].items()
        if not same_bits(value, other["weights"][name])
        or any(
            not same_bits(value, other["states"][name][state])
            for state, value in one["states"][name].items()
        )
    ]


# ---- Accelerate and Trainer


def test_trainer_into_deepspeed(runs: Runs) -> None:
    folder, held = runs.trainer()
    found = runs.resumed(2, Plain(3), folder)
    assert unlike(held, found["states"]) == []
    assert near(found["losses"], held["more"])
    found["states"]["full"]["model.norm.weight", "exp_avg"][-1] += 1e-3
    found["losses"][-1] += 1e-4
    assert unlike(held, found["states"]) == ["model.norm.weight exp_avg"]
    assert not near(found["losses"], held["more"])


@pytest.mark.parametrize("tp", [0, 2], ids=["from DeepSpeed", "from Megatron"])
@pytest.mark.slow
def test_accelerate_loads_what_is_written_for_it(runs: Runs, tmp_path: Path, tp: int) -> None:
    run = runs.megatron(2, tp) if tp else runs.deepspeed(2, Plain(1))
    folder, source = written(run[0], "accelerate", tmp_path / "out"), run[1]
    own = {"no_schedule": True} if tp else {}  # Megatron's is none of torch's
    found = runs.program(2, "accelerate", tmp_path / "again", load=folder, steps=MORE, **own)
    compare = unlike_megatron if tp else unlike
    assert compare(found["begun"], source["states"]) == []
    assert near(found["losses"], source["losses"])
    held = found["begun"]["states"]["lm_head.weight"]
    held["exp_avg_sq"][0, 0] *= 2
    assert len(compare(found["begun"], source["states"])) == 1
    held["step"] += 1
    assert len(compare(found["begun"], source["states"])) > 1


@pytest.mark.slow
def test_trainer_goes_on_from_what_is_written_for_it(runs: Runs, tmp_path: Path) -> None:
    checkpoint, held = runs.trainer()
    ucp.convert(checkpoint, tmp_path / "mid", mesh="dp=2,zero=1")
    folder = tmp_path / "run" / checkpoint.name
    ucp.convert(tmp_path / "mid", folder, to="accelerate")
    shutil.copy(checkpoint / "trainer_state.json", folder)
    total = {"total": STEPS + MORE, "steps": 99}
    found = runs.program(2, "trainer", tmp_path / "run", load=folder, **total)
    assert near(found["losses"][-MORE:], held["more"])
    damaged = tmp_path / "other" / checkpoint.name
    shutil.copytree(folder, damaged)
    flipped(damaged / "optimizer_0")
    found = runs.program(2, "trainer", tmp_path / "other", load=damaged, **total)
    assert not near(found["losses"][-MORE:], held["more"])


def flipped(folder: Path) -> None:
    """Turns the moments of a folder round, by torch's own reader and writer."""
    from tests.reshard.test_dcp import tree_of

    tree = tree_of(folder, folder)
    for own in tree["optimizer"]["state"].values():
        own["exp_avg"].neg_()
    for path in folder.iterdir():
        path.unlink()
    dcp.save(tree, checkpoint_id=folder, no_dist=True)


@pytest.mark.slow
def test_the_recipe_of_the_page(runs: Runs, tmp_path: Path) -> None:
    """docs/fsdp2.md, word for word."""
    saved, source = runs.deepspeed(2, Plain(1))
    (tmp_path / "recipe.py").write_text(recipe("fsdp2.md", "From DeepSpeed to FSDP2"))
    folder = written(saved, "dcp", tmp_path / "out")
    found = runs.program(2, "fsdp", recipe=tmp_path / "recipe.py", load=folder, steps=MORE)
    assert unlike(found["begun"], source["states"]) == []
    assert near(found["losses"], source["losses"])


@pytest.mark.slow
def test_two_rates_and_a_schedule_that_falls(runs: Runs, tmp_path: Path) -> None:
    """From torchtitan's flat layout, which has the scheduler: groups have rates of their own."""
    how = {"layout": "flat", "rate": "1e-3", "decay": True}
    held = runs.program(2, "fsdp", tmp_path / "flat", **how, steps=STEPS)
    more = runs.program(2, "fsdp", **how, steps=STEPS + MORE)
    found = runs.resumed(2, Plain(1, rate=1e-3, decay=True), tmp_path / "flat")
    assert unlike(held, found["states"]) == []
    rates = {states["lr"] for states in found["states"]["hyper"].values()}
    assert len(rates) == 2 and 3e-3 not in rates
    assert near(found["losses"], more["losses"][STEPS:])


@pytest.mark.slow
def test_weights_in_bf16_go_on_as_masters(runs: Runs, tmp_path: Path) -> None:
    held = runs.program(2, "fsdp", tmp_path / "bf16", dtype="bfloat16", steps=STEPS)
    found = runs.resumed(2, Plain(1, dtype="bf16"), tmp_path / "bf16", steps=0)
    assert any("bfloat16" in note for note in found["notes"])
    for (name, state), value in found["states"]["full"].items():
        want = held["weights"][name] if state == "fp32" else held["states"][name][state]
        assert want.dtype == torch.bfloat16 and same_bits(value, want.float()), f"{name} {state}"


# ---- torchtitan


@pytest.mark.parametrize("zero", [1, 3])
def test_what_torchtitan_saved_comes_back(ranks: RankPool, zero: int, tmp_path: Path) -> None:
    """Through an engine: every weight, moment, step and setting, and the step of the schedule."""
    held = torch.load(GOLDEN / "torchtitan.pt", weights_only=False)
    out = tmp_path / "out"
    own = {"folder": str(GOLDEN / "torchtitan"), "out": str(out), "steps": 1}
    found = ranks.run(2, titan_jobs.pass_on, setup=Plain(zero), timeout_s=200, **own)[0]
    assert any("step alone" in note for note in found["notes"]) and found["scheduled"] == 4
    shutil.copy(GOLDEN / "torchtitan" / "config.json", out)
    ucp.convert(out, tmp_path / "titan", to="torchtitan")
    back = flat_of(tmp_path / "titan", tmp_path)

    def unlike_held() -> list[str]:
        # which implementation of torch's steps is each program's own
        return [k for k in differ(held, back) if not k.endswith((".fused", ".foreach"))]

    assert unlike_held() == []
    key = "state.layers.0.attention.qkv_linear.wqkv.weight.exp_avg"
    rows = back["optimizer"][key]
    rows[[0, 1]] = rows[[1, 0]]
    assert unlike_held() == [key]
