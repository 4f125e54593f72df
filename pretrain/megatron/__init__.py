"""megatron-core's own models, built and trained by `pretrain_gpt.py`: process groups, pipelines,
experts, sequence parallelism."""
