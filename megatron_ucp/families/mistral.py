"""Mistral on megatron-core's local layer spec: a LLaMA. A sliding window is not supported."""

from megatron_ucp.families import llama
from megatron_ucp.families.twin import Config, check_config


def accepted(found: Config) -> Config:
    """Raises UnsupportedError for a window, which the class has where nothing says otherwise."""
    check_config({"sliding_window": 4096, **found}, {"sliding_window": (None,)})
    return found


FAMILY = llama.alike("Mistral", {"sliding_window": None}, accepted)
