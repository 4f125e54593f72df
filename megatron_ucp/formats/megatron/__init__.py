"""Checkpoints of Megatron-core and Megatron-LM."""
