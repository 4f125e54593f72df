"""What optimizers keep, known by optimizer and by key and never by size. An optimizer is one row.

Sources: `torch.optim` of torch 2.13, `deepspeed/ops` of DeepSpeed 0.19.8, bitsandbytes 0.50,
schedulefree 1.4, lion-pytorch 0.2, Transformer Engine 2.3 and Apex, each optimizer's `step`,
`_init_group` or `init_state`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from megatron_ucp.core.manifest import ParamGroup
from megatron_ucp.core.names import MASTER, VALUE
from megatron_ucp.errors import StateMismatchError, UnsupportedError, UsageError

# ---- optimizers


# optimizers that look at a whole matrix: their states follow no partition of a flat buffer
WHOLE_MATRICES = frozenset({"torch.Muon"})
_CLIPPED = (
    "it scales each step by the root mean square over what it is given, which is a partition, "
    "keeps its count in the group, and begins its moments anew where kahan_comp is not beside them"
)
# optimizers that can't be registered either: a resume would change numbers in silence
REFUSED = {"optimi.StableAdamW": _CLIPPED, "pytorch_optimizer.StableAdamW": _CLIPPED}
_BITSANDBYTES = {"state1", "state2"}
REFUSED_STATES = {
    "state1": "8-bit block-wise states",
    "state2": "8-bit block-wise states",
    "qmap1": "8-bit block-wise states",
    "absmax1": "8-bit block-wise states",
    "worker_error": "error feedback of a 1-bit optimizer",
    "server_error": "error feedback of a 1-bit optimizer",
    "exp_avg_sq_row": "factored moments",
    "exp_avg_sq_col": "factored moments",
    "scaling_coeff": "per-tensor coefficients of LAMB",
    "lamb_coeff_freeze": "per-tensor coefficients of LAMB",
    "momentum": "states of an optimizer that is not known",
}


@dataclass(frozen=True)
class Kept:
    """What one optimizer keeps: element-wise states, per-parameter scalars, and how it stores
    `step`. `switches` are further element-wise states, of groups with these hyper-parameters."""

    element: tuple[str, ...]
    scalar: tuple[str, ...] = ("step",)
    # "tensor": 0-d float32, "int": Python int, "either": as it is found, "group": an int that
    # stands in the parameter group, once for all of its parameters
    step: str = "tensor"
    switches: Mapping[str, str] = field(default_factory=dict)

    def of(self, group: Mapping[str, Any]) -> "Kept":
        """What it keeps of a group with these hyper-parameters."""
        more = [state for key, state in self.switches.items() if group.get(key)]
        return Kept((*self.element, *more), self.scalar, self.step)


def _bitsandbytes(states: tuple[str, ...], *names: str) -> dict[str, Kept]:
    """The 32-bit optimizers of bitsandbytes, paged or not. What 8-bit ones keep besides `state1`
    is refused by name; those whose states are no vectors of the parameter's size have no row."""
    kept = Kept(states, step="int")
    forms = ("{}", "{}32bit", "Paged{}", "Paged{}32bit")
    return {f"bitsandbytes.{form.format(name)}": kept for name in names for form in forms}


