"""What the ranks do in the tests between the two engines: the models of `megatron_jobs` under
DeepSpeed."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import megatron_ucp as ucp
from pretrain.mcore import models, pipeline
from tests.engines import megatron_states, tensor_jobs
from tests.engines.kinds import KINDS, Kind
from tests.engines.megatron_jobs import BATCH, Mcore
from tests.engines.model import config_of, engine_around


@dataclass(frozen=True)
class Zero(Mcore):
    """The model of an Mcore under DeepSpeed at a ZeRO stage; in DeepSpeed's pipeline for pp > 1.
    The learning rate is constant."""

    zero: int = 1
    style: str = "constant"


def make(setup: Zero, attach: bool = True) -> Any:
    models.start(setup.tp, 7, setup.pp, setup.ep, setup.etp)
    sizes = setup.model
    model: Any = pipeline.build_pipeline(sizes, setup.pp) if setup.pp > 1 else models.build(sizes)
    optimizer = torch.optim.AdamW(models.param_groups(model, 3e-3, 0.1), eps=setup.eps)
    dp = dist.get_world_size() // setup.tp // setup.pp
    config = config_of(setup.zero, BATCH // dp, setup.dtype, gradient_clipping=setup.clip)
    made = engine_around(
        model, optimizer, config, rate=lambda step: 1.0, mpu=None if setup.pp > 1 else models.mpu()
    )
    return ucp.attach(made, family=setup.family) if attach else made


# what either engine saved is compared by what both engines have
KINDS[Zero] = Kind(
    make,
    tensor_jobs.train,
    close=tensor_jobs.close,
    differences=megatron_states.compare,
    trains_on=True,
    stale_steps=1,
)
