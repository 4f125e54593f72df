"""Runtime patches for the installed DeepSpeed and Megatron-Core: one file per defect, applied by name."""
