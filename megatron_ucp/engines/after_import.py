"""Changes a module of another library as soon as it is imported, whoever imports it first."""

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any


class AfterImport:
    """Calls a function with a module as soon as the module's own code has run, so that whoever
    imports names from it gets those that the function left there. At once for a module that is
    imported already. A finder of `sys.meta_path`."""

    def __init__(self, functions: Mapping[str, Callable[[Any], None]]) -> None:
        self._functions, self.called = functions, False
        sys.meta_path.insert(0, self)
        for name in functions:
            if (module := sys.modules.get(name)) is not None:
                self._call(module)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """As the other finders say, with a loader that calls the function."""
        if name not in self._functions:
            return None
        others: list[Any] = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec: ModuleSpec | None = next((one for one in specs if one is not None), None)
        loader: Any = spec and spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                self._call(module)

            loader.exec_module = exec_module  # a loader is made for each spec
        return spec

    def _call(self, module: Any) -> None:
        self.called = True
        self._functions[module.__name__](module)
