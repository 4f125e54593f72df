"""Where megatron-core's live buffers have their parameters: as the formulas for files say. And what
of a stack is refused, before anything is touched."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from megatron_ucp.errors import UcpError
from tests.engines.kinds import refusal_of
from tests.engines.megatron_jobs import Mcore, close, make, train
from tests.ranks import RankPool

MOE: dict[str, Any] = {"family": "mixtral", "layers": 2}
MESHES = {
    "dp4-buckets": (4, Mcore(overlap=True, bucket=2000)),
    "pp2-vpp2-tied": (4, Mcore("gpt", tied=True, pp=2, vpp=2, overlap=True, bucket=1500)),
    "dp3": (3, Mcore(overlap=True, gather=True, bucket=3000)),
    "tp2-ep2": (4, Mcore(tp=2, ep=2, overlap=True, bucket=1, **MOE)),
    "pad": (2, Mcore(pad=True)),
    "tp2-dp2-bf16": (4, Mcore(tp=2, dtype="bf16", overlap=True, bucket=1000)),
}


def against_formulas(setup: Mcore, wide: bool | None = None) -> tuple[int, list[str]]:
    """How many buckets of this rank were compared, and which differ. `wide` plants another
    padding."""
    from megatron_ucp.engines.megatron.live import describe

    engine = make(setup)
    live = describe(engine.handle)
    found = iter(live.shard.buffers)
    buckets, wrong = 0, []
    for inner in live.shard.inner:
        for number, buffer in enumerate(inner.buffers):
            chunk = engine.stack.chunks[inner.gbuf_idx_to_model_idx_map[number]]
            want = formula(chunk, buffer, setup.pad if wide is None else wide)
            for index, bucket in enumerate(want.buckets):
                flat = next(found).flat
                held = [(p.name, p.start - bucket.start) for p in want.params if p.bucket == index]
                have = [(member.param, member.start) for member in flat.members]
                buckets += 1
                if (held, bucket.stop - bucket.start) != (have, flat.length):
                    wrong.append(held[0][0])
    assert next(found, None) is None
    close(engine)
    return buckets, wrong


def formula(chunk: Any, buffer: Any, wide: bool) -> Any:
    """One of a chunk's buffers, from the order in which its model registered the parameters."""
    from megatron_ucp.engines.mcore_model import bare_model, canonical_names
    from megatron_ucp.formats.megatron.buffers import Registered, grad_buffer

    model = bare_model(chunk)
    names = canonical_names(model)
    listed = [
        Registered(names[name], param.numel(), getattr(param, "shared_embedding", False))
        for name, param in model.named_parameters()
        if param in buffer.param_index_map
    ]
    return grad_buffer(listed, buffer.data_parallel_world_size, chunk.bucket_size, wide=wide)


@pytest.mark.parametrize("mesh", MESHES)
def test_live_buffers_are_those_of_the_formulas(ranks: RankPool, mesh: str) -> None:
    world, setup = MESHES[mesh]
    found = ranks.run(world, against_formulas, setup)
    assert all(buckets and not wrong for buckets, wrong in found)
    assert not setup.bucket or any(buckets > 1 for buckets, _ in found)


def test_the_comparison_sees_another_padding(ranks: RankPool) -> None:
    setup = Mcore(pad=True)
    found = ranks.run(2, against_formulas, setup, wide=False)
    assert all(wrong for _, wrong in found)


def attempting(found: dict[str, str]) -> Any:
    """A function that makes a call and notes under its name what it raised."""

    def attempt(name: str, call: Any) -> None:
        found[name] = refusal_of(call, "nothing")

    return attempt


def refusals(folder: str) -> dict[str, str]:
    """What each call raises, on two ranks."""
    import megatron_ucp as ucp

    engine = make(Mcore())
    found: dict[str, str] = {}
    refused_stacks(engine, attempting(found))
    attempt = attempting(found)
    attempt("early", lambda: ucp.save(engine.handle, folder))
    attempt("other", lambda: ucp.save(SimpleNamespace(), folder))  # type: ignore[arg-type]
    train(engine, 1)
    ucp.save(engine.handle, folder)
    weight = engine.stack.bare[0].decoder.layers[0].mlp.linear_fc2.weight
    weight.partition_dim, kept = 0, weight.partition_dim
    attempt("attribute", lambda: ucp.load(engine.handle, folder))
    weight.partition_dim = kept
    broken_load(engine, folder, attempt)
    close(engine)
    return found


