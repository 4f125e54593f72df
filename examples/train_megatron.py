r"""One phase of `quickstart.py`: a run of `pretrain/pretrain_gpt.py` with the states checked at its
save or after its load.

    torchrun --nproc_per_node 4 examples/train_megatron.py \
        --out DIR --name NAME [--save-at N] [flags of pretrain_gpt.py]

The training is that of the program, from its own flags: the class below adds the check, and nothing
that is trained or loaded depends on it.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `pretrain` is not installed
# megatron-core says at import that Transformer Engine and Apex are not there, torch that DeepSpeed
# uses old names
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")

import torch.distributed as dist  # noqa: E402
from lib import states  # noqa: E402

from pretrain.training import Run  # noqa: E402


class CheckedRun(Run):
    """Saves once, with the states beside the checkpoint; compares with them after a load."""

    def __init__(self, own: argparse.Namespace, argv: list[str]) -> None:
        self.own = own
        self.found: dict[str, Any] = {}
        super().__init__(argv)

    def save(self) -> None:
        if (
            self.result.position.iteration == self.own.save_at
        ):  # not at the end: the run goes on only to be compared with
            super().save()
            states.save(self.own.out / "states.pt", states.gather(self.engine))

    def load(self, saved: Any) -> Any:
        fresh = states.gather(self.engine)
        dist.barrier()
        started = time.perf_counter()
        position = super().load(saved)
        dist.barrier()
        self.found = {
            "seconds": time.perf_counter() - started,
            "read_bytes": states.total(self.report.read_bytes),
        }
        if self.own.plant_fault:
            states.plant_fault(self.engine)
        self.found |= states.compare(self.own.out / "states.pt", states.gather(self.engine), fresh)
        return position


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,  # --save is not --save-at
        description="One phase of the quickstart; takes the flags of pretrain_gpt.py too.",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for states.pt and the result"
    )
    parser.add_argument("--name", required=True, help="the result is written to NAME.json")
    parser.add_argument("--save-at", type=int, help="iteration after which to save")
    parser.add_argument(
        "--plant-fault",
        action="store_true",
        help="flip one bit after the load: the check must see it",
    )
    own, flags = parser.parse_known_args()
    run = CheckedRun(own, flags)
    result = run.train()
    if dist.get_rank() == 0:
        summary = {"losses": result.losses, "first_step": result.first, **run.found}
        (own.out / f"{own.name}.json").write_text(json.dumps(summary))
    run.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