_MOMENTUM, _MOMENTS = ("momentum_buffer",), ("exp_avg", "exp_avg_sq")
_ADAM = Kept(_MOMENTS, switches={"amsgrad": "max_exp_avg_sq"})
_SCHEDULE_FREE = Kept(("z", "exp_avg_sq"), ())  # counts and sums stand in its groups
_MUON, _MATRICES = "deepspeed.MuonWithAuxAdam", Kept(_MOMENTUM, ())
_TABLE = {
    "torch.Adam": _ADAM,
    "torch.AdamW": _ADAM,
    "torch.NAdam": Kept(_MOMENTS, ("step", "mu_product")),
    "torch.RAdam": Kept(_MOMENTS),
    "torch.Adamax": Kept(("exp_avg", "exp_inf")),
    "torch.Adagrad": Kept(("sum",)),
    "torch.SGD": Kept((), (), switches={"momentum": "momentum_buffer"}),
    "torch.Muon": _MATRICES,
    "torch.RMSprop": Kept(
        ("square_avg",), switches={"momentum": "momentum_buffer", "centered": "grad_avg"}
    ),
    "torch.Adadelta": Kept(("square_avg", "acc_delta")),
    _MUON: Kept(_MOMENTS, step="either"),  # an Adam of DeepSpeed's or torch's, beside `_MATRICES`
    "deepspeed.FusedAdam": Kept(_MOMENTS, step="int"),
    "deepspeed.DeepSpeedCPUAdam": Kept(_MOMENTS, step="int"),
    "deepspeed.FusedLion": Kept(("exp_avg",), step="int"),
    "deepspeed.DeepSpeedCPULion": Kept(_MOMENTS, step="int"),
    "deepspeed.DeepSpeedCPUAdagrad": Kept(("exp_avg_sq",), step="int"),
    "transformer_engine.FusedAdam": Kept(_MOMENTS, step="group"),
    "apex.FusedAdam": Kept(_MOMENTS, step="group"),
    **_bitsandbytes(("state1", "state2"), "Adam", "AdamW"),
    **_bitsandbytes(("state1",), "Lion"),
    "schedulefree.AdamWScheduleFree": _SCHEDULE_FREE,
    "schedulefree.RAdamScheduleFree": _SCHEDULE_FREE,
    "schedulefree.SGDScheduleFree": Kept(("z",), ()),
    "lion_pytorch.Lion": Kept(("exp_avg",), ()),
}
# What torch's classes, and those after their example, keep for a group that has these
# hyper-parameters: files of DeepSpeed's don't name the class.
_BY_SETTINGS: tuple[tuple[frozenset[str], tuple[str, ...]], ...] = (
    (frozenset({"betas", "eps"}), _MOMENTS),
    (frozenset({"betas"}), ("exp_avg",)),
    (frozenset({"rho", "eps"}), ("square_avg", "acc_delta")),
    (frozenset({"alpha", "centered"}), ("square_avg",)),
    (frozenset({"lambd", "t0"}), ("ax",)),
    (frozenset({"etas", "step_sizes"}), ("prev", "step_size")),
    (frozenset({"lr_decay", "initial_accumulator_value"}), ("sum",)),
)
# names of element-wise and of scalar states that some optimizer keeps; registered ones come in too
ELEMENT = {
    *(state for kept in _TABLE.values() for state in (*kept.element, *kept.switches.values())),
    *(state for _, states in _BY_SETTINGS for state in states),
}
SCALAR = {"step", "mu_product", "eta", "mu"}


_REGISTERED: set[str] = set()  # names that `register_optimizer` added


DECOUPLED = "decoupled_weight_decay"  # of a group: the decay is none of the gradient's
_OF_ADAM = frozenset(
    {
        *("torch.Adam", "torch.AdamW", "deepspeed.FusedAdam", "deepspeed.DeepSpeedCPUAdam"),
        *("transformer_engine.FusedAdam", "apex.FusedAdam"),
        _MUON,  # of what is no matrix
    }
)


def steps_as(optimizer: str, settings: Mapping[str, Any]) -> str:
    """The rule by which an optimizer steps a group with these hyper-parameters, whoever implements
    it: the same for torch's AdamW and DeepSpeed's fused Adam. "" where nothing says it: of an
    optimizer without a name, which DeepSpeed's files do not say, the keys that torch's classes
    have are looked at."""
    decoupled = settings.get(DECOUPLED)
    if settings.get("use_muon"):
        return "Muon"
    if not optimizer and decoupled is not None:
        optimizer = "torch.Adam" if "amsgrad" in settings else "torch.RAdam"
        optimizer = "torch.NAdam" if "momentum_decay" in settings else optimizer
    name = optimizer.rpartition(".")[2]
    if optimizer in _OF_ADAM:
        decoupled = True if decoupled is None and name == "AdamW" else decoupled
        return "" if decoupled is None else "AdamW" if decoupled else "Adam"
    return f"{name} with decoupled weight decay" if decoupled else name


def rule_of(group: ParamGroup) -> str:
    """The rule by which a group is stepped, "" where nothing says it."""
    return group.steps_as or steps_as(group.optimizer, group.settings)


def rule_untold(group: ParamGroup) -> bool:
    """Whether a group is stepped as Adam does, with its kind of weight decay or the other, and does
    not tell which."""
    is_adams = {"betas", "eps"} <= group.settings.keys()
    return is_adams and group.optimizer in {"", *_OF_ADAM} and not rule_of(group)