def refused_stacks(engine: Any, attempt: Any) -> None:
    import megatron_ucp as ucp

    chunks, optimizer = engine.stack.chunks, engine.optimizer

    def attach(**options: Any) -> Any:
        return ucp.attach_megatron(chunks, options.pop("optimizer", optimizer), None, **options)

    def with_setting(owner: Any, name: str) -> Any:
        def planted() -> None:
            with mock.patch.object(owner, name, True, create=True):
                attach()

        return planted

    attempt("bare", lambda: ucp.attach_megatron(engine.stack.bare, optimizer))
    attempt("optimizer", lambda: attach(optimizer=SimpleNamespace(config=None)))
    attempt("family", lambda: attach(family="gpt"))
    attempt("no family", lambda: attach(family="none"))
    attempt("fsdp", with_setting(chunks[0].ddp_config, "use_megatron_fsdp"))
    config = optimizer.chained_optimizers[0].config
    attempt("offload", with_setting(config, "optimizer_cpu_offload"))


def broken_load(engine: Any, folder: str, attempt: Any) -> None:
    """A load that fails while bytes move; what the engine refuses until one succeeds."""
    import megatron_ucp as ucp

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(5, "the disk is gone")

    with mock.patch("megatron_ucp.reshard.files.execute", failing):
        attempt("broken", lambda: ucp.load(engine.handle, folder))
    attempt("step", engine.optimizer.step)
    attempt("save", lambda: ucp.save(engine.handle, folder))
    attempt("export", lambda: ucp.export_hf(engine.handle, f"{folder}_hf"))
    ucp.load(engine.handle, folder)
    attempt("usable", engine.optimizer.step)


def test_refusals(ranks: RankPool, tmp_checkpoints: Any) -> None:
    folder = str(tmp_checkpoints / "stack_refusals")
    for found in ranks.run(2, refusals, folder):
        says = {
            "bare": "UsageError: the chunks of the model are megatron-core's",
            "optimizer": "UnsupportedError: an optimizer of megatron-core's that is not known",
            "no family": "UsageError: there is no such family",
            "fsdp": "UnsupportedError: use_megatron_fsdp is not supported",
            "offload": "UnsupportedError: optimizer_cpu_offload is not supported",
            "early": "UsageError: there is nothing that Megatron-LM could load",
            "other": "UsageError: ucp.save is for megatron-core's own stack",
            "attribute": "LayoutError: a live parameter's attribute partition_dim contradicts",
            "broken": "DamagedFileError: the operating system refused",
            "step": "EngineUnusableError",
            "save": "EngineUnusableError",
            "export": "EngineUnusableError",
            "usable": "nothing",
        }
        for name, text in says.items():
            assert text in found[name], (name, found[name])


# what is set on a live stack, by the object that has it: what is raised names it
SETTINGS: dict[str, tuple[str, Any]] = {
    "use_precision_aware_optimizer": ("optimizer", True),
    "optimizer_cuda_graph": ("optimizer", True),
    "use_layer_wise_distributed_optimizer": ("optimizer", True),
    "use_custom_fsdp": ("buffers", True),
    "fp8_param_gather": ("buffers", True),
    "fp4_param_gather": ("buffers", True),
    "num_distributed_optimizer_instances": ("buffers", 2),
    "fp8": ("model", "hybrid"),
    "fp4": ("model", "e2m1"),
    "moe_single_grouped_weight": ("model", True),
    "moe_single_grouped_bias": ("model", True),
    "moe_mlp_glu_interleave_size": ("model", 32),
    "moe_shared_expert_glu_interleave_size": ("model", 32),
    "gtp_weight_remat_size": ("model", 2),
    "expert_gtp_weight_remat_size": ("model", 2),
}
OFF = {"gtp_weight_remat_size": 1, "fp8": None, "moe_mlp_glu_interleave_size": None}


