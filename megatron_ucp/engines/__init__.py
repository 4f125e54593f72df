"""The border to live engines: the only place that imports deepspeed or megatron, and only inside
functions."""
