"""Resume a training run on any mesh, straight from its own checkpoint files, bit for bit.

An engine:      attach, initialize, install, load, save, wait, report, fingerprint, hold,
                resize, refit, export_hf
Megatron-core:  attach_megatron; `megatron_ucp.megatron_lm` for Megatron-LM's own program
A checkpoint:   inspect, describe, ls, plan, verify, diff, newest_whole
Another form:   convert, export_hf, import_hf, fp32_state_dict, fp32_tensors
Your own:       register_family, register_optimizer, ResumableLoader

Every error is a `UcpError`. What starts with an underscore, and modules that are not named here,
may change at any time; see docs/reference/python.md.
"""

from typing import TYPE_CHECKING, Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import (
    DamagedFileError,
    EngineUnusableError,
    ForeignFileError,
    InexactError,
    LayoutError,
    ModelMismatchError,
    NotFoundError,
    PlanError,
    RankError,
    RuleError,
    SaveError,
    StateMismatchError,
    StoreError,
    UcpError,
    UnsafePickleError,
    UnsupportedError,
    UsageError,
)

if TYPE_CHECKING:  # what editors and type checkers see; at run time each is imported on first use
    from megatron_ucp.engines.background import wait
    from megatron_ucp.engines.deepspeed.engine import attach, initialize
    from megatron_ucp.engines.deepspeed.install import install
    from megatron_ucp.engines.handle import fingerprint, report
    from megatron_ucp.engines.hold import hold, resize
    from megatron_ucp.engines.load import load
    from megatron_ucp.engines.megatron.engine import attach_megatron
    from megatron_ucp.engines.megatron.save import save
    from megatron_ucp.engines.refit import refit
    from megatron_ucp.engines.run_state import ResumableLoader
    from megatron_ucp.families import register_family
    from megatron_ucp.formats.deepspeed.target import Target
    from megatron_ucp.formats.optimizers import register_optimizer
    from megatron_ucp.reshard.check import diff, verify
    from megatron_ucp.reshard.convert import convert
    from megatron_ucp.reshard.fp32 import fp32_state_dict, fp32_tensors
    from megatron_ucp.reshard.hugging_face.export import export_hf
    from megatron_ucp.reshard.hugging_face.import_hf import import_hf
    from megatron_ucp.reshard.look import describe, inspect, ls, newest_whole
    from megatron_ucp.reshard.plan import plan

__all__ = [
    "DamagedFileError",
    "EngineUnusableError",
    "ForeignFileError",
    "InexactError",
    "LayoutError",
    "Manifest",
    "Mesh",
    "ModelMismatchError",
    "NotFoundError",
    "PlanError",
    "RankError",
    "ResumableLoader",
    "RuleError",
    "SaveError",
    "StateMismatchError",
    "StoreError",
    "Target",
    "UcpError",
    "UnsafePickleError",
    "UnsupportedError",
    "UsageError",
    "attach",
    "attach_megatron",
    "convert",
    "describe",
    "diff",
    "export_hf",
    "fingerprint",
    "fp32_state_dict",
    "fp32_tensors",
    "hold",
    "import_hf",
    "initialize",
    "inspect",
    "install",
    "load",
    "ls",
    "newest_whole",
    "plan",
    "refit",
    "register_family",
    "register_optimizer",
    "report",
    "resize",
    "save",
    "verify",
    "wait",
]
__version__ = "0.1.0"

_HOMES = {
    "attach": "engines.deepspeed.engine",
    "attach_megatron": "engines.megatron.engine",
    "convert": "reshard.convert",
    "describe": "reshard.look",
    "diff": "reshard.check",
    "export_hf": "reshard.hugging_face.export",
    "fingerprint": "engines.handle",
    "fp32_state_dict": "reshard.fp32",
    "fp32_tensors": "reshard.fp32",
    "hold": "engines.hold",
    "import_hf": "reshard.hugging_face.import_hf",
    "initialize": "engines.deepspeed.engine",
    "inspect": "reshard.look",
    "install": "engines.deepspeed.install",
    "load": "engines.load",
    "ls": "reshard.look",
    "newest_whole": "reshard.look",
    "plan": "reshard.plan",
    "refit": "engines.refit",
    "register_family": "families",
    "register_optimizer": "formats.optimizers",
    "report": "engines.handle",
    "resize": "engines.hold",
    "ResumableLoader": "engines.run_state",
    "save": "engines.megatron.save",
    "Target": "formats.deepspeed.target",
    "verify": "reshard.check",
    "wait": "engines.background",
}


def __getattr__(name: str) -> Any:
    # Looked up on first use: the command-line tool must start without torch, and run without
    # deepspeed.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