def refused_settings() -> dict[str, str]:
    """What attach raises under each; under none, and under what means off, nothing."""
    import megatron_ucp as ucp

    engine = make(Mcore(layers=2))
    chunks, optimizer = engine.stack.chunks, engine.optimizer
    owners = {
        "optimizer": optimizer.chained_optimizers[0].config,
        "buffers": chunks[0].ddp_config,
        "model": engine.stack.bare[0].config,
    }
    found: dict[str, str] = {}
    attempt = attempting(found)
    for name, (owner, value) in SETTINGS.items():
        with mock.patch.object(owners[owner], name, value, create=True):
            attempt(name, lambda: ucp.attach_megatron(chunks, optimizer))
        if name in OFF:
            with mock.patch.object(owners[owner], name, OFF[name], create=True):
                ucp.attach_megatron(chunks, optimizer)
    close(engine)
    return found


def test_settings_under_which_numbers_lie_elsewhere_are_refused_by_name(ranks: RankPool) -> None:
    says = {
        "use_layer_wise_distributed_optimizer": "LayerWiseDistributedOptimizer is not supported",
        "num_distributed_optimizer_instances": "several instances",
        "gtp_weight_remat_size": "generalized tensor parallelism",
        "expert_gtp_weight_remat_size": "generalized tensor parallelism",
    }
    for found in ranks.run(2, refused_settings):
        for name in SETTINGS:
            assert found[name].startswith(f"UnsupportedError: {says.get(name, name)}"), found[name]
            assert name in found[name] and "what to do" in found[name], found[name]


def like(name: str, **has: Any) -> Any:
    """An object of a class of this name."""
    return type(name, (SimpleNamespace,), {})(**has)


def refused_classes() -> dict[str, str]:
    """Stand-ins of classes that this version of megatron-core has not, or a CPU can't run. What is
    wrong on one rank alone is raised on all."""
    import megatron_ucp as ucp

    engine = make(Mcore(layers=2))
    chunks, optimizer = engine.stack.chunks, engine.optimizer
    found: dict[str, str] = {}
    attempt = attempting(found)

    def attach(model: Any = chunks, stepper: Any = optimizer) -> Any:
        return lambda: ucp.attach_megatron(model, stepper)

    refused_optimizers(optimizer, attempt, attach)
    refused_models(chunks[0], engine.stack.bare[0], attempt, attach)
    attempt("nothing", attach())
    close(engine)
    return found


def refused_models(chunk: Any, bare: Any, attempt: Any, attach: Any) -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    wrapped = {"module": bare, "ddp_config": chunk.ddp_config, "parameters": bare.parameters}
    attempt("fsdp2", attach([like("TorchFullyShardedDataParallel", **wrapped)]))
    tensors = {**wrapped, "parameters": lambda: [like("DTensor")]}
    attempt("dtensor", attach([like("FSDPModule", **tensors)]))
    several = like("MultiModuleProcessGroupCollection")
    with mock.patch.object(bare, "pg_collection", several):
        attempt("several modules", attach())
    attempt("mimo", attach([like("MimoModel")]))
    with mock.patch.object(parallel_state, "model_parallel_is_initialized", lambda: False):
        attempt("no groups", attach())
    with mock.patch.object(chunk, "tp_group", dist.group.WORLD):
        attempt("own groups", attach())


def refused_optimizers(optimizer: Any, attempt: Any, attach: Any) -> None:
    import torch.distributed as dist

    (inner,) = optimizer.chained_optimizers
    layers = like("LayerWiseDistributedOptimizer", chained_optimizers=[inner])
    attempt("layer-wise", attach(stepper=layers))
    both = SimpleNamespace(chained_optimizers=[inner, layers])
    attempt("layer-wise in a chain", attach(stepper=both))
    attempt("one rank", attach(stepper=optimizer if dist.get_rank() else layers))
    for name in ("TensorParallelMuon", "SOAP", "Lion"):
        with mock.patch.object(inner, "optimizer", like(name)):
            attempt(name, attach())