def register_optimizer(
    name: str, element: Iterable[str], scalar: Iterable[str] = ("step",), step: str = "tensor"
) -> None:
    """Says what an optimizer keeps, so that its states can be resharded. A second call for a name
    replaces the first.

    Args:
        name: The first part of its module, and its class: "my_package.Lion".
        element: Names of states that have the parameter's shape: one number for each element,
            independent of the others.
        scalar: Names of states that are single numbers.
        step: How the step is kept: as a 0-d "tensor", or as an "int".

    Returns:
        Nothing.

    Raises:
        UsageError: For names that can't be states.
        UnsupportedError: For an optimizer that is known not to be reshardable.

    Example:
        >>> import megatron_ucp as ucp
        >>> ucp.register_optimizer("my_package.Lion", element=("exp_avg",), scalar=())
    """
    kept = _kept(name, element, scalar, step)
    if name in REFUSED:
        raise UnsupportedError(
            "this optimizer can't be carried",
            found=f"{name}: {REFUSED[name]}",
            fix="train with an optimizer of torch, apex or DeepSpeed that keeps one "
            "number per element, such as AdamW",
        )
    names = (*kept.element, *kept.scalar)
    wrong = [one for one in names if not one.isidentifier() or one in (MASTER, VALUE)]
    both = set(kept.element) & (SCALAR | set(kept.scalar)) or ELEMENT & set(kept.scalar)
    if wrong or both or "." not in name or step not in ("tensor", "int"):
        raise UsageError(
            "this is no optimizer that can be registered",
            expected="a name with a module, states with plain names, step tensor or int",
            found=f"{name}: {', '.join(wrong or both or names)}, step {step}",
            fix='give a name such as "my_package.Lion", names of states such as '
            '("exp_avg",), and step="tensor" or "int"',
        )
    ELEMENT.update(kept.element)
    SCALAR.update(kept.scalar)
    _TABLE[name] = kept
    _REGISTERED.add(name)


def _kept(name: Any, element: Any, scalar: Any, step: Any) -> Kept:
    """Raises UsageError unless these are a name, two lists of names and a word."""
    lists = [_words(element), _words(scalar)]
    if None in lists or not isinstance(name, str) or not isinstance(step, str):
        raise UsageError(
            "an optimizer is registered by names",
            expected="text for its name and its step, and lists of text for its states",
            found=f"{name!r}, element {element!r}, scalar {scalar!r}, step {step!r}"[:200],
            fix='write register_optimizer("my_package.Lion", element=("exp_avg",))',
        )
    return Kept(lists[0] or (), lists[1] or (), step)


def _words(value: Any) -> tuple[str, ...] | None:
    """A list of text; None for anything else."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return None
    words = tuple(value)
    return words if all(isinstance(word, str) for word in words) else None


def in_table(name: str) -> bool:
    """Whether the states of an optimizer of that name are known."""
    return name in _TABLE


def is_element(key: object) -> bool:
    """Whether a state of that name is element-wise."""
    return key in ELEMENT


def is_scalar(key: object) -> bool:
    """Whether a state of that name is a single number."""
    return key in SCALAR


def _short_name(kind: type) -> str:
    return f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"


def name_in_table(kind: type) -> str:
    """How the table calls an optimizer's class; a subclass is the class that it is known by."""
    names = [_short_name(one) for one in kind.__mro__]
    return next((name for name in names if name in _TABLE), names[0])


def full_name(kind: type) -> str:
    """A class with its module, for messages."""
    return f"{kind.__module__}.{kind.__qualname__}"


def taken_as(kind: type) -> str:
    """A note where an optimizer's class is a subclass that is taken as one in the table, else
    ""."""
    name = name_in_table(kind)
    if name == _short_name(kind):
        return ""
    return (
        f"the optimizer {full_name(kind)} is taken as {name}, which it is a subclass of; if it "
        "keeps other states, say which with ucp.register_optimizer"
    )


def kept_by(optimizer: str, group: Mapping[str, Any]) -> Kept:
    """What `optimizer` ("torch.AdamW", "deepspeed.FusedAdam") keeps for a group with these
    hyper-parameters.

    Raises UnsupportedError for an optimizer that is not in the table.
    """
    if optimizer not in _TABLE:
        name = optimizer.rpartition(".")[2].lower()
        names = {known: known.rpartition(".")[2].lower() for known in sorted(_TABLE)}
        alike = get_close_matches(name, names.values(), n=1)
        near = [known for known, own in names.items() if own in alike]
        did_you_mean = f"did you mean {' or '.join(near)}? Else " if near else ""
        raise UnsupportedError(
            "the states of this optimizer are not known",
            expected=", ".join(sorted(_TABLE)),
            found=optimizer,
            fix=f"{did_you_mean}use one of these, or say what it keeps (ucp.register_optimizer); "
            "a load can also leave the optimizer out (Python: load_optimizer_states=False)",
        )
    if optimizer == _MUON and group.get("use_muon"):
        return _MATRICES
    return _TABLE[optimizer].of(group)


