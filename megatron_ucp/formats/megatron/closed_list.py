"""The classes that Megatron's pickles may name besides those of every `.pt` file. Each becomes an
inert `Stand`; none is imported.

Sources: what Megatron-core 0.16.1 to 0.19.2 with torch 2.13 writes, and its own list
(`safe_globals.py`). Its enums are not listed: each version adds some, and the arguments of a run
hold them by default (since 0.18 an `InferenceCudaGraphScope`).
"""

from megatron_ucp.formats.pt.unpickler import AllowedClasses

_CHECKPOINT = "torch.distributed.checkpoint"
_STRATEGIES = "megatron.core.dist_checkpointing.strategies.torch"

# what the file `.metadata` names
OF_METADATA = AllowedClasses(
    frozenset(
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
)

# what the arguments of a run and its optimizer may hold
OF_VALUES = AllowedClasses(
    frozenset(
        {
            "megatron.core.optimizer.optimizer_config.OptimizerConfig",
            "signal.Signals",
            "_io.BytesIO",
        }
    ),
    enums_below="megatron",
)
