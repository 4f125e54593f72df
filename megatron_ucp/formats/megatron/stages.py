"""Which layers each chunk of a pipeline has. Rank p of P stages has V chunks (virtual stages);
chunk v of rank p is part v x P + p of the model, and the parts follow each other.

Source: `get_num_layers_to_build` and `get_transformer_layer_offset` of megatron-core 0.16.1.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ucp.core.mesh import Mesh
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.megatron.arguments import size

_MOST_CHARS = 10_000  # of a layout that is written out
_EMBEDDING, _HEAD, _LAYER, _PREDICTION = "E", "L", "t", "m"
_STAGE_BORDER, _PREDICTIONS_BEHIND = "|", "/"  # in the layer pattern of a hybrid model


@dataclass(frozen=True, slots=True)
class PipelinePart:
    """One chunk of a pipeline rank: its stage, its number there, its layers [first, last), and
    whether it has the embedding, the head, and the layers for multi-token prediction, which have a
    copy of the embedding of their own."""

    stage: int
    chunk: int
    first: int
    last: int
    has_embedding: bool
    has_head: bool
    has_predictions: bool = False


def parts_of(arguments: Mapping[str, Any], mesh: Mesh, file: str) -> list[PipelinePart]:
    """The parts of the model, in their order. Raises UnsupportedError for a division that the
    arguments don't say, or that holds what is no layer of a decoder."""
    written = arguments.get("pipeline_model_parallel_layout")
    if written is not None and mesh.pp > 1:
        contents = _written(written, mesh.pp * mesh.vpp, file)
    else:
        sizes = _by_pattern(arguments, mesh.pp * mesh.vpp, file)
        sizes = sizes or _sizes(arguments, mesh.pp, mesh.vpp, file)
        predicts, end = bool(size(arguments, "mtp_num_layers", 0)), len(sizes) - 1
        contents = [(n, at == 0, at == end, predicts and at == end) for at, n in enumerate(sizes)]
    counts = [layers for layers, *_ in contents]
    if sum(counts) != size(arguments, "num_layers", 0):
        raise _unknown(file, f"{arguments.get('num_layers')} layers", counts)
    out: list[PipelinePart] = []
    first = 0
    for at, (layers, *what) in enumerate(contents):
        chunk, stage = divmod(at, mesh.pp)
        last = first + layers
        out.append(PipelinePart(stage, chunk, first, last, *what))
        first = last
    return out


def _written(layout: object, count: int, file: str) -> list[tuple[int, bool, bool, bool]]:
    """The layers of each part, and whether it has the embedding, the head and the predictions,
    where a layout says them."""
    texts = _unrolled(layout, file)
    known = {_EMBEDDING, _HEAD, _LAYER, _PREDICTION}
    if len(texts) != count or set("".join(texts)) - known:
        raise _unknown(file, f"{count} parts of E, t, m and L", layout)
    return [
        (text.count(_LAYER), _EMBEDDING in text, _HEAD in text, _PREDICTION in text)
        for text in texts
    ]


def _by_pattern(arguments: Mapping[str, Any], count: int, file: str) -> list[int]:
    """The layers of each part, where the pattern of a hybrid model has borders of stages
    ("M*-|M*-/M"); empty for any other model. Before 0.17 the pattern had another name."""
    pattern = arguments.get("hybrid_layer_pattern") or arguments.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        return []
    parts = pattern.split(_PREDICTIONS_BEHIND)[0].split(_STAGE_BORDER)
    if len(parts) == 1:
        return []
    if len(parts) != count:
        raise _unknown(file, f"{count} parts", pattern)
    return [len(part) for part in parts]


def _sizes(arguments: Mapping[str, Any], stages: int, chunks: int, file: str) -> list[int]:
    """The layers of each part, where the division is by numbers."""
    layers = size(arguments, "num_layers", 0)
    first = arguments.get("decoder_first_pipeline_num_layers")
    last = arguments.get("decoder_last_pipeline_num_layers")
    if not isinstance(first, int | None) or not isinstance(last, int | None):
        raise _unknown(file, "numbers of layers", f"{first} and {last}")
    before = bool(arguments.get("account_for_embedding_in_pipeline_split"))
    behind = bool(arguments.get("account_for_loss_in_pipeline_split"))
    said = [count for count in (first, last) if count is not None]
    left = stages - len(said)
    rest = layers + before + behind - sum(said)
    each, over = divmod(rest, max(left, 1))
    if over:
        raise _unknown(file, f"layers that {left} stages share evenly", rest)
    by_stage = [each] * stages
    if first is not None:
        by_stage[0] = first
    if last is not None:
        by_stage[-1] = last
    if any(count % chunks for count in by_stage):
        raise _unknown(file, f"stages that {chunks} chunks divide", by_stage)
    sizes = [count // chunks for count in by_stage] * chunks
    sizes[0] -= before
    sizes[-1] -= behind
    return sizes


def _unrolled(written: object, file: str) -> list[str]:
    """The parts of a layout such as "Et|(tt|)*2tL", each with a letter for what is in it."""
    if not isinstance(written, str) or len(written) > _MOST_CHARS:
        raise _unknown(file, "a text such as Et|tt|tL", written)
    text = written.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,3})", r"(.)\*(\d{1,3})"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
        if len(text) > _MOST_CHARS * 10:
            raise _unknown(file, "a layout of fewer layers", written)
    return text.split("|")


def _unknown(file: str, expected: object, found: object) -> UnsupportedError:
    return UnsupportedError(
        "how the layers are divided among the stages of the pipeline can't be read",
        file=file,
        expected=expected,
        found=str(found)[:100],
        fix="save it again with --dist-ckpt-optim-fully-reshardable",
    )
