"""A run whose state moves in every way from one engine into another one, on whatever device
DeepSpeed trains on here, over its own messages: NCCL's, or gloo's. Run by
tests/engines/test_devices.py.

device_script.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch

import megatron_ucp as ucp
from megatron_ucp.core.names import MASTER
from megatron_ucp.reshard.kept_moves import KeptMoves
from tests.engines.model import GLOBAL_BATCH, SEQUENCE, VOCAB, Net, param_groups


def main() -> None:
    folder = Path(sys.argv[1])
    deepspeed.init_distributed()
    source = ucp.attach(made(1, seed=1), save="background")
    for number in range(3):
        train(source, number)
    want, values = ucp.fingerprint(source), weights(source)
    source.save_checkpoint(str(folder))
    train(source, 3)  # while it is written
    train(source, 4)
    ucp.wait(source)
    other = ucp.attach(made(3, seed=2))
    assert ucp.fingerprint(other).table != want.table
    assert any(not torch.equal(one, values[name]) for name, one in weights(other).items())
    ucp.load(other, folder)
    same("files", other, want, values)
    target = ucp.attach(made(2, seed=3))
    ucp.resize(other, target)
    same("resize", target, want, values)
    held = ucp.hold(target)
    again = ucp.attach(made(1, seed=4))
    ucp.load(again, held)
    same("hold", again, want, values)
    train(again, 3)
    assert ucp.fingerprint(again).table != want.table
    refitted("refit", ucp.refit(again, other), again, other)
    if again.device.type != "cpu":  # over gloo a rank sends nothing to itself
        with sending_all():
            refit = ucp.refit(again, other)
            assert refitted("messages", refit, again, other).moved_bytes > 0
    if torch.distributed.get_rank() == 0:
        print(f"moved on {again.device.type} by {torch.distributed.get_backend()}")
    torch.distributed.barrier()


def refitted(way: str, refit: Any, source: Any, target: Any) -> Any:
    """Steps in between, and what they give arrives. The last report."""
    report = None
    for number in (4, 5):
        train(source, number)
        want, values = masters(source), weights(source)
        assert masters(target) != want
        report = refit(checksums=True)
        assert masters(target) == want, way
        have = weights(target)
        assert all(torch.equal(have[name], values[name]) for name in values), way
    return report


def masters(engine: Any) -> dict[str, str]:
    """The sums of an engine's masters, by parameter."""
    return {
        name: row[MASTER] for name, row in ucp.fingerprint(engine).table.items() if MASTER in row
    }


def sending_all() -> Any:
    """Inside, moves are planned that send also what a rank has itself."""
    nobody = property(lambda _: -1, lambda *_: None)
    return mock.patch.object(KeptMoves, "rank", nobody, create=True)


def made(zero: int, seed: int) -> Any:
    torch.manual_seed(seed)
    net = Net()
    config = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // torch.distributed.get_world_size(),
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": zero},
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
    }
    optimizer = torch.optim.AdamW(param_groups(net, 2))
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    return engine


def tokens(engine: Any, number: int) -> torch.Tensor:
    """This rank's part of a batch."""
    dice = torch.Generator().manual_seed(number)
    batch = torch.randint(VOCAB, (GLOBAL_BATCH, SEQUENCE), generator=dice)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return batch.chunk(world)[rank].to(engine.device)


def train(engine: Any, number: int) -> None:
    engine.train()
    engine.backward(engine(tokens(engine, number)))
    engine.step()


def weights(engine: Any) -> dict[str, torch.Tensor]:
    """All of them as the forward pass has them, and the buffers."""
    params = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(params, enabled=hasattr(params[0], "ds_id")):
        return {n: v.detach().cpu().clone() for n, v in engine.module.state_dict().items()}


def same(way: str, engine: Any, want: Any, values: dict[str, torch.Tensor]) -> None:
    found = ucp.fingerprint(engine)
    wrong = [name for name in want.table if found.table.get(name) != want.table[name]]
    assert not wrong and found.table.keys() == want.table.keys(), f"{way}: {wrong}"
    have = weights(engine)
    assert have.keys() == values.keys() and all(torch.equal(have[n], values[n]) for n in have), way


if __name__ == "__main__":
    main()
