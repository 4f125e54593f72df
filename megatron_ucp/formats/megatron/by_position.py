"""States of Megatron's optimizers that are not distributed, in its older files: they have no names,
and lie group by group in the order in which the model registered what it trains."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ucp.core.states import MASTER
from megatron_ucp.errors import StateMismatchError
from megatron_ucp.formats.foreign import at_key, at_key_or, each, of_kind
from megatron_ucp.formats.pt.unpickler import TensorRef

InModelOrder = Sequence[tuple[str, TensorRef]]  # weights by name, in the order of the model
_OF_HALF = "fp32_from_fp16_params"  # masters of weights in half precision, by group
_FULL, _STEP = "float32", "step"


def inner_tree(tree: Mapping[str, Any], file: str) -> Mapping[str, Any]:
    """What torch's optimizer keeps of one of Megatron's."""
    return at_key(tree, "optimizer", dict, file) if "optimizer" in tree else tree


def steps_in(inner: Mapping[str, Any], file: str) -> list[TensorRef]:
    """The tensors that count steps, of each parameter."""
    states = at_key_or(inner, "state", {}, file).values()
    found = [of_kind(one, dict, "the state of a parameter", file).get(_STEP) for one in states]
    return [ref for ref in found if isinstance(ref, TensorRef)]


@dataclass
class StatesByPosition:
    """`found` has the element-wise states of each parameter of a rank, masters among them."""

    file: str
    found: dict[str, dict[str, TensorRef]] = field(default_factory=dict[str, dict[str, TensorRef]])

    def add(self, tree: Mapping[str, Any], groups: Sequence[InModelOrder]) -> None:
        """Takes one optimizer, of whose `groups` these are the weights. Raises StateMismatchError
        where they are not, DamagedFileError."""
        inner, file = inner_tree(tree, self.file), self.file
        listed = each(at_key_or(inner, "param_groups", [], file), dict, "param_groups", file)
        states = at_key_or(inner, "state", {}, file)
        for number, named in enumerate(groups):
            ids = listed[number].get("params") if number < len(listed) else None
            halves = [one for one in named if one[1].storage.dtype != _FULL]
            masters = iter(self._paired(halves, self._masters(tree, number)))
            for (name, weight), at in self._paired(named, ids):
                half = weight.storage.dtype != _FULL
                own = {MASTER: next(masters)[1] if half else weight}
                own |= self._of_param(states.get(at) or {})
                for state, ref in own.items():
                    self._check(name, state, weight, ref)
                self.found[name] = own

    def _masters(self, tree: Mapping[str, Any], number: int) -> Any:
        listed = tree.get(_OF_HALF) or []
        return listed[number] if number < len(listed) else []

    def _of_param(self, kept: Any) -> dict[str, TensorRef]:
        refs = of_kind(kept, dict, "the state of a parameter", self.file).items()
        return {k: ref for k, ref in refs if isinstance(ref, TensorRef) and k != _STEP}

    def _paired(
        self, named: InModelOrder, listed: Any
    ) -> Iterator[tuple[tuple[str, TensorRef], Any]]:
        """InModelOrder with what a list has at their places. Raises StateMismatchError."""
        count = len(listed) if isinstance(listed, list) else None
        if count != len(named):
            raise StateMismatchError(
                "a group of the optimizer has another number of parameters than the model",
                file=self.file,
                expected=f"{len(named)}: {', '.join(name for name, _ in named)}"[:200],
                found=count,
                fix="load the weights alone (Python: load_optimizer_states=False)",
            )
        return zip(named, listed, strict=True)

    def _check(self, name: str, state: str, weight: TensorRef, ref: Any) -> None:
        """Raises StateMismatchError for a state that is none of this parameter."""
        good = isinstance(ref, TensorRef) and ref.is_contiguous and ref.storage.dtype == _FULL
        if not good or ref.shape != weight.shape:
            raise StateMismatchError(
                "what the optimizer keeps at the place of a parameter is not its state",
                file=self.file,
                parameter=f"{name} ({state})",
                expected=f"{weight.shape} in {_FULL}",
                found=f"{getattr(ref, 'shape', ref)}"[:100],
                fix="load the weights alone (Python: load_optimizer_states=False)",
            )


def one_step(steps: Collection[float], file: str) -> float | None:
    """The step that all parameters of a file have; None where it counts none by tensors. Raises
    StateMismatchError."""
    if len(steps) > 1:
        raise StateMismatchError(
            "parameters were stepped a different number of times",
            file=file,
            expected="one step",
            found=", ".join(f"{step:g}" for step in sorted(steps)),
            fix="load the weights alone (Python: load_optimizer_states=False)",
        )
    return next(iter(steps), None)
