"""The classes that Megatron's pickles may name besides those of every `.pt` file. Each becomes an
inert `Stand`; none is imported.

Sources: what Megatron-core 0.16.1 with torch 2.13 writes, and its own list (`safe_globals.py`).
"""

_CHECKPOINT = "torch.distributed.checkpoint"
_STRATEGIES = "megatron.core.dist_checkpointing.strategies.torch"

# what the file `.metadata` names
OF_METADATA = frozenset(
    {
        *(
            f"{_CHECKPOINT}.metadata.{name}"
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "TensorProperties",
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        f"{_CHECKPOINT}.filesystem._StorageInfo",
        f"{_CHECKPOINT}.filesystem._StoragePrefix",
        *(
            f"{_CHECKPOINT}.planner.{name}"
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
        ),
        f"{_STRATEGIES}.MCoreMetadata",
        f"{_STRATEGIES}.MCoreSavePlan",
        "torch.serialization._get_layout",
    }
)

# what the arguments of a run and its optimizer may hold
OF_VALUES = frozenset(
    {
        "megatron.core.enums.ModelType",
        "megatron.core.transformer.enums.AttnBackend",
        "megatron.core.transformer.enums.CudaGraphScope",
        "megatron.core.transformer.enums.LayerType",
        "megatron.core.optimizer.optimizer_config.OptimizerConfig",
        "megatron.core.rerun_state_machine.RerunDiagnostic",
        "megatron.core.rerun_state_machine.RerunMode",
        "megatron.core.rerun_state_machine.RerunState",
        "signal.Signals",
        "_io.BytesIO",
    }
)
