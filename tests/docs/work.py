"""The folders that the pages name, in a work folder of each page.

runs/llama           what `bash examples/quickstart.sh` leaves: tp=2, dp=2, ZeRO-1 of DeepSpeed
checkpoint-500       (and -400) what transformers' Trainer leaves: DeepSpeed's own ZeRO-3 files
                     and config.json
lora/checkpoint-500  the same of a LoRA adapter of peft on `base`
base                 a Hugging Face model
megatron             Megatron-LM's own folder, `fully_reshardable`; `megatron_default` is
                     `dp_reshardable`, `megatron_legacy` the format before `torch_dist`
megatron_deepspeed   what its own program leaves, at tp=2, pp=2
damaged              a copy of runs/llama's tag in which one bit is turned
my_model.toml        rules for the model of runs/llama
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT
from tests.ranks import RankPool
from tests.scripts import run_example

GOLDEN = ROOT / "tests" / "formats" / "golden" / "megatron"
OF_PROGRAM = GOLDEN.with_name("megatron_deepspeed") / "gpt_tp2pp2_z1"
BATCH = 32  # samples of a step, as docs/resume.md counts them
COPIES = {
    "megatron": "td_full_tp2dp2",
    "megatron_default": "td_dpr_dp2_bf16",
    "megatron_legacy": "legacy_tp2pp2",
}


def make(folder: Path, pool: RankPool, steps: int) -> None:
    """The work folder that every page gets a copy of; the quickstart trains so many steps."""
    arguments = [
        "--out",
        str(folder / "quickstart"),
        "--checkpoint",
        str(folder / "runs" / "llama"),
    ]
    few = ["--steps", str(steps), "--more", "1", "--resume", "tp=1,dp=1,zero=0"]
    done = run_example("quickstart.py", *arguments, *few)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    shutil.rmtree(folder / "quickstart")
    pool.run(2, trainer_folders, str(folder))
    for name, golden in COPIES.items():
        shutil.copytree(GOLDEN / golden, folder / name)
        (folder / name / "next_losses.txt").unlink(missing_ok=True)
    shutil.copytree(OF_PROGRAM, folder / "megatron_deepspeed")
    (folder / "megatron_deepspeed" / "next_losses.txt").unlink()
    shutil.copy(Path(__file__).with_name("my_model.toml"), folder)
    damage(next((folder / "runs" / "llama").glob("global_step*")), folder / "damaged")


def damage(tag: Path, copy: Path) -> None:
    """A copy of a tag in which one bit of a tensor is turned."""
    shutil.copytree(tag, copy)
    path = copy / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def trainer_folders(folder: str) -> None:
    """What Trainer leaves of two runs, on the ranks that save them: the whole model, and LoRA."""
    import torch.distributed as dist
    from peft import LoraConfig, get_peft_model

    out = Path(folder)
    model = small_llama()
    if dist.get_rank() == 0:
        model.save_pretrained(out / "base")
    save_like_trainer(model, {out / "checkpoint-400": 400, out / "checkpoint-500": 500})
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapter = get_peft_model(small_llama(), config)
    save_like_trainer(adapter, {out / "lora" / "checkpoint-500": 500})


def small_llama() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, use_cache=False))


def save_like_trainer(model: Any, folders: dict[Path, int]) -> None:
    """One step on, then a save of plain DeepSpeed, for each folder and its step."""
    import deepspeed
    import torch
    import torch.distributed as dist

    config = {
        "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(trained, lr=1e-3), config=config
    )
    for folder, step in folders.items():
        tokens = torch.arange(32).repeat(BATCH // dist.get_world_size(), 1) + dist.get_rank()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.global_steps, engine.global_samples = step, BATCH * step
        engine.save_checkpoint(str(folder), tag=f"global_step{step}")
        if dist.get_rank() == 0:
            saved: Any = model
            configs = getattr(saved, "peft_config", {"": saved.config})
            for one in configs.values():
                one.save_pretrained(folder)
        dist.barrier()
    engine.destroy()


@contextlib.contextmanager
def copied(made: Path, to: Path) -> Iterator[None]:
    """A copy of the work folder, in which this process is while the context lasts."""
    shutil.copytree(made, to)
    before = Path.cwd()
    os.chdir(to)
    try:
        yield
    finally:
        os.chdir(before)
        shutil.rmtree(to)
