"""A folder of a Hugging Face model as a native checkpoint for any mesh, before its first step."""

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_ucp.core.flat import alone
from megatron_ucp.core.layers import Layers
from megatron_ucp.core.manifest import RECORDED, Manifest, ParamGroup
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import UsageError
from megatron_ucp.families import find_family
from megatron_ucp.families.architecture import Architecture
from megatron_ucp.families.base import Model, Sizes
from megatron_ucp.formats.base import Extras
from megatron_ucp.formats.deepspeed.native_structure import RunSettings
from megatron_ucp.formats.deepspeed.native_writer import NativeWriter
from megatron_ucp.formats.deepspeed.target import Target, config_for
from megatron_ucp.formats.hugging_face.checkpoint import HuggingFaceCheckpoint
from megatron_ucp.reshard.convert import NARROW, ConversionJob, Converted, point_at, write_tag
from megatron_ucp.reshard.findings import Progress
from megatron_ucp.reshard.origin import CLIP_GRAD, VERSION
from megatron_ucp.reshard.output_folder import require_outside, require_plain
from megatron_ucp.reshard.target import Wanted, target_manifest
from megatron_ucp.reshard.twin import read_twin

_DTYPES = ("float32", "bfloat16", "float16")  # that DeepSpeed trains in


def import_hf(
    src: str | Path,
    dst: str | Path,
    target: Target | Mesh,
    *,
    family: str = "",
    padded_vocab: int | None = None,
    config: Mapping[str, Any] | None = None,
    allow: Collection[str] = (),
    progress: Progress | None = None,
) -> Converted:
    """Writes the Hugging Face folder `src` as the new tag folder `dst`: native files for the
    target's mesh, with fp32 masters and without optimizer states, which begin afresh.

    The model is the one of the family that the folder's config.json says. What the target does
    not say is as in the DeepSpeed config `config`, else as in the folder: the training dtype is
    that of the tensors. `padded_vocab` (default: none is padded) adds rows of zeros to the
    vocabulary; `allow={"narrow"}` rounds a folder in fp64. Not needed to train: an engine loads the
    folder itself. Raises a UcpError, SaveError where the output can't be written; nothing is left
    of it then.
    """
    started, folder = time.perf_counter(), Path(dst)
    target = _checked(folder, target, allow)
    twin, sizes, architecture = read_twin(Path(src), family)
    model = Model(find_family(twin.family), _padded(sizes, padded_vocab))
    model.check_cut(target.mesh.tp)
    with HuggingFaceCheckpoint(Path(src), twin.shares, twin.specs) as source:
        require_outside(folder, source.folder)
        target = _completed(target, source.manifest, config)
        paper = _on_paper(model, architecture, str(target.dtype))
        layers = _layers(model) if target.mesh.pp > 1 else None
        manifest = target_manifest(Wanted(paper, target, str(source.folder), layers))
        settings = _settings(target, config)
        outputs = list(NativeWriter(manifest, settings, layers).outputs())
        job = ConversionJob(source, manifest, frozenset(allow), progress)
        job.prove(outputs)
        write_tag(job, outputs, folder)
    notes = [*source.notes, *_notes(sizes, padded_vocab), *point_at(folder, "native")]
    return Converted(
        str(folder),
        f"Hugging Face {twin.family}",
        str(target.mesh),
        len(outputs),
        job.reader.read_bytes,
        job.done,
        time.perf_counter() - started,
        tuple(notes),
    )


def _checked(folder: Path, target: Target | Mesh, allow: Collection[str]) -> Target:
    """The target. Raises UsageError for arguments of an import that can't be."""
    require_plain(folder)
    if isinstance(allow, str) or set(allow) - NARROW:
        raise UsageError("allow names what may happen", expected="narrow", found=" ".join(allow))
    return Target(target) if isinstance(target, Mesh) else target


def _padded(sizes: Sizes, rows: int | None) -> Sizes:
    if rows is not None and rows < sizes.true_vocab:
        raise UsageError(
            "the padded vocabulary is smaller than the model's",
            expected=f"at least {sizes.true_vocab}",
            found=rows,
        )
    return sizes if rows is None else replace(sizes, vocab=rows)


def _notes(sizes: Sizes, rows: int | None) -> list[str]:
    added = (rows or 0) - sizes.true_vocab
    padding = f"{added} rows of zeros were added to the vocabulary, which shift the loss"
    return ["no optimizer states: they begin afresh", *([padding] if added > 0 else [])]


def _completed(target: Target, source: Manifest, config: Mapping[str, Any] | None) -> Target:
    """The target with everything that the config of its job says, or else the folder."""
    if config is None and target.dtype is None:
        first = source.params[0].dtype
        target = replace(target, dtype=first if first in _DTYPES else "float32")
    return target.completed(config or {})


def _on_paper(model: Model, architecture: Architecture, dtype: str) -> Manifest:
    """The model before its first step, each parameter whole and in one group."""
    specs = [declared.spec(name, dtype) for name, declared in model.table.items()]
    masters = ((MASTER, "float32"),)
    buffers = [alone(spec.name, math.prod(spec.shape), masters, 0) for spec in specs]
    says = {"sizes": asdict(model.sizes), "architecture": asdict(architecture)}
    run = {"global_steps": 0, "skipped_steps": 0, "ds_version": VERSION, RECORDED: says}
    return Manifest(
        "universal",
        Mesh(),
        tuple(specs),
        tuple(buffers),
        (ParamGroup({}),),
        family=model.family.name,
        run=run,
    )


def _layers(model: Model) -> Layers | None:
    found = model.family.layers
    return None if found is None else found([*model.table]).with_values([*model.table])


def _settings(target: Target, config: Mapping[str, Any] | None) -> RunSettings:
    """What the files say besides tensors: a run that has taken no step."""
    counters = {"global_steps": 0, "global_samples": 0, "skipped_steps": 0}
    dtype = str(target.dtype)
    said = config_for(target, config or {}, dtype)
    clip = said.get("gradient_clipping", CLIP_GRAD)
    extras = Extras(counters, None, {}, None, {})
    return RunSettings(extras, said, VERSION, dtype, {}, float(clip), False, lambda _: None)
