"""What Megatron-DeepSpeed's program asks for and the installed DeepSpeed (its compression) and a
machine for tests (torchvision) lack: modules that have whatever is asked for."""

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any
from unittest import mock


def install() -> None:
    module("deepspeed.compression")
    compress = module("deepspeed.compression.compress")
    compress.init_compression = compress.redundancy_clean = lambda model, *_: model
    for name in ("torchvision", "torchvision.transforms", "torchvision.datasets.folder"):
        module(name)
    datasets = module("torchvision.datasets")
    for name in ("VisionDataset", "ImageFolder", "DatasetFolder"):
        setattr(datasets, name, object)


def module(name: str) -> Any:
    """A module of this name that has whatever is asked for."""
    made: Any = types.ModuleType(name)
    made.__spec__, made.__path__ = ModuleSpec(name, None), []

    def anything(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return mock.MagicMock(name=attribute)

    made.__getattr__ = anything
    sys.modules[name] = made
    return made
