"""Megatron-DeepSpeed's own program around an engine: what its arguments say of the model, and what
a load tells it. Megatron-DeepSpeed brings a `megatron.core` of its own, whatever else is installed:
that an engine is the program's says the class of its model."""

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megatron_ucp.core.rules import RuleSet
from megatron_ucp.errors import ModelMismatchError
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.deepspeed.files import PATTERNS
from megatron_ucp.formats.deepspeed.megatron_deepspeed import arguments_of, rules_of
from megatron_ucp.formats.deepspeed.weights import by_dotted_name
from megatron_ucp.formats.megatron.run_state import ARGUMENTS_KEY

_MODELS = "megatron.model."  # where the classes of its models lie; Megatron-LM's lie elsewhere
_DEGREES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
# what the program itself compares with the arguments of the run, and no shape shows
_COMPARED = ("num_attention_heads", "num_key_value_heads")


def arguments(module: Any) -> Any:
    """The live arguments of the program whose model this is; an empty namespace of another one."""
    program: Any = sys.modules.get("megatron")
    if not type(module).__module__.startswith(_MODELS) or not hasattr(program, "get_args"):
        return SimpleNamespace()
    return program.get_args()


def unsaved_buffers(module: Any) -> frozenset[str]:
    """Buffers of a model that its program does not save, whatever they are registered as: older
    code of Megatron-DeepSpeed computes the table of rotary positions again."""
    own = getattr(module, "state_dict_for_save_checkpoint", None)
    if own is None or not vars(arguments(module)):
        return frozenset()
    saved = by_dotted_name(own(keep_vars=True))
    return frozenset(name for name, _ in module.named_buffers() if name not in saved)


def rules_of_program(module: Any) -> RuleSet | None:
    """The rules that come with the package for the program's model; None for another model, and
    where the arguments don't decide it."""
    return rules_of(vars(arguments(module)))


def vocabulary_info(module: Any) -> Mapping[str, Any]:
    """What the program saves of the padding of its vocabulary, in the words of stock DeepSpeed's
    `universal_checkpoint_info`; empty of another model."""
    if not vars(arguments(module)) or not hasattr(module, PATTERNS):
        return {}
    rows = sys.modules["megatron"].get_tokenizer().vocab_size
    return {**module.universal_checkpoint_info(), "original_vocab_size": rows}


def check_arguments(source: Checkpoint, module: Any) -> None:
    """Raises ModelMismatchError where the program would end once everything was loaded: its model
    computes something else than the run's."""
    here, saved = arguments(module), arguments_of(source.extras.client_state.get(ARGUMENTS_KEY))
    if getattr(here, "finetune", False):
        return
    other = [
        name
        for name in _COMPARED
        if name in saved and hasattr(here, name) and saved[name] != getattr(here, name)
    ]
    if other:
        raise ModelMismatchError(
            "the arguments of the run that wrote the checkpoint say another model",
            file=source.main_file,
            expected=", ".join(f"{name}={saved[name]}" for name in other),
            found=", ".join(f"{name}={getattr(here, name)}" for name in other),
            fix="start the program with the flags of the run",
        )


def say_other_mesh(module: Any, client_state: Mapping[Any, Any] | None) -> None:
    """Lets the program go on where its degrees of parallelism are not the run's, as
    `--universal-checkpoint` does: it compares them once it has the client state. And where there
    are no random states, as in an import: it would end, without an exit code."""
    here, state = arguments(module), client_state or {}
    if not vars(here):
        return
    saved = state.get(ARGUMENTS_KEY)
    if not any(key in state for key in ("rng_state", "random_rng_state")):
        here.no_load_rng = True
    if any(getattr(saved, name, None) != getattr(here, name, None) for name in _DEGREES):
        here.universal_checkpoint = True
