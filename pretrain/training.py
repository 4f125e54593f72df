"""The run: set up, load, train, evaluate, save, stop."""

import argparse
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.families import find_family
from megatron_ucp.families.family import Model
from megatron_ucp.formats.tags import nothing_there
from megatron_ucp.reshard import agree
from pretrain import checkpoint, elastic, same_data, setup
from pretrain.arguments import complete, complete_each, parse
from pretrain.checkpoint import Position, count, keep_position, program_of
from pretrain.data import Batches, make_samples
from pretrain.engine import DEEPSPEED
from pretrain.flags import FLAGS
from pretrain.log import Progress, say
from pretrain.mcore import experts, models
from pretrain.steps import make_steps
from pretrain.tokenizer import make_tokenizer

SIGTERM = "SIGTERM"  # as a reason to stop


@dataclass
class Result:
    """What a run did: where it started and ended, the mean loss of each of its iterations, and why
    it stopped."""

    first: int
    position: Position
    losses: list[float] = field(default_factory=list[float])
    evaluations: dict[int, float] = field(default_factory=dict[int, float])
    stopped_by: str = "--train-iters"
    again: bool = False  # the agent of this rank shall start it again: another node leaves


class Stop:
    """SIGTERM asks the run to end after the iteration. Further ones change nothing: a scheduler
    signals all processes, and torchrun, signalled too, hands its own on."""

    def __init__(self) -> None:
        self.asked = False

    def __enter__(self) -> "Stop":
        self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def wait(self, seconds: float) -> bool:
        """Whether this rank itself is asked, now or within so many seconds."""
        deadline = time.monotonic() + seconds
        while not self.asked and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.asked


