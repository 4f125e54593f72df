"""A base model with a low-rank adapter added to it, element by element, in memory that does not
grow with the model.

W + scale * B A, as peft's `merge_and_unload`; here the sum is made in fp64 from the masters and
rounded once, so that the bytes depend neither on the machine's matrix kernels nor on windows.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megatron_ucp.core.manifest import Manifest, Tie
from megatron_ucp.core.names import VALUE
from megatron_ucp.core.plan import Slot
from megatron_ucp.core.tensor_parts import Share, weights_manifest
from megatron_ucp.errors import (
    ModelMismatchError,
    UnsupportedError,
    UsageError,
    some_of,
)
from megatron_ucp.formats.checkpoint import Checkpoint
from megatron_ucp.formats.hugging_face.checkpoint import (
    ADAPTER_CONFIG_FILE,
    CONFIG_FILE,
    read_json,
)
from megatron_ucp.formats.registry import open_checkpoint
from megatron_ucp.reshard.check import weight_of
from megatron_ucp.reshard.execute import TORCH_DTYPES
from megatron_ucp.reshard.files import WINDOW_BYTES, FileSource
from megatron_ucp.reshard.hugging_face.adapter import (
    FACTORS,
    Adapter,
    adapter_of,
    check_adapter_config,
    not_merely_added,
    scale_of,
    tensor_of,
)
from megatron_ucp.reshard.hugging_face.released import renamed_in_files
from megatron_ucp.reshard.transfer import Proved, SinkPart, proved

# Models whose matrices lie transposed (Conv1D) but for their head: peft says which way a layer's
# lie for the last one alone.
_MIXED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")


@dataclass(frozen=True)
class _Product:
    """What is added to a tensor: `scale` times up @ down, or the transpose of that. `down` and `up`
    are parameters."""

    down: str
    up: str
    scale: float
    turned: bool


class Merge:
    """The source of an export in which an adapter is added to its base. `base` is the folder of the
    base model, `source` the checkpoint with the adapter, `config` its adapter_config.json.

    Raises UsageError where `source` holds no adapter, UnsupportedError for an adapter that is not
    merely added, ModelMismatchError that lists everything which does not fit the base.
    """

    all_looked_at = True

    def __init__(self, base: Checkpoint, source: Checkpoint, config: Mapping[str, Any]) -> None:
        self.manifest = base.manifest
        self.file = str(source.folder)
        found = adapter_of(source.manifest, self.file)
        if found is None:
            raise UsageError(
                "there is nothing to merge: the checkpoint holds no adapter",
                file=self.file,
                fix="leave --merge out (Python: merge=)",
            )
        check_adapter_config(found, source.manifest, config, self.file)
        _require_plain(config, self.file)
        names = base.manifest.by_name
        said = read_json(base.folder / CONFIG_FILE)
        # the base's files may have other names than the model in memory, which has the adapter's
        self._in_files = renamed_in_files(said, names)
        self._whole = {self._tensor(name): param for name, param in found.whole.items()}
        self._base = _Tensors(base, [*names])
        own = dict.fromkeys([*found.files, *found.beside, *found.base])
        self._own = _Tensors(source, [*own])
        self._trained_as = {self._tensor(name): param for param, name in found.base.items()}
        self._products = self._fitting(found, config)
        self._require_tied(found, source.manifest.ties)
        self._require_sides(config, said.get("model_type"))
        self._local = threading.local()

    @property
    def read_bytes(self) -> int:
        return self._base.source.read_bytes + self._own.source.read_bytes

    def manifest_of(self, part: int) -> Manifest:
        """The base model's: the merged one has its tensors."""
        return self.manifest

    def locate(self, one: Proved) -> None:
        """All parameters of both were looked up."""

    def windows(self, one: Proved) -> "MergedWindows":
        """Windows of tensors, which the part names."""
        return MergedWindows(self, one.part.names)

    def check(self, thorough: bool) -> None:
        """Compares what was read with its checksums. Raises DamagedFileError."""
        for tensors in (self._base, self._own):
            tensors.source.check(thorough=False)

    def elements(self, tensor: str, low: int, elems: int) -> torch.Tensor:
        """Elements from `low` of a tensor of the merged model, flat: as they are saved, or sums in
        fp64. Raises ModelMismatchError where the checkpoint was trained on another base."""
        if tensor in self._whole:
            return self._own.read(self._whole[tensor], low, elems)
        values = self._base.read(tensor, low, elems)
        self._compare(tensor, low, values)
        if tensor not in self._products:
            return values
        left, right = self._factors(tensor)
        width = right.shape[1]
        first, end = low // width, -(-(low + elems) // width)
        rows = left[first:end] @ right
        added = rows.reshape(-1)[low - first * width :][:elems]
        return values.double() + self._products[tensor].scale * added

    # ------------------------------------------------ parts

    def _tensor(self, name: str) -> str:
        """The base's name of a tensor that the adapter's model calls so."""
        return self._in_files.get(name, name)

    def _fitting(self, found: Adapter, config: Mapping[str, Any]) -> dict[str, _Product]:
        """What is added to each tensor, once all of it fits the base."""
        out: dict[str, _Product] = {}
        faults: list[str] = []
        for tensor, param in self._whole.items():
            faults += self._misfit(tensor, self._own.shape(param))
        for module, parts in found.factors.items():
            product = self._product(module, parts, config)
            if isinstance(product, str):
                faults.append(product)
                continue
            tensor, shape = self._tensor(f"{module}.weight"), self._added(product)
            if self._base_shape(tensor) in (shape, shape[::-1]) and shape[0] != shape[1]:
                product = replace(product, turned=self._base_shape(tensor) != shape)
            out[tensor] = product
            faults += self._misfit(tensor, shape[::-1] if product.turned else shape)
        if faults:
            raise ModelMismatchError(
                "the adapter does not fit the base model",
                file=self.file,
                expected="the model that it was trained on",
                found=some_of(faults, between="; "),
                fix="give --merge (Python: merge=) the folder of the adapter's own base model",
            )
        return out

    def _product(
        self, module: str, parts: Mapping[str, str], config: Mapping[str, Any]
    ) -> _Product | str:
        """What is added to a module's weight; what is wrong with it, as a text."""
        embedding = "lora_embedding_A" in parts
        names = FACTORS[2:] if embedding else FACTORS[:2]
        if set(parts) != {*names}:
            return f"{module}: {', '.join(sorted(parts))}; expected {', '.join(names)}"
        down, up = (parts[name] for name in names)
        shapes = self._own.shape(down), self._own.shape(up)
        if any(len(shape) != 2 for shape in shapes) or shapes[0][0] != shapes[1][1]:
            return f"{module}: factors of shape {shapes[0]} and {shapes[1]}"
        turned = embedding or bool(config.get("fan_in_fan_out"))
        scale = scale_of(config, module, shapes[0][0], self.file)
        return _Product(down, up, scale, turned)

    def _added(self, product: _Product) -> tuple[int, int]:
        """The shape of up @ down."""
        return self._own.shape(product.up)[0], self._own.shape(product.down)[1]

    def _require_tied(self, found: Adapter, ties: Sequence[Tie]) -> None:
        """Raises UnsupportedError where one name of a tensor was trained and another was not: the
        base has one tensor for both."""
        trained = {*self._products, *self._whole}
        for tie in ties:
            if tie.canonical in found.whole.values():
                trained |= {self._tensor(tensor_of(alias)) for alias in tie.aliases}
        for tie in ties:
            known = map(tensor_of, (tie.canonical, *tie.aliases))
            names = {self._tensor(name) for name in known}
            if trained & names and names - trained:
                raise UnsupportedError(
                    "the adapter changes one of two parameters that are one tensor in the base",
                    file=self.file,
                    parameter=min(trained & names),
                    expected=f"{', '.join(sorted(names))} trained alike",
                    found=f"{', '.join(sorted(names - trained))} as in the base",
                    fix="export the adapter and use it with peft; a base with "
                    "tie_word_embeddings false, saved with both, can be merged",
                )

    def _require_sides(self, config: Mapping[str, Any], kind: object) -> None:
        """Raises UnsupportedError for square matrices of which nobody says whether they lie
        transposed: peft saves one `fan_in_fan_out`, that of the last layer that it wrapped."""
        said = bool(config.get("fan_in_fan_out"))
        layers = {
            tensor: product
            for tensor, product in self._products.items()
            if "lora_embedding" not in product.down
        }
        if all(one.turned == said for one in layers.values()) and (said or kind not in _MIXED):
            return
        square = [name for name, one in layers.items() if len({*self._added(one)}) == 1]
        if square:
            raise UnsupportedError(
                "which way the adapter's square matrices lie is not known",
                file=self.file,
                expected="one fan_in_fan_out for all layers of the adapter",
                found=f"{some_of(square)}; fan_in_fan_out {said}, as of the last layer",
                fix="export the adapter, load it with peft and merge it there",
            )

    def _base_shape(self, tensor: str) -> tuple[int, ...] | None:
        return self._base.shape(tensor) if tensor in self._base.numbers else None

    def _misfit(self, tensor: str, shape: Sequence[int]) -> list[str]:
        """What is wrong with the place of something that was trained."""
        if tensor not in self._base.numbers:
            return [f"{tensor}: the base has no such tensor"]
        have = self._base_shape(tensor)
        return [] if have == tuple(shape) else [f"{tensor}: {have} in the base, {tuple(shape)}"]

    def _factors(self, tensor: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Two matrices in fp64 whose product is added. This thread's last ones are kept."""
        if getattr(self._local, "tensor", None) != tensor:
            product = self._products[tensor]
            up, down = (self._own.matrix(name) for name in (product.up, product.down))
            self._local.factors = (down.T.contiguous(), up.T) if product.turned else (up, down)
            self._local.tensor = tensor
        return self._local.factors

    def _compare(self, tensor: str, low: int, values: torch.Tensor) -> None:
        """The base's elements with those that the checkpoint was trained on, where it has them."""
        param = self._trained_as.get(tensor)
        if param is None:
            return
        trained = self._own.read(param, low, len(values))
        if not torch.equal(values.to(trained.dtype), trained):
            raise ModelMismatchError(
                "the base is not the model that the adapter was trained on",
                file=self.file,
                parameter=tensor,
                expected="the frozen weights of the checkpoint",
                found=f"other values from element {low} on",
                fix="give --merge (Python: merge=) the folder of the adapter's own base model",
            )


@dataclass(frozen=True)
class MergedWindows:
    """Windows of the tensors of a merged model, by the buffer that each has in an output."""

    merge: Merge
    names: Sequence[str]

    def fill(self, slot: Slot, low: int, memory: torch.Tensor) -> None:
        """Elements from `low` of a tensor, rounded once to the dtype of the memory."""
        memory.copy_(self.exact(slot, low, len(memory)))

    def exact(self, slot: Slot, low: int, elems: int) -> torch.Tensor:
        """The elements before they are rounded."""
        return self.merge.elements(self.names[slot.buffer], low, elems)

    def window_bytes(self, slot: Slot) -> int:
        """As of files: whatever run of a tensor is asked for is computed."""
        return WINDOW_BYTES


class _Tensors:
    """Some parameters of a checkpoint, read in parts; their masters, where there are any."""

    def __init__(self, checkpoint: Checkpoint, names: Sequence[str]) -> None:
        self.source = FileSource(checkpoint, str(checkpoint.folder))
        self.numbers = {name: number for number, name in enumerate(names)}
        self._specs = checkpoint.manifest.by_name
        states = [weight_of(checkpoint.manifest, name) for name in names]
        self._dtypes = [dtype for _, dtype in states]
        rows = [(Share(name), dtype) for name, dtype in zip(names, self._dtypes, strict=True)]
        wants = tuple(
            (Slot(number, (), 0, VALUE), state) for number, (state, _) in enumerate(states)
        )
        part = SinkPart(weights_manifest(self._specs, rows), wants)
        self._windows = self.source.windows(proved(self.source, part))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._specs[name].shape

    def read(self, name: str, low: int, elems: int) -> torch.Tensor:
        """Elements from `low` on, flat, in the dtype that they are saved in."""
        number = self.numbers[name]
        out = torch.empty(elems, dtype=TORCH_DTYPES[self._dtypes[number]])
        self._windows.fill(Slot(number, (), 0, VALUE), low, out)
        return out

    def matrix(self, name: str) -> torch.Tensor:
        """All of it, in fp64."""
        shape = self.shape(name)
        return self.read(name, 0, math.prod(shape)).double().view(shape)


def open_merge(
    opened: ExitStack, base: str | Path, source: Checkpoint, config: Mapping[str, Any] | None
) -> tuple[Checkpoint, Merge]:
    """The folder of a base model, and what becomes of it with the adapter in `source`. Raises as
    Merge, UsageError without a config."""
    if config is None:
        raise UsageError(
            "a merge needs to know the adapter's scale",
            file=source.folder,
            expected=f"a folder with {ADAPTER_CONFIG_FILE}",
            found="none, nor one beside the checkpoint",
            fix="give --config (Python: config=) the folder that peft's save_pretrained wrote",
            id="no-config",
        )
    model = opened.enter_context(open_checkpoint(base))
    return model, Merge(model, source, config)


def _require_plain(config: Mapping[str, Any], file: str) -> None:
    """Raises UnsupportedError where an adapter is not merely added to its base."""
    if faults := not_merely_added(config):
        raise UnsupportedError(
            "the adapter is not merely added to its base model",
            file=file,
            expected="W + scale * B A",
            found="; ".join(faults),
            fix="export the adapter, load it with peft and merge it there",
        )
