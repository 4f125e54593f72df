"""Without Transformer Engine: megatron-core's router finds that there is no matrix product of
it."""

from typing import Any

from . import Patch


def change() -> None:
    from megatron.core.transformer.moe import moe_utils

    module: Any = moe_utils
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


PATCH = Patch(
    package="megatron-core",
    versions=("0.16.1",),
    mended=("0.17.1", "0.18.2", "0.19.1", "0.19.2"),
    upstream="megatron.core.transformer.moe.moe_utils.RouterGatingLinearFunction",
    why="it asks whether te_general_gemm is None, but the name is only there where Transformer "
    "Engine could be imported: every forward pass of a router raises NameError",
    until="megatron-core 0.16.1 is no longer supported: later versions define the name",
    change=change,
)