class Run:
    """A run on all ranks, from the command line. Collective throughout."""

    def __init__(self, argv: Sequence[str]) -> None:
        given = parse(argv)
        self.started = time.monotonic()
        patience = elastic.timeout(given)
        elastic.check_launcher(given, os.environ)
        setup.start_distributed(patience, given.get("engine", DEEPSPEED))
        self._grouped = time.monotonic()
        saved = self._find(given)
        self._build(saved, patience)
        args, self._built = self.args, time.monotonic()
        position = Position()
        if saved is not None:
            position = self.load(saved)
        elif args.load is not None:
            say(f"no checkpoint in {args.load}, starting from the beginning")
        self._loaded = time.monotonic()
        if args.elastic:
            args.train_iters = elastic.last_iteration(args, position.iteration, position.consumed)
        self.result = Result(position.iteration, position)
        continues_folder = saved is not None and args.load == args.save
        self._saved_at = saved.iteration if continues_folder and saved is not None else -1

    def _build(self, saved: checkpoint.Saved | None, patience: timedelta) -> None:
        """Data and engine. What can't be is refused before the model is built."""
        args = self.args
        with agree.together():
            if saved is not None:
                checkpoint.check_saved(saved, args)
            tokenizer = make_tokenizer(args)
            padded = self._padded(tokenizer, saved)
            checkpoint.prepare_folder(args)
        setup.start_groups(args)
        setup.bound_waits(patience)
        self._mesh = models.mpu()
        checkpoint.seed_random(args.seed)
        with agree.together():
            self._data = [self._batches(tokenizer, split) for split in (0, 1)]
        self.engine = setup.make_engine(args, tokenizer.vocab_size, padded)
        keep_position(self.engine, lambda: self.result.position)
        setup.bound_waits(patience)
        self._device = setup.device(args.engine)
        self._steps = make_steps(self.engine, args, self._device)

    def _find(self, given: dict[str, Any]) -> checkpoint.Saved | None:
        """The checkpoint to go on from, and `args`: the model's sizes may come from it."""
        world = dist.get_world_size()
        given = self._resumed(given)
        with agree.together():
            # what finds the checkpoint is known before the model's sizes
            values = {flag.attribute: flag.default for flag in reversed(FLAGS)}
            early = argparse.Namespace(**{n: given.get(n, value) for n, value in values.items()})
        saved = checkpoint.peek(early)
        with agree.together():
            of_run = saved.args if saved and early.use_checkpoint_args else None
            self.args = complete(given, world, of_run)
            self._each = list(complete_each(given, of_run))
        with agree.gathering() as shared:
            shared.value = same_data.identity(self.args) if dist.get_rank() == 0 else None
        setattr(self.args, same_data.NAME, shared.values[0])
        return saved

    def _resumed(self, given: dict[str, Any]) -> dict[str, Any]:
        """The flags, of which an elastic run takes what it loads from --save once it has saved."""
        if not given.get("elastic") or not given.get("save"):
            return given
        with agree.gathering() as shared:
            shared.value = dist.get_rank() == 0 and not nothing_there(given["save"])
        return elastic.resumed_flags(given) if shared.values[0] else given

    def _padded(self, tokenizer: Any, saved: checkpoint.Saved | None) -> int:
        """Rows of the embedding. Raises a UcpError where one of --elastic-meshes can't cut them, or
        the model."""
        vocab = tokenizer.vocab_size
        for args in self._each:
            padded = checkpoint.padded_vocab(vocab, args, saved)
            sizes = setup.model_config(args, vocab, padded).sizes()
            Model(find_family(args.model_family), sizes).check_cut(args.tensor_model_parallel_size)
        return checkpoint.padded_vocab(vocab, self.args, saved)

    def _batches(self, tokenizer: Any, split: int) -> Batches | None:
        args = self.args
        evaluates = args.eval_iters > 0
        if split == 1 and not evaluates:
            return None
        count = (
            args.eval_iters * args.global_batch_size
            if split
            else max(args.train_iters * args.global_batch_size, args.train_samples or 0)
        )
        samples = make_samples(args, tokenizer, split, count)
        return Batches(
            samples,
            tokenizer,
            args.micro_batch_size,
            args.data_parallel_size,
            # neighbours share their samples
            self._mesh.get_data_parallel_rank() // args.ds_sequence_parallel_size,
        )

    def load(self, saved: checkpoint.Saved) -> Position:
        """Fills the engine from --load; where to go on. `report` says what was read."""
        position, self.report = checkpoint.load(self.engine, saved, self.args)
        return position

    # ---------------------------------------------------------------- one iteration

    def _iterate(self) -> float:
        """One optimizer step; the mean loss of its global batch, before the step."""
        train = self._data[0]
        assert train is not None
        loss = self._steps.train(train, self.result.position.consumed)
        self._auxiliary = self._of_experts()
        self.result.position.iteration += 1
        self.result.position.consumed += self.args.global_batch_size
        count(self.engine, self.result.position)
        return loss

    def _of_experts(self) -> dict[str, float]:
        """After a global batch: moves the routers' biases, and returns the auxiliary losses."""
        if self.args.num_experts is None:
            return {}
        model: Any = self.engine.module
        if self.args.engine == DEEPSPEED:  # megatron-core does it with the gradients
            experts.update_expert_bias(model, model.config)
        return experts.auxiliary_losses(model.config, self.args.gradient_accumulation)

    def evaluate(self) -> float:
        """Mean loss over the first --eval-iters global batches of the validation split, the same at
        every evaluation."""
        valid = self._data[1]
        assert valid is not None
        batch, count = self.args.global_batch_size, self.args.eval_iters
        return (
            sum(self._steps.evaluate(valid, iteration * batch) for iteration in range(count))
            / count
        )

    # ---------------------------------------------------------------- the loop

    def train(self) -> Result:
        """Until --train-iters, an exit flag or SIGTERM; saves on the way and at the end."""
        args, result = self.args, self.result
        progress = Progress(args)
        if args.elastic:
            self._say_start(progress)
        try:
            with Stop() as stop:  # around the last save too: a second signal would cut it off
                self._iterations(stop, progress)
                if args.save:
                    self.save()
                    ucp.wait(program_of(self.engine))
                if args.elastic and result.stopped_by == SIGTERM:
                    result.again = not stop.wait(elastic.NOTICE_S)
                    return result
            if args.export_hf:
                checkpoint.export(self.engine, args)
            if args.eval_iters and result.losses and result.stopped_by == "--train-iters":
                self._evaluate(progress)
        finally:
            progress.close()
        return result

    def _iterations(self, stop: Stop, progress: Progress) -> None:
        """Until the last iteration, or a reason to stop."""
        args, result = self.args, self.result
        while result.position.iteration < args.train_iters:
            loss = self._iterate()
            result.losses.append(loss)
            self._report(progress, loss)
            iteration = result.position.iteration
            if (
                args.eval_iters
                and not iteration % args.eval_interval
                and iteration < args.train_iters
            ):
                self._evaluate(progress)
            reason = self._reason_to_stop(stop)
            if reason:
                result.stopped_by = reason
                say(f"stopping after iteration {iteration}: {reason}")
                break
            is_due = args.save_interval and not iteration % args.save_interval
            # the first one says whose steps are in memory
            if is_due or (args.keep_memory_every and self._saved_at < 0):
                self.save()

    def _say_start(self, progress: Progress) -> None:
        """The mesh and the batch that an elastic run has now, and what its start took."""
        args, position = self.args, self.result.position
        seconds = {
            "groups": self._grouped - self.started,
            "engine": self._built - self._grouped,
            "load": self._loaded - self._built,
        }
        took = ", ".join(f"{name} {value:.2f} s" for name, value in seconds.items())
        say(f"{elastic.start_line(args)}; goes on after iteration {position.iteration} ({took})")
        progress.start(
            start=str(elastic.mesh_of(args)),
            ranks=args.world_size,
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            gradient_accumulation=args.gradient_accumulation,
            after_iteration=position.iteration,
            consumed_samples=position.consumed,
            seconds=seconds,
        )

    def save(self) -> None:
        """A checkpoint of this iteration, unless there is one."""
        if self._saved_at != self.result.position.iteration:
            checkpoint.save(self.engine, self.args, self.result.position)
            self._saved_at = self.result.position.iteration

    def _evaluate(self, progress: Progress) -> None:
        started = time.perf_counter()
        loss = self.evaluate()
        self.result.evaluations[self.result.position.iteration] = loss
        position = self.result.position
        progress.evaluation(
            position.iteration, position.consumed, loss, time.perf_counter() - started
        )

    def _report(self, progress: Progress, loss: float) -> None:
        position, last = self.result.position, self._steps.last()
        progress.iteration(
            position.iteration,
            position.consumed,
            loss,
            last.lr,
            last.scale,
            last.norm,
            last.applied,
            self._auxiliary,
        )

    def _reason_to_stop(self, stop: Stop) -> str | None:
        """The same answer on all ranks: a signal may have reached one of them only, and clocks
        differ."""
        minutes = (time.monotonic() - self.started) / 60
        late = (
            self.args.exit_duration_in_mins is not None
            and minutes > self.args.exit_duration_in_mins
        )
        flags = torch.tensor([float(stop.asked), float(late)], device=self._device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        if flags[0]:
            return SIGTERM
        if flags[1]:
            return "--exit-duration-in-mins"
        if self.args.exit_interval and not self.result.position.iteration % self.args.exit_interval:
            return "--exit-interval"
        return None

    def close(self) -> None:
        """Takes engine and process groups of the run down; torch.distributed stays."""
        self.engine.destroy()
        models.stop()


def main(argv: Sequence[str]) -> Result:
    """One run from its command line. Raises a UcpError; leaves torch.distributed initialised."""
    run = Run(argv)
    try:
        result = run.train()
    except BaseException:
        if not run.args.elastic:  # there the process ends, and taking down may wait for dead ranks
            run.close()
        raise
    run.close()
    return result