_IN_PLACE_OF = {  # a state -> those that some optimizers keep instead
    "exp_avg": ("z", "state1"),
    "exp_avg_sq": ("exp_inf", "state2"),
}
_BY_SWITCH = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg"}


def untold_states(settings: Mapping[str, Any], found: Collection[str]) -> list[str]:
    """The element-wise states that a group with these hyper-parameters has after its first step
    besides those `found`, whatever class steps it. For example, a group with betas and eps of which
    exp_avg was found also has exp_avg_sq."""
    if any({*found} == {*_TABLE[name].element} for name in _REGISTERED):
        return []
    usual = next((kept for keys, kept in _BY_SETTINGS if keys <= settings.keys()), ())
    wanted = [*usual, *(state for key, state in _BY_SWITCH.items() if settings.get(key) is True)]
    if isinstance(momentum := settings.get("momentum"), int | float) and momentum:
        wanted.append("momentum_buffer")
    if settings.get("use_muon"):
        wanted = ["momentum_buffer"]
    others = {state: _IN_PLACE_OF.get(state, ()) for state in dict.fromkeys(wanted)}
    return [one for one, instead in others.items() if not {one, *instead} & {*found}]


def counts_steps(settings: Mapping[str, Any], states: Collection[str]) -> bool:
    """Whether an optimizer with these hyper-parameters, which keeps these states, has a step for
    each parameter: those of Adam's kind do, but for schedule-free ones."""
    own = [_TABLE[name] for name in _REGISTERED]
    if any({*states} == {*kept.element} and "step" not in kept.scalar for kept in own):
        return False
    return {"betas", "eps"} <= settings.keys() and "z" not in states


def steps_in_group(optimizer: str) -> bool:
    """Whether an optimizer counts its steps in its parameter groups."""
    return optimizer in _TABLE and _TABLE[optimizer].step == "group"


def refuse_step_in_group(optimizer: str) -> None:
    """Raises UnsupportedError for an optimizer that keeps its step in its groups: DeepSpeed's files
    have it in the states, from where such an optimizer does not take it."""
    if steps_in_group(optimizer):
        raise UnsupportedError(
            "under DeepSpeed this optimizer is not supported: it counts its steps in its parameter "
            "groups",
            expected="torch.AdamW or deepspeed.FusedAdam",
            found=optimizer,
            fix="use one of these; in megatron-core's own stack it is supported",
        )


def check_known(keys: Iterable[str], where: str) -> None:
    """Raises UnsupportedError for a saved state that is refused by name or not known. Those of
    bitsandbytes are known where nothing beside them says that they are in 8 bits."""
    keys = list(keys)
    bits = {*keys} & _BITSANDBYTES if {*keys} - _BITSANDBYTES - SCALAR else set[str]()
    for key in keys:
        if key in bits or (key not in ELEMENT and key not in SCALAR):
            raise UnsupportedError(
                "the checkpoint holds an optimizer state that can't be cut",
                file=where,
                expected=" ".join(sorted(ELEMENT | SCALAR)),
                found=f"{key} ({REFUSED_STATES.get(key, 'a name that is not known')})",
                fix="load the weights alone (Python: load_optimizer_states=False), or load it on "
                "the mesh that wrote it with DeepSpeed's own load",
            )


def require_equal(wanted: Iterable[str], found: Iterable[str], parameter: str, where: str) -> None:
    """Raises StateMismatchError where the optimizer's states and the saved ones differ."""
    want, have = sorted(wanted), sorted(found)
    if want != have:
        raise StateMismatchError(
            "the optimizer keeps other states than the checkpoint holds",
            file=where,
            parameter=parameter,
            expected=" ".join(want) or "no states",
            found=" ".join(have) or "no states",
            fix="use the optimizer (and its options) that wrote the checkpoint, or load the "
            "weights alone (Python: load_optimizer_states=False)",
        )


def keeps_states(optimizer: str, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer has states after its first step. Of one that is not known its group's
    hyper-parameters speak: betas or a momentum."""
    if optimizer in _TABLE:
        kept = kept_by(optimizer, group)
        return bool(kept.element or kept.scalar)
    return bool("betas" in group or group.get("momentum"))
