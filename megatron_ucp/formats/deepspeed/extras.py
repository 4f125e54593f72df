"""What DeepSpeed saves besides element-wise states, from a tag folder's model files."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from megatron_ucp.core.layers import TIED, Layers
from megatron_ucp.core.manifest import Manifest
from megatron_ucp.core.mesh import stage_of
from megatron_ucp.errors import DamagedFileError, some_of
from megatron_ucp.formats import expect
from megatron_ucp.formats.checkpoint import Extras
from megatron_ucp.formats.deepspeed.files import COUNTERS, HELPERS, NEWEST, OWN_KEYS, TagFolder
from megatron_ucp.formats.deepspeed.run import NativeRun
from megatron_ucp.formats.deepspeed.weights import is_nothing
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.pt.refs import TensorRef
from megatron_ucp.formats.schedules import of_all_stages, regrouped


def extras_of(run: NativeRun) -> Extras:
    """Of native files."""
    optimizer, scheduler = expect.section(run.optimizer_of(0)[0]), _joined_scheduler(run)
    scaler, modules = run.contents.scaler, run.weights.extra_states()
    found = from_meta(run, run.meta, optimizer, scheduler, scaler, modules)
    return replace(found, side_data=run.weights.side_data())


def _whole(value: Any) -> Any:
    """A counter: under sequence parallelism DeepSpeed counts samples in floats, which are whole."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def from_meta(
    folder: TagFolder,
    meta: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    scheduler: Any,
    scaler: LossScale,
    modules: Mapping[str, Any],
) -> Extras:
    """`meta` is the tree of a model file, `optimizer` that of an optimizer file, `modules` what
    modules keep besides tensors. Raises DamagedFileError for counters that are no numbers and a
    scheduler that is no dict."""
    _check_counters(folder, meta)
    if not isinstance(scheduler, dict | None):
        raise DamagedFileError(
            "the scheduler's state is no dictionary",
            file=folder.main_file,
            expected="what its state_dict() gave",
            found=type(scheduler).__name__,
        )
    config = meta.get("ds_config")
    clip = optimizer.get("clip_grad")
    has_clip = isinstance(clip, int | float) and not isinstance(clip, bool)
    clip_grad = float(cast("float", clip)) if has_clip else None
    return Extras(
        counters={key: _whole(meta[key]) for key in COUNTERS if meta.get(key) is not None},
        scheduler=scheduler,
        scaler=scaler,
        config=config if isinstance(config, dict) else None,
        client_state={key: value for key, value in meta.items() if key not in OWN_KEYS},
        helpers={key: meta[key] for key in HELPERS if meta.get(key) is not None},
        version=str(meta.get("ds_version") or ""),
        clip_grad=clip_grad,
        int_steps=_int_steps(optimizer),
        stateless={name: value for name, value in modules.items() if is_nothing(value)},
        patterns=expect.section(meta, "universal_checkpoint_info"),
        modules={name: value for name, value in modules.items() if not is_nothing(value)},
    )


def notes_of_keys(meta: Mapping[str, Any]) -> list[str]:
    """A note about keys of a model file that a later DeepSpeed than is known here may have added:
    they are taken for the user's client state."""
    version = str(meta.get("ds_version") or "")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    keys = sorted(str(key) for key in meta if key not in OWN_KEYS)
    if not keys or numbers is None or (int(numbers[1]), int(numbers[2])) <= NEWEST:
        return []
    return [
        f"DeepSpeed {version} is newer than what is known here: keys of its model file that it may "
        f"have added are taken for the client state ({some_of(keys)})"
    ]


def _check_counters(folder: TagFolder, meta: Mapping[str, Any]) -> None:
    """Raises DamagedFileError for counters that are no numbers."""
    for key in COUNTERS:
        value = _whole(meta.get(key))
        if value is not None and (type(value) is not int or not 0 <= value < 2**63):
            raise DamagedFileError(
                f"the model file says no number in {key}",
                file=folder.main_file,
                expected="a whole number from 0",
                found=type(value).__name__,
            )


def _int_steps(optimizer: Mapping[str, Any]) -> bool:
    """Whether the optimizer of a file keeps its step as an int."""
    base = (
        optimizer.get("base_optimizer_state") or optimizer.get("optimizer_state_dict") or optimizer
    )
    entries = base.get("state", {}) if isinstance(base, dict) else dict(enumerate(base))
    return any(type(expect.section(e).get("step")) is int for e in expect.section(entries).values())


def _joined_scheduler(run: NativeRun) -> Any:
    """The scheduler's state with what it keeps per group for the groups of all stages, one stage
    after the other, also in schedulers that it holds: each stage of a pipeline wrote its own."""
    found = run.meta.get("lr_scheduler")
    if run.mesh.pp == 1 or not isinstance(found, dict):
        return found
    files = run.first_of_stages
    groups: dict[int, int] = {}  # how many each stage has; its places with experts have the same
    for at, contents in zip(run.places, run.stages, strict=True):
        groups.setdefault(stage_of(at), len(contents.groups))
    saved = [_with_numbers(run, file) for file in files]
    return of_all_stages(found, [*zip(saved, groups.values(), strict=True)])


def _with_numbers(run: NativeRun, file: str) -> Any:
    """The scheduler's state in a file, with rates that are tensors as numbers: only the first
    stage's file is read later."""

    def of(lists: list[Any]) -> Any:
        return [
            run.scalar(run.full_path(file), value) if isinstance(value, TensorRef) else value
            for value in lists[0]
        ]

    return regrouped([run.tree(file).get("lr_scheduler") or {}], of)


# ------------------------------------------------ a pipeline's layers


def layers_of(run: NativeRun) -> Layers:
    """A pipeline's layers as its files show them. What later stages hold of a tied module without a
    file of its own stands at a position behind the last one."""
    names = run.manifest.names
    own, tied = _by_position(names)
    filed = {layer for layer, _ in run.names.layers}
    count = 1 + max({*own, *filed}, default=-1)
    at = [own.get(position, {}) for position in range(count)]
    for position in sorted(filed - own.keys()):
        keys = set(run.tree(run.names.layers[position, 0]))
        at[position] = next((module for module in tied.values() if module.keys() <= keys), {})
    shared = _shared(run.manifest)
    placed = Counter(pipe for layer in at for pipe in layer.values())
    if any(placed[pipe] < 2 for pipe in shared):
        tensors = [tensor for module in tied.values() for tensor in module.items()]
        at.append({rest: pipe for rest, pipe in tensors if pipe in shared})
    return Layers(tuple(at), names, frozenset(filed))


def _shared(manifest: Manifest) -> set[str]:
    """What several stages hold, by its names in the pipeline."""
    holders = manifest.holders
    return {pipe for pipe, name in manifest.names.items() if len(holders.get(name, ())) > 1}


def _by_position(
    names: Mapping[str, str],
) -> tuple[dict[int, dict[str, str]], dict[str, dict[str, str]]]:
    """Parameters of each position, and of each tied module: rest of the name -> name in the
    pipeline."""
    own: dict[int, dict[str, str]] = {}
    tied: dict[str, dict[str, str]] = {}
    for pipe in names:
        head, _, rest = pipe.partition(".")
        if head == TIED:
            key, _, rest = rest.partition(".")
            tied.setdefault(key, {})[rest] = pipe
        else:
            own.setdefault(int(head), {})[rest] = pipe
    return own, tied
