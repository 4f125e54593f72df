"""For Megatron-LM's own training program: what takes the place of its `load_checkpoint` and
`save_checkpoint`. See docs/megatron.md."""

from megatron_ucp.engines.megatron.program import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
