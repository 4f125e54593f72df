"""Resume a training run on any mesh, straight from its own checkpoint files, bit for bit."""

from typing import Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UcpError
from megatron_ucp.formats.deepspeed.target import Target

__all__ = [
    "Manifest",
    "Mesh",
    "ResumableLoader",
    "Target",
    "UcpError",
    "attach",
    "attach_megatron",
    "convert",
    "describe",
    "diff",
    "export_hf",
    "import_hf",
    "initialize",
    "install",
    "load",
    "newest_whole",
    "register_family",
    "register_optimizer",
    "save",
    "verify",
]
__version__ = "0.1.0"

_HOMES = {
    "attach": "engines.attach",
    "attach_megatron": "engines.megatron.engine.attach",
    "initialize": "engines.attach",
    "install": "engines.attach",
    "ResumableLoader": "engines.loader",
    "newest_whole": "reshard.newest",
    "load": "engines.load",
    "register_family": "families",
    "save": "engines.megatron.engine.save",
    "register_optimizer": "formats.optimizers",
    "convert": "reshard.convert",
    "describe": "reshard.describe",
    "diff": "reshard.diff",
    "export_hf": "reshard.export",
    "import_hf": "reshard.import_hf",
    "verify": "reshard.verify",
}


def __getattr__(name: str) -> Any:
    # Looked up on first use: the command-line tool must start without torch, and run without
    # deepspeed.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
