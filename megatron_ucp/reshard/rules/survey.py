"""What a checkpoint says by itself about how its parameters are cut: the manifest, stock's
patterns, the ranks' bytes."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.layers import TIED
from megatron_ucp.core.layout import Partial, Replicate
from megatron_ucp.core.manifest import FILE_NAME, Manifest, ParamSpec
from megatron_ucp.core.mesh import DENSE_CUT
from megatron_ucp.core.rules import Rename, Rule, RuleSet
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.deepspeed.layout_sources import says_layouts
from megatron_ucp.formats.deepspeed.tp_patterns import order_of
from megatron_ucp.formats.pt.values import ITEMSIZE
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.formats.tags import find_tag
from megatron_ucp.reshard.check import HeldAt, read_copy
from megatron_ucp.reshard.execute import Progress

_BLOCK_BYTES = 4 * 2**20


class _NothingKnown(RuleSet):
    """Under Partial every rank holds a copy of its own, which is all that is known before somebody
    says more."""

    def declare(self, name: str, local: Ints, sizes: Mapping[str, int]) -> ParamSpec:
        return ParamSpec(name, local, "", layout=Partial(*DENSE_CUT))


_ANY = Rule("(?s:.*)", Replicate())  # says that every name has a rule
_NOTHING_KNOWN = _NothingKnown("nothing", (_ANY,), (Rename("(?P<name>(?s:.*))", "{name}"),))
ONE, EQUAL, CONSTANT, DIFFERENT = "one", "equal", "constant", "different"


@dataclass(frozen=True)
class Held:
    """One parameter: the shape that a rank holds; whether the tensor-parallel ranks' copies are the
    same bytes (CONSTANT: the same, and one value only; ONE: there is one rank); the spec, where a
    manifest says it. `pipe` is its name in stock DeepSpeed's patterns, which is that of the
    pipeline where there is one."""

    name: str
    pipe: str
    local: Ints
    kind: str
    copies: str
    recorded: ParamSpec | None


@dataclass(frozen=True)
class Survey:
    """An opened checkpoint. `stock_names` are names in a pipeline that nothing maps to canonical
    ones; `info` is stock DeepSpeed's `universal_checkpoint_info`, or empty, and `order` what the
    run's arguments say of query_key_value."""

    checkpoint: Checkpoint
    held: tuple[Held, ...]
    info: Mapping[str, Any]
    order: str
    stock_names: list[str]

    @property
    def manifest(self) -> Manifest:
        return self.checkpoint.manifest

    @property
    def tp(self) -> int:
        """Ranks that have shares of one parameter."""
        return self.manifest.mesh.tp

    @property
    def recorded(self) -> bool:
        """Whether there is a manifest that says how parameters are cut."""
        return self.checkpoint.recorded is not None and says_layouts(self.manifest)


@contextmanager
def survey(
    path: str | Path, tag: str | None = None, progress: Progress | None = None
) -> Iterator[Survey]:
    """Opens a checkpoint without being told how it is cut, and compares the ranks' copies of each
    parameter up to the first byte that differs. `progress(done, total)` counts parameters. Raises a
    UcpError."""
    found = find_tag(path, tag)
    folder = found.folder
    has_manifest = (folder / FILE_NAME).is_file()
    with open_checkpoint(folder, rules=None if has_manifest else _NOTHING_KNOWN) as checkpoint:
        checkpoint.led_here = found.notes
        manifest, held = checkpoint.manifest, list[Held]()
        pipes = {name: pipe for pipe, name in manifest.names.items()}
        for spec in manifest.params:
            local = manifest.local_shape(spec.name)
            held.append(
                Held(
                    spec.name,
                    pipes.get(spec.name, spec.name),
                    local,
                    spec.kind,
                    _copies(checkpoint, spec.name),
                    spec if has_manifest and says_layouts(manifest) else None,
                )
            )
            if progress is not None:
                progress(len(held), len(manifest.params))
        stock_names = list(manifest.names) or [
            one.name for one in held if re.match(rf"[0-9]+\.|{TIED}\.", one.name)
        ]
        yield Survey(
            checkpoint,
            tuple(held),
            checkpoint.extras.patterns,
            order_of(checkpoint.extras.client_state.get("args")),
            [] if has_manifest else stock_names,
        )


def _copies(checkpoint: Checkpoint, name: str) -> str:
    manifest = checkpoint.manifest
    b, m = manifest.holders[name][0]
    buffer = manifest.buffers[b]
    places = [HeldAt(b, m, cut) for cut in manifest.cuts_of(buffer)]
    if len(places) < 2:
        return ONE
    state, dtype = buffer.states[0]
    size, width, seen = buffer.members[m].size, ITEMSIZE[dtype], set[bytes]()
    step = _BLOCK_BYTES // width
    for low in range(0, size, step):
        first, *others = (
            read_copy(checkpoint, place, state, dtype, low, min(low + step, size))
            for place in places
        )
        if any(other != first for other in others):
            return DIFFERENT
        seen.add(first[:width])
        if len(seen) == 1 and first != first[:width] * (len(first) // width):
            seen.add(b"")  # more than one value
    return EQUAL if len(seen) > 1 else CONSTANT
