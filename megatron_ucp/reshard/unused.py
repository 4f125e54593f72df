"""What a target says that its format, or its mesh, has no place for."""

from megatron_ucp.errors import UsageError
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.reshard.pointing import NATIVE, TORCH_DIST, UNIVERSAL

# what a format has no place for, of a target
_UNUSED = {
    NATIVE: (),
    UNIVERSAL: ("stages",),
    TORCH_DIST: (
        "optimizer",
        "groups",
        "stages",
        "sub_group_size",
        "alignment",
        "round_robin",
        "grad_accum_fp32",
        "offloaded",
    ),
}


def refuse_unused(target: Target, to: str = NATIVE) -> None:
    """Raises UsageError for what a target says that its format, or its mesh, has no place for."""
    found = [name for name in _UNUSED[to] if getattr(target, name) is not None]
    where = f"a folder in the format {to}"
    if to == NATIVE and target.stages is not None and target.mesh.pp == 1:
        found, where = ["stages"], "a mesh without pipeline stages (pp=1)"
    if found:
        raise UsageError(
            f"{where} has no place for {', '.join(found)}",
            expected="only what is used",
            found=", ".join(f"{name}={getattr(target, name)}"[:80] for name in found),
            fix=f"leave out {', '.join('--' + name.replace('_', '-') for name in found)} (Python: "
            f"{', '.join(name + '=' for name in found)})",
        )
