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
    written = arguments.get("pipeline_model_parallel_layout")
    if written is not None and mesh.pp > 1:
        contents = _written(written, mesh.pp * mesh.vpp, file)
    else:
        sizes = _sizes(arguments, mesh.pp, mesh.vpp, file)
        contents = [(n, at == 0, at == len(sizes) - 1) for at, n in enumerate(sizes)]
    counts = [layers for layers, _, _ in contents]
    if sum(counts) != size(arguments, "num_layers", 0):
        raise _unknown(file, f"{arguments.get('num_layers')} layers", counts)
    out: list[PipelinePart] = []
    first = 0
    for at, (layers, has_embedding, has_head) in enumerate(contents):
        chunk, stage = divmod(at, mesh.pp)
        last = first + layers
        out.append(PipelinePart(stage, chunk, first, last, has_embedding, has_head))
        first = last
    return out


def _written(layout: object, count: int, file: str) -> list[tuple[int, bool, bool]]:
    """The layers of each part, and whether it has the embedding and the head, where a layout says
    them."""
    texts = _unrolled(layout, file)
    if len(texts) != count or set("".join(texts)) - {_EMBEDDING, _HEAD, _LAYER}:
        raise _unknown(file, f"{count} parts of E, t and L", layout)
    return [(text.count(_LAYER), _EMBEDDING in text, _HEAD in text) for text in texts]


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
