"""megatron-core's stack as a run that a resize moves from."""

from dataclasses import replace

from megatron_ucp.engines.megatron.engine.besides import described, extras_of, values_of
from megatron_ucp.engines.megatron.engine.stack import MegatronStack
from megatron_ucp.engines.taking import LentRun, RankValues, Taking, lent
from megatron_ucp.engines.values import inert
from megatron_ucp.errors import UnsupportedError
from megatron_ucp.formats.megatron.extras import OPERATIONS
from megatron_ucp.reshard import agree


def taken(stack: MegatronStack, how: Taking) -> LentRun:
    """Takes a stack as it is; nothing in it is changed. Collective. Raises a UcpError on every
    rank."""
    present = described(stack, UnsupportedError)
    live = present.live
    with agree.together() as told:
        own = values_of(live)
        client = {OPERATIONS: stack.floating_point_operations, **how.client_state}
        found = extras_of(live, {inert(key): inert(value) for key, value in client.items()})
        extras = replace(found, scheduler=inert(found.scheduler))
        told.value = own.digest()
    apart = own.differing(told.values)
    values = RankValues(own, apart, tuple(live.own.taken_as))
    return lent(present, present.manifest.run, extras, values, how)
