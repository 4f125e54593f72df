"""A folder of a Hugging Face model as a native checkpoint for any mesh, before its first step."""

import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_ucp import say
from megatron_ucp.core.flat import alone
from megatron_ucp.core.manifest import RECORDED, Manifest, ParamGroup
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.errors import LayoutError, UsageError
from megatron_ucp.families import find_family
from megatron_ucp.families.family import Model, Sizes
from megatron_ucp.families.settings import Architecture
from megatron_ucp.formats.checkpoint import Extras
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.hugging_face.checkpoint import HuggingFaceCheckpoint
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.store import Location, folder_at, location
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.convert import NATIVE, Converted, Writing, refuse_unused
from megatron_ucp.reshard.findings import Progress
from megatron_ucp.reshard.folder import check_source, require_plain
from megatron_ucp.reshard.hugging_face.names import read_twin
from megatron_ucp.reshard.options import (
    IMPORT,
    check_switch,
    check_words,
    needed_target,
    parsed_config,
    plain_path,
)
from megatron_ucp.reshard.target import VERSION, SourceSettings
from megatron_ucp.reshard.work_sharing import as_rank_error, ranks_of, require_same
from megatron_ucp.reshard.writers import native

_DTYPES = ("float32", "bfloat16", "float16")  # that DeepSpeed trains in


