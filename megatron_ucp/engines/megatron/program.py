"""Loads and saves as Megatron-LM's own training program calls them: by its flags, with what it
keeps of a run beside tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ucp import say
from megatron_ucp.engines.background import wait
from megatron_ucp.engines.load import load, no_checkpoint
from megatron_ucp.engines.megatron.engine import attach_megatron
from megatron_ucp.engines.megatron.save import TORCH, TORCH_DIST, StackSave, require_written
from megatron_ucp.engines.megatron.shard import MegatronStack
from megatron_ucp.engines.save import SaveOptions, save_engine
from megatron_ucp.errors import UnsupportedError, UsageError
from megatron_ucp.formats.megatron.run_state import ARGUMENTS_KEY, OPERATIONS
from megatron_ucp.formats.store import location
from megatron_ucp.formats.tags import iteration_name
from megatron_ucp.reshard.options import BACKGROUND, DIRECT, absolute_path

_STACK = "_ucp_stack"  # of an optimizer
# what Megatron-LM takes from a checkpoint's flags beside the consumed samples
_COUNTS = ("skipped_train_samples", "consumed_valid_samples")


def load_checkpoint(
    ddp_model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    strict: bool = True,
    **_: Any,
) -> tuple[int, float]:
    """In place of Megatron-LM's own: any engine's checkpoint in `--load`, on any mesh. Returns the
    iteration and the floating-point operations so far: 0 of a folder that holds no checkpoint.
    Collective.

    Follows `--ckpt-step`, `--finetune`, `--pretrained-checkpoint`, `--no-load-optim`,
    `--no-load-rng` and `--exit-on-missing-checkpoint`. Raises a UcpError on every rank.
    """
    args = _arguments()
    if getattr(args, "save", None) and not _saves_itself(args):
        require_written(_format_of(args))  # before anybody trains
    stack = _stack_of(ddp_model, optimizer, opt_param_scheduler)
    wait(stack)  # the folder's newest save may be on its way
    folder, finetune = getattr(args, load_arg), bool(args.finetune)
    pretrained = getattr(args, "pretrained_checkpoint", None)
    if pretrained is not None and _is_empty(folder):
        folder, finetune = pretrained, True
        args.finetune = True
    elif not args.exit_on_missing_checkpoint and _is_empty(folder):
        say.note(f"{folder} holds no checkpoint: the run begins with its own weights")
        return 0, 0
    step = getattr(args, "ckpt_step", None)
    report = load(
        stack,
        folder,
        None if not step else iteration_name(step),
        load_optimizer_states=not args.no_load_optim,
        load_lr_scheduler_states=not args.no_load_optim,
        load_module_only=finetune,
        rng=not args.no_load_rng,
    )
    operations = report.client_state.get(OPERATIONS, 0)
    if finetune:
        return 0, operations
    said = report.client_state.get(ARGUMENTS_KEY)
    known: Mapping[str, Any] = said if isinstance(said, Mapping) else {}
    args.consumed_train_samples = stack.consumed_samples
    for name in _COUNTS:
        value = known.get(name)
        setattr(args, name, value if type(value) is int else 0)
    from megatron.core.num_microbatches_calculator import update_num_microbatches

    update_num_microbatches(consumed_samples=stack.consumed_samples, verbose=True)
    return stack.iteration, operations


def save_checkpoint(
    iteration: int,
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_floating_point_operations_so_far: float,
    checkpointing_context: Any = None,
    *,
    non_persistent_ckpt: bool = False,
    release: bool = False,
    **more: Any,
) -> None:
    """In place of Megatron-LM's own: a checkpoint in `--save` that every engine loads, stock
    Megatron-LM too. With `--async-save` training goes on while it is written. Under
    `--ckpt-format torch` Megatron-LM's own save runs, with a note. Collective. Raises a UcpError on
    every rank."""
    args = _arguments()
    if _saves_itself(args):
        _save_by_megatron(
            iteration,
            model,
            optimizer,
            opt_param_scheduler,
            num_floating_point_operations_so_far,
            checkpointing_context,
            non_persistent_ckpt=non_persistent_ckpt,
            release=release,
            **more,
        )
        return
    _refuse(args, non_persistent_ckpt, release)
    stack = _stack_of(model, optimizer, opt_param_scheduler)
    folder, keep_latest = args.save, None
    if non_persistent_ckpt:
        apart = getattr(args, "non_persistent_global_ckpt_dir", None)
        folder, keep_latest = apart or str(location(args.save) / "non_persistent"), 1
    stack.iteration, stack.consumed_samples = iteration, args.consumed_train_samples
    stack.floating_point_operations = num_floating_point_operations_so_far
    how = SaveOptions(keep_latest=keep_latest, rng=not args.no_save_rng)
    interval = None if non_persistent_ckpt else getattr(args, "save_retain_interval", None)
    save_engine(StackSave.of(stack, absolute_path(folder), args, how, interval))


def _arguments() -> Any:
    from megatron.training import get_args  # pyright: ignore[reportMissingImports]  (Megatron-LM)

    return get_args()


def _stack_of(model: Sequence[Any], optimizer: Any, scheduler: Any) -> MegatronStack:
    """The stack, attached at its first load or save."""
    if optimizer is None:
        raise UsageError(
            "there is no optimizer to load or save",
            expected="a run that trains",
            found="--skip-train",
            fix="use Megatron-LM's own load_checkpoint",
        )
    kept: MegatronStack | None = optimizer.__dict__.get(_STACK)
    if kept is None or kept.chunks != list(model):
        way = BACKGROUND if getattr(_arguments(), "async_save", False) else DIRECT
        kept = attach_megatron(model, optimizer, scheduler, save=way)
        optimizer.__dict__[_STACK] = kept
    return kept


def _is_empty(folder: str | None) -> bool:
    """Whether there is nothing like a checkpoint. Raises UsageError where some ranks see one."""
    return folder is None or no_checkpoint(folder)


def _saves_itself(args: Any) -> bool:
    """Whether Megatron-LM's own save writes: its older files, which this package only loads."""
    return _format_of(args) == TORCH


def _save_by_megatron(*given: Any, **more: Any) -> None:
    from megatron.training.checkpointing import (  # pyright: ignore[reportMissingImports]
        save_checkpoint as own_save,
    )

    say.note(
        "--ckpt-format torch: Megatron-LM's own save writes these files, which only the same mesh "
        "continues in Megatron-LM itself; leave the flag out for a save that any mesh continues"
    )
    own_save(*given, **more)


def _format_of(args: Any) -> str:
    return getattr(args, "ckpt_format", None) or TORCH_DIST


def _refuse(args: Any, non_persistent: bool, release: bool) -> None:
    """Raises UnsupportedError for what this package's save does not write."""
    local = non_persistent and getattr(args, "non_persistent_ckpt_type", None) == "local"
    require_written(_format_of(args))
    asked = {
        "--no-save-optim": getattr(args, "no_save_optim", None),
        "--non-persistent-ckpt-type local": local,
        "a release": release,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise UnsupportedError(
                "this kind of save is not supported",
                expected="weights and optimizer, in one folder of all ranks",
                found=what,
                fix="leave it out, or call Megatron-LM's own save_checkpoint for it",
            )
