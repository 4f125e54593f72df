"""Runs of Trainer, Accelerate and Lightning that save at every step, keep a checkpoint or two, and
are killed at random moments; each is started again as its users start it.

    python -m tests.engines.killed_trainers FOLDER --trainer trainer --save background --keep 1

Each life appends what it does to a journal: where it began, each step's loss, each save that its
trainer counted. What must hold: when a save has counted, a whole checkpoint is on disk at any time;
a restart resumes from the newest one that is whole; and a step's loss is the same in every life.
Prints a line of JSON for each life.
"""

import argparse
import json
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megatron_ucp as ucp
from megatron_ucp.engines.deepspeed import engine as attaching
from megatron_ucp.engines.deepspeed import install
from tests.engines.killed import start

LIMIT_S = 60
VOCAB, SEQUENCE, SAMPLES = 32, 8, 4096


class Journal:
    """What the first rank of a life says, a line each, on disk before it goes on."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a") if int(os.environ["RANK"]) == 0 else None

    def say(self, **facts: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(facts) + "\n")
            self._file.flush()


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCAB, (SAMPLES, SEQUENCE), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def model() -> Any:
    from tests.engines.trainer_jobs import tiny_llama

    torch.manual_seed(1)
    return tiny_llama(tied=True)


def config(save: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 1},
        "steps_per_print": 10**9,
        "universal_checkpoint": {"enabled": True, "save": save},
    }


def of_trainer(folder: str, save: str, keep: int) -> None:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from transformers import Trainer, TrainerCallback, TrainingArguments

    journal = Journal(Path(folder, "journal"))

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            journal.say(begins=state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                journal.say(step=state.global_step, loss=logs["loss"])

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            journal.say(counted=state.global_step)

    ucp.install()
    arguments = TrainingArguments(
        output_dir=f"{folder}/out",
        max_steps=10**6,
        per_device_train_batch_size=2,
        save_steps=1,
        save_total_limit=keep,
        logging_steps=1,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        deepspeed=config(save),
        learning_rate=1e-3,
        seed=3,
    )
    trainer = Trainer(model=model(), args=arguments, train_dataset=data(), callbacks=[Watch()])
    there = any(Path(folder, "out").glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=True if there and _has_counted(folder) else None)


def of_accelerate(folder: str, save: str, keep: int) -> None:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    from accelerate import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils import DeepSpeedPlugin, ProjectConfiguration

    journal = Journal(Path(folder, "journal"))
    PartialState(backend="gloo")  # it finds none by itself for DeepSpeed on CPU ranks
    ucp.install()
    naming = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=True, total_limit=keep
    )
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config(save)), project_config=naming
    )
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(data(), batch_size=2)  # type: ignore[arg-type]
    engine, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    first = 0
    if _has_counted(folder):
        accelerator.load_state()
        first = engine.global_steps
    # a name that a killed life began is used again by nobody: Accelerate refuses it
    numbers = [int(one.name.rpartition("_")[2]) for one in Path(folder).glob("checkpoints/*_*")]
    naming.iteration = max(numbers, default=-1) + 1
    journal.say(begins=first)
    rows = list(data())
    for step in range(first, 10**6):
        at = 2 * accelerator.num_processes * step + 2 * accelerator.process_index
        batch = {key: torch.stack([row[key] for row in rows[at : at + 2]]) for key in rows[0]}
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        journal.say(step=step + 1, loss=loss.item())
        accelerator.save_state()
        journal.say(counted=step + 1)


def of_lightning(folder: str, save: str, keep: int) -> None:
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from tests.engines.lightning_parts import OnCpu

    journal = Journal(Path(folder, "journal"))
    rows = data()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, number: int) -> Any:
            at = 2 * self.trainer.world_size * self.trainer.global_step + 2 * self.global_rank
            own = {key: torch.stack([row[key] for row in rows[at : at + 2]]) for key in rows[0]}
            loss = self.net(**own).loss
            journal.say(step=self.trainer.global_step + 1, loss=loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Saves(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
            super()._save_checkpoint(trainer, filepath)
            journal.say(counted=trainer.global_step)

    class Begins(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            journal.say(begins=trainer.global_step)

    ucp.install(enabled=True)
    saves = Saves(
        dirpath=f"{folder}/out",
        every_n_train_steps=1,
        save_top_k=keep,
        monitor="step",
        mode="max",
        filename="{step}",
    )
    trainer = lightning.Trainer(
        strategy=OnCpu(config=config(save), process_group_backend="gloo"),
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        max_steps=10**6,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saves, Begins()],
        default_root_dir=folder,
    )
    path = str(ucp.newest_whole(f"{folder}/out").folder.parent) if _has_counted(folder) else None
    loader = torch.utils.data.DataLoader(range(10**6), batch_size=2)  # type: ignore[arg-type]
    trainer.fit(Module(), loader, ckpt_path=path, weights_only=False)


TRAINERS: dict[str, Callable[[str, str, int], None]] = {
    "trainer": of_trainer,
    "accelerate": of_accelerate,
    "lightning": of_lightning,
}


def _has_counted(folder: str) -> bool:
    return any("counted" in line or line.get("begins", 0) > 0 for line in lines(Path(folder)))


def lines(folder: Path) -> list[dict[str, Any]]:
    """The journal, but for a last line that a kill cut short."""
    out: list[dict[str, Any]] = []
    path = folder / "journal"
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            out.append(json.loads(text))
        except ValueError:
            continue
    return out


def life(trainer: str, save: str, keep: int, ranks: int, folder: Path, after_s: float) -> int:
    """One life on so many ranks, killed so long after it has begun to train; how many lines it
    wrote. An error that ends it by itself is raised."""
    before, store = len(lines(folder)), folder / f"store{time.time_ns()}"
    work = TRAINERS[trainer]
    args = str(folder), save, keep
    pids = [start(rank, ranks, store, work, *args) for rank in range(ranks)]
    try:
        end = time.monotonic() + LIMIT_S
        while not any("begins" in line for line in lines(folder)[before:]):
            done, status = os.waitpid(-1, os.WNOHANG)
            if done:
                pids.remove(done)
                raise RuntimeError(f"a rank ended by itself before it trained: {status}")
            if time.monotonic() > end:
                raise RuntimeError("it did not begin to train")
            time.sleep(0.01)
        time.sleep(after_s)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
    return len(lines(folder)) - before


def judge(folder: Path, save: str, before: int) -> list[str]:
    """What a life of which the journal begins behind `before` did wrong."""
    told, wrong = lines(folder), list[str]()
    own = told[before:]
    counted = [line["counted"] for line in told[:before] if "counted" in line]
    begins = next(line["begins"] for line in own if "begins" in line)
    # one save may be under way in the background when its trainer counts it
    least = (counted[-1] - (save == "background")) if counted else 0
    if begins < least:
        wrong.append(f"begins at {begins}, and the trainer had counted {counted[-1]}")
    losses: dict[int, float] = {}
    for line in told:
        if "loss" in line and losses.setdefault(line["step"], line["loss"]) != line["loss"]:
            wrong.append(f"step {line['step']} has loss {line['loss']}, {losses[line['step']]}")
    where = folder / ("checkpoints" if (folder / "checkpoints").exists() else "out")
    if any("counted" in line for line in told) and len(own) > 1:
        finished = [line["counted"] for line in told if "counted" in line]
        if len(finished) > 1 or save == "direct":
            try:
                ucp.newest_whole(where)
            except ucp.UcpError as error:
                wrong.append(f"no whole checkpoint is on disk: {error}")
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trainer", choices=TRAINERS, default="trainer")
    parser.add_argument("--save", choices=("direct", "background"), default="background")
    parser.add_argument("--keep", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--lives", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plant-fault", action="store_true", help="trainers remove at once")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    os.environ.setdefault("MEGATRON_UCP_LOG", "warning")
    os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    os.environ |= {"LOCAL_SIZE": "-1", "MASTER_ADDR": "127.0.0.1"}
    import accelerate
    import deepspeed
    import lightning
    import transformers

    assert all((accelerate, deepspeed, lightning, transformers)), "imported once, for all lives"
    if args.plant_fault:
        attaching.guard_removals = install.guard_trainers = lambda: None
    dice, failed = random.Random(args.seed), 0
    args.folder.mkdir(parents=True, exist_ok=True)
    for number in range(args.lives):
        before, after_s = len(lines(args.folder)), dice.uniform(0.02, 1.5)
        wrong: list[str] = []
        try:
            how = args.trainer, args.save, args.keep, args.ranks, args.folder, after_s
            life(*how)
            wrong = judge(args.folder, args.save, before)
        except RuntimeError as error:
            wrong = [str(error)]
        own = lines(args.folder)[before:]
        saves = sum("counted" in line for line in own)
        begins = next((line["begins"] for line in own if "begins" in line), None)
        print(
            json.dumps({"life": number, "begins": begins, "saves": saves, "wrong": wrong}),
            flush=True,
        )
        failed += bool(wrong)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
