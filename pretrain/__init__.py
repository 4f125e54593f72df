"""Trains megatron-core's GPTModel under DeepSpeed, with Megatron's flags; `pretrain_gpt.py` is the
program."""
