"""megatron-core's models, whole and in pipeline stages."""