@say.shown("import-hf", ends=True)
def import_hf(
    src: str | Path,
    dst: str | Path,
    *,
    mesh: Mesh | str | None = None,
    target: Target | Mesh | str | None = None,
    latest: bool = False,
    family: str = "",
    padded_vocab: int | None = None,
    ds_config: Mapping[str, Any] | str | Path | None = None,
    allow: Collection[str] = (),
    ranks: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Writes a folder of a Hugging Face model as native files for a mesh, with fp32 master weights
    and without optimizer states, which begin from scratch. Not needed to train: an engine loads the
    folder itself.

    Args:
        src: The folder, with config.json and the safetensors files.
        dst: The new tag folder. It must not exist, and appears whole or not at all.
        mesh: The mesh that the files are for, such as "tp=2,dp=4,zero=1"; what is left out is 1,
            the ZeRO stage 0.
        target: In place of `mesh`: a `Target`, which says more than a mesh.
        latest: Whether `latest` in the folder above names the new one.
        family: The model family, where config.json does not decide it.
        padded_vocab: Rows of the vocabulary with padding, which is zeros. Default: no padding.
        ds_config: The DeepSpeed config of the job, or its file; the training dtype is else that of
            the tensors.
        allow: What may happen besides exact copies: "narrow" rounds a folder in fp64.
        ranks: Whether all ranks write the folder together, as of `convert`.
        progress: `progress(done, total)` counts bytes; with `ranks` those of this rank.

    Returns:
        What was done, as of `convert`.

    Raises:
        UsageError: For arguments that can't be.
        SaveError: Where the output can't be written; nothing is left of it.
        UcpError: Where the folder's model is none that a family describes.

    Example:
        >>> import megatron_ucp as ucp
        >>> done = ucp.import_hf("hf", "start/global_step0", mesh="tp=2,dp=2,zero=1")
    """
    started, together = time.perf_counter(), ranks_of(ranks)
    with as_rank_error("the import"), ExitStack() as opened:
        with agree.together(together):
            folder = location(plain_path(dst))
            asked, config = _checked(folder, mesh, target, latest, allow), parsed_config(ds_config)
            twin, sizes, architecture = read_twin(location(plain_path(src)), family)
            model = _model(twin.family, _padded(sizes, padded_vocab), asked.mesh.tp, str(src))
            source = HuggingFaceCheckpoint(folder_at(src), twin.told)
            opened.enter_context(source)
            check_source(source, folder, allow)
            asked = _completed(asked, source.manifest, config)
            origin = _origin(source, model, architecture, str(asked.dtype))
            output = native(origin, origin.wanted(asked, config), config, folder)
        require_same(output, together, dst=folder, mesh=str(asked.mesh), latest=latest)
        notes = [*origin.notes, *_notes(sizes, padded_vocab), *twin.notes]
        writing = Writing(folder, NATIVE, latest, allow, progress, started, ranks)
        of = f"Hugging Face {twin.family}"
        return writing.write(source, output, of, str(asked.mesh), notes)


def _model(family: str, sizes: Sizes, tp: int, file: str) -> Model:
    """The model of a folder. Raises LayoutError where tensor parallelism does not divide it."""
    model = Model(find_family(family), sizes)
    _check_vocabulary(sizes.vocab, tp, file)
    model.check_cut(tp)
    return model


def _origin(
    source: HuggingFaceCheckpoint, model: Model, architecture: Architecture, dtype: str
) -> SourceSettings:
    """The folder as a conversion sees it: a run of that training dtype that has taken no step."""
    origin = SourceSettings(source, ruled=True)
    counters = {"global_steps": 0, "global_samples": 0, "skipped_steps": 0}
    origin.extras = Extras(counters, None, LossScale(), None, {**model.family.client_state})
    origin.manifest, origin.dtype = _before_training(model, architecture, dtype), dtype
    return origin


def _checked(
    folder: Location,
    mesh: Mesh | str | None,
    target: Target | Mesh | str | None,
    latest: bool,
    allow: Collection[str],
) -> Target:
    """The target. Raises UsageError for arguments of an import that can't be."""
    check_words(allow, {IMPORT})
    check_switch("latest", latest)
    given = needed_target(mesh, target, "native files are")
    require_plain(folder)
    refuse_unused(given)
    return given.with_zero_of(Mesh())


def _check_vocabulary(rows: int, tp: int, file: str) -> None:
    """Raises LayoutError where tensor parallelism does not divide the vocabulary."""
    if rows % tp:
        raise LayoutError(
            "the tensor-parallel size does not divide the rows of the vocabulary",
            file=file,
            expected=f"rows that {tp} divides",
            found=rows,
            fix=f"give --padded-vocab-size {-(-rows // tp) * tp} (Python: "
            "padded_vocab=): rows of zeros are added, and the "
            "model is built with as many rows",
            id="vocabulary",
        )


def _padded(sizes: Sizes, rows: int | None) -> Sizes:
    if rows is not None and (type(rows) is not int or rows < sizes.true_vocab):
        raise UsageError(
            "the padded vocabulary has no fewer rows than the model's",
            expected=f"at least {sizes.true_vocab}",
            found=rows,
            fix="give --padded-vocab-size (Python: padded_vocab=) that many rows, or leave it out",
        )
    return sizes if rows is None else replace(sizes, vocab=rows)


def _notes(sizes: Sizes, rows: int | None) -> list[str]:
    added = (rows or 0) - sizes.true_vocab
    padding = f"{added} rows of zeros were added to the vocabulary, which shift the loss"
    return ["no optimizer states: they begin from scratch", *([padding] if added > 0 else [])]


def _completed(target: Target, source: Manifest, config: Mapping[str, Any] | None) -> Target:
    """The target with everything that the config of its job says, or else the folder."""
    if config is None and target.dtype is None:
        first = source.params[0].dtype
        target = replace(target, dtype=first if first in _DTYPES else "float32")
    return target.completed(config or {})


def _before_training(model: Model, architecture: Architecture, dtype: str) -> Manifest:
    """The model before its first step, each parameter whole and in one group."""
    specs = [declared.spec(name, dtype) for name, declared in model.table.items()]
    buffers = [
        alone(spec.name, spec.elems, ((VALUE, spec.dtype),))
        if spec.kind == "buffer"
        else alone(spec.name, spec.elems, ((MASTER, "float32"),), 0)
        for spec in specs
    ]
    says = {"sizes": asdict(model.sizes), "architecture": asdict(architecture)}
    run = {"global_steps": 0, "skipped_steps": 0, "ds_version": VERSION, RECORDED: says}
    return Manifest(
        Keeper.UNIVERSAL,
        Mesh(),
        tuple(specs),
        tuple(buffers),
        (ParamGroup({}),),
        family=model.family.name,
        run=run,
    )
