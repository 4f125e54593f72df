"""Which stage of a pipeline that does not exist yet holds which parameters."""

from collections.abc import Mapping
from dataclasses import replace

from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.deepspeed.partition import divide
from megatron_ucp.reshard.wanted import Wanted


def no_layers(file: str) -> UnsupportedError:
    """The error for a pipeline that a model without a family would have."""
    return UnsupportedError(
        "the names of the parameters in a pipeline are not known",
        file=file,
        found="no family",
        expected="a pipeline checkpoint, or one of a family that has a pipeline",
        fix="train with a family, or convert without pp",
    )


def placed(wanted: Wanted, local: Mapping[str, int]) -> list[frozenset[str]]:
    """The names that each stage of the target holds."""
    source, target, layers, file = wanted.source, wanted.target, wanted.layers, wanted.file
    if target.mesh.pp == 1:
        return [frozenset(spec.name for spec in source.params)]
    if layers is None:
        raise no_layers(file)
    known = {name for names in layers.canonical for name in names}
    lost = [spec.name for spec in source.params if spec.name not in known]
    if lost:
        raise UnsupportedError(
            "a parameter or buffer has no place in the pipeline",
            file=file,
            parameter=lost[0],
            found=f"{len(lost)} of {len(source.params)}",
            fix="convert without pp",
        )
    # what DeepSpeed balances
    trained = {spec.name: local[spec.name] for spec in source.params if spec.kind == "trainable"}
    return [
        frozenset(name for at in stage for name in layers.canonical[at])
        for stage in divide(layers, target.stages or "layers", target.mesh.pp, trained)
    ]


def with_stages(wanted: Wanted) -> tuple[Wanted, list[str]]:
    """With how the layers are divided among the stages, where nobody said it: as in the source, if
    that has as many stages, else as many each of the most frequent kind, which a note says."""
    source, target, layers = wanted.source, wanted.target, wanted.layers
    if target.mesh.pp == 1 or target.stages is not None or layers is None:
        return wanted, []
    if source.mesh.pp == target.mesh.pp and source.mesh.vpp == 1:
        if (counts := _stages_of(source, layers)) is not None:
            return replace(wanted, target=replace(target, stages=counts)), []
    note = (
        "nobody said how the layers are divided among the stages: as many each of the most "
        "frequent kind, which is `--stages layers`; the job needs the same partition method"
    )
    return replace(wanted, target=replace(target, stages="layers")), [note]


def _stages_of(source: Manifest, layers: Layers) -> tuple[int, ...] | None:
    """How many layers each stage of the source has; of a parameter that several positions hold the
    last is on the last stage."""
    held = {
        name: [source.buffers[b].stage for b, _ in holders]
        for name, holders in source.holders.items()
    }
    at, seen = [0], set[str]()
    for names in layers.canonical:
        own = [held[name][-1] if name in seen else held[name][0] for name in names if name in held]
        seen.update(names)
        at.append(max([at[-1], *own]))
    counts = tuple(at[1:].count(stage) for stage in range(source.mesh.pp))
    return counts if all(counts) else None
