"""What no optimizer steps: frozen parameters and module buffers, where model files keep them."""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ucp.core.box import Ints
from megatron_ucp.core.experts import of_every_expert
from megatron_ucp.core.flat import FlatBuffer, Member, alone
from megatron_ucp.core.keepers import Keeper
from megatron_ucp.core.states import VALUE
from megatron_ucp.errors import DamagedFileError, UnsupportedError, some_of
from megatron_ucp.formats.deepspeed.model_file import buffer_names, frozen_shapes
from megatron_ucp.formats.deepspeed.native_steps import Optimizers
from megatron_ucp.formats.deepspeed.weights import is_extra_state
from megatron_ucp.formats.pt.unpickler import TensorRef


@dataclass(frozen=True)
class FrozenValue:
    """A value as the files of a rank keep it: `order` are the dims as a file stores them (None: as
    they are), `partitions` those of ZeRO-3 that hold a frozen parameter together."""

    name: str
    shape: Ints
    dtype: str
    kind: str
    order: Ints | None
    partitions: int | None

    def buffer(self, axes: tuple[str, ...]) -> FlatBuffer:
        """A buffer of its own."""
        size, states = math.prod(self.shape), ((VALUE, self.dtype),)
        if self.partitions is None:
            return alone(self.name, size, states, axes=axes)
        length = -(-size // self.partitions)
        member = Member(self.name, 0, size)
        return FlatBuffer((member,), length, self.partitions, "each", states, axes=axes)


def values_of(
    step: Optimizers, module: Mapping[str, Any], known: Collection[str]
) -> Iterator[FrozenValue]:
    """Every value of a `module` of the first rank that is not among the `known` names.

    Raises DamagedFileError for one that is missing, UnsupportedError for an entry that is neither a
    parameter nor a buffer.
    """
    frozen = _frozen_shapes(step)
    buffers = _buffer_names(step)
    divided = step.contents.keeper == Keeper.ZERO_3
    # Older ZeRO-3 files don't name the buffers, which are all that has bytes there, nor keep frozen
    # parameters.
    old = divided and "buffer_names" not in step.meta
    named = [name for name in module if not is_extra_state(name) or name in buffers]
    for name in dict.fromkeys([*named, *frozen]):
        ref = module.get(name)
        held = isinstance(ref, TensorRef) and ref.numel > 0
        if name in known or (old and not held and name not in frozen):
            continue
        if divided and not old and name not in {*frozen, *buffers}:
            if held:
                raise unexplained(name, buffers - set(module), step.main_file)
            continue  # what stands for a parameter whose own name is in another place
        is_frozen = name not in buffers and not (old and held)
        parts = step.spread.dense if is_frozen and divided else None
        value = ref if parts is None else step.fragment(name, 0)
        shape = frozen.get(name, ref.shape if isinstance(ref, TensorRef) else ())
        yield _value(name, shape, "frozen" if is_frozen else "buffer", value, parts, step.main_file)


def _value(
    name: str, shape: Ints, kind: str, held: Any, partitions: int | None, file: str
) -> FrozenValue:
    if not isinstance(held, TensorRef):
        raise DamagedFileError("the value of a parameter is missing", file=file, parameter=name)
    is_as_told = partitions is not None or held.is_contiguous
    return FrozenValue(
        name, shape, held.storage.dtype, kind, None if is_as_told else held.order, partitions
    )


def _frozen_shapes(step: Optimizers) -> dict[str, Ints]:
    """Those of frozen parameters, as the first model file says; the files of experts have theirs,
    of all ranks."""
    stacked, shapes = step.experts.autoep.experts, frozen_shapes(step.meta, step.main_file)
    return {name: shape for name, shape in shapes.items() if name not in stacked}


def _buffer_names(step: Optimizers) -> set[str]:
    """The module buffers of all stages, by canonical name."""
    found = {
        step.weights.name_of(name, file)
        for file in step.first_of_stages
        for name in buffer_names(step.files.tree(file), step.files.full_path(file))
    }
    return of_every_expert(found, step.expert_counts)


def unexplained(name: str, lacking: Collection[str], file: str) -> UnsupportedError:
    """For an entry of the weights whose name is none of the model's, of which some are `lacking`
    there."""
    return UnsupportedError(
        "the weights have an entry that is no parameter and no buffer of the model: a hook of its "
        "state dict renames or adds entries, and nothing in the files says what it is",
        file=file,
        parameter=name,
        expected=f"one of {some_of(sorted(lacking))}" if lacking else "no such entry",
        found="a name that the model does not have",
        fix="load it into an engine of the same model, whose hook says what it is, or with "
        "DeepSpeed's own load on the same mesh (native=True)",
    )
