"""What takes the place of Megatron-LM's `load_checkpoint` and `save_checkpoint` follows its flags.
Its program is not there: a module in its name gives the flags."""

import argparse
import enum
import inspect
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_ucp as ucp
from megatron_ucp.errors import NotFoundError, UnsupportedError, UsageError
from megatron_ucp.formats.tags import nothing_there
from megatron_ucp.megatron_lm import load_checkpoint, save_checkpoint
from tests.engines import megatron_jobs
from tests.engines.megatron_jobs import BATCH, Mcore
from tests.engines.megatron_states import canonical, compare
from tests.engines.memory_jobs import heard
from tests.ranks import RankPool


class Backend(enum.Enum):
    auto = 5


class Signal(enum.IntEnum):
    stop = 15


def flags(engine: Any, **others: Any) -> argparse.Namespace:
    """Those of a run of Megatron-LM, of which some are no plain values."""
    said: dict[str, Any] = {
        "save": None,
        "load": None,
        "ckpt_step": None,
        "pretrained_checkpoint": None,
        "iteration": 0,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "params_dtype": torch.float32,
        "attention_backend": Backend.auto,
        "exit_signal": Signal.stop,
        "activation": len,
        "some": [Signal.stop],
        "many": {"a": (1, None)},
    }
    switches = "finetune no_load_optim no_load_rng no_save_optim no_save_rng"
    said |= dict.fromkeys([*switches.split(), "exit_on_missing_checkpoint"], False)
    return argparse.Namespace(**{**vars(megatron_jobs.arguments(engine)), **said, **others})


def give(args: argparse.Namespace) -> None:
    """Makes them the program's; a batch has 2 samples up to the fourth, then 4."""
    from megatron.core import num_microbatches_calculator as batches

    stub: Any = types.ModuleType("megatron.training")
    stub.get_args, stub.print_rank_0 = (lambda: args), (lambda text: None)
    sys.modules[stub.__name__] = stub
    batches.destroy_num_microbatches_calculator()
    init = batches.init_num_microbatches_calculator
    sizes: dict[str, Any] = {"step_batch_size_schedule": f"0:2 4:{BATCH}"}
    if not sizes.keys() & inspect.signature(init).parameters:  # before 0.18
        sizes = {"rampup_batch_size": [2, 2, 4]}
    init(
        rank=dist.get_rank(),
        global_batch_size=BATCH,
        micro_batch_size=1,
        data_parallel_size=2,
        **{"rampup_batch_size": None, **sizes},
    )


def micro_batches() -> int:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return get_num_microbatches()


def parts(engine: Any) -> tuple[Any, Any, Any]:
    return engine.stack.chunks, engine.optimizer, engine.scheduler


def program(folder: str) -> None:
    """Saves, and loads as the flags say; all on two ranks."""
    kind = Mcore(layers=2)
    engine = megatron_jobs.make(kind)
    give(args := flags(engine, load=folder, save=folder))
    assert load_checkpoint(*parts(engine)) == (0, 0)
    args.exit_on_missing_checkpoint = True
    with pytest.raises(NotFoundError, match="no checkpoint"):
        load_checkpoint(*parts(engine))
    args.load = __file__ if dist.get_rank() else f"{folder}/nowhere"
    args.exit_on_missing_checkpoint = False
    with pytest.raises(UsageError, match="don't see the same files"):
        load_checkpoint(*parts(engine))
    want = save_in_all_ways(engine, args, folder)
    engine = megatron_jobs.make(kind)
    give(args := flags(engine, load=folder))
    before = {**canonical(engine), "counters": None}
    assert micro_batches() == 1
    assert load_checkpoint(*parts(engine), checkpointing_context={}) == (2, 12.5)
    counts = args.consumed_train_samples, args.skipped_train_samples, args.consumed_valid_samples
    assert counts == (7, 1, 3) and micro_batches() == 2
    assert compare(want, {**canonical(engine), "counters": None}) == [] != compare(want, before)
    args.ckpt_step = 9
    with pytest.raises(NotFoundError, match="iter_0000009"):
        load_checkpoint(*parts(engine))
    megatron_jobs.close(engine)
    check_weights_alone(kind, folder, want)


