"""megatron-core's own optimizer stack as an engine that loads and saves checkpoints."""
