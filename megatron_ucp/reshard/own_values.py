"""What a rank of a live engine gets of values that differ from rank to rank in a checkpoint."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.states import VALUE
from megatron_ucp.errors import DamagedFileError
from megatron_ucp.formats.base import Checkpoint
from megatron_ucp.formats.of_ranks import SCHEDULER, OwnValues, PerRank, refuse_unless
from megatron_ucp.formats.rank_differences import ranks_of
from megatron_ucp.reshard import agree
from megatron_ucp.reshard.engine import Engine
from megatron_ucp.reshard.execute import tensor_of

# makes one value of those of all ranks, by the name of the value
Reduce = Callable[[str, list[Any]], Any]


def values_for(
    source: Checkpoint,
    bare: Manifest,
    what: PerRank,
    rule: Reduce | None,
    allow: Collection[str],
) -> tuple[OwnValues | None, list[str]]:
    """What this rank gets of all that differs (None: what all share), and notes. On another mesh
    the `rule` decides, or the first rank's is taken where that is allowed.

    Raises StateMismatchError, DamagedFileError.
    """
    if not what:
        return None, []
    mesh, file = ranks_of(source), str(source.folder)
    if mesh.has_ranks_of(bare.mesh):
        own, notes = source.of_rank(agree.world()[0]).only(what), list[str]()
    elif rule is not None:
        held = [source.of_rank(rank).only(what) for rank in range(mesh.world)]
        own, notes = _reduced(what, held, rule), [f"made of those of all ranks: {what}"]
    else:
        return None, [refuse_unless("per_rank" in allow, what, file, str(bare.mesh))]
    _check_buffers(own, bare, file)
    return own, notes


def _reduced(what: PerRank, held: Sequence[OwnValues], rule: Reduce) -> OwnValues:
    def client(key: Any) -> Any:
        values = [own.client_state[key] for own in held if key in own.client_state]
        return rule(f"client_state[{key!r}]", values)

    return OwnValues(
        {n: rule(n, [o.buffers[n] for o in held if n in o.buffers]) for n in what.buffers},
        {key: client(key) for key in what.client_state},
        rule(SCHEDULER, [own.scheduler for own in held]) if what.scheduler else None,
    )


def _check_buffers(own: OwnValues, bare: Manifest, file: str) -> None:
    """Raises DamagedFileError where a rank's own buffer has another shape than the model's."""
    for name, value in own.buffers.items():
        spec = bare.by_name.get(name)
        if spec is not None and tuple(spec.shape) != tuple(value.get("shape")):
            raise DamagedFileError(
                "a rank's own buffer has another shape than the one of the model",
                file=file,
                parameter=name,
                expected=spec.shape,
                found=value.get("shape"),
            )


def set_buffers(engine: Engine, own: Mapping[str, Any]) -> None:
    """Gives the engine what this rank had otherwise than the first one."""
    for number, cut, part in engine.parts():
        buffer = engine.manifest.buffers[number]
        name = buffer.first_param
        if name in own and not buffer.stepped:
            whole = tensor_of(own[name])
            order = engine.manifest.by_name[name].order
            stored = whole if order is None else whole.permute(order)
            engine.tensor(Slot(number, cut, part, VALUE)).copy_(stored.reshape(-1))
