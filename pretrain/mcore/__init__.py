"""megatron-core's own models, built and trained by `pretrain_gpt.py`: process groups, pipelines,
experts, sequence parallelism.

Not called `megatron`: a program that is started by its path has its own folder first on the path
of modules, and would take this one for Megatron's.
"""
