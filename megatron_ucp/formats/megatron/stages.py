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
_EMBEDDING, _HEAD, _LAYER = "E", "L", "t"


@dataclass(frozen=True, slots=True)
class PipelinePart:
    """One chunk of a pipeline rank: its stage, its number there, its layers [first, last), and
    whether it has the embedding and the head."""

    stage: int
    chunk: int
    first: int
    last: int
    has_embedding: bool
    has_head: bool


def parts_of(arguments: Mapping[str, Any], mesh: Mesh, file: str) -> list[PipelinePart]:
    """The parts of the model, in their order. Raises UnsupportedError for a division that the
    arguments don't say, or that holds what is no layer of a decoder."""
    stages, chunks = mesh.pp, mesh.vpp
    count = stages * chunks
    written = arguments.get("pipeline_model_parallel_layout")
    if written is not None and stages > 1:
        texts = _unrolled(written, file)
        if len(texts) != count or set("".join(texts)) - {_EMBEDDING, _HEAD, _LAYER}:
            raise _unknown(file, f"{count} parts of E, t and L", written)
        sizes = [text.count(_LAYER) for text in texts]
        ends = [_EMBEDDING in text for text in texts], [_HEAD in text for text in texts]
    else:
        sizes = _sizes(arguments, stages, chunks, file)
        ends = [at == 0 for at in range(count)], [at == count - 1 for at in range(count)]
    if sum(sizes) != size(arguments, "num_layers", 0):
        raise _unknown(file, f"{arguments.get('num_layers')} layers", sizes)
    out: list[PipelinePart] = []
    first = 0
    for at, layers in enumerate(sizes):
        chunk, stage = divmod(at, stages)
        out.append(PipelinePart(stage, chunk, first, first + layers, ends[0][at], ends[1][at]))
        first += layers
    return out


def _sizes(arguments: Mapping[str, Any], stages: int, chunks: int, file: str) -> list[int]:
    """The layers of each part, where the division is by numbers."""
    layers = size(arguments, "num_layers", 0)
    first, last = (
        arguments.get(f"decoder_{which}_pipeline_num_layers") for which in ("first", "last")
    )
    if not isinstance(first, int | None) or not isinstance(last, int | None):
        raise _unknown(file, "numbers of layers", f"{first} and {last}")
    before = bool(arguments.get("account_for_embedding_in_pipeline_split"))
    behind = bool(arguments.get("account_for_loss_in_pipeline_split"))
    left = stages - (first is not None) - (last is not None)
    rest = layers + before + behind - (first or 0) - (last or 0)
    if rest % max(left, 1):
        raise _unknown(file, f"layers that {left} stages share evenly", rest)
    by_stage = [rest // max(left, 1)] * stages
    if first is not None:
        by_stage[0] = first
    if last is not None:
        by_stage[-1] = last
    if any(count % chunks for count in by_stage):
        raise _unknown(file, f"stages that {chunks} chunks divide", by_stage)
    sizes = [count // chunks for _ in range(chunks) for count in by_stage]
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
