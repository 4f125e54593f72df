"""Wrappers of a model show as prefixes of its names, on one side only: then no name is found."""

from collections import Counter
from collections.abc import Collection

from megatron_ucp.errors import ModelMismatchError

_COMPILED = (
    "torch.compile(model) gives such names, model.compile() and engine.compile() do not",
    "_orig_mod.",
)
_WRAPPED = ("DistributedDataParallel and other wrappers give such names", "module.")


# What torch's own wrappers put into names: torch.compile, activation checkpointing, FSDP.
_OF_TORCH = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def unwrapped_name(name: str) -> str:
    """A name without what torch's wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in _OF_TORCH)


def other_prefix(
    saved: Collection[str], wanted: Collection[str], file: str
) -> ModelMismatchError | None:
    """What to raise where names of a checkpoint are those that a model wants but for one prefix;
    None where it is not that, as where the model has the names without a prefix too."""
    names, here = set(saved), set(wanted)
    if names <= here or here <= names:
        return None
    if prefix := _prefix_of(here, names):
        what, do = "added", "give deepspeed.initialize the module inside the wrapper"
    elif prefix := _prefix_of(names, here):
        what, do = "removed", "wrap the model as the run that wrote it did"
    else:
        return None
    first = min(names)
    other = f"{prefix}{first}" if what == "added" else first.removeprefix(prefix)
    why = next((f": {text}" for text, known in (_COMPILED, _WRAPPED) if known in prefix), "")
    return ModelMismatchError(
        f"all names match with the prefix {prefix} {what} to those of the checkpoint: the model is "
        "wrapped, that of the checkpoint was not"
        if what == "added"
        else f"all names match with the prefix {prefix} {what} from those of the checkpoint: its "
        "model was wrapped, this one is not",
        file=file,
        parameter=first,
        expected=f"{other} as in the model",
        found=f"{first} in the checkpoint",
        fix=f"{do}{why}",
    )


def _prefix_of(longer: set[str], shorter: set[str]) -> str:
    """The prefix with which all names of one of the sides are among those of the other; "" where
    there is none."""
    first = min(shorter)
    parts = min(longer).split(".")
    found = {".".join(parts[:count]) + "." for count in range(1, len(parts))}
    found |= {name.removesuffix(first) for name in longer if name.endswith(f".{first}")}
    for prefix in sorted(found):
        named = {f"{prefix}{name}" for name in shorter}
        if named <= longer or longer <= named:
            return prefix
    return ""


def likely_renaming(saved: Collection[str], wanted: Collection[str]) -> str:
    """What most names of a checkpoint have in the place of what the model's names begin with, in
    words; "" where few end alike. For example, `language_model.model.layers.0.bias` and
    `model.language_model.layers.0.bias` end alike from `layers` on."""
    ends: dict[str, list[str]] = {}
    for name in saved:
        parts = name.split(".")
        for first in range(len(parts) - 1):
            ends.setdefault(".".join(parts[first:]), []).append(".".join(parts[:first]))
    found = Counter[tuple[str, str]]()
    for name in wanted:
        parts = name.split(".")
        common = (n for n in range(len(parts) - 1) if ".".join(parts[n:]) in ends)
        first = next(common, None)
        if first is not None:
            before = ".".join(parts[:first])
            found.update((theirs, before) for theirs in ends[".".join(parts[first:])])
    if not found:
        return ""
    (theirs, ours), count = found.most_common(1)[0]
    if 2 * count < len(wanted) or theirs == ours:
        return ""
    said = f"{count} of {len(wanted)} names match where the checkpoint's begin with "
    return f"{said}`{_dotted(theirs)}` and the model's with `{_dotted(ours)}`"


def _dotted(prefix: str) -> str:
    return f"{prefix}." if prefix else ""
