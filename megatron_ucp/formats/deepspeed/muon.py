"""DeepSpeed's Muon: which groups it steps as whole matrices, and where their momentum lies.

Source: `runtime/zero/muon/` of DeepSpeed 0.19.8, and `_muon_momentum_buffer` and
`_apply_muon_updates_cpu_offload` in `runtime/zero/stage_1_and_2.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import is_stacked
from megatron_ucp.core.flat import FlatBuffer
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.manifest import Manifest, ParamGroup
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import (
    DamagedFileError,
    StateMismatchError,
    UnsupportedError,
    UsageError,
)

MUON = "deepspeed.MuonWithAuxAdam"
MOMENTUM = "momentum_buffer"
_CLIPPED_FIRST = (Keeper.ZERO_0, Keeper.BF16)  # engines that clip what Muon gets, not what it gives
_STEPPED_BY = "use_muon"  # the key of a group; the other groups are stepped by Adam


def steps_matrices(group: Mapping[str, Any]) -> bool:
    """Whether Muon steps a group with these hyper-parameters, and not the Adam beside it."""
    return bool(group.get(_STEPPED_BY))


def uncut_states(group: Mapping[str, Any], keeper: Keeper, offloaded: bool) -> tuple[str, ...]:
    """The states of a group of which a partition keeps whole matrices (see `FlatBuffer.uncut`):
    the momentum at ZeRO-1 and 2, unless the optimizer is offloaded to the CPU."""
    kept = keeper == Keeper.ZERO_1_OR_2 and steps_matrices(group) and not offloaded
    return (MOMENTUM,) if kept else ()


def is_offloaded(config: Any) -> bool:
    """Whether a DeepSpeed config puts the optimizer into the CPU's memory."""
    settings: Any = config.get("zero_optimization") if isinstance(config, dict) else None
    if not isinstance(settings, dict):
        return False
    section: Any = settings.get("offload_optimizer")
    device = section.get("device") if isinstance(section, dict) else None
    return device == "cpu" or settings.get("cpu_offload") is True


def in_its_order(
    names: Sequence[str],
    shapes: Mapping[str, Ints],
    source: Mapping[str, Ints],
    file: str,
    at_init: bool = False,
) -> tuple[str, ...]:
    """The parameters of a group that Muon steps in the order that its class gives them: by their
    rank-local `shapes`, greatest first, compared dim by dim, and those of one shape as the client
    listed them. `names` are in the order of a source with its own shapes, which is the same kind of
    order, or the client's: so it is where ZeRO-3 made the model (`zero.Init`: then no parameter has
    a shape yet), and so a target `at_init` keeps it.

    Raises UsageError where parameters have one shape here and had others in the source: nobody
    knows then which one the client listed first.
    """
    is_sorted = list(names) == _sorted(names, source)
    if not is_sorted:
        return tuple(names) if at_init else tuple(_sorted(names, shapes))
    out = _sorted(names, shapes)
    for one, other in pairwise(out):
        if shapes[one] == shapes[other] and source[one] != source[other]:
            raise UsageError(
                "the order of a group that Muon steps is not known on this mesh",
                file=file,
                parameter=f"{one} and {other}",
                expected="shapes of a rank that differ, or were the same in the source too",
                found=f"{shapes[one]}, from {source[one]} and {source[other]}",
                fix="load it into an engine of the job and save there, or list the groups as its "
                "optimizer has them (--groups; Python: Target(groups=))",
            )
    return tuple(out)


def as_listed(
    shapes: Sequence[dict[str, Ints]],
    groups: Sequence[Mapping[str, Any]],
    told: Mapping[str, Ints],
    file: str,
) -> list[dict[str, Ints]]:
    """Each group's parameters as the optimizer that wrote a file listed them, which sorted those
    that Muon steps by the rank-local `shapes` there. They come in the order of an engine that
    sorted by its own, `told`. Raises StateMismatchError where parameters had one shape there and
    have others in the engine: nobody knows then which one the client listed first."""
    out = list(shapes)
    for number, named in enumerate(shapes):
        if number >= len(groups) or not steps_matrices(groups[number]):
            continue
        out[number] = {name: named[name] for name in _sorted(list(named), named)}
        for one, other in pairwise(out[number]):
            if named[one] == named[other] and told.get(one) != told.get(other):
                raise StateMismatchError(
                    "the file names no parameters of a group that Muon steps, and their order is "
                    "not known on this mesh",
                    file=file,
                    parameter=f"{one} and {other}",
                    expected="shapes of a rank that differ, or are the same in the engine too",
                    found=f"{named[one]}, in the engine {told[one]} and {told[other]}",
                    fix="load it on the tensor-parallel size of the run that saved it, or save "
                    "with a manifest (megatron_ucp.attach)",
                )
    return out


def _sorted(names: Sequence[str], shapes: Mapping[str, Ints]) -> list[str]:
    return sorted(names, key=lambda name: shapes[name], reverse=True)


def check_momentum(groups: Sequence[ParamGroup], buffers: Iterable[FlatBuffer], file: str) -> None:
    """Raises DamagedFileError where a group that Muon steps has other states than a momentum,
    UnsupportedError where it steps stacked experts, whose matrices one tensor holds."""
    for buffer in buffers:
        group = groups[buffer.group] if buffer.group is not None else None
        if group is None or not steps_matrices(group.settings):
            continue
        first = buffer.members[0].param
        found = [state for state, _ in buffer.states if state not in (MASTER, MOMENTUM)]
        if found:
            raise DamagedFileError(
                "a group that Muon steps holds states of another optimizer",
                file=file,
                parameter=first,
                expected=MOMENTUM,
                found=" ".join(found),
                fix="load another tag, or the weights alone (Python: load_optimizer_states=False)",
            )
        if any(is_stacked(member.param) for member in buffer.members):
            raise UnsupportedError(
                "Muon over AutoEP's stacked experts is not supported",
                file=file,
                parameter=first,
                fix="resume on the mesh that wrote it with DeepSpeed's own load",
            )


def other_steps(source: Manifest, target: Manifest) -> list[str]:
    """Notes where Muon goes on otherwise than it would have, from states that are bit-equal."""
    if not (is_used(source) and is_used(target)):
        return []
    out: list[str] = []
    if source.mesh.tp != target.mesh.tp:
        out.append(
            "Muon: its next steps are not those of the checkpoint's mesh, as it orthogonalizes "
            f"what a tensor-parallel rank has of a matrix: {source.mesh.tp} ranks then, "
            f"{target.mesh.tp} now"
        )
    if (source.keeper in _CLIPPED_FIRST) != (target.keeper in _CLIPPED_FIRST):
        out.append(
            "Muon: its next steps are not those of the checkpoint's ZeRO stage where gradients "
            "are clipped: DeepSpeed clips before orthogonalizing without ZeRO and in "
            "BF16_Optimizer, behind it at ZeRO 1 to 3"
        )
    return out


def is_used(manifest: Manifest) -> bool:
    """Whether Muon steps a group of a manifest."""
    return any(steps_matrices(group.settings) for group in manifest.groups)