def save_in_all_ways(engine: Any, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Saves iteration 2; others as `--non-persistent-ckpt-type` asks. What is in the engine."""
    megatron_jobs.train(engine, 2)
    vars(args).update(consumed_train_samples=7, skipped_train_samples=1, consumed_valid_samples=3)
    for asked in ({"release": True}, {"non_persistent_ckpt": True}, {}):
        args.non_persistent_ckpt_type, args.no_save_optim = "local", not asked
        with pytest.raises(UnsupportedError, match="kind of save"):
            save_checkpoint(2, *parts(engine), 12.5, **asked)
    vars(args).update(non_persistent_ckpt_type="global", no_save_optim=False)
    save_checkpoint(2, *parts(engine), 12.5, {}, train_data_iterator=None)
    want = {**canonical(engine), "counters": None}
    for iteration in (3, 4):
        save_checkpoint(iteration, *parts(engine), 12.5, non_persistent_ckpt=True)
    assert [p.name for p in Path(folder, "non_persistent").glob("iter*")] == ["iter_0000004"]
    retain(engine, args, f"{folder}/retained")
    megatron_jobs.close(engine)
    return want


def retain(engine: Any, args: argparse.Namespace, folder: str) -> None:
    """Saves as `--save-retain-interval` asks: what it divides stays, and the newest; a link and
    another's folder do too."""
    args.save, args.save_retain_interval = folder, 4
    for iteration in (2, 4, 6, 8, 10, 10, 12):
        save_checkpoint(iteration, *parts(engine), 12.5)
        dist.barrier()
        if iteration == 2 and dist.get_rank() == 0:
            Path(folder, "iter_0000002").rename(f"{folder}/elsewhere")
            Path(folder, "iter_0000002").symlink_to(f"{folder}/elsewhere")
        if iteration == 10 and dist.get_rank() == 0:
            Path(folder, "iter_0000010", "ucp_manifest.json").unlink()
        dist.barrier()
    kept = sorted(int(path.name[5:]) for path in Path(folder).glob("iter_*"))
    assert kept == [2, 4, 8, 10, 12] and nothing_in_the_way(folder)


def nothing_in_the_way(folder: str) -> bool:
    return not [path for path in Path(folder).iterdir() if path.name.startswith(".")]


def check_weights_alone(kind: Mcore, folder: str, want: dict[str, Any]) -> None:
    """As `--no-load-optim`, `--finetune` and `--pretrained-checkpoint` ask."""
    empty = f"{folder}/nowhere"
    cases: list[tuple[dict[str, Any], int]] = [
        ({"load": folder, "no_load_optim": True, "no_load_rng": True}, 2),
        ({"load": folder, "finetune": True}, 0),
        ({"load": empty, "pretrained_checkpoint": folder}, 0),
    ]
    for others, iteration in cases:
        engine = megatron_jobs.make(kind)
        give(args := flags(engine, **others))
        args.consumed_train_samples = 0
        schedule = engine.scheduler.state_dict()
        assert load_checkpoint(*parts(engine)) == (iteration, 12.5)
        assert args.consumed_train_samples == (7 if iteration else 0)
        assert engine.scheduler.state_dict() == schedule
        assert args.finetune is not bool(iteration)
        have = canonical(engine)
        assert {state for _, state in have["full"]} == {"fp32"} and not have["scalars"]
        for name, values in want["weights"].items():
            assert torch.equal(have["weights"][name], values), name
        megatron_jobs.close(engine)


def test_it_follows_the_flags(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, program, str(tmp_path))
    tree = torch.load(tmp_path / "iter_0000002" / "common.pt", weights_only=False)
    said = vars(tree["args"])
    assert said["params_dtype"] is torch.float32 and said["many"] == {"a": (1, None)}
    assert not {"attention_backend", "exit_signal", "activation", "some"} & {*said}


def in_background(folder: str) -> list[str]:
    """Saves with `--async-save`; what is missing of the last one in a run that loads it."""
    kind = Mcore(layers=2)
    engine = megatron_jobs.make(kind)
    others = {"async_save": True, "save_retain_interval": 4}
    give(args := flags(engine, save=folder, load=folder, **others))
    for iteration in range(1, 7):
        megatron_jobs.train(engine, 1, first=iteration - 1)
        args.consumed_train_samples = iteration * BATCH
        save_checkpoint(iteration, *parts(engine), 12.5)
    want = {**canonical(engine), "counters": None}
    megatron_jobs.train(engine, 1, first=6)
    assert load_checkpoint(*parts(engine)) == (6, 12.5), "the load waits for it"
    found = compare(want, {**canonical(engine), "counters": None})
    report = ucp.report(engine.optimizer._ucp_stack).save
    assert report.global_steps == 6 and report.blocked_seconds < report.seconds
    megatron_jobs.close(engine)
    return found


def test_async_save(ranks: RankPool, tmp_path: Path) -> None:
    """Each save waits for the one before it, and the older one goes when the newer one is named."""
    job = in_background
    assert ranks.run(2, job, str(tmp_path)) == [[], []]
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000006"]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6"


def another_format(folder: str) -> None:
    """`--ckpt-format` is followed or refused, at the start, and by a save that comes without a
    load; with `--async-save` too."""
    engine = megatron_jobs.make(Mcore(layers=2))
    megatron_jobs.train(engine, 1)
    for others in ({"ckpt_format": "torch_dcp"}, {"ckpt_format": "zarr", "async_save": True}):
        give(flags(engine, save=folder, load=folder, **others))
        for call in (
            lambda: load_checkpoint(*parts(engine)),
            lambda: save_checkpoint(1, *parts(engine), 12.5),
        ):
            with pytest.raises(UnsupportedError, match="this format") as refused:
                call()
            assert "--ckpt-format torch_dist" in str(refused.value)
        assert not any(Path(folder).iterdir())
        give(flags(engine, load=folder, **others))
        assert load_checkpoint(*parts(engine)) == (0, 0), "a run that saves nothing may load"
    give(flags(engine, save=folder, ckpt_format="torch_dist"))
    save_checkpoint(1, *parts(engine), 12.5)
    megatron_jobs.close(engine)


def test_another_format_is_refused_before_anybody_trains(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, another_format, str(tmp_path))
    assert (tmp_path / "iter_0000001" / ".metadata").is_file()


def older_files(folder: str) -> list[str]:
    """Under `--ckpt-format torch` Megatron-LM's own save gets all that the program gave."""
    engine = megatron_jobs.make(Mcore(layers=2))
    calls: list[Any] = []
    give(flags(engine, save=folder, load=folder, ckpt_format="torch", async_save=True))
    own: Any = types.ModuleType("megatron.training.checkpointing")
    own.save_checkpoint = lambda *given, **more: calls.append((given, more))
    sys.modules[own.__name__] = own
    try:
        assert load_checkpoint(*parts(engine)) == (0, 0)
        with heard() as notes:
            save_checkpoint(2, *parts(engine), 12.5, {"a": 1}, release=True, train_data_iterator=7)
    finally:
        del sys.modules[own.__name__]
    ((given, more),) = calls
    assert given == (2, *parts(engine), 12.5, {"a": 1})
    assert more == {"non_persistent_ckpt": False, "release": True, "train_data_iterator": 7}
    with pytest.raises(UnsupportedError, match="loaded here, but not written"):
        ucp.save(ucp.attach_megatron(*parts(engine)), folder, ckpt_format="torch")
    megatron_jobs.close(engine)
    return notes


def test_megatron_lm_itself_saves_its_older_files(ranks: RankPool, tmp_path: Path) -> None:
    (notes,) = ranks.run(1, older_files, str(tmp_path))
    assert not [*tmp_path.iterdir()]
    assert any("Megatron-LM's own save writes these files" in note for note in notes)


def test_a_folder_of_weights_is_no_first_start(tmp_path: Path) -> None:
    assert nothing_there(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert not nothing_there(tmp_path)
