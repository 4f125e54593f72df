"""What this package keeps of a live engine, in one place: its record, which every module asks.

An engine that was never attached has a record too, from its first load or save on:

    record_of(engine).run.id    # the run that the engine's saves belong to
"""

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

HANDLE = "ucp"  # the attribute of an attached engine with its `Handle`
LOADED, SAVED = "ucp_report", "ucp_save_report"  # those with the reports of its last load and save
_RECORD = "_ucp"


@dataclass
class OwnRun:
    """The run that an engine's saves are of: `id` is born with its first save, or comes from the
    checkpoint that it loaded. `origin` is that checkpoint where it has no id (`tags.content_id`;
    empty: none). `said` are lines about older tags that no later save repeats."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    origin: str = ""
    said: set[str] = field(default_factory=set[str])


@dataclass
class EngineRecord:
    """All that is known of one engine, beside what it says itself.

    `attachment` says how it was attached (None: it was not). `backgrounds` are what works beside
    its training, by what each does. `memory` keeps in-memory checkpoints, if anything does. `model`
    is the family's model that an earlier call named. `stepped` are the ids of the parameters that a
    plain optimizer stepped when the engine was attached: some may be frozen later. `broken` are the
    parts that a failed load left (live.WEIGHTS, live.STATES), `closed_doors` the methods that the
    engine had before, and `hooks` what stands in the way of its modules meanwhile. `tensor_rank` is
    this rank's number among those that cut the parameters, once it was asked.
    """

    attachment: Any = None
    run: OwnRun = field(default_factory=OwnRun)
    backgrounds: dict[str, Any] = field(default_factory=dict[str, Any])
    memory: Any = None
    model: Any = None
    stepped: frozenset[int] = frozenset()
    broken: frozenset[str] = frozenset()
    closed_doors: Mapping[str, Callable[..., Any] | None] = field(default_factory=dict[str, Any])
    hooks: list[Any] = field(default_factory=list[Any])
    tensor_rank: int | None = None


def record_of(engine: Any) -> EngineRecord:
    """The record of an engine; of what is none, an empty one that nobody keeps."""
    own: dict[str, Any] = getattr(engine, "__dict__", {})
    if _RECORD not in own:  # asked for each parameter: a new one, with its id, is made once
        own[_RECORD] = EngineRecord()
    return own[_RECORD]


def run_of(engine: Any) -> OwnRun:
    return record_of(engine).run


def handle_of(engine: Any, family: Any = None) -> Any:
    """The `Handle` of an attached engine. Of another one, which can be DeepSpeed's alone, one with
    the model of the `family`. Collective. Raises a UcpError on every rank."""
    attached = getattr(engine, HANDLE, None)
    if attached is not None:
        return attached
    from megatron_ucp.engines.deepspeed.engine import unattached

    return unattached(engine, family)