def test_classes_that_keep_numbers_elsewhere_are_refused_by_name(ranks: RankPool) -> None:
    says = {
        "fsdp2": "torch's FSDP2 is not supported",
        "dtensor": "torch's FSDP2 is not supported",
        "layer-wise": "LayerWiseDistributedOptimizer is not supported",
        "layer-wise in a chain": "LayerWiseDistributedOptimizer is not supported",
        "one rank": "LayerWiseDistributedOptimizer is not supported",
        "TensorParallelMuon": "optimizers that step whole matrices are not supported",
        "SOAP": "optimizers that step whole matrices are not supported",
        "Lion": "the states of this optimizer are not known",
        "several modules": "a model of several modules, each on a mesh of its own",
        "mimo": "a model of several modules, each on a mesh of its own",
        "no groups": "megatron-core's own process groups are not there",
        "own groups": "the model was built on process groups of the program's own",
    }
    for found in ranks.run(2, refused_classes):
        for name, text in says.items():
            assert found[name].startswith(f"UnsupportedError: {text}"), (name, found[name])
            assert "what to do" in found[name]
            assert ("register_optimizer" in found[name]) == (name == "Lion"), "a way that ends"
        assert found["nothing"] == "nothing"


def steps_apart() -> str:
    """Loading parameters that were stepped a different number of times."""
    from megatron_ucp.core.flat import alone
    from megatron_ucp.core.manifest import Manifest, ParamSpec
    from megatron_ucp.core.mesh import Mesh
    from megatron_ucp.engines.megatron.live import describe

    engine = make(Mcore(distributed=False, layers=2))
    buffers = tuple(alone(n, 2, (), scalars={"step": s}) for n, s in (("a", 3.0), ("b", 4.0)))
    specs = tuple(ParamSpec(name, (2,), "float32") for name in "ab")
    source: Any = SimpleNamespace(manifest=Manifest("", Mesh(), specs, buffers), folder="x")
    try:
        describe(engine.handle).check(source, True)
        said = "nothing"
    except UcpError as error:
        said = str(error)
    close(engine)
    return said


def test_steps_that_differ_are_refused(ranks: RankPool) -> None:
    (said,) = ranks.run(1, steps_apart)
    assert "a and b" in said and "3, 4" in said


def failing_save(folder: str) -> tuple[str, list[str], str]:
    """A save in which one rank's disk is full: what is raised, and what lies there after it."""
    import torch.distributed as dist

    import megatron_ucp as ucp

    engine = make(Mcore(layers=2))
    train(engine, 1)
    ucp.save(engine.handle, folder)
    train(engine, 1)
    found: dict[str, str] = {}

    def full(*_: Any) -> None:
        raise OSError(28, "no space left on device", "x.distcp")

    place = "megatron_ucp.formats.output_folder.OutFile.write"
    with mock.patch(place, full) if dist.get_rank() else mock.MagicMock():
        attempting(found)("save", lambda: ucp.save(engine.handle, folder))
    dist.barrier()  # rank 0 takes the folder aside away
    close(engine)
    pointer = Path(folder, "latest_checkpointed_iteration.txt").read_text()
    return found["save"], sorted(path.name for path in Path(folder).iterdir()), pointer


def test_a_save_that_fails_on_one_rank(ranks: RankPool, tmp_path: Path) -> None:
    job = failing_save
    for said, there, pointer in ranks.run(2, job, str(tmp_path)):
        assert said.startswith("SaveError: the checkpoint was not saved")
        assert there == ["iter_0000001", "latest_checkpointed_iteration.txt"]
        assert pointer == "1"


def families_of(setups: list[Mcore]) -> list[str]:
    """What attach_megatron takes each model for, without being told."""
    import megatron_ucp as ucp

    out = []
    for setup in setups:
        engine = make(setup)
        stack = ucp.attach_megatron(engine.stack.chunks, engine.optimizer)
        out.append(stack.model.family.name)
        close(engine)
    return out


def test_the_family_is_found(ranks: RankPool) -> None:
    setups = [Mcore("gpt", tied=True), Mcore(), Mcore(**MOE), Mcore("qwen3_moe", layers=2)]
    (found,) = ranks.run(1, families_of, setups)
    assert found == ["gpt", "llama", "mixtral", "qwen3_moe"]
