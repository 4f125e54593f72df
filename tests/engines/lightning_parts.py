"""The trainer's strategy, module and callback in the tests of Lightning. Apart from the jobs, which
the tests import: Lightning takes seconds to import and need not be there."""

from typing import Any

import lightning
import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

from tests.engines.kinds import plant_fault
from tests.engines.model import GLOBAL_BATCH, SEQUENCE, VOCAB, Net, param_groups
from tests.engines.trainer_jobs import states


class OnCpu(DeepSpeedStrategy):
    """Lightning refuses DeepSpeed where there is no GPU, and numbers devices."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        super(DDPStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


class Module(lightning.LightningModule):
    """Its batches depend on the step alone, as Lightning begins the data again after a load."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = Net()
        self.losses: dict[int, float] = {}
        self.samples: dict[int, int] = {}

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        step = self.trainer.global_step
        self.samples[step] = int(batch)
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(VOCAB, (GLOBAL_BATCH, SEQUENCE), generator=generator)
        loss = self.net(tokens.chunk(self.trainer.world_size)[self.global_rank].contiguous())
        mean = loss.detach().double()
        torch.distributed.all_reduce(mean)
        self.losses[step] = float(mean) / self.trainer.world_size
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(param_groups(self.net, 2))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Watch(Callback):
    """A callback with a state of its own, which notes what a run saves and what it begins with;
    before that it may plant a fault."""

    def __init__(self, fault: str) -> None:
        self.seen, self.fault = 0, fault
        self.found: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen = state_dict["seen"]

    def now(self, trainer: Any) -> dict[str, Any]:
        loop = trainer.fit_loop
        scheduler = trainer.lr_scheduler_configs[0].scheduler
        return {
            "states": states(trainer.strategy.deepspeed_engine, scheduler),
            "counters": (trainer.global_step, trainer.current_epoch, self.seen),
            "batches": loop.epoch_loop.batch_progress.state_dict(),
        }

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.fault:
            plant_fault(trainer.strategy.deepspeed_engine, self.fault)
        self.found["begin"] = self.now(trainer)

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen += 1

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        self.found.setdefault("saved", self.now(trainer))
