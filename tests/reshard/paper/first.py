"""The first checkpoint of a model, written by the package on one rank, where nothing is cut."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.flat import FlatBuffer, alone
from megatron_ucp.core.manifest import Manifest, ParamGroup, ParamSpec
from megatron_ucp.core.manifest_json import to_json
from megatron_ucp.core.mesh import Mesh
from megatron_ucp.core.names import MASTER, VALUE, Keeper
from megatron_ucp.core.plan import Slot
from megatron_ucp.families import find_family
from megatron_ucp.formats import output_folder
from megatron_ucp.formats.checkpoint import Extras
from megatron_ucp.formats.deepspeed.target import Target
from megatron_ucp.formats.deepspeed.writer import NativeWriter, RunSettings
from megatron_ucp.formats.loss_scale import LossScale
from megatron_ucp.formats.pt.archive import Output, Weight, write_pt
from megatron_ucp.reshard.execute import bytes_of
from megatron_ucp.reshard.target import Conversion, target_manifest
from tests.reshard.paper.model import Model

SHORT = {"bfloat16": "bf16", "float16": "fp16"}
NO_STEPS = {"global_steps": 0, "skipped_steps": 0, "ds_version": "0.19.8"}
COUNTERS = {"global_steps": 7, "skipped_steps": 1, "ds_version": "0.19.8"}


def write(model: Model, folder: Path, **meta: Any) -> Path:
    """A tag folder of one rank at ZeRO-1."""
    target = Target(Mesh(zero=1), model.dtype).completed({})
    manifest = target_manifest(Conversion(_on_paper(model), target, "paper"))
    writer = NativeWriter(manifest, _run(model, meta), None)
    folder.mkdir(parents=True)
    outputs = list(writer.outputs())
    for output in outputs:
        write_pt(
            folder / output.name,
            output.tree,
            lambda ref, output=output: [_payload(model, manifest, output, ref.key)],
        )
    entries = tuple(output_folder.entry_of(folder / output.name) for output in outputs)
    text = to_json(replace(manifest, files=entries, save_id="0" * 32))
    (folder / "ucp_manifest.json").write_text(text)
    return folder


def _on_paper(model: Model) -> Manifest:
    """Each tensor in a buffer of its own."""
    states = ((MASTER, "float32"), *((state, "float32") for state in model.states))
    buffers = []
    for number, (_, step, names) in enumerate(model.groups):
        for name in names:
            buffers.append(_buffer(model, name, states, number, dict(step)))
    for name in model.extra:
        buffers.append(_buffer(model, name, ((VALUE, model.dtypes[name]),), None, {}))
    return Manifest(
        Keeper.ZERO_0,
        Mesh(),
        _specs(model),
        tuple(buffers),
        tuple(ParamGroup(settings, model.optimizer) for settings, _, _ in model.groups),
        family=model.family,
        run=_counters(model),
    )


def _counters(model: Model) -> dict[str, Any]:
    """A run without states is one before its first step."""
    stepped = model.states or any(step for _, step, _ in model.groups)
    return {**(COUNTERS if stepped else NO_STEPS), **model.run}


def _specs(model: Model) -> tuple[ParamSpec, ...]:
    table = find_family(model.family).table(model.sizes) if model.family else {}
    specs = []
    for name, shape in model.shapes.items():
        dtype, kind = model.dtypes[name], model.kinds[name]
        known = name in table and table[name].shape == shape
        specs.append(
            table[name].spec(name, dtype, kind) if known else ParamSpec(name, shape, dtype, kind)
        )
    return tuple(specs)


def _buffer(
    model: Model, name: str, states: Any, group: int | None, scalars: dict[str, float]
) -> FlatBuffer:
    return alone(name, math.prod(model.shapes[name]), states, group, scalars)


def _run(model: Model, meta: dict[str, Any]) -> RunSettings:
    """What the files say beside tensors."""
    config: dict[str, Any] = {"zero_optimization": {"stage": 1}, "gradient_clipping": 1.5}
    if model.dtype in SHORT:
        config[SHORT[model.dtype]] = {"enabled": True}
    own = {key: value for key, value in _counters(model).items() if key in COUNTERS}
    said = {**own, "global_samples": 28, "note": {"mine": [1, 2.5, None]}, **meta}
    rates = [settings["lr"] for settings, _, _ in model.groups]
    scheduler = {"base_lrs": rates, "last_epoch": 7, "_last_lr": rates[::-1]}
    flat = "FusedAdam" in model.optimizer
    patterns = said.pop("universal_checkpoint_info", {})
    counters = {key: said.pop(key) for key in ("global_steps", "skipped_steps", "global_samples")}
    said.pop("ds_version")
    extras = Extras(counters, scheduler, LossScale(), config, said, patterns=patterns)
    return RunSettings(
        extras, config, "0.19.8", model.dtype, LossScale(), 1.5, flat, lambda stage: scheduler
    )


def _payload(model: Model, manifest: Manifest, output: Output, key: str) -> bytes:
    payload = output.payloads[key]
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, Weight):
        found = model.truth(payload.param).to(getattr(torch, model.dtype))
    else:
        assert isinstance(payload, Slot)
        buffer = manifest.buffers[payload.buffer]
        if payload.state == VALUE:
            found = model.truth(buffer.members[0].param)
        else:
            found = torch.cat(
                [model.truth(m.param, payload.state).reshape(-1) for m in buffer.members]
            )
            found = torch.cat([found, torch.zeros(buffer.length - len(found))])
    return bytes(bytes_of(found.contiguous().reshape(-1))) if found.numel() else b""
